"""Layer, group, batch and root-mean-square normalisation, with the ops their gradients need.

Statistics (mean, rstd) are results, so that backward reads them instead of computing them again; they are float32 for
16-bit inputs. Running statistics are values too: nothing is updated in place.
"""

from __future__ import annotations

import math

import torch

from ...ir.core import Op, Value
from ...ir.dialect import Attr, FloatTensor, Operand, Result
from ...ir.types import TensorType
from .base import LABELS, Roles, StepOp, step, torch_dtype
from .support import add, present, spread, statistic, used, widen

aten = torch.ops.aten


def statistics_gradient(b, x: Value, mean: Value | None, rstd: Value, dims, dmean: Value | None, drstd: Value | None):
    """What flows to x from gradients of its mean and rstd; None where neither has one. All in kept-dimension shapes."""
    count = float(math.prod(x.type.shape[d] for d in dims))
    wx, out = b.cast_to(x, rstd.type.element), None
    if dmean is not None:
        out = b.broadcast_to(b.div(dmean, count), x.type.shape)
    if drstd is not None:
        slope = b.mul(b.mul(drstd, b.pow(rstd, 3.0)), -1.0 / count)
        out = add(b, out, b.mul(slope, wx if mean is None else b.sub(wx, mean)))
    return None if out is None else b.cast_to(out, x.type.element)


# ---- layer norm, rms norm --------------------------------------------------------------------------------------------


def _trailing(x, trailing: int) -> tuple[int, ...]:
    """The normalised dimensions."""
    return tuple(range(len(x.shape) - trailing, len(x.shape)))


def _row_shape(x, trailing: int) -> tuple[int, ...]:
    lead = len(x.shape) - trailing
    return (*x.shape[:lead], *(1,) * trailing)


class RowNorm(StepOp):
    """A normalisation over trailing dimensions: each row on its own, weight and bias shared by all rows.

    CUDA kernels take x and its weight in one element type only, so x is cast where the weight is f32.
    """

    precision = "high"

    @staticmethod
    def check(op):
        x = op.x.type
        if not 1 <= op.trailing <= x.rank:
            return "trailing must be between 1 and the rank of x"
        for name in ("weight", "bias"):
            value = getattr(op, name, None)
            if value is not None and value.type.shape != x.shape[-op.trailing :]:
                return f"the {name} must have shape {x.shape[-op.trailing :]}"
        return None

    @staticmethod
    def flops(op: Op) -> int:
        return 8 * op.x.type.size

    @staticmethod
    def roles(op: Op) -> Roles:
        x = op.x.type
        labels = LABELS[: x.rank]
        lead, tail = labels[: x.rank - op.trailing], labels[x.rank - op.trailing :]
        row = lead + " " * op.trailing

        def spec(type: TensorType) -> str:
            return labels if type.shape == x.shape else tail if type.rank < x.rank else row

        return Roles(tuple(spec(v.type) for v in op.operands), tuple(spec(r.type) for r in op.results), whole=tail)


@step.op
class LayerNorm(RowNorm):
    """(x - mean) * rstd * weight + bias, with mean and rstd = 1 / sqrt(variance + eps) of each row."""

    x = Operand(FloatTensor)
    weight = Operand(FloatTensor, "scale, of the normalised shape", optional=True)
    bias = Operand(FloatTensor, "shift, of the normalised shape", optional=True)
    y = Result()
    mean = Result(doc="mean of each row")
    rstd = Result(doc="1 / standard deviation of each row")
    trailing = Attr("int", "how many trailing dimensions are normalised", 1)
    eps = Attr("float", "added to the variance", 1e-5)

    @staticmethod
    def infer(x, weight, bias, trailing, eps):
        row = statistic(x, _row_shape(x, trailing))
        return x, row, row

    @staticmethod
    def evaluate(op):
        shape, eps, dtype = op.x.type.shape[-op.trailing :], op.eps, torch_dtype(op.mean.type.element)

        def run(x, weight, bias):
            y, mean, rstd = aten.native_layer_norm.default(x, shape, weight, bias, eps)
            return y, mean.to(dtype), rstd.to(dtype)

        return spread(op, run)

    @staticmethod
    def derivative(b, op, dy, dmean=None, drstd=None):
        dims = _trailing(op.x.type, op.trailing)
        dx = statistics_gradient(b, op.x, op.mean, op.rstd, dims, dmean, drstd)
        dw = db = None
        if dy is not None:
            direct, dw, db = b.layer_norm_grad(dy, op.x, op.mean, op.rstd, op.weight, trailing=op.trailing)
            dx = add(b, direct, dx)
        return present(op, dx, dw, db)

    @staticmethod
    def expand(b, op):
        dims = _trailing(op.x.type, op.trailing)
        (x,) = widen(b, op.x)
        mean = b.mean(x, dims=dims, keepdim=True)
        variance = b.variance(x, dims=dims, keepdim=True, correction=0)
        rstd = b.rsqrt(b.add(variance, op.eps))
        return LayerNorm.normalised(b, op, mean, rstd), mean, rstd

    @staticmethod
    def normalised(b, op, mean, rstd):
        """y from statistics that are known."""
        x, weight, bias = widen(b, op.x, op.weight, op.bias)
        y = b.mul(b.sub(x, mean), rstd)
        y = y if weight is None else b.mul(y, weight)
        y = y if bias is None else b.add(y, bias)
        return b.cast_to(y, op.y.type.element)


