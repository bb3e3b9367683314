"""The engines that cuDNN proposes for an attention or a convolution that stands alone: the first is PyTorch's own
choice, but here it writes where the plan says, in memory that the plan has."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ...dialects.step.attention import kernel_of, product_flops
from ...dialects.step.attention_cuda import CUDNN, CUDNN_REPEATED
from ...dialects.strides import row_major
from ..aten import lower
from ..kernels import Spec
from . import attention, convolution
from .graph import Graph
from .library import (
    ALIGNMENT,
    DOWN_CONVERTS,
    FFT,
    LIBRARY,
    NO_FIXED_ORDER,
    REDUCES_SHORT,
    TENSOR_CORES,
    WINOGRAD,
    Engine,
    engines,
)

if TYPE_CHECKING:
    from ...ir.core import Op
    from ..providers import Region

#: so many engines are offered: of attention the second is compiled and seldom better, those of convolutions are there
ATTENTIONS, CONVOLUTIONS = 2, 6
#: operations of one product below which nothing takes time worth measuring
LEAST = 1 << 26
#: bytes that an engine for convolutions may take beside its tensors: PyTorch's limit
ROOM = 256 << 20
#: cuDNN counts a tensor's elements with 32 bits
LARGEST = 2**31
#: what no engine for convolutions may do to numbers: all multiply 16 bits and add up 32
OTHERWISE = frozenset({DOWN_CONVERTS, REDUCES_SHORT, FFT, WINOGRAD})
SIXTEEN = (torch.bfloat16, torch.float16)
GRAPHS = {"step.attention": attention.forward, "step.attention_grad": attention.backward}
#: ops that the library may run where they stand alone
OPS = (*GRAPHS, *convolution.KINDS)

Launcher = Callable[..., None]


@dataclass(frozen=True, eq=False)
class Way:
    """One engine for one op, and what runs tensors that lie where it cannot read them."""

    engine: Engine
    otherwise: Launcher

    @property
    def scratch(self) -> tuple[Spec, ...]:
        space = self.engine.workspace
        return (*self.engine.graph.scratch, *((Spec((space,), (1,), torch.uint8),) if space else ()))

    def build(self) -> Launcher:
        plan = self.engine.plan

        def run(*tensors: torch.Tensor) -> None:
            if any(t.data_ptr() % ALIGNMENT for t in tensors):  # such as an argument of the user's
                self.otherwise(*tensors)
            else:
                plan.run(tensors)

        return run


def why_not(region: Region) -> str:
    """ "" where the library may run a region, else why not."""
    return "cuDNN is not loaded" if LIBRARY.loaded is None else why_unsuited(region)


def why_unsuited(region: Region) -> str:
    """ "" where a region is one op as the library takes it, else why not."""
    op = the_op(region)
    if op is None:
        return "it is more than an attention or a convolution, or none"
    return (why_no_convolution if op.name in convolution.KINDS else why_no_attention)(op, region)


def why_no_attention(op: Op, region: Region) -> str:
    if op.mask is not None:
        return "it has a mask"
    if kernel_of(op, region.device) not in (CUDNN, CUDNN_REPEATED):
        return "another kernel than cuDNN's was chosen for it"
    if op.name == "step.attention_grad" and torch.are_deterministic_algorithms_enabled():
        return "it adds gradients up in no fixed order"
    rows = [s for s in region.specs if len(s.shape) == 4]
    sums = [s for s in region.specs if len(s.shape) != 4]
    if rows[0].dtype not in SIXTEEN or any(s.dtype is not rows[0].dtype for s in rows):
        return "it has other types than one of 16 bits"
    if not all(map(lies_aligned, rows)):
        return "its rows do not begin at multiples of 16 bytes"
    if any(s.dtype is not torch.float32 or s.strides != row_major(s.shape) for s in sums):
        return "its log-sum-exp has gaps"
    return "it is too small to be worth measuring" if product_flops(op) < LEAST else ""


def why_no_convolution(op: Op, region: Region) -> str:
    specs = region.specs
    if not torch.backends.cudnn.enabled:
        return "cuDNN is switched off"
    if len(specs) != 3:
        return "it has a bias"
    if op.padding_after:
        return "it has not as many zeros before as behind"
    if op.groups > 1 and kernel_spec(op, region).shape[1] == 1:
        return "it is depthwise"
    if specs[0].dtype not in SIXTEEN or any(s.dtype is not specs[0].dtype for s in specs):
        return "it has other types than one of 16 bits"
    if not all(map(convolution.lies_channels_last, specs)):
        return "its tensors are not channels-last"
    if any(math.prod(s.shape) >= LARGEST for s in specs):
        return "it has more elements than cuDNN counts"
    return "it is too small to be worth measuring" if op.definition.flops(op) < LEAST else ""  # type: ignore[attr-defined]


def kernel_spec(op: Op, region: Region) -> Spec:
    """The kernel of a convolution, or its gradient."""
    return region.results[0] if op.name == "step.conv_weight_grad" else region.operands[1]


def the_op(region: Region) -> Op | None:
    """The attention, the convolution or the gradient of one that a region is, where it is nothing else."""
    return region.only if region.only is not None and region.only.name in OPS else None


def lies_aligned(spec: Spec) -> bool:
    """Whether every row fills words of 16 bytes and begins at one, none of them twice."""
    each = ALIGNMENT // spec.dtype.itemsize
    *steps, last = spec.strides
    return spec.shape[-1] % each == 0 and last == 1 and all(s > 0 and s % each == 0 for s in steps)


def graph_of(region: Region) -> Graph:
    """What a region computes that suits."""
    op = the_op(region)
    assert op is not None
    if op.name in convolution.KINDS:
        return convolution.graph_of(op, region.specs)
    return GRAPHS[op.name](region.specs, attention.Options(op.scale, op.causal))


def ways(region: Region) -> list[Way]:
    """What the library proposes."""
    graph, otherwise = graph_of(region), by_aten(region)
    if is_convolution(region):
        found = engines(graph, region.device, CONVOLUTIONS, convolves_well)
    else:
        found = engines(graph, region.device, ATTENTIONS)
    return [Way(engine, otherwise) for engine in found]


def is_convolution(region: Region) -> bool:
    """Whether a region that suits is one. Its ways then take no time to build: they are there, none is compiled."""
    return region.ops[0].name in convolution.KINDS


def convolves_well(engine: Engine) -> bool:
    """Whether an engine may be tried. Without tensor cores it is slow, and some of those are compiled."""
    fixed = torch.backends.cudnn.deterministic or torch.are_deterministic_algorithms_enabled()
    notes = engine.notes
    if TENSOR_CORES not in notes or notes & OTHERWISE or (fixed and NO_FIXED_ORDER in notes):
        return False
    return engine.workspace <= ROOM


def by_aten(region: Region) -> Launcher:
    """PyTorch's own kernel, whose results are copied."""
    call, count = lower(region.ops[0], region.device), len(region.operands)

    def run(*tensors: torch.Tensor) -> None:
        made = call.run(*tensors[:count])
        for place, value in zip(tensors[count:], made if isinstance(made, list | tuple) else (made,), strict=False):
            place.copy_(value)

    return run
