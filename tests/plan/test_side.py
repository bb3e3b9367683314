"""Plans whose updates run on a stream of their own: proved by replay and by the verifier, and refused when broken."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.plan.networks import Case, convnet, gpt
from tests.plan.simulate import simulate
from tests.plan.test_simulated import same_bits
from wholestep.dialects.move import verify_plan
from wholestep.errors import InputError
from wholestep.ir.core import Op
from wholestep.ir.verify import VerifyError
from wholestep.plan import Plan, module_to_plan, plan_function, plan_to_module
from wholestep.plan.side import SHARE, SIDE
from wholestep.runtime.executor import Executable
from wholestep.transforms import offload
from wholestep.transforms.opportunity import transform
from wholestep.transforms.side_updates import MARK

CASES: dict[str, Any] = {
    "gpt-bf16": lambda: Case(gpt(0.1, layers=1), precision="bf16", clip_value=0.5),
    "conv-sgd": lambda: Case(convnet(), "sgd"),
}


def beside(case: Case, device: str = "cuda") -> tuple[Plan, Op]:
    case.program.function.attributes[MARK] = True
    return plan_function(case.program.function, device, case.numbers, whole_updates=False)


def hidden(plan: Plan) -> int:
    """Launches of the kernels' stream between those of updates and the waits for them."""
    main = [not x.stream and x.provider not in ("host", "wait") for x in plan.launches]
    return sum(sum(main[x.waits[0] : p]) for p, x in enumerate(plan.launches) if x.provider == "wait")


@pytest.mark.parametrize("name", CASES)
def test_replay_equals_the_step_without_it(name: str) -> None:
    """Updates that run as late as they may still find every value, and the state gets the bits it has without them."""
    case = CASES[name]()
    reference = Executable(case.program.function, "cpu", case.numbers)([x.clone() for x in case.inputs])
    plan, function = beside(case, "cpu")
    replay = simulate(plan, function, case.program.module, [x.clone() for x in case.inputs])
    assert sum(not same_bits(a, b) for a, b in zip(reference, replay.results, strict=True)) == 0
    assert any(x.stream == SIDE for x in plan.launches if x.phase == "update")
    root = plan_to_module(plan)
    verify_plan(root)
    assert module_to_plan(root) == plan and hidden(plan) > 0


def test_copies_to_the_host_go_together_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(gpt(layers=1), "sgd")
    reference = Executable(case.program.function, "cpu", case.numbers)([x.clone() for x in case.inputs])
    monkeypatch.setattr(offload, "LEAST_BYTES", 1)
    transform(case.program.module, force=["offload *"])
    plan, function = beside(case, "cpu")
    assert {x.stream for x in plan.launches} == {0, 1, 2, SIDE}
    verify_plan(plan_to_module(plan))
    replay = simulate(plan, function, case.program.module, [x.clone() for x in case.inputs])
    assert all(same_bits(a, b) for a, b in zip(reference, replay.results, strict=True))


@pytest.fixture(scope="module")
def plans() -> tuple[Plan, Plan]:
    """For a GPU: as it is without side updates, and with them."""
    case = Case(gpt())
    plain, _ = plan_function(case.program.function, "cuda", case.numbers)
    return plain, beside(case)[0]


def test_only_what_updates_need_goes_there(plans: tuple[Plan, Plan]) -> None:
    """With the updates go sums that make gradients of biases; products stay, and so does whatever they read."""
    names = {x.name for x in plans[1].launches if x.stream == SIDE and x.phase == "backward"}
    assert names == {"step.sum"}
    assert {x.stream for x in plans[1].launches if x.phase == "update" and x.provider == "aten"} == {SIDE}
    made = {w for x in plans[1].launches if x.stream == SIDE for w in x.writes}
    readers = [x for x in plans[1].launches if made & set(x.reads)]
    assert readers and all(x.stream == SIDE or x.provider == "wait" for x in readers)


def test_memory_stays_what_it_was(plans: tuple[Plan, Plan]) -> None:
    """Gradients wait below the peak that is there anyway; some updates are waited for at the end, others before it."""
    plain, side = plans
    assert side.lower_bound <= plain.lower_bound * (1 + SHARE)
    assert hidden(side) > sum(x.stream == SIDE for x in side.launches)
    ends = [p for p, x in enumerate(side.launches) if x.provider == "wait"]
    last = max(p for p, x in enumerate(side.launches) if not x.stream and x.provider == "aten")
    assert min(ends) < last < max(ends)


def dropped(plan: Plan, positions: set[int]) -> Plan:
    """The plan in which nothing waits at some positions."""
    gone = {p for i in positions for p in plan.launches[i].waits}
    launches = []
    for position, launch in enumerate(plan.launches):
        waits = () if position in positions else launch.waits
        if launch.stream:  # what the kernels' stream does not wait for, nobody else comes after
            waits = tuple(p for p in waits if p not in gone)
        launches.append(replace(launch, waits=waits))
    return replace(plan, launches=launches)


def test_a_step_that_ends_before_its_updates_is_refused(plans: tuple[Plan, Plan]) -> None:
    plan = plans[1]
    waits = {p for p, x in enumerate(plan.launches) if x.provider == "wait"}
    verify_plan(plan_to_module(plan))
    with pytest.raises(VerifyError, match=r"runs on stream 3, and nothing waits for it before the plan is over"):
        verify_plan(plan_to_module(dropped(plan, {max(waits)})))


def test_memory_that_an_update_may_still_read_is_not_written(plans: tuple[Plan, Plan]) -> None:
    """Updates that are waited for at the end alone: nothing may be written where an earlier wait set memory free."""
    plan = plans[1]
    waits = {p for p, x in enumerate(plan.launches) if x.provider == "wait"}
    with pytest.raises(VerifyError, match="nothing orders it after"):
        verify_plan(plan_to_module(dropped(plan, waits - {max(waits)})))


def test_an_update_that_waits_for_nothing_is_refused(plans: tuple[Plan, Plan]) -> None:
    plan = plans[1]
    first = next(p for p, x in enumerate(plan.launches) if x.stream == SIDE)
    assert plan.launches[first].waits
    with pytest.raises(VerifyError, match="nothing orders it after"):
        verify_plan(plan_to_module(dropped(plan, {first})))


def test_whole_updates_refuse_it() -> None:
    case = Case(gpt(layers=1), "sgd")
    case.program.function.attributes[MARK] = True
    with pytest.raises(InputError, match="on a second stream of a GPU; on a CPU nothing changes before"):
        plan_function(case.program.function, "cpu", case.numbers)
