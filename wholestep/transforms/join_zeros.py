"""`join_zeros`: the gradient of a slice that a library reads, such as of a cut convolution, becomes a concatenation.

    slice_grad(concat(a, b))   =   concat(zeros, concat(a, b), zeros), in the order of memory that is asked for

To fill a gradient up with zeros is a pass where a product ends with it. As a concatenation it is none: the plan has a
and b written where they belong, and a few zeros beside them (`plan/joins.py`). Sums over what was filled up, such as
those for biases, are taken of a and b, where these are made. Sums are in another order.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..dialects.step import StepBuilder
from ..dialects.step.layout import Layout, inverse
from ..dialects.step.reductions import Sum
from ..dialects.step.shape import Concat, SliceGrad
from ..ir.core import Op, Value
from .opportunity import Change, Place, Transformation, register_transformation
from .regions import base, follows_product, is_library, readers_of


@register_transformation
class JoinZeros(Transformation):
    """Level 2: the gradient of a slice, and what makes it and reads it."""

    name = "join_zeros"
    level = 2

    def places(self, function: Op) -> Iterator[Place]:
        for op in function.regions[0].block:
            if op.definition is SliceGrad:
                zeros = op.result.type.bytes - op.x.type.bytes
                # what is read and written in a pass; the zeros are copied
                yield op, why_not(op) or Change(bytes=-op.x.type.bytes - op.result.type.bytes + 2 * zeros)

    def apply(self, op: Op) -> None:
        assert op.parent is not None
        b = StepBuilder(op.parent, op, op.loc, op.phase)
        for user in list(dict.fromkeys(op.result.uses)):
            if is_sum_over(user, op):
                user.result.replace_by(summed(b, user, op.x))
                user.erase()
        if op.result.uses:
            op.result.replace_by(filled(b, op))
        op.erase()


def why_not(op: Op) -> str:
    """Why a slice is filled up in a pass; empty where it need not be."""
    if op.stride != 1:
        return "its elements are no neighbours"
    if 2 * op.x.type.size < op.result.type.size:
        return "most of it is zeros"
    if not any(map(is_library, readers_of(op.result))):
        return "kernels that read it fill it up on the way"
    makers = [base(part).op for part in parts_of(op)]
    if any(maker is None or is_library(maker) for maker in makers):
        return "who makes it leaves no gaps"
    return "" if all(map(follows_product, parts_of(op))) else "the kernel that makes it fills it up on the way"


def joint(op: Op) -> Op | None:
    """The concatenation that makes the slice, where nobody else reads it."""
    maker = op.x.op
    return maker if maker is not None and maker.definition is Concat and len(op.x.uses) == 1 else None


def parts_of(op: Op) -> tuple[Value, ...]:
    """What is written where the slice is."""
    join = joint(op)
    return (op.x,) if join is None else tuple(join.operands)


def is_sum_over(user: Op, op: Op) -> bool:
    return user.definition is Sum and op.dim in user.dims


def summed(b: StepBuilder, op: Op, x: Value) -> Value:
    """The sum of a slice: part by part, where parts lie beside one another in what stays."""

    def total(part: Value) -> Value:
        rest = tuple(1 if d in op.dims else n for d, n in enumerate(part.type.shape) if op.keepdim or d not in op.dims)
        return b.sum(part, dims=op.dims, keepdim=op.keepdim, result_types=[op.result.type.with_shape(rest)])

    maker = x.op
    if maker is None or maker.definition is not Concat or maker.dim in op.dims:
        return total(x)
    place = maker.dim if op.keepdim else sum(d not in op.dims for d in range(maker.dim))
    return b.concat([total(part) for part in maker.operands], dim=place)


def filled(b: StepBuilder, op: Op) -> Value:
    """The slice with zeros before and behind, joined in the order in which it lies for those who read it."""
    order, join = order_of(op), joint(op)
    parts = [b.transpose(part, order=order) for part in parts_of(op)]
    slice = parts[0] if join is None else b.concat(parts, dim=order.index(join.dim))
    dim, shape = order.index(op.dim), slice.type.shape

    def zeros(count: int) -> list[Value]:
        return [b.full(0.0, (*shape[:dim], count, *shape[dim + 1 :]), slice.type.element)] if count else []

    whole = b.concat([*zeros(op.start), slice, *zeros(op.size - op.end)], dim=dim)
    return b.transpose(whole, order=inverse(order))


def order_of(op: Op) -> tuple[int, ...]:
    """The order of memory that readers ask for; row by row where they do not."""
    orders = {user.order for user in op.result.uses if user.definition is Layout}
    return orders.pop() if len(orders) == 1 else tuple(range(op.result.type.rank))
