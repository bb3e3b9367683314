"""The whole training step as one function: forward, loss, backward, clip, update.

State and batch come in; loss, outputs and new state go out. Each result that replaces an argument is marked as donated.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ..capture.capture import Captured
from ..capture.slots import Slot
from ..dialects.step import StepBuilder
from ..errors import InputError
from ..ir.builtin import finish_function
from ..ir.core import UNKNOWN, Op, Value
from ..ir.passes import run_pipeline
from .autodiff import gradients
from .clip import clip_by_norm
from .optimizer_plan import OptimizerPlan
from .traced_vjp import VjpCache

PHASES = ("forward", "loss", "backward", "clip", "update")


@dataclass(slots=True)
class Result:
    """One result of the step: the loss, an output, the gradient norm, or the new value of an argument."""

    kind: str
    slot: Slot | None = None


@dataclass(slots=True)
class Program:
    """A training step: its module, what each argument is and what each result is."""

    module: Op
    function: Op
    slots: list[Slot]
    results: list[Result]
    captured: Captured
    updated: list[str]
    untouched: list[str] = field(default_factory=list)
    vjps: VjpCache = field(default_factory=VjpCache)


def build_step(captured: Captured, plan: OptimizerPlan, clip_norm: float | None = None) -> Program:
    """Adds backward, clipping and the optimizer's update to a captured forward program."""
    function = captured.function
    block = function.regions[0].block
    arguments = {slot.source: value for slot, value in zip(captured.slots, block.arguments, strict=True)}
    slots = list(captured.slots)
    b = StepBuilder(block, phase="backward")
    vjps = VjpCache(next(iter(captured.parameters.values())).device)
    owned = [
        fqn for fqn in plan.parameters if captured.parameters[fqn].requires_grad and ("parameter", fqn) in arguments
    ]
    grads = gradients(b, captured.loss, [arguments["parameter", fqn] for fqn in owned], vjps)
    by_name = {fqn: grad for fqn, grad in zip(owned, grads, strict=True) if grad is not None}
    if not by_name:
        raise InputError(
            "the loss does not depend on any parameter that the optimizer updates; check that the loss is computed "
            "from the model's output without detach(), .item() or torch.no_grad()"
        )
    b.loc = UNKNOWN
    norm: Value | None = None
    if clip_norm is not None:
        b.phase = "clip"
        by_name, norm = clip_by_norm(b, by_name, clip_norm)
    b.phase = "update"
    results = [Result("output") for _ in captured.outputs]
    values = list(captured.outputs)
    results[captured.exported.loss_index].kind = "loss"
    if norm is not None:
        results.append(Result("grad_norm"))
        values.append(norm)
    for slot, value in captured.changed:
        results.append(Result("state", slot))
        values.append(value)

    def argument(slot: Slot) -> Value:
        if slot.source not in arguments:
            arguments[slot.source] = block.add_argument(slot.type, slot.name)
            slots.append(slot)
        return arguments[slot.source]

    parameter_slots = {s.source: s for s in captured.slots if s.kind == "parameter"}
    for fqn, grad in by_name.items():
        source = ("parameter", fqn)
        b.loc = layer_of(fqn)
        inputs = [argument(slot) for slot in plan.slots(fqn)]
        new, states = plan.emit(b, fqn, arguments[source], grad, inputs)
        for slot, value in ((parameter_slots[source], new), *states):
            results.append(Result("state", slot))
            values.append(value)
    finish_function(function, values, *describe(slots, results))
    run_pipeline(captured.module, "cse,dce")
    untouched = [f for f in plan.parameters if f not in by_name]
    return Program(captured.module, function, slots, results, captured, list(by_name), untouched, vjps)


def layer_of(parameter: str):
    """The layer a parameter belongs to, as a location."""
    from ..ir.core import Location

    return Location(parameter.rpartition(".")[0] or parameter)


def describe(slots: list[Slot], results: list[Result]) -> tuple[list[dict], list[dict]]:
    """Attributes of arguments and results: what each is and which argument a result replaces."""
    index = {slot.source: i for i, slot in enumerate(slots)}
    args = [{"step.kind": s.kind, "step.name": s.name} for s in slots]
    res: list[dict] = []
    for result in results:
        if result.slot is None:
            res.append({"step.kind": result.kind})
        else:
            res.append(
                {
                    "step.kind": result.slot.kind,
                    "step.name": result.slot.name,
                    "step.donates": index[result.slot.source],
                }
            )
    return args, res


def sizes(function: Op) -> dict[str, int]:
    """Number of ops by phase."""
    counts = dict.fromkeys(PHASES, 0)
    for op in function.regions[0].block:
        if op.phase:
            counts[op.phase] = counts.get(op.phase, 0) + 1
    return counts
