"""`memory_budget=` where kernels are fused: the plan that really runs is what must fit, and what shares are of."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import wholestep as ws
from wholestep import api
from wholestep.errors import MemoryBudgetError


def compiled(**options):
    torch.manual_seed(0)
    layers = [part for _ in range(3) for part in (nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16), nn.LayerNorm(16))]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = torch.randn(128, 16), torch.randn(128, 16)
    step = ws.compile(model, nn.functional.mse_loss, optimizer, batch, providers=["aten", "cpp"], tune=False, **options)
    return step, [float(step(*batch)) for _ in range(3)]


def test_the_fused_plan_has_the_last_word():
    plain, losses = compiled()
    step, others = compiled(memory_budget=0.8)
    found = step.budget
    assert found.peak_before == plain.plan().peak and found.budget == int(0.8 * plain.plan().peak)
    assert step.plan().peak == found.peak_after <= found.budget
    assert any(launch.provider == "cpp" for launch in step.plan().launches)
    assert found.op_by_op[0] > found.op_by_op[1] and "without fused kernels it would be" in str(found)
    assert others == pytest.approx(losses, rel=1e-6)
    enough, _ = compiled(memory_budget=plain.plan().peak)
    assert not enough.budget.recomputed  # though op by op it would need more
    with pytest.raises(MemoryBudgetError) as caught:
        compiled(memory_budget="50kB")
    least = int(str(caught.value).partition("Give memory_budget=")[2].split()[0])
    assert compiled(memory_budget=least)[0].plan().peak <= least


def test_a_fused_plan_that_gains_late_is_found(monkeypatch):
    """What a plan gains op by op the fused one may gain only when much is computed again."""
    plain, _ = compiled()
    whole = plain.plan().peak
    peaks = []

    def stubborn(*arguments, choices=None, **named):
        planned = real(*arguments, choices=choices, **named)
        if choices is not None:
            peaks.append(planned.plan.peak)
            if planned.plan.peak > 0.8 * whole:  # nothing is gained by a little
                planned.plan.arena += whole - planned.plan.peak
        return planned

    real = api.planned_function
    monkeypatch.setattr(api, "planned_function", stubborn)
    step, _ = compiled(memory_budget=0.97)
    assert step.plan().peak <= 0.97 * whole and len(peaks) > 2
