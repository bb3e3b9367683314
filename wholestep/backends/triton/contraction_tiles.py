"""Which tiles of a matrix product are worth timing: the best guess first, by a small model of how they fill the GPU."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace

from .families import PROCESSORS, power_of_two

#: shared memory of a multiprocessor that one program may have, and its registers
SHARED = 227 * 1024
REGISTERS = 65536
#: what one element costs to load or store, in multiplications that its multiprocessor could have done meanwhile
TRAFFIC = 64
#: the same for one element of a factor that is computed, where rows and columns are many; where they are few, or that
#: takes long, how many times as long a program takes that computes its factors with no other beside it, where it takes
#: the whole sum and where several share it: as the tiles of 237 products on an H200 are told apart best
#: (bench/results/LOG.md)
COMPUTED, ALONE, LARGE = 48, (1.5, 1.2), 64
#: the same for the launch of one more kernel
LAUNCH = 8_000_000
#: rows, columns, summed, warps, stages
WIDE = [
    (128, 256, 64, 8, 3),
    (128, 256, 64, 8, 4),
    (256, 128, 64, 8, 3),
    (128, 128, 64, 8, 3),
    (128, 128, 64, 4, 3),
    (128, 128, 64, 8, 4),
    (128, 128, 32, 4, 4),
    (64, 256, 64, 4, 3),
    (256, 64, 64, 8, 3),
    (64, 128, 64, 4, 4),
    (128, 64, 64, 4, 4),
    (64, 64, 64, 4, 4),
    (64, 256, 64, 8, 3),
    (128, 32, 64, 4, 4),
    (64, 32, 64, 4, 4),
    (256, 32, 64, 8, 3),
]
#: the same where factors are f32, which no tensor core multiplies exactly
EXACT = [(64, 64, 32, 4, 2), (128, 64, 16, 8, 2), (64, 128, 16, 8, 2), (32, 64, 32, 4, 3), (64, 32, 32, 4, 3)]
MOST = 6
#: the fewest columns that a part of a tile has
LEAST_PART = 8
#: multiplications per element that is read or written below which a product waits for memory
RIDGE = 256
#: the same for programs that stay where a factor is computed, which they do not do while they multiply
RIDGE_COMPUTED = 128
#: registers of a thread for its sums and all that is read beside them
ROOM = 200
#: registers of a thread beside its sums, and for each element that it computes of a factor
OTHERS, EACH = 80, 1.5
#: and where nothing is counted: of a program that takes all that is summed at once, and of one that does so in rounds
USUAL, IN_ROUNDS = 128, 160
#: elements of the summed dimension that such programs take at a time, where whole ones are filled up with too many
ROUNDS = (64, 32)
#: so many of these at most
MOST_ROUNDS = 10
#: sums of a thread that leave it few registers for others
MANY_SUMS = 32
#: the longest sum that a program takes in one step, and the fewest rows for which programs stay
LONGEST = 256
MANY = 4 * 64 * PROCESSORS
#: narrow tiles of programs that stay, which are for results that have at most this share of the columns of wide ones
NARROW, SPARE = (64, 32), 0.8


@dataclass(frozen=True)
class Tile:
    """A configuration: the tile of one program, how many loads are under way, how many programs share a sum, and in how
    many pieces what comes after the product is computed."""

    m: int
    n: int
    k: int
    warps: int
    stages: int
    split: int = 1
    pieces: int = 1
    #: as many programs, each for many tiles of rows and for the whole summed dimension; 0: one for each tile
    programs: int = 0
    #: whether all that is read beside the product and stored of it is so at once, instead of piece by piece
    at_once: bool = False
    #: whether it may be the best, by what others have shown: the rest is for those who try everything
    likely: bool = field(default=True, compare=False)

    def __str__(self) -> str:
        shared = (
            f" split{self.split}"
            if self.split > 1
            else f" {'at' if self.at_once else 'in'}{self.pieces}"
            if self.pieces > 1
            else ""
        )
        shared += f" by{self.programs}" if self.programs else ""
        return f"dot {self.m}x{self.n}x{self.k}{shared} s{self.stages} w{self.warps}"


@dataclass(frozen=True)
class Demand:
    """What the choice depends on: sizes, bytes per element of each factor and of what it is made of, tensors around."""

    z: int
    m: int
    n: int
    k: int
    bytes: int
    #: whether a factor is a tensor as it lies in memory
    plain: tuple[bool, bool]
    #: bytes that are loaded per element of a factor
    loaded: tuple[int, int]
    #: tensors along rows and columns that are read or written after the product
    around: int
    #: bytes that are read per element of the result, and of the widest number that is written for one
    beside: int
    written: int
    #: functions of numbers after the product
    after: int
    #: whether the summed dimension may be split over programs
    splits: bool
    #: whether a program may stay for many tiles of rows
    stays: bool
    #: elements of the summed dimension that are one run of memory, where windows are walked by their rows
    run: int = 0
    #: whether results are added up, as those of programs that share a sum
    meets: bool = False
    #: whether what a factor is made of is stored as well
    stored: tuple[bool, bool] = (False, False)
    #: places at which the result is read at once, each of which has its part of a tile's columns
    parts: int = 1
    #: where what is summed goes over from one tensor to the next, of several that are read side by side
    joints: tuple[int, ...] = ()
    #: whether columns of the result are summed up
    sums: bool = False
    #: whether a factor takes functions that are computed by many instructions
    slow: bool = False
    #: whether truth values are written that lie as tensor cores leave columns, and what else is read is so in tiles
    in_order: bool = False


def choices(demand: Demand) -> list[Tile]:
    """The tiles worth timing."""
    made: dict[Tile, float] = {}
    for m, n, k, warps, stages in EXACT if demand.bytes == 4 else WIDE:
        least = LEAST_PART * demand.parts
        if m > max(64, power_of_two(demand.m)) or n > max(32, least, power_of_two(demand.n)) or n < least:
            continue
        tile = Tile(m, n, min(k, max(16, power_of_two(demand.k))), warps, stages)
        if demand.k <= 2 * tile.k:  # so few rounds that there is nothing to load ahead
            tile = replace(tile, stages=min(stages, -(-demand.k // tile.k)))
        if fits(tile, demand):
            for split in splits(tile, demand):
                own = replace(tile, split=split, pieces=1 if split > 1 else pieces(tile, demand))
                own = replace(own, at_once=own.pieces > 1 and at_once(own, demand))
                made[own] = cost(own, demand)
    found = sorted(made, key=lambda t: (comes_again(t, demand), made[t]))
    stay = [*by_runs(demand), *staying(demand)][: MOST - 2]
    found = [replace(t, likely=is_likely(t, found[0], demand, bool(stay))) for t in found]
    return [*stay[:2], *found[:2], *stay[2:], *found[2:]][:MOST]  # (the first of both kinds: often no more are timed)


def comes_again(tile: Tile, demand: Demand) -> bool:
    """Whether several programs read all that a factor is made of, and only one of them stores it."""
    return (demand.stored[0] and tile.n < demand.n) or (demand.stored[1] and tile.m < demand.m)


def is_likely(tile: Tile, guess: Tile, demand: Demand, stay: bool) -> bool:
    """Whether a tile may beat the best guess: not one that computes factors more often or sums fewer at a time for
    nothing, nor one of more sums per thread, where much is made of each: it takes longest to compile. Beside programs
    that stay the guess may, but not where it has nothing to load ahead."""
    if stay:
        return tile == guess and demand.k > 2 * tile.k
    rows, columns = demand.plain
    again = (not rows and tile.n < guess.n) or (not columns and tile.m < guess.m)
    shorter = rows and columns and tile.k < guess.k
    long = demand.after > 6 and sums_per_thread(tile) > sums_per_thread(guess)
    return not (again or shorter or long)


def sums_per_thread(tile: Tile) -> int:
    return tile.m * tile.n // (32 * tile.warps)


def staying(demand: Demand) -> list[Tile]:
    """Tiles for programs that stay for many of them: for products that wait for memory and sum over little."""
    k = max(16, power_of_two(demand.k))
    if not demand.stays or demand.m < MANY or not waits_for_memory(demand):
        return []
    if demand.joints:  # each round reads one of them; with wide results factors are better fetched again
        part = next(part for part in ROUNDS if not any(end % part for end in (*demand.joints, demand.k)))
        found = staying_by(demand, part) if demand.n <= NARROW[0] and demand.k <= MOST_ROUNDS * part else []
        return sorted(found, key=lambda t: (t.warps, t.m))
    if k > LONGEST:
        return []
    found = staying_by(demand, k)
    if not demand.plain[0]:  # what is computed beyond the end is for nothing: in rounds it is less
        part = min(ROUNDS, key=lambda part: rounded_up(demand.k, part))
        rounds = staying_by(demand, part) if rounded_up(demand.k, part) <= SPARE * k else []
        found = [*rounds[:1], *found]
    return found


def staying_by(demand: Demand, k: int) -> list[Tile]:
    """Such tiles that take so many elements of what is summed at a time, the best guess first."""
    found = []
    whole = max(16, min(power_of_two(demand.n), 256))
    # sums of a thread, beside which what is made of them is in registers
    most = 64 if demand.after <= 8 else 32 if demand.after <= 16 else 16
    halves = (whole, whole // 2) if whole >= 128 else (whole,)
    spare = min(rounded_up(demand.n, n) for n in halves)
    narrow = [n for n in NARROW if n < whole // 2 and rounded_up(demand.n, n) <= SPARE * spare]
    if not demand.plain[0]:  # what is computed is so for each tile of columns
        narrow = narrow[:1]
    for m, n, warps in itertools.product((64, 128), (*halves, *narrow), (4, 8)):
        if n < 16 or not 8 <= m * n // (32 * warps) <= most:
            continue
        if not demand.plain[0] and m * k // (32 * warps) > 128:  # it is computed in registers
            continue
        # what a thread computes beside many sums takes registers, and so do vectors along what is summed, which it
        # keeps for all rounds
        own = IN_ROUNDS if k < demand.k else USUAL
        if not demand.plain[0] and m * n // (32 * warps) >= MANY_SUMS:
            own = max(own, held(m, n, k, warps))
        for at_once in range(max(1, min(4, REGISTERS // (32 * warps * own))), 0, -1):
            tiles = (Tile(m, n, k, warps, stages) for stages in (4, 3, 2))
            tile = next((t for t in tiles if staying_bytes(t, demand) <= SHARED // at_once), None)
            if tile is not None:
                columns = -(-demand.n // n)
                found.append(replace(tile, programs=PROCESSORS * at_once // columns * columns))
                break
    least = min((rounded_up(demand.n, t.n) for t in found), default=0)
    # those with two loads under way first, and with few columns for nothing, if anything is made of these; the best of
    # the wide ones is the second
    found.sort(
        key=lambda t: (t.stages < 3, demand.after and SPARE * rounded_up(demand.n, t.n) > least, *crowd(t, demand))
    )
    if not demand.plain[0]:  # two programs rather than two loads, so that one multiplies while the other computes
        found = [t for t in found if t.programs > PROCESSORS or t.n >= demand.n]
        found.sort(key=lambda t: (spills(t), comes_again(t, demand), -t.programs, rounded_up(demand.n, t.n)))
    wide = next((t for t in found if t.n in halves), None)
    return found if wide is None or wide in found[:2] else [found[0], wide, *(t for t in found[1:] if t != wide)]


def crowd(tile: Tile, demand: Demand) -> tuple[bool, int, int]:
    """What is better the less it is. Of wide tiles two programs of a multiprocessor are best, and of many warps, unless
    there is another and much to be made of the sums; of narrow ones as many as there is room for."""
    if tile.n < NARROW[0]:
        return True, -tile.programs * tile.warps, 0
    each = -(-tile.programs // PROCESSORS)
    return False, abs(each - 2), tile.warps if each > 1 and demand.after else -tile.warps


def held(m: int, n: int, k: int, warps: int) -> int:
    """Registers of a thread of a program that stays and computes a factor, roughly."""
    return int((m * n + EACH * m * k) / (32 * warps)) + OTHERS


def spills(tile: Tile) -> bool:
    """Whether such a thread may need more registers than it has."""
    there = REGISTERS // (32 * tile.warps * -(-tile.programs // PROCESSORS))
    return held(tile.m, tile.n, tile.k, tile.warps) > min(255, there)


def rounded_up(size: int, step: int) -> int:
    return -(-size // step) * step


def by_runs(demand: Demand) -> list[Tile]:
    """Tiles for programs that stay, for windows that are walked by their rows: all of these at once or one by one. So
    little is multiplied that other programs take their turn meanwhile, instead of loads ahead."""
    if not demand.run or not demand.stays or demand.m < MANY or demand.n > 256:
        return []
    n, whole, found = max(16, power_of_two(demand.n)), power_of_two(demand.k), []
    ways = [(whole, 8), (demand.run, 4), (whole, 4)]
    if demand.after:  # which has fewer registers beside all of these
        ways = [ways[1], ways[0], ways[2]]
    for k, warps in ways:
        m, threads = 64, 32 * warps
        held = m * n // threads + m * k * demand.bytes // (4 * threads)  # registers, for sums and for what is loaded
        if k > LONGEST or held > 96:
            continue
        shared = n * -(-demand.k // k) * k * demand.bytes + m * max(n * demand.written, k * demand.bytes)
        registers = (64 if demand.k <= 64 else 128) * (2 if demand.after and k < whole else 1)
        at_once = min(SHARED // shared, REGISTERS // (threads * registers))
        found += [Tile(m, n, k, warps, 1, programs=PROCESSORS * at_once)] if at_once else []
    return found


def staying_bytes(tile: Tile, demand: Demand) -> int:
    """Shared memory of a program that stays: the factor it keeps, what is loaded ahead, and what is laid out anew,
    which is a computed factor before the product or a tile of results after it.

    Tensor cores read a factor that is as it lies where it was loaded: one more is then under way.
    """
    ahead, k = tile.stages - 1, rounded_up(demand.k, tile.k)
    rows = tile.m * k * demand.loaded[0] * (tile.stages if demand.plain[0] or demand.joints else ahead)
    anew = max(tile.m * tile.n * demand.written, 0 if demand.plain[0] else tile.m * tile.k * demand.bytes)
    return tile.n * k * demand.bytes + rows + tile.m * tile.n * demand.beside * ahead + anew


def waits_for_memory(demand: Demand) -> bool:
    """Whether a product has so few multiplications per element that memory is what it waits for."""
    ridge = RIDGE if demand.plain[0] else RIDGE_COMPUTED
    moved = demand.z * (demand.m * demand.k + demand.n * demand.k + demand.m * demand.n)
    return demand.bytes < 4 and demand.z * demand.m * demand.n * demand.k < ridge * moved


def pieces(tile: Tile, demand: Demand) -> int:
    """Into how many pieces the tile of sums is cut, so that what is computed from it fits into registers beside it.
    Where columns are summed up, in few: for each piece threads exchange what they have. But no piece has a column for
    each thread, by which Triton would lay it out."""
    most = 128 if demand.around <= 1 and demand.after <= 3 else 64 if demand.after <= 6 else 32
    few = max(2, tile.n // (16 * tile.warps)) if demand.sums else 4
    return max(1, min(sums_per_thread(tile) // most, tile.n // demand.parts // 32, few))


def at_once(tile: Tile, demand: Demand) -> bool:
    """Whether a thread has room for all that is read beside its sums, which it then keeps as tensor cores left them."""
    held = sums_per_thread(tile) * (4 + demand.beside) // 4
    return demand.in_order and held <= ROOM and tile.m >= 16 * tile.warps


def shared_bytes(tile: Tile, demand: Demand) -> int:
    """Shared memory of the tiles that are under way; of a computed factor also of its finished tile."""
    loads = tile.k * (tile.m * demand.loaded[0] + tile.n * demand.loaded[1])
    finished = tile.k * demand.bytes * (tile.m * (not demand.plain[0]) + tile.n * (not demand.plain[1]))
    return tile.stages * loads + finished


def registers(tile: Tile, demand: Demand) -> int:
    """Registers of a thread, roughly: its sums, its part of computed factors and of what they come from, addresses."""
    computed = 0.0
    for side, plain, loaded in zip((tile.m, tile.n), demand.plain, demand.loaded, strict=True):
        computed += 0 if plain else side * tile.k * (1 + loaded / demand.bytes) / 2
    return sums_per_thread(tile) + int(computed) // (32 * tile.warps) + 48


def fits(tile: Tile, demand: Demand) -> bool:
    return shared_bytes(tile, demand) <= SHARED and registers(tile, demand) <= 255


def splits(tile: Tile, demand: Demand) -> list[int]:
    """By how many programs a sum may be shared: where there are too few tiles for the GPU and the sum is long."""
    tiles = demand.z * -(-demand.m // tile.m) * -(-demand.n // tile.n)
    if not demand.splits:
        return [1]
    many = [PROCESSORS * rounds // tiles for rounds in (1, 2, 3)]  # a long sum of few tiles
    found = {s for s in (2, 3, 4, 6, 8, 16, *many) if s > 1 and tiles * s <= 3 * PROCESSORS and demand.k >= 256 * s}
    return [*([] if demand.meets else [1]), *sorted(found)]


def cost(tile: Tile, demand: Demand) -> float:
    """Time in multiplications of one multiprocessor, by rounds of programs that fill it."""
    programs = demand.z * -(-demand.m // tile.m) * -(-demand.n // tile.n) * tile.split
    threads = 32 * tile.warps
    at_once = min(SHARED // max(shared_bytes(tile, demand), 1), REGISTERS // (threads * registers(tile, demand)), 2)
    at_once = max(at_once, 1)
    area = tile.m * tile.n
    reuse = area / (tile.m + tile.n)
    summed = -(-demand.k // (tile.k * tile.split)) * tile.k
    work = area * summed * (1 + 25 / reuse)
    computed = sum(n for n, plain in zip((tile.m, tile.n), demand.plain, strict=True) if not plain)
    large = min(demand.m, demand.n) >= LARGE
    work += COMPUTED * summed * computed if large else 0
    around = area * TRAFFIC * (demand.around if tile.split == 1 else 2)
    rounds = -(-programs // (PROCESSORS * at_once)) * at_once
    # two programs at once: one stores while the other multiplies
    total = rounds * (work + around if at_once == 1 else max(work, around) + 0.3 * min(work, around))
    if at_once == 1 and computed and (not large or (demand.slow and tile.split == 1 and not any(demand.stored))):
        total *= ALONE[tile.split > 1]  # and one multiplies while the other computes its factors
    if tile.split > 1:
        total += (
            LAUNCH + demand.z * demand.m * demand.n * (tile.split * 2 + 2 * demand.around) * TRAFFIC / PROCESSORS / 2
        )
    return total
