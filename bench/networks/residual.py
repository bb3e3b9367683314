"""Residual networks of bottlenecks in plain PyTorch, the shapes of torchvision's `resnet`, for two networks here."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

EXPANSION = 4


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions with BatchNorm around which the input is added."""

    def __init__(self, inputs: int, planes: int, width: int, stride: int, dilation: int):
        super().__init__()
        outputs = planes * EXPANSION
        self.conv1 = nn.Conv2d(inputs, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, padding=dilation, dilation=dilation, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, outputs, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(outputs)
        self.shortcut = nn.Sequential()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = functional.relu(self.bn1(self.conv1(x)))
        y = functional.relu(self.bn2(self.conv2(y)))
        return functional.relu(self.bn3(self.conv3(y)) + self.shortcut(x))


class Features(nn.Module):
    """The stem and the stages. `times` widens the 3x3 convolutions; the last `dilated` stages dilate, not stride."""

    def __init__(self, first: int, depths: tuple[int, ...], times: int = 1, dilated: int = 0):
        super().__init__()
        self.conv1 = nn.Conv2d(3, first, 7, 2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(first)
        self.pool = nn.MaxPool2d(3, 2, padding=1)
        channels, dilation = first, 1
        stages = []
        for number, depth in enumerate(depths):
            planes, stride, before = first * 2**number, 1 if number == 0 else 2, dilation
            if number >= len(depths) - dilated:
                dilation, stride = dilation * stride, 1
            blocks = [Bottleneck(channels, planes, planes * times, stride, before)]
            channels = planes * EXPANSION
            blocks += [Bottleneck(channels, planes, planes * times, 1, dilation) for _ in range(depth - 1)]
            stages.append(nn.Sequential(*blocks))
        self.stages = nn.Sequential(*stages)
        self.channels = channels
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.stages(self.pool(functional.relu(self.bn1(self.conv1(images)))))
