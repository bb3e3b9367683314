"""Casts and sums of gradients go to the updates that read them, however far away these are."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.dialects.loop.provider import run_fused
from tests.transforms.test_fuse import program, regions_of, root_of
from wholestep.dialects.step import StepBuilder, torch_dtype
from wholestep.ir import BF16, F32, TensorType, verify
from wholestep.ir.core import Op
from wholestep.runtime.executor import Executable
from wholestep.transforms import fuse as fusing

SHAPE = (64, 32)
WIDE, NARROW = TensorType(SHAPE, F32), TensorType(SHAPE, BF16)


def gradient(b: StepBuilder, *gradients: Any) -> Any:
    """One gradient in f32, or the sum of several, as backward makes it."""
    b.phase = "backward"
    wide = [b.cast(g, dtype=F32) if g.type.element is BF16 else g for g in gradients]
    return wide[0] if len(wide) == 1 else b.add(*wide)


def long_way(b: StepBuilder, count: int = 90) -> None:
    """Other ops of backward, so that the update is far away."""
    x = b.full(1.0, (4,), F32)
    for _ in range(count):
        x = b.exp(x)


def step(*kinds: TensorType) -> Op:
    def build(b: StepBuilder, weight: Any, *given: Any) -> list[Any]:
        total = gradient(b, *given)
        long_way(b)
        b.phase = "update"
        return [b.sub(weight, b.div(total, b.sqrt(b.add(b.mul(total, total), 1e-3))))]

    return program([WIDE, *kinds], build)


@pytest.mark.parametrize("kinds", [(NARROW,), (NARROW, WIDE), (WIDE, WIDE)])
def test_the_update_reads_what_backward_made(monkeypatch: pytest.MonkeyPatch, kinds: tuple[TensorType, ...]) -> None:
    monkeypatch.setattr(fusing, "WINDOW", 64)
    function = step(*kinds)
    torch.manual_seed(0)
    inputs = [torch.randn(SHAPE).to(torch_dtype(kind.element)) for kind in (WIDE, *kinds)]
    wanted = Executable(function)(inputs)
    fusion = fusing.fuse(function)
    verify(root_of(function))
    (update,) = [op for op in regions_of(function) if op.results[0].type is WIDE]
    assert sorted(str(v.type) for v in update.operands) == sorted(str(kind) for kind in (WIDE, *kinds))
    torch.testing.assert_close(run_fused(function, inputs, fusion)[0].float(), wanted[0], rtol=1e-5, atol=1e-5)


def test_a_sum_of_three_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three gradients in memory until the update would be more than twice their sum."""

    def build(b: StepBuilder, weight: Any, *given: Any) -> list[Any]:
        b.phase = "backward"
        total = b.select(b.lt(given[0], given[1]), given[2], given[0])
        b.phase = "update"
        return [b.sub(weight, total)]

    function = program([WIDE] * 4, build)
    fusing.fuse(function)
    assert [len(op.operands) for op in regions_of(function)] == [3, 2]
