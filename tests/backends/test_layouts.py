"""The clock of layouts: ops alone in either layout, each timed once per machine, and what becomes of failures."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import wholestep as ws
from tests.runtime.runs import data
from tests.transforms.test_layout import batch, program, resnet, window
from wholestep.backends import layouts
from wholestep.backends.choose import Choices
from wholestep.backends.layouts import CLEAR, CLOSE, MODEL, TIME_IS_UP, LayoutClock, region_as_product, region_in
from wholestep.backends.providers import Aten, Cpp, Region, Triton, op_by_op
from wholestep.backends.store import Store
from wholestep.capture.capture import capture
from wholestep.ir.builtin import finish_function
from wholestep.ir.core import Op, Value
from wholestep.ir.types import BF16, F32, ScalarType
from wholestep.machine.description import load_description
from wholestep.options import Options
from wholestep.training.build import build_step
from wholestep.training.optimizers import plan_optimizer
from wholestep.transforms import opportunity
from wholestep.transforms.layout_prices import Move, case_of
from wholestep.transforms.layout_rules import is_convolution
from wholestep.transforms.opportunity import whatever

CPU = torch.device("cpu")


def convolution(
    image: tuple[int, ...] = (2, 8, 6, 6),
    kernel: tuple[int, ...] = (4, 8, 3, 3),
    element: ScalarType = F32,
    **more: Any,
) -> Op:
    n = len(image) - 2
    _, b, (x, w), function = program(image, kernel, element=element)
    y = b.conv(x, w, None, **window(n, kernel[-1] // 2), **more)
    finish_function(function, [y])
    assert y.op is not None
    return y.op


def pooling() -> Op:
    _, b, (x,), function = program((2, 8, 6, 6))
    y = b.max_pool(x, kernel=(2, 2), stride=(2, 2), padding=(0, 0), dilation=(1, 1))[0]
    finish_function(function, [y])
    assert y.op is not None
    return y.op


def alone(shapes: Sequence[tuple[int, ...]], build: Callable[..., Value]) -> Op:
    """One op on tensors of bf16."""
    _, b, given, function = program(*shapes, element=BF16)
    made = build(b, *given)
    finish_function(function, [made])
    assert made.op is not None
    return made.op


class Fake(LayoutClock):
    """Takes what it is told for either layout, and counts."""

    rows, last, calls = 3.0, 2.0, 0

    def time_region(self, region: Region, to_beat: float = math.inf) -> float:
        self.calls += 1
        strides, shape = region.operands[0].strides, region.operands[0].shape
        return self.last if strides[1] == 1 and len(shape) > 2 else self.rows

    def time_move(self, move: Move) -> float:
        self.calls += 1
        return 7.0


def fake(folder: Path, **options: Any) -> Fake:
    return Fake(CPU, Store("a machine", folder), **options)


def ask(clock: LayoutClock, *ops: Op) -> list[Any]:
    found = clock.ops({case_of(op): op for op in ops})
    return [found[case_of(op)] for op in ops]


def test_times_are_kept_and_not_measured_again(tmp_path: Path) -> None:
    one, other = convolution(), pooling()
    move = Move(one.operands[0].type, (0, 1, 2, 3), (0, 2, 3, 1))
    first = fake(tmp_path)
    assert ask(first, one, other, convolution()) == [(3.0, 2.0)] * 3
    assert first.moves([move]) == {move: 7.0}
    assert first.measured == 3 and first.calls == 5 and first.problems == {}
    second = fake(tmp_path)
    assert ask(second, one, other) == [(3.0, 2.0)] * 2 and second.moves([move]) == {move: 7.0}
    assert second.measured == second.calls == 0 and second.seconds == 0
    row = next(r for r in second.store.rows() if "step.conv" in r.choice.about)  # type: ignore[union-attr]
    assert row.choice.winner == "channels-last" and row.choice.seconds == 2.0


def test_a_closed_clock_times_nothing(tmp_path: Path) -> None:
    clock = fake(tmp_path)
    clock.close()
    assert ask(clock, convolution()) == [None] and clock.measured == 0


def test_what_crashes_is_said_and_the_rest_goes_on(tmp_path: Path) -> None:
    class Crashing(Fake):
        def time_region(self, region: Region, to_beat: float = math.inf) -> float:
            if region.ops[0].name == "step.max_pool":
                raise RuntimeError("no kernel for that\nand more")
            return super().time_region(region, to_beat)

    clock = Crashing(CPU, Store("a machine", tmp_path))
    assert ask(clock, pooling(), convolution()) == [None, (3.0, 2.0)]
    ((words, why),) = clock.problems.items()
    assert "step.max_pool: 2x8x6x6 f32" in words and why == "it crashed: RuntimeError: no kernel for that"
    again = Crashing(CPU, Store("a machine", tmp_path))
    assert ask(again, pooling()) == [None] and again.measured == 0 and list(again.problems.values()) == [why]


def test_a_lack_of_memory_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layouts, "memory_bytes", lambda: 1000)
    small = LayoutClock(CPU, Store("a machine", tmp_path))
    assert ask(small, convolution()) == [None] and list(small.problems.values()) == ["out of memory"]
    monkeypatch.undo()
    assert ask(fake(tmp_path), convolution()) == [(3.0, 2.0)]


def test_beyond_its_time_it_measures_nothing_unless_it_may_take_any(tmp_path: Path) -> None:
    clock = fake(tmp_path, patience=0.0)
    assert ask(clock, convolution()) == [None] and list(clock.problems.values()) == [TIME_IS_UP]
    again = fake(tmp_path, patience=5.0)  # the same answer, so that the same program comes of it
    assert ask(again, convolution()) == [None] and again.calls == 0
    assert [r.choice.winner for r in again.store.rows()] == [MODEL]  # type: ignore[union-attr]
    assert ask(fake(tmp_path), convolution()) == [(3.0, 2.0)]


def test_real_times(tmp_path: Path) -> None:
    clock = LayoutClock(CPU, Store("a machine", tmp_path))
    ((rows, last),) = ask(clock, convolution())
    assert 0 < rows < 1 and 0 < last < 1 and clock.seconds > 0
    assert 1e8 < clock.bandwidth < 1e13  # nobody has described this machine: it is measured, and kept
    assert LayoutClock(CPU, Store("a machine", tmp_path)).bandwidth == clock.bandwidth
    assert clock.limit(convolution()) == math.inf
    described = LayoutClock(CPU, description=load_description("h200"))
    assert described.bandwidth == pytest.approx(4.2e12, rel=0.01) and 0 < described.limit(convolution()) < 1e-6


@pytest.mark.parametrize(
    "op",
    [convolution(), convolution((2, 8, 20), (4, 8, 3)), convolution((2, 4, 5, 6, 7), (8, 4, 3, 3, 3)), pooling()],
    ids=["images", "sequences", "volumes", "pooling"],
)
def test_an_op_alone_does_the_same_in_both_layouts(op: Op) -> None:
    made = []
    for last in (False, True):
        region = region_in(op, last, CPU)
        tensors = [data(*s.shape, seed=i) for i, s in enumerate(region.operands)]
        laid = [torch.empty_strided(s.shape, s.strides).copy_(t) for s, t in zip(region.operands, tensors, strict=True)]
        assert (laid[0].stride(1) == 1) == last
        made.append(op_by_op(region)(*laid)[0])
    torch.testing.assert_close(made[0], made[1].reshape(made[0].shape), rtol=1e-4, atol=1e-5)


def test_a_pointwise_convolution_is_also_tried_as_a_product() -> None:
    assert region_as_product(convolution(element=BF16), CPU) is None
    op = convolution(kernel=(4, 8, 1, 1), element=BF16)
    product = region_as_product(op, CPU)
    assert product is not None and "step.contract" in [each.name for each in product.ops]
    assert not {"step.conv", "step.layout"} & {each.name for each in product.ops}
    x, w = (data(*s.shape, seed=i).bfloat16().as_strided(s.shape, s.strides) for i, s in enumerate(product.operands))
    torch.testing.assert_close(op_by_op(product)(x, w)[0], torch.conv2d(x, w), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("image, kernel", [((4, 8, 6, 6), (16, 8, 1, 1)), ((4, 8, 36), (16, 8, 1))])
def test_that_product_has_no_bias(image: tuple[int, ...], kernel: tuple[int, ...]) -> None:
    """A kernel beside it adds that: the libraries' product with a bias may be far slower, which says nothing."""
    n = len(image) - 2
    window = {"stride": (1,) * n, "padding": (0,) * n, "dilation": (1,) * n}
    op = alone([image, kernel, kernel[:1]], lambda b, x, w, a: b.conv(x, w, a, **window))
    product = region_as_product(op, CPU)
    assert product is not None and len(product.operands) == 2
    assert all(spec.strides[1] == 1 for spec in (product.operands[0], *product.results))  # nothing is copied
    (contract,) = (each for each in product.ops if each.name == "step.contract")
    assert len(contract.operands) == 2


