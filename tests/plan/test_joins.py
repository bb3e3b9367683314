"""Concatenations in place: parts are written where the whole lies, every bit stays, broken plans are refused."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

import wholestep as ws
from tests.dialects.loop.provider import LoopReference, registered
from tests.plan.networks import Case
from tests.plan.simulate import simulate
from tests.runtime.runs import data
from tests.transforms.test_fuse import program
from wholestep.cost import make_ledger
from wholestep.cost.movement import movement_of
from wholestep.dialects.move import verify_plan
from wholestep.dialects.strides import row_major
from wholestep.ir.types import F32, TensorType
from wholestep.ir.verify import VerifyError
from wholestep.plan import joined, planner
from wholestep.plan.joins import Joins, Part, find_joins, held_back
from wholestep.plan.launches import flatten
from wholestep.plan.plan import Launch, Plan
from wholestep.plan.planner import Planned, planned_function
from wholestep.plan.text import module_to_plan, plan_to_module
from wholestep.runtime.calls import in_words
from wholestep.runtime.executor import Executable
from wholestep.transforms import join_slices  # noqa: F401  (it registers)
from wholestep.transforms.opportunity import take

CPU = torch.device("cpu")
Network = tuple[nn.Module, Any, tuple[torch.Tensor, ...]]


class Packed(nn.Module):
    """Attention whose query, key and value are parts of one product."""

    def __init__(self, width: int = 16, heads: int = 2):
        super().__init__()
        self.qkv, self.out, self.heads = nn.Linear(width, 3 * width), nn.Linear(width, width), heads

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, n, w = x.shape
        q, k, v = (p.view(b, n, self.heads, -1).transpose(1, 2) for p in self.qkv(x).chunk(3, -1))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(b, n, w))


class Side(nn.Module):
    """Linear layers side by side, of different widths; one is read once more, one goes through a kernel of loops."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other, self.third = nn.Linear(8, 16), nn.Linear(8, 24, bias=False), nn.Linear(8, 8)
        self.out = nn.Linear(48, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b, c = self.one(x), self.other(x), self.third(x) * 0.5
        return self.out(torch.cat([a, b, c], -1)) + (a * a)[..., :3]


class Skip(nn.Module):
    """A part of a U-Net on images in channels-last order: what is made before the pooling is joined after it."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.low, self.up = (nn.Conv2d(n, m, 3, padding=1) for n, m in ((3, 8), (8, 8), (16, 4)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        high = self.down(x.contiguous(memory_format=torch.channels_last))
        low = self.low(nn.functional.max_pool2d(high, 2))
        both = torch.cat([high, nn.functional.interpolate(low, scale_factor=2) * 0.5], 1)
        return self.up(both).mean((2, 3))


class Dense(nn.Module):
    """Every layer reads all before it side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8 * (i + 1), 8) for i in range(4))
        self.out = nn.Linear(8 * 5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.cat([x, layer(x)], -1)
        return self.out(x)


def squares(y: torch.Tensor) -> torch.Tensor:
    return (y * y).sum()


def network(model: nn.Module, *shape: int) -> Network:
    return model, lambda model, x: squares(model(x)), (data(*shape),)


NETWORKS: dict[str, Callable[[], Network]] = {
    "packed": lambda: network(nn.Sequential(Packed(), nn.LayerNorm(16), Packed()), 4, 8, 16),
    "side": lambda: network(Side(), 32, 8),
    "skip": lambda: network(Skip(), 2, 3, 8, 8),
    "dense": lambda: network(Dense(), 32, 8),
}


@cache
def case_of(name: str) -> Case:
    torch.manual_seed(0)
    case = Case(NETWORKS[name]())
    take(case.program.module, ("join_slices",))
    return case


@cache
def planned_of(name: str) -> Planned:
    return planned_function(case_of(name).program.function, CPU, case_of(name).numbers)


def plan_of(name: str) -> Plan:
    """A plan to break."""
    return module_to_plan(plan_to_module(planned_of(name).plan))


def parts(plan: Plan) -> list[tuple[Launch, int]]:
    """Launches that write a part of something, and the place of that part among their results."""
    return [
        (launch, i)
        for launch in plan.launches
        for i, number in enumerate(launch.writes)
        if number >= 0 and plan.buffers[number].share == "view"
    ]


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    one, other = (x.contiguous().reshape(-1).view(torch.uint8) for x in (one, other))
    return torch.equal(one, other)


def as_wholes(case: Case) -> Planned:
    """The plan in which every concatenation is made as a whole."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(joined, "find_joins", lambda *given: Joins())
        return planned_function(case.program.function, CPU, case.numbers)


@pytest.mark.parametrize(
    "name, makers, saved", [("packed", 1, 12288), ("side", 3, 12288), ("skip", 1, 8192), ("dense", 1, 2048)]
)
def test_parts_are_written_in_place_and_nothing_else_changes(name: str, makers: int, saved: int) -> None:
    """Every bit is that of the reference, on memory that is poisoned where nothing lives."""
    case, planned = case_of(name), planned_of(name)
    plan = planned.plan
    assert len({id(launch) for launch, _ in parts(plan) if launch.provider != "copy"}) == makers
    reference = Executable(case.program.function, "cpu", case.numbers)([x.clone() for x in case.inputs])
    replay = simulate(plan, planned.function, case.program.module, [x.clone() for x in case.inputs])
    assert not replay.other_layouts
    assert all(same_bits(a, b) for a, b in zip(reference, replay.results, strict=True))
    plain = as_wholes(case)
    assert not parts(plain.plan)
    assert make_ledger(plain).total - make_ledger(planned).total == saved
    assert movement_of(plain).bound.total == movement_of(planned).bound.total
    assert plan.lower_bound <= 1.01 * plain.plan.lower_bound


@pytest.mark.parametrize("name, provider", [("packed", "aten"), ("side", "aten"), ("side", "loops")])
def test_a_step_trains_to_the_same_bits(name: str, provider: str) -> None:
    """Kernels of ATen and of loops write parts with strides; the parameters after two steps are those of before."""
    trained = []
    for in_place in (True, False):
        torch.manual_seed(0)
        model, loss_fn, batch = NETWORKS[name]()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        force = ["join_slices"] if name == "packed" else []
        with registered(LoopReference), pytest.MonkeyPatch.context() as patch:
            patch.setattr(joined, "GROWTH", 1.0)
            if not in_place:
                patch.setattr(joined, "find_joins", lambda *given: Joins())
            names = list(dict.fromkeys(["aten", provider]))
            step = ws.compile(model, loss_fn, optimizer, batch, providers=names, tune=False, force=force)
            losses = [float(step(*batch)) for _ in range(2)]
            verify_plan(plan_to_module(step.plan()))
        written = {launch.provider for launch, _ in parts(step.plan())}
        trained.append((losses, [p.detach().clone() for p in model.parameters()]))
        if name == "side":
            assert written == ({"aten", provider} if in_place else set())
        if provider == "loops" and in_place:
            told = step.why_not("*/forward/concat#0", "*/forward/mul#0")
            assert "its parts are written where it lies, so that it costs nothing" in told
    (one, weights), (other, others) = trained
    assert one == other and all(same_bits(a, b) for a, b in zip(weights, others, strict=True))


@pytest.mark.parametrize("again", [False, True])
def test_what_others_read_too_is_in_memory(again: bool) -> None:
    """A part that loops make, that other loops read: the whole is worth being in place where it is written anyway."""

    def build(b: Any, x: Any, y: Any, w: Any) -> list[Any]:
        part = b.exp(x)
        both = b.contract(b.concat([part, y], dim=1), w, spec="mk,nk->mn")
        return [both, b.sum(part, dims=(0,))] if again else [both]

    types = [TensorType((64, 24), F32), TensorType((64, 8), F32), TensorType((4, 32), F32)]
    assert list(held_back(program(types, build), CPU).values()) == [64 * 8 * 4] * int(again)  # (y is copied)


@pytest.mark.parametrize("reads", [False, True])
def test_a_concatenation_inside_of_another(reads: bool) -> None:
    """Its parts lie in the outer one, where nobody else reads it. Zeros are copied: no product writes them beside."""

    def build(b: Any, x: Any, y: Any, w: Any, v: Any) -> list[Any]:
        product = b.contract(x, y, spec="mk,kn->mn")
        inner = b.concat([b.sin(product), b.cos(product)], dim=1)
        outer = b.concat([inner, b.full(0.0, (8, 32), F32)], dim=0)
        both = b.contract(outer, w, spec="mk,kn->mn")
        return [both, b.contract(inner, v, spec="mk,nm->kn")] if reads else [both]

    types = [TensorType(s, F32) for s in ((64, 24), (24, 16), (32, 8), (8, 64))]
    function = program(types, build)
    held = held_back(function, CPU)
    inner, outer = (op for op in function.regions[0].block if op.name == "step.concat")
    assert held == ({} if reads else {outer: 8 * 32 * 4, inner: 0})  # (the zeros are copied)
    laid = {op: row_major(op.result.type.shape) for op in (inner, outer)}
    found = find_joins(function, laid, {}, CPU, loops=True)
    if reads:
        assert "2 of its 2 parts would be copied" in found.refused[outer] and not found.inner
        return
    assert list(found.strides) == [outer] and found.inner == {inner: Part(outer, (32, 1), 0)}
    assert [(part.join, part.strides, part.offset) for part in found.parts.values()] == [
        (outer, (32, 1), 0),
        (outer, (32, 1), 16),
    ]


@pytest.mark.parametrize("rows", [False, True])
def test_sums_over_rows_are_written_side_by_side(rows: bool) -> None:
    def build(b: Any, x: Any, y: Any) -> list[Any]:
        return [b.exp(b.concat([b.sum(v, dims=(0,) if rows else (1,)) for v in (x, y)], dim=0))]

    assert list(held_back(program([TensorType((64, 64), F32)] * 2, build), CPU).values()) == [0] * int(rows)


# ---- what is refused -------------------------------------------------------------------------------------------------


def reasons(case: Case) -> list[str]:
    """Why concatenations of a plan by ATen are not in place."""
    planned = planned_function(case.program.function, CPU, case.numbers)
    laid = flatten(planned.function, planner.Kernels(CPU), case.numbers).concats
    return list(find_joins(planned.function, laid, {}, CPU).refused.values())


def joined_with(function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Case:
    """A layer whose result is joined by a function of it and of the batch, before another layer."""

    class Joining(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.out = nn.Linear(8, 8, bias=False), nn.LazyLinear(3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.out(function(self.layer(x), x))

    model = Joining()
    model(data(64, 8))
    return Case((model, lambda model, x: squares(model(x)), (data(64, 8),)))


@pytest.mark.parametrize(
    "function, reason",
    [
        (lambda y, x: torch.cat([y, x, x], -1), "2 of its 3 parts would be copied: an argument of the step lies where"),
        (lambda y, x: torch.cat([x, x, y], -1) + y.sum(), "sum reads it too, and wants it to fill its memory"),
        (lambda y, x: torch.cat([x, x, torch.tanh(y)], -1), "tanh is exact to the last bit only where"),
        (lambda y, x: torch.cat([x, x, y[:, :4]], -1), "a view of what contract of layer makes cannot lie so"),
        (lambda y, x: torch.cat([x[:2], y[:2]], -1), "it has 128 bytes"),
    ],
)
def test_why_parts_stay_where_they_are(function: Any, reason: str) -> None:
    assert any(reason in found for found in reasons(joined_with(function)))


# ---- broken plans ----------------------------------------------------------------------------------------------------


def test_text_and_back() -> None:
    plan = planned_of("packed").plan
    again = module_to_plan(plan_to_module(plan))
    assert parts(again) and again == plan


def test_a_part_that_nobody_writes_is_found() -> None:
    plan = plan_of("side")
    launch, _ = parts(plan)[1]
    plan.launches.remove(launch)
    with pytest.raises(VerifyError, match="which is written only in part"):
        verify_plan(plan_to_module(plan))


@pytest.mark.parametrize("shift", [4, -4, 64])
def test_a_part_in_the_wrong_place_is_found(shift: int) -> None:
    plan = plan_of("side")
    launch, index = parts(plan)[1]
    plan.buffers[launch.writes[index]].offset += shift
    with pytest.raises(VerifyError, match=r"which meet|covers bytes"):
        verify_plan(plan_to_module(plan))


def test_memory_of_the_whole_is_taken_from_its_first_part_on() -> None:
    """Whoever is written between two parts lies elsewhere."""
    plan = plan_of("side")
    (first, at), *_, (last, _) = parts(plan)
    whole = plan.buffers[plan.buffers[first.writes[at]].of]
    begin, end = plan.launches.index(first), plan.launches.index(last)
    assert whole.first == begin < end
    between = [b for _, b in plan.owners() if begin < b.first <= end]
    between[0].offset = whole.offset
    with pytest.raises(VerifyError, match="at offset"):
        verify_plan(plan_to_module(plan))


def test_what_would_raise_the_peak_is_made_as_a_whole() -> None:
    """A part cannot be written over what its maker reads, and the whole is there from its first part on."""
    case = case_of("packed")
    plan, plain = planned_of("packed").plan, as_wholes(case).plan
    assert len([x for x in plan.launches if x.name == "step.concat"]) == 1  # of two
    assert plan.arena <= 1.01 * plain.arena
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(joined, "GROWTH", 1.0)
        assert planned_function(case.program.function, CPU, case.numbers).plan.arena > 1.1 * plain.arena


# ---- copies on a GPU -------------------------------------------------------------------------------------------------


def test_parts_are_copied_in_words() -> None:
    """Rows of a part are words of 16 bytes where they begin and end at such; every bit pattern comes through."""
    whole = torch.zeros(2, 5, 48, dtype=torch.bfloat16)
    out = whole[..., 16:32].view(2, 5, 2, 8).transpose(1, 2)
    value = torch.arange(-80, 80, dtype=torch.int16).mul(400).view(torch.bfloat16).view(2, 5, 2, 8).transpose(1, 2)
    to, source = in_words(out), in_words(value)
    assert to is not None and source is not None and to.shape == (2, 2, 5, 1)
    to.copy_(source)
    assert same_bits(out, value) and not whole[..., :16].any() and not whole[..., 32:].any()
    for odd in (
        whole[..., 1:9],
        whole[..., :12],
        whole.transpose(1, 2),
        whole.view(-1)[:60].view(5, 12),
        whole[0, 0, 0],
    ):
        assert in_words(odd) is None
