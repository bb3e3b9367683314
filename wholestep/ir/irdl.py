"""IRDL text of a dialect, which stock mlir-opt 22 loads (`--irdl-file=F`) and then verifies our programs by.

What IRDL can say is said: how many operands, results and regions, tensor or any type, which attributes must be there,
their kind, closed sets of values. What it cannot: element kinds and ranks of tensors, the `infer` and `check` rules,
optional attributes (left out: an attribute that is not declared may hold anything), that an integer is no boolean.
A constraint of IRDL is a variable: used twice, it must be the same type twice. So each field has its own, and mlir-opt
takes a variadic group only where all its values have one type.
"""

from __future__ import annotations

from .attributes import attribute_text, string_text
from .dialect import Attr, Declared, Dialect, OpDef, TypeConstraint
from .types import _SCALARS

_BASES = {
    "int": ("integer",),
    "float": ("float",),
    "number": ("integer", "float"),
    "str": ("string",),
    "ints": ("dense_array",),
    "list": ("array",),
    "dict": ("dictionary",),
    "type": ("type",),
    "symbol": ("symbol_ref",),
}


def irdl_text(dialect: Dialect) -> str:
    """The IRDL declaration of a dialect: types, attributes, then ops, each in alphabetical order."""
    lines = [
        f"// The {dialect.name} dialect for mlir-opt 22, generated from its declaration: do not edit.",
        f"irdl.dialect @{dialect.name} {{",
    ]
    for short, declared in sorted(dialect.types.items()):
        lines += _Parameters("type", short, declared).lines
    for short, declared in sorted(dialect.attributes.items()):
        lines += _Parameters("attribute", short, declared).lines
    for short, definition in sorted(dialect.ops.items()):
        lines += _Operation(short, definition).lines
    return "\n".join([*lines, "}", ""])


class _Writer:
    """Writes one declaration; every constraint gets a fresh name."""

    def __init__(self, what: str, short: str):
        self.lines = [f"  irdl.{what} @{short} {{"]
        self.count = 0

    def line(self, text: str) -> None:
        self.lines.append(f"    {text}")

    def constraint(self, text: str) -> str:
        name = f"%c{self.count}"
        self.count += 1
        self.line(f"{name} = {text}")
        return name

    def any_of(self, texts: list[str]) -> str:
        names = [self.constraint(text) for text in texts]
        return names[0] if len(names) == 1 else self.constraint(f"irdl.any_of({', '.join(names)})")

    def type(self, constraint: TypeConstraint) -> str:
        if constraint.declared:
            return self.constraint(f"irdl.base {_symbol(constraint.declared)}")
        return self.constraint('irdl.base "!builtin.tensor"' if constraint.kinds else "irdl.any")

    def attribute(self, attr: Attr) -> str:
        if attr.declared:
            return self.constraint(f"irdl.base {_symbol(attr.declared)}")
        if attr.choices:
            return self.any_of([f"irdl.is {attribute_text(choice)}" for choice in attr.choices])
        if attr.kind == "bool":
            return self.any_of(["irdl.is true", "irdl.is false"])
        if attr.kind == "dtype":
            return self.any_of([f"irdl.is {name}" for name in _SCALARS])
        if attr.kind in _BASES:
            return self.any_of([f'irdl.base "#builtin.{base}"' for base in _BASES[attr.kind]])
        return self.constraint("irdl.any")


class _Parameters(_Writer):
    """One `irdl.type` or `irdl.attribute`."""

    def __init__(self, what: str, short: str, declared: Declared):
        super().__init__(what, short)
        parameters = [(name, self.attribute(Attr(kind))) for name, kind in declared.parameters.items()]
        if parameters:
            self.line(f"irdl.parameters({', '.join(f'{name}: {c}' for name, c in parameters)})")
        self.lines.append("  }")


class _Operation(_Writer):
    """One `irdl.operation`."""

    def __init__(self, short: str, definition: type[OpDef]):
        super().__init__("operation", short)
        operands = [(f.name, _how_many(f.optional, f.variadic), self.type(f.type)) for f in definition.operand_fields]
        results = [(f.name, _how_many(False, f.variadic), self.type(f.type)) for f in definition.result_fields]
        attributes = [(a.name, self.attribute(a)) for a in definition.attribute_fields.values() if not a.optional]
        regions = [self.constraint("irdl.region") for _ in range(definition.region_count)]
        if operands:
            self.line(f"irdl.operands({', '.join(f'{name}: {many}{c}' for name, many, c in operands)})")
        if results:
            self.line(f"irdl.results({', '.join(f'{name}: {many}{c}' for name, many, c in results)})")
        if attributes:
            self.line(f"irdl.attributes {{ {', '.join(f'{string_text(name)} = {c}' for name, c in attributes)} }}")
        if regions:
            self.line(f"irdl.regions({', '.join(f'region{i}: {c}' for i, c in enumerate(regions))})")
        self.lines.append("  }")


def _symbol(name: str) -> str:
    """`@move::@buffer` of `move.buffer`."""
    return "::".join(f"@{part}" for part in name.split("."))


def _how_many(optional: bool, variadic: bool) -> str:
    return "variadic " if variadic else "optional " if optional else ""
