"""The order and the addresses of a plan are kept: when the same launches are planned again, nothing is searched.

An entry is JSON with numbers, found by a hash of all that the search looks at and of its source. It is taken only where
it is right: an order that keeps the dependences, addresses that nothing else has at the same time.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..machine.describe import package_version
from ..transforms.remembered import Keeper
from .aliases import Assignment, assign
from .liveness import Graph
from .order import best_order
from .place import FEW, Placement, place

KIND = "plan"


@functools.cache
def source_hash() -> str:
    """Of all that searches."""
    files = sorted(Path(__file__).parent.glob("*.py"))
    placer = package_version("omnimalloc") if importlib.util.find_spec("omnimalloc") is not None else None
    return hashlib.sha256(b"\0".join([str(placer).encode(), *(file.read_bytes() for file in files)])).hexdigest()


@dataclass(frozen=True, slots=True)
class Memory:
    """Searches, or knows what was found before. kept: None remembers nothing."""

    kept: Keeper | None = None

    def order(self, graph: Graph, phases: list[str]) -> tuple[str, list[int], Assignment, int]:
        """As `best_order`."""
        digest = self.digest("order", graph, phases)
        entry = self.read(digest)
        name, order = entry.get("name"), entry.get("order", ())
        if isinstance(name, str) and keeps_dependences(graph, order):
            found, program_peak = assign(graph, order), assign(graph, list(range(len(order)))).peak
            if found.peak <= program_peak:
                return name, order, found, program_peak
        name, order, found, program_peak = best_order(graph, phases)
        self.write(digest, {"name": name, "order": order})
        return name, order, found, program_peak

    def placement(self, found: Assignment, alignment: int, external: bool) -> Placement:
        """As `place`, for the memory that was handed out along an order."""
        start, end, size, bound = found.start, found.end, found.size, found.peak
        if len(size) > FEW:
            return place(start, end, size, bound, external)
        digest = self.digest("place", start, end, size, bound, alignment, external)
        entry = self.read(digest)
        placer, offsets = entry.get("placer"), entry.get("offsets", ())
        if isinstance(placer, str) and lie_apart(start, end, size, offsets, alignment):
            return Placement(offsets, top(start, end, size, offsets), placer)
        placement = place(start, end, size, bound, external)
        self.write(digest, {"placer": placement.placer, "offsets": placement.offsets})
        return placement

    def digest(self, what: str, *content: object) -> str:
        if self.kept is None:
            return ""
        return hashlib.sha256("\n".join([source_hash(), what, *map(repr, content)]).encode()).hexdigest()

    def read(self, digest: str) -> dict[str, Any]:
        """An entry; empty where there is none, or something that is none."""
        data = None if self.kept is None else self.kept.read(KIND, digest)
        try:
            found = {} if data is None else json.loads(data)
        except (ValueError, RecursionError):
            return {}
        return found if isinstance(found, dict) else {}

    def write(self, digest: str, entry: dict[str, Any]) -> None:
        if self.kept is not None:
            with suppress(OSError):  # (the next compile searches again)
                self.kept.write(KIND, digest, json.dumps(entry).encode())


def keeps_dependences(graph: Graph, order: Any) -> bool:
    """Whether something is an order of all launches in which each comes after those it needs."""
    count = len(graph.reads)
    if not is_numbers(order, count) or set(order) != set(range(count)):
        return False
    position = [0] * count
    for p, launch in enumerate(order):
        position[launch] = p
    return all(position[i] < position[j] for i, after in enumerate(graph.successors) for j in after)


def lie_apart(start: Sequence[int], end: Sequence[int], size: Sequence[int], offsets: Any, alignment: int) -> bool:
    """Whether something is an aligned offset for every stretch, and no two that live at once share a byte."""
    if not is_numbers(offsets, len(size)) or any(o < 0 or o % alignment for o in offsets):
        return False
    live = [i for i in range(len(size)) if size[i] and end[i] > start[i]]
    first, last, low, length = (np.array([row[i] for i in live], np.int64) for row in (start, end, offsets, size))
    high = low + length
    shares = 0
    for s, e, bottom, above in zip(first, last, low, high, strict=True):
        shares += int(((first < e) & (last > s) & (low < above) & (high > bottom)).sum())
    return shares == len(live)  # each with itself


def top(start: Sequence[int], end: Sequence[int], size: Sequence[int], offsets: Sequence[int]) -> int:
    return max([o + n for s, e, n, o in zip(start, end, size, offsets, strict=True) if n and e > s], default=0)


def is_numbers(found: Any, count: int) -> bool:
    return isinstance(found, list) and len(found) == count and all(type(n) is int and n < 1 << 60 for n in found)
