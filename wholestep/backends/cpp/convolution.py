"""Convolutions on CPUs that libraries are slow at, as a template of the provider `cpp`: images that lie channels-last.

A dense one is a matrix product: of the image itself where its kernel is one pixel, else of its windows, written out as
rows. A depthwise one is a kernel in `convolution.h`. Each is a region of its own, and is timed against ATen's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from functools import cache
from pathlib import Path

import torch

from ...dialects.step.base import torch_dtype
from ...dialects.step.convolution import Conv
from ...dialects.strides import row_major, same_places
from ...ir.core import Op
from ..convolution_ops import PARTS, laid_out_from, shapes_of
from ..kernels import Spec
from ..providers import Launcher, Offer, Progress, Region
from . import Candidate
from . import build as build_kernels
from .compiler import digest, header, working_compiler

#: what the kernels do, by number
WINDOWS, GATHERED, DEPTHWISE = 0, 1, {"forward": 2, "input_grad": 3, "weight_grad": 4}
#: bytes of windows written out at most: where images are large, libraries are good
LARGEST = 8 << 20
#: taps of a depthwise kernel at most
TAPS = 49
#: channels that one task of a depthwise kernel takes at most, and how many tasks there should be
CHANNELS, TASKS = 32, 16


@dataclass(frozen=True)
class Problem:
    """One convolution: which part of it, and its sizes."""

    part: str
    n: int
    c: int
    h: int
    w: int
    o: int
    oh: int
    ow: int
    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    depthwise: bool
    bias: bool

    @property
    def is_product(self) -> bool:
        """Whether it is a product of the image itself."""
        return self.kernel == self.stride == (1, 1) and self.padding == (0, 0)

    @property
    def rows(self) -> int:
        return self.n * self.oh * self.ow

    @property
    def columns(self) -> int:
        return self.kernel[0] * self.kernel[1] * self.c

    def sizes(self, what: int, chunks: int = 1) -> torch.Tensor:
        """What a kernel is told."""
        image = self.n, self.c, self.h, self.w, self.oh, self.ow
        return torch.tensor([what, *image, *self.kernel, *self.stride, *self.padding, chunks], dtype=torch.int64)


def problem_of(op: Op) -> Problem:
    (n, c, h, w), (o, _, *kernel), (_, _, oh, ow) = shapes_of(op)
    bias = op.definition is Conv and op.bias is not None
    window = tuple(kernel), tuple(op.stride), tuple(op.padding)
    return Problem(PARTS[op.definition], n, c, h, w, o, oh, ow, *window, op.groups > 1, bias)  # type: ignore[arg-type]


def takes(op: Op) -> bool:
    """Whether the op is to be a region of its own."""
    if op.definition not in PARTS or op.transposed or len(op.stride) != 2 or any(d != 1 for d in op.dilation):
        return False
    if torch_dtype(op.operands[0].type.element) is not torch.float32 or isinstance(working_compiler(), str):
        return False
    p = problem_of(op)
    if 0 in (p.n, p.c, p.h, p.w, p.o, p.oh, p.ow):
        return False
    if p.depthwise:
        return p.c == p.o == op.groups and p.kernel[0] * p.kernel[1] <= TAPS and not p.bias
    return p.is_product or 4 * p.rows * p.columns <= LARGEST


def anchor(region: Region) -> Op:
    return next(op for op in region.ops if op.definition in PARTS)


def why_not(region: Region) -> str:
    """Empty where a region whose op is taken can be run, else why it cannot."""
    op, block = anchor(region), region.body.regions[0].block
    assert block.last is not None
    if [laid_out_from(v) for v in block.last.operands] != [op.results[0]]:
        return "a convolution with its neighbours; only one by itself"
    operands = [laid_out_from(v) for v in op.operands]
    if any(v not in block.arguments for v in operands):
        return "a convolution of a view; only of a whole tensor"
    for value, spec in zip((*operands, op.results[0]), specs_of(region, op), strict=True):
        last = channels_last(spec.shape) if len(spec.shape) == 4 else row_major(spec.shape)
        if not same_places(spec.shape, spec.strides, last):
            return f"a convolution whose {'result' if value is op.results[0] else 'operand'} is not channels-last"
    return ""


def specs_of(region: Region, op: Op) -> list[Spec]:
    """How the operands of a convolution and its result lie."""
    arguments = region.body.regions[0].block.arguments
    return [*(region.operands[arguments.index(laid_out_from(v))] for v in op.operands), region.results[0]]


def channels_last(shape: Sequence[int]) -> tuple[int, ...]:
    _, c, h, w = shape
    return (h * w * c, 1, w * c, c)


@dataclass(frozen=True)
class Way:
    """A convolution on the tensors of a region: which they are."""

    problem: Problem
    operands: tuple[int, ...]
    result: int

    @property
    def key(self) -> str:
        return f"convolution {digest(repr(astuple(self)), source())[:32]}"

    @property
    def chunks(self) -> int:
        """Of images: more than one where blocks of channels are few."""
        return min(self.problem.n, -(-TASKS * CHANNELS // self.problem.c))

    @property
    def scratch(self) -> tuple[Spec, ...]:
        p = self.problem
        if p.depthwise:
            shape = (self.chunks, p.kernel[0] * p.kernel[1], p.c)
            return (Spec(shape, row_major(shape), torch.float32),) if p.part == "weight_grad" else ()
        return () if p.is_product else (Spec((p.rows, p.columns), (p.columns, 1), torch.float32),)


def offers(region: Region) -> list[Offer]:
    op, arguments = anchor(region), region.body.regions[0].block.arguments
    operands = tuple(arguments.index(laid_out_from(v)) for v in op.operands)
    way = Way(problem_of(op), operands, len(region.operands))
    name = "depthwise" if way.problem.depthwise else "product" if way.problem.is_product else "product of windows"
    return [Offer(name, way.key, way.scratch, way)]


@cache
def source() -> str:
    return Path(__file__).with_name("convolution.h").read_text()


def build(offers: Sequence[Offer], report: Progress | None = None) -> dict[str, Launcher | Exception]:
    """What runs each offer, by its key."""
    kernels = Candidate("convolution", (), digest(source(), header()), source())
    built = build_kernels([kernels], report)[kernels.key]
    if isinstance(built, Exception):
        return {o.key: built for o in offers}
    return {o.key: launcher(o.made, built) for o in offers}


def launcher(way: Way, kernels: Callable[..., None]) -> Launcher:
    """Runs a way on the tensors of its region and its scratch memory."""
    p, (first, second, *more), result = way.problem, way.operands, way.result
    scratch = result + 1
    if p.depthwise:
        sizes = p.sizes(DEPTHWISE[p.part], way.chunks)

        def depthwise(*tensors: torch.Tensor) -> None:
            kernels(sizes, tensors[first], tensors[second], tensors[result], *tensors[scratch:])

        return depthwise

    spread = p.sizes(WINDOWS if p.part != "input_grad" else GATHERED)
    image, output, kernel = (p.rows, p.columns), (p.rows, p.o), (p.o, p.columns)
    view = torch.as_strided

    def matrix(tensor: torch.Tensor, shape: tuple[int, int], turned: bool = False) -> torch.Tensor:
        n, m = shape
        return view(tensor, (m, n), (1, m)) if turned else view(tensor, shape, (m, 1))

    def windows(tensors: Sequence[torch.Tensor], of: int) -> torch.Tensor:
        if p.is_product:
            return matrix(tensors[of], image)
        kernels(spread, tensors[of], tensors[scratch])
        return tensors[scratch]

    def forward(*tensors: torch.Tensor) -> None:
        out, w = matrix(tensors[result], output), matrix(tensors[second], kernel, turned=True)
        if more:
            torch.addmm(tensors[more[0]], windows(tensors, first), w, out=out)
        else:
            torch.mm(windows(tensors, first), w, out=out)

    def weight_grad(*tensors: torch.Tensor) -> None:
        dy = matrix(tensors[second], output, turned=True)
        torch.mm(dy, windows(tensors, first), out=matrix(tensors[result], kernel))

    def input_grad(*tensors: torch.Tensor) -> None:
        dy, w = matrix(tensors[first], output), matrix(tensors[second], kernel)
        if p.is_product:
            torch.mm(dy, w, out=matrix(tensors[result], image))
            return
        torch.mm(dy, w, out=tensors[scratch])
        kernels(spread, tensors[scratch], tensors[result])

    return {"forward": forward, "weight_grad": weight_grad, "input_grad": input_grad}[p.part]
