"""Repeated layers of forward: stretches of ops that look alike and are wired alike, decided about once.

What does not repeat is cut into pieces, templates of one instance.
"""

from __future__ import annotations

from ..plan.templates import Template, find_repeats
from .graph import Graph

__all__ = ["Template", "find_templates"]

#: ops in a piece of what does not repeat
PIECE = 32


def find_templates(graph: Graph) -> list[Template]:
    """Templates that cover all ops, in program order."""
    numbers: dict[tuple[object, ...], int] = {}
    looks = []
    for node in graph.nodes:
        made = tuple((m.bytes, m.late, m.fixed) for m in (graph.memories[i] for i in node.makes))
        looks.append(numbers.setdefault((node.looks, node.again, made), len(numbers)))
    found: list[Template] = []
    at = 0
    for template in [*find_repeats(looks, lambda start, length: wiring(graph, start, length)), None]:
        end = len(looks) if template is None else template.start
        found += [Template(p, min(PIECE, end - p), 1) for p in range(at, end, PIECE)]
        if template is not None:
            found.append(template)
            at = template.end
    return found


def wiring(graph: Graph, start: int, length: int) -> list[tuple[int, ...]]:
    """For every op of a stretch the memories of the stretch that it reads, counted from the stretch's first one."""
    first = graph.nodes[start].makes[0]
    return [tuple(m - first for m in graph.nodes[n].reads if m >= first) for n in range(start, start + length)]
