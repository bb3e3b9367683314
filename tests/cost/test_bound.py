"""The fused bound by hand on a two-layer network, and that no step moves less."""

from __future__ import annotations

import pytest
import torch

import wholestep as ws
from tests.cost.models import convolution_step, language_step, moved
from tests.runtime.runs import Perceptron, data, fresh, squares


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
    heavy = {k.name for make in (language_step, convolution_step) for k in moved(make()).ledger.kernels if k.anchor}
    assert heavy == {
        "contract", "attention", "attention_grad", "embedding", "embedding_grad",
        "conv", "conv_input_grad", "conv_weight_grad",
    }  # fmt: skip
