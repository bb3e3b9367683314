"""Functions of one number, activations among them."""

from __future__ import annotations

import math
from typing import Any

from ...ir.types import BOOL, I64
from ..context import Context, Tensor
from . import operator
from .support import clamped, computed, one_number

#: operators that are a step op by another name
UNARY = {
    "Abs": "abs", "Neg": "neg", "Exp": "exp", "Log": "log", "Sqrt": "sqrt", "Reciprocal": "reciprocal", "Sin": "sin",
    "Cos": "cos", "Tanh": "tanh", "Sigmoid": "sigmoid", "Relu": "relu", "Sign": "sign",
}  # fmt: skip
ROUNDING = {"Floor": "floor", "Ceil": "ceil", "Round": "round"}
#: functions that step ops do not have
BY_ATEN = ("Tan", "Asin", "Acos", "Atan", "Sinh", "Cosh", "Asinh", "Acosh", "Atanh")


@operator(*UNARY)
def unary(c: Context, x: Tensor):
    if x.element.text in ("ui16", "ui32", "ui64"):
        if c.name == "Abs":
            return x.value
        if c.name == "Sign":
            return c.b.cast_to(c.b.cast_to(c.b.ne(c.b.cast_to(x.value, I64), 0), I64), x.element)
    return getattr(c.b, UNARY[c.name])(x.value)


@operator(*ROUNDING)
def rounding(c: Context, x: Tensor):
    return getattr(c.b, ROUNDING[c.name])(x.value)


@operator(*BY_ATEN)
def by_aten(c: Context, x: Tensor):
    return c.opaque(f"aten.{c.name.lower()}.default", x.value)


@operator("Erf")
def erf(c: Context, x: Tensor):
    if not x.is_float:
        raise c.unsupported("the error function of integers is not supported", "cast the input to float")
    return c.b.erf(x.value)


@operator("Clip", until=10)
def clip_by_attributes(c: Context, x: Tensor):
    return clamped(c.b, x.value, c.attribute("min"), c.attribute("max"))


@operator("Clip", since=11)
def clip(c: Context, x: Tensor, low: Tensor | None = None, high: Tensor | None = None):
    b = c.b

    def bound(value: Any) -> Any:
        return None if value is None else one_number(b, value)

    if x.element.text == "ui64":
        raise c.unsupported("64-bit unsigned numbers are not supported", "cast to int64")
    bounds = [None if v is None else v.value for v in (low, high)]
    return computed(
        c, lambda value, *given: clamped(b, value, *restore(bounds, [bound(v) for v in given])),
        x.value, *(v for v in bounds if v is not None),
    )  # fmt: skip


def restore(places: list[Any], values: list[Any]) -> list[Any]:
    """Values in the places that are not None."""
    rest = iter(values)
    return [None if p is None else next(rest) for p in places]


# ---- activations -----------------------------------------------------------------------------------------------------


def softplus(b: Any, x: Any) -> Any:
    """log(1 + exp(x)), which neither overflows nor has a gradient that is not a number."""
    return b.add(b.select(b.gt(x, 0.0), x, 0.0), b.log1p(b.exp(b.neg(b.abs(x)))))


def elu(b: Any, x: Any, alpha: float, scale: float = 1.0, input_scale: float = 1.0) -> Any:
    low = b.select(b.le(x, 0.0), x, 0.0)  # the exponential of what is not used must stay finite
    negative = b.mul(b.expm1(low if input_scale == 1 else b.mul(low, input_scale)), alpha * scale)
    return b.select(b.le(x, 0.0), negative, x if scale == 1 else b.mul(x, scale))


@operator("Elu")
def elu_(c: Context, x: Tensor):
    return elu(c.b, x.value, c.attribute("alpha"))


@operator("Selu")
def selu(c: Context, x: Tensor):
    return elu(c.b, x.value, c.attribute("alpha"), c.attribute("gamma"))


@operator("Celu")
def celu(c: Context, x: Tensor):
    alpha = c.attribute("alpha")
    if alpha == 0:
        raise c.wrong("its alpha is zero, and it divides by it")
    return elu(c.b, x.value, alpha, 1.0, 1 / alpha)


@operator("LeakyRelu")
def leaky_relu(c: Context, x: Tensor):
    return c.b.select(c.b.lt(x.value, 0.0), c.b.mul(x.value, c.attribute("alpha")), x.value)


@operator("PRelu")
def prelu(c: Context, x: Tensor, slope: Tensor):
    b, weight = c.b, slope.value
    if c.version < 7 and slope.rank == 1 and slope.size > 1:  # one slope per channel
        weight = b.reshape_to(weight, (slope.size, *(1,) * (x.rank - 2)))
    if x.element.text == "ui64":
        raise c.unsupported("64-bit unsigned numbers are not supported", "cast to int64")
    return computed(c, lambda p, q: b.select(b.lt(p, 0), b.mul(p, q), p), x.value, weight)


@operator("Softplus")
def softplus_(c: Context, x: Tensor):
    return softplus(c.b, x.value)


@operator("Softsign")
def softsign(c: Context, x: Tensor):
    return c.b.div(x.value, c.b.add(c.b.abs(x.value), 1.0))


@operator("Mish")
def mish(c: Context, x: Tensor):
    return c.b.mul(x.value, c.b.tanh(softplus(c.b, x.value)))


@operator("Gelu")
def gelu(c: Context, x: Tensor):
    kind = c.attribute("approximate")
    if kind not in ("none", "tanh"):
        raise c.wrong(f"its approximation {kind!r} is neither none nor tanh")
    return c.b.gelu(x.value, approximate=kind)


@operator("Swish")
def swish(c: Context, x: Tensor):
    alpha = c.attribute("alpha")
    if alpha == 1:
        return c.b.silu(x.value)
    return c.b.mul(x.value, c.b.sigmoid(c.b.mul(x.value, alpha)))


@operator("HardSigmoid")
def hard_sigmoid(c: Context, x: Tensor):
    line = c.b.add(c.b.mul(x.value, c.attribute("alpha")), c.attribute("beta"))
    return clamped(c.b, line, 0.0, 1.0)


@operator("HardSwish")
def hard_swish(c: Context, x: Tensor):
    line = c.b.add(c.b.mul(x.value, 1 / 6), 0.5)
    return c.b.mul(x.value, clamped(c.b, line, 0.0, 1.0))


@operator("Shrink")
def shrink(c: Context, x: Tensor):
    if not x.is_float:
        raise c.unsupported("integers are not supported", "cast the input to float")
    b, limit, bias = c.b, c.attribute("lambd"), c.attribute("bias")
    low, high = b.add(x.value, bias), b.sub(x.value, bias)
    return b.select(b.lt(x.value, -limit), low, b.select(b.gt(x.value, limit), high, 0.0))


@operator("ThresholdedRelu")
def thresholded_relu(c: Context, x: Tensor):
    return c.b.select(c.b.gt(x.value, c.attribute("alpha")), x.value, 0.0)


# ---- questions -------------------------------------------------------------------------------------------------------


@operator("IsNaN")
def is_nan(c: Context, x: Tensor):
    return c.b.isnan(x.value)


@operator("IsInf")
def is_inf(c: Context, x: Tensor):
    b = c.b
    above, below = b.eq(x.value, math.inf), b.eq(x.value, -math.inf)
    if not c.attribute("detect_positive"):
        above = b.full(False, x.shape, BOOL)
    return b.bit_or(above, below) if c.attribute("detect_negative") else above
