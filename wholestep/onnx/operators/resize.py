"""Resize and Upsample: every result along an axis is a sum of a few elements, with weights known at import."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from ...dialects.step import torch_dtype
from ...ir.core import Value
from ..context import Context, Tensor
from . import operator
from .support import LONGEST, along, limited, vector


@dataclass
class Axis:
    """What is done along one axis: from `size` to `result` elements; `begin` and `end` are those of a region."""

    dim: int
    size: int
    result: int
    scale: float
    begin: float = 0.0
    end: float = 1.0


@operator("Upsample", until=8)
def upsample_by_attribute(c: Context, x: Tensor):
    scales = c.attribute("scales")
    if scales is None:
        scales = [1.0, 1.0, c.attribute("height_scale"), c.attribute("width_scale")]
    return resized(c, x, by_scales(c, x, range(x.rank), scales), "asymmetric", "floor")


@operator("Upsample", since=9)
def upsample(c: Context, x: Tensor, scales: Tensor):
    given = c.known(scales, "scales").tolist()
    return resized(c, x, by_scales(c, x, range(x.rank), given), "asymmetric", "floor")


@operator("Resize", until=10)
def resize_simple(c: Context, x: Tensor, scales: Tensor):
    given = c.known(scales, "scales").tolist()
    return resized(c, x, by_scales(c, x, range(x.rank), given), "asymmetric", "floor")


@operator("Resize", since=11)
def resize(c: Context, x: Tensor, roi: Tensor | None = None, scales: Tensor | None = None, sizes: Tensor | None = None):
    dims = [c.axis(a, x.rank) for a in c.attribute("axes") or range(x.rank)]
    if len(set(dims)) != len(dims) or 0 in x.shape:
        raise c.wrong("its axes name a dimension twice, or its input is empty")
    if scales is not None and scales.size:
        axes = by_scales(c, x, dims, c.known(scales, "scales").tolist())
    elif sizes is not None and sizes.size:
        axes = by_sizes(c, x, dims, c.ints(sizes, "sizes"))
    else:
        raise c.wrong("it has neither scales nor sizes")
    how = c.attribute("coordinate_transformation_mode")
    if how == "tf_crop_and_resize":
        if roi is None or roi.size != 2 * len(axes):
            raise c.wrong("its region does not fit its axes")
        region = c.known(roi, "region").tolist()
        for i, axis in enumerate(axes):
            axis.begin, axis.end = region[i], region[len(axes) + i]
    return resized(c, x, axes, how, c.attribute("nearest_mode"))


def by_scales(c: Context, x: Tensor, dims: Any, scales: Any) -> list[Axis]:
    if len(scales) != len(dims) or any(s is None or not 0 < s < 1e6 for s in scales):
        raise c.wrong(f"its scales {scales} do not fit")
    return [Axis(d, x.shape[d], math.floor(x.shape[d] * s), s) for d, s in zip(dims, scales, strict=True)]


def by_sizes(c: Context, x: Tensor, dims: list[int], sizes: list[int]) -> list[Axis]:
    if len(sizes) != len(dims) or any(n < 0 for n in sizes) or 0 in x.shape:
        raise c.wrong(f"its sizes {sizes} do not fit")
    scales = [n / x.shape[d] for n, d in zip(sizes, dims, strict=True)]
    policy = c.attribute("keep_aspect_ratio_policy", "stretch")
    if policy != "stretch":
        scale = min(scales) if policy == "not_larger" else max(scales)
        return [Axis(d, x.shape[d], math.floor(scale * x.shape[d] + 0.5), scale) for d in dims]
    return [Axis(d, x.shape[d], n, s) for d, n, s in zip(dims, sizes, scales, strict=True)]


def resized(c: Context, x: Tensor, axes: list[Axis], how: str, rounding: str) -> Value:
    b, mode, value = c.b, c.attribute("mode"), x.value
    mode = "linear" if mode in ("bilinear", "trilinear") else mode
    if mode not in ("nearest", "linear", "cubic"):
        raise c.wrong(f"{mode!r} is not a way of interpolating")
    if mode != "nearest" and not x.is_float:
        raise c.unsupported("interpolating between integers is not supported", "cast to float")
    outside: Value | None = None
    for axis in axes:
        if axis.result == axis.size and axis.scale == 1 and (axis.begin, axis.end) == (0.0, 1.0):
            continue
        places = coordinates(c, axis, how)
        if how == "tf_crop_and_resize":
            beyond = c.constant((places < 0) | (places > axis.size - 1)).value
            beyond = along(b, beyond, axis.dim, x.rank)
            outside = beyond if outside is None else b.bit_or(outside, beyond)
        if mode == "nearest":
            value = picked(c, value, axis, nearest(c, places, rounding).clamp(0, max(axis.size - 1, 0)))
        else:
            value = mixed(c, value, axis, *weights(c, axis, places, mode))
    if outside is not None:
        value = b.select(outside, float(c.attribute("extrapolation_value")), value)
    return value


def coordinates(c: Context, axis: Axis, how: str) -> torch.Tensor:
    """Where each element of the result lies in the input."""
    limited(c, axis.result, LONGEST)
    place, n, m, s = torch.arange(axis.result, dtype=torch.float64), axis.size, axis.result, axis.scale
    length = s * n  # a fraction where the scale does not give a whole number: so the official cases have it
    if how == "half_pixel" or (how == "pytorch_half_pixel" and m > 1):
        return (place + 0.5) / s - 0.5
    if how == "pytorch_half_pixel":
        return torch.zeros_like(place)
    if how == "half_pixel_symmetric":
        return n / 2 * (1 - m / length) + (place + 0.5) / s - 0.5
    if how == "asymmetric":
        return place / s
    if how == "align_corners":
        return torch.zeros_like(place) if length == 1 else place * (n - 1) / (length - 1)
    if how == "tf_crop_and_resize":
        span = (axis.end - axis.begin) * (n - 1)
        moved = torch.full_like(place, span / 2) if length == 1 else place * span / (length - 1)
        return moved + axis.begin * (n - 1)
    raise c.unsupported(f"coordinates by {how!r} are not supported", "use half_pixel")


def nearest(c: Context, places: torch.Tensor, rounding: str) -> torch.Tensor:
    if rounding == "round_prefer_floor":
        return torch.ceil(places - 0.5).long()
    if rounding == "round_prefer_ceil":
        return torch.floor(places + 0.5).long()
    if rounding in ("floor", "ceil"):
        return getattr(torch, rounding)(places).long()
    raise c.wrong(f"{rounding!r} is not a way of rounding")


def picked(c: Context, x: Value, axis: Axis, index: torch.Tensor) -> Value:
    """Elements along an axis; each of them repeated is a broadcast and needs no index."""
    b, times = c.b, axis.result // axis.size if axis.size else 0
    if axis.result == axis.size * times and torch.equal(index, torch.arange(axis.result) // max(times, 1)):
        shape, d = x.type.shape, axis.dim
        wide = b.broadcast_to(b.unsqueeze(x, d + 1), (*shape[: d + 1], times, *shape[d + 1 :]))
        return b.reshape_to(wide, (*shape[:d], axis.result, *shape[d + 1 :]))
    return b.index(x, [vector(c, index)], dims=(axis.dim,))


def weights(c: Context, axis: Axis, places: torch.Tensor, mode: str) -> tuple[torch.Tensor, torch.Tensor]:
    """For each element of the result the elements it is made of, and how much of each: [result, taps]."""
    low = torch.ceil(places) - 1  # the element to the left, so that the rest is more than 0 and at most 1
    rest = (places - low)[:, None]
    scale = min(axis.scale, 1.0) if c.attribute("antialias") else 1.0
    reach = 1 if mode == "linear" else 2
    first = math.floor(-reach / scale) + 1
    offsets = torch.arange(first, 2 - first)
    distance = ((offsets - rest) * scale).abs()
    if mode == "linear":
        share = (1 - distance).clamp(0, 1)
    else:
        a = c.attribute("cubic_coeff_a")
        near = ((a + 2) * distance - (a + 3)) * distance**2 + 1
        far = ((a * distance - 5 * a) * distance + 8 * a) * distance - 4 * a
        share = torch.where(distance <= 1, near, torch.where(distance < 2, far, torch.zeros_like(far)))
    index = low.long()[:, None] + offsets
    if c.attribute("exclude_outside"):
        share = torch.where((index < 0) | (index >= axis.size), torch.zeros_like(share), share)
        share = share / share.sum(1, keepdim=True)
    elif c.attribute("antialias"):
        share = share / share.sum(1, keepdim=True)
    return index.clamp(0, max(axis.size - 1, 0)), share


def mixed(c: Context, x: Value, axis: Axis, index: torch.Tensor, share: torch.Tensor) -> Value:
    b, rank = c.b, x.type.rank
    dtype = torch_dtype(x.type.element)
    total: Value | None = None
    for tap in range(index.shape[1]):
        if not bool(share[:, tap].any()):
            continue
        part = b.index(x, [vector(c, index[:, tap].contiguous())], dims=(axis.dim,))
        weight = along(b, c.constant(share[:, tap].contiguous().to(dtype)).value, axis.dim, rank)
        part = b.mul(part, weight)
        total = part if total is None else b.add(total, part)
    assert total is not None
    return total
