"""The little of MLIR's own dialects that a program needs: `builtin.module`, `func.func` and `func.return`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from .attributes import Symbol
from .core import UNKNOWN, Block, Builder, Location, Op, Region, Value, function_type
from .dialect import AnyType, Attr, Dialect, OpDef, Operand
from .types import FunctionType, Type

builtin = Dialect("builtin", "The module that holds symbols.")
func = Dialect("func", "Functions.")


@builtin.op
class Module(OpDef):
    """A list of symbols; the root of every program."""

    region_count = 1
    pure = False
    isolated = True
    sym_name = Attr("str", "name of the module", optional=True)


@func.op
class Func(OpDef):
    """A function with one block; `arg_attrs` and `res_attrs` say what each argument and result is."""

    name = "func"
    region_count = 1
    pure = False
    isolated = True
    sym_name = Attr("str", "name of the function")
    function_type = Attr("type", "argument and result types")
    arg_attrs = Attr("list", "one dictionary per argument", optional=True)
    res_attrs = Attr("list", "one dictionary per result", optional=True)

    @staticmethod
    def check(op: Op) -> str | None:
        if not isinstance(op.function_type, FunctionType):
            return "function_type is not a function type"
        if not op.regions[0].blocks:
            return "a function needs a body"
        block = op.regions[0].block
        if tuple(a.type for a in block.arguments) != op.function_type.inputs:
            return "the block's arguments do not match function_type"
        if block.last is None or block.last.definition is not Return:
            return "a function must end in func.return"
        for key, count in (("arg_attrs", len(op.function_type.inputs)), ("res_attrs", len(op.function_type.results))):
            listed = op.attributes.get(key)
            if listed is not None and len(listed) != count:
                return f"{key} has {len(listed)} entries, expected {count}"
        return None


@func.op
class Return(OpDef):
    """Ends a function and hands back its results."""

    pure = False
    terminator = True
    values = Operand(AnyType, "what the function returns", variadic=True)

    @staticmethod
    def check(op: Op) -> str | None:
        if op.parent is None or op.parent.parent is None or op.parent.parent.parent is None:
            return None
        owner = op.parent.parent.parent
        if owner.definition is Func and isinstance(owner.function_type, FunctionType):
            given = tuple(v.type for v in op.operands)
            if given != owner.function_type.results:
                return f"returns {FunctionType((), given)} but the function declares {owner.function_type}"
        return None


def module(name: str | None = None) -> Op:
    """An empty module."""
    attributes = {"sym_name": name} if name else {}
    return Op(Module, (), (), attributes, [Region([Block()])])


def add_function(
    root: Op, name: str, inputs: Sequence[Type], names: Sequence[str] | None = None, loc: Location = UNKNOWN
) -> Op:
    """Adds an empty function to a module; finish it with `finish_function`."""
    block = Block(inputs)
    for value, hint in zip(block.arguments, names or (), strict=False):
        value.name = hint
    attributes = {"sym_name": name, "function_type": FunctionType(tuple(inputs), ())}
    op = Op(Func, (), (), attributes, [Region([block])], loc)
    root.regions[0].block.append(op)
    return op


def finish_function(
    function: Op,
    results: Sequence[Value],
    arg_attrs: list[dict[str, Any]] | None = None,
    res_attrs: list[dict[str, Any]] | None = None,
) -> Op:
    """Sets what a function returns, replacing an earlier return, and its type to match."""
    block = function.regions[0].block
    if block.last is not None and block.last.definition is Return:
        block.last.erase()
    Builder(block).create(Return, results)
    function.attributes["function_type"] = function_type(block, results)
    for key, value in (("arg_attrs", arg_attrs), ("res_attrs", res_attrs)):
        if value is not None:
            function.attributes[key] = value
    return function


def functions(root: Op) -> Iterator[Op]:
    """The functions of a module."""
    for op in root.regions[0].block:
        if op.definition is Func:
            yield op


def lookup(root: Op, symbol: str | Symbol) -> Op:
    """The function a symbol names."""
    name = symbol.name if isinstance(symbol, Symbol) else symbol
    for op in functions(root):
        if op.attributes["sym_name"] == name:
            return op
    raise KeyError(f"no function @{name} in this module")
