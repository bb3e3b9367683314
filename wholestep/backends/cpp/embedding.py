"""The gradient of an embedding on CPUs, as a template of the provider `cpp`: rows added to zeros where indices say.

ATen makes it in memory of its own, from where it is copied to its place, and hands parts of it from thread to thread.
This kernel writes it in place, and each thread writes a part of the table; the update that reads it is cut alike.
What may be run is as for the provider `triton` (`backends/embedding.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from functools import cache
from pathlib import Path

import torch

from ...dialects.step.base import torch_dtype
from ...ir.core import Op
from .. import embedding
from ..embedding import Places, Problem
from ..kernels import Spec
from ..providers import Launcher, Offer, Progress, Region
from . import Candidate
from . import build as build_kernels
from .compiler import digest, header, working_compiler

#: index tensors of one gradient at most (`embedding.h`)
INDICES = 8


def takes(op: Op) -> bool:
    """Whether the op is to be a region of its own."""
    sums = embedding.sums_of(op)
    if sums is None or not embedding.fits(sums) or isinstance(working_compiler(), str):
        return False
    return torch_dtype(sums.dy.type.element) is torch.float32 and len(sums.indices) <= INDICES


def why_not(region: Region) -> str:
    """Empty where a region whose op is taken can be run, else why it cannot."""
    return embedding.why_not(region)


@dataclass(frozen=True)
class Way:
    """A gradient on the tensors of a region: which they are."""

    problem: Problem
    places: Places

    @property
    def key(self) -> str:
        return f"embedding {digest(repr(astuple(self)), source())[:32]}"

    @property
    def scratch(self) -> tuple[Spec, ...]:
        """The row of each token."""
        return (Spec((self.problem.tokens,), (1,), torch.int64),)

    def sizes(self) -> torch.Tensor:
        """What the kernel is told."""
        p = self.problem
        table = p.tokens, p.rows, p.columns, p.padding, p.column
        indices = list(zip((p.indices, *p.more), p.sizes, strict=True))
        how = p.across, p.from_end, p.index is torch.int64, len(indices)
        numbers = [*table, *how, *p.dy, *(n for walk, size in indices for n in (*walk, size))]
        return torch.tensor([int(n) for n in numbers], dtype=torch.int64)


def offers(region: Region) -> list[Offer]:
    found = embedding.problem_of(region)
    assert found is not None
    way = Way(*found)
    return [Offer("embedding gradient", way.key, way.scratch, way)]


@cache
def source() -> str:
    return Path(__file__).with_name("embedding.h").read_text()


def kernels() -> list[Candidate]:
    """What is compiled for this template."""
    return [Candidate("embedding gradient", (), digest(source(), header()), source())]


def build(offers: Sequence[Offer], report: Progress | None = None) -> dict[str, Launcher | Exception]:
    """What runs each offer, by its key."""
    (kernel,) = kernels()
    built = build_kernels([kernel], report)[kernel.key]
    if isinstance(built, Exception):
        return {o.key: built for o in offers}
    return {o.key: launcher(o.made, built) for o in offers}


def launcher(way: Way, kernel: Callable[..., None]) -> Launcher:
    """Runs a way on the tensors of its region and its scratch memory."""
    sizes, (dy,), (out,) = way.sizes(), way.places.dy, way.places.out
    indices = way.places.indices

    def run(*tensors: torch.Tensor) -> None:
        kernel(sizes, tensors[dy], tensors[out], tensors[out + 1], *[tensors[i] for i in indices])

    return run
