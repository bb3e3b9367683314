"""Plans with values that wait in host memory: copies on streams of their own, proved by replay and by the verifier."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.plan.networks import Case, convnet, gpt, recurrent
from tests.plan.simulate import simulate
from tests.plan.test_simulated import same_bits
from wholestep.dialects.move import verify_plan
from wholestep.errors import SavedStepError
from wholestep.ir.verify import VerifyError, verify
from wholestep.plan import Plan, load, module_to_plan, overlap, plan_function, plan_to_module, save
from wholestep.runtime.executor import Executable
from wholestep.transforms import offload
from wholestep.transforms.opportunity import transform

CASES: dict[str, Any] = {
    "gpt-dropout": lambda: Case(gpt(0.1)),
    "gpt-bf16-clip": lambda: Case(gpt(layers=1), precision="bf16", clip_norm=1.0),
    "gpt-accumulate": lambda: Case(gpt(0.1, layers=1), "sgd", accumulate=2),
    "conv-sgd": lambda: Case(convnet(), "sgd"),
    "lstm-sgd": lambda: Case(recurrent(), "sgd"),
}


def reference_of(case: Case) -> list[torch.Tensor]:
    return Executable(case.program.function, "cpu", case.numbers)([x.clone() for x in case.inputs])


def offloaded(case: Case, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Everything that backward reads is taken to the host, however small."""
    monkeypatch.setattr(offload, "LEAST_BYTES", 1)
    return transform(case.program.module, force=["offload *"])


def differing(case: Case, plan: Plan, function: Any, reference: list[torch.Tensor]) -> int:
    replay = simulate(plan, function, case.program.module, [x.clone() for x in case.inputs])
    return sum(not same_bits(a, b) for a, b in zip(reference, replay.results, strict=True))


