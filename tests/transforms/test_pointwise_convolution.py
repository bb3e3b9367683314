"""`pointwise_convolution`: 1x1 convolutions as products give the same numbers, in one call of a library each."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.plan.networks import Case
from tests.plan.simulate import simulate
from tests.runtime.runs import data
from tests.transforms.test_layout import batch, sequence, squared
from wholestep.dialects.step import StepBuilder, tensor_type
from wholestep.errors import InputError
from wholestep.ir.builtin import add_function, finish_function, module
from wholestep.ir.core import Op
from wholestep.ir.passes import run_pipeline
from wholestep.ir.types import BF16, TensorType
from wholestep.ir.verify import verify
from wholestep.plan.planner import Planned, planned_function
from wholestep.runtime.executor import Executable
from wholestep.transforms.layout import own_strides
from wholestep.transforms.opportunity import take, transform
from wholestep.transforms.pointwise_convolution import PointwiseConvolution, lie_channels_last

NAMES = ("pointwise_convolution",)
CONVOLUTIONS = ("step.conv", "step.conv_input_grad", "step.conv_weight_grad")


class Bottleneck(nn.Module):
    """As in ResNet-50, with a squeeze-and-excite branch on single pixels."""

    def __init__(self, inputs: int, width: int, stride: int):
        super().__init__()
        self.narrow, self.norm1 = nn.Conv2d(inputs, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv, self.norm2 = nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
        self.widen = nn.Conv2d(width, 2 * width, 1)
        self.squeeze, self.excite = nn.Conv2d(2 * width, 4, 1), nn.Conv2d(4, 2 * width, 1)
        self.short = nn.Conv2d(inputs, 2 * width, 1, stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.norm2(self.conv(torch.relu(self.norm1(self.narrow(x))))))
        y = self.widen(y)
        scale = torch.sigmoid(self.excite(torch.relu(self.squeeze(y.mean((2, 3), keepdim=True)))))
        return torch.relu(y * scale + self.short(x))


def network() -> nn.Module:
    stem = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU())
    return nn.Sequential(stem, Bottleneck(8, 8, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 5))


def case_of(**options: Any) -> Case:
    torch.manual_seed(0)
    target = torch.randint(0, 5, (4,), generator=torch.Generator().manual_seed(0))
    return Case((network(), nn.functional.cross_entropy, (data(4, 3, 32, 32), target)), "sgd", **options)


def laid_out() -> Case:
    case = case_of(precision="bf16")
    transform(case.program.module, force=["channels_last *"])
    return case


def planned(case: Case) -> Planned:
    chosen = own_strides(case.program.function)
    strides = [chosen.get(i) for i in range(len(case.program.slots))]
    return planned_function(case.program.function, "cpu", case.numbers, strides)


def inputs_of(case: Case) -> list[torch.Tensor]:
    chosen = own_strides(case.program.function)
    return [
        torch.empty_strided(t.shape, chosen[i], dtype=t.dtype).copy_(t) if i in chosen else t.clone()
        for i, t in enumerate(case.inputs)
    ]


def convolutions(function: Op) -> dict[str, int]:
    """How many convolutions and gradients there are, by layer."""
    found: dict[str, int] = {}
    for op in function.regions[0].block:
        if op.name in CONVOLUTIONS:
            found[op.loc.layer] = found.get(op.loc.layer, 0) + 1
    return found


def test_the_step_gives_the_same_and_the_rest_stays() -> None:
    case = laid_out()
    before = Executable(case.program.function, "cpu", case.numbers)([x.clone() for x in case.inputs])
    layers = ("1.narrow", "1.widen", "1.squeeze", "1.excite")
    assert all(convolutions(case.program.function)[layer] == 3 for layer in layers)
    done = take(case.program.module, NAMES)
    verify(case.program.module)
    assert len(done) == 3 * len(layers) and done[0].startswith("pointwise_convolution step/")
    assert set(convolutions(case.program.function)) == {"0.0", "1.conv", "1.short"}
    plan = planned(case)
    replay = simulate(plan.plan, plan.function, case.program.module, inputs_of(case))
    assert replay.other_layouts == []
    for mine, want in zip(replay.results, before, strict=True):
        torch.testing.assert_close(mine.float().contiguous(), want.float().contiguous(), rtol=0.05, atol=2e-3)


def test_those_of_sequences_are_products_too() -> None:
    torch.manual_seed(0)
    case = Case((sequence(), squared, batch("sequence")), "sgd", precision="bf16")
    before = Executable(case.program.function, "cpu", case.numbers)([x.clone() for x in case.inputs])
    transform(case.program.module, force=["channels_last *"])
    assert len(take(case.program.module, NAMES)) == 6
    verify(case.program.module)
    assert set(convolutions(case.program.function)) == {"0", "1.both", "2.both", "3", "4"}
    plan = planned(case)
    replay = simulate(plan.plan, plan.function, case.program.module, inputs_of(case))
    for mine, want in zip(replay.results, before, strict=True):
        torch.testing.assert_close(mine.float().contiguous(), want.float().contiguous(), rtol=0.05, atol=5e-3)


@pytest.mark.parametrize(
    "places, window", [((5, 3), (1, 1)), ((2, 3, 4), (1, 1, 1)), ((5,), (3,)), ((2, 3), (4, 2)), ((2, 1, 2), (3, 1, 2))]
)
@pytest.mark.parametrize("part", ["conv", "conv with bias", "conv_input_grad", "conv_weight_grad"])
def test_one_op_gives_the_same_to_the_last_digits(part: str, places: tuple[int, ...], window: tuple[int, ...]) -> None:
    image = (2, 6, *(n * size for n, size in zip(places, window, strict=True)))
    output, weight, ones = (2, 4, *places), (4, 6, *window), (1,) * len(places)
    shapes = {"conv": [image, weight], "conv with bias": [image, weight, (4,)]}
    shapes |= {"conv_input_grad": [output, weight], "conv_weight_grad": [image, output]}
    more = {"conv_input_grad": {"input_shape": image}, "conv_weight_grad": {"weight_shape": weight}}.get(part, {})
    tensors = [data(*shape, seed=seed).double() for seed, shape in enumerate(shapes[part])]
    root = module()
    function = add_function(root, "f", [tensor_type(t) for t in tensors])
    block = function.regions[0].block
    make = getattr(StepBuilder(block, phase="forward"), part.split()[0])
    y = make(*block.arguments, stride=window, padding=(0,) * len(places), dilation=ones, **more)
    finish_function(function, [y])
    (want,) = Executable(function, "cpu")(tensors)
    PointwiseConvolution().apply(y.op)
    verify(root)
    assert [op.name for op in block if "conv" in op.name] == []
    (mine,) = Executable(function, "cpu")(tensors)
    torch.testing.assert_close(mine, want, rtol=1e-12, atol=1e-12)


def test_each_product_is_one_call_that_copies_nothing() -> None:
    case = laid_out()
    layers = {key.split("/")[1] for key in take(case.program.module, NAMES)}
    found = planned(case)
    calls = []
    for launch, kernel in zip(found.plan.launches, found.kernels, strict=True):
        if launch.name == "step.contract" and launch.layer in layers:
            assert kernel is not None and not kernel.scratch
            calls += [[(s.kind, str(s.call)) for s in kernel.steps if s.kind != "view"]]
    assert len(calls) == 3 * len(layers) == 12
    assert all(call in ([("out", "aten.mm.out")], [("out", "aten.addmm.out")]) for call in calls)


def test_reasons() -> None:
    case = laid_out()
    reasons = {o.site: o.why_not for o in PointwiseConvolution().find(case.program.module)}
    assert "it skips pixels" in reasons["step/1.short/forward/conv#0"]
    assert reasons["step/1.narrow/forward/conv#0"] == ""
    assert not any("1.conv/" in site for site in reasons)
    rows = {o.site: o.why_not for o in PointwiseConvolution().find(case_of(precision="bf16").program.module)}
    assert "not channels-last" in rows["step/1.narrow/forward/conv#0"]
    assert rows["step/1.squeeze/forward/conv#0"] == ""  # single pixels lie the same either way
    wide = case_of()
    assert {
        "16 bits" in o.why_not or "skips" in o.why_not for o in PointwiseConvolution().find(wide.program.module)
    } == {True}
    with pytest.raises(InputError, match="16 bits"):
        transform(wide.program.module, force=["pointwise_convolution */1.narrow/*"])


def test_what_is_forbidden_stays_and_a_recipe_brings_it_all_back() -> None:
    case = laid_out()
    done = take(case.program.module, NAMES, ["pointwise_convolution */1.widen/*"])
    assert convolutions(case.program.function)["1.widen"] == 3 and len(done) == 9
    again = laid_out()
    assert transform(again.program.module, recipe=done) == done
    assert convolutions(again.program.function) == convolutions(case.program.function)


class Patches(nn.Module):
    """The beginning of a vision transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.cut, self.last = nn.Conv2d(2, 16, 4, 4), nn.Linear(16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.relu(self.cut(x)).flatten(2).mean(2))


