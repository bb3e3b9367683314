"""A convolution as a product whose rows are the windows of an image, with what follows it.

No window is ever written: the GPU's copy engine gathers a tile of them, tap by tap, from an image that lies
channels-last. So a region around a convolution is looked at as one around a product of two matrices that are not there,
windows and weights; only how tiles of the first are fetched differs (`product.cu`). The input gradient of a convolution
that visits every pixel is a convolution too (`transforms/backward_forms.py`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ...dialects.step import StepBuilder
from ...dialects.step.convolution import Conv
from ...dialects.strides import row_major, same_places
from ...ir.builtin import add_function, finish_function, module
from ...ir.core import Op, Value
from ...ir.types import TensorType
from ...transforms.loops import NotLoops, lowered
from ...transforms.tall_products import has_wide_windows
from ..cudnn.convolution import channels_last
from ..kernels import Spec
from ..triton.scalars import NoText
from . import products
from .library import Gathering
from .products import ALIGNMENT, COLUMNS, PIECE, STAGE, SUMMED, Place, Product, Shape

if TYPE_CHECKING:
    from ..providers import Region

#: what a map of windows can say: corners of 8 bits with a sign, taps of 8 bits without, steps
CORNERS, TAPS, STEPS = (-128, 127), 255, 8
#: bytes of weights that may stay with a block
KEPT = 96 * 1024
#: the share of a step's channels that must be there
FILLED = 0.5


class Convolution(Product):
    """A loop kernel as the product that a convolution is. windows: the argument that is not there, before that of the
    weights; image: what it is gathered from."""

    windowed = True

    def __init__(self, function: Op, places: list[Place], op: Op, windows: int, image: Spec):
        self.op, self.windows, self.image = op, windows, image
        super().__init__(function, [p.spec for p in places], places)

    def check(self) -> None:
        super().check()
        if self.parts > 1 or (self.a.argument, self.b.argument) != (self.windows, self.windows + 1):
            raise NoText("its result does not lie channels-last")

    @property
    def columns(self) -> int:
        return PIECE if self.n <= PIECE else COLUMNS

    @property
    def weights(self) -> int:
        """Bytes of the weights of one column of tiles, with what fills their steps."""
        channels = self.image.shape[1]
        return self.k // channels * -(-channels // SUMMED) * SUMMED * self.columns * self.image.dtype.itemsize

    def factors(self, shape: Shape) -> int:
        return shape.stages * STAGE + self.weights if shape.stays else super().factors(shape)

    def shape(self, stays: bool = False) -> Shape | None:
        return None if stays and (self.n > self.columns or self.weights > KEPT) else super().shape(stays)

    @property
    def gathering(self) -> Gathering:
        """How windows lie in the image."""
        (n, c, h, w), laid = self.image.shape, strides_of(self.image)
        lower, upper = corners_of(self.op)
        strides = (laid[3], laid[2], laid[0])
        return Gathering((c, w, h, n), strides, lower, upper, (self.op.stride[1], self.op.stride[0]))

    @property
    def window(self) -> tuple[int, ...]:
        """`Window` of product.cu."""
        op = self.op
        taps, out = op.w.type.shape[3], op.y.type.shape[2:]
        return (self.image.shape[1], taps, *out, *op.stride, *op.padding, *op.dilation)


def corners_of(op: Op) -> tuple[tuple[int, int], tuple[int, int]]:
    """The box that windows begin in, from the corners of the image: along a row, then from row to row. It ends with the
    last window, however many pixels are left behind that."""
    (top, left), sizes = op.padding, zip(op.y.type.shape[2:], op.stride, op.x.type.shape[2:], op.padding, strict=True)
    bottom, right = ((out - 1) * step + 1 - size - before for out, step, size, before in sizes)
    return (-left, -top), (right, bottom)


def strides_of(image: Spec) -> tuple[int, ...]:
    """The strides of an image; of what has size 1 those that it would have without gaps."""
    dense = channels_last(image.shape)
    return tuple(d if n == 1 else s for n, s, d in zip(image.shape, image.strides, dense, strict=True))


def product_of(region: Region) -> Product:
    """The product, or the convolution as one, that a region is; NoText where it is none that this kernel does."""
    convolutions = [op for op in region.ops if op.definition is Conv]
    if not convolutions:
        return products.product_of(region)
    if region.parts or len(convolutions) > 1:
        raise NoText("it is more than one convolution")
    (op,) = convolutions
    given = list(region.body.regions[0].block.arguments)
    if op.x not in given or op.w not in given:
        raise NoText("what a convolution reads is computed on the way")
    image, weights = (given.index(v) for v in (op.x, op.w))
    why = why_not(op, region.operands[image], region.operands[weights])
    if why:
        raise NoText(why)
    function = as_product(region, op)
    new = [Spec(v.type.shape, row_major(v.type.shape), region.operands[image].dtype)
           for v in function.regions[0].block.arguments[-2:]]  # fmt: skip
    places = [Place(spec, i) for i, spec in enumerate(region.specs)]
    places[len(given) : len(given)] = [Place(new[0], image), Place(new[1], weights)]
    try:
        return Convolution(lowered(function), places, op, len(given), region.operands[image])
    except NotLoops as error:
        raise NoText(str(error)) from error


def why_not(op: Op, image: Spec, weights: Spec) -> str:
    """Why a convolution is no such product; empty where it is."""
    if op.transposed or op.groups > 1 or len(op.stride) != 2:
        return "only convolutions of whole images, over all channels, are products of windows"
    if op.x.type.element.text not in ("bf16", "f16"):
        return "its factors are no 16-bit numbers"
    each = ALIGNMENT // image.dtype.itemsize
    channels = image.shape[1]
    if strides_of(image)[1] != 1 or any(s % each for d, s in enumerate(strides_of(image)) if d != 1):
        return "its image is not channels-last, or pixels do not begin at multiples of 16 bytes"
    if not same_places(weights.shape, weights.strides, channels_last(weights.shape)):
        return "its weights are not channels-last"
    if channels < FILLED * SUMMED * -(-channels // SUMMED):
        return "it has too few channels to fill a step"
    within = all(CORNERS[0] <= c <= CORNERS[1] for corner in corners_of(op) for c in corner)
    reach = max(d * (n - 1) for d, n in zip(op.dilation, op.w.type.shape[2:], strict=True))
    if not within or reach > TAPS or max(op.stride) > STEPS:
        return "its windows reach further than a map of them can say"
    return ""


def writes_so(body: Op, value: Value, strides: Sequence[int] | None) -> bool:
    """Whether what follows a convolution over all channels may be written as pixels with something between them."""
    block = body.regions[0].block
    shape, wide = value.type.shape, [op for op in block if has_wide_windows(op)]
    if strides is None or len(wide) != 1 or shape != wide[0].y.type.shape or value is wide[0].y:
        return False
    apart = strides[3] * value.type.element.bytes
    places = (shape[2] * shape[3] * strides[3], 1, shape[3] * strides[3], strides[3])
    return apart % ALIGNMENT == 0 and same_places(shape, tuple(strides), places)


def as_product(region: Region, op: Op) -> Op:
    """The body of a region with its convolution as a product of two more arguments: windows, and weights by rows."""
    block = region.body.regions[0].block
    n, out, p, q = op.y.type.shape
    summed, element = math.prod(op.w.type.shape[1:]), op.x.type.element
    types = [TensorType((n, p, q, summed), element), TensorType((out, summed), element)]
    function = add_function(module(), "windows", [*(a.type for a in block.arguments), *types])
    inner = function.regions[0].block
    mapping: dict[Value, Value] = dict(zip(block.arguments, inner.arguments, strict=False))
    b = StepBuilder(inner)
    for each in region.ops:
        if each is op:
            bias = [] if op.bias is None else [b.reshape(mapping[op.bias], shape=(out, 1, 1))]
            mapping[op.y] = b.contract(*inner.arguments[-2:], *bias, spec="npqk,ok->nopq")
            continue
        copy = each.clone(mapping)
        inner.append(copy)
        mapping.update(zip(each.results, copy.results, strict=True))
    assert block.last is not None
    finish_function(function, [mapping[v] for v in block.last.operands])
    return function
