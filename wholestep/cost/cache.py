"""What reaches DRAM: the launches of a plan in order, through a last-level cache that keeps what was used last.

Every access is a stretch of memory, by address and not by name, so that memory used again in place or by a later value
is still in the cache. A stretch longer than the cache leaves its tail there. Written bytes go to DRAM when they are
evicted. A launch goes through its operands and results side by side and reads each once; a second read within a
matrix product or a convolution is taken to hit the cache. `PASSES` lists kernels that go through their operands twice.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ..plan.plan import Plan
from ..plan.planner import Planned
from .accesses import ARENA, Access, Call, Frame, Place

#: ops whose ATen kernels on a GPU read their operands once per pass: statistics first, then the values
PASSES: Mapping[str, int] = {
    "step.batch_norm": 2,
    "step.batch_norm_grad": 2,
    "step.layer_norm_grad": 2,
    "step.rms_norm_grad": 2,
    "step.group_norm": 2,
    "step.group_norm_grad": 2,
}
#: operands and results of a launch advance together, by this share of the cache at a time
SHARE_AT_ONCE = 8
#: a strided view of more pieces than this is taken as one piece of as many bytes
PIECES = 64

Stretch = tuple[int, int]  # first address, the address after the last


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes between the cache and DRAM, per launch in the plan's order. `left`: written bytes still in the cache."""

    read: Sequence[int]
    written: Sequence[int]
    left: int = 0

    @property
    def total(self) -> int:
        return sum(self.read) + sum(self.written)


def without_cache(plan: Plan | Planned, passes: Mapping[str, int] | None = None) -> Traffic:
    """What the launches read and write, all of it from and to DRAM: the ledger's bytes, and those of further passes."""
    frame = Frame(plan)
    read, written = [0] * len(frame.plan.launches), [0] * len(frame.plan.launches)
    for number, work in enumerate(works(frame, PASSES if passes is None else passes)):
        for reads, writes in work:
            read[number] += sum(a.bytes for a in reads)
            written[number] += sum(a.bytes for a in writes)
    return Traffic(read, written)


