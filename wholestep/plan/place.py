"""Addresses: an offset in one arena for every stretch of memory that is live for a while.

Our own placers are the baseline: best fit along time, forwards and backwards, for any number; most crowded first, where
there are few. `omnimalloc` is asked too where it is installed. The smallest arena wins; every placer is bounded by
counts, never by a clock, so that a plan is the same on every run.
"""

from __future__ import annotations

import importlib
import importlib.util
from bisect import bisect_left, insort
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

#: placers that compare each stretch with all that live at the same time are left out beyond this many
FEW = 5000
#: what sticks out is put first again while tries times squared count stay below this, and at most so often in vain
EFFORT, IN_VAIN = 10_000_000, 3
#: a share of the bound that is not worth another try
CLOSE = 1e-4


@dataclass(slots=True)
class Placement:
    """Offsets in an arena of this size, and which placer found them."""

    offsets: list[int]
    size: int
    placer: str


def place(start: list[int], end: list[int], size: list[int], bound: int, external: bool = True) -> Placement:
    """Offsets for stretches [start, end) of time with these sizes; stops at the first placer that is close to `bound`.

    Sizes are multiples of the alignment, so offsets are too. `external=False` leaves omnimalloc out.
    """
    live = [i for i, s in enumerate(size) if s and end[i] > start[i]]
    placers: list[tuple[str, Callable[..., dict[int, int]]]] = [
        ("best fit along time", best_fit_along_time),
        ("best fit against time", best_fit_against_time),
    ]
    if len(live) <= FEW:
        placers.append(("most crowded first", most_crowded_first))
        if external and importlib.util.find_spec("omnimalloc") is not None:
            placers.append(("omnimalloc", omnimalloc))
    best: Placement | None = None
    for name, placer in placers:
        found = placer(live, start, end, size, bound)
        height = max([found[i] + size[i] for i in live], default=0)
        if best is None or height < best.size:
            best = Placement([found.get(i, 0) for i in range(len(size))], height, name)
        if is_close(height, bound):
            break
    assert best is not None
    return best


def is_close(height: int, bound: int) -> bool:
    """Whether an arena is so near the least that any could be that no other is looked for."""
    return height <= bound * (1 + CLOSE)


def best_fit_along_time(
    live: list[int], start: list[int], end: list[int], size: list[int], bound: int
) -> dict[int, int]:
    """As an allocator would do it: the tightest free gap, else the top."""
    offsets: dict[int, int] = {}
    gaps = _Gaps()
    ends = sorted(live, key=lambda i: (end[i], i))
    done = 0
    for i in sorted(live, key=lambda i: (start[i], -size[i], i)):
        while end[ends[done]] <= start[i]:
            old = ends[done]
            gaps.free(offsets[old], size[old])
            done += 1
        offsets[i] = gaps.take(size[i])
    return offsets


def best_fit_against_time(
    live: list[int], start: list[int], end: list[int], size: list[int], bound: int
) -> dict[int, int]:
    """The same with time running backwards: what lives long after the peak comes first."""
    return best_fit_along_time(live, [-e for e in end], [-s for s in start], size, bound)


class _Gaps:
    """Free stretches below the top, by size and by both ends."""

    def __init__(self) -> None:
        self.by_size: list[tuple[int, int]] = []  # (size, offset), sorted
        self.size_at: dict[int, int] = {}
        self.start_of_end: dict[int, int] = {}
        self.top = 0

    def take(self, size: int) -> int:
        at = bisect_left(self.by_size, (size, -1))
        if at < len(self.by_size):
            have, offset = self.by_size.pop(at)
            del self.size_at[offset], self.start_of_end[offset + have]
            if have > size:
                self.add(offset + size, have - size)
            return offset
        offset = self.top
        below = self.start_of_end.get(self.top)
        if below is not None:  # a gap right below the top grows
            self.remove(below)
            offset = below
        self.top = offset + size
        return offset

    def free(self, offset: int, size: int) -> None:
        before = self.start_of_end.get(offset)
        if before is not None:
            size += self.remove(before)
            offset = before
        if offset + size in self.size_at:
            size += self.remove(offset + size)
        self.add(offset, size)

    def add(self, offset: int, size: int) -> None:
        self.size_at[offset] = size
        self.start_of_end[offset + size] = offset
        insort(self.by_size, (size, offset))

    def remove(self, offset: int) -> int:
        size = self.size_at.pop(offset)
        del self.start_of_end[offset + size]
        del self.by_size[bisect_left(self.by_size, (size, offset))]
        return size


