"""fp16 loss scaling and skipped updates, against torch.amp.GradScaler."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import wholestep as ws
from tests.runtime.runs import Perceptron, adamw, data, fresh, sgd
from wholestep.errors import InputError, LossScaleError, OptimizerError

HUGE = 3e4  # beyond fp16's range once a layer has doubled it


def large(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return (model(x).float() * 8).pow(2).mean()


def batches(count: int, bad: tuple[int, ...]) -> list[torch.Tensor]:
    return [data(6, 4, seed=i) * (HUGE if i in bad else 1.0) for i in range(count)]


@pytest.mark.parametrize("make_optimizer", [sgd, adamw])
def test_scale_and_skips_follow_grad_scaler(make_optimizer):
    settings = {"init_scale": 2.0**14, "growth_interval": 3}
    model = fresh(Perceptron)
    twin = copy.deepcopy(model)
    optimizer, other = make_optimizer(model), make_optimizer(twin)
    scaler = torch.amp.GradScaler("cpu", **settings)
    step = ws.compile(model, large, optimizer, (data(6, 4),), precision="fp16", loss_scale=settings)
    skipped = 0
    for x in batches(14, bad=(2, 9)):
        scale_before = scaler.get_scale()
        loss = step(x)
        other.zero_grad()
        with torch.autocast("cpu", torch.float16):
            expected = large(twin, x)
        scaler.scale(expected).backward()
        scaler.step(other)
        scaler.update()
        theirs_skipped = scaler.get_scale() < scale_before
        assert bool(step.last.skipped) == theirs_skipped
        skipped += theirs_skipped
        assert step.state_dict()["scaler"]["scale"] == scaler.get_scale()
        if not theirs_skipped:
            torch.testing.assert_close(loss, expected.detach(), rtol=2e-2, atol=2e-3)
    assert skipped >= 2 and step.report().skipped == skipped
    assert step.state_dict()["scaler"] == scaler.state_dict()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=5e-2, atol=5e-3)
    counts = {float(s["step"]) for s in optimizer.state.values() if "step" in s}
    assert counts == {float(s["step"]) for s in other.state.values() if "step" in s}


def test_a_skipped_update_changes_no_parameter_and_no_state():
    model = fresh(Perceptron)
    optimizer = adamw(model)
    step = ws.compile(model, large, optimizer, (data(6, 4),), skip_nonfinite=True, ema=0.5)
    step(data(6, 4))
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    step(torch.full((6, 4), float("nan")))
    assert bool(step.last.skipped) and step.report().skipped == 1
    torch.testing.assert_close(model.state_dict(), before[0], rtol=0, atol=0)
    torch.testing.assert_close(optimizer.state_dict()["state"], before[1]["state"], rtol=0, atol=0)
    step(data(6, 4, seed=1))
    assert not bool(step.last.skipped)
    assert float(next(iter(optimizer.state.values()))["step"]) == 2.0
    assert not torch.equal(model.state_dict()["first.weight"], before[0]["first.weight"])


def test_without_the_option_a_bad_gradient_goes_through():
    model = fresh(Perceptron)
    step = ws.compile(model, large, sgd(model), (data(6, 4),))
    step(torch.full((6, 4), float("nan")))
    assert step.last.skipped is None
    assert bool(torch.isnan(model.first.weight).any())


def test_skipping_changes_nothing_where_all_is_finite():
    runs = []
    for options in ({}, {"skip_nonfinite": True}):
        model = fresh(Perceptron)
        step = ws.compile(model, large, adamw(model), (data(6, 4),), **options)
        for seed in range(4):
            step(data(6, 4, seed=seed))
        runs.append(model.state_dict())
    torch.testing.assert_close(*runs, rtol=1e-6, atol=1e-7)


def test_a_collapsed_scale_is_an_error():
    model = fresh(Perceptron)
    step = ws.compile(
        model, large, sgd(model), (data(6, 4),), precision="fp16", loss_scale={"init_scale": 4.0, "backoff_factor": 0.1}
    )
    bad = torch.full((6, 4), float("inf"))
    with pytest.raises(LossScaleError, match=r"the loss scale has collapsed from 4 to 0\.0004"):
        for _ in range(10):
            step(bad)
    assert bool(torch.isfinite(model.first.weight).all())


def test_a_scaler_state_goes_both_ways():
    model = fresh(Perceptron)
    step = ws.compile(model, large, sgd(model), (data(6, 4),), precision="fp16", loss_scale=256.0)
    step(data(6, 4))
    scaler = torch.amp.GradScaler("cpu")
    scaler.load_state_dict(step.state_dict()["scaler"])
    assert scaler.get_scale() == 256.0
    state = step.state_dict()
    state["scaler"] = torch.amp.GradScaler("cpu", init_scale=1024.0).state_dict()
    step.load_state_dict(state)
    step(data(6, 4))
    assert step.state_dict()["scaler"]["scale"] == 1024.0


def test_optimizers_that_cannot_be_held_back_are_refused():
    model = fresh(Perceptron)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, dampening=0.5)
    with pytest.raises(OptimizerError, match="SGD with dampening starts its buffer on its first update"):
        ws.compile(model, large, optimizer, (data(6, 4),), skip_nonfinite=True)


class CountsOnTheHost(torch.optim.Optimizer):
    """Keeps its step as a Python number."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                state["count"] = state.get("count", 0) + 1
                p.add_(p.grad, alpha=-group["lr"] / state["count"])


def test_custom_optimizers_with_numbers_are_refused():
    model = fresh(Perceptron)
    with pytest.raises(OptimizerError, match="CountsOnTheHost keeps count as Python numbers"):
        ws.compile(model, large, CountsOnTheHost(model.parameters()), (data(6, 4),), precision="fp16")


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"init_scale": 0.0}, "the first loss scale must be positive and finite, not 0.0"),
        ({"growth_factor": 1.0}, "growth_factor must be greater than 1, not 1.0"),
        ({"backoff_factor": 1.5}, "backoff_factor must lie between 0 and 1, not 1.5"),
        ({"growth_interval": 0}, "growth_interval must be a positive number of steps, not 0"),
        ({"growth": 2}, "loss_scale has no setting 'growth'"),
        (-1.0, "the first loss scale must be positive and finite, not -1.0"),
        ("auto", "loss_scale is a number or the settings of torch.amp.GradScaler, not 'auto'"),
        (True, "loss_scale is a number or the settings of torch.amp.GradScaler, not True"),
    ],
)
def test_bad_settings(setting, message):
    model = fresh(Perceptron)
    with pytest.raises(InputError, match=message):
        ws.compile(model, large, sgd(model), (data(6, 4),), precision="fp16", loss_scale=setting)


@pytest.mark.parametrize("option", ["skip_nonfinite", "verify"])
def test_switches_are_true_or_false(option):
    model = fresh(Perceptron)
    with pytest.raises(InputError, match=f"{option} is True or False, not 'no'"):
        ws.compile(model, large, sgd(model), (data(6, 4),), **{option: "no"})


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_scale_without_fp16_is_refused(precision):
    model = fresh(Perceptron)
    with pytest.raises(InputError, match='loss_scale= belongs to precision="fp16"'):
        ws.compile(model, large, sgd(model), (data(6, 4),), precision=precision, loss_scale=128.0)
