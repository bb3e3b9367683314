"""`pointwise_convolution`: 1x1 convolutions of channels-last images, and their gradients, as matrix products.

Each pixel is a row of channels there, so nothing moves: the images are looked at as [N, H, W, C]. The library's product
writes where it is told, which its convolutions do not, and kernels around it may be part of it. Sums are in another
order.

`strided_gradient` is the same for the input gradient of one that skips pixels: the zeros between the pixels that it has
seen belong to whoever reads the gradient, so it is for kernels that fuse.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..dialects.step import StepBuilder
from ..dialects.step.convolution import Conv, ConvInputGrad, ConvWeightGrad
from ..dialects.step.layout import Layout
from ..ir.builtin import functions
from ..ir.core import Op, Value
from .layout import channels_last, differ, follows, is_wide
from .opportunity import Change, Opportunity, Transformation, register_transformation, site_names

#: views of some of an image, which lie as it does
PARTS = frozenset({"step.slice", "step.detach"})


@register_transformation
class PointwiseConvolution(Transformation):
    """Level 1: one convolution, or one gradient of one."""

    name = "pointwise_convolution"
    level = 1

    def find(self, module: Op) -> list[Opportunity]:
        found: list[Opportunity] = []
        names = site_names(module)
        for function in functions(module):
            pointwise = [op for op in function.regions[0].block if is_wide(op) and set(taps(op)) == {1}]
            last = lie_channels_last(function) if pointwise else set()
            for op in pointwise:
                reason = why_not(op, last)
                change = Change() if reason else Change(bytes=-2 * op.result.type.bytes)  # the copy of the result
                found.append(Opportunity(self.name, names[op], change, reason))
        return found

    def apply(self, op: Op) -> None:
        assert op.parent is not None
        b = StepBuilder(op.parent, op, op.loc, op.phase)
        rank = op.operands[0].type.rank
        pixels = "nhwd"[: rank - 1]
        back = (0, rank - 1, *range(1, rank - 1))

        def rows(image: Value) -> Value:
            return b.transpose(image, order=channels_last(rank))

        if op.definition is Conv:
            y = b.contract(rows(op.x), matrix(b, op.w), op.bias, spec=f"{pixels}c,oc->{pixels}o")
        elif op.definition is ConvInputGrad:
            y = b.contract(rows(op.dy), matrix(b, op.w), spec=f"{pixels}o,oc->{pixels}c")
        else:
            y = b.contract(rows(op.dy), rows(op.x), spec=f"{pixels}o,{pixels}c->oc")
        if op.definition is ConvWeightGrad:
            made = b.reshape(y, shape=op.weight_shape)
        else:
            made = apart(b, b.transpose(y, order=back), op)
        op.result.replace_by(made)
        op.erase()


@register_transformation
class StridedGradient(PointwiseConvolution):
    """Level 2: the input gradient of one convolution, and its readers."""

    name = "strided_gradient"
    level = 2

    def find(self, module: Op) -> list[Opportunity]:
        found: list[Opportunity] = []
        names = site_names(module)
        for function in functions(module):
            ops = [op for op in function.regions[0].block if op.definition is ConvInputGrad and is_wide(op)]
            wanted = [op for op in ops if set(taps(op)) == {1} and any(n > 1 for n in op.stride)]
            last = lie_channels_last(function) if wanted else set()
            for op in wanted:
                grouped = "it is transposed" if op.transposed else "its channels are in groups" * (op.groups > 1)
                reason = grouped or ("it pads" if any(op.padding) else why_no_rows(op, last))
                less = op.dy.type.bytes * op.dx.type.shape[1] // op.dy.type.shape[1] - 3 * op.dx.type.bytes
                found.append(Opportunity(self.name, names[op], Change() if reason else Change(bytes=less), reason))
        return found


def apart(b: StepBuilder, image: Value, op: Op) -> Value:
    """The gradient of a convolution that skips pixels: those that it has seen, with zeros between them."""
    shape = op.result.type.shape
    for dim, stride in enumerate(op.stride, 2):
        if stride > 1 and op.definition is ConvInputGrad:
            end = (image.type.shape[dim] - 1) * stride + 1
            image = b.slice_grad(image, dim=dim, start=0, end=end, stride=stride, size=shape[dim])
    return image


def taps(op: Op) -> tuple[int, ...]:
    """The size of the window."""
    shape = op.weight_shape if op.definition is ConvWeightGrad else op.w.type.shape
    return tuple(shape[2:])


def matrix(b: StepBuilder, w: Value) -> Value:
    """A kernel of one tap as [C_out, C_in]."""
    return b.reshape(w, shape=w.type.shape[:2])


def why_not(op: Op, last: set[Value]) -> str:
    if op.transposed or op.groups > 1:
        return "it is transposed" if op.transposed else f"its channels are in {op.groups} groups"
    if any(n != 1 for n in op.stride) or any(op.padding):
        return "it skips pixels or pads them; a product has a row for each"
    return why_no_rows(op, last)


def why_no_rows(op: Op, last: set[Value]) -> str:
    """Why the pixels of an op's images are no rows of a product; empty where they are."""
    if op.operands[0].type.element.text not in ("bf16", "f16"):
        return "only in 16 bits is the product of the libraries as fast as their convolution"
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
        elif op.name == "step.reshape":
            last = op.operands[0] in found and one_row(op.operands[0].type.shape, op.result.type.shape)
        else:
            last = any(v in found for v in op.operands) and (op.name in PARTS or follows(op, widest(op)))
        if last:
            found.update(r for r in op.results if r.type.rank >= 3)
    return found


def one_row(shape: Sequence[int], new: Sequence[int]) -> bool:
    """Whether one of two shapes is that of sequences and the other that of images of one row: one memory."""
    short, long = sorted((tuple(shape), tuple(new)), key=len)
    return len(short) == 3 and long == (*short[:2], 1, short[2])


def widest(op: Op) -> int:
    return max(v.type.rank for v in op.operands)
