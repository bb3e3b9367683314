"""MobileNetV2 in plain PyTorch, the shapes of torchvision's: inverted residuals with depthwise convolutions, ReLU6."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from .network import Batch, Network, coloured_images, drawn, of

#: expansion, channels, blocks, stride
Stage = tuple[int, int, int, int]
STAGES: tuple[Stage, ...] = (
    (1, 16, 1, 1),
    (6, 24, 2, 2),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)
#: images, pixels, classes, channels of the stem, stages, channels before the head
DIMENSIONS: dict[str, tuple[int, int, int, int, tuple[Stage, ...], int]] = {
    "full": (256, 224, 1000, 32, STAGES, 1280),
    "few": (8, 224, 1000, 32, STAGES, 1280),
    "cpu": (8, 64, 100, 32, STAGES, 1280),
    "small": (16, 32, 10, 8, ((1, 8, 1, 1), (4, 12, 2, 2)), 32),
    "tiny": (4, 8, 5, 4, ((1, 4, 1, 1), (2, 6, 2, 2)), 8),
}


def convolution(inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1) -> nn.Sequential:
    """With BatchNorm and ReLU6."""
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, groups=groups, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU6(),
    )


class Inverted(nn.Module):
    """Expands, convolves each channel by itself, and projects back."""

    def __init__(self, inputs: int, outputs: int, stride: int, expansion: int):
        super().__init__()
        inner = inputs * expansion
        self.expand = convolution(inputs, inner, 1) if expansion > 1 else nn.Sequential()
        self.depthwise = convolution(inner, inner, 3, stride, groups=inner)
        self.project = nn.Sequential(nn.Conv2d(inner, outputs, 1, bias=False), nn.BatchNorm2d(outputs))
        self.residual = stride == 1 and inputs == outputs

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.project(self.depthwise(self.expand(x)))
        return x + y if self.residual else y


class MobileNetV2(nn.Module):
    def __init__(self, classes: int, first: int, stages: tuple[Stage, ...], last: int):
        super().__init__()
        layers: list[nn.Module] = [convolution(3, first, 3, 2)]
        channels = first
        for expansion, outputs, blocks, stride in stages:
            for block in range(blocks):
                layers.append(Inverted(channels, outputs, stride if block == 0 else 1, expansion))
                channels = outputs
        layers.append(convolution(channels, last, 1))
        self.features = nn.Sequential(*layers)
        self.head = nn.Linear(last, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out")

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.features(images).mean((2, 3)))


def build(size: str = "full", device: str = "cpu") -> Network:
    rows, pixels, classes, first, stages, last = of(DIMENSIONS, size)
    with drawn(device):
        model = MobileNetV2(classes, first, stages, last).train()

    def make_batch(seed: int, device: str | torch.device) -> Batch:
        return coloured_images(rows, pixels, classes, seed, device)

    def loss_fn(model: Any, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(model(images), labels)

    lr = 3e-4 if size in ("full", "few") else 2e-3
    items = f"{rows} images of {pixels}x{pixels}"
    return Network("mobilenet_v2", items, model, loss_fn, make_batch, lr, warmup=30, images=True)