def through_cache(
    plan: Plan | Planned, capacity: int, passes: Mapping[str, int] | None = None, warm: bool = True
) -> Traffic:
    """What a cache of `capacity` bytes lets through. warm: the cache holds what the step before left in it.

    A plan with its kernels is counted operator by operator; one without, launch by launch.
    """
    frame, addresses = Frame(plan), Addresses()
    read, written = [0] * len(frame.plan.launches), [0] * len(frame.plan.launches)
    cache = Cache(capacity)
    listed = list(works(frame, PASSES if passes is None else passes))
    for _ in range(2 if warm else 1):
        for number, work in enumerate(listed):
            cache.read = cache.written = 0
            for reads, writes in work:
                pieces = [addresses(a) for a in reads], [addresses(a) for a in writes]
                for write, first, end in side_by_side(*pieces, max(capacity // SHARE_AT_ONCE, 1)):
                    cache.touch(first, end, write)
            read[number], written[number] = cache.read, cache.written
    return Traffic(read, written, cache.dirty)


# ---- accesses --------------------------------------------------------------------------------------------------------

Pieces = tuple[Stretch, ...]  # one operand or result
Pass = tuple[list[Access], list[Access]]  # what is read, what is written


def works(frame: Frame, passes: Mapping[str, int]) -> Iterator[list[Pass]]:
    """The passes of every launch of a plan."""
    for position, launch in enumerate(frame.plan.launches):
        if launch.body < 0:
            yield passes_of(frame.calls(position), passes.get(launch.name, 1))
            continue
        out: list[Pass] = []
        for body, gathered in frame.turns(launch):
            for work in works(body, passes):
                out += work
            out += passes_of([g.call for g in gathered], 1)
        yield out


def passes_of(calls: Sequence[Call], times: int) -> list[Pass]:
    """Calls as passes; the one that reads the most reads `times` times. Scratch is read after it was written."""
    out: list[Pass] = []
    for call in calls:
        reads, writes = [a for a in call if not a.written], [a for a in call if a.written]
        scratch = {a.place for a in writes if a.inside}
        later = [a for a in reads if a.inside and a.place in scratch]
        out.append(([a for a in reads if a not in later], writes))
        out += [(later, [])] if later else []
    if times > 1 and out:
        most = max(range(len(out)), key=lambda i: sum(a.bytes for a in out[i][0]))
        out[most:most] = [(out[most][0], [])] * (times - 1)
    return out


class Addresses:
    """Gives every memory a range of addresses of its own; the arena's begin at 0."""

    ROOM = 1 << 48

    def __init__(self) -> None:
        self.memories: dict[Hashable, int] = {ARENA: 0}
        self.known: dict[tuple[Place, int], Pieces] = {}

    def __call__(self, access: Access) -> Pieces:
        place = access.place
        found = self.known.get((place, access.bytes))
        if found is None:
            start = self.memories.setdefault(place.memory, len(self.memories)) * self.ROOM + place.base
            inner = place.offset - place.base
            listed = stretches(place.shape, place.strides, place.element, inner) if access.bytes else []
            whole = tuple([(start + first, start + end) for first, end in listed])
            found = self.known[place, access.bytes] = cut(whole, 0, access.bytes)
        return found


def stretches(shape: Sequence[int], strides: Sequence[int], element: int, offset: int) -> list[Stretch]:
    """The bytes of a strided tensor, by address. Of many pieces in rows of columns, the columns are put together."""
    steps = sorted((st * element, n) for n, st in zip(shape, strides, strict=True) if n > 1 and st > 0)
    first, length = offset, element
    many: list[tuple[int, int]] = []  # steps that stay apart
    for step, count in steps:
        if not many and length >= step:  # pieces touch
            length += step * (count - 1)
            continue
        many.append((step, count))
        if math.prod(n for _, n in many) > PIECES:
            for apart, times in many:
                phase = first % apart
                first += phase * (times - 1)
                length = min(length, apart - phase) * times
            many = []
    starts = [first]
    for step, count in many:
        starts = [start + i * step for start in starts for i in range(count)]
    return sorted((start, start + length) for start in starts)


def side_by_side(reads: Sequence[Pieces], writes: Sequence[Pieces], at_once: int) -> Iterator[tuple[bool, int, int]]:
    """Goes through operands and results together, so that each is as far along as the others: (written, from, to)."""
    all_of = [(False, a, size(a)) for a in reads] + [(True, a, size(a)) for a in writes]
    rounds = max(1, -(-sum(total for _, _, total in all_of) // at_once))
    places = [(0, 0)] * len(all_of)  # the piece that comes next, and the bytes before it
    for turn in range(rounds):
        for number, (write, pieces, total) in enumerate(all_of):
            first, end = total * turn // rounds, total * (turn + 1) // rounds
            piece, before = places[number]
            while first < end:
                start, stop = pieces[piece]
                until = min(end, before + stop - start)
                yield write, start + first - before, start + until - before
                if until == before + stop - start:
                    piece, before = piece + 1, until
                first = until
            places[number] = piece, before


def cut(pieces: Pieces, first: int, end: int) -> Pieces:
    """The part of an access from its byte `first` to before its byte `end`."""
    if len(pieces) == 1:
        start = pieces[0][0]
        return ((start + first, start + end),) if end > first else ()
    out, at = [], 0
    for start, stop in pieces:
        low, high = max(first - at, 0), min(end - at, stop - start)
        if low < high:
            out.append((start + low, start + high))
        at += stop - start
    return tuple(out)


def size(pieces: Pieces) -> int:
    return sum([end - start for start, end in pieces])


# ---- the cache -------------------------------------------------------------------------------------------------------


class Segment:
    """A stretch of memory in the cache, its bytes used one after the other: the first is the oldest."""

    __slots__ = ("dirty", "end", "newer", "older", "start")

    def __init__(self, start: int, end: int, dirty: bool):
        self.start, self.end, self.dirty = start, end, dirty
        self.older: Segment = self
        self.newer: Segment = self


class Cache:
    """Least recently used bytes leave first. Segments hang in a ring by age, and in a list by address."""

    def __init__(self, capacity: int):
        self.capacity = capacity
        self.held = 0
        self.read = self.written = 0  # bytes from and to DRAM
        self.ring = Segment(0, 0, False)  # its `newer` is the oldest segment, its `older` the newest
        self.starts: list[int] = []
        self.segments: list[Segment] = []

    @property
    def dirty(self) -> int:
        """Bytes that are written but not in DRAM yet."""
        return sum(s.end - s.start for s in self.segments if s.dirty)

    def touch(self, start: int, end: int, write: bool) -> None:
        """Reads or writes a stretch, from its first byte to its last. Whole stretches are written without a read."""
        at = start
        for segment, first, last in self.overlapping(start, end):
            if at < first:
                self.miss(at, first, write)
            if segment.start <= first < segment.end:
                dirty = segment.dirty or write
                self.take(segment, first, last)
                self.push(first, last, dirty)
            else:
                # What came before drove its first byte out. Each further byte drives out the next one of the segment.
                if segment.start < min(segment.end, last):
                    if segment.dirty:
                        self.written += last - segment.start
                    self.take(segment, segment.start, last)
                self.miss(first, last, write)
            at = last
        if at < end:
            self.miss(at, end, write)

    def overlapping(self, start: int, end: int) -> list[tuple[Segment, int, int]]:
        """The segments that hold a part of a stretch, and which, by address."""
        index = bisect_right(self.starts, start)
        if index and self.segments[index - 1].end > start:
            index -= 1
        out = []
        while index < len(self.starts) and self.starts[index] < end:
            segment = self.segments[index]
            out.append((segment, max(segment.start, start), min(segment.end, end)))
            index += 1
        return out

    def miss(self, start: int, end: int, write: bool) -> None:
        if not write:
            self.read += end - start
        if end - start > self.capacity:  # longer than the cache: the tail stays
            self.evict(0)
            if write:
                self.written += end - start - self.capacity
            start = end - self.capacity
            if start == end:
                return
        self.evict(self.capacity - (end - start))
        self.push(start, end, write)

    def evict(self, most: int) -> None:
        """Lets the oldest bytes go until no more than `most` are held."""
        while self.held > most:
            oldest = self.ring.newer
            gone = min(self.held - most, oldest.end - oldest.start)
            if oldest.dirty:
                self.written += gone
            self.take(oldest, oldest.start, oldest.start + gone)

    def take(self, segment: Segment, first: int, last: int) -> None:
        """Takes a part out of a segment; what is before and after it keeps its age."""
        self.held -= last - first
        index = bisect_left(self.starts, segment.start)
        if last < segment.end:
            if first == segment.start:
                segment.start = self.starts[index] = last
                return
            rest = Segment(last, segment.end, segment.dirty)
            self.link(rest, segment)
            self.enter(rest)
        if first > segment.start:
            segment.end = first
            return
        segment.end = segment.start  # nothing is left
        segment.older.newer, segment.newer.older = segment.newer, segment.older
        del self.starts[index], self.segments[index]

    def push(self, start: int, end: int, dirty: bool) -> None:
        """Adds a stretch that is not held, as the newest."""
        self.held += end - start
        newest = self.ring.older
        if newest.end == start and newest.dirty == dirty and newest is not self.ring:
            newest.end = end
            return
        segment = Segment(start, end, dirty)
        self.link(segment, newest)
        self.enter(segment)

    def link(self, segment: Segment, older: Segment) -> None:
        segment.older, segment.newer = older, older.newer
        older.newer.older = segment
        older.newer = segment

    def enter(self, segment: Segment) -> None:
        index = bisect_left(self.starts, segment.start)
        self.starts.insert(index, segment.start)
        self.segments.insert(index, segment)
