"""Mixtures of experts by PyTorch's grouped products: they are one op of the program, and train as eager PyTorch does.

What PyTorch's own kernel leaves of empty groups on a CPU is whatever memory held: eager models here have a product for
each group.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import wholestep as ws
from wholestep.dialects.step.grouped import SPECS
from wholestep.ir import print_module

ROWS, WIDTH, INNER, EXPERTS = 24, 16, 24, 4
LABELS = torch.arange(ROWS) % 3
Product = Callable[..., torch.Tensor]


def per_group(x: torch.Tensor, y: torch.Tensor, offs: torch.Tensor | None = None) -> torch.Tensor:
    """What `F.grouped_mm` gives, by a product for each group."""
    if offs is None:
        return x @ y
    lengths = torch.diff(offs, prepend=offs.new_zeros(1)).tolist()
    if x.dim() == 3:
        return torch.cat([a @ b.t() for a, b in zip(x, y.t().split(lengths), strict=True)], 1)
    if y.dim() == 3:
        return torch.cat([a @ b for a, b in zip(x.split(lengths), y, strict=True)])
    return torch.stack([a.t() @ b for a, b in zip(x.t().split(lengths), y.split(lengths), strict=True)])


class Experts(nn.Module):
    """Each row goes to its two best experts: their matrices lie as rows read them, and turned around."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS)
        self.up = nn.Parameter(torch.randn(EXPERTS, INNER, WIDTH) * 0.3)
        self.down = nn.Parameter(torch.randn(EXPERTS, INNER, WIDTH) * 0.3)
        self.out = nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor, product: Product) -> torch.Tensor:
        weights, chosen = self.gate(x).softmax(-1).topk(2, -1)
        experts, order = torch.sort(chosen.reshape(-1))
        ends = (experts.unsqueeze(1) <= torch.arange(EXPERTS)).sum(0).to(torch.int32)
        rows = order // 2
        y = F.silu(product(x[rows], self.up.transpose(1, 2), offs=ends))
        y = product(y, self.down, offs=ends) * weights.reshape(-1)[order, None]
        return self.out(torch.zeros_like(x).index_add(0, rows, y))


class Sums(nn.Module):
    """A matrix per group of rows, of which one is empty."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(WIDTH, INNER), nn.Linear(WIDTH, ROWS)

    def forward(self, x: torch.Tensor, product: Product) -> torch.Tensor:
        found = product(self.one(x).t(), self.other(x), offs=torch.tensor([5, 5, ROWS], dtype=torch.int32))
        return found.tanh().mean(1).t()


class Columns(nn.Module):
    """Each group of columns by a matrix of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(2, 3, WIDTH))

    def forward(self, x: torch.Tensor, product: Product) -> torch.Tensor:
        return product(self.w, x.t(), offs=torch.tensor([7, ROWS], dtype=torch.int32)).t()


class Batches(nn.Module):
    """As many rows in each group."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(2, WIDTH, 3))

    def forward(self, x: torch.Tensor, product: Product) -> torch.Tensor:
        return product(x.view(2, ROWS // 2, WIDTH), self.w).flatten(0, 1)


def trained(make: type[nn.Module], **options: Any) -> tuple[list[float], list[float], ws.TrainStep]:
    """Losses of some steps, ours and eager's."""
    torch.manual_seed(3)
    model, x = make(), torch.randn(ROWS, WIDTH)
    twin = copy.deepcopy(model)

    def loss_fn(model: nn.Module, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(x, F.grouped_mm), labels)

    step = ws.compile(model, loss_fn, torch.optim.SGD(model.parameters(), lr=0.1), (x, LABELS), **options)
    optimizer, ours, theirs = torch.optim.SGD(twin.parameters(), lr=0.1), [], []
    for _ in range(5):
        ours.append(float(step(x, LABELS)))
        optimizer.zero_grad()
        loss = F.cross_entropy(twin(x, per_group), LABELS)
        loss.backward()
        optimizer.step()
        theirs.append(float(loss.detach()))
    return ours, theirs, step


@pytest.mark.parametrize("level", [0, 4])
@pytest.mark.parametrize("make", [Experts, Sums, Columns, Batches])
def test_they_train_as_eager_ones(make: type[nn.Module], level: int) -> None:
    ours, theirs, step = trained(make, level=level)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=0)
    assert not step.report().opaque and not step.report().traced
    text = print_module(step.program())
    if make is Experts:
        assert all(spec in text for spec in SPECS)
    assert ("step.grouped_contract" in text) == (make is not Batches)


def test_they_compute_in_16_bits_where_asked() -> None:
    ours, theirs, step = trained(Experts, precision="bf16")
    torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=0)
    lines = [line for line in print_module(step.program()).splitlines() if "step.grouped_contract" in line]
    assert len(lines) == 5 and all("bf16" in line and "xf32" not in line for line in lines)


def test_rows_of_no_group_are_zero_and_have_no_gradient() -> None:
    x, model = torch.randn(10, 4), nn.Module()
    model.w = nn.Parameter(torch.randn(2, 4, 3))
    before = model.w.detach().clone()

    def loss_fn(model: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = F.grouped_mm(x, model.w, offs=torch.tensor([3, 6], dtype=torch.int32))
        return y.square().sum(), y

    step = ws.compile(model, loss_fn, torch.optim.SGD([model.w], lr=0.5), (x,))
    _, y = step(x)
    wanted = torch.cat([x[:3] @ before[0], x[3:6] @ before[1]])
    torch.testing.assert_close(y, torch.cat([wanted, torch.zeros(4, 3)]))
    gradient = torch.stack([x[:3].t() @ wanted[:3], x[3:6].t() @ wanted[3:]])
    torch.testing.assert_close(model.w.detach(), before - gradient)
