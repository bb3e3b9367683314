"""No two buffers that are live at once share a byte of an arena.

A sweep in issue order over a map from address ranges to the memory that used them last. A newcomer must come after
every access to whatever it covers; that is then forgotten, since what is after the newcomer is after it too.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right

from ...ir.core import Op
from ...ir.verify import InvalidOp
from .base import extent
from .buffers import Alloc
from .flat import Flat
from .order import Order


def check_overlap(flat: Flat, order: Order) -> None:
    """InvalidOp for the first buffer that is written over memory still in use."""
    accesses: list[list[int]] = [[] for _ in flat.storages]
    first_writes: list[list[int]] = [[] for _ in flat.storages]
    at_end = [False] * len(flat.storages)
    whole = [0] * len(flat.storages)  # the buffer that is all of a storage
    for version in flat.versions:
        number = version.storage
        accesses[number] += [action for action, _ in version.reads]
        accesses[number] += [action for action, _ in version.writes]
        at_end[number] |= version.given_back
        if version.old < 0:
            whole[number] = version.buffer
            first_writes[number] = [action for action, _ in version.writes]
    used = [n for n, op in enumerate(flat.storages) if op.definition is Alloc and accesses[n]]
    last = {n: order.last(sorted(accesses[n])) for n in used}
    maps: dict[Op, _Occupants] = {}
    for number in sorted(used, key=lambda n: (min(accesses[n]), n)):
        op = flat.storages[number]
        size = extent(op.attributes["type"], op.attributes.get("strides"))
        if not size:
            continue
        arena = op.operands[0].op
        assert arena is not None
        start = op.attributes["offset"]
        for occupant in maps.setdefault(arena, _Occupants()).replace(start, start + size, number):
            for action in first_writes[number]:
                _check_free(flat, order, whole[occupant], last[occupant], at_end[occupant], whole[number], action)


def _check_free(flat: Flat, order: Order, old: int, last: dict[int, int], at_end: bool, new: int, action: int) -> None:
    """The memory of `old`, with those last accesses, must be free when the action writes `new` over it."""
    used_by = next((other for other in last.values() if not order.before(other, action)), None)
    if used_by is None and not at_end:
        return
    places = [flat.values[buffer].owner.attributes["offset"] for buffer in (new, old)]  # type: ignore[union-attr]
    if used_by == action:
        why = "which it uses too"
    elif used_by is None:
        why = "which is given back at the end"
    elif used_by > action:
        why = f"which {flat.action(used_by)} still uses"
    else:
        why = f"and nothing orders it after {flat.action(used_by)} on stream {order.stream[used_by]}, which uses that"
    problem = (
        f"{flat.action(action)} writes {flat.name(new)} at offset {places[0]} over {flat.name(old)} at {places[1]}"
    )
    raise InvalidOp(flat.actions[action], f"{problem}, {why}")


class _Occupants:
    """Disjoint address ranges in order, each with the storage that used it last."""

    def __init__(self) -> None:
        self.starts: list[int] = []
        self.ends: list[int] = []
        self.owners: list[int] = []

    def replace(self, start: int, end: int, owner: int) -> list[int]:
        """Gives a range to a new owner; returns the owners it is taken from."""
        first = bisect_right(self.ends, start)
        stop = bisect_left(self.starts, end)
        found = self.owners[first:stop]
        starts, ends, owners = [start], [end], [owner]
        if first < stop and self.starts[first] < start:
            starts.insert(0, self.starts[first])
            ends.insert(0, start)
            owners.insert(0, found[0])
        if first < stop and self.ends[stop - 1] > end:
            starts.append(end)
            ends.append(self.ends[stop - 1])
            owners.append(found[-1])
        self.starts[first:stop] = starts
        self.ends[first:stop] = ends
        self.owners[first:stop] = owners
        return found
