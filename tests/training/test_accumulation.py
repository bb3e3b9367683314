"""`accumulate=k`: one update for k micro-batches, as eager accumulation gives it."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import wholestep as ws
from tests.runtime.runs import Perceptron, adamw, assert_same, data, fresh, sgd, squares
from wholestep.errors import InputError


class WithStatistics(nn.Module):
    """BatchNorm and two outputs: rows, and a number."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(4, 6, bias=False), nn.BatchNorm1d(6), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.norm(self.first(x))))


def with_outputs(model: nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor]:
    rows = model(x)
    return {"loss": rows.pow(2).mean(), "rows": rows, "largest": rows.max()}


@pytest.mark.parametrize("make_optimizer", [sgd, adamw])
@pytest.mark.parametrize("count", [2, 3])
def test_as_eager_accumulation(count, make_optimizer):
    model = fresh(WithStatistics)
    twin = copy.deepcopy(model)
    optimizer, other = make_optimizer(model), make_optimizer(twin)
    step = ws.compile(model, with_outputs, optimizer, (data(12, 4),), accumulate=count, clip_norm=0.5)
    for seed in range(4):
        x = data(12, 4, seed=seed)
        result = step(x)
        other.zero_grad()
        parts = [with_outputs(twin, part) for part in x.chunk(count)]
        for part in parts:
            (part["loss"] / count).backward()
        norm = nn.utils.clip_grad_norm_(twin.parameters(), 0.5)
        other.step()
        torch.testing.assert_close(result["loss"], torch.stack([p["loss"] for p in parts]).mean().detach())
        torch.testing.assert_close(result["rows"], torch.cat([p["rows"] for p in parts]).detach())
        torch.testing.assert_close(result["largest"], torch.stack([p["largest"] for p in parts]).mean().detach())
        torch.testing.assert_close(step.last.grad_norm, norm)
        assert step.last.loss is result["loss"]
    assert_same(model, twin, 1e-5)
    assert int(model.norm.num_batches_tracked) == 4 * count


def test_it_is_one_program_with_a_function_per_micro_batch():
    model = fresh(Perceptron)
    step = ws.compile(model, squares, sgd(model), (data(8, 4),), accumulate=4)
    text = str(step.program())
    assert text.count('"step.micro_batches"') == 1 and text.count("func.func") >= 2
    assert "callee = @micro_batch" in text and "count = 4 : i64" in text
    assert "tensor<2x4xf32>" in text and "tensor<8x4xf32>" in text
    assert text.count('"step.sgd"') == 4  # one update per parameter, however many micro-batches


def test_gradients_are_summed_where_the_plan_says():
    model = fresh(Perceptron)
    step = ws.compile(model, squares, sgd(model), (data(8, 4),), accumulate=4)
    step(data(8, 4))
    bound = step._compiled.static.bound
    (loop,) = [launch for launch in bound.plan.launches if launch.provider == "micro_batches"]
    start, end = bound.arena.data_ptr(), bound.arena.data_ptr() + bound.arena.numel()
    places = [bound.memory.tensor(n).data_ptr() for n in loop.writes if n >= 0]
    assert len(places) >= 4 and all(start <= p < end for p in places)
    assert sum(getattr(call, "__name__", "") == "add_" for call, _, _ in bound.calls) >= 4 * 3


def test_each_micro_batch_draws_its_own_dropout():
    model = fresh(lambda: nn.Sequential(nn.Linear(4, 64), nn.Dropout(0.5)))
    step = ws.compile(model, lambda m, x: (m(x).pow(2).mean(), m(x)), sgd(model, 0.0), (data(4, 4),), accumulate=2)
    row = data(1, 4).expand(4, 4).contiguous()
    _, rows = step(row)
    masks = rows != 0
    assert 0.3 < float(masks.float().mean()) < 0.7
    assert not torch.equal(masks[0:2], masks[2:4])


def test_accumulation_is_verified_against_eager():
    model = fresh(WithStatistics)
    step = ws.compile(model, with_outputs, adamw(model), (data(12, 4),), accumulate=3, verify=True, clip_value=0.1)
    step(data(12, 4))
    assert step.verified


@pytest.mark.parametrize("rows", [2, 4])
def test_a_loss_with_a_dimension_is_averaged_too(rows):
    model = fresh(lambda: nn.Linear(4, 1))
    twin = copy.deepcopy(model)
    x = data(rows, 4)
    loss = ws.compile(model, lambda m, x: m(x).pow(2).mean(0), sgd(model), (x,), accumulate=2)(x)
    torch.testing.assert_close(loss, twin(x).pow(2).mean(0).detach())


def test_an_error_in_a_micro_batch_names_the_layer_once():
    model = fresh(lambda: nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 1)))
    step = ws.compile(model, squares, sgd(model), (torch.arange(4),), accumulate=2)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(IndexError, match=r"^step\.embedding of layer 0"):
        step(torch.tensor([0, 1, 2, 9]))
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())


@pytest.mark.parametrize(
    ("batch", "count", "message"),
    [
        ((data(8, 4),), 3, r"accumulate=3 does not divide the batch: batch\[0\] has 8 rows"),
        ((data(8, 4),), 0, "accumulate must be a positive number of micro-batches, not 0"),
        ((data(8, 4),), 2.0, "accumulate must be a positive number of micro-batches, not 2.0"),
        ((data(8, 4), data(4, 4)), 2, r"which is 4 for batch\[1\] and 8 for batch\[0\]"),
        ((data(8, 4), torch.tensor(1.0)), 2, r"batch\[1\] is a single number"),
    ],
)
def test_batches_that_cannot_be_split(batch, count, message):
    model = fresh(Perceptron)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(InputError, match=message):
        ws.compile(model, lambda m, x, *rest: squares(m, x), sgd(model), batch, accumulate=count)
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())


def test_generated_kernels_read_micro_batches_as_the_batch_lies():
    torch.manual_seed(0)
    model = nn.Sequential(nn.ReLU(), nn.Linear(3, 2))
    x = torch.randn(4, 3, 5).transpose(1, 2)
    wanted = squares(model, x).detach()
    step = ws.compile(model, squares, sgd(model), (x,), accumulate=2, providers=["aten", "cpp"], tune=False)
    torch.testing.assert_close(step(x), wanted)
