"""Upsampling by whole factors, bilinear and to the nearest pixel: as ATen runs it and as loops, against PyTorch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import wholestep as ws
from tests.runtime.runs import data
from tests.transforms.test_windows import results
from wholestep.ir.builtin import functions

FACTORS = [(2, 2), (3, 1), (8, 5), (1, 16), (16, 16)]
#: what the gradients are called
GRADIENTS = {"step.upsample_grad", "step.upsample_cells_grad", "step.repeat_pixels_grad"}


def large(x: torch.Tensor, factors: tuple[int, int]) -> torch.Tensor:
    size = [n * f for n, f in zip(x.shape[2:], factors, strict=True)]
    return F.interpolate(x, size=size, mode="bilinear", align_corners=False)


@pytest.mark.parametrize("size", [(1, 1), (2, 3), (4, 1)], ids=str)
@pytest.mark.parametrize("factors", FACTORS, ids=str)
def test_loops_are_those_of_torch(factors: tuple[int, int], size: tuple[int, int]) -> None:
    x = data(1, 2, *size).double().requires_grad_()
    want = large(x, factors)
    (mine,) = results(lambda b, x: b.upsample(x, factors=factors), x.detach())
    torch.testing.assert_close(mine, want.detach(), rtol=1e-12, atol=1e-12)
    dy = data(*want.shape, seed=1).double()
    (gradient,) = torch.autograd.grad(want, x, dy)
    (mine,) = results(lambda b, dy: b.upsample_grad(dy, factors=factors), dy)
    torch.testing.assert_close(mine, gradient, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("size", [(1, 1), (2, 3), (4, 1)], ids=str)
@pytest.mark.parametrize("factors", FACTORS, ids=str)
def test_loops_repeat_pixels_as_torch_does(factors: tuple[int, int], size: tuple[int, int]) -> None:
    x = data(2, 3, *size).double().requires_grad_()
    want = F.interpolate(x, scale_factor=factors, mode="nearest")
    (mine,) = results(lambda b, x: b.repeat_pixels(x, factors=factors), x.detach())
    assert torch.equal(mine, want.detach())
    dy = data(*want.shape, seed=1).double()
    (gradient,) = torch.autograd.grad(want, x, dy)
    (mine,) = results(lambda b, dy: b.repeat_pixels_grad(dy, factors=factors), dy)
    torch.testing.assert_close(mine, gradient, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("size", [(1, 1), (2, 3), (4, 1)], ids=str)
@pytest.mark.parametrize("factors", [(2, 2), (4, 5), (8, 4), (16, 16)], ids=str)
def test_cells_share_out_what_torch_does(factors: tuple[int, int], size: tuple[int, int]) -> None:
    x = data(1, 2, *size).double().requires_grad_()
    y = large(x, factors)
    dy = data(*y.shape, seed=1).double()
    (gradient,) = torch.autograd.grad(y, x, dy)
    parts = results(lambda b, dy: list(b.upsample_shares(dy, factors=factors)), dy)
    before, above, left, after = (part.sum((2, 4)) for part in parts)
    mine = before[:, 1:, 1:] + above[:, 1:, :-1] + left[:, :-1, 1:] + after[:, :-1, :-1]
    torch.testing.assert_close(mine.movedim(-1, 1), gradient, rtol=1e-12, atol=1e-12)


class Segments(nn.Module):
    def __init__(self, **how: object):
        super().__init__()
        self.conv, self.how = nn.Conv2d(3, 5, 3, padding=1), how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.interpolate(self.conv(x), **{"mode": "bilinear", **self.how})  # type: ignore[arg-type]


def test_what_is_summed_by_cells() -> None:
    """By large factors, and where the gradient is computed from the enlarged image and little else."""
    x = data(2, 3, 6, 4)

    def gradients(loss: Any, target: torch.Tensor, factor: int) -> set[str]:
        model = Segments(scale_factor=factor)
        step = ws.compile(model, loss, torch.optim.SGD(model.parameters(), lr=0.1), (x, target))
        return GRADIENTS & {op.name for function in functions(step.program()) for op in function.regions[0].block}

    labels = torch.zeros(2, 48, 32, dtype=torch.int64)
    assert gradients(F.cross_entropy, labels, 8) == {"step.upsample_cells_grad"}
    assert gradients(F.cross_entropy, labels[:, :12, :8], 2) == {"step.upsample_grad"}
    assert gradients(F.mse_loss, data(2, 5, 48, 32), 8) == {"step.upsample_grad"}


@pytest.mark.parametrize(
    ("how", "ours"),
    [
        ({"size": (24, 12)}, True),
        ({"scale_factor": 2}, True),
        ({"scale_factor": (4.0, 1.0)}, True),
        ({"scale_factor": (8.0, 5.0)}, True),
        ({"scale_factor": (3.0, 1.0), "mode": "nearest"}, True),
        ({"size": (24, 12), "mode": "nearest"}, True),
        ({"scale_factor": 2.1, "mode": "nearest"}, False),
        ({"scale_factor": 2, "mode": "nearest-exact"}, False),
        ({"size": (24, 12), "align_corners": True}, False),
        ({"scale_factor": 1.5}, False),
        ({"scale_factor": 2.1}, False),  # 6 and 4 become 12 and 8, but not by 2
        ({"size": (3, 8)}, False),
    ],
    ids=str,
)
def test_training_is_that_of_torch(how: dict[str, object], ours: bool) -> None:
    x = data(2, 3, 6, 4)
    torch.manual_seed(0)
    model = Segments(**how)
    target = torch.randint(0, 5, (2, *model(x).shape[2:]))
    twin = Segments(**how)
    twin.load_state_dict(model.state_dict())
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, twin)]
    step = ws.compile(model, F.cross_entropy, optimizers[0], (x, target))
    names = {op.name for function in functions(step.program()) for op in function.regions[0].block}
    assert bool({"step.upsample", "step.repeat_pixels"} & names) == bool(GRADIENTS & names) == ours
    for _ in range(2):
        loss = F.cross_entropy(twin(x), target)
        optimizers[1].zero_grad()
        loss.backward()
        optimizers[1].step()
        assert float(step(x, target)) == pytest.approx(float(loss.detach()), rel=1e-5)
    for mine, want in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine, want, rtol=1e-5, atol=1e-6)
