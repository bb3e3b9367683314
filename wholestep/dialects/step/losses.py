"""Losses over classes: cross entropy and negative log likelihood, with class-index targets.

Logits are [N, C] or [N, C, d1, ...] (or [C] with a 0-d target). Cross entropy saves the log-sum-exp of each position,
not the log-probabilities: backward makes exp(logits - logsumexp) in one pass and no [N, C] tensor is kept.
"""

from __future__ import annotations

import torch

from ...ir.core import Op, Value
from ...ir.dialect import Attr, FloatTensor, IntTensor, Operand, Result
from ...ir.types import TensorType
from .base import LABELS, Roles, StepOp, step, torch_dtype
from .support import add, present, spread, wide

aten = torch.ops.aten
REDUCTIONS = ("none", "mean", "sum")


def class_dim(logits: TensorType) -> int:
    """The dimension that counts classes."""
    return min(1, logits.rank - 1)


def position_shape(logits: TensorType) -> tuple[int, ...]:
    """The shape without the class dimension."""
    dim = class_dim(logits)
    return (*logits.shape[:dim], *logits.shape[dim + 1 :])


class ClassLoss(StepOp):
    """Common rules of losses over classes. The first float operand after dy is named `x` by every op of the family."""

    precision = "high"

    @staticmethod
    def check(op):
        if op.x.type.rank < 1:
            return "the class dimension is missing"
        if op.target.type.shape != position_shape(op.x.type):
            return f"the target must have shape {position_shape(op.x.type)}"
        if op.weight is not None and op.weight.type.shape != (op.x.type.shape[class_dim(op.x.type)],):
            return "the weight must be a [C] vector"
        return None

    @staticmethod
    def flops(op: Op) -> int:
        return 6 * op.x.type.size

    @staticmethod
    def roles(op: Op) -> Roles:
        x = op.x.type
        dim, labels = class_dim(x), LABELS[: x.rank]
        classes, positions = labels[dim], labels[:dim] + labels[dim + 1 :]

        def spec(value: Value) -> str:
            if value is op.weight:
                return classes
            shape = value.type.shape
            return labels if shape == x.shape else positions if shape == position_shape(x) else ""

        # a mean over positions is not a sum of the parts' means: the count must be known
        whole = labels if op.attributes["reduction"] == "mean" else classes
        return Roles(tuple(spec(v) for v in op.operands), tuple(spec(r) for r in op.results), whole=whole)


def expand_coefficients(b, op: Op, dy: Value | None, element) -> tuple[Value, Value | None, Value]:
    """Per position: the weight of its target class (0 where ignored), the share of the loss, and the target made safe.

    The share is dy brought to each position: divided by the total weight for a mean. None without dy.
    """
    x, target = op.x.type, op.target
    kept = b.ne(target, op.ignore_index)
    safe = b.select(kept, target, 0)
    if op.weight is None:
        mine = b.cast(kept, dtype=element)
    else:
        flat = b.reshape_to(safe, (target.type.size,))
        mine = b.reshape_to(b.gather(b.cast_to(op.weight, element), flat, dim=0), target.type.shape)
        mine = b.select(kept, mine, 0.0)
    share = None
    if dy is not None:
        share = b.cast_to(dy, element)
        if op.reduction == "mean":
            share = b.div(share, b.sum(mine, dims=tuple(range(x.rank - 1))))
        share = b.select(kept, b.broadcast_to(share, target.type.shape), 0.0)
    return mine, share, safe


def coefficients(op: Op):
    """The same as `expand_coefficients`, on tensors: f(dy, target, weight, dtype) -> mine, share, safe target."""
    ignore_index, mean = op.ignore_index, op.reduction == "mean"

    def run(dy, target, weight, dtype):
        ignored = target == ignore_index
        safe = target.masked_fill(ignored, 0)
        mine = torch.ones_like(target, dtype=dtype) if weight is None else weight.to(dtype)[safe]
        mine = mine.masked_fill_(ignored, 0)
        share = dy.to(dtype)
        if mean:
            share = share / mine.sum()
        return mine, share.expand(target.shape).masked_fill(ignored, 0), safe

    return run


