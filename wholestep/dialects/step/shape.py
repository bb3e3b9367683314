"""Shape ops: they move elements and compute nothing. Most cost nothing where the reader can follow strides."""

from __future__ import annotations

import torch

from ...ir.core import Op
from ...ir.dialect import Attr, Operand, Result
from ...ir.types import TensorType
from .base import LABELS, Roles, StepOp, step


class Shape(StepOp):
    """Common rules of shape ops: no arithmetic."""

    moves = True
    x = Operand()
    y = Result()

    @staticmethod
    def flops(op: Op) -> int:
        return 0


@step.op
class Reshape(Shape):
    """The same elements in row-major order under another shape."""

    views = True
    shape = Attr("ints", "the new shape, with as many elements")

    @staticmethod
    def infer(x, shape):
        return x.with_shape(shape)

    @staticmethod
    def check(op):
        return None if op.x.type.size == op.y.type.size else "the number of elements changes"

    @staticmethod
    def evaluate(op):
        shape = op.shape
        return lambda x: x.reshape(shape)

    @staticmethod
    def element(k, op, index):
        return k.at(op.x, reshaped(k, index, op.shape, op.x.type.shape))

    @staticmethod
    def derivative(b, op, dy):
        return [b.reshape_to(dy, op.x.type.shape)]


@step.op
class Transpose(Shape):
    """Dimensions in another order: dimension i of the result is dimension order[i] of x."""

    views = True
    order = Attr("ints", "a permutation of the dimensions")

    @staticmethod
    def infer(x, order):
        return x.with_shape(tuple(x.shape[i] for i in order))

    @staticmethod
    def check(op):
        return None if sorted(op.order) == list(range(op.x.type.rank)) else "order is not a permutation"

    @staticmethod
    def evaluate(op):
        order = op.order
        return lambda x: x.permute(order)

    @staticmethod
    def element(k, op, index):
        return k.at(op.x, [index[op.order.index(i)] for i in range(len(index))])

    @staticmethod
    def derivative(b, op, dy):
        back = sorted(range(len(op.order)), key=op.order.__getitem__)
        return [b.transpose(dy, order=tuple(back))]

    @staticmethod
    def roles(op):
        labels = LABELS[: op.x.type.rank]
        return Roles((labels,), ("".join(labels[i] for i in op.order),))


@step.op
class Broadcast(Shape):
    """x repeated along new leading dimensions and along dimensions of size one."""

    views = True
    shape = Attr("ints", "the new shape")

    @staticmethod
    def infer(x, shape):
        return x.with_shape(shape)

    @staticmethod
    def check(op):
        have, want = op.x.type.shape, op.shape
        fits = len(have) <= len(want) and all(h in (1, w) for h, w in zip(have[::-1], want[::-1], strict=False))
        return None if fits else f"{have} does not broadcast to {want}"

    @staticmethod
    def evaluate(op):
        shape = op.shape
        return lambda x: x.expand(shape)

    @staticmethod
    def element(k, op, index):
        have = op.x.type.shape
        index = index[len(index) - len(have) :]
        return k.at(op.x, [k.nowhere if n == 1 else place for place, n in zip(index, have, strict=True)])

    @staticmethod
    def derivative(b, op, dy):
        return [b.sum_to(dy, op.x.type.shape)]

    @staticmethod
    def roles(op):
        labels = LABELS[: len(op.shape)]
        lead = len(op.shape) - op.x.type.rank
        spec = "".join(
            " " if d == 1 and op.shape[lead + i] != 1 else labels[lead + i] for i, d in enumerate(op.x.type.shape)
        )
        return Roles((spec,), (labels,))


