"""Each captured call knows one line of the user's: the same that the whole stack of torch would have given."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

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


@torch.enable_grad()
def mean(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    loss = helper(model(x))
    return loss.mean()


def lines(loss_fn: Any = mean) -> list[str]:
    return [f"{op.name} {op.loc}" for op in capture(Outer(), loss_fn, (torch.randn(3, 4),)).function.walk()]


def test_lines_are_those_of_the_whole_stack(monkeypatch: pytest.MonkeyPatch) -> None:
    found = lines()
    first = mean.__wrapped__.__code__.co_firstlineno
    loss = [line for line in found if line.endswith((f":{first + 2}", f":{first + 3}"))]
    assert [line.split()[0] for line in loss] == ["step.exp", "step.constant", "step.add", "step.mean"]
    here = [line for line in found if Path(__file__).name in line and line not in loss]
    assert len(here) > 5 and len({line.rpartition(":")[2] for line in here}) == 3  # one line of Inner, two of Outer
    monkeypatch.setattr(export, "user_lines_only", nullcontext)  # it has no lines of loss functions
    whole = lines()
    assert [line for line in found if line not in loss] == [line for line in whole if "export.py" not in line]
    assert sum("export.py" in line for line in whole) == len(loss)


def test_losses_of_torch_are_at_lines_of_torch() -> None:
    batch = (torch.randn(3, 4), torch.randn(3, 4))
    for loss_fn, file in ((nn.functional.mse_loss, "functional.py"), (nn.MSELoss(), "loss.py")):
        ops = capture(nn.Linear(4, 4), loss_fn, batch).function.regions[0].block
        assert {Path(op.loc.file).name for op in ops if not op.definition.terminator} == {"linear.py", file}


def test_torch_is_left_as_it_was() -> None:
    whole = torch.fx.proxy.CapturedTraceback
    with pytest.raises(ZeroDivisionError), export.user_lines_only():
        assert torch.fx.proxy.CapturedTraceback is not whole
        raise ZeroDivisionError
    assert torch.fx.proxy.CapturedTraceback is whole
