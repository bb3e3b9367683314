"""`channels_last`: one decision for a whole step; the same numbers, and copies only where the layout changes."""

from __future__ import annotations

import itertools
import random
import time
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

import wholestep as ws
from tests.plan.networks import Case
from tests.plan.simulate import simulate
from tests.runtime.runs import data
from wholestep.dialects.step import StepBuilder
from wholestep.dialects.strides import row_major, same_places, strides_in
from wholestep.errors import InputError
from wholestep.ir.builtin import add_function, finish_function, module
from wholestep.ir.core import Op, Value
from wholestep.ir.types import BF16, F32, F64, I64, ScalarType, TensorType
from wholestep.ir.verify import verify
from wholestep.plan import Plan, plan_function
from wholestep.runtime.executor import Executable
from wholestep.transforms import layout_rules
from wholestep.transforms.flow import Network
from wholestep.transforms.layout import SINK, SOURCE, ChannelsLast, own_strides
from wholestep.transforms.layout_rules import Preference, channels_last
from wholestep.transforms.opportunity import Opportunity, transform

FORCE = ["channels_last *"]


class Residual(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int):
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs)
        self.conv2, self.norm2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False), nn.BatchNorm2d(outputs)
        self.short = nn.Conv2d(inputs, outputs, 1, stride) if inputs != outputs else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.norm1(self.conv1(x)))
        return torch.relu(self.short(x) + self.norm2(self.conv2(y)))


def resnet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(3, 2, 1),
        Residual(8, 8, 1), Residual(8, 16, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 5),
    )  # fmt: skip


