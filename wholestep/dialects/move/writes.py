"""Whether the writes of one value fit together: they cover disjoint parts of its memory.

One write of the whole is the common case. Several go through views; parts that interleave in memory (a concat along an
inner dimension) are boxes in the dimensions of the value, told apart dimension by dimension, in sorted sweeps.
"""

from __future__ import annotations

from ..strides import row_major
from .flat import Flat, Version


def overlapping_writes(flat: Flat, version: Version) -> tuple[int, int] | None:
    """Two entries of `version.writes` that share a byte, or cannot be shown not to; None where all are disjoint."""
    spans = [flat.span(buffer) for _, buffer in version.writes]
    clash = _clash([(*span, i) for i, span in enumerate(spans)])
    if clash is None:
        return None
    boxes = [_box(flat, version, buffer) for _, buffer in version.writes]
    if any(box is None for box in boxes):
        return clash
    rank = flat.type(version.buffer).rank
    return _box_clash([(box, i) for i, box in enumerate(boxes) if box is not None], 0, rank)


def _clash(spans: list[tuple[int, int, int]]) -> tuple[int, int] | None:
    """Two of the (start, end, number) that overlap."""
    reached, owner = -1, -1
    for start, end, number in sorted(span for span in spans if span[0] < span[1]):
        if start < reached:
            return owner, number
        reached, owner = end, number
    return None


Box = list[tuple[int, int]]


def _box_clash(boxes: list[tuple[Box, int]], dim: int, rank: int) -> tuple[int, int] | None:
    """Two boxes that overlap: those that meet along one dimension must be apart along a later one."""
    if len(boxes) < 2:
        return None
    if dim == rank:
        return boxes[0][1], boxes[1][1]
    group: list[tuple[Box, int]] = []
    reached = -1
    for box in sorted(boxes, key=lambda item: (item[0][dim], item[1])):
        start, end = box[0][dim]
        if start >= reached:
            clash = _box_clash(group, dim + 1, rank)
            if clash:
                return clash
            group = []
        group.append(box)
        reached = max(reached, end)
    return _box_clash(group, dim + 1, rank)


def _box(flat: Flat, version: Version, buffer: int) -> Box | None:
    """A view as ranges along the dimensions of the value it is a part of; None where it is no such box."""
    whole, part = flat.type(version.buffer), flat.type(buffer)
    if whole.element.bytes != part.element.bytes:
        return None
    strides = flat.strides(version.buffer) or row_major(whole.shape)
    size_of = {
        stride: size
        for size, stride in zip(part.shape, flat.strides(buffer) or row_major(part.shape), strict=True)
        if size != 1
    }
    if len(size_of) != sum(size != 1 for size in part.shape):
        return None
    left, odd = divmod(flat.start[buffer] - version.start, whole.element.bytes)
    box: Box = [(0, 1)] * whole.rank
    for stride, dim in sorted(((s, d) for d, s in enumerate(strides) if whole.shape[d] != 1), reverse=True):
        first, left = divmod(left, stride)
        size = size_of.pop(stride, 1)
        if first + size > whole.shape[dim]:
            return None
        box[dim] = (first, first + size)
    return None if left or odd or size_of else box
