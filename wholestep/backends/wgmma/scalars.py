"""Functions of numbers as CUDA C++, in f32 with the few instructions of the hardware: right but for the last bits."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass

from ...ir.types import ScalarType
from ..triton.scalars import NoText

COMPARISONS = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
ARITHMETIC = {"add": "+", "sub": "-", "mul": "*"}
#: functions of `product.cu` with its name and an underscore
CALLED = ("exp", "exp2", "sigmoid", "tanh", "erf", "relu", "reciprocal")
#: and of CUDA
KNOWN = {"abs": "fabsf", "floor": "floorf", "ceil": "ceilf", "round": "rintf", "trunc": "truncf", "sqrt": "sqrtf",
         "rsqrt": "rsqrtf", "log": "logf", "log2": "log2f", "log1p": "log1pf", "expm1": "expm1f", "sin": "sinf",
         "cos": "cosf"}  # fmt: skip
FLOATS = ("f32", "bf16", "f16")


@dataclass(frozen=True, slots=True)
class Number:
    """A number of the kernel: its text, and whether it is a truth value."""

    text: str
    truth: bool = False
    value: float | None = None

    @property
    def number(self) -> str:
        return f"({self.text} ? 1.0f : 0.0f)" if self.truth else self.text

    @property
    def condition(self) -> str:
        return self.text if self.truth else f"({self.text} != 0.0f)"


def literal(value: float) -> str:
    value = float(value)
    if math.isnan(value):
        return "as_float(0x7FC00000u)"
    if math.isinf(value):
        return "as_float(0xFF800000u)" if value < 0 else "as_float(0x7F800000u)"
    try:
        (bits,) = struct.unpack("<f", struct.pack("<f", value))
    except OverflowError:
        return literal(math.copysign(math.inf, value))
    return f"{bits.hex()}f" if abs(bits) >= 2.0**-126 or bits == 0 else f"{bits!r}f"


def apply(fn: str, args: list[Number], element: ScalarType, beside_one: bool = False) -> Number:
    """The text of a function. beside_one: `Walk.beside_one` of its result."""
    kind = element.text
    if kind not in (*FLOATS, "i1"):
        raise NoText(f"numbers of type {element} are not computed around this product")
    if fn in COMPARISONS:
        return Number(f"({args[0].number} {COMPARISONS[fn]} {args[1].number})", truth=True)
    if fn == "isnan":
        return Number(f"({args[0].number} != {args[0].number})", truth=True)
    if kind == "i1":
        return truth(fn, args)
    x = [a.number for a in args]
    if fn == "select":
        return Number(f"({args[0].condition} ? {x[1]} : {x[2]})")
    if fn == "cast":
        return Number(x[0], value=args[0].value)
    if fn == "rounded":
        return Number(f"{kind}_rounded({x[0]})")
    if fn in ARITHMETIC:
        return Number(f"({x[0]} {ARITHMETIC[fn]} {x[1]})")
    if fn == "neg":
        return Number(f"(-{x[0]})")
    if fn == "div":
        return Number(f"__fdividef({x[0]}, {x[1]})")
    if fn in ("maximum", "minimum"):
        return Number(f"{'larger' if fn == 'maximum' else 'smaller'}({x[0]}, {x[1]})")
    if fn == "sign":
        return Number(f"({x[0]} > 0.0f ? 1.0f : {x[0]} < 0.0f ? -1.0f : 0.0f)")
    if fn == "pow":
        return power(x[0], args[1].value)
    if fn in ("tanh", "erf") and beside_one:
        return Number(f"{fn}_beside_one({x[0]})")
    if fn in CALLED:
        return Number(f"{fn}_({x[0]})")
    if fn in KNOWN:
        return Number(f"{KNOWN[fn]}({x[0]})")
    raise NoText(f"{fn} is not computed around this product")


def truth(fn: str, args: list[Number]) -> Number:
    a, b = args[0].condition, args[-1].condition
    if fn == "bit_not":
        return Number(f"(!{a})", truth=True)
    if fn in ("bit_and", "mul", "minimum"):
        return Number(f"({a} && {b})", truth=True)
    if fn in ("bit_or", "add", "maximum"):
        return Number(f"({a} || {b})", truth=True)
    if fn == "bit_xor":
        return Number(f"({a} != {b})", truth=True)
    if fn == "cast":
        return Number(a, truth=True)
    raise NoText(f"{fn} of truth values is not computed around this product")


def power(x: str, exponent: float | None) -> Number:
    products = {1.0: x, 2.0: f"({x} * {x})", 3.0: f"({x} * {x} * {x})", -1.0: f"reciprocal_({x})", 0.5: f"sqrtf({x})"}
    if exponent not in products:
        raise NoText("a power that is no small constant is not computed around this product")
    return Number(products[exponent])