class Inverted(nn.Module):
    """Widen, depthwise, squeeze-and-excite, narrow."""

    def __init__(self, width: int):
        super().__init__()
        wide = 2 * width
        self.widen, self.norm1 = nn.Conv2d(width, wide, 1, bias=False), nn.BatchNorm2d(wide)
        self.depth, self.norm2 = nn.Conv2d(wide, wide, 3, 1, 1, groups=wide, bias=False), nn.BatchNorm2d(wide)
        self.squeeze, self.excite = nn.Conv2d(wide, 4, 1), nn.Conv2d(4, wide, 1)
        self.narrow, self.norm3 = nn.Conv2d(wide, width, 1, bias=False), nn.BatchNorm2d(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = nn.functional.silu(self.norm1(self.widen(x)))
        y = nn.functional.silu(self.norm2(self.depth(y)))
        scale = torch.sigmoid(self.excite(nn.functional.silu(self.squeeze(y.mean((2, 3), keepdim=True)))))
        return x + self.norm3(self.narrow(y * scale))


def mobilenet() -> nn.Module:
    stem = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8), nn.SiLU())
    return nn.Sequential(stem, Inverted(8), nn.Conv2d(8, 6, 4), nn.SiLU(), nn.Flatten(), nn.Linear(6 * 13 * 13, 5))


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2 = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 16, 3, padding=1)
        self.up, self.join = nn.ConvTranspose2d(16, 8, 2, 2), nn.Conv2d(16, 8, 3, padding=1, bias=False)
        self.norm, self.out = nn.BatchNorm2d(8), nn.Conv2d(8, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        high = torch.relu(self.down1(x))
        low = torch.relu(self.down2(nn.functional.avg_pool2d(high, 2)))
        y = self.norm(self.join(torch.cat([self.up(low), high], 1)))
        return self.out(nn.functional.interpolate(torch.relu(y), scale_factor=2, mode="nearest"))


class Denoising(nn.Module):
    """As in diffusion models: GroupNorm before each convolution, and what the way down saw beside what comes up."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.down = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, 2, 1)
        self.norm1, self.conv1 = nn.GroupNorm(4, 8), nn.Conv2d(8, 16, 3, padding=1)
        self.norm2, self.conv2 = nn.GroupNorm(4, 16), nn.Conv2d(16, 8, 3, padding=1)
        self.norm3, self.out = nn.GroupNorm(2, 16, affine=False), nn.Conv2d(16, 3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        high = self.first(x)
        low = self.down(high)
        low = low + self.conv2(nn.functional.silu(self.norm2(self.conv1(nn.functional.silu(self.norm1(low))))))
        low = nn.functional.interpolate(low, scale_factor=2, mode="nearest")
        return self.out(nn.functional.silu(self.norm3(torch.cat([low, high], 1))))


class Permuting(nn.Module):
    """As in ConvNeXt: normalised and mixed with channels at the end, by LayerNorm and linear layers."""

    def __init__(self, width: int):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(width, width, 3, padding=1), nn.LayerNorm(width)
        self.wide, self.narrow = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(self.conv(x).permute(0, 2, 3, 1))
        return x + self.narrow(nn.functional.gelu(self.wide(y))).permute(0, 3, 1, 2)


def convnext() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 4, 4), Permuting(8), Permuting(8), nn.Conv2d(8, 2, 3))


def volume() -> nn.Module:
    return nn.Sequential(
        nn.Conv3d(2, 8, 3, padding=1), nn.BatchNorm3d(8), nn.ReLU(), nn.MaxPool3d(2), nn.Conv3d(8, 4, 3)
    )


class Gated(nn.Module):
    """As in WaveNet: a dilated causal convolution, its gate, and a way past both. (And a norm of groups.)"""

    def __init__(self, width: int, dilation: int):
        super().__init__()
        self.past = (dilation, 0)
        self.both = nn.Conv1d(width, 2 * width, 2, dilation=dilation, bias=False)
        self.norm = nn.BatchNorm1d(2 * width)
        self.group, self.out = nn.GroupNorm(2, width), nn.Conv1d(width, width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        filtered, gate = self.norm(self.both(nn.functional.pad(x, self.past))).chunk(2, dim=1)
        return x + self.out(self.group(torch.tanh(filtered) * torch.sigmoid(gate)))


def sequence() -> nn.Module:
    return nn.Sequential(
        nn.Conv1d(3, 8, 3, padding=1), Gated(8, 1), Gated(8, 4), nn.Conv1d(8, 6, 4, 2, groups=2),
        nn.ConvTranspose1d(6, 4, 3, 2, output_padding=1),
    )  # fmt: skip


def squared(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target.float().view(-1, *[1] * (output.dim() - 1))).pow(2).mean()


IMAGES = {"resnet": resnet, "mobilenet": mobilenet, "unet": UNet, "denoising": Denoising, "convnext": convnext}
MODELS = {**IMAGES, "volume": volume, "sequence": sequence}
SHAPES = {"volume": (4, 2, 8, 8, 8), "sequence": (4, 3, 24)}


def batch(name: str = "resnet", seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    return data(*SHAPES.get(name, (4, 3, 32, 32)), seed=seed), torch.randint(
        0, 5, (4,), generator=torch.Generator().manual_seed(seed)
    )


def loss_of(name: str) -> Any:
    return nn.functional.cross_entropy if name in ("resnet", "mobilenet") else squared


def case_of(name: str, optimizer: str = "sgd", **options: Any) -> Case:
    torch.manual_seed(0)
    return Case((MODELS[name](), loss_of(name), batch(name)), optimizer, **options)


def count(function: Op, name: str) -> int:
    return sum(op.name == f"step.{name}" for op in function.regions[0].block)


def planned(case: Case, device: str = "cpu") -> tuple[Plan, Op]:
    """A plan in which what the step lays out itself lies as it wants it."""
    chosen = own_strides(case.program.function)
    strides = [chosen.get(i) for i in range(len(case.program.slots))]
    return plan_function(case.program.function, device, case.numbers, strides=strides)


def inputs_of(case: Case) -> list[torch.Tensor]:
    chosen = own_strides(case.program.function)
    return [
        torch.empty_strided(t.shape, chosen[i], dtype=t.dtype).copy_(t) if i in chosen else t.clone()
        for i, t in enumerate(case.inputs)
    ]


def rows_read_by_convolutions(plan: Plan) -> list[str]:
    """Convolutions that are given an image, volume or kernel that is not channels-last."""
    found = []
    for launch in plan.launches:
        if launch.name.startswith("step.conv"):
            for buffer in (plan.buffers[n] for n in launch.reads):
                shape = buffer.type.shape
                order = channels_last(len(shape))
                if len(shape) < 3 or not layout_rules.differ(shape, tuple(range(len(shape))), order):
                    continue
                if sorted(range(len(shape)), key=lambda d, s=buffer.strides: -s[d]) != list(order):
                    found.append(f"{launch.name} {launch.layer} {shape} {buffer.strides}")
    return found


# ---- whole steps -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_the_plan_is_right_and_every_convolution_gets_channels_last(name: str) -> None:
    case = case_of(name)
    plain = Executable(case.program.function, "cpu", case.numbers)([x.clone() for x in case.inputs])
    assert len(transform(case.program.module, force=FORCE)) == 1
    verify(case.program.module)
    plan, function = planned(case)
    assert rows_read_by_convolutions(plan) == []
    replay = simulate(plan, function, case.program.module, inputs_of(case))
    assert replay.other_layouts == []  # kernels write where the decision says
    for mine, want in zip(replay.results, plain, strict=True):
        torch.testing.assert_close(mine.contiguous(), want.contiguous(), rtol=2e-4, atol=2e-5, equal_nan=True)


def copies_predicted(case: Case) -> Counter[str]:
    """What a step in float32 must copy: kernels of more than one channel and pixel, and their gradients."""
    kernels = [
        v.type.shape
        for v, slot in zip(case.program.function.regions[0].block.arguments, case.program.slots, strict=True)
        if slot.kind == "parameter"
        and v.type.rank in (3, 4, 5)
        and slot.type.shape[1] > 1
        and max(v.type.shape[2:]) > 1
    ]
    return Counter({"forward": len(kernels), "update": len(kernels)})


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("resnet", {}),
        ("mobilenet", {"forward": 1, "backward": 1}),  # flatten and back
        ("unet", {}),
        ("denoising", {}),
        ("convnext", {}),
        ("volume", {}),
        ("sequence", {"forward": 1, "backward": 3}),  # and padding and gradients of slices, which write row by row
    ],
)
def test_copies_are_where_they_are_predicted(name: str, more: dict[str, int]) -> None:
    case = case_of(name)
    transform(case.program.module, force=FORCE)
    plan, _ = planned(case)
    found = Counter(p.phase for p in plan.launches if p.name == "step.layout")
    assert found == copies_predicted(case) + Counter(more)
    images = [i for i, slot in enumerate(case.program.slots) if slot.kind == "batch" and len(slot.type.shape) > 2]
    assert set(own_strides(case.program.function)) == set(images)


@pytest.mark.parametrize("name", IMAGES)
def test_in_low_precision_neither_kernels_nor_their_gradients_are_copied(name: str) -> None:
    """The update writes the 16-bit kernel in its layout, and the copy to the optimizer's layout does the cast."""
    launches = []
    for force in ([], FORCE):
        case = case_of(name, precision="bf16")
        transform(case.program.module, force=force)
        plan, _ = planned(case)
        launches.append(Counter(p.name for p in plan.launches if p.name in ("step.cast", "step.layout", "copy")))
        if force:
            assert rows_read_by_convolutions(plan) == []
            assert not [p for p in plan.launches if p.name == "step.layout" and p.phase == "forward" and p.layer == ""]
    more = launches[1].total() - launches[0].total()
    assert more == {"resnet": 0, "mobilenet": 2, "unet": 0, "denoising": 0, "convnext": 0}[name]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("resnet", {}),
        ("mobilenet", {}),
        ("unet", {}),
        ("denoising", {}),
        ("sequence", {}),
        ("resnet", {"accumulate": 2}),
        ("unet", {"clip_norm": 0.5, "precision": "bf16"}),
    ],
    ids=str,
)
def test_training_gives_the_same_numbers(name: str, options: dict[str, Any]) -> None:
    losses: list[list[float]] = []
    weights: list[list[torch.Tensor]] = []
    for force in ([], FORCE):
        torch.manual_seed(0)
        model = MODELS[name]()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        step = ws.compile(model, loss_of(name), optimizer, batch(name), force=force, tune=False, **options)
        losses.append([float(step(*batch(name, seed))) for seed in range(4)])
        weights.append([p.detach().clone() for p in model.parameters()])
        assert [key.partition(" ")[0] for key in step.recipe] == ["channels_last"] * bool(force)
        assert all(p.is_contiguous() for p in model.parameters())  # the user's own tensors lie as they did
    low = "precision" in options
    assert losses[0] == pytest.approx(losses[1], rel=1e-2 if low else 1e-5)
    # Adam divides by the size of the gradient: where that is rounding alone, the update is any number up to the rate
    for one, other in zip(*weights, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-2, atol=8e-3 if low else 1e-3)