def test_on_a_gpu_the_product_counts_where_the_convolution_does_not_win_clearly() -> None:
    class Gpu(Fake):
        products = 0

        def time_region(self, region: Region, to_beat: float = math.inf) -> float:
            if any(op.name == "step.contract" for op in region.ops):
                self.products += 1
                return 0.5
            return super().time_region(region, to_beat)

    op = convolution(kernel=(4, 8, 1, 1), element=BF16)
    for rows in (1.0, 3.0):
        clock = Gpu(torch.device("cuda"))
        clock.rows = rows
        assert ask(clock, op) == [(rows, 0.5)] and clock.products == 1
    clock = Gpu(torch.device("cuda"))
    clock.rows = 2.1 * CLEAR
    assert ask(clock, op) == [(2.1 * CLEAR, 2.0)] and clock.products == 0


def test_convolutions_count_in_the_form_that_a_plan_has() -> None:
    """On images, without a bias, input gradients as convolutions: so others have kernels for them."""
    gpu = torch.device("cuda")
    image, kernel, bias, made = (4, 128, 16000), (256, 128, 2), (256,), (4, 256, 16008)
    window = {"stride": (1,), "padding": (8,), "dilation": (8,)}
    ops = [
        alone([image, kernel, bias], lambda b, x, w, a: b.conv(x, w, a, **window)),
        alone([made, kernel], lambda b, dy, w: b.conv_input_grad(dy, w, input_shape=image, **window)),
        alone([image, made], lambda b, x, dy: b.conv_weight_grad(x, dy, weight_shape=kernel, **window)),
    ]
    clock = LayoutClock(gpu, choices=Choices(gpu, [Aten(), Triton()]))
    for op, name in zip(ops, ("conv", "conv", "conv_weight_grad"), strict=True):
        region = clock.by_others(op)
        assert region is not None and [each.name for each in region.ops] == [f"step.{name}"]
        assert [len(s.shape) for s in region.operands] == [4, 4] and not Triton().claims(region)
        assert LayoutClock(gpu, choices=Choices(gpu, [Aten()])).by_others(op) is None
    op = alone([image, (256, 128, 1)], lambda b, x, w: b.conv(x, w, stride=(1,), padding=(0,), dilation=(1,)))
    assert clock.by_others(op) is None and region_as_product(op, CPU) is not None


