"""Clipping inside the program, with the numbers of `torch.nn.utils.clip_grad_norm_` and `clip_grad_value_`."""

from __future__ import annotations

import math

from ..dialects.step import StepBuilder
from ..ir.core import Value

EPSILON = 1e-6


def clip_by_norm(b: StepBuilder, grads: dict[str, Value], max_norm: float) -> tuple[dict[str, Value], Value]:
    """Gradients scaled so that their joint 2-norm is at most `max_norm`, and the norm before scaling."""
    first = next(iter(grads.values())).type.element
    norms = []
    for grad in grads.values():
        square = b.sum(b.mul(grad, grad), dims=tuple(range(grad.type.rank)))
        norms.append(b.reshape_to(b.cast_to(b.sqrt(square), first), (1,)))
    stacked = b.concat(norms, dim=0) if len(norms) > 1 else norms[0]
    total = b.sqrt(b.sum(b.mul(stacked, stacked), dims=(0,)))
    if math.isinf(max_norm):  # the norm is wanted, not the clipping
        return grads, total
    scale = b.minimum(b.div(b.full(max_norm, (), first), b.add(total, EPSILON)), 1.0)
    return {name: b.mul(grad, b.cast_to(scale, grad.type.element)) for name, grad in grads.items()}, total


def clip_by_value(b: StepBuilder, grads: dict[str, Value], limit: float) -> dict[str, Value]:
    """Gradients cut to lie between -limit and limit; NaN stays NaN."""
    return {name: b.minimum(b.maximum(grad, -limit), limit) for name, grad in grads.items()}
