"""Updates that wait for the next forward: what is kept between two steps, and who sees to it that nobody reads old
parameters.

`transforms/late_updates.py` makes the programs; `TrainStep` runs them. Between two steps an update is *waiting*: its
gradients lie in memory of their own, its hyper-parameters are those of the step that made them.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..backends.kernels import Spec
from ..capture.slots import Slot
from ..dialects.step import torch_dtype
from ..dialects.strides import row_major
from ..errors import OptimizerError
from ..plan import Plan
from ..plan.plan import aligned
from ..training.optimizer_plan import OptimizerPlan
from ..transforms.late_updates import KEPT
from .own_state import APART
from .record import Record
from .static import Arena

if TYPE_CHECKING:
    from .compiled import Compiled
    from .train_step import TrainStep


@dataclass(slots=True)
class Late:
    """What a compiled step whose update waits has beside the program that does the update and the next step."""

    #: the step as it is without that: it is saved and compared with eager PyTorch, never run
    whole: Compiled
    #: a step without an update, and an update without a step
    first: Compiled
    update: Compiled
    #: tells whether anybody else has written a parameter
    written: Record


class Promised:
    """The hyper-parameters of the update that waits: those of the step that made its gradients."""

    def __init__(self) -> None:
        self.numbers: dict[tuple[Any, ...], float] = {}

    def keep(self, compiled: Compiled) -> None:
        """They are as now."""
        slots = [s for s in compiled.program.slots if s.kind == "hyper" and s.source != ("ema_weight",)]
        self.numbers = {slot.source: float(compiled.plan.read(slot)) for slot in slots}

    def read(self, plan: OptimizerPlan, slot: Slot) -> Any:
        """A hyper-parameter, or what else an optimizer's plan knows of an update."""
        return self.numbers[slot.source] if slot.source in self.numbers else plan.read(slot)


def check_can_wait(plan: OptimizerPlan) -> None:
    """Refuses optimizers that count in Python numbers: what these are belongs to the update that is still to come."""
    for fqn in plan.parameters:
        counted = plan.host_state(fqn)
        if counted:
            raise OptimizerError(
                f"{type(plan.optimizer).__name__} keeps {', '.join(counted)} as Python numbers or makes them on its "
                'first update, which cannot wait for the next forward; compile with updates="in_step"'
            )


def kept_strides(plan: Plan, slots: Sequence[Slot]) -> dict[tuple[Any, ...], tuple[int, ...]]:
    """How kept values lie where kernels make them: where that is otherwise than planned, they would be copied."""
    found = {}
    for launch in plan.launches:
        owner = plan.owner(launch.writes[0]) if launch.provider == "copy" and launch.op < 0 else -1
        if 0 <= owner < len(slots) and slots[owner].kind == KEPT:
            source = plan.buffers[launch.reads[0]]
            made = source.share != "view" and source.space == "arena"
            if made and source.strides != plan.buffers[owner].strides:
                found[slots[owner].source] = source.strides
    return found


def make_room(
    slots: Sequence[Slot],
    strides: Mapping[tuple[Any, ...], tuple[int, ...] | None],
    arena: Arena,
    device: torch.device,
) -> dict[tuple[Any, ...], torch.Tensor]:
    """Memory for what is kept between steps, in one piece that all programs of a step share: one update waits at a
    time."""
    places: list[tuple[Slot, Spec, int]] = []
    size = 0
    for slot in slots:
        if slot.kind == KEPT:
            laid = strides.get(slot.source) or row_major(slot.type.shape)
            spec = Spec(slot.type.shape, laid, torch_dtype(slot.type.element))
            places.append((slot, spec, size))
            size += aligned(spec.bytes, APART)
    room = arena.take(size, device).untyped_storage()
    return {
        slot.source: torch.empty(0, dtype=spec.dtype, device=device).set_(
            room, start // spec.dtype.itemsize, spec.shape, spec.strides
        )
        for slot, spec, start in places
    }


class FlushFirst:
    """A hook on the user's model and optimizer: whoever reads or writes them finds them up to date.

    A copy of the model, or one from a file, belongs to no step.
    """

    of_wholestep = True

    def __init__(self, step: TrainStep | None = None):
        self._step = None if step is None else weakref.ref(step)

    def __call__(self, *_: Any) -> None:
        step = None if self._step is None else self._step()
        if step is not None:
            step.flush()

    def __reduce__(self) -> Any:
        return FlushFirst, ()


def hook(step: TrainStep) -> None:
    """Sees to it that calls of the model, its state dicts and those of the optimizer, and eager steps flush first."""
    first, optimizer = FlushFirst(step), step.optimizer
    handles = [
        optimizer.register_state_dict_pre_hook(first),
        optimizer.register_load_state_dict_pre_hook(first),
        optimizer.register_step_pre_hook(first),
    ]
    for root in (step.model, step.loss_fn):
        if isinstance(root, nn.Module):
            handles += [
                root.register_state_dict_pre_hook(first),
                root.register_load_state_dict_pre_hook(first),
                root.register_forward_pre_hook(first),
            ]
    for handle in handles:
        weakref.finalize(step, handle.remove)