@pytest.mark.parametrize("rank, transposed", [(n, t) for n in (1, 2, 3) for t in (False, True)])
def test_every_convolution_has_a_form(rank: int, transposed: bool) -> None:
    """Also where that is no convolution any more: 1x1 input gradients that skip pixels are products of the others."""
    gpu = torch.device("cuda")
    clock = LayoutClock(gpu, choices=Choices(gpu, [Aten(), Triton()]))
    kinds = [(nn.Conv1d, nn.Conv2d, nn.Conv3d), (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)]
    layer, seen = kinds[transposed][rank - 1], 0
    for kernel, stride, padding, groups, bias in itertools.product((1, 3), (1, 2), (0, 1), (1, 8), (True, False)):
        sizes = {"kernel_size": kernel, "stride": stride, "padding": padding, "groups": groups, "bias": bias}
        model = nn.Sequential(layer(8, 8, 3, padding=1), layer(8, 8, **sizes))
        captured = capture(model, lambda m, x: m(x).square().mean(), (torch.zeros(2, 8, *[6] * rank),))
        plan = plan_optimizer(torch.optim.SGD(model.parameters(), 0.1), captured.parameters, None)
        function = build_step(captured, plan, Options(precision="bf16")).function
        for op in [op for op in function.regions[0].block if is_convolution(op)]:
            region, seen = clock.by_others(op), seen + 1
            assert region is None or any(map(is_convolution, region.ops))
    assert seen == 32 * 5  # forward and both gradients, but for the gradient of the batch


