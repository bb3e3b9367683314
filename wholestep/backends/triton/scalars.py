"""Functions of numbers as Triton text, with the results torch gives: NaN, infinities, ties and signs included.

libdevice is used where Triton's own functions are approximations. What needs several lines is a helper function that is
written in front of the kernels that use it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ...dialects.loop import compute_type
from ...ir.types import ScalarType

#: element types, as Triton calls pointers to them and the numbers that are computed from them
POINTERS = {
    "f64": "*fp64",
    "f32": "*fp32",
    "bf16": "*bf16",
    "f16": "*fp16",
    "i64": "*i64",
    "i32": "*i32",
    "i16": "*i16",
    "i8": "*i8",
    "ui8": "*u8",
    "i1": "*i1",
}
NUMBERS = {
    "f64": "tl.float64",
    "f32": "tl.float32",
    "i64": "tl.int64",
    "i32": "tl.int32",
    "i16": "tl.int16",
    "i8": "tl.int8",
    "ui8": "tl.uint8",
    "i1": "tl.int1",
}
NARROW = {"bf16": "tl.bfloat16", "f16": "tl.float16"}
FLOATS = ("tl.float32", "tl.float64")
COMPARISONS = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
LIBDEVICE = ("exp", "exp2", "expm1", "log", "log2", "log1p", "rsqrt", "sin", "cos", "tanh", "erf", "trunc", "atan2",
             "fmod", "pow")  # fmt: skip
#: functions of many instructions
SLOW = {*LIBDEVICE, "sigmoid"} - {"rsqrt", "trunc"}

HELPERS = {
    "larger": "return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)",
    "smaller": "return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)",
    "product": "return a * b",
    "floor_div_int": """q = a // b
    return q - ((a - q * b != 0) & ((a < 0) != (b < 0))).to(q.dtype)""",
    "rem_int": """r = a % b
    return r + tl.where((r != 0) & ((r < 0) != (b < 0)), b, b - b)""",
    "floor_div_float": """r = libdevice.fmod(a, b)
    q = ieee_div(a - r, b)
    q = tl.where((r != 0) & ((b < 0) != (r < 0)), q - 1, q)
    whole = tl.floor(q)
    whole = tl.where(q - whole > 0.5, whole + 1, whole)
    whole = tl.where(q == 0, ieee_div(a, b) * 0, whole)
    return tl.where(b == 0, ieee_div(a, b), whole)""",
    "rem_float": """r = libdevice.fmod(a, b)
    return tl.where((r != 0) & ((b < 0) != (r < 0)), r + b, r)""",
    # Abramowitz and Stegun 7.1.26 with b = exp(-a * a): wrong by up to 6e-7 in f32, as a CPU computes it
    "far_erf": """t = libdevice.fast_dividef(tl.full((), 1.0, tl.float32), 1.0 + 0.3275911 * tl.abs(a))
    p = ((((1.061405429 * t - 1.453152027) * t + 1.421413741) * t - 0.284496736) * t + 0.254829592) * t
    return tl.where(a < 0, p * b - 1.0, 1.0 - p * b)""",
    "ieee_div": """if a.dtype == tl.float32:
        return tl.div_rn(a, b)
    else:
        return a / b""",
}
#: helpers that a helper calls
BEHIND = {"floor_div_float": ("ieee_div",)}


class NoText(Exception):
    """Triton text cannot do this; the message says what."""


@dataclass(frozen=True, slots=True)
class Number:
    """A number of the kernel that is being written: its text and its Triton type."""

    text: str
    type: str
    #: its value, of a constant
    value: float | int | bool | None = None

    def to(self, type: str) -> str:
        if self.type == type:
            return self.text
        if self.value is not None:
            return literal(self.value, type)
        if type == "tl.int1":
            return f"({self.text} != 0)"
        return f"{self.text}.to({type})"


def number_type(element: ScalarType) -> str:
    """The Triton type in which numbers of an element type are computed."""
    text = str(compute_type(element))
    if text not in NUMBERS:
        raise NoText(f"numbers of type {element} are not generated")
    return NUMBERS[text]


def literal(value: float | int | bool, type: str) -> str:
    if type in FLOATS:
        number = float(value)
        text = f'float("{number}")' if math.isinf(number) or math.isnan(number) else repr(number)
    elif type == "tl.int1":
        text = str(int(bool(value)))
    else:
        text = str(int(value))
    return f"tl.full((), {text}, {type})"


def apply(
    fn: str, args: list[Number], element: ScalarType, rough: bool = False, beside_one: bool = False
) -> tuple[Number, tuple[str, ...]]:
    """The text of a function of numbers, and the helpers it calls. beside_one: `Walk.beside_one` of its result."""
    out = number_type(element)
    if fn in COMPARISONS:
        common = wider(args[0].type, args[1].type)
        return Number(f"{args[0].to(common)} {COMPARISONS[fn]} {args[1].to(common)}", "tl.int1"), ()
    if fn == "isnan":
        x = args[0]
        return Number(f"{x.text} != {x.text}", "tl.int1"), ()
    if fn == "select":
        return Number(f"tl.where({args[0].to('tl.int1')}, {args[1].to(out)}, {args[2].to(out)})", out), ()
    if fn == "cast":
        if args[0].type in FLOATS and out == "tl.uint8":  # as a signed number first: what is below 0 wraps around
            return Number(f"{args[0].text}.to(tl.int64).to(tl.uint8)", out), ()
        return Number(args[0].to(out), out, args[0].value if out == args[0].type else None), ()
    if fn == "rounded":
        return Number(f"{args[0].to(out)}.to({NARROW[str(element)]}).to({out})", out), ()
    if out == "tl.int1":
        return boolean(fn, args), ()
    texts = [a.to(out) for a in args]
    if out in FLOATS:
        return floating(fn, texts, args, out, rough, beside_one)
    return whole(fn, texts, out)


def wider(a: str, b: str) -> str:
    order = ["tl.int1", "tl.uint8", "tl.int8", "tl.int16", "tl.int32", "tl.int64", "tl.float32", "tl.float64"]
    return max(a, b, key=order.index)


def boolean(fn: str, args: list[Number]) -> Number:
    a, b = args[0].to("tl.int1"), args[-1].to("tl.int1")
    if fn == "bit_not":
        return Number(f"{a} == 0", "tl.int1")
    if fn in ("bit_and", "mul", "minimum"):
        return Number(f"{a} & {b}", "tl.int1")
    if fn in ("bit_or", "add", "maximum"):
        return Number(f"{a} | {b}", "tl.int1")
    if fn == "bit_xor":
        return Number(f"{a} ^ {b}", "tl.int1")
    raise NoText(f"{fn} of truth values is not generated")


#: f32 functions by the few instructions of the hardware, right but for the last bits; see `Walk.rough`. A division
#: and `tl.exp` care for the smallest numbers, which takes three times as many; `exp` is 0 here once below 1.2e-38
ROUGH = {
    "div": "({0} / {1})",
    "reciprocal": "(1.0 / {0})",
    "exp": "tl.exp2({0} * 1.4426950408889634)",
    "sigmoid": "libdevice.fast_dividef(tl.full((), 1.0, tl.float32), 1.0 + tl.exp2({0} * -1.4426950408889634))",
    "tanh": "1.0 - libdevice.fast_dividef(tl.full((), 2.0, tl.float32), tl.exp2({0} * 2.8853900817779268) + 1.0)",
    # (written so that exp(-x * x), which the gradient of GELU has as well, is the same number)
    "erf": "far_erf({0}, tl.exp2((-({0} * {0})) * 1.4426950408889634))",
}
#: what stands for those of them that lose their last bits to 1 near 0, and up to where
NEAR_0 = {
    "tanh": ("{0} - {0} * {0} * {0} / 3.0", 0.03),
    "erf": ("{0} * (1.1283791670955126 - 0.37612638903183754 * {0} * {0})", 0.05),
}


def floating(
    fn: str, x: list[str], args: list[Number], type: str, rough: bool, beside_one: bool
) -> tuple[Number, tuple[str, ...]]:
    first, last = x[0], x[-1]
    if rough and type == "tl.float32" and fn in ROUGH:
        text = ROUGH[fn].format(*x)
        if fn in NEAR_0 and not beside_one:
            near, limit = NEAR_0[fn]
            text = f"tl.where(tl.abs({first}) < {limit}, {near.format(first)}, {text})"
        return Number(text, type), ("far_erf",) if fn == "erf" else ()
    zero, one = literal(0, type), literal(1, type)
    helpers: tuple[str, ...] = ()
    match fn:
        case "add" | "sub" | "mul":
            text = f"{first} {dict(add='+', sub='-', mul='*')[fn]} {last}"
        case "neg":
            text = f"-{first}"
        case "div":
            text, helpers = f"ieee_div({first}, {last})", ("ieee_div",)
        case "reciprocal":
            text, helpers = f"ieee_div({one}, {first})", ("ieee_div",)
        case "sigmoid":
            text, helpers = f"ieee_div({one}, {one} + libdevice.exp(-{first}))", ("ieee_div",)
        case "trunc_div":
            text, helpers = f"libdevice.trunc(ieee_div({first}, {last}))", ("ieee_div",)
        case "floor_div":
            text, helpers = f"floor_div_float({first}, {last})", ("ieee_div", "floor_div_float")
        case "rem":
            text, helpers = f"rem_float({first}, {last})", ("rem_float",)
        case "abs" | "floor" | "ceil":
            text = f"tl.{fn}({first})"
        case "sqrt":
            text = f"tl.sqrt_rn({first})" if type == "tl.float32" else f"tl.sqrt({first})"
        case "round":
            text = f"libdevice.rint({first})"
        case "sign":
            text = f"tl.where({first} > 0, {one}, tl.where({first} < 0, -{one}, {zero}))"
        case "relu":
            text = f"tl.where({first} <= 0, {zero}, {first})"
        case "maximum" | "minimum":
            text = f"tl.{fn}({first}, {last}, propagate_nan=tl.PropagateNan.ALL)"
        case "pow":
            text, helpers = power(first, last, args[1].value, type)
        case _ if fn in LIBDEVICE:
            text = f"libdevice.{fn}({', '.join(x)})"
        case _:
            raise NoText(f"{fn} of floating-point numbers is not generated")
    return Number(text, type), helpers


def power(x: str, y: str, exponent: float | int | bool | None, type: str) -> tuple[str, tuple[str, ...]]:
    """Small constant exponents as products, as torch does it."""
    products = {1.0: x, 2.0: f"{x} * {x}", 3.0: f"{x} * {x} * {x}"}
    if exponent is not None and float(exponent) in products:
        return products[float(exponent)], ()
    if exponent == 0.5:
        return f"tl.sqrt_rn({x})" if type == "tl.float32" else f"tl.sqrt({x})", ()
    if exponent == -1.0:
        return f"ieee_div({literal(1, type)}, {x})", ("ieee_div",)
    return f"libdevice.pow({x}, {y})", ()


def whole(fn: str, x: list[str], type: str) -> tuple[Number, tuple[str, ...]]:
    first, last = x[0], x[-1]
    signs = {"add": "+", "sub": "-", "mul": "*", "bit_and": "&", "bit_or": "|", "bit_xor": "^", "trunc_div": "//",
             "fmod": "%"}  # fmt: skip
    helpers: tuple[str, ...] = ()
    unsigned = type == "tl.uint8"
    match fn:
        case _ if fn in signs:
            text = f"{first} {signs[fn]} {last}"
        case "floor_div":
            text, helpers = (
                (f"{first} // {last}", ()) if unsigned else (f"floor_div_int({first}, {last})", ("floor_div_int",))
            )
        case "rem":
            text, helpers = (f"{first} % {last}", ()) if unsigned else (f"rem_int({first}, {last})", ("rem_int",))
        case "neg":
            text = f"{literal(0, type)} - {first}"
        case "bit_not":
            text = f"{first} ^ {literal(255 if unsigned else -1, type)}"
        case "abs":
            text = first if unsigned else f"tl.abs({first})"
        case "sign":
            text = f"(({first} > 0).to({type}) - ({first} < 0).to({type}))"
        case "relu":
            text = f"tl.maximum({first}, {literal(0, type)})"
        case "maximum" | "minimum":
            text = f"tl.{fn}({first}, {last})"
        case "floor" | "ceil" | "round" | "trunc":
            text = first
        case _:
            raise NoText(f"{fn} of whole numbers is not generated")
    # Triton widens small integers in some of these
    return Number(f"({text}).to({type})", type), helpers


def helper_text(names: list[str]) -> str:
    """The helper functions, each after those it calls."""
    wanted: dict[str, None] = {}
    for name in sorted(names):
        wanted.update(dict.fromkeys((*BEHIND.get(name, ()), name)))
    return "".join(f"@triton.jit\ndef {name}(a, b):\n    {HELPERS[name]}\n\n\n" for name in wanted)


# ---- reductions ------------------------------------------------------------------------------------------------------


def accumulator_type(element: ScalarType) -> str:
    """The type in which a reduction is accumulated: truth values as 0 or 1."""
    type = number_type(element)
    return "tl.int32" if type == "tl.int1" else type


def neutral(kind: str, type: str) -> str:
    """What changes nothing when it is combined."""
    if kind in ("sum", "or"):
        return "0.0" if type in FLOATS and kind == "sum" else "0"
    if kind in ("prod", "and"):
        return "1.0" if type in FLOATS else "1"
    if type in FLOATS:
        return 'float("-inf")' if kind == "max" else 'float("inf")'
    if type == "tl.uint8":
        return "0" if kind == "max" else "255"
    bits = int(type.removeprefix("tl.int"))
    return str(-(2 ** (bits - 1))) if kind == "max" else str(2 ** (bits - 1) - 1)


def combined(kind: str, a: str, b: str, type: str) -> str:
    if kind in ("max", "min"):
        name = "maximum" if kind == "max" else "minimum"
        nan = ", propagate_nan=tl.PropagateNan.ALL" if type in FLOATS else ""
        return f"tl.{name}({a}, {b}{nan})"
    return f"{a} {dict(sum='+', prod='*', **{'or': '|', 'and': '&'})[kind]} {b}"


def reduced(kind: str, x: str, axis: int | None, keep: bool, type: str) -> tuple[str, tuple[str, ...]]:
    """A tile reduced along an axis, or altogether."""
    place = f"{axis}, keep_dims=True" if keep else str(axis)
    floats = type in FLOATS
    if kind == "sum":
        return f"tl.sum({x}, {place}).to({type})", ()
    if (kind in ("max", "min") and floats) or kind == "prod":
        helper = {"max": "larger", "min": "smaller", "prod": "product"}[kind]
        order = f"{axis}, {helper}, keep_dims=True" if keep else f"{axis}, {helper}"
        return f"tl.reduce({x}, {order})", (helper,)
    name = "max" if kind in ("max", "or") else "min"
    return f"tl.{name}({x}, {place}).to({type})", ()
