"""Updates on a stream of their own: which launches go there, when they are issued, and when they are waited for.

A launch of the side stream comes after all that the kernels' stream was given before it. What it reads stays in memory
until the kernels' stream waits for it. That wait stands as late as the memory allows: below the peak that the step has
anyway, a gradient that is kept longer costs nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..dialects.step import StepOp
from ..dialects.step.control import root_of
from ..dialects.step.fused import Fused
from ..ir.builtin import lookup
from ..ir.core import Op
from ..transforms.side_updates import ENDING
from .aliases import Assignment
from .launches import LAUNCH, Flat
from .liveness import Graph

#: the stream of updates, after those of copies
SIDE = 3
#: operations per byte below which a launch of backward that makes gradients alone goes there too: no matrix product
LIGHT = 16
#: how much the peak may grow for what waits to be updated, as a share
SHARE = 0.01


def side_launches(flat: Flat, ops: Sequence[Op]) -> list[int]:
    """Launches that end the step, with those that only they wait for and that compute little.

    Nothing else waits for them: neither by reading what they make nor by writing over what they read. What writes a
    part of a concatenation stays with those that write the others.
    """
    readers: dict[int, set[int]] = {}
    for i, reads in enumerate(flat.reads):
        for value in reads:
            readers.setdefault(flat.root[value], set()).add(i)
    #: who writes over an argument, and who reads the value it has before
    over = [
        (flat.made_by[value], readers.get(argument, set()))
        for value, argument in flat.results
        if argument >= 0 and flat.made_by[value] >= 0
    ]

    def free(i: int, side: set[int]) -> bool:
        return all(flat.root[w] == w and readers.get(w, set()) <= side for w in flat.writes[i] if w >= 0)

    side = {i for i, phase in enumerate(flat.phase) if phase in ENDING and flat.kernel[i] is not None}
    while True:
        stay = {i for i in side if free(i, side)}
        stay -= {i for writer, old in over if writer not in stay for i in old}
        if stay == side:
            break
        side = stay
    kept = {i for writer, old in over if writer not in side for i in old}
    for i in reversed(range(len(flat.op))):
        asked = flat.phase[i] == "backward" and flat.kernel[i] is not None and i not in kept
        if asked and free(i, side) and is_light(flat, i, ops[flat.op[i]]):
            side.add(i)
    return sorted(side)


def is_light(flat: Flat, launch: int, op: Op) -> bool:
    """Whether a launch moves bytes rather than computes: loops without a product, few operations for each byte."""
    inner = [op] if op.definition is not Fused else list(lookup(root_of(op), op.callee).regions[0].block)
    if any(o.definition.precision == "low" for o in inner if issubclass(o.definition, StepOp)):
        return False
    if op.definition is not Fused and op.definition.element is None:  # type: ignore[attr-defined]
        return False  # nobody knows what it does
    values = {*flat.reads[launch], *[w for w in flat.writes[launch] if w >= 0]}
    return op.definition.flops(op) <= LIGHT * sum(flat.bytes(v) for v in values)  # type: ignore[attr-defined]


def add_waits(flat: Flat, side: list[int]) -> dict[int, int]:
    """Puts launches on the side stream and adds a wait for each, which holds what it reads; gives the waits."""
    waits: dict[int, int] = {}
    for launch in side:
        flat.stream[launch] = SIDE
        held = [flat.root[v] for v in flat.reads[launch] if flat.kind[flat.root[v]] == LAUNCH]
        if flat.workspace[launch] >= 0:
            held.append(flat.workspace[launch])
        wait = waits[launch] = flat.launch(-1, "wait", tuple(dict.fromkeys(held)))
        flat.name[wait], flat.phase[wait], flat.layer[wait] = "wait", flat.phase[launch], flat.layer[launch]
        flat.awaits[wait] = launch
    return waits


def keep_arguments(flat: Flat, graph: Graph, side: list[int]) -> None:
    """Forbids other launches to write over arguments that the side stream reads: nobody waits for that in time."""
    on_side = set(side)
    read = {flat.root[v] for i in side for v in flat.reads[i]} & set(range(flat.arguments))
    for i, over in enumerate(graph.over):
        if i not in on_side:
            graph.over[i] = tuple([tuple([m for m in places if m not in read]) for places in over])


def hurried(flat: Flat, graph: Graph, order: list[int], side: list[int]) -> list[int]:
    """The order with each launch of the side stream right after the last one that it must wait for.

    What needs no gradient, and numbers of the host, come right before who reads them.
    """
    moving, place = {*side, *[i for i in order if flat.provider[i] == "host"]}, {i: p for p, i in enumerate(order)}
    key = {i: -1 if i in moving else p for i, p in place.items()}  # the launch of the main stream that each comes after
    for launch in order:
        for later in graph.successors[launch]:
            if later in moving:
                key[later] = max(key[later], key[launch])
    for launch in reversed(order):
        if launch in moving and graph.successors[launch]:
            first = min([key[i] if i in moving else key[i] - 1 for i in graph.successors[launch]])
            key[launch] = max(key[launch], first)
    return sorted(order, key=lambda i: (key[i], i in moving, place[i]))


def released(flat: Flat, graph: Graph, order: list[int], found: Assignment, waits: dict[int, int]) -> list[int]:
    """The order with the waits in it, each as late as what it holds still fits.

    found: who has which memory in the order without them.
    """
    count = len(order)
    change = np.zeros(count + 2, np.int64)
    np.add.at(change, found.start, found.size)
    np.add.at(change, np.minimum(found.end, count + 1), np.negative(found.size))
    live = np.cumsum(change)[:count]
    room = int(found.peak * (1 + SHARE)) - live
    place = {launch: p for p, launch in enumerate(order)}
    before: list[list[int]] = [[] for _ in range(count + 1)]
    latest = count
    for launch in sorted(waits, key=place.__getitem__, reverse=True):
        start = place[launch] + 1
        held = np.zeros(latest - start, np.int64)
        for value in flat.reads[waits[launch]]:
            if found.place[value] >= graph.arguments:
                last = max([place[i] for i in graph.readers[value] if i in place], default=0)
                held[max(last - start, 0) :] += graph.size[value]
        full = np.flatnonzero(held > room[start:latest])
        latest = start + int(full[0]) if len(full) else latest  # what runs later is over later: waits keep their order
        room[start:latest] -= held[: latest - start]
        before[latest].insert(0, waits[launch])
    out: list[int] = []
    for position, here in enumerate(before):
        out += here
        out += order[position : position + 1]
    return out
