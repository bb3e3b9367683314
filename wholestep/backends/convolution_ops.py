"""What templates of convolutions share: names of the ops, their shapes, and what stands before a change of layout."""

from __future__ import annotations

from ..dialects.step.convolution import Conv, ConvInputGrad, ConvWeightGrad
from ..dialects.step.layout import Layout
from ..ir.core import Op, Value

#: what each op is called by the kernels
PARTS: dict[type, str] = {Conv: "forward", ConvInputGrad: "input_grad", ConvWeightGrad: "weight_grad"}
Shape = tuple[int, ...]


def shapes_of(op: Op) -> tuple[Shape, Shape, Shape]:
    """Image, kernel and output of a convolution, or of the one whose gradient an op is."""
    if op.definition is Conv:
        return op.x.type.shape, op.w.type.shape, op.y.type.shape
    if op.definition is ConvInputGrad:
        return tuple(op.input_shape), op.w.type.shape, op.dy.type.shape
    return op.x.type.shape, tuple(op.weight_shape), op.dy.type.shape


def laid_out_from(value: Value) -> Value:
    """What a value is before a change of layout; where that is channels-last already, the change is none."""
    while value.op is not None and value.op.definition is Layout:
        value = value.op.operands[0]
    return value
