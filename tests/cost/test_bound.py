"""The fused bound by hand on small networks, that nothing done to a program changes it, and that no step moves less."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

import wholestep as ws
from tests.cost.models import TOKENS, convolution_step, language_model, language_step, moved, next_token
from tests.runtime.runs import Perceptron, data, fresh, squares
from wholestep.cost import Bound, fused_bound
from wholestep.cost.bound import HEAVY, NOTED, bound_of, heavy_bytes
from wholestep.dialects.step import StepBuilder
from wholestep.ir import F32, I64, TensorType, add_function, finish_function, module
from wholestep.ir.core import Op, Value
from wholestep.ir.passes import run_pipeline


def perceptron(momentum: float, **options) -> ws.TrainStep:
    model = fresh(Perceptron)  # 4 -> 5 -> 3: 43 parameters
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)
    return ws.compile(model, squares, optimizer, (data(2, 4),), **options)


#: elements of x, w, bias and y of each product of a perceptron with a batch of 2
PRODUCTS = (
    8 + 20 + 5 + 10,  # first layer
    10 + 15 + 3 + 6,  # second layer
    6 + 10 + 15,  # gradient of its weight: dy, hidden values
    6 + 15 + 10,  # gradient of its input: dy, weight
    10 + 8 + 20,  # gradient of the first weight: dy, batch
)


def test_two_layers_by_hand():
    bound = moved(perceptron(momentum=0.0)).bound
    assert bound.heavy == 4 * sum(PRODUCTS)
    assert (bound.state_read, bound.state_written) == (4 * 43, 4 * 43)
    assert bound.total == 4 * (sum(PRODUCTS) + 2 * 43)


def test_optimizer_state_is_read_and_written_once():
    bound = moved(perceptron(momentum=0.9)).bound
    assert bound.heavy == 4 * sum(PRODUCTS)
    assert (bound.state_read, bound.state_written) == (2 * 4 * 43, 2 * 4 * 43)


def test_averages_are_state():
    bound = moved(perceptron(momentum=0.0, ema=0.9)).bound
    assert (bound.state_read, bound.state_written) == (2 * 4 * 43, 2 * 4 * 43)


def test_products_count_in_their_precision_and_copies_are_written():
    bound = moved(perceptron(momentum=0.0, precision="bf16")).bound
    weights = 20 + 15
    assert bound.state_read == 4 * 43
    # the copies of what products read in bf16; biases are addends of products and have copies too
    assert bound.state_written in (4 * 43 + 2 * weights, 4 * 43 + 2 * 43)
    assert bound.heavy == 2 * sum(PRODUCTS)


def test_micro_batches_run_their_products_each():
    whole, halves = moved(perceptron(momentum=0.0)).bound, moved(perceptron(momentum=0.0, accumulate=2)).bound
    # weights and weight gradients are moved by each of the two, rows of the batch once
    again = 20 + 5 + 15 + 3 + 15 + 15 + 20
    assert halves.heavy - whole.heavy == 4 * again
    assert (halves.state_read, halves.state_written) == (whole.state_read, whole.state_written)


@pytest.mark.parametrize("make", [language_step, convolution_step, lambda: language_step(precision="bf16")])
def test_no_step_moves_less(make):
    movement = moved(make())
    assert movement.ratio > 1
    assert movement.ratio == movement.ledger.total / movement.bound.total


def test_convolutions_attention_and_embeddings_are_heavy():
    programs = [make(level=0)._compiled.program.module for make in (language_step, convolution_step)]
    assert {op.name for program in programs for op in program.walk() if issubclass(op.definition, HEAVY)} == {
        f"step.{name}"
        for name in ("contract", "attention", "attention_grad", "embedding", "embedding_grad")
        + ("conv", "conv_input_grad", "conv_weight_grad")
    }


# ---- ops by hand -----------------------------------------------------------------------------------------------------


def heavy(*shapes: tuple[int, ...], make: Any) -> int:
    """What the heavy ops must move of a function of tensors of these shapes, after what every program goes through."""
    function = add_function(module(), "main", [s if isinstance(s, TensorType) else TensorType(s, F32) for s in shapes])
    made = make(StepBuilder(function.regions[0].block), *function.regions[0].block.arguments)
    finish_function(function, list(made) if isinstance(made, tuple) else [made])
    root: Op = function.parent.parent.parent  # type: ignore[union-attr, assignment]
    run_pipeline(root, "cse,dce")
    return heavy_bytes(function)


def product(b: StepBuilder, x: Value, y: Value) -> Value:
    return b.contract(x, y, spec="mk,kn->mn")


def test_what_nobody_uses_and_what_is_there_already_do_not_count():
    def once(b, x, y):
        return product(b, x, y)

    def often(b, x, y):
        product(b, y, x)  # nobody uses it
        return b.add(product(b, x, y), product(b, x, y))

    assert heavy((2, 3), (3, 2), make=once) == heavy((2, 3), (3, 2), make=often) == 4 * (6 + 6 + 4)


def test_views_of_one_tensor_are_read_once():
    assert heavy((2, 3), make=lambda b, x: product(b, x, b.transpose(x, order=(1, 0)))) == 4 * (6 + 4)

    def halves(b, x):  # of 3x4: two columns, and two of the others
        left, right = b.slice(x, dim=1, start=0, end=2), b.slice(x, dim=1, start=2, end=4)
        return product(b, b.transpose(left, order=(1, 0)), right)

    assert heavy((3, 4), make=halves) == 4 * (12 + 4)
    assert heavy((1, 3), (3, 2), make=lambda b, x, y: product(b, b.broadcast_to(x, (5, 3)), y)) == 4 * (3 + 6 + 10)


def test_embeddings_move_the_rows_that_they_are_asked_for():
    rows = TensorType((5,), I64)
    assert heavy((100, 4), rows, make=lambda b, t, i: b.embedding(t, i)) == 4 * (20 + 20) + 8 * 5
    assert heavy((2, 4), rows, make=lambda b, t, i: b.embedding(t, i)) == 4 * (8 + 20) + 8 * 5
    assert heavy((5, 4), rows, make=lambda b, dy, i: b.embedding_grad(dy, i, rows=100)) == 4 * (20 + 20) + 8 * 5
    assert heavy((5, 4), rows, make=lambda b, dy, i: b.embedding_grad(dy, i, rows=2)) == 4 * (20 + 8) + 8 * 5


def test_the_gradients_of_one_attention_are_one_op():
    inputs, mask = [(2, 3, 4)] * 5 + [(2, 3)], (2, 3, 3)

    def three(b, *operands):
        return tuple(b.attention_grad(*operands, scale=0.5))

    def four(b, *operands):
        return (*b.attention_grad(*operands, scale=0.5), b.attention_mask_grad(*operands, scale=0.5))

    assert heavy(*inputs, mask, make=three) == 4 * (5 * 24 + 6 + 18 + 3 * 24)
    assert heavy(*inputs, mask, make=four) == 4 * (5 * 24 + 6 + 18 + 3 * 24 + 18)


def test_a_result_that_backward_does_not_need_is_not_written():
    def attention(b, q, k, v):
        return b.attention(q, k, v, scale=0.5)[0]

    assert heavy(*[(2, 3, 4)] * 3, make=attention) == 4 * 4 * 24


# ---- whatever is done to the program ---------------------------------------------------------------------------------


class Heads(nn.Module):
    """Attention with three products of one input, and keys and values that heads share."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = nn.Linear(8, 8), nn.Linear(8, 4), nn.Linear(8, 4), nn.Linear(8, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = self.q(x).unflatten(-1, (4, 2)).transpose(1, 2)
        k, v = (p(x).unflatten(-1, (2, 2)).transpose(1, 2).repeat_interleave(2, 1) for p in (self.k, self.v))
        seen = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.out(seen.transpose(1, 2).flatten(2))


