"""The ways to train that a benchmark compares, each as a function that takes one step on a batch.

All train the same model from the same weights with PyTorch's fused AdamW (ours compiles it into the step) and, in bf16,
under `torch.autocast` (ours: `precision="bf16"`). Some come with a budget of memory: `wholestep:0.7`, `compile:0.3`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ..errors import InputError
from ..torch_private import set_activation_memory_budget
from .jax_contender import JaxTraining
from .workload import Batch, Workload

OURS, EAGER = "wholestep", "eager"
#: ours with other options: ATen's kernels alone, with PyTorch's compiler for regions too, every configuration tried,
#: host memory for what a budget has no room for
OWN: dict[str, dict[str, Any]] = {
    OURS: {},
    "aten": {"providers": ["aten"]},
    "inductor": {"providers": ["aten", "triton", "cpp", "inductor"]},
    "max": {"tune": "max"},
    "offload": {"level": 4},
}
#: eager training that keeps the inputs of its blocks and runs them again in backward
CHECKPOINT = "checkpoint"
#: torch.compile as it is
DEFAULT = "compile"
#: contenders that compile forward and loss with torch.compile, and its mode
MODES = {
    DEFAULT: None,
    "compile-reduce-overhead": "reduce-overhead",
    "compile-max-autotune": "max-autotune",
}
#: a plain JAX twin, where JAX is installed and the network has one
JAX = "jax"
#: those that the best is picked from: what they keep in memory is up to them
RIVALS = (EAGER, *MODES, JAX)
CONTENDERS = (OURS, *RIVALS, *list(OWN)[1:], CHECKPOINT)
#: contenders that may have a budget: a share of our own peak without one; torch's `activation_memory_budget`
BUDGETED = (OURS, "offload", DEFAULT)
PRECISIONS = ("bf16", "fp32")


def split(contender: str) -> tuple[str, float | None]:
    """A contender's name without its budget, and the budget."""
    name, _, share = contender.partition(":")
    return name, float(share) if share else None


def is_ours(contender: str) -> bool:
    return split(contender)[0] in OWN


def compiles_alone(contender: str) -> bool:
    """Whether nobody works beside it while it compiles: its seconds are compared with ours, or it times kernels and
    knows of no clock that others have.

    torch.compile's other modes do: they take their turn for a kernel's time (`clock.py`).
    """
    return is_ours(contender) or contender in (JAX, DEFAULT)


def rank(contender: str) -> tuple[int, float]:
    """Where it stands in a table: by its name, the largest budget first."""
    name, share = split(contender)
    return CONTENDERS.index(name), -1e9 if share is None else -share


@dataclass
class Trainer:
    """Takes training steps. `whole` is our compiled step, where it is ours; `schedule` changes the learning rate."""

    step: Callable[[Batch], Any]
    optimizer: torch.optim.Optimizer | None = None
    whole: Any = None
    jax: JaxTraining | None = None
    schedule: torch.optim.lr_scheduler.LRScheduler | None = None

    def __call__(self, batch: Batch) -> Any:
        loss = self.step(batch)
        if self.schedule is not None:
            self.schedule.step()
        return loss

    def states(self) -> list[Any]:
        """What the optimizer keeps."""
        kept = {} if self.optimizer is None else self.optimizer.state
        return [value for state in kept.values() for value in state.values()]


def make(contender: str, workload: Workload, precision: str, example: Batch, network: str, module: str) -> Trainer:
    """A contender's way to train. What it compiles on its first step is not compiled yet."""
    name, budget = split(contender)
    if name == JAX:
        training = JaxTraining(workload, network, module, precision)
        return Trainer(training, jax=training)
    if is_ours(name):
        return ours(workload, precision, example, {**OWN[name], "memory_budget": budget})
    if name == CHECKPOINT:
        keep_inputs(blocks(workload.model))
    if name in (EAGER, CHECKPOINT):
        return torch_step(workload, workload.loss_fn, precision)
    if budget is not None:
        set_activation_memory_budget(budget)
    return torch_step(workload, torch.compile(workload.loss_fn, mode=MODES[name]), precision, MODES[name] is not None)


def ours(workload: Workload, precision: str, example: Batch, options: dict[str, Any]) -> Trainer:
    import wholestep as ws

    optimizer, schedule = workload.optimizer
    whole = ws.compile(workload.model, workload.loss_fn, optimizer, example, precision=precision, **options)
    return Trainer(lambda batch: whole(*batch).detach(), optimizer, whole, schedule=schedule)


def blocks(model: nn.Module) -> list[nn.Module]:
    """What checkpointing runs again one by one: the parts of the outermost lists that hold several of one class."""
    found: list[nn.Module] = []

    def look(module: nn.Module) -> None:
        parts = list(module.children())
        listed = isinstance(module, nn.ModuleList | nn.Sequential) and len(parts) > 1
        if listed and len({type(part) for part in parts}) == 1 and any(True for _ in parts[0].children()):
            found.extend(parts)
            return
        for part in parts:
            look(part)

    look(model)
    if not found:
        raise InputError("this network has no list of equal blocks that checkpointing could run again")
    return found


def keep_inputs(parts: Sequence[nn.Module]) -> None:
    """Each part keeps its inputs alone and runs again in backward."""
    for part in parts:
        plain = part.forward

        def again(*given: Any, plain: Any = plain, **named: Any) -> Any:
            return checkpoint(plain, *given, use_reentrant=False, **named)

        part.forward = again  # type: ignore[method-assign]


def torch_step(workload: Workload, loss_fn: Callable[..., Any], precision: str, graphs: bool = False) -> Trainer:
    """Forward and loss as given, backward by autograd, the optimizer as it is: what a user of PyTorch writes."""
    optimizer, schedule = workload.optimizer
    kind, low = next(workload.model.parameters()).device.type, precision == "bf16"

    def step(batch: Batch) -> torch.Tensor:
        if graphs:  # torch.compile's CUDA graphs want to know where a step begins
            torch.compiler.cudagraph_mark_step_begin()
        optimizer.zero_grad()
        with torch.autocast(kind, torch.bfloat16, enabled=low):
            loss = loss_fn(workload.model, *batch)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Trainer(step, optimizer, schedule=schedule)
