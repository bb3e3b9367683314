"""Where the elements of a tensor lie: strides, and which ops of the step dialect give views of their operand.

Plain arithmetic on shapes, shared by the move dialect, the planner and the ledger. Views follow PyTorch's own rules.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..ir.core import Op

Strides = tuple[int, ...]


def row_major(shape: Sequence[int]) -> Strides:
    """Strides of a tensor without gaps whose last dimension is the fastest."""
    out, step = [], 1
    for size in reversed(shape):
        out.append(step)
        step *= max(size, 1)
    return tuple(reversed(out))


def strides_in(shape: Sequence[int], order: Sequence[int]) -> Strides:
    """Strides of a tensor without gaps whose dimensions lie in this order."""
    out, step = [0] * len(shape), 1
    for dim in reversed(order):
        out[dim] = step
        step *= max(shape[dim], 1)
    return tuple(out)


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


def runs(shape: Sequence[int], strides: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """(size, stride) per dimension, with dimensions of size one left out and neighbours without a gap merged.

    Two tensors with equal runs have as many elements in the same places in the same order, whatever their shapes.
    """
    merged: list[tuple[int, int]] = []
    for size, stride in zip(shape, strides, strict=True):
        if size == 1:
            continue
        if merged and merged[-1][1] == size * stride:
            merged[-1] = (merged[-1][0] * size, stride)
        else:
            merged.append((size, stride))
    return tuple(merged) or ((1, 1),)


def is_laid_out(shape: Sequence[int], strides: Sequence[int], order: Sequence[int]) -> bool:
    """Whether a tensor fills its memory with its dimensions in this order."""
    return same_places([shape[d] for d in order], [strides[d] for d in order], row_major([shape[d] for d in order]))


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
    if name == "step.layout":
        return (strides, 0) if is_laid_out(shape, strides, op.attributes["order"]) else None
    return None
