"""Convolutions on CPUs that libraries are slow at, as a template of the provider `cpp`: images that lie channels-last.

A dense one is a matrix product, ours (`product.py`) or PyTorch's: of the image itself where its kernel is one pixel,
else of its windows, written out as rows. A depthwise one is a kernel in `convolution.h`. Each is a region of its own,
and is timed against ATen's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from functools import cache, partial
from pathlib import Path

import torch

from ...dialects.step.base import torch_dtype
from ...dialects.step.convolution import Conv
from ...dialects.step.layout import Layout
from ...dialects.strides import row_major, same_places, view_of
from ...ir.core import Op, Value
from ..convolution_ops import PARTS, laid_out_from, shapes_of
from ..kernels import Spec
from ..matrices import Matrices, multiply
from ..providers import Launcher, Offer, Progress, Region
from . import Candidate, product
from . import build as build_kernels
from .compiler import digest, header, working_compiler

#: what the kernels do, by number
WINDOWS, GATHERED, DEPTHWISE = 0, 1, {"forward": 2, "input_grad": 3, "weight_grad": 4}
#: bytes of windows written out at most: where images are large, libraries are good
LARGEST = 24 << 20
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
    dilation: tuple[int, int]
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

    @property
    def matrices(self) -> Matrices:
        """The product of rows that a dense one is: of windows and the kernel, or of one of them and an output."""
        windows, output, kernel = (0, self.columns, 1), (0, self.o, 1), (0, self.columns, 1)
        sizes, strides = {
            "forward": ((self.rows, self.o, self.columns), (windows, turned(kernel), output)),
            "weight_grad": ((self.o, self.columns, self.rows), (turned(output), windows, kernel)),
            "input_grad": ((self.rows, self.columns, self.o), (output, kernel, windows)),
        }[self.part]
        return Matrices(1, *sizes, *strides, torch.float32, swapped=False, biased=self.bias)

    def sizes(self, what: int, chunks: int = 1) -> torch.Tensor:
        """What a kernel is told."""
        image = self.n, self.c, self.h, self.w, self.oh, self.ow
        window = *self.kernel, *self.stride, *self.padding, *self.dilation
        return torch.tensor([what, *image, *window, chunks], dtype=torch.int64)


def turned(strides: tuple[int, int, int]) -> tuple[int, int, int]:
    """Of the transposed matrix."""
    batch, row, column = strides
    return batch, column, row


def problem_of(op: Op) -> Problem:
    """A sequence is an image of one row."""
    (n, c, *image), (o, _, *kernel), (_, _, *output) = shapes_of(op)

    def rows(sizes: Sequence[int], alone: int = 1) -> tuple[int, int]:
        first, last = (alone, *sizes)[-2:]
        return first, last

    (h, w), (oh, ow) = rows(image), rows(output)
    window = rows(kernel), rows(op.stride), rows(op.padding, 0), rows(op.dilation)
    bias = op.definition is Conv and op.bias is not None
    return Problem(PARTS[op.definition], n, c, h, w, o, oh, ow, *window, op.groups > 1, bias)


def takes(op: Op) -> bool:
    """Whether the op is to be a region of its own."""
    if op.definition not in PARTS or op.transposed or len(op.stride) not in (1, 2):
        return False
    if torch_dtype(op.operands[0].type.element) is not torch.float32 or isinstance(working_compiler(), str):
        return False
    p = problem_of(op)
    if 0 in (p.n, p.c, p.h, p.w, p.o, p.oh, p.ow):
        return False
    if p.depthwise:
        return p.c == p.o == op.groups and p.kernel[0] * p.kernel[1] <= TAPS and not p.bias and p.dilation == (1, 1)
    return p.is_product or 4 * p.rows * p.columns <= LARGEST


def anchor(region: Region) -> Op:
    return next(op for op in region.ops if op.definition in PARTS)


def why_not(region: Region) -> str:
    """Empty where a region whose op is taken can be run, else why it cannot."""
    op, block = anchor(region), region.body.regions[0].block
    assert block.last is not None
    if [laid_out_from(v) for v in block.last.operands] != [op.results[0]]:
        return "a convolution with its neighbours; only one by itself"
    operands = [memory_of(region, v) for v in op.operands]
    known = [each[1] for each in operands if each is not None]
    if len(known) < len(operands):
        return "a convolution of a part of a tensor, or of what is no view"
    for spec, what in zip((*known, region.results[0]), (*["operand"] * len(known), "result"), strict=True):
        last = channels_last(spec.shape) if len(spec.shape) > 1 else row_major(spec.shape)
        if not same_places(spec.shape, spec.strides, last):
            return f"a convolution whose {what} is not channels-last"
    return ""


def memory_of(region: Region, value: Value) -> tuple[int, Spec] | None:
    """The number of the operand in whose memory a value lies, from its first element on, and how it lies there; as
    before a change of layout, which is none where that is channels-last already. None where it is no such view."""
    views: list[Op] = []
    while (op := value.op) is not None:
        if not getattr(op.definition, "views", False) or op.operands[0].type.element is not value.type.element:
            return None
        views.append(op)
        value = op.operands[0]
    number = region.body.regions[0].block.arguments.index(value)
    seen = region.operands[number]
    for op in reversed(views):
        found = (seen.strides, 0) if op.definition is Layout else view_of(op, seen.shape, seen.strides)
        if found is None or found[1]:
            return None
        seen = Spec(op.results[0].type.shape, found[0], seen.dtype)
    return number, seen


def channels_last(shape: Sequence[int]) -> tuple[int, ...]:
    n, c, *image = shape
    each, *inner, last = row_major((n, *image, c))
    return (each, last, *inner)


@dataclass(frozen=True)
class Way:
    """A convolution on the tensors of a region: which they are, and whether the product is PyTorch's."""

    problem: Problem
    operands: tuple[int, ...]
    result: int
    by_torch: bool = False

    @property
    def key(self) -> str:
        return f"convolution {digest(repr(astuple(self)), source(), product.source())[:32]}"

    @property
    def chunks(self) -> int:
        """Of images: more than one where blocks of channels are few."""
        return min(self.problem.n, -(-TASKS * CHANNELS // self.problem.c))

    @property
    def scratch(self) -> tuple[Spec, ...]:
        """Partial sums of a depthwise one; of another windows, then what a product of ours needs."""
        p = self.problem
        if p.depthwise:
            shape = (self.chunks, p.kernel[0] * p.kernel[1], p.c)
            return (Spec(shape, row_major(shape), torch.float32),) if p.part == "weight_grad" else ()
        windows = () if p.is_product else (Spec((p.rows, p.columns), (p.columns, 1), torch.float32),)
        return windows if self.by_torch else (*windows, product.panels(p.matrices))


def offers(region: Region) -> list[Offer]:
    op = anchor(region)
    operands = tuple(number for number, _ in filter(None, (memory_of(region, v) for v in op.operands)))
    problem, result = problem_of(op), len(region.operands)
    name = "depthwise" if problem.depthwise else "product" if problem.is_product else "product of windows"
    ways = {name: Way(problem, operands, result)}
    if not problem.depthwise:
        ways[f"{name} by PyTorch"] = Way(problem, operands, result, by_torch=True)
    return [Offer(name, way.key, way.scratch, way) for name, way in ways.items()]


@cache
def source() -> str:
    return Path(__file__).with_name("convolution.h").read_text()


def kernels() -> list[Candidate]:
    """What is compiled for this template."""
    return [Candidate("convolution", (), digest(source(), header()), source()), product.kernel()]


def build(offers: Sequence[Offer], report: Progress | None = None) -> dict[str, Launcher | Exception]:
    """What runs each offer, by its key."""
    wanted = kernels()
    made = build_kernels(wanted, report)
    built = [made[c.key] for c in wanted]
    failed = next((one for one in built if isinstance(one, Exception)), None)
    return {o.key: failed or launcher(o.made, *built) for o in offers}  # type: ignore[arg-type]


def launcher(way: Way, images: Callable[..., None], products: Callable[..., None]) -> Launcher:
    """Runs a way on the tensors of its region and its scratch memory."""
    p, (first, second, *bias), result = way.problem, way.operands, way.result
    scratch = result + 1
    if p.depthwise:
        sizes = p.sizes(DEPTHWISE[p.part], way.chunks)

        def depthwise(*tensors: torch.Tensor) -> None:
            images(sizes, tensors[first], tensors[second], tensors[result], *tensors[scratch:])

        return depthwise

    by_torch, ours = partial(multiply, p.matrices), product.launcher(p.matrices, products)
    spread = p.sizes(WINDOWS if p.part != "input_grad" else GATHERED)

    def dense(*tensors: torch.Tensor) -> None:
        own = list(tensors[scratch:])
        windows = None if p.is_product else own.pop(0)
        image, other, out = tensors[first], tensors[second], tensors[result]
        if p.part == "input_grad":
            run((image, other, out if windows is None else windows), own)
            if windows is not None:
                images(spread, windows, out)
            return
        if windows is not None:
            images(spread, image, windows)
            image = windows
        factors = (other, image) if p.part == "weight_grad" else (image, other)
        run((*factors, *[tensors[b] for b in bias], out), own)

    def run(tensors: Sequence[torch.Tensor], own: Sequence[torch.Tensor]) -> None:
        by_torch(tensors) if way.by_torch else ours(*tensors, *own)

    return dense