def labelled(model: nn.Module, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(x).flatten(0, 1), labels.flatten())


@cache
def heads_step(**options: Any) -> ws.TrainStep:
    model = fresh(Heads)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return ws.compile(model, labelled, optimizer, (data(2, 4, 8), torch.arange(8).view(2, 4)), **options)


def test_heads_by_hand():
    """8 tokens: of each product x, w, bias, y; attention 64 elements of q, and of k and v 32 that are read twice."""
    forward = 64 + 64 + 8 + 64 + 2 * (64 + 32 + 4 + 32) + 64 + 128 + 16 + 128
    attention = 64 + 2 * 32 + 64 + 32  # q, k, v, out, logsumexp
    gradients = 2 * 64 + 64 + 2 * 32 + 32 + 3 * 64  # dout, out, q, k, v, logsumexp; dq, and dk, dv of every head
    weights = 64 + 64 + 64 + 2 * (64 + 32 + 32) + 64 + 128 + 128
    inputs = 128 + 128 + 64  # of the last layer alone: nobody asks for that of x
    parameters = 64 + 8 + 2 * (32 + 4) + 128 + 16
    bound = moved(heads_step(level=0)).bound
    assert bound == Bound(4 * (forward + attention + gradients + weights + inputs), 4 * parameters, 4 * parameters)


