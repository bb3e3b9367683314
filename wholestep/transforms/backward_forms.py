"""Backward ops in the form that kernels of our own and the libraries do best; `take` takes all that is possible.

`gradient_as_convolution`: the input gradient of a convolution that visits every pixel is itself a convolution, of the
gradient with the kernel turned round. The library's forward kernels write where they are told; its gradients make their
result elsewhere, and it is copied. Sums are in another order.

`own_padding`: a depthwise convolution of a padded image, and both its gradients, do the padding themselves, before and
behind apart. Kernels of our own then read the image without a border, and may compute it on the way.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..dialects.step import StepBuilder
from ..dialects.step.convolution import Conv, ConvInputGrad, ConvWeightGrad
from ..dialects.step.layout import Layout
from ..dialects.step.shape import Pad, Slice
from ..ir.core import Op, Value
from ..ir.types import TensorType
from . import bias_apart, positions  # noqa: F401  (they register)
from .layout_rules import channels_last, is_wide
from .opportunity import Change, Place, Transformation, register_transformation
from .pointwise_convolution import lie_channels_last, taps

#: the forms, in the order in which they are taken
FORMS = ("bias_apart", "short_positions", "strided_gradient", "own_padding", "gradient_as_convolution")


@register_transformation
class GradientAsConvolution(Transformation):
    """Level 1: one input gradient."""

    name = "gradient_as_convolution"
    level = 1

    def places(self, function: Op) -> Iterator[Place]:
        ops = [op for op in function.regions[0].block if op.definition is ConvInputGrad and is_wide(op)]
        wanted = [op for op in ops if set(taps(op)) != {1}]
        last = lie_channels_last(function) if wanted else set()
        for op in wanted:
            yield op, why_not(op, last) or Change(bytes=2 * (op.w.type.bytes - op.dx.type.bytes))

    def apply(self, op: Op) -> None:
        assert op.parent is not None
        b = StepBuilder(op.parent, op, op.loc, op.phase)
        rank = op.w.type.rank
        turned = b.flip(b.transpose(op.w, order=(1, 0, *range(2, rank))), dims=tuple(range(2, rank)))
        turned = b.layout(turned, order=channels_last(rank))
        reach = [d * (n - 1) - p for d, n, p in zip(op.dilation, taps(op), op.padding, strict=True)]
        window = {
            "stride": op.stride,
            "dilation": op.dilation,
            "output_padding": op.output_padding,
        }  # as forward has it
        dx = b.conv(op.dy, turned, padding=tuple(reach), **window)
        op.result.replace_by(dx)
        op.erase()


def why_not(op: Op, last: set[Value]) -> str:
    if op.transposed or op.groups > 1:
        return "it is transposed" if op.transposed else f"its channels are in {op.groups} groups"
    if any(n != 1 for n in op.stride):
        return "it skips pixels, so that its windows lie in the result"
    if op.padding_after:
        return "it pads before and behind apart"
    if any(p > d * (n - 1) for p, d, n in zip(op.padding, op.dilation, taps(op), strict=True)):
        return "it pads by more than its window reaches"
    if op.dy.type.element.text not in ("bf16", "f16") or op.dy not in last:
        return "only for 16 bits and channels-last do the libraries have such kernels that write in place"
    return ""


@register_transformation
class OwnPadding(Transformation):
    """Level 1: one depthwise convolution, or one gradient of one."""

    name = "own_padding"
    level = 1

    def places(self, function: Op) -> Iterator[Place]:
        for op in function.regions[0].block:
            if op.definition in (Conv, ConvInputGrad, ConvWeightGrad) and op.groups > 1:
                image = without_border(op)
                if image is not None:
                    yield op, why_not_own(op) or Change(bytes=-2 * image.bytes)  # the padded image, or its gradient

    def apply(self, op: Op) -> None:
        assert op.parent is not None
        b = StepBuilder(op.parent, op, op.loc, op.phase)
        window = {k: op.attributes[k] for k in ("stride", "dilation", "groups")}
        if op.definition is ConvInputGrad:
            inner = cut_out(op)
            assert inner is not None
            before, whole, size = (0,) * (op.dx.type.rank - 2), op.input_shape[2:], inner.type.shape
            for view in chain(inner, op):
                before = tuple(p + (view.start if d == view.dim else 0) for d, p in enumerate(before, 2))
            after = tuple(n - m - p for n, m, p in zip(whole, size[2:], before, strict=True))
            pads = zeros(op, before, after)
            dx = b.conv_input_grad(op.dy, op.w, input_shape=size, **pads, **window)
            inner.replace_by(dx)
            for view in chain(inner, op):
                view.erase()
            op.erase()
            return
        pad, layouts = padding_of(op.x)
        assert pad is not None
        x = pad.x
        for layout in layouts:
            x = b.layout(x, order=layout.order)
        pads = zeros(op, pad.low[2:], pad.high[2:])
        if op.definition is Conv:
            made = b.conv(x, op.w, op.bias, **pads, **window)
        else:
            made = b.conv_weight_grad(x, op.dy, weight_shape=op.weight_shape, **pads, **window)
        op.result.replace_by(made)
        op.erase()


def zeros(op: Op, before: Sequence[int], after: Sequence[int]) -> dict[str, tuple[int, ...]]:
    """How a convolution pads that has so many zeros around it beside its own."""
    own = op.padding
    return {
        "padding": tuple(p + n for p, n in zip(own, before, strict=True)),
        "padding_after": tuple(p + n for p, n in zip(own, after, strict=True)),
    }


def without_border(op: Op) -> TensorType | None:
    """The type of the image that was padded for a convolution; None where it was not."""
    if op.definition is ConvInputGrad:
        inner = cut_out(op)
        return None if inner is None else inner.type
    pad, _ = padding_of(op.x)
    return None if pad is None else pad.x.type


def padding_of(image: Value) -> tuple[Op | None, list[Op]]:
    """The padding with zeros that made an image, and the layouts since then, the first one first."""
    layouts: list[Op] = []
    while image.op is not None and image.op.definition is Layout and image.type.element is image.op.x.type.element:
        layouts.insert(0, image.op)
        image = image.op.operands[0]
    op = image.op
    if op is None or op.definition is not Pad or op.value != 0 or min(*op.low, *op.high) < 0:
        return None, []
    return (None, []) if any((*op.low[:2], *op.high[:2])) else (op, layouts)


def cut_out(op: Op) -> Value | None:
    """What is cut out of an input gradient along its spatial dimensions, if nobody reads the rest."""
    value = op.result
    while len(users := list(dict.fromkeys(value.uses))) == 1 and users[0].definition is Slice:
        if users[0].dim < 2 or users[0].stride != 1:
            break
        value = users[0].result
    return None if value is op.result else value


def chain(inner: Value, op: Op) -> list[Op]:
    """The views from a value back to an op."""
    found: list[Op] = []
    while inner.op is not op:
        assert inner.op is not None
        found.append(inner.op)
        inner = inner.op.operands[0]
    return found


def why_not_own(op: Op) -> str:
    if op.transposed or op.padding_after:
        return "it is transposed" if op.transposed else "it pads before and behind apart already"
    kernel = op.weight_shape if op.definition is ConvWeightGrad else op.w.type.shape
    if kernel[1] != 1:
        return "its channels are in groups of several"
    if op.operands[0].type.element.text not in ("bf16", "f16"):
        return "only for 16 bits are there kernels that gain by it"
    return ""
