"""Depthwise convolutions of our own for NVIDIA GPUs, channels-last: forward, input gradient, weight gradient.

A thread owns a few neighbouring channels of a strip of columns and walks down the image. It reads each row once and
keeps the rows that are still open, and the weights, in registers. Shapes are constants, so only edges pay for edges.
Functions that are constants too say what happens to a value as it is read, and what is summed over what is stored.
"""

# mypy: disable-error-code="assignment"
# (kernels grow tuples of registers; to mypy each is another type)

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl

from ...errors import InputError

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
#: what kernels are told that do nothing else on their loads, or on their stores
NOTHING_BEFORE: dict[str, Any] = {"BEFORE_ONCE": None, "BEFORE": None}
NOTHING_AFTER: dict[str, Any] = {"AFTER_ONCE": None, "AFTER": None, "SUMS": 0, "BESIDE": 0, "STORES": False}
#: threads that keep a large GPU busy; `configs` shortens the walks until there are so many
BUSY = 200_000
#: threads below which multiprocessors have so few warps each that some finish long before others
FEWEST = 40_000
#: the kernels index within one image, and number their threads, with 32 bits
LARGEST = 2**31


@dataclass(frozen=True)
class Config:
    """How the work is cut: what one thread holds (`columns` x `vector` channels) and how far it walks (`rows`)."""

    columns: int
    rows: int
    vector: int = 2
    warps: int = 4
    #: images that one thread of the weight gradient walks through
    images: int = 1
    #: read the next row before computing with this one
    prefetch: bool = True


# ---------------------------------------------------------------------------------------------------------- kernels
# Names in capitals are constants of the compiled kernel. Row t of a walk is the row of the smaller image (the output of
# the convolution); the larger image has STRIDE_H rows for each. `first` is the column where a lane's strip begins.


