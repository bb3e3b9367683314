"""Repeated layers, found by structure: stretches of a list that look alike, one after the other, and are wired alike.

A stretch that repeats is a template with instances. Of launches one instance is cut out as a small graph, which is
ordered like a whole one, and its order is replayed in all of them. Memory budgets look for repeats in the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy

from .liveness import FOREVER, Graph

#: the longest stretch that is looked for
LONGEST = 2000
#: how many templates a plan names, those that cover most launches; and the least share of launches that one covers
NAMED, LEAST_SHARE = 3, 0.05


@dataclass(frozen=True, slots=True)
class Template:
    """`count` stretches of `length`, one after the other, the first one at `start`."""

    start: int
    length: int
    count: int

    @property
    def end(self) -> int:
        return self.start + self.length * self.count


def find_repeats(looks: Sequence[int], wiring: Callable[[int, int], object]) -> list[Template]:
    """What repeats at least once, by place. `wiring(start, length)` is equal for stretches that are wired alike."""
    seen = numpy.asarray(looks)
    found: list[Template] = []
    pending = [(0, len(looks))]
    while pending:
        start, end = pending.pop()
        best = best_repeat(seen, wiring, start, end)
        if best is not None:
            found.append(best)
            pending += [(start, best.start), (best.end, end)]
    return sorted(found, key=lambda t: t.start)


def best_repeat(looks: numpy.ndarray, wiring: Callable[[int, int], object], start: int, end: int) -> Template | None:
    """The repetition that covers most between two places; the shortest stretch among equals."""
    seen = looks[start:end]
    best: Template | None = None
    covers = 0
    for length in range(2, min(len(seen) // 2, LONGEST) + 1):
        different = numpy.flatnonzero(seen[:-length] != seen[length:])
        edges = numpy.concatenate(([-1], different, [len(seen) - length]))
        runs = numpy.diff(edges) - 1
        at = int(runs.argmax())
        covered = (int(runs[at]) // length + 1) * length
        if runs[at] < length or covered <= covers:
            continue
        template = wired_alike(wiring, Template(start + int(edges[at]) + 1, length, covered // length))
        if template is not None and template.count * length > covers:
            best, covers = template, template.count * length
    return best


def wired_alike(wiring: Callable[[int, int], object], template: Template) -> Template | None:
    """The longest part of a repetition whose instances are wired in the same way; None without any two."""
    shapes = [wiring(template.start + i * template.length, template.length) for i in range(template.count)]
    best, first = (0, 0), 0
    for i in range(1, template.count + 1):
        if i == template.count or shapes[i] != shapes[first]:
            best = max(best, (i - first, -first))
            first = i
    count, first = best[0], -best[1]
    return Template(template.start + first * template.length, template.length, count) if count > 1 else None


# ---- launches --------------------------------------------------------------------------------------------------------


def repeated_launches(graph: Graph, order: list[int]) -> list[Template]:
    """The templates of an order: launches alike in what they run on and in what must come before what."""
    position = positions(order)

    def wiring(start: int, length: int) -> object:
        end, outside = start + length, dict[int, int]()
        shape = []
        for i in order[start:end]:
            reads: list[tuple[int, int]] = []
            for memory in graph.reads[i]:
                maker = graph.maker[memory]
                if maker >= 0 and start <= position[maker] < end:
                    reads.append((position[maker] - start, graph.writes[maker].index(memory)))
                else:
                    reads.append((-1, outside.setdefault(memory, len(outside))))
            later = [position[j] - start for j in graph.successors[i] if start <= position[j] < end]
            shape.append((reads, sorted(later)))
        return shape

    return find_repeats([graph.looks[i] for i in order], wiring)


def positions(order: list[int]) -> list[int]:
    """Per launch its place in an order."""
    position = [0] * len(order)
    for p, i in enumerate(order):
        position[i] = p
    return position


def instance_graph(graph: Graph, order: list[int], start: int, length: int) -> Graph:
    """A stretch of an order as a graph of its own.

    Launch 0 stands for all that ran before: it makes what dies in the stretch. Other memory that is there before and
    after the stretch makes no difference to the stretch's orders and is left out.
    """
    launches, position = order[start : start + length], positions(order)
    number = {launch: n for n, launch in enumerate(launches, 1)}

    def ends_here(memory: int) -> bool:
        last = max([position[i] for i in graph.readers[memory]], default=-1)
        return graph.count[memory] < FOREVER and last < start + length

    made = [m for i in launches for m in graph.writes[i]]
    arguments = [graph.target[m] for m in made if graph.target[m] >= 0 and ends_here(graph.target[m])]
    own = set(made)
    read = dict.fromkeys(m for i in launches for m in graph.reads[i] if m not in own)
    there = [m for m in read if m >= graph.arguments and ends_here(m)]
    memories = [*arguments, *there, *made]
    name = {m: n for n, m in enumerate(memories)}
    readers = [[number[i] for i in graph.readers[m] if i in number] for m in memories]
    target = [name.get(graph.target[m], -1) for m in memories]
    successors = [[number[j] for j in graph.successors[i] if j in number] for i in launches]
    begins = set(number.values()).difference(*successors)
    successors.insert(0, sorted(begins))
    before = [0] * len(successors)
    for after in successors:
        for j in after:
            before[j] += 1
    return Graph(
        len(arguments),
        [(), *[tuple([name[m] for m in graph.reads[i] if m in name]) for i in launches]],
        [tuple([name[m] for m in there]), *[tuple([name[m] for m in graph.writes[i]]) for i in launches]],
        [
            ((),) * len(there),
            *[tuple([tuple([name[m] for m in over if m in name]) for over in graph.over[i]]) for i in launches],
        ],
        [graph.size[m] for m in memories],
        readers,
        [len(found) + (m in own and not ends_here(m)) for m, found in zip(memories, readers, strict=True)],
        target,
        [name[graph.replaced_by[argument]] for argument in arguments],
        [-1] * len(arguments) + [0] * len(there) + [number[graph.maker[m]] for m in made],
        successors,
        before,
    )


def replay(order: list[int], template: Template, inner: list[int]) -> list[int]:
    """The order with every instance of a template in the order of its small graph, whose launch 0 comes first."""
    new = order[:]
    for start in range(template.start, template.end, template.length):
        new[start : start + template.length] = [order[start + n - 1] for n in inner[1:]]
    return new


def in_words(templates: list[Template], launches: int) -> str:
    """The templates that cover most launches, for the plan's text; empty without any."""
    large = [t for t in templates if t.count * t.length >= LEAST_SHARE * launches]
    large.sort(key=lambda t: -t.count * t.length)
    return ", ".join(f"{t.count} x {t.length}" for t in sorted(large[:NAMED], key=lambda t: t.start))
