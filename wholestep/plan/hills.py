"""Small hills first: a list schedule that looks along chains of launches to where they have given back their memory.

A ready launch and those that follow from it climb a hill of memory and come down again. Hills that end no higher than
they began are run whole, the smallest first; launches that only take memory keep to another order.
"""

from __future__ import annotations

from heapq import heappop, heappush

from .liveness import Graph
from .templates import positions

#: how many launches a hill has at most
LONGEST = 16


def hills(graph: Graph, base: list[int]) -> list[int]:
    """The order. base: the one that launches keep to that only take memory."""
    walk = _Walk(graph, base)
    while walk.heap:
        key, i = heappop(walk.heap)
        now, chain = walk.current.get(i, (None, []))
        if now == key:  # else it has run, or its hill has changed
            for at in chain:
                walk.run(at)
    return walk.order


class _Walk:
    """Which launches have run, and the hill of each that is ready."""

    def __init__(self, graph: Graph, base: list[int]):
        self.graph = graph
        self.rank = positions(base)
        self.predecessors: list[list[int]] = [[] for _ in base]
        for i, after in enumerate(graph.successors):
            for j in after:
                self.predecessors[j].append(i)
        self.before, self.remaining = graph.before[:], graph.count[:]
        self.cost = graph.size[:]  # bytes of the arena that are free again once a memory is dead
        self.done = [False] * len(base)
        self.order: list[int] = []
        self.current: dict[int, tuple[tuple[int, int, int], list[int]]] = {}  # ready launch -> its key, its chain
        self.heap: list[tuple[tuple[int, int, int], int]] = []
        for i in range(len(base)):
            if not self.before[i]:
                self.offer(i)

    def offer(self, i: int) -> None:
        """Works out the hill of a ready launch, and with it the launch's turn."""
        height, chain = self.climb(i)
        key = (0, height, self.rank[i]) if height >= 0 else (1, 0, self.rank[i])
        self.current[i] = (key, chain)
        heappush(self.heap, (key, i))

    def climb(self, i: int) -> tuple[int, list[int]]:
        """How high memory rises from a launch on until it is no more than before, and the launches up to there.

        -1 and the launch alone where it does not come down within a few launches.
        """
        graph, remaining = self.graph, self.remaining
        left: dict[int, int] = {}
        cost: dict[int, int] = {}
        waits: dict[int, int] = {}
        live = height = 0
        chain: list[int] = []
        todo = [i]
        while todo and len(chain) < LONGEST:
            at = min(todo)
            todo.remove(at)
            chain.append(at)
            dying = []
            for r in graph.reads[at]:
                left[r] = left.get(r, remaining[r]) - 1
                if not left[r]:
                    dying.append(r)
            live += self.make(at, dying, cost)
            height = max(height, live)
            live -= sum([cost.get(r, self.cost[r]) for r in dying])
            live -= sum([cost[w] for w in graph.writes[at] if not remaining[w]])
            if live <= 0:
                return height, chain
            for j in graph.successors[at]:
                waits[j] = waits.get(j, self.before[j]) - 1
                if not waits[j]:
                    todo.append(j)
        return -1, [i]

    def make(self, at: int, dying: list[int], cost: dict[int, int]) -> int:
        """Bytes that a launch takes; notes the cost of what it makes, and takes out of `dying` what that lies in."""
        taken = 0
        for w, over in zip(self.graph.writes[at], self.graph.over[at], strict=True):
            old = next((r for r in over if r in dying), -1)
            if self.graph.target[w] >= 0:
                cost[w] = 0
            elif old >= 0:
                dying.remove(old)
                cost[w] = cost.get(old, self.cost[old])
            else:
                cost[w] = self.graph.size[w]
                taken += cost[w]
        return taken

    def run(self, at: int) -> None:
        """Runs a launch. Hills may have changed: of the last reader of a memory, the last that others wait for."""
        self.done[at] = True
        self.current.pop(at, None)
        self.order.append(at)
        cost: dict[int, int] = {}
        self.make(at, [r for r in self.graph.reads[at] if self.remaining[r] == 1], cost)
        for w, bytes in cost.items():
            self.cost[w] = bytes
        changed: set[int] = set()
        for r in self.graph.reads[at]:
            self.remaining[r] -= 1
            if self.remaining[r] == 1:
                changed.update(self.graph.readers[r])
        for j in self.graph.successors[at]:
            self.before[j] -= 1
            if not self.before[j]:
                changed.add(j)
            elif self.before[j] == 1:
                changed.update(self.predecessors[j])
        for j in changed:
            if not self.before[j] and not self.done[j]:
                self.offer(j)
