"""Reductions along dimensions, running sums, and the order ops (sort, top-k)."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import torch

from ...ir.core import Op
from ...ir.dialect import Attr, FloatTensor, Operand, Result
from ...ir.types import BOOL, I64
from .base import LABELS, Roles, StepOp, step, torch_dtype


def reduced_shape(shape: tuple[int, ...], dims: tuple[int, ...], keepdim: bool) -> tuple[int, ...]:
    """The shape after reducing `dims` (counted from the front)."""
    if keepdim:
        return tuple(1 if i in dims else d for i, d in enumerate(shape))
    return tuple(d for i, d in enumerate(shape) if i not in dims)


def restore(b, value, op):
    """A reduced value (result or its gradient) with the reduced dimensions back as size one."""
    return b.reshape_to(value, reduced_shape(op.x.type.shape, op.dims, True))


class Reduction(StepOp):
    """y = reduction of x over `dims`; an empty tuple reduces nothing."""

    precision = "high"
    torch_function: ClassVar[Callable[..., object] | None] = None
    reduction = "sum"
    x = Operand()
    y = Result()
    dims = Attr("ints", "dimensions to reduce, counted from the front")
    keepdim = Attr("bool", "whether reduced dimensions stay with size one", False)

    @staticmethod
    def infer(x, dims, keepdim):
        return x.with_shape(reduced_shape(x.shape, dims, keepdim))

    @staticmethod
    def check(op):
        return None if all(0 <= d < op.x.type.rank for d in op.dims) else "a dimension is out of range"

    @staticmethod
    def flops(op: Op) -> int:
        return op.x.type.size

    @staticmethod
    def evaluate(op: Op):
        function, dims, keepdim = op.definition.torch_function, op.dims, op.keepdim  # type: ignore[attr-defined]
        if not dims:
            return lambda x: x
        return lambda x: function(x, dims, keepdim)

    @staticmethod
    def element(k, op, index):
        rest, home, where = iter(index), k.home(op.x), []
        for dim, place in enumerate(home):
            if dim in op.dims:
                where.append(place)
                if op.keepdim:
                    next(rest)
            else:
                where.append(next(rest))
        reduced = [home[d] for d in op.dims]
        x = k.at(op.x, where)
        return k.reduce(x, op.definition.reduction, reduced, index, op.y.type.element)

    @staticmethod
    def roles(op: Op) -> Roles:
        labels = LABELS[: op.x.type.rank]
        kept = "".join(
            " " if i in op.dims and op.keepdim else c for i, c in enumerate(labels) if op.keepdim or i not in op.dims
        )
        return Roles((labels,), (kept,), reduction=op.definition.reduction)  # type: ignore[attr-defined]


@step.op
class Sum(Reduction):
    """Sum over dimensions."""

    converts = True

    @staticmethod
    def evaluate(op):
        dims, keepdim, dtype = op.dims, op.keepdim, None
        if not dims:
            return lambda x: x
        dtype = torch_dtype(op.y.type.element)
        return lambda x: torch.sum(x, dims, keepdim, dtype=dtype)

    @staticmethod
    def derivative(b, op, dy):
        return [b.broadcast_to(restore(b, dy, op), op.x.type.shape)]


@step.op
class Mean(Reduction):
    """Mean over dimensions."""

    converts = True
    x = Operand(FloatTensor)
    reduction = "mean"
    element = None  # type: ignore[assignment]  # by its expansion

    @staticmethod
    def evaluate(op):
        dims, keepdim, dtype = op.dims, op.keepdim, torch_dtype(op.y.type.element)
        if not dims:
            return lambda x: x
        return lambda x: torch.mean(x, dims, keepdim, dtype=dtype)

    @staticmethod
    def derivative(b, op, dy):
        count = max(1, op.x.type.size) // max(1, op.y.type.size)
        return [b.broadcast_to(b.div(restore(b, dy, op), float(count)), op.x.type.shape)]

    @staticmethod
    def expand(b, op):
        count = max(1, op.x.type.size) // max(1, op.y.type.size)
        return b.div(b.sum(op.x, dims=op.dims, keepdim=op.keepdim), float(count))


def _extremum_gradient(b, op, dy):
    """The gradient is shared equally among the elements that attain the extremum."""
    mask = b.cast(b.eq(op.x, restore(b, op.y, op)), dtype=dy.type.element)
    count = b.sum(mask, dims=op.dims, keepdim=True)
    return [b.mul(b.div(mask, count), restore(b, dy, op))]


@step.op
class Amax(Reduction):
    """Largest element."""

    precision = "follow"
    torch_function = staticmethod(torch.amax)
    reduction = "max"
    derivative = staticmethod(_extremum_gradient)


@step.op
class Amin(Reduction):
    """Smallest element."""

    precision = "follow"
    torch_function = staticmethod(torch.amin)
    reduction = "min"
    derivative = staticmethod(_extremum_gradient)


class BooleanReduction(Reduction):
    """A reduction of booleans."""

    precision = "follow"
    differentiable = False

    @staticmethod
    def evaluate(op):
        return Reduction.evaluate(op) if op.dims else lambda x: x != 0

    @staticmethod
    def infer(x, dims, keepdim):
        return x.with_shape(reduced_shape(x.shape, dims, keepdim)).with_element(BOOL)


@step.op
class Any(BooleanReduction):
    """Whether any element is true (or not zero)."""

    torch_function = staticmethod(torch.any)
    reduction = "or"


@step.op
class All(BooleanReduction):
    """Whether every element is true (or not zero)."""

    torch_function = staticmethod(torch.all)
    reduction = "and"


@step.op
class Prod(Reduction):
    """Product over one dimension."""

    converts = True
    reduction = "prod"

    @staticmethod
    def check(op):
        return None if len(op.dims) == 1 else "prod reduces exactly one dimension"

    @staticmethod
    def evaluate(op):
        (dim,), keepdim = op.dims, op.keepdim
        dtype = torch_dtype(op.y.type.element)
        return lambda x: torch.prod(x, dim, keepdim, dtype=dtype)


@step.op
class Logsumexp(Reduction):
    """log(sum(exp(x))) without overflow."""

    x = Operand(FloatTensor)
    torch_function = staticmethod(torch.logsumexp)
    reduction = "logsumexp"
    element = None  # type: ignore[assignment]  # by its expansion

    @staticmethod
    def derivative(b, op, dy):
        return [b.mul(restore(b, dy, op), b.exp(b.sub(op.x, restore(b, op.y, op))))]

    @staticmethod
    def expand(b, op):
        top = b.amax(op.x, dims=op.dims, keepdim=True)
        top = b.select(b.eq(b.abs(top), float("inf")), 0.0, top)
        total = b.log(b.sum(b.exp(b.sub(op.x, top)), dims=op.dims, keepdim=True))
        return b.reshape_to(b.add(total, top), op.y.type.shape)


@step.op
class Variance(Reduction):
    """Mean squared distance from the mean, over (count - correction)."""

    x = Operand(FloatTensor)
    reduction = "var"
    element = None  # type: ignore[assignment]  # by its expansion
    correction = Attr("number", "subtracted from the count", 1)
    exact_zero = Attr("bool", "whether equal numbers must give exactly 0, however their mean is rounded", False)

    @staticmethod
    def infer(x, dims, keepdim, correction, exact_zero):  # type: ignore[override]
        return x.with_shape(reduced_shape(x.shape, dims, keepdim))

    @staticmethod
    def evaluate(op):
        dims, keepdim, correction = op.dims, op.keepdim, op.correction
        if not dims:  # torch would take an empty list for every dimension
            return lambda x: torch.var(x.unsqueeze(-1), -1, correction=correction)
        return lambda x: torch.var(x, dims, correction=correction, keepdim=keepdim)

    @staticmethod
    def derivative(b, op, dy):
        count = max(1, op.x.type.size) // max(1, op.y.type.size)
        left = count - op.correction
        centred = b.sub(op.x, b.mean(op.x, dims=op.dims, keepdim=True))
        # torch divides by zero here too when nothing is left after the correction
        scale = 2.0 / left if left else float("inf")
        return [b.mul(b.mul(restore(b, dy, op), scale), centred)]

    @staticmethod
    def expand(b, op):
        count = max(1, op.x.type.size) // max(1, op.y.type.size)
        centred = b.sub(op.x, b.mean(op.x, dims=op.dims, keepdim=True))
        total = b.sum(b.mul(centred, centred), dims=op.dims, keepdim=op.keepdim)
        if op.exact_zero and count > 1:  # (torch.var keeps a running mean, which equal numbers leave alone)
            highest, lowest = (f(op.x, dims=op.dims, keepdim=op.keepdim) for f in (b.amax, b.amin))
            total = b.select(b.eq(b.sub(highest, lowest), 0), 0.0, total)
        return b.div(total, float(max(0, count - op.correction)))


class ArgReduction(StepOp):
    """Index of an extremum along one dimension."""

    differentiable = False
    torch_function: ClassVar[Callable[..., object] | None] = None
    x = Operand()
    y = Result()
    dim = Attr("int", "dimension")
    keepdim = Attr("bool", "whether the dimension stays with size one", False)

    @staticmethod
    def infer(x, dim, keepdim):
        return x.with_shape(reduced_shape(x.shape, (dim,), keepdim)).with_element(I64)

    @staticmethod
    def evaluate(op):
        function, dim, keepdim = op.definition.torch_function, op.dim, op.keepdim
        return lambda x: function(x, dim, keepdim)

    @staticmethod
    def flops(op):
        return op.x.type.size


@step.op
class Argmax(ArgReduction):
    """Index of the largest element."""

    torch_function = staticmethod(torch.argmax)


@step.op
class Argmin(ArgReduction):
    """Index of the smallest element."""

    torch_function = staticmethod(torch.argmin)


@step.op
class Cumsum(StepOp):
    """Running sum along one dimension."""

    precision = "high"
    converts = True
    x = Operand()
    y = Result()
    dim = Attr("int", "dimension")

    @staticmethod
    def infer(x, dim):
        return x

    @staticmethod
    def evaluate(op):
        dim, dtype = op.dim, torch_dtype(op.y.type.element)
        return lambda x: torch.cumsum(x, dim, dtype=dtype)

    @staticmethod
    def derivative(b, op, dy):
        if op.x.type.rank == 0:
            return [dy]
        return [b.flip(b.cumsum(b.flip(dy, dims=(op.dim,)), dim=op.dim), dims=(op.dim,))]

    @staticmethod
    def roles(op):
        labels = LABELS[: op.x.type.rank]
        return Roles((labels,), (labels,), whole=labels[op.dim] if labels else "")


@step.op
class Topk(StepOp):
    """The k largest or smallest elements along one dimension, and where they were. With k = size this is a sort."""

    x = Operand()
    values = Result()
    indices = Result()
    k = Attr("int", "how many")
    dim = Attr("int", "dimension")
    largest = Attr("bool", "largest or smallest", True)
    ordered = Attr("bool", "whether the values come in order", True)

    @staticmethod
    def infer(x, k, dim, largest, ordered):
        y = x.with_shape((*x.shape[:dim], k, *x.shape[dim + 1 :])) if x.shape else x
        return y, y.with_element(I64)

    @staticmethod
    def evaluate(op):
        k, dim, largest, ordered = op.k, op.dim, op.largest, op.ordered
        return lambda x: tuple(torch.topk(x, k, dim, largest, ordered))

    @staticmethod
    def derivative(b, op, dy, _):
        if dy is None:
            return [None]
        if not op.x.type.shape:
            return [dy]
        return [b.scatter_add(b.zeros_like(op.x), op.indices, dy, dim=op.dim)]


@step.op
class Sort(StepOp):
    """x in order along one dimension, and where each element was."""

    x = Operand()
    values = Result()
    indices = Result()
    dim = Attr("int", "dimension")
    descending = Attr("bool", "largest first", False)
    stable = Attr("bool", "equal elements keep their order", True)

    @staticmethod
    def infer(x, dim, descending, stable):
        return x, x.with_element(I64)

    @staticmethod
    def evaluate(op):
        dim, descending, stable = op.dim, op.descending, op.stable
        return lambda x: tuple(torch.sort(x, dim=dim, descending=descending, stable=stable))

    @staticmethod
    def derivative(b, op, dy, _):
        if dy is None:
            return [None]
        if not op.x.type.shape:
            return [dy]
        return [b.scatter_add(b.zeros_like(op.x), op.indices, dy, dim=op.dim)]
