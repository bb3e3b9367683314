"""Numbers of a kernel as C++ expressions."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence

from ...ir.types import ScalarType
from .walk import Linear, Number

STORED = {"f64": "double", "f32": "float", "bf16": "bf16", "f16": "f16", "i1": "b8"} | {
    "i64": "i64",
    "i32": "i32",
    "i16": "i16",
    "i8": "i8",
    "ui8": "u8",
}
COMPUTED = STORED | {"bf16": "float", "f16": "float", "i1": "bool"}
HOW = {"sum": "Sum", "prod": "Prod", "max": "Max", "min": "Min", "or": "Or", "and": "And"}
#: from here on a number rounds to infinity as f32
LARGEST = 2.0**128 - 2.0**103


def c_type(n: Number) -> str:
    """The type a number is computed in; whole numbers that are known to be small take 32 bits."""
    return "i32" if n.type.text == "i64" and n.is_small else COMPUTED[n.type.text]


def number_text(value: int) -> str:
    return "(-9223372036854775807ll - 1)" if value == -(2**63) else f"{value}ll"


def literal(value: float | int | bool, type: ScalarType) -> str:
    if type.kind == "bool":
        return "true" if value else "false"
    if type.kind == "int":
        return f"({COMPUTED[type.text]}){number_text(int(value))}"
    value = float(value)
    name = COMPUTED[type.text]
    if name == "float" and math.isfinite(value):
        value = (
            math.copysign(math.inf, value) if abs(value) >= LARGEST else struct.unpack("f", struct.pack("f", value))[0]
        )
    if math.isnan(value):
        return f'({name})__builtin_nan("")'
    if math.isinf(value):
        return f"({name}){'-' if value < 0 else ''}__builtin_inf()"
    return f"({name}){value.hex()}"


def neutral_of(n: Number) -> str:
    if n.how in ("sum", "or"):
        return literal(0, n.type)
    if n.how in ("prod", "and"):
        return literal(1, n.type)
    sign = -1 if n.how == "max" else 1
    if n.type.kind == "float":
        return literal(sign * math.inf, n.type)
    if n.type.kind == "bool":
        return literal(sign > 0, n.type)
    if n.type.text.startswith("ui"):
        return literal(2**n.type.bits - 1 if sign > 0 else 0, n.type)
    return literal(2 ** (n.type.bits - 1) - 1 if sign > 0 else -(2 ** (n.type.bits - 1)), n.type)


def sum_text(linear: Linear) -> str:
    """A sum of loop indices."""
    terms = [f"i{d}" if c == 1 else f"{c} * i{d}" for d, c in sorted(linear.terms.items())]
    if linear.constant or not terms:
        terms.append(str(linear.constant))
    return " + ".join(terms)


_OPERATORS = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
_ARITHMETIC = {"add": "+", "sub": "-", "mul": "*"}
_BITS = {"bit_and": "&", "bit_or": "|", "bit_xor": "^"}
_DIVISIONS = {"floor_div": "floor_div", "trunc_div": "trunc_div", "rem": "rem_any", "fmod": "fmod_any"}
_CHOICES = {"maximum": "larger", "minimum": "smaller"}
_WHOLE = {"floor", "ceil", "round", "trunc"}


def apply(n: Number, args: Sequence[str]) -> str:
    """A function of numbers as an expression."""
    fn, type = n.kind, c_type(n)
    kind = n.type.kind
    if fn == "cast":
        return f"To<{type}>::from({args[0]})"
    if fn == "select":
        return f"{args[0]} ? ({type}){args[1]} : ({type}){args[2]}"
    if fn in _OPERATORS:
        return f"{args[0]} {_OPERATORS[fn]} {args[1]}"
    if fn == "isnan":
        return f"{args[0]} != {args[0]}"
    wide = type
    if type == "i32" and n.type.text == "i64" and not all(a.is_small for a in n.args):
        wide = "i64"  # large numbers whose result is small
    given = [f"({wide}){a}" for a in args]
    if fn in _ARITHMETIC:
        if kind == "bool":
            return f"{args[0]} {'&' if fn == 'mul' else '|' if fn == 'add' else '^'} {args[1]}"
        return f"({type})({given[0]} {_ARITHMETIC[fn]} {given[1]})"
    if fn in _BITS:
        return f"({type})({given[0]} {_BITS[fn]} {given[1]})"
    if fn in _CHOICES:
        return f"({type}){_CHOICES[fn]}<{wide}>({given[0]}, {given[1]})"
    if fn == "div" and kind == "float":
        return f"{given[0]} / {given[1]}"
    if fn in _DIVISIONS or fn == "div":
        return f"({type}){_DIVISIONS.get(fn, 'trunc_div')}({given[0]}, {given[1]})"
    if fn == "pow":
        return power(n, given, type)
    if fn == "neg":
        return f"({type})-{given[0]}"
    if fn == "bit_not":
        return f"!{args[0]}" if kind == "bool" else f"({type})~{given[0]}"
    if fn == "reciprocal":
        return f"({type})1 / {given[0]}"
    if fn == "rsqrt":
        return f"({type})1 / sqrt_({given[0]})"
    if fn in _WHOLE and kind != "float":
        return given[0]
    return f"({type}){fn}_({given[0]}" + "".join(f", {a}" for a in given[1:]) + ")"


def power(n: Number, given: Sequence[str], type: str) -> str:
    exponent = n.args[1].value if n.args[1].kind == "constant" else None
    x = given[0]
    if n.type.kind != "float":
        return f"int_pow<{type}>({x}, {given[1]})"
    if exponent in (1, 2, 3):
        return " * ".join([x] * int(exponent))
    if exponent == -1:
        return f"({type})1 / {x}"
    return f"pow_({x}, {given[1]})"
