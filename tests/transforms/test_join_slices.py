"""`join_slices`: gradients of all slices of a tensor are one concatenation, and the same numbers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from tests.plan.networks import Case
from tests.runtime.runs import data
from wholestep.ir.verify import verify
from wholestep.runtime.executor import Executable
from wholestep.transforms import join_slices  # noqa: F401  (it registers)
from wholestep.transforms.opportunity import take, transformations

Function = Callable[[torch.Tensor], torch.Tensor]


class Sliced(nn.Module):
    """A linear layer whose result is read in slices."""

    def __init__(self, function: Function):
        super().__init__()
        self.layer, self.function = nn.Linear(6, 12), function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self.layer(x))


def chunks(y: torch.Tensor) -> torch.Tensor:
    a, b, c = y.chunk(3, -1)
    return torch.sin(a) * torch.cos(b) + c


def unbound(y: torch.Tensor) -> torch.Tensor:
    a, b, c = y.view(4, 5, 3, 2, 2).permute(2, 0, 3, 1, 4).unbind(0)
    return torch.sin(a) * torch.cos(b) + c


def with_others(y: torch.Tensor) -> torch.Tensor:
    return chunks(y).sum() + torch.sin(y)


def case_of(function: Function) -> Case:
    torch.manual_seed(0)
    return Case((Sliced(function), lambda model, x: model(x).square().sum(), (data(4, 5, 6),)))


def names(case: Case) -> list[str]:
    return [op.name.removeprefix("step.") for op in case.program.function.regions[0].block]


@pytest.mark.parametrize("function, views", [(chunks, 0), (unbound, 3), (with_others, 0)])
def test_all_slices_become_one_concatenation(function: Function, views: int) -> None:
    case = case_of(function)
    before = Executable(case.program.function, "cpu", case.numbers)([x.clone() for x in case.inputs])
    turns = names(case).count("transpose")
    (found,) = transformations()["join_slices"].find(case.program.module)
    assert not found.why_not and found.change.bytes == -2 * 4 * (4 * 5 * 12 * 4)
    assert take(case.program.module, ("join_slices",)) == [found.key]
    verify(case.program.module)
    assert names(case).count("concat") == 1 and "slice_grad" not in names(case)
    assert names(case).count("transpose") - turns == views - bool(views)  # of every part, instead of one of the whole
    after = Executable(case.program.function, "cpu", case.numbers)([x.clone() for x in case.inputs])
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize(
    "function, reason",
    [
        (lambda y: torch.sin(y[..., :4]) * y[..., 4:8], "the slices end at 8 of 12"),
        (lambda y: torch.sin(y[..., :4]) * y[..., 8:], "the slices leave a gap at 8"),
        (lambda y: torch.sin(y[..., :8]) * y[..., 4:], "the slices overlap at 4"),
    ],
)
def test_why_not(function: Function, reason: str) -> None:
    case = case_of(function)
    (found,) = transformations()["join_slices"].find(case.program.module)
    assert found.why_not == reason
    assert take(case.program.module, ("join_slices",)) == []
