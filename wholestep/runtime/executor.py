"""Reference execution: a flat list of calls over numbered slots, each tensor dropped after its last use."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..backends.aten import expand_op, lower, needs_expansion
from ..errors import WholestepError
from ..ir.core import Op, Value


class Executable:
    """A function of the program, ready to run: tensors in, tensors out, nothing decided while it runs."""

    def __init__(self, function: Op, device: torch.device | str = "cpu"):
        self.function = function.clone()
        self.device = torch.device(device)
        block = self.function.regions[0].block
        pending = [op for op in block if not op.definition.terminator and needs_expansion(op)]
        while pending:
            for op in pending:
                expand_op(op)
            pending = [op for op in block if not op.definition.terminator and needs_expansion(op)]
        slots: dict[Value, int] = {a: i for i, a in enumerate(block.arguments)}
        calls: list[tuple[Callable[..., Any], tuple[int, ...], tuple[int, ...], Op]] = []
        fixed: list[tuple[int, torch.Tensor]] = []
        assert block.last is not None
        for op in block:
            if op is block.last:
                break
            if not any(r.uses for r in op.results):
                continue
            call = lower(op, self.device)
            for result in call.results:
                slots[result] = len(slots)
            if call.operands:
                calls.append((call.run, tuple(slots[v] for v in call.operands), tuple(slots[r] for r in call.results), op))
            else:
                fixed.append((slots[call.results[0]], call.run()))
        self.results = tuple(slots[v] for v in block.last.operands)
        self.arguments = len(block.arguments)
        self.slots = len(slots)
        self.fixed = fixed
        self.calls = self._with_frees(calls, {slot for slot, _ in fixed})

    def _with_frees(self, calls, kept):
        """Adds to each call the slots that nobody reads after it."""
        kept = kept | set(self.results)
        last: dict[int, int] = {}
        for index, (_, reads, writes, _) in enumerate(calls):
            for slot in (*reads, *writes):
                last[slot] = index
        frees: list[list[int]] = [[] for _ in calls]
        for slot, index in sorted(last.items()):
            if slot not in kept:
                frees[index].append(slot)
        return [(run, r, w if len(w) > 1 else w[0], tuple(f), op) for (run, r, w, op), f in zip(calls, frees, strict=True)]

    def __call__(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        if len(inputs) != self.arguments:
            raise WholestepError(f"the program takes {self.arguments} tensors, {len(inputs)} were given")
        slots: list[Any] = [None] * self.slots
        slots[: self.arguments] = inputs
        for slot, tensor in self.fixed:
            slots[slot] = tensor
        op = None
        try:
            with torch.no_grad():
                for run, reads, writes, frees, op in self.calls:
                    out = run(*[slots[i] for i in reads])
                    if type(writes) is int:
                        slots[writes] = out
                    else:
                        for slot, value in zip(writes, out, strict=False):
                            slots[slot] = value
                    for slot in frees:
                        slots[slot] = None
        except Exception as error:
            if op is None or isinstance(error, WholestepError):
                raise
            raise type_of(error)(f"{op.name} of layer {op.loc}: {error}") from error
        return [slots[i] for i in self.results]


def type_of(error: Exception) -> type[Exception]:
    """The class to raise again with the layer's name: torch's out-of-memory and runtime errors stay what they are."""
    for kind in (torch.OutOfMemoryError, MemoryError, IndexError, RuntimeError):
        if isinstance(error, kind):
            return kind
    return WholestepError
