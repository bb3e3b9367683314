"""Convolution in one, two or three dimensions, and its two gradients. The gradient of the bias is a sum."""

from __future__ import annotations

import math

import torch

from ...ir.core import Op
from ...ir.dialect import Attr, FloatTensor, Operand, Result
from ...ir.types import TensorType
from .base import LABELS, Roles, StepOp, step
from .contraction import walked
from .support import blank, present, spread

aten = torch.ops.aten


class ConvolutionLike(StepOp):
    """The attributes and common rules of a convolution and its gradients.

    Inputs are [N, C, ...]. A kernel is [C_out, C_in / groups, ...], and [C_in, C_out / groups, ...] when transposed.
    """

    precision = "low"
    stride = Attr("ints", "step of the window, per spatial dimension")
    padding = Attr("ints", "zeros on both sides, per spatial dimension")
    padding_after = Attr("ints", "zeros behind, where they are not as many as before; empty for as many", ())
    dilation = Attr("ints", "distance between taps, per spatial dimension")
    transposed = Attr("bool", "whether this is the adjoint of a convolution", False)
    output_padding = Attr("ints", "added to the size of a transposed result; empty for zeros", ())
    groups = Attr("int", "channels are split into this many independent convolutions", 1)


def window(op: Op) -> tuple:
    """The arguments of ATen's convolution from stride to groups; no padding where it differs before and behind."""
    stride, none = op.stride, (0,) * len(op.stride)
    padding = none if op.padding_after else op.padding
    return stride, padding, op.dilation, op.transposed, op.output_padding or none, op.groups


def border(op: Op) -> list[int]:
    """The zeros that ATen's convolution does not add, as its padding wants them: the last dimension first."""
    pairs = list(zip(op.padding, op.padding_after, strict=True)) if op.padding_after else []
    return [n for pair in reversed(pairs) for n in pair]


def bordered(x: torch.Tensor, widths: list[int]) -> torch.Tensor:
    return aten.constant_pad_nd.default(x, widths) if widths else x


def options(op: Op) -> dict:
    """The attributes of a convolution, to build one of its gradients with."""
    return {k: op.attributes[k] for k in ConvolutionLike.attribute_fields}


def result_shape(
    x, w, stride, padding, dilation, transposed=False, output_padding=(), groups=1, padding_after=()
) -> tuple[int, ...]:
    """The shape of a convolution."""
    kernel = w.shape[2:]
    if not len(x.shape) == len(w.shape) == len(stride) + 2 or not len(stride) == len(padding) == len(dilation):
        raise ValueError(f"a window of {len(stride)} dimensions does not fit x {x} and a kernel {w}")
    if transposed:
        extra = output_padding or (0,) * len(kernel)
        sizes = [
            (n - 1) * s - 2 * p + d * (k - 1) + e + 1
            for n, k, s, p, d, e in zip(x.shape[2:], kernel, stride, padding, dilation, extra, strict=True)
        ]
        return (x.shape[0], w.shape[1] * groups, *sizes)
    sizes = [
        (n + p + q - d * (k - 1) - 1) // s + 1
        for n, k, s, p, q, d in zip(
            x.shape[2:], kernel, stride, padding, padding_after or padding, dilation, strict=True
        )
    ]
    return (x.shape[0], w.shape[0], *sizes)


def multiply_adds(op: Op, x: TensorType, y: TensorType, w: TensorType) -> int:
    """Flops of a convolution of x to y, which its gradients share: one multiply and add per tap and element."""
    walked, channels = (x, w.shape[1]) if op.transposed else (y, w.shape[1])
    return 2 * walked.size * channels * math.prod(w.shape[2:])


def conv_roles(op: Op, x: str, w: str, y: str, order: str) -> Roles:
    """Batch and output channels are parallel; spatial dimensions need their neighbours."""
    grouped = op.groups > 1
    whole = "".join(c for c in x + w + y if c not in "ano")
    if grouped:
        whole += "no"
    table = {"x": x, "w": w, "y": y, "b": "o"}
    specs = [table[c] for c in order]
    return Roles(tuple(specs[:-1]), (specs[-1],), whole="".join(dict.fromkeys(whole)))


