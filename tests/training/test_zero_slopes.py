"""Gradients where a formula divides by zero, since a spread or a norm is exactly 0: autograd's, by every provider."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import wholestep as ws
from wholestep.backends import cpp

INF = math.inf
ORDERS = (0.5, 1, 1.5, 2, 3, INF, -INF, -1)
WAYS = {"reference": {"level": 0}, "aten": {"providers": ["aten"]}, "cpp": {"providers": ["cpp", "aten"]}}


def rows() -> dict[str, torch.Tensor]:
    """Rows of equal numbers, whose mean is rounded, among others."""
    torch.manual_seed(0)
    equal = torch.randn(16, 1).expand(16, 1000)
    others = torch.randn(5, 1000)
    zeros = torch.cat([torch.zeros(2, 8), torch.randn(1, 8)])
    names = ["std", "std0", "std_mean", "sqrt", "length", "normalize", *(f"norm{p}" for p in ORDERS)]
    return {n.replace(".", "_"): torch.cat([equal, others]) if n.startswith("std") else zeros for n in names}


class Everything(nn.Module):
    """Each function of a tensor of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.x = nn.ParameterDict({name: nn.Parameter(x.clone()) for name, x in rows().items()})

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        x = self.x
        found = [x["std"].std(-1), x["std0"].std(-1, correction=0), torch.std_mean(x["std_mean"], -1)[0]]
        found += [x["sqrt"].abs().sqrt().sum(-1), torch.norm(x["length"], dim=-1)]
        found += [nn.functional.normalize(x["normalize"], dim=-1).sum(-1)]
        found += [torch.linalg.vector_norm(x[f"norm{p}".replace(".", "_")], p, dim=-1) for p in ORDERS]
        return sum((f * weight).sum() for f in found)  # type: ignore[return-value]


@pytest.mark.parametrize("way", WAYS)
def test_slopes_at_zero_are_autograds(way: str) -> None:
    if way == "cpp" and cpp.missing():
        pytest.skip(cpp.missing())
    weight = torch.tensor(1.5)
    twin, model = Everything(), Everything()
    step = ws.compile(model, None, torch.optim.SGD(model.parameters(), lr=1.0), (weight,), **WAYS[way])
    for x in (p for m in (model, twin) for name, p in m.x.items() if name.startswith("std")):
        with torch.no_grad():  # a row that is no numbers has no spread of 0
            x[-1], x[-2], x[-3, 500], x[-4, 7] = INF, math.nan, INF, math.nan
    twin(weight).backward()
    before = {name: x.detach().clone() for name, x in model.x.items()}
    step(weight)
    for name, x in model.x.items():
        gradient = twin.x[name].grad
        assert gradient is not None
        torch.testing.assert_close(x.detach(), before[name] - gradient, rtol=1e-5, atol=1e-6, equal_nan=True, msg=name)


def test_the_origin_has_no_angle() -> None:
    x = nn.Parameter(torch.tensor([0.0, 0.0, 3.0]))
    y = nn.Parameter(torch.tensor([0.0, 1.0, 4.0]))
    model = nn.ParameterList([x, y])
    step = ws.compile(
        model, lambda m, w: (torch.atan2(m[0], m[1]) * w).sum(), torch.optim.SGD([x, y], lr=1.0), (torch.ones(3),)
    )
    step(torch.ones(3))
    torch.testing.assert_close(x.detach(), torch.tensor([0.0, -1.0, 3.0 - 4 / 25]))
    torch.testing.assert_close(y.detach(), torch.tensor([0.0, 1.0, 4.0 + 3 / 25]))
