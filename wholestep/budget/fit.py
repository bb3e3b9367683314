"""`fit_budget`: makes a step fit a memory budget by running ops of forward again in backward, as cheaply as it can.

The choice is made on a memory model (choice.py) that is read off the plan the step runs by, with kernels fused where
they are. It is applied as `recompute` transformations (`renormalize` for what fused kernels normalise: statistics are
kept) and judged by the real plan. Where the plan needs more than the model said, the model's limit is moved by the
difference and it chooses again. Where that is allowed, values may wait in host memory too (away.py). A loss over a
large vocabulary may be taken in chunks: the step is fitted with and without that, and the cheaper way is taken.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch

from ..backends.choose import Choices
from ..dialects.step.control import MicroBatches
from ..dialects.strides import Strides
from ..errors import MemoryBudgetError
from ..ir.builtin import lookup
from ..ir.core import Op
from ..ir.passes import run_pipeline
from ..machine.description import Description, shipped
from ..plan import Buffer, Launch, Plan
from ..plan.planner import Planned
from ..transforms.chunked_loss import large_losses
from ..transforms.fusion_wishes import Wishes
from ..transforms.kept import NORMALISATIONS, Renormalize
from ..transforms.opportunity import Opportunity, apply_key, site_names
from ..transforms.recompute import Recompute
from ..transforms.regenerate import EARLY
from .away import Away, fewest_away, send_away
from .choice import Segments, cut, measure
from .exact import Exact, Solved, is_installed
from .graph import UNPRICED, graph_of, price
from .greedy import Greedy
from .report import BudgetReport, size_text
from .templates import find_templates
from .trials import Trials
from .windows import note_windows

#: how often the plan is asked at most before the leanest choice is taken
TRIALS = 6
#: a choice that leaves less than this share of the activations unused is good enough
SLACK = 0.02
#: where nothing fits: which parts of what the model can save are tried above its least, and how often less than the
#: least that was found is asked for
NEAR = (64, 32, 16, 8, 4)
ROUNDS = 4


@dataclass(slots=True)
class Fitter:
    """One step that is to fit, and what was tried."""

    module: Op
    function: Op
    trials: Trials
    segments: Segments
    solver: Exact | Greedy
    tried: dict[tuple[frozenset[int], tuple[str, ...]], Plan] = field(default_factory=dict)

    def plan(self, again: frozenset[int], away: tuple[str, ...] = ()) -> Plan:
        """The plan of the step where these ops run again and these values wait in host memory, tried on a copy."""
        if (again, away) not in self.tried:
            copy = self.changed(again)
            send_away(copy, away)
            function = lookup(copy, self.function.attributes["sym_name"])
            self.tried[again, away] = self.trials.planned(function).plan
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
        """Makes kernels run again, all their ops that backward then reads from; the recipe of it."""
        mine = forward_function(self.module, self.function).regions[0].block
        function = forward_function(module, lookup(module, self.function.attributes["sym_name"]))
        same = dict(zip(mine, function.regions[0].block, strict=True))
        nodes = self.segments.graph.nodes
        copied = {same[op] for n in again for op in nodes[n].ops}
        decided = {same[op] for node in nodes for op in node.ops}
        for op in same.values():  # views of what runs again are made again too
            if op.phase in EARLY and op not in decided and any(v.op in copied for v in op.operands):
                copied.add(op)
        names = site_names(module)
        recipe = []
        for op in reversed(list(same.values())):  # consumers come before their producers
            how = way_of(op, self.trials.fuses)
            if op in copied and how.late(op):
                recipe.append(f"{how.name} {names[op]}")
                how.apply(op)
        return recipe

    def search(self, budget: int, before: Plan) -> Solved | None:
        """The cheapest choice that was met whose plan fits, by moving the model's limit; None where none was met."""
        whole = measure(self.segments, ()).memory
        limit, step = budget - (before.peak - whole), 0
        enough = SLACK * before.arena
        good, bad = 0, whole  # limits whose choice fits the plan, and that do not
        fitting: list[Solved] = []
        for _ in range(TRIALS):
            solved = self.solver.cheapest(limit) if limit > 0 else None
            if solved is None and fitting:
                break
            last = solved is None  # the least that the model knows of
            solved = solved or self.solver.leanest()
            left = budget - self.peak(solved.choice.again)
            if left >= 0:
                fitting.append(solved)
                good = solved.choice.memory if last else limit
                if left <= enough or bad - good <= enough:
                    break
                limit = min(good + left, (good + bad) // 2)
            elif last:
                break
            else:
                bad = limit
                step = max(-left, 2 * step)  # a plan may gain late: ever more is asked of it
                limit = max(limit + left, (bad + good) // 2) if fitting else limit - step
        return min(fitting, key=lambda s: s.choice.seconds, default=None)

    def leanest(self, before: Plan, enough: int) -> list[Solved]:
        """Choices that need nearly as little as any can, by the model and by the plan; more until one fits `enough`.

        What the model calls leaner need not be so for the plan, so its neighbours are tried too, and then ever less.
        """
        least = self.solver.leanest()
        span = measure(self.segments, ()).memory - least.choice.memory
        more = [self.solver.cheapest(least.choice.memory + span // part) for part in NEAR]
        found = [least, *[m for m in more if m is not None]]
        for _ in range(ROUNDS):
            needed = min(self.peak(s.choice.again) for s in found)
            better = self.search(needed - 1, before) if needed > enough else None
            if better is None:
                break
            found.append(better)
        return found


@dataclass(frozen=True, slots=True)
class Setting:
    """What a step is to fit into, and by which means."""

    trials: Trials
    allowed: int
    machine: Description
    forbidden: Sequence[str]
    offload: bool


@dataclass(frozen=True, slots=True)
class Losses:
    """What is done to losses: the recipe. Of chunks: bytes of logits not held, predicted seconds, (layer, chunks)."""

    recipe: tuple[str, ...] = ()
    bytes: int = 0
    seconds: float = 0.0
    where: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Fit:
    """One way to make a step fit. fits: False where it is the leanest that was found, and not lean enough."""

    fitter: Fitter
    solved: Solved | None
    away: Away
    losses: Losses
    fits: bool = True

    @property
    def seconds(self) -> float:
        """Predicted, per step, beyond those of the step as it was."""
        again = 0.0 if self.solved is None else self.solved.choice.seconds
        return self.losses.seconds + again + self.away.extra_seconds

    @property
    def plan(self) -> Plan:
        """The plan of the step."""
        again: frozenset[int] = frozenset() if self.solved is None else self.solved.choice.again
        return self.fitter.plan(again, self.away.recipe)

    def apply(self, module: Op) -> list[str]:
        """Changes a program, the one that was looked at or a copy of it; the recipe."""
        recipe = change_losses(module, self.losses.recipe)
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
    choices: Choices | None = None,
    wishes: Wishes | None = None,
    note: Callable[[Planned], None] | None = None,
    losses: Sequence[str] = (),
) -> tuple[BudgetReport, list[str]]:
    """Changes the program so that its plan needs no more than the budget; the report, and the recipe of what was done.

    budget: bytes, or as a float a share of the peak without it. losses: what is done to losses without a budget (keys);
    here it is taken too, unless they go in chunks. offload: values may also wait in host memory: where
    that is hidden behind the step's work or cheaper than running ops again, and where running again is not enough.
    choices, wishes: who runs regions and what a user asks of fusion, as for the plan that the step will run by. note:
    writes down in a plan what libraries take beside it, which counts. MemoryBudgetError where no choice fits; the
    program is as it was then.
    """
    trials = Trials(torch.device(device), numbers, strides, choices, wishes, note)
    machine = priced(machine, trials.device)
    copy, inside, before = with_losses(module, function, losses, trials)
    plan = before.plan if wishes is None or wishes == Wishes() else trials.planned(inside).plan
    allowed = int(budget * plan.peak) if isinstance(budget, float) else budget
    if plan.peak <= allowed:
        report = BudgetReport(allowed, plan.peak, plan.peak, plan.peak - plan.arena, machine.name)
        return report, change_losses(module, losses)
    setting = Setting(trials, allowed, machine, forbidden, offload)
    fit = cheapest(module, function, Start.of(copy, inside, before, setting, Losses(tuple(losses))), setting)
    if not fit.fits:
        raise MemoryBudgetError(impossible(fit.plan, allowed, micro_batches(function)))
    return describe(fit, allowed, plan, fit.plan, machine), fit.apply(module)


def with_losses(module: Op, function: Op, keys: Sequence[str], trials: Trials) -> tuple[Op, Op, Planned]:
    """A copy of a program where something is done to its losses, its function, and its plan with marks."""
    copy = module.clone()
    change_losses(copy, keys)
    inside = lookup(copy, function.attributes["sym_name"])
    return copy, inside, trials.planned(inside, marked=True)


def change_losses(module: Op, keys: Sequence[str]) -> list[str]:
    """Does to losses what the keys say; the recipe."""
    recipe = [apply_key(module, key) for key in keys]
    if recipe:
        run_pipeline(module, "dce")
    return recipe


def cheapest(module: Op, function: Op, start: Start, setting: Setting) -> Fit:
    """The cheapest way to fit, with losses in chunks or without; the leanest where none fits."""
    ways = [start]
    plain = fitted(start, setting)
    found = [plain]
    chunked = [c for c in large_losses(module) if not is_forbidden(c[0].key, setting.forbidden)]
    if chunked:
        ways.append(in_chunks(module, function, start, chunked, setting))
        if plain is None or ways[1].losses.seconds < plain.seconds:
            found.append(fitted(ways[1], setting))
    fitting = [fit for fit in found if fit is not None]
    if not fitting:
        fitting = [leanest(way, setting) for way in ways]
        fitting = [fit for fit in fitting if fit.fits] or [min(fitting, key=lambda f: f.plan.peak)]
    return min(fitting, key=lambda f: f.seconds)


@dataclass(frozen=True, slots=True)
class Start:
    """A step before anything runs again: how it is planned, and what can be decided about it."""

    fitter: Fitter
    planned: Planned
    losses: Losses

    @classmethod
    def of(cls, module: Op, function: Op, planned: Planned, setting: Setting, losses: Losses) -> Start:
        """planned: with marks."""
        segments = segments_of(module, function, planned, setting)
        solver = Exact(segments) if is_installed() else Greedy(segments)
        fitter = Fitter(module, function, setting.trials, segments, solver)
        fitter.tried[frozenset(), ()] = planned.plan
        return cls(fitter, planned, losses)

    def away_with(self, again: frozenset[int], setting: Setting) -> Away | None:
        """The fewest values that wait in host memory so that the step fits where these ops run again."""
        if not setting.offload:
            return None
        fitter, seconds = self.fitter, work_seconds(self.planned, setting.machine)
        module, allowed = fitter.changed(again), setting.allowed
        return fewest_away(
            module, lambda keys: fitter.plan(again, keys), allowed, setting.forbidden, setting.machine, seconds
        )


def in_chunks(
    module: Op, function: Op, start: Start, found: Sequence[tuple[Opportunity, int, str]], setting: Setting
) -> Start:
    """The step where these losses are taken in chunks."""
    keys = tuple(opportunity.key for opportunity, _, _ in found)
    copy, inside, planned = with_losses(module, function, keys, setting.trials)
    more = work_seconds(planned, setting.machine) - work_seconds(start.planned, setting.machine)
    size = -sum(opportunity.change.saved for opportunity, _, _ in found)
    where = tuple((layer, count) for _, count, layer in found)
    return Start.of(copy, inside, planned, setting, Losses(keys, size, max(0.0, more), where))


def fitted(start: Start, setting: Setting) -> Fit | None:
    """The cheapest way to make a step fit by running ops again or sending values away; None where none is met."""
    fitter, before = start.fitter, start.planned.plan
    if before.peak <= setting.allowed:
        return Fit(fitter, None, Away(), start.losses)
    away = start.away_with(frozenset(), setting)
    if away is not None and away.extra_seconds == 0:
        return Fit(fitter, None, away, start.losses)
    solved = fitter.search(setting.allowed, before)
    if solved is not None and (away is None or solved.choice.seconds <= away.extra_seconds):
        return Fit(fitter, solved, Away(), start.losses)
    return None if away is None else Fit(fitter, None, away, start.losses)


def leanest(start: Start, setting: Setting) -> Fit:
    """What needs next to no memory, whether it fits or not; with values sent away where it does not."""
    fitter = start.fitter
    lean = fitter.leanest(start.planned.plan, setting.allowed)
    fitting = [s for s in lean if fitter.peak(s.choice.again) <= setting.allowed]
    if fitting:
        return Fit(fitter, min(fitting, key=lambda s: s.choice.seconds), Away(), start.losses)
    solved = min(lean, key=lambda s: fitter.peak(s.choice.again))
    away = start.away_with(solved.choice.again, setting)  # neither is enough alone
    return Fit(fitter, solved, Away() if away is None else away, start.losses, fits=away is not None)


def segments_of(module: Op, function: Op, planned: Planned, setting: Setting) -> Segments:
    """What can be decided about a step, with the memory that its plan needs beside. planned: with marks."""
    forward, inner = forward_function(module, function), inner_plan(planned)
    names, fuses = site_names(module), setting.trials.fuses
    graph = graph_of(inner, list(forward.regions[0].block), setting.machine)
    for node in graph.nodes:
        keys = [f"{way_of(op, fuses).name} {names[op]}" for op in node.ops]
        if any(is_forbidden(key, setting.forbidden) for key in keys):
            node.again = False
    segments = cut(graph, find_templates(graph))
    note_windows(segments, inner.plan, planned.plan.peak - inner.plan.arena)
    return segments


def inner_plan(planned: Planned) -> Planned:
    """The plan that forward and backward are in: the step's own, or that of its micro-batches."""
    return planned.bodies[0] if planned.bodies else planned


def way_of(op: Op, fuses: bool) -> Recompute:
    """How an op runs again."""
    return Renormalize() if fuses and op.definition in NORMALISATIONS else Recompute()


def work_seconds(planned: Planned, machine: Description) -> float:
    """Predicted seconds of all launches of forward and backward, of one micro-batch where there are several."""
    inner = inner_plan(planned)
    launches = [x for x in inner.plan.launches if x.op >= 0 and x.reads and x.provider not in UNPRICED]
    return sum(price(launches, list(inner.function.regions[0].block), inner.plan, machine))


def describe(fit: Fit, budget: int, before: Plan, after: Plan, machine: Description) -> BudgetReport:
    fitter, solved, away = fit.fitter, fit.solved, fit.away
    report = BudgetReport(
        budget,
        before.peak,
        after.peak,
        before.peak - before.arena,
        machine.name,
        plans=fitter.trials.count,
        offloaded=len(away.recipe),
        offloaded_bytes=away.bytes,
        link_seconds=away.link_seconds,
        step_seconds=away.step_seconds,
        chunked=fit.losses.where,
        chunked_bytes=fit.losses.bytes,
        chunked_seconds=fit.losses.seconds,
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


def impossible(plan: Plan, budget: int, micro_batches: int = 1) -> str:
    """Why a budget cannot be met, the least that can, and what that is made of. `plan`: that of the leanest step."""
    held = list(held_at_peak(plan))
    parts = {"memory that kernels take by themselves": plan.made}
    for _, buffer in held:
        word = WORDS.get(buffer.lifetime, "activations")
        parts[word] = parts.get(word, 0) + buffer.bytes
    own = [(b.bytes, launches[b.first]) for launches, b in held if b.space == "arena" and b.first >= 0]
    largest, launch = max(own, key=lambda o: o[0], default=(0, None))
    made_by = "" if launch is None else f"{launch.name.removeprefix('step.')} in {launch.layer or launch.phase}"
    shown = ", ".join(f"{name} {size_text(b)}" for name, b in sorted(parts.items(), key=lambda p: -p[1]) if b)
    needed = plan.peak
    grows = sum(parts.get(word, 0) for word in ("activations", "temporaries", "the batch"))  # with the batch
    accumulate = f", or accumulate={2 * micro_batches}" if grows > parts.get("parameters", 0) else ""
    return (
        f"memory_budget is {size_text(budget)} ({budget:,} bytes), and the least found to do for this step is "
        f"{size_text(needed)} ({needed:,} bytes), with all that helps computed again in backward. At its peak there "
        f"are {shown}; the largest tensor of the step's own is {size_text(largest)}, made by {made_by}. "
        f"Give memory_budget={needed} or more, or a smaller batch{accumulate}"
    )


def held_at_peak(plan: Plan) -> Iterator[tuple[list[Launch], Buffer]]:
    """What owns memory when most of the arena is in use, with the launches it counts by; that of micro-batches too."""
    curve = plan.live_bytes()
    at = max(range(len(curve)), key=curve.__getitem__, default=0)
    inside = plan.launches[at] if plan.launches and plan.launches[at].body >= 0 else None
    for number, buffer in enumerate(plan.buffers):
        if buffer.base >= 0 or buffer.space == "host" or (inside is not None and number == inside.workspace):
            continue
        if buffer.space != "arena" or buffer.first <= at <= buffer.last:
            yield plan.launches, buffer
    if inside is not None:
        yield from (held for held in held_at_peak(plan.bodies[inside.body]) if held[1].space == "arena")


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


def micro_batches(function: Op) -> int:
    """How many micro-batches a step takes its batch in."""
    return next((op.count for op in function.regions[0].block if op.definition is MicroBatches), 1)


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


def is_forbidden(key: str, patterns: Sequence[str]) -> bool:
    return any(key == p or fnmatch.fnmatchcase(key, p) for p in patterns)
