"""The cache model: small plans with figures done by hand, and a simulator that keeps every single line."""

from __future__ import annotations

import random
from collections import OrderedDict
from itertools import pairwise

import pytest
import torch
from torch import nn

import wholestep as ws
from wholestep.cost import make_ledger
from wholestep.cost.accesses import ROWS, Frame
from wholestep.cost.cache import (
    PASSES,
    PIECES,
    Addresses,
    Cache,
    side_by_side,
    stretches,
    through_cache,
    without_cache,
    works,
)
from wholestep.dialects import context
from wholestep.ir.types import ScalarType, TensorType
from wholestep.plan.plan import Buffer, Launch, Plan
from wholestep.plan.planner import Planned

UI8 = ScalarType("ui8")
KB = 1024


class Lines:
    """A cache that keeps single bytes, each with its own age."""

    def __init__(self, capacity: int):
        self.capacity, self.lines = capacity, OrderedDict()
        self.read = self.written = 0

    def touch(self, start: int, end: int, write: bool) -> None:
        for line in range(start, end):
            held = line in self.lines
            dirty = self.lines.pop(line, False)
            if not held and not write:
                self.read += 1
            self.lines[line] = dirty or write
            if len(self.lines) > self.capacity:
                self.written += self.lines.popitem(last=False)[1]

    @property
    def dirty(self) -> int:
        return sum(self.lines.values())


@pytest.mark.parametrize("seed", range(30))
def test_stretches_are_cached_as_single_lines_would_be(seed):
    draw = random.Random(seed)
    capacity = draw.choice([1, 7, 40, 100])
    cache, lines = Cache(capacity), Lines(capacity)
    for _ in range(400):
        start = draw.randrange(160)
        end = start + draw.choice([1, 5, 20, draw.randrange(1, 140)])
        write = draw.random() < 0.4
        cache.touch(start, end, write)
        lines.touch(start, end, write)
        assert (cache.read, cache.written, cache.dirty) == (lines.read, lines.written, lines.dirty)
        assert cache.held == sum(s.end - s.start for s in cache.segments) == len(lines.lines)
        assert cache.starts == sorted(s.start for s in cache.segments)


def buffer(size: int, offset: int = 0, **more) -> Buffer:
    return Buffer(TensorType((size,), UI8), (1,), more.pop("space", "arena"), "transient", offset=offset, **more)


def plan(buffers: list[Buffer], *launches: tuple) -> Plan:
    """Launches are (reads, writes) or (reads, writes, name)."""
    listed = [Launch(-1, reads, writes, "aten", name=(*name, "step.add")[0]) for reads, writes, *name in launches]
    arena = max((b.offset + b.type.bytes for b in buffers if b.space == "arena" and b.base < 0), default=0)
    return Plan("f", "", "cuda", 256, "program", "first", arena, arena, arena, buffers, listed)


def test_a_value_that_fits_is_read_from_the_cache():
    made = plan([buffer(8 * KB, space="external"), buffer(8 * KB)], ((0,), (1,)), ((1,), ()))
    found = through_cache(made, 32 * KB, warm=False)
    assert (found.read, found.written, found.left) == ([8 * KB, 0], [0, 0], 8 * KB)
    assert through_cache(made, 32 * KB).read == [0, 0]  # the step before left it there
    plain = without_cache(made)
    assert (plain.read, plain.written, plain.total) == ([8 * KB, 8 * KB], [8 * KB, 0], 24 * KB)


def test_streaming_leaves_the_tail():
    made = plan([buffer(100 * KB, space="external"), buffer(100 * KB)], ((0,), ()), ((1,), ()), ((1,), ()))
    found = through_cache(made, 40 * KB, warm=False)
    assert found.read == [100 * KB, 100 * KB, 100 * KB]  # the tail is driven out before a second pass comes to it
    tail = buffer(30 * KB, 70 * KB, base=1, share="view", of=1)
    made = plan([buffer(100 * KB, space="external"), buffer(100 * KB), tail], ((0,), ()), ((1,), ()), ((2,), ()))
    assert through_cache(made, 40 * KB, warm=False).read == [100 * KB, 100 * KB, 0]


def test_memory_counts_and_not_names():
    """A value in the memory of a dead one overwrites it in the cache: the dead value never goes to DRAM."""
    shared = [buffer(8 * KB), buffer(8 * KB), buffer(8 * KB, base=1, share="in_place", of=1)]
    apart = [buffer(8 * KB), buffer(8 * KB, 8 * KB), buffer(8 * KB, 16 * KB)]
    for buffers, written in ((shared, 8 * KB), (apart, 16 * KB)):
        made = plan([*buffers, buffer(100 * KB, 24 * KB)], ((), (1,)), ((1,), (2,)), ((3,), ()))
        found = through_cache(made, 32 * KB, warm=False)
        assert sum(found.written) == written and found.read[1] == 0


def test_a_dead_value_that_was_never_overwritten_still_goes_to_dram():
    made = plan([buffer(16 * KB), buffer(64 * KB, 16 * KB)], ((), (0,)), ((1,), ()))
    found = through_cache(made, 32 * KB, warm=False)
    assert found.written == [0, 16 * KB] and found.left == 0


def test_results_larger_than_the_cache_are_written_while_they_are_made():
    made = plan([buffer(64 * KB, space="external"), buffer(64 * KB)], ((0,), (1,)))
    found = through_cache(made, 32 * KB, warm=False)
    assert found.read == [64 * KB] and found.written[0] + found.left == 64 * KB
    assert found.left == pytest.approx(16 * KB, rel=0.3)  # half of the cache: operand and result advance together


