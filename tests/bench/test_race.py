"""The race of contenders: processes that take turns, and what happens to one that is wrong, crashes or is too slow."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from wholestep.bench import agreement, race
from wholestep.bench.race import Race, Reference, Settings
from wholestep.bench.workload import Case

SETTINGS = Settings("cpu", "fp32", steps=3, rounds=2, limit=30.0)


@pytest.fixture
def journal(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Contenders are stood for by `fake_worker.py`, which notes what it is told."""
    monkeypatch.setattr(race, "START", (Path(__file__).parent / "fake_worker.py").read_text())
    monkeypatch.setenv("FAKE_WORKER_JOURNAL", str(tmp_path / "journal"))
    return tmp_path / "journal"


def run(contenders: list[str], settings: Settings = SETTINGS, known: Reference | None = None) -> dict[str, dict]:
    said: list[str] = []
    found = Race(Case("any", "tiny"), settings, said.append, time.monotonic() + 60, known)
    entries = found.run(contenders, Race.timing)
    assert not found.runners and said
    return entries


def test_contenders_take_turns_and_times_are_medians(journal: Path) -> None:
    entries = run(["wholestep", "eager"])
    turns = [line for line in journal.read_text().splitlines() if line.endswith("time")]
    assert turns == ["eager time", "wholestep time", "wholestep time", "eager time"]
    assert {name: e["ms"]["median"] for name, e in entries.items()} == {"eager": 500.0, "wholestep": 250.0}
    assert all(e["status"] == "agrees" and e["alone"] and e["peak_bytes"] == 1000 for e in entries.values())


def test_who_disagrees_or_fails_is_noted_and_never_timed(journal: Path) -> None:
    quick = Settings("cpu", "fp32", steps=3, rounds=2, limit=1.5)
    entries = run(["wholestep", "eager", "compile", "compile-reduce-overhead", "compile-max-autotune"], quick)
    assert entries["wholestep"]["status"] == entries["eager"]["status"] == "agrees"
    wrong = entries["compile"]
    assert wrong["status"] == "disagrees" and "ms" not in wrong and wrong["distance"] == pytest.approx(0.2)
    crashed, slow = entries["compile-reduce-overhead"], entries["compile-max-autotune"]
    assert crashed["status"] == "failed" and "code 3: a library says goodbye" in crashed["why"]
    assert slow["status"] == "failed" and "over its limit of 2 s" in slow["why"]
    assert not any(line.startswith("compile") and line.endswith("time") for line in journal.read_text().splitlines())


def test_without_eager_losses_of_an_earlier_run_are_compared(journal: Path) -> None:
    assert run(["wholestep"], known=Reference([2.0, 1.9, 1.8], 1e-3))["wholestep"]["status"] == "agrees"
    assert "eager" not in journal.read_text()
    assert run(["wholestep"], known=Reference([2.0, 1.9, 1.7], 1e-3))["wholestep"]["status"] == "disagrees"
    assert list(run(["wholestep"])) == ["wholestep"] and "eager prepare" in journal.read_text()


def test_who_finds_no_memory_beside_others_has_another_try(journal: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_WORKER_FULL", "compile")
    known = Reference([2.4, 2.28, 2.16], 0.3)
    entries = run(["wholestep", "eager", "compile"], known=known)
    assert journal.read_text().splitlines().count("compile prepare") == 2
    assert entries["compile"]["status"] == "disagrees"  # it was prepared after all, and compared
    assert entries["eager"]["status"] == "agrees" and len(entries["wholestep"]["ms"]["blocks"]) == 2


def test_together_all_are_prepared_and_still_take_turns(journal: Path) -> None:
    entries = run(["wholestep", "eager"], Settings("cpu", "fp32", steps=3, rounds=1, limit=30.0, together=True))
    assert journal.read_text().split("\n")[:4] == ["eager prepare", "wholestep prepare", "eager time", "wholestep time"]
    assert all(e["status"] == "agrees" and e["alone"] for e in entries.values())


def test_compiling_together_is_noted_and_leaves_those_alone_that_measure() -> None:
    together = Race(Case("any"), Settings("cuda", "bf16", together=True), print, 0.0)
    names = ["eager", "wholestep", "compile", "compile-reduce-overhead", "compile-max-autotune"]
    assert together.groups(names) == [
        ["eager"],
        ["wholestep"],
        ["compile-max-autotune"],
        ["compile", "compile-reduce-overhead"],
    ]


def test_losses_may_be_as_far_apart_as_rounding_carries_them() -> None:
    curve = [3.0, 2.5, 2.0, 1.5]
    off = [1.015 * x for x in curve]
    assert agreement.distance(off, curve) == pytest.approx(0.015)
    assert agreement.tolerance("bf16", curve, {}) == 0.01
    assert agreement.tolerance("bf16", curve, {"fp32": off}) == pytest.approx(0.03)
    assert race.verdict(off, Reference(curve, 0.01))["status"] == "disagrees"
    assert race.verdict([3.0, 2.5, 2.0, float("nan")], Reference(curve, 0.01)) == {
        "distance": None,
        "tolerance": 0.01,
        "status": "disagrees",
    }
