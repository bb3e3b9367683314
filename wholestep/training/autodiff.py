"""Reverse-mode differentiation on the step dialect.

One walk backwards over the ops that lie between the loss and what is differentiated. Each op's own `derivative` rule is
used; an op without one gets the derivative traced from PyTorch's autograd (traced_vjp.py). Saved values are ordinary
values of the program, so saving or recomputing them stays a later decision.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..dialects.step import StepBuilder
from ..errors import DifferentiationError, WholestepError
from ..ir.core import Op, Value
from .traced_vjp import VjpCache


def differentiable(value: Value) -> bool:
    """Whether a value can carry a gradient at all."""
    return value.type.element.kind in ("float", "complex")


def active_values(block_ops: Sequence[Op], wrt: Sequence[Value], loss: Value) -> set[Value]:
    """Values that depend on `wrt` through differentiable ops and on which the loss depends."""
    forward = set(wrt)
    for op in block_ops:
        if op.definition.differentiable and any(v in forward for v in op.operands):  # type: ignore[attr-defined]
            forward.update(r for r in op.results if differentiable(r))
    needed = {loss} & forward
    for op in reversed(block_ops):
        if any(r in needed for r in op.results):
            needed.update(v for v in op.operands if v in forward)
    return needed


def gradients(
    b: StepBuilder, loss: Value, wrt: Sequence[Value], vjps: VjpCache, seed: Value | None = None
) -> list[Value | None]:
    """Emits the backward pass at the insertion point; gives d loss / d value for each of `wrt`, None if zero.

    `seed` is what the loss counts for, such as a loss scale; 1 where it is not given.
    """
    ops = [op for op in b.block if op is not b.before and not op.definition.terminator]
    active = active_values(ops, wrt, loss)
    adjoint: dict[Value, Value] = {}
    if loss in active:
        adjoint[loss] = b.full(1.0, loss.type.shape, loss.type.element) if seed is None else seed
    keep = set(wrt)
    for op in reversed(ops):
        outgoing = [adjoint.get(r) for r in op.results]
        if all(g is None for g in outgoing):
            continue
        if op.definition.differentiable and any(v in active for v in op.operands):  # type: ignore[attr-defined]
            b.loc = op.loc
            for operand, gradient in zip(op.operands, pull_back(b, op, outgoing, active, vjps), strict=True):
                if gradient is None or operand not in active:
                    continue
                if gradient.type is not operand.type:
                    raise DifferentiationError(
                        f"internal error: the gradient of {op.name} has type {gradient.type}, expected {operand.type}"
                    )
                before = adjoint.get(operand)
                adjoint[operand] = gradient if before is None else b.add(before, gradient)
        for r in op.results:
            if r not in keep:
                adjoint.pop(r, None)
    return [adjoint.get(v) for v in wrt]


def pull_back(
    b: StepBuilder, op: Op, outgoing: list[Value | None], active: set[Value], vjps: VjpCache
) -> Sequence[Value | None]:
    """Gradients of an op's operands from those of its results."""
    rule = op.definition.derivative  # type: ignore[attr-defined]
    try:
        if rule is not None and not any(v.type.element.kind == "complex" for v in (*op.operands, *op.results)):
            return rule(b, op, *outgoing)
        return vjps.pull_back(b, op, outgoing, [v in active for v in op.operands])
    except WholestepError:
        raise
    except (ValueError, TypeError, KeyError, RuntimeError) as error:
        raise DifferentiationError(f"no gradient through {op.name} of layer {op.loc}: {error}") from error
