"""The ways to train that a benchmark compares, each as a function that takes one step on a batch.

All train the same model from the same weights with PyTorch's fused AdamW (ours compiles it into the step) and, in bf16,
under `torch.autocast` (ours: `precision="bf16"`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from .jax_contender import JaxTraining
from .workload import Batch, Workload

OURS, EAGER = "wholestep", "eager"
#: contenders that compile forward and loss with torch.compile, and its mode
MODES = {
    "compile": None,
    "compile-reduce-overhead": "reduce-overhead",
    "compile-max-autotune": "max-autotune",
}
#: a plain JAX twin, where JAX is installed and the network has one
JAX = "jax"
CONTENDERS = (OURS, EAGER, *MODES, JAX)
#: contenders that time kernels while they compile: on a GPU nobody works beside them then
MEASURING = (OURS, "compile-max-autotune")
PRECISIONS = ("bf16", "fp32")


@dataclass
class Trainer:
    """Takes training steps. `whole` is our compiled step, where it is ours."""

    step: Callable[[Batch], Any]
    optimizer: torch.optim.Optimizer | None = None
    whole: Any = None
    jax: JaxTraining | None = None

    def states(self) -> list[Any]:
        """What the optimizer keeps."""
        kept = {} if self.optimizer is None else self.optimizer.state
        return [value for state in kept.values() for value in state.values()]


def make(contender: str, workload: Workload, precision: str, example: Batch, network: str, module: str) -> Trainer:
    """A contender's way to train. What it compiles on its first step is not compiled yet."""
    if contender == JAX:
        training = JaxTraining(workload, network, module, precision)
        return Trainer(training, jax=training)
    if contender == OURS:
        return ours(workload, precision, example)
    if contender == EAGER:
        return torch_step(workload, workload.loss_fn, precision)
    return torch_step(
        workload, torch.compile(workload.loss_fn, mode=MODES[contender]), precision, MODES[contender] is not None
    )


def ours(workload: Workload, precision: str, example: Batch) -> Trainer:
    import wholestep as ws

    optimizer, schedule = workload.optimizer()
    whole = ws.compile(workload.model, workload.loss_fn, optimizer, example, precision=precision)

    def step(batch: Batch) -> torch.Tensor:
        loss = whole(*batch)
        schedule.step()
        return loss.detach()

    return Trainer(step, optimizer, whole)


def torch_step(workload: Workload, loss_fn: Callable[..., Any], precision: str, graphs: bool = False) -> Trainer:
    """Forward and loss as given, backward by autograd, the optimizer as it is: what a user of PyTorch writes."""
    optimizer, schedule = workload.optimizer()
    kind, low = next(workload.model.parameters()).device.type, precision == "bf16"

    def step(batch: Batch) -> torch.Tensor:
        if graphs:  # torch.compile's CUDA graphs want to know where a step begins
            torch.compiler.cudagraph_mark_step_begin()
        optimizer.zero_grad()
        with torch.autocast(kind, torch.bfloat16, enabled=low):
            loss = loss_fn(workload.model, *batch)
        loss.backward()
        optimizer.step()
        schedule.step()
        return loss.detach()

    return Trainer(step, optimizer)