@step.op
class LayerNormGrad(RowNorm):
    """The gradients of layer_norm. dw and db are there without a weight too; nobody reads them then."""

    dy = Operand(FloatTensor)
    x = Operand(FloatTensor)
    mean = Operand(FloatTensor)
    rstd = Operand(FloatTensor)
    weight = Operand(FloatTensor, optional=True)
    dx = Result()
    dw = Result()
    db = Result()
    trailing = Attr("int", "how many trailing dimensions are normalised", 1)

    @staticmethod
    def infer(dy, x, mean, rstd, weight, trailing):
        dw = x.with_shape(x.shape[len(x.shape) - trailing :]) if weight is None else weight
        return x, dw, dw

    @staticmethod
    def evaluate(op):
        shape, mask = op.x.type.shape[-op.trailing :], used(op)

        def run(dy, x, mean, rstd, weight):
            if x.dtype.itemsize < 4 and not x.is_cuda and (weight is None or weight.dtype is x.dtype):
                mean, rstd = mean.to(x.dtype), rstd.to(x.dtype)  # as the CPU kernel had them
            if weight is None and (mask[1] or mask[2]):
                weight = x.new_ones(shape)
            mean, rstd, weight = packed(mean), packed(rstd), packed(weight)
            return aten.native_layer_norm_backward.default(dy, x, shape, mean, rstd, weight, weight, mask)

        return spread(op, run)

    @staticmethod
    def expand(b, op):
        dims = _trailing(op.x.type, op.trailing)
        rows = tuple(range(op.x.type.rank - op.trailing))
        dy, x, weight = widen(b, op.dy, op.x, op.weight)
        normal = b.mul(b.sub(x, op.mean), op.rstd)
        scaled = dy if weight is None else b.mul(dy, weight)
        centre = b.mean(scaled, dims=dims, keepdim=True)
        slope = b.mean(b.mul(scaled, normal), dims=dims, keepdim=True)
        dx = b.mul(b.sub(b.sub(scaled, centre), b.mul(normal, slope)), op.rstd)
        dw = b.sum(b.mul(dy, normal), dims=rows)
        out = (dx, dw, b.sum(dy, dims=rows))
        return tuple(b.cast_to(v, r.type.element) for v, r in zip(out, op.results, strict=True))

    @staticmethod
    def flops(op):
        return 14 * op.x.type.size


