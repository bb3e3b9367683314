"""Budgets where kernels want memory beside their tensors: those that take little are chosen where nothing else fits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import wholestep as ws
from tests.runtime.runs import adamw, eager_step, fresh
from wholestep.backends import cpp
from wholestep.errors import MemoryBudgetError

pytestmark = pytest.mark.skipif(bool(cpp.missing()), reason=cpp.missing())
X, Y = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(1)), torch.arange(4) % 3


def network() -> nn.Module:
    """A small ResNet's beginning: written out, the windows of its first layer are 37 times what it makes."""
    first = nn.Conv2d(3, 4, 7, stride=2, padding=3, bias=False), nn.BatchNorm2d(4), nn.ReLU()
    second = nn.Conv2d(4, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU()
    return nn.Sequential(*first, *second, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3))


def compiled(**options: Any) -> ws.TrainStep:
    model = fresh(network)
    options = {"providers": ["aten", "cpp"], "tune": False, **options}
    return ws.compile(model, nn.functional.cross_entropy, adamw(model), (X, Y), **options)


def least(**options: Any) -> int:
    with pytest.raises(MemoryBudgetError) as caught:
        compiled(memory_budget=1, **options)
    return int(str(caught.value).partition("Give memory_budget=")[2].split()[0])


def test_the_least_is_about_that_of_library_kernels(tmp_path: Path) -> None:
    plain, named = compiled(), least()
    assert max(b.bytes for b in plain.plan().buffers if b.lifetime == "workspace") > 100_000
    assert named <= 1.05 * least(providers=["aten"]) < plain.plan().peak / 2
    step = compiled(memory_budget=named)
    assert step.budget is not None and step.budget.lean and step.plan().peak == step.budget.peak_after <= named
    assert "much memory beside their tensors are left out" in str(step.budget)
    assert any(launch.provider == "cpp" for launch in step.plan().launches)
    losses = [float(step(X, Y)) for _ in range(3)]
    model = fresh(network)
    optimizer = adamw(model)
    wanted = [eager_step(lambda m: nn.functional.cross_entropy(m(X), Y), model, optimizer) for _ in range(3)]
    assert losses == pytest.approx(wanted, rel=1e-4)
    step.save(tmp_path / "lean.step")
    model = fresh(network)
    loaded = ws.load(tmp_path / "lean.step", model, nn.functional.cross_entropy, adamw(model))
    assert loaded.plan().peak == step.plan().peak


def test_what_fits_anyway_keeps_its_kernels() -> None:
    plain = compiled()
    step = compiled(memory_budget=plain.plan().peak)
    assert step.budget is not None and not step.budget.lean and step.plan().peak == plain.plan().peak
