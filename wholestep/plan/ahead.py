"""Updates of the step before, at the head of a plan: right before their first reader, or on a stream of their own.

They read state and what is kept between steps, so they may run at any time before somebody reads what they make.
"""

from __future__ import annotations

from .aliases import Assignment, assign
from .launches import Flat
from .liveness import Graph
from .side import SHARE


def ahead_launches(flat: Flat) -> list[int]:
    """The launches that update state of the step before, in program order; none in other functions."""
    if not flat.ahead:
        return []
    return [i for i, phase in enumerate(flat.phase) if phase == "update" and flat.provider[i] not in ("host", "wait")]


def first_readers(graph: Graph, order: list[int], ahead: list[int]) -> dict[int, int]:
    """Per update the position in the order that it must come before. They keep their own order."""
    moving, place = set(ahead), {launch: p for p, launch in enumerate(order)}
    found: dict[int, int] = {}
    limit = len(order)
    for launch in reversed(ahead):
        limit = min([limit, *[place[i] for i in graph.successors[launch] if i not in moving]])
        found[launch] = limit
    return found


def before_use(
    flat: Flat, graph: Graph, order: list[int], found: Assignment, ahead: list[int]
) -> tuple[list[int], Assignment]:
    """The order with each update right before its first reader, unless what it needs for itself lifts the peak."""
    due = first_readers(graph, order, ahead)
    place = {launch: p for p, launch in enumerate(order)}
    for launch in order:  # numbers of the host are there before everything
        if flat.provider[launch] == "host":
            due[launch] = -1
    candidate = sorted(order, key=lambda i: (due.get(i, place[i]), i not in due, i if i in due else place[i]))
    trial = assign(graph, candidate)
    return (candidate, trial) if trial.peak <= found.peak * (1 + SHARE) else (order, found)


def beside_forward(flat: Flat, graph: Graph, order: list[int], ahead: list[int], waits: dict[int, int]) -> list[int]:
    """The order with all updates at its head, on their stream, and each waited for before its first reader.

    The first gradient of this step may be written where one of the last step lies: all updates are over by then.
    """
    moving = set(ahead)
    rest = [i for i in order if i not in moving]
    due = first_readers(graph, rest, ahead)
    overwrites = [p for p, i in enumerate(rest) for value in graph.writes[i] if graph.target[value] in flat.ahead]
    last = min(overwrites, default=len(rest))
    before: list[list[int]] = [[] for _ in range(len(rest) + 1)]
    for launch in ahead:
        before[min(due[launch], last)].append(waits[launch])
    host = [i for i in rest if flat.provider[i] == "host"]
    out = [*host, *ahead]
    for position, here in enumerate(before):
        out += here
        out += [i for i in rest[position : position + 1] if flat.provider[i] != "host"]
    return out
