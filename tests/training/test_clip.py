"""Clipping inside the program against torch.nn.utils."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

import wholestep as ws
from tests.runtime.runs import Perceptron, adamw, assert_same, data, fresh, sgd, squares
from wholestep.errors import InputError


@pytest.mark.parametrize("make_optimizer", [sgd, adamw])
@pytest.mark.parametrize(
    ("options", "clip"),
    [
        ({"clip_norm": 0.05}, lambda ps: nn.utils.clip_grad_norm_(ps, 0.05)),
        ({"clip_norm": 100.0}, lambda ps: nn.utils.clip_grad_norm_(ps, 100.0)),
        ({"clip_norm": math.inf}, lambda ps: nn.utils.clip_grad_norm_(ps, math.inf)),
        ({"clip_value": 0.01}, lambda ps: nn.utils.clip_grad_value_(ps, 0.01)),
    ],
)
def test_clipping_as_torch_does(options, clip, make_optimizer):
    model = fresh(Perceptron)
    twin = copy.deepcopy(model)
    optimizer, other = make_optimizer(model), make_optimizer(twin)
    step = ws.compile(model, squares, optimizer, (data(6, 4),), **options)
    for seed in range(5):
        x = data(6, 4, seed=seed)
        loss = step(x)
        other.zero_grad()
        expected = squares(twin, x)
        expected.backward()
        norm = clip(list(twin.parameters()))
        other.step()
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-5, atol=1e-6)
        if "clip_norm" in options:
            torch.testing.assert_close(step.last.grad_norm, norm, rtol=1e-5, atol=1e-7)
        else:
            assert step.last.grad_norm is None
    assert_same(model, twin, 1e-5)


def test_clipping_changes_the_update():
    """A run without clipping differs: the tests above could fail."""
    runs = []
    for options in ({}, {"clip_norm": 0.05}, {"clip_value": 0.01}):
        model = fresh(Perceptron)
        step = ws.compile(model, squares, sgd(model), (data(6, 4),), **options)
        step(data(6, 4))
        runs.append(model.first.weight.detach().clone())
    assert not any(torch.allclose(runs[0], other, atol=1e-6) for other in runs[1:])


def test_the_update_uses_what_was_clipped_to_a_value():
    model = fresh(Perceptron)
    before = model.second.weight.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    ws.compile(model, squares, optimizer, (data(6, 4),), clip_value=1e-4)(data(6, 4))
    moved = (model.second.weight.detach() - before).abs().max()
    assert 0.9e-4 < float(moved) <= 1.01e-4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"clip_norm": 0.0}, "clip_norm must be a positive number, not 0.0"),
        ({"clip_value": -1}, "clip_value must be a positive number, not -1"),
        ({"clip_value": "much"}, "clip_value must be a positive number, not 'much'"),
        ({"clip_norm": 1.0, "clip_value": 1.0}, "clip by one of them"),
    ],
)
def test_bad_limits(options, message):
    model = fresh(Perceptron)
    with pytest.raises(InputError, match=message):
        ws.compile(model, squares, sgd(model), (data(6, 4),), **options)
