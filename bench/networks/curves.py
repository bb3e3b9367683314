"""Trains a network for some steps, eagerly or compiled, and compares the losses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import wholestep as ws
from wholestep.bench.agreement import apart, smooth

from .network import Batch, Network


@dataclass
class Trainer:
    """A way to take training steps, with its optimizer and, where it is compiled, our step."""

    step: Callable[[Batch], torch.Tensor]
    optimizer: torch.optim.Optimizer
    whole: ws.TrainStep | None = None


def eager(network: Network, model: nn.Module, low: torch.dtype | None = None, loss_fn: Any = None) -> Trainer:
    """Plain PyTorch training, under autocast where a low type is given. `loss_fn` may replace the network's."""
    optimizer, schedule = network.optimizer(model)
    kind = next(model.parameters()).device.type
    loss_fn = loss_fn or network.loss_fn

    def step(batch: Batch) -> torch.Tensor:
        optimizer.zero_grad()
        with torch.autocast(kind, low or torch.bfloat16, enabled=low is not None):
            loss = loss_fn(model, *batch)
        loss.backward()
        optimizer.step()
        schedule.step()
        return loss.detach()

    return Trainer(step, optimizer)


def compiled(network: Network, model: nn.Module, **options: Any) -> Trainer:
    """The same as one compiled step. `options` are those of `wholestep.compile`."""
    optimizer, schedule = network.optimizer(model)
    device = next(model.parameters()).device
    whole = ws.compile(model, network.loss_fn, optimizer, network.make_batch(0, device), **options)

    def step(batch: Batch) -> torch.Tensor:
        loss = whole(*batch)
        schedule.step()
        return loss.detach()

    return Trainer(step, optimizer, whole)


def losses_of(network: Network, trainer: Trainer, steps: int, device: str = "cpu") -> list[float]:
    return [float(trainer.step(network.make_batch(number, device))) for number in range(steps)]


__all__ = ["Trainer", "apart", "compiled", "eager", "losses_of", "smooth"]
