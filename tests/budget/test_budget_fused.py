"""`memory_budget=` where kernels are fused: the plan that really runs is what must fit, and what shares are of."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

import wholestep as ws
from wholestep import api
from wholestep.budget.trials import Trials, origins
from wholestep.errors import MemoryBudgetError


@functools.cache
def plain():
    return compiled()


def compiled(**options):
    torch.manual_seed(0)
    layers = [part for _ in range(3) for part in (nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16), nn.LayerNorm(16))]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = torch.randn(128, 16), torch.randn(128, 16)
    step = ws.compile(model, nn.functional.mse_loss, optimizer, batch, providers=["aten", "cpp"], tune=False, **options)
    return step, [float(step(*batch)) for _ in range(3)]


def test_the_fused_plan_has_the_last_word():
    whole, losses = plain()[0].plan().peak, plain()[1]
    step, others = compiled(memory_budget=0.8)
    found = step.budget
    assert found.peak_before == whole and found.budget == int(0.8 * whole)
    assert step.plan().peak == found.peak_after <= found.budget
    assert any(launch.provider == "cpp" for launch in step.plan().launches)
    assert found.plans <= 3  # the model knows what fused kernels need
    assert others == pytest.approx(losses, rel=1e-6)
    enough, _ = compiled(memory_budget=whole)
    assert not enough.budget.recomputed  # though op by op it would need more
    with pytest.raises(MemoryBudgetError) as caught:
        compiled(memory_budget="50kB")
    least = int(str(caught.value).partition("Give memory_budget=")[2].split()[0])
    assert compiled(memory_budget=least)[0].plan().peak <= least


def test_a_fused_plan_that_gains_late_is_found(monkeypatch):
    """What the model gains the plan may gain only when much is computed again."""
    whole = plain()[0].plan().peak
    peaks = []

    def stubborn(self, *arguments, **named):
        planned = real(self, *arguments, **named)
        peaks.append(planned.plan.peak)
        if planned.plan.peak > 0.8 * whole:  # nothing is gained by a little
            planned.plan.arena += whole - planned.plan.peak
        return planned

    real = Trials.planned
    monkeypatch.setattr(Trials, "planned", stubborn)
    step, _ = compiled(memory_budget=0.97)
    assert step.plan().peak <= 0.97 * whole and len(peaks) > 2


def test_what_libraries_take_counts(monkeypatch):
    """A stand-in for what is measured on a GPU: every product takes memory of its own while it runs."""
    taken = 10_000

    def note(planned):
        for launch in planned.plan.launches:
            if launch.name == "step.contract":
                launch.takes = taken

    def noting(*arguments, **named):
        return real(*arguments, **{**named, "note": note})

    whole = plain()[0].plan().peak
    real = api.fit_budget
    monkeypatch.setattr(api, "fit_budget", noting)
    step, _ = compiled(memory_budget=0.8)
    found = step.budget
    assert found.peak_before == whole + taken and found.budget == int(0.8 * found.peak_before)
    assert step.plan().peak + taken == found.peak_after <= found.budget


def test_marks_tell_which_ops_a_kernel_does():
    step, _ = plain()
    program, numbers = step._compiled.program, step._compiled.numbers
    ops = list(program.function.regions[0].block)
    planned = Trials(torch.device("cpu"), numbers, None, step.choices).planned(program.function, marked=True)
    done = [[ops[n] for n in marks] for marks in origins(planned)]
    assert [str(op.loc) for op in ops] == [str(op.loc) for op in program.function.regions[0].block]
    fused = 0
    for op, parts in zip(planned.function.regions[0].block, done, strict=True):
        if op.name == "step.contract":
            assert [p.name for p in parts] == ["step.contract"]
            assert parts[0].results[0].type == op.results[0].type
        elif op.name == "step.fused":
            assert parts and "step.contract" not in {p.name for p in parts}
            fused += "step.gelu" in {p.name for p in parts}
    assert fused >= 3
