"""Declaring dialects. An op is one class: fields declare operands, attributes and results, methods are its rules.

From the same declaration come the verifier, the reference page (`docs/dialects/`) and the IRDL file for mlir-opt.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from .attributes import Attribute, DialectAttribute, I32Array, Symbol
from .core import Builder, Op, Value
from .types import DialectType, ScalarType, TensorType, Type


@dataclass(frozen=True, slots=True)
class TypeConstraint:
    """Which types an operand or result may have."""

    name: str
    kinds: tuple[str, ...] = ()  # element kinds; empty means any type at all
    rank: int | None = None
    declared: str = ""  # the full name of a type that a dialect declares, such as "move.buffer"

    def accepts(self, type: Type) -> bool:
        if self.declared:
            return isinstance(type, DialectType) and type.name == self.declared
        if not self.kinds:
            return True
        return (
            isinstance(type, TensorType)
            and type.element.kind in self.kinds
            and (self.rank is None or len(type.shape) == self.rank)
        )


AnyType = TypeConstraint("any type")
AnyTensor = TypeConstraint("any tensor", ("float", "int", "bool", "complex"))
FloatTensor = TypeConstraint("float tensor", ("float", "complex"))
IntTensor = TypeConstraint("integer tensor", ("int", "bool"))
BoolTensor = TypeConstraint("boolean tensor", ("bool",))


@dataclass(slots=True)
class Operand:
    """Declares an operand. `optional`: zero or one; `variadic`: any number."""

    type: TypeConstraint = AnyTensor
    doc: str = ""
    optional: bool = False
    variadic: bool = False
    name: str = ""

    @property
    def single(self) -> bool:
        return not (self.optional or self.variadic)


@dataclass(slots=True)
class Result:
    """Declares a result; `variadic`: any number."""

    type: TypeConstraint = AnyTensor
    doc: str = ""
    variadic: bool = False
    name: str = ""


REQUIRED = inspect.Parameter.empty


@dataclass(slots=True)
class Attr:
    """Declares an attribute of one kind: int, float, bool, str, ints, list, dict, type, symbol, number or any.

    `choices` closes a string attribute to an enumeration. `default` fills it in when the builder is not told. The kind
    "enum" is an attribute that a dialect declares; `declared` is its full name, such as "move.space".
    """

    kind: str
    doc: str = ""
    default: Any = REQUIRED
    choices: tuple[str, ...] = ()
    optional: bool = False
    name: str = ""
    declared: str = ""

    def accepts(self, value: Attribute) -> bool:
        if value is None and self.optional:
            return True
        if self.choices and value not in self.choices:
            return False
        return _KINDS[self.kind](value) and (not self.declared or value.name == self.declared)

    def describe(self) -> str:
        if self.declared:
            return f"#{self.declared}"
        return " | ".join(f'"{c}"' for c in self.choices) if self.choices else self.kind


_KINDS: dict[str, Callable[[Any], bool]] = {
    "int": lambda v: type(v) is int and -(1 << 63) <= v < 1 << 63,
    "float": lambda v: type(v) is float,
    "bool": lambda v: type(v) is bool,
    "number": lambda v: type(v) in (int, float, bool),
    "str": lambda v: type(v) is str,
    "ints": lambda v: type(v) is tuple and all(type(i) is int for i in v),
    "list": lambda v: type(v) is list,
    "dict": lambda v: type(v) is dict,
    "type": lambda v: isinstance(v, Type),
    "dtype": lambda v: isinstance(v, ScalarType),
    "symbol": lambda v: type(v) is Symbol,
    "enum": lambda v: type(v) is DialectAttribute,
    "any": lambda v: True,
}


def snake_case(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()


class OpDef:
    """Base of every op declaration. Never instantiated: `Op.definition` is the class itself.

    Rules that every dialect may give: `infer` (result types from operand types and attributes) and `check` (what the
    fields cannot say). Dialects add their own.
    """

    name: ClassVar[str] = ""
    dialect: ClassVar[str] = ""
    operand_fields: ClassVar[tuple[Operand, ...]] = ()
    result_fields: ClassVar[tuple[Result, ...]] = ()
    attribute_fields: ClassVar[dict[str, Attr]] = {}
    region_count: ClassVar[int] = 0
    pure: ClassVar[bool] = True
    terminator: ClassVar[bool] = False
    commutative: ClassVar[bool] = False  # the operands may be swapped: `cse` then sees a+b and b+a as one
    isolated: ClassVar[bool] = False  # its regions see no value from outside
    regenerated: ClassVar[bool] = False  # each phase computes it for itself: `cse` does not merge it across phases
    infer: ClassVar[Callable[..., Any] | None] = None

    def __init_subclass__(cls, **kwargs: Any):
        super().__init_subclass__(**kwargs)
        fields: dict[str, Any] = {}
        for base in reversed(cls.__mro__):
            for key, value in vars(base).items():
                if isinstance(value, Operand | Result | Attr):
                    value.name = key
                    fields[key] = value
        cls.operand_fields = tuple(f for f in fields.values() if isinstance(f, Operand))
        cls.result_fields = tuple(f for f in fields.values() if isinstance(f, Result))
        cls.attribute_fields = {f.name: f for f in fields.values() if isinstance(f, Attr)}
        cls._places = {f.name: ("operand", i) for i, f in enumerate(cls.operand_fields)}
        cls._places |= {f.name: ("result", i) for i, f in enumerate(cls.result_fields)}
        cls._loose = sum(not f.single for f in cls.operand_fields)
        cls._simple = cls._loose == 0

    _places: ClassVar[dict[str, tuple[str, int]]] = {}
    _loose: ClassVar[int] = 0
    _simple: ClassVar[bool] = True

    @classmethod
    def segments(cls, operands: Sequence[Any], attributes: dict[str, Attribute]) -> list[Any]:
        """Operands by declared field: a value, None or a value (optional), a list (variadic)."""
        if cls._simple:
            return list(operands)
        if cls._loose == 1:
            spare = len(operands) - (len(cls.operand_fields) - 1)
            sizes = [1 if f.single else spare for f in cls.operand_fields]
        else:
            sizes = list(attributes["operandSegmentSizes"].values)
        out: list[Any] = []
        position = 0
        for f, size in zip(cls.operand_fields, sizes, strict=True):
            part = operands[position : position + size]
            position += size
            out.append(list(part) if f.variadic else part[0] if size else None)
        return out

    @classmethod
    def field(cls, op: Op, name: str) -> Any:
        """What `op.<name>` reads."""
        place = cls._places.get(name)
        if place is None:
            if name in cls.attribute_fields:
                return op.attributes.get(name)
            raise KeyError(name)
        kind, index = place
        if kind == "operand":
            return op.operands[index] if cls._simple else cls.segments(op.operands, op.attributes)[index]
        if cls.result_fields[index].variadic:
            return op.results[index:]
        return op.results[index]

    @classmethod
    def build(
        cls, builder: Builder, *operands: Any, result_types: Iterable[Type] | None = None, **attributes: Any
    ) -> Op:
        """Makes an op at the builder's insertion point; result types are inferred where not given."""
        if len(operands) > len(cls.operand_fields):
            raise TypeError(f"{cls.name} takes {len(cls.operand_fields)} operands, {len(operands)} were given")
        flat: Sequence[Value] = operands
        sizes: Sequence[int] | None = None
        if not cls._simple or len(operands) < len(cls.operand_fields) or None in operands:
            flat, sizes = cls._flatten(operands)
        full: dict[str, Attribute] = {}
        for key, attr in cls.attribute_fields.items():
            if key in attributes:
                value = attributes.pop(key)
            elif attr.default is not REQUIRED:
                value = attr.default
            elif attr.optional:
                continue
            else:
                raise TypeError(f"{cls.name} needs its attribute {key!r}")
            if value is None and attr.optional:
                continue
            full[key] = value
        if attributes:
            raise TypeError(f"{cls.name} has no attribute {', '.join(attributes)}")
        if result_types is None:
            if cls.infer is None:
                raise TypeError(f"{cls.name} cannot infer its result types; pass result_types")
            result_types = cls.infer_types([v.type for v in flat], full, sizes)
        if cls._loose > 1:
            assert sizes is not None
            full["operandSegmentSizes"] = I32Array(tuple(sizes))
        return builder.create(cls, flat, result_types, full)

    @classmethod
    def _flatten(cls, operands: Sequence[Any]) -> tuple[list[Value], list[int]]:
        """Operands given by field as one list, and how many each field has."""
        groups = [*operands, *(None for _ in range(len(cls.operand_fields) - len(operands)))]
        flat: list[Value] = []
        sizes = []
        for f, group in zip(cls.operand_fields, groups, strict=True):
            part = list(group or ()) if f.variadic else [] if group is None else [group]
            if f.single and not part:
                raise TypeError(f"{cls.name} needs its operand {f.name!r}")
            sizes.append(len(part))
            flat += part
        return flat, sizes

    @classmethod
    def infer_types(
        cls, types: Sequence[Any], attributes: dict[str, Attribute], sizes: Sequence[int] | None = None
    ) -> list[Type]:
        """Runs the `infer` rule: `infer(x, y, ..., attribute=...)` on operand types, one type or a sequence back."""
        if cls._simple:
            groups: Sequence[Any] = types
        else:
            if cls._loose > 1 and sizes is not None and "operandSegmentSizes" not in attributes:
                groups = cls.segments(types, {"operandSegmentSizes": I32Array(tuple(sizes))})
            else:
                groups = cls.segments(types, attributes)
        known = {k: attributes.get(k) for k in cls.attribute_fields}
        assert cls.infer is not None
        out = cls.infer(*groups, **known)
        return [out] if isinstance(out, Type) else list(out)

    @staticmethod
    def check(op: Op) -> str | None:
        """What is wrong with the op beyond its fields and types; None when nothing is."""
        return None


