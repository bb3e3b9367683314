"""The memory of a plan: where the tensor of each buffer is, in the arena, in the user's tensors or on the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from ..backends.kernels import Spec
from ..dialects.step import torch_dtype
from ..plan.plan import Plan
from .cells import Cells


@dataclass(slots=True)
class Memory:
    """Where the tensors of a plan are."""

    plan: Plan
    arena: torch.Tensor
    arguments: Sequence[torch.Tensor | None]
    cells: Cells
    pinned: torch.Tensor
    constants: dict[int, torch.Tensor] = field(default_factory=dict)
    known: dict[int, torch.Tensor] = field(default_factory=dict)

    def tensor(self, number: int) -> torch.Tensor:
        """The tensor of a buffer."""
        found = self.known.get(number)
        if found is None:
            found = self.known[number] = self._make(number)
        return found

    def _make(self, number: int) -> torch.Tensor:
        buffer, owner = self.plan.buffers[number], self.plan.owner(number)
        if buffer.space == "host":
            return self.cells.tensors[number]
        dtype = torch_dtype(buffer.type.element)
        if buffer.space in ("arena", "pinned"):
            start = self.plan.buffers[owner].offset
            inner = buffer.offset if owner != number else 0
            memory = self.arena if buffer.space == "arena" else self.pinned
            return self.at(start + inner, Spec(buffer.type.shape, buffer.strides, dtype), memory)
        base = self.arguments[owner] if buffer.space == "external" else self.constants[owner]
        assert base is not None
        if number == owner:
            return base
        offset = base.storage_offset() + buffer.offset // dtype.itemsize
        return base.as_strided(buffer.type.shape, buffer.strides, offset)

    def at(self, offset: int, spec: Spec, memory: torch.Tensor | None = None) -> torch.Tensor:
        """Memory of the arena, or of another block, as a tensor."""
        memory = self.arena if memory is None else memory
        if not spec.bytes:
            return torch.empty_strided(spec.shape, spec.strides, dtype=spec.dtype, device=memory.device)
        flat = memory[offset : offset + spec.bytes].view(spec.dtype)
        return flat.as_strided(spec.shape, spec.strides, flat.storage_offset())


def pinned_memory(plan: Plan, device: torch.device) -> torch.Tensor:
    """Host memory for what a plan takes there, page-locked where a GPU copies from and to it."""
    return torch.empty(plan.pinned, dtype=torch.uint8, pin_memory=device.type == "cuda" and plan.pinned > 0)
