"""Pooling windows over one, two or three spatial dimensions. Tensors are [N, C, ...] or [C, ...]."""

from __future__ import annotations

import math

import torch

from ...ir.core import Op
from ...ir.dialect import Attr, FloatTensor, IntTensor, Operand, Result
from ...ir.types import I64, ScalarType, TensorType
from .base import LABELS, Roles, StepOp, step
from .support import blank
from .windows import ONE_BYTE, adaptive_gradient, average, average_gradient, contest, max_gradient, rounded

aten = torch.ops.aten
UI8 = ScalarType("ui8")


class Pool(StepOp):
    """Common rules: leading dimensions are parallel, spatial ones need their neighbours."""

    @staticmethod
    def roles(op: Op) -> Roles:
        n, first = spatial_rank(op), op.operands[0].type
        lead = LABELS[: first.rank - n]
        inside, outside = LABELS[len(lead) : len(lead) + n], LABELS[len(lead) + n : len(lead) + 2 * n]
        ins = tuple(lead + inside for _ in op.operands)
        return Roles(ins, tuple(lead + outside for _ in op.results), whole=inside + outside)


def spatial_rank(op: Op) -> int:
    """How many dimensions the windows have."""
    return len(op.attributes.get("kernel", op.attributes.get("size", ())) or ())


def pooled_size(size: int, kernel: int, stride: int, padding: int, dilation: int, ceil_mode: bool) -> int:
    """How many windows fit along one dimension."""
    extra = stride - 1 if ceil_mode else 0
    out = (size + 2 * padding - dilation * (kernel - 1) - 1 + extra) // stride + 1
    # with ceil_mode the last window must still start inside x or its left padding
    if ceil_mode and (out - 1) * stride >= size + padding:
        out -= 1
    return out


def pooled_shape(x: TensorType, kernel, stride, padding, dilation, ceil_mode: bool) -> tuple[int, ...]:
    """The shape of a pooled tensor."""
    n = len(kernel)
    tail = x.shape[len(x.shape) - n :]
    sizes = (
        pooled_size(d, k, s, p, g, ceil_mode)
        for d, k, s, p, g in zip(tail, kernel, stride, padding, dilation, strict=True)
    )
    return (*x.shape[: len(x.shape) - n], *sizes)


def check_window(op: Op, x: TensorType) -> str | None:
    n = len(op.kernel)
    if not 1 <= n <= 3 or x.rank not in (n + 1, n + 2):
        return "windows have one to three dimensions, and x one or two more"
    if any(len(v) != n for v in (op.stride, op.padding)):
        return "stride and padding must have one number per spatial dimension"
    if any(2 * p > k for p, k in zip(op.padding, op.kernel, strict=True)):
        return "padding must be at most half of the window"
    return None


class Lifted:
    """One-dimensional windows run as two-dimensional ones with a first dimension of size one, as in eager PyTorch."""

    def __init__(self, op: Op):
        self.flat = spatial_rank(op) == 1

    def window(self, sizes, filler: int) -> list[int]:
        return [filler, *sizes] if self.flat else list(sizes)

    def up(self, x: torch.Tensor) -> torch.Tensor:
        return x.unsqueeze(-2) if self.flat else x

    def down(self, x: torch.Tensor) -> torch.Tensor:
        return x.squeeze(-2) if self.flat else x

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return (*shape[:-1], 1, shape[-1]) if self.flat else shape


# ---- max -------------------------------------------------------------------------------------------------------------


class MaxWindow(Pool):
    """The attributes of max pooling."""

    kernel = Attr("ints", "size of the window, per spatial dimension")
    stride = Attr("ints", "step of the window, per spatial dimension")
    padding = Attr("ints", "border on both sides that never wins, per spatial dimension")
    dilation = Attr("ints", "distance between the window's elements, per spatial dimension")
    ceil_mode = Attr("bool", "whether a last, partial window counts", False)


def _max_arguments(op: Op, lift: Lifted) -> tuple:
    return (
        lift.window(op.kernel, 1),
        lift.window(op.stride, 1),
        lift.window(op.padding, 0),
        lift.window(op.dilation, 1),
        op.ceil_mode,
    )


