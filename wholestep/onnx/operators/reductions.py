"""Reductions along axes, running sums, and the largest elements."""

from __future__ import annotations

import math
from typing import Any

import torch

from ...dialects.step import torch_dtype
from ...ir.core import Value
from ...ir.types import BOOL, I64, ScalarType
from ..context import Context, Tensor
from . import operator
from .support import F32, F64, STORED, TOP_BIT, U64, along, axes_of, compared, computed, cut, ordered, positions

NAMES = (
    "ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceL1", "ReduceL2", "ReduceLogSum",
    "ReduceLogSumExp", "ReduceSumSquare",
)  # fmt: skip


@operator(*NAMES)
def reduction(c: Context, x: Tensor, axes: Tensor | None = None):
    dims = axes_of(c, axes, x.rank)
    if not dims:
        dims = () if c.attribute("noop_with_empty_axes") else tuple(range(x.rank))
    return REDUCTIONS[c.name](c, x.value, tuple(sorted(dims)), bool(c.attribute("keepdims")))


def total(c: Context, x: Value, dims: tuple[int, ...], keep: bool) -> Value:
    b = c.b
    if not dims:
        return x
    if empty(x, dims):
        return b.full(0, kept_shape(x, dims, keep), x.type.element)
    return computed(c, lambda v: b.cast_to(b.sum(v, dims=dims, keepdim=keep), v.type.element), x)


def mean(c: Context, x: Value, dims: tuple[int, ...], keep: bool) -> Value:
    b = c.b
    if not dims:
        return x
    if x.type.element.kind == "float" and not empty(x, dims):
        return b.mean(x, dims=dims, keepdim=keep)
    count = math.prod(x.type.shape[d] for d in dims)
    if count == 0:
        if x.type.element.kind != "float":
            raise c.wrong("integers without elements have no mean")
        return b.full(math.nan, kept_shape(x, dims, keep), x.type.element)
    element = x.type.element
    if element is U64:
        raise c.unsupported("the mean of 64-bit unsigned numbers is not supported", "cast to int64")
    whole = total(c, b.cast_to(x, I64), dims, keep)
    return b.cast_to(b.div(whole, count, rounding="trunc"), element)


def largest(c: Context, x: Value, dims: tuple[int, ...], keep: bool) -> Value:
    return extremum(c, x, dims, keep, "amax")


def smallest(c: Context, x: Value, dims: tuple[int, ...], keep: bool) -> Value:
    return extremum(c, x, dims, keep, "amin")


def extremum(c: Context, x: Value, dims: tuple[int, ...], keep: bool, name: str) -> Value:
    b = c.b
    if not dims:
        return x
    if empty(x, dims):
        low, high = bounds(x.type.element)
        return b.full(low if name == "amax" else high, kept_shape(x, dims, keep), x.type.element)
    if x.type.element is BOOL:
        return getattr(b, "any" if name == "amax" else "all")(x, dims=dims, keepdim=keep)
    return compared(c, lambda v: getattr(b, name)(v, dims=dims, keepdim=keep), x)


def bounds(element: ScalarType) -> tuple[Any, Any]:
    """The smallest and the largest number of a type."""
    if element.kind == "float":
        return -math.inf, math.inf
    if element is BOOL:
        return False, True
    info = torch.iinfo(torch_dtype(element))
    return info.min, info.max


def prod(c: Context, x: Value, dims: tuple[int, ...], keep: bool) -> Value:
    b = c.b
    if not dims:
        return x
    if empty(x, dims):
        return b.full(1, kept_shape(x, dims, keep), x.type.element)

    def run(v: Value) -> Value:
        for dim in reversed(dims):
            v = b.cast_to(b.prod(v, dims=(dim,), keepdim=keep), v.type.element)
        return v

    return computed(c, run, x)


def first_norm(c: Context, x: Value, dims: tuple[int, ...], keep: bool) -> Value:
    return total(c, x if x.type.element.text in STORED else c.b.abs(x), dims, keep)


def sum_of_squares(c: Context, x: Value, dims: tuple[int, ...], keep: bool) -> Value:
    return total(c, computed(c, lambda v: c.b.mul(v, v), x), dims, keep)


def second_norm(c: Context, x: Value, dims: tuple[int, ...], keep: bool) -> Value:
    return in_floats(c, x, lambda v: c.b.sqrt(total(c, c.b.mul(v, v), dims, keep)))


def log_of_sum(c: Context, x: Value, dims: tuple[int, ...], keep: bool) -> Value:
    return in_floats(c, x, lambda v: c.b.log(total(c, v, dims, keep)))


def log_sum_exp(c: Context, x: Value, dims: tuple[int, ...], keep: bool) -> Value:
    def run(v: Value) -> Value:
        if not dims:
            return v
        if empty(v, dims):
            return c.b.full(-math.inf, kept_shape(v, dims, keep), v.type.element)
        if x.type.element.kind != "float":  # as ONNX defines it: the result is cut off, so that every digit counts
            return c.b.log(total(c, c.b.exp(v), dims, keep))
        return c.b.logsumexp(v, dims=dims, keepdim=keep)

    return in_floats(c, x, run)


