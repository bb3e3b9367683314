"""`pad`: fills matrix products up with zeros to sizes that tensor cores like.

A dimension of 50,257 leaves rows of 16-bit numbers unaligned, and libraries fall back to kernels that are several times
slower. Zeros change no sum; the result is cut back by a view. The kernel may add in another order.
"""

from __future__ import annotations

from ..dialects.step import StepBuilder
from ..dialects.step.contraction import Contract, parse_spec
from ..ir.builtin import functions
from ..ir.core import Op, Value
from .opportunity import Change, Opportunity, Transformation, register_transformation, site_names

#: elements of 16 bits that lie in 16 bytes: the least alignment of a row
ALIGNED = 8
#: large dimensions are filled up to a multiple of this
TILE = 64
#: products with fewer flops are not worth the copies
WORTH = 1 << 28


@register_transformation
class Pad(Transformation):
    """Level 1: one product, with its operands filled up."""

    name = "pad"
    level = 1

    def find(self, module: Op) -> list[Opportunity]:
        found: list[Opportunity] = []
        names = site_names(module)
        for function in functions(module):
            for op in function.regions[0].block:
                if op.definition is not Contract or not unaligned(op):
                    continue
                reason = why_not(op)
                change = Change() if reason else predicted(op)
                found.append(Opportunity(self.name, names[op], change, reason))
        return found

    def apply(self, op: Op) -> None:
        left, right, out = parse_spec(op.spec)
        wanted = unaligned(op)
        assert op.parent is not None
        b = StepBuilder(op.parent, op, op.loc, op.phase)
        lhs, rhs = filled(b, op.lhs, left, wanted), filled(b, op.rhs, right, wanted)
        addend = op.addend
        if addend is not None:
            shape = addend.type.shape
            tail = zip(out[len(out) - len(shape) :], shape, strict=True)
            addend = filled(b, addend, "".join(label if n > 1 else "." for label, n in tail), wanted)
        y: Value = b.contract(lhs, rhs, addend, spec=op.spec)
        for dim, label in enumerate(out):
            if label in wanted:
                y = b.slice(y, dim=dim, start=0, end=wanted[label][0])
        op.result.replace_by(y)
        op.erase()


def unaligned(op: Op) -> dict[str, tuple[int, int]]:
    """Labels whose size leaves rows unaligned: (size, size to fill up to)."""
    if op.lhs.type.element.text not in ("bf16", "f16"):
        return {}
    left, right, _ = parse_spec(op.spec)
    sizes = {**dict(zip(left, op.lhs.type.shape, strict=True)), **dict(zip(right, op.rhs.type.shape, strict=True))}
    ends = {left[-1:], right[-1:], parse_spec(op.spec)[2][-1:]}  # only the innermost dimensions are rows in memory
    return {
        label: (n, -(-n // (TILE if n > 1024 else ALIGNED)) * (TILE if n > 1024 else ALIGNED))
        for label, n in sizes.items()
        if label in ends and n % ALIGNED
    }


def why_not(op: Op) -> str:
    if Contract.flops(op) < WORTH:
        return "the product is too small to be worth copies of its operands"
    return ""


def predicted(op: Op) -> Change:
    """Copies of the operands, and the flops on zeros."""
    left, right, _ = parse_spec(op.spec)
    wanted = unaligned(op)
    copied = sum(
        2 * v.type.bytes for v, labels in ((op.lhs, left), (op.rhs, right)) if any(c in wanted for c in labels)
    )
    growth = 1.0
    for size, full in wanted.values():
        growth *= full / size
    return Change(bytes=copied, flops=int(Contract.flops(op) * (growth - 1)))


def filled(b: StepBuilder, x: Value, labels: str, wanted: dict[str, tuple[int, int]]) -> Value:
    """An operand with zeros after its elements along the labels to fill up."""
    high = tuple(wanted[c][1] - wanted[c][0] if c in wanted else 0 for c in labels)
    return b.pad(x, low=(0,) * len(high), high=high, value=0.0) if any(high) else x
