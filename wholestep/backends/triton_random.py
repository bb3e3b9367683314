"""Random numbers on a GPU as one Triton kernel that reads its key from the device: nothing waits for the host.

Imported where Triton is there. The words are those of `philox.py`; uniform numbers are finished by the kernel, other
distributions and float64 by the operations of `philox.py` on its words.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..dialects.step.philox import OPERATORS, digits, draw_into, fill, words_per_element

BLOCKS = 256


@triton.jit(do_not_specialize=["stream", "count"])
def philox_words(out, key, stream, count, BITS: tl.constexpr, BLOCKS: tl.constexpr):
    """Element i of `out` gets word i: as it is, or (BITS > 0) its upper bits as a fraction."""
    seed = tl.load(key)
    step = tl.load(key + 1)
    micro_batch = tl.load(key + 2)
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    zero = (block * 0).to(tl.uint32)
    upper = (micro_batch | ((step >> 32) << 16)).to(tl.uint32)
    words = tl.philox(seed, block.to(tl.uint32), zero + stream.to(tl.uint32), zero + step.to(tl.uint32), zero + upper)
    for k in tl.static_range(4):
        at = 4 * block + k
        if BITS > 0:
            value = (words[k] >> (32 - BITS)).to(tl.float32) * (1.0 / (1 << BITS))
            tl.store(out + at, value, mask=at < count)
        else:
            tl.store(out + at, words[k].to(tl.int32, bitcast=True), mask=at < count)


def launch(out: torch.Tensor, key: torch.Tensor, stream: int, bits: int) -> None:
    count = out.numel()
    if count:
        grid = (triton.cdiv(triton.cdiv(count, 4), BLOCKS),)
        philox_words[grid](out, key, stream, count, BITS=bits, BLOCKS=BLOCKS)


def random_(out: torch.Tensor, key: torch.Tensor, distribution: str, stream: int) -> None:
    """The kernel behind `torch.ops.wholestep.random_` on a GPU."""
    if key.device.type == "cpu" and out.device.type != "cpu":
        draw_into(out, distribution, key.tolist(), stream)
    elif distribution == "uniform" and out.dtype is not torch.float64:
        launch(out, key, stream, digits(out.dtype))
    else:
        count = -(-out.numel() * words_per_element(out.dtype) // 4) * 4
        words = torch.empty(count, dtype=torch.int32, device=out.device)
        launch(words, key, stream, 0)
        fill(out.view(-1), words, distribution)


def register() -> None:
    OPERATORS.impl("random_", random_, "CUDA")
