"""Cells: memory of the device with numbers of the host in it, for kernels that read them from there.

They lie side by side, so that one copy per step brings them all; what that copy leaves from takes turns. Each begins at
a multiple of 16 bytes: a kernel all of whose tensors do reads them in wide steps, and is the one that was timed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy
import torch

from ..backends.kernels import Kernel, Number, replaced
from ..dialects.step import torch_dtype
from ..plan.planner import Planned

#: bytes from one cell to the next
APART = 16
#: bytes of seed, step and micro-batch, which come first
KEY = 2 * APART


class Cells:
    """Numbers of the host in memory that kernels read: side by side on the device, so that one copy brings them all.

    On a GPU the copy leaves from pinned memory and nobody waits for it: two halves of that memory take turns, and one
    is written again only once every copy from it has left.
    """

    HALF = 8

    def __init__(self, planned: Planned, device: torch.device, key: torch.device | None = None, room: int = 0):
        self.device = device
        wanted: dict[torch.dtype, dict[int, None]] = {}
        buffers = planned.plan.buffers
        for launch, kernel in zip(planned.plan.launches, planned.kernels, strict=True):
            if kernel is None:
                continue
            taken = numbers_taken(kernel)
            for position, number in enumerate(launch.reads):
                if buffers[number].space == "host" and position not in taken:
                    wanted.setdefault(torch_dtype(buffers[number].type.element), {})[number] = None
        self.numbers = sorted(((d, list(n)) for d, n in wanted.items()), key=lambda item: -item[0].itemsize)
        cuda = device.type == "cuda"
        size = KEY + APART * sum(len(numbers) for _, numbers in self.numbers)
        #: the cells, and bytes behind them for what is to arrive by the same copy
        self.memory = torch.zeros(size + room, dtype=torch.uint8, device=device)
        self.there, self.room = self.memory[:size], self.memory[size:]
        parts = self.parts(self.there)
        self.tensors = {
            number: part[i]
            for part, (_, numbers) in zip(parts[1:], self.numbers, strict=True)
            for i, number in enumerate(numbers)
        }
        #: seed, step and micro-batch, where random numbers are made
        self.key = parts[0] if key is None or key == device else torch.zeros(3, dtype=torch.int64)
        self.here = [self.there]
        if cuda:
            self.here = [torch.zeros_like(self.there, device="cpu").pin_memory() for _ in range(2 * self.HALF)]
        #: the same memory as arrays: the key, then the numbers by type
        self.arrays = [[part.numpy() for part in self.parts(here)] for here in self.here]
        self.left: list[torch.cuda.Event | None] = [None, None]
        self.turn = -1
        #: by type: the numbers to look at while all counters agree, and for each cell which of them it holds
        self.once: list[tuple[list[int], Any]] = []
        #: by block of memory and type: those numbers as they stand there; None where it holds others
        self.held: list[list[Any]] = [[None] * len(self.numbers) for _ in self.here]

    def parts(self, memory: torch.Tensor) -> list[torch.Tensor]:
        """The key, then the numbers by type, as they lie in memory."""
        found, at = [memory[:KEY].view(torch.int64)[:3]], KEY
        for dtype, numbers in self.numbers:
            end = at + APART * len(numbers)
            found.append(memory[at:end].view(dtype)[:: APART // dtype.itemsize])
            at = end
        return found

    def share(self, stands_for: Mapping[int, int]) -> None:
        """Tells whose number a cell has while all counters agree."""
        self.once = []
        for _, numbers in self.numbers:
            sources = [stands_for.get(n, n) for n in numbers]
            distinct = sorted(set(sources))
            place = {n: i for i, n in enumerate(distinct)}
            self.once.append((distinct, numpy.array([place[n] for n in sources])))

    def layout(self) -> list[tuple[int, str, int]]:
        """Where each cell is, what it is, and whose number it has while all counters agree. The key comes before."""
        found, at = [], KEY
        for (dtype, _), (distinct, place) in zip(self.numbers, self.once, strict=True):
            for source in place.tolist():
                found.append((at, str(dtype).removeprefix("torch."), distinct[source]))
                at += APART
        return found

    def fill(self, values: list[Any], key: Sequence[int], alike: bool = False) -> None:
        """Puts the numbers of a step where its kernels read them. `alike`: each was computed once."""
        turn = self.turn = (self.turn + 1) % len(self.here)
        half, first = divmod(turn, self.HALF)
        if not first and (event := self.left[half]) is not None:
            event.synchronize()
        if self.key.device != self.there.device:
            self.key.numpy()[:] = key
        mine, *arrays = self.arrays[turn]
        mine[:] = key
        held = self.held[turn]
        for i, array in enumerate(arrays):
            if alike:
                distinct, place = self.once[i]
                numbers = [values[n] for n in distinct]
                if numbers != held[i]:
                    held[i] = numbers
                    array[:] = numpy.array(numbers, array.dtype)[place]
            else:
                held[i] = None
                array[:] = [values[n] for n in self.numbers[i][1]]
        if self.there.is_cuda:
            self.there.copy_(self.here[turn], non_blocking=True)
            if first == self.HALF - 1:
                event = self.left[half] = self.left[half] or torch.cuda.Event()
                event.record()


def numbers_taken(kernel: Kernel) -> set[int]:
    """The operands that a kernel takes as Python numbers."""
    found: set[int] = set()

    def look(value: Any) -> Any:
        if isinstance(value, Number):
            found.add(value.operand)
        return value

    for step in kernel.steps:
        replaced(step.args, look)
        replaced(tuple(step.kwargs.values()), look)
    return found
