"""Accumulation inside the program: forward and backward become a function that runs once per micro-batch.

Gradients are added up in eager's order, statistics are carried on, and what is left of the step (clipping, update) is
a second function around it.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..capture.slots import Slot
from ..dialects.step import StepBuilder
from ..dialects.step.control import scaled
from ..errors import InputError
from ..ir.attributes import Symbol
from ..ir.builtin import add_function, finish_function
from ..ir.core import Op, Value
from ..ir.types import TensorType


def micro_size(slots: Sequence[Slot]) -> int | None:
    """The size of a micro-batch: the first dimension of the batch's first tensor that has one."""
    return next((s.type.shape[0] for s in slots if s.kind == "batch" and s.type.shape), None)


def run_per_micro_batch(
    root: Op,
    function: Op,
    slots: list[Slot],
    count: int,
    outputs: list[Value],
    loss: int,
    changed: list[tuple[Slot, Value]],
    grads: list[Value],
) -> tuple[Op, list[Slot], list[Value], list[tuple[Slot, Value]], list[Value]]:
    """Makes `function` the micro-batch's and gives a new function `step` that calls it `count` times.

    `loss` is the place of the loss among the outputs. Also gives the new function's slots (batches whole) and its
    values for outputs, changed state and gradients.
    """
    size = micro_size(slots)
    values = [*outputs, *(v for _, v in changed), *grads]
    kinds = ["mean" if i == loss else how_taken(v.type, size) for i, v in enumerate(outputs)]
    kinds += ["last"] * len(changed) + ["sum"] * len(grads)
    described = [{"step.kind": s.kind, "step.name": s.name} for s in slots]
    finish_function(function, values, described)
    function.attributes["sym_name"] = "micro_batch"
    whole = [Slot(s.kind, s.name, s.source, whole_type(s, count)) for s in slots]
    step = add_function(root, "step", [s.type for s in whole], [s.name for s in whole])
    block = step.regions[0].block
    result_of = {slot.source: len(outputs) + i for i, (slot, _) in enumerate(changed)}
    b = StepBuilder(block, phase="backward")
    new = b.micro_batches(
        list(block.arguments),
        callee=Symbol("micro_batch"),
        count=count,
        given=[{"batch": "split", "random_key": "key"}.get(s.kind, "same") for s in slots],
        taken=kinds,
        carried=tuple(result_of.get(s.source, -1) for s in slots),
        result_types=[scaled(v.type, count) if k == "concat" else v.type for v, k in zip(values, kinds, strict=True)],
    )
    new = [new] if isinstance(new, Value) else list(new)
    first, second = len(outputs), len(outputs) + len(changed)
    carried = [(slot, value) for (slot, _), value in zip(changed, new[first:second], strict=True)]
    return step, whole, new[:first], carried, new[second:]


def how_taken(type: TensorType, size: int | None) -> str:
    """How an output of the micro-batches becomes one of the batch: rows behind each other, single numbers averaged."""
    if type.shape and type.shape[0] == size:
        return "concat"
    return "mean" if type.element.kind == "float" and not type.shape else "last"


def whole_type(slot: Slot, count: int) -> TensorType:
    """The type of an argument of the whole step, from that of the micro-batch."""
    if slot.kind != "batch":
        return slot.type
    found = scaled(slot.type, count)
    if found is None:
        raise InputError(f"{slot.name} is a single number, which cannot be split into {count} micro-batches")
    return found
