"""EfficientNet-B0, of transformers: depthwise convolutions, SiLU, squeeze and excitation."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .network import SINGLE_LABEL, Batch, Network, coloured_images, drawn, of

#: images, pixels, classes, share of B0's width, and the blocks where they are not B0's
DIMENSIONS: dict[str, tuple[int, int, int, float, dict[str, Any]]] = {
    "full": (256, 224, 1000, 1.0, {}),
    "few": (8, 224, 1000, 1.0, {}),
    "cpu": (8, 64, 100, 1.0, {}),
    "small": (
        8,
        32,
        10,
        0.25,
        {
            "kernel_sizes": [3, 5],
            "in_channels": [32, 16],
            "out_channels": [16, 40],
            "strides": [1, 2],
            "num_block_repeats": [1, 2],
            "expand_ratios": [1, 6],
        },
    ),
    "tiny": (
        2,
        8,
        5,
        0.05,
        {
            "kernel_sizes": [3, 5],
            "in_channels": [32, 16],
            "out_channels": [16, 24],
            "strides": [1, 2],
            "num_block_repeats": [1, 2],
            "expand_ratios": [1, 2],
        },
    ),
}


def build(size: str = "full", device: str = "cpu") -> Network:
    from transformers import EfficientNetConfig, EfficientNetForImageClassification

    rows, pixels, classes, width, changes = of(DIMENSIONS, size)
    config = EfficientNetConfig(
        image_size=pixels,
        num_labels=classes,
        width_coefficient=width,
        depth_coefficient=1.0,
        hidden_dim=max(8, int(1280 * width)),
        dropout_rate=0.0,
        drop_connect_rate=0.0,
        **changes,
        **SINGLE_LABEL,
    )
    with drawn(device):
        model = EfficientNetForImageClassification(config).train()
        # the mean of all pixels. transformers has AvgPool2d(1280, ceil_mode=True) for it, whose gradient torch.compile
        # divides by 1280 * 1280 instead of the pixels (2.11 to 2.13)
        model.efficientnet.pooler = nn.AdaptiveAvgPool2d(1)
        as_in_the_paper(model)

    def make_batch(seed: int, device: str | torch.device) -> Batch:
        return coloured_images(rows, pixels, classes, seed, device)

    def loss_fn(model: Any, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return model(pixel_values=images, labels=labels).loss

    lr = 3e-4 if size in ("full", "few") else 2e-3
    items = f"{rows} images of {pixels}x{pixels}"
    return Network("efficientnet_b0", items, model, loss_fn, make_batch, lr, warmup=30, images=True)


def as_in_the_paper(model: nn.Module) -> None:
    """Weights to start from. Those of transformers scale every BatchNorm by about 0.02, and no signal gets through."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            reached = module.kernel_size[0] * module.kernel_size[1] * module.out_channels // module.groups
            nn.init.normal_(module.weight, std=(2.0 / reached) ** 0.5)
        elif isinstance(module, nn.BatchNorm2d):
            nn.init.ones_(module.weight)
