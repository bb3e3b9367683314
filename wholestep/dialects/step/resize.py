"""Images made larger by whole factors, with straight lines between pixels (bilinear) or without (nearest), and the
gradients of that.

A pixel of the result lies between two of x in each direction. Of the gradient each pixel of x asks the few pixels of
the result that it was part of, one direction after the other: nothing is scattered, and the sums are always the same.
"""

from __future__ import annotations

import itertools
import math

import torch

from ...ir.core import Op, Value
from ...ir.dialect import Attr, FloatTensor, Operand, Result
from ..loop import compute_type
from .base import Roles, StepOp, step
from .convolution import padded
from .support import wide
from .windows import added, rounded

aten = torch.ops.aten
#: sums over factors up to this are written out; longer ones are walked: written out, they take long to compile
WRITTEN_OUT = 4
#: how many times larger an image is than what is small beside it
SMALL = 4


class Resize(StepOp):
    """Common rules: batch and channels are parallel, rows and columns need their neighbours."""

    precision = "high"
    factors = Attr("ints", "how many rows and columns of the large image there are for one of the small one")

    @staticmethod
    def roles(op: Op) -> Roles:
        return Roles(("abcd",), ("abef",), whole="cdef")


# ---- as loops --------------------------------------------------------------------------------------------------------


def middle(factor: int) -> float:
    """How far beyond the middle of a small pixel the middle of the next large one lies, in large pixels."""
    return 0.5 if factor % 2 == 0 else 0.0


def weighted(k, numbers, weights, dtype):
    """A number times its weights, of which those that are None are 1."""
    for weight in weights:
        if weight is not None:
            numbers = k.apply("mul", rounded(k, numbers, dtype), weight, dtype=dtype)
    return numbers


