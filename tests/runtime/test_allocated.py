"""What a provider's kernels make by themselves on a CPU is seen in the first step, named, and looked for no more."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import wholestep as ws
from tests.runtime.runs import data, fresh, sgd, squares
from wholestep.backends.kernels import Spec
from wholestep.backends.providers import Offer, Provider, Region, forget_provider, register_provider
from wholestep.ir.core import Op
from wholestep.plan.plan import Launch
from wholestep.runtime.allocated import SLACK, Allocated
from wholestep.runtime.calls import Counted, Late
from wholestep.runtime.static import StaticStep

MANY = 1 << 20  # elements: 4 MiB


class Greedy(Provider):
    """Runs a tanh with a large tensor of its own, or with one that it asked for."""

    name = "greedy"
    asks = False

    def takes(self, op: Op) -> bool:
        return op.name == "step.tanh"

    def claims(self, region: Region) -> str:
        return "" if [op.name for op in region.ops] == ["step.tanh"] else "it is no tanh"

    def offers(self, region: Region) -> list[Offer]:
        asked = (Spec((MANY,), (1,), torch.float32),) if self.asks else ()
        return [Offer(f"asks: {self.asks}", f"{self.name} {self.asks} {region.key}", asked, made=region)]

    def build(self, offers, report=None):
        return {offer.key: run for offer in offers}


def run(x: torch.Tensor, y: torch.Tensor, wide: torch.Tensor | None = None) -> None:
    wide = torch.ones(MANY) if wide is None else wide.fill_(1.0)
    torch.tanh(x, out=y)
    y.mul_(wide[0])


@pytest.fixture
def greedy() -> Iterator[type[Greedy]]:
    """The provider "greedy" is known while a test runs."""
    yield register_provider(Greedy)
    forget_provider("greedy")


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def start(providers: tuple[str, ...] = ("greedy",), **options) -> ws.TrainStep:
    net = fresh(model)
    return ws.compile(net, squares, sgd(net), (data(6, 4),), providers=list(providers), **options)


def static_of(step: ws.TrainStep) -> StaticStep:
    assert step._compiled.static is not None
    return step._compiled.static


def counted(step: ws.TrainStep) -> int:
    bound = static_of(step).bound
    assert bound is not None
    calls = [call.call if isinstance(call, Late) else call for call, _, _ in bound.calls]
    return sum(isinstance(call, Counted) for call in calls)


@pytest.mark.parametrize("options", [{}, {"accumulate": 2}], ids=["whole", "micro-batches"])
def test_what_a_provider_makes_is_named_once_and_changes_nothing(greedy, options):
    step, other = start(**options), start(("aten",), **options)
    assert static_of(step).allocated.bytes == 0
    with pytest.warns(UserWarning) as caught:
        losses = [float(step(data(6, 4))) for _ in range(3)]
    (text,) = [str(w.message) for w in caught if "greedy" in str(w.message)]
    (launch,) = {p.name for plan in (step.plan(), *step.plan().bodies) for p in plan.launches if p.provider == "greedy"}
    assert text.startswith(f"provider 'greedy' makes 4.2 MB of its own while it runs {launch} of layer 1: ")
    assert "Try: ask for that memory as scratch= of the Offer (docs/kernels.md" in text
    found = static_of(step).allocated
    assert list(found.unplanned) == [launch] and 4 * MANY <= found.unplanned[launch] < 4 * MANY + SLACK
    assert found.bytes == found.unplanned[launch] and counted(step) == 0
    assert losses == [float(other(data(6, 4))) for _ in range(3)]


def test_memory_that_was_asked_for_is_planned(greedy, monkeypatch):
    monkeypatch.setattr(Greedy, "asks", True)
    step = start()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(data(6, 4))
    assert static_of(step).allocated.unplanned == {} and static_of(step).allocated.bytes < SLACK
    assert step.plan().arena >= 4 * MANY


def test_a_step_under_a_profiler_is_not_watched(greedy):
    step = start()
    with torch.autograd.profiler.profile(profile_memory=True) as profile:
        step(data(6, 4))
    assert any(event.name == "aten::tanh" for event in profile.function_events)
    assert static_of(step).allocated.bytes == counted(step) == 0


def test_an_error_of_a_kernel_ends_the_watching(greedy, monkeypatch):
    monkeypatch.setattr(Greedy, "asks", True)
    step = start()
    monkeypatch.setattr(torch.Tensor, "mul_", lambda *given: 1 / 0)
    with pytest.raises(ws.WholestepError, match="division by zero"):
        step(data(6, 4))
    monkeypatch.undo()
    assert not torch.autograd._profiler_enabled()
    step(data(6, 4))


def test_what_stays_is_no_surprise_of_every_step():
    found, launch = Allocated(), Launch(0, (), (), "mine", name="step.cos", makes=SLACK)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found.note(launch, 9 * SLACK, 8 * SLACK)  # kept by whoever made it
        found.note(launch, 2 * SLACK, -SLACK)  # as much as is known, and what the allocator rounds up
        found.note(None, 5 * SLACK, 0)  # not the program's own
    assert found.bytes == 13 * SLACK and found.unplanned == {}
    with pytest.warns(UserWarning, match=r"'mine' makes 3.1 MB .* step.cos of layer \(none\)"):
        found.note(launch, 3 * SLACK, 0)
    assert found.unplanned == {"step.cos": 2 * SLACK}
