"""Pooling: the largest, the mean or a norm of each window."""

from __future__ import annotations

import math
from functools import reduce

import torch

from ...dialects.step import torch_dtype
from ...ir.core import Value
from ...ir.types import I64
from ..context import Context, Tensor
from . import operator
from .support import F32, LONGEST, along, limited, positions, power, root
from .windows import Windows, padded, taps, windows


def spatial(c: Context, x: Tensor) -> tuple[int, ...]:
    if not 3 <= x.rank <= 5:
        raise c.unsupported(f"pooling of rank {x.rank} is not supported", "use one to three spatial dimensions")
    if 0 in x.shape:
        raise c.wrong(f"its input of shape {list(x.shape)} is empty")
    return x.shape[2:]


@operator("MaxPool")
def max_pool(c: Context, x: Tensor):
    b, sizes = c.b, spatial(c, x)
    w = windows(c, sizes, c.attribute("kernel_shape"))
    value = x.value if x.is_float else b.cast_to(x.value, F32)
    pads = w.low
    direct = w.symmetric and all(2 * p <= k for p, k in zip(pads, w.kernel, strict=True)) and not any(over(w))
    if not direct:
        value, pads = padded(c, value, w.low, w.after, -math.inf), (0,) * len(sizes)
    values, indices = b.max_pool(
        value, kernel=w.kernel, stride=w.stride, padding=pads, dilation=w.dilation, ceil_mode=False
    )
    values = b.cast_to(values, x.element)
    if not c.wants(1):
        return values
    return [values, flat_places(c, x, indices, value.type.shape[2:], (0,) * len(sizes) if direct else w.low)]


def over(w: Windows) -> list[int]:
    """How far windows reach beyond the padding behind."""
    return [max(0, a - h) for a, h in zip(w.after, w.high, strict=True)]


def flat_places(c: Context, x: Tensor, index: Value, sizes: tuple[int, ...], low: tuple[int, ...]) -> Value:
    """Positions counted through the whole input, from those counted through the (padded) spatial dimensions."""
    b = c.b
    coordinates: list[Value] = []
    for size, before in zip(reversed(sizes), reversed(low), strict=True):
        coordinates.insert(0, b.add(b.rem(index, size), -before))
        index = b.div(index, size, rounding="floor")
    pairs = list(zip(coordinates, x.shape[2:], strict=True))
    flat = b.zeros_like(index)
    for place, size in reversed(pairs) if c.attribute("storage_order", 0) else pairs:
        flat = b.add(b.mul(flat, size), place)
    lead = b.add(
        b.mul(along(b, positions(b, x.shape[0]), 0, x.rank), x.shape[1]), along(b, positions(b, x.shape[1]), 1, x.rank)
    )
    return b.add(b.mul(lead, math.prod(x.shape[2:])), flat)


def window_sums(c: Context, x: Value, w: Windows) -> Value:
    """The sum of each window, with zeros around."""
    b = c.b
    x = padded(c, x, w.low, w.after, 0.0)
    if any(d != 1 for d in w.dilation):
        return reduce(b.add, taps(c, x, w))
    mean = b.avg_pool(x, kernel=w.kernel, stride=w.stride, padding=(0,) * len(w.kernel), ceil_mode=False)
    return b.mul(mean, float(math.prod(w.kernel)))


@operator("AveragePool")
def average_pool(c: Context, x: Tensor):
    b, sizes = c.b, spatial(c, x)
    w = windows(c, sizes, c.attribute("kernel_shape"))
    with_padding = bool(c.attribute("count_include_pad", 0))
    fits = all(2 * p <= k for p, k in zip(w.low, w.kernel, strict=True))
    if w.symmetric and fits and all(d == 1 for d in w.dilation) and not any(over(w)):
        return b.avg_pool(
            x.value, kernel=w.kernel, stride=w.stride, padding=w.low, ceil_mode=False, count_include_pad=with_padding
        )
    return b.div(window_sums(c, x.value, w), counts(c, x, w, with_padding))


def counts(c: Context, x: Tensor, w: Windows, with_padding: bool) -> Value:
    """How many elements each window has."""
    limited(c, sum(n * k for n, k in zip(w.count, w.kernel, strict=True)), LONGEST)
    whole = torch.ones((), dtype=torch.float64)
    for size, k, s, d, low, high, n in zip(
        w.sizes, w.kernel, w.stride, w.dilation, w.low, w.high, w.count, strict=True
    ):
        place = torch.arange(n)[:, None] * s + torch.arange(k)[None, :] * d - low
        begin, end = (-low, size + high) if with_padding else (0, size)
        number = ((place >= begin) & (place < end)).sum(1).clamp(min=1)
        whole = whole[..., None] * number
    return c.constant(whole.to(torch_dtype(x.element))).value