def most_crowded_first(
    live: list[int], start: list[int], end: list[int], size: list[int], bound: int
) -> dict[int, int]:
    """What is there when most is comes first: it must lie without a gap, and what lives when there is room fits around.

    Of those equally crowded the largest, or what takes the most room for the longest, or the longest comes first; then
    the largest of all. While these leave the arena above `bound`, what sticks out of the best goes first in one more.
    """
    most = crowds(live, start, end, size)
    life = {i: end[i] - start[i] for i in live}
    ranks: list[Callable[[int], tuple[int, ...]]] = [
        lambda i: (-most[i], -size[i], -life[i], i),
        lambda i: (-most[i], -size[i] * life[i], i),
        lambda i: (-most[i], -life[i], -size[i], i),
        lambda i: (-size[i], -life[i], i),
    ]
    best: dict[int, int] = {}
    order: list[int] = []
    least = -1
    for rank in ranks:
        among = sorted(live, key=rank)
        offsets = in_turn(among, start, end, size)
        height = max([offsets[i] + size[i] for i in live], default=0)
        if least < 0 or height < least:
            best, order, least = offsets, among, height
        if is_close(height, bound):
            return best
    offsets, vain = best, 0
    for _ in range(EFFORT // max(1, len(live) ** 2)):
        height = max(offsets[i] + size[i] for i in live)
        top = {i for i in live if offsets[i] + size[i] == height}
        order = [i for i in order if i in top] + [i for i in order if i not in top]
        offsets = in_turn(order, start, end, size)
        height = max(offsets[i] + size[i] for i in live)
        vain = 0 if height < least else vain + 1
        if height < least:
            best, least = offsets, height
        if is_close(height, bound) or vain == IN_VAIN:
            break
    return best


def crowds(live: list[int], start: list[int], end: list[int], size: list[int]) -> dict[int, int]:
    """The most that lives at once while each stretch does."""
    times = sorted({t for i in live for t in (start[i], end[i])})
    at = {t: n for n, t in enumerate(times)}
    change = np.zeros(len(times), np.int64)
    for i in live:
        change[at[start[i]]] += size[i]
        change[at[end[i]]] -= size[i]
    used = np.cumsum(change)
    return {i: int(used[at[start[i]] : at[end[i]]].max()) for i in live}


def in_turn(order: list[int], start: list[int], end: list[int], size: list[int]) -> dict[int, int]:
    """Each at the tightest place between those already placed that live at the same time."""
    offsets: dict[int, int] = {}
    placed: list[tuple[int, int, int, int]] = []  # (offset, one past the end, start, end), sorted by offset
    for i in order:
        first, last, need = start[i], end[i], size[i]
        at, found, tightest = 0, -1, 0
        for low, high, s, e in placed:
            if s >= last or e <= first:
                continue
            if low - at >= need and (found < 0 or low - at < tightest):
                found, tightest = at, low - at
            if high > at:
                at = high
        offset = at if found < 0 else found
        offsets[i] = offset
        insort(placed, (offset, offset + need, first, last))
    return offsets


def omnimalloc(live: list[int], start: list[int], end: list[int], size: list[int], bound: int) -> dict[int, int]:
    """The best of omnimalloc's greedy placers."""
    library: Any = importlib.import_module("omnimalloc")
    asked = [library.Allocation(i, size[i], start[i], end[i]) for i in live]
    return {a.id: a.offset for a in library.allocate(asked, "greedy_by_all")} if asked else {}
