"""FCN-ResNet50 in plain PyTorch, the shapes of torchvision's: dilated ResNet-50, a class for every pixel.

Dropout of the head is left out, as everywhere here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from .network import Batch, Network, coloured_images, drawn, of
from .residual import Features

#: images, pixels, classes, channels of the stem, blocks of each stage, stages that dilate
DIMENSIONS: dict[str, tuple[int, int, int, int, tuple[int, ...], int]] = {
    "full": (16, 480, 21, 64, (3, 4, 6, 3), 2),
    "few": (1, 480, 21, 64, (3, 4, 6, 3), 2),
    "cpu": (2, 64, 21, 64, (3, 4, 6, 3), 2),
    "small": (8, 32, 5, 4, (1, 2, 1), 1),
    "tiny": (2, 16, 3, 2, (1, 1), 1),
}


class FCN(nn.Module):
    def __init__(self, classes: int, first: int, depths: tuple[int, ...], dilated: int):
        super().__init__()
        self.features = Features(first, depths, dilated=dilated)
        channels, inner = self.features.channels, self.features.channels // 4
        self.head = nn.Sequential(
            nn.Conv2d(channels, inner, 3, padding=1, bias=False),
            nn.BatchNorm2d(inner),
            nn.ReLU(),
            nn.Conv2d(inner, classes, 1),
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        coarse = self.head(self.features(images))
        return functional.interpolate(coarse, images.shape[-2:], mode="bilinear", align_corners=False)


def build(size: str = "full", device: str = "cpu") -> Network:
    rows, pixels, classes, first, depths, dilated = of(DIMENSIONS, size)
    with drawn(device):
        model = FCN(classes, first, depths, dilated).train()

    def make_batch(seed: int, device: str | torch.device) -> Batch:
        """Left and right half of an image have classes of their own, which colours tell."""
        left, class_left = coloured_images(rows, pixels, classes, seed, device)
        right, class_right = coloured_images(rows, pixels, classes, seed + 1_000_000, device)
        half = torch.arange(pixels, device=device) < pixels // 2
        images = torch.where(half, left, right)
        labels = torch.where(half, class_left[:, None, None], class_right[:, None, None])
        return images, labels.expand(rows, pixels, pixels).contiguous()

    def loss_fn(model: Any, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(model(images), labels)

    lr = 3e-4 if size in ("full", "few") else 1e-3
    items = f"{rows} images of {pixels}x{pixels}"
    return Network("fcn_resnet50", items, model, loss_fn, make_batch, lr, warmup=30, images=True)