@operator("LpPool")
def lp_pool(c: Context, x: Tensor):
    order = c.attribute("p", 2)
    w = windows(c, spatial(c, x), c.attribute("kernel_shape"))
    return root(c.b, window_sums(c, power(c.b, x.value, order), w), order)


@operator("GlobalAveragePool")
def global_average_pool(c: Context, x: Tensor):
    return c.b.mean(x.value, dims=tuple(range(2, x.rank)), keepdim=True) if x.rank > 2 else x.value


@operator("GlobalMaxPool")
def global_max_pool(c: Context, x: Tensor):
    if 0 in x.shape:
        raise c.wrong(f"its input of shape {list(x.shape)} is empty")
    return c.b.amax(x.value, dims=tuple(range(2, x.rank)), keepdim=True) if x.rank > 2 else x.value


@operator("GlobalLpPool")
def global_lp_pool(c: Context, x: Tensor):
    order = c.attribute("p", 2)
    return root(c.b, c.b.sum(power(c.b, x.value, order), dims=tuple(range(2, x.rank)), keepdim=True), order)


@operator("MaxUnpool")
def max_unpool(c: Context, x: Tensor, indices: Tensor, shape: Tensor | None = None):
    b, sizes = c.b, spatial(c, x)
    rank = len(sizes)
    kernel, stride = c.attribute("kernel_shape"), c.attribute("strides") or [1] * rank
    pads = c.attribute("pads") or [0] * 2 * rank
    if (
        len(kernel) != rank
        or len(stride) != rank
        or len(pads) != 2 * rank
        or min(*kernel, *stride) < 1
        or min(pads) < 0
    ):
        raise c.wrong("its kernel, strides or pads do not fit its input")
    natural = [
        (n - 1) * s + k - pads[i] - pads[rank + i]
        for i, (n, s, k) in enumerate(zip(sizes, stride, kernel, strict=True))
    ]
    inner = (*x.shape[:2], *natural)  # what the indices count through
    whole = tuple(c.ints(shape, "output shape")) if shape is not None else inner
    more = [w - n for w, n in zip(whole, inner, strict=False)]
    if len(whole) != x.rank or indices.shape != x.shape or any(more[:2]) or min(more) < 0:
        raise c.wrong(f"a result of shape {list(whole)} does not fit its input {list(x.shape)}")
    flat = b.full(0, (math.prod(inner),), x.element)
    place = b.reshape_to(b.cast_to(indices.value, I64), (x.size,))
    out = b.reshape_to(b.scatter(flat, place, b.reshape_to(x.value, (x.size,)), dim=0), inner)
    return padded(c, out, (0,) * rank, more[2:], 0.0)


@operator("Col2Im")
def col2im(c: Context, x: Tensor, image: Tensor, block: Tensor):
    """Adds blocks up where they overlap: each element of the block is spread over the image by its stride."""
    b, sizes, kernel = c.b, c.ints(image, "image shape"), c.ints(block, "block shape")
    w = windows(c, sizes, kernel)
    n, channels = x.shape[0], x.shape[1] // math.prod(kernel)
    if x.rank != 3 or channels * math.prod(kernel) != x.shape[1] or math.prod(w.count) != x.shape[2]:
        raise c.wrong(f"blocks {kernel} over an image {sizes} do not fit the shape {list(x.shape)}")
    place: Value | None = None
    inside: Value | None = None
    rank = len(sizes)
    for i, size in enumerate(sizes):
        within = along(b, b.mul(positions(b, kernel[i]), w.dilation[i]), i, 2 * rank)
        first = along(b, b.add(b.mul(positions(b, w.count[i]), w.stride[i]), -w.low[i]), rank + i, 2 * rank)
        at = b.add(within, first)
        fits = b.bit_and(b.ge(at, 0), b.lt(at, size))
        inside = fits if inside is None else b.bit_and(inside, fits)
        place = at if place is None else b.add(b.mul(place, size), at)
    assert place is not None and inside is not None
    number = math.prod(kernel) * math.prod(w.count)
    full = (*kernel, *w.count)
    flat = b.reshape_to(b.broadcast_to(b.select(inside, place, 0), full), (number,))
    keep = b.reshape_to(b.broadcast_to(inside, full), (number,))
    values = b.select(keep, b.reshape_to(x.value, (n, channels, number)), b.full(0, (), x.element))
    out = b.index_add(b.full(0, (n, channels, math.prod(sizes)), x.element), flat, values, dim=2)
    return b.reshape_to(out, (n, channels, *sizes))
