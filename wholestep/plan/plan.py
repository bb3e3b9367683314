"""The plan as flat data: launches in order, buffers with addresses, what is given back. It holds no code.

A buffer is one tensor as a launch sees it. Several may share memory: `base` names the buffer whose memory it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from ..ir.types import TensorType

#: what a buffer is: an argument of the program, memory of the arena, memory made once, a number on the host, or host
#: memory that values wait in, page-locked where there is a GPU
SPACES = ("external", "arena", "constant", "host", "pinned")
#: how a buffer came to its memory: its own, the memory of a dead value (of its own launch, or an argument's), a view
SHARES = ("own", "in_place", "donated", "view")
#: how a result leaves: it already lies in the argument it replaces, it is copied there, it stays where it is, it is
#: the argument itself, or it is a number on the host
WAYS = ("in_place", "copy", "output", "same", "host")


@dataclass(slots=True)
class Buffer:
    """One tensor in memory. `offset` is in bytes: where it owns memory from the start of the arena, or of all pinned
    memory, else from its base."""

    type: TensorType
    strides: tuple[int, ...]  # in elements
    space: str
    lifetime: str  # param, opt_state, state, batch, constant; grad, activation, transient, output, workspace
    share: str = "own"
    base: int = -1  # the buffer that owns the memory; -1 for itself
    of: int = -1  # the buffer that this is a view of, or whose value it replaces in the same memory
    offset: int = 0
    bytes: int = 0  # the memory it owns, before alignment; 0 where it owns none
    first: int = -1  # position of the launch that writes it; -1 where it is there before the step
    last: int = -1  # position of the last launch that reads it; the number of launches where it outlives the step
    argument: int = -1  # number of the argument, for a buffer that is one
    op: int = -1  # number of the op that makes it, in the planned function
    name: str = ""  # of an argument


@dataclass(slots=True)
class Launch:
    """One call. `reads` and `writes` are buffers, in the order of the call's operands and the op's results.

    A result that nobody reads is written nowhere: -1. `in_place` pairs a position in `writes` with the position in
    `reads` whose memory it takes. Launches of one stream run in turn; `waits` orders them against those of others. A
    "wait" runs nothing: what follows on its stream comes after the copy it waits for, and until then the buffer that it
    reads is in use.
    """

    op: int  # number of the op in the planned function; -1 for a copy
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    provider: str  # aten, host, choose (one of two tensors, by a number of the host), copy, wait, micro_batches
    in_place: tuple[tuple[int, int], ...] = ()
    stream: int = 0
    name: str = ""
    phase: str = ""
    layer: str = ""
    body: int = -1  # for micro_batches: number of the plan in `Plan.bodies`
    workspace: int = -1  # the buffer that is memory for the launch alone; for micro_batches the arena of that plan
    makes: int = 0  # bytes that its provider allocates by itself while it runs
    waits: tuple[int, ...] = ()  # positions of earlier launches on other streams that must be over before it
    takes: int = 0  # bytes that its library was measured to take while it runs, what it makes among them


@dataclass(slots=True)
class Returned:
    """One result of the program: the buffer that holds it, the argument it replaces (-1: none) and how."""

    buffer: int
    argument: int
    way: str


@dataclass(slots=True)
class Plan:
    """A step with its order and its addresses."""

    function: str  # symbol of the planned function
    fingerprint: str  # structural hash of the planned function and of those it calls
    device: str  # "cpu" or "cuda"
    alignment: int
    order: str  # which order was best: program, or how it was found
    placer: str  # which placement was best
    arena: int  # bytes
    lower_bound: int  # the most bytes of the arena that are live at once: no placement is smaller
    program_order_bound: int  # the same for the program's own order
    buffers: list[Buffer] = field(default_factory=list)
    launches: list[Launch] = field(default_factory=list)
    results: list[Returned] = field(default_factory=list)
    bodies: list[Plan] = field(default_factory=list)
    #: ops whose kernels could not be asked for their layout: their results are planned row by row
    assumed: list[str] = field(default_factory=list)
    #: bytes that libraries keep from their first call on, as measured: cuBLAS's workspace
    kept_by_libraries: int = 0
    #: bytes that a GPU's allocator has handed out beyond what the arguments and the arena asked it for, once bound
    handed_beyond: int = 0

    @property
    def pinned(self) -> int:
        """Bytes of host memory that values wait in, without those of the plans it runs."""
        return sum(aligned(b.type.bytes, self.alignment) for b in self.buffers if b.space == "pinned")

    @property
    def streams(self) -> int:
        """How many streams its launches, and those of the plans it runs, are on."""
        return max([1 + launch.stream for launch in self.launches] + [body.streams for body in self.bodies], default=1)

    @property
    def gap(self) -> float:
        """How much larger the arena is than the least possible for this order, as a share."""
        return self.arena / self.lower_bound - 1 if self.lower_bound else 0.0

    def bytes_in(self, space: str) -> int:
        """Bytes of one space that are there for the whole step; for the arena its size, for pinned memory its too."""
        if space == "arena":
            return self.arena
        if space == "pinned":
            return self.pinned + sum(body.pinned for body in self.bodies)
        return sum(b.bytes for b in self.buffers if b.space == space and b.base < 0)

    @property
    def peak(self) -> int:
        """All memory of the step at its peak: the arena, the program's arguments, its constants, what kernels make."""
        return self.arena + self.bytes_in("external") + self.bytes_in("constant") + self.made + self.handed_beyond

    @property
    def made(self) -> int:
        """The most bytes that the provider of one launch allocates by itself, beside what libraries keep."""
        own = max([max(launch.makes, launch.takes) for launch in self.launches], default=0)
        return max(own + self.kept_by_libraries, *[body.made for body in self.bodies], 0)

    def owners(self) -> Iterator[tuple[int, Buffer]]:
        """The buffers that own memory of the arena."""
        for number, buffer in enumerate(self.buffers):
            if buffer.space == "arena" and buffer.base < 0:
                yield number, buffer

    def owner(self, number: int) -> int:
        """The buffer whose memory a buffer lies in."""
        base = self.buffers[number].base
        return number if base < 0 else base

    def note_uses(self) -> None:
        """Works out `bytes`, `first` and `last` of every buffer from the launches."""
        buffers, end = self.buffers, len(self.launches)
        for buffer in buffers:
            buffer.first = buffer.last = -1
            owns = buffer.base < 0 and buffer.space != "host"
            buffer.bytes = buffer.type.bytes if owns else 0
        for position, launch in enumerate(self.launches):
            for number in (*launch.writes, launch.workspace):
                if number >= 0:
                    buffers[number].first = buffers[number].last = position
            for number in launch.reads:
                buffers[number].last = position
        for returned in self.results:
            buffers[returned.buffer].last = end
        for buffer in buffers:  # what is written in parts is there from the first part on
            if buffer.share == "view" and buffer.first >= 0:
                whole = buffers[buffer.of]
                whole.first = buffer.first if whole.first < 0 else min(whole.first, buffer.first)
        for buffer in buffers:
            if buffer.share == "view":
                buffer.first = buffers[buffer.of].first
            if buffer.base >= 0 and buffers[buffer.base].last < buffer.last:
                buffers[buffer.base].last = buffer.last

    def live_bytes(self) -> list[int]:
        """Bytes of the arena that are in use at each launch: the memory curve of the step."""
        change = [0] * (len(self.launches) + 2)
        for _, buffer in self.owners():
            change[buffer.first] += aligned(buffer.bytes, self.alignment)
            change[buffer.last + 1] -= aligned(buffer.bytes, self.alignment)
        curve, live = [], 0
        for step in change[: len(self.launches)]:
            live += step
            curve.append(live)
        return curve

    def __str__(self) -> str:
        shared = [b.share for b in self.buffers]
        return (
            f"{len(self.launches)} launches, order: {self.order}; arena {self.arena:,} bytes, {self.gap:.2%} above the "
            f"least for it ({self.placer}); program order needs at least {self.program_order_bound:,}; "
            f"{shared.count('view')} views, {shared.count('in_place')} written in place, "
            f"{shared.count('donated')} donated"
        )


def aligned(size: int, alignment: int) -> int:
    """A size rounded up to the next multiple of the alignment."""
    return -(-size // alignment) * alignment
