"""The step dialect: what one training step computes, on tensors with static shapes."""

from __future__ import annotations

from . import (
    attention,
    contraction,
    convolution,
    indexing,
    losses,
    normalization,
    opaque,
    optimizers,
    pointwise,
    pooling,
    reductions,
    shape,
    softmax,
    sources,
)
from .base import (
    Roles,
    StepBuilder,
    StepOp,
    broadcast_shapes,
    constant_value,
    ir_dtype,
    normalize_dim,
    step,
    tensor_type,
    torch_dtype,
)

__all__ = [
    "Roles",
    "StepBuilder",
    "StepOp",
    "attention",
    "broadcast_shapes",
    "constant_value",
    "contraction",
    "convolution",
    "indexing",
    "ir_dtype",
    "losses",
    "normalization",
    "normalize_dim",
    "opaque",
    "optimizers",
    "pointwise",
    "pooling",
    "reductions",
    "shape",
    "softmax",
    "sources",
    "step",
    "tensor_type",
    "torch_dtype",
]
