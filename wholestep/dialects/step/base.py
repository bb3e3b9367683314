"""What a step op is: one class that owns all its rules, and the builder that makes such ops.

Rules: `infer` (types), `evaluate` (reference execution through ATen), `derivative`, `expand` (into smaller ops),
`flops`, `precision`, `roles` (which dimensions are parallel, reduced or must stay whole), `element` (one element of the
result from elements of the operands, which is what loops are made of).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from ...ir.core import Builder, Op, Value
from ...ir.dialect import Dialect, OpDef
from ...ir.types import ScalarType, TensorType, Type

step = Dialect("step", "What is computed: one training step on tensors with static shapes.")

_TORCH_DTYPES = {
    "f64": torch.float64,
    "f32": torch.float32,
    "bf16": torch.bfloat16,
    "f16": torch.float16,
    "f8E4M3FN": torch.float8_e4m3fn,
    "f8E5M2": torch.float8_e5m2,
    "i64": torch.int64,
    "i32": torch.int32,
    "i16": torch.int16,
    "i8": torch.int8,
    "ui64": torch.uint64,
    "ui32": torch.uint32,
    "ui16": torch.uint16,
    "ui8": torch.uint8,
    "i1": torch.bool,
    "complex<f32>": torch.complex64,
    "complex<f64>": torch.complex128,
}
_IR_DTYPES = {dtype: ScalarType(name) for name, dtype in _TORCH_DTYPES.items()}


def torch_dtype(element: ScalarType) -> torch.dtype:
    """The torch dtype of an element type."""
    return _TORCH_DTYPES[element.text]


def ir_dtype(dtype: torch.dtype) -> ScalarType:
    """The element type of a torch dtype."""
    try:
        return _IR_DTYPES[dtype]
    except KeyError:
        raise TypeError(f"{dtype} has no element type in the step dialect") from None


def tensor_type(tensor: torch.Tensor) -> TensorType:
    """The type of a torch tensor (real, fake or meta)."""
    return TensorType(tuple(int(d) for d in tensor.shape), ir_dtype(tensor.dtype))


@dataclass(frozen=True, slots=True)
class Roles:
    """How the dimensions of operands and results correspond, einsum-like: one label per dimension.

    `" "` marks a broadcast dimension. Labels in `whole` cannot be split across devices or tiles without more than a
    reduction; labels absent from every result are reduced by `reduction`.
    """

    operands: tuple[str, ...]
    results: tuple[str, ...]
    whole: str = ""
    reduction: str = "sum"

    @property
    def reduced(self) -> str:
        kept = set("".join(self.results))
        seen = dict.fromkeys(c for spec in self.operands for c in spec if c != " ")
        return "".join(c for c in seen if c not in kept)


LABELS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"


class StepOp(OpDef):
    """Base of the step dialect's ops, with the defaults of their rules."""

    #: what mixed precision wants: "low" (matmul-like), "high" (statistics, losses, long sums) or "follow" (its inputs)
    precision: ClassVar[str] = "follow"
    #: whether a "high" op takes a 16-bit first operand as it is, since its kernel keeps sums in f32 itself: "always",
    #: or "for low" where only ops that compute low read the result (else the result would be rounded too early)
    widens: ClassVar[str] = ""
    #: operands that stay f32 beside a 16-bit first operand
    vectors: ClassVar[tuple[str, ...]] = ()
    #: it moves elements and computes nothing, so a cast may stand on either side of it
    moves: ClassVar[bool] = False
    #: its ATen call brings operands of a narrower float type to its own by itself
    converts: ClassVar[bool] = False
    #: one output element depends on one element of each (broadcast) operand
    pointwise: ClassVar[bool] = False
    #: its result is its operand's memory seen otherwise, where strides can say it
    views: ClassVar[bool] = False
    commutative: ClassVar[bool] = False
    #: False for ops whose results carry no gradient (comparisons, integer results)
    differentiable: ClassVar[bool] = True
    #: evaluate(op) -> callable on tensors, as many as the op has operands; returns a tensor or a tuple of them
    evaluate: ClassVar[Callable[..., Callable[..., Any]] | None] = None
    #: derivative(b, op, *gradients of the results) -> gradient per operand, None where there is none
    derivative: ClassVar[Callable[..., Sequence[Value | None]] | None] = None
    #: expand(b, op) -> the results computed by smaller step ops
    expand: ClassVar[Callable[..., Any] | None] = None
    #: element(k, op, index) -> the number at an index of the result, by `k.at(operand, index)` (transforms/loops.py);
    #: of an op with several results a number for each
    element: ClassVar[Callable[..., Any] | None] = None

    @staticmethod
    def flops(op: Op) -> int:
        """Floating-point operations; for most ops one per element written."""
        return sum(r.type.size for r in op.results if isinstance(r.type, TensorType))

    @staticmethod
    def bytes(op: Op) -> tuple[int, int]:
        """Bytes read and written if each operand is read once and each result that somebody uses is written once."""
        read = sum(v.type.bytes for v in dict.fromkeys(op.operands))
        return read, sum(r.type.bytes for r in op.results if r.uses)

    @staticmethod
    def roles(op: Op) -> Roles | None:
        """How dimensions correspond; None where nothing is known."""
        return None