@pytest.mark.parametrize("slowdown", [1.0, 76.0])
@pytest.mark.parametrize("name", CASES)
def test_replay_equals_the_step_without_it(name: str, slowdown: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies that run as late as they may still bring the bits that the plain program has, on any link."""
    monkeypatch.setattr("wholestep.plan.planner.link_slowdown", lambda device: slowdown)
    case = CASES[name]()
    reference = reference_of(case)
    done = offloaded(case, monkeypatch)
    plan, function = plan_function(case.program.function, "cpu", case.numbers)
    inner = plan.bodies[0] if plan.bodies else plan
    assert len([x for x in inner.launches if x.stream == 1]) >= len(done) >= 4
    assert plan.streams == 3 and plan.bytes_in("pinned") == inner.pinned > 0
    assert differing(case, plan, function, reference) == 0
    root = plan_to_module(plan)
    verify_plan(root)
    assert module_to_plan(root) == plan
    assert inner.lower_bound == max(inner.live_bytes()) <= inner.arena


@pytest.fixture
def case(monkeypatch: pytest.MonkeyPatch) -> Case:
    found = Case(gpt(layers=1), "sgd")
    offloaded(found, monkeypatch)
    return found


def without_wait(plan: Plan, position: int) -> Plan:
    """The plan where nothing waits at a position; positions after it stay what they are."""
    launches = [replace(x, waits=() if p == position else x.waits) for p, x in enumerate(plan.launches)]
    return replace(plan, launches=launches)


def test_a_dropped_wait_is_refused(case: Case) -> None:
    """A wait is needed, unless one for a later copy of the same stream stands beside it or comes in time."""
    plan, _ = plan_function(case.program.function, "cpu", case.numbers)
    refused = {1: 0, 2: 0}
    is_wait = [x.provider == "wait" for x in plan.launches]
    for position, launch in enumerate(plan.launches):
        if launch.provider != "wait":
            continue
        (awaited,) = launch.waits
        stream = plan.launches[awaited].stream
        mutant = without_wait(plan, position)
        for side in mutant.launches:  # what the kernels' stream does not wait for, copies do not come after
            if side.stream:
                side.waits = tuple(p for p in side.waits if p != awaited)
        try:
            verify_plan(plan_to_module(mutant))
        except VerifyError as error:
            assert "nothing orders it after" in str(error)
            refused[stream] += 1
        else:
            assert stream == 1 or is_wait[position - 1] or is_wait[position + 1]
    assert refused[1] > 3 and refused[2] > 3


def test_a_copy_that_waits_for_nothing_is_refused(case: Case) -> None:
    """A copy to the host must come after the kernel that makes its value, one from there after that copy."""
    plan, _ = plan_function(case.program.function, "cpu", case.numbers)
    for stream in (1, 2):
        first = next(p for p, x in enumerate(plan.launches) if x.stream == stream)
        with pytest.raises(VerifyError, match="nothing orders it after"):
            verify_plan(plan_to_module(without_wait(plan, first)))


def test_nothing_takes_the_memory_of_a_copy_under_way(case: Case) -> None:
    """Until its copy is waited for, what is taken to the host is written over by nobody, in place included."""
    plan, _ = plan_function(case.program.function, "cpu", case.numbers)
    for position, launch in enumerate(plan.launches):
        if launch.stream != 1:
            continue
        source = plan.buffers[launch.reads[0]]
        source = source if source.share != "view" else plan.buffers[source.of]
        over = next(p for p, x in enumerate(plan.launches) if x.provider == "wait" and position in x.waits)
        owner = plan.owner(launch.reads[0])
        for p in range(position + 1, over):
            assert owner not in [plan.owner(w) for w in plan.launches[p].writes if w >= 0]
        assert plan.buffers[owner].last >= over


def test_few_copies_are_under_way(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a slow link no more than DEPTH values each way are held for copies, besides the one being made."""
    monkeypatch.setattr("wholestep.plan.planner.link_slowdown", lambda device: 1e9)
    plan, _ = plan_function(case.program.function, "cpu", case.numbers)
    under_way: dict[int, set[int]] = {1: set(), 2: set()}
    most = {1: 0, 2: 0}
    for position, launch in enumerate(plan.launches):
        if launch.stream:
            under_way[launch.stream].add(position)
            most[launch.stream] = max(most[launch.stream], len(under_way[launch.stream]))
        elif launch.provider == "wait":
            for each in under_way.values():
                each.difference_update(launch.waits)
    assert overlap.DEPTH <= most[1] <= overlap.DEPTH + 1
    assert overlap.DEPTH <= most[2] <= overlap.DEPTH + 1


def test_a_slow_link_is_given_more_time(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies are issued further from where they are waited for than on a fast one."""

    def distance(slowdown: float) -> int:
        monkeypatch.setattr("wholestep.plan.planner.link_slowdown", lambda device: slowdown)
        plan, _ = plan_function(case.program.function, "cpu", case.numbers, reorder=False)
        return sum(p - x.waits[0] for p, x in enumerate(plan.launches) if x.provider == "wait")

    assert distance(0.0) < distance(1.0) < distance(20.0)


def test_file_keeps_streams_and_waits(case: Case, tmp_path: Any) -> None:
    plan, _ = plan_function(case.program.function, "cpu", case.numbers)
    save(plan, tmp_path / "step.plan")
    assert load(tmp_path / "step.plan") == plan
    text = (tmp_path / "step.plan").read_text()
    lines = text.splitlines()
    waiting = next(i for i, line in enumerate(lines) if '"move.wait"' in line)
    (tmp_path / "step.plan").write_text("\n".join(lines[1:waiting] + lines[waiting + 1 :]))
    try:  # a file without its checksum and one of its waits is another plan, or none
        assert load(tmp_path / "step.plan") != plan
    except SavedStepError as error:
        assert "nothing orders it after" in str(error)


def test_host_memory_is_read_by_fetch_alone(case: Case) -> None:
    """The verifier refuses a program in which another op reads what is on the host."""
    function = case.program.function
    block = function.regions[0].block
    away = next(op for op in block if op.name == "step.offload")
    (fetch,) = away.result.uses
    user = next(iter(fetch.result.uses))
    user.set_operands([away.result if v is fetch.result else v for v in user.operands])
    with pytest.raises(VerifyError, match=r"step\.fetch brings it back first"):
        verify(case.program.module)


def test_a_plan_for_a_gpu_is_accepted(case: Case) -> None:
    """Copies between the device's memory and page-locked memory of the host, both within reach."""
    plan, _ = plan_function(case.program.function, "cuda", case.numbers)
    root = plan_to_module(plan)
    verify_plan(root)
    assert '"hbm"' in str(root) and '"pinned"' in str(root) and module_to_plan(root) == plan
    assert {x.stream for x in plan.launches if x.provider == "copy"} == {1, 2}


def test_plans_without_copies_have_one_stream() -> None:
    case = Case(gpt(layers=1), "sgd")
    plan, _ = plan_function(case.program.function, "cpu", case.numbers)
    assert plan.streams == 1 and plan.bytes_in("pinned") == 0
    assert all(not x.waits and not x.stream and x.provider != "wait" for x in plan.launches)
