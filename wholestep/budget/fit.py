"""`fit_budget`: makes a step fit a memory budget by running ops of forward again in backward, as cheaply as it can.

The choice is made on a memory model (choice.py) that is read off the plan the step runs by, with kernels fused where
they are, and judged by the real plan (fitter.py). Where that is allowed, values may wait in host memory too (away.py).
A loss over a large vocabulary may be taken in chunks: the step is fitted with and without that, and the cheaper way is
taken. Where nothing fits so, a model of single ops is asked as well: a fused kernel runs again whole or not at all, and
often a part of it would do (a normalisation that shares its kernel with the sum that the layer before ends with).
Where that does not fit either, kernels that take much memory beside their tensors are left out (`Choices.leaner`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from ..backends.choose import Choices
from ..dialects.step.control import MicroBatches
from ..dialects.strides import Strides
from ..errors import MemoryBudgetError
from ..ir.builtin import lookup
from ..ir.core import Op
from ..ir.passes import run_pipeline
from ..machine.description import Description, shipped
from ..plan import Plan
from ..plan.planner import Planned
from ..transforms.chunked_loss import large_losses
from ..transforms.fusion_wishes import Wishes
from ..transforms.opportunity import Opportunity, apply_key, is_named, matches, opportunities, site_names
from .away import Away, fewest_away, send_away
from .choice import Segments, cut
from .copies import note_copies
from .exact import Exact, Solved, is_installed
from .fitter import Fitter, forward_function, way_of
from .graph import UNPRICED, graph_of, price
from .greedy import Greedy
from .impossible import impossible
from .report import BudgetReport
from .templates import find_templates
from .trials import Trials
from .windows import note_windows

#: transformations that a budget takes by itself
MEANS = ("recompute", "renormalize", "chunk-loss")
#: where nothing fits: how much more than the least of all ways one may need to be looked at closely, and the share of
#: the step that a kernel must take beside its tensors for others to be tried
CLOSE, MUCH = 1.1, 0.05


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
    def again(self) -> frozenset[int]:
        """What runs again."""
        return frozenset() if self.solved is None else self.solved.choice.again

    @property
    def peak(self) -> int:
        """What the step needs."""
        return self.fitter.peak(self.again, self.away.recipe)

    @property
    def plan(self) -> Plan:
        """The plan of the step."""
        return self.fitter.plan(self.again, self.away.recipe)

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
    if not fit.fits and choices is not None and may_be_leaner(fit, allowed):
        fit = min(fit, leaner(module, function, setting, losses), key=lambda f: (not f.fits, f.peak))
    if not fit.fits:
        kept_out, helps = rules_out(module, forbidden), fit.peak < plan.peak
        least, again = (fit.plan, len(fit.again)) if helps else (trials.planned(inside).plan, 0)
        raise MemoryBudgetError(impossible(least, allowed, again, kept_out, micro_batches(function)))
    return describe(fit, allowed, plan, machine), fit.apply(module)


def may_be_leaner(fit: Fit, allowed: int) -> bool:
    """Whether kernels take so much memory beside their tensors that a step could fit, or need much less, without."""
    beside = max([b.bytes for b in fit.plan.buffers if b.lifetime == "workspace"], default=0)
    return beside >= min(fit.peak - allowed, int(MUCH * fit.peak))


def leaner(module: Op, function: Op, setting: Setting, losses: Sequence[str]) -> Fit:
    """The cheapest way to fit by kernels that take little memory beside their tensors; the leanest where none fits."""
    old = setting.trials
    assert old.choices is not None
    trials = Trials(old.device, old.numbers, old.strides, old.choices.leaner(), old.wishes, old.note)
    copy, inside, before = with_losses(module, function, losses, trials)
    setting = replace(setting, trials=trials)
    return cheapest(module, function, Start.of(copy, inside, before, setting, Losses(tuple(losses))), setting)


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
    chunked = [c for c in large_losses(module) if not matches(c[0], setting.forbidden)]
    if chunked:
        ways.append(in_chunks(module, function, start, chunked, setting))
        if plain is None or ways[1].losses.seconds < plain.seconds:
            found.append(fitted(ways[1], setting))
    fitting = [fit for fit in found if fit is not None]
    if not fitting:
        ways = close(ways)
        lean = [leanest(way, setting) for way in ways]
        if setting.trials.fuses and not any(fit.fits for fit in lean):
            parts = [way.op_by_op(setting) for way in ways]
            lean += [fitted(part, setting) or leanest(part, setting) for part in close(parts)]
        fitting = [fit for fit in lean if fit.fits] or [min(lean, key=lambda f: f.peak)]
    return min(fitting, key=lambda f: f.seconds)


def close(ways: Sequence[Start]) -> list[Start]:
    """Those of some ways that may need the least: by the plans of what the model calls leanest."""
    needed = [way.fitter.peak(way.fitter.solver.leanest().choice.again) for way in ways]
    return [way for way, size in zip(ways, needed, strict=True) if size <= CLOSE * min(needed)]


@dataclass(frozen=True, slots=True)
class Start:
    """A step before anything runs again: how it is planned, and what can be decided about it."""

    fitter: Fitter
    planned: Planned
    losses: Losses

    @classmethod
    def of(cls, module: Op, function: Op, planned: Planned, setting: Setting, losses: Losses) -> Start:
        """planned: with marks."""
        fuses = setting.trials.fuses
        segments = segments_of(module, function, planned, setting, statistics=fuses)
        fitter = Fitter(module, function, setting.trials, segments, solver_of(segments), planned.plan, fuses)
        return cls(fitter, planned, losses)

    def op_by_op(self, setting: Setting) -> Start:
        """The same step, planned as before, where every op is decided about by itself."""
        module, function, trials = self.fitter.module, self.fitter.function, setting.trials
        single = trials.planned(function, marked=True, fused=False)
        segments = segments_of(module, function, single, setting, statistics=False, copies=True)
        fitter = Fitter(module, function, trials, segments, solver_of(segments), self.fitter.before)
        return Start(fitter, self.planned, self.losses)

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
    solved = fitter.search(setting.allowed)
    if solved is not None and (away is None or solved.choice.seconds <= away.extra_seconds):
        return Fit(fitter, solved, Away(), start.losses)
    return None if away is None else Fit(fitter, None, away, start.losses)


def leanest(start: Start, setting: Setting) -> Fit:
    """What needs next to no memory, whether it fits or not; with values sent away where it does not."""
    fitter = start.fitter
    lean = fitter.leanest(setting.allowed)
    fitting = [s for s in lean if fitter.peak(s.choice.again) <= setting.allowed]
    if fitting:
        return Fit(fitter, min(fitting, key=lambda s: s.choice.seconds), Away(), start.losses)
    solved = min(lean, key=lambda s: fitter.peak(s.choice.again))
    away = start.away_with(solved.choice.again, setting)  # neither is enough alone
    return Fit(fitter, solved, Away() if away is None else away, start.losses, fits=away is not None)


def solver_of(segments: Segments) -> Exact | Greedy:
    """What chooses: the exact solver where SciPy is there."""
    return Exact(segments) if is_installed() else Greedy(segments)


def segments_of(
    module: Op, function: Op, planned: Planned, setting: Setting, statistics: bool, copies: bool = False
) -> Segments:
    """What can be decided about a step, with the memory that its plan needs beside. planned: with marks.

    statistics: whether those of what runs again are kept. copies: what backward has copies of is taken as such.
    """
    block, inner = forward_function(module, function).regions[0].block, inner_plan(planned)
    names = site_names(module)
    graph = graph_of(inner, list(block), setting.machine)
    for node in graph.nodes:
        keys = [f"{way_of(op, statistics).name} {names[op]}" for op in node.ops]
        if any(is_named(key, setting.forbidden) for key in keys):
            node.again = False
    if copies:
        note_copies(graph, block)
    segments = cut(graph, find_templates(graph))
    note_windows(segments, inner.plan, planned.plan.peak - inner.plan.arena)
    return segments


def inner_plan(planned: Planned) -> Planned:
    """The plan that forward and backward are in: the step's own, or that of its micro-batches."""
    return planned.bodies[0] if planned.bodies else planned


