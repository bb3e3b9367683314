"""Arithmetic with numpy's broadcasting, on floats and on integers of every width."""

from __future__ import annotations

from functools import reduce

from ...ir.core import Value
from ...ir.types import I64
from ..context import Context, Tensor
from . import operator
from .support import F64, STORED, TOP_BIT, U64, compared, computed, lined_up, one_number, wide


@operator("Add")
def add(c: Context, x: Tensor, y: Tensor):
    return computed(c, c.b.add, *lined_up(c, x, y))


@operator("Sub")
def sub(c: Context, x: Tensor, y: Tensor):
    return computed(c, c.b.sub, *lined_up(c, x, y))


@operator("Mul")
def mul(c: Context, x: Tensor, y: Tensor):
    return computed(c, c.b.mul, *lined_up(c, x, y))


@operator("Div")
def div(c: Context, x: Tensor, y: Tensor):
    left, right = lined_up(c, x, y)
    if x.is_float:
        return c.b.div(left, right)
    if x.element is U64:
        return unsigned_division(c, left, right)[0]
    return computed(c, lambda p, q: c.b.div(p, q, rounding="trunc"), left, right)


@operator("Mod")
def mod(c: Context, x: Tensor, y: Tensor):
    if x.element is U64:
        return unsigned_division(c, x.value, y.value)[1]
    rounding = "trunc" if c.attribute("fmod") else "floor"
    return computed(c, lambda p, q: c.b.rem(p, q, rounding=rounding), x.value, y.value)


def unsigned_division(c: Context, x: Value, y: Value) -> tuple[Value, Value]:
    """Quotient and remainder of 64-bit unsigned numbers by signed arithmetic: halved first, then put right by one."""
    b = c.b
    x, y = b.cast_to(x, I64), b.cast_to(y, I64)
    large = b.lt(y, 0)  # of 2^63 or more: goes into anything at most once
    halved = b.bit_and(b.div(x, 2, rounding="floor"), (1 << 63) - 1)
    rough = b.mul(b.div(halved, b.select(large, 1, y), rounding="trunc"), 2)
    rough = b.select(large, 0, rough)
    rest = b.sub(x, b.mul(rough, y))
    more = b.ge(b.bit_xor(rest, TOP_BIT), b.bit_xor(y, TOP_BIT))
    quotient = b.add(rough, b.cast_to(more, I64))
    return b.cast_to(quotient, U64), b.cast_to(b.sub(x, b.mul(quotient, y)), U64)


@operator("Pow")
def pow(c: Context, x: Tensor, y: Tensor):
    b = c.b
    base, exponent = lined_up(c, x, y)
    if x.is_float:
        if y.constant is not None and y.size == 1:
            # a number, so that the gradient is that of a power and needs no logarithm
            number = b.full(float(y.constant.reshape(()).item()), (1,) * max(0, y.rank - x.rank), x.element)
            return b.pow(base, number if y.rank > x.rank else one_number(b, number))
        return b.pow(base, b.cast_to(wide(b, exponent), x.element))
    if y.is_float:
        return b.cast_to(b.pow(b.cast_to(wide(b, base), F64), b.cast_to(exponent, F64)), x.element)
    wider = I64 if {x.element.text, y.element.text} & set(STORED) or x.element is not y.element else x.element
    return b.cast_to(b.pow(b.cast_to(base, wider), b.cast_to(exponent, wider)), x.element)


@operator("Max")
def maximum(c: Context, *xs: Tensor):
    return compared(c, lambda *values: reduce(c.b.maximum, values), *(x.value for x in xs))


@operator("Min")
def minimum(c: Context, *xs: Tensor):
    return compared(c, lambda *values: reduce(c.b.minimum, values), *(x.value for x in xs))


@operator("Sum")
def sum_(c: Context, *xs: Tensor):
    return reduce(c.b.add, (x.value for x in xs))


@operator("Mean")
def mean(c: Context, *xs: Tensor):
    return c.b.div(reduce(c.b.add, (x.value for x in xs)), float(len(xs)))


@operator("BitwiseAnd")
def bitwise_and(c: Context, x: Tensor, y: Tensor):
    return computed(c, c.b.bit_and, x.value, y.value)


@operator("BitwiseOr")
def bitwise_or(c: Context, x: Tensor, y: Tensor):
    return computed(c, c.b.bit_or, x.value, y.value)


@operator("BitwiseXor")
def bitwise_xor(c: Context, x: Tensor, y: Tensor):
    return computed(c, c.b.bit_xor, x.value, y.value)


@operator("BitwiseNot")
def bitwise_not(c: Context, x: Tensor):
    return computed(c, c.b.bit_not, x.value)


@operator("BitShift")
def bit_shift(c: Context, x: Tensor, y: Tensor):
    """Shifts; by a negative number, or by as many bits as there are, only what comes in from the side is left."""
    b = c.b
    left, given = b.cast_to(x.value, I64), b.cast_to(y.value, I64)
    inside = b.bit_and(b.ge(given, 0), b.lt(given, x.element.bits))
    by = b.select(inside, given, 0)
    if c.attribute("direction") == "LEFT":
        return b.cast_to(b.select(inside, c.opaque("aten.bitwise_left_shift.Tensor", left, by), 0), x.element)
    out = c.opaque("aten.bitwise_right_shift.Tensor", left, by)
    if x.element is not U64:
        return b.cast_to(b.select(inside, out, b.select(b.lt(left, 0), b.full(-1, (), I64), 0)), x.element)
    ones = b.full(1, by.type.shape, I64)  # zeros come in, not copies of the top bit
    kept = b.sub(c.opaque("aten.bitwise_left_shift.Tensor", ones, b.sub(64, b.maximum(by, 1))), 1)
    out = b.select(b.eq(by, 0), left, b.bit_and(out, kept))
    return b.cast_to(b.select(inside, out, 0), x.element)