@step.op
class RmsNorm(RowNorm):
    """x * rstd * weight, with rstd = 1 / sqrt(mean(x^2) + eps) of each row."""

    x = Operand(FloatTensor)
    weight = Operand(FloatTensor, "scale, of the normalised shape", optional=True)
    y = Result()
    rstd = Result(doc="1 / root mean square of each row")
    trailing = Attr("int", "how many trailing dimensions are normalised", 1)
    eps = Attr("float", "added to the mean square", 1e-6)

    @staticmethod
    def infer(x, weight, trailing, eps):
        return x, statistic(x, _row_shape(x, trailing))

    @staticmethod
    def evaluate(op):
        shape, eps = op.x.type.shape[-op.trailing :], op.eps
        return spread(op, lambda x, weight: aten._fused_rms_norm.default(x, shape, weight, eps))

    @staticmethod
    def derivative(b, op, dy, drstd=None):
        dx = statistics_gradient(b, op.x, None, op.rstd, _trailing(op.x.type, op.trailing), None, drstd)
        dw = None
        if dy is not None:
            direct, dw = b.rms_norm_grad(dy, op.x, op.rstd, op.weight, trailing=op.trailing)
            dx = add(b, direct, dx)
        return present(op, dx, dw)

    @staticmethod
    def expand(b, op):
        dims = _trailing(op.x.type, op.trailing)
        (x,) = widen(b, op.x)
        rstd = b.rsqrt(b.add(b.mean(b.mul(x, x), dims=dims, keepdim=True), op.eps))
        return RmsNorm.normalised(b, op, rstd), rstd

    @staticmethod
    def normalised(b, op, rstd):
        """y from statistics that are known."""
        x, weight = widen(b, op.x, op.weight)
        y = b.mul(x, rstd)
        y = y if weight is None else b.mul(y, weight)
        return b.cast_to(y, op.y.type.element)


@step.op
class RmsNormGrad(RowNorm):
    """The gradients of rms_norm. dw is there without a weight too; nobody reads it then."""

    dy = Operand(FloatTensor)
    x = Operand(FloatTensor)
    rstd = Operand(FloatTensor)
    weight = Operand(FloatTensor, optional=True)
    dx = Result()
    dw = Result()
    trailing = Attr("int", "how many trailing dimensions are normalised", 1)

    @staticmethod
    def infer(dy, x, rstd, weight, trailing):
        return x, x.with_shape(x.shape[len(x.shape) - trailing :]) if weight is None else weight

    @staticmethod
    def evaluate(op):
        shape, mask = op.x.type.shape[-op.trailing :], used(op)
        dims, rows = _trailing(op.x.type, op.trailing), tuple(range(op.x.type.rank - op.trailing))
        kept, dw_dtype = torch_dtype(op.rstd.type.element), torch_dtype(op.dw.type.element)
        count = math.prod(shape)

        def run(dy, x, rstd, weight):
            if x.is_cuda and weight is not None:
                return aten._fused_rms_norm_backward.default(dy, x, shape, packed(rstd), packed(weight), mask)
            # on CPU eager differentiates the formula; the same steps in the same order
            wide_dy, wide_x = dy.to(kept), x.to(kept)
            dx = dw = None
            if mask[1]:
                dw = wide_dy * (wide_x * rstd)
                dw = (dw.sum(rows) if rows else dw).to(dw_dtype)
            if mask[0]:
                scaled = wide_dy if weight is None else wide_dy * weight.to(kept)
                drstd = (scaled * wide_x).sum(dims, keepdim=True)
                square = -0.5 * drstd * rstd.pow(3) / count
                dx = (wide_x * 2).mul_(square).add_(scaled * rstd).to(x.dtype)
            return dx, dw

        return spread(op, run)

    @staticmethod
    def expand(b, op):
        dims = _trailing(op.x.type, op.trailing)
        dy, x, weight = widen(b, op.dy, op.x, op.weight)
        normal = b.mul(x, op.rstd)
        scaled = dy if weight is None else b.mul(dy, weight)
        slope = b.mean(b.mul(scaled, normal), dims=dims, keepdim=True)
        dx = b.mul(b.sub(scaled, b.mul(normal, slope)), op.rstd)
        dw = b.sum(b.mul(dy, normal), dims=tuple(range(op.x.type.rank - op.trailing)))
        return b.cast_to(dx, op.dx.type.element), b.cast_to(dw, op.dw.type.element)

    @staticmethod
    def flops(op):
        return 10 * op.x.type.size


# ---- group norm ------------------------------------------------------------------------------------------------------


