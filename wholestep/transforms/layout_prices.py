"""What layouts cost: by the clock where a compile has one (`timed_by`), else by the model of `layout_rules.py`.

All prices are bytes; a time is as many bytes as memory would move meanwhile. A clock is asked only where the answer
hangs on it (`Decision.settle`): until then an op may be `SPAN` times what it takes at the machine's limits quicker row
by row, or slower by that and twice what the model says, and a copy costs what its bytes do.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Protocol

from ..ir.core import Op, Value
from ..ir.hashing import structural_hash
from ..ir.types import TensorType
from .layout_rules import Order, Preference, conversion

#: by how many times of what it takes at the machine's limits an op may be off the model
SPAN = 1.0
#: a price beyond any that a model has, below what no cut pays
HIGHEST = 1 << 44

#: seconds row by row and with channels as neighbours
Pair = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Move:
    """A copy of a tensor from one order of memory to another."""

    type: TensorType
    source: Order
    target: Order


@dataclass(frozen=True, slots=True, eq=False)
class Costed:
    """An op whose time hangs on its layout: its node, and its tensors, of which it is modelled to convert a share."""

    op: Op
    node: int
    share: float
    tensors: list[Value]
    #: equal for ops that do the same on tensors of the same types
    case: str


class Clock(Protocol):
    """Who times ops and copies, each once. None is what it cannot time or was not asked to: it is then modelled."""

    @property
    def bandwidth(self) -> float:
        """Bytes per second of the memory."""

    @property
    def launch(self) -> float:
        """Seconds that one more kernel takes beside its bytes."""

    def ops(self, cases: dict[str, Op]) -> dict[str, Pair | None]:
        """Seconds of an op of each case in either layout."""

    def moves(self, moves: Sequence[Move]) -> dict[Move, float | None]:
        """Seconds of copies."""

    def limit(self, op: Op) -> float:
        """Seconds that an op takes at the limits of the machine; infinite where those are not known."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """How a function's images were laid out, and by what that was decided."""

    function: str
    #: convolutions and their gradients, and those of them that got channels-last
    convolutions: int
    last: int
    by: str
    #: different ops, and copies, that were timed; ops that were clear without; ops that could not be timed
    timed: int = 0
    moves: int = 0
    clear: int = 0
    modelled: int = 0
    #: seconds of what was timed or modelled, as it was decided and row by row; None where there was no clock
    seconds: float | None = None
    rows: float | None = None

    def __str__(self) -> str:
        share = f"{self.last} of {self.convolutions} convolutions and gradients"
        text = f"{self.function}: {share} channels-last, by {self.by}"
        if self.seconds is None or self.rows is None:
            return text
        text += f": {self.seconds * 1e6:,.1f} us, all row by row {self.rows * 1e6:,.1f} us"
        counts = [(self.timed, "kinds of ops timed"), (self.moves, "kinds of copies timed")]
        counts += [(self.clear, "ops clear without"), (self.modelled, "ops modelled")]
        return f"{text} ({', '.join(f'{n} {what}' for n, what in counts if n)})"


@dataclass(slots=True)
class Timing:
    """How a compile wants layouts decided, and what was decided in it, by function."""

    clock: Clock | None = None
    #: a layout was asked for by name: where the clock sees no use for it, the model decides
    insist: bool = False
    #: why there is no clock
    why_modelled: str = "nothing is timed here"
    #: by function: arguments that lie with channels as neighbours, as a model that was laid out so by its user has them
    lies: Mapping[str, frozenset[int]] = field(default_factory=dict)
    #: what the clock has said in this compile: each decision asks for what is missing
    known: dict[str, Pair | None] = field(default_factory=dict)
    moved: dict[Move, float | None] = field(default_factory=dict)
    verdicts: dict[str, Verdict] = field(default_factory=dict)

    def looked_at(self) -> Timing:
        """The same for whoever asks afterwards, and changes nothing here; the model where nothing was decided."""
        if not self.verdicts:
            return Timing(lies=self.lies)
        return replace(self, known=dict(self.known), moved=dict(self.moved), verdicts=dict(self.verdicts))


_TIMING: ContextVar[Timing | None] = ContextVar("timing of layouts", default=None)


@contextmanager
def timed_by(timing: Timing | None) -> Iterator[None]:
    """Layouts are decided so inside of it; None is the model."""
    before = _TIMING.set(timing)
    try:
        yield
    finally:
        _TIMING.reset(before)


def timing_now() -> Timing:
    return _TIMING.get() or Timing()


def case_of(op: Op) -> str:
    """Equal for ops that do the same on tensors of the same types."""
    return structural_hash([op], ("phase",))


class Prices:
    """Prices of ops and copies: by the clock where there is one, else by the model."""

    def __init__(self, preference: Preference, timing: Timing | None = None):
        timing = Timing() if timing is None else timing
        self.clock, self.known, self.moved = timing.clock, timing.known, timing.moved
        if self.clock is not None:
            preference = replace(preference, launch=int(self.clock.launch * self.clock.bandwidth))
        self.preference = preference

    def bytes(self, seconds: float) -> int:
        assert self.clock is not None
        return min(HIGHEST, int(seconds * self.clock.bandwidth))

    def modelled(self, costed: Costed) -> int:
        """What an op pays for lying row by row."""
        copies = sum(2 * v.type.bytes + self.preference.launch for v in costed.tensors)
        return int(costed.share * copies)

    def op(self, costed: Costed, way: int = 0) -> tuple[int, int]:
        """What an op costs row by row and channels-last, without what it costs in any case.

        way: 1 where whatever was not timed wants channels-last as much as it possibly could, -1 as little.
        """
        pair = self.known.get(costed.case)
        if pair is not None:
            more = self.bytes(abs(pair[0] - pair[1]))
            return (more, 0) if pair[0] > pair[1] else (0, more)
        more = self.modelled(costed)
        if way and self.clock is not None and costed.case not in self.known:
            more += way * (more + self.weight(costed))
        return (more, 0) if more > 0 else (0, -more)

    def weight(self, costed: Costed) -> int:
        """By how much an op may be quicker row by row, though the model says otherwise."""
        assert self.clock is not None
        limit = SPAN * self.clock.limit(costed.op)
        return HIGHEST if limit == float("inf") else self.bytes(limit)

    def copy(self, value: Value, source: Order, target: Order) -> int:
        """The price of a copy of a value in another layout; nothing where that copy runs anyway."""
        seconds = self.moved.get(Move(value.type, source, target)) if is_whole_copy(value) else None
        return self.preference.copy(value) if seconds is None else self.bytes(seconds)

    def ask(self, ops: Sequence[Costed], moves: Sequence[Move]) -> None:
        """Has the clock time something."""
        assert self.clock is not None
        if ops:
            cases = {c.case: c.op for c in ops}
            self.known.update(dict.fromkeys(cases) | self.clock.ops(cases))
        if moves:
            self.moved.update(dict.fromkeys(moves) | self.clock.moves(moves))


def is_whole_copy(value: Value) -> bool:
    """Whether a copy in another layout is nothing but that, and no cast on the way."""
    return conversion(value) == 2 * value.type.bytes
