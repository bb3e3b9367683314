"""The race of contenders: processes that take turns, and what happens to one that is wrong, crashes or is too slow."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from wholestep.bench import agreement, race, runner
from wholestep.bench.field import RACE_SECONDS, Field, Spent, Stage
from wholestep.bench.race import Race, Reference
from wholestep.bench.runner import Settings
from wholestep.bench.workload import Case

SETTINGS = Settings("cpu", "fp32", steps=3, rounds=2, limit=30.0)
TOGETHER = replace(SETTINGS, rounds=1, together=2)


@pytest.fixture
def journal(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Contenders are stood for by `fake_worker.py`, which notes what it is told."""
    monkeypatch.setattr(runner, "START", (Path(__file__).parent / "fake_worker.py").read_text())
    monkeypatch.setenv("FAKE_WORKER_JOURNAL", str(tmp_path / "journal"))
    return tmp_path / "journal"


def run_all(
    cases: list[str],
    contenders: list[str],
    settings: Settings = SETTINGS,
    known: Reference | None = None,
    work: Callable[[Race], None] = Race.timing,
) -> dict[str, dict]:
    """The entries of each case, as they were when it was done for the last time."""
    said: list[str] = []
    deadline = time.monotonic() + 60
    races = [Race(Case(case, "tiny"), contenders, settings, said.append, deadline, known) for case in cases]
    kept: dict[str, dict] = {}
    field = Field(races, settings.together > 0, deadline, said.append)
    field.run(work, lambda race: kept.update({race.case.network: race.entries}))
    assert not any(race.runners for race in races) and said
    return kept


def run(contenders: list[str], settings: Settings = SETTINGS, known: Reference | None = None) -> dict[str, dict]:
    return run_all(["any"], contenders, settings, known)["any"]


def lines(journal: Path, what: str) -> list[str]:
    return [line.removesuffix(f" {what}") for line in journal.read_text().splitlines() if line.endswith(what)]


def test_contenders_take_turns_and_times_are_medians(journal: Path) -> None:
    entries = run(["wholestep", "eager"])
    assert lines(journal, "time") == ["any eager", "any wholestep", "any wholestep", "any eager"]
    assert {name: e["ms"]["median"] for name, e in entries.items()} == {"eager": 500.0, "wholestep": 250.0}
    assert all(e["status"] == "agrees" and e["alone"] and e["peak_bytes"] == 1000 for e in entries.values())
    assert set(entries["eager"]["race_seconds"]) == {"time", "memory", "device_load"}


def test_who_disagrees_or_fails_is_noted_and_never_timed(journal: Path) -> None:
    quick = Settings("cpu", "fp32", steps=3, rounds=2, limit=1.5)
    entries = run(["wholestep", "eager", "compile", "compile-reduce-overhead", "compile-max-autotune"], quick)
    assert entries["wholestep"]["status"] == entries["eager"]["status"] == "agrees"
    wrong = entries["compile"]
    assert wrong["status"] == "disagrees" and "ms" not in wrong and wrong["distance"] == pytest.approx(0.2)
    crashed, slow = entries["compile-reduce-overhead"], entries["compile-max-autotune"]
    assert crashed["status"] == "failed" and "code 3: a library says goodbye" in crashed["why"]
    assert (
        slow["status"] == "failed" and "over its limit of 2 s, in prepared (" in slow["why"] and not slow["unfinished"]
    )
    assert set(lines(journal, "time")) == {"any eager", "any wholestep"}


def test_without_eager_losses_of_an_earlier_run_are_compared(journal: Path) -> None:
    assert run(["wholestep"], known=Reference([2.0, 1.9, 1.8], 1e-3))["wholestep"]["status"] == "agrees"
    assert "eager" not in journal.read_text()
    assert run(["wholestep"], known=Reference([2.0, 1.9, 1.7], 1e-3))["wholestep"]["status"] == "disagrees"
    assert list(run(["wholestep"])) == ["wholestep"] and lines(journal, "prepare")[-2:] == [
        "any eager",
        "any wholestep",
    ]