def patches(side: int = 8) -> Case:
    torch.manual_seed(0)
    target = torch.randint(0, 5, (4,), generator=torch.Generator().manual_seed(0))
    return Case((Patches(), nn.functional.cross_entropy, (data(4, 2, side, side), target)), "sgd", precision="bf16")


def test_patches_are_rows_that_a_cast_copies() -> None:
    case = patches()
    before = Executable(case.program.function, "cpu", case.numbers)([x.clone() for x in case.inputs])
    transform(case.program.module, force=["channels_last *"])
    assert [key.split("/")[-1] for key in take(case.program.module, NAMES)] == ["conv_weight_grad#0", "conv#0"]
    verify(case.program.module)
    run_pipeline(case.program.module, "cse,dce")
    assert convolutions(case.program.function) == {}
    made = [
        op.name for op in case.program.function.regions[0].block for r in op.results if r.type.shape == (4, 2, 2, 32)
    ]
    assert made == ["step.reshape", "step.cast"]
    mine = Executable(case.program.function, "cpu", case.numbers)([x.clone() for x in inputs_of(case)])
    for got, want in zip(mine, before, strict=True):
        torch.testing.assert_close(got.float(), want.float(), rtol=0.05, atol=5e-3)


def test_windows_that_leave_pixels_out_stay() -> None:
    found = PointwiseConvolution().find(patches(side=9).program.module)
    assert len(found) == 2 and all("whole image" in o.why_not for o in found)


def test_rows_of_a_product_seen_as_an_image_lie_channels_last() -> None:
    function = add_function(module(), "main", [TensorType((2, 4, 4, 8), BF16), TensorType((8, 6), BF16)])
    b, (x, w) = StepBuilder(function.regions[0].block), function.regions[0].block.arguments
    image = b.transpose(b.contract(x, w, spec="nhwc,co->nhwo"), order=(0, 3, 1, 2))
    after = b.relu(image)
    rows = b.transpose(after, order=(0, 2, 3, 1))
    finish_function(function, [rows, b.relu(b.transpose(x, order=(0, 2, 1, 3)))])
    assert lie_channels_last(function) == {image, after}
