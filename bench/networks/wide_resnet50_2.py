"""Wide ResNet-50-2 in plain PyTorch, the shapes of torchvision's: ResNet-50 with 3x3 convolutions twice as wide."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from .network import Batch, Network, coloured_images, drawn, of
from .residual import Features

#: images, pixels, classes, channels of the stem, blocks of each stage
DIMENSIONS: dict[str, tuple[int, int, int, int, tuple[int, ...]]] = {
    "full": (128, 224, 1000, 64, (3, 4, 6, 3)),
    "few": (8, 224, 1000, 64, (3, 4, 6, 3)),
    "cpu": (8, 64, 100, 64, (3, 4, 6, 3)),
    "small": (16, 32, 10, 4, (1, 2)),
    "tiny": (4, 16, 5, 2, (1, 1)),
}


class WideResNet(nn.Module):
    def __init__(self, classes: int, first: int, depths: tuple[int, ...]):
        super().__init__()
        self.features = Features(first, depths, times=2)
        self.head = nn.Linear(self.features.channels, classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.features(images).mean((2, 3)))


def build(size: str = "full", device: str = "cpu") -> Network:
    rows, pixels, classes, first, depths = of(DIMENSIONS, size)
    with drawn(device):
        model = WideResNet(classes, first, depths).train()

    def make_batch(seed: int, device: str | torch.device) -> Batch:
        return coloured_images(rows, pixels, classes, seed, device)

    def loss_fn(model: Any, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(model(images), labels)

    lr = 1e-3 if size in ("small", "tiny") else 3e-4
    items = f"{rows} images of {pixels}x{pixels}"
    return Network("wide_resnet50_2", items, model, loss_fn, make_batch, lr, warmup=30, images=True)
