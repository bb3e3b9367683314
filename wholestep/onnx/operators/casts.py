"""Changes of element type, to types that a wider one carries (float8, float4, int4) too; quantised numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from onnx import TensorProto

from ...ir.core import Value
from ...ir.types import BOOL, I64, ScalarType
from ..context import Context, Tensor
from ..dtypes import CARRIED, element_of, type_name
from . import operator
from .support import F32, I32, along, cut, one_number, wide


@dataclass(frozen=True)
class Small:
    """A small float: bits of the mantissa, exponent of its smallest normal number, largest number."""

    mantissa: int
    lowest: int
    largest: float
    #: what is too large becomes this where it does not saturate
    beyond: float = math.nan
    negative_zero: bool = True
    #: whether it has no other choice than to saturate
    always: bool = False


SMALL: dict[int, Small] = {
    TensorProto.FLOAT8E4M3FN: Small(3, -6, 448.0),
    TensorProto.FLOAT8E4M3FNUZ: Small(3, -7, 240.0, negative_zero=False),
    TensorProto.FLOAT8E5M2: Small(2, -14, 57344.0, beyond=math.inf),
    TensorProto.FLOAT8E5M2FNUZ: Small(2, -15, 57344.0, negative_zero=False),
    TensorProto.FLOAT4E2M1: Small(1, 0, 6.0, always=True),
    TensorProto.FLOAT6E2M3: Small(3, 0, 7.5, always=True),
    TensorProto.FLOAT6E3M2: Small(2, -2, 28.0, always=True),
}
#: integers by bits: number of bits, whether signed
INTEGERS: dict[int, tuple[int, bool]] = {
    TensorProto.INT2: (2, True), TensorProto.UINT2: (2, False), TensorProto.INT4: (4, True),
    TensorProto.UINT4: (4, False), TensorProto.INT8: (8, True), TensorProto.UINT8: (8, False),
    TensorProto.INT16: (16, True), TensorProto.UINT16: (16, False),
}  # fmt: skip


@operator("Cast")
def cast(c: Context, x: Tensor):
    kind = c.attribute("to")
    if c.version < 6:
        kind = TensorProto.DataType.Value(kind) if isinstance(kind, str) else kind
    return converted(c, x, kind, bool(c.attribute("saturate", 1)), c.attribute("round_mode", "up"))


@operator("CastLike")
def cast_like(c: Context, x: Tensor, like: Tensor):
    return converted(c, x, like.type, bool(c.attribute("saturate", 1)), c.attribute("round_mode", "up"))


def converted(c: Context, x: Tensor, kind: int, saturate: bool = True, round_mode: str = "up") -> Tensor:
    """A tensor as one of another ONNX type, by the rules of Cast."""
    b, element = c.b, element_of(kind)
    if element is None:
        raise c.unsupported(f"a cast to {type_name(kind)} is not supported", "keep text out of the graph")
    if kind == x.type:
        return x
    if element.kind == "complex" or x.element.kind == "complex":
        raise c.unsupported("casts of complex numbers are not supported", "use a real tensor of pairs")
    value = x.value
    if kind in SMALL or kind == TensorProto.FLOAT8E8M0:
        value = b.cast_to(wide(b, value), F32) if x.element.bits != 64 or not x.is_float else value
        if kind in SMALL:
            value = to_small(c, value, SMALL[kind], saturate)
        else:
            value = to_powers(c, value, saturate, round_mode)
        return c.tensor(b.cast_to(value, F32), kind)
    if kind in CARRIED:
        bits, signed = INTEGERS[kind]
        value = b.cast_to(value, I64)
        offset = 1 << (bits - 1) if signed else 0  # the lower bits, as a number of that type
        value = b.sub(b.bit_and(b.add(value, offset), (1 << bits) - 1), offset)
        return c.tensor(b.cast_to(value, element), kind)
    if element is BOOL:
        return c.tensor(b.ne(wide(b, value), 0), kind)
    if x.is_float and element.kind != "float" and element.bits < 64:
        value = b.cast_to(value, I64)  # then the lower bits of that
    return c.tensor(b.cast_to(value, element, rounds=True), kind)


def to_small(c: Context, x: Value, small: Small, saturate: bool) -> Value:
    """Numbers rounded to those of a small float, ties to even."""
    b = c.b
    saturate = saturate or small.always
    bounded = b.select(b.gt(x, 2 * small.largest), 2 * small.largest, x)
    bounded = b.select(b.lt(bounded, -2 * small.largest), -2 * small.largest, bounded)
    _, exponent = c.opaque("aten.frexp.Tensor", bounded)  # of a mantissa between 1/2 and 1
    exponent = b.maximum(b.sub(exponent, 1), small.lowest)
    unit = b.exp2(b.cast_to(b.sub(exponent, small.mantissa), x.type.element))
    rounded = b.mul(b.round(b.div(bounded, unit)), unit)
    above, below = b.gt(rounded, small.largest), b.lt(rounded, -small.largest)
    beyond = small.largest if saturate else small.beyond
    rounded = b.select(below, -beyond, b.select(above, beyond, rounded))
    return rounded if small.negative_zero else b.add(rounded, 0.0)


def to_powers(c: Context, x: Value, saturate: bool, round_mode: str) -> Value:
    """Numbers rounded to powers of two: float8e8m0, which has nothing else."""
    b = c.b
    mantissa, exponent = c.opaque("aten.frexp.Tensor", x)
    limits = {"up": 0.5, "down": 1.0, "nearest": 0.75}
    if round_mode not in limits:
        raise c.wrong(f"{round_mode!r} is not a way of rounding")
    limit = limits[round_mode]
    up = b.ge(mantissa, limit) if round_mode == "nearest" else b.gt(mantissa, limit)
    exponent = b.select(up, exponent, b.sub(exponent, 1))
    exponent = b.select(b.eq(x, 0.0), -127, exponent)
    exponent = b.select(b.eq(b.abs(x), math.inf), 127, exponent)
    bounded = b.minimum(b.maximum(exponent, -127), 127)
    out = b.mul(b.exp2(b.cast_to(b.add(bounded, 1), x.type.element)), 0.5)
    bad = b.bit_or(b.isnan(x), b.lt(x, 0.0))
    if not saturate:
        bad = b.bit_or(bad, b.bit_or(b.ne(exponent, bounded), b.bit_or(b.eq(x, 0.0), b.eq(x, math.inf))))
    return b.select(bad, math.nan, out)


@operator("BitCast")
def bit_cast(c: Context, x: Tensor):
    kind = c.attribute("to")
    element = element_of(kind)
    if kind == x.type:
        return x
    if element is None or kind in CARRIED or x.type in CARRIED:
        raise c.unsupported(f"bits as {type_name(kind)} are not supported", "use types of at least 8 bits")
    if width(element) != width(x.element):
        raise c.wrong(f"{type_name(x.type)} and {type_name(kind)} differ in size")
    from ...dialects.step import torch_dtype

    return c.tensor(c.opaque("aten.view.dtype", x.value, torch_dtype(element)), kind)


def width(element: ScalarType) -> int:
    """Bits of a number in memory: a truth value takes a byte."""
    return 8 if element is BOOL else element.bits


# ---- quantised numbers -----------------------------------------------------------------------------------------------


def spread(c: Context, scale: Value, shape: tuple[int, ...], block: int = 0) -> Value:
    """A scale or zero point for each element: one number, one along the axis, or one per block along the axis."""
    b = c.b
    if scale.type.size == 1 and not block:
        return one_number(b, scale)
    axis = c.axis(c.attribute("axis", 1), len(shape))
    if not block:
        if scale.type.shape != (shape[axis],):
            raise c.wrong(f"a scale of shape {list(scale.type.shape)} does not fit axis {axis} of {list(shape)}")
        return along(b, scale, axis, len(shape))
    have = scale.type.shape
    if len(have) != len(shape) or have[axis] * block < shape[axis] or (have[axis] - 1) * block >= shape[axis]:
        raise c.wrong(f"a scale of shape {list(have)} does not fit blocks of {block} of {list(shape)}")
    apart = b.broadcast_to(b.unsqueeze(scale, axis + 1), (*have[: axis + 1], block, *have[axis + 1 :]))
    whole = b.reshape_to(apart, (*have[:axis], have[axis] * block, *have[axis + 1 :]))
    return cut(b, whole, axis, 0, shape[axis])


def to_integers(c: Context, x: Value, zero: Value | None, kind: int) -> Tensor:
    """Floats rounded, shifted by the zero point (of type int32) and bounded."""
    b, (bits, signed) = c.b, INTEGERS[kind]
    low, high = (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if signed else (0, (1 << bits) - 1)
    element = element_of(kind)
    assert element is not None
    value = b.round(x)
    if zero is not None:
        value = b.add(value, b.cast_to(zero, value.type.element))
    value = b.minimum(b.maximum(value, float(low)), float(high))
    return c.tensor(b.cast_to(b.cast_to(value, I32), element), kind)


@operator("QuantizeLinear")
def quantize(c: Context, x: Tensor, scale: Tensor, zero: Tensor | None = None):
    b, block = c.b, c.attribute("block_size", 0)
    kind = c.attribute("output_dtype") or (TensorProto.UINT8 if zero is None else zero.type)
    kind = zero.type if zero is not None else kind
    precision = element_of(c.attribute("precision")) if c.attribute("precision") else scale.element
    if precision is None or precision.kind != "float":
        precision = F32
    computing = F32 if precision.bits < 32 else precision
    # half precision divides in its own type, and what is rounded to integers then fits 32 bits
    ratio = b.div(b.cast_to(x.value, precision), spread(c, b.cast_to(scale.value, precision), x.shape, block))
    ratio = b.cast_to(ratio, computing)
    if kind in INTEGERS:
        shift = None if zero is None else spread(c, b.cast_to(zero.value, I32), x.shape, block)
        return to_integers(c, ratio, shift, kind)
    if kind in SMALL:
        if zero is not None:
            ratio = b.add(ratio, spread(c, b.cast_to(zero.value, computing), x.shape, block))
        return c.tensor(b.cast_to(to_small(c, ratio, SMALL[kind], bool(c.attribute("saturate", 1))), F32), kind)
    raise c.unsupported(f"quantising to {type_name(kind)} is not supported", "use int8 or uint8")


@operator("DequantizeLinear")
def dequantize(c: Context, x: Tensor, scale: Tensor, zero: Tensor | None = None):
    b, block = c.b, c.attribute("block_size", 0)
    kind = c.attribute("output_dtype") or scale.type
    element = element_of(kind)
    if element is None or kind in CARRIED or element.kind != "float":
        raise c.unsupported(f"dequantising to {type_name(kind)} is not supported", "use float")
    value = x.value if x.is_float else b.cast_to(wide(b, x.value), I64)
    if zero is not None:
        shift = zero.value if x.is_float else b.cast_to(wide(b, zero.value), I64)
        value = b.sub(value, spread(c, shift, x.shape, block))
    factor = spread(c, b.cast_to(scale.value, element), x.shape, block)
    return c.tensor(b.mul(b.cast_to(value, element), factor), kind)


def shifted(c: Context, x: Tensor, zero: Tensor | None, element: Any, shape: tuple[int, ...] | None = None) -> Value:
    """Integers less their zero point, in a wider type; `shape` is that of the zero point where it is not one number."""
    b, value = c.b, c.b.cast_to(wide(c.b, x.value), element)
    if zero is None:
        return value
    shift = b.cast_to(wide(b, zero.value), element)
    if zero.size == 1:
        shift = one_number(b, shift)
    elif shape is not None:
        shift = b.reshape_to(shift, shape)
    return b.sub(value, shift)
