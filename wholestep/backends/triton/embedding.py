"""The gradient of an embedding for NVIDIA GPUs: each row of the table is written once, and always by the same sums.

Tokens are sorted by the row they name: a token's place is how many of all tokens come before it. Then every row is
written by whoever owns it, zeros where nobody names it, or named rows alone, with a table of their places. Rows that
many tokens name are summed in parts of equal length.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Names in capitals are constants of the compiled kernel: TOKENS tokens, ROWS rows of the table, COLUMNS columns.
# DY says where tokens of dy lie, and INDICES where indices do (`offset`); DY_COLUMN is from one column to the next.
# ALONE: only rows that are named are written, at the place of their first sorted token.
# OUT is from one row of the result to the next, and from one column to the next.
# `order` has the tokens sorted by row, `named` the row of each.
# A program works on BLOCK_ROWS or BLOCK_TOKENS of those by BLOCK_COLUMNS.


@triton.jit
def offset(token, WALK: tl.constexpr):
    """Where a token lies. WALK: how many are a group, from one group to the next, from one token to the next."""
    if WALK[1] == WALK[0] * WALK[2]:
        return token.to(tl.int64) * WALK[2]
    else:
        return (token // WALK[0]).to(tl.int64) * WALK[1] + (token % WALK[0]).to(tl.int64) * WALK[2]


@triton.jit
def collect_kernel(indices, near, INDICES: tl.constexpr, TOKENS: tl.constexpr, SIZE: tl.constexpr,
                   FROM_END: tl.constexpr, FURTHER: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Puts indices that lie apart side by side, since all of them are read again and again: -1 for what is no row.

    FURTHER: these are of one more dimension, of SIZE, behind those that are there already.
    """
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    index = tl.load(indices + offset(at, INDICES), mask=at < TOKENS, other=0)
    if FROM_END:
        index = tl.where(index < 0, index + SIZE, index)
    there = (index >= 0) & (index < SIZE)
    index = index.to(tl.int32)
    if FURTHER:
        before = tl.load(near + at, mask=at < TOKENS, other=0)
        there = there & (before >= 0)
        index = before * SIZE + index
    tl.store(near + at, tl.where(there, index, -1), mask=at < TOKENS)


@triton.jit
def read(indices, at, TOKENS: tl.constexpr, ROWS: tl.constexpr):
    return tl.load(indices + at, mask=at < TOKENS, other=ROWS + 1)


@triton.jit
def row_of(index, ROWS: tl.constexpr, FROM_END: tl.constexpr):
    """The row that an index names, as an f32 number: -1 or ROWS + 1 where the table has no such row.

    FROM_END: negative ones count from the end.
    """
    if FROM_END:
        index = tl.where(index < 0, index + ROWS, index)
    return tl.minimum(tl.maximum(index.to(tl.int32), -1), ROWS + 1).to(tl.float32)


@triton.jit
def are_below(rows, limits):
    """1 for every row below a limit, else 0. All are whole numbers: the difference, saturated, is that."""
    return tl.minimum(tl.maximum(limits[:, None] - rows[None, :], 0.0), 1.0)


@triton.jit
def sort_kernel(indices, order, named, TOKENS: tl.constexpr, ROWS: tl.constexpr, FROM_END: tl.constexpr,
                OWN: tl.constexpr, OTHERS: tl.constexpr):  # fmt: skip
    """Compares OWN tokens with all others, OTHERS at a time. Of equal tokens the earlier comes first."""
    own = tl.program_id(0) * OWN + tl.arange(0, OWN)
    row = row_of(read(indices, own, TOKENS, ROWS), ROWS, FROM_END)
    here = tl.program_id(0) * OWN // OTHERS * OTHERS
    others = tl.arange(0, OTHERS)
    count = tl.zeros((OWN, OTHERS), tl.float32)
    ahead = read(indices, others, TOKENS, ROWS)
    for begin in range(0, here, OTHERS):
        count += are_below(row_of(ahead, ROWS, FROM_END), row + 1)
        ahead = read(indices, begin + OTHERS + others, TOKENS, ROWS)
    for begin in range(here, TOKENS, OTHERS):
        count += are_below(row_of(ahead, ROWS, FROM_END), row)
        ahead = read(indices, begin + OTHERS + others, TOKENS, ROWS)
    theirs = row_of(read(indices, here + others, TOKENS, ROWS), ROWS, FROM_END)
    count += ((here + others)[None, :] < own[:, None]) & (theirs[None, :] == row[:, None])
    place = tl.sum(count, axis=1).to(tl.int32)
    tl.store(order + place, own, mask=own < TOKENS)
    tl.store(named + place, row.to(tl.int32), mask=own < TOKENS)


