"""Opportunities as a plan and a machine see them: the bytes that the ledger would count per step, and their time.

A transformation looks at the program alone. Where ATen runs every op by itself the plan knows what one run of an op
moves, with the copies of results that its kernel allocates; the machine's description knows how long that takes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ..cost.accesses import Frame
from ..cost.ledger import Kernel
from ..cost.roofline import compute_seconds
from ..dialects.step.base import StepOp
from ..dialects.step.control import MicroBatches, root_of
from ..ir.builtin import functions
from ..ir.core import Op
from ..machine.description import LINKS, Description
from ..plan.planner import Planned
from ..transforms.opportunity import Change, Opportunity, Transformation, sites, transformations


def predicted(
    module: Op, found: Sequence[Opportunity], planned: Planned | None, machine: Description | None
) -> list[Opportunity]:
    """Opportunities of a program with what each would change in a step of this plan, on this machine.

    planned: None where nothing is known but the program; machine: None where none is described.
    """
    known, at, times = transformations(), sites(module), runs(module)
    runs_again = {name for name, how in known.items() if how.runs_again}
    again = {o.site: at[o.site] for o in found if not o.why_not and o.transformation in runs_again}
    moved = bytes_of_runs(planned, again)
    out = []
    for opportunity in found:
        change, site = opportunity.change, opportunity.site
        if change == Change():
            out.append(opportunity)
            continue
        how, op, count = known.get(opportunity.transformation), at.get(site), times.get(site.partition("/")[0], 1)
        own = moved.get(site, change.bytes) if how is not None and how.runs_again else change.bytes
        said = None if change.seconds is None else count * change.seconds
        change = replace(change, bytes=count * own, flops=count * change.flops, seconds=said)
        out.append(replace(opportunity, change=replace(change, seconds=seconds_of(change, how, op, machine))))
    return out


def runs(module: Op) -> dict[str, int]:
    """How often a step runs each function that it runs per micro-batch."""
    ops = [op for function in functions(module) for op in function.regions[0].block]
    return {op.callee.name: op.count for op in ops if op.definition is MicroBatches}


def bytes_of_runs(planned: Planned | None, wanted: Mapping[str, Op]) -> dict[str, int]:
    """What one run of some ops moves, by their sites, where ATen runs each by itself."""
    found: dict[str, int] = {}
    if planned is None or planned.fusion is not None:
        return found
    for part in (planned, *planned.bodies):
        place = {op: number for number, op in enumerate(part.function.regions[0].block)}
        launched = {launch.op: at for at, launch in enumerate(part.plan.launches) if launch.body < 0}
        frame = Frame(part)
        for site, op in sites(root_of(part.function)).items():
            if op in place and site in wanted and types_of(op) == types_of(wanted[site]):
                at = launched.get(place[op])  # a view is none
                calls = [] if at is None else frame.calls(at)
                found[site] = sum(access.bytes for call in calls for access in call)
    return found


def types_of(op: Op) -> list[object]:
    return [v.type for v in (*op.operands, *op.results)]


def seconds_of(change: Change, how: Transformation | None, op: Op | None, machine: Description | None) -> float | None:
    """Time of a change at the machine's limits, without what calls cost; None where the machine does not tell.

    What is done more takes the longer of its bytes and its products, and so does what is done less.
    """
    if change.seconds is not None or machine is None:
        return change.seconds
    if how is not None and how.over_link:
        rates = [machine.links.get(name) for name in LINKS]
        return sum(-change.saved / rate for rate in rates if rate) if all(rates) else None
    limits = [0.0, change.bytes / machine.bandwidth]
    if op is not None and issubclass(op.definition, StepOp) and op.operands:
        element, matrix = op.operands[0].type.element.text, op.definition.precision == "low"
        kernel = Kernel(op.name, op.phase, op.loc, flops=change.flops, element=element, matrix=matrix)
        limits.append(compute_seconds(kernel, machine) or 0.0)
    return max(limits) + min(limits)
