"""What became of fusion in a planned step: the recipe of its kernels, what was refused, and why two ops are not one.

The answers come from the record that `transforms/fuse.py` keeps (`Fusion`) and from who runs what in the plan.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import InputError
from ..ir.core import Op
from ..plan.planner import Planned
from ..transforms.again_wishes import INTO, NAME
from ..transforms.fuse import Fusion
from ..transforms.fusion_wishes import PREFIX
from ..transforms.opportunity import Change, Opportunity, fits

NOTHING = "nothing is fused in this step: only ATen may run it; see providers= and level="
#: what a name may stand for, the first that fits: sites, a layer (what it does in forward before anything else), an op
FORMS = ("{}", "*/{}/forward/*", "*/{}/loss/*", "*/{}.*/forward/*", "*/{}/*", "*/{}.*/*", "*/{}#*", "*/{}")


@dataclass(frozen=True, slots=True)
class Kernel:
    """Ops that were joined, and what runs them: a launch of the plan, or nobody but ATen, op by op."""

    sites: list[str]
    launch: int = -1
    function: str = ""
    provider: str = "aten"
    #: whether nobody runs them as one: then this is what became of the op that the others stand around
    divided: bool = False


def parts_of(planned: Planned | None) -> Iterator[tuple[Planned, Fusion]]:
    """A planned function and those it runs per micro-batch, as far as something was fused in them."""
    if planned is not None:
        if planned.fusion is not None:
            yield planned, planned.fusion
        for body in planned.bodies:
            yield from parts_of(body)


def kernels_of(planned: Planned | None) -> list[Kernel]:
    """All that was joined, in the order of the program."""
    found = []
    for part, fusion in parts_of(planned):
        number = {op: i for i, op in enumerate(part.function.regions[0].block)}
        launches = {launch.op: i for i, launch in enumerate(part.plan.launches) if launch.op >= 0}
        for op, sites in fusion.kernels:
            at = launches.get(number.get(op, -1), -1)
            divided = op.callee.name in fusion.divided
            run = Kernel(sites, at, part.plan.function, part.plan.launches[at].provider, divided)
            found.append(run if at >= 0 else Kernel(sites))
    return found


def recipe_of(planned: Planned | None) -> list[str]:
    """A line per kernel that is run as one, and per value that such kernels compute again."""
    run = [k for k in kernels_of(planned) if k.launch >= 0]
    there = {site for kernel in run for site in kernel.sites}
    again = [line for _, fusion in parts_of(planned) for line in fusion.again]
    lines = [f"{NAME} {line}" for line in again if there.issuperset(line.replace(INTO, " + ").split(" + "))]
    return [PREFIX + " + ".join(k.sites) for k in run] + lines


def refused(planned: Planned | None) -> list[Opportunity]:
    """Neighbours that are not one kernel, and what kernels could compute again, the most bytes first."""
    found = []
    for part, fusion in parts_of(planned):
        home = {site: i for i, kernel in enumerate(kernels_of(part)) for site in kernel.sites}
        for (producer, consumer), why in fusion.refusals.items():
            if home.get(producer, -1) != home.get(consumer, -2):
                change = Change(bytes=-fusion.gains[producer, consumer])
                found.append(Opportunity("fuse", f"{consumer} <- {producer}", change, why))
        for site, (more, why) in fusion.handed.items():
            found.append(Opportunity(NAME, site, Change(bytes=more), why))
    return sorted(found, key=lambda o: o.change.bytes)


def why_not(planned: Planned | None, a: str, b: str, program: Sequence[str] = ()) -> str:
    """One sentence: two ops are one kernel and who runs it, or why not.

    a, b: sites, patterns of them, or names of layers or ops. program: the sites of the program as users see it.
    """
    parts = list(parts_of(planned))
    if not parts:
        return NOTHING
    known = [site for _, fusion in parts for site in fusion.reads]
    first, second = matching(a, known, program), matching(b, known, program)
    if len(first | second) == 1:
        raise InputError(f"{a!r} and {b!r} are the same op; name two")
    return (
        in_one_kernel(kernels_of(planned), first, second)
        or refusal(parts, first, second)
        or next((s for _, fusion in parts if (s := neighbours(fusion, first, second))), "")
        or f"{pair(first, second)} are no neighbours: neither reads what the other makes"
    )


def matching(name: str, sites: Sequence[str], program: Sequence[str] = ()) -> set[str]:
    """The sites that a name stands for, or what is near it."""
    if not isinstance(name, str):
        raise InputError(
            f"ops are named by text, such as '*mlp*/gelu#0' or a layer's name, not by {type(name).__name__}"
        )
    if found := standing_for(name, sites):
        return found
    if gone := standing_for(name, program):
        why = "it is a view, which costs nothing, or it was written as simpler ops"
        raise InputError(f"{min(gone)} is no part of a kernel by itself: {why}; step.recipe names what kernels do")
    by_end = {site.rpartition("/")[2]: site for site in reversed(sites)}
    by_layer = {site.split("/")[1]: site for site in reversed(sites)}
    near = difflib.get_close_matches(name, sites, 3)
    for table in (by_layer, by_end):
        words = difflib.get_close_matches(name.rpartition("/")[2].strip("*"), table, 3)
        near += [table[word] for word in words if not near]
    hint = f"; near it are {', '.join(near)}" if near else ""
    raise InputError(f"{name!r} fits no op of the step{hint}; step.recipe and step.opportunities() name them")


def standing_for(name: str, sites: Sequence[str]) -> set[str]:
    every = ({site for site in sites if fits(site, form.format(name))} for form in FORMS)
    return next((found for found in every if found), set())


def pair(first: set[str], second: set[str]) -> str:
    """Two ops to speak of, one that each pattern fits."""
    one = min(first)
    return f"{one} and {min(second - {one})}" if second - {one} else f"{min(first - second)} and {min(second)}"


def in_one_kernel(kernels: Sequence[Kernel], first: set[str], second: set[str]) -> str:
    for kernel in sorted(kernels, key=lambda k: k.launch < 0):
        ours, theirs = first & set(kernel.sites), second & set(kernel.sites)
        if ours and theirs and len(ours | theirs) > 1:
            both = pair(ours, theirs)
            if kernel.launch < 0:
                return f"{both} could be one kernel, but ATen runs their ops one by one: nobody else does it faster"
            if kernel.divided:
                return f"{both} could be one kernel, but nobody runs them as one: {kernel.provider} runs a part"
            where = f"launch {kernel.launch} of {kernel.function}"
            return f"{both} are one kernel of {len(kernel.sites)} ops, {where}, run by {kernel.provider}"
    return ""


def refusal(parts: Sequence[tuple[Planned, Fusion]], first: set[str], second: set[str]) -> str:
    for _, fusion in parts:
        for (producer, consumer), why in fusion.refusals.items():
            if (producer in first and consumer in second) or (producer in second and consumer in first):
                return f"{producer} and {consumer} are not one kernel: {why}"
    return ""


def neighbours(fusion: Fusion, first: set[str], second: set[str]) -> str:
    """Of two ops one of which reads from the other: which of them is no part of a kernel."""
    for consumer, producers in fusion.reads.items():
        for producer in producers:
            if (producer in first and consumer in second) or (producer in second and consumer in first):
                for site in (producer, consumer):
                    if site in fusion.apart:
                        return f"{producer} and {consumer} are not one kernel: {fusion.apart[site]} ({site})"
                why = (
                    "the recipe has them apart" if fusion.replayed else "they are in different parts of a long program"
                )
                return f"{producer} and {consumer} are not one kernel: {why}"
    return ""


def loop_form(step: Any, site: str) -> Op:
    """The kernel that an op of a `TrainStep` became part of, in the loop dialect. site: a site or a pattern."""
    parts = list(parts_of(step._compiled.planned))
    wanted = matching(site, [name for _, fusion in parts for name in fusion.reads])
    for _, fusion in parts:
        for op, sites in fusion.kernels:
            body = fusion.bodies.get(op.callee.name)
            if wanted.intersection(sites) and body is not None and body.kernel is not None:
                return body.kernel
    raise InputError(f"{min(wanted)} is part of no kernel that has a loop form")
