"""Reads attributes and types from tokens. Nothing is ever evaluated; numbers that do not fit are refused."""

from __future__ import annotations

import math
import re
import struct

from .attributes import Attribute, DialectAttribute, I32Array, Symbol
from .tokens import MAX_NESTING, NUMBER, PUNCTUATION, SIGIL, STRING, TENSOR, WORD, Tokens
from .types import DialectType, FunctionType, ScalarType, TensorType, Type

_SYMBOL_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_$.]*\Z", re.ASCII)
_SHORT_ESCAPES = {"n": 10, "t": 9, '"': 34, "\\": 92}


class AttributeParser(Tokens):
    """The part of the parser that knows attributes and types."""

    def __init__(self, text: str, filename: str):
        self.types: dict[str, Type] = {}
        self.strings: dict[str, str] = {}
        super().__init__(text, filename)

    # ---- attributes ----

    def dictionary(self, into: dict[str, Attribute], depth: int) -> None:
        """Reads `{key = value, ...}`."""
        self.expect("{", "before attributes")
        if self.accept("}"):
            return
        while True:
            if self.kind == WORD:
                key = self.token
            elif self.kind == STRING:
                key = self.string()
            else:
                self.fail(f"expected the name of an attribute, {self.seen()}")
            if key in into:
                self.fail(f"the attribute {key!r} is given twice")
            self.advance()
            if self.token == "=" and self.kind == PUNCTUATION:
                self.advance()
                if self.kind == STRING:
                    into[key] = self.strings.get(self.token) or self.string()
                    self.advance()
                else:
                    into[key] = self.attribute(depth)
            else:
                into[key] = None
            if self.token != "," or self.kind != PUNCTUATION:
                break
            self.advance()
        self.expect("}", "after the attributes")

    def attribute(self, depth: int) -> Attribute:
        if depth > MAX_NESTING:
            self.fail(f"attributes are nested more than {MAX_NESTING} deep")
        kind, token = self.kind, self.token
        if kind == STRING:
            value = self.string()
            self.advance()
            return value
        if kind == NUMBER or (kind == PUNCTUATION and token == "-"):
            return self.number()
        if kind == WORD:
            if token == "true" or token == "false":
                self.advance()
                return token == "true"
            if token == "unit":
                self.advance()
                return None
            if token == "array":
                return self.dense_array()
            return self.type(depth)
        if kind == SIGIL and token[0] == "@":
            return self.symbol()
        if kind == SIGIL and token[0] == "#":
            name = self.dialect_name("attribute")
            return DialectAttribute(name, self.parameters(depth))
        if kind == PUNCTUATION:
            if token == "[":
                return self.array(depth)
            if token == "{":
                entries: dict[str, Attribute] = {}
                self.dictionary(entries, depth + 1)
                return entries
            if token == "(":
                return self.type(depth)
        if kind in (TENSOR, SIGIL):
            return self.type(depth)
        self.fail(f"expected an attribute, {self.seen()}")

    def array(self, depth: int) -> list[Attribute]:
        self.advance()
        items: list[Attribute] = []
        if self.accept("]"):
            return items
        while True:
            items.append(self.attribute(depth + 1))
            if not self.accept(","):
                break
        self.expect("]", "after the list")
        return items

    def number(self) -> int | float:
        start = self.start
        sign = ""
        if self.token == "-":
            sign = "-"
            self.advance()
            if self.kind != NUMBER:
                self.fail(f"expected a number after '-', {self.seen()}")
        token = self.token
        self.advance()
        type_name = ""
        if self.accept(":"):
            if self.kind != WORD:
                self.fail(f"expected the type of the number, {self.seen()}")
            type_name = self.token
            self.advance()
        if "." in token:
            if type_name not in ("", "f64"):
                self.fail("float attributes are f64 here", start)
            value = float(sign + token)
            if math.isinf(value):
                self.fail("this number does not fit in f64", start)
            return value
        if type_name == "f64":
            if not token.startswith("0x") or sign or len(token) > 18:
                self.fail("a float is written with a point, or as the 64 bits of the number in hexadecimal", start)
            return float(struct.unpack("<d", struct.pack("<Q", int(token, 16)))[0])
        if type_name not in ("", "i64"):
            self.fail(f"integer attributes are i64 here, not {type_name}", start)
        return self.integer(sign, token, start)

    def integer(self, sign: str, token: str, start: int, bits: int = 64) -> int:
        value = int(sign + token, 16 if token.startswith("0x") else 10) if len(token) <= 20 else 1 << 64
        if not -(1 << (bits - 1)) <= value < 1 << (bits - 1):
            self.fail(f"this number does not fit in {bits} bits", start)
        return value

    def dense_array(self) -> tuple[int, ...] | I32Array:
        self.advance()
        self.expect("<", "after 'array'")
        element = self.token
        if self.kind != WORD or element not in ("i64", "i32"):
            self.fail(f"expected array<i64: ...> or array<i32: ...>, {self.seen()}")
        bits = int(element[1:])
        self.advance()
        items: list[int] = []
        if self.accept(":"):
            while True:
                start = self.start
                sign = "-" if self.accept("-") else ""
                if self.kind != NUMBER or "." in self.token:
                    self.fail(f"expected an integer, {self.seen()}")
                items.append(self.integer(sign, self.token, start, bits))
                self.advance()
                if self.token != "," or self.kind != PUNCTUATION:
                    break
                self.advance()
        self.expect(">", "after the array")
        return tuple(items) if bits == 64 else I32Array(tuple(items))

    def symbol(self) -> Symbol:
        token = self.token
        if token[1] == '"':
            name = self.string(token[1:])
        elif _SYMBOL_NAME.match(token, 1):
            name = token[1:]
        else:
            self.fail(f"{token} is not the name of a symbol")
        self.advance()
        return Symbol(name)

    def dialect_name(self, what: str) -> str:
        name = self.token[1:]
        if not _SYMBOL_NAME.match(name) or "." not in name.strip("."):
            self.fail(f"expected a dialect's {what} such as {self.token[0]}dialect.name, {self.seen()}")
        self.advance()
        return name

    def parameters(self, depth: int) -> tuple[Attribute, ...]:
        if not self.accept("<"):
            return ()
        items: list[Attribute] = []
        while True:
            items.append(self.attribute(depth + 1))
            if not self.accept(","):
                break
        self.expect(">", "after the parameters")
        return tuple(items)

    def string(self, token: str | None = None) -> str:
        """The value of a quoted token; does not advance."""
        token = self.token if token is None else token
        body = token[1:-1]
        if "\\" not in body:
            value = body
        else:
            raw = bytearray()
            position = 0
            while position < len(body):
                ch = body[position]
                if ch != "\\":
                    raw += ch.encode("utf-8", "surrogatepass")
                    position += 1
                elif body[position + 1] in _SHORT_ESCAPES:
                    raw.append(_SHORT_ESCAPES[body[position + 1]])
                    position += 2
                elif re.match(r"[0-9A-Fa-f]{2}", body[position + 1 : position + 3]):
                    raw.append(int(body[position + 1 : position + 3], 16))
                    position += 3
                else:
                    self.fail(f"unknown escape {body[position : position + 2]!r} in a string", self.end - len(token))
            try:
                value = raw.decode("utf-8", "surrogatepass")
            except UnicodeDecodeError:
                self.fail("the bytes of this string are not UTF-8", self.end - len(token))
        self.strings[token] = value
        return value

    # ---- types ----

    def type(self, depth: int) -> Type:
        if depth > MAX_NESTING:
            self.fail(f"types are nested more than {MAX_NESTING} deep")
        token, kind = self.token, self.kind
        if kind == TENSOR:
            found = self.types.get(token) or self.tensor()
            self.advance()
            return found
        if kind == WORD:
            if token == "complex":
                return self.complex()
            if token == "tensor":
                self.fail("expected a tensor with a static shape and a known element type, such as tensor<2x3xf32>")
            return self.scalar()
        if kind == PUNCTUATION and token == "(":
            inputs = self.type_list(depth + 1)
            self.expect("->", "in a function type")
            return FunctionType(tuple(inputs), tuple(self.result_types(depth + 1)))
        if kind == SIGIL and token[0] == "!":
            name = self.dialect_name("type")
            return DialectType(name, self.parameters(depth))
        self.fail(f"expected a type, {self.seen()}")

    def scalar(self) -> ScalarType:
        try:
            found = ScalarType(self.token)
        except ValueError as error:
            self.fail(str(error))
        self.advance()
        return found

    def complex(self) -> ScalarType:
        start = self.start
        self.advance()
        self.expect("<", "after 'complex'")
        inner = self.token
        self.advance()
        if f"complex<{inner}>" not in ("complex<f32>", "complex<f64>"):
            self.fail("expected complex<f32> or complex<f64>", start)
        self.expect(">", "after the element of a complex type")
        return ScalarType(f"complex<{inner}>")

    def tensor(self) -> TensorType:
        """The type of a tensor token; does not advance."""
        token = self.token
        body = token[7:-1]
        shape: list[int] = []
        while body[0].isdigit():
            size, _, body = body.partition("x")
            shape.append(self.integer("", size, self.start))
        try:
            found = TensorType(tuple(shape), ScalarType(body))
        except ValueError as error:
            self.fail(str(error))
        self.types[token] = found
        return found

    def type_list(self, depth: int) -> list[Type]:
        """Reads `(type, ...)`; the current token is the parenthesis."""
        self.advance()
        types: list[Type] = []
        if self.token == ")" and self.kind == PUNCTUATION:
            self.advance()
            return types
        known = self.types
        while True:
            found = known.get(self.token) if self.kind == TENSOR else None
            if found is not None:
                self.advance()
            else:
                found = self.type(depth)
            types.append(found)
            if self.token != "," or self.kind != PUNCTUATION:
                break
            self.advance()
        self.expect(")", "after the types")
        return types

    def result_types(self, depth: int) -> list[Type]:
        if self.token == "(" and self.kind == PUNCTUATION:
            return self.type_list(depth)
        return [self.type(depth)]
