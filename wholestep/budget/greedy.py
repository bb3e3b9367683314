"""The greedy choice: ops by RAF's score, cost x uses / bytes, the lowest first, until what is held fits.

What an op needs and nobody keeps runs again with it, up to ten producers deep, or is kept from then on.
"""

from __future__ import annotations

from .choice import Choice, Segments, measure
from .exact import Solved

#: how far producers are followed
DEPTH = 10


class Greedy:
    """Chooses for one graph at any limit."""

    name = "greedy"

    def __init__(self, segments: Segments):
        self.segments, self.graph = segments, segments.graph
        readers: dict[int, set[int]] = {}
        for number, node in enumerate(self.graph.nodes):
            for memory in node.reads:
                readers.setdefault(memory, set()).add(number)
        self.readers = readers
        scored = []
        for number, node in enumerate(self.graph.nodes):
            size = self.graph.late_bytes(number)
            if node.again and size:
                again = self.with_producers(number, frozenset())
                cost = sum(self.graph.nodes[n].seconds for n in again)
                uses = 1 + sum(len(readers.get(m, ())) for m in node.makes)
                scored.append((cost * uses / size, number))
        self.order = [number for _, number in sorted(scored)]

    def cheapest(self, limit: int) -> Solved | None:
        """The choice that first fits; None where none does. It proves nothing: the bound is 0."""
        for choice in self.choices(limit):
            if choice.memory <= limit:
                return Solved(choice, 0.0)
        return None

    def leanest(self) -> Solved:
        """Of all choices on the way, the one that holds the fewest bytes."""
        return Solved(min(self.choices(0), key=lambda c: (c.memory, c.seconds)), 0.0)

    def choices(self, limit: int) -> list[Choice]:
        """One choice after the other, each running more again; up to the first that fits."""
        chosen: frozenset[int] = frozenset()
        found = [measure(self.segments, chosen)]
        for number in self.order:
            if found[-1].memory <= limit:
                break
            if number in chosen:
                continue
            more = chosen | self.with_producers(number, chosen)
            if self.is_local(more - chosen, more):
                chosen = more
                found.append(measure(self.segments, chosen))
        return found

    def with_producers(self, number: int, chosen: frozenset[int], depth: int = 0) -> frozenset[int]:
        """An op and the producers in its segment that must run again with it."""
        found = {number}
        for memory in self.graph.nodes[number].reads:
            made = self.graph.memories[memory]
            if made.late or made.fixed or made.node in chosen or depth == DEPTH or not self.is_near(made.node, number):
                continue
            if self.graph.nodes[made.node].again:
                found |= self.with_producers(made.node, chosen, depth + 1)
        return frozenset(found)

    def is_near(self, first: int, second: int) -> bool:
        return self.segments.where[first][3] == self.segments.where[second][3]

    def is_local(self, new: frozenset[int], chosen: frozenset[int]) -> bool:
        """Whether no new op reads from, or is read by, an op that runs again in another segment."""
        for number in new:
            node = self.graph.nodes[number]
            makers = [self.graph.memories[m].node for m in node.reads if not self.graph.memories[m].fixed]
            others = [*makers, *[r for m in node.makes for r in self.readers.get(m, ())]]
            if any(o in chosen and not self.is_near(o, number) for o in others):
                return False
        return True
