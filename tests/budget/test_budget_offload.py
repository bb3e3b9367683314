"""`fit_budget` with host memory as the third choice: keep, run again, or let wait on the host."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.plan.networks import Case, gpt
from tests.plan.simulate import simulate
from tests.plan.test_simulated import same_bits
from wholestep.budget import BudgetReport, fit_budget
from wholestep.dialects.move import verify_plan
from wholestep.errors import MemoryBudgetError
from wholestep.machine.description import Description, load_description
from wholestep.plan import plan_function, plan_to_module
from wholestep.runtime.executor import Executable
from wholestep.transforms import offload

#: so fast that every copy is hidden, and so slow that none is
FAST, SLOW = 1e15, 1.0


@pytest.fixture(autouse=True)
def small_values_travel_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "LEAST_BYTES", 1)


def machine(link: float | None) -> Description:
    links = {} if link is None else {"host_to_device": link, "device_to_host": link}
    return replace(load_description("h200"), links=links)


def step(layers: int = 1, **options: Any) -> Case:
    torch.manual_seed(0)
    return Case(gpt(0.1, layers=layers), "sgd", **options)


def fit(budget: float | int, link: float | None, **options: Any) -> tuple[Case, BudgetReport, list[str]]:
    case = step()
    program = case.program
    report, recipe = fit_budget(
        program.module, program.function, "cpu", case.numbers, None, budget, machine(link), **options
    )
    return case, report, recipe


def least(**options: Any) -> int:
    """The least that the error names for a budget of nothing."""
    with pytest.raises(MemoryBudgetError) as caught:
        fit(1, FAST, **options)
    return int(str(caught.value).partition("memory_budget=")[2].split()[0])


def check(case: Case, report: BudgetReport) -> None:
    """The plan fits, holds, and computes what the step without a budget computes."""
    plain = step()
    inputs = [x.clone() for x in plain.inputs]
    reference = Executable(plain.program.function, "cpu", plain.numbers)(inputs)
    plan, function = plan_function(case.program.function, "cpu", case.numbers)
    assert plan.peak == report.peak_after <= report.budget < report.peak_before
    assert (plan.bytes_in("pinned") > 0) == (report.offloaded > 0)
    verify_plan(plan_to_module(plan))
    found = simulate(plan, function, case.program.module, [x.clone() for x in case.inputs]).results
    assert all(same_bits(a, b) for a, b in zip(reference, found, strict=True))


def kinds(recipe: list[str]) -> set[str]:
    return {key.split()[0] for key in recipe}


def test_where_copies_are_hidden_values_wait_on_the_host() -> None:
    case, report, recipe = fit(0.9, FAST, offload=True)
    assert kinds(recipe) == {"offload"} and len(recipe) == report.offloaded > 0
    assert report.link_hidden and report.recomputed == 0 and report.offloaded_bytes > 0
    assert "wait in host memory" in str(report) and "hidden behind" in str(report)
    assert 0 < fit(0.97, FAST, offload=True)[1].offloaded < report.offloaded
    check(case, report)


@pytest.mark.parametrize("link", [SLOW, None])
def test_where_copies_cost_more_ops_run_again(link: float | None) -> None:
    case, report, recipe = fit(0.9, link, offload=True)
    assert kinds(recipe) == {"recompute"} and report.offloaded == 0 and report.recomputed > 0
    check(case, report)


def test_below_what_running_again_reaches_both_are_used() -> None:
    """A budget that recompute alone cannot meet is met with host memory, and the report says what the link costs."""
    lean = least()
    with pytest.raises(MemoryBudgetError):
        fit(lean - 1, SLOW)
    case, report, recipe = fit(lean - 1, SLOW, offload=True)
    assert "offload" in kinds(recipe)
    assert not report.link_hidden and "the link sets its pace" in str(report)
    check(case, report)


@pytest.mark.parametrize("pattern", ["offload *", "offload"])
def test_what_is_forbidden_stays(pattern: str) -> None:
    _, report, recipe = fit(0.9, FAST, offload=True, forbidden=[pattern])
    assert kinds(recipe) == {"recompute"} and report.offloaded == 0


def test_an_impossible_budget_leaves_the_program_as_it_was() -> None:
    case = step(layers=1)
    before = str(case.program.module)
    with pytest.raises(MemoryBudgetError, match="memory_budget is 1 B"):
        fit_budget(
            case.program.module, case.program.function, "cpu", case.numbers, None, 1, machine(FAST), offload=True
        )
    assert str(case.program.module) == before


def test_a_step_with_micro_batches_sends_values_away() -> None:
    case = step(accumulate=2)
    report, recipe = fit_budget(
        case.program.module, case.program.function, "cpu", case.numbers, None, 0.97, machine(FAST), offload=True
    )
    plan, _ = plan_function(case.program.function, "cpu", case.numbers)
    assert kinds(recipe) == {"offload"} and plan.peak == report.peak_after <= report.budget
    assert plan.bodies[0].pinned == plan.bytes_in("pinned") > 0
