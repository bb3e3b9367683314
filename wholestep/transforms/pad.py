"""`pad`: fills matrix products up with zeros to sizes that tensor cores like.

A dimension of 50,257 leaves rows of 16-bit numbers unaligned, and libraries fall back to kernels that are several times
slower. Zeros change no sum; the result is cut back by a view. The kernel may add in another order. Where a dimension
makes the rows of a small operand alone, only the distance of those rows is filled up, and the large one stays as it is.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..dialects.step import StepBuilder
from ..dialects.step.contraction import Contract, parse_spec
from ..dialects.step.reductions import Sum
from ..dialects.step.shape import Pad as Fill
from ..dialects.step.shape import Slice, Transpose
from ..ir.core import Op, Value
from .opportunity import Change, Place, Transformation, register_transformation

#: elements of 16 bits that lie in 16 bytes: the least alignment of a row
ALIGNED = 8
#: large dimensions are filled up to a multiple of this
TILE = 64
#: products with fewer flops are not worth the copies
WORTH = 1 << 28
#: flops per copied byte from which on the faster kernel makes up for the copies: on an H200 unaligned products run at
#: about 150 of 650 Tflop/s, and copies at 4 TB/s
PAYS = 50


@register_transformation
class Pad(Transformation):
    """Level 1: one product, with its operands filled up."""

    name = "pad"
    level = 1

    def places(self, function: Op) -> Iterator[Place]:
        for op in function.regions[0].block:
            if op.definition is Contract and unaligned(op):
                yield op, why_not(op) or predicted(op)

    def apply(self, op: Op) -> None:
        left, right, out = parse_spec(op.spec)
        apart, every = rows_apart(op), unaligned(op)
        wanted = {label: sizes for label, sizes in every.items() if label not in apart}
        assert op.parent is not None
        b = StepBuilder(op.parent, op, op.loc, op.phase)
        operands: list[Value] = []
        for value, labels in ((op.lhs, left), (op.rhs, right)):
            last = labels[-1:]
            full = filled(b, value, labels, wanted | ({last: every[last]} if last in apart else {}))
            if last in apart:
                full = b.slice(full, dim=len(labels) - 1, start=0, end=every[last][0])
            operands.append(full)
        lhs, rhs = operands
        addend = op.addend
        if addend is not None:
            shape = addend.type.shape
            tail = zip(out[len(out) - len(shape) :], shape, strict=True)
            addend = filled(b, addend, "".join(label if n > 1 else "." for label, n in tail), wanted)
        y: Value = b.contract(lhs, rhs, addend, spec=op.spec)
        for dim, label in enumerate(out):
            if label in wanted:
                y = b.slice(y, dim=dim, start=0, end=wanted[label][0])
        for old, new in ((op.lhs, lhs), (op.rhs, rhs)):
            sum_filled(old, new, op)
        op.result.replace_by(y)
        op.erase()


def unaligned(op: Op) -> dict[str, tuple[int, int]]:
    """Labels whose size leaves rows unaligned: (size, size to fill up to)."""
    if op.lhs.type.element.text not in ("bf16", "f16"):
        return {}
    left, right, out = parse_spec(op.spec)
    sizes = {**dict(zip(left, op.lhs.type.shape, strict=True)), **dict(zip(right, op.rhs.type.shape, strict=True))}
    # only the innermost dimensions are rows in memory
    ends = {out[-1:], *(side[-1:] for v, side in ((op.lhs, left), (op.rhs, right)) if not lies_filled(v))}
    return {
        label: (n, -(-n // (TILE if n > 1024 else ALIGNED)) * (TILE if n > 1024 else ALIGNED))
        for label, n in sizes.items()
        if label in ends and n % ALIGNED
    }


def lies_filled(value: Value) -> bool:
    """Whether a value is what was cut from a filled one: its rows lie apart already."""
    filled = value.op.operands[0] if value.op is not None and value.op.definition is Slice else None
    return filled is not None and filled.op is not None and filled.op.definition is Fill


def rows_apart(op: Op) -> set[str]:
    """Labels for which it is enough to fill up the distance of rows: they make those of the smaller operand alone."""
    left, right, _ = parse_spec(op.spec)
    if op.lhs is op.rhs or left[-1:] == right[-1:]:
        return set()
    found = set()
    for (small, labels), (large, others) in (((op.lhs, left), (op.rhs, right)), ((op.rhs, right), (op.lhs, left))):
        if labels[-1:] in unaligned(op) and labels[-1] in others and small.type.bytes < large.type.bytes:
            found.add(labels[-1])
    return found


def why_not(op: Op) -> str:
    if Contract.flops(op) < WORTH:
        return "the product is too small to be worth copies of its operands"
    if Contract.flops(op) < PAYS * predicted(op).bytes:
        return "copies of its operands would take longer than the unaligned product"
    return ""


def predicted(op: Op) -> Change:
    """Copies of the operands, and the flops on zeros."""
    left, right, _ = parse_spec(op.spec)
    wanted, apart = unaligned(op), rows_apart(op)
    copied = sum(
        2 * v.type.bytes
        for v, labels in ((op.lhs, left), (op.rhs, right))
        if any(c in wanted and (c not in apart or c == labels[-1]) for c in labels)
    )
    growth = 1.0
    for label, (size, full) in wanted.items():
        growth *= 1.0 if label in apart else full / size
    return Change(bytes=copied, flops=int(Contract.flops(op) * (growth - 1)))


def filled(b: StepBuilder, x: Value, labels: str, wanted: dict[str, tuple[int, int]]) -> Value:
    """An operand with zeros after its elements along the labels to fill up."""
    high = tuple(wanted[c][1] - wanted[c][0] if c in wanted else 0 for c in labels)
    if not any(high):
        return x
    y = b.pad(x, low=(0,) * len(high), high=high, value=0.0)
    if x.op is not None and x.op.definition is Transpose:  # the copy is for the product: it lies as that reads it
        y = b.layout(y, order=tuple(range(len(labels))))
    return y


def sum_filled(old: Value, new: Value, reader: Op) -> None:
    """Sums of an operand become sums of the filled one, which is in memory anyway: then only that is."""
    if lies_filled(new) and new.op is not None:
        (new,) = new.op.operands
    if new.op is None or new.op.definition is not Fill or new.op.operands[0] is not old:
        return
    grown = {dim for dim, (n, m) in enumerate(zip(old.type.shape, new.type.shape, strict=True)) if n != m}
    for user in [u for u in old.uses if u.definition is Sum and grown.isdisjoint(u.dims) and is_behind(u, reader)]:
        assert user.parent is not None
        b = StepBuilder(user.parent, user, user.loc, user.phase)
        total: Value = b.sum(new, dims=user.dims, keepdim=user.keepdim)
        for dim, (n, m) in enumerate(zip(user.result.type.shape, total.type.shape, strict=True)):
            if n != m:
                total = b.slice(total, dim=dim, start=0, end=n)
        user.result.replace_by(total)
        user.erase()


def is_behind(op: Op, other: Op) -> bool:
    """Whether an op comes after another one of its block."""
    following = other.next
    while following is not None and following is not op:
        following = following.next
    return following is op