def test_the_step_lays_out_its_batch_and_copies_by_itself() -> None:
    torch.manual_seed(0)
    model = resnet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options: dict[str, Any] = {"precision": "bf16", "force": FORCE, "tune": False}
    step = ws.compile(model, nn.functional.cross_entropy, optimizer, batch(), **options)
    step(*batch())
    plan = step.plan()
    images = [b for b in plan.buffers if b.argument >= 0 and b.type.rank == 4]
    laid = [b.name for b in images if b.strides == strides_in(b.type.shape, (0, 2, 3, 1))]
    assert rows_read_by_convolutions(plan) == []
    assert "batch[0]" in laid and "0.weight as bf16" in laid
    assert [p.phase for p in plan.launches if p.name == "step.layout"].count("forward") == 0


def test_weights_that_the_user_has_channels_last_are_updated_so() -> None:
    """Neither they nor their gradients are turned around, and numbers are eager's."""
    copies, losses = {}, {}
    for layout in (torch.contiguous_format, torch.channels_last):
        torch.manual_seed(0)
        model, twin = (resnet().to(memory_format=layout) for _ in range(2))
        twin.load_state_dict(model.state_dict())
        optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-3) for m in (model, twin)]
        step = ws.compile(model, nn.functional.cross_entropy, optimizers[0], batch(), force=FORCE, tune=False)
        losses[layout] = [float(step(*batch(seed=seed))) for seed in range(3)]
        expected = []
        for seed in range(3):
            optimizers[1].zero_grad()
            images, targets = batch(seed=seed)
            loss = nn.functional.cross_entropy(twin(images), targets)
            loss.backward()
            optimizers[1].step()
            expected.append(float(loss.detach()))
        assert losses[layout] == pytest.approx(expected, rel=1e-4)
        assert all(p.is_contiguous(memory_format=layout) for p in model.parameters() if p.dim() == 4)
        plan = step.plan()
        four = [
            p for p in plan.launches if p.name == "step.layout" and plan.buffers[p.reads[0]].type.shape[2:] == (3, 3)
        ]
        copies[layout] = Counter(p.phase for p in four)
    assert copies[torch.contiguous_format]["update"] > 0 and not copies[torch.channels_last]