def neighbours(k, place, factor: int, size: int, dtype) -> list[tuple]:
    """The places in a line of `size` pixels that a pixel of the larger line lies between, with the weight of each."""
    if factor == 1:
        return [(place, None)]
    after, rest = k.divided(k.shifted(place, factor - factor // 2), factor)
    return list(zip((k.shifted(after, -1), after), shares(k, after, rest, factor, size, dtype), strict=True))


def shares(k, after, tap, factor: int, size: int, dtype) -> tuple:
    """What the neighbours before and after are of a pixel of the larger line, of which `tap` lie between them and it.
    Where there is only one it is all of it."""
    one, zero = k.constant(1.0, dtype), k.constant(0.0, dtype)
    share = k.counted(tap, middle(factor) / factor, 1 / factor, dtype)
    share = k.choose(k.below(after, 1), one, k.choose(k.below(after, size), share, zero))
    return k.apply("sub", one, share, dtype=dtype), share


def part(k, place, tap, after: bool, factor: int, size: int, dtype):
    """How much of a small pixel is in one of the `factor` large ones between its middle and that of a neighbour, which
    comes after it or before. `tap` is the number among these. Where it has no such neighbour that is all of it."""
    one = k.constant(1.0, dtype)
    if isinstance(tap, int):
        share = k.constant((tap + middle(factor)) / factor, dtype)
    else:
        share = k.counted(tap, middle(factor) / factor, 1 / factor, dtype)
    if after:
        return k.choose(k.below(place, size - 1), k.apply("sub", one, share, dtype=dtype), one)
    return k.choose(k.below(place, 1), one, share)


def is_made_of(dy: Value, y: Value) -> bool:
    """Whether a gradient is computed from y and what is small beside it, as that of a loss over classes is: then it
    need not be written, but each reader computes all that it reads."""
    others = [] if dy.op is None else [v for v in dy.op.operands if v is not y]
    return dy.op is not None and y in dy.op.operands and all(v.type.size * SMALL <= y.type.size for v in others)


# ---- ops -------------------------------------------------------------------------------------------------------------


@step.op
class Upsample(Resize):
    """Every pixel becomes several; those between the middles of two pixels of x are on the line between them."""

    x = Operand(FloatTensor, "[N, C, H, W]")
    y = Result()

    @staticmethod
    def infer(x, factors):
        return x.with_shape((*x.shape[:2], *(n * f for n, f in zip(x.shape[2:], factors, strict=True))))

    @staticmethod
    def check(op: Op) -> str | None:
        if op.x.type.rank != 4 or len(op.factors) != 2 or min(op.factors) < 1:
            return "x must be [N, C, H, W], with one factor of at least 1 for rows and one for columns"
        return None

    @staticmethod
    def evaluate(op: Op):
        size = op.y.type.shape[2:]
        return lambda x: aten.upsample_bilinear2d.default(x, size, False)

    @staticmethod
    def element(k, op, index):
        element = op.y.type.element
        wide = compute_type(element)
        each = zip(index[2:], op.factors, op.x.type.shape[2:], strict=True)
        parts = []
        for corner in itertools.product(*(neighbours(k, *dim, wide) for dim in each)):
            number = padded(k, op.x, [*index[:2], *(place for place, _ in corner)])
            parts.append(weighted(k, number, [weight for _, weight in corner], wide))
        return rounded(k, added(k, parts, element), element)

    @staticmethod
    def derivative(b, op, dy):
        rows, columns = op.factors
        if min(rows, columns) > WRITTEN_OUT and is_made_of(dy, op.y):
            return [b.upsample_cells_grad(dy, factors=op.factors)]
        for factors in ((1, columns), (rows, 1)):  # columns first: they are neighbours in memory
            dy = b.upsample_grad(dy, factors=factors) if max(factors) > 1 else dy
        return [dy]

    @staticmethod
    def flops(op: Op) -> int:
        return 7 * op.y.type.size


@step.op
class UpsampleGrad(Resize):
    """dx of `upsample`: each pixel the sum of what lies up to one pixel from it, the less the farther."""

    dy = Operand(FloatTensor)
    dx = Result()

    @staticmethod
    def infer(dy, factors):
        return dy.with_shape((*dy.shape[:2], *(n // f for n, f in zip(dy.shape[2:], factors, strict=True))))

    @staticmethod
    def check(op: Op) -> str | None:
        shape = op.dy.type.shape
        if len(shape) != 4 or len(op.factors) != 2 or min(op.factors) < 1:
            return "dy must be [N, C, H, W], with one factor of at least 1 for rows and one for columns"
        fits = not any(n % f for n, f in zip(shape[2:], op.factors, strict=True))
        return None if fits else "rows and columns of dy must be multiples of the factors"

    @staticmethod
    def evaluate(op: Op):
        size, shape = op.dy.type.shape[2:], op.dx.type.shape
        return lambda dy: aten.upsample_bilinear2d_backward.default(dy, size, shape, False)

    @staticmethod
    def element(k, op, index):
        element = op.dx.type.element
        wide = compute_type(element)
        each = list(zip(index[2:], op.factors, op.dx.type.shape[2:], strict=True))

        def sides(taps):
            """What is seen with these numbers of large pixels, before and after the middle of the small one."""
            found = []
            for afters in itertools.product(*((False, True) if f > 1 else (False,) for f in op.factors)):
                places, weights = list(index[:2]), []
                for (place, factor, size), tap, after in zip(each, taps, afters, strict=True):
                    if factor == 1:
                        places.append(place)
                        continue
                    start = k.shifted(k.scaled(place, factor), factor // 2 - (0 if after else factor))
                    places.append(k.shifted(start, tap) if isinstance(tap, int) else k.joined([start, tap], [1, 1]))
                    weights.append(part(k, place, tap, after, factor, size, wide))
                found.append(weighted(k, padded(k, op.dy, places), weights, wide))
            return found

        if math.prod(op.factors) <= WRITTEN_OUT:
            numbers = [n for taps in itertools.product(*map(range, op.factors)) for n in sides(taps)]
            total = added(k, numbers, element)
        else:
            walked = [k.walk(factor) for factor in op.factors]
            total = k.reduce(added(k, sides(walked), element), "sum", walked, index, element)
        return rounded(k, total, element)

    @staticmethod
    def flops(op: Op) -> int:
        return 2 * op.dx.type.size * math.prod(1 if f == 1 else 2 * f for f in op.factors)


@step.op
class UpsampleShares(Resize):
    """What each of four neighbouring pixels of `upsample` was of the large pixels between their middles, times dy.

    These are a cell, [N, cell, row in it, cell, column in it, C]. There is one more cell in each direction than there
    are pixels: half of those at both ends lies outside, where there are zeros, and the other half has one neighbour.
    """

    dy = Operand(FloatTensor)
    before = Result(doc="of the neighbour before the cell in both directions")
    above = Result(doc="of that before it among rows and after it among columns")
    left = Result(doc="of that after it among rows and before it among columns")
    after = Result(doc="of that after it in both directions")

    @staticmethod
    def infer(dy, factors):
        sizes = [(n // f + 1, f) for n, f in zip(dy.shape[2:], factors, strict=True)]
        return (dy.with_shape((dy.shape[0], *itertools.chain(*sizes), dy.shape[1])),) * 4

    @staticmethod
    def check(op: Op) -> str | None:
        return UpsampleGrad.check(op)

    @staticmethod
    def evaluate(op: Op):
        (n, *shape, channels), factors = op.before.type.shape, op.factors
        starts = [f - f // 2 for f in factors]
        border = (starts[1], factors[1] - starts[1], starts[0], factors[0] - starts[0])

        def run(dy):
            weights = []
            for factor, cells in zip(factors, shape[::2], strict=True):
                share = (torch.arange(factor, dtype=torch.float64, device=dy.device) + middle(factor)) / factor
                share = share.repeat(cells, 1)
                share[0], share[-1] = 1, 0
                weights.append([side.to(dy.dtype) for side in (1 - share, share)])
            cells = torch.nn.functional.pad(dy, border).view(n, channels, *shape).movedim(1, -1)
            rows, columns = ([side[..., None] for side in sides] for sides in weights)
            return tuple(cells * row[..., None, None] * column for row, column in itertools.product(rows, columns))

        return run

    @staticmethod
    def roles(op: Op) -> Roles:
        return Roles(("abcd",), ("aefghb",) * 4, whole="cdefgh")

    @staticmethod
    def element(k, op, index):
        element = op.before.type.element
        wide = compute_type(element)
        (n, *cells, channel), weights = index, []
        places = [n, channel]
        for cell, tap, factor, size in zip(cells[::2], cells[1::2], op.factors, op.dy.type.shape[2:], strict=True):
            places.append(k.shifted(k.joined([cell, tap], [size // factor + 1, factor]), factor // 2 - factor))
            weights.append(shares(k, cell, tap, factor, size // factor, wide))
        number = padded(k, op.dy, places)
        return tuple(rounded(k, weighted(k, number, sides, wide), element) for sides in itertools.product(*weights))

    @staticmethod
    def flops(op: Op) -> int:
        return 6 * op.before.type.size


@step.op
class UpsampleCellsGrad(UpsampleGrad):
    """dx of `upsample` by large factors, where dy is computed on the way: every cell between pixels is summed for each
    of its four neighbours, which add up those of their four cells. So each pixel of dy is looked at once."""

    element = None  # type: ignore[assignment]  # by its expansion

    @staticmethod
    def expand(b, op):
        dy = b.cast_to(op.dy, compute_type(op.dy.type.element))
        height, width = op.dx.type.shape[2:]
        sums, starts = [], itertools.product((1, 0), repeat=2)  # the cell after a pixel, where that is before it
        for part, (row, column) in zip(b.upsample_shares(dy, factors=op.factors), starts, strict=True):
            total = b.slice(b.sum(part, dims=(2, 4)), dim=1, start=row, end=row + height)
            sums.append(b.slice(total, dim=2, start=column, end=column + width))
        dx = b.add(b.add(sums[0], sums[1]), b.add(sums[2], sums[3]))
        return b.transpose(b.cast_to(dx, op.dx.type.element), order=(0, 3, 1, 2))


# ---- nearest ---------------------------------------------------------------------------------------------------------


class Repeat(Resize):
    """Common rules of the nearest pixel: nothing is computed but sums in the gradient."""

    precision = "follow"

    @staticmethod
    def flops(op: Op) -> int:
        return op.operands[0].type.size


@step.op
class RepeatPixels(Repeat):
    """Every pixel becomes several equal ones."""

    x = Operand(FloatTensor, "[N, C, H, W]")
    y = Result()

    @staticmethod
    def infer(x, factors):
        return Upsample.infer(x, factors)

    @staticmethod
    def check(op: Op) -> str | None:
        return Upsample.check(op)

    @staticmethod
    def evaluate(op: Op):
        size = op.y.type.shape[2:]
        return lambda x: aten.upsample_nearest2d.default(x, size)

    @staticmethod
    def expand(b, op):
        shape = op.x.type.shape
        each = b.reshape(op.x, shape=blocks_of(shape, (1, 1)))
        return b.reshape(b.broadcast_to(each, blocks_of(shape, op.factors)), shape=op.y.type.shape)

    @staticmethod
    def derivative(b, op, dy):
        return [b.repeat_pixels_grad(dy, factors=op.factors)]


@step.op
class RepeatPixelsGrad(Repeat):
    """dx of `repeat_pixels`: the sum over the pixels that were one."""

    dy = Operand(FloatTensor)
    dx = Result()

    @staticmethod
    def infer(dy, factors):
        return UpsampleGrad.infer(dy, factors)

    @staticmethod
    def check(op: Op) -> str | None:
        return UpsampleGrad.check(op)

    @staticmethod
    def evaluate(op: Op):
        size, shape = op.dy.type.shape[2:], op.dx.type.shape

        def run(dy):
            if dy.stride(1) == 1:  # also of a part of the channels, which the kernel would copy row by row
                dy = dy.contiguous(memory_format=torch.channels_last)
            return aten.upsample_nearest2d_backward.default(dy, size, shape)

        return run

    @staticmethod
    def expand(b, op):
        dy = b.cast_to(op.dy, wide(op.dy.type.element))
        blocks = b.reshape(dy, shape=blocks_of(op.dx.type.shape, op.factors))
        return b.cast_to(b.sum(blocks, dims=(3, 5)), op.dx.type.element)


def blocks_of(shape, factors) -> tuple[int, ...]:
    """A larger image with the pixels that are one in x along dimensions of their own, behind those of x."""
    (n, c, h, w), (rows, columns) = shape, factors
    return n, c, h, rows, w, columns
