"""Steps whose updates wait for the next forward: their programs against the step they come from, and their plans."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.plan.networks import Case, convnet, gpt, recurrent
from tests.plan.simulate import simulate
from tests.plan.test_simulated import same_bits
from wholestep.api import host_numbers
from wholestep.dialects import context
from wholestep.dialects.move import verify_plan
from wholestep.dialects.step import torch_dtype
from wholestep.errors import InputError
from wholestep.ir.parser import parse
from wholestep.ir.verify import VerifyError
from wholestep.ir.verify import verify as verify_ir
from wholestep.plan import Plan, module_to_plan, plan_function, plan_to_module
from wholestep.plan.side import SIDE
from wholestep.runtime.executor import Executable
from wholestep.runtime.late import kept_strides
from wholestep.training.build import Program
from wholestep.transforms import late_updates as module
from wholestep.transforms.late_updates import KEPT, Late, late_updates
from wholestep.transforms.opportunity import transform
from wholestep.transforms.side_updates import MARK

CASES: dict[str, Callable[[], Case]] = {
    "gpt-clip": lambda: Case(gpt(0.1, layers=1), clip_norm=0.01),
    "gpt-bf16-clip": lambda: Case(gpt(layers=1), precision="bf16", clip_norm=0.01, ema=0.9),
    "conv-sgd-clip-value": lambda: Case(convnet(), "sgd", clip_value=0.001),
    "fp16-scaled": lambda: Case(recurrent(), precision="fp16", clip_norm=1.0),
    "accumulate-skip": lambda: Case(recurrent(), "sgd", accumulate=2, skip_nonfinite=True, clip_norm=0.1),
}
State = dict[tuple[Any, ...], torch.Tensor]


@pytest.fixture(autouse=True)
def every_weight_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TOGETHER", 0)


def inputs_of(program: Program, state: State) -> list[torch.Tensor]:
    """The arguments of a program; what is kept and was not made yet is NaN."""
    for slot in program.slots:
        if slot.source not in state:
            assert slot.kind == KEPT
            state[slot.source] = torch.zeros(slot.type.shape, dtype=torch_dtype(slot.type.element))
            if slot.type.element.kind == "float":
                state[slot.source].fill_(torch.nan)
    return [state[slot.source].clone(memory_format=torch.contiguous_format) for slot in program.slots]


def advance(case: Case, program: Program, state: State) -> list[torch.Tensor]:
    """Runs a program by the reference executor on a state, which it changes; gives what is not state."""
    numbers = host_numbers(program, case.optimizer)
    results = Executable(program.function, "cpu", numbers)(inputs_of(program, state))
    for r, value in zip(program.results, results, strict=True):
        if r.slot is not None:  # the copy into place may be what casts it
            state[r.slot.source] = value.to(torch_dtype(r.slot.type.element), copy=True)
    return [v for r, v in zip(program.results, results, strict=True) if r.slot is None]


def start(case: Case) -> State:
    return {s.source: x.clone() for s, x in zip(case.program.slots, case.inputs, strict=True)}


def parts_of(case: Case, beside: bool = False) -> Late:
    parts = late_updates(case.program, beside)
    for program in (parts.first, parts.both, parts.update):
        verify_ir(program.module)
        text = str(program.module)
        assert str(parse(text, context())) == text
    return parts


@pytest.mark.parametrize("name", CASES)
def test_three_programs_do_what_the_step_does(name: str) -> None:
    """First without an update, then with that of the step before, then that update alone: bit for bit the same."""
    case = CASES[name]()
    parts, whole, late = parts_of(case), start(case), start(case)
    expected = [advance(case, case.program, whole) for _ in range(3)]
    found = [advance(case, p, late) for p in (parts.first, parts.both, parts.both)]
    assert advance(case, parts.update, late) == []
    for one, other in zip(expected, found, strict=True):
        assert all(same_bits(a, b) for a, b in zip(one, other, strict=True))
    assert [s for s in whole if not same_bits(whole[s], late[s])] == []


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("name", CASES)
def test_plans_of_them_are_proved_and_replayed(name: str, whole: bool) -> None:
    case = CASES[name]()
    parts, state = parts_of(case), start(case)
    advance(case, parts.first, state)
    for program in (parts.first, parts.both, parts.update):
        numbers, inputs = host_numbers(program, case.optimizer), inputs_of(program, state)
        expected = Executable(program.function, "cpu", numbers)([x.clone() for x in inputs])
        plan, function = plan_function(program.function, "cpu", numbers, whole_updates=whole)
        replay = simulate(plan, function, program.module, inputs)
        assert all(same_bits(a, b) for a, b in zip(expected, replay.results, strict=True))
        root = plan_to_module(plan)
        verify_plan(root)
        assert module_to_plan(root) == plan


def written_at(plan: Plan, kind: str, program: Program) -> dict[int, int]:
    """The launch that writes each argument of a kind."""
    wanted = {i for i, slot in enumerate(program.slots) if slot.kind == kind}
    return {
        r.argument: next(p for p, x in enumerate(plan.launches) if r.buffer in x.writes)
        for r in plan.results
        if r.argument in wanted
    }


@pytest.mark.parametrize("whole", [True, False])
def test_a_weight_is_updated_in_place_right_before_it_is_read(whole: bool) -> None:
    case = Case(gpt(layers=3), clip_norm=1.0)
    parts = parts_of(case)
    program, numbers = parts.both, host_numbers(parts.both, case.optimizer)
    laid = kept_strides(plan_function(parts.first.function, "cpu")[0], parts.first.slots)
    assert len(laid) == 1  # the gradient of the tied embedding is made by columns, and would be copied
    strides = [laid.get(slot.source) for slot in program.slots]
    plan, _ = plan_function(program.function, "cpu", numbers, strides=strides, whole_updates=whole)
    kernels = [x for x in plan.launches if x.provider not in ("host", "copy")]
    phases = [x.phase for x in kernels]
    for argument, position in written_at(plan, "parameter", program).items():
        new = next(r.buffer for r in plan.results if r.argument == argument)
        assert plan.buffers[new].space == "external"
        readers = [p for p, x in enumerate(plan.launches) if any(root(plan, n) == new for n in x.reads)]
        assert readers and position < min(readers), program.slots[argument].name
    assert all(r.way == "in_place" for r in plan.results if r.argument in written_at(plan, KEPT, program))
    runs = [p for i, p in enumerate(phases) if i == 0 or phases[i - 1] != p]
    assert runs[:2] == ["update", "forward"] and runs.count("update") > 6  # in turns, not all of it first


def root(plan: Plan, number: int) -> int:
    return plan.buffers[number].of if plan.buffers[number].share == "view" else number


def test_weights_are_updated_together_up_to_a_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TOGETHER", 1 << 30)
    case = Case(gpt(), clip_norm=1.0)
    program = parts_of(case).both
    phases = [op.phase for op in program.function.regions[0].block if op.operands]
    assert phases.index("forward") == sum(p == "update" for p in phases)


def test_narrow_gradients_are_kept() -> None:
    case = Case(gpt(layers=1), precision="bf16", clip_norm=1.0)
    parts = parts_of(case)
    program = parts.first
    copies = [[s.source for s in p.slots if s.kind == "copy"] for p in (program, parts.both, parts.update)]
    assert copies[0] == copies[1] == copies[2] != []  # whoever watches them sees the same ones in every turn
    kept = [s for s in program.slots if s.kind == KEPT]
    trained = sum(p.numel() for p in case.program.captured.parameters.values())
    tied = case.program.captured.parameters["words.weight"].numel()
    wide = sum(s.type.bytes for s in kept if s.type.element.text == "f32")
    assert sum(s.type.size for s in kept) >= trained and wide <= 4 * (2 * tied + 8 * 16 + 1 + 10 * 16)


class Words(nn.Module):
    """An embedding that is not tied, of which a batch reads few rows."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.out = nn.Embedding(50, 16), nn.Linear(16, 8)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.out(self.words(ids)).square().mean()


