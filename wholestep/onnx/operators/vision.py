"""Images: reading between pixels, regions of interest, boxes."""

from __future__ import annotations

import math
from typing import Any

import torch

from ...ir.core import Value
from ...ir.types import I64
from ..context import Context, Tensor
from . import operator
from .support import clamped, cut, positions


def sampled(
    c: Context, image: Value, which: Value, ys: Value, xs: Value, edge: bool = False, largest: bool = False
) -> Value:
    """Pixels of images [N, C, H, W] at coordinates between them, by the four around: [coordinates..., C].

    Outside of the image there are zeros; with `edge` coordinates up to one pixel outside are moved to its border.
    """
    b = c.b
    height, width = image.type.shape[2:]
    last = b.transpose(image, order=(0, 2, 3, 1))
    far = b.bit_or(b.bit_or(b.lt(ys, -1.0), b.gt(ys, float(height))), b.bit_or(b.lt(xs, -1.0), b.gt(xs, float(width))))
    if edge:
        ys, xs = clamped(b, ys, 0.0, height - 1.0), clamped(b, xs, 0.0, width - 1.0)
    top, left = b.floor(ys), b.floor(xs)
    down, right = b.sub(ys, top), b.sub(xs, left)
    total: Value | None = None
    for dy in (0, 1):
        for dx in (0, 1):
            row, column = b.add(b.cast_to(top, I64), dy), b.add(b.cast_to(left, I64), dx)
            inside = b.bit_and(
                b.bit_and(b.ge(row, 0), b.lt(row, height)), b.bit_and(b.ge(column, 0), b.lt(column, width))
            )
            weight = b.mul(down if dy else b.sub(1.0, down), right if dx else b.sub(1.0, right))
            weight = b.select(inside, weight, 0.0)
            pixel = b.index(
                last, [which, clamped(b, row, 0, height - 1), clamped(b, column, 0, width - 1)], dims=(0, 1, 2)
            )
            part = b.mul(pixel, b.unsqueeze(weight, weight.type.rank))
            total = part if total is None else b.maximum(total, part) if largest else b.add(total, part)
    assert total is not None
    return b.select(b.unsqueeze(far, far.type.rank), 0.0, total) if edge else total


@operator("GridSample")
def grid_sample(c: Context, x: Tensor, grid: Tensor):
    mode = c.attribute("mode")
    modes = {"linear": 0, "bilinear": 0, "nearest": 1, "cubic": 2, "bicubic": 2}
    borders = {"zeros": 0, "border": 1, "reflection": 2}
    padding = c.attribute("padding_mode")
    if mode not in modes or padding not in borders:
        raise c.wrong(f"{mode!r} and {padding!r} are not ways of sampling")
    if x.rank not in (4, 5) or (x.rank == 5 and modes[mode] == 2):
        raise c.unsupported(f"{mode} sampling of rank {x.rank} is not supported", "use linear sampling of images")
    if grid.rank != x.rank or grid.shape[0] != x.shape[0] or grid.shape[-1] != x.rank - 2 or 0 in x.shape[1:]:
        raise c.wrong(f"a grid of shape {list(grid.shape)} does not fit the shape {list(x.shape)}")
    at = c.b.cast_to(grid.value, x.element)
    name = f"aten.grid_sampler_{x.rank - 2}d.default"
    return c.opaque(name, x.value, at, modes[mode], borders[padding], bool(c.attribute("align_corners")))


