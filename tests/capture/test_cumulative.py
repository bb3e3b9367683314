"""BatchNorm(momentum=None): running statistics are the mean over all batches, as in eager PyTorch."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import wholestep as ws


@pytest.mark.parametrize("options", [{"level": 0}, {}, {"accumulate": 2}], ids=str)
def test_statistics_are_those_of_eager_over_five_steps(options: dict[str, int]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, momentum=None), nn.Flatten(), nn.Linear(64, 5))
    twin = copy.deepcopy(model)
    forward = nn.BatchNorm2d.forward
    batches = [(torch.randn(4, 3, 6, 6) * (i + 1) + i, torch.randint(5, (4,))) for i in range(5)]
    step = ws.compile(model, F.cross_entropy, torch.optim.SGD(model.parameters(), 0.1), batches[0], **options)
    assert nn.BatchNorm2d.forward is forward
    optimizer, parts = torch.optim.SGD(twin.parameters(), 0.1), options.get("accumulate", 1)
    for x, target in batches:
        step(x, target)
        optimizer.zero_grad()
        for some, goal in zip(x.chunk(parts), target.chunk(parts), strict=True):
            (F.cross_entropy(twin(some), goal) / parts).backward()
        optimizer.step()
    assert int(model[1].num_batches_tracked) == 5 * parts
    for mine, other in zip(model.state_dict().values(), twin.state_dict().values(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-5)


def test_a_layer_that_does_not_train_is_left_alone() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, momentum=None))
    model[1].eval()
    x = torch.randn(6, 3)
    step = ws.compile(model, lambda model, x: model(x).square().mean(), torch.optim.SGD(model.parameters(), 0.1), (x,))
    step(x)
    assert int(model[1].num_batches_tracked) == 0
    assert torch.equal(model[1].running_mean, torch.zeros(4))
