"""A kernel in given memory gives, bit for bit, what its call gives in memory of its own, however operands lie."""

from __future__ import annotations

import re
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import wholestep as ws
from tests.dialects.step.samples import SAMPLES
from wholestep.backends import kernels
from wholestep.backends.kernels import COPY, NEW, OUT, VIEW, Number, Operand, Spec, out_form, trace
from wholestep.dialects.step import StepBuilder, step, tensor_type
from wholestep.ir.builtin import add_function, finish_function, module
from wholestep.plan.planner import planned_function
from wholestep.runtime.bound import BoundPlan
from wholestep.runtime.calls import Watched
from wholestep.runtime.executor import Executable

CPU = torch.device("cpu")
ELSEWHERE = {"micro_batches", "offload", "fetch"}  # they have tests of their own: they need others beside them


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    one, other = one.contiguous(), other.contiguous()
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))


def turned(tensor: torch.Tensor) -> torch.Tensor:
    """The same values with the first dimension innermost in memory."""
    return tensor.movedim(0, -1).contiguous().movedim(-1, 0) if tensor.dim() > 1 else tensor


def run_both(name: str, operands: list[Any], attributes: dict[str, Any], lie: Any) -> None:
    flat = [v for o in operands for v in (o if isinstance(o, list) else [o]) if v is not None]
    inputs = [lie(t) for t in flat]
    root = module()
    function = add_function(root, "f", [tensor_type(t) for t in inputs])
    arguments = iter(function.regions[0].block.arguments)
    b = StepBuilder(function.regions[0].block, phase="forward")
    values = [
        None if o is None else [next(arguments) for _ in o] if isinstance(o, list) else next(arguments)
        for o in operands
    ]
    made = getattr(b, name)(*values, **attributes)
    results = list(made) if isinstance(made, list | tuple) else [made]
    finish_function(function, results)
    want = Executable(function)([t.clone() for t in inputs])
    planned = planned_function(function, CPU, strides=[tuple(t.stride()) for t in inputs])
    kept = [t.clone() for t in inputs]
    bound = BoundPlan(planned, CPU, inputs)
    bound.arena.fill_(255)
    for _ in range(2):  # a second run must not depend on what the first left behind
        bound.run()
        for mine, theirs in zip(bound.results(), want, strict=True):
            assert same_bits(mine, theirs), name
    assert all(same_bits(a, c) for a, c in zip(inputs, kept, strict=True)), "an operand was changed"


@pytest.mark.parametrize("lie", [torch.Tensor.contiguous, turned], ids=["row by row", "turned"])
@pytest.mark.parametrize("name", sorted(set(SAMPLES) - ELSEWHERE))
def test_every_op(name: str, lie: Any) -> None:
    torch.manual_seed(0)
    assert f"step.{name}" in {f"step.{d}" for d in SAMPLES} and step.ops
    for operands, attributes in SAMPLES[name]:
        run_both(name, operands, attributes, lie)


def spec(*shape: int) -> Spec:
    return Spec(shape, tuple(torch.empty(shape).stride()), torch.float32)


def test_out_kernels_are_used_where_there_are_any() -> None:
    kernel, why = trace(
        lambda x, y: (x @ y).relu(), [Operand(spec(3, 4), "cpu"), Operand(spec(4, 5), "cpu")], [spec(3, 5)], CPU
    )
    assert not why and [s.kind for s in kernel.steps] == [OUT, OUT] and not kernel.allocates
    assert len(kernel.scratch) == 1 and kernel.makes == 0


def test_others_make_their_result_and_say_so() -> None:
    layer_norm = torch.ops.aten.native_layer_norm.default
    assert out_form(layer_norm, "cpu") is None
    kernel, why = trace(
        lambda x: layer_norm(x, [4], None, None, 1e-5)[0], [Operand(spec(3, 4), "cpu")], [spec(3, 4)], CPU
    )
    assert not why and [s.kind for s in kernel.steps] == [NEW]
    assert kernel.allocates and kernel.makes >= 3 * 4 * 4


def test_products_that_give_f32_are_written_to_their_place_on_a_gpu() -> None:
    """Also as a build of PyTorch without CUDA plans them: it has no such kernel itself."""
    short = [Spec((32, 16), (16, 1), torch.bfloat16), Spec((32, 24), (24, 1), torch.bfloat16)]
    made = Spec((16, 24), (24, 1), torch.float32)
    kernel, why = trace(
        lambda x, y: torch.mm(x.T, y, out_dtype=torch.float32), [Operand(s, "cuda") for s in short], [made],
        torch.device("cuda"),
    )  # fmt: skip
    assert not why and [s.kind for s in kernel.steps if s.kind != VIEW] == [OUT] and not kernel.allocates
    assert out_form(torch.ops.aten.mm.dtype, "cpu") is None


