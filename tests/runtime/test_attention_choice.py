"""The choice of attention kernels in a whole step: before the plan, in the report, made again for a saved step."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

import wholestep as ws
from wholestep.backends import attentions


class Attends(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        return self.out(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


def loss_fn(model, x):
    return model(model(x)).square().mean()


def compiled(**options):
    torch.manual_seed(0)
    model = Attends()
    return ws.compile(model, loss_fn, torch.optim.SGD(model.parameters(), lr=0.1), (torch.randn(3, 10, 16),), **options)


def kernels(step) -> set[str]:
    return {op.attributes.get("kernel", "") for op in step.program().walk() if op.name.startswith("step.attention")}


@pytest.fixture
def clock(monkeypatch, tmp_path):
    """Seconds by kernel, instead of a real clock."""
    seconds = {"flash": 1e-3, "math": 2e-3}
    monkeypatch.setenv("WHOLESTEP_CACHE", str(tmp_path))
    names: list[str] = []
    way = attentions.way_by

    def noted(name, op):
        names.append(name)
        return way(name, op)

    monkeypatch.setattr(attentions, "way_by", noted)
    monkeypatch.setattr(attentions, "timed_on", lambda call, device: seconds[names[-1]])
    return seconds


def test_the_step_runs_what_was_measured(clock, monkeypatch, tmp_path):
    x = torch.randn(3, 10, 16)
    own = compiled()
    assert kernels(own) == {""}
    line = next(line for line in str(own.report()).splitlines() if "q 3x2x10x8" in line)
    assert "2 x q 3x2x10x8 f32, causal" in line and "flash, 1,000.0 us forward and backward; math 2,000.0 us" in line
    losses = [float(own(x)) for _ in range(3)]
    monkeypatch.setenv("WHOLESTEP_CACHE", str(tmp_path / "other"))
    clock["math"] = 1e-4
    other = compiled()
    assert kernels(other) == {"math"}
    assert json.loads(other.report().rendered("json"))["attention"][0]["kernel"] == "math"
    assert [float(other(x)) for _ in range(3)] == pytest.approx(losses, rel=1e-5)
    assert kernels(compiled(tune=False)) == {""} and kernels(compiled(memory_budget="1GB")) == {""}
    path = tmp_path / "a.step"
    other.save(path)
    monkeypatch.setenv("WHOLESTEP_CACHE", str(tmp_path / "third"))  # as on another machine
    clock["math"] = 1e-2
    again = ws.load(path, other.model, loss_fn, other.optimizer)
    assert kernels(again) == {""} and again.report().attention[0].kernel == "flash"