def in_floats(c: Context, x: Value, run: Any) -> Value:
    """A function of floats; integers go there and back, halves through 32 bits."""
    element = x.type.element
    if element.kind == "float":
        return c.b.cast_to(run(c.b.cast_to(x, F32 if element.bits < 32 else element)), element)
    return c.b.cast_to(run(c.b.cast_to(x, F64)), element)


REDUCTIONS = {
    "ReduceSum": total, "ReduceMean": mean, "ReduceMax": largest, "ReduceMin": smallest, "ReduceProd": prod,
    "ReduceL1": first_norm, "ReduceL2": second_norm, "ReduceLogSum": log_of_sum, "ReduceLogSumExp": log_sum_exp,
    "ReduceSumSquare": sum_of_squares,
}  # fmt: skip


def empty(x: Value, dims: tuple[int, ...]) -> bool:
    return any(x.type.shape[d] == 0 for d in dims)


def kept_shape(x: Value, dims: tuple[int, ...], keep: bool) -> tuple[int, ...]:
    return tuple(1 if i in dims else d for i, d in enumerate(x.type.shape) if keep or i not in dims)


@operator("ArgMax", "ArgMin")
def arg_extremum(c: Context, x: Tensor):
    b = c.b
    axis, keep = c.axis(c.attribute("axis"), x.rank), bool(c.attribute("keepdims"))
    if x.shape[axis] == 0:
        raise c.wrong("nothing has no largest or smallest element")
    value = ordered(b, x.value)
    name = c.name.lower()
    if not c.attribute("select_last_index"):
        return getattr(b, name)(value, dim=axis, keepdim=keep)
    found = getattr(b, name)(b.flip(value, dims=(axis,)), dim=axis, keepdim=keep)
    return b.sub(x.shape[axis] - 1, found)


@operator("TopK", until=9)
def topk_by_attribute(c: Context, x: Tensor):
    return topk(c, x, c.attribute("k"), True)


@operator("TopK", since=10)
def topk_by_input(c: Context, x: Tensor, k: Tensor):
    return topk(c, x, int(c.number(k, "k")), bool(c.attribute("largest", 1)))


def topk(c: Context, x: Tensor, k: int, largest: bool) -> list[Value]:
    """By a stable sort: of equal elements the first comes first."""
    b, axis = c.b, c.axis(c.attribute("axis"), x.rank)
    if not 0 <= k <= x.shape[axis]:
        raise c.wrong(f"it wants {k} of {x.shape[axis]} elements")
    value = ordered(b, x.value)
    values, indices = b.sort(value, dim=axis, descending=largest, stable=True)
    if x.element is U64:
        values = b.bit_xor(values, TOP_BIT)
    values = b.cast_to(values, x.element)
    return [cut(b, values, axis, 0, k), cut(b, indices, axis, 0, k)]


@operator("CumSum")
def cumsum(c: Context, x: Tensor, axis: Tensor):
    return running(c, x, axis, 0, lambda v, dim: c.b.cast_to(c.b.cumsum(v, dim=dim), v.type.element))


@operator("CumProd")
def cumprod(c: Context, x: Tensor, axis: Tensor):
    def run(v: Value, dim: int) -> Value:
        return c.opaque("aten.cumprod.default", v, dim, dtype=torch_dtype(v.type.element))

    return running(c, x, axis, 1, run)


def running(c: Context, x: Tensor, axis: Tensor, start: int, function: Any) -> Value:
    b, dim = c.b, c.axis(int(c.number(axis, "axis")), x.rank)
    size = x.shape[dim]

    def run(value: Value) -> Value:
        if c.attribute("reverse"):
            value = b.flip(value, dims=(dim,))
        if c.attribute("exclusive") and size:
            value = cut(b, value, dim, 0, size - 1)
            low = tuple(int(i == dim) for i in range(x.rank))
            value = b.pad(value, low=low, high=(0,) * x.rank, value=float(start) if x.is_float else start)
        value = function(value, dim)
        return b.flip(value, dims=(dim,)) if c.attribute("reverse") else value

    return computed(c, run, x.value)


# ---- softmax and its like --------------------------------------------------------------------------------------------


def as_rows(c: Context, x: Tensor) -> tuple[Value, int]:
    """The input and the axis of a softmax; before opset 13 it was flattened to a matrix whose rows are normalised."""
    axis = c.axis(c.attribute("axis"), x.rank) if x.rank else 0
    if c.version >= 13:
        return x.value, axis
    return c.b.reshape_to(x.value, (math.prod(x.shape[:axis]), math.prod(x.shape[axis:]))), 1


@operator("Softmax")
def softmax(c: Context, x: Tensor):
    value, axis = as_rows(c, x)
    return c.b.reshape_to(c.b.softmax(value, dim=axis), x.shape)


@operator("LogSoftmax")
def log_softmax(c: Context, x: Tensor):
    value, axis = as_rows(c, x)
    return c.b.reshape_to(c.b.log_softmax(value, dim=axis), x.shape)


@operator("Hardmax")
def hardmax(c: Context, x: Tensor):
    b = c.b
    value, axis = as_rows(c, x)
    if x.size == 0:
        return x.value
    first = b.argmax(value, dim=axis, keepdim=True)
    place = along(b, positions(b, value.type.shape[axis]), axis, value.type.rank)
    return b.reshape_to(b.cast_to(b.eq(place, first), x.element), x.shape)
