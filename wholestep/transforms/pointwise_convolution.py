"""`pointwise_convolution`: convolutions whose windows do not overlap, and their gradients, as matrix products.

Of a 1x1 convolution of channels-last images each pixel is a row of channels, so nothing moves: the images are looked at
as [N, H, W, C]. Where windows are larger and lie side by side, such as the patches of a photograph, each is a row:
[N, H / k, W / k, C * k * k] is a copy, which a cast of the image does on the way. That is for few channels, which the
libraries would fill up. Their product writes where it is told, which their convolutions do not, and kernels around it
may be part of it. Sums are in another order.

`strided_gradient` is the same for the input gradient of one that skips pixels: the zeros between the pixels that it has
seen belong to whoever reads the gradient, so it is for kernels that fuse.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from ..dialects.step import StepBuilder
from ..dialects.step.convolution import Conv, ConvInputGrad, ConvWeightGrad
from ..dialects.step.layout import Layout
from ..ir.core import Op, Value
from .layout_rules import channels_last, differ, follows, is_convolution, is_wide
from .opportunity import Change, Place, Transformation, register_transformation

#: views of some of an image, which lie as it does
PARTS = frozenset({"step.slice", "step.detach"})
#: lengths of rows that products of libraries are fast for
ALIGNED = 8
NARROW = "only in 16 bits is the product of the libraries as fast as their convolution"


@register_transformation
class PointwiseConvolution(Transformation):
    """Level 1: one convolution, or one gradient of one."""

    name = "pointwise_convolution"
    level = 1

    def places(self, function: Op) -> Iterator[Place]:
        convolutions = [op for op in function.regions[0].block if is_convolution(op)]
        pointwise = [op for op in convolutions if is_wide(op) and set(taps(op)) == {1}]
        last = lie_channels_last(function) if pointwise else set()
        for op in [op for op in convolutions if op in pointwise or has_patches(op)]:
            reason = why_no_patches(op) if has_patches(op) else why_not(op, last)
            yield op, reason or Change(bytes=-2 * op.result.type.bytes)  # the copy of the result

    def apply(self, op: Op) -> None:
        assert op.parent is not None
        b = StepBuilder(op.parent, op, op.loc, op.phase)
        rank = op.operands[0].type.rank
        pixels = "nhwd"[: rank - 1]
        patches = has_patches(op)

        def rows(image: Value) -> Value:
            return b.transpose(in_order(image) if patches else image, order=channels_last(rank))

        def windows(image: Value) -> Value:
            return patched(b, image, op.stride) if patches else rows(image)

        if op.definition is Conv:
            y = b.contract(windows(op.x), matrix(b, op.w), op.bias, spec=f"{pixels}c,oc->{pixels}o")
        elif op.definition is ConvInputGrad:
            y = b.contract(rows(op.dy), matrix(b, op.w), spec=f"{pixels}o,oc->{pixels}c")
        else:
            y = b.contract(rows(op.dy), windows(op.x), spec=f"{pixels}o,{pixels}c->oc")
        if op.definition is ConvWeightGrad:
            made = b.reshape(y, shape=op.weight_shape)
        elif patches and op.definition is ConvInputGrad:
            made = together(b, y, op.dx.type.shape, op.stride)
        else:
            made = apart(b, b.transpose(y, order=as_image(rank)), op)
        op.result.replace_by(made)
        op.erase()


@register_transformation
class StridedGradient(PointwiseConvolution):
    """Level 2: the input gradient of one convolution, and its readers."""

    name = "strided_gradient"
    level = 2

    def places(self, function: Op) -> Iterator[Place]:
        ops = [op for op in function.regions[0].block if op.definition is ConvInputGrad and is_wide(op)]
        wanted = [op for op in ops if set(taps(op)) == {1} and any(n > 1 for n in op.stride)]
        last = lie_channels_last(function) if wanted else set()
        for op in wanted:
            grouped = "it is transposed" if op.transposed else "its channels are in groups" * (op.groups > 1)
            less = op.dy.type.bytes * op.dx.type.shape[1] // op.dy.type.shape[1] - 3 * op.dx.type.bytes
            yield op, grouped or ("it pads" if any(op.padding) else why_no_rows(op, last)) or Change(bytes=less)


def apart(b: StepBuilder, image: Value, op: Op) -> Value:
    """The gradient of a convolution that skips pixels: those that it has seen, with zeros between them."""
    shape = op.result.type.shape
    for dim, stride in enumerate(op.stride, 2):
        if stride > 1 and op.definition is ConvInputGrad:
            end = (image.type.shape[dim] - 1) * stride + 1
            image = b.slice_grad(image, dim=dim, start=0, end=end, stride=stride, size=shape[dim])
    return image


def has_patches(op: Op) -> bool:
    """Whether windows of more than one pixel lie side by side."""
    return not op.transposed and tuple(op.stride) == taps(op) and set(taps(op)) != {1}


def in_order(value: Value) -> Value:
    """What a layout was asked for."""
    return value.op.operands[0] if value.op is not None and value.op.definition is Layout else value


def patched(b: StepBuilder, image: Value, sizes: Sequence[int]) -> Value:
    """An image as rows of windows: [N, H / k, W / k, C * k * k]. It is cast afterwards: that copies it as well."""
    image = in_order(image)
    cast = image.op if image.op is not None and image.op.name == "step.cast" else None
    image = image if cast is None else in_order(cast.operands[0])
    n, channels, *places = image.type.shape
    split = [part for place, size in zip(places, sizes, strict=True) for part in (place // size, size)]
    blocks = b.reshape(image, shape=(n, channels, *split))
    last = len(split) + 2
    blocks = b.transpose(blocks, order=(0, *range(2, last, 2), 1, *range(3, last, 2)))
    rows = b.reshape(blocks, shape=(n, *split[::2], channels * math.prod(sizes)))
    return rows if cast is None else b.cast(rows, dtype=cast.dtype, rounds=cast.rounds)


def together(b: StepBuilder, rows: Value, shape: Sequence[int], sizes: Sequence[int]) -> Value:
    """Rows of windows as the image that they are of."""
    n, channels, *places = shape
    count = len(sizes)
    blocks = b.reshape(rows, shape=(*rows.type.shape[:-1], channels, *sizes))
    order = (0, count + 1, *(dim for i in range(count) for dim in (1 + i, count + 2 + i)))
    return b.reshape(b.transpose(blocks, order=order), shape=(n, channels, *places))


def taps(op: Op) -> tuple[int, ...]:
    """The size of the window."""
    shape = op.weight_shape if op.definition is ConvWeightGrad else op.w.type.shape
    return tuple(shape[2:])


def matrix(b: StepBuilder, w: Value) -> Value:
    """A kernel as [C_out, C_in * taps]."""
    w = w if math.prod(w.type.shape[2:]) == 1 else in_order(w)
    return b.reshape(w, shape=(w.type.shape[0], math.prod(w.type.shape[1:])))


def why_not(op: Op, last: set[Value]) -> str:
    if op.transposed or op.groups > 1:
        return "it is transposed" if op.transposed else f"its channels are in {op.groups} groups"
    if any(n != 1 for n in op.stride) or any(op.padding):
        return "it skips pixels or pads them; a product has a row for each"
    return why_no_rows(op, last)


def why_no_patches(op: Op) -> str:
    """Why the windows of an op are no rows of a product; empty where they are."""
    if op.groups > 1 or any(op.padding) or any(op.padding_after) or any(n != 1 for n in op.dilation):
        return "its windows are spread, padded or of some channels only"
    image = op.dx.type if op.definition is ConvInputGrad else op.x.type
    shape = op.weight_shape if op.definition is ConvWeightGrad else op.w.type.shape
    if any(n % size for n, size in zip(image.shape[2:], shape[2:], strict=True)):
        return "its windows do not cover the whole image"
    if image.element.text not in ("bf16", "f16"):
        return NARROW
    if shape[1] % ALIGNED == 0:
        return f"libraries read windows of {shape[1]} channels where they are; rows would be a copy"
    if math.prod(shape[1:]) % ALIGNED or shape[0] % ALIGNED:
        return f"rows of {math.prod(shape[1:])} numbers to {shape[0]}: libraries want multiples of {ALIGNED}"
    return ""


def why_no_rows(op: Op, last: set[Value]) -> str:
    """Why the pixels of an op's images are no rows of a product; empty where they are."""
    if op.operands[0].type.element.text not in ("bf16", "f16"):
        return NARROW
    images = op.operands if op.definition is ConvWeightGrad else op.operands[:1]
    if not all(v in last or one_pixel(v) for v in images):
        return "its images are not channels-last: they would have to be copied"
    return ""