@triton.jit
def gather(dy, token, column, there, DY: tl.constexpr, DY_COLUMN: tl.constexpr, COLUMNS: tl.constexpr):
    """dy of some tokens in f32, zeros for those that are not there."""
    at = dy + offset(token, DY)[:, None] + column.to(tl.int64)[None, :] * DY_COLUMN
    return tl.load(at, mask=there[:, None] & (column < COLUMNS)[None, :], other=0.0).to(tl.float32)


@triton.jit
def runs_kernel(dy, order, named, starts, partials, places, DY: tl.constexpr, DY_COLUMN: tl.constexpr,
                TOKENS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, PART: tl.constexpr,
                STEPS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, ALONE: tl.constexpr,
                PADDING: tl.constexpr):  # fmt: skip
    """The sum of every PART sorted tokens that name one row; and where each row's tokens start, by STEPS halvings.

    ALONE: also where the row's sum will be, which is there.
    """
    WIDE: tl.constexpr = (COLUMNS + BLOCK_COLUMNS - 1) // BLOCK_COLUMNS
    SUMMING: tl.constexpr = TOKENS // PART * WIDE
    program = tl.program_id(0)
    if program < SUMMING:
        part = program // WIDE
        first = tl.load(named + part * PART)
        last = tl.load(named + part * PART + PART - 1)
        if first == last:
            column = program % WIDE * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
            token = tl.load(order + part * PART + tl.arange(0, PART))
            total = tl.sum(gather(dy, token, column, token >= 0, DY, DY_COLUMN, COLUMNS), axis=0)
            tl.store(partials + part * COLUMNS + column, total, mask=column < COLUMNS)
    else:
        row = (program - SUMMING) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        low = tl.zeros((BLOCK_ROWS,), tl.int32)
        high = low + TOKENS
        for _ in range(STEPS):
            unsure = low < high
            middle = (low + high) // 2
            below = tl.load(named + middle, mask=unsure, other=ROWS) < row
            low = tl.where(unsure & below, middle + 1, low)
            high = tl.where(unsure & (below == 0), middle, high)
        tl.store(starts + row, low, mask=row <= ROWS)
        if ALONE:
            some = tl.load(named + low, mask=low < TOKENS, other=-1) == row
            tl.store(places + row, tl.where(some & (row != PADDING), low, -1), mask=row < ROWS)


@triton.jit
def add_tokens(total, dy, order, column, begin, end, DY: tl.constexpr, DY_COLUMN: tl.constexpr,
               COLUMNS: tl.constexpr, BLOCK_TOKENS: tl.constexpr):  # fmt: skip
    """Adds dy of sorted tokens from `begin` to `end`, BLOCK_TOKENS at a time, without summing over those."""
    for first in range(begin, end, BLOCK_TOKENS):
        at = first + tl.arange(0, BLOCK_TOKENS)
        token = tl.load(order + at, mask=at < end, other=0)
        total += gather(dy, token, column, at < end, DY, DY_COLUMN, COLUMNS)
    return total


