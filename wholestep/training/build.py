"""The whole training step as one program: forward, loss, backward, clip, update.

State and batch come in; loss, outputs and new state go out. Each result that replaces an argument is marked as donated.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ..capture.capture import Captured
from ..capture.slots import Slot
from ..dialects.step import StepBuilder
from ..errors import InputError
from ..ir.builtin import finish_function, functions
from ..ir.core import UNKNOWN, Location, Op, Value
from ..ir.passes import run_pipeline
from ..ir.types import F16, F64, TensorType
from ..options import Options
from .accumulation import run_per_micro_batch
from .autodiff import gradients
from .clip import clip_by_norm, clip_by_value
from .optimizer_plan import OptimizerPlan
from .precision import Policy, apply_precision, parse_precision, split_weight_copies
from .scaling import SCALE, SKIPPED, TRACKER, check_skippable, next_scale, unscale
from .traced_vjp import VjpCache

PHASES = ("forward", "loss", "backward", "clip", "update")
#: the share of the new parameter in its average: 1 on the first step, then 1 - decay
EMA_WEIGHT = Slot("hyper", "ema weight", ("ema_weight",), TensorType((), F64))


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
    policy: Policy = field(default_factory=lambda: parse_precision("fp32"))


class Arguments:
    """The arguments of a function by what they are; asking for one that is not there yet adds it."""

    def __init__(self, function: Op, slots: list[Slot]):
        self.block = function.regions[0].block
        self.slots = slots
        self.values = {slot.source: value for slot, value in zip(slots, self.block.arguments, strict=True)}

    def __call__(self, slot: Slot) -> Value:
        if slot.source not in self.values:
            self.values[slot.source] = self.block.add_argument(slot.type, slot.name)
            self.slots.append(slot)
        return self.values[slot.source]


def build_step(captured: Captured, plan: OptimizerPlan, options: Options | None = None) -> Program:
    """Adds precision, backward, clipping and the optimizer's update to a captured forward program."""
    options = options or Options()
    policy = parse_precision(options.precision)
    scaling = policy.low is F16
    skipping = scaling or options.skip_nonfinite
    if skipping:
        check_skippable(plan)
    apply_precision(captured, policy)
    argument = Arguments(captured.function, list(captured.slots))
    b = StepBuilder(argument.block, phase="backward")
    vjps = VjpCache(next(iter(captured.parameters.values())).device)
    grads = differentiate(b, captured, plan, argument, vjps, options.accumulate, scaling)
    copies = split_weight_copies(argument.block, captured, argument) if policy.low is not None else {}
    function, outputs, changed = captured.function, captured.outputs, captured.changed
    if options.accumulate > 1:
        names, loss = list(grads), captured.exported.loss_index
        function, slots, outputs, changed, sums = run_per_micro_batch(
            captured.module, function, argument.slots, options.accumulate, outputs, loss, changed, list(grads.values())
        )
        grads = dict(zip(names, sums, strict=True))
        argument = Arguments(function, slots)
        b = StepBuilder(argument.block)
    finish = Finish(b, captured, plan, options, argument, copies, outputs, changed)
    finish.take(grads, scaling, skipping)
    finish_function(function, finish.values, *describe(argument.slots, finish.results))
    run_pipeline(captured.module, "cse,dce")
    untouched = [f for f in plan.parameters if f not in grads]
    return Program(
        captured.module, function, argument.slots, finish.results, captured, list(grads), untouched, vjps, policy
    )


def differentiate(
    b: StepBuilder,
    captured: Captured,
    plan: OptimizerPlan,
    argument: Arguments,
    vjps: VjpCache,
    micro_batches: int,
    scaling: bool,
) -> dict[str, Value]:
    """The backward pass: gradients of the parameters that the optimizer updates, by name."""
    owned = [
        fqn
        for fqn in plan.parameters
        if captured.parameters[fqn].requires_grad and ("parameter", fqn) in argument.values
    ]
    loss = captured.loss
    seed = None
    if scaling:
        seed = b.reshape_to(b.cast_to(argument(SCALE), loss.type.element), loss.type.shape)
    if micro_batches > 1:  # as eager's (loss / k).backward()
        one = b.full(1.0, loss.type.shape, loss.type.element) if seed is None else seed
        seed = b.div(one, float(micro_batches))
    wrt = [argument.values["parameter", fqn] for fqn in owned]
    grads = gradients(b, loss, wrt, vjps, seed)
    found = {fqn: grad for fqn, grad in zip(owned, grads, strict=True) if grad is not None}
    if not found:
        raise InputError(
            "the loss does not depend on any parameter that the optimizer updates; check that the loss is computed "
            "from the model's output without detach(), .item() or torch.no_grad()"
        )
    return found


