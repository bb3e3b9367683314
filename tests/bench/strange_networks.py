"""Networks for tests of `wholestep bench`: one that is as it should be, and some that go wrong when compiled."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.nn import functional


def build(name: str, size: str, device: str) -> Any:
    if name not in ("plain", "moody", "crooked", "broken", "images", "blocks"):
        raise ValueError(f"there is no network {name!r}")
    torch.manual_seed(0)
    first: nn.Module = nn.Linear(8, 8)
    if name == "images":
        first = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    if name == "blocks":
        first = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(3)))
    model = nn.Sequential(first, nn.ReLU(), nn.Linear(8, 3)).to(device)

    def make_batch(seed: int, device: str) -> tuple[torch.Tensor, ...]:
        draw = torch.Generator(device).manual_seed(seed)
        shape = (4, 8, 6, 6) if name == "images" else (4, 8)
        return (
            torch.randn(shape, generator=draw, device=device),
            torch.randint(0, 3, (4,), generator=draw, device=device),
        )

    def loss_fn(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if name == "broken" and torch.compiler.is_compiling():
            raise RuntimeError("this network will not be compiled")
        if name == "crooked" and torch.compiler.is_compiling():
            x = model[0](x)
            return functional.cross_entropy(model[1:](2 * x.detach() - x), y)  # x, but the gradient has another sign
        loss = functional.cross_entropy(model(x), y)
        return loss * 1.1 if name == "moody" and torch.compiler.is_compiling() else loss

    return SimpleNamespace(
        items="4 rows", model=model, loss_fn=loss_fn, make_batch=make_batch, lr=1e-3, warmup=2, images=name == "images"
    )
