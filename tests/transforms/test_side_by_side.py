"""Products read what is put side by side from where it lies, where something would be copied and the clock says so."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from tests.transforms.test_fuse import program, root_of
from tests.transforms.test_tall_products import Clock, is_held
from wholestep.ir import BF16, TensorType, verify
from wholestep.ir.builtin import lookup
from wholestep.ir.core import Op, Value
from wholestep.runtime.executor import Executable
from wholestep.transforms import again, side_by_side, tall_products, wide_products
from wholestep.transforms.around import divide
from wholestep.transforms.fuse import dissolve, fuse
from wholestep.transforms.regions import HELD, Bodies, Piece

#: rows, columns of a gradient and of what is beside it
ROWS, WIDE, BESIDE = 4096, 64, 32


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(again, "LEAST", 0)
    for module in (tall_products, wide_products, side_by_side):
        monkeypatch.setattr(module, "LEAST", 0)


def beside(b: Any, dy: Value, x: Value, w: Value) -> list[Value]:
    """A gradient that was made elsewhere beside what forward kept, which is copied; the product's mask reads it too."""
    both = b.concat([dy, x], dim=1)
    both.op.attributes[HELD] = x.type.bytes
    dx = b.contract(both, w, spec="mk,kn->mn")
    return [b.select(b.le(x, 0.0), 0.0, dx)]


def twice(b: Any, dy: Value, x: Value, w: Value) -> list[Value]:
    """With the weight's gradient, along whose rows both lie."""
    made = beside(b, dy, x, w)
    both = next(op for op in b.block if is_held(op)).results[0]
    return [*made, b.contract(both, x, spec="mk,mn->kn", wide=True)]


def of(build: Any, rows: int = ROWS) -> Op:
    shapes = [(rows, WIDE), (rows, BESIDE), (WIDE + BESIDE, BESIDE)]
    return program([TensorType(s, BF16) for s in shapes], build)


def kernels(function: Op, clock: Any, **options: Any) -> list[list[str]]:
    """The ops of each kernel with a product or a concatenation; results stay as they were."""
    torch.manual_seed(0)
    inputs = [torch.randn(v.type.shape).bfloat16() / 4 for v in function.regions[0].block.arguments]
    wanted = Executable(function)(inputs)
    fuse(function, bodies=Bodies(), seconds=clock, alone=is_held, **options)
    verify(root_of(function))
    bodies = [lookup(root_of(function), op.callee) for op in function.regions[0].block if op.name == "step.fused"]
    inside = [[o.name.removeprefix("step.") for o in body.regions[0].block if o.operands] for body in bodies]
    dissolve(function, lambda op: True)
    for got, want in zip(Executable(function)(inputs), wanted, strict=True):
        torch.testing.assert_close(got.double(), want.double(), rtol=2e-2, atol=2e-2)
    return sorted(names[:-1] for names in inside if {"contract", "concat"} & set(names))


def anything(piece: Piece, strides: Any) -> bool:
    return True


def nothing(piece: Piece, strides: Any) -> bool:
    return False


ONE = ["concat", "contract", "le", "select"]


def test_nothing_is_copied_where_all_readers_are_products() -> None:
    assert kernels(of(beside), Clock()) == [ONE]
    assert kernels(of(twice), Clock()) == [["concat", "contract"], ONE]


def test_wide_products_are_asked_of_who_runs_them() -> None:
    rows = WIDE + BESIDE  # (no side is much the longest)
    assert kernels(of(beside, rows), Clock(), follows=anything) == [ONE]
    assert ["concat"] in kernels(of(beside, rows), Clock(), follows=nothing)
    assert ["concat"] in kernels(of(beside, rows), Clock())


def test_the_copy_alone_counts_and_not_what_is_written_in_place() -> None:
    """Of the concatenation a third is copied. It is timed as a whole, so that a third of that is what it takes."""

    def seconds(more: float) -> Any:
        def timed(pieces: Sequence[Piece], strides: Any) -> list[float]:
            names = [{op.name for op in piece.ops} for piece in pieces]
            return [100 + more if {"step.concat", "step.contract"} <= own else 3 if "step.concat" in own else
                    98 if {"step.contract", "step.select"} <= own else 99 for own in names]  # fmt: skip

        return timed

    tie = 99 * tall_products.TIE - 100
    assert kernels(of(beside), seconds(tie - 0.01)) == [ONE]
    assert kernels(of(beside), seconds(tie + 0.01)) == [["concat"], ONE[1:]]


def test_it_stays_where_it_costs_nothing_or_others_read_it() -> None:
    def in_place(b: Any, *values: Value) -> list[Value]:
        made = beside(b, *values)
        next(op for op in b.block if is_held(op)).attributes[HELD] = 0
        return made

    def read(b: Any, *values: Value) -> list[Value]:
        made = beside(b, *values)
        return [*made, b.amax(next(op for op in b.block if is_held(op)).results[0], dims=(1,))]

    for build in (in_place, read):
        assert ["concat"] in kernels(of(build), Clock())


def test_what_the_clock_refuses_says_so() -> None:
    function = of(beside)
    fusion = fuse(function, bodies=Bodies(), seconds=Clock(faster=False), alone=is_held)
    told = [why for pair, why in fusion.refusals.items() if "concat" in pair[0] and "contract" in pair[1]]
    assert len(told) == 1 and told[0].startswith("measured: ")


def test_a_recipe_replays() -> None:
    fusion = fuse(of(twice), bodies=Bodies(), seconds=Clock(), alone=is_held)
    lines = [f"fuse {' + '.join(sites)}" for _, sites in fusion.kernels]
    assert kernels(of(twice), Clock(), recipe=lines) == [["concat", "contract"], ONE]


def test_what_nobody_runs_comes_apart_again() -> None:
    function, bodies = of(twice), Bodies()
    inputs = [torch.randn(v.type.shape).bfloat16() / 4 for v in function.regions[0].block.arguments]
    wanted = Executable(function)(inputs)
    fusion = fuse(function, bodies=bodies, seconds=Clock(), alone=is_held)
    divide(function, fusion, bodies, lambda op: True)
    verify(root_of(function))
    dissolve(function, lambda op: True)
    names = [op.name for op in function.regions[0].block]
    assert names.count("step.contract") == 2 and "step.concat" in names
    for got, want in zip(Executable(function)(inputs), wanted, strict=True):
        torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)
