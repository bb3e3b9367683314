"""Whether the writes of one value fit together, and which of them a read sees.

One write of the whole is the common case. Several go through views; parts that interleave in memory (a concat along an
inner dimension) become boxes: every address is a number with one digit per stride, and a view is a range of each digit.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate, combinations
from math import prod

from ..strides import row_major
from .flat import Flat, Version

#: a range (first, one past the last) per digit
Box = list[tuple[int, int]]


def overlapping_writes(flat: Flat, version: Version) -> tuple[int, int] | None:
    """Two entries of `version.writes` that share a byte, or cannot be shown not to; None where all are disjoint."""
    buffers = [buffer for _, buffer in version.writes]
    clash = _clash([(*flat.span(buffer), i) for i, buffer in enumerate(buffers)])
    if clash is None:
        return None
    boxes = boxes_of(flat, buffers)
    if boxes is None:
        return clash
    return _box_clash([(box, i) for i, box in enumerate(boxes) if prod(_sizes(box))])


class SeenWrites:
    """Which writes of a value a buffer shows. Most read what one action has written, or all of it."""

    def __init__(self, flat: Flat, version: Version):
        self.flat, self.writes = flat, version.writes
        self.exactly = {flat.region(buffer): action for action, buffer in version.writes}
        #: writes by their first byte, and what all up to each of them reach
        self.by_start = sorted([(*flat.span(buffer), action, buffer) for action, buffer in version.writes])
        self.starts = [start for start, *_ in self.by_start]
        self.reached = list(accumulate([end for _, end, *_ in self.by_start], max))

    def __call__(self, buffer: int) -> tuple[list[int], bool] | None:
        """The actions that write what a buffer shows, and whether they write all of it; None where nobody can tell."""
        own = self.exactly.get(self.flat.region(buffer))
        if own is not None:
            return [own], True
        start, end = self.flat.span(buffer)
        near = self.by_start[bisect_right(self.reached, start) : bisect_left(self.starts, end)]
        boxes = boxes_of(self.flat, [buffer, *[b for *_, b in near]])
        if boxes is None:
            return None
        mine, *theirs = boxes
        found, covered = [], 0
        for box, (_, _, action, _) in zip(theirs, near, strict=True):
            shared = prod([max(0, min(a[1], b[1]) - max(a[0], b[0])) for a, b in zip(mine, box, strict=True)])
            if shared:
                found.append(action)
                covered += shared
        return found, covered == prod(_sizes(mine))  # (writes of one value are disjoint, see `overlapping_writes`)


def are_apart(flat: Flat, one: int, other: int) -> bool:
    """Whether two buffers of one storage are known to share no byte."""
    if _clash([(*flat.span(one), 0), (*flat.span(other), 1)]) is None:
        return True
    boxes = boxes_of(flat, [one, other])
    return boxes is not None and _are_apart(*boxes)


def _sizes(box: Box) -> list[int]:
    return [end - first for first, end in box]


def _clash(spans: list[tuple[int, int, int]]) -> tuple[int, int] | None:
    """Two of the (start, end, number) that overlap."""
    reached, owner = -1, -1
    for start, end, number in sorted(span for span in spans if span[0] < span[1]):
        if start < reached:
            return owner, number
        reached, owner = end, number
    return None


def _box_clash(boxes: list[tuple[Box, int]]) -> tuple[int, int] | None:
    """Two boxes that overlap. Where there is a cut between some along a dimension, each side is looked at alone."""
    if len(boxes) < 2:
        return None
    for dim in range(len(boxes[0][0])):
        groups = _groups(boxes, dim)
        if len(groups) > 1:
            return next(filter(None, map(_box_clash, groups)), None)
    return next(((i, j) for (one, i), (other, j) in combinations(boxes, 2) if not _are_apart(one, other)), None)


def _groups(boxes: list[tuple[Box, int]], dim: int) -> list[list[tuple[Box, int]]]:
    """Boxes by the ranges that they cover together along a dimension."""
    groups: list[list[tuple[Box, int]]] = []
    reached = -1
    for box in sorted(boxes, key=lambda item: (item[0][dim], item[1])):
        start, end = box[0][dim]
        if start >= reached:
            groups.append([])
        groups[-1].append(box)
        reached = max(reached, end)
    return groups


def _are_apart(one: Box, other: Box) -> bool:
    return any(min(a[1], b[1]) <= max(a[0], b[0]) for a, b in zip(one, other, strict=True))


# ---- buffers as boxes ----


def boxes_of(flat: Flat, buffers: Sequence[int]) -> list[Box] | None:
    """Buffers of one storage as boxes of one address space; None where they are no such boxes.

    The digits are the strides that occur, the largest first. An address has one number for each of them, and only one,
    where all that the smaller digits reach together stays below one step of the larger.
    """
    width = {flat.type(buffer).element.bytes for buffer in buffers}
    if len(width) != 1:
        return None
    (element,) = width
    starts = [divmod(flat.start[buffer], element) for buffer in buffers]
    if any(odd for _, odd in starts):
        return None
    runs = [_runs(flat.type(b).shape, flat.strides(b) or row_major(flat.type(b).shape)) for b in buffers]
    digits = sorted({1, *[stride for run in runs for stride, _ in run]}, reverse=True)
    boxes = [_box(run, start, digits) for run, (start, _) in zip(runs, starts, strict=True)]
    found = [box for box in boxes if box is not None]
    if len(found) < len(boxes):
        return None
    reached = 0
    for place in reversed(range(len(digits))):
        if reached >= digits[place]:
            return None
        reached += digits[place] * max(0, *[box[place][1] - 1 for box in found])
    return found


def _runs(shape: Sequence[int], strides: Sequence[int]) -> list[tuple[int, int]]:
    """Dimensions as (stride, size), the largest stride first; neighbours that are steps of one another are one.

    What is repeated (stride 0) is seen once; a tensor without elements has a run of none.
    """
    if 0 in shape:
        return [(1, 0)]
    found: list[tuple[int, int]] = []
    for stride, size in sorted([(st, n) for n, st in zip(shape, strides, strict=True) if n != 1 and st], reverse=True):
        if found and found[-1][0] == stride * size:
            found[-1] = (stride, size * found[-1][1])
        else:
            found.append((stride, size))
    return found


def _box(runs: Sequence[tuple[int, int]], start: int, digits: Sequence[int]) -> Box | None:
    """A tensor as a range of each digit; None where a run ends inside of one, or two runs go along the same."""
    sizes = dict.fromkeys(digits, 1)
    pending = list(runs)
    while pending:
        stride, size = pending.pop()
        larger = min([d for d in digits if stride < d < stride * size], default=0)
        if larger:
            step, odd = divmod(larger, stride)
            if odd or size % step:
                return None
            pending.append((larger, size // step))
            size = step
        if sizes[stride] != 1:
            return None
        sizes[stride] = size
    box: Box = []
    for digit in digits:
        first, start = divmod(start, digit)
        box.append((first, first + sizes[digit]))
    return box
