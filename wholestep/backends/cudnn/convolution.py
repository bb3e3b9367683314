"""A convolution, or one of its gradients, as a graph of one node: images and kernels with channels side by side."""

from __future__ import annotations

from collections.abc import Sequence

from ...dialects.strides import same_places, strides_in
from ...ir.core import Op
from ..kernels import Spec
from .graph import CONVOLUTION, GIVEN, INPUT_GRADIENT, WEIGHT_GRADIENT, Graph, Window

KINDS = {
    "step.conv": CONVOLUTION,
    "step.conv_input_grad": INPUT_GRADIENT,
    "step.conv_weight_grad": WEIGHT_GRADIENT,
}
#: of a transposed one, whose windows lie in its result: what it is of the one that it is the adjoint of
ADJOINT = {CONVOLUTION: INPUT_GRADIENT, INPUT_GRADIENT: CONVOLUTION, WEIGHT_GRADIENT: WEIGHT_GRADIENT}


def graph_of(op: Op, tensors: Sequence[Spec]) -> Graph:
    """tensors: the op's operands, and its result."""
    graph, kind = Graph(), KINDS[op.name]
    left, right, into = (graph.tensor(GIVEN, as_image(spec)) for spec in tensors)
    if op.transposed:
        left, right = (right, left) if kind == WEIGHT_GRADIENT else (left, right)
        kind = ADJOINT[kind]
    stride, padding, dilation = (tuple(numbers) for numbers in (op.stride, op.padding, op.dilation))
    if len(stride) == 1:
        stride, padding, dilation = (1, *stride), (0, *padding), (1, *dilation)
    graph.convolution(kind, left, right, into, Window(stride, padding, dilation))
    return graph


def as_image(spec: Spec) -> Spec:
    """A sequence as an image of one row; of what has size 1, the stride that tells the layout."""
    shape = (*spec.shape[:2], 1, *spec.shape[2:]) if len(spec.shape) == 3 else spec.shape
    return Spec(shape, channels_last(shape), spec.dtype)


def channels_last(shape: Sequence[int]) -> tuple[int, ...]:
    return strides_in(shape, (0, *range(2, len(shape)), 1))


def lies_channels_last(spec: Spec) -> bool:
    """Whether a tensor fills its memory, channels side by side."""
    return same_places(spec.shape, spec.strides, channels_last(spec.shape))
