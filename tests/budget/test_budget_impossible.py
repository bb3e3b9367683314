"""What the error says where no choice fits: what is true, in the user's names."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import wholestep as ws
from wholestep.budget.fit import close, may_be_leaner
from wholestep.budget.trials import MARK
from wholestep.errors import MemoryBudgetError


def layers() -> nn.Module:
    return nn.Sequential(*[part for _ in range(2) for part in (nn.Linear(16, 16), nn.Tanh(), nn.LayerNorm(16))])


def message(model: nn.Module, loss_fn, batch, budget, **options) -> str:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(MemoryBudgetError) as caught:
        ws.compile(model, loss_fn, optimizer, batch, memory_budget=budget, tune=False, **options)
    return str(caught.value)


@pytest.mark.parametrize("providers", [["aten"], ["aten", "cpp"]])
@pytest.mark.parametrize("forbid", [["recompute *", "renormalize *"], ["recompute", "renormalize"]])
def test_where_all_is_forbidden_it_says_so(providers, forbid):
    batch = torch.randn(64, 16), torch.randn(64, 16)
    text = message(layers(), nn.functional.mse_loss, batch, 1, forbid=forbid, providers=providers)
    assert MARK.search(text) is None and re.search(r"made by \w+ in (\d|loss_fn)", text)
    assert "nothing computed again in backward, since what could be is forbidden or does not help" in text
    assert "or forbid less" in text and "all that helps" not in text


@pytest.mark.parametrize("providers", [["aten"], ["aten", "cpp"]])
def test_where_nothing_helps_it_says_so(providers):
    model, x = nn.Linear(8, 100), torch.randn(200, 8)
    text = message(model, lambda m, x: m(x).tanh().sum(), (x,), 0.6, providers=providers)
    assert MARK.search(text) is None and "forbid" not in text
    assert "with nothing computed again in backward, since that would not help" in text


def test_where_something_helps_it_is_computed_again():
    batch = torch.randn(64, 16), torch.randn(64, 16)
    text = message(layers(), nn.functional.mse_loss, batch, 1, providers=["aten"])
    assert "with all that helps computed again in backward" in text and "forbid" not in text
    text = message(layers(), nn.functional.mse_loss, batch, 1, providers=["aten"], forbid=["recompute step/1/*"])
    assert "with all that helps and is not forbidden computed again" in text and "or forbid less" in text


def test_only_ways_that_may_need_the_least_are_looked_at_closely():
    def way(peak):
        solver = SimpleNamespace(leanest=lambda: SimpleNamespace(choice=SimpleNamespace(again=frozenset({1}))))
        return SimpleNamespace(fitter=SimpleNamespace(solver=solver, peak=lambda again: peak))

    ways = [way(130), way(104), way(100), way(111)]
    assert close(ways) == ways[1:3]


@pytest.mark.parametrize(
    ("beside", "allowed", "tried"), [(6, 10, True), (4, 10, False), (4, 97, True), (4, 95, False), (0, 10, False)]
)
def test_kernels_are_left_out_where_they_take_much(beside, allowed, tried):
    """The step needs 100: a kernel's memory counts where it is a twentieth of that, or all that is missing."""
    buffers = [SimpleNamespace(lifetime=kind, bytes=n) for kind, n in (("activation", 50), ("workspace", beside))]
    assert may_be_leaner(SimpleNamespace(plan=SimpleNamespace(buffers=buffers), peak=100), allowed) is tried


class Recurrent(nn.Module):
    """What is computed again takes as much as it saves: the peak is in the update."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.out = nn.GRUCell(8, 16), nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = x.new_zeros(x.shape[0], 16)
        for t in range(x.shape[1]):
            state = self.cell(x[:, t], state)
        return self.out(state)


def test_a_least_that_nothing_lowers_is_the_step_as_it_is():
    torch.manual_seed(0)
    model, batch = Recurrent(), (torch.randn(8, 6, 8), torch.randint(0, 3, (8,)))
    optimizer = torch.optim.Adam(model.parameters(), amsgrad=True)
    options = {"providers": ["aten"], "skip_nonfinite": True}
    peak = ws.compile(model, nn.functional.cross_entropy, optimizer, batch, **options).plan().peak
    with pytest.raises(MemoryBudgetError, match=f"memory_budget={peak} or more") as caught:
        ws.compile(model, nn.functional.cross_entropy, optimizer, batch, memory_budget=0.85, **options)
    assert "with nothing computed again in backward, since that would not help" in str(caught.value)