@operator("RoiAlign")
def roi_align(c: Context, x: Tensor, rois: Tensor, batch: Tensor):
    b, mode = c.b, c.attribute("mode")
    height, width = c.attribute("output_height"), c.attribute("output_width")
    ratio, scale = c.attribute("sampling_ratio"), c.attribute("spatial_scale")
    aligned = c.attribute("coordinate_transformation_mode", "output_half_pixel") == "half_pixel"
    if min(height, width) < 1 or 0 in x.shape:
        raise c.wrong("its regions or its image are empty")
    if x.rank != 4 or rois.shape != (batch.size, 4) or mode not in ("avg", "max"):
        raise c.wrong(f"regions of shape {list(rois.shape)} do not fit")
    count = rois.shape[0]
    corners = b.sub(b.mul(rois.value, scale), 0.5 if aligned else 0.0)
    x1, y1, x2, y2 = (b.reshape_to(cut(b, corners, 1, i, i + 1), (count,)) for i in range(4))
    spans = [b.sub(y2, y1), b.sub(x2, x1)]
    if not aligned:
        spans = [b.maximum(s, 1.0) for s in spans]
    if ratio > 0:
        grids = [(ratio, ratio)] * count
    else:  # as many as the region has pixels per cell, which must be known
        known = c.known(rois, "regions").to(torch.float64) * scale
        sizes = [(r[3] - r[1], r[2] - r[0]) for r in known.tolist()]
        if not aligned:
            sizes = [(max(h, 1.0), max(w, 1.0)) for h, w in sizes]
        grids = [(math.ceil(h / height), math.ceil(w / width)) for h, w in sizes]
    if len(set(grids)) > 1:
        raise c.unsupported("regions of different sizes without a sampling_ratio are not supported", "give a ratio")
    if not grids:
        return b.full(0, (0, x.shape[1], height, width), x.element)
    gh, gw = grids[0]
    ys = cells(b, y1, spans[0], height, gh)  # [regions, height * gh]
    xs = cells(b, x1, spans[1], width, gw)
    shape = (count, height * gh, width * gw)
    at = [b.broadcast_to(v, shape) for v in (b.unsqueeze(ys, 2), b.unsqueeze(xs, 1))]
    which = b.broadcast_to(b.reshape_to(b.cast_to(batch.value, I64), (count, 1, 1)), shape)
    # the maximum is that of the weighted pixels, before they are summed
    pixels = sampled(c, x.value, which, at[0], at[1], edge=True, largest=mode == "max")
    split = b.reshape_to(pixels, (count, height, gh, width, gw, x.shape[1]))
    cell = b.amax(split, dims=(2, 4)) if mode == "max" else b.mean(split, dims=(2, 4))
    return b.transpose(cell, order=(0, 3, 1, 2))


def cells(b: Any, start: Value, span: Value, count: int, per: int) -> Value:
    """The coordinates at which the cells of regions are read."""
    step = b.div(b.add(b.cast_to(positions(b, count * per), start.type.element), 0.5), float(count * per))
    return b.add(b.unsqueeze(start, 1), b.mul(b.unsqueeze(span, 1), b.unsqueeze(step, 0)))


@operator("NonMaxSuppression")
def non_max_suppression(
    c: Context, boxes: Tensor, scores: Tensor, most: Tensor | None = None, overlap: Tensor | None = None,
    least: Tensor | None = None,
):  # fmt: skip
    """Greedy: the best box of each class, then the next that overlaps none taken too much. Its inputs must be known."""
    known, marks = c.known(boxes, "boxes").double(), c.known(scores, "scores").double()
    limit = 0 if most is None else int(c.number(most, "number of boxes"))
    threshold = 0.0 if overlap is None else float(c.number(overlap, "threshold of overlap"))
    floor = -math.inf if least is None else float(c.number(least, "threshold of scores"))
    if c.attribute("center_point_box"):
        center, size = known[..., :2], known[..., 2:]
        low, high = center - size / 2, center + size / 2
    else:
        low, high = torch.minimum(known[..., :2], known[..., 2:]), torch.maximum(known[..., :2], known[..., 2:])
    area = (high - low).prod(-1)
    taken: list[list[int]] = []
    for n in range(marks.shape[0]):
        for kind in range(marks.shape[1]):
            chosen: list[int] = []
            for i in marks[n, kind].argsort(descending=True, stable=True).tolist():
                if len(chosen) >= limit or marks[n, kind, i] <= floor:
                    break
                if all(shared(low[n], high[n], area[n], i, j) <= threshold for j in chosen):
                    chosen.append(i)
            taken += [[n, kind, i] for i in chosen]
    return c.constant(torch.tensor(taken, dtype=torch.int64).reshape(-1, 3))


def shared(low: Any, high: Any, area: Any, i: int, j: int) -> float:
    """Intersection over union of two boxes."""
    sides = (torch.minimum(high[i], high[j]) - torch.maximum(low[i], low[j])).clamp(min=0)
    common = float(sides.prod())
    union = float(area[i] + area[j]) - common
    return common / union if union > 0 else 0.0