@triton.jit
def long_row(dy, order, named, starts, partials, out, window, column, DY: tl.constexpr, DY_COLUMN: tl.constexpr,
             TOKENS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, PADDING: tl.constexpr,
             FEW: tl.constexpr, PART: tl.constexpr, BLOCK_TOKENS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
             OUT: tl.constexpr, ALONE: tl.constexpr):  # fmt: skip
    """Writes the row of more than FEW tokens that starts among FEW sorted ones, if there is one: no two can."""
    at = window * FEW + tl.arange(0, FEW)
    row = tl.load(named + at, mask=at < TOKENS, other=-1)
    previous = tl.load(named + at - 1, mask=(at > 0) & (at < TOKENS), other=-2)
    further = tl.load(named + at + FEW, mask=at + FEW < TOKENS, other=-2)
    starts_here = (row != previous) & (row == further) & (row >= 0) & (row < ROWS) & (row != PADDING)
    begin = tl.max(tl.where(starts_here, at, -1), axis=0)
    if begin >= 0:
        chosen = tl.load(named + begin)
        end = tl.load(starts + chosen + 1)
        first, last = (begin + PART - 1) // PART, end // PART  # the parts that are summed already
        parts = first < last
        total = tl.zeros((BLOCK_TOKENS, BLOCK_COLUMNS), tl.float32)
        total = add_tokens(total, dy, order, column, begin, tl.where(parts, first * PART, end), DY, DY_COLUMN,
                           COLUMNS, BLOCK_TOKENS)  # fmt: skip
        for some in range(first, last, BLOCK_TOKENS):
            part = some + tl.arange(0, BLOCK_TOKENS)
            total += gather(partials, part, column, part < last, (1, COLUMNS, COLUMNS), 1, COLUMNS)
        total = add_tokens(total, dy, order, column, tl.where(parts, last * PART, end), end, DY, DY_COLUMN,
                           COLUMNS, BLOCK_TOKENS)  # fmt: skip
        value = tl.sum(total, axis=0).to(out.dtype.element_ty)
        place = begin if ALONE else chosen
        tl.store(out + place.to(tl.int64) * OUT[0] + column.to(tl.int64) * OUT[1], value, mask=column < COLUMNS)


@triton.jit
def short_rows(dy, order, starts, out, program, DY: tl.constexpr, DY_COLUMN: tl.constexpr, ROWS: tl.constexpr,
               COLUMNS: tl.constexpr, PADDING: tl.constexpr, FEW: tl.constexpr, BLOCK_ROWS: tl.constexpr,
               ROW_COLUMNS: tl.constexpr, OUT: tl.constexpr):  # fmt: skip
    """Writes the rows of a block that at most FEW tokens name, or none."""
    ROW_WIDE: tl.constexpr = (COLUMNS + ROW_COLUMNS - 1) // ROW_COLUMNS
    row = program // ROW_WIDE * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    column = program % ROW_WIDE * ROW_COLUMNS + tl.arange(0, ROW_COLUMNS)
    begin = tl.load(starts + row, mask=row < ROWS, other=0)
    end = tl.load(starts + row + 1, mask=row < ROWS, other=0)
    end = tl.where(row == PADDING, begin, end)
    mine = (row < ROWS) & (end - begin <= FEW)
    most = tl.max(tl.where(mine, end - begin, 0), axis=0)
    inside = column < COLUMNS
    if OUT[0] == 1:  # neighbouring rows are neighbours in memory, and often their tokens are
        total = tl.zeros((ROW_COLUMNS, BLOCK_ROWS), tl.float32)
        for number in range(most):
            there = mine & (begin + number < end)
            token = tl.load(order + begin + number, mask=there, other=0)
            place = dy + offset(token, DY)[None, :] + column.to(tl.int64)[:, None] * DY_COLUMN
            total += tl.load(place, mask=there[None, :] & inside[:, None], other=0.0).to(tl.float32)
        at = out + row[None, :] + column.to(tl.int64)[:, None] * OUT[1]
        tl.store(at, total.to(out.dtype.element_ty), mask=mine[None, :] & inside[:, None])
    else:
        total = tl.zeros((BLOCK_ROWS, ROW_COLUMNS), tl.float32)
        for number in range(most):
            there = mine & (begin + number < end)
            token = tl.load(order + begin + number, mask=there, other=0)
            total += gather(dy, token, column, there, DY, DY_COLUMN, COLUMNS)
        at = out + row.to(tl.int64)[:, None] * OUT[0] + column[None, :] * OUT[1]
        tl.store(at, total.to(out.dtype.element_ty), mask=mine[:, None] & inside[None, :])


