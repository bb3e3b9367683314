"""Attention and its gradients in f32 on CPUs, as a template of the provider `cpp`: made of the tiles of products.

No score is ever in memory: a thread has those of some rows in its cache, and all products there are ours. PyTorch's
kernel makes its results in memory of its own, from where they are copied. The two compete by the clock.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass

import torch

from ..kernels import Spec
from ..providers import Launcher, Offer, Progress, Region
from . import Candidate, product
from .compiler import digest, working_compiler
from .product import ATTENTION, ATTENTION_GRADIENTS, PANEL

#: columns of queries and values, and scores of a row, at most (`attention.h`)
WIDEST, LONGEST = 256, 32_000
OPS = ("step.attention", "step.attention_grad")


def runs(region: Region) -> bool:
    """Whether a region is one of these and nothing else."""
    return region.only is not None and region.only.name in OPS


def why_not(region: Region) -> str:
    """Empty where a region that is an attention can be run, else why it cannot."""
    if isinstance(working_compiler(), str):
        return f"no C++ compiler works: {working_compiler()}"
    op = region.only
    assert op is not None
    if op.mask is not None:
        return "it has a mask"
    if any(s.dtype is not torch.float32 for s in region.specs):
        return "only attention in float32 is generated for CPUs"
    if op.q.type.rank != 4 or any(0 in s.shape for s in region.specs):
        return "it has no batch of heads"
    if max(op.q.type.shape[-1], op.v.type.shape[-1]) > WIDEST or op.k.type.shape[-2] > LONGEST:
        return "its rows are too long for the stack"
    if any(s.strides[-1] != 1 for s in region.specs if len(s.shape) == 4):
        return "its rows are not neighbours in memory"
    return ""


@dataclass(frozen=True)
class Way:
    """One attention, or its gradients: sizes, and how its tensors lie."""

    what: int
    batch: int
    heads: int
    #: heads of q that share one of k
    shared: int
    rows: int
    keys: int
    width: int
    value_width: int
    causal: bool
    scale: float
    #: steps of batch, head and row, in the order of `attention.h`; those that are not there are zeros
    steps: tuple[tuple[int, ...], ...]

    @property
    def key(self) -> str:
        return f"attention {digest(repr(astuple(self)), product.source())[:32]}"

    @property
    def scratch(self) -> tuple[Spec, ...]:
        """Keys and values side by side, as products read them."""
        length, width, values = (-(-n // PANEL) * PANEL for n in (self.keys, self.width, self.value_width))
        forward = length * self.width + values * self.keys
        backward = length * (self.width + self.value_width) + width * self.keys
        each = forward if self.what == ATTENTION else backward
        return (Spec((self.batch * (self.heads // self.shared) * each,), (1,), torch.float32),)

    @property
    def sizes(self) -> torch.Tensor:
        """What the kernel is told."""
        counts = self.what, self.batch, self.heads, self.shared, self.rows, self.keys, self.width, self.value_width
        steps = [step for each in self.steps for step in each]
        packed = struct.pack(f"9q1d{len(steps)}q", *counts, int(self.causal), self.scale, *steps)
        return torch.frombuffer(bytearray(packed), dtype=torch.int64)


def way_of(region: Region) -> Way:
    op = region.only
    assert op is not None
    forward = op.name == OPS[0]
    batch, heads, rows, width = op.q.type.shape
    _, others, keys, value_width = op.v.type.shape
    lies = [s.strides[:3] for s in region.specs]
    none = ((0, 0, 0),)
    if forward:
        steps = (*lies, *(none * 4))
    else:
        dout, q, k, v, out, sums, *gradients = lies
        steps = (q, k, v, out, sums, dout, *gradients)
    sizes = batch, heads, heads // others, rows, keys, width, value_width
    return Way(ATTENTION if forward else ATTENTION_GRADIENTS, *sizes, op.causal, op.scale, steps)


def offers(region: Region) -> list[Offer]:
    way = way_of(region)
    return [Offer("attention", way.key, way.scratch, way)]


def kernels() -> list[Candidate]:
    """What is compiled for this template."""
    return [product.kernel()]


def build(offers: Sequence[Offer], report: Progress | None = None) -> dict[str, Launcher | Exception]:
    """What runs each offer, by its key."""
    return product.launched(offers, report, launcher)


def launcher(way: Way, kernel: Callable[..., None]) -> Launcher:
    """Runs an attention on the tensors of its region and its scratch memory."""
    sizes = way.sizes

    def run(*tensors: torch.Tensor) -> None:
        kernel(sizes, *tensors)

    return run
