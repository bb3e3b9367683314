"""Wide products and convolutions take along what reads their results or sums up a factor, where somebody runs that and
it is faster."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.transforms.test_fuse import program, root_of
from tests.transforms.test_tall_products import Clock
from wholestep.dialects.step import torch_dtype
from wholestep.ir import BF16, F32, TensorType, verify
from wholestep.ir.builtin import lookup
from wholestep.ir.core import Op, Value
from wholestep.runtime.executor import Executable
from wholestep.transforms import again, tall_products, wide_products
from wholestep.transforms.around import divide
from wholestep.transforms.fuse import dissolve, fuse
from wholestep.transforms.regions import Bodies, Piece

ROWS, WIDE, NARROW = 48, 40, 32


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(again, "LEAST", 2048)
    for module in (tall_products, wide_products):
        monkeypatch.setattr(module, "LEAST", 0)


def activation(b: Any, x: Value, w: Value, pre: Value) -> list[Value]:
    y = b.contract(x, w, spec="mk,nk->mn")
    return [y, b.gelu(y, approximate="tanh")]


def gradient(b: Any, x: Value, w: Value, pre: Value) -> list[Value]:
    d = b.gelu_grad(b.contract(x, w, spec="mk,nk->mn"), pre, approximate="none")
    return [d, b.sum(b.cast(d, dtype=F32), dims=(0,))]


def weight(b: Any, x: Value, w: Value, pre: Value) -> list[Value]:
    """The gradient of an input, that of a weight, and that of a bias."""
    dx = b.contract(pre, w, spec="mn,nk->mk")
    return [dx, b.contract(pre, x, spec="mn,mk->nk"), b.sum(b.cast(pre, dtype=F32), dims=(0,))]


def of(build: Any) -> Op:
    shapes = [(ROWS, NARROW), (WIDE, NARROW), (ROWS, WIDE)]
    return program([TensorType(s, BF16) for s in shapes], build)


def joined(function: Op, clock: Clock, able: Any) -> list[list[str]]:
    """The ops of kernels with a product; results stay as they were."""
    torch.manual_seed(0)
    types = [v.type for v in function.regions[0].block.arguments]
    inputs = [(torch.randn(t.shape) / 4).to(torch_dtype(t.element)) for t in types]
    wanted = Executable(function)(inputs)
    fuse(function, seconds=clock, follows=able)
    verify(root_of(function))
    kernels = [[o.name for o in r.regions[0].block if not o.definition.terminator] for r in bodies_of(function)]
    dissolve(function, lambda op: True)
    for got, want in zip(Executable(function)(inputs), wanted, strict=True):
        torch.testing.assert_close(got.double(), want.double(), rtol=2e-2, atol=2e-2)
    return [names for names in kernels if {"step.contract", "step.conv", "step.conv_input_grad"} & {*names}]


def bodies_of(function: Op) -> list[Op]:
    block = function.regions[0].block
    return [lookup(root_of(function), op.callee) for op in block if op.name == "step.fused"]


def anything(piece: Piece, strides: Any) -> bool:
    return True


@pytest.mark.parametrize(("build", "op"), [(activation, "step.gelu"), (gradient, "step.gelu_grad")])
def test_what_reads_a_product_is_taken_along(build: Any, op: str) -> None:
    (names,) = joined(of(build), Clock(), anything)
    assert op in names


@pytest.mark.parametrize(
    ("clock", "able"), [(Clock(faster=False), anything), (Clock(), lambda *_: False), (Clock(), None)]
)
@pytest.mark.parametrize("build", [activation, gradient, weight])
def test_not_where_it_is_slower_or_nobody_runs_it(build: Any, clock: Clock, able: Any) -> None:
    assert joined(of(build), clock, able) == []


def test_what_the_clock_refuses_says_so() -> None:
    function = of(activation)
    fusion = fuse(function, seconds=Clock(faster=False), follows=anything)
    (why,) = (why for pair, why in fusion.refusals.items() if "gelu" in pair[1])
    assert why.startswith("measured: ") and why.endswith(" us apart")


def exponentials(b: Any, x: Value, w: Value, pre: Value) -> list[Value]:
    """Of a product, less a number per row that is made of others, and a mean of logarithms of their sums."""
    low = b.mul(b.cast(b.slice(pre, dim=1, start=0, end=1), dtype=F32), 2.0)
    e = b.cast(b.exp(b.sub(b.cast(b.contract(x, w, spec="mk,nk->mn"), dtype=F32), low)), dtype=BF16)
    sums = b.sum(b.cast(e, dtype=F32), dims=(1,))
    return [e, sums, b.mean(b.log(sums), dims=(0,))]


def test_a_kernel_that_goes_on_from_sums_is_cut_behind_them() -> None:
    def able(piece: Piece, strides: Any) -> bool:
        return not any(op.name in ("step.log", "step.mean") for op in piece.ops)

    (names,) = joined(of(exponentials), Clock(), able)
    assert "step.exp" in names and "step.sum" in names
    assert joined(of(exponentials), Clock(faster=False), able) == []


def statistics(b: Any, x: Value, w: Value, pre: Value) -> list[Value]:
    """BatchNorm's, behind a convolution."""
    y = b.conv(x, w, **WINDOW)
    wide = b.cast(y, dtype=F32)
    return [y, b.mean(wide, dims=(0, 2, 3)), b.mean(b.mul(wide, wide), dims=(0, 2, 3))]


