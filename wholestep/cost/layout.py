"""Strides of what the ATen provider writes, without asking it, and which operands a product copies.

Arguments and results of kernels are taken as dense. Pointwise results keep the order of their
operands, attention keeps [batch, length, head, width], as PyTorch's kernels do.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..dialects.step.contraction import parse_spec
from ..dialects.strides import Strides, reshaped, row_major
from ..ir.core import Op


def dense_like(shape: Sequence[int], strides: Strides) -> Strides:
    """Dense strides that keep the order of dimensions of these."""
    if 0 in strides:
        return row_major(shape)
    order = sorted(range(len(shape)), key=lambda d: (-strides[d] if shape[d] != 1 else 0, d))
    dense = row_major([shape[d] for d in order])
    out = [0] * len(shape)
    for position, d in enumerate(order):
        out[d] = dense[position]
    return tuple(out)


def contraction(op: Op, left: Strides, right: Strides) -> tuple[Strides, bool, bool, bool]:
    """How ATen runs a product: strides of the result, whether it copies lhs, copies rhs, adds the addend in a pass.

    The same folding to matrices as `plan_contraction`.
    """
    lhs, rhs, out = parse_spec(op.spec)
    shapes, strides = (op.lhs.type.shape, op.rhs.type.shape), (left, right)
    swapped = False
    batch = [c for c in out if c in lhs and c in rhs]
    rows = [c for c in out if c in lhs and c not in rhs]
    cols = [c for c in out if c in rhs and c not in lhs]
    if out == "".join(batch + cols + rows) and rows and cols:
        swapped, lhs, rhs, rows, cols = True, rhs, lhs, cols, rows
        shapes, strides = shapes[::-1], strides[::-1]
    inner = [c for c in lhs if c not in out]
    sizes = dict(zip(lhs, shapes[0], strict=True)) | dict(zip(rhs, shapes[1], strict=True))
    copies = [
        copied(labels, batch, first, second, sizes, shape, stride)
        for labels, first, second, shape, stride in zip(
            (lhs, rhs), (rows, inner), (inner, cols), shapes, strides, strict=True
        )
    ]
    natural = batch + rows + cols
    dense = row_major([sizes[c] for c in natural])
    result = tuple(dense[natural.index(c)] for c in out)
    row = not batch and natural == list(out) and len(cols) == 1
    extra = op.addend is not None and not (row and op.addend.type.shape == (sizes[cols[0]],))
    if swapped:
        copies.reverse()
    return result, copies[0], copies[1], extra


def copied(
    labels: str,
    batch: list[str],
    first: list[str],
    second: list[str],
    sizes: dict[str, int],
    shape: tuple[int, ...],
    strides: Strides,
) -> bool:
    """Whether bringing an operand to [batch, first, second] copies it."""

    def size(group: list[str]) -> int:
        n = 1
        for c in group:
            n *= sizes[c]
        return n

    if list(labels) == [*batch, *second, *first]:
        first, second = second, first  # folded as stored, then transposed as a view
    order = [labels.index(c) for c in (*batch, *first, *second)]
    folded = [size(first), size(second)]
    if batch:
        folded.insert(0, size(batch))
    return reshaped([shape[i] for i in order], tuple(strides[i] for i in order), folded) is None
