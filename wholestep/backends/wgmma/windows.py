"""A convolution as a product whose rows are the windows of an image, with what follows it.

No window is ever written: the GPU's copy engine gathers a tile of them, tap by tap, from an image that lies
channels-last. So a region around a convolution is looked at as one around a product of two matrices that are not there,
windows and weights; only how tiles of the first are fetched differs (`product.cu`). The input gradient of a convolution
that visits every pixel is a convolution too (`transforms/backward_forms.py`). That of one of stride 2 is four of them,
by the parity of a pixel: with 3x3 taps, one, two, two and four of these see a pixel. They are tiles of one product,
whose weights are read as they lie, and what lies along its rows is copied as pixels that are two apart.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING

from ...dialects.step import StepBuilder
from ...dialects.step.convolution import Conv, ConvInputGrad
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
from .products import ALIGNMENT, BLOCKS, COLUMNS, PIECE, STAGE, SUMMED, Matrix, Place, Product, Shape

if TYPE_CHECKING:
    from ..providers import Region

#: what a map of windows can say: corners of 8 bits with a sign, taps of 8 bits without, steps
CORNERS, TAPS, STEPS = (-128, 127), 255, 8
#: bytes of weights that may stay with a block
KEPT = 96 * 1024
#: the share of a step's channels that must be there
FILLED = 0.5
#: parities of pixels: each has maps of its own among the arguments of a kernel
PARITIES = 4


@dataclass(frozen=True, slots=True)
class Taps:
    """`Taps` of product.cu: of the pixels of one parity, taps in a row and all taps, where the first lies in a window,
    and its number among weights."""

    across: int
    all: int
    over: int
    down: int
    first: int


@dataclass(frozen=True, slots=True)
class Windows:
    """How a convolution, or the input gradient of one, walks its image; pairs are of rows and columns. grid: windows;
    before: how far the first begins before the image; weights: from tap to tap among weights; apart: pixels of one
    parity in the result; taps: by parity."""

    grid: tuple[int, int]
    stride: tuple[int, int]
    before: tuple[int, int]
    dilation: tuple[int, int]
    weights: tuple[int, int]
    apart: tuple[int, int]
    taps: tuple[Taps, ...]

    @property
    def reach(self) -> int:
        """The furthest tap of a window."""
        rows = [t.down + self.dilation[0] * (t.all // t.across - 1) for t in self.taps]
        return max(*rows, *(t.over + self.dilation[1] * (t.across - 1) for t in self.taps))

    def corners(self, size: Sequence[int]) -> tuple[tuple[int, int], tuple[int, int]]:
        """The box that windows begin in, from the corners of an image of so many rows and columns: along a row, then
        from row to row. It ends with the last window, however many pixels are left behind that."""
        each = zip(self.grid, self.stride, size, self.before, strict=True)
        bottom, right = ((out - 1) * step + 1 - n - before for out, step, n, before in each)
        return (-self.before[1], -self.before[0]), (right, bottom)


def windows_of(op: Op) -> Windows:
    """The windows of a convolution; of an input gradient those of the gradient that is given. A pixel s * i + r of what
    was convolved with stride s is seen by every s-th tap, the last of these by the first window."""
    high, wide = op.w.type.shape[2:]
    if op.definition is Conv:
        taps = (Taps(wide, high * wide, 0, 0, 0),)
        return Windows(op.y.type.shape[2:], op.stride, op.padding, op.dilation, (wide, 1), (1, 1), taps)
    rows, columns = (seen_by(n, s, p) for n, s, p in zip((high, wide), op.stride, op.padding, strict=True))
    top, left = (min(begin for _, begin, _ in dim) for dim in (rows, columns))
    found = [
        Taps(across, down * across, x - left, y - top, tap * wide + tap_x)
        for down, y, tap in rows
        for across, x, tap_x in columns
    ]
    grid = tuple(n // s for n, s in zip(op.dx.type.shape[2:], op.stride, strict=True))
    weights = (-op.stride[0] * wide, -op.stride[1])
    return Windows(grid, (1, 1), (-top, -left), (1, 1), weights, op.stride, tuple(found))


def seen_by(taps: int, stride: int, padding: int) -> list[tuple[int, int, int]]:
    """Of pixels 0, 1, ... up to the stride: how many taps see one, in which window the last of these does, and that."""
    found = []
    for pixel in range(padding, padding + stride):
        own = range(pixel % stride, taps, stride)
        found.append((len(own), pixel // stride - len(own) + 1, own[-1] if own else 0))
    return found


class Convolution(Product):
    """A loop kernel as the product that a convolution is, or an input gradient. windows: the argument that is not
    there, before that of the weights; image: what it is gathered from."""

    windowed = True

    def __init__(self, function: Op, places: list[Place], op: Op, windows: int, image: Spec):
        self.op, self.windows, self.image, self.how = op, windows, image, windows_of(op)
        self.parities = len(self.how.taps)
        super().__init__(function, [p.spec for p in places], places)

    def check(self) -> None:
        super().check()
        if self.parts > 1 or (self.a.argument, self.b.argument) != (self.windows, self.windows + 1):
            raise NoText("its result does not lie channels-last")
        if self.aside:
            raise NoText("its weights are summed up beside it")
        if self.along_b:  # a row for each channel of the gradient, with the columns of each tap
            rows, *rest = self.op.w.type.shape
            self.b = Matrix(self.b.argument, 0, math.prod(rest), rows, math.prod(rest))

    def write(self) -> None:
        super().write()
        if self.parities > 1 and (self.heights or self.tables or self.crossed):
            raise NoText("rows of several parities are no rows of what lies along them alone")

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
        fits = self.n <= self.columns and not self.along_b and self.weights <= KEPT
        return super().shape(stays) if fits or not stays else None

    @property
    def gathering(self) -> Gathering:
        """How windows lie in the image."""
        (n, c, h, w), laid = self.image.shape, strides_of(self.image)
        lower, upper = self.how.corners((h, w))
        strides = (laid[3], laid[2], laid[0])
        return Gathering((c, w, h, n), strides, lower, upper, (self.how.stride[1], self.how.stride[0]))

    def pixels(self, matrix: Matrix, parity: int) -> tuple[int, Gathering]:
        """Where the pixels of a parity begin in a tensor that lies along rows and columns, and how they lie."""
        (high, wide), (down, over) = self.how.grid, self.how.apart
        row = wide * over * matrix.stride
        begin = parity // over * row + parity % over * matrix.stride
        sizes = (matrix.columns, wide, high, matrix.rows // self.parities // (high * wide))
        return begin, Gathering(sizes, (over * matrix.stride, down * row, down * high * row), (0, 0), (0, 0), (1, 1))

    def window(self, blocks: int = BLOCKS) -> tuple[int, ...]:
        """`Window` of product.cu, where so many blocks run. Tile by tile, each goes through all parities: by itself
        where they are an odd number, else parities are turned whenever all blocks have made a tile."""
        how = self.how
        turn = self.tiles if blocks % 2 or blocks < self.parities else blocks // self.parities
        pairs = (how.grid, how.stride, how.before, how.dilation, how.weights, how.apart)
        taps = [n for own in how.taps for n in astuple(own)]
        return (self.image.shape[1], *(n for pair in pairs for n in pair), turn, *taps)


def strides_of(image: Spec) -> tuple[int, ...]:
    """The strides of an image; of what has size 1 those that it would have without gaps."""
    dense = channels_last(image.shape)
    return tuple(d if n == 1 else s for n, s, d in zip(image.shape, image.strides, dense, strict=True))


def product_of(region: Region) -> Product:
    """The product, or the convolution as one, that a region is; NoText where it is none that this kernel does."""
    convolutions = [op for op in region.ops if op.definition in (Conv, ConvInputGrad)]
    if not convolutions:
        return products.product_of(region)
    if region.parts or len(convolutions) > 1:
        raise NoText("it is more than one convolution")
    (op,) = convolutions
    given = list(region.body.regions[0].block.arguments)
    if op.operands[0] not in given or op.w not in given:
        raise NoText("what a convolution reads is computed on the way")
    image, weights = (given.index(v) for v in (op.operands[0], op.w))
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
    if op.w.type.element.text not in ("bf16", "f16"):
        return "its factors are no 16-bit numbers"
    how = windows_of(op)
    why = why_not_back(op, how) if op.definition is ConvInputGrad else ""
    if why:
        return why
    each = ALIGNMENT // image.dtype.itemsize
    channels = image.shape[1]
    if strides_of(image)[1] != 1 or any(s % each for d, s in enumerate(strides_of(image)) if d != 1):
        return "its image is not channels-last, or pixels do not begin at multiples of 16 bytes"
    if not same_places(weights.shape, weights.strides, channels_last(weights.shape)):
        return "its weights are not channels-last"
    if channels < FILLED * SUMMED * -(-channels // SUMMED):
        return "it has too few channels to fill a step"
    within = all(CORNERS[0] <= c <= CORNERS[1] for corner in how.corners(image.shape[2:]) for c in corner)
    if not within or how.reach > TAPS or max(op.stride) > STEPS:
        return "its windows reach further than a map of them can say"
    return ""


def why_not_back(op: Op, how: Windows) -> str:
    """Why an input gradient is no such product; empty where it is."""
    if max(op.dilation) > 1 or len(how.taps) > PARITIES:
        return f"its taps are apart, or pixels have more than {PARITIES} parities"
    if any(n % s for n, s in zip(op.dx.type.shape[2:], op.stride, strict=True)):
        return "its pixels of each parity are not equally many"
    if not all(t.all for t in how.taps):
        return "some of its pixels no window sees"
    if op.w.type.shape[1] * op.w.type.element.bytes % ALIGNMENT:
        return "its weights of a tap do not begin at multiples of 16 bytes"
    return ""


def writes_so(body: Op, value: Value, strides: Sequence[int] | None) -> bool:
    """Whether what follows a convolution over all channels may be written as pixels with something between them."""
    block = body.regions[0].block
    shape, wide = value.type.shape, [op for op in block if has_wide_windows(op)]
    if strides is None or len(wide) != 1 or shape != wide[0].results[0].type.shape or value is wide[0].results[0]:
        return False
    apart = strides[3] * value.type.element.bytes
    places = (shape[2] * shape[3] * strides[3], 1, shape[3] * strides[3], strides[3])
    return apart % ALIGNMENT == 0 and same_places(shape, tuple(strides), places)


def as_product(region: Region, op: Op) -> Op:
    """The body of a region with its convolution as a product of two more arguments: windows, and weights by rows, or
    by columns where they lie as in forward."""
    block = region.body.regions[0].block
    back = op.definition is ConvInputGrad
    n, out, p, q = op.results[0].type.shape
    summed, element = math.prod(op.w.type.shape) // out, op.w.type.element
    if back:  # on average, as rows that are aligned
        each = ALIGNMENT // element.bytes
        summed = -(-summed // (math.prod(op.stride) * each)) * each
    rows = (summed, out) if back else (out, summed)
    types = [TensorType((n, p, q, summed), element), TensorType(rows, element)]
    function = add_function(module(), "windows", [*(a.type for a in block.arguments), *types])
    inner = function.regions[0].block
    mapping: dict[Value, Value] = dict(zip(block.arguments, inner.arguments, strict=False))
    b = StepBuilder(inner)
    for each in region.ops:
        if each is op:
            bias = [] if back or op.bias is None else [b.reshape(mapping[op.bias], shape=(out, 1, 1))]
            spec = "npqk,ko->nopq" if back else "npqk,ok->nopq"
            mapping[op.results[0]] = b.contract(*inner.arguments[-2:], *bias, spec=spec)
            continue
        copy = each.clone(mapping)
        inner.append(copy)
        mapping.update(zip(each.results, copy.results, strict=True))
    assert block.last is not None
    finish_function(function, [mapping[v] for v in block.last.operands])
    return function
