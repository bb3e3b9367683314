"""Attributes are plain Python values: bool, int, float, str, None, tuple of int, list, dict, Type, Symbol, I32Array.

A tuple of ints is a dense `array<i64: ...>`, a list a general array, None is `unit`. Values are never mutated in place.
"""

from __future__ import annotations

import math
import re
import struct
from dataclasses import dataclass
from typing import Any

from .types import Type

Attribute = Any


@dataclass(frozen=True, slots=True)
class Symbol:
    """A reference to a symbol of the module: `@main`."""

    name: str


@dataclass(frozen=True, slots=True)
class I32Array:
    """A dense array of 32-bit integers, as MLIR wants for segment sizes."""

    values: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class DialectAttribute:
    """An attribute that a dialect declares: `#move.space<"hbm", 0 : i64>`."""

    name: str
    parameters: tuple[Any, ...] = ()


_BARE_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_$.]*\Z")
_ESCAPES = {'"': '\\"', "\\": "\\\\", "\n": "\\0A", "\t": "\\09", "\r": "\\0D"}


def string_text(value: str) -> str:
    """A quoted MLIR string; whatever is not printable ASCII is written as `\\XX` bytes."""
    if value.isascii() and value.isprintable() and '"' not in value and "\\" not in value:
        return f'"{value}"'
    out = []
    for ch in value:
        if ch in _ESCAPES:
            out.append(_ESCAPES[ch])
        elif ch.isascii() and ch.isprintable():
            out.append(ch)
        else:
            out.extend(f"\\{byte:02X}" for byte in ch.encode("utf-8", "surrogatepass"))
    return '"' + "".join(out) + '"'


def float_text(value: float) -> str:
    """Exact decimal text of a double in the form MLIR reads; non-finite values as their bit pattern."""
    if not math.isfinite(value):
        return f"0x{struct.unpack('<Q', struct.pack('<d', value))[0]:016X}"
    text = repr(value)
    if "e" in text:
        mantissa, exponent = text.split("e")
        return f"{mantissa if '.' in mantissa else mantissa + '.0'}e{exponent}"
    return text


def attribute_text(value: Attribute) -> str:
    """MLIR text of an attribute value."""
    if value is True:
        return "true"
    if value is False:
        return "false"
    if value is None:
        return "unit"
    kind = type(value)
    if kind is int:
        return f"{value} : i64"
    if kind is str:
        return string_text(value)
    if kind is tuple:
        return f"array<i64: {', '.join(map(str, value))}>" if value else "array<i64>"
    if kind is float:
        return f"{float_text(value)} : f64"
    if kind is list:
        return f"[{', '.join(attribute_text(v) for v in value)}]"
    if kind is dict:
        return "{" + ", ".join(entry_text(k, v) for k, v in value.items()) + "}"
    if isinstance(value, Type):
        return value.text
    if kind is Symbol:
        return f"@{value.name}" if _BARE_KEY.match(value.name) else f"@{string_text(value.name)}"
    if kind is I32Array:
        return f"array<i32: {', '.join(map(str, value.values))}>" if value.values else "array<i32>"
    if kind is DialectAttribute:
        inner = f"<{', '.join(attribute_text(p) for p in value.parameters)}>" if value.parameters else ""
        return f"#{value.name}{inner}"
    raise TypeError(f"{value!r} of type {kind.__name__} is not an attribute")


def entry_text(key: str, value: Attribute) -> str:
    """`key = value` of a dictionary; a unit value prints as its key alone, as MLIR does."""
    key = key if _BARE_KEY.match(key) else string_text(key)
    return key if value is None else f"{key} = {attribute_text(value)}"


def freeze(value: Attribute) -> Any:
    """A hashable stand-in for an attribute; equal stand-ins mean equal attributes (1, 1.0 and True stay apart)."""
    kind = type(value)
    if kind is str or kind is tuple or value is None or isinstance(value, Type):
        return value
    if kind is list:
        return ("list", *(freeze(v) for v in value))
    if kind is dict:
        return ("dict", *((k, freeze(v)) for k, v in value.items()))
    if kind is float:
        return ("float", struct.pack("<d", value))
    if kind is DialectAttribute:
        return ("attribute", value.name, *(freeze(p) for p in value.parameters))
    return (kind.__name__, value)