def test_rows_that_were_read_are_kept_with_their_places() -> None:
    """What the update looks up of its batch is kept too: the next step has another one."""
    batch = torch.randint(1, 48, (2, 5))
    case = Case((Words(), lambda model, ids: model(ids), (batch,)), clip_norm=0.01)
    transform(case.program.module, force=["row_gradients"])
    parts, whole, late = parts_of(case), start(case), start(case)
    kept = {s.type.text for s in parts.first.slots if s.kind == KEPT}
    assert "tensor<10x16xf32>" in kept and "tensor<50x16xf32>" not in kept
    source = next(s.source for s in case.program.slots if s.kind == "batch")
    for number, program in enumerate((parts.first, parts.both, parts.both)):
        whole[source], late[source] = batch + number - 1, batch + number - 1
        for one, other in zip(advance(case, case.program, whole), advance(case, program, late), strict=True):
            assert same_bits(one, other)
    late[source] = batch * 0
    advance(case, parts.update, late)
    assert [s for s in whole if s != source and not same_bits(whole[s], late[s])] == []


@pytest.mark.parametrize("name", ["gpt-clip", "conv-sgd-clip-value"])
def test_beside_forward(name: str) -> None:
    """On a stream of their own all updates are issued first, each waited for before somebody reads its weight."""
    case = CASES[name]()
    program = parts_of(case, beside=True).both
    state = start(case)
    advance(case, parts_of(case).first, state)
    numbers, inputs = host_numbers(program, case.optimizer), inputs_of(program, state)
    expected = Executable(program.function, "cpu", numbers)([x.clone() for x in inputs])
    plan, function = plan_function(program.function, "cpu", numbers, whole_updates=False)
    replay = simulate(plan, function, program.module, inputs)
    assert all(same_bits(a, b) for a, b in zip(expected, replay.results, strict=True))
    verify_plan(plan_to_module(plan))
    assert {x.stream for x in plan.launches if x.phase == "update" and x.op >= 0 and x.provider == "aten"} == {SIDE}
    waits = [p for p, x in enumerate(plan.launches) if x.provider == "wait"]
    forward = [p for p, x in enumerate(plan.launches) if x.phase == "forward" and x.provider == "aten"]
    assert sum(forward[0] < p < forward[-1] for p in waits) > 2
    plan.launches = [x for i, x in enumerate(plan.launches) if i != max(w for w in waits if w < forward[-1])]
    with pytest.raises((VerifyError, IndexError)):
        verify_plan(plan_to_module(plan))


def test_beside_forward_on_a_gpu_is_proved() -> None:
    case = Case(gpt(), clip_norm=1.0)
    program = parts_of(case, beside=True).both
    plan, _ = plan_function(program.function, "cuda", host_numbers(program, case.optimizer))
    verify_plan(plan_to_module(plan))
    assert sum(x.stream == SIDE for x in plan.launches) > 10


def test_two_ways_at_once_are_refused() -> None:
    case = Case(recurrent())
    case.program.function.attributes[MARK] = True
    with pytest.raises(InputError, match="beside_next_forward"):
        late_updates(case.program)