def test_the_form_of_a_plan_is_timed_where_the_op_comes_close(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, asked = torch.device("cuda"), list[Region]()
    op = alone([(4, 128, 16000), (256, 128, 2)], lambda b, x, w: b.conv(x, w, stride=(1,), padding=(8,), dilation=(8,)))
    monkeypatch.setattr(Choices, "times", lambda self, regions: asked.extend(regions) or [0.5] * len(regions))
    clock = Fake(gpu, choices=Choices(gpu, [Aten(), Triton()]))
    clock.rows = 2.1 * CLOSE
    assert ask(clock, op) == [(2.1 * CLOSE, 2.0)] and not asked
    for rows in (1.0, 1.9 * CLOSE):
        asked.clear()
        clock = Fake(gpu, choices=Choices(gpu, [Aten(), Triton()]))
        clock.rows = rows
        assert ask(clock, op) == [(rows, 0.5)] and len(asked) == 1


def test_depthwise_convolutions_are_not_timed_on_a_gpu() -> None:
    depthwise = convolution(kernel=(8, 1, 3, 3), groups=8)
    cuda = LayoutClock(torch.device("cuda"))
    assert cuda.leaves(depthwise) and not cuda.leaves(convolution()) and not LayoutClock(CPU).leaves(depthwise)


def test_what_is_part_of_generated_kernels_is_not_timed_as_aten_runs_it() -> None:
    generating = LayoutClock(CPU, choices=Choices(CPU, [Aten(), Cpp()]))
    assert generating.leaves(pooling()) and not generating.leaves(convolution())
    assert not LayoutClock(CPU, choices=Choices(CPU, [Aten()])).leaves(pooling())


# ---- whole compiles --------------------------------------------------------------------------------------------------


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("WHOLESTEP_CACHE", str(tmp_path))
    return tmp_path


def compiled(**options: Any) -> ws.TrainStep:
    torch.manual_seed(0)
    model = resnet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    asked = {"policy": "layouts_alone"} | options
    return ws.compile(model, nn.functional.cross_entropy, optimizer, batch(), **asked)


@pytest.fixture
def timed(cache: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What ops take in either layout, in seconds, how often that was asked, and which op cannot be timed. ATen runs all
    of them; layouts are taken as they are where kernels are generated."""
    monkeypatch.setitem(opportunity._POLICIES, "layouts_alone", whatever("channels_last"))
    told: dict[str, Any] = {"rows": 1.0, "last": 1.0, "calls": 0, "broken": ""}

    def time_region(self: LayoutClock, region: Region, to_beat: float = math.inf) -> float:
        told["calls"] += 1
        if region.ops[0].name == told["broken"]:
            raise RuntimeError("no such kernel")
        return told["last" if region.operands[0].strides[1] == 1 else "rows"]

    monkeypatch.setattr(LayoutClock, "time_region", time_region)
    return told


def layouts_in(step: ws.TrainStep) -> int:
    return sum(op.name == "step.layout" for op in step.program().walk())


def why_no_layout(step: ws.TrainStep) -> str:
    (found,) = [o for o in step.opportunities() if o.transformation == "channels_last"]
    return found.why_not


def test_a_slow_layout_flips_the_choice_and_a_second_compile_measures_nothing(timed: dict[str, Any]) -> None:
    timed |= {"rows": 0.001, "last": 0.5}
    step = compiled()
    assert layouts_in(step) == 0 and "channels_last" not in str(step.recipe)
    assert "0 of 17 convolutions and gradients channels-last, by measured times" in why_no_layout(step)
    assert timed["calls"] > 0 and step.report().seconds["time layouts"] > 0
    assert "step: 0 of 17 convolutions" in str(step.report()) and step.report().to_dict()["layouts"]
    timed["calls"] = 0
    again = compiled()
    assert timed["calls"] == 0 and str(again.program()) == str(step.program())
    assert "time layouts" not in again.report().seconds


def test_a_quick_layout_is_taken_and_the_report_says_by_what(timed: dict[str, Any]) -> None:
    timed |= {"rows": 0.5, "last": 0.001}
    step = compiled()
    assert layouts_in(step) > 0 and "channels_last step/0/forward/conv#0" in step.recipe
    assert why_no_layout(step).startswith("done: step: 17 of 17 convolutions and gradients channels-last, by measured")
    assert "by measured times" in str(step.report())


def test_without_tuning_the_model_decides(timed: dict[str, Any]) -> None:
    timed |= {"rows": 0.001, "last": 0.5}
    step = compiled(tune=False)
    assert timed["calls"] == 0 and layouts_in(step) > 0
    assert "17 of 17 convolutions and gradients channels-last, by modelled bytes: tune=False" in str(step.report())
    forbidden = compiled(forbid=["channels_last *"])
    assert timed["calls"] == 0 and layouts_in(forbidden) == 0


def test_an_op_that_cannot_be_timed_is_reported_and_the_compile_goes_on(timed: dict[str, Any]) -> None:
    timed |= {"rows": 0.5, "last": 0.001, "broken": "step.conv_weight_grad"}
    step = compiled()
    text = str(step.report())
    assert layouts_in(step) > 0 and "not timed, and modelled: step.conv_weight_grad" in text
    assert "others: it crashed: RuntimeError: no such kernel" in text
    assert math.isfinite(float(step(*batch())))


def test_a_step_whose_layouts_were_measured_trains_as_eager_does(cache: Path) -> None:
    torch.manual_seed(0)
    model = resnet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    eager = []
    for seed in range(4):
        images, labels = batch(seed=seed)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        eager.append(float(loss.detach()))
    step = compiled(policy=None, providers=["cpp", "aten"])
    assert [float(step(*batch(seed=seed))) for seed in range(4)] == pytest.approx(eager, rel=1e-4)
    assert "by measured times" in str(step.report())
    for mine, theirs in zip(step.model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-4)