@step.op
class Slice(Shape):
    """Every stride-th index from start up to end along one dimension."""

    views = True
    dim = Attr("int", "dimension")
    start = Attr("int", "first index")
    end = Attr("int", "one past the last index")
    stride = Attr("int", "distance between indices", 1)

    @staticmethod
    def infer(x, dim, start, end, stride):
        count = max(0, -(-(end - start) // stride))
        return x.with_shape((*x.shape[:dim], count, *x.shape[dim + 1 :]))

    @staticmethod
    def check(op):
        size = op.x.type.shape[op.dim]
        return None if 0 <= op.start <= size and op.end <= size and op.stride >= 1 else "slice out of range"

    @staticmethod
    def evaluate(op):
        index = (slice(None),) * op.dim + (slice(op.start, op.end, op.stride),)
        return lambda x: x[index]

    @staticmethod
    def element(k, op, index):
        place = k.shifted(k.scaled(index[op.dim], op.stride), op.start)
        return k.at(op.x, [*index[: op.dim], place, *index[op.dim + 1 :]])

    @staticmethod
    def derivative(b, op, dy):
        place = dict(dim=op.dim, start=op.start, end=op.end, stride=op.stride)
        return [b.slice_grad(dy, size=op.x.type.shape[op.dim], **place)]

    @staticmethod
    def roles(op):
        labels = LABELS[: op.x.type.rank]
        return Roles((labels,), (labels,), whole=labels[op.dim])


@step.op
class SliceGrad(Shape):
    """Zeros everywhere but x on a slice: the adjoint of a slice."""

    dim = Attr("int", "dimension")
    start = Attr("int", "first index")
    end = Attr("int", "one past the last index")
    stride = Attr("int", "distance between indices", 1)
    size = Attr("int", "size of the dimension in the result")

    @staticmethod
    def infer(x, dim, start, end, stride, size):
        return x.with_shape((*x.shape[:dim], size, *x.shape[dim + 1 :]))

    @staticmethod
    def evaluate(op):
        shape, args = op.y.type.shape, (op.dim, op.start, op.end, op.stride)
        return lambda x: torch.ops.aten.slice_backward.default(x, shape, *args)

    @staticmethod
    def element(k, op, index):
        zero = k.constant(0, op.y.type.element)
        return on_slice(k, op, index, zero)

    @staticmethod
    def derivative(b, op, dy):
        return [b.slice(dy, dim=op.dim, start=op.start, end=op.end, stride=op.stride)]

    @staticmethod
    def expand(b, op):
        return b.slice_update(b.zeros_like(op.y), op.x, dim=op.dim, start=op.start, end=op.end, stride=op.stride)

    @staticmethod
    def roles(op):
        return Slice.roles(op)


@step.op
class SliceUpdate(StepOp):
    """`base` with one slice replaced by x."""

    moves = True
    base = Operand()
    x = Operand()
    y = Result()
    dim = Attr("int", "dimension")
    start = Attr("int", "first index")
    end = Attr("int", "one past the last index")
    stride = Attr("int", "distance between indices", 1)

    @staticmethod
    def infer(base, x, dim, start, end, stride):
        return base

    @staticmethod
    def flops(op):
        return 0

    @staticmethod
    def evaluate(op):
        args = (op.dim, op.start, op.end, op.stride)
        return lambda base, x: torch.ops.aten.slice_scatter.default(base, x, *args)

    @staticmethod
    def element(k, op, index):
        return on_slice(k, op, index, k.at(op.base, index))

    @staticmethod
    def derivative(b, op, dy):
        place = dict(dim=op.dim, start=op.start, end=op.end, stride=op.stride)
        dx = b.slice(dy, **place)
        return [b.slice_update(dy, b.zeros_like(dx), **place), dx]


@step.op
class Concat(StepOp):
    """Tensors joined along one dimension."""

    moves = True
    xs = Operand(variadic=True)
    y = Result()
    dim = Attr("int", "dimension")

    @staticmethod
    def infer(xs, dim):
        first = xs[0]
        return first.with_shape((*first.shape[:dim], sum(x.shape[dim] for x in xs), *first.shape[dim + 1 :]))

    @staticmethod
    def flops(op):
        return 0

    @staticmethod
    def check(op):
        first, dim = op.operands[0].type, op.dim
        for value in op.operands[1:]:
            t = value.type
            if t.element is not first.element or t.rank != first.rank:
                return "operands differ in element type or rank"
            if any(i != dim and a != b for i, (a, b) in enumerate(zip(t.shape, first.shape, strict=True))):
                return "operands differ in a dimension that is not joined"
        return None

    @staticmethod
    def evaluate(op):
        dim = op.dim
        return lambda *xs: torch.cat(xs, dim)

    @staticmethod
    def element(k, op, index):
        place, at, end = index[op.dim], op.y.type.shape[op.dim], None
        for x in reversed(op.operands):
            at, behind = at - x.type.shape[op.dim], at
            if not x.type.size:
                continue
            here = k.below(place, behind)
            if here is False or k.below(place, at) is True:
                continue
            mine = k.part(place, at, behind, op.y.type.shape[op.dim])
            value = k.at(x, [*index[: op.dim], mine, *index[op.dim + 1 :]])
            end = value if end is None or here is True else k.choose(here, value, end)
        return end

    @staticmethod
    def derivative(b, op, dy):
        out, at = [], 0
        for x in op.operands:
            size = x.type.shape[op.dim]
            out.append(b.slice(dy, dim=op.dim, start=at, end=at + size))
            at += size
        return out

    @staticmethod
    def roles(op):
        labels = LABELS[: op.y.type.rank]
        return Roles(tuple(labels for _ in op.operands), (labels,), whole=labels[op.dim])


@step.op
class Pad(Shape):
    """A border around x: a constant, or negative widths to cut. Widths are (low, high) per dimension."""

    low = Attr("ints", "elements added before, per dimension")
    high = Attr("ints", "elements added after, per dimension")
    value = Attr("number", "what the border holds", 0.0)

    @staticmethod
    def infer(x, low, high, value):
        return x.with_shape(tuple(d + lo + hi for d, lo, hi in zip(x.shape, low, high, strict=True)))

    @staticmethod
    def evaluate(op):
        widths = [w for lo, hi in zip(op.low[::-1], op.high[::-1], strict=True) for w in (lo, hi)]
        value = op.value
        return lambda x: torch.ops.aten.constant_pad_nd.default(x, widths, value)

    @staticmethod
    def element(k, op, index):
        inside, mine = True, []
        for place, low, n, size in zip(index, op.low, op.x.type.shape, op.y.type.shape, strict=True):
            inside = k.both(inside, k.between(place, low, low + n))
            mine.append(k.part(place, low, low + n, size))
        return k.choose(inside, k.at(op.x, mine), k.constant(op.value, op.y.type.element))

    @staticmethod
    def derivative(b, op, dy):
        if min((*op.low, *op.high), default=0) < 0:
            return [b.pad(dy, low=tuple(-w for w in op.low), high=tuple(-w for w in op.high), value=0.0)]
        for dim, (low, n, full) in enumerate(zip(op.low, op.x.type.shape, dy.type.shape, strict=True)):
            dy = b.slice(dy, dim=dim, start=low, end=low + n) if n != full else dy  # a view
        return [dy]

    @staticmethod
    def roles(op):
        labels = LABELS[: op.x.type.rank]
        touched = "".join(c for c, lo, hi in zip(labels, op.low, op.high, strict=True) if lo or hi)
        return Roles((labels,), (labels,), whole=touched)


@step.op
class Flip(Shape):
    """x with some dimensions reversed."""

    dims = Attr("ints", "dimensions to reverse")

    @staticmethod
    def infer(x, dims):
        return x

    @staticmethod
    def evaluate(op):
        dims = op.dims
        return lambda x: torch.flip(x, dims)

    @staticmethod
    def element(k, op, index):
        shape = op.x.type.shape
        return k.at(
            op.x, [k.shifted(k.scaled(p, -1), shape[d] - 1) if d in op.dims else p for d, p in enumerate(index)]
        )

    @staticmethod
    def derivative(b, op, dy):
        return [b.flip(dy, dims=op.dims)]

    @staticmethod
    def roles(op):
        labels = LABELS[: op.x.type.rank]
        return Roles((labels,), (labels,), whole="".join(labels[d] for d in op.dims))


def reshaped(k, index, shape, wanted):
    """The index into a tensor of shape `wanted` of the element that has `index` under another shape.

    Runs of dimensions with equally many elements are translated on their own.
    """
    if 0 in shape:
        return [k.nowhere] * len(wanted)
    found = []
    i = j = 0
    while i < len(shape) or j < len(wanted):
        first, second, have, want = i, j, 1, 1
        while have != want or (i == first and i < len(shape)) or (j == second and j < len(wanted)):
            if (have <= want or j == len(wanted)) and i < len(shape):
                have, i = have * shape[i], i + 1
            else:
                want, j = want * wanted[j], j + 1
        here, place = [], k.joined(index[first:i], shape[first:i])
        for n in reversed(wanted[second + 1 : j]):
            place, rest = k.divided(place, n)
            here.append(rest)
        found += [place, *reversed(here)] if second < j else []
    return found


def on_slice(k, op, index, other):
    """The element of op.x where the index is on its slice, `other` elsewhere."""
    behind = op.start + (op.x.type.shape[op.dim] - 1) * op.stride + 1
    place = k.part(index[op.dim], op.start, behind, op.results[0].type.shape[op.dim])
    inside = k.between(index[op.dim], op.start, behind)
    if op.stride != 1:
        place, rest = k.quotient(place, op.stride)
        inside = k.both(inside, rest)
    value = k.at(op.x, [*index[: op.dim], place, *index[op.dim + 1 :]])
    return k.choose(inside, value, other)


def matrix_of(type: TensorType, dims: tuple[int, ...]) -> int:
    """How many elements lie along these dimensions."""
    size = 1
    for d in dims:
        size *= type.shape[d]
    return size
