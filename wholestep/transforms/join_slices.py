"""`join_slices`: gradients of all slices of a tensor, each padded with zeros and added up, become one concatenation.

Where every place belongs to one slice, the sum only ever adds zeros; other summands stay. The plan then has the parts
written where the concatenation lies (`plan/joins.py`). A gradient of -0.0 stays -0.0, which the sum made 0.0.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ..dialects.step import StepBuilder
from ..dialects.step.pointwise import Add
from ..dialects.step.shape import SliceGrad, Transpose
from ..ir.core import Op, Value
from .opportunity import Change, Place, Transformation, register_transformation


@dataclass(frozen=True, slots=True)
class Slices:
    """A sum: the slices of one dimension that are among its summands, by place, and the other summands."""

    dim: int
    size: int
    parts: tuple[Value, ...]
    others: tuple[Value, ...]


@register_transformation
class JoinSlices(Transformation):
    """Level 2: a sum, and the slices that it is made of."""

    name = "join_slices"
    level = 2

    def places(self, function: Op) -> Iterator[Place]:
        for op in function.regions[0].block:
            slices = slices_of(op)
            if slices is not None:
                # every padded part is written and read, and every sum but the last
                yield op, why_not(slices) or Change(-2 * (2 * len(slices.parts) - 2) * op.result.type.bytes)

    def apply(self, op: Op) -> None:
        slices = slices_of(op)
        assert op.parent is not None and slices is not None
        b = StepBuilder(op.parent, op, op.loc, op.phase)
        parts, dim, end = [v.op.operands[0] for v in slices.parts if v.op is not None], slices.dim, op
        turn = None if slices.others else transpose_behind(op)
        if turn is not None:  # the parts are turned before they are joined: of each that is a view
            parts = [b.transpose(x, order=turn.order) for x in parts]
            dim, end = turn.order.index(dim), turn
        y = b.concat(parts, dim=dim)
        for other in slices.others:
            y = b.add(y, other)
        end.result.replace_by(y)
        drop(end)


def slices_of(op: Op) -> Slices | None:
    """The slices that a sum adds up, where it is the last of a chain of sums; None where it adds up none."""
    if op.definition is not Add or continues(op):
        return None
    terms = summands(op)
    slices = [v for v in terms if v.op is not None and v.op.definition is SliceGrad]
    kinds = {(v.op.dim, v.op.size, v.op.stride) for v in slices if v.op is not None}
    if len(slices) < 2 or len(kinds) != 1:
        return None
    ((dim, size, stride),) = kinds
    if stride != 1:
        return None
    parts = sorted(slices, key=lambda v: v.op.start if v.op is not None else 0)
    return Slices(dim, size, tuple(parts), tuple(v for v in terms if v not in slices))


def summands(op: Op) -> list[Value]:
    """What a chain of sums adds up, from the left to the right."""
    found: list[Value] = []
    for value in op.operands:
        maker = value.op
        if maker is not None and maker.definition is Add and len(value.uses) == 1 and continues(maker):
            found += summands(maker)
        else:
            found.append(value)
    return found


def continues(op: Op) -> bool:
    """Whether all that reads a sum is another sum of the same type and phase; both may add numbers, too."""
    users = list(op.result.uses)
    if len(users) != 1 or users[0].definition is not Add or users[0].phase != op.phase:
        return False
    own = op.result.type
    same = all(v.type is own or v.type.size == 1 for v in (*op.operands, *users[0].operands))
    return same and users[0].result.type is own


def why_not(slices: Slices) -> str:
    """Why the slices are not joined; empty where they can be."""
    reached = 0
    for value in slices.parts:
        assert value.op is not None
        if value.op.start != reached:
            return f"the slices {'overlap' if value.op.start < reached else 'leave a gap'} at {value.op.start}"
        if len(value.uses) != 1:
            return "a padded slice is read by others too"
        reached = value.op.end
    return "" if reached == slices.size else f"the slices end at {reached} of {slices.size}"


def transpose_behind(op: Op) -> Op | None:
    """The transpose that is all that reads a sum."""
    users = list(op.result.uses)
    return users[0] if len(users) == 1 and users[0].definition is Transpose else None


def drop(op: Op) -> None:
    """Takes out an op that nobody reads any more, with what it alone read."""
    makers = [v.op for v in op.operands if v.op is not None]
    op.erase()
    for maker in dict.fromkeys(makers):
        if maker.definition.pure and not any(r.uses for r in maker.results):
            drop(maker)