def test_what_rounding_does_to_eager_is_measured_once(journal: Path) -> None:
    known = Reference([2.0, 1.9, 1.8], 0.07, {"nudged": 0.035}, [0.01, 0.05, 0.07])
    eager = run(["wholestep", "eager"], known=known)["eager"]
    assert (eager["limits"], eager["rounding"]) == ([0.01, 0.05, 0.07], {"nudged": 0.035})
    assert not lines(journal, "rounded")
    other = replace(known, losses=[3.0, 2.9, 2.8])  # it does not train so any more
    assert run(["wholestep", "eager"], known=other)["eager"]["limits"] == [1e-4] * 3
    assert lines(journal, "rounded") == ["any eager"]


def test_who_finds_no_memory_beside_others_has_another_try(journal: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_WORKER_FULL", "any compile")
    known = Reference([2.4, 2.28, 2.16], 0.3)
    entries = run(["wholestep", "eager", "compile"], known=known)
    assert lines(journal, "prepare").count("any compile") == 2
    assert entries["compile"]["status"] == "disagrees"  # it was prepared after all, and compared
    assert entries["eager"]["status"] == "agrees" and len(entries["wholestep"]["ms"]["blocks"]) == 2


def test_until_it_has_another_try_it_says_nothing(journal: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An earlier row stays, should there be no time for that."""
    monkeypatch.setenv("FAKE_WORKER_FULL", "any compile")
    race = Race(Case("any", "tiny"), ["wholestep", "eager", "compile"], SETTINGS, print, time.monotonic() + 60)
    told: list[bool] = []
    Field([race], False, race.deadline, print).run(
        Race.timing, lambda race: told.append(race.entries["compile"].get("unfinished", False))
    )
    assert told == [True, False]


def test_where_eager_finds_no_memory_all_have_another_try(journal: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_WORKER_FULL", "one eager")
    found = run_all(["one", "two"], ["wholestep", "eager"], TOGETHER)
    assert all(e["status"] == "agrees" and "ms" in e for entries in found.values() for e in entries.values())
    order = ["one eager", "two eager", "two wholestep", "one eager", "one wholestep"]
    assert lines(journal, "prepare") == order  # without eager's losses nobody compiles


# ---- several cases at once -------------------------------------------------------------------------------------------


def test_cases_are_prepared_at_once_and_race_one_after_the_other(journal: Path) -> None:
    found = run_all(["one", "two"], ["wholestep", "eager", "checkpoint", "aten"], TOGETHER)
    told = [line.rsplit(maxsplit=1) for line in journal.read_text().splitlines()]
    assert [what for _, what in told if what != "rounded"] == ["begin"] * 8 + ["prepare"] * 8 + ["time"] * 8
    alone = [f"{case} {name}" for name in ("eager", "wholestep", "aten") for case in ("one", "two")]
    assert lines(journal, "prepare")[:6] == alone
    assert [who.split()[0] for who in lines(journal, "time")] == ["one"] * 4 + ["two"] * 4
    for entries in found.values():
        assert {name: e["beside"] for name, e in entries.items()} == {
            "eager": 0,
            "wholestep": 0,
            "aten": 0,
            "checkpoint": 1,
        }
        assert all(e["status"] == "agrees" and e["alone"] == (e["beside"] == 0) for e in entries.values())


def test_when_time_runs_out_who_is_ready_still_races(journal: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Field.compile

    def compile_in_a_second(field: Field, stage: Stage) -> None:
        if len(stage) > 1:
            for each in field.races:
                each.until(time.monotonic() + 1)
        whole(field, stage)

    monkeypatch.setattr(Field, "compile", compile_in_a_second)
    monkeypatch.setenv("FAKE_WORKER_SLOW", "two checkpoint")
    found = run_all(["one", "two"], ["wholestep", "eager", "checkpoint"], TOGETHER)
    slow = found["two"].pop("checkpoint")
    assert slow["status"] == "failed" and slow["unfinished"] and slow["why"] == "no time was left for all"
    assert all("ms" in e for entries in found.values() for e in entries.values())


def test_time_is_kept_for_races() -> None:
    field = Field([], True, time.monotonic() + 1000, print)
    assert field.reserve(3) == 3 * RACE_SECONDS
    assert 400 < field.reserve(100) <= 500  # never most of what is left
    assert Field([], True, time.monotonic() - 1, print).reserve(3) == 0


def test_rounds_end_when_time_does(journal: Path) -> None:
    def hurried(one: Race) -> None:
        one.until(time.monotonic() + race.CLOSING + 0.1)
        one.timing()

    many = replace(SETTINGS, rounds=10**6)
    entries = run_all(["any"], ["wholestep", "eager"], many, work=hurried)["any"]
    assert all(1 <= len(e["ms"]["blocks"]) < 10**6 and e["peak_bytes"] == 1000 for e in entries.values())


def test_who_compiles_at_once_times_no_kernels() -> None:
    names = ["eager", "wholestep", "compile", "compile-reduce-overhead", "compile-max-autotune", "jax"]
    races = [Race(Case(case), names, TOGETHER, print, 0.0) for case in ("one", "two")]
    stages = [[f"{race.case} {name}" for race, name in stage] for stage in Field(races, True, 0.0, print).stages()]
    at_once = [f"{case} {name}" for case in ("one", "two") for name in ("compile", "compile-reduce-overhead")]
    assert stages[:5] == [["one eager"], ["two eager"], ["one wholestep"], ["two wholestep"], at_once]
    assert stages[5:] == [[f"{case} {name}"] for case in ("one", "two") for name in ("compile-max-autotune", "jax")]


def test_a_field_is_as_large_as_the_time_that_is_left() -> None:
    last = Spent(cases=4, at_once=80.0, in_turn=160.0)
    assert [last.fitting(left) for left in (240.0, 239.0, 120.0, 119.0, 10.0)] == [4, 3, 1, 0, 0]


# ---- losses ----------------------------------------------------------------------------------------------------------


def test_losses_may_be_as_far_apart_as_rounding_carries_them() -> None:
    curve = [3.0, 2.5, 2.0, 1.5]
    off = [1.015 * x for x in curve]
    assert agreement.distance(off, curve) == pytest.approx(0.015)
    assert agreement.limits("bf16", curve, {}) == [0.01] * 4
    assert agreement.limits("bf16", curve, {"fp32": off}) == pytest.approx([0.03] * 4)
    assert race.verdict(off, Reference(curve, 0.01))["status"] == "disagrees"
    assert race.verdict([3.0, 2.5, 2.0, float("nan")], Reference(curve, 0.01)) == {
        "distance": None,
        "tolerance": 0.01,
        "at_step": 1,
        "status": "disagrees",
    }


def test_steps_before_rounding_shows_are_held_to_stricter_limits() -> None:
    """Eager rounded otherwise is 100 % away in the end; a contender that is 3 % away at the third step is wrong."""
    curve = [10.0 - i for i in range(8)]
    chaotic = [*curve[:6], 2 * curve[6], 2 * curve[7]]
    limits = agreement.limits("bf16", curve, {"fp32": chaotic})
    assert limits[:3] == [0.01] * 3 and limits[3] == limits[7] > agreement.CHAOS
    known = Reference(curve, limits[-1], limits=limits)
    assert race.verdict(chaotic, known)["status"] == "agrees"
    assert race.verdict([*curve[:7], 10 * curve[7]], known)["status"] == "agrees"  # by then rounding decides
    assert race.verdict([*curve[:7], math.inf], known)["status"] == "disagrees"
    early = [curve[0], curve[1], 1.1 * curve[2], *curve[3:]]
    assert race.verdict(early, replace(known, limits=()))["status"] == "agrees"
    found = race.verdict(early, known)
    assert (found["status"], found["at_step"], found["tolerance"]) == ("disagrees", 3, 0.01)
