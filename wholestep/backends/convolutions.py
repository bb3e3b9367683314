"""Convolutions on NVIDIA GPUs that write where they are told.

`aten::convolution` has no `out=` kernel: its result is made elsewhere and copied. Where it would call cuDNN, which it
does for nearly all, cuDNN is called by its own operator, which has one; a bias is then added in place, as ATen does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

from ..dialects.step.convolution import Conv, window
from ..dialects.strides import is_laid_out
from ..torch_private import cudnn_off, has_kernel
from .convolution_ops import PARTS, shapes_of

if TYPE_CHECKING:
    from ..ir.core import Op
    from .providers import Region

aten = torch.ops.aten
#: element types that cuDNN convolves
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
#: cuDNN counts elements with 32 bits; ATen splits larger batches
LARGEST = 2**31


def cudnn_writes() -> bool:
    """Whether cuDNN's own operator can be used. A build without CUDA only plans, and plans as if it could."""
    if not torch.backends.cuda.is_built():
        return True
    return (
        has_kernel(aten.cudnn_convolution.out, "cuda")
        and torch.backends.cudnn.enabled
        and torch.backends.cudnn.is_available()
    )


def by_cudnn(args: Sequence[Any], made: torch.Tensor) -> bool:
    """Whether ATen would have cuDNN do a convolution with these arguments on a GPU. It has kernels of its own for
    depthwise ones that are not channels-last."""
    x, w, _, stride, _, _, transposed, _, groups = args
    if transposed or len(stride) not in (2, 3) or x.dtype not in DTYPES or x.dtype != w.dtype:
        return False
    if any(not 0 < t.numel() < LARGEST for t in (x, w, made)):
        return False
    if groups > 1 and w.shape[1] == 1 and not made.is_contiguous(memory_format=torch.channels_last):
        return False
    return cudnn_writes()


def convolve(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    *,
    out: torch.Tensor,
) -> None:
    """`aten::convolution` without a bias into `out`, which says by its strides how all tensors are to lie."""
    cudnn = torch.backends.cudnn
    deterministic = cudnn.deterministic or torch.are_deterministic_algorithms_enabled()
    tf32 = cudnn.conv.fp32_precision == "tf32"
    aten.cudnn_convolution.out(x, w, padding, stride, dilation, groups, cudnn.benchmark, deterministic, tf32, out=out)


def out_call(name: str, args: Sequence[Any], made: Sequence[torch.Tensor], device: str) -> Callable[..., None] | None:
    """What does an operator without an `out=` kernel in given memory, or None."""
    if device == "cuda" and name == "aten::convolution" and args[2] is None and by_cudnn(args, made[0]):
        return convolve
    return None


def in_parts(args: Sequence[Any], made: torch.Tensor, device: str) -> Callable[[], torch.Tensor] | None:
    """A convolution by operators that ATen makes of it itself, where that helps to have it in given memory; or None."""
    x, w, bias, stride, padding, dilation, transposed, output_padding, groups = args
    if device != "cuda" or transposed:
        return None
    if len(stride) == 1:  # a sequence is an image of one row
        window = ((1, *stride), (0, *padding), (1, *dilation), False, (0, *output_padding), groups)
        return lambda: aten.convolution.default(x.unsqueeze(2), w.unsqueeze(2), bias, *window).squeeze(2)
    window = (stride, padding, dilation, transposed, output_padding, groups)
    if bias is None or not by_cudnn((x, w, None, *window), made):
        return None
    return lambda: plus(aten.convolution.default(x, w, None, *window), bias)


def plus(y: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    y.add_(bias.view(-1, *[1] * (y.dim() - 2)))
    return y


def one_convolution(region: Region) -> Callable[..., None] | None:
    """What runs a region that is one convolution as a plan would have it: its result is not copied. None for others."""
    ops = [op for op in region.body.regions[0].block if not op.definition.terminator]
    if region.device.type != "cuda" or not ops or ops[-1].definition is not Conv:
        return None
    *views, op = ops
    if op.bias is not None or op.padding_after:
        return None
    given = dict(zip(region.body.regions[0].block.arguments, region.operands, strict=True))
    source = {v: v for v in given}
    for view in views:  # changes of layout that are none
        (x,) = view.operands if view.name == "step.layout" else (None,)
        if x not in given or not is_laid_out(given[x].shape, given[x].strides, view.order):
            return None
        source[view.result] = x
    places = [list(given).index(source[v]) for v in op.operands]
    args, count = window(op), len(given)

    def run(*tensors: torch.Tensor) -> None:
        x, w = (tensors[i] for i in places)
        out = tensors[count]
        if by_cudnn((x, w, None, *args), out):
            convolve(x, w, None, *args, out=out)
        else:
            out.copy_(aten.convolution.default(x, w, None, *args))

    return run


def starts_slowly(region: Region) -> bool:
    """Whether ATen's first call takes long: for every size of a depthwise convolution cuDNN compiles a kernel, which
    takes it half a second to a second."""
    if region.device.type != "cuda":
        return False
    return any(op.definition in PARTS and is_depthwise(op) for op in region.ops)


def is_depthwise(op: Op) -> bool:
    """Whether ATen has kernels of its own for a convolution of one channel each, or for a gradient of it."""
    image = shapes_of(op)[0]
    return len(image) == 4 and 1 < op.groups == image[1] and not op.transposed


def by_quick_kernels(region: Region) -> AbstractContextManager[None]:
    """Where results alone count, such convolutions run by ATen's own kernels: slower ones that are there."""
    return cudnn_off() if starts_slowly(region) else nullcontext()
