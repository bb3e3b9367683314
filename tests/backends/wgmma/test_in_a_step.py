"""Regions around convolutions as a step has them, planned for a GPU that is not there, and run on a CPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("triton")

from bench import bytes as planning
from tests.backends.wgmma import host
from tests.backends.wgmma.test_windows import assert_right, tensors_of
from wholestep.backends.providers import Region
from wholestep.backends.wgmma import ways
from wholestep.backends.wgmma.windows import Convolution, product_of
from wholestep.transforms import again, tall_products, wide_products


class Net(nn.Module):
    """A residual block without its residual: a norm before and behind the convolution."""

    def __init__(self, stride: int) -> None:
        super().__init__()
        self.before, self.norm = nn.Conv2d(64, 64, 1, bias=False), nn.BatchNorm2d(64)
        self.middle, self.behind = nn.Conv2d(64, 64, 3, stride, 1, bias=False), nn.BatchNorm2d(64)
        self.last = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.norm(self.before(x)))
        return self.last(torch.relu(self.behind(self.middle(x))).mean((2, 3)))


@pytest.mark.parametrize("stride", [1, 2])
def test_statistics_and_sums_are_taken_along_and_right(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, stride: int
) -> None:
    for module in (tall_products, wide_products, ways):
        monkeypatch.setattr(module, "LEAST", 0)
    monkeypatch.setattr(ways, "FEW", 0)
    monkeypatch.setattr(again, "LEAST", 1024)
    found: dict[str, Region] = {}
    guess = planning.Guessed.guess

    def noted(self: Any, region: Region) -> Any:
        chosen = guess(self, region)
        if chosen.provider == "wgmma" and len(region.ops) > 1:
            found[region.key] = replace(region, device=torch.device("cpu"))
        return chosen

    monkeypatch.setattr(planning.Guessed, "guess", noted)
    torch.manual_seed(0)
    model = Net(stride)
    work: Any = SimpleNamespace(
        model=model,
        loss_fn=nn.CrossEntropyLoss(),
        batch=lambda seed, device: (torch.randn(12, 64, 14 * stride, 14 * stride), torch.randint(0, 10, (12,))),
        optimizer=lambda: (torch.optim.SGD(model.parameters(), lr=0.1), None),
    )
    planned = planning.planned(work)
    assert sum(launch.provider == "wgmma" for launch in planned.plan.launches) == 2
    sizes = []
    for number, region in enumerate(found.values()):
        product, tensors = product_of(region), tensors_of(region)
        assert isinstance(product, Convolution)
        for tensor in tensors[: len(region.operands)]:  # (so that no variance is negative)
            tensor.copy_(tensor.abs() + 0.5 if tensor.dim() == 1 else tensor)
        (tmp_path / str(number)).mkdir()
        host.run(product, tensors, tmp_path / str(number))
        assert_right(region, tensors, "bf16")
        sizes.append((product.parities, product.sums, len(product.reads), len(product.writes)))
    # statistics; sums of a gradient, with ReLU's mask from what the norm reads
    assert sorted(sizes) == [(1, 2, 0, 1), (stride**2, 2, 1, 1)]
