"""Strides of what kernels write.

A kernel's own choice (channels last, transposed heads) is asked of PyTorch with tensors that have no memory, once per
kind of call. Where it cannot be asked, results lie row by row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..dialects.step import torch_dtype
from ..dialects.strides import Strides, is_dense, row_major
from ..ir.core import Op
from ..ir.types import TensorType
from ..torch_private import FakeTensorMode


class Layouts:
    """Asks PyTorch how a call lays out its results. Equal calls are asked once, so equal layers cost nothing more."""

    def __init__(self, device: torch.device):
        self.device = device
        self.mode = FakeTensorMode()
        self.known: dict[Any, list[Strides]] = {}
        #: names of ops that could not be asked
        self.unasked: set[str] = set()

    def __call__(
        self,
        op: Op,
        run: Callable[..., Any],
        operands: Sequence[tuple[TensorType, Strides | None]],
        results: Sequence[TensorType],
        used: tuple[bool, ...],
    ) -> list[Strides]:
        """Strides of each result of a call on operands of these types and strides; without strides, Python numbers."""
        key = (op.definition, attribute_key(op), tuple(operands), tuple(results), used)
        found = self.known.get(key)
        if found is None:
            found = self.known[key] = self.ask(op, run, operands, results)
        return found

    def ask(
        self,
        op: Op,
        run: Callable[..., Any],
        operands: Sequence[tuple[TensorType, Strides | None]],
        results: Sequence[TensorType],
    ) -> list[Strides]:
        plain = [row_major(t.shape) for t in results]
        if getattr(op.definition, "takes_device", False) or all(t.rank < 2 for t in results):
            return plain
        where = self.device
        try:
            with self.mode, torch.no_grad():
                tensors = [
                    1.0 if s is None else torch.empty_strided(t.shape, s, dtype=torch_dtype(t.element), device=where)
                    for t, s in operands
                ]
                made = run(*tensors)
        except Exception:  # it decides by the data, or knows no tensors without memory; row by row always works
            self.unasked.add(op.name)
            return plain
        made = (made,) if isinstance(made, torch.Tensor) else tuple(made)
        out = []
        for tensor, type, rows in zip(made, results, plain, strict=True):
            fits = isinstance(tensor, torch.Tensor) and tuple(tensor.shape) == type.shape
            out.append(tuple(tensor.stride()) if fits and is_dense(tensor.shape, tensor.stride()) else rows)
        return out


def attribute_key(op: Op) -> tuple[Any, ...]:
    """What tells one call of an op from another, as a hashable value."""
    return tuple(
        (k, repr(v) if type(v) is list or type(v) is dict else v) for k, v in op.attributes.items() if k != "phase"
    )