@step.op
class CrossEntropy(ClassLoss):
    """-log softmax(x)[target], weighted per class, optionally smoothed; `none`, `mean` (weighted) or `sum` of it."""

    x = Operand(FloatTensor, "logits: [N, C, ...]")
    target = Operand(IntTensor, "class indices: [N, ...]")
    weight = Operand(FloatTensor, "weight per class", optional=True)
    loss = Result()
    logsumexp = Result(doc="log(sum(exp(x))) of each position, for backward")
    ignore_index = Attr("int", "positions with this target count for nothing", -100)
    reduction = Attr("str", "how positions are combined", "mean", choices=REDUCTIONS)
    label_smoothing = Attr("float", "share of the target spread over all classes", 0.0)

    @staticmethod
    def infer(x, target, weight, ignore_index, reduction, label_smoothing):
        positions = position_shape(x)
        loss = TensorType(positions if reduction == "none" else (), x.element)
        return loss, TensorType(positions, wide(x.element))

    @staticmethod
    def evaluate(op):
        dim, dtype = class_dim(op.x.type), torch_dtype(op.logsumexp.type.element)
        reduction, ignore_index, smoothing = op.reduction, op.ignore_index, op.label_smoothing
        number, saved = REDUCTIONS.index(reduction), bool(op.logsumexp.uses)

        def run(x, target, weight):
            if x.device.type == "cuda" and x.dim() == 2 and x.dtype == dtype and not smoothing:
                return row_by_row(x, target, weight, reduction, ignore_index)
            logp = aten._log_softmax.default(x, dim, False)
            loss = aten.nll_loss_nd.default(logp, target, weight, number, ignore_index)
            if smoothing:
                spread_loss = smooth_loss(logp, target, weight, dim, ignore_index, reduction)
                loss = (1 - smoothing) * loss + spread_loss * (smoothing / x.shape[dim])
            # the largest log-probability is max(x) - logsumexp(x), exactly: no second pass of exponentials
            lse = (x.amax(dim).to(dtype) - logp.amax(dim).to(dtype)) if saved else None
            return loss, lse

        return spread(op, run)

    @staticmethod
    def derivative(b, op, dloss, dlse=None):
        dx = None
        if dloss is not None:
            options = {k: op.attributes[k] for k in ("ignore_index", "reduction", "label_smoothing")}
            dx = b.cross_entropy_grad(dloss, op.x, op.target, op.logsumexp, op.weight, **options)
        if dlse is not None:
            dim = class_dim(op.x.type)
            p = b.exp(b.sub(b.cast_to(op.x, dlse.type.element), b.unsqueeze(op.logsumexp, dim)))
            dx = add(b, dx, b.cast_to(b.mul(p, b.unsqueeze(dlse, dim)), op.x.type.element))
        return present(op, dx, None, None)

    @staticmethod
    def expand(b, op):
        dim, element = class_dim(op.x.type), wide(op.x.type.element)
        x = b.cast_to(op.x, element)
        lse = b.logsumexp(x, dims=(dim,), keepdim=True)
        logp = b.sub(x, lse)
        mine, _, safe = expand_coefficients(b, op, None, element)
        picked = b.reshape_to(b.gather(logp, b.unsqueeze(safe, dim), dim=dim), op.target.type.shape)
        # where the weight is zero the loss is zero, even if the log-probability is infinite
        loss = b.neg(b.select(b.eq(mine, 0.0), 0.0, b.mul(picked, mine)))
        parts = [loss]
        if op.label_smoothing:
            # the sum of all log-probabilities, by a sum that need not wait for logsumexp
            scaled, count = x, float(x.type.shape[dim])
            if op.weight is not None:
                shape = [1] * x.type.rank
                shape[dim] = x.type.shape[dim]
                weight = b.cast_to(op.weight, element)
                scaled, count = b.mul(x, b.reshape_to(weight, shape)), b.sum(weight, dims=(0,))
            row = b.reshape_to(lse, op.logsumexp.type.shape)
            total = b.sub(b.mul(row, count), b.sum(scaled, dims=(dim,)))
            parts.append(b.select(b.eq(op.target, op.ignore_index), 0.0, total))
        if op.reduction != "none":
            every = tuple(range(op.target.type.rank))
            parts = [b.sum(p, dims=every) for p in parts]
            if op.reduction == "mean":
                total = b.sum(mine, dims=every)
                parts = [b.div(p, total) for p in parts]
        loss = parts[0]
        if op.label_smoothing:
            smoothing = op.label_smoothing
            loss = b.add(b.mul(parts[0], 1 - smoothing), b.mul(parts[1], smoothing / x.type.shape[dim]))
        return b.cast_to(loss, op.loss.type.element), b.reshape_to(lse, op.logsumexp.type.shape)


