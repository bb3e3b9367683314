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
from tests.backends.wgmma.test_wgmma import assert_right
from tests.backends.wgmma.test_windows import tensors_of
from wholestep.backends.providers import Region
from wholestep.backends.wgmma import ways
from wholestep.backends.wgmma.products import Product
from wholestep.backends.wgmma.windows import Convolution, product_of
from wholestep.plan.planner import Planned
from wholestep.transforms import again, side_by_side, tall_products, through_norm, wide_products


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


class Widening(nn.Module):
    """A product that widens before a norm: its gradient is that of the norm beside what the product read."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(64, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64)
        self.widen, self.behind = nn.Conv2d(64, 256, 1, bias=False), nn.BatchNorm2d(256)
        self.next, self.last = nn.Conv2d(256, 64, 1, bias=False), nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.behind(self.widen(torch.relu(self.norm(self.first(x))))))
        return self.last(torch.relu(self.next(x)).mean((2, 3)))


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (tall_products, wide_products, side_by_side, ways):
        monkeypatch.setattr(module, "LEAST", 0)
    monkeypatch.setattr(ways, "FEW", 0)
    monkeypatch.setattr(again, "LEAST", 1024)


def planned(
    model: nn.Module, names: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, size: int = 14
) -> tuple[Planned, list[Region]]:
    """The step of a model, and the regions with an op of these names that `wgmma` runs, as those of a CPU."""
    found: dict[str, Region] = {}
    guess = planning.Guessed.guess

    def noted(self: Any, region: Region) -> Any:
        chosen = guess(self, region)
        if chosen.provider == "wgmma" and any(op.name in names for op in region.ops):
            found[region.key] = replace(region, device=torch.device("cpu"))
        return chosen

    monkeypatch.setattr(planning.Guessed, "guess", noted)
    work: Any = SimpleNamespace(
        model=model,
        loss_fn=nn.CrossEntropyLoss(),
        batch=lambda seed, device: (torch.randn(12, 64, size, size), torch.randint(0, 10, (12,))),
        optimizer=(torch.optim.SGD(model.parameters(), lr=0.1), None),
    )
    return planning.planned(work), list(found.values())


def assert_run(region: Region, folder: Path) -> Product:
    product, tensors = product_of(region), tensors_of(region)
    for tensor in tensors[: len(region.operands)]:  # (so that no variance is negative)
        tensor.copy_(tensor.abs() + 0.5 if tensor.dim() == 1 else tensor)
    folder.mkdir()
    host.run(product, tensors, folder)
    assert_right(region, tensors, "bf16")
    return product


@pytest.mark.parametrize("stride", [1, 2])
def test_statistics_and_sums_are_taken_along_and_right(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, stride: int
) -> None:
    torch.manual_seed(0)
    step, found = planned(Net(stride), ("step.conv", "step.conv_input_grad"), monkeypatch, 14 * stride)
    assert sum(launch.provider == "wgmma" for launch in step.plan.launches) == 2
    sizes = []
    for number, region in enumerate(found):
        product = assert_run(region, tmp_path / str(number))
        assert isinstance(product, Convolution)
        sizes.append((product.parities, product.sums, len(product.reads), len(product.writes)))
    # statistics; sums of a gradient, with ReLU's mask from what the norm reads
    assert sorted(sizes) == [(1, 2, 0, 1), (stride**2, 2, 1, 1)]


def test_what_a_product_read_is_not_copied_beside_a_gradient(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for module in (tall_products, ways):  # as if every product kept tensor cores busy
        monkeypatch.setattr(module, "RIDGE", 0)
    for name in ("LEAST", "SMALL"):
        monkeypatch.setattr(through_norm, name, 0)
    torch.manual_seed(0)
    step, found = planned(Widening(), ("step.concat",), monkeypatch)
    assert not any(launch.name == "step.concat" for launch in step.plan.launches)
    for number, region in enumerate(found):  # as it was measured, and as it lies in the end
        product = assert_run(region, tmp_path / str(number))
        assert [side.columns for side in product.sides] == [256, 64]
        assert (product.sums, len(product.reads), len(product.writes)) == (2, 2, 1)
    assert found
