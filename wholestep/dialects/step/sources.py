"""Ops that make a tensor out of nothing: constants, counting, random numbers."""

from __future__ import annotations

import torch

from ...ir.core import Op
from ...ir.dialect import Attr, IntTensor, Operand, Result
from ...ir.types import I64, TensorType
from .base import Roles, StepOp, step, torch_dtype


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
    def check(op):
        return None if op.type.rank == 1 else "iota makes a vector"


_MIX = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


def mix_seed(seed: int, counter: int, stream: int) -> int:
    """One 64-bit seed from the run's seed, the step's number and the op's stream (splitmix64 rounds)."""
    state = seed & _MASK
    for word in (counter, stream):
        state = (state ^ ((word * _MIX) & _MASK)) + _MIX & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state


@step.op
class Random(StepOp):
    """Random numbers as a pure function of (seed, step counter, stream): asking twice gives the same numbers.

    `uniform` is on [0, 1), `normal` is standard, `exponential` has rate 1. Nothing is stored: backward asks again.
    """

    differentiable = False
    key = Operand(IntTensor, "seed and step counter, a pair of integers")
    y = Result()
    distribution = Attr("str", "which distribution", choices=("uniform", "normal", "exponential"))
    stream = Attr("int", "number of this random op in the program")
    type = Attr("type", "the type of the result")

    @staticmethod
    def infer(key, distribution, stream, type):
        return type

    @staticmethod
    def evaluate(op):
        shape, dtype, stream, distribution = op.type.shape, torch_dtype(op.type.element), op.stream, op.distribution

        def draw(key):
            seed, counter = key.tolist()
            generator = torch.Generator(device=key.device).manual_seed(mix_seed(seed, counter, stream))
            out = torch.empty(shape, dtype=dtype, device=key.device)
            if distribution == "uniform":
                return out.uniform_(generator=generator)
            if distribution == "normal":
                return out.normal_(generator=generator)
            return out.exponential_(generator=generator)

        return draw

    @staticmethod
    def check(op):
        return None if op.key.type is TensorType((2,), I64) else "the key is a tensor<2xi64>"

    @staticmethod
    def roles(op):
        labels = "abcdefgh"[: op.y.type.rank]
        return Roles(("z",), (labels,), whole=labels)
