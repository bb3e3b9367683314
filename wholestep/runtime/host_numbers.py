"""Numbers of the host: what follows from learning rates and counters, computed as Python numbers before each step.

While all counters agree, what is computed alike is computed once and stands for all. What no counter changes is
computed only where what it follows from has changed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any


@dataclass(slots=True)
class HostCall:
    """Arithmetic on numbers of the host."""

    function: Callable[..., Any]
    reads: tuple[int, ...]
    write: int
    kind: tuple[Any, ...]  # equal for calls that compute alike
    name: str = ""  # of the op
    constants: tuple[float | None, ...] = ()  # by operand: None where it is a buffer


class HostNumbers:
    """The arithmetic on numbers of the host. While all counters agree, what is computed alike is computed once."""

    def __init__(self, calls: list[HostCall], counters: Sequence[int], needed: set[int]):
        self.calls, self.counters = calls, list(counters)
        alike: dict[int, Any] = dict.fromkeys(counters, "counter")
        first: dict[Any, int] = {}
        for call in calls:
            key = (call.kind, tuple(alike.get(n, n) for n in call.reads))
            first.setdefault(key, call.write)
            alike[call.write] = key
        #: whose number a buffer has while all counters agree
        self.stands_for = {call.write: first[alike[call.write]] for call in calls}
        self.stands_for |= dict.fromkeys(counters, self.counters[0] if counters else -1)
        stands_for = self.stands_for
        once = [
            replace(c, reads=tuple([stands_for.get(n, n) for n in c.reads]))
            for c in calls
            if stands_for[c.write] == c.write
        ]
        moving = set(counters)
        for call in once:
            if not moving.isdisjoint(call.reads):
                moving.add(call.write)
        #: what no counter changes is computed again only where what it follows from has changed
        self.moving = [c for c in once if c.write in moving]
        self.steady = [c for c in once if c.write not in moving]
        self._moving, self._steady = (
            [(c.function, c.reads, c.write) for c in some] for some in (self.moving, self.steady)
        )
        made = {call.write for call in once}
        self.given = sorted({n for call in self.steady for n in call.reads} - made)
        self.known: list[Any] | None = None
        self.copies = [(n, stands_for[n]) for n in sorted(needed) if stands_for.get(n, n) != n]

    def compute(self, values: list[Any], agree: bool = False) -> bool:
        """What follows from the numbers given; true where each was computed once: `spread` then gives it to all.

        agree: all counters are known to be one number, which is in the place of the first.
        """
        if not agree and len({values[n] for n in self.counters}) > 1:
            self.known = None
            for call in self.calls:
                values[call.write] = call.function(*[values[n] for n in call.reads])
            return False
        self.settle(values)
        for function, reads, write in self._moving:
            values[write] = function(*[values[n] for n in reads])
        return True

    def settle(self, values: list[Any]) -> None:
        """What follows from the numbers given and from no counter."""
        given = [values[n] for n in self.given]
        if given != self.known:
            self.known = given
            for function, reads, write in self._steady:
                values[write] = function(*[values[n] for n in reads])

    def spread(self, values: list[Any]) -> None:
        """Gives numbers that were computed once to all who have them."""
        for number, source in self.copies:
            values[number] = values[source]
