"""Losses."""

from __future__ import annotations

from ...ir.core import Value
from ...ir.types import I64
from ..context import Context, Tensor
from . import operator


@operator("NegativeLogLikelihoodLoss")
def negative_log_likelihood(c: Context, x: Tensor, target: Tensor, weight: Tensor | None = None):
    loss = loss_of(c, x, target, weight, "nll_loss")
    return loss


@operator("SoftmaxCrossEntropyLoss")
def softmax_cross_entropy(c: Context, x: Tensor, target: Tensor, weight: Tensor | None = None):
    loss = loss_of(c, x, target, weight, "cross_entropy")
    return [loss, c.b.log_softmax(x.value, dim=1)] if c.wants(1) else loss


def loss_of(c: Context, x: Tensor, target: Tensor, weight: Tensor | None, name: str) -> Value:
    b, reduction = c.b, c.attribute("reduction")
    if x.rank < 2 or target.shape != (x.shape[0], *x.shape[2:]):
        raise c.wrong(f"targets of shape {list(target.shape)} do not fit the shape {list(x.shape)}")
    if reduction not in ("none", "mean", "sum"):
        raise c.wrong(f"{reduction!r} is not a way of putting losses together")
    classes = x.shape[1]
    flat = (x.shape[0], classes, x.size // (x.shape[0] * classes) if x.size else 0)
    value = b.reshape_to(x.value, flat) if x.rank > 4 else x.value
    index = b.cast_to(target.value, I64)
    index = b.reshape_to(index, (flat[0], flat[2])) if x.rank > 4 else index
    ignored = c.attribute("ignore_index")
    out = getattr(b, name)(
        value, index, None if weight is None else weight.value,
        ignore_index=-100 if ignored is None else ignored, reduction=reduction,
    )  # fmt: skip
    loss = out[0] if name == "cross_entropy" else out
    return b.reshape_to(loss, target.shape) if reduction == "none" else loss