class Finish:
    """What follows backward: unscaling, clipping, the update, and the list of everything the step gives back."""

    def __init__(
        self,
        b: StepBuilder,
        captured: Captured,
        plan: OptimizerPlan,
        options: Options,
        argument: Arguments,
        copies: dict[str, Slot],
        outputs: list[Value],
        changed: list[tuple[Slot, Value]],
    ):
        self.b, self.plan, self.options, self.argument, self.copies = b, plan, options, argument, copies
        self.results = [Result("output") for _ in outputs]
        self.results[captured.exported.loss_index].kind = "loss"
        self.values = list(outputs)
        self.parameters = {s.source[1]: s for s in captured.slots if s.kind == "parameter"}
        for slot, value in changed:
            self.give(slot, value)

    def give(self, slot: Slot, value: Value) -> None:
        """One more result: the new value of an argument."""
        self.results.append(Result("state", slot))
        self.values.append(value)

    def take(self, grads: dict[str, Value], scaling: bool, skipping: bool) -> None:
        """Everything from the gradients to the new state."""
        b, options = self.b, self.options
        b.loc, b.phase = UNKNOWN, "clip"
        finite = b.all_finite(list(grads.values())) if skipping else None
        if scaling:
            grads = unscale(b, grads, self.argument(SCALE))
        if options.clip_norm is not None:
            grads, norm = clip_by_norm(b, grads, options.clip_norm)
            self.results.append(Result("grad_norm"))
            self.values.append(norm)
        if options.clip_value is not None:
            grads = clip_by_value(b, grads, options.clip_value)
        b.phase = "update"
        for fqn, grad in grads.items():
            self.update(fqn, grad, finite)
        b.loc = UNKNOWN
        if finite is not None:
            self.results.append(Result("finite"))
            self.values.append(finite)
            skipped = self.argument(SKIPPED)
            self.give(SKIPPED, b.select(finite, skipped, b.add(skipped, 1)))
        if scaling:
            assert finite is not None
            scale, tracker = self.argument(SCALE), self.argument(TRACKER)
            new_scale, new_tracker = next_scale(b, scale, tracker, finite, options.loss_scale)
            self.give(SCALE, new_scale)
            self.give(TRACKER, new_tracker)

    def update(self, fqn: str, grad: Value, finite: Value | None) -> None:
        """The optimizer's update of one parameter, of its low-precision copy and of its average."""
        b, argument = self.b, self.argument
        b.loc = layer_of(fqn)
        slot = self.parameters[fqn]
        inputs = [argument(s) for s in self.plan.slots(fqn)]
        new, states = self.plan.emit(b, fqn, argument(slot), grad, inputs)
        if finite is not None:
            new = b.select(finite, new, argument(slot))
            states = [(s, b.select(finite, value, argument(s))) for s, value in states]
        self.give(slot, new)
        for state_slot, value in states:
            self.give(state_slot, value)
        copy = self.copies.get(fqn)
        if copy is not None:
            self.give(copy, b.cast(new, dtype=copy.type.element))
        if self.options.ema is not None and slot.type.element.kind == "float":
            average = Slot("ema", f"{fqn} averaged", ("ema", fqn), slot.type)
            self.give(average, b.lerp(argument(average), new, argument(EMA_WEIGHT)))


def layer_of(parameter: str) -> Location:
    """The layer a parameter belongs to, as a location."""
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


def sizes(module: Op) -> dict[str, int]:
    """Number of ops by phase."""
    counts = dict.fromkeys(PHASES, 0)
    for function in functions(module):
        for op in function.regions[0].block:
            if op.phase:
                counts[op.phase] = counts.get(op.phase, 0) + 1
    return counts
