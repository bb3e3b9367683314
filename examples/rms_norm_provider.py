"""A kernel library of one's own: RMSNorm and its gradient, written by hand in Triton, run inside a compiled step.

On a GPU it competes by time with the other providers. Without one, TRITON_INTERPRET=1 runs its kernels in Python.
"""

import argparse
import math
import os
from functools import partial

import torch
import triton
import triton.language as tl
from torch import nn

import wholestep as ws
from wholestep.backends.kernels import Spec
from wholestep.backends.providers import Offer, Provider, register_provider
from wholestep.dialects.strides import row_major, same_places


@triton.jit
def normalise(x, weight, y, rstd, width, eps, BLOCK: tl.constexpr):
    """One row per program."""
    row, at = tl.program_id(0), tl.arange(0, BLOCK)
    inside = at < width
    value = tl.load(x + row * width + at, mask=inside, other=0.0).to(tl.float32)
    scale = 1 / tl.sqrt(tl.sum(value * value) / width + eps)
    tl.store(rstd + row, scale)
    w = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + row * width + at, (value * scale * w).to(y.dtype.element_ty), mask=inside)


@triton.jit
def gradients(dy, x, rstd, weight, dx, parts, rows, width, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Some rows per program: the gradient of each, and their part of the weight's."""
    program, at = tl.program_id(0), tl.arange(0, BLOCK)
    w = tl.load(weight + at, mask=at < width, other=0.0).to(tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for i in range(ROWS):
        row = program * ROWS + i
        inside = (at < width) & (row < rows)
        value = tl.load(x + row * width + at, mask=inside, other=0.0).to(tl.float32)
        given = tl.load(dy + row * width + at, mask=inside, other=0.0).to(tl.float32)
        scale = tl.load(rstd + row, mask=row < rows, other=0.0)
        mean = tl.sum(given * w * value) / width
        result = scale * (given * w - value * scale * scale * mean)
        tl.store(dx + row * width + at, result.to(dx.dtype.element_ty), mask=inside)
        total += given * value * scale
    tl.store(parts + program * width + at, total, mask=at < width)


@triton.jit
def add_up(parts, dw, width, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for i in range(PARTS):
        total += tl.load(parts + i * width + at, mask=at < width, other=0.0)
    tl.store(dw + at, total.to(dw.dtype.element_ty), mask=at < width)


# ---- the provider ----


@register_provider
class HandWritten(Provider):
    """RMSNorm over the last dimension, with its gradient."""

    name = "hand_written"

    def takes(self, op):  # not fused with their neighbours: these are regions of their own
        return op.name in ("step.rms_norm", "step.rms_norm_grad")

    def claims(self, region):  # empty, or why it cannot run a region
        op, block = region.ops[0], region.body.regions[0].block
        if len(region.ops) != 1 or not self.takes(op):
            return "it is no RMSNorm"
        if region.device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
            return "Triton runs on GPUs, or anywhere with TRITON_INTERPRET=1"
        whole = [*op.operands, *op.results] == [*block.arguments, *block.last.operands]
        if op.trailing != 1 or op.weight is None or not whole:
            return "it is an RMSNorm of another form"
        dense = all(same_places(s.shape, s.strides, row_major(s.shape)) for s in region.specs)
        return "" if dense else "rows do not follow each other"

    def offers(self, region):  # the ways it has, each with the memory it needs beside its tensors
        gradient = region.ops[0].name == "step.rms_norm_grad"
        *outer, width = region.operands[gradient].shape
        rows = math.prod(outer)
        if not gradient:
            way = partial(run_forward, rows, width, region.ops[0].eps)
            return [Offer("one row", f"{self.name} {region.key}", made=way)]
        found = []
        for each in (8, 32):
            scratch = Spec((triton.cdiv(rows, each), width), (width, 1), torch.float32)
            way = partial(run_backward, rows, width, each)
            found.append(Offer(f"{each} rows", f"{self.name} {each} {region.key}", (scratch,), way))
        return found

    def build(self, offers, report=None):  # what runs each of them: it gets operands, results and scratch memory
        return {offer.key: offer.made for offer in offers}


def run_forward(rows, width, eps, x, weight, y, rstd):
    normalise[(rows,)](x, weight, y, rstd, width, eps, BLOCK=triton.next_power_of_2(width))


def run_backward(rows, width, each, dy, x, rstd, weight, dx, dw, parts):
    block, count = triton.next_power_of_2(width), triton.cdiv(rows, each)
    gradients[(count,)](dy, x, rstd, weight, dx, parts, rows, width, ROWS=each, BLOCK=block)
    add_up[(triton.cdiv(width, 128),)](parts, dw, width, PARTS=count, BLOCK=128)


# ---- a model that uses it ----


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--providers", nargs="+", default=["aten", "hand_written"])
    args = parser.parse_args()

    torch.manual_seed(0)
    layers = [nn.Linear(32, args.width), nn.RMSNorm(args.width, eps=1e-6), nn.Linear(args.width, 4)]
    model = nn.Sequential(*layers).to(args.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x, y = torch.randn(args.batch, 32, device=args.device), torch.arange(args.batch, device=args.device) % 4
    timed = args.device != "cpu"  # in the interpreter it would lose
    step = ws.compile(model, nn.CrossEntropyLoss(), optimizer, (x, y), providers=args.providers, tune=timed)
    for number in range(args.steps):
        print(f"step {number + 1} loss {float(step(x, y)):.5f}")
    for launch in step.plan().launches:
        if launch.provider == "hand_written":
            print(f"{launch.phase} of layer {launch.layer} was run by {launch.provider}")


if __name__ == "__main__":
    main()