@triton.constexpr_function
def ceil_div(a, b):
    return -(-a // b)


@triton.constexpr_function
def padding_only(column, strips, width):
    """The image is a single strip and this column of it lies outside: nothing to read, nothing to multiply."""
    return strips == 1 and not 0 <= column < width


@triton.constexpr_function
def begins(column, step, strips):
    """The first k for which `column + k * step` is not only padding."""
    return 0 if strips > 1 else max(0, -(column // step))


@triton.constexpr_function
def ends(column, step, count, strips, width):
    """The first k behind those, of so many."""
    return count if strips > 1 else min(count, (width - 1 - column) // step + 1)


@triton.jit
def place(COUNT, STRIPS: tl.constexpr, C: tl.constexpr, LANES: tl.constexpr, VECTOR: tl.constexpr):
    """For each lane: is there work for it, which item of COUNT, which strip, which channels. Spare lanes repeat the
    last one's reads."""
    lane = tl.program_id(0) * LANES + tl.arange(0, LANES)
    total = COUNT * STRIPS * (C // VECTOR)
    active = (lane < total)[:, None]
    lane = tl.minimum(lane, total - 1)
    channel = (lane % (C // VECTOR))[:, None] * VECTOR + tl.arange(0, VECTOR)[None, :]
    strip = (lane // (C // VECTOR))[:, None]
    return active, strip // STRIPS, strip % STRIPS, channel


@triton.jit
def inside(there, column, BEFORE: tl.constexpr, BEHIND: tl.constexpr, WIDTH: tl.constexpr):
    """`there`, and the column is in the image: asked only if some strip has it BEFORE the image, or BEHIND it."""
    if BEFORE:
        there = there & (column >= 0)
    if BEHIND:
        there = there & (column < WIDTH)
    return there


@triton.jit
def add_products(value, ones, others, BEGIN: tl.constexpr, END: tl.constexpr):
    """`value` and products of two tuples, added one after the other."""
    for k in tl.static_range(BEGIN, END):
        value += ones[k] * others[k]
    return value


@triton.jit
def read_row(base, there, first, COUNT: tl.constexpr, FIRST: tl.constexpr, STEP: tl.constexpr, STRIPS: tl.constexpr,
             WIDTH: tl.constexpr, C: tl.constexpr):  # fmt: skip
    """COUNT neighbouring pixels of a row, zeros where there are none."""
    LAST: tl.constexpr = FIRST + (STRIPS - 1) * STEP
    values = ()
    for j in tl.static_range(COUNT):
        if padding_only(FIRST + j, STRIPS, WIDTH):
            values = values + (tl.zeros(base.shape, base.dtype.element_ty),)
        else:
            mask = inside(there, first + j, FIRST + j < 0, LAST + j >= WIDTH, WIDTH)
            values = values + (tl.load(base + j * C, mask=mask, other=0.0),)
    return values


@triton.jit
def read_rows(base, t, there, first, STRIDE_H: tl.constexpr, PAD_H: tl.constexpr, COUNT: tl.constexpr,
              FIRST: tl.constexpr, STEP: tl.constexpr, STRIPS: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
              C: tl.constexpr):  # fmt: skip
    """The STRIDE_H rows of the larger image that belong to row t of the smaller one."""
    values = ()
    for a in tl.static_range(STRIDE_H):
        row = t * STRIDE_H + a - PAD_H
        mask = there & (row >= 0) & (row < HEIGHT)
        values = values + read_row(base + row * (WIDTH * C), mask, first, COUNT, FIRST, STEP, STRIPS, WIDTH, C)
    return values


@triton.jit
def widen(values, COUNT: tl.constexpr):
    """To f32."""
    wide = ()
    for j in tl.static_range(COUNT):
        wide = wide + (values[j].to(tl.float32),)
    return wide


@triton.jit
def prepare(values, known, t, first, STRIDE_H: tl.constexpr, PAD_H: tl.constexpr, COUNT: tl.constexpr,
            FIRST: tl.constexpr, STEP: tl.constexpr, STRIPS: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
            BEFORE: tl.constexpr):  # fmt: skip
    """To f32, and BEFORE(value, known) where the pixel is in the image: padding stays zero."""
    LAST: tl.constexpr = FIRST + (STRIPS - 1) * STEP
    wide = widen(values, STRIDE_H * COUNT)
    if BEFORE is not None:
        made = ()
        for a in tl.static_range(STRIDE_H):
            row = t * STRIDE_H + a - PAD_H
            there = (row >= 0) & (row < HEIGHT)
            for j in tl.static_range(COUNT):
                value = wide[a * COUNT + j]
                if not padding_only(FIRST + j, STRIPS, WIDTH):
                    seen = inside(there, first + j, FIRST + j < 0, LAST + j >= WIDTH, WIDTH)
                    value = tl.where(seen, BEFORE(value, known), 0.0)
                made = made + (value,)
        wide = made
    return wide


@triton.jit
def read_beside(others, row, active, begin, end, strip, STORED: tl.constexpr, COLUMNS: tl.constexpr,
                STRIPS: tl.constexpr, WIDTH: tl.constexpr, C: tl.constexpr, BESIDE: tl.constexpr):  # fmt: skip
    """What lies beside the pixels of the STORED rows of a step, all of it before any of them is stored: no compiler
    moves a load before a store that may change what it reads, so each would be waited for."""
    seen = ()
    for i in tl.static_range(STORED):
        r = row + i
        there = active & (r >= begin) & (r < end)
        for u in tl.static_range(COLUMNS):
            mask = inside(there, strip * COLUMNS + u, False, (STRIPS - 1) * COLUMNS + u >= WIDTH, WIDTH)
            for k in tl.static_range(BESIDE):
                if padding_only(u, STRIPS, WIDTH):
                    seen = seen + (tl.zeros(others[k].shape, others[k].dtype.element_ty),)
                else:
                    seen = seen + (tl.load(others[k] + (r * (WIDTH * C) + u * C), mask=mask, other=0.0),)
    return seen


@triton.jit
def count(totals, value, beside, within, known, AFTER: tl.constexpr, SUMS: tl.constexpr, BESIDE: tl.constexpr,
          STORES: tl.constexpr):  # fmt: skip
    """Adds what AFTER makes of a value, and of the images `beside` it at the same place, to a lane's sums; gives these
    and what is stored, which is the value itself or (STORES) what AFTER makes of it as well.

    The value is the one before it is rounded to be stored, as in generated kernels: to widen it again takes longer.
    Only columns that are not `within` the image are left out here: `whole_rows` leaves out rows, and spare lanes write
    no sums."""
    seen = ()
    for k in tl.static_range(BESIDE):
        seen = seen + (beside[k].to(tl.float32),)
    found = AFTER(value, seen, known)
    more = ()
    for k in tl.static_range(SUMS):
        more = more + (totals[k] + tl.where(within, found[k], 0.0),)
    if STORES:
        value = found[SUMS]
    return more, value


@triton.jit
def whole_rows(there, totals, before, SUMS: tl.constexpr):
    """A lane's sums after a row: as `before` it where the row is not one of its own."""
    kept = ()
    for k in tl.static_range(SUMS):
        kept = kept + (tl.where(there, totals[k], before[k]),)
    return kept


@triton.jit
def write_sums(sums, totals, item, strip, channel, active, STRIPS: tl.constexpr, C: tl.constexpr, SUMS: tl.constexpr):
    """A lane's sums as one row of the partial ones."""
    part = (item * STRIPS + strip) * tl.num_programs(1) + tl.program_id(1)
    at = sums + part.to(tl.int64) * (SUMS * C) + channel
    for k in tl.static_range(SUMS):
        tl.store(at + k * C, totals[k], mask=active)


@triton.jit
def shifted(pointers, offset, COUNT: tl.constexpr):
    """Each pointer, so far on."""
    found = ()
    for k in tl.static_range(COUNT):
        found = found + (pointers[k] + offset,)
    return found


@triton.jit
def read_weights(w, channel, TAPS: tl.constexpr):
    values = ()
    for tap in tl.static_range(TAPS):
        values = values + (tl.load(w + channel * TAPS + tap).to(tl.float32),)
    return values


@triton.jit
def zeros(COUNT: tl.constexpr, LANES: tl.constexpr, VECTOR: tl.constexpr):
    nothing = tl.zeros((LANES, VECTOR), tl.float32)
    values = ()
    for _ in tl.static_range(COUNT):
        values = values + (nothing,)
    return values


@triton.jit
def forward_row(rows, opened, totals, weights, known, known_after, others, result, active, strip, first, t, begin, end,
                C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, OW: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
                STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr, PAD_H: tl.constexpr, PAD_W: tl.constexpr,
                COLUMNS: tl.constexpr, STRIPS: tl.constexpr, BEFORE: tl.constexpr, AFTER: tl.constexpr,
                SUMS: tl.constexpr, BESIDE: tl.constexpr, STORES: tl.constexpr, PIXEL: tl.constexpr):  # fmt: skip
    """One step of a walk: which outputs are still open after it, and a lane's sums."""
    OPEN: tl.constexpr = ceil_div(KH, STRIDE_H)
    COUNT: tl.constexpr = (COLUMNS - 1) * STRIDE_W + KW
    STEP: tl.constexpr = COLUMNS * STRIDE_W
    values = prepare(rows, known, t, first, STRIDE_H, PAD_H, COUNT, -PAD_W, STEP, STRIPS, H, W, BEFORE)
    o = t - (OPEN - 1)
    beside = read_beside(others, o, active, begin, end, strip, 1, COLUMNS, STRIPS, OW, C, BESIDE)
    totals_before = totals
    nothing = tl.zeros(weights[0].shape, tl.float32)
    still = ()
    for q in tl.static_range(OPEN):
        for u in tl.static_range(COLUMNS):
            if q == 0:
                value = nothing
            else:
                value = opened[(q - 1) * COLUMNS + u]
            for a in tl.static_range(STRIDE_H):
                if q * STRIDE_H + a < KH:
                    pixels = values[a * COUNT + u * STRIDE_W : a * COUNT + u * STRIDE_W + KW]
                    taps = weights[(q * STRIDE_H + a) * KW : (q * STRIDE_H + a + 1) * KW]
                    value = add_products(value, pixels, taps, begins(u * STRIDE_W - PAD_W, 1, STRIPS),
                                         ends(u * STRIDE_W - PAD_W, 1, KW, STRIPS, W))  # fmt: skip
            if q < OPEN - 1:
                still = still + (value,)
            elif not padding_only(u, STRIPS, OW):
                within = inside(True, strip * COLUMNS + u, False, (STRIPS - 1) * COLUMNS + u >= OW, OW)
                mask = active & (o >= begin) & (o < end) & within
                if AFTER is not None:
                    seen = beside[u * BESIDE : (u + 1) * BESIDE]
                    totals, value = count(totals, value, seen, within, known_after, AFTER, SUMS, BESIDE, STORES)
                tl.store(result + (o * (OW * PIXEL) + u * PIXEL), value.to(result.dtype.element_ty), mask=mask)
    totals = whole_rows((o >= begin) & (o < end), totals, totals_before, SUMS)
    return still, totals


@triton.jit(do_not_specialize=["N"])
def forward_kernel(x, w, y, before, after, beside, sums, N, C: tl.constexpr, H: tl.constexpr, W: tl.constexpr,
                   OH: tl.constexpr, OW: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, STRIDE_H: tl.constexpr,
                   STRIDE_W: tl.constexpr, PAD_H: tl.constexpr, PAD_W: tl.constexpr, COLUMNS: tl.constexpr,
                   ROWS: tl.constexpr, LANES: tl.constexpr, VECTOR: tl.constexpr, PREFETCH: tl.constexpr,
                   BEFORE_ONCE: tl.constexpr, BEFORE: tl.constexpr, AFTER_ONCE: tl.constexpr, AFTER: tl.constexpr,
                   SUMS: tl.constexpr, BESIDE: tl.constexpr, STORES: tl.constexpr, PIXEL: tl.constexpr):  # fmt: skip
    """Row t of the walk adds to outputs t, t - 1, ... t - OPEN + 1; the last of them is then complete."""
    STRIPS: tl.constexpr = ceil_div(OW, COLUMNS)
    OPEN: tl.constexpr = ceil_div(KH, STRIDE_H)
    COUNT: tl.constexpr = (COLUMNS - 1) * STRIDE_W + KW
    STEP: tl.constexpr = COLUMNS * STRIDE_W
    active, n, strip, channel = place(N, STRIPS, C, LANES, VECTOR)
    first = strip * STEP - PAD_W
    image = x + n.to(tl.int64) * (H * W * C) + (first * C + channel)
    place_out = n.to(tl.int64) * (OH * OW * C) + (strip * (COLUMNS * C) + channel)
    result = y + n.to(tl.int64) * (OH * OW * PIXEL) + (strip * (COLUMNS * PIXEL) + channel)
    others = shifted(beside, place_out, BESIDE)
    begin = tl.program_id(1) * ROWS
    end = tl.minimum(begin + ROWS, OH)
    weights = read_weights(w, channel, KH * KW)
    known = ()
    if BEFORE is not None:
        known = BEFORE_ONCE(before, channel)
    known_after = ()
    if AFTER is not None:
        known_after = AFTER_ONCE(after, channel)
    totals = zeros(SUMS, LANES, VECTOR)
    opened = zeros((OPEN - 1) * COLUMNS, LANES, VECTOR)
    if PREFETCH:
        ahead = read_rows(image, begin, True, first, STRIDE_H, PAD_H, COUNT, -PAD_W, STEP, STRIPS, H, W, C)
    for step in range(ROWS + OPEN - 1):
        t = begin + step
        if PREFETCH:
            rows = ahead
            more = t + 1 < end + OPEN - 1
            ahead = read_rows(image, t + 1, more, first, STRIDE_H, PAD_H, COUNT, -PAD_W, STEP, STRIPS, H, W, C)
        else:
            rows = read_rows(image, t, True, first, STRIDE_H, PAD_H, COUNT, -PAD_W, STEP, STRIPS, H, W, C)
        opened, totals = forward_row(rows, opened, totals, weights, known, known_after, others, result, active, strip,
                                     first, t, begin, end, C, H, W, OW, KH, KW, STRIDE_H, STRIDE_W, PAD_H, PAD_W,
                                     COLUMNS, STRIPS, BEFORE, AFTER, SUMS, BESIDE, STORES, PIXEL)  # fmt: skip
    if AFTER is not None:
        write_sums(sums, totals, n, strip, channel, active, STRIPS, C, SUMS)


@triton.jit
def input_grad_row(row, opened, totals, weights, known_after, others, result, active, strip, t, begin, end,
                   C: tl.constexpr, W: tl.constexpr, OW: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
                   STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr, PAD_H: tl.constexpr, PAD_W: tl.constexpr,
                   COLUMNS: tl.constexpr, STRIPS: tl.constexpr, AFTER: tl.constexpr, SUMS: tl.constexpr,
                   BESIDE: tl.constexpr, STORES: tl.constexpr, PIXEL: tl.constexpr):  # fmt: skip
    """One step of a walk: which rows are still open after it, and a lane's sums."""
    OPEN: tl.constexpr = KH if KH > STRIDE_H else STRIDE_H
    FIRST: tl.constexpr = -((KW - 1 - PAD_W) // STRIDE_W)
    LAST: tl.constexpr = (COLUMNS - 1 + PAD_W) // STRIDE_W
    COUNT: tl.constexpr = LAST - FIRST + 1
    row_out = t * STRIDE_H - PAD_H
    beside = read_beside(others, row_out, active, begin, end, strip, STRIDE_H, COLUMNS, STRIPS, W, C, BESIDE)
    values = widen(row, COUNT)[::-1]  # as taps meet them
    nothing = tl.zeros(weights[0].shape, tl.float32)
    still = ()
    for i in tl.static_range(OPEN):
        r = t * STRIDE_H - PAD_H + i
        totals_before = totals
        for u in tl.static_range(COLUMNS):
            if i < OPEN - STRIDE_H:
                value = opened[i * COLUMNS + u]
            else:
                value = nothing
            if i < KH:
                taps = weights[i * KW + (u + PAD_W) % STRIDE_W : (i + 1) * KW : STRIDE_W]
                pixels = values[LAST - (u + PAD_W) // STRIDE_W : LAST - (u + PAD_W) // STRIDE_W + len(taps)]
                value = add_products(value, pixels, taps, begins(OW - 1 - (u + PAD_W) // STRIDE_W, 1, STRIPS),
                                     ends(OW - 1 - (u + PAD_W) // STRIDE_W, 1, len(taps), STRIPS, OW))  # fmt: skip
            if i >= STRIDE_H:
                still = still + (value,)
            elif not padding_only(u, STRIPS, W):
                within = inside(True, strip * COLUMNS + u, False, (STRIPS - 1) * COLUMNS + u >= W, W)
                mask = active & (r >= begin) & (r < end) & within
                if AFTER is not None:
                    seen = beside[(i * COLUMNS + u) * BESIDE : (i * COLUMNS + u + 1) * BESIDE]
                    totals, value = count(totals, value, seen, within, known_after, AFTER, SUMS, BESIDE, STORES)
                tl.store(result + (r * (W * PIXEL) + u * PIXEL), value.to(result.dtype.element_ty), mask=mask)
        if i < STRIDE_H:
            totals = whole_rows((r >= begin) & (r < end), totals, totals_before, SUMS)
    return still, totals


@triton.jit(do_not_specialize=["N"])
def input_grad_kernel(dy, w, dx, after, beside, sums, N, C: tl.constexpr, H: tl.constexpr, W: tl.constexpr,
                      OH: tl.constexpr, OW: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, STRIDE_H: tl.constexpr,
                      STRIDE_W: tl.constexpr, PAD_H: tl.constexpr, PAD_W: tl.constexpr, COLUMNS: tl.constexpr,
                      ROWS: tl.constexpr, LANES: tl.constexpr, VECTOR: tl.constexpr,
                      PREFETCH: tl.constexpr, AFTER_ONCE: tl.constexpr, AFTER: tl.constexpr, SUMS: tl.constexpr,
                      BESIDE: tl.constexpr, STORES: tl.constexpr, PIXEL: tl.constexpr):  # fmt: skip
    """Row t of dy adds to rows t * STRIDE_H - PAD_H + i of dx, i < KH; the first STRIDE_H of them are then complete.
    COLUMNS is a multiple of STRIDE_W, so which taps meet a column of the strip is known at compile time."""
    STRIPS: tl.constexpr = ceil_div(W, COLUMNS)
    OPEN: tl.constexpr = KH if KH > STRIDE_H else STRIDE_H
    REACH: tl.constexpr = ceil_div(KH, STRIDE_H)
    STEP: tl.constexpr = COLUMNS // STRIDE_W
    FIRST: tl.constexpr = -((KW - 1 - PAD_W) // STRIDE_W)
    COUNT: tl.constexpr = (COLUMNS - 1 + PAD_W) // STRIDE_W - FIRST + 1
    active, n, strip, channel = place(N, STRIPS, C, LANES, VECTOR)
    first = strip * STEP + FIRST
    image = dy + n.to(tl.int64) * (OH * OW * C) + (first * C + channel)
    place_out = n.to(tl.int64) * (H * W * C) + (strip * (COLUMNS * C) + channel)
    result = dx + n.to(tl.int64) * (H * W * PIXEL) + (strip * (COLUMNS * PIXEL) + channel)
    others = shifted(beside, place_out, BESIDE)
    begin = tl.program_id(1) * ROWS
    end = tl.minimum(begin + ROWS, H)
    weights = read_weights(w, channel, KH * KW)
    start = (begin + PAD_H) // STRIDE_H - (REACH - 1)
    stop = (end - 1 + PAD_H) // STRIDE_H + 1
    # rows of dy that any walk needs: one more where walks begin at odd places
    STEPS: tl.constexpr = (ROWS - 1 + (PAD_H if ROWS % STRIDE_H == 0 else 1) % STRIDE_H) // STRIDE_H + REACH
    known_after = ()
    if AFTER is not None:
        known_after = AFTER_ONCE(after, channel)
    totals = zeros(SUMS, LANES, VECTOR)
    opened = zeros((OPEN - STRIDE_H) * COLUMNS, LANES, VECTOR)
    if PREFETCH:
        ahead = read_rows(image, start, True, first, 1, 0, COUNT, FIRST, STEP, STRIPS, OH, OW, C)
    for step in range(STEPS):
        t = start + step
        if PREFETCH:
            row = ahead
            ahead = read_rows(image, t + 1, t + 1 < stop, first, 1, 0, COUNT, FIRST, STEP, STRIPS, OH, OW, C)
        else:
            row = read_rows(image, t, True, first, 1, 0, COUNT, FIRST, STEP, STRIPS, OH, OW, C)
        opened, totals = input_grad_row(row, opened, totals, weights, known_after, others, result, active, strip, t,
                                        begin, end, C, W, OW, KH, KW, STRIDE_H, STRIDE_W, PAD_H, PAD_W, COLUMNS, STRIPS,
                                        AFTER, SUMS, BESIDE, STORES, PIXEL)  # fmt: skip
    if AFTER is not None:
        write_sums(sums, totals, n, strip, channel, active, STRIPS, C, SUMS)


@triton.jit
def weight_grad_row(rows, row_dy, window, products, known, first, t, H: tl.constexpr, W: tl.constexpr, OW: tl.constexpr,
                    KH: tl.constexpr, KW: tl.constexpr, STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr,
                    PAD_H: tl.constexpr, PAD_W: tl.constexpr, COLUMNS: tl.constexpr, STRIPS: tl.constexpr,
                    BEFORE: tl.constexpr):  # fmt: skip
    """One step of a walk: which rows of dy are still needed after it, and a lane's sums."""
    OPEN: tl.constexpr = ceil_div(KH, STRIDE_H)
    COUNT: tl.constexpr = (COLUMNS - 1) * STRIDE_W + KW
    STEP: tl.constexpr = COLUMNS * STRIDE_W
    values = prepare(rows, known, t, first, STRIDE_H, PAD_H, COUNT, -PAD_W, STEP, STRIPS, H, W, BEFORE)
    window = widen(row_dy, COLUMNS) + window
    more_products = ()
    for i in tl.static_range(KH):
        for j in tl.static_range(KW):
            pixels = values[(i % STRIDE_H) * COUNT + j : (i % STRIDE_H + 1) * COUNT - (KW - 1 - j) : STRIDE_W]
            grads = window[(i // STRIDE_H) * COLUMNS : (i // STRIDE_H + 1) * COLUMNS]
            value = add_products(products[i * KW + j], pixels, grads, begins(j - PAD_W, STRIDE_W, STRIPS),
                                 ends(j - PAD_W, STRIDE_W, COLUMNS if COLUMNS < OW else OW, STRIPS, W))  # fmt: skip
            more_products = more_products + (value,)
    still = ()
    for u in tl.static_range((OPEN - 1) * COLUMNS):
        still = still + (window[u],)
    return still, more_products


@triton.jit(do_not_specialize=["N"])
def weight_grad_kernel(x, dy, before, partials, N, C: tl.constexpr, H: tl.constexpr, W: tl.constexpr,
                       OH: tl.constexpr, OW: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, STRIDE_H: tl.constexpr,
                       STRIDE_W: tl.constexpr, PAD_H: tl.constexpr, PAD_W: tl.constexpr, COLUMNS: tl.constexpr,
                       ROWS: tl.constexpr, LANES: tl.constexpr, VECTOR: tl.constexpr, PREFETCH: tl.constexpr,
                       IMAGES: tl.constexpr, BEFORE_ONCE: tl.constexpr, BEFORE: tl.constexpr):  # fmt: skip
    """Row t of the walk meets rows t, t - 1, ... t - OPEN + 1 of dy, which stay in registers. Each lane writes the sums
    of its own walk as one row of `partials`."""
    STRIPS: tl.constexpr = ceil_div(OW, COLUMNS)
    OPEN: tl.constexpr = ceil_div(KH, STRIDE_H)
    COUNT: tl.constexpr = (COLUMNS - 1) * STRIDE_W + KW
    STEP: tl.constexpr = COLUMNS * STRIDE_W
    active, group, strip, channel = place(tl.cdiv(N, IMAGES), STRIPS, C, LANES, VECTOR)
    first = strip * STEP - PAD_W
    left = strip * COLUMNS
    begin = tl.program_id(1) * ROWS
    end = tl.minimum(begin + ROWS, OH)
    known = ()
    if BEFORE is not None:
        known = BEFORE_ONCE(before, channel)
    products = zeros(KH * KW, LANES, VECTOR)
    for m in range(IMAGES):
        n = group * IMAGES + m
        here = n < N
        image = x + n.to(tl.int64) * (H * W * C) + (first * C + channel)
        grad = dy + n.to(tl.int64) * (OH * OW * C) + (left * C + channel)
        window = zeros((OPEN - 1) * COLUMNS, LANES, VECTOR)
        if PREFETCH:
            ahead = read_rows(image, begin, here, first, STRIDE_H, PAD_H, COUNT, -PAD_W, STEP, STRIPS, H, W, C)
            ahead_dy = read_row(grad + begin * (OW * C), here, left, COLUMNS, 0, COLUMNS, STRIPS, OW, C)
        for step in range(ROWS + OPEN - 1):
            t = begin + step
            if PREFETCH:
                rows = ahead
                row_dy = ahead_dy
                more = here & (t + 1 < end + OPEN - 1)
                ahead = read_rows(image, t + 1, more, first, STRIDE_H, PAD_H, COUNT, -PAD_W, STEP, STRIPS, H, W, C)
                ahead_dy = read_row(grad + (t + 1) * (OW * C), here & (t + 1 < end), left, COLUMNS, 0, COLUMNS, STRIPS,
                                    OW, C)  # fmt: skip
            else:
                rows = read_rows(image, t, here, first, STRIDE_H, PAD_H, COUNT, -PAD_W, STEP, STRIPS, H, W, C)
                row_dy = read_row(grad + t * (OW * C), here & (t < end), left, COLUMNS, 0, COLUMNS, STRIPS, OW, C)
            window, products = weight_grad_row(rows, row_dy, window, products, known, first, t, H, W, OW, KH, KW,
                                               STRIDE_H, STRIDE_W, PAD_H, PAD_W, COLUMNS, STRIPS, BEFORE)  # fmt: skip
    write_sums(partials, products, group, strip, channel, active, STRIPS, C, KH * KW)


@triton.jit
def add_up(partials, column, there, begin, end, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The sum over some rows of `partials` [rows, WIDTH] of each column, always in the same order."""
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(begin, end, ROWS):
        row = (start + tl.arange(0, ROWS))[:, None]
        at = partials + row.to(tl.int64) * WIDTH + column[None, :]
        total += tl.load(at, mask=there[None, :] & (row < end), other=0.0)
    return tl.sum(total, axis=0)


@triton.jit
def fold_kernel(partials, folded, PARTS: tl.constexpr, WIDTH: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr,
                COLUMNS: tl.constexpr):  # fmt: skip
    """folded[i] = the sum over CHUNK rows of `partials`: many sums of few columns, by many programs."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    there = column < WIDTH
    begin = tl.program_id(1) * CHUNK
    end = tl.minimum(begin + CHUNK, PARTS)
    value = add_up(partials, column, there, begin, end, WIDTH, ROWS, COLUMNS)
    tl.store(folded + tl.program_id(1) * WIDTH + column, value, mask=there)


@triton.jit
def finish_kernel(partials, out, PARTS: tl.constexpr, C: tl.constexpr, TAPS: tl.constexpr, ROWS: tl.constexpr,
                  COLUMNS: tl.constexpr):  # fmt: skip
    """out[c, tap] = the sum over `partials[:, tap, c]`."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    there = column < TAPS * C
    value = add_up(partials, column, there, 0, PARTS, TAPS * C, ROWS, COLUMNS)
    tl.store(out + (column % C) * TAPS + column // C, value.to(out.dtype.element_ty), mask=there)


# --------------------------------------------------------------------------------------------------------- launching


def pair(value: int | Sequence[int]) -> tuple[int, int]:
    """One number for both dimensions, or one for each."""
    if isinstance(value, int):
        return value, value
    height, width = value
    return height, width


def output_size(height: int, width: int, kernel: Sequence[int], stride: Any, padding: Any) -> tuple[int, int]:
    (kh, kw), (sh, sw), (ph, pw) = pair(kernel), pair(stride), pair(padding)
    return (height + 2 * ph - kh) // sh + 1, (width + 2 * pw - kw) // sw + 1


def why_not(
    shape: Sequence[int],
    weight_shape: Sequence[int],
    stride: int | Sequence[int],
    padding: int | Sequence[int],
    dilation: int | Sequence[int],
    groups: int,
    dtype: torch.dtype,
) -> str:
    """Why these kernels cannot do a convolution of an input of this shape (N, C, H, W); "" if they can."""
    if len(shape) != 4 or len(weight_shape) != 4:
        return f"the input has {len(shape)} dimensions and the weight {len(weight_shape)}; 4 and 4 are needed"
    n, c, height, width = shape
    kernel, strides, pads = pair(weight_shape[2:]), pair(stride), pair(padding)
    if dtype not in DTYPES:
        return f"{dtype} is not one of {', '.join(str(d) for d in DTYPES)}"
    if groups != c or tuple(weight_shape[:2]) != (c, 1):
        return f"not depthwise: {c} channels in, {weight_shape[0]} out, {groups} groups"
    if pair(dilation) != (1, 1):
        return f"dilation {dilation} (only 1)"
    if not all(1 <= k <= 7 for k in kernel):
        return f"kernel {kernel[0]}x{kernel[1]} (only up to 7x7)"
    if not all(s in (1, 2) for s in strides):
        return f"stride {stride} (only 1 or 2)"
    if not all(0 <= p < k for p, k in zip(pads, kernel, strict=True)):
        return f"padding {padding} is not smaller than the kernel {kernel[0]}x{kernel[1]}"
    oh, ow = output_size(height, width, kernel, strides, pads)
    if min(n, c, height, width, oh, ow) < 1:
        return f"nothing to compute: input {tuple(shape)}, output {(n, c, oh, ow)}"
    # a walk may point one padded row past the image
    if max(height + 2 * pads[0] + 2, oh + 7) * max(width + 2 * pads[1] + 16, ow + 16) * c >= LARGEST:
        return f"one image of {tuple(shape[1:])} has too many elements for 32-bit indices"
    if n * c * max(width, ow) >= LARGEST:
        return f"{tuple(shape)} has too many columns for 32-bit indices"
    return ""


def strips_of(width: int, columns: int) -> int:
    return -(-width // columns)


def launch(
    kernel: Any, strips: int, items: int, height: int, c: int, config: Config, *args: Any, **constants: Any
) -> None:
    """One thread for each strip of each item (an image or several) and `vector` channels."""
    lanes = 32 * config.warps
    grid = (-(-items * strips * (c // config.vector) // lanes), -(-height // config.rows))
    kernel[grid](
        *args,
        **constants,
        COLUMNS=config.columns,
        ROWS=config.rows,
        LANES=lanes,
        VECTOR=config.vector,
        PREFETCH=config.prefetch,
        num_warps=config.warps,
        num_stages=1,
    )


def geometry(
    image: torch.Tensor, weight: torch.Tensor, output: torch.Tensor, stride: Any, padding: Any, config: Config
) -> dict[str, int]:
    """The constants of all three kernels, once everything about the tensors is as the kernels assume.

    `padding` is that before the image. What is behind it follows from the output's size.
    """
    n, c, height, width = image.shape
    reason = why_not(image.shape, weight.shape, stride, padding, 1, weight.shape[0], image.dtype)
    (kh, kw), (sh, sw), (ph, pw) = pair(weight.shape[2:]), pair(stride), pair(padding)
    if not reason:
        # every window sees some of the image
        most = (n, c, (height + ph - 1) // sh + 1, (width + pw - 1) // sw + 1)
        if tuple(output.shape[:2]) != (n, c) or any(o > m for o, m in zip(output.shape[2:], most[2:], strict=True)):
            reason = f"the output has shape {tuple(output.shape)}, not {most} or less"
        elif not all(t.is_contiguous(memory_format=torch.channels_last) for t in (image, output)):
            reason = "input and output must be channels-last (torch.channels_last), dense"
        elif not weight.is_contiguous():
            reason = "the weight must be contiguous"
        elif output.dtype != image.dtype:
            reason = f"the output is {output.dtype}, the input {image.dtype}"
        elif c % config.vector:
            reason = f"{c} channels are not a multiple of the configuration's vector, {config.vector}"
    if reason:
        raise InputError(f"depthwise convolution: {reason}; use the aten provider for this layer")
    return dict(
        C=c, H=height, W=width, OH=output.shape[2], OW=output.shape[3], KH=kh, KW=kw, STRIDE_H=sh, STRIDE_W=sw,
        PAD_H=ph, PAD_W=pw,
    )  # fmt: skip


def expect(tensor: torch.Tensor, shape: tuple[int, ...], name: str) -> None:
    if tuple(tensor.shape) != shape or tensor.dtype != torch.float32 or not tensor.is_contiguous():
        raise InputError(
            f"depthwise convolution: {name} must be float32 of shape {shape}, contiguous; "
            f"it is {tensor.dtype} of shape {tuple(tensor.shape)}"
        )


def forward(
    x: torch.Tensor,
    w: torch.Tensor,
    y: torch.Tensor,
    *,
    stride: int | Sequence[int],
    padding: int | Sequence[int],
    config: Config,
) -> None:
    """y = the convolution of x."""
    constants = geometry(x, w, y, stride, padding, config) | NOTHING_BEFORE | NOTHING_AFTER | {"PIXEL": x.shape[1]}
    strips = strips_of(y.shape[3], config.columns)
    launch(
        forward_kernel, strips, x.shape[0], y.shape[2], x.shape[1], config,
        x, w, y, None, None, None, None, x.shape[0], **constants,
    )  # fmt: skip


def input_grad(
    dy: torch.Tensor,
    w: torch.Tensor,
    dx: torch.Tensor,
    *,
    stride: int | Sequence[int],
    padding: int | Sequence[int],
    config: Config,
) -> None:
    """dx = the gradient with respect to the input."""
    constants = geometry(dx, w, dy, stride, padding, config) | NOTHING_AFTER | {"PIXEL": dx.shape[1]}
    if config.columns % pair(stride)[1]:
        raise InputError(f"depthwise convolution: {config} needs columns that are a multiple of the stride {stride}")
    strips = strips_of(dx.shape[3], config.columns)
    launch(
        input_grad_kernel, strips, dx.shape[0], dx.shape[2], dx.shape[1], config,
        dy, w, dx, None, None, None, dx.shape[0], **constants,
    )  # fmt: skip


def weight_grad(
    x: torch.Tensor,
    dy: torch.Tensor,
    dw: torch.Tensor,
    partials: torch.Tensor,
    *,
    stride: int | Sequence[int],
    padding: int | Sequence[int],
    config: Config,
) -> None:
    """dw = the gradient with respect to the weight. `partials` is scratch of `partials_shape`."""
    constants = geometry(x, dw, dy, stride, padding, config) | NOTHING_BEFORE
    expect(partials, partials_shape(dy.shape, dw.shape, config), "partials")
    strips, groups = strips_of(dy.shape[3], config.columns), -(-x.shape[0] // config.images)
    launch(
        weight_grad_kernel, strips, groups, dy.shape[2], x.shape[1], config,
        x, dy, None, partials, x.shape[0], **constants, IMAGES=config.images,
    )  # fmt: skip
    finish(partials, dw)


def finish(partials: torch.Tensor, out: torch.Tensor) -> None:
    """out[c, ...] = the sum of `partials` [P, taps, C] over P; `out` is contiguous, [C, taps] in some shape."""
    parts, taps, c = partials.shape
    columns = 8 if taps * c < 4096 else 32
    finish_kernel[(-(-taps * c // columns),)](
        partials, out, PARTS=parts, C=c, TAPS=taps, ROWS=2048 // columns, COLUMNS=columns, num_warps=8, num_stages=1
    )


def partials_shape(dy_shape: Sequence[int], weight_shape: Sequence[int], config: Config) -> tuple[int, int, int]:
    """The scratch of `weight_grad`: float32, one row for each walk."""
    n, c, oh, ow = dy_shape
    walks = -(-n // config.images) * strips_of(ow, config.columns) * -(-oh // config.rows)
    return walks, weight_shape[2] * weight_shape[3], c


def sums_shape(shape: Sequence[int], count: int, config: Config) -> tuple[int, int, int]:
    """Partial sums over a stored image of this shape: float32, one row for each walk, `count` sums per channel."""
    n, c, height, width = shape
    return n * strips_of(width, config.columns) * -(-height // config.rows), count, c


# ------------------------------------------------------------------------------------------------------------ tuning


def configs(
    which: str, shape: Sequence[int], k: int | Sequence[int], stride: int | Sequence[int], dtype: torch.dtype
) -> list[Config]:
    """A handful of configurations worth timing for `which` ("forward", "input_grad" or "weight_grad") and an input of
    this shape, the best guess first."""
    if which not in ("forward", "input_grad", "weight_grad"):
        raise InputError(f"depthwise convolution: {which!r} is none of forward, input_grad, weight_grad")
    n, c, height, width = shape
    (kh, kw), (sh, sw) = pair(k), pair(stride)
    if which != "input_grad":  # walks are over the output; padding changes its size by less than a kernel
        height, width = -(-height // sh), -(-width // sw)
    scatter = sw if which == "input_grad" else 1
    taps = kh * kw
    two = 2 if c % 2 == 0 else 1

    def config(strip: int, vector: int = two, shorter: int = 1, images: int = 1, prefetch: bool = True) -> Config:
        columns = min(strip * scatter, -(-width // scatter) * scatter)
        lanes = n * strips_of(width, columns) * (c // vector)
        if which == "weight_grad":
            # the sums of a walk are written and read again: make it long enough that this is little
            while columns * height * images < 7 * taps and lanes >= 2 * images * FEWEST:
                images *= 2
        images = min(images, n)
        pieces = max(1, min(-(-BUSY * images // lanes), height // (4 * kh))) * shorter
        rows = max(kh, -(-height // pieces))
        if which == "input_grad":
            rows = -(-rows // sh) * sh  # every walk then begins at the same phase of the stride
        return Config(columns, min(rows, height), vector, 4, images, prefetch)

    if taps <= 9:
        found = [config(7), config(7, prefetch=False), config(4), config(7, shorter=2)]
        found += [config(4, vector=4)] if c % 4 == 0 and dtype.itemsize == 2 else [config(7, vector=1)]
    elif taps <= 25:
        found = [config(5), config(4), config(7), config(7, prefetch=False), config(7, shorter=2)]
    else:
        found = [config(4), config(4, prefetch=False), config(2), config(7, vector=1), config(4, vector=1)]
    # a last strip that is mostly empty is a poor first guess
    found.sort(key=lambda config: strips_of(width, config.columns) * config.columns > 1.1 * width)
    if which == "weight_grad":
        found.append(replace(found[0], images=min(n, 2 * found[0].images)))
    return list(dict.fromkeys(found))
