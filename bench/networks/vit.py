"""ViT-B/16, of transformers: patches of an image as the tokens of an encoder."""

from __future__ import annotations

from typing import Any

import torch

from .attention import without_masks
from .network import SINGLE_LABEL, Batch, Network, coloured_images, drawn, of

#: images, pixels, patch, classes, width, layers, heads
DIMENSIONS: dict[str, tuple[int, int, int, int, int, int, int]] = {
    "full": (128, 224, 16, 1000, 768, 12, 12),
    "few": (8, 224, 16, 1000, 768, 12, 12),
    "cpu": (8, 64, 8, 100, 192, 6, 3),
    "small": (8, 32, 8, 10, 64, 2, 4),
    "tiny": (2, 8, 4, 5, 16, 1, 2),
}


def build(size: str = "full", device: str = "cpu") -> Network:
    from transformers import ViTConfig, ViTForImageClassification

    rows, pixels, patch, classes, width, layers, heads = of(DIMENSIONS, size)
    config = ViTConfig(
        image_size=pixels,
        patch_size=patch,
        num_labels=classes,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=4 * width,
        attn_implementation=without_masks(),
        **SINGLE_LABEL,
    )
    with drawn(device):
        model = ViTForImageClassification(config).train()

    def make_batch(seed: int, device: str | torch.device) -> Batch:
        return coloured_images(rows, pixels, classes, seed, device)

    def loss_fn(model: Any, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return model(pixel_values=images, labels=labels).loss

    lr = 3e-4 if size in ("full", "few") else 1e-3
    return Network("vit", f"{rows} images of {pixels}x{pixels}", model, loss_fn, make_batch, lr, warmup=30)
