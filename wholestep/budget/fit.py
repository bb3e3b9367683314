"""`fit_budget`: makes a step fit a memory budget by running ops of forward again in backward, as cheaply as it can.

The choice is made on a memory model (choice.py), applied as `recompute` transformations and judged by the real plan.
Where the plan needs more than the model said, the model's limit is moved by the difference and it chooses again. Where
that is allowed, values may wait in host memory too (away.py). A loss over a large vocabulary may be taken in chunks:
the step is fitted with and without that, and the cheaper way is taken.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch

from ..dialects.step.control import MicroBatches, root_of
from ..dialects.strides import Strides
from ..errors import MemoryBudgetError
from ..ir.builtin import lookup
from ..ir.core import Op
from ..ir.passes import run_pipeline
from ..machine.description import Description, shipped
from ..plan import Plan, plan_function
from ..transforms.chunked_loss import large_losses
from ..transforms.expand import expanded
from ..transforms.opportunity import Opportunity, apply_key, site_names
from ..transforms.recompute import Recompute, late_results
from ..transforms.regenerate import EARLY
from .away import Away, fewest_away, send_away
from .choice import Segments, cut, measure
from .exact import Exact, Solved, is_installed
from .graph import UNPRICED, graph_of, price
from .greedy import Greedy
from .report import BudgetReport, size_text
from .templates import find_templates
from .windows import note_windows

#: how often the plan is asked at most before the leanest choice is taken
TRIALS = 4
#: a choice that leaves less than this share of the activations unused is good enough
SLACK = 0.02


@dataclass(slots=True)
class Fitter:
    """One step that is to fit, and what was tried."""

    module: Op
    function: Op
    device: torch.device
    numbers: Sequence[int]
    strides: Sequence[Strides | None] | None
    segments: Segments
    views: set[Op]  # ops of forward that run nothing
    solver: Exact | Greedy
    plans: int = 1  # one before anything was tried
    tried: dict[tuple[frozenset[int], tuple[str, ...]], Plan] = field(default_factory=dict)

    def plan(self, again: frozenset[int], away: tuple[str, ...] = ()) -> Plan:
        """The plan of the step where these ops run again and these values wait in host memory, tried on a copy."""
        if (again, away) not in self.tried:
            self.plans += 1
            copy = self.changed(again)
            send_away(copy, away)
            function = lookup(copy, self.function.attributes["sym_name"])
            self.tried[again, away] = plan_function(function, self.device, self.numbers, strides=self.strides)[0]
        return self.tried[again, away]

    def changed(self, again: frozenset[int]) -> Op:
        """A copy of the module where these ops run again."""
        copy = self.module.clone()
        self.apply(copy, again)
        run_pipeline(copy, "dce")
        return copy

    def peak(self, again: frozenset[int]) -> int:
        return self.plan(again).peak

    def apply(self, module: Op, again: frozenset[int]) -> list[str]:
        """Makes ops run again, consumers before their producers; the recipe of it."""
        mine = forward_function(self.module, self.function).regions[0].block
        function = forward_function(module, lookup(module, self.function.attributes["sym_name"]))
        same = dict(zip(mine, function.regions[0].block, strict=True))
        copied = {same[op] for n in again if (op := self.segments.graph.nodes[n].op) is not None}
        for old, op in same.items():  # views of what runs again are made again too
            if old in self.views and any(v.op in copied for v in op.operands):
                copied.add(op)
        names = site_names(module)
        recipe = []
        recompute = Recompute()
        for op in reversed(list(same.values())):
            if op in copied and late_results(op):
                recipe.append(f"{Recompute.name} {names[op]}")
                recompute.apply(op)
        return recipe

    def search(self, budget: int, before: Plan) -> Solved | None:
        """The cheapest choice whose plan fits, by moving the model's limit; None where none was met."""
        limit = budget - (before.peak - measure(self.segments, ()).memory)
        enough = SLACK * before.arena
        good: int | None = None  # limits whose choice fits the plan, and that do not
        bad: int | None = None
        best: Solved | None = None
        seen: set[frozenset[int]] = set()
        for _ in range(TRIALS):
            solved = self.solver.cheapest(limit) if limit > 0 else None
            if solved is None or solved.choice.again in seen:
                break
            seen.add(solved.choice.again)
            left = budget - self.peak(solved.choice.again)
            if left >= 0:
                best, good = solved, limit
                if left <= enough or (bad is not None and bad - limit <= enough):
                    break
                limit = limit + left if bad is None else min(limit + left, (limit + bad) // 2)
            else:
                bad = limit
                limit = limit + left if good is None else max(limit + left, (limit + good) // 2)
        return best

    def leanest(self, before: Plan) -> list[Solved]:
        """Choices that need nearly as little as any can, by the model and by the plan, whatever the budget is."""
        least = self.solver.leanest()
        span = measure(self.segments, ()).memory - least.choice.memory
        more = [self.solver.cheapest(least.choice.memory + span * share // 10) for share in (1, 2)]
        found = [least, *[m for m in more if m is not None]]
        better = self.search(min(self.peak(s.choice.again) for s in found) - 1, before)
        return found if better is None else [*found, better]


@dataclass(frozen=True, slots=True)
class Setting:
    """What a step is to fit into, and by which means."""

    device: torch.device
    numbers: Sequence[int]
    strides: Sequence[Strides | None] | None
    allowed: int
    machine: Description
    forbidden: Sequence[str]
    offload: bool


@dataclass(frozen=True, slots=True)
class Chunked:
    """Losses that are taken in chunks: the recipe, bytes of logits not held, predicted seconds, (layer, chunks)."""

    recipe: tuple[str, ...] = ()
    bytes: int = 0
    seconds: float = 0.0
    where: tuple[tuple[str, int], ...] = ()


NOT_CHUNKED = Chunked()


@dataclass(frozen=True, slots=True)
class Fit:
    """One way to make a step fit. fits: False where it is the leanest that was found, and not lean enough."""

    fitter: Fitter
    solved: Solved | None
    away: Away
    chunked: Chunked
    fits: bool = True

    @property
    def seconds(self) -> float:
        """Predicted, per step, beyond those of the step as it was."""
        again = 0.0 if self.solved is None else self.solved.choice.seconds
        return self.chunked.seconds + again + self.away.extra_seconds

    @property
    def plan(self) -> Plan:
        """The plan of the step, op by op."""
        again: frozenset[int] = frozenset() if self.solved is None else self.solved.choice.again
        return self.fitter.plan(again, self.away.recipe)

    def apply(self, module: Op) -> list[str]:
        """Changes a program, the one that was looked at or a copy of it; the recipe."""
        recipe = [apply_key(module, key) for key in self.chunked.recipe]
        if recipe:
            run_pipeline(module, "dce")
        if self.solved is not None:
            recipe += self.fitter.apply(module, self.solved.choice.again)
        run_pipeline(module, "dce")
        send_away(module, self.away.recipe)
        return [*recipe, *self.away.recipe]


def fit_budget(
    module: Op,
    function: Op,
    device: torch.device | str,
    numbers: Sequence[int],
    strides: Sequence[Strides | None] | None,
    budget: int | float,
    machine: Description | None,
    forbidden: Sequence[str] = (),
    offload: bool = False,
    judge: Callable[[Op], Plan] | None = None,
) -> tuple[BudgetReport, list[str]]:
    """Changes the program so that its plan needs no more than the budget; the report, and the recipe of what was done.

    budget: bytes, or as a float a share of the peak without it. offload: values may also wait in host memory: where
    that is hidden behind the step's work or cheaper than running ops again, and where running again is not enough.
    judge: the plan that a function will really run by, where that is not the one op by op: kernels that are fused need
    less. What to run again is chosen op by op, for a budget that is larger as the plans are, and that plan has the last
    word. MemoryBudgetError where no choice fits; the program is as it was then.
    """
    device = torch.device(device)
    machine = priced(machine, device)
    before, form = plan_function(function, device, numbers, strides=strides)
    whole = before if judge is None else judge(function)
    allowed = int(budget * whole.peak) if isinstance(budget, float) else budget
    if whole.peak <= allowed:
        return BudgetReport(allowed, whole.peak, whole.peak, whole.peak - whole.arena, machine.name), []
    setting = Setting(device, numbers, strides, allowed * before.peak // whole.peak, machine, forbidden, offload)

    def tried(setting: Setting) -> tuple[Fit, Plan]:
        fit = cheapest(module, function, before, form, setting)
        if judge is None:
            return fit, fit.plan
        copy = module.clone()
        fit.apply(copy)
        return fit, judge(lookup(copy, function.attributes["sym_name"]))

    fit, plan = tried(setting)
    for trial in range(TRIALS):  # what a plan op by op gains the fused one may not: more is asked of it, and more
        if plan.peak <= allowed or not fit.fits:
            break
        less = min(setting.allowed * allowed // plan.peak, setting.allowed * (50 - 2**trial) // 50)
        setting = replace(setting, allowed=less if trial + 1 < TRIALS else 0)  # 0: the leanest
        fit, plan = tried(setting)
    if plan.peak > allowed:
        raise MemoryBudgetError(impossible(plan, allowed))
    report = describe(fit, allowed, whole, plan, machine)
    if judge is not None:
        report = replace(report, op_by_op=(before.peak, fit.plan.peak))
    return report, fit.apply(module)


def cheapest(module: Op, function: Op, before: Plan, form: Op, setting: Setting) -> Fit:
    """The cheapest way to fit, with losses in chunks or without; the leanest where none fits."""
    found = [fitted(module, function, before, form, setting)]
    chunked = [c for c in large_losses(module) if not is_forbidden(c[0].key, setting.forbidden)]
    if chunked:
        seconds = work_seconds(module, function, before, form, setting.machine, setting.device)
        found.append(fitted_in_chunks(module, function, chunked, seconds, setting))
    fitting = [fit for fit in found if fit.fits]
    return min(fitting, key=lambda f: f.seconds) if fitting else min(found, key=lambda f: f.plan.peak)


def fitted_in_chunks(
    module: Op, function: Op, found: Sequence[tuple[Opportunity, int, str]], seconds: float, setting: Setting
) -> Fit:
    """The cheapest way that takes these losses in chunks. seconds: predicted for the step without that."""
    copy = module.clone()
    recipe = tuple(apply_key(copy, opportunity.key) for opportunity, _, _ in found)
    run_pipeline(copy, "dce")
    function = lookup(copy, function.attributes["sym_name"])
    before, form = plan_function(function, setting.device, setting.numbers, strides=setting.strides)
    more = work_seconds(copy, function, before, form, setting.machine, setting.device) - seconds
    size = -sum(opportunity.change.saved for opportunity, _, _ in found)
    where = tuple((layer, count) for _, count, layer in found)
    return fitted(copy, function, before, form, setting, Chunked(recipe, size, max(0.0, more), where))


def fitted(module: Op, function: Op, before: Plan, form: Op, setting: Setting, chunked: Chunked = NOT_CHUNKED) -> Fit:
    """The cheapest way to make a step fit by running ops again or sending values away; the leanest where none does.

    before, form: the plan of the step as it is, and the planned function.
    """
    device, allowed, machine, forbidden = setting.device, setting.allowed, setting.machine, setting.forbidden
    segments, views = segments_of(module, function, before, form, machine, device, forbidden)
    solver = Exact(segments) if is_installed() else Greedy(segments)
    fitter = Fitter(module, function, device, setting.numbers, setting.strides, segments, views, solver)
    fitter.tried[frozenset(), ()] = before
    if before.peak <= allowed:
        return Fit(fitter, None, Away(), chunked)
    seconds = work_seconds(module, function, before, form, machine, device) if setting.offload else 0.0

    def away_with(again: frozenset[int]) -> Away | None:
        if not setting.offload:
            return None
        return fewest_away(
            fitter.changed(again), lambda keys: fitter.plan(again, keys), allowed, forbidden, machine, seconds
        )

    away = away_with(frozenset())
    solved: Solved | None = None
    if away is None or away.extra_seconds > 0:
        solved = fitter.search(allowed, before)
        lean = fitter.leanest(before) if solved is None else []
        fitting = [s for s in lean if fitter.peak(s.choice.again) <= allowed]
        if fitting:
            solved = min(fitting, key=lambda s: s.choice.seconds)
        if away is None and solved is None:  # neither is enough alone
            solved = min(lean, key=lambda s: fitter.peak(s.choice.again))
            away = away_with(solved.choice.again)
            if away is None:
                return Fit(fitter, solved, Away(), chunked, fits=False)
        elif solved is not None and (away is None or solved.choice.seconds <= away.extra_seconds):
            away = None
        else:
            solved = None
    return Fit(fitter, solved, Away() if away is None else away, chunked)


def segments_of(
    module: Op,
    function: Op,
    plan: Plan,
    form: Op,
    machine: Description,
    device: torch.device,
    forbidden: Sequence[str] = (),
) -> tuple[Segments, set[Op]]:
    """What can be decided about a step, with the memory that its plan needs beside; and the views of forward.

    form: the planned function.
    """
    forward, inner, form = forward_plan(module, function, plan, form, device)
    names, sites = site_names(module), site_names(root_of(form))
    program = {names[op]: op for op in forward.regions[0].block if op in names}
    planned = list(form.regions[0].block)
    originals = {n: program[sites[op]] for n, op in enumerate(planned) if sites.get(op) in program}
    graph = graph_of(inner, planned, originals, machine)
    for node in graph.nodes:
        if node.op is not None and is_forbidden(f"{Recompute.name} {names[node.op]}", forbidden):
            node.again = False
    segments = cut(graph, find_templates(graph))
    note_windows(segments, inner, plan.peak - inner.arena)
    views = {op for op in originals.values() if is_early(op)} - {node.op for node in graph.nodes}
    return segments, views


def forward_plan(module: Op, function: Op, plan: Plan, form: Op, device: torch.device) -> tuple[Op, Plan, Op]:
    """The function that forward and backward are in, its plan, and its planned form."""
    forward = forward_function(module, function)
    return (function, plan, form) if forward is function else (forward, plan.bodies[0], expanded(forward, device))


def work_seconds(module: Op, function: Op, plan: Plan, form: Op, machine: Description, device: torch.device) -> float:
    """Predicted seconds of all launches of forward and backward, of one micro-batch where there are several."""
    _, inner, form = forward_plan(module, function, plan, form, device)
    launches = [x for x in inner.launches if x.op >= 0 and x.reads and x.provider not in UNPRICED]
    return sum(price(launches, list(form.regions[0].block), inner, machine))


def describe(fit: Fit, budget: int, before: Plan, after: Plan, machine: Description) -> BudgetReport:
    fitter, solved, away = fit.fitter, fit.solved, fit.away
    report = BudgetReport(
        budget,
        before.peak,
        after.peak,
        before.peak - before.arena,
        machine.name,
        plans=fitter.plans,
        offloaded=len(away.recipe),
        offloaded_bytes=away.bytes,
        link_seconds=away.link_seconds,
        step_seconds=away.step_seconds,
        chunked=fit.chunked.where,
        chunked_bytes=fit.chunked.bytes,
        chunked_seconds=fit.chunked.seconds,
    )
    if solved is None:
        return report
    choice, segments = solved.choice, fitter.segments
    greedy = Greedy(segments).cheapest(choice.memory)
    layers = []
    for number, template in enumerate(segments.templates):
        if template.count > 1:
            touched = {segments.where[n][2] for n in choice.again if segments.where[n][0] == number}
            layers.append((segments.graph.nodes[template.start].layer, template.count, len(touched)))
    return replace(
        report,
        recomputed=len(choice.again),
        recomputed_bytes=sum(segments.graph.late_bytes(n) for n in choice.again),
        extra_seconds=choice.seconds,
        solver=fitter.solver.name,
        bound_seconds=solved.bound,
        greedy_seconds=None if greedy is None else greedy.choice.seconds,
        templates=tuple(layers),
    )


def impossible(plan: Plan, budget: int) -> str:
    """Why a budget cannot be met, the least that can, and what that is made of. `plan`: that of the leanest step."""
    parts = dict.fromkeys(WORDS.values(), 0)
    curve = plan.live_bytes()
    at = max(range(len(curve)), key=curve.__getitem__, default=0)
    largest, where = 0, ""
    for buffer in plan.buffers:
        if buffer.base >= 0 or buffer.space == "host":
            continue
        in_arena = buffer.space == "arena"
        if in_arena and not buffer.first <= at <= buffer.last:
            continue
        parts[WORDS.get(buffer.lifetime, "activations")] += buffer.bytes
        if in_arena and buffer.bytes > largest and buffer.first >= 0:
            launch = plan.launches[buffer.first]
            largest, where = buffer.bytes, f"{launch.name.removeprefix('step.')} in {launch.layer or launch.phase}"
    shown = ", ".join(f"{name} {size_text(b)}" for name, b in sorted(parts.items(), key=lambda p: -p[1]) if b)
    needed = plan.peak
    return (
        f"memory_budget is {size_text(budget)} ({budget:,} bytes), and the least found to do for this step is "
        f"{size_text(needed)} ({needed:,} bytes), with all that helps computed again in backward. At its peak there "
        f"are {shown}; the largest tensor of the step's own is {size_text(largest)}, made by {where}. "
        f"Give memory_budget={needed} or more, a smaller batch, or accumulate=2"
    )


#: what the memory of a plan is called in an error
WORDS = {
    "param": "parameters",
    "opt_state": "optimizer state",
    "state": "buffers and other state",
    "batch": "the batch",
    "constant": "constants",
    "grad": "gradients",
    "activation": "activations",
    "transient": "temporaries",
    "output": "outputs",
    "workspace": "temporaries",
}


def forward_function(module: Op, function: Op) -> Op:
    """Where forward and backward are: the step's own function, or that of its micro-batches."""
    for op in function.regions[0].block:
        if op.definition is MicroBatches:
            return lookup(module, op.callee)
    return function


def priced(machine: Description | None, device: torch.device) -> Description:
    """A description to price ops with: the machine's own, or the shipped one of its kind that is said in the report."""
    if machine is not None and machine.gemm:
        return machine
    other = next(d for _, d in shipped() if d.kind == device.type and d.gemm)
    return replace(other, name=f"{other.name} (this machine is not described)")


def is_early(op: Op) -> bool:
    return op.phase in EARLY


def is_forbidden(key: str, patterns: Sequence[str]) -> bool:
    return any(key == p or fnmatch.fnmatchcase(key, p) for p in patterns)