#: elements of logits that are looked at in one go on a GPU
PIECE = 1 << 25


def row_by_row(x, target, weight, reduction: str, ignore_index: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Loss and log-sum-exp of [rows, classes] a few rows at a time: nothing as large as the logits is made."""
    parts = []
    for piece in x.split(max(1, PIECE // x.shape[1])):
        top = piece.amax(1, keepdim=True)
        top = top.masked_fill(top.abs() == float("inf"), 0.0)
        parts.append((piece - top).exp_().sum(1).log_() + top.squeeze(1))
    lse = torch.cat(parts)
    ignored = target == ignore_index
    safe = target.masked_fill(ignored, 0)
    share = torch.ones_like(lse) if weight is None else weight.to(lse.dtype)[safe]
    share = share.masked_fill(ignored, 0.0)
    picked = x.gather(1, safe.unsqueeze(1)).squeeze(1) - lse
    loss = -(picked * share).masked_fill(share == 0, 0.0)
    if reduction == "sum":
        loss = loss.sum()
    elif reduction == "mean":
        loss = loss.sum() / share.sum()
    return loss, lse


def smooth_loss(logp, target, weight, dim: int, ignore_index: int, reduction: str) -> torch.Tensor:
    """The part of the loss that asks for every class alike, as eager PyTorch computes it."""
    ignored = target == ignore_index
    if weight is None:
        loss = -logp.sum(dim)
    else:
        shape = [1] * logp.dim()
        shape[dim] = -1
        loss = -(logp * weight.view(shape)).sum(dim)
    loss = loss.masked_fill_(ignored, 0.0)
    if reduction == "none":
        return loss
    if reduction == "sum":
        return loss.sum()
    if weight is None:
        return loss.sum() / (~ignored).sum()
    return loss.sum() / weight[target.masked_fill(ignored, 0)].masked_fill(ignored, 0).sum()


def nll_gradient(dy, logp, target, weight, reduction: int, ignore_index: int) -> torch.Tensor:
    """The gradient of nll_loss, by the kernel eager uses for this rank."""
    shape = logp.shape
    if logp.dim() <= 2:
        forward, backward = aten.nll_loss_forward.default, aten.nll_loss_backward.default
    else:
        forward, backward = aten.nll_loss2d_forward.default, aten.nll_loss2d_backward.default
        if logp.dim() != 4:
            logp, target = logp.reshape(*shape[:2], 1, -1), target.reshape(shape[0], 1, -1)
            dy = dy.reshape(target.shape) if reduction == 0 else dy
    total = forward(logp, target, weight, reduction, ignore_index)[1]
    return backward(dy, logp, target, weight, reduction, ignore_index, total).reshape(shape)


@step.op
class CrossEntropyGrad(ClassLoss):
    """dx of cross_entropy: (softmax(x) - target distribution) times the weight and share of each position."""

    dy = Operand(FloatTensor, "gradient of the loss")
    x = Operand(FloatTensor, "logits: [N, C, ...]")
    target = Operand(IntTensor, "class indices: [N, ...]")
    logsumexp = Operand(FloatTensor, "as the forward op made it")
    weight = Operand(FloatTensor, "weight per class", optional=True)
    dx = Result()
    ignore_index = Attr("int", "positions with this target count for nothing", -100)
    reduction = Attr("str", "how positions were combined", "mean", choices=REDUCTIONS)
    label_smoothing = Attr("float", "share of the target spread over all classes", 0.0)

    @staticmethod
    def infer(dy, x, target, logsumexp, weight, ignore_index, reduction, label_smoothing):
        return x

    @staticmethod
    def evaluate(op):
        dim, smoothing, dtype = class_dim(op.x.type), op.label_smoothing, torch_dtype(op.logsumexp.type.element)
        classes, shares = op.x.type.shape[dim], coefficients(op)
        reduction, ignore_index = REDUCTIONS.index(op.reduction), op.ignore_index

        def run(dy, x, target, logsumexp, weight):
            if not smoothing and x.device.type != "cuda":  # eager's own kernels: its gradient to the last bit
                logp = aten._log_softmax.default(x, dim, False)
                return aten._log_softmax_backward_data.default(
                    nll_gradient(dy, logp, target, weight, reduction, ignore_index), logp, dim, x.dtype
                )
            mine, share, safe = shares(dy, target, weight, dtype)
            at_target = mine * share * (1 - smoothing) if smoothing else mine * share
            total = at_target
            if smoothing:
                each = share * (smoothing / classes)
                total = at_target + each * (classes if weight is None else weight.to(dtype).sum())
            dx = (x - logsumexp.unsqueeze(dim)).exp_().mul_(total.unsqueeze(dim))
            dx.scatter_add_(dim, safe.unsqueeze(dim), -at_target.unsqueeze(dim))
            if smoothing:
                if weight is None:
                    dx.sub_(each.unsqueeze(dim))
                else:
                    shape = [1] * x.dim()
                    shape[dim] = -1
                    dx.sub_(each.unsqueeze(dim) * weight.to(dtype).view(shape))
            return dx.to(x.dtype)

        return spread(op, run)

    @staticmethod
    def expand(b, op):
        dim, element, smoothing = class_dim(op.x.type), wide(op.x.type.element), op.label_smoothing
        classes = op.x.type.shape[dim]
        x = b.cast_to(op.x, element)
        mine, share, safe = expand_coefficients(b, op, op.dy, element)
        at_target = b.mul(mine, share)
        total = at_target = b.mul(at_target, 1 - smoothing) if smoothing else at_target
        shape = [1] * x.type.rank
        shape[dim] = classes
        numbers = b.iota(start=0, stride=1, type=TensorType((classes,), safe.type.element))
        wished = b.eq(b.unsqueeze(safe, dim), b.reshape_to(numbers, shape))
        away = b.select(wished, b.unsqueeze(at_target, dim), 0.0)
        if smoothing:
            each = b.mul(share, smoothing / classes)
            if op.weight is None:
                total = b.add(total, b.mul(each, float(classes)))
                away = b.add(away, b.unsqueeze(each, dim))
            else:
                weight = b.cast_to(op.weight, element)
                total = b.add(total, b.mul(each, b.sum(weight, dims=(0,))))
                away = b.add(away, b.mul(b.unsqueeze(each, dim), b.reshape_to(weight, shape)))
        p = b.exp(b.sub(x, b.unsqueeze(op.logsumexp, dim)))
        return b.cast_to(b.sub(b.mul(p, b.unsqueeze(total, dim)), away), op.dx.type.element)


@step.op
class Accumulate(StepOp):
    """total + part, for sums over chunks. It is never one kernel with the next: the parts would all wait for it."""

    total = Operand(FloatTensor, "the sum so far, in the element type of sums")
    part = Operand(FloatTensor, "of the same shape, in a type that is no wider")
    y = Result()

    @staticmethod
    def infer(total, part):
        return total

    @staticmethod
    def check(op):
        total, part = op.total.type, op.part.type
        if total.shape != part.shape:
            return "total and part differ in shape"
        return None if total.element in (part.element, wide(part.element)) else "the total must be as wide as the part"

    @staticmethod
    def evaluate(op):
        return torch.add

    @staticmethod
    def derivative(b, op, dy):
        return dy, b.cast_to(dy, op.part.type.element)

    @staticmethod
    def roles(op: Op) -> Roles:
        labels = LABELS[: op.total.type.rank]
        return Roles((labels, labels), (labels,))


@step.op
class NllLoss(ClassLoss):
    """-x[target], weighted per class; `none`, `mean` (weighted) or `sum` of it. x holds log-probabilities."""

    x = Operand(FloatTensor, "log-probabilities: [N, C, ...]")
    target = Operand(IntTensor, "class indices: [N, ...]")
    weight = Operand(FloatTensor, "weight per class", optional=True)
    loss = Result()
    ignore_index = Attr("int", "positions with this target count for nothing", -100)
    reduction = Attr("str", "how positions are combined", "mean", choices=REDUCTIONS)

    @staticmethod
    def infer(x, target, weight, ignore_index, reduction):
        return TensorType(position_shape(x) if reduction == "none" else (), x.element)

    @staticmethod
    def evaluate(op):
        number, ignore_index = REDUCTIONS.index(op.reduction), op.ignore_index
        return spread(op, lambda x, target, weight: aten.nll_loss_nd.default(x, target, weight, number, ignore_index))

    @staticmethod
    def derivative(b, op, dloss):
        options = {k: op.attributes[k] for k in ("ignore_index", "reduction")}
        dx = b.nll_loss_grad(dloss, op.target, op.weight, classes=op.x.type.shape[class_dim(op.x.type)], **options)
        return present(op, dx, None, None)

    @staticmethod
    def expand(b, op):
        dim, element = class_dim(op.x.type), wide(op.x.type.element)
        mine, _, safe = expand_coefficients(b, op, None, element)
        picked = b.gather(b.cast_to(op.x, element), b.unsqueeze(safe, dim), dim=dim)
        picked = b.reshape_to(picked, op.target.type.shape)
        loss = b.neg(b.select(b.eq(mine, 0.0), 0.0, b.mul(picked, mine)))
        every = tuple(range(op.target.type.rank))
        if op.reduction != "none":
            loss = b.sum(loss, dims=every)
        if op.reduction == "mean":
            loss = b.div(loss, b.sum(mine, dims=every))
        return b.cast_to(loss, op.loss.type.element)

    @staticmethod
    def flops(op):
        return 2 * op.target.type.size


@step.op
class NllLossGrad(StepOp):
    """dx of nll_loss: minus the weight and share of each position, at its target class."""

    precision = "high"
    dy = Operand(FloatTensor, "gradient of the loss")
    target = Operand(IntTensor, "class indices: [N, ...]")
    weight = Operand(FloatTensor, "weight per class", optional=True)
    dx = Result()
    classes = Attr("int", "number of classes")
    ignore_index = Attr("int", "positions with this target count for nothing", -100)
    reduction = Attr("str", "how positions were combined", "mean", choices=REDUCTIONS)

    @staticmethod
    def infer(dy, target, weight, classes, ignore_index, reduction):
        shape = (*target.shape[:1], classes, *target.shape[1:]) if target.shape else (classes,)
        return TensorType(shape, dy.element)

    @staticmethod
    def evaluate(op):
        shape, dim, dtype = op.dx.type.shape, class_dim(op.dx.type), torch_dtype(wide(op.dx.type.element))
        shares = coefficients(op)

        def run(dy, target, weight):
            mine, share, safe = shares(dy, target, weight, dtype)
            at_target = -(mine * share).to(dy.dtype)
            return dy.new_zeros(shape).scatter_(dim, safe.unsqueeze(dim), at_target.unsqueeze(dim))

        return spread(op, run)

    @staticmethod
    def flops(op):
        return 2 * op.target.type.size
