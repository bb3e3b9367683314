"""What a user asks of `compute_again`: it is listed with its bytes, forced, forbidden, recorded and replayed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import wholestep as ws
from wholestep.backends import cpp
from wholestep.errors import InputError
from wholestep.transforms import again

pytestmark = pytest.mark.skipif(bool(cpp.missing()), reason=cpp.missing())
X, Y = torch.randn(4096, 16, generator=torch.Generator().manual_seed(5)), torch.arange(4096) % 3
#: both are needed for the sums of BatchNorm's backward and, point by point, after those
SILU = "compute_again step/2/backward/silu_grad#0 into step/1/backward/mul#7"
RELU = "compute_again step/5/backward/select#0 into step/4/backward/mul#6"


def network() -> nn.Module:
    first = nn.Linear(16, 32), nn.BatchNorm1d(32), nn.SiLU()
    return nn.Sequential(*first, nn.Linear(32, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 3))


def compiled(**options: Any) -> ws.TrainStep:
    torch.manual_seed(0)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"providers": ["aten", "cpp"], "tune": False} | options
    return ws.compile(model, nn.CrossEntropyLoss(), optimizer, (X, Y), **options)


def losses(step: ws.TrainStep) -> list[float]:
    return [float(step(X, Y)) for _ in range(3)]


def done(step: ws.TrainStep) -> list[str]:
    return [line for line in step.recipe if line.startswith("compute_again ")]


def launches(step: ws.TrainStep) -> list[Any]:
    return [(x.name, x.provider, x.reads, x.writes) for x in step.plan().launches]


def listed(step: ws.TrainStep) -> dict[str, Any]:
    return {o.key: o for o in step.opportunities() if o.transformation == "compute_again"}


def eager_losses() -> list[float]:
    torch.manual_seed(0)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(X), Y)
        loss.backward()
        optimizer.step()
        found.append(float(loss.detach()))
    return found


def test_it_is_listed_with_the_bytes_that_it_saves() -> None:
    """Tensors of half a megabyte are left alone unless they are asked for."""
    plain = compiled()
    assert done(plain) == [] and {SILU, RELU} <= listed(plain).keys()
    forced = compiled(force=[SILU])
    assert done(forced) == [SILU] and SILU not in listed(forced) and RELU in listed(forced)
    moved = [step.report().movement.ledger.total for step in (plain, forced)]
    assert not listed(plain)[SILU].why_not and listed(plain)[SILU].change.bytes == moved[1] - moved[0] < 0
    assert losses(forced) == pytest.approx(eager_losses(), rel=1e-5)
    assert any("compute_again" in line and "silu_grad#0" in line for line in str(forced.report()).splitlines())


def test_near_misses_say_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(again, "OPS", 0)
    found = {key: o.why_not for key, o in listed(compiled()).items()}
    (mean,) = [why for key, why in found.items() if key.startswith("compute_again step/4/forward/add#1 into")]
    assert mean == "it is read in another part of the step"
    (share,) = [why for key, why in found.items() if key.startswith("compute_again step/loss_fn/backward/mul#0 into")]
    assert share == "it is not made by a few cheap ops from what is in memory"


def test_what_has_to_be_written_for_it_is_counted() -> None:
    """The share of each row is computed from their number, which its kernel then writes."""
    plain = compiled()
    (share,) = [o for key, o in listed(plain).items() if "loss_fn/backward/mul#0 into" in key]
    forced = compiled(force=[share.key])
    moved = [step.report().movement.ledger.total for step in (plain, forced)]
    assert not share.why_not and share.change.bytes == moved[1] - moved[0] < 0
    assert losses(forced) == pytest.approx(eager_losses(), rel=1e-5)


def test_by_itself_it_is_recorded_and_replays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(again, "LEAST", 1 << 16)
    step = compiled()
    assert {SILU, RELU} <= set(done(step))
    monkeypatch.undo()
    copy = compiled(recipe=step.recipe)
    assert copy.recipe == step.recipe and launches(copy) == launches(step)
    assert losses(copy) == losses(step)
    less = compiled(recipe=[line for line in step.recipe if line != RELU])
    assert RELU not in less.recipe and SILU in less.recipe


def test_a_kernel_that_nobody_needs_any_more_is_in_the_recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of what makes the share of each row moves into the kernel of the loss."""
    step = compiled(force=["compute_again *loss_fn/backward/select#0"])
    (line,) = done(step)
    copy = compiled(recipe=step.recipe)
    assert done(copy) == [line] and copy.recipe == step.recipe and launches(copy) == launches(step)


@pytest.mark.parametrize("pattern", ["compute_again", "compute_again *", "compute_again */silu_grad#0", SILU])
def test_forbidden(pattern: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(again, "LEAST", 1 << 16)
    step = compiled(forbid=[pattern])
    assert SILU not in step.recipe and (RELU in step.recipe) == ("silu" in pattern)
    assert listed(step)[SILU].why_not == "it is forbidden"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"force": ["compute_again *softmax*"]}, "which fits no fusion"),
        ({"forbid": ["compute_again *softmax*"]}, "which fits no fusion"),
        ({"force": ["compute_again step/4/forward/add#1"]}, "is not possible: it is read in another part of the step"),
        ({"recipe": [SILU.partition(" into ")[0]]}, "does not say who computes it"),
        ({"recipe": [SILU.replace("mul#7", "mal#7")]}, "has no op 'step/1/backward/mal#7'; did you mean"),
        ({"recipe": [SILU.replace("/1/backward/mul#7", "/4/backward/mul#6")]}, "not all of them read it"),
        ({"force": [SILU], "providers": ["aten"]}, "only ATen may run this step"),
    ],
)
def test_what_is_not_possible_says_why(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        compiled(**options)