@triton.jit
def lone_rows(dy, order, named, starts, out, program, DY: tl.constexpr, DY_COLUMN: tl.constexpr, TOKENS: tl.constexpr,
              ROWS: tl.constexpr, COLUMNS: tl.constexpr, PADDING: tl.constexpr, FEW: tl.constexpr,
              BLOCK_ROWS: tl.constexpr, ROW_COLUMNS: tl.constexpr):  # fmt: skip
    """The same where a row is written at the place of its first sorted token, and zeros at that of every other."""
    ROW_WIDE: tl.constexpr = (COLUMNS + ROW_COLUMNS - 1) // ROW_COLUMNS
    begin = program // ROW_WIDE * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    column = program % ROW_WIDE * ROW_COLUMNS + tl.arange(0, ROW_COLUMNS)
    row = tl.load(named + begin, mask=begin < TOKENS, other=-1)
    previous = tl.load(named + begin - 1, mask=(begin > 0) & (begin < TOKENS), other=-2)
    first = (row != previous) & (row >= 0) & (row < ROWS) & (row != PADDING)
    end = tl.load(starts + row + 1, mask=first, other=0)
    count = tl.where(first, end - begin, 0)
    mine = (begin < TOKENS) & (count <= FEW)
    most = tl.max(tl.where(mine, count, 0), axis=0)
    total = tl.zeros((BLOCK_ROWS, ROW_COLUMNS), tl.float32)
    for number in range(most):
        there = mine & (number < count)
        token = tl.load(order + begin + number, mask=there, other=0)
        total += gather(dy, token, column, there, DY, DY_COLUMN, COLUMNS)
    at = out + begin.to(tl.int64)[:, None] * COLUMNS + column[None, :]
    tl.store(at, total.to(out.dtype.element_ty), mask=mine[:, None] & (column < COLUMNS)[None, :])


@triton.jit
def rows_kernel(dy, order, named, starts, partials, out, DY: tl.constexpr, DY_COLUMN: tl.constexpr,
                TOKENS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, PADDING: tl.constexpr,
                FEW: tl.constexpr, WINDOWS: tl.constexpr, PART: tl.constexpr, BLOCK_ROWS: tl.constexpr,
                BLOCK_TOKENS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, ROW_COLUMNS: tl.constexpr,
                OUT: tl.constexpr, ALONE: tl.constexpr):  # fmt: skip
    """Writes every row. The first programs look for rows of more than FEW tokens, the others own all rows in turn."""
    WIDE: tl.constexpr = (COLUMNS + BLOCK_COLUMNS - 1) // BLOCK_COLUMNS
    LOOKING: tl.constexpr = (TOKENS + FEW * WINDOWS - 1) // (FEW * WINDOWS) * WIDE
    program = tl.program_id(0)
    if program < LOOKING:
        column = program % WIDE * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
        for window in range(WINDOWS):
            long_row(dy, order, named, starts, partials, out, program // WIDE * WINDOWS + window, column, DY,
                     DY_COLUMN, TOKENS, ROWS, COLUMNS, PADDING, FEW, PART, BLOCK_TOKENS, BLOCK_COLUMNS,
                     OUT, ALONE)  # fmt: skip
    elif ALONE:
        lone_rows(dy, order, named, starts, out, program - LOOKING, DY, DY_COLUMN, TOKENS, ROWS, COLUMNS, PADDING, FEW,
                  BLOCK_ROWS, ROW_COLUMNS)  # fmt: skip
    else:
        short_rows(dy, order, starts, out, program - LOOKING, DY, DY_COLUMN, ROWS, COLUMNS, PADDING, FEW,
                   BLOCK_ROWS, ROW_COLUMNS, OUT)  # fmt: skip
