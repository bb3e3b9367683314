"""Normalisations, and Dropout: what behaves differently in training."""

from __future__ import annotations

from ...dialects.step.support import wide
from ...ir.core import Value
from ...ir.types import BOOL
from ..context import Context, Tensor
from ..dtypes import element_of
from . import operator
from .support import F32, limited, power, root


@operator("BatchNormalization")
def batch_normalization(c: Context, x: Tensor, scale: Tensor, bias: Tensor, mean: Tensor, var: Tensor):
    """Batch statistics while training (and running ones updated), running statistics else: see `c.training`."""
    b = c.b
    if not c.attribute("spatial", 1):
        raise c.unsupported("statistics per element (spatial=0) are not supported", "export the model again")
    if x.rank < 2:
        raise c.wrong(f"its input has rank {x.rank}, not 2 or more")
    momentum, eps = c.attribute("momentum"), c.attribute("epsilon")
    state = c.is_state(mean) and c.is_state(var)
    training = c.training if c.training is not None and state else as_written(c)
    inner = wide(x.element)
    weight, shift, old_mean, old_var = (b.cast_to(t.value, inner) for t in (scale, bias, mean, var))
    if not training:
        return b.batch_norm(x.value, weight, shift, old_mean, old_var, training=False, momentum=0.0, eps=eps)[0]
    count = x.size // x.shape[1]
    if count < 2:
        raise c.unsupported("statistics of one value per channel are not supported", "use a larger batch")
    y, own, _, new_mean, new_var = b.batch_norm(
        x.value, weight, shift, old_mean, old_var, training=True, momentum=1 - momentum, eps=eps
    )
    # the running variance of ONNX is that of the batch over its count, not over one less
    kept = b.mul(old_var, momentum)
    new_var = b.add(kept, b.mul(b.sub(new_var, kept), (count - 1) / count))
    new = [b.cast_to(v, t.element) for v, t in ((new_mean, mean), (new_var, var))]
    if c.training and state:
        c.update(mean, b.detach(new[0]))
        c.update(var, b.detach(new[1]))
    if c.version >= 14 or c.outputs == 1:
        return [y, *new]
    dims = tuple(i for i in range(x.rank) if i != 1)
    saved = b.variance(b.cast_to(x.value, inner), dims=dims, correction=0)
    return [y, *new, b.cast_to(own, mean.element), b.cast_to(saved, var.element)]


def as_written(c: Context) -> bool:
    """Whether the node itself asks for batch statistics."""
    if c.version < 7:
        return not c.attribute("is_test")
    return bool(c.attribute("training_mode")) if c.version >= 14 else c.outputs > 1


@operator("InstanceNormalization")
def instance_normalization(c: Context, x: Tensor, scale: Tensor, bias: Tensor):
    if x.rank < 3:
        raise c.wrong(f"its input has rank {x.rank}, not 3 or more")
    eps = c.attribute("epsilon")
    if scale.shape != (x.shape[1],) or bias.shape != scale.shape or 0 in x.shape:
        raise c.wrong(f"its scale and bias do not fit the shape {list(x.shape)}")
    return c.b.group_norm(x.value, scale.value, bias.value, groups=x.shape[1], eps=eps)[0]


@operator("GroupNormalization", since=21)
def group_normalization(c: Context, x: Tensor, scale: Tensor, bias: Tensor):
    b, groups, eps = c.b, c.attribute("num_groups"), c.attribute("epsilon")
    if x.rank < 2 or groups < 1 or x.shape[1] % groups:
        raise c.wrong(f"{groups} groups do not fit the shape {list(x.shape)}")
    if scale.shape != (x.shape[1],) or bias.shape != scale.shape or 0 in x.shape:
        raise c.wrong(f"its scale and bias do not fit the shape {list(x.shape)}")
    return b.group_norm(x.value, scale.value, bias.value, groups=groups, eps=eps)[0]


@operator("LayerNormalization")
def layer_normalization(c: Context, x: Tensor, scale: Tensor, bias: Tensor | None = None):
    b, axis = c.b, c.axis(c.attribute("axis"), x.rank)
    rows, stash = x.shape[axis:], element_of(c.attribute("stash_type")) or F32
    inner = x.element if x.element.bits >= stash.bits else stash
    weight, shift = fitted(c, scale, rows), None if bias is None else fitted(c, bias, rows)
    if shift is None:
        shift = b.full(0.0, rows, x.element)
    value, weight, shift = (b.cast_to(v, inner) for v in (x.value, weight, shift))
    y, mean, rstd = b.layer_norm(value, weight, shift, trailing=x.rank - axis, eps=c.attribute("epsilon"))
    kept = (*x.shape[:axis], *(1,) * len(rows))
    statistics = [b.cast_to(b.reshape_to(v, kept), stash) for v in (mean, rstd)]
    return [b.cast_to(y, x.element), *statistics]


