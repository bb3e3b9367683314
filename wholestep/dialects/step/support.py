"""What the neural-network ops share: optional operands in their rules, and the element type statistics are kept in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ...ir.core import Op, Value
from ...ir.types import F32, ScalarType, TensorType


def spread(op: Op, run: Callable[..., Any]) -> Callable[..., Any]:
    """`run` takes a tensor, None or a list per declared operand; what comes back takes the op's operands flat."""
    fields, attributes = op.definition, op.attributes
    if len(op.operands) == len(fields.operand_fields) and not any(f.variadic for f in fields.operand_fields):
        return run
    return lambda *tensors: run(*fields.segments(tensors, attributes))


def present(op: Op, *gradients: Any) -> list[Value | None]:
    """One gradient per operand, from one gradient (or list) per declared operand: absent operands are left out."""
    out: list[Value | None] = []
    groups = op.definition.segments(op.operands, op.attributes)
    for group, gradient in zip(groups, gradients, strict=True):
        if isinstance(group, list):
            out += [None] * len(group) if gradient is None else gradient
        elif group is not None:
            out.append(gradient)
    return out


def used(op: Op) -> list[bool]:
    """Which results somebody reads: the output mask of a gradient kernel."""
    return [bool(r.uses) for r in op.results]


def wide(element: ScalarType) -> ScalarType:
    """The element type in which sums and statistics of `element` are kept: float32 for the 16-bit floats."""
    return F32 if element.bits < 32 else element


def widen(b: Any, *values: Value | None) -> list[Any]:
    """Each value in the element type its statistics are kept in."""
    return [None if v is None else b.cast_to(v, wide(v.type.element)) for v in values]


def statistic(x: TensorType, shape: Sequence[int]) -> TensorType:
    """The type of a statistic of x."""
    return TensorType(tuple(shape), wide(x.element))


def add(b: Any, x: Value | None, y: Value | None) -> Value | None:
    """x + y where an absent gradient counts as zero."""
    if x is None or y is None:
        return y if x is None else x
    return b.add(x, y)


def blank(like: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Memory nobody reads, for kernels that want a tensor only to know its shape and layout (that of `like`)."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    layout = formats.get(like.dim()) if like.dim() == len(shape) else None
    if layout is not None and not like.is_contiguous() and like.is_contiguous(memory_format=layout):
        return torch.empty(tuple(shape), dtype=like.dtype, device=like.device, memory_format=layout)
    return like.new_empty(tuple(shape))
