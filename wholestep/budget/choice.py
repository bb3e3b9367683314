"""A choice of ops that run again, and what it costs: seconds, and the most memory in use at any time.

Forward is a row of segments (the instances of all templates). What runs again in a segment reads what is kept, or what
runs again in the same segment: so it is there only while backward is in that segment.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .graph import Graph
from .templates import Template


@dataclass(frozen=True, slots=True)
class Choice:
    """Which ops of the graph run again. `seconds` and `memory` are predictions."""

    again: frozenset[int]
    seconds: float
    memory: int


@dataclass(slots=True)
class Segments:
    """A graph cut into segments."""

    graph: Graph
    templates: Sequence[Template]
    #: per op: its template, its place in the stretch, the number of its instance, its segment
    where: list[tuple[int, int, int, int]]
    count: int
    #: per segment: bytes in use beside what is decided here, while forward and backward pass through it
    forward: list[int]
    backward: list[int]


def cut(graph: Graph, templates: Sequence[Template]) -> Segments:
    """The segments of a graph, one per instance of each template."""
    where: list[tuple[int, int, int, int]] = []
    segment = -1
    for number, template in enumerate(templates):
        for instance in range(template.count):
            segment += 1
            where += [(number, place, instance, segment) for place in range(template.length)]
    count = segment + 1
    return Segments(graph, templates, where, count, [0] * count, [0] * count)


def measure(segments: Segments, again: Iterable[int]) -> Choice:
    """What a choice costs; ValueError where an op that runs again would read what runs again in another segment."""
    graph, where = segments.graph, segments.where
    chosen = frozenset(again)
    kept = [m.late and not m.fixed and m.node not in chosen for m in graph.memories]
    for node in chosen:
        if not graph.nodes[node].again:
            raise ValueError(f"op {node} cannot run again")
        for memory in graph.nodes[node].reads:
            made = graph.memories[memory]
            if made.node in chosen:
                if where[made.node][3] != where[node][3]:
                    raise ValueError(f"op {node} reads what op {made.node} makes again in another segment")
            elif not made.fixed:
                kept[memory] = True
    needed = {m for node in chosen for m in graph.nodes[node].reads}
    held = [0] * segments.count
    again_long = [0] * segments.count  # made again for others that run again: there all through the segment
    again_short = [0] * segments.count  # made again for backward alone: there one after the other
    for index, (made, is_kept) in enumerate(zip(graph.memories, kept, strict=True)):
        segment = where[made.node][3]
        if is_kept:
            held[segment] += made.bytes
        elif made.late and not made.fixed:
            if index in needed:
                again_long[segment] += made.bytes
            else:
                again_short[segment] = max(again_short[segment], made.bytes)
    total, most = 0, 0
    for segment, mine in enumerate(held):
        total += mine
        back = segments.backward[segment] + again_long[segment] + again_short[segment]
        most = max(most, total + segments.forward[segment], total + back)
    return Choice(chosen, sum(graph.nodes[n].seconds for n in sorted(chosen)), most)
