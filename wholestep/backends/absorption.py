"""Casts that the ATen kernels beside them do on the way, so that they need no pass over memory of their own.

Decided once, before lowering. A cast to a wider type is absorbed by readers that promote or reduce in the wider type, a
cast of a pointwise result by the kernel that makes it (`out=`), a cast that is only new state by the copy into place.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from ..dialects.step import torch_dtype
from ..dialects.step.pointwise import is_scalar_number
from ..dialects.step.reductions import Reduction
from ..ir.core import Op, Value

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class CastBytes:
    """Bytes read and written by casts that run on their own, bytes that absorbed casts save, how many casts run."""

    executed: int = 0
    absorbed: int = 0
    count: int = 0

    def plus(self, other: CastBytes, times: int = 1) -> CastBytes:
        return CastBytes(
            self.executed + times * other.executed,
            self.absorbed + times * other.absorbed,
            self.count + times * other.count,
        )


@dataclass(slots=True)
class Absorption:
    """Casts that are not run: their result is their operand's tensor, as it is (`narrow`) or written in the cast's type
    by its producer (`written`)."""

    narrow: set[Op] = field(default_factory=set)
    written: dict[Op, torch.dtype] = field(default_factory=dict)

    @property
    def casts(self) -> set[Op]:
        return self.narrow | {user for producer in self.written for user in producer.result.uses}


#: pointwise calls that take `out=` and convert to its type; the value computed is rounded to the op's own type first
OUT: dict[str, Callable[..., Any]] = {
    f"step.{f.__name__}": f
    for f in (torch.add, torch.sub, torch.mul, torch.div, torch.exp, torch.exp2, torch.expm1)
    + (torch.log, torch.log2, torch.log1p, torch.sqrt, torch.rsqrt, torch.reciprocal, torch.sin, torch.cos, torch.tanh)
    + (torch.sigmoid, torch.erf)
} | {
    "step.silu_grad": lambda dy, x, out: aten.silu_backward.grad_input(dy, x, grad_input=out),
    "step.tanh_grad": lambda dy, y, out: aten.tanh_backward.grad_input(dy, y, grad_input=out),
    "step.sigmoid_grad": lambda dy, y, out: aten.sigmoid_backward.grad_input(dy, y, grad_input=out),
}


def writer(op: Op, dtype: torch.dtype, device: torch.device) -> Callable[..., Any]:
    """The call that computes a pointwise op and writes another float type, laid out as its first full operand."""
    function, shape = OUT[op.name], op.result.type.shape

    def run(*tensors: Any) -> Any:
        full = [t for t in tensors if isinstance(t, torch.Tensor) and tuple(t.shape) == shape]
        like = next((t for t in full if 0 not in t.stride()), None)  # what is repeated has no layout of its own
        out = torch.empty(0, dtype=dtype, device=device) if like is None else torch.empty_like(like, dtype=dtype)
        return function(*tensors, out=out)

    return run


def is_float_cast(op: Op) -> bool:
    """A cast from one float type to another."""
    if op.name != "step.cast":
        return False
    have, want = op.operands[0].type.element, op.dtype
    return have is not want and have.kind == want.kind == "float"


def cast_bytes(op: Op) -> int:
    """Bytes a cast reads and writes."""
    return op.operands[0].type.bytes + op.result.type.bytes


def absorb_casts(function: Op) -> Absorption:
    """Which casts of a function need no call of their own; the largest are decided first."""
    found = Absorption()
    block = function.regions[0].block
    states = returned_state(function)
    casts = [op for op in block if is_float_cast(op) and op.result.uses and op.result.type.rank]
    for cast in sorted(casts, key=cast_bytes, reverse=True):
        source = cast.operands[0]
        users = list(cast.result.uses)
        state = users == [block.last] and cast.result in states
        if state or all(takes_narrow(user, cast, found) for user in users):
            found.narrow.add(cast)
        elif source.op is not None and writes_other(source.op, cast, found):
            found.written[source.op] = torch_dtype(cast.dtype)
    return found


def returned_state(function: Op) -> set[Value]:
    """Results that only ever are copied into an argument's own tensor."""
    last = function.regions[0].block.last
    attributes = function.attributes.get("res_attrs")
    if last is None or not attributes:
        return set()
    plain = {v for v, a in zip(last.operands, attributes, strict=True) if "step.donates" not in a}
    return set(last.operands) - plain


def takes_narrow(user: Op, cast: Op, found: Absorption) -> bool:
    """Whether an op computes the same from the tensor before a widening cast."""
    if not getattr(user.definition, "converts", False) or cast.operands[0].type.element.bits >= cast.dtype.bits:
        return False
    if issubclass(user.definition, Reduction):
        return bool(user.dims)
    if not user.definition.pointwise:  # type: ignore[attr-defined]  # a running sum
        return True
    # another tensor of the wide type makes ATen promote; 0-d ones have no say
    return any(
        v is not cast.result and v.type.rank and v.type.element is cast.dtype and v.op not in found.narrow
        for v in user.operands
    )


def writes_other(op: Op, cast: Op, found: Absorption) -> bool:
    """Whether an op's only reader is the cast, and its kernel can write what the cast gives."""
    if op.name not in OUT or op in found.written or list(op.result.uses) != [cast]:
        return False
    if op.name in ("step.sub", "step.div") and is_scalar_number(op.operands[0]):
        return False
    return op.attributes.get("rounding", "none") == "none"
