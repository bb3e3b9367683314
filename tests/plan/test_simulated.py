"""Plans replayed on real memory give, bit for bit, what the reference executor gives: the proof of the planner."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from tests.plan.networks import Case, convnet, gpt, recurrent
from tests.plan.simulate import simulate
from wholestep.dialects.step import StepBuilder
from wholestep.ir.builtin import add_function, finish_function, module
from wholestep.ir.core import Op
from wholestep.ir.types import F32, I64, TensorType
from wholestep.plan import Plan, plan_function
from wholestep.runtime.executor import Executable

CASES: dict[str, Any] = {
    "gpt-dropout-adamw": lambda: Case(gpt(0.1)),
    "gpt-bf16-clip": lambda: Case(gpt(layers=1), precision="bf16", clip_norm=1.0),
    "gpt-fp16-ema": lambda: Case(gpt(layers=1), precision="fp16", ema=0.9),
    "gpt-accumulate-amsgrad": lambda: Case(gpt(0.1, layers=1), "amsgrad", accumulate=2),
    "conv-sgd": lambda: Case(convnet(), "sgd"),
    "conv-bf16-adamw": lambda: Case(convnet(), precision="bf16"),
    "conv-accumulate": lambda: Case(convnet(), "sgd", accumulate=2),
    "lstm-sgd": lambda: Case(recurrent(), "sgd"),
}


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    left, right = left.to(right.dtype).contiguous(), right.contiguous()
    return left.shape == right.shape and torch.equal(
        left.reshape(-1).view(torch.uint8), right.reshape(-1).view(torch.uint8)
    )


def differing(case: Case, plan: Plan, function: Op) -> list[int]:
    """Numbers of the results that differ from the reference."""
    reference = Executable(case.program.function, "cpu", case.numbers)([x.clone() for x in case.inputs])
    replay = simulate(plan, function, case.program.module, [x.clone() for x in case.inputs])
    assert not replay.other_layouts
    return [i for i, (a, b) in enumerate(zip(reference, replay.results, strict=True)) if not same_bits(a, b)]


@pytest.mark.parametrize("name", CASES)
def test_replay_equals_reference(name: str) -> None:
    case = CASES[name]()
    plans = []
    for reorder in (False, True):
        plan, function = plan_function(case.program.function, "cpu", case.numbers, reorder=reorder)
        assert differing(case, plan, function) == []
        assert plan.assumed == (["step.addcdiv"] if name == "gpt-fp16-ema" else [])  # it asks for its scale
        assert plan.lower_bound == max(plan.live_bytes()) <= plan.arena
        plans.append(plan)
    in_program_order, ordered = plans
    assert ordered.lower_bound <= ordered.program_order_bound
    if not ordered.bodies:
        assert ordered.program_order_bound == in_program_order.lower_bound
    assert ordered.arena <= in_program_order.arena


def test_state_is_updated_where_it_lives() -> None:
    """Parameters and moments of AdamW are written in place, and their updates need one temporary at a time."""
    case = Case(gpt())
    plan, _ = plan_function(case.program.function, "cpu", case.numbers)
    ways = {slot.slot.name: r.way for slot, r in zip(case.program.results, plan.results, strict=True) if slot.slot}
    for name, way in ways.items():
        assert way == ("host" if name.endswith(".step") or name.endswith(" step") else "in_place"), name
    assert not any(launch.provider == "copy" for launch in plan.launches)


def test_views_are_not_launched() -> None:
    plan, function = plan_function(Case(gpt()).program.function)
    ops = list(function.regions[0].block)
    launched = {launch.op for launch in plan.launches}
    shapes = [i for i, op in enumerate(ops) if op.name in ("step.transpose", "step.broadcast", "step.slice")]
    assert shapes and not launched.intersection(shapes)


# ---- the simulator can say no ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def planned() -> tuple[Case, Plan, Op]:
    case = Case(gpt())
    return case, *plan_function(case.program.function, "cpu", case.numbers)


def rejected(planned: tuple[Case, Plan, Op], change: Any) -> bool:
    case, plan, function = planned
    changed = copy.deepcopy(plan)
    change(changed)
    try:
        return bool(differing(case, changed, function))
    except (AssertionError, RuntimeError, IndexError, KeyError):
        return True


def test_unchanged_copy_is_accepted(planned: tuple[Case, Plan, Op]) -> None:
    assert not rejected(planned, lambda plan: None)


def test_overlap_is_seen(planned: tuple[Case, Plan, Op]) -> None:
    def overlap(plan: Plan) -> None:
        owners = [b for _, b in plan.owners() if b.bytes > 64]
        one = max(owners, key=lambda b: b.last - b.first)
        other = next(b for b in owners if b is not one and one.first < b.first < one.last and b.offset != one.offset)
        other.offset = one.offset

    assert rejected(planned, overlap)


def test_short_lifetime_is_seen(planned: tuple[Case, Plan, Op]) -> None:
    def shorten(plan: Plan) -> None:
        one = max((b for _, b in plan.owners()), key=lambda b: min(b.last, len(plan.launches) - 1) - b.first)
        one.last -= 1 + (one.last == len(plan.launches))

    assert rejected(planned, shorten)


def test_swapped_launches_are_seen(planned: tuple[Case, Plan, Op]) -> None:
    def swap(plan: Plan) -> None:
        first = next(
            p
            for p, (a, b) in enumerate(zip(plan.launches, plan.launches[1:], strict=False))
            if a.provider == b.provider == "aten" and a.writes[0] in b.reads
        )
        plan.launches[first : first + 2] = plan.launches[first + 1], plan.launches[first]

    assert rejected(planned, swap)


def test_writing_over_a_live_value_is_seen(planned: tuple[Case, Plan, Op]) -> None:
    def overwrite(plan: Plan) -> None:
        for launch in plan.launches:
            if launch.provider != "aten" or launch.in_place or launch.writes[0] < 0:
                continue
            new, old = plan.buffers[launch.writes[0]], plan.buffers[launch.reads[0]]
            if new.type is old.type and new.base < 0 and old.base < 0 and old.space == "arena" and old.last > new.last:
                new.base = launch.reads[0]
                new.offset = 0
                return
        raise LookupError("no such launch")

    assert rejected(planned, overwrite)


# ---- small programs with a twist -------------------------------------------------------------------------------------

VECTOR = TensorType((8,), F32)


class Small:
    """A program of a few ops on vectors, in the clothes of a `Case`."""

    numbers: tuple[int, ...] = ()

    def __init__(self, arguments: int, build: Any):
        self.module = module()
        function = add_function(self.module, "step", [VECTOR] * arguments)
        values = function.regions[0].block.arguments
        results, donates = zip(*build(StepBuilder(function.regions[0].block), *values), strict=True)
        kinds = [{"step.kind": "parameter", "step.name": f"p{i}"} for i in range(arguments)]
        words = [{"step.kind": "output"} | ({} if d < 0 else {"step.donates": d}) for d in donates]
        finish_function(function, list(results), kinds, words)
        self.function = function
        self.program = self
        self.inputs = [torch.arange(8.0) + 10 * i + 1 for i in range(arguments)]


TWISTS: dict[str, Small] = {
    "two arguments swapped": Small(2, lambda b, x, y: [(y, 0), (x, 1)]),
    "an argument is given back unchanged": Small(2, lambda b, x, y: [(x, 0), (b.add(x, y), 1)]),
    "the old value is an output": Small(1, lambda b, x: [(x, -1), (b.mul(x, 2.0), 0)]),
    "a view of the old value is an output": Small(1, lambda b, x: [(b.reshape(x, shape=(2, 4)), -1), (b.neg(x), 0)]),
    "one new value for two arguments": Small(2, lambda b, x, y: [(s := b.add(x, y), 0), (s, 1)]),
    "the new value is an output too": Small(1, lambda b, x: [(y := b.neg(x), 0), (y, -1)]),
    "the old value is read after the new one": Small(
        2, lambda b, x, y: [(n := b.mul(x, y), 0), (b.add(b.exp(n), b.mul(x, x)), -1)]
    ),
    "an operand is seen twice": Small(1, lambda b, x: [(b.mul(t := b.exp(x), t), 0)]),
    "an operand is seen the other way round": Small(
        1,
        lambda b, x: [
            (b.add(t := b.reshape(b.exp(x), shape=(2, 4)), b.transpose(b.reshape(t, shape=(4, 2)), order=(1, 0))), -1)
        ],
    ),
    "a slice is replaced": Small(
        2, lambda b, x, y: [(b.slice_update(b.exp(x), b.slice(y, dim=0, start=0, end=4), dim=0, start=2, end=6), 0)]
    ),
    "a slice is replaced by another of the same tensor": Small(
        1,
        lambda b, x: [(b.slice_update(t := b.exp(x), b.slice(t, dim=0, start=0, end=4), dim=0, start=2, end=6), 0)],
    ),
    "the new value is a view": Small(
        1, lambda b, x: [(b.reshape(b.slice(b.concat([x, b.neg(x)], dim=0), dim=0, start=4, end=12), shape=(8,)), 0)]
    ),
    "a constant is added to": Small(1, lambda b, x: [(b.add(b.iota(start=0.0, stride=1.0, type=VECTOR), x), 0)]),
}


@pytest.mark.parametrize("twist", TWISTS)
def test_twists(twist: str) -> None:
    case: Any = TWISTS[twist]
    plan, function = plan_function(case.function)
    assert differing(case, plan, function) == []


def test_indices_and_empty_tensors() -> None:
    """Integer operands, a scatter into a dying base, and tensors without elements."""
    root = module()
    function = add_function(root, "step", [TensorType((5, 3), F32), TensorType((2,), I64), TensorType((0, 3), F32)])
    x, index, empty = function.regions[0].block.arguments
    b = StepBuilder(function.regions[0].block)
    base = b.exp(x)
    added = b.index_add(base, index, b.index(x, [index], dims=(0,)), dim=0)
    finish_function(function, [added, b.neg(empty)])
    plan, copied = plan_function(function)
    inputs = [torch.randn(5, 3), torch.tensor([3, 1]), torch.empty(0, 3)]
    replay = simulate(plan, copied, root, [t.clone() for t in inputs])
    for got, want in zip(replay.results, Executable(function)(inputs), strict=True):
        assert same_bits(want, got)
    assert [launch.in_place for launch in plan.launches if launch.name == "step.index_add"] == [((0, 0),)]
