"""`reuse`: a convolution of backward reads what forward wrote, where that would be written once more for it.

What backward computes again from what it reads anyway costs nothing for a mask or a norm's gradient, but a convolution
that reads it as an image wants it in memory. Forward wrote it for a convolution of its own: kept, it is not written
twice. Those who compute it on the way go on doing so.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..dialects.step.convolution import ConvolutionLike
from ..ir.core import Op, Value
from .opportunity import Change, Place, Transformation, register_transformation
from .recompute import is_late, originals
from .regenerate import EARLY
from .regions import ANCHORS, base, readers_of


@register_transformation
class Reuse(Transformation):
    """Level 3: a convolution of a later phase, and what it reads that is computed again."""

    name = "reuse"
    level = 3

    def places(self, function: Op) -> Iterator[Place]:
        block = function.regions[0].block
        first: dict[Op, Op] | None = None
        for op in block:
            if is_late(op) and reads_images(op) and any(is_again(v) for v in op.operands):
                first = originals(block) if first is None else first
                found = written(op, first)
                if found:
                    more = sum(base(old).type.bytes for old in dict.fromkeys(found.values()))
                    yield op, Change(bytes=-more, saved=more)

    def apply(self, op: Op) -> None:
        assert op.parent is not None
        found = written(op, originals(op.parent))
        op.set_operands([found.get(v, v) for v in op.operands])


def reads_images(op: Op) -> bool:
    """Whether an op is a convolution over all channels; those of single channels compute what they read."""
    return issubclass(op.definition, ConvolutionLike) and op.groups == 1


def is_again(value: Value) -> bool:
    maker = base(value).op
    return maker is not None and bool(maker.attributes.get("again"))


def written(op: Op, first: dict[Op, Op]) -> dict[Value, Value]:
    """What an op reads that is computed again, and what forward has of it in memory."""
    found: dict[Value, Value] = {}
    for value in dict.fromkeys(op.operands):
        if not is_again(value) or value.op not in first:
            continue
        old = first[value.op].results[value.index]
        if any(u.name in ANCHORS and u.phase in EARLY for u in readers_of(base(old))):
            found[value] = old
    return found
