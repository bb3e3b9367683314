"""Fusion: fused programs are right, acyclic and the same every time; taken apart again they are what they were."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import wholestep as ws
from tests.dialects.loop.programs import Drawn
from tests.dialects.loop.provider import LoopReference, registered, run_fused
from tests.plan.networks import Case, convnet, gpt
from tests.transforms.test_kept import Bottleneck, Inverted, images, language
from wholestep.backends.host import host_function
from wholestep.dialects.step import StepBuilder
from wholestep.dialects.step.fused import Fused
from wholestep.errors import InputError
from wholestep.ir import F32, TensorType, add_function, finish_function, module, structural_hash, verify
from wholestep.ir.core import Op
from wholestep.runtime.executor import Executable
from wholestep.transforms import fuse as fusing
from wholestep.transforms.expand import expanded
from wholestep.transforms.fuse import Fuser, dissolve, fuse
from wholestep.transforms.regions import Bodies


def root_of(function: Op) -> Op:
    return function.parent.parent.parent


def ops_of(function: Op) -> list[Op]:
    return [op for op in function.regions[0].block if not op.definition.terminator]


def regions_of(function: Op) -> list[Op]:
    return [op for op in ops_of(function) if op.definition is Fused]


def program(types: list[TensorType], build: Any) -> Op:
    function = add_function(module(), "main", types)
    results = build(StepBuilder(function.regions[0].block), *function.regions[0].block.arguments)
    finish_function(function, results if isinstance(results, list) else [results])
    return function


# ---- random programs -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", [0, 40])
def test_random_programs(first: int) -> None:
    fused = exact = 0
    for seed in range(first, first + 40):
        drawn = Drawn(seed, ops=5 + seed % 25)
        before = {op.name for op in ops_of(drawn.function)}
        wanted = Executable(drawn.function)(drawn.inputs)
        fusion = fuse(drawn.function)
        verify(root_of(drawn.function))  # every value comes before its readers
        fused += sum(len(members) > 1 for _, members in fusion.kernels)
        for mine, true in zip(run_fused(drawn.function, drawn.inputs, fusion), wanted, strict=True):
            torch.testing.assert_close(mine, true, rtol=1e-8, atol=1e-10, msg=lambda m: f"seed {seed}: {m}")  # noqa: B023
        count = len(regions_of(drawn.function))
        assert dissolve(drawn.function, lambda op: True) == count
        verify(root_of(drawn.function))
        unexpanded = {op.name for op in ops_of(drawn.function)} <= before
        for mine, true in zip(Executable(drawn.function)(drawn.inputs), wanted, strict=True):
            assert not unexpanded or torch.equal(mine, true), seed
            torch.testing.assert_close(mine, true, rtol=1e-12, atol=1e-13)
        exact += unexpanded
    assert fused > 40 and exact > 12


# ---- networks --------------------------------------------------------------------------------------------------------


class Recommender(nn.Module):
    """As DLRM: embeddings and a perceptron whose pairwise products go into a second one."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(20, 8) for _ in range(3))
        self.bottom = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU())
        self.top = nn.Sequential(nn.Linear(8 + 6, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, dense: torch.Tensor, sparse: torch.Tensor) -> torch.Tensor:
        x = self.bottom(dense)
        each = torch.stack([x, *(table(sparse[:, i]) for i, table in enumerate(self.tables))], 1)
        pairs = each @ each.transpose(1, 2)
        rows, columns = torch.tril_indices(4, 4, -1)
        return self.top(torch.cat([x, pairs[:, rows, columns]], 1))[:, 0]


def recommender() -> tuple[nn.Module, Any, tuple[torch.Tensor, ...]]:
    batch = torch.randn(6, 5), torch.randint(0, 20, (6, 3)), torch.rand(6).round()

    def loss(model: nn.Module, dense: torch.Tensor, sparse: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.binary_cross_entropy_with_logits(model(dense, sparse), y)

    return Recommender(), loss, batch


NETWORKS: dict[str, Any] = {
    "gpt2": lambda: language("gpt2"),
    "bert": lambda: language("bert"),
    "llama": lambda: language("llama"),
    "resnet": lambda: images(Bottleneck(16, 4)),
    "efficientnet": lambda: images(Inverted(16)),
    "dlrm": recommender,
}


def train(name: str, **options: Any) -> tuple[list[float], dict[str, torch.Tensor], ws.TrainStep]:
    torch.manual_seed(0)
    model, loss_fn, batch = NETWORKS[name]()
    torch.manual_seed(5)
    step = ws.compile(model, loss_fn, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), batch, **options)
    return [float(step(*batch)) for _ in range(3)], dict(model.state_dict()), step


@pytest.mark.parametrize("name", NETWORKS)
def test_networks_train_alike_through_the_loop_reference(name: str) -> None:
    with registered(LoopReference):
        true, state, plain = train(name)
        found, own, step = train(name, providers=["aten", "loops"], tune=False)
    ran = [launch for launch in step.plan().launches if launch.provider == "loops"]
    assert len(ran) > 5 and len(step.plan().launches) < len(plain.plan().launches)
    torch.testing.assert_close(found, true, rtol=1e-4, atol=1e-5)
    for key, tensor in state.items():
        torch.testing.assert_close(own[key], tensor, rtol=2e-3, atol=2e-5, msg=lambda m: f"{key}: {m}")  # noqa: B023


def fused_case(network: Any, **options: Any) -> tuple[Case, Op, Any]:
    case = Case(network, **options)
    function = expanded(case.program.function, None)
    fusion = fuse(function, case.numbers, runs_on_host=lambda op: host_function(op) is not None)
    return case, function, fusion


@pytest.mark.parametrize("network", [gpt, convnet])
def test_what_a_fused_step_consists_of(network: Any) -> None:
    _, function, fusion = fused_case(network())
    verify(root_of(function))
    regions = regions_of(function)
    assert {op for op, _ in fusion.kernels} == set(regions)
    assert max(len(members) for _, members in fusion.kernels) > 3
    for op in regions:
        body = fusion.bodies[op.callee.name]
        assert body.kernel is not None and body.schedule is not None and not body.why_not
        assert any(r.uses for r in op.results)
    for op in ops_of(function):  # nothing is computed for nobody
        assert any(r.uses for r in op.results) or not op.definition.pure, op


def test_equal_layers_share_their_bodies() -> None:
    few = fused_case(gpt(layers=3))[2]
    many = fused_case(gpt(layers=6))[2]
    assert len(many.kernels) > 1.5 * len(few.kernels)
    assert len(many.bodies) <= len(few.bodies) + 2


def fingerprint() -> str:
    """Everything fusion decides about a small network; tests/test_properties.py asks for it under another hash seed."""
    _, function, fusion = fused_case(gpt())
    return f"{structural_hash(root_of(function))} {len(fusion.kernels)} {sorted(fusion.refusals.items())}"


# ---- refusals, forbid ------------------------------------------------------------------------------------------------

MATRIX = TensorType((64, 64), F32)


def test_forbid_keeps_two_ops_apart() -> None:
    def build(b: StepBuilder, x: Any) -> Any:
        return b.exp(b.tanh(x))

    joined = fuse(program([MATRIX], build))
    assert [len(members) for _, members in joined.kernels] == [2]
    apart = fuse(program([MATRIX], build), forbid=["fuse *exp* <- *tanh*", "recompute *"])
    assert [len(members) for _, members in apart.kernels] == [1, 1]
    assert apart.forbidden == {"fuse *exp* <- *tanh*"}
    assert "it is forbidden" in apart.refusals.values()


def test_a_pattern_that_fits_nothing_is_an_error() -> None:
    with registered(LoopReference), pytest.raises(InputError, match="fits no fusion"):
        train("dlrm", providers=["aten", "loops"], tune=False, forbid=["fuse nothing <- like this"])


def test_what_must_run_between_keeps_a_group_acyclic() -> None:
    """x -> a -> product -> c, and a -> c: a and c cannot be one kernel."""

    def build(b: StepBuilder, x: Any) -> Any:
        a = b.tanh(x)
        return b.add(a, b.contract(a, a, spec="mk,nk->mn"))

    function = program([MATRIX], build)
    fusion = fuse(function)
    verify(root_of(function))
    assert [len(members) for _, members in fusion.kernels] == [1, 1]
    assert any("must run between" in why for why in fusion.refusals.values())


def test_two_long_ways_around() -> None:
    """Groups that each wait for the other's product: joined once, never in a circle."""

    def build(b: StepBuilder, x: Any, y: Any) -> Any:
        a, c = b.tanh(x), b.sin(y)
        p, q = b.contract(a, a, spec="mk,nk->mn"), b.contract(c, c, spec="mk,nk->mn")
        return [b.add(b.mul(p, c), a), b.add(b.mul(q, a), c)]

    function = program([MATRIX, MATRIX], build)
    fusion = fuse(function)
    verify(root_of(function))
    torch.manual_seed(0)
    inputs = [torch.randn(64, 64) for _ in range(2)]
    again = program([MATRIX, MATRIX], build)
    for mine, true in zip(run_fused(function, inputs, fusion), Executable(again)(inputs), strict=True):
        torch.testing.assert_close(mine, true, rtol=1e-4, atol=1e-4)


def test_order_of_an_op_that_came_before_two_others_of_which_one_reads_the_other() -> None:
    function = program([MATRIX], lambda b, x: b.add(a := b.tanh(x), b.contract(a, a, spec="mk,nk->mn")))
    block = function.regions[0].block
    tanh, contract, add, end = list(block)
    for op in (add, tanh, contract, end):
        op.detach()
        block.append(op)
    Fuser(function).sort()
    verify(root_of(function))
    assert list(block) == [tanh, contract, add, end]

    tanh.replace_operand(block.arguments[0], add.results[0])
    with pytest.raises(AssertionError, match="would have to run before itself"):
        Fuser(function).sort()


def test_views_of_a_kernels_result_are_read_outside() -> None:
    def build(b: StepBuilder, x: Any) -> Any:
        y = b.tanh(x)
        turned = b.transpose(y, order=(1, 0))
        return [b.exp(turned), turned, b.slice(y, dim=0, start=3, end=9)]

    function = program([MATRIX], build)
    fusion = fuse(function)
    verify(root_of(function))
    x = torch.randn(64, 64)
    for mine, true in zip(run_fused(function, [x], fusion), Executable(program([MATRIX], build))([x]), strict=True):
        torch.testing.assert_close(mine, true, rtol=1e-6, atol=1e-6)


# ---- long programs ---------------------------------------------------------------------------------------------------


def test_long_programs_cost_no_more_per_op(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts pieces that are looked at instead of seconds: four times the ops, about four times the pieces."""
    seen = 0
    real = Bodies.__call__

    def counted(self: Bodies, piece: Any) -> Any:
        nonlocal seen
        seen += len(piece.ops)
        return real(self, piece)

    monkeypatch.setattr(Bodies, "__call__", counted)

    def work(layers: int) -> tuple[int, int]:
        nonlocal seen
        small = TensorType((4, 4), F32)

        def build(b: StepBuilder, x: Any) -> Any:
            for _ in range(layers):
                x = b.contract(b.tanh(b.mul(b.exp(x), 0.5)), x, spec="mk,nk->mn")
            return x

        function, seen = program([small], build), 0
        fuse(function)
        verify(root_of(function))
        return seen, len(ops_of(function))

    (some, _), (more, left) = work(300), work(1230)  # 5 ops each: 1,500 and 6,150
    assert more < 4.6 * some
    assert left < 3 * 1230


# ---- what is small ---------------------------------------------------------------------------------------------------


def test_what_takes_long_is_not_computed_for_each_point(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sigmoid of a gate per channel is a kernel of its own beside a large image, and part of it beside a small."""
    types = [TensorType((4, 16), F32), TensorType((4, 16, 32, 32), F32)]

    def gated(b: StepBuilder, s: Any, x: Any) -> Any:
        return b.mul(x, b.reshape(b.sigmoid(s), shape=(4, 16, 1, 1)))

    function = program(types, gated)
    assert not fuse(function).refusals and len(regions_of(function)) == 1
    monkeypatch.setattr(fusing, "MANY", 1 << 12)
    function = program(types, gated)
    (why,) = fuse(function).refusals.values()
    assert "again for every row" in why and len(regions_of(function)) == 2
    cheap = program(types, lambda b, s, x: b.mul(x, b.reshape(b.neg(s), shape=(4, 16, 1, 1))))
    assert not fuse(cheap).refusals and len(regions_of(cheap)) == 1


def test_numbers_per_channel_are_those_of_forward() -> None:
    """What is large is not: it may be computed again so as not to be kept."""
    channels, image = TensorType((16,), F32), TensorType((4096, 16), F32)

    def both(b: StepBuilder, v: Any, w: Any, x: Any, g: Any) -> Any:
        b.phase = "forward"
        y = b.add(b.mul(x, b.mul(v, w)), b.exp(x))
        b.phase = "backward"
        return [y, b.add(b.mul(g, b.mul(v, w)), b.exp(x))]

    function = program([channels, channels, image, image], both)
    fuser = Fuser(function)
    fuser.share_vectors()
    small = [op for op in ops_of(function) if op.result.type.rank == 1]
    assert len(small) == 1 and small[0].phase == "forward" and len(small[0].result.uses) == 2
    assert [op.name for op in ops_of(function)].count("step.exp") == 2
