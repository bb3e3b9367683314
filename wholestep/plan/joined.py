"""A function as launches with its concatenations in place, as far as its peak stays what it is.

How a concatenation lies is seen where it is made as a whole. In place it takes its memory with its first part, and what
makes a part cannot write over what it reads: those that are in memory at a peak which has grown are made as a whole.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..dialects.strides import Strides
from ..ir.core import Op
from ..ir.hashing import structural_hash
from .joins import Joins, find_joins
from .launches import Flat, Regions
from .liveness import Graph, build_graph
from .order import peak_position, quick
from .remembered import Memory, is_numbers

#: how much the peak may grow, as a share, by orders that are found quickly
GROWTH = 0.01
#: how often some are given up before all are
ROUNDS = 3

Flatten = Callable[[Regions | None, Joins], Flat]


class Joined:
    """Flattens a function, which may be changed between calls."""

    def __init__(
        self,
        function: Op,
        device: torch.device,
        flatten: Flatten,
        alignment: int,
        whole_updates: bool,
        memory: Memory,
    ):
        self.function, self.device, self.flatten = function, device, flatten
        self.alignment, self.whole_updates, self.memory = alignment, whole_updates, memory
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
        graph, wholes = self.graph(flat), list(flat.wholes)
        digest = self.memory.digest("peak", structural_hash(self.function), graph, flat.strides)
        marks = self.memory.read(digest).get("too_large", ())
        if not is_numbers(marks, len(wholes)):
            large = self.at_peak(flat, graph, regions)
            marks = [int(op in large) for op in wholes]
            self.memory.write(digest, {"too_large": marks})
        return [op for op, mark in zip(wholes, marks, strict=True) if mark]

    def at_peak(self, flat: Flat, graph: Graph, regions: Regions | None) -> list[Op]:
        """As `too_large`, by comparing with the launches of a function that makes all of them as a whole."""
        apart = self.flatten(regions, Joins())
        _, plain = quick(self.graph(apart), apart.phase)
        order, found = quick(graph, flat.phase)
        if found.peak <= plain.peak * (1 + GROWTH):
            return []
        at = peak_position(found, len(order))
        place = {op: found.place[value] - flat.arguments for op, value in flat.wholes.items()}
        return [op for op, p in place.items() if found.start[p] <= at < found.end[p]] or list(flat.wholes)

    def graph(self, flat: Flat) -> Graph:
        return build_graph(flat, self.alignment, self.whole_updates)