class GroupNormLike(StepOp):
    """Common rules of group_norm and its gradient: x is [N, C, ...], statistics are [N, groups]."""

    precision = "high"

    @staticmethod
    def check(op):
        if op.x.type.rank < 2:
            return "x must have at least the dimensions N and C"
        channels = op.x.type.shape[1]
        if op.groups < 1 or channels % op.groups:
            return f"{channels} channels do not divide into {op.groups} groups"
        return None if op.weight is None or op.weight.type.shape == (channels,) else "the weight must be a [C] vector"

    @staticmethod
    def flops(op: Op) -> int:
        return 8 * op.x.type.size

    @staticmethod
    def roles(op: Op) -> Roles:
        x = op.x.type
        labels = LABELS[: x.rank]

        def spec(type: TensorType) -> str:
            return labels if type is x else "aZ" if type.rank == 2 else "b"

        return Roles(
            tuple(spec(v.type) for v in op.operands), tuple(spec(r.type) for r in op.results), whole=labels[1:] + "Z"
        )


def _group_sizes(op) -> tuple[int, int, int, int]:
    shape = op.x.type.shape
    return shape[0], shape[1], math.prod(shape[2:]), op.groups


def _group_rows(op) -> tuple[int, int, int]:
    """x with a row per group."""
    n, c, inner, groups = _group_sizes(op)
    return n, groups, c // groups * inner


@step.op
class GroupNorm(GroupNormLike):
    """Each sample's channels in `groups` groups, each normalised on its own, then weight * x + bias per channel."""

    x = Operand(FloatTensor)
    weight = Operand(FloatTensor, "scale per channel", optional=True)
    bias = Operand(FloatTensor, "shift per channel", optional=True)
    y = Result()
    mean = Result(doc="mean per sample and group")
    rstd = Result(doc="1 / standard deviation per sample and group")
    groups = Attr("int", "number of groups")
    eps = Attr("float", "added to the variance", 1e-5)

    @staticmethod
    def infer(x, weight, bias, groups, eps):
        row = statistic(x, (x.shape[0], groups))
        return x, row, row

    @staticmethod
    def evaluate(op):
        sizes, eps, dtype = _group_sizes(op), op.eps, torch_dtype(op.mean.type.element)

        def run(x, weight, bias):
            weight, bias = packed(weight), packed(bias)
            y, mean, rstd = aten.native_group_norm.default(dense(x), weight, bias, *sizes, eps)
            return y, mean.to(dtype), rstd.to(dtype)

        return spread(op, run)

    @staticmethod
    def derivative(b, op, dy, dmean=None, drstd=None):
        dx = dw = db = None
        if dmean is not None or drstd is not None:
            rows = b.reshape(op.x, shape=_group_rows(op))
            incoming = [None if v is None else b.unsqueeze(v, -1) for v in (dmean, drstd)]
            kept = b.unsqueeze(op.mean, -1), b.unsqueeze(op.rstd, -1)
            dx = statistics_gradient(b, rows, *kept, (2,), *incoming)
            dx = b.reshape_to(dx, op.x.type.shape)
        if dy is not None:
            direct, dw, db = b.group_norm_grad(dy, op.x, op.mean, op.rstd, op.weight, groups=op.groups)
            dx = add(b, direct, dx)
        return present(op, dx, dw, db)

    @staticmethod
    def expand(b, op):
        (x,) = widen(b, op.x)
        rows = b.reshape(x, shape=_group_rows(op))
        mean = b.mean(rows, dims=(2,))
        rstd = b.rsqrt(b.add(b.variance(rows, dims=(2,), correction=0), op.eps))
        return GroupNorm.normalised(b, op, mean, rstd), mean, rstd

    @staticmethod
    def normalised(b, op, mean, rstd):
        """y from statistics that are known."""
        x, weight, bias = widen(b, op.x, op.weight, op.bias)
        rank, rows = x.type.rank, b.reshape(x, shape=_group_rows(op))
        y = b.mul(b.sub(rows, b.unsqueeze(mean, -1)), b.unsqueeze(rstd, -1))
        y = b.reshape_to(y, x.type.shape)
        y = y if weight is None else b.mul(y, per_channel(b, weight, rank))
        y = y if bias is None else b.add(y, per_channel(b, bias, rank))
        return b.cast_to(y, op.y.type.element)