def norm_gradient(b: Any, x: Value, w: Value, pre: Value) -> list[Value]:
    """The sums of BatchNorm's gradient behind an input gradient through ReLU."""
    g, before = b.conv(x, w, **WINDOW), b.cast(pre, dtype=F32)
    kept = b.select(b.le(before, 0.0), 0.0, b.cast(g, dtype=F32))
    sums = [b.sum(v, dims=(0, 2, 3)) for v in (kept, b.mul(kept, before))]
    return [g, *sums]


def strided_gradient(b: Any, x: Value, w: Value, pre: Value) -> list[Value]:
    """The same, of a convolution of stride 2."""
    window = WINDOW | {"stride": (2, 2)}
    g, before = b.conv_input_grad(x, w, input_shape=pre.type.shape, **window), b.cast(pre, dtype=F32)
    kept = b.select(b.le(before, 0.0), 0.0, b.cast(g, dtype=F32))
    return [g, *(b.sum(v, dims=(0, 2, 3)) for v in (kept, b.mul(kept, before)))]


WINDOW = {"stride": (1, 1), "padding": (1, 1), "dilation": (1, 1)}


def convolution(build: Any) -> Op:
    shapes = [(2, 24, 6, 8), (32, 24, 3, 3), (2, 32, 6, 8)]
    return program([TensorType(s, BF16) for s in shapes], build)


@pytest.mark.parametrize(("build", "op"), [(statistics, "step.mean"), (norm_gradient, "step.select")])
def test_what_reads_a_convolution_is_taken_along(build: Any, op: str) -> None:
    (names,) = joined(convolution(build), Clock(), anything)
    assert "step.conv" in names and op in names


def strided() -> Op:
    shapes = [(2, 24, 3, 4), (24, 32, 3, 3), (2, 32, 6, 8)]
    return program([TensorType(s, BF16) for s in shapes], strided_gradient)


def test_what_reads_an_input_gradient_of_stride_2_is_taken_along() -> None:
    (names,) = joined(strided(), Clock(), anything)
    assert {"step.conv_input_grad", "step.select", "step.sum"} <= {*names}
    assert joined(strided(), Clock(faster=False), anything) == joined(strided(), Clock(), lambda *_: False) == []


@pytest.mark.parametrize(
    ("clock", "able"), [(Clock(faster=False), anything), (Clock(), lambda *_: False), (Clock(), None)]
)
def test_a_convolution_stays_alone_where_that_is_faster_or_nobody_runs_it(clock: Clock, able: Any) -> None:
    assert joined(convolution(norm_gradient), clock, able) == []


def test_a_convolution_and_what_it_took_along_come_apart_again() -> None:
    """Where nobody runs both as one after all, each is a kernel of its own."""
    function, bodies = convolution(norm_gradient), Bodies()
    fusion = fuse(function, bodies=bodies, seconds=Clock(), follows=anything)
    assert len(bodies_of(function)) == 1
    parts = divide(function, fusion, bodies, lambda op: True)
    verify(root_of(function))
    names = [[o.name for o in r.regions[0].block if not o.definition.terminator] for r in bodies_of(function)]
    assert len(parts) == len(names) == 2 and names[0] == ["step.conv"] and "step.select" in names[1]


def test_a_sum_goes_with_the_product_that_may_take_it() -> None:
    def able(piece: Piece, strides: Any) -> bool:
        return any(op.name == "step.contract" and op.spec == "mn,mk->nk" for op in piece.ops)

    (names,) = joined(of(weight), Clock(), able)
    assert "step.sum" in names


def test_what_needs_the_product_by_another_way_stays_apart() -> None:
    def build(b: Any, x: Value, w: Value, pre: Value) -> list[Value]:
        y = b.contract(x, w, spec="mk,nk->mn")
        total = b.sum(b.contract(y, pre, spec="mn,mk->nk"), dims=(0, 1))  # of what the product makes
        return [b.mul(y, total)]

    assert all("step.mul" not in names for names in joined(of(build), Clock(), anything))
