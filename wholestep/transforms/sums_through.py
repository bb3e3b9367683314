"""`sums_through`: sums over a gradient, such as those for biases, from what it is computed from.

    keys      the sum of dK over positions is 0: attention does not change when all keys get the same vector added
    values    the sum of dV over positions is that of dO: the probabilities of a position sum up to 1
    products  the sum of A W over rows is (sum of A over rows) W

Of attention's input projections, those of keys and values then have their bias gradients without a look at theirs: one
is zero, the other is that of the output projection's bias times its weight. (Queries have no such rule.) A sum is
looked at through views, casts and concatenations. Sums are in another order, and gradients that are zero on paper,
which rounding made small numbers, are zero.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from ..dialects.step import StepBuilder, constant_value
from ..dialects.step.attention import AttentionGrad
from ..dialects.step.contraction import Contract, parse_spec
from ..dialects.step.pointwise import Cast, Mul
from ..dialects.step.reductions import Sum
from ..dialects.step.shape import Concat, Reshape, Slice, Transpose
from ..dialects.step.softmax import SoftmaxGrad
from ..dialects.step.support import wide
from ..ir.core import Op, Value
from ..ir.types import ScalarType, TensorType
from .opportunity import Change, Place, Transformation, register_transformation
from .parts import Dimensions, Part, left, regrouped

#: how many times as many bytes as what is read instead a gradient must have
FEWER = 2
#: bytes that must be saved, unless a sum is zero: they are worth two or three small kernels more, and products take
#: smaller sums along by the clock (`wide_products.py`), which can no longer be where a part of them is summed
LEAST = 28 << 20


@dataclass(frozen=True, slots=True)
class Total:
    """A way to a sum: bytes that are read for it, and what makes it, without the dimensions that are gone."""

    read: int
    make: Callable[[StepBuilder], Value]
    is_zero: bool = False
    #: whether it reads the tensor itself; why, where there is more to say
    plain: bool = False
    why: str = ""


#: earlier sums by what they are of
Known = dict[tuple[Value, Dimensions], Op]


@dataclass(frozen=True, slots=True)
class Search:
    """What a sum may be made of, and in which type."""

    element: ScalarType
    known: Known

    def total(self, value: Value, dims: Dimensions) -> Total:
        """The best way to a sum of a value that is found."""
        if not value.type.size:
            return self.plain(value, dims, "")
        there = self.known.get(under(value, dims))
        if there is not None and there.result.type.element.bits >= self.element.bits:
            made, shape = there.result, shape_of(dims)
            return Total(0, lambda b: b.cast_to(b.reshape_to(made, shape), self.element))
        rule = None if value.op is None else RULES.get(value.op.definition)
        found = "" if rule is None else rule(self, value, dims)
        return self.plain(value, dims, found) if isinstance(found, str) else found

    def plain(self, value: Value, dims: Dimensions, why: str) -> Total:
        rows = tuple(i for i, d in enumerate(dims) if not stays(d))
        type = TensorType(shape_of(dims), self.element)
        return Total(value.type.bytes, lambda b: b.sum(value, dims=rows, result_types=[type]), plain=True, why=why)

    def zero(self, dims: Dimensions) -> Total:
        return Total(0, lambda b: b.full(0.0, shape_of(dims), self.element), is_zero=True)

    def onward(
        self, inner: Total, dims: Dimensions, then: Callable[[StepBuilder, Value], Value] = lambda b, x: x
    ) -> Total | str:
        """The sum of what an op makes, by that of what the op reads."""
        if inner.is_zero or inner.plain:
            return self.zero(dims) if inner.is_zero else inner.why
        return replace(inner, make=lambda b: shaped(b, then(b, inner.make(b)), shape_of(dims)))

    def uncut(self, value: Value, dims: Dimensions) -> Total | str:
        """A sum over parts of dimensions, such as heads that share one: over them last, when little is left."""
        whole = tuple((Part(math.prod(p.size for p in d), False),) if is_cut(d) else d for d in dims)
        parts = [p for d in dims if stays(d) for p in d]

        def then(b: StepBuilder, x: Value) -> Value:
            split = b.reshape_to(x, tuple(p.size for p in parts))
            return b.sum(split, dims=tuple(i for i, p in enumerate(parts) if p.gone))

        return self.onward(self.total(value, whole), dims, then)


@register_transformation
class SumsThrough(Transformation):
    """Level 2: a sum, and what makes the tensor that it is of."""

    name = "sums_through"
    level = 2

    def places(self, function: Op) -> Iterator[Place]:
        known: Known = {}
        for op in sums_in(function.regions[0].block):
            found = total_of(op, known)
            saved = op.x.type.bytes - found.read
            if not found.plain:
                small = saved < LEAST and not found.is_zero
                yield op, "it is too small to be worth some small kernels more" if small else Change(bytes=-saved)
            elif found.why:
                yield op, found.why
            remember(op, known)

    def apply(self, op: Op) -> None:
        assert op.parent is not None
        known: Known = {}
        for earlier in sums_in(op.parent):
            if earlier is op:
                break
            remember(earlier, known)
        b = StepBuilder(op.parent, op, op.loc, op.phase)
        hand_out(b, shaped(b, total_of(op, known).make(b), op.result.type.shape), op.result)
        op.erase()


def sums_in(ops: Iterable[Op]) -> Iterator[Op]:
    return (op for op in ops if op.definition is Sum and op.x.type.element.kind == "float" and op.x.type.size)


def total_of(op: Op, known: Known) -> Total:
    return Search(op.result.type.element, known).total(op.x, dims_of(op))


def remember(op: Op, known: Known) -> None:
    known.setdefault(under(op.x, dims_of(op)), op)


def hand_out(b: StepBuilder, new: Value, old: Value) -> None:
    """Puts a value in the place of another. Who reads one part of a concatenation is given the part."""
    if new.op is not None and new.op.definition is Concat:
        parts, at = {}, 0
        for part in new.op.operands:
            parts[at, at + part.type.shape[new.op.dim]] = part
            at += part.type.shape[new.op.dim]
        for user in list(dict.fromkeys(old.uses)):
            if user.definition is not Slice or user.dim != new.op.dim or user.stride != 1:
                continue
            if (user.start, user.end) in parts:
                hand_out(b, parts[user.start, user.end], user.result)
                user.erase()
    for user in list(dict.fromkeys(old.uses)) if constant_value(new) is not None else ():
        if user.definition is Cast:  # a constant in another type is one too: nobody has to make it
            user.result.replace_by(b.full(0.0, new.type.shape, user.dtype))
            user.erase()
    old.replace_by(new)
    if not new.uses and new.op is not None:
        new.op.erase()


def shaped(b: StepBuilder, x: Value, shape: tuple[int, ...]) -> Value:
    """A value in another shape, whatever shape it was given before."""
    while x.op is not None and x.op.definition is Reshape:
        x = x.op.x
    return b.reshape_to(x, shape)


# ---- what is summed over ---------------------------------------------------------------------------------------------


def dims_of(op: Op) -> Dimensions:
    return tuple((Part(n, i in op.dims),) for i, n in enumerate(op.x.type.shape))


def stays(dimension: tuple[Part, ...]) -> bool:
    return not dimension or not all(p.gone for p in dimension)


def shape_of(dims: Dimensions) -> tuple[int, ...]:
    """The shape of a sum."""
    return tuple(left(d) for d in dims if stays(d))


def is_cut(dimension: tuple[Part, ...]) -> bool:
    """Whether a sum is over a part of a dimension."""
    return stays(dimension) and any(p.gone for p in dimension)


def behind(dims: Dimensions, dim: int) -> int:
    """Where a dimension is that stays."""
    return sum(map(stays, dims[:dim]))


def with_size(dims: Dimensions, dim: int, size: int) -> Dimensions:
    return (*dims[:dim], (Part(size, False),), *dims[dim + 1 :])


def turned(op: Op, dims: Dimensions) -> tuple[Dimensions, list[int]]:
    """The dimensions of what a transpose reads, and the order in which those that stay come out of it."""
    inner = tuple(dims[op.order.index(i)] for i in range(len(dims)))
    places = [op.order[i] for i, d in enumerate(dims) if stays(d)]
    return inner, [sorted(places).index(p) for p in places]


def under(value: Value, dims: Dimensions) -> tuple[Value, Dimensions]:
    """What a value is a view or a cast of, as far as what stays is in the same order, and what is summed of that."""
    while value.op is not None and value.op.definition in (Cast, Reshape, Transpose):
        inner: Dimensions | None = dims
        if value.op.definition is Transpose:
            inner, order = turned(value.op, dims)
            if order != sorted(order):
                break
        elif value.op.definition is Reshape:
            inner = regrouped(dims, value.op.x.type.shape)
        if inner is None or value.op.x.type.element.kind != "float":
            break
        value, dims = value.op.x, inner
    return value, tuple(map(joined, dims))


def joined(dimension: tuple[Part, ...]) -> tuple[Part, ...]:
    """Parts that are gone, or stay, beside one another as one."""
    found: list[Part] = []
    for part in dimension:
        if found and found[-1].gone == part.gone:
            found[-1] = Part(found[-1].size * part.size, part.gone)
        elif part.size != 1:
            found.append(part)
    return tuple(found)


# ---- rules: a sum of what an op makes, or why that has to be read ----------------------------------------------------


def of_cast(search: Search, value: Value, dims: Dimensions) -> Total | str:
    x = value.op.x  # type: ignore[union-attr]
    return search.onward(search.total(x, dims), dims) if x.type.element.kind == "float" else ""


def of_reshape(search: Search, value: Value, dims: Dimensions) -> Total | str:
    x = value.op.x  # type: ignore[union-attr]
    inner = regrouped(dims, x.type.shape)
    return "" if inner is None else search.onward(search.total(x, inner), dims)


def of_transpose(search: Search, value: Value, dims: Dimensions) -> Total | str:
    op = value.op
    assert op is not None
    inner, order = turned(op, dims)
    found = search.total(op.x, inner)
    if order == sorted(order):
        return search.onward(found, dims)
    return search.onward(found, dims, lambda b, x: b.transpose(x, order=tuple(order)))


def of_slice(search: Search, value: Value, dims: Dimensions) -> Total | str:
    op = value.op
    assert op is not None
    if any(map(is_cut, dims)):
        return search.uncut(value, dims)
    if not stays(dims[op.dim]):
        return ""
    place = dict(dim=behind(dims, op.dim), start=op.start, end=op.end, stride=op.stride)
    found = search.total(op.x, with_size(dims, op.dim, op.x.type.shape[op.dim]))
    return search.onward(found, dims, lambda b, x: b.slice(x, **place))


def of_concat(search: Search, value: Value, dims: Dimensions) -> Total | str:
    """Part by part, where one of them has a better way."""
    op = value.op
    assert op is not None
    if any(map(is_cut, dims)):
        return search.uncut(value, dims)
    if not stays(dims[op.dim]):
        return ""
    found = [search.total(x, with_size(dims, op.dim, x.type.shape[op.dim])) for x in op.operands]
    if all(part.plain for part in found):
        return "; ".join(dict.fromkeys(part.why for part in found if part.why))
    if all(part.is_zero for part in found):
        return search.zero(dims)
    dim = behind(dims, op.dim)
    return Total(sum(p.read for p in found), lambda b: b.concat([p.make(b) for p in found], dim=dim))


def of_multiple(search: Search, value: Value, dims: Dimensions) -> Total | str:
    """A product with a number."""
    op = value.op
    assert op is not None
    for x, factor in (op.operands, op.operands[::-1]):
        number = constant_value(factor)
        if number is not None and x.type.shape == value.type.shape:
            return search.onward(search.total(x, dims), dims, functools.partial(times, number))
    return ""


def times(number: float, b: StepBuilder, x: Value) -> Value:
    return b.mul(x, number)


def of_softmax_grad(search: Search, value: Value, dims: Dimensions) -> Total | str:
    """The gradient of softmax sums up to zero: adding a number to all that it reads changes nothing."""
    op = value.op
    assert op is not None
    return "" if any(not p.gone for p in dims[op.dim]) else search.zero(dims)


def of_attention_grad(search: Search, value: Value, dims: Dimensions) -> Total | str:
    op = value.op
    assert op is not None
    if value is op.dq:
        return "gradients of queries sum up to nothing that is known before"
    if any(not p.gone for p in dims[-2]):
        return "it is no sum over all positions"
    if value is op.dk:
        return search.zero(dims)
    if op.mask is not None:
        return "probabilities of a position that sees nothing do not sum up to 1, and its mask may hide all from one"
    *heads, length, _ = op.dout.type.shape
    rows = list(dims[:-2])
    if heads != [*value.type.shape[:-2]]:  # neighbouring heads of queries share one of values
        rows[-1] = (*rows[-1], Part(heads[-1] // value.type.shape[-3], True))
    found = search.total(op.dout, (*rows, (Part(length, True),), dims[-1]))
    if not found.plain and FEWER * found.read > value.type.bytes:
        return "what the gradient of attention's result is computed from is not much less to read"
    return search.onward(found, dims) or "the gradient of attention's result would have to be summed up instead"


def of_product(search: Search, value: Value, dims: Dimensions) -> Total | str:
    """Rows that one factor alone has are summed before they are multiplied; that is all, where the factor's are 0."""
    op = value.op
    assert op is not None
    if any(map(is_cut, dims)):
        return search.uncut(value, dims)
    if op.addend is not None:
        return ""
    first, second, out = parse_spec(op.spec)
    rows = {c for c, d in zip(out, dims, strict=True) if not stays(d)}
    for factor, labels, other, others in ((op.lhs, first, op.rhs, second), (op.rhs, second, op.lhs, first)):
        own = rows.difference(others)
        if not own:
            continue
        sizes = zip(labels, factor.type.shape, strict=True)
        found = search.total(factor, tuple((Part(n, c in own),) for c, n in sizes))
        if found.is_zero:
            return search.zero(dims)
        read = found.read + other.type.bytes
        if own == rows and not set(labels) - own - set(others) and FEWER * read <= value.type.bytes:
            labels, out = ("".join(c for c in side if c not in own) for side in (labels, out))
            return Total(read, functools.partial(multiplied, found, other, labels, others, out))
    return ""