class AtTheEnd(nn.Module):
    """Images that come with channels at the end already."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.first(x.permute(0, 3, 1, 2))))


def test_images_that_come_with_channels_at_the_end_are_not_copied() -> None:
    torch.manual_seed(0)
    images, targets = batch()
    case = Case((AtTheEnd(), squared, (images.permute(0, 2, 3, 1).contiguous(), targets)), "sgd")
    plain = Executable(case.program.function, "cpu", case.numbers)([x.clone() for x in case.inputs])
    transform(case.program.module, force=FORCE)
    plan, function = planned(case)
    assert rows_read_by_convolutions(plan) == []
    assert Counter(p.phase for p in plan.launches if p.name == "step.layout") == copies_predicted(case)
    for mine, want in zip(simulate(plan, function, case.program.module, inputs_of(case)).results, plain, strict=True):
        torch.testing.assert_close(mine.contiguous(), want.contiguous(), rtol=2e-4, atol=2e-5)


def test_recipes_and_forbid() -> None:
    def compiled(**options: Any) -> ws.TrainStep:
        torch.manual_seed(0)
        model = resnet()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return ws.compile(model, nn.functional.cross_entropy, optimizer, batch(), **options)

    for tune in (False, True):  # by the model, and by times that the second finds in the store
        step = compiled(force=FORCE, tune=tune)
        assert step.recipe == ["channels_last step/0/forward/conv#0"]
        again = compiled(recipe=step.recipe, tune=tune)
        assert str(again.program()) == str(step.program())
    assert compiled(forbid=FORCE).recipe == []
    with pytest.raises(InputError, match="channels_lost"):
        compiled(forbid=["channels_lost *"])


def test_the_decision_is_the_same_every_time() -> None:
    texts = set()
    for _ in range(3):
        case = case_of("mobilenet")
        transform(case.program.module, force=FORCE)
        texts.add(str(case.program.module))
    assert len(texts) == 1
    assert ChannelsLast().find(case.program.module) == []  # nothing is left to decide


def test_a_plan_for_cuda_needs_no_gpu() -> None:
    case = case_of("convnext", precision="bf16")
    transform(case.program.module, force=FORCE)
    plan, _ = planned(case, "cuda")
    assert rows_read_by_convolutions(plan) == []


# ---- what is decided -------------------------------------------------------------------------------------------------


def program(*shapes: tuple[int, ...], element: ScalarType = F32) -> tuple[Op, StepBuilder, tuple[Value, ...], Op]:
    root = module()
    function = add_function(root, "f", [TensorType(s, element) for s in shapes])
    block = function.regions[0].block
    return root, StepBuilder(block, phase="forward"), tuple(block.arguments), function


def window(n: int, padding: int = 1) -> dict[str, Any]:
    return {"stride": (1,) * n, "padding": (padding,) * n, "dilation": (1,) * n}


def found(root: Op) -> list[Opportunity]:
    return ChannelsLast().find(root)


def test_sequences_become_images_of_one_row() -> None:
    root, b, (x, w), function = program((2, 8, 20), (4, 8, 3))
    finish_function(function, [b.conv(x, w, None, **window(1))])
    tensors = [data(2, 8, 20), data(4, 8, 3, seed=1)]
    (before,) = Executable(function, "cpu")(tensors)
    transform(root, force=FORCE)
    verify(root)
    (conv,) = [op for op in function.regions[0].block if op.name == "step.conv"]
    assert (conv.x.type.shape, conv.w.type.shape, conv.padding) == ((2, 8, 1, 20), (4, 8, 1, 3), (0, 1))
    torch.testing.assert_close(Executable(function, "cpu")(tensors)[0], before, rtol=1e-5, atol=1e-6)


def test_depthwise_convolutions_of_sequences_ask_for_nothing() -> None:
    root, b, (x, w), function = program((2, 8, 20), (8, 1, 3))
    finish_function(function, [b.conv(x, w, None, groups=8, **window(1))])
    assert found(root)[0].why_not == "its convolutions run as well row by row"


def test_double_precision_is_left_alone() -> None:
    root, b, (x, w), function = program((2, 8, 6, 6), (4, 8, 3, 3), element=F64)
    finish_function(function, [b.conv(x, w, None, **window(2))])
    assert found(root)[0].why_not == "its convolutions run as well row by row"


def test_a_convolution_between_reshapes_is_not_worth_the_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    root, b, (x, w), function = program((2, 8 * 36), (8, 8, 3, 3))
    y = b.conv(b.reshape(x, shape=(2, 8, 6, 6)), w, None, **window(2))
    finish_function(function, [b.reshape(y, shape=(2, 8 * 36))])
    (opportunity,) = found(root)
    assert "would cost as much as its 1 conv" in opportunity.why_not and opportunity.change.bytes == 0
    monkeypatch.setattr(ChannelsLast, "preference", Preference(convolution=3.0))
    (wanted,) = found(root)
    copied = 2 * 4 * (2 * 8 * 36 * 2 + 8 * 8 * 9)  # x and y, and the kernel: each read and written
    assert not wanted.why_not and wanted.change.bytes == copied - 3 * copied


def test_convolutions_that_do_not_care_ask_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ChannelsLast, "preference", Preference(depthwise=0.0))
    root, b, (x, w), function = program((2, 8, 6, 6), (8, 1, 3, 3))
    finish_function(function, [b.conv(x, w, None, groups=8, **window(2))])
    assert found(root)[0].why_not == "its convolutions run as well row by row"


def test_a_layout_costs_nothing_where_it_is_already_so() -> None:
    shape = (2, 8, 6, 6)
    _, b, (x,), function = program(shape)
    finish_function(function, [b.exp(b.layout(x, order=(0, 2, 3, 1)))])
    for strides, launches in ((row_major(shape), 2), (strides_in(shape, (0, 2, 3, 1)), 1)):
        plan, _ = plan_function(function, strides=[strides])
        assert len(plan.launches) == launches
        assert plan.buffers[plan.results[0].buffer].strides == strides_in(shape, (0, 2, 3, 1))


def test_a_layout_does_the_cast_before_it() -> None:
    shape = (2, 8, 6, 6)
    x = data(*shape).bfloat16()
    for strides in (row_major(shape), strides_in(shape, (0, 2, 3, 1))):
        root, b, (given,), function = program(shape, element=BF16)
        finish_function(function, [b.exp(b.layout(b.cast(given, dtype=F32), order=(0, 2, 3, 1)))])
        plan, flat = plan_function(function, strides=[strides])
        assert [p.name for p in plan.launches] == ["step.layout", "step.exp"]
        laid = torch.empty_strided(shape, strides, dtype=x.dtype).copy_(x)
        (mine,) = simulate(plan, flat, root, [laid]).results
        assert torch.equal(mine, x.float().exp()) and mine.stride() == strides_in(shape, (0, 2, 3, 1))


POOL = {"kernel": (2, 2), "stride": (2, 2), "padding": (0, 0)}
DOWN, UP = (2, 8, 3, 3), (2, 8, 6, 6)
KEEPING: dict[str, tuple[list[tuple[tuple[int, ...], ScalarType]], Any]] = {
    "max_pool": ([(UP, F32)], lambda b, x: b.max_pool(x, dilation=(1, 1), **POOL)[0]),
    "max_pool_grad": (
        [(DOWN, F32), (DOWN, I64)],
        lambda b, x, i: b.max_pool_grad(x, i, dilation=(1, 1), input_shape=UP, **POOL),
    ),
    "avg_pool": ([(UP, F32)], lambda b, x: b.avg_pool(x, **POOL)),
    "avg_pool_grad": ([(DOWN, F32)], lambda b, x: b.avg_pool_grad(x, input_shape=UP, **POOL)),
    "adaptive_avg_pool": ([(UP, F32)], lambda b, x: b.adaptive_avg_pool(x, size=(2, 2))),
    "adaptive_avg_pool_grad": ([(DOWN, F32)], lambda b, x: b.adaptive_avg_pool_grad(x, size=(3, 3), input_shape=UP)),
    "upsample": ([(DOWN, F32)], lambda b, x: b.upsample(x, factors=(2, 2))),
    "upsample_grad": ([(UP, F32)], lambda b, x: b.upsample_grad(x, factors=(1, 2))),
    "repeat_pixels": ([(DOWN, F32)], lambda b, x: b.repeat_pixels(x, factors=(2, 2))),
    "repeat_pixels_grad": ([(UP, F32)], lambda b, x: b.repeat_pixels_grad(x, factors=(3, 2))),
    "upsample_cells_grad": ([((2, 8, 8, 12), F32)], lambda b, x: b.upsample_cells_grad(x, factors=(4, 4))),
    "pad": ([(UP, F32)], lambda b, x: b.pad(x, low=(0, 0, 0, 1), high=(0, 0, 2, 1), value=0.0)),
    "concat": ([(UP, F32), (UP, F32)], lambda b, x, y: b.concat([x, y], dim=1)),
    "batch_norm": ([(UP, F32), ((8,), F32)], lambda b, x, w: b.batch_norm(x, w, w, None, None)[0]),
    "batch_norm_grad": (
        [(UP, F32), (UP, F32), ((8,), F32)],
        lambda b, dy, x, v: b.batch_norm_grad(dy, x, v, v, v, eps=1e-5)[0],
    ),
    "group_norm": ([(UP, F32), ((8,), F32)], lambda b, x, w: b.group_norm(x, w, w, groups=2)[0]),
    "group_norm_grad": (
        [(UP, F32), (UP, F32), ((2, 2), F32), ((8,), F32)],
        lambda b, dy, x, s, w: b.group_norm_grad(dy, x, s, s, w, groups=2)[0],
    ),
}


@pytest.mark.parametrize("name", sorted(layout_rules.FOLLOW | layout_rules.FOLLOW_WIDE | layout_rules.FOLLOW_IMAGES))
def test_ops_write_as_they_read(name: str) -> None:
    """The table of ops that keep the layout is what PyTorch's kernels do."""
    arguments, build = KEEPING[name.removeprefix("step.")]
    root = module()
    function = add_function(root, "f", [TensorType(s, e) for s, e in arguments])
    b = StepBuilder(function.regions[0].block, phase="forward")
    finish_function(function, [build(b, *function.regions[0].block.arguments)])
    strides = [strides_in(s, channels_last(4)) if len(s) == 4 else None for s, _ in arguments]
    plan, flat = plan_function(function, strides=strides)
    given = [data(*s).abs() if e is F32 else torch.zeros(s, dtype=torch.int64) for s, e in arguments]
    laid = [t.contiguous(memory_format=torch.channels_last) if t.dim() == 4 else t for t in given]
    replay = simulate(plan, flat, root, laid)
    (mine,) = replay.results
    assert replay.other_layouts == []
    assert same_places(mine.shape, mine.stride(), strides_in(mine.shape, channels_last(4)))
    torch.testing.assert_close(mine, Executable(function)(given)[0], rtol=1e-5, atol=1e-5)


