"""A function as launches with its concatenations in place, as far as its peak stays what it is.

How a concatenation lies is seen where it is made as a whole. In place it takes its memory with its first part, and what
makes a part cannot write over what it reads: those that are in memory at a peak which has grown are made as a whole.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..dialects.strides import Strides
from ..ir.core import Op
from .aliases import Assignment
from .joins import Joins, find_joins
from .launches import Flat, Regions
from .liveness import build_graph
from .order import peak_position, quick

#: how much the peak may grow, as a share, by orders that are found quickly
GROWTH = 0.01
#: how often some are given up before all are
ROUNDS = 3

Flatten = Callable[[Regions | None, Joins], Flat]


class Joined:
    """Flattens a function, which may be changed between calls."""

    def __init__(self, function: Op, device: torch.device, flatten: Flatten, alignment: int, whole_updates: bool):
        self.function, self.device, self.flatten = function, device, flatten
        self.alignment, self.whole_updates = alignment, whole_updates
        #: how concatenations lie, and those that are made as a whole for the sake of the peak
        self.laid: dict[Op, Strides] = {}
        self.given_up: dict[Op, str] = {}
        self.joins = Joins()

    def __call__(self, regions: Regions | None = None) -> Flat:
        """The launches, whatever their peak is."""
        while True:
            self.joins = find_joins(self.function, self.laid, self.given_up, self.device)
            flat = self.flatten(regions, self.joins)
            if flat.concats.keys() <= self.laid.keys():
                return flat
            self.laid |= flat.concats

    def within_peak(self, settled: Callable[[], Flat], regions: Regions | None = None) -> Flat:
        """The launches. settled: calls this until everything is decided."""
        flat = settled()
        for attempt in range(1 + ROUNDS):
            large = self.too_large(flat, regions)
            if not large:
                break
            wanted = large if attempt < ROUNDS else list(flat.wholes)
            self.given_up |= dict.fromkeys(wanted, "in place it would be in memory when most is")
            flat = settled()
        return flat

    def too_large(self, flat: Flat, regions: Regions | None) -> list[Op]:
        """The concatenations that are in memory at the peak, where that has grown for them."""
        if not flat.wholes:
            return []
        _, plain = self.ordered(self.flatten(regions, Joins()))
        order, found = self.ordered(flat)
        if found.peak <= plain.peak * (1 + GROWTH):
            return []
        at = peak_position(found, len(order))
        place = {op: found.place[value] - flat.arguments for op, value in flat.wholes.items()}
        return [op for op, p in place.items() if found.start[p] <= at < found.end[p]] or list(flat.wholes)

    def ordered(self, flat: Flat) -> tuple[list[int], Assignment]:
        return quick(build_graph(flat, self.alignment, self.whole_updates), flat.phase)