@step.op
class MaxPool(MaxWindow):
    """The largest element of each window, and its position counted through x's spatial dimensions, or through the
    window: that is one byte, and says the same to the gradient."""

    x = Operand()
    values = Result()
    indices = Result()
    in_window = Attr("bool", "whether positions count through the window", False)

    @staticmethod
    def infer(x, kernel, stride, padding, dilation, ceil_mode, in_window):
        values = x.with_shape(pooled_shape(x, kernel, stride, padding, dilation, ceil_mode))
        return values, values.with_element(UI8 if in_window else I64)

    @staticmethod
    def check(op):
        if op.in_window and math.prod(op.kernel) > ONE_BYTE:
            return "a position in the window does not fit into one byte"
        return check_window(op, op.x.type)

    @staticmethod
    def evaluate(op):
        lift = Lifted(op)
        args = _max_arguments(op, lift)
        pool = aten.max_pool3d_with_indices if len(op.kernel) == 3 else aten.max_pool2d_with_indices
        places = Places(op, op.x.type.shape, op.values.type.shape) if op.in_window else None

        def run(x):
            values, indices = (lift.down(t) for t in pool.default(lift.up(x), *args))
            return values, indices if places is None else places.in_window(indices)

        return run

    @staticmethod
    def element(k, op, index):
        best, winner = contest(k, op, index, not op.in_window)
        return best, rounded(k, winner, op.indices.type.element)

    @staticmethod
    def derivative(b, op, dvalues, _=None):
        if dvalues is None:
            return [None]
        options = {k: op.attributes[k] for k in MaxWindow.attribute_fields}
        return [b.max_pool_grad(dvalues, op.indices, input_shape=op.x.type.shape, **options)]

    @staticmethod
    def flops(op):
        return op.values.type.size * math.prod(op.kernel)


