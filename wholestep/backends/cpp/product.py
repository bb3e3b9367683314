"""Matrix products of f32 on CPUs, as a template of the provider `cpp`: tiles in registers, factors side by side.

PyTorch's come from MKL, which was half as fast on an AMD processor (bench/results/kernels_cpu.md). These compete by the
clock wherever a contraction stands alone, and in the convolutions that are products (`convolution.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from ..kernels import Spec
from ..matrices import Matrices, NotMatrices, matrices_of, the_product
from ..providers import Launcher, Offer, Progress, Region
from . import Candidate
from . import build as build_kernels
from .compiler import digest, header, working_compiler

#: as in `product.h`: terms that are summed before a tile is written, panels that are there at a time, and the most
#: columns that a panel has
DEPTH, PANELS, PANEL = 512, 128, 32
#: what is to be done, as in `products.h`
PRODUCT, ATTENTION, ATTENTION_GRADIENTS, GROUPED = range(4)


def runs(region: Region) -> bool:
    """Whether a region is one of these and nothing else."""
    return the_product(region) is not None


def why_not(region: Region) -> str:
    """Empty where a region that is a contraction can be run, else why it cannot."""
    if isinstance(working_compiler(), str):
        return f"no C++ compiler works: {working_compiler()}"
    try:
        known = matrices_of(region)
    except NotMatrices as error:
        return str(error)
    same = all(s.dtype is known.dtype is torch.float32 for s in region.specs)
    return "" if same else "only products of float32 are generated for CPUs"


@dataclass(frozen=True)
class Way:
    """One product of matrices."""

    known: Matrices

    @property
    def key(self) -> str:
        return f"product {digest(repr(self.known), source())[:32]}"

    @property
    def scratch(self) -> tuple[Spec, ...]:
        return (panels(self.known),)


def panels(known: Matrices) -> Spec:
    """Memory for columns side by side."""
    width, parts = min(-(-known.n // PANEL), PANELS), -(-known.k // DEPTH)
    count = min(known.z, PANELS // width) * width * PANEL * -(-known.k // parts)
    return Spec((count,), (1,), torch.float32)


def offers(region: Region) -> list[Offer]:
    way = Way(matrices_of(region))
    return [Offer("product", way.key, way.scratch, way)]


@cache
def source() -> str:
    """What is compiled, once for products, of groups as well, and attention: all are made of the same tiles."""
    files = ("tiles.h", "product.h", "grouped.h", "attention.h", "products.h")
    return "\n".join(Path(__file__).with_name(name).read_text() for name in files)


@cache
def kernel() -> Candidate:
    """What runs every product and attention, by sizes that it is told."""
    return Candidate("products", (), digest(source(), header()), source())


def kernels() -> list[Candidate]:
    """What is compiled for this template."""
    return [kernel()]


def build(offers: Sequence[Offer], report: Progress | None = None) -> dict[str, Launcher | Exception]:
    """What runs each offer, by its key."""
    return launched(offers, report, lambda way, kernel: launcher(way.known, kernel))


def launched(
    offers: Sequence[Offer], report: Progress | None, launcher: Callable[[Any, Callable[..., None]], Launcher]
) -> dict[str, Launcher | Exception]:
    """What runs each offer, by its key, as a template launches the one kernel."""
    built = build_kernels([kernel()], report)[kernel().key]
    return {o.key: built if isinstance(built, Exception) else launcher(o.made, built) for o in offers}


def sizes_of(known: Matrices) -> torch.Tensor:
    """What the kernel is told."""
    numbers = PRODUCT, known.z, known.m, known.n, known.k, *known.left, *known.right, *known.result[:2], known.biased
    return torch.tensor([int(n) for n in numbers], dtype=torch.int64)


def launcher(known: Matrices, kernel: Callable[..., None]) -> Launcher:
    """Runs a product on the tensors of its region and its scratch memory."""
    sizes = sizes_of(known)
    left, right = (1, 0) if known.swapped else (0, 1)

    def run(*tensors: torch.Tensor) -> None:
        *_, result, scratch = tensors
        kernel(sizes, tensors[left], tensors[right], result, scratch, *tensors[2:-2])

    return run
