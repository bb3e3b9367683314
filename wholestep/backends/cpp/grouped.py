"""Grouped products in f32 on CPUs, as a template of the provider `cpp`: a product of ours for each group.

PyTorch's is a product by MKL for each; the two compete by the clock, on groups of about one size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass

import torch

from ...dialects.step.grouped import SUMS, TURNED
from ..kernels import Spec
from ..providers import Launcher, Offer, Progress, Region
from . import Candidate, product
from .compiler import digest, working_compiler
from .product import DEPTH, GROUPED, PANEL, PANELS


def runs(region: Region) -> bool:
    """Whether a region is one of these and nothing else."""
    return region.only is not None and region.only.name == "step.grouped_contract"


def why_not(region: Region) -> str:
    """Empty where a region that is a grouped product can be run, else why it cannot."""
    if isinstance(working_compiler(), str):
        return f"no C++ compiler works: {working_compiler()}"
    lhs, rhs, ends = region.operands
    (result,) = region.results
    if any(s.dtype is not torch.float32 for s in (lhs, rhs, result)) or ends.dtype not in (torch.int32, torch.int64):
        return "only products of float32 are generated for CPUs"
    if any(0 in s.shape for s in region.specs):
        return "it is no product of matrices"
    if result.strides[-1] != 1 or ends.strides != (1,):
        return "its rows are not neighbours in memory"
    return ""


@dataclass(frozen=True)
class Way:
    """One grouped product: what is summed, sizes, and how its tensors lie, as in `grouped.h`."""

    sums: bool
    wide: bool
    groups: int
    rows: int
    n: int
    k: int
    left: tuple[int, ...]
    right: tuple[int, ...]
    result: tuple[int, int]

    @property
    def key(self) -> str:
        return f"grouped product {digest(repr(astuple(self)), product.source())[:32]}"

    @property
    def scratch(self) -> tuple[Spec, ...]:
        """Columns side by side."""
        width, terms = min(-(-self.n // PANEL), PANELS), min(self.rows if self.sums else self.k, DEPTH)
        return (Spec((width * PANEL * terms,), (1,), torch.float32),)


def way_of(region: Region) -> Way:
    op = region.only
    assert op is not None
    (lhs, rhs, ends), (result,) = region.operands, region.results
    right = (rhs.strides[0], rhs.strides[2], rhs.strides[1]) if op.spec == TURNED else rhs.strides
    if op.spec == SUMS:  # (a row of the right side stands where a matrix does)
        right = (rhs.strides[0], 0, rhs.strides[1])
    sizes = ends.shape[0], lhs.shape[0], result.shape[-1], lhs.shape[1]
    first, second = result.strides[:2] if op.spec == SUMS else (0, result.strides[0])
    return Way(op.spec == SUMS, ends.dtype is torch.int64, *sizes, lhs.strides, right, (first, second))


def offers(region: Region) -> list[Offer]:
    way = way_of(region)
    return [Offer("product per group", way.key, way.scratch, way)]


def kernels() -> list[Candidate]:
    """What is compiled for this template."""
    return [product.kernel()]


def build(offers: Sequence[Offer], report: Progress | None = None) -> dict[str, Launcher | Exception]:
    """What runs each offer, by its key."""
    return product.launched(offers, report, launcher)


def launcher(way: Way, kernel: Callable[..., None]) -> Launcher:
    """Runs a grouped product on the tensors of its region and its scratch memory."""
    numbers = GROUPED, way.sums, way.wide, way.groups, way.rows, way.n, way.k, *way.left, *way.right, *way.result
    sizes = torch.tensor([int(n) for n in numbers], dtype=torch.int64)

    def run(*tensors: torch.Tensor) -> None:
        kernel(sizes, *tensors)

    return run