class Places:
    """Positions of winners, counted through the window or through x: one from the other by arithmetic on tensors."""

    def __init__(self, op: Op, inside: tuple[int, ...], outside: tuple[int, ...]):
        n = len(op.kernel)
        self.sizes, self.kernel = inside[len(inside) - n :], op.kernel
        self.counts = outside[len(outside) - n :]
        self.steps = list(zip(op.stride, op.padding, op.dilation, strict=True))

    def start(self, dim: int, like: torch.Tensor) -> torch.Tensor:
        """Where each window starts along a dimension, shaped to go with all windows."""
        (stride, padding, _), n = self.steps[dim], len(self.counts)
        places = torch.arange(self.counts[dim], device=like.device) * stride - padding
        return places.view(*[-1 if d == dim else 1 for d in range(n)])

    def in_window(self, indices: torch.Tensor) -> torch.Tensor:
        total, left = torch.zeros_like(indices), indices
        for dim in range(len(self.sizes)):
            inner = math.prod(self.sizes[dim + 1 :])
            tap = (left // inner - self.start(dim, indices)) // self.steps[dim][2]
            left = left % inner
            total = total * self.kernel[dim] + tap
        return total.to(torch.uint8)

    def in_x(self, taps: torch.Tensor) -> torch.Tensor:
        left = taps.to(torch.int64)
        total = torch.zeros_like(left)
        for dim in range(len(self.sizes)):
            inner = math.prod(self.kernel[dim + 1 :])
            place = self.start(dim, left) + left // inner * self.steps[dim][2]
            left = left % inner
            total = total * self.sizes[dim] + place
        return total


def possible_winners(op: Op, device: torch.device) -> torch.Tensor:
    """A position of x in every window of a `max_pool_grad`: the first that is not padding. (The last windows of
    `ceil_mode` may have no other.)"""
    places = Places(op, op.input_shape, op.dy.type.shape)
    taps = torch.zeros(op.dy.type.shape, dtype=torch.int64, device=device)
    for dim, (size, (_, _, dilation)) in enumerate(zip(op.kernel, places.steps, strict=True)):
        taps = taps * size + places.start(dim, taps).neg().clamp(min=0).add(dilation - 1) // dilation
    return places.in_x(taps) if op.indices.type.element is I64 else taps.to(torch.uint8)


@step.op
class MaxPoolGrad(MaxWindow):
    """dx of max pooling: each element of dy goes to the element that won its window."""

    dy = Operand(FloatTensor)
    indices = Operand(IntTensor, "positions counted through x, or through the window where they are bytes")
    dx = Result()
    input_shape = Attr("ints", "the shape of x")

    @staticmethod
    def infer(dy, indices, input_shape, **window):
        return dy.with_shape(input_shape)

    @staticmethod
    def evaluate(op):
        lift = Lifted(op)
        shape, args = lift.shape(op.input_shape), _max_arguments(op, lift)
        three = len(op.kernel) == 3
        back = aten.max_pool3d_with_indices_backward if three else aten.max_pool2d_with_indices_backward
        places = None if op.indices.type.element is I64 else Places(op, op.input_shape, op.dy.type.shape)

        def run(dy, indices):
            dy, indices = lift.up(dy), lift.up(indices if places is None else places.in_x(indices))
            return lift.down(back.default(dy, blank(dy, shape), *args, indices))

        return run

    @staticmethod
    def element(k, op, index):
        return max_gradient(k, op, index)


# ---- average ---------------------------------------------------------------------------------------------------------


class AverageWindow(Pool):
    """The attributes of average pooling."""

    kernel = Attr("ints", "size of the window, per spatial dimension")
    stride = Attr("ints", "step of the window, per spatial dimension")
    padding = Attr("ints", "zeros on both sides, per spatial dimension")
    ceil_mode = Attr("bool", "whether a last, partial window counts", False)
    count_include_pad = Attr("bool", "whether padding counts in the divisor", True)
    divisor_override = Attr("int", "what to divide by instead of the count", optional=True)


def _average_arguments(op: Op, lift: Lifted) -> tuple:
    return (
        lift.window(op.kernel, 1),
        lift.window(op.stride, 1),
        lift.window(op.padding, 0),
        op.ceil_mode,
        op.count_include_pad,
        op.divisor_override,
    )


@step.op
class AvgPool(AverageWindow):
    """The mean of each window."""

    x = Operand(FloatTensor)
    y = Result()

    @staticmethod
    def infer(x, kernel, stride, padding, ceil_mode, count_include_pad, divisor_override):
        return x.with_shape(pooled_shape(x, kernel, stride, padding, (1,) * len(kernel), ceil_mode))

    @staticmethod
    def check(op):
        return "the divisor must not be zero" if op.divisor_override == 0 else check_window(op, op.x.type)

    @staticmethod
    def evaluate(op):
        lift = Lifted(op)
        args = _average_arguments(op, lift)
        pool = aten.avg_pool3d if len(op.kernel) == 3 else aten.avg_pool2d
        return lambda x: lift.down(pool.default(lift.up(x), *args))

    @staticmethod
    def element(k, op, index):
        return average(k, op, index)

    @staticmethod
    def derivative(b, op, dy):
        options = {k: op.attributes.get(k) for k in AverageWindow.attribute_fields}
        if sees_everything(op):
            return [spread_evenly(b, dy, op.x.type.shape, op.divisor_override)]
        return [b.avg_pool_grad(dy, input_shape=op.x.type.shape, **options)]

    @staticmethod
    def flops(op):
        return op.y.type.size * math.prod(op.kernel)


def sees_everything(op: Op) -> bool:
    """Whether there is one window and all of x lies in it."""
    sizes = zip(op.x.type.shape[-len(op.kernel) :], op.y.type.shape[-len(op.kernel) :], strict=True)
    fits = all(out == 1 and n <= kernel for (n, out), kernel in zip(sizes, op.kernel, strict=True))
    return fits and not any(op.padding)


def spread_evenly(b, dy, shape: tuple[int, ...], divisor: int | None = None):
    """The gradient of a mean over all spatial dimensions. It is divided before it is repeated: that is no work."""
    spatial = [n for n, kept in zip(shape, dy.type.shape, strict=True) if n != kept]
    return b.broadcast_to(b.div(dy, float(divisor or math.prod(spatial))), shape)


@step.op
class AvgPoolGrad(AverageWindow):
    """dx of average pooling: each element of dy is spread over its window."""

    dy = Operand(FloatTensor)
    dx = Result()
    input_shape = Attr("ints", "the shape of x")

    @staticmethod
    def infer(dy, input_shape, **window):
        return dy.with_shape(input_shape)

    @staticmethod
    def evaluate(op):
        lift = Lifted(op)
        shape, args = lift.shape(op.input_shape), _average_arguments(op, lift)
        back = aten.avg_pool3d_backward if len(op.kernel) == 3 else aten.avg_pool2d_backward

        def run(dy):
            dy = lift.up(dy)
            return lift.down(back.default(dy, blank(dy, shape), *args))

        return run

    @staticmethod
    def element(k, op, index):
        return average_gradient(k, op, index)

    @staticmethod
    def flops(op):
        return op.dy.type.size * math.prod(op.kernel)


@step.op
class AdaptiveAvgPool(Pool):
    """The mean of windows that give the result its size: of n into m, window i runs from i n / m to (i + 1) n / m."""

    x = Operand(FloatTensor)
    y = Result()
    size = Attr("ints", "spatial size of the result")

    @staticmethod
    def infer(x, size):
        return x.with_shape((*x.shape[: len(x.shape) - len(size)], *size))

    @staticmethod
    def check(op):
        n = len(op.size)
        fits = 1 <= n <= 3 and op.x.type.rank in (n + 1, n + 2)
        return None if fits else "windows have one to three dimensions, and x one or two more"

    @staticmethod
    def evaluate(op):
        lift = Lifted(op)
        size = lift.window(op.size, 1)
        pool = aten.adaptive_avg_pool3d if len(op.size) == 3 else aten.adaptive_avg_pool2d
        return lambda x: lift.down(pool.default(lift.up(x), size))

    @staticmethod
    def derivative(b, op, dy):
        shape = op.x.type.shape
        if all(s == 1 for s in op.size):  # a mean over everything, for eager too
            return [spread_evenly(b, dy, shape)]
        return [b.adaptive_avg_pool_grad(dy, size=op.size, input_shape=shape)]

    @staticmethod
    def expand(b, op):
        n, shape = len(op.size), op.x.type.shape
        lead = len(shape) - n
        if any(d % s for d, s in zip(shape[lead:], op.size, strict=True)):
            return uneven_windows(b, op)
        split = [part for d, s in zip(shape[lead:], op.size, strict=True) for part in (s, d // s)]
        dims = tuple(lead + 2 * i + 1 for i in range(n))
        return b.mean(b.reshape_to(op.x, (*shape[:lead], *split)), dims=dims)

    @staticmethod
    def flops(op):
        return op.x.type.size


def uneven_windows(b, op: Op):
    """Adaptive pooling where windows differ in size: means of slices, joined, one dimension after the other."""
    y = op.x
    lead = y.type.rank - len(op.size)
    for offset, size in enumerate(op.size):
        dim, length = lead + offset, y.type.shape[lead + offset]
        parts = []
        for i in range(size):
            start, end = i * length // size, -(-(i + 1) * length // size)
            parts.append(b.mean(b.slice(y, dim=dim, start=start, end=end), dims=(dim,), keepdim=True))
        y = b.concat(parts, dim=dim)
    return y


@step.op
class AdaptiveAvgPoolGrad(Pool):
    """dx of adaptive average pooling."""

    dy = Operand(FloatTensor)
    dx = Result()
    size = Attr("ints", "spatial size of dy")
    input_shape = Attr("ints", "the shape of x")

    @staticmethod
    def infer(dy, size, input_shape):
        return dy.with_shape(input_shape)

    @staticmethod
    def evaluate(op):
        lift = Lifted(op)
        shape = lift.shape(op.input_shape)
        back = aten._adaptive_avg_pool3d_backward if len(op.size) == 3 else aten._adaptive_avg_pool2d_backward

        def run(dy):
            dy = lift.up(dy)
            return lift.down(back.default(dy, blank(dy, shape)))

        return run

    @staticmethod
    def element(k, op, index):
        return adaptive_gradient(k, op, index)

    @staticmethod
    def flops(op):
        return op.dx.type.size
