"""Tiles of matrix products: none is offered that does not fit, as the compiler's own count of shared memory says."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from wholestep.backends.kernels import Spec
from wholestep.backends.triton import contraction_tiles as tiles
from wholestep.backends.triton.contraction_tiles import Demand
from wholestep.dialects.step import StepBuilder
from wholestep.dialects.strides import row_major
from wholestep.ir import BF16, F32, TensorType, add_function, finish_function, module
from wholestep.transforms.loops import lowered


def demand(n: int, k: int, computed: bool = False, beside: int = 0, written: int = 2, after: int = 2) -> Demand:
    plain = (not computed, True)
    return Demand(1, 100_000, n, k, 2, plain, (2, 2), 1 + bool(beside), beside, written, after, False, True)


def test_programs_that_stay_fit_as_often_as_they_are_there() -> None:
    met = 0
    for n, k, computed, beside in itertools.product((64, 256, 384), (32, 64, 128, 196), (False, True), (0, 2, 4)):
        asked = demand(n, k, computed, beside)
        for tile in tiles.staying(asked):
            at_once = -(-tile.programs // tiles.PROCESSORS)
            assert 2 <= tile.stages <= 4 and at_once * tiles.staying_bytes(tile, asked) <= tiles.SHARED, (tile, asked)
            met += 1
    assert met > 50


def test_many_functions_leave_room_for_fewer_sums() -> None:
    few, some, many = (tiles.staying(demand(256, 128, after=after)) for after in (8, 15, 20))
    assert max(map(tiles.sums_per_thread, few)) == 64 and max(map(tiles.sums_per_thread, some)) == 32
    assert not many and max(map(tiles.sums_per_thread, tiles.staying(demand(64, 128, after=20)))) == 16


def test_columns_that_are_summed_up_are_cut_in_two_or_as_threads_are_more() -> None:
    tile = tiles.Tile(128, 128, 64, 4, 3)
    asked = demand(1024, 1024, beside=2, after=10)
    assert tiles.pieces(tile, asked) == 4 and tiles.pieces(tile, replace(asked, sums=True)) == 2
    assert tiles.pieces(replace(tile, m=64, n=64), replace(asked, sums=True)) == 1
    assert tiles.pieces(replace(tile, m=64, n=256), replace(asked, sums=True)) == 4


def test_bits_are_written_at_once_where_a_thread_has_room() -> None:
    asked = replace(demand(1024, 1024, beside=2, after=10), in_order=True)
    found = [t for t in tiles.choices(asked) if t.pieces > 1]
    assert found and all(t.at_once == (t.m >= 16 * t.warps) for t in found) and any(t.at_once for t in found)
    assert not any(t.at_once for t in tiles.choices(replace(asked, in_order=False)))
    crowded = tiles.choices(replace(asked, beside=8))
    assert not any(t.at_once for t in crowded if tiles.sums_per_thread(t) == 128)


def test_programs_stay_with_a_computed_factor_where_little_is_multiplied() -> None:
    assert tiles.staying(demand(1024, 256)) and not tiles.staying(demand(1024, 256, computed=True))
    assert tiles.staying(demand(64, 256, computed=True)) and tiles.staying(demand(256, 128, computed=True))


def test_with_a_computed_factor_two_programs_share_a_multiprocessor_or_one_has_all_columns() -> None:
    """As was measured: with four warps two of them, with eight one, by what registers hold."""
    (two, *_), (one, *_) = (tiles.staying(demand(n, k, computed=True)) for n, k in ((512, 128), (128, 256)))
    assert (two.n, two.warps, two.programs) == (128, 4, 2 * tiles.PROCESSORS)
    assert (one.n, one.warps, one.programs) == (128, 8, tiles.PROCESSORS)
    for n, k in itertools.product((64, 128, 256, 512), (64, 128, 256)):
        found = tiles.staying(demand(n, k, computed=True))
        assert all(t.programs > tiles.PROCESSORS or t.n >= n for t in found)
        assert [tiles.spills(t) for t in found] == sorted(tiles.spills(t) for t in found)


def test_few_columns_for_nothing_where_something_is_made_of_them_else_few_tiles_of_columns() -> None:
    """As was measured of 144 columns: 64 at a time with sums of them, else all at once; computed, 64 rather than 32."""
    alone, summed = (tiles.staying(replace(demand(144, 24, after=after), m=802816)) for after in (0, 5))
    assert (alone[0].n, alone[0].warps) == (256, 8) and (summed[0].n, summed[0].warps) == (64, 8)
    computed = tiles.staying(replace(demand(144, 24, computed=True, after=5), m=802816))
    assert computed[0].n == 64 and not any(t.n == 32 for t in computed)
    narrow = tiles.staying(replace(demand(96, 16, computed=True, after=0), m=3211264))
    assert narrow[0].n == 32  # 64 would leave a quarter of the columns empty


def test_two_programs_of_a_multiprocessor_have_few_warps_one_alone_has_many() -> None:
    """As was measured with something made of the sums; without, many warps are better either way."""
    sizes = (512, 128, 5), (512, 256, 5), (512, 128, 0)
    two, one, plain = (tiles.staying(demand(n, k, after=after))[0] for n, k, after in sizes)
    assert (two.warps, two.programs) == (4, 2 * tiles.PROCESSORS)
    assert (one.warps, one.programs) == (8, tiles.PROCESSORS)
    assert (plain.warps, plain.programs) == (8, 2 * tiles.PROCESSORS)


def test_of_programs_that_compute_slow_functions_two_share_a_multiprocessor() -> None:
    """As was measured of 672 x 112 with silu: 50 and 68 us; where the factor is stored as well 129 and 79."""
    asked = replace(demand(112, 672, computed=True, after=0), m=50176, loaded=(4, 2))
    quick, slow, stored = (
        tiles.choices(replace(asked, slow=slow, stored=(stored, False)))[0]
        for slow, stored in ((False, False), (True, False), (True, True))
    )
    assert (slow.m, slow.n, slow.k, slow.warps) == (128, 128, 32, 4)
    assert (quick.k, quick.warps) == (stored.k, stored.warps) == (64, 8)


def test_what_is_computed_goes_in_rounds_where_much_of_a_whole_one_is_for_nothing() -> None:
    """144 as five times 32 instead of 256, 192 as three times 64; 240 as 256."""
    rounds = {k: [t.k for t in tiles.staying(demand(24, k, computed=True))] for k in (96, 144, 192, 240)}
    assert {k: found[0] for k, found in rounds.items()} == {96: 32, 144: 32, 192: 64, 240: 256}
    assert all(set(found[1:]) == {tiles.power_of_two(k)} for k, found in rounds.items())
    assert {t.k for t in tiles.staying(demand(24, 144))} == {256}
    asked = demand(24, 144, computed=True)
    assert all(tiles.staying_bytes(t, asked) <= tiles.SHARED for t in tiles.staying(asked))


def test_what_has_two_loads_under_way_is_guessed_first() -> None:
    guesses = tiles.staying(demand(1024, 256))
    assert guesses[0].stages > 2 and guesses[-1].stages == 2


def test_all_tiles_are_offered_and_some_are_likely() -> None:
    """Factors are not computed more often than by the guess, nor is much made of more sums; who stays is better."""
    computed, much = tiles.choices(demand(256, 1024, computed=True)), tiles.choices(demand(256, 256, after=20))
    assert len(computed) == len(much) == tiles.MOST
    assert [t.likely for t in computed] == [t.n >= computed[0].n for t in computed] and not computed[2].likely
    sums = [tiles.sums_per_thread(t) for t in much]
    assert [t.likely for t in much] == [n <= sums[0] for n in sums] and not much[-1].likely
    staying = tiles.choices(demand(256, 128))
    assert [t.likely for t in staying] == [bool(t.programs) for t in staying] and {t.likely for t in staying[:4]} == {
        True,
        False,
    }
    longer = tiles.choices(demand(256, 256))
    assert [t for t in longer if t.likely and not t.programs] == [next(t for t in longer if not t.programs)]


def test_how_many_short_rounds_there_are_is_not_told() -> None:
    """ptxas writes rounds out whose number it knows; where a factor is computed they are too long for that."""
    from wholestep.backends.triton.generate import candidates

    def texts(k: int, computed: bool) -> set[bool]:
        types = [TensorType((64000, k), BF16), TensorType((128, k), BF16)]
        function = add_function(module(), "f", types)
        b = StepBuilder(function.regions[0].block)
        x, w = function.regions[0].block.arguments
        y = b.contract(b.relu(x) if computed else x, w, spec="mk,nk->mn")
        finish_function(function, [y])
        specs = [Spec(t.shape, row_major(t.shape), torch.bfloat16) for t in (*types, y.type)]
        made = candidates(lowered(function), specs)
        return {"num_programs(1)" in c.source for c in made if " by" not in c.name and "x64 " in c.name}

    assert texts(640, False) == {True} and texts(640, True) == texts(256, False) == {False}


def test_shared_memory_is_what_the_compiler_says() -> None:
    """A product with a wide residual: what is kept, loaded ahead and laid out anew."""
    triton = pytest.importorskip("triton")
    if not Path(triton.knobs.nvidia.ptxas.path).exists():
        pytest.skip("Triton has no ptxas here")
    from wholestep.backends.triton.contraction import Contraction
    from wholestep.backends.triton.generate import candidate, compile_for

    types = [TensorType(s, t) for s, t in (((64000, 128), BF16), ((128, 128), BF16), ((64000, 128), F32))]
    function = add_function(module(), "f", types)
    b = StepBuilder(function.regions[0].block)
    x, w, residual = function.regions[0].block.arguments
    y = b.add(b.cast(b.contract(x, w, spec="mk,nk->mn"), dtype=F32), residual)
    finish_function(function, [y])
    dtypes = {BF16: torch.bfloat16, F32: torch.float32}
    specs = [Spec(t.shape, row_major(t.shape), dtypes[t.element]) for t in (*types, y.type)]
    product = Contraction(lowered(function), specs)
    tile = product.tiles()[0]
    made = candidate(product, tile)
    (info,) = compile_for([made], 90).values()
    assert not isinstance(info, Exception), info
    asked = demand(128, 128, beside=4, written=4)
    assert tile.programs and 0.9 * tiles.staying_bytes(tile, asked) <= info.shared <= tiles.staying_bytes(tile, asked)


def test_columns_that_are_there_for_nothing_are_few() -> None:
    """144 columns are 256 in wide tiles and 192 in narrow ones; both kinds are timed."""
    first, second, *_ = tiles.staying(demand(144, 32))
    assert tiles.rounded_up(144, first.n) <= 192 and second.n in (128, 256)
    assert {t.n for t in tiles.staying(demand(256, 32))} == {128, 256} and {
        t.n for t in tiles.staying(demand(64, 32))
    } == {64}
