"""Attention on CUDA: which of PyTorch's fused kernels can run an op, and how each of them is called.

That follows from types, attributes and the GPU alone, so that forward and backward agree. Widths, masks and strides
that a kernel does not take as they are get padded or copied first. Nothing here waits for the GPU.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ...ir.core import Op

aten = torch.ops.aten

#: the kernels, as torch names them
CUDNN, FLASH, EFFICIENT = "cudnn", "flash", "efficient"
#: ends the name of a kernel that is given a copy of k and v for every head of q; the efficient one always needs them
REPEATED = "_repeated"
CUDNN_REPEATED, FLASH_REPEATED = CUDNN + REPEATED, FLASH + REPEATED
#: the efficient kernel keeps the log-sum-exp of rows in multiples of this many
_ROWS = 32
#: the efficient kernel wants rows of a mask to start at multiples of this many elements
_MASK_ROW = 8
#: blocks of threads along the dimensions of batch and heads
_GRID = 65535
#: from here on torch prefers cuDNN's attention on the GPUs below
_CUDNN_VERSION = 91500
_CUDNN_GPUS = ((9, 0), (10, 0))
#: where flash has room for the gradients of widths up to 256; elsewhere up to 192
_WIDE_FLASH_GPUS = ((8, 0), (9, 0), (10, 0))


def gpu_of(device: torch.device) -> tuple[tuple[int, int], int]:
    """Compute capability and version of cuDNN; where no GPU is at hand (a plan made elsewhere), those of an H200."""
    if not torch.cuda.is_available():
        return (9, 0), _CUDNN_VERSION + 1
    return torch.cuda.get_device_capability(device), torch.backends.cudnn.version() or 0


def fused_kernels(op: Op, capability: tuple[int, int], cudnn: int) -> list[str]:
    """The kernels that can run an attention op or its gradients, in the order in which PyTorch prefers them.

    Empty where none fits and the formula runs.
    """
    q, k, v = op.q.type, op.k.type, op.v.type
    if q.rank != 4 or 0 in q.shape or 0 in k.shape or 0 in v.shape or max(q.shape[:2]) > _GRID:
        return []
    if op.scale <= 0:  # the kernels look for the largest product before they scale
        return []
    found = []
    element, length, keys, width = q.element.text, q.shape[-2], k.shape[-2], q.shape[-1]
    # flash aligns a causal mask to the last key where lengths differ; cuDNN gives NaN in rows that see nothing
    plain = op.mask is None and width == v.shape[-1] and not (op.causal and length != keys)
    if element in ("f16", "bf16") and capability >= (8, 0) and plain:
        if capability in _CUDNN_GPUS and cudnn > _CUDNN_VERSION and width <= 128 and keys > 1:
            found.append(CUDNN)
        if width <= (256 if capability in _WIDE_FLASH_GPUS else 192):
            found.append(FLASH)
    if element in ("f16", "f32") or (element == "bf16" and capability >= (8, 0)):
        found.append(EFFICIENT)
    if CUDNN in found and q.shape[1] != k.shape[1]:
        found.append(CUDNN_REPEATED)
    return found


def fused_kernel(op: Op, capability: tuple[int, int], cudnn: int) -> str:
    """The kernel that PyTorch prefers for an attention op or its gradients; "" where none fits."""
    return next(iter(fused_kernels(op, capability, cudnn)), "")


def forward(
    kernel: str,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    causal: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The result and the log-sum-exp [B, H, L] of each row; 0 for rows that see nothing. A mask is numbers to add."""
    length, width = q.shape[-2], v.shape[-1]
    kernel, k, v = heads_for(kernel, q, k, v)
    if kernel == EFFICIENT:
        bias = bias_rows(mask, q, k.shape[-2])
        out, lse, *_ = aten._scaled_dot_product_efficient_attention.default(
            aligned(q), aligned(k), aligned(v), bias, True, 0.0, causal, scale=scale
        )
        lse = first(lse, length)
        if mask is not None:
            lse = lse.masked_fill(lse.isinf(), 0.0)
    elif kernel == FLASH:
        out, lse, *_ = aten._scaled_dot_product_flash_attention.default(
            aligned(q), aligned(k), aligned(v), 0.0, causal, scale=scale
        )
    else:
        out, lse, *_ = aten._scaled_dot_product_cudnn_attention.default(
            aligned(q), aligned(k), aligned(v), None, True, 0.0, causal, scale=scale
        )
        lse = lse.squeeze(-1)
    return first(out, width), lse


