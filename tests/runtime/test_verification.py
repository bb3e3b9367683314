"""`verify=True`: says so where eager agrees; else names the first tensor that differs, and writes nothing."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

import wholestep as ws
from tests.runtime.runs import Body, Perceptron, adamw, compare, data, fresh, sgd, squares
from tests.runtime.test_step_border import assert_equal, everything
from wholestep.dialects.step import step as dialect
from wholestep.errors import InputError, MismatchError
from wholestep.runtime.verification import Check, difference

X = data(6, 4)


@pytest.mark.parametrize("make_optimizer", [sgd, adamw, lambda m: torch.optim.Rprop(m.parameters())])
def test_a_good_step_agrees_and_says_so(make_optimizer):
    def make():
        return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 3))

    step = compare(fresh(make), squares, [(X,)] * 2, lambda m, b: squares(m, *b), make_optimizer, verify=True)
    assert step.verified is True
    assert "the first step was run in eager PyTorch too and agreed" in str(step.report())


def test_clipping_is_verified_too():
    model = fresh(Perceptron)
    step = ws.compile(model, squares, sgd(model), (X,), verify=True, clip_norm=0.01)
    step(X)
    assert step.verified and float(step.last.grad_norm) > 0.01


def test_only_the_first_step_is_verified(monkeypatch):
    model = fresh(Perceptron)
    step = ws.compile(model, squares, sgd(model), (X,), verify=True)
    assert step.verified is None and "agreed" not in str(step.report())
    step(X)
    monkeypatch.setattr("wholestep.runtime.train_step.compare_with_eager", lambda *_: pytest.fail("again"))
    step(X)


@pytest.mark.parametrize("make_optimizer", [lambda m: torch.optim.SGD(m.parameters(), lr=1e-3), adamw])
def test_a_broken_derivative_is_found_by_its_layer(monkeypatch, make_optimizer):
    rule = dialect.ops["tanh"].derivative

    def broken(b, op, grad):
        return [b.mul(right, 1.5) for right in rule(b, op, grad)]

    monkeypatch.setattr(dialect.ops["tanh"], "derivative", staticmethod(broken))
    model = fresh(Perceptron)
    optimizer = make_optimizer(model)
    step = ws.compile(model, squares, optimizer, (X,), verify=True)
    before = everything(model, optimizer)
    with pytest.raises(MismatchError, match=r"disagrees with eager PyTorch at .*first\.weight.*Nothing was written"):
        step(X)
    assert_equal(everything(model, optimizer), before)
    assert step.verified is None


def test_a_broken_forward_is_found_at_the_loss(monkeypatch):
    evaluate = dialect.ops["tanh"].evaluate

    def broken(op):
        run = evaluate(op)
        return lambda x: run(x) * 1.01

    monkeypatch.setattr(dialect.ops["tanh"], "evaluate", staticmethod(broken))
    model = fresh(Perceptron)
    step = ws.compile(model, squares, sgd(model), (X,), verify=True)
    with pytest.raises(MismatchError, match="at loss output: largest difference"):
        step(X)


def test_gradients_of_the_user_and_random_state_are_kept():
    model = fresh(Perceptron)
    model.first.weight.grad = kept = torch.ones(5, 4)
    step = ws.compile(model, squares, sgd(model), (X,), verify=True)
    state = torch.get_rng_state()
    step(X)
    assert model.first.weight.grad is kept and torch.equal(kept, torch.ones(5, 4))
    assert model.second.weight.grad is None
    assert torch.equal(torch.get_rng_state(), state)


def test_gradients_that_are_only_rounding_do_not_count():
    def shifted(m, x):
        h = m.layer(x)
        return torch.softmax(h + m.layer.bias.sum(), -1)  # the bias moves all logits alike

    model = fresh(lambda: Body(shifted))
    step = ws.compile(model, lambda m, x: m(x)[:, 0].log().mean(), adamw(model), (X,), verify=True)
    step(X)
    assert step.verified


def test_dropout_cannot_be_verified():
    model = fresh(lambda: nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)))
    step = ws.compile(model, squares, sgd(model), (X,), verify=True)
    with pytest.raises(InputError, match="cannot compare a step that draws random numbers"):
        step(X)


def test_a_loss_that_remembers_its_model_is_refused():
    model = fresh(Perceptron)
    step = ws.compile(model, lambda m, x: squares(model, x), sgd(model), (X,), verify=True)
    with pytest.raises(InputError, match="loss_fn must use the model that it is given"):
        step(X)
    assert model.first.weight.grad is None


@pytest.mark.parametrize(
    "theirs, ours, before, problem",
    [
        (torch.ones(3), torch.ones(3) + 1e-6, None, ""),
        (torch.ones(3), torch.ones(3) + 1e-3, None, "largest difference 0.001 where values reach 1"),
        (torch.ones(3), torch.ones(2), None, r"shapes \(3,\) and \(2,\)"),
        (torch.arange(3), torch.tensor([0, 1, 3]), None, "1 of 3 elements differ"),
        (torch.tensor([1.0]), torch.tensor([float("nan")]), None, "NaN on one side only"),
        (torch.tensor([float("nan")]), torch.tensor([float("nan")]), None, ""),
        (torch.tensor([1.001]), torch.tensor([1.00101]), torch.tensor([1.0]), "where the update reaches 0.001"),
        (torch.empty(0), torch.empty(0), None, ""),
    ],
)
def test_differences(theirs, ours, before, problem):
    found = difference(Check("x", theirs, ours, before))
    assert bool(found) == bool(problem)
    if problem:
        assert re.search(problem, found)
