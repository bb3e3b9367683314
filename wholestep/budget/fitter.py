"""The search: choices of the memory model, each judged by the real plan of the step.

A choice is applied as `recompute` transformations; as `renormalize` for what fused kernels normalise, so that
statistics are kept. Where the plan needs more than the model said, the model's limit is moved by the difference and it
chooses again.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ..dialects.step.control import MicroBatches
from ..ir.builtin import lookup
from ..ir.core import Op
from ..ir.passes import run_pipeline
from ..plan import Plan
from ..transforms.kept import NORMALISATIONS, Renormalize, base_of
from ..transforms.opportunity import site_names
from ..transforms.recompute import Recompute
from ..transforms.regenerate import EARLY
from .away import send_away
from .choice import Segments, measure
from .exact import Exact, Solved
from .greedy import Greedy
from .trials import Trials

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
    """One step that is to fit, and what was tried.

    before: its plan where nothing runs again, which may have marks. statistics: whether those of what runs again are
    kept.
    """

    module: Op
    function: Op
    trials: Trials
    segments: Segments
    solver: Exact | Greedy
    before: Plan
    statistics: bool = False
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

    def peak(self, again: frozenset[int], away: tuple[str, ...] = ()) -> int:
        """What that plan needs."""
        return self.plan(again, away).peak if again or away else self.before.peak

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
        there = {same[op] for node in nodes if node.there for op in node.ops}
        names = site_names(module)
        recipe = []
        for op in reversed(list(same.values())):  # consumers come before their producers
            if there and not copied.isdisjoint(u for r in op.results for u in r.uses) and shown_by(op) in there:
                copied.add(op)
            how = way_of(op, self.statistics)
            if op in copied and how.late(op):
                recipe.append(f"{how.name} {names[op]}")
                how.apply(op)
        return recipe

    def search(self, budget: int) -> Solved | None:
        """The cheapest choice that was met whose plan fits, by moving the model's limit; None where none was met."""
        whole = measure(self.segments, ()).memory
        limit, step = budget - (self.before.peak - whole), 0
        enough = SLACK * self.before.arena
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

    def leanest(self, enough: int) -> list[Solved]:
        """Choices that need nearly as little as any can, by the model and by the plan; more until one fits `enough`.

        What the model calls leaner need not be so for the plan, so its neighbours are tried too, each also in all
        layers, and then ever less.
        """
        least = self.solver.leanest()
        span = measure(self.segments, ()).memory - least.choice.memory
        more = [self.solver.cheapest(least.choice.memory + span // part) for part in NEAR]
        found = [least, *[m for m in more if m is not None]]
        needed = min(self.peak(s.choice.again) for s in found)
        if needed > enough:
            uniform = dict.fromkeys(self.everywhere(s.choice.again) for s in found)
            found += [s for again in uniform if (s := self.solved(again, needed)) is not None]
        for _ in range(ROUNDS):
            needed = min(self.peak(s.choice.again) for s in found)
            better = self.search(needed - 1) if needed > enough else None
            if better is None:
                break
            found.append(better)
        return found

    def everywhere(self, again: frozenset[int]) -> frozenset[int]:
        """The same ops in all instances of their templates."""
        where = self.segments.where
        chosen = {where[node][:2] for node in again}
        return frozenset(node for node, (template, place, _, _) in enumerate(where) if (template, place) in chosen)

    def solved(self, again: frozenset[int], below: int) -> Solved | None:
        """A choice, with what the cheapest that holds as little costs; None where its plan needs `below` or more."""
        try:
            choice = measure(self.segments, again)
        except ValueError:  # it is no choice: something reads across layers
            return None
        if self.peak(again) >= below:
            return None
        best = self.solver.cheapest(choice.memory)
        return None if best is None else Solved(choice, best.bound)


def forward_function(module: Op, function: Op) -> Op:
    """Where forward and backward are: the step's own function, or that of its micro-batches."""
    for op in function.regions[0].block:
        if op.definition is MicroBatches:
            return lookup(module, op.callee)
    return function


def way_of(op: Op, statistics: bool) -> Recompute:
    """How an op runs again. statistics: whether those that a normalisation has found in forward are kept."""
    return Renormalize() if statistics and op.definition in NORMALISATIONS else Recompute()


def shown_by(op: Op) -> Op | None:
    """The op whose memory an op shows: itself, or that of what it is a view of."""
    return base_of(op.results[0]).op if op.results else None
