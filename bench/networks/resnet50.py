"""ResNet-50, of transformers: convolutions, BatchNorm, pooling."""

from __future__ import annotations

from typing import Any

import torch

from .network import SINGLE_LABEL, Batch, Network, coloured_images, drawn, of

#: images, pixels, classes, what differs from ResNet-50
DIMENSIONS: dict[str, tuple[int, int, int, dict[str, Any]]] = {
    "full": (256, 224, 1000, {}),
    "few": (8, 224, 1000, {}),
    "cpu": (8, 64, 100, {}),
    "small": (16, 32, 10, {"embedding_size": 8, "hidden_sizes": [16, 32], "depths": [1, 2]}),
    "tiny": (4, 16, 5, {"embedding_size": 4, "hidden_sizes": [8, 16], "depths": [1, 1]}),
}


def build(size: str = "full", device: str = "cpu") -> Network:
    from transformers import ResNetConfig, ResNetForImageClassification

    rows, pixels, classes, changes = of(DIMENSIONS, size)
    with drawn(device):
        model = ResNetForImageClassification(ResNetConfig(num_labels=classes, **changes, **SINGLE_LABEL)).train()

    def make_batch(seed: int, device: str | torch.device) -> Batch:
        return coloured_images(rows, pixels, classes, seed, device)

    def loss_fn(model: Any, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return model(pixel_values=images, labels=labels).loss

    lr = 3e-4 if size in ("full", "few") else 1e-3
    items = f"{rows} images of {pixels}x{pixels}"
    return Network("resnet50", items, model, loss_fn, make_batch, lr, warmup=30, images=True)
