"""Truth values as bits: eight of them in a byte, along one dimension.

A mask that backward reads takes a sixteenth of the 16-bit tensor that it was computed from. Kernels of our own set and
ask single bits where they make and need them (`loop.store` and `loop.load` with `bits`).
"""

from __future__ import annotations

import torch

from ...ir.core import Op
from ...ir.dialect import Attr, Operand, Result
from ...ir.types import BOOL, ScalarType, TensorType
from .base import LABELS, Roles, StepOp, step

BYTE = 8
UI8 = ScalarType("ui8")


class Bits(StepOp):
    """Common rules: nothing is computed."""

    differentiable = False
    dim = Attr("int", "the dimension along which eight truth values are a byte, the first its lowest bit")

    @staticmethod
    def flops(op: Op) -> int:
        return 0

    @staticmethod
    def roles(op: Op) -> Roles:
        labels = LABELS[: op.x.type.rank]
        return Roles((labels,), (labels,), whole=labels[op.dim])


def places(dim: int, rank: int, device: torch.device) -> torch.Tensor:
    """The numbers 0 to 7 along a dimension that was put behind another one."""
    return torch.arange(BYTE, dtype=torch.uint8, device=device).reshape([-1, *[1] * (rank - dim - 1)])


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
        return "the dimension must be a multiple of eight" if op.x.type.shape[op.dim] % BYTE else None

    @staticmethod
    def evaluate(op):
        dim, rank = op.dim, op.x.type.rank

        def run(x):
            apart = x.unflatten(dim, (-1, BYTE)).to(torch.uint8)
            return (apart << places(dim, rank, x.device)).sum(dim + 1, dtype=torch.uint8)

        return run

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
        return None if fits else "it unpacks bytes along one of their dimensions"

    @staticmethod
    def evaluate(op):
        dim, rank = op.dim, op.x.type.rank

        def run(x):
            apart = x.unsqueeze(dim + 1) >> places(dim, rank, x.device)
            return (apart & 1).to(torch.bool).flatten(dim, dim + 1)

        return run

    @staticmethod
    def element(k, op, index):
        return k.bit(op.x, index, op.dim)
