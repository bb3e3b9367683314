"""A trial of the ways to run a region: made-up operands, what ATen makes of them, and whether a way makes the same.

A way must write all of its results and leave its operands as they are: whoever is tried next reads them, and in a step
others do.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from .compare import TIED, TURNED, Exact, difference, rounds, spoilt
from .convolutions import by_quick_kernels
from .made_up import neutral_inputs
from .providers import Launcher, Region, op_by_op


class Trial:
    """Operands that ways are tried on, the results that are wanted, and memory for those that they give."""

    def __init__(self, region: Region, wait: Callable[[], None]):
        self.region, self.wait, self.positive = region, wait, False
        self.inputs = neutral_inputs(region, False)
        reference = op_by_op(region)
        with by_quick_kernels(region):
            self.wanted = reference(*self.inputs)
            if has_nan(self.wanted):
                self.positive, self.inputs = True, neutral_inputs(region, True)
                self.wanted = reference(*self.inputs)
        self.low = rounds(region)
        pools = self.low and any(op.name == "step.max_pool" for op in region.ops)
        self.turned = TIED if pools else TURNED
        self.exact = Exact(region, self.inputs, self.wanted)
        self.outputs = [empty(s, region.device) for s in region.results]
        self.marks = marks_of(self.inputs)

    def tensors(self, scratch: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        return (*self.inputs, *self.outputs, *scratch)

    def judge(self, run: Launcher, scratch: Sequence[torch.Tensor]) -> tuple[str, float]:
        """What is wrong with the results of a call, empty where nothing is, and its seconds on a host."""
        for output, right in zip(self.outputs, self.wanted, strict=True):
            spoilt(output, right)
        start = time.perf_counter()
        run(*self.tensors(scratch))
        seconds = time.perf_counter() - start
        self.wait()
        why = difference(self.outputs, self.wanted, self.low, self.turned)
        why = self.exact.judge(self.outputs, why, self.turned) if why and self.low else why
        if marks_of(self.inputs) != self.marks:
            why = "it writes over its operands"
            for own, fresh in zip(self.inputs, neutral_inputs(self.region, self.positive), strict=True):
                own.copy_(fresh)
        return why, seconds


def marks_of(tensors: Sequence[torch.Tensor]) -> list[float]:
    """Numbers that tell whether tensors have changed: their sums. The device is waited for once."""
    wide = {torch.bfloat16: torch.float32, torch.float16: torch.float32}
    sums = [t.sum(dtype=wide.get(t.dtype)).double() for t in tensors]
    return torch.stack(sums).tolist() if sums else []


def has_nan(tensors: Sequence[torch.Tensor]) -> bool:
    found = [t.isnan().any() for t in tensors if t.is_floating_point()]
    return bool(found) and bool(torch.stack(found).any())  # (waits for the device once)


def empty(spec: object, device: torch.device) -> torch.Tensor:
    return torch.empty_strided(spec.shape, spec.strides, dtype=spec.dtype, device=device)  # type: ignore[attr-defined]
