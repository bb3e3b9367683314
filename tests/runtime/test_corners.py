"""Corners of execution from a plan in which numbers once went wrong without a word: compared with eager or level=0."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import wholestep as ws
from tests.runtime.runs import adamw, data, fresh, sgd, squares
from wholestep.errors import InputError


def trained(
    build: Any, loss: Any, batch: tuple[torch.Tensor, ...], steps: int = 3, **options: Any
) -> list[torch.Tensor]:
    """Parameters and buffers after some steps."""
    model = fresh(build)
    step = ws.compile(model, loss, adamw(model), batch, **options)
    for _ in range(steps):
        step(*batch)
    return [t.detach().clone() for t in model.state_dict().values()]


def same_as_reference(build: Any, loss: Any, batch: tuple[torch.Tensor, ...], **options: Any) -> None:
    planned, reference = (trained(build, loss, batch, level=level, **options) for level in (3, 0))
    for mine, theirs in zip(planned, reference, strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("name", ["binary_cross_entropy", "huber_loss", "smooth_l1_loss", "mse_loss", "l1_loss"])
def test_losses_that_reduce_in_their_kernel(name: str, reduction: str) -> None:
    function = getattr(F, name)

    def loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return function(model(x).sigmoid(), y, reduction=reduction).sum()

    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))

    same_as_reference(build, loss, (data(4, 5), data(4, 3).sigmoid()))


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.Module]):
        super().__init__()
        self.layer = kind(6, 6, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)[0]


@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, nn.LSTM])
def test_kernels_that_turn_a_tensor_in_place(kind: type[nn.Module]) -> None:
    same_as_reference(lambda: Recurrent(kind), squares, (data(4, 4, 6),))  # as many rows as positions: no shape tells


@pytest.mark.parametrize(
    "function",
    [
        lambda y: torch.fft.ifft(y).real + torch.fft.ihfft(y).imag.sum(),
        lambda y: torch.fft.rfft(y).abs(),
        lambda y: torch.stft(y.flatten(), 8, window=torch.ones(8), return_complex=True).abs(),
    ],
    ids=["ifft", "rfft", "stft"],
)
def test_views_that_lie_elsewhere(function: Any) -> None:
    same_as_reference(lambda: nn.Linear(4, 6), lambda m, x: function(m(x)).pow(2).sum(), (data(5, 4),))


def test_a_check_inside_a_kernel_still_raises() -> None:
    model = fresh(lambda: nn.Linear(3, 3))

    def loss(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return torch.linalg.cholesky(m(x) * 0 + x).sum()

    step = ws.compile(model, loss, sgd(model), (torch.eye(3),))
    step(torch.eye(3))
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(RuntimeError, match="positive"):
        step(-torch.eye(3))
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


class Swapping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)
        self.register_buffer("one", torch.tensor(1.0))
        self.register_buffer("two", torch.tensor(2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.one, self.two = self.two, self.one
        return self.layer(x) * self.one


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_buffers_that_swap_between_micro_batches(count: int) -> None:
    same_as_reference(Swapping, squares, (data(12, 4),), accumulate=count)


def test_averages_and_scale_are_those_of_the_checkpoint() -> None:
    model = fresh(lambda: nn.Linear(4, 4))
    step = ws.compile(model, squares, sgd(model), (data(2, 4),), ema=0.5)
    step(data(2, 4))
    kept = copy.deepcopy(step.state_dict())
    results = []
    for _ in range(2):
        step.load_state_dict(kept)
        for seed in range(3):
            step(data(2, 4, seed=seed))
        results.append(step.ema_state_dict())
    assert all(torch.equal(results[0][k], results[1][k]) for k in results[0])


@pytest.mark.parametrize("change", ["moved", "turned state", "turned weight"])
def test_memory_that_changes_behind_a_tensor(change: str) -> None:
    ends = []
    for level in (3, 0):
        model = fresh(lambda: nn.Linear(4, 4))
        optimizer = adamw(model)
        step = ws.compile(model, squares, optimizer, (data(2, 4),), level=level)
        for number in range(4):
            step(data(2, 4, seed=number))
            state = optimizer.state[model.weight]["exp_avg"]
            if number == 1 and change == "moved":
                state.data = state.data.clone() * 0.5
            elif number == 1 and change == "turned state":
                state.data = state.data.t()
            elif number == 1:
                model.weight.data = model.weight.data.t()
        ends.append((model.weight.detach().clone(), optimizer.state[model.weight]["exp_avg"].clone()))
    assert torch.equal(ends[0][0], ends[1][0]) and torch.equal(ends[0][1], ends[1][1])


def test_tensors_that_overlap_in_part_are_refused() -> None:
    class Overlapping(nn.Module):
        def __init__(self, apart: bool) -> None:
            super().__init__()
            memory = torch.ones(8)
            self.whole = nn.Parameter(memory[4:] if apart else memory)
            self.part = nn.Parameter(memory[:4])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x * self.part).sum() + self.whole.sum()

    for apart in (False, True):
        model = Overlapping(apart)
        if apart:
            ws.compile(model, lambda m, x: m(x), sgd(model), (data(4),))(data(4))
        else:
            with pytest.raises(InputError, match=r"(part and whole|whole and part) share some"):
                ws.compile(model, lambda m, x: m(x), sgd(model), (data(4),))


def test_counters_of_several_programs_stay_together() -> None:
    """Packed side by side by the first program, they are found there by the second."""
    from wholestep.runtime.counters import Counters

    model = fresh(lambda: nn.Linear(4, 4))
    optimizer = adamw(model)
    step = ws.compile(model, squares, optimizer, (data(2, 4),))
    step(data(2, 4))
    compiled = step._compiled
    buffers = [r.buffer for r in compiled.static.plan.results]
    made = [
        Counters(compiled.program, compiled.plan, compiled.numbers, buffers, optimizer, lambda: 0.0, {}, True)
        for _ in "ab"
    ]
    first, second = (c.vectors[0].memory for c in made)
    assert first.data_ptr() == second.data_ptr() == optimizer.state[model.weight]["step"].data_ptr()
    made[0].write([5.0] * len(compiled.static.plan.buffers))
    assert set(made[1].vectors[0].read()) == {5.0} == {float(s["step"]) for s in optimizer.state.values()}
