"""`bias_apart`: a convolution's bias is a sum of its own, so that it is part of the kernel that reads the result.

Libraries convolve without it and then read and write the whole result once more; the sum rounds as theirs does. Kernels
of our own for depthwise convolutions take none either.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..dialects.step import StepBuilder
from ..dialects.step.convolution import Conv
from ..ir.core import Op, Value
from .opportunity import Change, Place, Transformation, register_transformation
from .pointwise_convolution import lie_channels_last


@register_transformation
class BiasApart(Transformation):
    """Level 1: one convolution."""

    name = "bias_apart"
    level = 1

    def places(self, function: Op) -> Iterator[Place]:
        biased = [op for op in function.regions[0].block if op.definition is Conv and op.bias is not None]
        last = lie_channels_last(function) if biased else set()
        for op in biased:
            yield op, why_not(op, last) or Change(bytes=-2 * op.y.type.bytes)

    def apply(self, op: Op) -> None:
        assert op.parent is not None
        b = StepBuilder(op.parent, op, op.loc, op.phase)
        window = {name: op.attributes[name] for name in Conv.attribute_fields if name in op.attributes}
        y = b.conv(op.x, op.w, **window)
        op.result.replace_by(b.add(y, b.reshape(op.bias, shape=(*op.bias.type.shape, *[1] * len(op.stride)))))
        op.erase()


def why_not(op: Op, last: set[Value]) -> str:
    """Libraries for processors add a bias on the way; images lie channels-last by themselves on GPUs alone."""
    return "" if op.x in last else "its image is not channels-last: libraries may add the bias on the way"
