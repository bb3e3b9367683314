"""`ema=`: averages of the parameters inside the program, against torch.optim.swa_utils."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import wholestep as ws
from tests.runtime.runs import Perceptron, adamw, data, fresh, sgd, squares
from wholestep.errors import InputError


def test_as_torchs_averaged_model():
    model = fresh(Perceptron)
    twin = copy.deepcopy(model)
    optimizer, other = adamw(model), adamw(twin)
    average = AveragedModel(twin, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    step = ws.compile(model, squares, optimizer, (data(6, 4),), ema=0.9)
    for seed in range(6):
        x = data(6, 4, seed=seed)
        step(x)
        other.zero_grad()
        squares(twin, x).backward()
        other.step()
        average.update_parameters(twin)
    ours = step.ema_state_dict()
    assert list(ours) == list(model.state_dict())
    torch.testing.assert_close(ours, dict(average.module.state_dict()), rtol=1e-6, atol=1e-7)
    assert not torch.allclose(ours["first.weight"], model.first.weight)
    assert "ema" in str(step.program())


def test_the_model_holds_the_average_inside_the_block():
    model = fresh(Perceptron)
    step = ws.compile(model, squares, sgd(model), (data(6, 4),), ema=0.5, precision="bf16")
    for seed in range(3):
        step(data(6, 4, seed=seed))
    kept, averages = copy.deepcopy(model.state_dict()), step.ema_state_dict()
    with step.averaged() as inner:
        assert inner is model
        torch.testing.assert_close(dict(model.state_dict()), averages, rtol=0, atol=0)
    torch.testing.assert_close(model.state_dict(), kept, rtol=0, atol=0)
    with pytest.raises(RuntimeError, match="inside"), step.averaged():
        raise RuntimeError("inside")
    torch.testing.assert_close(model.state_dict(), kept, rtol=0, atol=0)


def test_averages_are_part_of_a_checkpoint():
    model = fresh(Perceptron)
    step = ws.compile(model, squares, sgd(model), (data(6, 4),), ema=0.8)
    for seed in range(3):
        step(data(6, 4, seed=seed))
    other_model = fresh(Perceptron, seed=9)
    other = ws.compile(other_model, squares, sgd(other_model), (data(6, 4),), ema=0.8)
    other.load_state_dict(copy.deepcopy(step.state_dict()))
    for s in (step, other):
        s(data(6, 4, seed=3))
    torch.testing.assert_close(step.ema_state_dict(), other.ema_state_dict(), rtol=0, atol=0)


def test_frozen_layers_keep_their_value_in_the_average():
    model = fresh(Perceptron)
    model.first.requires_grad_(False)
    step = ws.compile(model, squares, sgd(model), (data(6, 4),), ema=0.9)
    step(data(6, 4))
    torch.testing.assert_close(step.ema_state_dict()["first.weight"], model.first.weight.detach(), rtol=0, atol=0)
    model.first.requires_grad_(True)
    for seed in range(2):
        step(data(6, 4, seed=seed))
    assert not torch.equal(step.ema_state_dict()["first.weight"], model.first.weight.detach())
    assert step.compilations == 2


def test_a_layer_that_is_frozen_later_goes_on_as_in_torch():
    model = fresh(Perceptron)
    step = ws.compile(model, squares, adamw(model), (data(6, 4),), ema=0.5)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    for seed in range(6):
        model.first.requires_grad_(seed not in (2, 3))
        step(data(6, 4, seed=seed))
        average.update_parameters(model)
    torch.testing.assert_close(step.ema_state_dict(), dict(average.module.state_dict()), rtol=1e-6, atol=1e-7)


def test_a_checkpoint_without_averages_starts_them_anew():
    model, other = fresh(Perceptron), fresh(Perceptron, seed=1)
    step = ws.compile(model, squares, sgd(model), (data(6, 4),), ema=0.9)
    step(data(6, 4))
    step.load_state_dict(ws.compile(other, squares, sgd(other), (data(6, 4),)).state_dict())
    step(data(6, 4))
    torch.testing.assert_close(step.ema_state_dict(), dict(model.state_dict()), rtol=0, atol=0)


def test_no_step_while_the_model_holds_its_averages():
    model = fresh(Perceptron)
    step = ws.compile(model, squares, sgd(model), (data(6, 4),), ema=0.9)
    step(data(6, 4))
    before = copy.deepcopy(model.state_dict())
    with step.averaged(), pytest.raises(InputError, match=r"inside `with step\.averaged"):
        step(data(6, 4))
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    step(data(6, 4))


def test_no_average_was_asked_for():
    model = fresh(Perceptron)
    step = ws.compile(model, squares, sgd(model), (data(6, 4),))
    with pytest.raises(InputError, match=r"compile it with ema=0\.999"):
        step.ema_state_dict()


@pytest.mark.parametrize("decay", [1.0, -0.1, "much", float("nan")])
def test_bad_decay(decay):
    model = fresh(Perceptron)
    with pytest.raises(InputError, match="ema is the decay of the average, from 0 up to but not including 1"):
        ws.compile(model, squares, sgd(model), (data(6, 4),), ema=decay)
