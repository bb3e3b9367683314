"""Group norms of images whose channels are neighbours in memory: by channel first, and then by group.

A group of such an image is strewn over memory: a few channels of each pixel. So sums over pixels are taken channel by
channel, as those of BatchNorm are, and are then added up group by group, which is little; the norm itself and its
gradient have a scale and a shift per channel of each image. Images that lie row by row are normalised by
`GroupNorm.expand`: a group of theirs is one stretch of memory.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..dialects.step import StepBuilder
from ..dialects.step.normalization import GroupNorm, GroupNormGrad
from ..dialects.step.support import widen
from ..ir.core import Op, Value
from .layout_rules import channels_last, differ
from .pointwise_convolution import lie_channels_last
from .recompute import originals


@dataclass(frozen=True, slots=True)
class Channels:
    """Numbers per channel of each image, [N, C, 1, ...]: its own mean and how far that is off its group's, what it is
    multiplied with, without and with the weight, and what is then added, for which a gradient alone has no use."""

    own: Value
    off: Value
    rstd: Value
    scale: Value
    shift: Value | None = None


def by_channel(function: Op) -> None:
    """Takes the group norms of such images apart. Backward has the numbers of forward where it can."""
    block = function.regions[0].block
    norms = [op for op in block if op.definition in (GroupNorm, GroupNormGrad) and is_strewn(op)]
    last = lie_channels_last(function) if norms else set()
    norms = [op for op in norms if op.x in last]
    copies = originals(block) if norms else {}
    known: dict[Value, Channels] = {}  # by the mean that a norm gives
    for op in norms:
        b = StepBuilder(block, op, op.loc, op.phase)
        before = known.get(copies[op].mean) if op in copies else None
        if op.definition is GroupNormGrad:
            made = gradients(b, op, known.get(op.mean))
        elif before is not None and not any(r.uses for r in op.results[1:]):
            made = [normalised(b, op, before), *op.results[1:]]
        else:
            made, known[op.mean] = forward(b, op)
            known[made[1]] = known[op.mean]
        for old, new in zip(op.results, made, strict=True):
            old.replace_by(new)
    for op in norms:
        op.erase()


def is_strewn(op: Op) -> bool:
    """Whether it makes a difference how the image lies."""
    rank = op.x.type.rank
    return rank >= 3 and differ(op.x.type.shape, tuple(range(rank)), channels_last(rank))


def forward(b: StepBuilder, op: Op) -> tuple[list[Value], Channels]:
    """The results of a norm, and what backward may use of it.

    The variance of a group is that within its channels and that of their means.
    """
    shape, (x, bias) = by_group(op), widen(b, op.x, op.bias)
    own = b.mean(x, dims=pixels(op), keepdim=True)
    centred = b.sub(x, own)
    within = b.mean(b.mul(centred, centred), dims=pixels(op), keepdim=True)
    mean = b.mean(b.reshape(own, shape=shape), dims=(2,), keepdim=True)
    off = b.sub(b.reshape(own, shape=shape), mean)
    variance = b.mean(b.add(b.reshape(within, shape=shape), b.mul(off, off)), dims=(2,), keepdim=True)
    rstd = b.rsqrt(b.add(variance, op.eps))
    known = channels(b, op, own, off, rstd)
    middle, scale = b.sub(b.reshape(own, shape=shape), off), b.reshape(known.scale, shape=shape)
    shift = b.neg(b.mul(middle, scale))
    shift = shift if bias is None else b.add(shift, b.reshape(bias, shape=shape[1:]))
    known = replace(known, shift=b.reshape(shift, shape=own.type.shape))
    return [normalised(b, op, known), *(b.reshape(v, shape=shape[:2]) for v in (mean, rstd))], known


def channels(b: StepBuilder, op: Op, own: Value, off: Value, rstd: Value) -> Channels:
    """What groups have, for each of their channels."""
    shape, (weight,) = by_group(op), widen(b, op.weight)
    each = b.mul(rstd, b.full(1.0, shape[1:], rstd.type.element))
    scale = each if weight is None else b.mul(each, b.reshape(weight, shape=shape[1:]))
    return Channels(own, *(b.reshape(v, shape=own.type.shape) for v in (off, each, scale)))


def normalised(b: StepBuilder, op: Op, known: Channels) -> Value:
    """One multiplication and one sum per element."""
    (x,) = widen(b, op.x)
    return b.cast_to(b.add(b.mul(x, known.scale), known.shift), op.y.type.element)


def gradients(b: StepBuilder, op: Op, known: Channels | None) -> list[Value]:
    """dx = dy * scale - ((x - own) * slope + shift)."""
    shape, (dy, x) = by_group(op), widen(b, op.dy, op.x)
    if known is None:
        own = b.mean(x, dims=pixels(op), keepdim=True)
        off = b.sub(b.reshape(own, shape=shape), b.unsqueeze(op.mean, -1))
        known = channels(b, op, own, off, b.unsqueeze(op.rstd, -1))
    centred = b.sub(x, known.own)
    total = b.sum(dy, dims=pixels(op), keepdim=True)
    product = b.sum(b.mul(dy, centred), dims=pixels(op), keepdim=True)
    product = b.mul(b.add(product, b.mul(total, known.off)), known.rstd)
    (weight,), count = widen(b, op.weight), float(x.type.size // (shape[0] * shape[1]))
    parts = (b.reshape(v, shape=shape) for v in (total, product))
    parts = parts if weight is None else (b.mul(v, b.reshape(weight, shape=shape[1:])) for v in parts)
    centre, slope = (b.div(b.sum(v, dims=(2,), keepdim=True), count) for v in parts)
    rstd, off = (b.reshape(v, shape=shape) for v in (known.rstd, known.off))
    slope = b.mul(slope, b.mul(rstd, rstd))
    shift = b.add(b.mul(slope, off), b.mul(centre, rstd))
    slope, shift = (b.reshape(v, shape=known.own.type.shape) for v in (slope, shift))
    dx = b.sub(b.mul(dy, known.scale), b.add(b.mul(centred, slope), shift))
    vectors = [b.reshape(b.sum(v, dims=(0,)), shape=op.dw.type.shape) for v in (product, total)]
    return [b.cast_to(v, r.type.element) for v, r in zip((dx, *vectors), op.results, strict=True)]


def by_group(op: Op) -> tuple[int, int, int]:
    """Numbers per channel of each image, with the channels of a group along a dimension of their own."""
    n, channels = op.x.type.shape[:2]
    return n, op.groups, channels // op.groups


def pixels(op: Op) -> tuple[int, ...]:
    return tuple(range(2, op.x.type.rank))
