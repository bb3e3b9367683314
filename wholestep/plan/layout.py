"""Where the elements of a tensor lie: strides of views, and strides of what kernels write.

A kernel's own choice (channels last, transposed heads) is asked of PyTorch with tensors that have no memory, once per
kind of call. Where it cannot be asked, results lie row by row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..dialects.step import torch_dtype
from ..ir.core import Op
from ..ir.types import TensorType
from ..torch_private import FakeTensorMode

Strides = tuple[int, ...]


def row_major(shape: Sequence[int]) -> Strides:
    """Strides of a tensor without gaps whose last dimension is the fastest."""
    out, step = [], 1
    for size in reversed(shape):
        out.append(step)
        step *= max(size, 1)
    return tuple(reversed(out))


def is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether the elements fill a stretch of memory, each once."""
    expected = 1
    for stride, size in sorted((st, s) for s, st in zip(shape, strides, strict=True) if s != 1):
        if size == 0:
            return True
        if stride != expected:
            return False
        expected *= size
    return True


def same_places(shape: Sequence[int], left: Sequence[int], right: Sequence[int]) -> bool:
    """Whether two tensors of this shape have their elements at the same places."""
    return all(a == b or s == 1 for s, a, b in zip(shape, left, right, strict=True))


def reshaped(shape: Sequence[int], strides: Sequence[int], new: Sequence[int]) -> Strides | None:
    """Strides under a new shape without moving an element; None where elements would have to move.

    Neighbouring dimensions that are steps of one another form a run; a new shape fits if it cuts no run across. This is
    PyTorch's own rule, so that a reshape is a view here exactly where it is one there.
    """
    if 0 in shape:
        return row_major(new)
    if not shape:
        return (1,) * len(new)
    out = [0] * len(new)
    at = len(new) - 1
    step, elements, covered = strides[-1], 1, 1
    for dim in range(len(shape) - 1, -1, -1):
        elements *= shape[dim]
        if dim and (shape[dim - 1] == 1 or strides[dim - 1] == elements * step):
            continue  # the run goes on
        while at >= 0 and (covered < elements or new[at] == 1):
            out[at] = covered * step
            covered *= new[at]
            at -= 1
        if covered != elements:
            return None
        if dim:
            step, elements, covered = strides[dim - 1], 1, 1
    return tuple(out) if at < 0 else None


def view_of(op: Op, shape: tuple[int, ...], strides: Strides) -> tuple[Strides, int] | None:
    """Strides and offset (in elements) of an op's result as a view of its operand; None where it is no view."""
    name = op.definition.name
    if name == "step.reshape":
        found = reshaped(shape, strides, op.attributes["shape"])
        return None if found is None else (found, 0)
    if name == "step.transpose":
        return tuple(strides[i] for i in op.attributes["order"]), 0
    if name == "step.broadcast":
        new = op.attributes["shape"]
        lead = len(new) - len(shape)
        kept = [0 if s == 1 and n != 1 else st for s, st, n in zip(shape, strides, new[lead:], strict=True)]
        return (0,) * lead + tuple(kept), 0
    if name == "step.slice":
        dim, start = op.attributes["dim"], op.attributes["start"]
        stride = op.attributes["stride"]
        return (*strides[:dim], strides[dim] * stride, *strides[dim + 1 :]), start * strides[dim]
    if name == "step.detach":
        return strides, 0
    return None


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
