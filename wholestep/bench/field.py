"""Some cases at once: their contenders start together, are prepared stage by stage, then race, one case after another.

Who times kernels while it compiles (ours too) does so alone, and nobody is timed beside another. The rest of all cases
compile at once, which is noted: it takes each of them longer, and leaves more of a machine's time for other cases.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from .contenders import EAGER, OURS, is_ours, measures
from .race import Race
from .runner import first_to_answer

#: seconds of the time for all that are kept for the race of each case
RACE_SECONDS = 12.0
#: seconds below which nothing further is begun
LEAST_SECONDS = 20.0

Stage = list[tuple[Race, str]]


@dataclass(frozen=True)
class Spent:
    """Seconds that a field took: `at_once` however many cases it has, `in_turn` case by case."""

    cases: int
    at_once: float
    in_turn: float

    def fitting(self, left: float) -> int:
        """How many cases like these can be finished in the seconds that are left."""
        return max(0, int((left - self.at_once) * self.cases // max(self.in_turn, 1e-3)))


class Field:
    """The cases, and how they are prepared: with `together` all processes start first and some compile at once."""

    def __init__(self, races: Sequence[Race], together: bool, deadline: float, say: Callable[[str], None]):
        self.races, self.together, self.deadline, self.say = races, together, deadline, say

    def run(self, work: Callable[[Race], None], done: Callable[[Race], None]) -> Spent:
        """Prepares all, then `work` and `done` with one case after another.

        When time runs out, who is ready races. Who found no memory has another try after all.
        """
        began = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="wholestep-bench-") as folder:
            try:
                at_once = self.prepare(Path(folder))
                with_ours_first = sorted(self.races, key=lambda race: OURS not in race.runners)
                for number, race in enumerate(with_ours_first, 1):
                    race.until(self.deadline - self.reserve(len(self.races) - number))
                    work(race)
                    race.leave(*(name for name in race.runners if name != OURS or not race.late))
                    if self.tries_again(race):
                        race.leave_open()
                    done(race)
                in_turn = time.monotonic() - began - at_once
                for race in self.races:
                    self.again(race, Path(folder), work, done)
            finally:
                for race in self.races:
                    race.leave(*race.runners)
        if self.together:
            words = f"{at_once:.0f} s for starting and for compiling at once, {in_turn:.0f} s in turn"
            self.say(f"{', '.join(str(race.case) for race in self.races)}: {words}")
        return Spent(len(self.races), at_once, in_turn)

    def reserve(self, cases: int) -> float:
        """Seconds kept for the races of some cases; never most of what is left."""
        return min(RACE_SECONDS * cases, max(0.0, self.deadline - time.monotonic()) / 2)

    # ---- before anything is timed ------------------------------------------------------------------------------------

    def prepare(self, folder: Path) -> float:
        """Builds, compiles and compares. Returns the seconds that do not grow with the number of cases."""
        for race in self.races:
            race.until(self.deadline - self.reserve(len(self.races)))
        at_once, stages, start = 0.0, self.stages(), time.monotonic()
        if self.together:
            self.start([pair for stage in stages for pair in stage], folder)
            at_once += time.monotonic() - start
        for stage in stages:
            start = time.monotonic()
            if not self.together:
                self.start(stage, folder)
            self.compile(stage)
            at_once += time.monotonic() - start if len(stage) > 1 else 0.0
        return at_once

    def stages(self) -> list[Stage]:
        """Who compiles at once, in order. Eager says what is right; rivals that time kernels are slow and come last."""
        pairs = [(race, name) for race in self.races for name in race.wanted]
        if not self.together:
            return [[pair] for pair in pairs]
        eager = [[pair] for pair in pairs if pair[1] == EAGER]
        ours = [[pair] for pair in sorted(pairs, key=lambda pair: pair[1] != OURS) if is_ours(pair[1])]
        others = [pair for pair in pairs if pair[1] != EAGER and not measures(pair[1])]
        measuring = [[pair] for pair in pairs if measures(pair[1]) and not is_ours(pair[1])]
        return [*eager, *ours, *([others] if others else []), *measuring]

    def start(self, stage: Stage, folder: Path) -> None:
        """Starts processes, and waits until all have imported and built: nobody does so while ours compiles."""
        for race, name in stage:
            race.start(name, folder)
        for race, name in as_they_answer(stage):
            race.ready(name)

    def compile(self, stage: Stage) -> None:
        told = [(race, name) for race, name in stage if race.prepare(name)]
        for race, name in as_they_answer(told):
            race.check(name, len(told) - 1)

    def tries_again(self, race: Race) -> bool:
        """Whether somebody found no memory who was not alone with ours."""
        return bool(race.late) and sum(len(race.wanted) for race in self.races) > 2

    # ---- after all ---------------------------------------------------------------------------------------------------

    def again(self, race: Race, folder: Path, work: Callable[[Race], None], done: Callable[[Race], None]) -> None:
        """Another try of each who found no memory beside others, with ours alone; of all where eager found none."""
        if not self.tries_again(race):
            return
        for names in [[name] for name in race.late] if race.reference is not None else [race.wanted]:
            if self.deadline - time.monotonic() < LEAST_SECONDS:
                race.postpone(names)
                continue
            self.say(f"{race.case} {', '.join(names)}: once more, with less memory taken by others")
            race.until(self.deadline - self.reserve(1))
            self.start([(race, name) for name in names], folder)
            for name in names:
                self.compile([(race, name)])
            race.until(self.deadline)
            if any(name in race.runners for name in names):
                work(race)
            race.leave(*(name for name in race.runners if name != OURS))
        done(race)


def as_they_answer(stage: Stage) -> Iterator[tuple[Race, str]]:
    """Those whose process is there, each when it can be heard."""
    waiting = [(race, name) for race, name in stage if name in race.runners]
    while waiting:
        yield waiting.pop(first_to_answer([race.runners[name] for race, name in waiting]))