@step.op
class GroupNormGrad(GroupNormLike):
    """The gradients of group_norm. dw and db are there without a weight too; nobody reads them then."""

    dy = Operand(FloatTensor)
    x = Operand(FloatTensor)
    mean = Operand(FloatTensor)
    rstd = Operand(FloatTensor)
    weight = Operand(FloatTensor, optional=True)
    dx = Result()
    dw = Result()
    db = Result()
    groups = Attr("int", "number of groups")

    @staticmethod
    def infer(dy, x, mean, rstd, weight, groups):
        dw = x.with_shape((x.shape[1],)) if weight is None else weight
        return x, dw, dw

    @staticmethod
    def evaluate(op):
        sizes, mask = _group_sizes(op), used(op)

        def run(dy, x, mean, rstd, weight):
            if x.dtype.itemsize < 4 and not x.is_cuda and (weight is None or weight.dtype is x.dtype):
                mean, rstd = mean.to(x.dtype), rstd.to(x.dtype)  # as the CPU kernel had them
            mean, rstd, weight = packed(mean), packed(rstd), packed(weight)
            x = dense(x)
            dy = dy.contiguous(memory_format=torch.contiguous_format if x.is_contiguous() else CHANNELS_LAST[x.dim()])
            return aten.native_group_norm_backward.default(dy, x, mean, rstd, weight, *sizes, mask)

        return spread(op, run)

    @staticmethod
    def expand(b, op):
        rank, rows = op.x.type.rank, _group_rows(op)
        dy, x, weight = widen(b, op.dy, op.x, op.weight)
        mean, rstd = b.unsqueeze(op.mean, -1), b.unsqueeze(op.rstd, -1)
        normal = b.mul(b.sub(b.reshape(x, shape=rows), mean), rstd)
        scaled = b.reshape(dy if weight is None else b.mul(dy, per_channel(b, weight, rank)), shape=rows)
        centre = b.mean(scaled, dims=(2,), keepdim=True)
        slope = b.mean(b.mul(scaled, normal), dims=(2,), keepdim=True)
        dx = b.reshape_to(b.mul(b.sub(b.sub(scaled, centre), b.mul(normal, slope)), rstd), x.type.shape)
        others = tuple(i for i in range(rank) if i != 1)
        dw = b.sum(b.mul(dy, b.reshape_to(normal, x.type.shape)), dims=others)
        out = (dx, dw, b.sum(dy, dims=others))
        return tuple(b.cast_to(v, r.type.element) for v, r in zip(out, op.results, strict=True))

    @staticmethod
    def flops(op):
        return 14 * op.x.type.size


#: by rank
CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def packed(x: torch.Tensor | None) -> torch.Tensor | None:
    """x row by row in memory: the kernels of norms read weights and statistics as if they always lay so."""
    return None if x is None else x.contiguous()


def dense(x: torch.Tensor) -> torch.Tensor:
    """x as the group norm kernels take it: contiguous, in either memory format, which a gradient must then have too."""
    last = CHANNELS_LAST.get(x.dim())
    return x if last is not None and x.is_contiguous(memory_format=last) else x.contiguous()


def per_channel(b, value: Value, rank: int) -> Value:
    """A [C] vector shaped to broadcast against [N, C, ...]."""
    return b.reshape_to(value, (value.type.shape[0], *(1,) * (rank - 2)))


# ---- batch norm ------------------------------------------------------------------------------------------------------


class BatchNormLike(StepOp):
    """Common rules of batch_norm and its gradient: x is [N, C, ...], statistics are [C]."""

    precision = "high"
    widens = "always"
    vectors = ("weight", "bias", "running_mean", "running_var")

    @staticmethod
    def check(op):
        if op.x.type.rank < 2:
            return "x must have at least the dimensions N and C"
        channels = (op.x.type.shape[1],)
        wrong = [v for v in op.operands if v.type.rank == 1 and v.type.shape != channels]
        return "weight, bias and statistics must be [C] vectors" if wrong else None

    @staticmethod
    def flops(op: Op) -> int:
        return 8 * op.x.type.size

    @staticmethod
    def roles(op: Op) -> Roles:
        labels = LABELS[: op.x.type.rank]

        def spec(type: TensorType) -> str:
            return "b" if type.rank == 1 else labels

        whole = labels.replace("b", "") if op.attributes.get("training", True) else ""
        return Roles(tuple(spec(v.type) for v in op.operands), tuple(spec(r.type) for r in op.results), whole=whole)


def _batch_dims(op) -> tuple[int, ...]:
    return tuple(i for i in range(op.x.type.rank) if i != 1)


