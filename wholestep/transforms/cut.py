"""The cheapest way to split a network in two: Dinic's algorithm for the minimum cut between two nodes.

A decision with two labels per node, and costs where neighbours differ, is such a split; it is exact.
"""

from __future__ import annotations

from collections import deque

SOURCE, SINK = 0, 1
#: the capacity of an edge that must not be cut
FOREVER = 1 << 62


class Network:
    """Directed edges with capacities between numbered nodes. An edge is paid for where it leaves the source's side."""

    def __init__(self) -> None:
        self.edges: list[list[int]] = [[], []]  # per node: numbers of its edges; edge e ^ 1 is edge e backwards
        self.head: list[int] = []
        self.left: list[int] = []  # what an edge can still take

    def node(self) -> int:
        self.edges.append([])
        return len(self.edges) - 1

    def add(self, tail: int, head: int, capacity: int) -> None:
        if tail == head or not capacity:
            return
        for start, end, room in ((tail, head, capacity), (head, tail, 0)):
            self.edges[start].append(len(self.head))
            self.head.append(end)
            self.left.append(room)

    def cut(self) -> tuple[int, list[bool]]:
        """The least cost of a split, and per node whether it is on the source's side.

        Of several splits that cost the least, it is the one with the fewest nodes there.
        """
        cost = 0
        while True:
            level = self.levels()
            if level[SINK] < 0:
                return cost, [distance >= 0 for distance in level]
            cost += self.fill(level)

    def levels(self) -> list[int]:
        """Distances from the source along edges with room; -1 where there is no way."""
        level = [-1] * len(self.edges)
        level[SOURCE] = 0
        waiting = deque([SOURCE])
        while waiting:
            node = waiting.popleft()
            for edge in self.edges[node]:
                other = self.head[edge]
                if self.left[edge] and level[other] < 0:
                    level[other] = level[node] + 1
                    waiting.append(other)
        return level

    def fill(self, level: list[int]) -> int:
        """Sends as much as fits along shortest ways, depth first."""
        head, left, edges = self.head, self.left, self.edges
        tried = [0] * len(edges)  # per node: how many of its edges lead nowhere any more
        way: list[int] = []
        node, sent = SOURCE, 0
        while True:
            if node == SINK:
                room = min([left[e] for e in way])
                sent += room
                full = len(way)
                for position, edge in enumerate(way):
                    left[edge] -= room
                    left[edge ^ 1] += room
                    if not left[edge] and full == len(way):
                        full = position
                node = head[way[full] ^ 1]
                del way[full:]
                continue
            mine = edges[node]
            while tried[node] < len(mine):
                edge = mine[tried[node]]
                if left[edge] and level[head[edge]] == level[node] + 1:
                    break
                tried[node] += 1
            if tried[node] < len(mine):
                way.append(edge)
                node = head[edge]
            elif way:
                node = head[way.pop() ^ 1]
                tried[node] += 1
            else:
                return sent