def one_pixel(image: Value) -> bool:
    """Whether an image lies the same in both layouts."""
    rank = image.type.rank
    return not differ(image.type.shape, tuple(range(rank)), channels_last(rank))


def lie_channels_last(function: Op) -> set[Value]:
    """Images that lie channels-last because a `step.layout` says so, or because their maker writes as it reads.

    A guess for the sake of copies; results are the same where it is wrong.
    """
    found: set[Value] = set()
    for op in function.regions[0].block:
        if op.definition.terminator or not op.operands:
            continue
        if op.definition is Layout:
            last = op.order == channels_last(op.result.type.rank)
        elif op.name == "step.transpose":  # rows of a product as an image
            last = op.operands[0] not in found and tuple(op.order) == as_image(op.result.type.rank)
        elif op.name == "step.reshape":
            last = op.operands[0] in found and one_row(op.operands[0].type.shape, op.result.type.shape)
        else:
            last = any(v in found for v in op.operands) and (op.name in PARTS or follows(op, widest(op)))
        if last:
            found.update(r for r in op.results if r.type.rank >= 3)
    return found


def as_image(rank: int) -> tuple[int, ...]:
    """The order of dimensions that makes an image of pixels that are rows of channels."""
    return (0, rank - 1, *range(1, rank - 1))


def one_row(shape: Sequence[int], new: Sequence[int]) -> bool:
    """Whether one of two shapes is that of sequences and the other that of images of one row: one memory."""
    short, long = sorted((tuple(shape), tuple(new)), key=len)
    return len(short) == 3 and long == (*short[:2], 1, short[2])


def widest(op: Op) -> int:
    return max(v.type.rank for v in op.operands)
