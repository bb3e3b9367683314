"""Who may write over whom: the walk along an order that hands out memory.

A result takes over the memory of an operand that dies at its launch, or that of the argument it replaces. The walk is
exact for any order, so that comparing orders compares real peaks.
"""

from __future__ import annotations

from dataclasses import dataclass

from .liveness import FOREVER, Graph


@dataclass(slots=True)
class Assignment:
    """Who has which memory for one order. Places 0.. are the arguments', then come the arena's."""

    place: list[int]  # per memory
    old: list[int]  # per memory: the one that was in the same place before it, or -1
    holder: list[int]  # per argument: the memory that is in its place at the end
    took: list[bool]  # per memory: whether that was read by the same launch
    start: list[int]  # per place of the arena: position of the launch that first writes it
    end: list[int]  # ... and one past the position of the launch that last reads it
    size: list[int]
    peak: int  # most bytes live at once


def assign(graph: Graph, order: list[int]) -> Assignment:
    """Walks an order and hands out memory."""
    arguments, size, target, over_all = graph.arguments, graph.size, graph.target, graph.over
    remaining = graph.count[:]
    place = [-1] * len(size)
    before = [-1] * len(size)
    took = [False] * len(size)
    for argument in range(arguments):
        place[argument] = argument
    holder = list(range(arguments))
    position = [0] * len(order)
    for p, launch in enumerate(order):
        position[launch] = p
    starts: list[int] = []
    ends: list[int] = []
    sizes: list[int] = []
    finish = len(order) + 1  # beyond the last launch
    live = peak = 0
    for p, launch in enumerate(order):
        taken: list[int] = []
        for new, over in zip(graph.writes[launch], over_all[launch], strict=True):
            found = mine = -1
            argument = target[new]
            if argument >= 0:
                old = holder[argument]
                if remaining[old] == 0:
                    found = argument
                elif remaining[old] == 1 and old in over and old not in taken:
                    found, mine = argument, old
            if found < 0:
                for old in over:
                    if remaining[old] == 1 and old not in taken:
                        there = place[old]
                        if there >= arguments or (
                            holder[there] == old and leaves_in_time(graph, position, p, new, there)
                        ):
                            found, mine = there, old
                            break
            if found < 0:
                found = arguments + len(starts)
                starts.append(p)
                ends.append(finish)
                sizes.append(size[new])
                live += size[new]
            elif found < arguments:
                before[new], holder[found] = holder[found], new
            else:
                before[new] = mine
            if mine >= 0:
                taken.append(mine)
                took[new] = True
            place[new] = found
        if live > peak:
            peak = live
        for old in graph.reads[launch]:
            remaining[old] -= 1
            if not remaining[old] and old not in taken:
                there = place[old]
                if there >= arguments:
                    live -= size[old]
                    ends[there - arguments] = p + 1
        for new in graph.writes[launch]:
            if not remaining[new] and place[new] >= arguments:
                live -= size[new]
                ends[place[new] - arguments] = p + 1
    return Assignment(place, before, holder, took, starts, ends, sizes, peak)


def leaves_in_time(graph: Graph, position: list[int], now: int, new: int, argument: int) -> bool:
    """Whether a value that moves into an argument's memory is dead when the argument's new value must be written."""
    final = graph.replaced_by[argument]
    if final < 0 or graph.count[new] >= FOREVER:
        return False
    maker = graph.maker[final]
    due = position[maker]
    last = max([position[i] for i in graph.readers[new]], default=now)
    if now < due and last < due:
        return True
    return now < due and last == due and new in graph.over[maker][graph.writes[maker].index(final)]