def multiplied(rows: Total, matrix: Value, labels: str, others: str, out: str, b: StepBuilder) -> Value:
    """A product that is one pass over a matrix: no library is needed for it, and nothing is rounded on the way."""
    vector = rows.make(b)
    order = tuple(sorted(range(len(labels)), key=lambda i: others.index(labels[i])))
    turned = vector if order == tuple(range(len(labels))) else b.transpose(vector, order=order)
    shape = tuple(n if c in labels else 1 for c, n in zip(others, matrix.type.shape, strict=True))
    element = wide(matrix.type.element)
    product = b.mul(b.cast_to(matrix, element), b.reshape_to(b.cast_to(turned, element), shape))
    total = b.sum(product, dims=tuple(i for i, c in enumerate(others) if c not in out))
    kept = "".join(c for c in others if c in out)
    total = total if kept == out else b.transpose(total, order=tuple(kept.index(c) for c in out))
    return b.cast_to(total, vector.type.element)


RULES: dict[type, Callable[[Search, Value, Dimensions], Total | str]] = {
    Cast: of_cast,
    Reshape: of_reshape,
    Transpose: of_transpose,
    Slice: of_slice,
    Concat: of_concat,
    Mul: of_multiple,
    SoftmaxGrad: of_softmax_grad,
    AttentionGrad: of_attention_grad,
    Contract: of_product,
}
