"""Which configurations of a family are worth timing, the best guess first: from sizes and strides alone."""

from __future__ import annotations

from dataclasses import replace

from .families import (
    LONGEST_HELD,
    PROCESSORS,
    Blocks,
    Cases,
    Config,
    Family,
    Rows,
    Sums,
    Tiles,
    power_of_two,
    rows_of_run,
)
from .walk import MANY_TIMES, fast_dim


def configs(family: Family) -> list[Config]:
    made = {"pointwise": pointwise, "rows": rows, "sums": sums}[family.kind](family)
    return list(dict.fromkeys(made))[:6]


def between(low: int, n: int, high: int) -> int:
    return max(low, min(n, high))


def pointwise(family: Family) -> list[Config]:
    count = family.length
    most = max(power_of_two(count), 1)
    flat: list[Config] = [Blocks(min(b, most), w) for b, w in ((1024, 4), (512, 4), (2048, 4), (4096, 8), (512, 2))]
    if family.cases:
        return [*(Cases(min(b, most), w) for b, w in ((1024, 4), (512, 4), (2048, 8))), flat[0]]
    both = family.fast_dims()
    if both is None:
        return [*in_runs(family), *flat][:4]
    across, along = both
    tall, wide = power_of_two(across.size), power_of_two(along.size)
    tiles: list[Config] = []
    for high, broad, warps in ((64, 64, 8), (32, 64, 4), (32, 32, 4), (64, 32, 4), (128, 64, 8)):
        # a side that is short leaves its room to the other
        h, b = min(high, tall), min(broad, wide)
        h, b = min(tall, high * (broad // b)), min(wide, broad * (high // h))
        tiles.append(Tiles(h, b, warps))
    return [*tiles, flat[0]]


def in_runs(family: Family) -> list[Config]:
    """Tiles of runs, where little of them is empty.

    They have fewer columns than threads: Triton then lets each thread keep 16 bytes of a row, and not one column.
    """
    if family.runs is None or family.length < 1 << 18:
        return []
    across, along = family.runs
    made: list[Config] = []
    for high, wide, warps in ((32, 64, 4), (64, 64, 4), (32, 32, 2)):
        n = rows_of_run(across, along, wide)
        full = filled(across.size // n, high) * filled(n * along.size, wide)
        made += [Tiles(high, wide, warps)] if full > 0.85 else []
    return made[:2]


def filled(size: int, block: int) -> float:
    """The share of blocks that is not beyond the end."""
    return size / (-(-size // block) * block)


def walked_along_row(family: Family) -> bool:
    """Whether the largest tensor's fastest dimension lies in the row."""
    for access in family.walk.heavy():
        dim = fast_dim(access, [*family.inside, *family.outside])
        if dim is not None:
            return dim in family.inside
    return True


#: elements a program holds, and its warps
HELD = ((1024, 4), (2048, 4), (1024, 2), (4096, 8), (4096, 4), (2048, 8), (4096, 16), (8192, 16), (8192, 8), (8192, 32),
        (16384, 32), (16384, 16))  # fmt: skip


#: elements of a long row that a program walks at a time, its warps, and how many such walks are under way
LOOPED = (
    (4096, 8, 1),
    (8192, 16, 1),
    (4096, 16, 1),
    (4096, 16, 3),
    (2048, 8, 1),
    (2048, 8, 3),
    (8192, 32, 2),
    (8192, 32, 1),
)


def rows(family: Family) -> list[Config]:
    length, count = family.length, family.count
    block, most = power_of_two(length), power_of_two(count)
    made: list[Config] = []
    if not walked_along_row(family):  # neighbouring rows are neighbours in memory
        if count < 48 * PROCESSORS:
            made += side_by_side(family)
        else:
            if block <= WIDEST_LOOKED_UP and looks_rows_up(family):
                made += [Rows(n, 1, 4, looped=True) for n in (256, 128)]
            made += [
                Rows(n, block, between(4, n * block // 512, 32)) for n in (64, 32, 128) if n * block <= LONGEST_HELD
            ]
            made += [Rows(64, min(width, block), warps, looped=True) for width, warps in ((32, 4), (64, 8))]
    else:
        fitting = [(e, w) for e, w in HELD if block <= e <= max(block, 4096)] if block > 16 else [(1024, 4), (512, 4)]
        made += [Rows(between(1, e // block, most), block, w) for e, w in fitting if block <= LONGEST_HELD]
        if block > 4096:
            made += [Rows(1, w, n, looped=True, stages=s) for w, n, s in LOOPED]
    if family.across:
        ahead = reading_ahead(family, block) if walked_along_row(family) and 256 <= block <= LONGEST_HELD else []
        made = [*ahead, *(r for c in made if isinstance(c, Rows) for r in shared(family, c))]
    return made


#: the longest row that a thread walks by itself
WIDEST_LOOKED_UP = 64


def looks_rows_up(family: Family) -> bool:
    """Whether nothing has a number for every element of every row: what lies along rows is looked up in something
    small. A thread then has a row by itself: where it looks is worked out once, not by all threads that have some."""
    walk, whole = family.walk, family.length * family.count
    along = [a for a in walk.accesses.values() if walk.access_dims(a) & family.row]
    return all(a.itemsize * whole > MANY_TIMES * walk.bytes(a) for a in along)


def side_by_side(family: Family) -> list[Config]:
    """Few rows that lie side by side: so few per program that most multiprocessors have one, but words of 16 bytes.

    A program is alone on its multiprocessor: it has many warps, so that most of its rows is under way at once.
    """
    block, most = power_of_two(family.length), power_of_two(family.count)
    word = 16 // family.walk.heavy()[0].itemsize
    n = min(32, most)
    while n > word and 4 * -(-family.count // n) < 3 * PROCESSORS:
        n //= 2
    if n > 1 and 4 * -(-family.count // n) <= PROCESSORS:  # so few that half a word is better
        n //= 2
    made: list[Config] = []
    for high in (n, max(n // 2, 1), min(2 * n, most)):
        width = min(block, 8192 // high)
        made.append(Rows(high, width, between(4, high * width // 512, 16), looped=width < block))
    return made


def shared(family: Family, config: Rows) -> list[Config]:
    """How many programs share all rows: as many as are there at once, or half of them, which is the better guess where
    they have few rows each to add up."""
    sums = any(family.kept(op) for op in family.across)
    if sums and (config.looped or config.rows * config.block > 1024 * config.warps):
        return []
    at_once = between(1, 32 // config.warps, 8) * PROCESSORS
    if not sums:
        return [replace(config, programs=at_once)]
    few = family.count < 2 * config.rows * at_once
    return [replace(config, programs=n) for n in sorted((at_once, at_once // 2), reverse=not few)]


#: rows at a time, elements that a thread holds of them, warps of a multiprocessor: those that read ahead
AHEAD = ((1, 8, 12), (2, 16, 8), (1, 16, 8), (1, 8, 16))
#: and turns that a program must have for it to be worth that
TURNS = 4


def reading_ahead(family: Family, block: int) -> list[Config]:
    """Programs that have the next rows on their way while they work on one. Fewer of them keep the memory busy."""
    made: list[Config] = []
    for rows, held, busy in AHEAD:
        warps = between(1, rows * block // (32 * held), 16)
        programs = max(busy // warps, 1) * PROCESSORS
        if rows * block <= 1024 * warps and family.count >= TURNS * rows * programs:
            made.append(Rows(rows, block, warps, programs=programs, stages=3))
    return made


#: the longest of many sums that are added up a few numbers at a time, by threads that keep them; and where they lie
#: side by side
SHORT, MANY_SHORT = 256, 1024


def sums(family: Family) -> list[Config]:
    kept, reduced = family.length, family.count
    made: list[Config] = []
    if walked_along_row(family) and kept > 1:
        # fewer columns than threads: Triton then lets each thread keep 16 bytes of a row, and not one column
        shapes = [(64, 32, 4, 3), (64, 32, 4, 1), (128, 32, 8, 3), (128, 16, 4, 3)]
        wide = power_of_two(kept)
        if looks_around(family):  # nothing of that can be on its way while it is worked out where it lies
            shapes = [shapes[1], shapes[0], *shapes[2:]]
        elif wide >= 128 and reduced <= MANY_SHORT and fills(kept, 64):
            shapes = [shapes[3], *shapes[:3]]
        for width, high, warps, stages in shapes:
            k = min(width, wide)
            made += split(family, min(high * (width // k), power_of_two(reduced)), k, warps, stages)
    else:
        if 16 < reduced <= SHORT and kept >= 1024 * PROCESSORS:
            made += [Sums(16, 64, 1, 4), Sums(16, 32, 1, 4)]
        for size, warps in ((2048, 4), (4096, 8), (1024, 4), (8192, 16)):
            n = min(size, power_of_two(reduced))
            made += split(family, n, between(1, size // n, power_of_two(kept)), warps)
    return made


def looks_around(family: Family) -> bool:
    """Whether something is read where it may not be, or where a computed number says."""
    return any(access.guards or access.numbers for access in family.walk.accesses.values())


def fills(kept: int, k: int) -> bool:
    """Whether so many sums, k to a program, keep the GPU busy without programs that share one."""
    return -(-kept // k) >= 4 * PROCESSORS


def split(family: Family, n: int, k: int, warps: int, stages: int = 1) -> list[Config]:
    """As many programs per sum as fill the GPU a few times, while each still has something to add up."""
    blocks = -(-family.length // k)
    steps = -(-family.count // n)
    wanted = (4 if stages > 1 else 8) * PROCESSORS  # who does not read ahead waits: others run meanwhile
    if not blocks or fills(family.length, k):
        return [Sums(n, k, 1, warps, stages)]
    programs = between(1, -(-wanted // blocks), -(-steps // 2))
    return [Sums(n, k, programs, warps, stages)]
