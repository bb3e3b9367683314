"""The ops of the loop dialect. A kernel is a function: its arguments are tensors, inputs before outputs.

`loop.space` gives the sizes of its iteration dimensions; every other value is a number at one point of that space. A
load or store says by an *access map* which element: per dimension of the tensor one coefficient per iteration dimension
and a constant.
"""

from __future__ import annotations

from ...ir.core import Op
from ...ir.dialect import AnyTensor, AnyType, Attr, Dialect, OpDef, Operand, Result
from ...ir.types import BF16, BOOL, F16, F32, I64, ScalarType, TensorType

loop = Dialect("loop", "How one kernel walks its data: iteration dimensions, access maps, numbers, reductions.")

#: element types that a number can be rounded to inside of a kernel
ROUNDED = (BF16, F16)
REDUCTIONS = ("sum", "max", "min", "prod", "or", "and")
#: how many numbers each function takes; the names are those of the step dialect's pointwise ops, and of roundings of
#: them: `rounded` is a cast to a 16-bit float that rounds also where its result stays in the kernel
FUNCTIONS = {
    **dict.fromkeys(
        [
            "neg",
            "abs",
            "sign",
            "exp",
            "exp2",
            "expm1",
            "log",
            "log2",
            "log1p",
            "sqrt",
            "rsqrt",
            "reciprocal",
            "sin",
            "cos",
            "tanh",
            "sigmoid",
            "erf",
            "relu",
            "floor",
            "ceil",
            "round",
            "trunc",
            "isnan",
            "bit_not",
            "cast",
            "rounded",
        ],
        1,
    ),
    **dict.fromkeys(
        [
            "add",
            "sub",
            "mul",
            "div",
            "floor_div",
            "trunc_div",
            "rem",
            "fmod",
            "pow",
            "atan2",
            "maximum",
            "minimum",
            "eq",
            "ne",
            "lt",
            "le",
            "gt",
            "ge",
            "bit_and",
            "bit_or",
            "bit_xor",
        ],
        2,
    ),
    "select": 3,
}


@loop.op
class Space(OpDef):
    """The iteration dimensions of the kernel; comes first and once."""

    pure = False
    sizes = Attr("ints", "how many steps each dimension has, the outermost first")

    @staticmethod
    def infer(sizes):
        return ()


@loop.op
class Index(OpDef):
    """Where the point lies along one dimension."""

    y = Result(AnyType)
    dim = Attr("int", "the iteration dimension")

    @staticmethod
    def infer(dim):
        return I64


@loop.op
class Constant(OpDef):
    """A number. It keeps full precision: functions compute with it and not with its rounding."""

    y = Result(AnyType)
    value = Attr("number", "the number")
    dtype = Attr("dtype", "its type")

    @staticmethod
    def infer(value, dtype):
        return dtype


def map_problem(op: Op, tensor: TensorType) -> str | None:
    """What is wrong with an access map."""
    if len(op.map) != tensor.rank:
        return f"the map has {len(op.map)} rows for a tensor of rank {tensor.rank}"
    if len({len(row) for row in op.map}) > 1:
        return "the rows of the map differ in length"
    if len(op.dynamic) != len(op.indices) or any(not 0 <= d < tensor.rank for d in op.dynamic):
        return "dynamic must name one dimension of the tensor per index"
    return None


@loop.op
class Load(OpDef):
    """One element of a tensor. `indices` are added to the mapped index of the dimensions that `dynamic` names.

    Guarded, an element outside of the tensor is 0, or NaN if it is `checked`; otherwise there is none outside. With
    `bits` it is a truth value, one of eight in a byte: the index of that dimension counts them, in the order of
    `step/bits.py`.
    """

    tensor = Operand(AnyTensor)
    indices = Operand(AnyType, "computed indices", variadic=True)
    y = Result(AnyType)
    map = Attr("list", "per dimension of the tensor: a coefficient per iteration dimension, then a constant")
    dynamic = Attr("ints", "dimensions of the tensor whose index is computed", ())
    guarded = Attr("bool", "whether the map may leave the tensor", False)
    checked = Attr("bool", "whether leaving it is a mistake in the data, which must be seen", False)
    bits = Attr("int", "the dimension of bytes whose index counts bits", optional=True)

    @staticmethod
    def infer(tensor, *rest, bits=None, **attributes):
        return tensor.element if bits is None else BOOL

    @staticmethod
    def check(op: Op) -> str | None:
        return map_problem(op, op.tensor.type)


