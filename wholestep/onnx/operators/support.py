"""What the rules of many operators share: unsigned integers, old ways of broadcasting, axes, known vectors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ...dialects.step import StepBuilder, ir_dtype
from ...ir.core import Value
from ...ir.types import I64, ScalarType, TensorType
from ..context import Context, Tensor
from ..errors import OnnxLimitError

F32, F64 = ir_dtype(torch.float32), ir_dtype(torch.float64)
I8, I16, I32 = ir_dtype(torch.int8), ir_dtype(torch.int16), ir_dtype(torch.int32)
U8, U64 = ir_dtype(torch.uint8), ir_dtype(torch.uint64)
#: unsigned types that torch stores but hardly computes with: sums are computed in 64 bits and cut off
STORED = ("ui16", "ui32", "ui64")
TOP_BIT = -(1 << 63)


def wide(b: StepBuilder, x: Value) -> Value:
    """Integers that torch cannot compute with as 64-bit ones of the same bits."""
    return b.cast_to(x, I64) if x.type.element.text in STORED else x


def ordered(b: StepBuilder, x: Value) -> Value:
    """`wide`, but so that larger numbers stay larger: the upper half of the 64-bit ones would turn negative."""
    return b.bit_xor(b.cast_to(x, I64), TOP_BIT) if x.type.element is U64 else wide(b, x)


def computed(c: Context, function: Callable[..., Value], *values: Value) -> Value:
    """A function of integers or floats in a type that torch computes with, and back to the type of the first."""
    element = values[0].type.element
    return c.b.cast_to(function(*(wide(c.b, v) for v in values)), element)


def compared(c: Context, function: Callable[..., Value], *values: Value) -> Value:
    """A function that only compares numbers and picks among them (maximum, sort), in a type with the same order."""
    element = values[0].type.element
    out = function(*(ordered(c.b, v) for v in values))
    if element is U64:
        out = c.b.bit_xor(out, TOP_BIT)
    return c.b.cast_to(out, element)


def lined_up(c: Context, x: Tensor, y: Tensor) -> tuple[Value, Value]:
    """Two operands ready to be broadcast; before opset 7 attributes say whether and at which axis it is done."""
    if "broadcast" not in c.schema.attributes:
        return x.value, y.value
    if not c.attribute("broadcast"):
        if x.shape != y.shape:
            raise c.wrong(f"its inputs have shapes {list(x.shape)} and {list(y.shape)}, and it does not broadcast")
        return x.value, y.value
    axis = c.attribute("axis")
    if axis is None:
        return x.value, y.value
    axis = c.axis(axis, x.rank)
    if axis + y.rank > x.rank:
        raise c.wrong(f"its second input of rank {y.rank} does not fit at axis {axis} of rank {x.rank}")
    return x.value, c.b.reshape_to(y.value, (*y.shape, *(1,) * (x.rank - axis - y.rank)))


def axes_of(c: Context, axes: Tensor | None, rank: int) -> tuple[int, ...] | None:
    """Axes from the input or, in older versions, the attribute `axes`; None where none are given."""
    given = c.attribute("axes") if axes is None else c.ints(axes, "axes")
    if given is None:
        return None
    found = tuple(c.axis(a, rank) for a in given)
    if len(set(found)) != len(found):
        raise c.wrong(f"its axes {list(given)} name a dimension twice")
    return found


def positions(b: StepBuilder, size: int, start: int = 0) -> Value:
    """0, 1, 2, ... as int64."""
    return b.iota(start=start, stride=1, type=TensorType((size,), I64))


def along(b: StepBuilder, x: Value, axis: int, rank: int) -> Value:
    """A vector as a tensor of some rank that varies along one axis."""
    return b.reshape_to(x, tuple(x.type.size if i == axis else 1 for i in range(rank)))


def vector(c: Context, numbers: Any, element: ScalarType = I64) -> Value:
    """Known numbers as a value."""
    from ...dialects.step import torch_dtype

    return c.constant(torch.as_tensor(numbers).to(torch_dtype(element))).value


def from_front(c: Context, index: Tensor, size: int) -> Value:
    """Indices as int64 counted from the front: negative ones count from the end."""
    if index.constant is not None:
        known = index.constant.to(torch.int64)
        if known.numel() and not bool(((known >= -size) & (known < size)).all()):
            raise c.wrong(f"an index is out of range for a dimension of size {size}")
        return c.constant(torch.where(known < 0, known + size, known)).value
    value = c.b.cast_to(index.value, I64)
    return c.b.select(c.b.lt(value, 0), c.b.add(value, size), value)


def cut(b: StepBuilder, x: Value, dim: int, start: int, end: int, stride: int = 1) -> Value:
    """A slice; x itself where it is all of it."""
    if start == 0 and end >= x.type.shape[dim] and stride == 1:
        return x
    return b.slice(x, dim=dim, start=start, end=end, stride=stride)


def joined(b: StepBuilder, parts: Sequence[Value], dim: int) -> Value:
    return b.concat(list(parts), dim=dim) if len(parts) > 1 else parts[0]


def one_number(b: StepBuilder, x: Value) -> Value:
    """A tensor of one element as a scalar."""
    return b.reshape_to(x, ())


def clamped(b: StepBuilder, x: Value, low: Any = None, high: Any = None) -> Value:
    """x within bounds; at a bound the gradient passes, as torch.clamp has it."""
    if low is not None:
        x = b.select(b.lt(x, low), low, x)
    if high is not None:
        x = b.select(b.gt(x, high), high, x)
    return x


def root(b: StepBuilder, x: Value, order: float) -> Value:
    """The order-th root."""
    return x if order == 1 else b.sqrt(x) if order == 2 else b.pow(x, 1 / order)


def power(b: StepBuilder, x: Value, order: float) -> Value:
    """|x| to the power of order."""
    return b.abs(x) if order == 1 else b.mul(x, x) if order == 2 else b.pow(b.abs(x), float(order))


def limited(c: Context, count: int, most: int | None = None) -> int:
    """A number of the file by which something is repeated at import, if it is not too large."""
    if count > (c.walk.limits.rounds if most is None else most):
        raise OnnxLimitError(f"{c.where}: {count} repetitions are more than are written out")
    return count


#: the longest axis for which places and weights are computed at import
LONGEST = 1 << 24