@step.op
class BatchNorm(BatchNormLike):
    """(x - mean) * rstd * weight + bias per channel; the statistics are the batch's (training) or the running ones.

    In training with running statistics the two results `running` are their new values. Otherwise `running` is empty.
    """

    x = Operand(FloatTensor)
    weight = Operand(FloatTensor, "scale per channel", optional=True)
    bias = Operand(FloatTensor, "shift per channel", optional=True)
    running_mean = Operand(FloatTensor, optional=True)
    running_var = Operand(FloatTensor, optional=True)
    y = Result()
    mean = Result(doc="the mean that was subtracted")
    rstd = Result(doc="1 / sqrt(variance + eps) that was multiplied with")
    running = Result(doc="new running mean and new running variance", variadic=True)
    training = Attr("bool", "whether the batch's own statistics are used", True)
    momentum = Attr("float", "weight of the batch in the running statistics", 0.1)
    eps = Attr("float", "added to the variance", 1e-5)

    @staticmethod
    def infer(x, weight, bias, running_mean, running_var, training, momentum, eps):
        row = statistic(x, (x.shape[1],))
        running = [t for t in (running_mean, running_var) if t is not None] if training else []
        return [x, row, row, *running]

    @staticmethod
    def check(op):
        if (op.running_mean is None) != (op.running_var is None):
            return "running_mean and running_var come together"
        if not op.training and op.running_mean is None:
            return "without running statistics batch_norm can only use the batch's own: training must be true"
        if op.training and op.x.type.size == op.x.type.shape[1]:
            return "one value per channel has no batch statistics"
        return BatchNormLike.check(op)

    @staticmethod
    def evaluate(op):
        training, momentum, eps = op.training, op.momentum, op.eps
        dtype, mask = torch_dtype(op.mean.type.element), used(op)

        def run(x, weight, bias, running_mean, running_var):
            if not training:
                y = aten.native_batch_norm.default(x, weight, bias, running_mean, running_var, False, momentum, eps)[0]
                rstd = torch.rsqrt(running_var.to(dtype) + eps) if mask[2] else None
                return y, running_mean.to(dtype), rstd
            state = () if running_mean is None else (running_mean.clone(), running_var.clone())
            both = state or (None, None)
            y, mean, rstd = aten.native_batch_norm.default(x, weight, bias, *both, True, momentum, eps)
            return y, mean.to(dtype), rstd.to(dtype), *state

        return spread(op, run)

    @staticmethod
    def derivative(b, op, dy, dmean=None, drstd=None, *drunning):
        dims, rank = _batch_dims(op), op.x.type.rank
        dx = dw = db = None
        if op.training and (dmean is not None or drstd is not None):
            incoming = [None if v is None else per_channel(b, v, rank) for v in (dmean, drstd)]
            kept = per_channel(b, op.mean, rank), per_channel(b, op.rstd, rank)
            dx = statistics_gradient(b, op.x, *kept, dims, *incoming)
        if dy is not None and op.training:
            direct, dw, db = b.batch_norm_grad(dy, op.x, op.mean, op.rstd, op.weight, eps=op.eps)
            dx = add(b, direct, dx)
        elif dy is not None:
            # fixed statistics: a scale and a shift per channel
            wide_dy, x, weight = widen(b, dy, op.x, op.weight)
            scale = op.rstd if weight is None else b.mul(op.rstd, weight)
            dx = b.cast_to(b.mul(wide_dy, per_channel(b, scale, rank)), op.x.type.element)
            if weight is not None:
                moved = b.mul(b.sub(x, per_channel(b, op.mean, rank)), wide_dy)
                dw = b.cast_to(b.mul(b.sum(moved, dims=dims), op.rstd), op.weight.type.element)
            if op.bias is not None:
                db = b.cast_to(b.sum(wide_dy, dims=dims), op.bias.type.element)
        return present(op, dx, dw, db, None, None)

    @staticmethod
    def expand(b, op, statistics=None):
        """statistics: mean and variance of the batch, where known."""
        (x,) = widen(b, op.x)
        if not op.training:
            mean, variance = (b.cast_to(v, x.type.element) for v in (op.running_mean, op.running_var))
        else:
            mean, variance = statistics or BatchNorm.statistics(b, op, x)
        running = []
        if op.training and op.running_mean is not None:
            count = x.type.size // x.type.shape[1]
            unbiased = b.mul(variance, count / max(1, count - 1))
            for old, new in ((op.running_mean, mean), (op.running_var, unbiased)):
                kept = b.mul(b.cast_to(old, x.type.element), 1.0 - op.momentum)
                running.append(b.cast_to(b.add(kept, b.mul(new, op.momentum)), old.type.element))
        rstd = b.rsqrt(b.add(variance, op.eps))
        return BatchNorm.normalised(b, op, mean, rstd), mean, rstd, *running

    @staticmethod
    def statistics(b, op, x):
        """Mean and variance of a batch: with running statistics both sums are from one look at x, around the running
        mean, where they lose no digits once that has settled."""
        dims = _batch_dims(op)
        if op.running_mean is None:
            return b.mean(x, dims=dims), b.variance(x, dims=dims, correction=0)
        around = b.cast_to(op.running_mean, x.type.element)
        distance = b.sub(x, per_channel(b, around, op.x.type.rank))
        off = b.mean(distance, dims=dims)
        square = b.mean(b.mul(distance, distance), dims=dims)
        return b.add(around, off), b.maximum(b.sub(square, b.mul(off, off)), 0.0)

    @staticmethod
    def normalised(b, op, mean, rstd):
        """y from statistics that are known: one multiplication and one sum per element, the rest per channel."""
        rank = op.x.type.rank
        x, weight, bias = widen(b, op.x, op.weight, op.bias)
        scale = rstd if weight is None else b.mul(rstd, weight)
        middle = b.mul(mean, scale)
        shift = b.neg(middle) if bias is None else b.sub(bias, middle)
        y = b.add(b.mul(x, per_channel(b, scale, rank)), per_channel(b, shift, rank))
        return b.cast_to(y, op.y.type.element)