@loop.op
class Apply(OpDef):
    """A function of numbers, named as the pointwise op of the step dialect. 16-bit floats are computed as f32."""

    x = Operand(AnyType)
    rest = Operand(AnyType, "further numbers, all of one type", variadic=True)
    y = Result(AnyType)
    fn = Attr("str", "the function", choices=tuple(FUNCTIONS))
    dtype = Attr("dtype", "type of the result")

    @classmethod
    def build(cls, builder, *operands, **attributes):  # type: ignore[no-untyped-def]
        """The numbers are given as one list."""
        ((first, *rest),) = operands
        return super().build(builder, first, rest, **attributes)

    @staticmethod
    def infer(*rest, fn, dtype):
        return dtype

    @staticmethod
    def check(op: Op) -> str | None:
        if len(op.operands) != FUNCTIONS[op.fn]:
            return f"{op.fn} takes {FUNCTIONS[op.fn]} numbers"
        if op.fn == "rounded" and op.dtype not in ROUNDED:
            return f"numbers are not rounded to {op.dtype}"
        kinds = {v.type: None for v in op.rest}
        return f"{op.fn} of {' and '.join(map(str, kinds))}" if len(kinds) > 1 else None


@loop.op
class Random(OpDef):
    """The uniform number in [0, 1) that `step.random` has at an element (see step/philox.py): word `element` mod 4 of
    block `element` div 4 of a stream, its upper `digits` bits as a fraction."""

    seed = Operand(AnyType)
    counter = Operand(AnyType, "the step counter")
    micro_batch = Operand(AnyType)
    element = Operand(AnyType, "row-major number of the element")
    stream = Operand(AnyType, "number of the random op in the program: no attribute, so that equal layers are equal")
    y = Result(AnyType)
    digits = Attr("int", "how many bits of the word count")

    @staticmethod
    def infer(*rest, **attributes):
        return F32


@loop.op
class Reduce(OpDef):
    """What all points that differ only along `dims` have in common: their sum, largest, ... in the result's type."""

    x = Operand(AnyType)
    y = Result(AnyType)
    kind = Attr("str", "how they are combined", choices=REDUCTIONS)
    dims = Attr("ints", "iteration dimensions that are reduced")
    dtype = Attr("dtype", "type of the result, in which it is accumulated")

    @staticmethod
    def infer(x, kind, dims, dtype):
        return dtype


@loop.op
class Store(OpDef):
    """Writes an element of an output, which nothing else in the kernel reads or writes; with `bits` one of eight truth
    values in a byte, as `load` reads them."""

    pure = False
    value = Operand(AnyType)
    tensor = Operand(AnyTensor)
    indices = Operand(AnyType, "computed indices", variadic=True)
    map = Attr("list", "per dimension of the tensor: a coefficient per iteration dimension, then a constant")
    dynamic = Attr("ints", "dimensions of the tensor whose index is computed", ())
    bits = Attr("int", "the dimension of bytes whose index counts bits", optional=True)

    @staticmethod
    def infer(*rest, **attributes):
        return ()

    @staticmethod
    def check(op: Op) -> str | None:
        return map_problem(op, op.tensor.type)


def compute_type(element: ScalarType) -> ScalarType:
    """The type in which numbers of a type are computed: 16-bit floats as f32."""
    return F32 if element.kind == "float" and element.bits < 32 else element
