"""A small MLIR-shaped core: ops, values, regions, text, verification, rewriting. It knows nothing of torch."""

from __future__ import annotations

from .attributes import Attribute, DialectAttribute, I32Array, Symbol, attribute_text, freeze
from .builtin import Func, Module, Return, add_function, builtin, finish_function, func, functions, lookup, module
from .collector import collector_paused
from .core import UNKNOWN, Block, Builder, Location, Op, Region, Value, function_type
from .dialect import (
    AnyTensor,
    AnyType,
    Attr,
    BoolTensor,
    Context,
    Dialect,
    FloatTensor,
    IntTensor,
    OpDef,
    Operand,
    Result,
    TypeConstraint,
    UnregisteredOp,
)
from .hashing import program_hash, structural_hash
from .parser import parse
from .printer import print_module, print_op
from .rewrite import PatternRewriter, RewritePattern, apply_patterns
from .types import BF16, BOOL, F16, F32, F64, I32, I64, DialectType, FunctionType, ScalarType, TensorType, Type
from .verify import InvalidOp, verify

__all__ = [
    # the graph
    "Op",
    "Value",
    "Block",
    "Region",
    "Builder",
    "Location",
    "UNKNOWN",
    # types
    "Type",
    "ScalarType",
    "TensorType",
    "FunctionType",
    "DialectType",
    "F64",
    "F32",
    "BF16",
    "F16",
    "I64",
    "I32",
    "BOOL",
    # attributes
    "Attribute",
    "Symbol",
    "I32Array",
    "DialectAttribute",
    "attribute_text",
    "freeze",
    # declaring dialects
    "Dialect",
    "OpDef",
    "Operand",
    "Result",
    "Attr",
    "TypeConstraint",
    "AnyType",
    "AnyTensor",
    "FloatTensor",
    "IntTensor",
    "BoolTensor",
    "Context",
    "UnregisteredOp",
    # modules and functions
    "builtin",
    "func",
    "Module",
    "Func",
    "Return",
    "module",
    "add_function",
    "finish_function",
    "functions",
    "function_type",
    "lookup",
    # text and checks
    "parse",
    "print_op",
    "print_module",
    "verify",
    "InvalidOp",
    "collector_paused",
    # changing programs; passes are in ir.passes
    "RewritePattern",
    "PatternRewriter",
    "apply_patterns",
    "program_hash",
    "structural_hash",
]
