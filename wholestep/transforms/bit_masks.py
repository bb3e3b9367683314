"""`bit_masks`: where an activation let something through is kept as bits, so that backward does not read its result.

The gradient of a relu asks of each element only whether it was positive. Where the result is what a product reads, such
as a residual sum, it is in memory, but the kernel of the gradient reads all of it for one bit in sixteen. The kernel
that makes it has every element at hand: it writes a bit of each as well. What is compared stays as it was, so that no
result changes.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..dialects.step import StepBuilder
from ..dialects.step.bits import BYTE, GROUP
from ..dialects.step.normalization import BatchNorm
from ..ir.core import Op, Value
from ..ir.types import BOOL
from .opportunity import Change, Place, Transformation, register_transformation
from .pointwise_convolution import lie_channels_last
from .recompute import is_late
from .regenerate import EARLY
from .regions import ANCHORS, is_source, is_view, lineage, readers_of

#: bytes of a tensor from which on it is worth one more
LEAST = 1 << 23


@register_transformation
class BitMasks(Transformation):
    """Level 3: one comparison that backward makes with a tensor of forward."""

    name = "bit_masks"
    level = 3

    def places(self, function: Op) -> Iterator[Place]:
        last = None
        for op in function.regions[0].block:
            x = compared(op)
            if x is None:
                continue
            last = lie_channels_last(function) if last is None else last
            bits = x.type.size // BYTE
            yield op, why_not(op, x, packed_along(x, last)) or Change(bytes=2 * bits - x.type.bytes, saved=bits)

    def apply(self, op: Op) -> None:
        x = compared(op)
        assert op.parent is not None and x is not None and x.op is not None
        dim = packed_along(x, lie_channels_last(function_of(op)))
        early = StepBuilder(op.parent, x.op.next, x.op.loc, x.op.phase)
        new: dict[Value, Value] = {}
        for maker in [v.op for v in op.operands if v is not x]:
            assert maker is not None
            new.update(zip(maker.results, inserted(early, maker, {}).results, strict=True))
        packed = early.pack_bits(inserted(early, op, new).results[0], dim=dim)
        late = StepBuilder(op.parent, op, op.loc, op.phase)
        op.results[0].replace_by(late.unpack_bits(packed, dim=dim))
        op.erase()


def inserted(b: StepBuilder, op: Op, new: dict[Value, Value]) -> Op:
    """An op once more, where a builder stands."""
    copy = op.clone(new)
    copy.attributes["phase"] = b.phase
    return b.insert(copy)


def compared(op: Op) -> Value | None:
    """The tensor of forward that an op of a later phase compares with numbers; None of any other op."""
    if not is_late(op) or not getattr(op.definition, "pointwise", False) or op.results[0].type.element is not BOOL:
        return None
    tensors = [v for v in op.operands if v.op is None or not is_source(v.op)]
    if len(tensors) != 1 or tensors[0].type.shape != op.results[0].type.shape:
        return None
    (x,) = tensors
    return x if x.op is not None and x.op.phase in EARLY and x.type.element.kind == "float" else None


def function_of(op: Op) -> Op:
    assert op.parent is not None and op.parent.parent is not None and op.parent.parent.parent is not None
    return op.parent.parent.parent


def packed_along(x: Value, last: set[Value]) -> int:
    """The dimension whose elements are neighbours in memory, as far as that is known."""
    return 1 if x in last else x.type.rank - 1


def why_not(op: Op, x: Value, dim: int) -> str:
    assert x.op is not None
    if x.type.bytes < LEAST:
        return "what it is compared with is too small to be worth a tensor more"
    if x.type.shape[dim] % GROUP:
        return f"{x.type.shape[dim]} neighbours in memory are no whole groups of {GROUP}"
    if is_view(x.op) or not getattr(x.op.definition, "pointwise", False):
        return "what makes the tensor is no kernel that could write bits as well"
    if any(u.name not in ANCHORS for u in readers_of(x) if is_late(u) and u is not op):
        return "backward reads the tensor for something else as well"
    if is_normalised(x):
        return "it is computed from what the norm before it is asked for in backward anyway"
    return ""


def is_normalised(x: Value) -> bool:
    """Whether a tensor is an activation of what BatchNorm gives, and of nothing else of its size."""
    return any(made.op is not None and made.op.definition is BatchNorm for made in lineage(x))
