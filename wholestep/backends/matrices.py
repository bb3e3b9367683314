"""A contraction as products of matrices where they lie: nothing is copied, transposes and batches are strides."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ..dialects.step.contraction import parse_spec
from .kernels import Spec

if TYPE_CHECKING:
    from ..ir.core import Op
    from .providers import Region

Views = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor]


class NotMatrices(Exception):
    """A contraction is no product of matrices as its tensors lie; the message says why."""


@dataclass(frozen=True, slots=True)
class Matrices:
    """result[z, m, n] = sum over k of left[z, m, k] * right[z, k, n], plus a bias along n. Strides per tensor.

    swapped: the contraction's second factor has the rows, so that results are written along columns.
    """

    z: int
    m: int
    n: int
    k: int
    left: tuple[int, int, int]
    right: tuple[int, int, int]
    result: tuple[int, int, int]
    dtype: torch.dtype
    swapped: bool
    biased: bool

    def views(
        self, tensors: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor]:
        """Left, right, bias and result of a region's tensors, as matrices."""
        left, right = tensors[:2] if not self.swapped else (tensors[1], tensors[0])
        bias, result = (tensors[2], tensors[3]) if self.biased else (None, tensors[2])
        first = 0 if self.z > 1 else 1
        return (
            left.as_strided((self.z, self.m, self.k)[first:], self.left[first:]),
            right.as_strided((self.z, self.k, self.n)[first:], self.right[first:]),
            bias,
            result.as_strided((self.z, self.m, self.n)[first:], self.result[first:]),
        )


def the_product(region: Region) -> Op | None:
    """The contraction that a region is, where it is nothing else."""
    return region.only if region.only is not None and region.only.name == "step.contract" else None


def matrices_of(region: Region) -> Matrices:
    """The matrices of a region that is a product.

    Where a factor's rows lie in several stretches, such as those of images whose channels are summed, the first label
    of the result is a batch in which the other factor has no part.
    """
    op = the_product(region)
    if op is None:
        raise NotMatrices("it is more than a product, or none")
    if op.wide:
        raise NotMatrices("its result is wider than its factors")
    left, right, out = parse_spec(op.spec)
    shared = [c for c in out if c in left and c in right]
    try:
        return with_batch(op, region, shared)
    except NotMatrices:
        if shared or len(out) < 3:
            raise
        return with_batch(op, region, [out[0]])


def with_batch(op: Op, region: Region, batch: Sequence[str]) -> Matrices:
    """The matrices of a product, as many as these labels count."""
    left, right, out = parse_spec(op.spec)
    tensors = [(left, region.operands[0]), (right, region.operands[1]), (out, region.results[0])]
    groups = {
        "z": list(batch),
        "m": [c for c in out if c in left and c not in right and c not in batch],
        "n": [c for c in out if c in right and c not in left and c not in batch],
        "k": [c for c in left if c not in out],
    }
    axes = {name: merged(labels, tensors) for name, labels in groups.items()}
    z, m, n, k = (axes[name][0] for name in "zmnk")
    if not all(groups[name] for name in "mnk") or not z * m * n * k:
        raise NotMatrices("it is no product of matrices")

    def strides(tensor: int, names: str) -> tuple[int, int, int]:
        one, two, three = (axes[name][1].get(tensor, 0) for name in names)
        return one, two, three

    dtype, biased = region.results[0].dtype, op.addend is not None
    if axes["n"][1][2] == 1:
        along = groups["n"]
        found = Matrices(
            z, m, n, k, strides(0, "zmk"), strides(1, "zkn"), strides(2, "zmn"), dtype, swapped=False, biased=biased
        )
    elif axes["m"][1][2] == 1:
        along = groups["m"]
        found = Matrices(
            z, n, m, k, strides(1, "znk"), strides(0, "zkm"), strides(2, "znm"), dtype, swapped=True, biased=biased
        )
    else:
        raise NotMatrices("its result is written neither along rows nor along columns")
    if biased and not is_vector(op, region.operands[2], out, along):
        raise NotMatrices("what is added is no vector along its columns")
    return found


def merged(labels: Sequence[str], tensors: Sequence[tuple[str, Spec]]) -> tuple[int, dict[int, int]]:
    """Labels as one axis: its size, and its stride in each tensor that has it."""
    sizes: dict[str, int] = {}
    for text, spec in tensors:
        sizes |= {c: n for c, n in zip(text, spec.shape, strict=True) if c in labels}
    real = [c for c in labels if sizes[c] != 1]
    having = [(i, text, spec) for i, (text, spec) in enumerate(tensors) if labels and labels[0] in text]
    if not real:
        return math.prod(sizes.values()), {i: 1 for i, _, _ in having}
    _, text, spec = having[-1]
    real.sort(key=lambda c: -spec.strides[text.index(c)])
    found = {}
    for i, text, spec in having:
        strides = [spec.strides[text.index(c)] for c in real]
        if any(a != b * sizes[c] for a, b, c in zip(strides, strides[1:], real[1:], strict=False)):
            raise NotMatrices("its factors lie so that they would have to be copied")
        found[i] = strides[-1]
    return math.prod(sizes.values()), found


def is_vector(op: Op, addend: Spec, out: str, along: Sequence[str]) -> bool:
    """Whether an addend is one number for every column."""
    lead = len(out) - len(addend.shape)
    own = [c for c, n in zip(out[lead:], addend.shape, strict=True) if n != 1]
    whole = math.prod(n for c, n in zip(out, op.y.type.shape, strict=True) if c in along)
    return (
        len(own) == 1
        and own == [c for c in along if c in own]
        and addend.shape[-1] == whole
        and addend.strides[-1] == 1
    )


def one_product(region: Region) -> Callable[..., None] | None:
    """ATen's product of a region, written where it is told; None where it is no product of matrices."""
    try:
        known = matrices_of(region)
    except NotMatrices:
        return None

    def run(*tensors: torch.Tensor) -> None:
        multiply(known, tensors)

    return run


def multiply(known: Matrices, tensors: Sequence[torch.Tensor]) -> None:
    """A product by ATen."""
    left, right, bias, result = known.views(tensors)
    if bias is None:
        (torch.mm if known.z == 1 else torch.bmm)(left, right, out=result)
    elif known.z == 1:
        torch.addmm(bias, left, right, out=result)
    else:
        torch.baddbmm(bias, left, right, out=result)