# ---- the cut ---------------------------------------------------------------------------------------------------------


def test_the_cut_is_the_cheapest_of_all_splits() -> None:
    rng = random.Random(0)
    for _ in range(200):
        count = rng.randint(1, 7)
        network, edges = Network(2), []
        for _ in range(count):
            network.node()
        for _ in range(rng.randint(1, 20)):
            tail, head = rng.randrange(count + 2), rng.randrange(count + 2)
            edges.append((tail, head, rng.randint(0, 9)))
            network.add(*edges[-1])
        costs = {}
        for bits in itertools.product((False, True), repeat=count):
            side = [True, False, *bits]
            costs[tuple(side)] = sum(c for t, h, c in edges if side[t] and not side[h])
        cost, side = network.push(SOURCE, SINK), network.after_source(SOURCE)
        assert cost == min(costs.values()) == costs[tuple(side)]
        assert sum(side) == min(sum(s) for s, c in costs.items() if c == cost)


def test_a_large_cut_is_quick() -> None:
    """A chain of 30,000 ops with a kernel for every third: what very deep networks look like."""
    network = Network(2)
    start = time.process_time()
    before = SINK
    for i in range(30_000):
        node = network.node()
        network.add(before, node, 900 + i % 7)
        network.add(node, before, 900 + i % 7)
        if i % 3 == 0:
            network.add(SOURCE, node, 2000 + i % 11)
            network.add(node, SINK, 20 + i % 5)
        before = node
    cost, side = network.push(SOURCE, SINK), network.after_source(SOURCE)
    assert time.process_time() - start < 2
    assert all(side[2:]) and cost == 900 + sum(20 + i % 5 for i in range(0, 30_000, 3))
