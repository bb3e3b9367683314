"""DLRM (Naumov et al., 2019): embedding tables and dense features, their pairwise products, a click that is predicted.

Tables have dense gradients, as `nn.Embedding` gives them by default.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from .network import Batch, Network, drawn, of

DENSE = 13
#: rows, tables, entries of a table, width of a vector, bottom layers, top layers
DIMENSIONS: dict[str, tuple[int, int, int, int, tuple[int, ...], tuple[int, ...]]] = {
    "full": (8192, 26, 100_000, 64, (512, 256), (512, 512, 256)),
    "few": (256, 26, 100_000, 64, (512, 256), (512, 512, 256)),
    "cpu": (512, 8, 5000, 32, (128, 64), (256, 128)),
    "small": (32, 4, 50, 16, (32,), (64, 32)),
    "tiny": (4, 3, 7, 4, (8,), (8,)),
}


def layers(*widths: int) -> nn.Sequential:
    """Linear layers with ReLU between them."""
    made: list[nn.Module] = []
    for width, following in itertools.pairwise(widths):
        made += [nn.Linear(width, following), nn.ReLU()]
    return nn.Sequential(*made[:-1])


class DLRM(nn.Module):
    def __init__(self, tables: int, entries: int, width: int, bottom: tuple[int, ...], top: tuple[int, ...]):
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(entries, width) for _ in range(tables))
        for table in self.tables:
            nn.init.uniform_(table.weight, -(width**-0.5), width**-0.5)
        self.bottom = layers(DENSE, *bottom, width)
        vectors = tables + 1
        self.top = layers(width + vectors * (vectors - 1) // 2, *top, 1)
        self.register_buffer("pairs", torch.tril_indices(vectors, vectors, -1), persistent=False)

    def forward(self, dense: torch.Tensor, sparse: torch.Tensor) -> torch.Tensor:
        first = functional.relu(self.bottom(dense))
        vectors = torch.stack([first, *(table(sparse[:, i]) for i, table in enumerate(self.tables))], dim=1)
        products = torch.bmm(vectors, vectors.transpose(1, 2))
        below = products[:, self.pairs[0], self.pairs[1]]
        return self.top(torch.cat([first, below], dim=1)).squeeze(1)


def build(size: str = "full", device: str = "cpu") -> Network:
    rows, tables, entries, width, bottom, top = of(DIMENSIONS, size)
    with drawn(device):
        model = DLRM(tables, entries, width, bottom, top).train()

    def make_batch(seed: int, device: str | torch.device) -> Batch:
        draw = torch.Generator(device).manual_seed(seed)
        dense = torch.randn((rows, DENSE), generator=draw, device=device)
        sparse = torch.randint(0, entries, (rows, tables), generator=draw, device=device)
        score = dense[:, 0] + 0.5 * dense[:, 1] * dense[:, 2] + torch.sin(sparse[:, 0] * 1.0)
        noise = torch.randn(rows, generator=draw, device=device)
        return dense, sparse, (score + 0.3 * noise > 0).float()

    def loss_fn(model: Any, dense: torch.Tensor, sparse: torch.Tensor, clicked: torch.Tensor) -> torch.Tensor:
        return functional.binary_cross_entropy_with_logits(model(dense, sparse), clicked)

    lr = 1e-3 if size in ("full", "few") else 5e-3
    return Network("dlrm", f"{rows} rows, {tables} tables of {entries}", model, loss_fn, make_batch, lr)
