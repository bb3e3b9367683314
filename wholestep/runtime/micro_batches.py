"""Runs a program once per micro-batch and puts the results together. Sums are kept in buffers made once and reused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..ir.core import Op


class MicroBatchLoop:
    """The call behind `step.micro_batches`: takes the op's operands, gives its results."""

    def __init__(self, op: Op, body: Callable[[Sequence[Any]], list[Any]]):
        self.body = body
        self.count, self.given, self.taken, self.carried = op.count, op.given, op.taken, op.carried
        self.sums: dict[int, torch.Tensor] = {}

    def __call__(self, *inputs: torch.Tensor) -> list[torch.Tensor]:
        parts = [x.chunk(self.count) if kind == "split" else None for x, kind in zip(inputs, self.given, strict=True)]
        current = list(inputs)
        results: list[Any] = [[] if kind == "concat" else None for kind in self.taken]
        for number in range(self.count):
            arguments = []
            for value, kind, part in zip(current, self.given, parts, strict=True):
                if part is not None:
                    value = part[number]
                elif kind == "key":
                    value = torch.cat((value[:-1], value.new_tensor([number])))
                arguments.append(value)
            outputs = self.body(arguments)
            for i, (kind, value) in enumerate(zip(self.taken, outputs, strict=True)):
                if kind == "sum":
                    results[i] = self._add(i, value, number)
                elif kind == "concat":
                    results[i].append(value)
                elif kind == "mean" and number:
                    results[i] = results[i] + value
                else:
                    results[i] = value
            for i, result in enumerate(self.carried):
                if result >= 0:
                    current[i] = outputs[result]
        for i, kind in enumerate(self.taken):
            if kind == "mean":
                results[i] = results[i] / self.count
            elif kind == "concat":
                results[i] = torch.cat(results[i])
        return results

    def _add(self, index: int, value: torch.Tensor, number: int) -> torch.Tensor:
        """The running sum of a result, in a buffer of its own."""
        buffer = self.sums.get(index)
        if buffer is None:
            buffer = self.sums[index] = torch.empty_like(value)
        return buffer.add_(value) if number else buffer.copy_(value)
