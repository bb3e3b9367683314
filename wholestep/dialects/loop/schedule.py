"""What a kernel's reductions ask of the code that runs it: which dimensions make a row, what is summed over rows.

A reduction whose result comes back to the points it was made of (the maximum in a softmax) is an *inner* one: all
inner reductions of a kernel go over the same dimensions, which are then its rows. The others are *final*: along the
row, or over all rows (partial sums that a second, small kernel finishes), and what is computed from them has no row
dimension left.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...ir.core import Op, Value
from .ops import Constant, Index, Load, Reduce, Space, Store


class NoSchedule(Exception):
    """No kernel can do this in one walk; the message says why."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """How a kernel walks: `outer` dimensions select a row, `row` dimensions are walked in it.

    along: reductions over the row, in order; a value that comes after one of them knows its result at once.
    across: reductions over all points that `outer` (and maybe `row`) dimensions make, finished at the end. Their
        results keep the dimensions of the row that they do not reduce.
    after: values computed from results of `across`, and loads that go with them, in order: the finishing kernel's.
    """

    sizes: tuple[int, ...]
    outer: tuple[int, ...]
    row: tuple[int, ...]
    along: tuple[Op, ...]
    across: tuple[Op, ...]
    after: tuple[Op, ...]


def space_of(function: Op) -> tuple[int, ...]:
    """The sizes of a kernel's iteration dimensions."""
    first = function.regions[0].block.first
    assert first is not None and first.definition is Space
    return first.attributes["sizes"]


def inputs_of(function: Op) -> list[Value]:
    """The arguments that the kernel reads."""
    outputs = set(outputs_of(function))
    return [a for a in function.regions[0].block.arguments if a not in outputs]


def outputs_of(function: Op) -> list[Value]:
    """The arguments that the kernel writes, in order."""
    block = function.regions[0].block
    written = {op.operands[1] for op in block if op.definition is Store}
    return [a for a in block.arguments if a in written]


def varying(function: Op) -> dict[Value, frozenset[int]]:
    """The iteration dimensions that each number changes along."""
    found: dict[Value, frozenset[int]] = {}
    nothing: frozenset[int] = frozenset()
    for op in function.regions[0].block:
        kind = op.definition
        if kind is Index:
            found[op.results[0]] = frozenset((op.attributes["dim"],))
        elif kind is Constant:
            found[op.results[0]] = nothing
        elif kind is Load:
            dims = {d for row in op.attributes["map"] for d, c in enumerate(row[:-1]) if c}
            found[op.results[0]] = frozenset(dims).union(*(found[v] for v in op.operands[1:]))
        elif kind is Reduce:
            found[op.results[0]] = found[op.operands[0]] - frozenset(op.attributes["dims"])
        elif op.results:
            found[op.results[0]] = nothing.union(*(found[v] for v in op.operands))
    return found


def stored_along(op: Op) -> frozenset[int]:
    """The iteration dimensions along which a store writes different elements."""
    return frozenset(d for row in op.attributes["map"] for d, c in enumerate(row[:-1]) if c)


def schedule(function: Op) -> Schedule:
    """How to walk a kernel; NoSchedule where one walk is not enough."""
    sizes = space_of(function)
    dims_of = varying(function)
    block = function.regions[0].block
    #: per number: the reductions it depends on
    behind: dict[Value, frozenset[Op]] = {}
    reductions: list[Op] = []
    for op in block:
        made = frozenset().union(*(behind.get(v, frozenset()) for v in op.operands))
        if op.definition is Reduce:
            reductions.append(op)
            made |= {op}
        for result in op.results:
            behind[result] = made
    inner: dict[Op, None] = {}
    for op in block:
        points = dims_of[op.results[0]] if op.results else stored_along(op) if op.definition is Store else set()
        for value in op.operands:
            for reduction in behind.get(value, ()):
                if reduction is not op and points & set(reduction.attributes["dims"]):
                    inner[reduction] = None
    rows = {frozenset(r.attributes["dims"]) for r in inner}
    if len(rows) > 1:
        raise NoSchedule("it needs whole rows along different dimensions at once")
    everything = frozenset(d for values in dims_of.values() for d in values)
    everything = everything.union(*(r.attributes["dims"] for r in reductions))  # also of what is the same along them
    if rows:
        (row,) = rows
    else:
        kinds = {frozenset(r.attributes["dims"]) for r in reductions if not behind[r.operands[0]]}
        row = min(kinds, key=lambda k: (-max(k, default=-1), len(k)), default=frozenset()) if kinds else frozenset()
        if kinds and max(everything, default=-1) not in row:
            row = frozenset()  # only sums over rows: a row is what they keep
    along = [r for r in reductions if row and frozenset(r.attributes["dims"]) == row]
    across = [r for r in reductions if r not in along]
    if across and not row:
        kept = {everything - frozenset(r.attributes["dims"]) for r in across}
        whole = {k for k in kept if k}
        if len(whole) > 1:
            raise NoSchedule("it sums over different dimensions at once")
        row = next(iter(whole), frozenset())
    outer = everything - row
    if outer and any(not dims_of[r.operands[0]] & outer for r in inner):
        raise NoSchedule("a reduction that is the same for every row belongs into a kernel before this one")
    for reduction in across:
        if not outer <= frozenset(reduction.attributes["dims"]):
            raise NoSchedule("a sum over some of the rows only")
    if any(r in across for reduction in reductions for r in behind[reduction.operands[0]]):
        raise NoSchedule("a sum over what another sum over all rows gives")
    after = [
        op
        for op in block
        if op not in across and op.definition is not Space
        if any(r in across for v in op.operands for r in behind.get(v, ()))
    ]
    finishes = any(sizes[d] > 1 for r in across for d in r.attributes["dims"])
    if finishes and any(behind.get(v) and behind[v].isdisjoint(across) for op in after for v in op.operands):
        raise NoSchedule("what comes after sums over all rows needs a reduction along a row, which belongs before them")
    order = lambda dims: tuple(sorted(dims))  # noqa: E731
    return Schedule(sizes, order(outer), order(row), tuple(along), tuple(across), tuple(after))
