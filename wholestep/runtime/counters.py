"""Single numbers that a step reads from the host and writes back: learning rates, the optimizer's own counters.

On a GPU the counters are moved into one vector, each still the user's own tensor, so that a step reads and writes them
in one go.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..capture.slots import Slot
from ..training.build import Program
from ..training.optimizer_plan import OptimizerPlan


class Counters:
    """The numbers of one compiled program, once its optimizer state exists; `buffers` hold its results."""

    def __init__(
        self,
        program: Program,
        plan: OptimizerPlan,
        numbers: Sequence[int],
        buffers: Sequence[int],
        optimizer: torch.optim.Optimizer,
        ema_weight: Callable[[], float],
        pack: bool,
    ):
        self.plan, self.ema_weight = plan, ema_weight
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
        self.vectors: list[tuple[torch.Tensor, list[int], list[int]]] = []
        if pack:
            self.pack()

    def pack(self) -> None:
        """Makes the counters of one type neighbours in memory."""
        by_type: dict[torch.dtype, list[tuple[int, int, torch.Tensor]]] = {}
        for entry in self.tensors:
            if entry[1] >= 0:
                by_type.setdefault(entry[2].dtype, []).append(entry)
        for entries in by_type.values():
            tensors = [t.detach() for _, _, t in entries]
            first = tensors[0]
            wanted = [first.data_ptr() + i * first.element_size() for i in range(len(tensors))]
            together = len({t.untyped_storage().data_ptr() for t in tensors}) == 1
            if together and [t.data_ptr() for t in tensors] == wanted:  # another program has packed them already
                vector = first.as_strided((len(tensors),), (1,))
            else:
                vector = torch.stack(tensors)
                for i, (_, _, tensor) in enumerate(entries):
                    tensor.data = vector[i]
            self.vectors.append((vector, [a for a, _, _ in entries], [r for _, r, _ in entries]))
        self.tensors = [entry for entry in self.tensors if entry[1] < 0]

    def read(self) -> dict[int, float]:
        """All numbers, by argument."""
        found = dict(self.still)
        for index, slot in self.hypers:
            found[index] = self.ema_weight() if slot.source == ("ema_weight",) else float(self.plan.read(slot))
        for argument, _, tensor in self.tensors:
            found[argument] = tensor.item()
        for vector, arguments, _ in self.vectors:
            found.update(zip(arguments, vector.tolist(), strict=True))
        for argument, _, table, key in self.plain:
            found[argument] = float(table[key])
        return found

    def write(self, outputs: Sequence[Any]) -> None:
        """Puts the new numbers, by buffer, into the counters."""
        for _, result, tensor in self.tensors:
            if result >= 0:
                tensor.fill_(outputs[result])
        for vector, _, results in self.vectors:
            new = [outputs[r] for r in results]
            if len(set(new)) == 1:
                vector.fill_(new[0])
            else:
                vector.copy_(torch.tensor(new, dtype=vector.dtype))
        for _, result, table, key in self.plain:
            if result >= 0:
                table[key] = type(table[key])(outputs[result])
