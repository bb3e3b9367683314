"""Ops that make a tensor out of nothing: constants, counting, random numbers."""

from __future__ import annotations

import torch

from ...ir.core import Op
from ...ir.dialect import Attr, FloatTensor, IntTensor, Operand, Result
from ...ir.types import I64, TensorType
from .base import LABELS, Roles, StepOp, constant_value, step, torch_dtype
from .philox import DISTRIBUTIONS, digits, words_per_element
from .philox_ops import expand_random


class Source(StepOp):
    """An op without tensor operands to differentiate."""

    differentiable = False
    y = Result()

    @staticmethod
    def flops(op: Op) -> int:
        return 0


@step.op
class Constant(Source):
    """One number everywhere. The value keeps full precision: a pointwise op computes with it, not with its rounding."""

    value = Attr("number", "the number, as a double, an integer or a boolean")
    type = Attr("type", "the type of the result")

    @staticmethod
    def infer(value, type):
        return type

    @staticmethod
    def evaluate(op):
        shape, dtype, value = op.type.shape, torch_dtype(op.type.element), op.attributes["value"]
        return lambda device=None: torch.full(shape, value, dtype=dtype, device=device)

    @staticmethod
    def element(k, op, index):
        return k.constant(op.attributes["value"], op.type.element)


@step.op
class Iota(Source):
    """start, start + step, start + 2 step, ... as a vector."""

    start = Attr("number", "first element")
    stride = Attr("number", "difference between neighbours")
    type = Attr("type", "the type of the result, one-dimensional")

    @staticmethod
    def infer(start, stride, type):
        return type

    @staticmethod
    def evaluate(op):
        n, dtype = op.type.shape[0], torch_dtype(op.type.element)
        start, stride = op.start, op.stride
        if op.type.element.kind == "int":
            start, stride = int(start), int(stride)
        # the end lies half a stride beyond the last element, so that rounding never changes the count
        whole = isinstance(start, int) and isinstance(stride, int)
        beyond = (1 if stride > 0 else -1) if whole else stride / 2
        end = start + (n - 1) * stride + beyond
        if n == 0:
            return lambda device=None: torch.empty(0, dtype=dtype, device=device)
        return lambda device=None: torch.arange(start, end, stride, dtype=dtype, device=device)

    @staticmethod
    def element(k, op, index):
        return k.counted(index[0], op.start, op.stride, op.type.element)

    @staticmethod
    def check(op):
        return None if op.type.rank == 1 else "iota makes a vector"


#: what a random op takes: seed, step counter and micro-batch index
RANDOM_KEY = TensorType((3,), I64)


@step.op
class Random(StepOp):
    """Random numbers as a pure function of (seed, step counter, micro-batch, stream): asking twice gives the same.

    `uniform` is on [0, 1), `normal` is standard, `exponential` has rate 1 and is never 0. The bits are those of
    Philox4x32-10 (philox.py) on every device. Nothing is stored: backward asks again, so `cse` leaves an op per phase.
    The key lies on the CPU, where the host reads it, or on the device of the numbers, where a kernel does.
    """

    differentiable = False
    regenerated = True
    takes_device = True
    key = Operand(IntTensor, "seed, step counter and micro-batch index")
    number = Operand(
        IntTensor, "the stream where it is no attribute: in kernels that equal layers share", optional=True
    )
    y = Result(FloatTensor)
    distribution = Attr("str", "which distribution", choices=DISTRIBUTIONS)
    stream = Attr("int", "number of this random op in the program")
    type = Attr("type", "the type of the result")

    @staticmethod
    def infer(key, number, distribution, stream, type):
        return type

    @staticmethod
    def evaluate(op):
        shape, dtype, stream, distribution = op.type.shape, torch_dtype(op.type.element), op.stream, op.distribution

        known = op.number is None or constant_value(op.number) is not None
        stream = stream if op.number is None else constant_value(op.number)

        def run(key, number=None, device=None):
            out = torch.empty(shape, dtype=dtype, device=device)
            torch.ops.wholestep.random_(out, key, distribution, stream if known else int(number))
            return out

        return run

    @staticmethod
    def element(k, op, index):
        return k.random(op, index, digits(torch_dtype(op.type.element)))

    @staticmethod
    def expand(b, op):
        return expand_random(b, op)

    @staticmethod
    def check(op):
        if op.key.type is not RANDOM_KEY:
            return f"the key is a {RANDOM_KEY}"
        if op.type.element.text not in ("f64", "f32", "bf16", "f16"):
            return f"random numbers are real floating-point numbers, not {op.type.element}"
        if not 0 <= op.stream < 1 << 32:
            return "the stream is a number from 0 to 2**32 - 1"
        if op.type.size * words_per_element(torch_dtype(op.type.element)) > 1 << 34:
            return "one stream holds 2**34 words; draw in several parts"
        return None

    @staticmethod
    def roles(op):
        labels, key = LABELS[: op.y.type.rank], LABELS[-1]
        return Roles((key, "")[: len(op.operands)], (labels,), whole=labels + key)
