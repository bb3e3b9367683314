"""`join_zeros`: gradients of cut convolutions are written in place beside zeros, and are PyTorch's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional

import wholestep as ws
from tests.dialects.loop.provider import LoopReference, registered
from tests.plan.networks import Case
from tests.plan.simulate import simulate
from tests.runtime.runs import data
from wholestep import api
from wholestep.dialects.move import verify_plan
from wholestep.ir.verify import verify
from wholestep.plan import joined
from wholestep.plan.plan import Plan
from wholestep.plan.planner import planned_function
from wholestep.plan.text import plan_to_module
from wholestep.runtime.executor import Executable
from wholestep.runtime.train_step import TrainStep
from wholestep.transforms import join_slices, join_zeros  # noqa: F401  (they register)
from wholestep.transforms.opportunity import take, transformations

#: of a slice, and of what it is cut from
POSITIONS, MORE, CHANNELS = 48, 2, 32
Function = Callable[[torch.Tensor], torch.Tensor]


class Cut(nn.Module):
    """A dilated convolution that pads on one side, a function of its result, and a product."""

    def __init__(self, function: Function, before: bool = True, bias: bool = True, made: int = CHANNELS):
        super().__init__()
        self.first = nn.Linear(CHANNELS, CHANNELS)
        self.both = nn.Conv1d(CHANNELS, 2 * CHANNELS, 2, dilation=MORE, bias=bias)
        self.out = nn.Linear(made, 4)
        self.widths, self.function = (MORE, 0) if before else (0, MORE), function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.both(functional.pad(self.first(x).transpose(1, 2), self.widths))
        return self.out(self.function(y).transpose(1, 2))


def gated(y: torch.Tensor) -> torch.Tensor:
    a, b = y.chunk(2, 1)
    return torch.tanh(a) * torch.sigmoid(b)


def plain(y: torch.Tensor) -> torch.Tensor:
    return y


MODELS: dict[str, Callable[[], nn.Module]] = {
    "gates": lambda: Cut(gated),
    "zeros before": lambda: Cut(gated, before=False),
    "no bias": lambda: Cut(gated, bias=False),
    "no concatenation": lambda: Cut(torch.tanh, made=2 * CHANNELS),
}


def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def model_of(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name]()


def case_of(model: nn.Module) -> Case:
    return Case((model, loss, (data(3, POSITIONS, CHANNELS),)))


def names(case: Case) -> list[str]:
    return [op.name.removeprefix("step.") for op in case.program.function.regions[0].block]


def outputs(case: Case) -> list[torch.Tensor]:
    return Executable(case.program.function, "cpu", case.numbers)([x.clone() for x in case.inputs])


@pytest.mark.parametrize("name", MODELS)
def test_zeros_are_joined(name: str) -> None:
    case = case_of(model_of(name))
    before = outputs(case)
    take(case.program.module, ("join_slices",))
    (found,) = transformations()["join_zeros"].find(case.program.module)
    slice, whole = (3 * 2 * CHANNELS * n * 4 for n in (POSITIONS, POSITIONS + MORE))
    assert not found.why_not and found.change.bytes == -slice - whole + 2 * (whole - slice)
    assert take(case.program.module, ("join_zeros",)) == [found.key]
    verify(case.program.module)
    assert "slice_grad" not in names(case)
    for a, b in zip(before, outputs(case), strict=True):
        torch.testing.assert_close(a, b)
    planned = planned_function(case.program.function, "cpu", case.numbers)
    replay = simulate(planned.plan, planned.function, case.program.module, [x.clone() for x in case.inputs])
    for a, b in zip(before, replay.results, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize(
    "model, reason",
    [
        (lambda: Cut(lambda y: y[..., : POSITIONS // 4], made=2 * CHANNELS), "most of it is zeros"),
        (lambda: Cut(lambda y: y[..., ::2], made=2 * CHANNELS), "its elements are no neighbours"),
        (lambda: Cut(plain, made=2 * CHANNELS), "who makes it leaves no gaps"),
        (lambda: nn.Sequential(Cut(plain, made=2 * CHANNELS), Last()), "kernels that read it fill it up on the way"),
        (lambda: Norms(), "the kernel that makes it fills it up on the way"),
    ],
)
def test_why_not(model: Callable[[], nn.Module], reason: str) -> None:
    case = case_of(model())
    take(case.program.module, ("join_slices",))
    assert reason in [o.why_not for o in transformations()["join_zeros"].find(case.program.module)]


class Last(nn.Module):
    """Reads all but the last position of what pointwise kernels have made."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.sin(x)[:, :-1])


class Norms(Cut):
    """A norm reads what is cut, so that no product ends with its gradient."""

    def __init__(self) -> None:
        super().__init__(plain, made=2 * CHANNELS)
        self.norm = nn.LayerNorm(POSITIONS)
        self.function = lambda y: self.norm(y)


# ---- in place --------------------------------------------------------------------------------------------------------


def parts(plan: Plan) -> list[str]:
    """Who writes parts of something in backward, the provider of each."""
    views = {n for n, buffer in enumerate(plan.buffers) if buffer.share == "view"}
    return [x.provider for x in plan.launches if x.phase == "backward" for n in x.writes if n in views]


def trained(name: str, provider: str) -> tuple[list[torch.Tensor], TrainStep]:
    """Gradients of one step that is compiled as for a GPU, as moments of AdamW, and the step."""
    model, batch = model_of(name), (data(3, POSITIONS, CHANNELS),)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with registered(LoopReference), pytest.MonkeyPatch.context() as patch:
        patch.setattr(joined, "GROWTH", 1.0)
        patch.setattr(api, "DEFAULTS", tuple(replace(d, device="") for d in api.DEFAULTS))
        step = ws.compile(model, loss, optimizer, batch, providers=["aten", provider], tune=False)
        step(*batch)
    verify_plan(plan_to_module(step.plan()))
    return [optimizer.state[p]["exp_avg"] for p in model.parameters()], step


@pytest.mark.parametrize("provider", ["loops", "cpp"])
@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_those_of_pytorch(name: str, provider: str) -> None:
    """Halves of a gate, and sums of each, are written where they belong; nothing but zeros is copied there."""
    found, step = trained(name, provider)
    model = model_of(name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loss(model, data(3, POSITIONS, CHANNELS)).backward()
    optimizer.step()
    for mine, p in zip(found, model.parameters(), strict=True):
        torch.testing.assert_close(mine, optimizer.state[p]["exp_avg"], rtol=1e-4, atol=1e-6)
    count = {"gates": 4, "zeros before": 4, "no bias": 2, "no concatenation": 1}[name]
    assert sorted(parts(step.plan())) == sorted(["copy", *[provider] * count])
    assert not any(launch.name == "step.slice_grad" for launch in step.plan().launches)
