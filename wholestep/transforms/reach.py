"""Which ops of a window must run before which others: what `fuse.py` asks before it joins kernels.

A matrix of bits, kept up as groups grow, so that no path is walked twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from ..ir.core import Op
from .regions import is_view


class Reach:
    """What must run before what, as bits; ops of one group must run together."""

    def __init__(self, nodes: list[Op]):
        self.nodes = nodes
        self.number = {op: i for i, op in enumerate(nodes)}
        #: a column per op: bits of those that it needs. (Rows lie in one piece: who needs an op is asked most)
        self.before = np.zeros((-(-len(nodes) // 64), len(nodes)), np.uint64)
        for i, op in enumerate(nodes):
            for value in op.operands:
                maker = self.number.get(value.op) if value.op is not None else None
                if maker is not None:
                    self.before[:, i] |= self.before[:, maker]
                    self.before[maker >> 6, i] |= np.uint64(1 << (maker & 63))

    def bits(self, ops: Iterable[Op]) -> np.ndarray:
        found = np.zeros(self.before.shape[0], np.uint64)
        for op in ops:
            i = self.number[op]
            found[i >> 6] |= np.uint64(1 << (i & 63))
        return found

    def needed(self, ops: Sequence[Op]) -> np.ndarray:
        """Bits of what some ops need, beside themselves."""
        columns = self.before[:, [self.number[op] for op in ops]]
        return np.bitwise_or.reduce(columns, axis=1) & ~self.bits(ops)

    def behind(self, own: np.ndarray) -> np.ndarray:
        """The numbers of those that need one of some ops, which are given as bits."""
        words = np.flatnonzero(own)
        return np.flatnonzero(np.bitwise_or.reduce(self.before[words] & own[words, None], axis=0))

    def between(self, a: Sequence[Op], b: Sequence[Op]) -> Op | None:
        """An op that reads from one of two groups and that the other needs. Views come along with their readers."""
        inside = {*a, *b}
        for group, needed in ((a, self.before[:, self.number[b[0]]]), (b, self.before[:, self.number[a[0]]])):
            pending = [u for op in group for r in op.results for u in r.uses]
            seen = set(inside)
            while pending:
                user = pending.pop()
                i = self.number.get(user)
                if user in seen or i is None:
                    continue
                seen.add(user)
                if is_view(user):
                    pending += user.results[0].uses
                elif int(needed[i >> 6]) >> (i & 63) & 1:
                    return user
        return None

    def needs(self, one: Op, other: Op) -> bool:
        """Whether an op must run after another."""
        i = self.number[other]
        return bool(int(self.before[i >> 6, self.number[one]]) >> (i & 63) & 1)

    def unite(self, members: Sequence[Op]) -> None:
        """From now on these run together, after everything that any of them needs."""
        own, needed = self.bits(members), self.needed(members)
        rows = [self.number[op] for op in members]
        known = self.before[:, rows]
        for place, i in enumerate(rows):
            known[i >> 6, place] |= np.uint64(1 << (i & 63))
        # whoever runs after one of them has what that one needs: only where the others need more are there new bits
        missing = np.flatnonzero(np.bitwise_or.reduce((needed | own)[:, None] & ~known, axis=1))
        later = self.behind(own)
        for word in missing:
            self.before[word, later] |= (needed | own)[word]
        self.before[:, rows] = needed[:, None]
