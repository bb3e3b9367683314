"""Truth values as bits: 32 of them in four bytes, along one dimension.

A mask that backward reads takes a sixteenth of the 16-bit tensor that it was computed from. Kernels of our own set and
ask single bits where they make and need them (`loop.store` and `loop.load` with `bits`). The order of bits is that in
which tensor cores give a product's columns to threads, so that a thread has all bits of a byte and no other has any:
the first two of every eight columns are those of the first byte, the next two those of the second.

    column 8 j + 2 t + p of 32 is bit 2 j + p of byte t
"""

from __future__ import annotations

import torch

from ...ir.core import Op
from ...ir.dialect import Attr, Operand, Result
from ...ir.types import BOOL, ScalarType, TensorType
from .base import LABELS, Roles, StepOp, step

BYTE, GROUP = 8, 32
UI8 = ScalarType("ui8")


class Bits(StepOp):
    """Common rules: nothing is computed."""

    differentiable = False
    dim = Attr("int", "the dimension along which 32 truth values are four bytes")

    @staticmethod
    def flops(op: Op) -> int:
        return 0

    @staticmethod
    def roles(op: Op) -> Roles:
        labels = LABELS[: op.x.type.rank]
        return Roles((labels,), (labels,), whole=labels[op.dim])


def packed(x: torch.Tensor, dim: int) -> torch.Tensor:
    """The bytes of truth values."""
    apart = x.movedim(dim, -1).unflatten(-1, (-1, 4, 4, 2)).to(torch.uint8)
    bits = (apart << places(x.device)).sum((-3, -1), dtype=torch.uint8)
    return bits.flatten(-2).movedim(-1, dim)


def unpacked(x: torch.Tensor, dim: int) -> torch.Tensor:
    """The truth values of bytes."""
    apart = x.movedim(dim, -1).unflatten(-1, (-1, 1, 4, 1)) >> places(x.device)
    return (apart & 1).to(torch.bool).flatten(-4).movedim(-1, dim)


def places(device: torch.device) -> torch.Tensor:
    """The bit of a byte by the eight that a column is of, its pair and its place in that."""
    return torch.arange(BYTE, dtype=torch.uint8, device=device).reshape(4, 1, 2)


@step.op
class PackBits(Bits):
    """Truth values as bytes: dimension `dim` has an eighth as many."""

    x = Operand()
    y = Result()

    @staticmethod
    def infer(x, dim):
        return TensorType(tuple(n // BYTE if d == dim else n for d, n in enumerate(x.shape)), UI8)

    @staticmethod
    def check(op):
        if op.x.type.element is not BOOL or not 0 <= op.dim < op.x.type.rank:
            return "it packs truth values along one of their dimensions"
        return f"the dimension must be a multiple of {GROUP}" if op.x.type.shape[op.dim] % GROUP else None

    @staticmethod
    def evaluate(op):
        dim = op.dim
        return lambda x: packed(x, dim)

    @staticmethod
    def element(k, op, index):
        k.refuse("bits are packed where they are stored, and not read in the same kernel")


@step.op
class UnpackBits(Bits):
    """The truth values that bytes hold."""

    x = Operand()
    y = Result()

    @staticmethod
    def infer(x, dim):
        return TensorType(tuple(n * BYTE if d == dim else n for d, n in enumerate(x.shape)), BOOL)

    @staticmethod
    def check(op):
        fits = op.x.type.element is UI8 and 0 <= op.dim < op.x.type.rank
        whole = fits and not op.x.type.shape[op.dim] * BYTE % GROUP
        return None if whole else "it unpacks bytes, by fours, along one of their dimensions"

    @staticmethod
    def evaluate(op):
        dim = op.dim
        return lambda x: unpacked(x, dim)

    @staticmethod
    def element(k, op, index):
        return k.bit(op.x, index, op.dim)
