"""`direct`: matrix products read what a transpose was made of, and write what the transpose after them would make.

A product across the middle dimension of [batch, positions, channels] would be one large product of a transposed copy.
As a batch of products it moves nothing: libraries read either order. An addend becomes a sum of its own, which is part
of the kernel behind the product and rounds once more.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..dialects.step import StepBuilder
from ..dialects.step.contraction import Contract, parse_spec, shared_lead
from ..dialects.step.shape import Transpose
from ..ir.core import Op, Value
from .opportunity import Change, Place, Transformation, register_transformation
from .regions import is_view

#: products of smaller matrices are better as one large product
LEAST = 64
#: from more dimensions on, types do not say how tensors lie
IMAGE = 3


@register_transformation
class Direct(Transformation):
    """Level 1: one product, and the transposes before and after it."""

    name = "direct"
    level = 1

    def places(self, function: Op) -> Iterator[Place]:
        for op in function.regions[0].block:
            if op.definition is Contract and (direct := direct_spec(op)) is not None:
                yield op, why_not(op, direct) or Change(bytes=-2 * moved(op))

    def apply(self, op: Op) -> None:
        turned = direct_spec(op)
        assert op.parent is not None and turned is not None
        b = StepBuilder(op.parent, op, op.loc, op.phase)
        y: Value = b.contract(under(op.lhs), under(op.rhs), spec=turned)
        if op.addend is not None:
            y = b.add(y, b.reshape(op.addend, shape=addend_shape(op, turned)))
        behind = transpose_behind(op)
        if behind is None:
            op.result.replace_by(y)
        else:
            behind.result.replace_by(y)
            behind.erase()
        op.erase()


def direct_spec(op: Op) -> str | None:
    """The spec of a product without the transposes around it; None where none is there, or it would move as much."""
    left, right, out = parse_spec(op.spec)
    behind = transpose_behind(op)
    if behind is not None:
        out = "".join(out[i] for i in behind.order)
    left, right = stored(op.lhs, left), stored(op.rhs, right)
    spec = f"{left},{right}->{out}"
    return spec if spec != op.spec and (shared_lead(left, right, out) or shared_lead(right, left, out)) else None


def stored(value: Value, labels: str) -> str:
    """The labels of what a transpose was made of."""
    if value.op is None or value.op.definition is not Transpose:
        return labels
    found = [""] * len(labels)
    for label, place in zip(labels, value.op.order, strict=True):
        found[place] = label
    return "".join(found)


def under(value: Value) -> Value:
    return value.op.operands[0] if value.op is not None and value.op.definition is Transpose else value


def transpose_behind(op: Op) -> Op | None:
    """The transpose that is all that reads the result."""
    users = list(op.result.uses)
    return users[0] if len(users) == 1 and users[0].definition is Transpose else None


def moved(op: Op) -> int:
    """Bytes of what need not be copied."""
    behind = transpose_behind(op)
    values = [*(v for v in (op.lhs, op.rhs) if under(v) is not v), *([] if behind is None else [op.result])]
    return sum(v.type.bytes for v in values)


def why_not(op: Op, turned: str) -> str:
    left, right, out = parse_spec(turned)
    sizes = dict(zip((*left, *right), (*under(op.lhs).type.shape, *under(op.rhs).type.shape), strict=True))
    lead = shared_lead(left, right, out) or shared_lead(right, left, out)
    for labels in (
        [c for c in left if c in right],
        *([c for c in side if c in out and c != lead] for side in (left, right)),
    ):
        size = 1
        for label in labels:
            size *= sizes[label]
        if size < LEAST:
            return f"products of matrices with a side of {size}: one large product is better"
    if max(len(left), len(right), len(out)) > IMAGE:
        return "images lie in memory as `channels_last` says"
    if any(is_view(v.op) for v in map(under, (op.lhs, op.rhs)) if v.op is not None):
        return "what is transposed is a view of something else, which may lie otherwise"
    if op.addend is not None and sum(n > 1 for n in op.addend.type.shape) > 1:
        return "what is added has more than one dimension"
    return ""


def addend_shape(op: Op, turned: str) -> tuple[int, ...]:
    """How an addend lies along the turned result: its one dimension that is no 1 where that dimension is now."""
    before, after, shape = parse_spec(op.spec)[2], parse_spec(turned)[2], op.addend.type.shape
    sizes = dict(zip(before[len(before) - len(shape) :], shape, strict=True))
    return tuple(sizes.get(label, 1) for label in after)
