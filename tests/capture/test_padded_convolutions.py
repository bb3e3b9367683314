"""Convolutions of what was padded with zeros pad by themselves: the same training, without a padded copy."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import wholestep as ws
from tests.runtime.runs import data
from wholestep.ir.builtin import functions


class Padded(nn.Module):
    def __init__(self, conv: nn.Module, widths: tuple[int, ...], value: float):
        super().__init__()
        self.conv, self.widths, self.value = conv, widths, value

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(F.pad(x, self.widths, value=self.value))


def loss_of(output: torch.Tensor) -> torch.Tensor:
    return (output.sin() * torch.arange(output.shape[-1])).pow(2).mean()


@pytest.mark.parametrize(
    ("widths", "value", "window", "pads"),
    [
        ((2, 0), 0.0, {}, False),
        ((0, 1), 0.0, {"dilation": 3}, False),
        ((1, 2), 0.0, {"padding": 1}, False),
        ((3, 3), 0.0, {"stride": 2}, False),
        ((2, 0), 0.0, {"stride": 2}, True),  # results would begin between those asked for
        ((20, 0), 0.0, {}, True),  # half as many results again would be thrown away
        ((2, 2), 1.0, {}, True),
        ((-1, 2), 0.0, {}, True),
        ((1, 1, 0, 1), 0.0, {"in_channels": 4}, True),  # a channel of zeros
    ],
    ids=str,
)
def test_training_is_that_of_torch(widths: tuple[int, ...], value: float, window: dict[str, Any], pads: bool) -> None:
    torch.manual_seed(0)
    window = {"in_channels": 3, "out_channels": 4, "kernel_size": 3} | window
    model, twin = (Padded(nn.Conv1d(**window), widths, value) for _ in range(2))
    twin.load_state_dict(model.state_dict())
    mine, its = (torch.optim.SGD(m.parameters(), lr=0.01) for m in (model, twin))
    x = data(2, 3, 40)
    step = ws.compile(model, lambda model, x: loss_of(model(x)), mine, (x,))
    names = {op.name for function in functions(step.program()) for op in function.regions[0].block}
    assert ("step.pad" in names) == pads
    for _ in range(2):
        loss = loss_of(twin(x))
        its.zero_grad()
        loss.backward()
        its.step()
        assert float(step(x)) == pytest.approx(float(loss.detach()), rel=1e-5)
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
