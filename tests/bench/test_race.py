"""The race of contenders: processes that take turns, and what happens to one that is wrong, crashes or is too slow."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from wholestep.bench import agreement, field, race, runner
from wholestep.bench.clock import Clock
from wholestep.bench.contenders import MODES, compiles_alone
from wholestep.bench.field import COMPILE_SECONDS, LEAST_SECONDS, PROCESS_BYTES, RACE_SECONDS, Field
from wholestep.bench.race import Cost, Race, Reference
from wholestep.bench.results import Results
from wholestep.bench.runner import Settings
from wholestep.bench.workload import Case
from wholestep.cli import bench

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
    field = Field(races, settings.together, deadline, said.append)
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


def test_profiles_come_beside_times_and_who_has_none_keeps_its_times(
    journal: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_WORKER_BLIND", "any eager")
    profiling = replace(SETTINGS, device="cuda", profile=True)
    race = Race(Case("any", "tiny"), ["wholestep", "eager"], profiling, print, time.monotonic() + 60)
    Field([race], 0, race.deadline, print).run(bench.work_of(profiling), lambda race: None)
    assert race.entries["wholestep"]["profile"] == {"us": 1.0, "calls": 2.0, "step_us": 250e3}
    assert "profile" not in race.entries["eager"] and len(race.entries["eager"]["ms"]["blocks"]) == 2
    measured, where = Results(), {"device": "cuda", "machine": "m", "command": "c", "versions": {}, "date": "d"}
    bench.merge(race, where | {"race": "r", "load": 0.0}, profiling, measured)
    assert [(e["contender"], "losses" in e) for e in measured.profiles] == [("wholestep", False)]
    assert {e["contender"]: "profile" in e for e in measured.entries} == {"wholestep": False, "eager": False}


def test_on_a_cpu_times_of_a_run_that_profiles_are_not_kept(journal: Path) -> None:
    profiling = replace(SETTINGS, profile=True)
    race = Race(Case("any", "tiny"), ["wholestep", "eager"], profiling, print, time.monotonic() + 60)
    Field([race], 0, race.deadline, print).run(bench.work_of(profiling), lambda race: None)
    measured, where = Results(), {"device": "cpu", "machine": "m", "command": "c", "versions": {}, "date": "d"}
    bench.merge(race, where | {"race": "r", "load": 0.0}, profiling, measured)
    assert not measured.entries and len(measured.profiles) == 2 and "ms" not in race.entries["eager"]
    assert lines(journal, "time") == ["any eager", "any wholestep"]


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
    Field([race], 0, race.deadline, print).run(
        Race.timing, lambda race: told.append(race.entries["compile"].get("unfinished", False))
    )
    assert told == [True, False]


def test_where_eager_finds_no_memory_all_have_another_try(journal: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_WORKER_FULL", "one eager")
    found = run_all(["one", "two"], ["wholestep", "eager"], TOGETHER)
    assert all(e["status"] == "agrees" and "ms" in e for entries in found.values() for e in entries.values())
    prepared = lines(journal, "prepare")  # without eager's losses nobody compiles
    assert sorted(prepared[:3]) == ["one eager", "two eager", "two wholestep"]
    assert prepared[3:] == ["one eager", "one wholestep"]


# ---- several cases at once -------------------------------------------------------------------------------------------


def test_cases_are_prepared_at_once_and_race_one_after_the_other(journal: Path) -> None:
    found = run_all(["one", "two"], ["wholestep", "eager", "checkpoint", "aten", "jax"], TOGETHER)
    for case, entries in found.items():
        own = [who.split()[1] for who in lines(journal, "prepare") if who.startswith(case)]
        assert own == ["eager", "checkpoint", "wholestep", "jax", "aten"]
        assert {name for name, e in entries.items() if e["beside"]} <= {"eager", "checkpoint"}
        assert all(e["status"] == "agrees" and e["alone"] == (e["beside"] == 0) for e in entries.values())
    raced = [who.split()[0] for who in lines(journal, "time")]
    assert raced in (["one"] * 5 + ["two"] * 5, ["two"] * 5 + ["one"] * 5)


def test_who_compiles_stands_still_while_ours_compiles_and_others_race(
    journal: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_WORKER_BUSY", "two checkpoint")
    found = run_all(["one", "two"], ["wholestep", "eager", "checkpoint"], TOGETHER)
    told = journal.read_text().splitlines()
    first = told.index("one wholestep prepare")
    ticks = [number for number, line in enumerate(told) if line == "two checkpoint tick"]
    assert len(ticks) == 60 and ticks[0] < first < ticks[-1]  # it was at work before, and went on
    raced = max(number for number, line in enumerate(told) if line.startswith("one") and line.endswith("time"))
    assert not [number for number in ticks if first < number < raced]
    assert all(e["status"] == "agrees" for entries in found.values() for e in entries.values())


def test_to_be_stopped_is_no_part_of_a_limit(journal: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FAKE_WORKER_SLOW", "any checkpoint")
    slow = runner.Runner(Case("any", "tiny"), "checkpoint", SETTINGS, tmp_path, time.monotonic() + 60)
    slow.hear()
    slow.tell("prepare", steps=3)
    slow.stop()
    time.sleep(1.0)
    slow.go()
    assert slow.left - slow.times_left()[0] < 0.8
    slow.end()


def test_when_time_runs_out_who_is_ready_still_races(journal: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def share_time(field: Field) -> None:
        for each in field.open:
            each.until(time.monotonic() + 4)

    monkeypatch.setattr(Field, "share_time", share_time)
    monkeypatch.setenv("FAKE_WORKER_SLOW", "two checkpoint")
    found = run_all(["one", "two"], ["wholestep", "eager", "checkpoint"], TOGETHER)
    slow = found["two"].pop("checkpoint")
    assert slow["status"] == "failed" and slow["unfinished"]
    assert slow["why"].startswith("no time was left for all, in prepared (")
    ours = found["two"].pop("wholestep")  # it would have been alone
    assert ours["unfinished"] and ours["why"] == "no time was left for those it was to race"
    assert all("ms" in e for entries in found.values() for e in entries.values())


def test_time_is_left_for_a_race_of_those_that_compile_alone(journal: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_WORKER_SLOW", "any checkpoint")
    deadline = time.monotonic() + 8
    slow = Race(Case("any", "tiny"), ["wholestep", "eager", "checkpoint"], SETTINGS, print, deadline)
    Field([slow], 0, deadline, print).run(Race.timing, lambda race: None)
    assert slow.entries["checkpoint"]["unfinished"]
    assert all("ms" in slow.entries[name] for name in ("wholestep", "eager"))


def test_who_compiles_for_long_says_what_it_does(journal: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_WORKER_SLOW", "any checkpoint")
    monkeypatch.setattr(field, "PROGRESS_SECONDS", 0.2)
    said: list[str] = []
    slow = Race(Case("any"), ["checkpoint"], replace(TOGETHER, limit=3.0), said.append, 0.0, Reference([2.0], 1.0))
    Field([slow], 1, time.monotonic() + 60, said.append).run(Race.timing, lambda race: None)
    assert any(line.startswith("any checkpoint: compiles, in prepared (<string>:") for line in said)


def test_time_is_kept_for_races() -> None:
    cost = {"wholestep": Cost(0, 8.0)}
    known = Race(Case("one"), ["wholestep", "eager"], TOGETHER, print, 0.0, costs=cost)
    new = Race(Case("two"), ["wholestep", "eager"], TOGETHER, print, 0.0)
    field = Field([], 2, time.monotonic() + 1000, print)
    assert field.reserve([known, new]) == 2 * RACE_SECONDS + 8.0 + COMPILE_SECONDS  # eager compiles beside others
    assert 400 < field.reserve([new] * 100) <= 500  # never most of what is left
    assert Field([], 2, time.monotonic() - 1, print).reserve([new]) == 0


def test_rounds_end_when_time_does(journal: Path) -> None:
    def hurried(one: Race) -> None:
        one.until(time.monotonic() + race.CLOSING + 0.1)
        one.timing()

    many = replace(SETTINGS, rounds=10**6)
    entries = run_all(["any"], ["wholestep", "eager"], many, work=hurried)["any"]
    assert all(1 <= len(e["ms"]["blocks"]) < 10**6 and e["peak_bytes"] == 1000 for e in entries.values())


def test_whose_seconds_are_compared_with_ours_compiles_alone_as_ours_does() -> None:
    others = set(MODES) - {"compile"}
    assert len(others) == 2 and not any(map(compiles_alone, (*others, "compile:0.6", "eager", "checkpoint")))
    assert all(map(compiles_alone, ("wholestep", "wholestep:0.7", "aten", "max", "jax", "compile")))


def test_cases_begin_while_there_is_room_for_them(journal: Path) -> None:
    """Ours of two cases are not there at the same time; what a process takes beside its tensors counts."""

    def case(name: str, theirs: float, ours: float) -> Race:
        costs = {"compile-max-autotune": Cost(theirs, 1.0), "wholestep": Cost(ours, 1.0)}
        names = ["wholestep", "compile-max-autotune"]
        return Race(Case(name), names, TOGETHER, print, 0.0, Reference([2.0], 1.0), costs)

    first, second, large, small = case("a", 3e9, 2e9), case("b", 4e9, 3e9), case("c", 6e9, 1e9), case("d", 1e9, 1e9)
    field = Field([first, second], 4, time.monotonic() + 60, print, 3e9 + 4e9 + 3e9 + 4 * PROCESS_BYTES)
    field.open[first] = 0.0
    assert field.fits(second) and not field.fits(large)
    field.room -= 1
    assert not field.fits(second) and field.fits(small)


def test_cases_that_take_longer_than_what_is_left_are_not_begun(journal: Path) -> None:
    said: list[str] = []
    races = [Race(Case(name, "tiny"), ["wholestep"], SETTINGS, said.append, 0.0) for name in ("one", "two")]
    field = Field(races, 0, time.monotonic() + LEAST_SECONDS + 2, said.append)

    def work(race: Race) -> None:
        field.deadline = time.monotonic() + LEAST_SECONDS / 2

    field.run(work, lambda race: None)
    assert lines(journal, "begin") == ["one eager", "one wholestep"]
    assert said[-1].startswith("two@tiny: not begun, 10 s")


# ---- the clock -------------------------------------------------------------------------------------------------------


def test_whoever_has_the_clock_has_it_alone(tmp_path: Path) -> None:
    mine, other = Clock(tmp_path / "clock"), Clock(tmp_path / "clock")
    with mine.held() as have, mine.held() as again, other.held(time.monotonic() + 0.05) as others:
        assert have and again and not others
    with other.held(time.monotonic() + 0.05) as others:
        assert others
    with Clock(None).held() as have:
        assert have


def test_a_kernel_waits_for_its_turn_but_not_for_long(tmp_path: Path) -> None:
    mine, other = Clock(tmp_path / "clock"), Clock(tmp_path / "clock")
    with mine.turn() as have, other.turn() as others:
        assert have and not others
    assert (mine.turns, mine.without, other.turns, other.without) == (1, 0, 0, 1)
    with other.turn() as others:
        assert others
    assert other.facts()["turns"] == other.facts()["without"] == 1


def test_time_of_others_is_not_ones_own(tmp_path: Path) -> None:
    mine, other = Clock(tmp_path / "clock"), Clock(tmp_path / "clock")
    start, began = mine.now(), time.perf_counter()
    with other.held(), mine.held(time.monotonic() + 0.2):
        pass
    elapsed = time.perf_counter() - began
    assert mine.waited >= 0.2 and mine.now() - start == pytest.approx(elapsed - mine.waited, abs=0.1)
    assert other.facts()["turns"] == 1 and other.longest == other.had >= 0.2
    other.stop(5.0)
    other.stop(2.0)
    assert mine.now() - start < elapsed - 6  # nobody was stopped, so it is less than what went by


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
