"""Single numbers that a step reads from the host and writes back: learning rates, the optimizer's own counters.

On a GPU the counters are moved into one vector, each still the user's own tensor, so that a step reads and writes them
in one go. What a step has written into counters on the device is known here, and read from there only once somebody
else has written one: reading would wait for the step before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ..capture.slots import Slot
from ..training.build import Program
from ..training.optimizer_plan import OptimizerPlan
from .record import Record, Subjects, record


class Counters:
    """The numbers of one compiled program, once its optimizer state exists.

    `buffers` hold its results; `stands_for` says whose number a buffer has where all counters are one number; `pack`
    makes counters neighbours: in this memory, which has 8 bytes for each, or anywhere.
    """

    def __init__(
        self,
        program: Program,
        plan: OptimizerPlan,
        numbers: Sequence[int],
        buffers: Sequence[int],
        optimizer: torch.optim.Optimizer,
        ema_weight: Callable[[], float],
        stands_for: Mapping[int, int],
        pack: torch.Tensor | bool,
    ):
        #: gives hyper-parameters
        self.read: Callable[[Slot], Any] = plan.read
        self.ema_weight, self.stands_for = ema_weight, stands_for
        results = {r.slot.source: b for r, b in zip(program.results, buffers, strict=True) if r.slot is not None}
        self.hypers: list[tuple[int, Slot]] = []
        #: numbers that stay as they are once the first step is over
        self.still: dict[int, float] = {}
        #: argument, buffer of the new value (-1: it is only read) and tensor of each counter
        self.tensors: list[tuple[int, int, torch.Tensor]] = []
        #: argument, buffer and place of each counter that is a Python number
        self.plain: list[tuple[int, int, dict[str, Any], str]] = []
        for index in numbers:
            slot = program.slots[index]
            if slot.kind == "fresh":
                self.still[index] = 0.0
            elif slot.kind == "hyper":
                self.hypers.append((index, slot))
            else:
                _, fqn, key = slot.source[:3]
                held = optimizer.state[program.captured.parameters[fqn]]
                result = results.get(slot.source, -1)
                if isinstance(held[key], torch.Tensor):
                    self.tensors.append((index, result, held[key]))
                else:
                    self.plain.append((index, result, held, key))
        self.vectors: list[Vector] = []
        #: the argument that stands for all counters where they agree
        self.first = min([index for index in numbers if program.slots[index].kind == "optimizer_state"], default=-1)
        #: the values that the numbers were last put into
        self.put_into: list[Any] | None = None
        if pack is not False:
            self.pack(pack if isinstance(pack, torch.Tensor) else None)

    def pack(self, room: torch.Tensor | None) -> None:
        """Makes the counters of one type neighbours in memory: in the room, where it is on their device."""
        by_type: dict[torch.dtype, list[tuple[int, int, torch.Tensor]]] = {}
        for entry in self.tensors:
            if entry[1] >= 0:
                by_type.setdefault(entry[2].dtype, []).append(entry)
        for entries in by_type.values():
            tensors = [t.detach() for _, _, t in entries]
            first = tensors[0]
            wanted = [first.data_ptr() + i * first.element_size() for i in range(len(tensors))]
            together = len({t.untyped_storage().data_ptr() for t in tensors}) == 1
            if not together or [t.data_ptr() for t in tensors] != wanted:  # no other program has packed them
                vector = torch.stack(tensors)
                if room is not None and room.device == vector.device:
                    size = vector.numel() * vector.element_size()
                    vector, room = room[:size].view(vector.dtype).copy_(vector), room[-(-size // 8) * 8 :]
                for i, (_, _, tensor) in enumerate(entries):
                    tensor.data = vector[i]
            results = [r for _, r, _ in entries]
            sources = [self.stands_for.get(r, r) for r in results]
            self.vectors.append(Vector([t for _, _, t in entries], [a for a, _, _ in entries], results, sources))
        self.tensors = [entry for entry in self.tensors if entry[1] < 0]

    def put(self, values: list[Any], same_groups: bool = False) -> bool:
        """Puts all numbers where a bound plan looks for them; true where all counters are one number, which then stands
        in the place of the first alone. `same_groups`: hyper-parameters are what they were when this was last called.
        """
        if self.put_into is not values:
            same_groups, self.put_into = False, values
            for index, number in self.still.items():
                values[index] = number
        self.put_hypers(values, same_groups)
        if self.vectors and not self.tensors and not self.plain:
            agreed = {vector.agreed() for vector in self.vectors}
            if len(agreed) == 1 and None not in agreed:
                values[self.first] = agreed.pop()
                return True
        for vector in self.vectors:
            for argument, number in zip(vector.arguments, vector.read(), strict=True):
                values[argument] = number
        for argument, _, tensor in self.tensors:
            values[argument] = tensor.item()
        for argument, _, table, key in self.plain:
            values[argument] = float(table[key])
        return False

    def put_hypers(self, values: list[Any], same_groups: bool = False) -> None:
        """Puts the hyper-parameters alone."""
        for index, slot in self.hypers:
            if slot.source == ("ema_weight",):
                values[index] = self.ema_weight()
            elif not same_groups:
                values[index] = float(self.read(slot))

    def write(self, values: Sequence[Any], alike: bool = False) -> None:
        """Puts the new numbers, by buffer, into the counters. `alike`: all counters were one number before."""
        for _, result, tensor in self.tensors:
            if result >= 0:
                tensor.fill_(values[result])
        for vector in self.vectors:
            vector.write(values, alike)
        for _, result, table, key in self.plain:
            if result >= 0:
                table[key] = type(table[key])(values[result])


class Vector:
    """Counters that are neighbours in memory, the arguments they are and the buffers of their new numbers.

    `sources`: the buffers to look at instead where all counters were one number.
    """

    def __init__(self, counters: list[torch.Tensor], arguments: list[int], results: list[int], sources: list[int]):
        self.counters, self.arguments, self.results, self.sources = counters, arguments, results, sources
        #: a view of the first counter: autograd counts a write to all as a write to this one, for every program
        self.memory = counters[0].detach().as_strided((len(counters),), (1,))
        #: the same memory, where it is the host's
        self.array = self.memory.numpy() if self.memory.device.type == "cpu" else None
        self.one = len(set(sources)) == 1
        #: the numbers that are there and the one that all are, as far as is known
        self.known: list[float] = []
        self.common: float | None = None
        #: on the host: the bytes of those numbers; on a device: how often each counter was written by then
        self.bytes = b""
        self.written: Record | None = None

    def agreed(self) -> float | None:
        """The number that all counters are now; None where they differ."""
        self.read()
        return self.common

    def read(self) -> list[float]:
        """The numbers as they are now."""
        if self.array is not None:
            if self.array.tobytes() != self.bytes:
                self.keep(self.array.tolist())
        elif self.written is None or not self.written.same():
            self.keep(self.memory.tolist())
        return self.known

    def keep(self, numbers: list[float], common: float | None = None) -> None:
        """These are the numbers; `common`: all are this one."""
        if common is None and numbers.count(numbers[0]) == len(numbers):
            common = numbers[0]
        self.known, self.common = numbers, common
        if self.array is not None:
            self.bytes = self.array.tobytes()
        elif self.written is None:
            self.written = record(Subjects(counted=self.counters))
        else:
            self.written.keep()

    def write(self, values: Sequence[Any], alike: bool) -> None:
        if alike and self.one:
            new = values[self.sources[0]]
            if self.array is not None:
                self.array.fill(new)
            else:
                self.memory.fill_(new)
            self.keep([new] * len(self.counters), new)
            return
        numbers = [values[n] for n in (self.sources if alike else self.results)]
        self.memory.copy_(torch.tensor(numbers, dtype=self.memory.dtype))
        self.keep(numbers)
