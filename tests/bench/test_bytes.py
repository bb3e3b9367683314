"""bench/bytes.py plans for a GPU that is not there, and its figures add up."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path

import pytest

pytest.importorskip("triton")
pytest.importorskip("transformers")

from bench.bytes import Guessed, families, groups_of, main, moves_of, planned
from wholestep.backends.providers import Region
from wholestep.bench.workload import Case, build
from wholestep.cost.movement import Movement, movement_of


@pytest.fixture(scope="module")
def movement() -> Movement:
    return movement_of(planned(build(Case("resnet50", "tiny"), "cpu")))


def test_what_is_beyond_the_bound_adds_up(movement: Movement) -> None:
    groups = groups_of(movement)
    assert sum(g.bytes for g in groups) == movement.ledger.total
    found = families(movement, groups)
    assert sum(found.values()) + movement.bound.total == movement.ledger.total
    assert {"norms", "pooling", "updates"} <= found.keys()


def test_generated_kernels_are_taken_to_win(movement: Movement) -> None:
    """Beside copies only products and convolutions are left to libraries; the plan is one for a GPU."""
    plan = movement.planned.plan
    library = {x.name for x in plan.launches if x.provider in ("aten", "cudnn")}
    assert plan.device == "cuda" and library <= {
        "step.contract", "step.conv", "step.conv_input_grad", "step.conv_weight_grad", "step.cast", "step.reshape",
    }  # fmt: skip
    assert {x.provider for x in plan.launches if x.name == "step.fused"} == {"triton"}


def test_moves_are_told_with_their_shapes(movement: Movement) -> None:
    heaviest = max(movement.ledger.kernels, key=lambda k: k.bytes)
    for move in heaviest.moves:
        move.bytes *= 10_000
    told = [*moves_of(heaviest, movement.ledger, False), *moves_of(heaviest, movement.ledger, True)]
    for move in heaviest.moves:
        move.bytes //= 10_000
    assert told and any("x" in text and text[-1].isdigit() for text in told)


def test_the_page_and_the_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["gpt2@tiny", "--rows", "3", "--layer", "transformer.h.0*", "--json", str(tmp_path / "figures.json")])
    out = capsys.readouterr().out
    assert "gpt2@tiny: moved" in out and "beyond the bound by family" in out and " in all" in out
    figures = json.loads((tmp_path / "figures.json").read_text())["gpt2@tiny"]
    assert figures["moved"] == figures["bound"] + sum(figures["beyond"].values())


@pytest.mark.parametrize("seed", [2, 3])
def test_a_plan_is_made_whatever_the_clock_says(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are joined, computed twice and refused by chance. (These seeds once met ops that were copies or gone.)"""
    drawn, guessed = random.Random(seed), Guessed.times

    def times(self: Guessed, regions: Sequence[Region]) -> list[float]:
        return [seconds * drawn.uniform(0.3, 3) for seconds in guessed(self, regions)]

    monkeypatch.setattr(Guessed, "times", times)
    made = planned(build(Case("mobilenet_v2", "full"), "cpu"))
    assert made.fusion is not None
    refused = [why for why in made.fusion.refusals.values() if why.startswith("measured: ")]
    assert len(refused) > 5 and movement_of(made).ledger.total > 0
