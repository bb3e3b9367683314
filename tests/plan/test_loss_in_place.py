"""The gradient of a loss over many classes is written over its logits, by kernels for CPUs too."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import wholestep as ws
from tests.runtime.runs import eager_step, fresh, sgd
from wholestep.dialects.move import verify_plan
from wholestep.plan import plan_to_module
from wholestep.plan.plan import Buffer

ROWS, LENGTH = 3, 8

OPTIONS: dict[str, dict[str, Any]] = {
    "mean": {},
    "sum": {"reduction": "sum"},
    "ignored": {"ignore_index": 2},
    "smoothed": {"label_smoothing": 0.1},
    "weighted": {"weight": True},
    "all": {"ignore_index": 2, "label_smoothing": 0.2, "weight": True},
}


class Language(nn.Module):
    """A head without a bias over an embedding; the loss sees the logits of all tokens as rows."""

    def __init__(self, classes: int, weight: bool = False, **options: Any) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(classes, 16), nn.Linear(16, classes, bias=False)
        self.register_buffer("weight", torch.rand(classes) + 0.1 if weight else None)
        self.options = options

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = self.head(torch.tanh(self.table(ids)))
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), self.weight, **self.options)


def run(model: nn.Module, ids: torch.Tensor, labels: torch.Tensor, **options: Any) -> tuple[ws.TrainStep, list[float]]:
    options = {"providers": ["aten", "cpp"], "tune": False, **options}
    step = ws.compile(model, lambda m, i, t: m(i, t), sgd(model), (ids, labels), **options)
    return step, [float(step(ids, labels)) for _ in range(3)]


def own(buffer: Buffer) -> bool:
    return buffer.space == "arena" and buffer.share == "own"


def written_over(step: ws.TrainStep, size: int) -> list[str]:
    """Who writes results of so many bytes over an operand."""
    plan = step.plan()
    sizes = [(x.provider, plan.buffers[x.writes[w]].type.bytes) for x in plan.launches for w, _ in x.in_place]
    return [provider for provider, bytes in sizes if bytes == size]


@pytest.mark.parametrize("classes", [37, 3001])
@pytest.mark.parametrize("name", OPTIONS)
def test_no_second_tensor_of_the_logits_size(name: str, classes: int) -> None:
    ids, labels = (
        torch.randint(0, classes, (ROWS, LENGTH), generator=torch.Generator().manual_seed(i)) for i in (0, 1)
    )
    labels[1, 3:5] = 2
    model = fresh(lambda: Language(classes, **OPTIONS[name]))
    eager = copy.deepcopy(model)
    step, losses = run(model, ids, labels)
    optimizer = sgd(eager)
    wanted = [eager_step(lambda m: m(ids, labels), eager, optimizer) for _ in range(3)]
    torch.testing.assert_close(losses, wanted, rtol=1e-5, atol=0)
    for (key, mine), theirs in zip(model.state_dict().items(), eager.state_dict().values(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6, msg=lambda m, key=key: f"{key}: {m}")
    verify_plan(plan_to_module(step.plan()))
    logits = ROWS * LENGTH * classes * 4
    assert [b.bytes for b in step.plan().buffers if own(b) and b.bytes >= logits and b.lifetime != "grad"] == [logits]
    assert written_over(step, logits) == ["cpp"]


def test_logits_that_are_read_again_stay() -> None:
    """An output of the step, or another loss of the same logits, needs them after the gradient is known."""

    def loss(model: nn.Module, ids: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = model.head(model.table(ids)).flatten(0, 1)
        return nn.functional.cross_entropy(logits, labels.flatten()), logits

    ids = torch.arange(ROWS * LENGTH).reshape(ROWS, LENGTH)
    model = fresh(lambda: Language(101))
    with torch.no_grad():
        wanted = model.head(model.table(ids)).flatten(0, 1)
    step = ws.compile(model, loss, sgd(model), (ids, ids), providers=["aten", "cpp"], tune=False)
    step(ids, ids)
    torch.testing.assert_close(step.last.outputs[1], wanted)


def test_classes_in_the_second_dimension() -> None:
    """As segmentation has them: rows that lie side by side in memory."""

    def loss(model: nn.Module, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(model(x), labels, label_smoothing=0.1)

    x, labels = torch.randn(2, 3, 9, 11), torch.randint(0, 19, (2, 9, 11))
    labels[0, 0] = -100
    model = fresh(lambda: nn.Conv2d(3, 19, 1))
    eager = copy.deepcopy(model)
    wanted = eager_step(lambda m: loss(m, x, labels), eager, sgd(eager))
    for options in ({}, {"forbid": ["channels_last *"]}):
        own = copy.deepcopy(model)
        step = ws.compile(own, loss, sgd(own), (x, labels), providers=["aten", "cpp"], tune=False, **options)
        assert float(step(x, labels)) == pytest.approx(wanted, rel=1e-5)
        torch.testing.assert_close(own.weight, eager.weight, rtol=1e-4, atol=1e-6)
        assert written_over(step, 2 * 19 * 99 * 4) == ["cpp"]


class Broadcast(nn.Module):
    """A product of factors with one dimension and with two: a gradient lies as a factor does, in another shape."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(16, 4), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.one(x).mean(0) * self.two(x).mean(0, keepdim=True)).sum()


@pytest.mark.parametrize("providers", [["aten"], ["aten", "cpp"]])
def test_pytorch_writes_over_its_own_shape_alone(providers: list[str]) -> None:
    model, x = fresh(Broadcast), torch.randn(8, 16)
    eager = copy.deepcopy(model)
    step = ws.compile(model, lambda m, x: m(x), sgd(model), (x,), providers=providers, tune=False)
    optimizer = sgd(eager)
    for _ in range(3):
        assert float(step(x)) == pytest.approx(eager_step(lambda m: m(x), eager, optimizer), rel=1e-5)