def test_views_read_their_own_bytes():
    wide = Buffer(TensorType((4, 300), UI8), (300, 1), "arena", "transient")
    column = Buffer(TensorType((4, 100), UI8), (300, 1), "arena", "transient", "view", 0, 0, 100)
    spread = Buffer(TensorType((4, 300, 8), UI8), (300, 1, 0), "arena", "transient", "view", 0, 0)
    made = plan([wide, column, spread], ((1,), ()), ((0,), ()), ((2,), ()))
    assert through_cache(made, 4 * KB, warm=False).read == [400, 800, 0]
    assert without_cache(made).read == [400, 1200, 1200]


def test_columns_of_many_rows_are_as_many_bytes_and_do_not_overlap():
    rows = 4 * PIECES
    thirds = [stretches((rows, 8), (24, 1), 2, 16 * i) for i in range(3)]
    assert thirds == [[(0, 16 * rows)], [(16 * rows, 32 * rows)], [(32 * rows, 48 * rows)]]
    assert stretches((rows, 24), (24, 1), 2, 0) == [(0, 48 * rows)]
    assert stretches((24, rows), (1, 24), 2, 0) == [(0, 48 * rows)]  # transposed
    assert stretches((3, 8), (24, 1), 2, 16) == [(16, 32), (64, 80), (112, 128)]
    assert stretches((10, 4), (1, 1), 1, 0) == [(0, 13)]  # windows that overlap
    # halves of heads, in rows of many: a few pieces, which take as many bytes and do not overlap
    halves = [stretches((4, rows, 32, 8), (rows * 512, 512, 16, 1), 2, 16 * i) for i in range(2)]
    assert [len(pieces) for pieces in halves] == [4, 4]
    covered = sorted(halves[0] + halves[1])
    assert sum(end - first for first, end in covered) == 4 * rows * 1024 and covered[-1][1] == 4 * rows * 1024
    assert all(before[1] <= after[0] for before, after in pairwise(covered))


def test_only_rows_that_are_asked_for_and_kernels_of_two_passes():
    table, ids, out = buffer(64 * KB, space="external"), buffer(8, space="external"), buffer(4 * KB)
    made = plan([table, ids, out], ((0, 1), (2,), "step.embedding"))
    assert without_cache(made).read == [4 * KB + 8]
    made = plan([buffer(64 * KB, space="external"), buffer(64 * KB)], ((0,), (1,), "step.batch_norm"))
    assert without_cache(made).read == [128 * KB] and without_cache(made, {}).read == [64 * KB]
    assert through_cache(made, 16 * KB, warm=False).read == [128 * KB]
    assert through_cache(made, 256 * KB, warm=False).read == [64 * KB]


def small_step(**options) -> Planned:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 8))
    optimizer = torch.optim.AdamW(model.parameters())
    batch = torch.randn(16, 16), torch.randint(0, 8, (16,))
    return ws.compile(model, nn.functional.cross_entropy, optimizer, batch, **options)._compiled.static.planned


@pytest.mark.parametrize("with_kernels", [True, False])
def test_a_real_step_as_line_by_line(with_kernels):
    made = small_step() if with_kernels else small_step().plan
    for capacity in (2 * KB, 20 * KB):
        lines, expected, addresses = Lines(capacity), [], Addresses()
        for _ in range(2):
            expected = []
            for work in works(Frame(made), {"step.layer_norm_grad": 2}):
                lines.read = lines.written = 0
                for reads, writes in work:
                    pieces = [addresses(a) for a in reads], [addresses(a) for a in writes]
                    for write, first, end in side_by_side(*pieces, capacity // 8):
                        lines.touch(first, end, write)
                expected.append((lines.read, lines.written))
        found = through_cache(made, capacity, {"step.layer_norm_grad": 2})
        assert list(zip(found.read, found.written, strict=True)) == expected and found.left == lines.dirty
    little, plain = through_cache(made, 256, warm=False), without_cache(made)
    assert 0.8 * sum(plain.read) < sum(little.read) <= sum(plain.read)
    assert 0.8 * sum(plain.written) < sum(little.written) + little.left <= sum(plain.written)
    everything = through_cache(made, 1 << 30)
    assert everything.total == 0 and everything.left > 0


def test_micro_batches_run_their_body_as_often_as_there_are():
    whole, parts = without_cache(small_step()), without_cache(small_step(accumulate=4))
    assert max(parts.read) > 2 * max(whole.read)  # weights are read once per micro-batch
    found = through_cache(small_step(accumulate=4), 1 << 30, warm=False)
    assert sum(found.read) < sum(whole.read)


@pytest.mark.parametrize("options", [{}, {"accumulate": 4}])
def test_without_a_cache_it_is_the_ledger(options):
    made = small_step(**options)
    plain, ledger = without_cache(made, {}), make_ledger(made)
    assert (sum(plain.read), sum(plain.written)) == (ledger.read, ledger.written)
    bare = without_cache(made.plan, {})  # without kernels: no scratch, no copies of what they allocate
    assert 0.5 * plain.total < bare.total < plain.total


def test_the_ops_with_habits_of_their_own_exist():
    known = context()
    for name in (*PASSES, *ROWS):
        assert known.find(name) is not None, name


def test_the_same_plan_gives_the_same_bytes():
    made = small_step()
    assert through_cache(made, 20 * KB) == through_cache(made, 20 * KB)
