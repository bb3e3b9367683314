"""Dimensions as products of parts, some of which will be gone: copies that are not made, or what is summed over."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Part:
    """A factor of a dimension."""

    size: int
    gone: bool


#: the dimensions of a tensor, each with its parts from the slowest to the fastest
Dimensions = tuple[tuple[Part, ...], ...]


def regrouped(dimensions: Dimensions, shape: Sequence[int]) -> Dimensions | None:
    """The parts of dimensions as those of another shape, divided where they must be; None where they do not fit it."""
    parts = [p for dimension in dimensions for p in dimension if p.size != 1]
    found = []
    for size in shape:
        mine: list[Part] = []
        while size != 1:
            part = parts.pop(0)
            if size % part.size == 0:
                mine.append(part)
                size //= part.size
            elif part.size % size == 0:
                mine.append(replace(part, size=size))
                parts.insert(0, replace(part, size=part.size // size))
                size = 1
            else:
                return None
        found.append(tuple(mine))
    return tuple(found)


def left(dimension: Sequence[Part]) -> int:
    """The size of a dimension without what is gone."""
    return math.prod(p.size for p in dimension if not p.gone)
