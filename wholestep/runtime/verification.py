"""`verify=True`: the first step also in eager PyTorch, on copies, compared tensor by tensor before anything is written."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from ..capture.export import calling_convention
from ..capture.structure import find_loss, flatten
from ..errors import InputError, MismatchError
from ..training.build import Program

#: largest relative difference allowed, by dtype; sums of different order differ by rounding alone
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}


def compare_with_eager(
    program: Program,
    model: nn.Module,
    loss_fn: Any,
    optimizer: torch.optim.Optimizer,
    batch: Any,
    clip_norm: float | None,
    outputs: list[torch.Tensor],
) -> None:
    """Raises MismatchError, naming the layer, at the first tensor of the compiled step that eager does not agree with."""
    if any(slot.kind == "random_key" for slot in program.slots):
        raise InputError(
            "verify=True cannot compare a step that draws random numbers (dropout): eager and compiled draw differently; "
            "set the dropout probabilities to 0 for the verification run"
        )
    twin, twin_loss, twin_optimizer = copy.deepcopy((model, loss_fn, optimizer))
    twin_optimizer.zero_grad(set_to_none=True)
    with torch.enable_grad():
        result = calling_convention(twin, twin_loss, batch)(copy.deepcopy(batch))
        find_loss(result)[0].backward()
    if clip_norm is not None:
        nn.utils.clip_grad_norm_([p for g in twin_optimizer.param_groups for p in g["params"]], clip_norm)
    twin_optimizer.step()
    flat: list[torch.Tensor] = []
    flatten(result, flat, [])
    paths = {name: t for name, t in (*named(twin, twin_loss),)}
    eager_outputs = iter(flat)
    names = iter(program.captured.exported.output_names)
    checks: list[tuple[str, torch.Tensor, torch.Tensor]] = []
    for r, ours in zip(program.results, outputs, strict=True):
        if r.kind in ("loss", "output"):
            checks.append((f"{r.kind} {next(names)}", next(eager_outputs), ours))
        elif r.slot is not None and r.slot.kind in ("parameter", "buffer"):
            checks.append((f"{r.slot.kind} {r.slot.name}", paths[r.slot.source[1]], ours))
        elif r.slot is not None and r.slot.kind == "optimizer_state":
            _, fqn, key = r.slot.source[:3]
            theirs = twin_optimizer.state[paths[fqn]].get(key)
            if isinstance(theirs, torch.Tensor):
                checks.append((f"optimizer state {key} of {fqn}", theirs, ours))
    for what, theirs, ours in checks:
        problem = difference(theirs.detach(), ours)
        if problem:
            raise MismatchError(
                f"the compiled step disagrees with eager PyTorch at {what}: {problem}. Nothing was written.\n"
                "Try: report it with step.program(); until then train eagerly"
            )


def named(model: nn.Module, loss_fn: Any) -> list[tuple[str, torch.Tensor]]:
    """Parameters and buffers under the names the program uses."""
    from ..capture.capture import named_state

    parameters, buffers, _ = named_state(model, loss_fn)
    return [*parameters.items(), *buffers.items()]


def difference(theirs: torch.Tensor, ours: torch.Tensor) -> str:
    """What differs beyond the dtype's tolerance, in words; empty when nothing does."""
    if theirs.shape != ours.shape:
        return f"shapes {tuple(theirs.shape)} and {tuple(ours.shape)}"
    if not theirs.is_floating_point():
        wrong = int((theirs != ours).sum())
        return f"{wrong} of {theirs.numel()} elements differ" if wrong else ""
    tolerance = TOLERANCE.get(theirs.dtype, 1e-4)
    a, b = theirs.double(), ours.double()
    if bool((a.isnan() != b.isnan()).any()):
        return "NaN on one side only"
    scale = float(a.abs().nan_to_num(0, 0, 0).max()) if a.numel() else 0.0
    worst = float((a - b).abs().nan_to_num(0, 0, 0).max()) if a.numel() else 0.0
    if worst > tolerance * max(scale, 1e-3):
        return f"largest difference {worst:.3g} where values reach {scale:.3g} (tolerance {tolerance:g} relative)"
    return ""
