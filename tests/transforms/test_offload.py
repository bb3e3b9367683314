"""`offload`: values of forward wait in host memory; results keep every bit, the arena shrinks."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import wholestep as ws
from tests.runtime.runs import adamw, data, fresh, squares
from wholestep.dialects.move import verify_plan
from wholestep.errors import InputError
from wholestep.plan import plan_to_module
from wholestep.transforms.opportunity import sites
from wholestep.transforms.recompute import Recompute

ROWS, WIDTH = 1024, 256  # 1 MB in f32
LAYERS = 5


class Wide(nn.Module):
    """Pointwise work between narrow weights: nearly all memory is activations. One of them is read through a view."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, WIDTH), nn.Linear(WIDTH, 4)
        self.scales = nn.ParameterList(nn.Parameter(torch.rand(WIDTH)) for _ in range(LAYERS))
        self.drop = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        for scale in self.scales:
            seen = torch.tanh(y * scale).reshape(2, -1, WIDTH)
            y = (seen * seen.sin()).reshape(-1, WIDTH)
        return self.last(self.drop(y))


def run(**options: Any) -> tuple[ws.TrainStep, list[float], list[torch.Tensor]]:
    net = fresh(Wide)
    torch.manual_seed(11)
    step = ws.compile(net, squares, adamw(net), (data(ROWS, 4),), **options)
    losses = [float(step(data(ROWS, 4, seed=s))) for s in range(3)]
    return step, losses, [p.detach().clone() for p in net.parameters()]


@functools.cache
def plain() -> tuple[ws.TrainStep, list[float], list[torch.Tensor]]:
    return run()


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_offloading_changes_no_bit_and_shrinks_the_arena() -> None:
    step, losses, parameters = plain()
    away, other_losses, other = run(force=["offload *"])
    assert losses == other_losses and same(parameters, other)
    taken = sum(op.name == "step.offload" for op in sites(away.program()).values())
    assert taken == sum(op.name == "step.fetch" for op in sites(away.program()).values()) >= 2 * LAYERS
    plan = away.plan()
    assert plan.bytes_in("pinned") == taken * ROWS * WIDTH * 4
    assert plan.peak < step.plan().peak - LAYERS * ROWS * WIDTH * 4
    assert plan.peak == plan.arena + plan.bytes_in("external") + plan.bytes_in("constant") + plan.made
    verify_plan(plan_to_module(plan))


@pytest.mark.parametrize("options", [{"precision": "bf16"}, {"accumulate": 2}, {"level": 0}], ids=str)
def test_options_keep_their_bits(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wholestep.transforms.offload.LEAST_BYTES", ROWS * WIDTH)
    _, losses, parameters = run(**options)
    step, other_losses, other = run(force=["offload *"], **options)
    assert losses == other_losses and same(parameters, other)
    assert step.recipe and all(key.startswith("offload ") for key in step.recipe)


def test_the_recipe_replays() -> None:
    step, losses, _ = run(force=["offload */tanh#*"])
    again, other, _ = run(recipe=step.recipe)
    assert len(step.recipe) == LAYERS and losses == other
    assert str(again.program()) == str(step.program())


def test_a_saved_step_offloads_too(tmp_path: Path) -> None:
    step, _, _ = run(force=["offload */tanh#*"])
    step.save(tmp_path / "wide.step")
    net = fresh(Wide)
    torch.manual_seed(11)
    loaded = ws.load(tmp_path / "wide.step", net, squares, adamw(net))
    assert [float(loaded(data(ROWS, 4, seed=s))) for s in range(3)] == plain()[1]
    assert loaded.plan().bytes_in("pinned") == LAYERS * ROWS * WIDTH * 4


def test_views_that_backward_reads_are_views_of_what_comes_back() -> None:
    """tanh is read by backward as it is and as a view: one copy travels, and nothing of forward stays for it."""
    step, _, _ = run(force=["offload */tanh#*"])
    made = list(sites(step.program()).values())
    for op in made:
        if op.name == "step.tanh":
            users = [u for u in op.result.uses if u.phase == "backward"]
            shown = [u for v in op.result.uses if v.name == "step.reshape" for u in v.result.uses]
            assert not users and shown and all(u.phase == "forward" for u in shown)
            assert sum(u.name == "step.offload" for u in op.result.uses) == 1


def test_prediction_and_reasons() -> None:
    step, _, _ = plain()
    found = {o.site: o for o in step.opportunities() if o.transformation == "offload"}
    tanh = [o for site, o in found.items() if "/tanh#" in site]
    assert len(tanh) == LAYERS
    size = ROWS * WIDTH * 4
    assert all(o.change.saved == -size and o.change.bytes == 4 * size and not o.why_not for o in tanh)
    reasons = " ".join(o.why_not for o in found.values())
    assert "below 1,000,000 a copy is not worth its launch" in reasons


def test_what_is_given_back_stays() -> None:
    model = fresh(lambda: nn.Linear(4, WIDTH))
    step = ws.compile(model, lambda m, x: (y := m(x), y.square().sum())[::-1], adamw(model), (data(ROWS, 4),))
    found = [o for o in step.opportunities() if o.transformation == "offload" and "/contract#" in o.site]
    assert [o.why_not for o in found] == ["the step gives it back, so it is kept anyway"]
    with pytest.raises(InputError, match="gives it back"):
        ws.compile(
            model,
            lambda m, x: (y := m(x), y.square().sum())[::-1],
            adamw(model),
            (data(ROWS, 4),),
            force=[found[0].key],
        )


def test_beside_recompute() -> None:
    """What is computed again may read what was taken away, and the other way round."""
    _, losses, parameters = plain()
    for force in (["recompute */sin#*", "offload *"], ["offload */tanh#*", "recompute *"]):
        step, other_losses, other = run(force=force)
        assert losses == other_losses and same(parameters, other)
        assert {key.split()[0] for key in step.recipe} == {"offload", Recompute.name}
        verify_plan(plan_to_module(step.plan()))


def test_levels_keep_it_out_unless_asked() -> None:
    step, _, _ = run(level=4)
    assert not any(op.name == "step.offload" for op in sites(step.program()).values())


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("options", [{}, {"precision": "bf16"}, {"accumulate": 2}], ids=str)
def test_copies_run_inside_the_graph(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU the copies are branches of the captured graph: same bits, less memory, step after step."""
    monkeypatch.setattr("wholestep.transforms.offload.LEAST_BYTES", ROWS * WIDTH)
    found = []
    for force in ([], ["offload *"]):
        net = fresh(Wide).cuda()
        torch.manual_seed(11)
        step = ws.compile(net, squares, adamw(net), (data(ROWS, 4).cuda(),), force=force, **options)
        losses = [float(step(data(ROWS, 4, seed=s).cuda())) for s in range(8)]
        plan, static = step.plan(), step._compiled.static
        assert static.graph.refused == "" and static.graph.graph is not None
        verify_plan(plan_to_module(plan))
        found.append((losses, [p.detach().cpu() for p in net.parameters()], plan))
    plain, away = found
    assert plain[0] == away[0] and same(plain[1], away[1])
    assert away[2].peak < plain[2].peak and away[2].bytes_in("pinned") > 0
