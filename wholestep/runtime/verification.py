"""`verify=True`: the first step also in eager PyTorch, on copies, compared tensor by tensor before anything is written.

What an optimizer writes is judged by the change it makes, not by the parameter's size, and where the change hangs on
rounding (Adam divides a gradient that is zero by its own size) as much is allowed as rounding can do.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..capture.capture import named_state
from ..capture.export import calling_convention
from ..capture.sandbox import keep_random_state
from ..capture.structure import find_loss
from ..errors import InputError, MismatchError
from ..options import Options
from ..training.build import Program
from .batches import flattened, micro_batches

#: largest relative difference allowed, by dtype; sums of different order differ by rounding alone
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}
#: the part of the largest gradient of all that rounding may add to any gradient, in units of the dtype's epsilon
NOISE = 64


@dataclass(slots=True)
class Check:
    """One tensor of the step: what eager gives, what we give, what it was before, how far rounding may carry it."""

    what: str
    theirs: torch.Tensor
    ours: torch.Tensor
    before: torch.Tensor | None = None
    slack: torch.Tensor | None = None
    floor: float = 1e-3  # values smaller than this are compared as if they were this large


def compare_with_eager(
    program: Program,
    model: nn.Module,
    loss_fn: Any,
    optimizer: torch.optim.Optimizer,
    batch: Any,
    options: Options,
    outputs: list[torch.Tensor],
) -> None:
    """Raises MismatchError, naming the layer, at the first tensor on which eager does not agree."""
    arguments = program.function.regions[0].block.arguments
    if any(slot.kind == "random_key" and a.uses for slot, a in zip(program.slots, arguments, strict=True)):
        raise InputError(
            "verify=True cannot compare a step that draws random numbers (dropout): eager and compiled draw "
            "differently; set the dropout probabilities to 0 for the verification run"
        )
    with keep_random_state():
        checks = eager_step(program, model, loss_fn, optimizer, batch, options, outputs)
    for check in checks:
        problem = difference(check)
        if problem:
            raise MismatchError(
                f"the compiled step disagrees with eager PyTorch at {check.what}: {problem}. Nothing was written.\n"
                "Try: report it with step.program(); until then train eagerly"
            )


def eager_step(
    program: Program, model: nn.Module, loss_fn: Any, optimizer: Any, batch: Any, options: Options, outputs: Any
) -> list[Check]:
    """One step in eager PyTorch on copies; every result of the program beside eager's."""
    twin, twin_loss, twin_optimizer = copy.deepcopy((model, loss_fn, optimizer))
    wrt = [p for g in twin_optimizer.param_groups for p in g["params"]]
    for p in wrt:
        p.grad = None
    with torch.enable_grad(), gradients_kept(model):
        parts = micro_batches(copy.deepcopy(batch), options.accumulate)
        run = calling_convention(twin, twin_loss, parts[0])
        results = [run(part) for part in parts]
        for result in results:
            (find_loss(result)[0] / len(parts)).backward()
    if all(p.grad is None for p in wrt):
        raise InputError(
            "verify=True: the loss of a copy does not depend on the copy's parameters; loss_fn must use the model that "
            "it is given, not one it remembers"
        )
    if options.clip_norm is not None:
        nn.utils.clip_grad_norm_(wrt, options.clip_norm)
    if options.clip_value is not None:
        nn.utils.clip_grad_value_(wrt, options.clip_value)
    shifted = [shifted_step(twin_optimizer, sign) for sign in (1, -1)]
    twin_optimizer.step()

    parameters, buffers, _ = named_state(twin, twin_loss)
    paths: dict[str, torch.Tensor] = {**parameters, **buffers}
    originals, _, _ = named_state(model, loss_fn)
    position = {id(p): i for i, p in enumerate(wrt)}
    eager_outputs = iter(zip(*(flattened(result)[0] for result in results), strict=True))
    names = iter(program.captured.exported.output_names)
    checks: list[Check] = []
    for r, ours in zip(program.results, outputs, strict=True):
        if r.kind in ("loss", "output"):
            checks.append(Check(f"{r.kind} {next(names)}", joined(next(eager_outputs), ours), ours))
        elif r.slot is not None and r.slot.kind == "buffer":
            checks.append(Check(f"buffer {r.slot.name}", paths[r.slot.source[1]], ours))
        elif r.slot is not None and r.slot.kind == "parameter":
            fqn = r.slot.source[1]
            place = position[id(paths[fqn])]
            slack = spread(paths[fqn], [params[place] for params, _ in shifted])
            checks.append(Check(f"parameter {fqn}", paths[fqn], ours, originals[fqn].detach(), slack))
        elif r.slot is not None and r.slot.kind == "optimizer_state":
            _, fqn, key = r.slot.source[:3]
            theirs = twin_optimizer.state[paths[fqn]].get(key)
            if isinstance(theirs, torch.Tensor):
                place = position[id(paths[fqn])]
                slack = spread(theirs, [other.state[params[place]][key] for params, other in shifted])
                checks.append(Check(f"optimizer state {key} of {fqn}", theirs, ours, None, slack, 0.0))
    return checks