@dataclass(frozen=True, slots=True)
class Declared:
    """A type or an attribute of a dialect: what it is for, and the kind of each of its parameters."""

    doc: str
    parameters: dict[str, str]


class Dialect:
    """A named set of op declarations. `@dialect.op` adds one, from our files or from a user's."""

    def __init__(self, name: str, doc: str = ""):
        self.name, self.doc = name, doc
        self.ops: dict[str, type[OpDef]] = {}
        self.types: dict[str, Declared] = {}
        self.attributes: dict[str, Declared] = {}

    def declare_type(self, short: str, doc: str, **parameters: str) -> TypeConstraint:
        """Declares `!<dialect>.<short>` with the kinds of its parameters; returns what accepts that type."""
        self._claim(short)
        self.types[short] = Declared(doc, parameters)
        return TypeConstraint(f"!{self.name}.{short}", declared=f"{self.name}.{short}")

    def declare_attribute(self, short: str, doc: str, **parameters: str) -> str:
        """Declares `#<dialect>.<short>` with the kinds of its parameters; returns its full name."""
        self._claim(short)
        self.attributes[short] = Declared(doc, parameters)
        return f"{self.name}.{short}"

    def op(self, cls: type[OpDef]) -> type[OpDef]:
        """Class decorator: registers the declaration as `<dialect>.<snake_case of the class>`."""
        short = cls.__dict__.get("name") or snake_case(cls.__name__)
        short = short.removeprefix(self.name + ".")
        cls.name, cls.dialect = f"{self.name}.{short}", self.name
        self._claim(short)
        self.ops[short] = cls
        return cls

    def _claim(self, short: str) -> None:
        """Ops, types and attributes share one name space, as they do in IRDL."""
        if short in self.ops or short in self.types or short in self.attributes:
            raise ValueError(f"{self.name}.{short} is declared twice")


class Context:
    """The dialects a parser knows."""

    def __init__(self, dialects: Iterable[Dialect], allow_unregistered: bool = False):
        self.dialects = {d.name: d for d in dialects}
        self.allow_unregistered = allow_unregistered
        self._unregistered: dict[str, type[OpDef]] = {}

    def find(self, name: str) -> type[OpDef] | None:
        """The declaration of an op by its full name; None if unknown."""
        head, _, short = name.partition(".")
        dialect = self.dialects.get(head)
        found = dialect.ops.get(short) if dialect else None
        if found is None and self.allow_unregistered:
            if name not in self._unregistered:
                self._unregistered[name] = type("Unregistered", (UnregisteredOp,), {"name": name, "dialect": head})
            return self._unregistered[name]
        return found


class UnregisteredOp(OpDef):
    """An op nobody declared; parsed and printed, never verified or removed."""

    operands = Operand(AnyType, variadic=True)
    results = Result(AnyType, variadic=True)
    pure = False