@step.op
class BatchNormGrad(BatchNormLike):
    """The gradients of batch_norm in training. dw and db are there without a weight too; nobody reads them then."""

    dy = Operand(FloatTensor)
    x = Operand(FloatTensor)
    mean = Operand(FloatTensor, "of the batch")
    rstd = Operand(FloatTensor, "of the batch")
    weight = Operand(FloatTensor, optional=True)
    dx = Result()
    dw = Result()
    db = Result()
    eps = Attr("float", "added to the variance in the forward op", 1e-5)

    @staticmethod
    def infer(dy, x, mean, rstd, weight, eps):
        dw = x.with_shape((x.shape[1],)) if weight is None else weight
        return x, dw, dw

    @staticmethod
    def evaluate(op):
        mask, eps = used(op), op.eps

        def run(dy, x, mean, rstd, weight):
            if x.dtype.itemsize < 4 and not x.is_cuda and (weight is None or weight.dtype is x.dtype):
                mean, rstd = mean.to(x.dtype), rstd.to(x.dtype)  # as the CPU kernel had them
            mean, rstd, weight = packed(mean), packed(rstd), packed(weight)
            return aten.native_batch_norm_backward.default(dy, x, weight, None, None, mean, rstd, True, eps, mask)

        return spread(op, run)

    @staticmethod
    def expand(b, op, sums=None):
        """dx = dy * scale - ((x - mean) * slope + shift), with numbers per channel. sums: dw and db, where known.

        Around the mean, since x * slope would lose digits where a channel varies little beside its mean.
        """
        dims, rank = _batch_dims(op), op.x.type.rank
        dy, x, weight = widen(b, op.dy, op.x, op.weight)
        count = float(x.type.size // x.type.shape[1])
        centred = b.sub(x, per_channel(b, op.mean, rank))
        if sums is None:
            db = b.sum(dy, dims=dims)
            dw = b.mul(b.sum(b.mul(dy, centred), dims=dims), op.rstd)
        else:
            dw, db = sums
        scale = op.rstd if weight is None else b.mul(op.rstd, weight)
        slope = b.mul(b.mul(scale, op.rstd), b.div(dw, count))
        shift = b.mul(scale, b.div(db, count))
        scale, slope, shift = (per_channel(b, v, rank) for v in (scale, slope, shift))
        dx = b.sub(b.mul(dy, scale), b.add(b.mul(centred, slope), shift))
        return tuple(b.cast_to(v, r.type.element) for v, r in zip((dx, dw, db), op.results, strict=True))

    @staticmethod
    def flops(op):
        return 14 * op.x.type.size
