"""`step.layout`: the same value in another order of memory, such as channels-last for images.

Values do not change and types say nothing of memory: kernels follow the layout of what they read, so it is only said
where it changes. Where the operand lies so already the op is a view and costs nothing.
"""

from __future__ import annotations

import torch

from ...ir.core import Op
from ...ir.dialect import Attr, Operand, Result
from .base import LABELS, Roles, StepOp, step, torch_dtype


@step.op
class Layout(StepOp):
    """x with its dimensions in a given order of memory, without gaps.

    The copy also brings x to the result's element type, so that a cast to a wider type right before it costs nothing.
    """

    moves = True
    views = True
    converts = True
    x = Operand()
    y = Result()
    order = Attr("ints", "a permutation: dimensions from the farthest apart in memory to neighbours")

    @staticmethod
    def infer(x, order):
        return x

    @staticmethod
    def check(op: Op) -> str | None:
        return None if sorted(op.order) == list(range(op.x.type.rank)) else "order is not a permutation"

    @staticmethod
    def flops(op: Op) -> int:
        return 0

    @staticmethod
    def evaluate(op: Op):
        order, dtype = op.order, torch_dtype(op.y.type.element)
        back, rows = inverse(order), torch.contiguous_format
        return lambda x: x.permute(order).to(dtype, copy=True, memory_format=rows).permute(back)

    @staticmethod
    def element(k, op, index):
        return k.at(op.x, index)

    @staticmethod
    def derivative(b, op, dy):
        return [b.layout(dy, order=op.order)]

    @staticmethod
    def roles(op: Op) -> Roles:
        labels = LABELS[: op.x.type.rank]
        return Roles((labels,), (labels,))


def inverse(order: tuple[int, ...]) -> tuple[int, ...]:
    """The permutation that undoes one."""
    return tuple(sorted(range(len(order)), key=order.__getitem__))