def backward(
    kernel: str,
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    mask: torch.Tensor | None,
    causal: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of q, k and v, from what `forward` gave by the same kernel."""
    length, keys, own = q.shape[-2], k.shape[-2], k.shape[1]
    widths = q.shape[-1], v.shape[-1]
    kernel, k, v = heads_for(kernel, q, k, v)
    unused = q.new_empty((2,), dtype=torch.int64)  # the state of dropout, which nobody reads without dropout
    if kernel == EFFICIENT:
        bias = bias_rows(mask, q, keys)
        missing = -length % _ROWS
        lse = F.pad(lse, (0, missing), value=float("inf")) if missing else dense(lse)
        q, k, v, dout, out = aligned(q), aligned(k), aligned(v), by_position(dout), by_position(out)
        dq, dk, dv, _ = aten._scaled_dot_product_efficient_attention_backward.default(
            dout, q, k, v, bias, out, lse, unused, unused, 0.0, [True, True, True, False], causal, scale=scale
        )
    elif kernel == FLASH:
        q, k, v, dout, out, lse = (*(aligned(t) for t in (q, k, v, dout, out)), dense(lse))
        dq, dk, dv = aten._scaled_dot_product_flash_attention_backward.default(
            dout, q, k, v, out, lse, None, None, length, keys, 0.0, causal, unused, unused, scale=scale
        )
    else:
        q, k, v, dout, out, lse = (*(aligned(t) for t in (q, k, v, dout, out)), dense(lse).unsqueeze(-1))
        dq, dk, dv = aten._scaled_dot_product_cudnn_attention_backward.default(
            dout, q, k, v, out, lse, unused, unused, None, None, None, length, keys, 0.0, causal, scale=scale
        )
    dk, dv = summed_heads(dk, own), summed_heads(dv, own)
    return first(dq, widths[0]), first(dk, widths[0]), first(dv, widths[1])


# ---- what the kernels take -------------------------------------------------------------------------------------------
# Kernels read 16 bytes at a time and do not look at addresses first: a row elsewhere is a CUDA error that ends the
# process. Torch's storages and our arena start at such words, so that strides and offsets tell, on fake tensors too.


def aligned(x: torch.Tensor) -> torch.Tensor:
    """x as the kernels read it: a width that fills 16-byte words (zeros are added), every row at such a word."""
    word = 16 // x.element_size()
    missing = -x.shape[-1] % word
    x = F.pad(x, (0, missing)) if missing else x  # padding keeps an order in which the width is not innermost
    return x if rows_fit(x, word) else x.clone(memory_format=torch.contiguous_format)


def rows_fit(x: torch.Tensor, word: int) -> bool:
    """Whether the last dimension is dense and every row starts at a multiple of `word` elements, none of them twice.

    Kernels also look at the strides of dimensions of size 1, so these count.
    """
    return (
        x.stride(-1) == 1 and x.storage_offset() % word == 0 and all(s > 0 and s % word == 0 for s in x.stride()[:-1])
    )


def by_position(x: torch.Tensor) -> torch.Tensor:
    """x [B, H, L, D] aligned, and dense in the order B, L, H, D: the efficient kernel's backward takes the distance
    between rows of the result to be H * D, whatever the stride says."""
    return aligned(x.transpose(1, 2)).contiguous().transpose(1, 2)


def dense(x: torch.Tensor) -> torch.Tensor:
    """x without gaps, at a 16-byte word."""
    fits = x.is_contiguous() and x.storage_offset() % (16 // x.element_size()) == 0
    return x if fits else x.clone(memory_format=torch.contiguous_format)


def first(x: torch.Tensor, count: int) -> torch.Tensor:
    """The first elements of the last dimension."""
    return x if x.shape[-1] == count else x.narrow(-1, 0, count)


def bias_rows(mask: torch.Tensor | None, q: torch.Tensor, keys: int) -> torch.Tensor | None:
    """A mask of numbers as what is added to the scores [B, H, L, S], in the layout of the efficient kernel."""
    if mask is None:
        return None
    mask = mask.to(q.dtype).expand(*mask.shape[:-1], keys)
    missing = -keys % _MASK_ROW
    mask = F.pad(mask, (0, missing)) if missing else mask
    if not rows_fit(mask, _MASK_ROW):
        mask = mask.clone(memory_format=torch.contiguous_format)
    return first(mask, keys).expand(*q.shape[:-1], keys)


def heads_for(kernel: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[str, torch.Tensor, torch.Tensor]:
    """Which of torch's kernels runs, and k and v with the heads that it is given."""
    if kernel == EFFICIENT or kernel.endswith(REPEATED):
        k, v = repeated_heads(k, q.shape[1]), repeated_heads(v, q.shape[1])
    return kernel.removesuffix(REPEATED), k, v


def repeated_heads(x: torch.Tensor, heads: int) -> torch.Tensor:
    """k or v with each head repeated for the query heads that share it."""
    if x.shape[1] == heads:
        return x
    return x.unsqueeze(2).expand(-1, -1, heads // x.shape[1], -1, -1).flatten(1, 2)


def summed_heads(dx: torch.Tensor, own: int) -> torch.Tensor:
    """The gradient of k or v from those of the copies of its heads."""
    return dx if dx.shape[1] == own else dx.unflatten(1, (own, dx.shape[1] // own)).sum(2)
