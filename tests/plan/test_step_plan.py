"""`step.plan()`: the plan of a compiled step as a user asks for it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import wholestep as ws
from tests.runtime.runs import adamw, data, fresh, squares
from wholestep.dialects.move.verify import verify_plan
from wholestep.plan import plan_to_module


def net() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.GELU(), nn.Flatten(), nn.Linear(8 * 36, 4))


@pytest.mark.parametrize("options", [{}, {"precision": "bf16"}, {"accumulate": 2}], ids=str)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=["rows", "channels-last"])
def test_a_step_can_be_planned(options, layout):
    model = fresh(net).to(memory_format=layout)
    step = ws.compile(model, squares, adamw(model), (data(4, 3, 8, 8),), **options)
    plan = step.plan()
    assert 0 < plan.lower_bound <= plan.arena <= 1.1 * plan.program_order_bound
    verify_plan(plan_to_module(plan))
    assert "launches" in str(plan)
    step(data(4, 3, 8, 8))
    assert step.plan().arena == plan.arena  # planning changes nothing, and neither does running


def test_recomputing_needs_less_memory():
    def deep() -> nn.Module:
        return nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(16, 16), nn.GELU())))

    arenas = []
    for options in ({}, {"force": ["recompute */gelu#*"]}):
        model = fresh(deep)
        step = ws.compile(model, squares, adamw(model), (data(512, 16),), **options)
        arenas.append(step.plan().arena)
    assert arenas[1] < 0.8 * arenas[0]
