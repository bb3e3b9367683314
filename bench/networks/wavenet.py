"""WaveNet (van den Oord et al., 2016): dilated causal convolutions with gates, residual and skip connections.

Samples are 256 levels of a mu-law code; each one is predicted from those before it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from .network import Batch, Network, drawn, of

#: rows, samples, levels, residual channels, skip channels, dilations of a cycle, cycles
DIMENSIONS: dict[str, tuple[int, int, int, int, int, int, int]] = {
    "full": (4, 16000, 256, 128, 256, 10, 3),
    "few": (1, 4000, 256, 128, 256, 10, 3),
    "cpu": (2, 2000, 256, 64, 128, 8, 1),
    "small": (4, 64, 32, 16, 32, 3, 2),
    "tiny": (2, 12, 8, 4, 8, 2, 1),
}


class Layer(nn.Module):
    """A dilated causal convolution of two samples, its gate, and the way on."""

    def __init__(self, residual: int, skip: int, dilation: int):
        super().__init__()
        self.dilation = dilation
        self.both = nn.Conv1d(residual, 2 * residual, 2, dilation=dilation)
        self.residual = nn.Conv1d(residual, residual, 1)
        self.skip = nn.Conv1d(residual, skip, 1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        filtered, gate = self.both(functional.pad(x, (self.dilation, 0))).chunk(2, dim=1)
        z = torch.tanh(filtered) * torch.sigmoid(gate)
        return x + self.residual(z), self.skip(z)


class WaveNet(nn.Module):
    def __init__(self, levels: int, residual: int, skip: int, dilations: int, cycles: int):
        super().__init__()
        self.embedding = nn.Embedding(levels, residual)
        self.layers = nn.ModuleList(Layer(residual, skip, 2**i) for _ in range(cycles) for i in range(dilations))
        self.first = nn.Conv1d(skip, skip, 1)
        self.second = nn.Conv1d(skip, levels, 1)

    def forward(self, codes: torch.Tensor) -> torch.Tensor:
        x = self.embedding(codes).transpose(1, 2)
        skips: Any = 0
        for layer in self.layers:
            x, skip = layer(x)
            skips = skips + skip
        return self.second(functional.relu(self.first(functional.relu(skips))))


def build(size: str = "full", device: str = "cpu") -> Network:
    rows, samples, levels, residual, skip, dilations, cycles = of(DIMENSIONS, size)
    with drawn(device):
        model = WaveNet(levels, residual, skip, dilations, cycles).train()

    def make_batch(seed: int, device: str | torch.device) -> Batch:
        draw = torch.Generator(device).manual_seed(seed)
        pitch = 0.05 + 0.3 * torch.rand((rows, 1), generator=draw, device=device)
        wave = torch.sin(pitch * torch.arange(samples + 1, device=device))
        wave = 0.9 * wave + 0.05 * torch.randn(wave.shape, generator=draw, device=device)
        squeezed = wave.sign() * torch.log1p((levels - 1) * wave.abs().clamp(max=1.0))
        squeezed = squeezed / torch.log1p(torch.tensor(levels - 1.0, device=device))
        codes = ((squeezed + 1) / 2 * (levels - 1) + 0.5).long()
        return codes[:, :-1].contiguous(), codes[:, 1:].contiguous()

    def loss_fn(model: Any, codes: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(model(codes), following)

    return Network("wavenet", f"{rows}x{samples} samples", model, loss_fn, make_batch, 1e-3, warmup=10)
