"""Softmax and log-softmax along one dimension, with their gradients."""

from __future__ import annotations

import torch

from ...ir.core import Op
from ...ir.dialect import Attr, FloatTensor, Operand, Result
from .base import LABELS, Roles, StepOp, step, torch_dtype
from .support import widen

aten = torch.ops.aten


class AlongDim(StepOp):
    """An op whose result has the shape of its first operand and which looks along one dimension."""

    precision = "high"
    dim = Attr("int", "dimension, counted from the front")

    @staticmethod
    def check(op):
        return None if 0 <= op.dim < max(1, op.operands[0].type.rank) else "dim is out of range"

    @staticmethod
    def flops(op: Op) -> int:
        return 8 * op.operands[0].type.size

    @staticmethod
    def roles(op: Op) -> Roles:
        labels = LABELS[: op.operands[0].type.rank]
        return Roles(tuple(labels for _ in op.operands), (labels,), whole=labels[op.dim : op.dim + 1])


class SoftmaxLike(AlongDim):
    """y = f(x) along one dimension."""

    x = Operand(FloatTensor)
    y = Result()

    @staticmethod
    def infer(x, dim):
        return x


class SoftmaxLikeGrad(AlongDim):
    """dx from dy and the op's own result y."""

    dy = Operand(FloatTensor)
    y = Operand(FloatTensor, "the result of the forward op")
    dx = Result()

    @staticmethod
    def infer(dy, y, dim):
        return y

    @staticmethod
    def flops(op: Op) -> int:
        return 4 * op.y.type.size


def _dims(op):
    return (op.dim,) if op.operands[0].type.rank else ()


@step.op
class Softmax(SoftmaxLike):
    """exp(x) / sum(exp(x)) along one dimension."""

    widens = "for low"

    @staticmethod
    def evaluate(op):
        dim = op.dim
        return lambda x: aten._softmax.default(x, dim, False)

    @staticmethod
    def derivative(b, op, dy):
        return [b.softmax_grad(dy, op.y, dim=op.dim)]

    @staticmethod
    def expand(b, op):
        (x,) = widen(b, op.x)
        power = b.exp(b.sub(x, b.amax(x, dims=_dims(op), keepdim=True)))
        return b.cast_to(b.div(power, b.sum(power, dims=_dims(op), keepdim=True)), op.y.type.element)


@step.op
class SoftmaxGrad(SoftmaxLikeGrad):
    """y * (dy - sum(dy * y)): the gradient of softmax."""

    @staticmethod
    def evaluate(op):
        dim, dtype = op.dim, torch_dtype(op.dx.type.element)
        return lambda dy, y: aten._softmax_backward_data.default(dy, y, dim, dtype)

    @staticmethod
    def expand(b, op):
        dy, y = widen(b, op.dy, op.y)
        weighted = b.mul(dy, y)
        dx = b.sub(weighted, b.mul(y, b.sum(weighted, dims=_dims(op), keepdim=True)))
        return b.cast_to(dx, op.dx.type.element)


@step.op
class LogSoftmax(SoftmaxLike):
    """x - log(sum(exp(x))) along one dimension."""

    @staticmethod
    def evaluate(op):
        dim = op.dim
        return lambda x: aten._log_softmax.default(x, dim, False)

    @staticmethod
    def derivative(b, op, dy):
        return [b.log_softmax_grad(dy, op.y, dim=op.dim)]

    @staticmethod
    def expand(b, op):
        (x,) = widen(b, op.x)
        shifted = b.sub(x, b.amax(x, dims=_dims(op), keepdim=True))
        y = b.sub(shifted, b.log(b.sum(b.exp(shifted), dims=_dims(op), keepdim=True)))
        return b.cast_to(y, op.y.type.element)


@step.op
class LogSoftmaxGrad(SoftmaxLikeGrad):
    """dy - exp(y) * sum(dy): the gradient of log_softmax."""

    @staticmethod
    def evaluate(op):
        dim, dtype = op.dim, torch_dtype(op.dx.type.element)
        return lambda dy, y: aten._log_softmax_backward_data.default(dy, y, dim, dtype)

    @staticmethod
    def expand(b, op):
        dy, y = widen(b, op.dy, op.y)
        dx = b.sub(dy, b.mul(b.exp(y), b.sum(dy, dims=_dims(op), keepdim=True)))
        return b.cast_to(dx, op.dx.type.element)
