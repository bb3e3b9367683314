"""Repeated layers, found by structure: stretches of forward's ops that look alike and are wired alike.

A stretch that repeats is a template with instances. What does not repeat is cut into pieces, templates of one instance.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy

from ..ir.hashing import structural_hash
from .graph import Graph

#: ops in a piece of what does not repeat
PIECE = 32
#: the longest stretch that is looked for
LONGEST = 2000
#: attributes that differ from layer to layer without a difference in cost
IGNORED = ("phase", "stream")


@dataclass(frozen=True, slots=True)
class Template:
    """`count` stretches of `length` ops, one after the other, the first one at `start`."""

    start: int
    length: int
    count: int

    @property
    def end(self) -> int:
        return self.start + self.length * self.count


def find_templates(graph: Graph) -> list[Template]:
    """Templates that cover all ops, in program order."""
    for node in graph.nodes:
        if node.op is not None:
            node.looks = structural_hash(node.op, IGNORED)
    numbers: dict[tuple[object, ...], int] = {}
    looks = []
    for node in graph.nodes:
        made = tuple((m.bytes, m.late, m.fixed) for m in (graph.memories[i] for i in node.makes))
        looks.append(numbers.setdefault((node.looks, node.again, made), len(numbers)))
    found: list[Template] = []
    pending = [(0, len(looks))]
    while pending:
        start, end = pending.pop()
        best = best_repeat(graph, looks, start, end)
        if best is None:
            found += [Template(at, min(PIECE, end - at), 1) for at in range(start, end, PIECE)]
        else:
            found.append(best)
            pending += [(start, best.start), (best.end, end)]
    return sorted(found, key=lambda t: t.start)


def best_repeat(graph: Graph, looks: Sequence[int], start: int, end: int) -> Template | None:
    """The repetition that covers most ops between two places; the shortest stretch among equals."""
    seen = numpy.asarray(looks[start:end])
    best: tuple[int, Template] | None = None
    for length in range(2, min(len(seen) // 2, LONGEST) + 1):
        different = numpy.flatnonzero(seen[:-length] != seen[length:])
        edges = numpy.concatenate(([-1], different, [len(seen) - length]))
        runs = numpy.diff(edges) - 1
        at = int(runs.argmax())
        covered = (int(runs[at]) // length + 1) * length
        if runs[at] < length or (best is not None and covered <= best[0]):
            continue
        whole = Template(start + int(edges[at]) + 1, length, covered // length)
        template = wired_alike(graph, whole)
        if template is not None and (best is None or template.count * length > best[0]):
            best = (template.count * length, template)
    return best[1] if best is not None else None


def wired_alike(graph: Graph, template: Template) -> Template | None:
    """The longest part of a repetition whose instances read their own values in the same way; None without any two."""
    shapes = [wiring(graph, template.start + i * template.length, template.length) for i in range(template.count)]
    best, first = (0, 0), 0
    for i in range(1, template.count + 1):
        if i == template.count or shapes[i] != shapes[first]:
            best = max(best, (i - first, -first))
            first = i
    count, first = best[0], -best[1]
    return Template(template.start + first * template.length, template.length, count) if count > 1 else None


def wiring(graph: Graph, start: int, length: int) -> list[tuple[int, ...]]:
    """For every op of a stretch the memories of the stretch that it reads, counted from the stretch's first one."""
    first = graph.nodes[start].makes[0]
    return [tuple(m - first for m in graph.nodes[n].reads if m >= first) for n in range(start, start + length)]