def broadcast_shapes(*shapes: tuple[int, ...]) -> tuple[int, ...]:
    """Numpy's broadcasting of shapes; ValueError where they do not fit."""
    first = shapes[0]
    if all(s == first for s in shapes):
        return first
    rank = max(map(len, shapes))
    out = []
    for position in range(-rank, 0):
        size = 1
        for shape in shapes:
            if -position <= len(shape) and shape[position] != 1:
                if size not in (1, shape[position]):
                    raise ValueError(f"shapes {', '.join(map(str, shapes))} do not broadcast")
                size = shape[position]
        out.append(size)
    return tuple(out)


def broadcast_roles(op: Op) -> Roles:
    """Roles of a pointwise op: everything parallel, size-1 dimensions broadcast."""
    out = op.results[0].type.shape
    labels = LABELS[: len(out)]

    def spec(shape: tuple[int, ...]) -> str:
        lead = len(out) - len(shape)
        places = zip(labels[lead:], shape, out[lead:], strict=True)
        return "".join(" " if d == 1 and full != 1 else c for c, d, full in places)

    return Roles(tuple(spec(v.type.shape) for v in op.operands), tuple(labels for _ in op.results))


def normalize_dim(dim: int, rank: int) -> int:
    """A dimension counted from the front; 0-d tensors have one imaginary dimension, as in torch."""
    rank = max(rank, 1)
    if not -rank <= dim < rank:
        raise ValueError(f"dimension {dim} is out of range for rank {rank}")
    return dim % rank


class StepBuilder(Builder):
    """Builds step ops by name: `b.softmax(x, dim=1)` gives the value, or a tuple for an op with several results.

    Where a pointwise op meets a Python number it becomes a constant of the other operand's element type.
    """

    def __getattr__(self, name: str) -> Callable[..., Any]:
        definition = step.ops.get(name)
        if definition is None:
            raise AttributeError(f"the step dialect has no op {name!r}")

        def build(*operands: Any, result_types: Sequence[Type] | None = None, **attributes: Any) -> Any:
            if definition.pointwise:  # type: ignore[attr-defined]
                operands = self._numbers(definition, operands)
            op = definition.build(self, *operands, result_types=result_types, **attributes)
            return op.results[0] if len(op.results) == 1 else op.results

        return build

    def _numbers(self, definition: type[OpDef], operands: tuple[Any, ...]) -> tuple[Any, ...]:
        if all(v is None or isinstance(v, Value) for v in operands):
            return operands
        # the condition of a select does not lend its type to the branches
        typed = [v for v in operands[definition.name == "step.select" :] if isinstance(v, Value)]
        if not typed:
            raise TypeError(f"{definition.name} needs at least one tensor operand to give a number its type")
        element = typed[0].type.element
        return tuple(v if v is None or isinstance(v, Value) else self.full(v, (), element) for v in operands)

    def full(self, value: float | int | bool, shape: Sequence[int], element: ScalarType) -> Value:
        """A constant tensor with one value everywhere."""
        if element.kind in ("float", "complex"):
            value = float(value)
        elif element.kind == "bool":
            value = bool(value)
        else:
            value = int(value)
        return step.ops["constant"].build(self, value=value, type=TensorType(tuple(shape), element)).result

    def zeros_like(self, x: Value) -> Value:
        return self.full(0, x.type.shape, x.type.element)

    def cast_to(self, x: Value, element: ScalarType, rounds: bool | None = None) -> Value:
        """`x` with another element type; `x` itself where it has it already. rounds: the program has this cast."""
        return x if x.type.element is element else self.cast(x, dtype=element, rounds=rounds)

    def reshape_to(self, x: Value, shape: Sequence[int]) -> Value:
        shape = tuple(shape)
        return x if x.type.shape == shape else self.reshape(x, shape=shape)

    def broadcast_to(self, x: Value, shape: Sequence[int]) -> Value:
        shape = tuple(shape)
        return x if x.type.shape == shape else self.broadcast(x, shape=shape)

    def sum_to(self, x: Value, shape: Sequence[int]) -> Value:
        """Sums `x` over what broadcasting from `shape` had repeated: the adjoint of broadcasting."""
        shape = tuple(shape)
        have = x.type.shape
        if have == shape:
            return x
        lead = len(have) - len(shape)
        dims = tuple(range(lead)) + tuple(lead + i for i, d in enumerate(shape) if d == 1 and have[lead + i] != 1)
        if dims:
            x = self.sum(x, dims=dims, keepdim=False)
        return self.reshape_to(x, shape)

    def unsqueeze(self, x: Value, *dims: int) -> Value:
        """`x` with dimensions of size one inserted at these positions of the result."""
        rank = x.type.rank + len(dims)
        places = {d % rank for d in dims}
        rest = iter(x.type.shape)
        return self.reshape(x, shape=tuple(1 if i in places else next(rest) for i in range(rank)))

    def swap(self, x: Value, i: int = -1, j: int = -2) -> Value:
        """`x` with two dimensions exchanged."""
        order = list(range(x.type.rank))
        order[i], order[j] = order[j], order[i]
        return self.transpose(x, order=tuple(order))


def constant_value(value: Value) -> float | int | bool | None:
    """The number a constant holds everywhere; None for anything that is not a constant."""
    op = value.op
    return op.attributes["value"] if op is not None and op.definition.name == "step.constant" else None
