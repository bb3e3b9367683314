"""MLP-Mixer-B/16 (Tolstikhin et al., 2021) in plain PyTorch: layers across patches and layers across channels."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from .network import Batch, Network, coloured_images, drawn, of

#: images, pixels, patch, classes, width, inner width across patches, inner width across channels, layers
DIMENSIONS: dict[str, tuple[int, int, int, int, int, int, int, int]] = {
    "full": (128, 224, 16, 1000, 768, 384, 3072, 12),
    "few": (8, 224, 16, 1000, 768, 384, 3072, 12),
    "cpu": (8, 64, 8, 100, 192, 96, 768, 4),
    "small": (8, 32, 8, 10, 64, 32, 128, 2),
    "tiny": (2, 8, 4, 5, 16, 8, 32, 1),
}


def mlp(width: int, inner: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, inner), nn.GELU(), nn.Linear(inner, width))


class Layer(nn.Module):
    def __init__(self, patches: int, width: int, across_patches: int, across_channels: int):
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.patches, self.channels = mlp(patches, across_patches), mlp(width, across_channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.patches(self.first(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channels(self.second(x))


class Mixer(nn.Module):
    def __init__(self, patches: int, patch: int, classes: int, width: int, inner: tuple[int, int], layers: int):
        super().__init__()
        self.embedding = nn.Conv2d(3, width, patch, patch)
        self.layers = nn.Sequential(*(Layer(patches, width, *inner) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.embedding(images).flatten(2).transpose(1, 2)
        return self.head(self.norm(self.layers(x)).mean(1))


def build(size: str = "full", device: str = "cpu") -> Network:
    rows, pixels, patch, classes, width, across_patches, across_channels, layers = of(DIMENSIONS, size)
    with drawn(device):
        inner = (across_patches, across_channels)
        model = Mixer((pixels // patch) ** 2, patch, classes, width, inner, layers).train()

    def make_batch(seed: int, device: str | torch.device) -> Batch:
        return coloured_images(rows, pixels, classes, seed, device)

    def loss_fn(model: Any, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(model(images), labels)

    lr = 3e-4 if size in ("full", "few") else 1e-3
    items = f"{rows} images of {pixels}x{pixels}"
    return Network("mlp_mixer", items, model, loss_fn, make_batch, lr, warmup=30)