@operator("RMSNormalization")
def rms_normalization(c: Context, x: Tensor, scale: Tensor):
    b, axis = c.b, c.axis(c.attribute("axis"), x.rank)
    stash = element_of(c.attribute("stash_type")) or F32
    inner = x.element if x.element.bits >= stash.bits else stash
    weight = b.cast_to(fitted(c, scale, x.shape[axis:]), inner)
    y, _ = b.rms_norm(b.cast_to(x.value, inner), weight, trailing=x.rank - axis, eps=c.attribute("epsilon"))
    return b.cast_to(y, scale.element)


def fitted(c: Context, x: Tensor, shape: tuple[int, ...]) -> Value:
    """A scale or shift of the shape that is normalised."""
    if x.rank > len(shape) and all(d == 1 for d in x.shape[: x.rank - len(shape)]):
        return c.b.broadcast_to(c.b.reshape_to(x.value, x.shape[x.rank - len(shape) :]), shape)
    return c.b.broadcast_to(x.value, shape)


@operator("LRN")
def lrn(c: Context, x: Tensor):
    """Each element over a power of the sum of squares of its neighbours among the channels."""
    b, size = c.b, c.attribute("size")
    if x.rank < 2 or size < 1:
        raise c.wrong("it needs channels, and a positive size")
    limited(c, size)
    before = (size - 1) // 2
    square = b.mul(x.value, x.value)
    low, high = [0] * x.rank, [0] * x.rank
    low[1], high[1] = before, size - 1 - before
    bordered = b.pad(square, low=tuple(low), high=tuple(high), value=0.0)
    total: Value | None = None
    for i in range(size):
        part = b.slice(bordered, dim=1, start=i, end=i + x.shape[1])
        total = part if total is None else b.add(total, part)
    assert total is not None
    base = b.add(b.mul(total, c.attribute("alpha") / size), c.attribute("bias"))
    return b.div(x.value, b.pow(base, float(c.attribute("beta"))))


@operator("LpNormalization")
def lp_normalization(c: Context, x: Tensor):
    b, axis, order = c.b, c.axis(c.attribute("axis"), x.rank), c.attribute("p")
    if order not in (1, 2):
        raise c.wrong(f"its p is {order}, not 1 or 2")
    total = b.sum(power(b, x.value, order), dims=(axis,), keepdim=True)
    zero = b.eq(total, 0.0)
    return b.select(zero, 0.0, b.div(x.value, root(b, b.select(zero, 1.0, total), order)))


@operator("MeanVarianceNormalization")
def mean_variance_normalization(c: Context, x: Tensor):
    b, dims = c.b, tuple(c.axis(a, x.rank) for a in c.attribute("axes"))
    centred = b.sub(x.value, b.mean(x.value, dims=dims, keepdim=True))
    deviation = b.sqrt(b.mean(b.mul(centred, centred), dims=dims, keepdim=True))
    return b.div(centred, b.add(deviation, 1e-9))


# ---- dropout ---------------------------------------------------------------------------------------------------------


@operator("Dropout", until=11, folds=False)
def dropout_by_attribute(c: Context, x: Tensor):
    written = c.version < 7 and not c.attribute("is_test")
    return dropped(c, x, c.attribute("ratio"), written)


@operator("Dropout", since=12, folds=False)
def dropout(c: Context, x: Tensor, ratio: Tensor | None = None, training: Tensor | None = None):
    written = training is not None and (c.training is None) and bool(c.number(training, "mode"))
    return dropped(c, x, 0.5 if ratio is None else float(c.number(ratio, "ratio")), written)


def dropped(c: Context, x: Tensor, ratio: float, written: bool):
    b, active = c.b, written if c.training is None else c.training
    if not 0 <= ratio < 1:
        raise c.wrong(f"its ratio {ratio} is not between 0 and 1")
    kind = BOOL if c.version >= 10 else x.element
    if not active or ratio == 0:
        return [x, b.full(1, x.shape, kind)] if c.wants(1) else x
    uniform = c.random("uniform", x.shape, F32 if x.element.bits < 64 else x.element)
    keep = b.ge(uniform, ratio)
    y = b.select(keep, b.mul(x.value, 1 / (1 - ratio)), 0.0)
    return [y, b.cast_to(keep, kind)] if c.wants(1) else y
