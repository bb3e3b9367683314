"""Contenders on one case: each in a process that stays alive, all taking turns, losses compared before any time counts.

Only one works at a time; `field.py` says who is prepared when, and who may compile beside others.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from . import agreement
from .contenders import EAGER, OURS, compiles_alone, is_ours, rank
from .runner import Failed, Runner, Settings
from .workload import Case

Entry = dict[str, Any]
#: seconds that are kept for what is asked after the last round
CLOSING = 2.0
#: orders of a race whose seconds are noted
RACING = ("time", "memory", "facts", "device_load")


@dataclass
class Reference:
    """Eager training's losses, and how far rounding alone carries them."""

    losses: list[float]
    #: how far others may be from them at any step
    tolerance: float
    #: how far apart eager trainings are that round otherwise
    rounding: Mapping[str, float | None] = field(default_factory=dict)
    #: how far others may be from them step by step; without: the same at all steps
    limits: Sequence[float] = ()

    @property
    def allowed(self) -> Sequence[float]:
        return self.limits or [self.tolerance] * len(self.losses)


@dataclass(frozen=True)
class Cost:
    """What a contender took in an earlier run."""

    bytes: float
    #: None: not known
    compile_seconds: float | None


class Race:
    """One case: starts contenders, checks them, lets them take turns. `entries` says what was found of each.

    `wanted` are those that take part: eager's losses are what the others' are compared with, so it does unless they
    are `known`. Where it does, and trains as it is known to, what rounding does to it is not measured again.
    """

    def __init__(
        self,
        case: Case,
        contenders: Sequence[str],
        settings: Settings,
        say: Callable[[str], None],
        deadline: float,
        known: Reference | None = None,
        costs: Mapping[str, Cost] | None = None,
    ):
        self.case, self.contenders, self.settings, self.say = case, contenders, settings, say
        self.deadline = deadline
        self.known = known
        self.costs = costs or {}
        self.reference = None if EAGER in contenders else known
        self.wanted = sorted(contenders, key=lambda name: (name != EAGER, rank(name)))  # the reference, ours, others
        if EAGER not in self.wanted and known is None:
            self.wanted.insert(0, EAGER)
        self.runners: dict[str, Runner] = {}
        self.samples: dict[str, list[float]] = {}
        self._found: dict[str, Entry] = {}

    @property
    def entries(self) -> dict[str, Entry]:
        """What was found of those that were asked for."""
        return {name: entry for name, entry in self._found.items() if name in self.contenders}

    @property
    def late(self) -> list[str]:
        """Who found no memory beside the others."""
        return [name for name, entry in self._found.items() if entry.get("out_of_memory")]

    def bytes_of(self, name: str) -> float:
        """Memory that a contender is known to take; 0 where that is not known."""
        return self.costs[name].bytes if name in self.costs else 0.0

    def compile_seconds_of(self, name: str, guess: float) -> float:
        known = self.costs[name].compile_seconds if name in self.costs else None
        return guess if known is None else known

    def until(self, deadline: float) -> None:
        """Everybody has until then."""
        self.deadline = deadline
        for runner in self.runners.values():
            runner.deadline = deadline

    # ---- before anything is timed ------------------------------------------------------------------------------------

    def start(self, name: str, folder: Path, clock: Path | None = None) -> None:
        """Starts a process. It imports and builds; `ready` waits for that."""
        entry = self._found[name] = {"status": "failed"}
        caches = None
        if is_ours(name) and name not in (OURS, "aten") and OURS in self.runners:
            caches = self.runners[OURS].caches  # how long it compiles is no figure of a budget, or of a provider more
            entry["warm"] = True
        try:
            self.runners[name] = Runner(self.case, name, self.settings, folder, self.deadline, caches, clock)
        except Failed as error:
            self.fail(name, error)

    def ready(self, name: str) -> None:
        try:
            self.runners[name].hear()
        except Failed as error:
            self.fail(name, error)

    def prepare(self, name: str) -> bool:
        """Tells a contender to compile and train for some steps; `check` takes what it finds. False: it is gone."""
        if name in self.runners and name != EAGER and self.reference is None:
            why = "eager did not train, and nothing else says what the losses should be"
            self._found[name] |= {"why": why, "unfinished": self._found[EAGER].get("unfinished", False)}
            self.leave(name)
        if name in self.runners:
            try:
                self.runners[name].tell("prepare", steps=self.settings.steps)
            except Failed as error:
                self.fail(name, error)
        return name in self.runners

    def gave_up(self, name: str) -> bool:
        """Whether no time was left for all others that are waited for: then it would be measured beside nobody."""
        others = [each for each in self.wanted if each != EAGER and not compiles_alone(each)]
        late = [each for each in others if self._found.get(each, {}).get("unfinished")]
        if name not in self.runners or not others or late != others:
            return False
        self.fail(name, Failed("no time was left for those it was to race", out_of_time=True))
        return True

    def check(self, name: str, beside: int) -> None:
        """Takes what a contender has prepared beside up to `beside` others, and compares its losses with eager's."""
        runner, entry = self.runners[name], self._found[name]
        entry |= {"alone": beside == 0, "beside": beside}
        try:
            entry |= runner.hear()
            if name == EAGER:
                self.take_reference(runner, entry)
        except Failed as error:
            self.fail(name, error)
            return
        what = f"{entry['compile_seconds']:.1f} s to the first step, losses {entry['losses'][0]:.5f} .. "
        what += f"{entry['losses'][-1]:.5f}"
        assert self.reference is not None, "nobody is prepared without eager's losses"
        entry |= verdict(entry["losses"], self.reference)
        if entry["status"] == "disagrees":
            far = "not finite" if entry["distance"] is None else f"{entry['distance']:.2%} from eager's"
            what += f": DISAGREES, {far} at step {entry['at_step']} ({entry['tolerance']:.2%} is allowed)"
        if entry["status"] != "agrees" or name not in self.contenders:
            self.leave(name)
        self.say(f"{self.case} {name}: {what}")

    def take_reference(self, runner: Runner, entry: Entry) -> None:
        """Eager's losses are what others are compared with, and eager rounded otherwise says how closely."""
        losses, known = entry["losses"], self.known
        if known is not None and known.rounding and verdict(losses, known)["status"] == "agrees":
            self.reference = Reference(losses, known.tolerance, known.rounding, known.allowed)
        else:
            rounded = runner.ask("rounded", steps=self.settings.steps)["rounded"]
            far = {name: finite(agreement.distance(curve, losses)) for name, curve in rounded.items()}
            limits = agreement.limits(self.settings.precision, losses, rounded)
            self.reference = Reference(losses, limits[-1], far, limits)
        entry |= {"rounding": dict(self.reference.rounding), "limits": list(self.reference.allowed)}

    # ---- who leaves --------------------------------------------------------------------------------------------------

    def fail(self, name: str, error: Failed) -> None:
        """Notes what went wrong with a contender; the others go on. `unfinished`: it is no fault of its own."""
        entry = self._found[name]
        entry |= {"status": "failed", "why": str(error), "out_of_memory": error.out_of_memory}
        entry["unfinished"] = error.out_of_time
        entry.pop("ms", None)
        self.say(f"{self.case} {name}: FAILED, {error}")
        self.leave(name)

    def leave_open(self) -> None:
        """Who found no memory has another try: until then it says nothing that could take an earlier row's place."""
        for name in self.late:
            self._found[name]["unfinished"] = True

    def postpone(self, names: Iterable[str]) -> None:
        """Nobody knows whether these find memory without others beside them: there is no time for another try."""
        for name in names:
            self._found[name]["unfinished"] = True
            self._found[name]["why"] = f"{self._found[name].get('why', 'failed')} (beside others; not tried again)"

    def leave(self, *names: str) -> None:
        """Ends processes: all are told before one is waited for."""
        ended = [self.runners.pop(name) for name in names if name in self.runners]
        for runner in ended:
            runner.kill()
        for runner in ended:
            runner.end()

    # ---- the work ----------------------------------------------------------------------------------------------------

    def timing(self) -> None:
        """Everybody alive times a block in turn, round after round, as long as there is time; then all else of them."""
        began = time.monotonic()
        self.take_turns()
        for name in list(self.runners):
            try:
                self._found[name] |= self.runners[name].ask("memory")
            except Failed as error:
                self.fail(name, error)
                continue
            entry = self._found[name]
            entry["ms"] = spread(self.samples[name])
            ms, peak = entry["ms"], entry.get("peak_bytes")
            memory = "" if peak is None else f", {peak / 1e9:.2f} GB"
            self.say(f"{self.case} {name}: {ms['median']:.3f} ms ({ms['low']:.3f} .. {ms['high']:.3f}){memory}")
        for name in list(self.runners):
            if "facts" not in self._found[name] and is_ours(name):
                self._found[name]["facts"] = self.extra(name, "facts")
            if "host_us" not in self._found[name]:
                self._found[name] |= self.extra(name, "device_load")
        total: dict[str, float] = {}
        for name, runner in self.runners.items():
            seconds = {do: spent for do, spent in runner.seconds.items() if do in RACING}
            self._found[name]["race_seconds"] = seconds
            for do, each in seconds.items():
                total[do] = total.get(do, 0.0) + each
        parts = ", ".join(f"{do} {seconds:.1f}" for do, seconds in total.items())
        self.say(f"{self.case}: raced in {time.monotonic() - began:.1f} s ({parts})")

    def take_turns(self) -> None:
        """Adds a block of everybody to `samples`, round after round."""
        taken: dict[str, list[float]] = {name: [] for name in self.runners}
        longest = 0.0
        for number in range(self.settings.rounds):
            start = time.monotonic()
            if number and start + longest + CLOSING > self.deadline:
                self.say(f"{self.case}: no time for more than {number} of {self.settings.rounds} rounds")
                break
            order = list(self.runners)
            for name in order if number % 2 == 0 else order[::-1]:
                try:
                    answer = self.runners[name].ask("time", seconds=self.settings.block_seconds)
                except Failed as error:
                    self.fail(name, error)
                    continue
                taken[name].append(answer["seconds"] * 1e3)
                self._found[name]["steps_in_block"] = answer["steps"]
            longest = max(longest, time.monotonic() - start)
        for name in self.runners:
            self.samples.setdefault(name, []).extend(taken[name])

    def extra(self, name: str, do: str) -> Entry:
        """What a contender says of itself beside its times. Those are known by now, and stay if it cannot."""
        if name not in self.runners:
            return {}
        try:
            return self.runners[name].ask(do)
        except Failed as error:
            self.say(f"{self.case} {name}: its {do} FAILED, {error}")
            self.leave(name)
            return {"error": f"{do}: {error}"}

    def profiling(self) -> None:
        """Everybody alive is profiled; who has no times, for none can be kept, times one block before.

        What is known of a contender by then stays, should its profile fail.
        """
        for name in list(self.runners):
            if "ms" in self._found[name]:
                found, us = self.extra(name, "profile"), self._found[name]["ms"]["median"] * 1e3
                if "error" in found:
                    continue
            else:
                try:
                    us = self.runners[name].ask("time", seconds=self.settings.block_seconds)["seconds"] * 1e6
                    found = self.runners[name].ask("profile")
                except Failed as error:
                    self.fail(name, error)
                    continue
            self._found[name]["profile"] = found | {"step_us": us}
            self.say(f"{self.case} {name}: profiled")

    def timing_and_profiling(self) -> None:
        self.timing()
        self.profiling()


def verdict(losses: Sequence[float], reference: Reference) -> Entry:
    """Whether a contender's times count."""
    found = agreement.nearest(losses, reference.losses, reference.allowed)
    return {
        "distance": finite(found.distance),
        "tolerance": found.allowed,
        "at_step": found.step,
        "status": "agrees" if found.distance <= found.allowed else "disagrees",
    }


def finite(value: float) -> float | None:
    """JSON has no infinity."""
    return value if math.isfinite(value) else None


def spread(samples: Sequence[float]) -> Mapping[str, Any]:
    """The median of blocks, and their quartiles."""
    quartiles = statistics.quantiles(samples, n=4, method="inclusive") if len(samples) > 1 else [samples[0]] * 3
    return {"median": quartiles[1], "low": quartiles[0], "high": quartiles[2], "blocks": list(samples)}
