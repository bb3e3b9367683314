"""Which action surely has finished before which starts: streams run in issue order, tokens order streams.

A vector clock per action says, for each stream, how many of its actions are known to be over; so one comparison answers
for any two actions, and all clocks together cost actions times streams.
"""

from __future__ import annotations

from collections.abc import Iterable

from ...ir.core import Op
from ...ir.verify import InvalidOp
from .actions import Action, Wait
from .flat import Flat


class Order:
    """Answers `before(a, b)` for the actions of a plan."""

    def __init__(self, flat: Flat, streams: int):
        self.stream = [op.attributes["stream"] for op in flat.actions]
        self.place: list[int] = []  # per action: its number on its stream, from 1
        self.clock: list[list[int]] = []
        latest = [[0] * streams for _ in range(streams)]  # per stream: what its next action knows
        issued = [0] * streams
        for op in flat.sequence:
            stream = op.attributes["stream"]
            clock = latest[stream]
            tokens = op.operands if op.definition is Wait else op.definition.accesses(op)[2]  # type: ignore[attr-defined]
            if tokens:
                clock = list(clock)
                for token in tokens:
                    seen = self.clock[flat.number[token.owner]]  # type: ignore[index]
                    clock = [max(mine, theirs) for mine, theirs in zip(clock, seen, strict=True)]
            if op.definition is not Wait:
                issued[stream] += 1
                clock = list(clock)
                clock[stream] = issued[stream]
                self.place.append(issued[stream])
                self.clock.append(clock)
            latest[stream] = clock
        #: what the first stream knows at the end
        self.end = latest[0]

    def before(self, first: int, second: int) -> bool:
        """Whether `first` has finished when `second` starts."""
        return first != second and self.clock[second][self.stream[first]] >= self.place[first]

    def last(self, actions: Iterable[int]) -> dict[int, int]:
        """The last action of each stream; those given are in issue order."""
        stream = self.stream
        return {stream[a]: a for a in actions}


def check_tokens(function: Op) -> None:
    """Refuses an action or wait that needs the token of something issued after it: neither could ever start."""
    issued: set[Op] = set()
    for op in function.regions[0].block:
        is_action = issubclass(op.definition, Action)
        if is_action or op.definition is Wait:
            for value in op.operands:
                owner = value.op
                if owner is None or not issubclass(owner.definition, Action) or owner in issued:
                    continue
                what = "itself" if owner is op else f"{owner.name} ({owner.loc}), which is issued only later"
                raise InvalidOp(op, f"a cycle of tokens: it waits for {what}")
        if is_action:
            issued.add(op)
