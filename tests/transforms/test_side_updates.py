"""`side-updates`: where updates may run beside backward, and why not elsewhere."""

from __future__ import annotations

from typing import Any

import pytest

import wholestep as ws
from tests.runtime.runs import Perceptron, adamw, data, fresh, squares
from wholestep.errors import InputError
from wholestep.ir.builtin import functions
from wholestep.transforms import side_updates
from wholestep.transforms.opportunity import Opportunity, transform
from wholestep.transforms.side_updates import SideUpdates, early_updates, runs_beside, updates_of


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(side_updates, "has_gpu", lambda: True)


def compiled(**options: Any) -> ws.TrainStep:
    model = fresh(Perceptron)
    return ws.compile(model, squares, adamw(model), (data(6, 4),), level=1, providers=["aten"], **options)


def found(step: ws.TrainStep) -> list[Opportunity]:
    return [o for o in step.opportunities() if o.transformation == "side-updates"]


def test_updates_of_late_layers_can_start_early() -> None:
    """All but those whose gradients end backward; it is never taken by itself."""
    step = compiled()
    (one,) = found(step)
    assert not one.why_not and "/update/adam" in one.site and step.recipe == []
    (function,) = functions(step.program())
    early, every = early_updates(function), updates_of(function)
    assert 0 < len(early) < len(every)
    assert transform(step.program(), force=["side-updates *"]) == [one.key]
    assert runs_beside(function) and SideUpdates().find(step.program()) == []


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"clip_norm": 1.0}, "clipping by the norm of all gradients needs the last of them first"),
        ({"accumulate": 2}, "gradients are sums over micro-batches"),
        ({"skip_nonfinite": True}, "steps with a gradient that is not finite are skipped"),
    ],
)
def test_what_needs_every_gradient_stays_at_the_end(options: dict[str, Any], reason: str) -> None:
    (one,) = found(compiled(**options))
    assert one.why_not.startswith("no update can start before backward is over: ") and reason in one.why_not


def test_it_is_for_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that lies on the CPU refuses it when it is planned; where there is no GPU it is not offered."""
    with pytest.raises(InputError, match="on a second stream of a GPU; on a CPU nothing changes"):
        compiled(force=["side-updates *"])
    monkeypatch.setattr(side_updates, "has_gpu", lambda: False)
    with pytest.raises(InputError, match="is not possible: there is no GPU here"):
        compiled(force=["side-updates *"])
