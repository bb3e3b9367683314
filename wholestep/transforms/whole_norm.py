"""`whole_norm`: the norm of gradients that are parts of one tensor is that of the tensor.

The gradients of weights that share their input are slices of one product (`shared_input.py`). Their squares are added
up in one go, which the kernel that makes the product can do on the way (`early_sums.py`). Sums are in another order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ..dialects.step import StepBuilder
from ..dialects.step.pointwise import Cast, Mul
from ..dialects.step.reductions import Sum
from ..dialects.step.shape import Concat, Reshape, Slice, Transpose
from ..ir.core import Op, Value
from ..ir.types import F32
from .opportunity import Change, Place, Transformation, register_transformation


@dataclass(frozen=True, slots=True)
class Part:
    """A norm among those that are joined: its number there, and the slice that it is of."""

    number: int
    cut: Op


@register_transformation
class WholeNorm(Transformation):
    """Level 2: the norms that one is made of, and what they are of."""

    name = "whole_norm"
    level = 2

    def places(self, function: Op) -> Iterator[Place]:
        for op in function.regions[0].block:
            if op.definition is Concat and total_of(op) is not None:
                found = parts_of(op)
                wholes = [parts for parts in found.values() if is_whole(parts)]
                if found:
                    yield op, Change() if wholes else "some parts of what the gradients are cut out of are none"

    def apply(self, op: Op) -> None:
        total = total_of(op)
        assert op.parent is not None and total is not None
        b = StepBuilder(op.parent, op, op.loc, op.phase)
        norms: dict[int, Value] = dict(enumerate(op.operands))
        for (whole, _), parts in parts_of(op).items():
            if is_whole(parts):
                wide = b.cast_to(whole, F32)
                square = b.sum(b.mul(wide, wide), dims=tuple(range(wide.type.rank)))
                for part in parts:
                    del norms[part.number]
                norms[min(part.number for part in parts)] = b.reshape_to(b.sqrt(square), (1,))
        left = [norms[number] for number in sorted(norms)]
        stacked = b.concat(left, dim=0) if len(left) > 1 else left[0]
        total.results[0].replace_by(b.sum(b.mul(stacked, stacked), dims=(0,)))


def total_of(op: Op) -> Op | None:
    """The sum of the squares of numbers that are put side by side, if nothing else is done with those."""
    square = reader_of(op)
    if square is None or square.definition is not Mul or set(square.operands) != {op.result}:
        return None
    total = reader_of(square)
    if total is None or total.definition is not Sum or op.result.type.element is not F32:
        return None
    return total if op.result.type.rank == 1 and op.result.type.size == len(op.operands) else None


def reader_of(op: Op) -> Op | None:
    """Who alone reads an op."""
    users = list(op.results[0].uses)
    return users[0] if len(users) == 1 and not users[0].definition.terminator else None


def parts_of(op: Op) -> dict[tuple[Value, int], list[Part]]:
    """Norms of slices, by what these are cut out of and along which dimension."""
    found: dict[tuple[Value, int], list[Part]] = {}
    for number, norm in enumerate(op.operands):
        cut = slice_of(norm)
        if cut is not None:
            found.setdefault((cut.operands[0], cut.dim), []).append(Part(number, cut))
    return found


def slice_of(norm: Value) -> Op | None:
    """The slice that a norm in f32 is of."""
    root = under(norm, (Reshape,))
    square = None if root is None or root.name != "step.sqrt" else root.operands[0].op
    if square is None or square.definition is not Sum or square.result.type.size != 1:
        return None
    product = square.operands[0].op
    if product is None or product.definition is not Mul or product.operands[0] is not product.operands[1]:
        return None
    if product.result.type.element is not F32:
        return None
    cut = under(product.operands[0], (Reshape, Transpose, Cast))
    return cut if cut is not None and cut.definition is Slice and cut.stride == 1 else None


def under(value: Value, kinds: tuple[type, ...]) -> Op | None:
    """What made a value, seen through ops that leave its numbers as they are."""
    op = value.op
    while op is not None and op.definition in kinds and not narrows(op):
        op = op.operands[0].op
    return op


def narrows(op: Op) -> bool:
    return op.definition is Cast and op.result.type.element.bits < op.operands[0].type.element.bits


def is_whole(parts: list[Part]) -> bool:
    """Whether slices, one behind the other, are all of what they are cut out of."""
    at = 0
    for cut in sorted((part.cut for part in parts), key=lambda cut: cut.start):
        if cut.start != at:
            return False
        at = cut.end
    first = parts[0].cut
    return len(parts) > 1 and at == first.operands[0].type.shape[first.dim]
