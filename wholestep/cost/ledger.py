"""The ledger: the bytes each kernel of a step reads and writes, with the cause, layer and phase of every one of them.

A kernel is a launch of the plan; `counting.py` lists what the operators that it runs read and write. Each of these is
one `Move` with one cause, so sums by cause, layer and phase all add up to the same total.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field

from ..ir.core import Location

#: why bytes move
CAUSES = {
    "weights": "parameters, buffers and low-precision copies",
    "casts": "casts between float types that run on their own",
    "gradients": "gradients of parameters, from backward to the update",
    "optimizer state": "moments, averages, loss scale",
    "saved activations": "made in forward or loss, read in backward or later",
    "transients": "everything else that is made and read within the step",
    "masks": "booleans, random draws, and what attention takes as its mask",
    "batch": "what the step is given",
    "workspace": "tensors fixed at compile time, scratch of a kernel, copies of what it allocates",
    "communication": "between devices",
}
KIND_CAUSES = {
    "parameter": "weights", "buffer": "weights", "copy": "weights", "optimizer_state": "optimizer state",
    "ema": "optimizer state", "scaler": "optimizer state", "hyper": "optimizer state", "fresh": "optimizer state",
    "kept": "gradients", "batch": "batch", "random_key": "batch", "constant": "workspace",
}  # fmt: skip
BEFORE, AFTER = ("forward", "loss"), ("backward", "clip", "update")
PHASES = (*BEFORE, *AFTER)


@dataclass(slots=True)
class Buffer:
    """A tensor that kernels read and write."""

    name: str
    type: str
    bytes: int
    cause: str
    kind: str = ""  # of an argument
    producer: int = -1  # the kernel that makes it; -1 for an argument or a tensor fixed at compile time


@dataclass(slots=True)
class Move:
    """Bytes that one run of a kernel reads from, or writes to, one buffer.

    `inside`: it is no operand or result but scratch of the kernel (that has no buffer: -1), or a copy of what it made.
    """

    buffer: int
    written: bool
    bytes: int
    cause: str
    inside: bool = False


@dataclass(slots=True)
class Kernel:
    """One launch of the plan, run `times` times per step. `launches` counts the operators that run for it."""

    name: str
    phase: str
    loc: Location
    times: int = 1
    launches: int = 1
    flops: int = 0
    element: str = ""
    #: a matrix product, convolution or attention, priced by the machine's rate for such
    matrix: bool = False
    #: position in the plan, of the micro-batches' launch for what runs inside it
    launch: int = -1
    #: bytes of memory in use while it runs
    live: int = 0
    moves: list[Move] = field(default_factory=list)

    @property
    def bytes(self) -> int:
        """Per step."""
        return self.times * sum(m.bytes for m in self.moves)


@dataclass(slots=True)
class Ledger:
    """All kernels of one step, in the order they run, and the memory between them."""

    kernels: list[Kernel]
    buffers: list[Buffer]
    #: bytes of memory that are in use before, during and after the step: parameters, state, batch, fixed tensors
    lasting: int = 0

    @property
    def read(self) -> int:
        return sum(k.times * m.bytes for k in self.kernels for m in k.moves if not m.written)

    @property
    def written(self) -> int:
        return sum(k.times * m.bytes for k in self.kernels for m in k.moves if m.written)

    @property
    def total(self) -> int:
        """Bytes read and written per step."""
        return sum(k.bytes for k in self.kernels)

    @property
    def flops(self) -> int:
        return sum(k.times * k.flops for k in self.kernels)

    @property
    def launches(self) -> int:
        return sum(k.launches for k in self.kernels)

    def by(self, key: Callable[[Kernel, Move], str]) -> dict[str, tuple[int, int]]:
        """Bytes (read, written) per step, grouped; the largest group first."""
        found: dict[str, list[int]] = {}
        for kernel in self.kernels:
            for move in kernel.moves:
                found.setdefault(key(kernel, move), [0, 0])[move.written] += kernel.times * move.bytes
        return {k: (r, w) for k, (r, w) in sorted(found.items(), key=lambda item: (-sum(item[1]), item[0]))}

    def by_cause(self) -> dict[str, tuple[int, int]]:
        return self.by(lambda kernel, move: move.cause)

    def by_phase(self) -> dict[str, tuple[int, int]]:
        found = self.by(lambda kernel, move: kernel.phase)
        return {phase: found[phase] for phase in (*PHASES, "other") if phase in found}

    def by_layer(self) -> dict[str, tuple[int, int]]:
        return self.by(lambda kernel, move: kernel.loc.layer or "(no layer)")

    def by_layer_group(self) -> dict[str, tuple[int, int]]:
        return self.by(lambda kernel, move: group_of(kernel))

    def by_kernel(self) -> dict[str, tuple[int, int]]:
        return self.by(lambda kernel, move: kernel.name)


def layer_group(layer: str) -> str:
    """A layer with the numbers of repeated blocks left out: `h.3.attn` and `h.7.attn` are one group."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.|$)", "*", layer) or "(the model itself)"


def group_of(kernel: Kernel) -> str:
    return layer_group(kernel.loc.layer) if kernel.loc.layer else "(no layer)"
