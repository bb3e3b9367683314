"""`side-updates`: the optimizer's updates run on a second stream of a GPU, beside the rest of the backward pass.

Updates move bytes and compute next to nothing, products of backward do the opposite. The function is marked; its plan
issues each update as soon as its gradient is there and waits for it late (`plan/side.py`). Kernels are the same ones.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ..ir.core import Op
from .opportunity import Change, Place, Transformation, register_transformation
from .regions import is_view

#: attribute of a function whose updates are to run beside its backward pass
MARK = "step.side_updates"
#: phases that wait for gradients
ENDING = ("clip", "update")


@register_transformation
class SideUpdates(Transformation):
    """Level 3: moves no byte less; what changes is when, so the clock decides. Never taken by itself."""

    name = "side-updates"
    level = 3

    def places(self, function: Op) -> Iterator[Place]:
        updates = [] if MARK in function.attributes else updates_of(function)
        if updates:
            early = early_updates(function)
            yield early[0] if early else updates[0], why_not(function, bool(early)) or Change()

    def apply(self, op: Op) -> None:
        region = op.parent.parent if op.parent is not None else None
        assert region is not None and region.parent is not None
        region.parent.attributes[MARK] = True


def runs_beside(function: Op) -> bool:
    """Whether the updates of a function are to run on a stream of their own."""
    return MARK in function.attributes


def updates_of(function: Op) -> list[Op]:
    """Ops that give the step's new state."""
    ops = [op for op in function.regions[0].block if op.phase == "update" and not is_view(op)]
    return [op for op in ops if any(user.definition.terminator for r in op.results for user in r.uses)]


def early_updates(function: Op) -> list[Op]:
    """Updates whose gradient is there while backward still has work to do."""
    position: dict[Op, int] = {}
    needs: dict[Op, int] = {}  # the last op of backward that each must wait for
    for op in function.regions[0].block:
        late = op.phase in ENDING or is_view(op) or not op.operands
        position[op] = len(position)
        behind = max((needs[v.op] for v in op.operands if v.op is not None), default=-1)
        needs[op] = behind if late else position[op]
    backward = [op for op in position if op.phase == "backward" and needs[op] == position[op]]
    if not backward:
        return []
    first, last = position[backward[0]], position[backward[-1]]
    return [op for op in updates_of(function) if first <= needs[op] < last]


def has_gpu() -> bool:
    return torch.cuda.is_available()


def why_not(function: Op, early: bool) -> str:
    """Why no update can run beside backward. early: some could start before it is over."""
    if not has_gpu():
        return "there is no GPU here, and updates run beside backward on a second stream of one"
    if early:
        return ""
    block = list(function.regions[0].block)
    if any(op.name == "step.micro_batches" for op in block):
        reason = "gradients are sums over micro-batches, which are there after the last one"
    elif any(op.name == "step.all_finite" for op in block):
        reason = "steps with a gradient that is not finite are skipped, and that is known after the last gradient"
    elif any(op.phase == "clip" for op in block):
        reason = "clipping by the norm of all gradients needs the last of them first"
    else:
        reason = "its gradients are there only at the end"
    return f"no update can start before backward is over: {reason}, and the model must be whole when the step ends"