@pytest.mark.parametrize(
    ("options", "done"),
    [
        ({}, ""),
        ({"force": ("shared_input *",)}, "shared_input"),
        ({"force": ("grouped_attention *",)}, "grouped_attention"),
        ({"force": ("chunk-loss *",)}, "chunk-loss"),
        ({"force": ("recompute */attention#0",)}, "recompute"),
        ({"providers": ("aten",)}, ""),
        ({"updates": "in_next_forward"}, ""),
    ],
)
def test_the_bound_is_that_of_the_captured_step(options, done):
    step = heads_step(**options)
    assert done in " ".join(step.recipe)
    assert moved(step).bound == moved(heads_step(level=0)).bound


@pytest.mark.parametrize("options", [{}, {"memory_budget": 0.9}, {"level": 1}, {"providers": ("aten",)}])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_levels_and_budgets_do_not_change_the_bound(options, precision):
    found = moved(language_step(precision=precision, **options))
    assert found.bound == moved(language_step(precision=precision, level=0)).bound
    assert found.bound.total > 0


def test_1x1_convolutions_that_become_products_count_as_they_were():
    def step(**options: Any) -> ws.TrainStep:
        model = fresh(lambda: nn.Sequential(nn.Conv2d(3, 4, 1), nn.Flatten(), nn.Linear(64, 2)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return ws.compile(model, squares, optimizer, (data(2, 3, 4, 4),), precision="bf16", **options)

    plain, changed = step(level=0), step(force=("channels_last *", "pointwise_convolution *"))
    assert any(key.startswith("pointwise_convolution ") for key in changed.recipe)
    assert moved(changed).bound == moved(plain).bound


def test_saved_steps_keep_it(tmp_path):
    options = {"force": ("shared_input *",), "precision": "bf16", "accumulate": 2}
    step = heads_step(**options)
    path = tmp_path / "heads.step"
    step.save(path)
    model = fresh(Heads)
    loaded = ws.load(path, model, labelled, torch.optim.SGD(model.parameters(), lr=0.1))
    assert moved(loaded).bound == moved(step).bound == moved(heads_step(level=0, precision="bf16", accumulate=2)).bound


def test_functions_that_are_no_step_have_none():
    function = add_function(module(), "main", [TensorType((2, 2), F32)])
    b, (x,) = StepBuilder(function.regions[0].block), function.regions[0].block.arguments
    finish_function(function, [product(b, x, x)])
    assert bound_of(function) == Bound(0, 0, 0) and NOTED not in function.attributes
    assert fused_bound(function) == Bound(4 * (4 + 4), 0, 0)


def test_counters_are_numbers_wherever_they_are():
    model = language_model()
    optimizer = torch.optim.AdamW(model.parameters())
    before = moved(ws.compile(model, next_token, optimizer, (TOKENS,), level=0)).bound
    skipping = ws.compile(model, next_token, optimizer, (TOKENS,), level=0, skip_nonfinite=True)
    assert moved(skipping).bound == before
