"""`offload`: a value of forward that backward reads waits in host memory in between, instead of on the device.

`step.offload` stands right after the op that makes the value, one `step.fetch` right before its first late reader.
Views of the value that backward reads become views of the fetched one. Results do not change: the same bytes come back.
The plan runs the copies beside the kernels.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..dialects.step import StepBuilder, StepOp
from ..ir.core import Op, Value
from .opportunity import Change, Place, Transformation, register_transformation
from .recompute import is_late
from .regenerate import EARLY

#: bytes of a value that is worth a copy to the host
LEAST_BYTES = 1_000_000


@register_transformation
class Offload(Transformation):
    """Level 4: trades bytes over the link to the host for memory of the device between forward and backward."""

    name = "offload"
    level = 4
    over_link = True

    def places(self, function: Op) -> Iterator[Place]:
        for op, late in candidates(function):
            size = sum(v.type.bytes for v in worth_it(late))
            # each way they are read in one memory and written in the other
            yield op, why_not(op, late) or Change(bytes=4 * size, saved=-size)

    def apply(self, op: Op) -> None:
        for value in worth_it([r for r in op.results if late_readers(r)]):
            take_away(value)


def candidates(function: Op) -> list[tuple[Op, list[Value]]]:
    """Ops of forward with those of their results that backward reads, also as views; views only of arguments."""
    found = []
    for op in function.regions[0].block:
        if op.phase not in EARLY or not issubclass(op.definition, StepOp):
            continue
        if is_view(op) and op.operands[0].op is not None:
            continue  # it waits with what it is a view of
        late = [r for r in op.results if late_readers(r)]
        if late:
            found.append((op, late))
    return found


def why_not(op: Op, late: list[Value]) -> str:
    if is_view(op):
        return "it shows an argument of the step, which is there anyway"
    if not op.operands:
        return "it is a constant and costs no memory"
    if not worth_it(late):
        kept = [v for v in late if is_given_back(v)]
        if kept:
            return "the step gives it back, so it is kept anyway"
        return f"it has {max(v.type.bytes for v in late):,} bytes; below {LEAST_BYTES:,} a copy is not worth its launch"
    return ""


def worth_it(values: list[Value]) -> list[Value]:
    return [v for v in values if v.type.bytes >= LEAST_BYTES and not is_given_back(v)]


def is_given_back(value: Value) -> bool:
    """Whether the step gives back a value, or a view of it."""
    shown = [value, *[view.result for view in views_of(value)]]
    return any(user.definition.terminator for v in shown for user in v.uses)


def is_view(op: Op) -> bool:
    return getattr(op.definition, "views", False) and len(op.operands) == 1


def views_of(value: Value) -> list[Op]:
    """Early ops that show a value otherwise, each after what it is a view of."""
    found: list[Op] = []
    for user in value.uses:
        if user.phase in EARLY and is_view(user):
            found += [user, *views_of(user.result)]
    return found


def late_readers(value: Value) -> list[Op]:
    """Ops of later phases that read a value or an early view of it."""
    shown = [value, *[view.result for view in views_of(value)]]
    return list(dict.fromkeys(user for v in shown for user in v.uses if is_late(user)))


def take_away(value: Value) -> None:
    """Lets one value wait in host memory until its first late reader."""
    op = value.op
    assert op is not None and op.parent is not None
    block, readers = op.parent, late_readers(value)
    place = {other: number for number, other in enumerate(block)}
    first = min(readers, key=place.__getitem__)
    after = next(other for other in block if place[other] == place[op] + 1)
    there = StepBuilder(block, after, op.loc, op.phase).offload(value)
    new = {value: StepBuilder(block, first, op.loc, first.phase).fetch(there)}
    for view in views_of(value):
        if late_readers(view.result):
            copy = view.clone(new)
            copy.attributes["phase"] = first.phase
            block.insert_before(copy, first)
    for user in readers:
        user.set_operands([new.get(v, v) for v in user.operands])