def joined(parts: tuple[torch.Tensor, ...], ours: torch.Tensor) -> torch.Tensor:
    """An output of every micro-batch as the program gives it: behind each other, averaged, or the last."""
    if len(parts) == 1 or parts[0].shape != ours.shape:
        return parts[0] if len(parts) == 1 else torch.cat(parts)
    return torch.stack(parts).mean(0) if parts[0].is_floating_point() and not parts[0].dim() else parts[-1]


@contextmanager
def gradients_kept(model: nn.Module) -> Iterator[None]:
    """Leaves `.grad` of the user's own parameters as it is, even if loss_fn uses them instead of the copies."""
    kept = [(p, p.grad) for p in model.parameters()]
    for p, _ in kept:
        p.grad = None
    try:
        yield
    finally:
        for p, grad in kept:
            p.grad = grad


def shifted_step(optimizer: torch.optim.Optimizer, sign: int) -> tuple[list[torch.Tensor], torch.optim.Optimizer]:
    """The same update on a copy whose gradients are a rounding error larger or smaller."""
    given = [p for g in optimizer.param_groups for p in g["params"]]
    other = copy.deepcopy(optimizer)
    params = [p for g in other.param_groups for p in g["params"]]
    grads = [p.grad for p in given if p.grad is not None]
    largest = max((float(g.abs().max()) for g in grads if g.numel()), default=0.0)
    for p, twin in zip(given, params, strict=True):
        if p.grad is None:
            twin.grad = None
            continue
        noise = NOISE * torch.finfo(p.grad.dtype).eps * largest
        twin.grad = p.grad.detach() + sign * noise
    other.step()
    return params, other


def spread(middle: torch.Tensor, others: list[torch.Tensor]) -> torch.Tensor:
    """How far each element is carried by a rounding error of the gradient, either way, twice over."""
    return 2 * sum((t.detach().double() - middle.detach().double()).abs() for t in others)  # type: ignore[return-value]


def difference(check: Check) -> str:
    """What differs beyond the dtype's tolerance, in words; empty when nothing does."""
    theirs, ours = check.theirs.detach(), check.ours
    if theirs.shape != ours.shape:
        return f"shapes {tuple(theirs.shape)} and {tuple(ours.shape)}"
    if not theirs.is_floating_point():
        wrong = int((theirs != ours).sum())
        return f"{wrong} of {theirs.numel()} elements differ" if wrong else ""
    if not theirs.numel():
        return ""
    tolerance = TOLERANCE.get(theirs.dtype, 1e-4)
    a, b = theirs.double(), ours.double()
    if bool((a.isnan() != b.isnan()).any()):
        return "NaN on one side only"
    size = float(a.nan_to_num(0, 0, 0).abs().max())
    if check.before is None:
        scale, allowed = size, tolerance * max(size, check.floor)
    else:  # an update: judged by its own size, and by what the sum of parameter and update can resolve
        scale = float((a - check.before.double()).nan_to_num(0, 0, 0).abs().max())
        allowed = tolerance * scale + 4 * torch.finfo(theirs.dtype).eps * size
    apart = (a - b).nan_to_num(0, 0, 0).abs()
    if check.slack is not None:
        apart = apart - check.slack.double().nan_to_num(0, 0, 0)
    worst = float(apart.max())
    if worst > allowed:
        unit = "the update reaches" if check.before is not None else "values reach"
        return f"largest difference {worst:.3g} where {unit} {scale:.3g} (tolerance {tolerance:g} relative)"
    return ""
