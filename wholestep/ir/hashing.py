"""A structural hash: equal for two pieces of program that compute the same in the same way, wherever they stand.

Names and locations do not count; types, attributes, the order of ops and how they are wired do. Values from outside are
told apart by the order of their first use, so equal layers with different weights hash alike.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from .attributes import Attribute, attribute_text, entry_text
from .builtin import functions
from .core import Block, Op, Region, Value


def structural_hash(what: Op | Block | Region | Iterable[Op], ignore: Iterable[str] = ()) -> str:
    """32 hexadecimal digits. `ignore` names attributes that do not count, such as `phase`."""
    hasher = _Hasher(frozenset(ignore))
    if isinstance(what, Op):
        what = [what]
    if isinstance(what, Region):
        hasher.region(what)
    elif isinstance(what, Block):
        hasher.block(what)
    else:
        ops: Iterable[Op] = what
        for op in ops:
            hasher.op(op)
    return hashlib.blake2b("\n".join(hasher.lines).encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def program_hash(function: Op, root: Op) -> str:
    """The same for a function together with those of its module that it calls, whatever all of them are called.

    Of one that the module does not have its name counts.
    """
    named = {f.attributes["sym_name"]: f for f in functions(root)}
    found: dict[str, str] = {}

    def text(function: Op) -> str:
        hashes = [structural_hash(function, ("sym_name", "callee"))]
        for op in function.regions[0].block:
            if (callee := op.attributes.get("callee")) is not None:
                if callee.name not in found:
                    found[callee.name] = text(named[callee.name]) if callee.name in named else callee.name
                hashes.append(found[callee.name])
        return hashlib.blake2b("\n".join(hashes).encode(), digest_size=16).hexdigest()

    return text(function)


class _Hasher:
    """Writes the piece down with values numbered by appearance."""

    def __init__(self, ignore: frozenset[str]):
        self.ignore = ignore
        self.lines: list[str] = []
        self.numbers: dict[Value, str] = {}

    def reference(self, value: Value) -> str:
        number = self.numbers.get(value)
        if number is None:  # from outside
            number = self.numbers[value] = f"%{len(self.numbers)}"
            return f"{number}:{value.type}"
        return number

    def op(self, op: Op) -> None:
        numbers = self.numbers
        uses = ",".join([numbers.get(v) or self.reference(v) for v in op.operands])
        attributes = "".join([f"{k}={_text(op.attributes[k])};" for k in sorted(op.attributes) if k not in self.ignore])
        for value in op.results:
            numbers[value] = f"%{len(numbers)}"
        types = ",".join([v.type.text for v in op.results])
        self.lines.append(f"{op.definition.name}({uses}){{{attributes}}}{types}")
        for region in op.regions:
            self.region(region)

    def region(self, region: Region) -> None:
        self.lines.append("{")
        for block in region.blocks:
            self.block(block)
        self.lines.append("}")

    def block(self, block: Block) -> None:
        for value in block.arguments:
            self.numbers[value] = f"%{len(self.numbers)}"
        self.lines.append("^" + ",".join([v.type.text for v in block.arguments]))
        for op in block:
            self.op(op)


def _text(value: Attribute) -> str:
    """Text that does not depend on the order of dictionary entries."""
    if type(value) is dict:
        return "{" + ",".join(entry_text(k, None) + "=" + _text(value[k]) for k in sorted(value)) + "}"
    if type(value) is list:
        return "[" + ",".join(map(_text, value)) + "]"
    return attribute_text(value)