def test_what_may_be_written_over() -> None:
    square = spec(4, 4)
    kernel, _ = trace(torch.add, [Operand(square, "cpu")] * 2, [square], CPU)
    assert kernel.over == [frozenset({0, 1})]
    kernel, _ = trace(torch.mm, [Operand(square, "cpu")] * 2, [square], CPU)
    assert kernel.over == [frozenset()]
    kernel, _ = trace(lambda x, y: x.t() + y, [Operand(square, "cpu")] * 2, [square], CPU)
    assert kernel.over == [frozenset({1})]  # the first is read in another order than the sum is written
    kernel, _ = trace(lambda x: x.t().contiguous(), [Operand(square, "cpu")], [square], CPU)
    assert [s.kind for s in kernel.steps if s.kind != "view"] == [COPY] and kernel.over == [frozenset()]
    kernel, _ = trace(lambda x, y: (x * 2 @ y) + x, [Operand(square, "cpu")] * 2, [square], CPU)
    assert 0 in kernel.over[0] and 1 in kernel.over[0]


def test_numbers_of_the_host_stay_open() -> None:
    number = Operand(None, "cpu")
    kernel, why = trace(lambda x, s: torch.add(x, x, alpha=s), [Operand(spec(3), "cpu"), number], [spec(3)], CPU)
    assert not why and kernel.steps[0].kwargs["alpha"] == Number(1)
    kernel, why = trace(lambda x, s: x * (1 - s), [Operand(spec(3), "cpu"), number], [spec(3)], CPU)
    assert "computes with numbers of the host" in why and [s.kind for s in kernel.steps] == [NEW]


def test_a_view_by_strides_starts_where_its_operand_does() -> None:
    kernel, why = trace(
        lambda x: torch.as_strided(x, (2, 3), (3, 1), 2) + 1, [Operand(spec(4, 4), "cpu")], [spec(2, 3)], CPU
    )
    (view,) = [s for s in kernel.steps if s.kind == "view"]
    elsewhere = torch.arange(32.0)[16:].view(4, 4)
    assert not why
    assert torch.equal(view.call(elsewhere, *view.args[1:]), elsewhere.flatten()[2:8].view(2, 3))


def test_what_decides_by_data_runs_as_a_whole() -> None:
    kernel, why = trace(lambda x: x + float(x.sum()), [Operand(spec(3), "cpu")], [spec(3)], CPU)
    assert why and [s.kind for s in kernel.steps] == [NEW]


def test_one_mode_traces_all_calls_of_a_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after a call that broke off inside of it: the next is traced as in a mode of its own."""
    made: list[kernels.FakeTensorMode] = []
    real = kernels.FakeTensorMode
    monkeypatch.setattr(kernels, "FakeTensorMode", lambda: made.append(real()) or made[-1])
    known = kernels.Kernels(CPU)
    given = [Operand(spec(3), "cpu")], [spec(3)], CPU
    first, broken, again = (
        trace(run, *given, known.mode) for run in (torch.exp, lambda x: x + float(x.sum()), torch.exp)
    )
    assert broken[1] and len(made) == 1
    assert first == again == trace(torch.exp, *given) and not first[1] and len(made) == 2


@pytest.mark.parametrize(
    "name", ["replication_pad2d", "reflection_pad2d_backward", "adaptive_avg_pool2d", "max_unpool2d"]
)
def test_who_lays_its_out_tensor_out_anew_is_not_given_one(name: str) -> None:
    assert out_form(getattr(torch.ops.aten, name).default, "cpu") is None


@pytest.mark.parametrize("known", [True, False])
def test_a_pad_of_images_with_channels_last_trains_as_in_eager(known: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not known to lay tensors out anew, it is seen to in the first step and copied from; others are watched once."""
    if not known:
        monkeypatch.setattr(kernels, "out_form", out_form.__wrapped__)
        monkeypatch.setattr(kernels, "RELAYS", re.compile("nothing"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 3, 1), nn.ReLU(), nn.ReplicationPad2d((0, 1, 1, 0)), nn.Conv2d(3, 2, 2))
    model, x = model.to(memory_format=torch.channels_last), torch.randn(2, 2, 5, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    step = ws.compile(model, lambda m, x: m(x).square().sum(), optimizer, (x,), providers=["aten"])
    for number in range(2):
        before = [p.detach().clone() for p in model.parameters()]
        wanted = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            step(x)
        told = [str(w.message) for w in said if "where it is told to" in str(w.message)]
        assert bool(told) == (not known and number == 0) and all("replication_pad2d_backward" in t for t in told)
        for old, new, gradient in zip(before, model.parameters(), wanted, strict=True):
            torch.testing.assert_close(old - new.detach(), gradient, rtol=1e-4, atol=1e-4)
    static = step._compiled.static
    assert static is not None and static.bound is not None
    assert sum(isinstance(call, Watched) for call, _, _ in static.bound.calls) == (not known)