def _labels(n: int) -> tuple[str, str, str]:
    """Labels of x, w, y: batch a, input channels n, output channels o, spatial dimensions apart from one another."""
    places = [c for c in LABELS if c not in "ano"]
    inside, taps, outside = ("".join(places[i * n : (i + 1) * n]) for i in range(3))
    return "an" + inside, "on" + taps, "ao" + outside


def _roles(op: Op, order: str) -> Roles:
    x, w, y = _labels(len(op.stride))
    if op.transposed:
        w = "no" + w[2:]
    return conv_roles(op, x, w, y, order)


# ---- as loops --------------------------------------------------------------------------------------------------------


def convolved(k, op: Op, x, w, index, spreads: bool):
    """One element of a convolution of x. `spreads`: windows lie in the result, as in the adjoint of a convolution."""
    image, out, *places = index
    taps = [k.walk(n) for n in w.type.shape[2:]]
    inner = out
    if op.groups == 1:
        channel = source = walked(k, x, 1)
    else:  # the inputs of a group lie side by side, as its outputs do
        width = x.type.shape[1] // op.groups
        channel = k.walk(width)
        group, inner = k.divided(out, op.results[0].type.shape[1] // op.groups)
        source = k.joined([group, channel], [op.groups, width])
    seen, inside = [], True
    for place, tap, s, p, d in zip(places, taps, op.stride, op.padding, op.dilation, strict=True):
        if spreads:
            at, exact = k.quotient(k.joined([k.shifted(place, p), k.scaled(tap, -d)], [1, 1]), s)
            inside = k.both(inside, exact)
        else:
            at = under(k, place, tap, s, p, d)
        seen.append(at)
    weight = k.at(w, [source, inner, *taps] if spreads else [out, channel, *taps])
    element = op.results[0].type.element
    product = k.apply("mul", padded(k, x, [image, source, *seen], inside), weight, dtype=element)
    return k.reduce(product, "sum", [channel, *taps], index, element)


def kernel_gradient(k, op: Op, x, dy, index):
    """One element of the gradient of a kernel: the windows lie in x, or in dy where the convolution is transposed."""
    wide, narrow = (dy, x) if op.transposed else (x, dy)
    channel, source, *taps = index
    if op.groups > 1:
        group, _ = k.divided(channel, narrow.type.shape[1] // op.groups)
        source = k.joined([group, source], [op.groups, op.dw.type.shape[1]])
    image, *places = (walked(k, narrow, d) for d in range(narrow.type.rank) if d != 1)
    seen = [under(k, *each) for each in zip(places, taps, op.stride, op.padding, op.dilation, strict=True)]
    element = op.dw.type.element
    product = k.apply(
        "mul", padded(k, wide, [image, source, *seen]), k.at(narrow, [image, channel, *places]), dtype=element
    )
    return k.reduce(product, "sum", [image, *places], index, element)


def under(k, place, tap, stride: int, padding: int, dilation: int = 1):
    """Where a tap of the window at a place lies."""
    return k.joined([k.shifted(k.scaled(place, stride), -padding), k.scaled(tap, dilation)], [1, 1])


def padded(k, value, index, inside=True):
    """The number a value has at an index; 0 outside of it, as a load is by itself, and where `inside` is not true."""
    if value not in k.arguments:
        for place, size in zip(index, value.type.shape, strict=True):
            inside = k.both(inside, k.between(place, 0, size))
    return k.choose(inside, k.at(value, index), k.constant(0, value.type.element))


# ---- ops -------------------------------------------------------------------------------------------------------------


@step.op
class Conv(ConvolutionLike):
    """Cross-correlation of x with a kernel, plus a bias per output channel."""

    x = Operand(FloatTensor, "[N, C_in, ...]")
    w = Operand(FloatTensor, "the kernel")
    bias = Operand(FloatTensor, "one number per output channel", optional=True)
    y = Result()

    @staticmethod
    def infer(x, w, bias, **window):
        return x.with_shape(result_shape(x, w, **window))

    @staticmethod
    def check(op):
        x, w, n = op.x.type, op.w.type, len(op.stride)
        if not 1 <= n <= 3 or x.rank != n + 2 or w.rank != n + 2:
            return "x and the kernel must have two dimensions more than the window, which has one to three"
        if len(op.padding) != n or len(op.dilation) != n or len(op.output_padding) not in (0, n):
            return "stride, padding, dilation and output_padding must have one number per spatial dimension"
        if op.padding_after and (len(op.padding_after) != n or op.transposed):
            return "padding_after must have one number per spatial dimension, and no transposed convolution has it"
        if x.element is not w.element or (op.bias is not None and op.bias.type.element is not x.element):
            return "operands differ in element type"
        have = w.shape[0] if op.transposed else w.shape[1] * op.groups
        if have != x.shape[1]:
            return f"the kernel is made for {have} channels, x has {x.shape[1]}"
        if op.bias is not None and op.bias.type.shape != (op.y.type.shape[1],):
            return "the bias must be a [C_out] vector"
        return "the result would be empty" if min(op.y.type.shape[2:]) < 1 else None

    @staticmethod
    def evaluate(op):
        args, widths = window(op), border(op)
        return spread(op, lambda x, w, bias: aten.convolution.default(bordered(x, widths), w, bias, *args))

    @staticmethod
    def element(k, op, index):
        total = convolved(k, op, op.x, op.w, index, op.transposed)
        return total if op.bias is None else k.apply("add", total, k.at(op.bias, [index[1]]), dtype=op.y.type.element)

    @staticmethod
    def derivative(b, op, dy):
        dx = b.conv_input_grad(dy, op.w, input_shape=op.x.type.shape, **options(op))
        dw = b.conv_weight_grad(op.x, dy, weight_shape=op.w.type.shape, **options(op))
        dims = tuple(i for i in range(dy.type.rank) if i != 1)
        return present(op, dx, dw, None if op.bias is None else b.sum(dy, dims=dims))

    @staticmethod
    def flops(op):
        return multiply_adds(op, op.x.type, op.y.type, op.w.type) + (0 if op.bias is None else op.y.type.size)

    @staticmethod
    def roles(op):
        return _roles(op, "xwy" if op.bias is None else "xwby")


@step.op
class ConvInputGrad(ConvolutionLike):
    """dx of a convolution."""

    dy = Operand(FloatTensor)
    w = Operand(FloatTensor, "the kernel")
    dx = Result()
    input_shape = Attr("ints", "the shape of x")

    @staticmethod
    def infer(dy, w, input_shape, **window):
        return dy.with_shape(input_shape)

    @staticmethod
    def evaluate(op):
        shape, args = op.input_shape, window(op)
        before, after = op.padding, op.padding_after
        mask = [True, False, False]
        if not after:
            return lambda dy, w: aten.convolution_backward.default(dy, blank(dy, shape), w, None, *args, mask)[0]
        whole = (*shape[:2], *(p + n + q for p, n, q in zip(before, shape[2:], after, strict=True)))

        def inside(dy, w):
            dx = aten.convolution_backward.default(dy, blank(dy, whole), w, None, *args, mask)[0]
            for dim, (first, size) in enumerate(zip(before, shape[2:], strict=True), 2):
                dx = dx.narrow(dim, first, size)
            return dx.clone()

        return inside

    @staticmethod
    def element(k, op, index):
        return convolved(k, op, op.dy, op.w, index, not op.transposed)

    @staticmethod
    def flops(op):
        return multiply_adds(op, op.dx.type, op.dy.type, op.w.type)

    @staticmethod
    def roles(op):
        return _roles(op, "ywx")


@step.op
class ConvWeightGrad(ConvolutionLike):
    """dw of a convolution."""

    x = Operand(FloatTensor)
    dy = Operand(FloatTensor)
    dw = Result()
    weight_shape = Attr("ints", "the shape of the kernel")

    @staticmethod
    def infer(x, dy, weight_shape, **window):
        return x.with_shape(weight_shape)

    @staticmethod
    def evaluate(op):
        shape, args, widths = op.weight_shape, window(op), border(op)
        mask = [False, True, False]
        gradients = aten.convolution_backward.default
        return lambda x, dy: gradients(dy, bordered(x, widths), blank(x, shape), None, *args, mask)[1]

    @staticmethod
    def element(k, op, index):
        return kernel_gradient(k, op, op.x, op.dy, index)

    @staticmethod
    def flops(op):
        return multiply_adds(op, op.x.type, op.dy.type, op.dw.type)

    @staticmethod
    def roles(op):
        return _roles(op, "xyw")