def work_seconds(planned: Planned, machine: Description) -> float:
    """Predicted seconds of all launches of forward and backward, of one micro-batch where there are several."""
    inner = inner_plan(planned)
    launches = [x for x in inner.plan.launches if x.op >= 0 and x.reads and x.provider not in UNPRICED]
    return sum(price(launches, list(inner.function.regions[0].block), inner.plan, machine))


def describe(fit: Fit, budget: int, before: Plan, machine: Description) -> BudgetReport:
    fitter, solved, away = fit.fitter, fit.solved, fit.away
    report = BudgetReport(
        budget,
        before.peak,
        fit.peak,
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
        lean=fitter.trials.choices is not None and fitter.trials.choices.lean,
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


def micro_batches(function: Op) -> int:
    """How many micro-batches a step takes its batch in."""
    return next((op.count for op in function.regions[0].block if op.definition is MicroBatches), 1)


def priced(machine: Description | None, device: torch.device) -> Description:
    """A description to price ops with: the machine's own, or the shipped one of its kind that is said in the report."""
    if machine is not None and machine.gemm:
        return machine
    other = next(d for _, d in shipped() if d.kind == device.type and d.gemm)
    return replace(other, name=f"{other.name} (this machine is not described)")


def rules_out(module: Op, forbidden: Sequence[str]) -> bool:
    """Whether a user forbids something that a budget might have done."""
    found = opportunities(module, names=MEANS) if forbidden else []
    return any(matches(opportunity, forbidden) for opportunity in found if not opportunity.why_not)
