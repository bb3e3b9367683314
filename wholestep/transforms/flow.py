"""Maximum flow and minimum cut of a directed network, by Dinic's algorithm on flat lists.

Flow may be pushed, edges added, and flow pushed again: what flows already stays.
"""

from __future__ import annotations

#: a capacity that no cut pays
UNBOUNDED = 1 << 62


class Network:
    """Nodes by number; an edge and its reverse are neighbours in the lists. Capacities are whole numbers."""

    def __init__(self, nodes: int):
        self.edges: list[list[int]] = [[] for _ in range(nodes)]  # by node: numbers of the edges that leave it
        self.to: list[int] = []
        self.left: list[int] = []  # what an edge can still take

    def node(self) -> int:
        """One more node."""
        self.edges.append([])
        return len(self.edges) - 1

    def add(self, tail: int, head: int, capacity: int) -> None:
        """An edge; its reverse has no capacity of its own."""
        self.edges[tail].append(len(self.to))
        self.edges[head].append(len(self.to) + 1)
        self.to += (head, tail)
        self.left += (capacity, 0)

    def push(self, source: int, sink: int) -> int:
        """Pushes as much more as can flow; gives how much that was. No path may be unbounded."""
        total = 0
        while True:
            level = self.levels(source, sink)
            if level[source] < 0:
                return total
            total += self.push_along(level, source, sink)

    def levels(self, source: int, sink: int) -> list[int]:
        """Of each node the fewest edges to the sink that can still take something; -1 where there is no way, or where
        the source is no farther."""
        level = [-1] * len(self.edges)
        level[sink] = 0
        edges, to, left = self.edges, self.to, self.left
        border = [sink]
        while border and level[source] < 0:
            ahead = []
            for node in border:
                farther = level[node] + 1
                for edge in edges[node]:
                    if left[edge ^ 1] and level[to[edge]] < 0:
                        level[to[edge]] = farther
                        ahead.append(to[edge])
            border = ahead
        return level

    def push_along(self, level: list[int], source: int, sink: int) -> int:
        """Fills every way that goes down one level at a time."""
        edges, to, left = self.edges, self.to, self.left
        following = [0] * len(edges)  # by node: how many of its edges lead nowhere any more
        total, node = 0, source
        path: list[int] = []  # edges from the source to the node
        while True:
            if node == sink:
                flow = min([left[edge] for edge in path])
                total += flow
                keep = 0
                for position, edge in reversed(list(enumerate(path))):
                    left[edge] -= flow
                    left[edge ^ 1] += flow
                    if not left[edge]:
                        keep = position  # go on from before the first edge that is full
                node = to[path[keep] ^ 1]
                del path[keep:]
                continue
            out, at, below = edges[node], following[node], level[node] - 1
            while at < len(out) and not (left[out[at]] and level[to[out[at]]] == below):
                at += 1
            following[node] = at
            if at < len(out):
                path.append(out[at])
                node = to[out[at]]
            elif path:
                node = to[path.pop() ^ 1]
                following[node] += 1
            else:
                return total

    def after_source(self, source: int) -> list[bool]:
        """Of each node whether it lies on the source's side of the minimum cut that is nearest to the source."""
        return self.side_of(source, 0)

    def before_sink(self, sink: int) -> list[bool]:
        """Of each node whether it lies on the sink's side of the minimum cut that is nearest to the sink."""
        return self.side_of(sink, 1)

    def side_of(self, end: int, turned: int) -> list[bool]:
        """Nodes that edges with something left lead to from an end; turned is 1 where they are walked against it."""
        side = [False] * len(self.edges)
        side[end] = True
        pending = [end]
        while pending:
            for edge in self.edges[pending.pop()]:
                if self.left[edge ^ turned] and not side[self.to[edge]]:
                    side[self.to[edge]] = True
                    pending.append(self.to[edge])
        return side
