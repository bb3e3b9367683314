"""What one network of the zoo is: how to build it with a batch, and how its loss is computed.

An entry builds the same tiny model and batch every time, in train mode, with nothing random inside the step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

Batch = dict[str, Any] | tuple[Any, ...]


@dataclass(frozen=True)
class Entry:
    """A network: `build()` gives model and batch; without `loss_fn` the loss is the model's own."""

    name: str
    family: str
    make: Callable[[], tuple[nn.Module, Batch]]
    loss_fn: Callable[..., torch.Tensor] | None = None
    note: str = ""
    # Learning rates for AdamW and for SGD with momentum 0.9 at which ten steps in float32 follow ten in float64; the
    # smaller ones are for deep networks with BatchNorm on two samples, where training is chaotic.
    lr: tuple[float, float] = (1e-3, 1e-2)
    # Patterns of parameters whose gradient is zero in exact arithmetic (a bias before BatchNorm, a key's bias before
    # softmax). Adam divides rounding noise by its own size, so these drift by up to `lr` per step in any two programs.
    null_gradients: tuple[str, ...] = ()
    failure: str = ""  # why torch.export cannot capture it, in plain words; empty for all that it can

    def build(self) -> tuple[nn.Module, Batch]:
        """The model in train mode and its batch; the global generator is left as it was found."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model, batch = self.make()
        return model.train(), batch

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """The scalar loss of `model` on `batch`, as a user would write it in an eager training loop."""
        if self.loss_fn is not None:
            return self.loss_fn(model, *batch)
        assert isinstance(batch, dict)
        return model(**batch).loss
