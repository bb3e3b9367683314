"""Each captured call knows one line of the user's: the same that the whole stack of torch would have given."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torch.fx.proxy
from torch import nn

from wholestep.capture import export
from wholestep.capture.capture import capture


def helper(x: torch.Tensor) -> torch.Tensor:
    return x.exp() + 1


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.norm(helper(self.layer(x)))) * 2


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = nn.functional.dropout(self.inner(x), 0.5)
        return (y * y).sum(1)


def mean(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).mean()  # (no `forward` of the user's is on the stack of the mean)


def lines() -> list[str]:
    return [f"{op.name} {op.loc}" for op in capture(Outer(), mean, (torch.randn(3, 4),)).function.walk()]


def test_lines_are_those_of_the_whole_stack(monkeypatch: pytest.MonkeyPatch) -> None:
    found = lines()
    here = [line for line in found if Path(__file__).name in line]
    assert len(here) > 5 and len({line.rpartition(":")[2] for line in here}) == 3  # one line of Inner, two of Outer
    monkeypatch.setattr(export, "user_lines_only", nullcontext)
    assert lines() == found


def test_torch_is_left_as_it_was() -> None:
    whole = torch.fx.proxy.CapturedTraceback
    with pytest.raises(ZeroDivisionError), export.user_lines_only():
        assert torch.fx.proxy.CapturedTraceback is not whole
        raise ZeroDivisionError
    assert torch.fx.proxy.CapturedTraceback is whole
