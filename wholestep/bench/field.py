"""Some cases at once: their contenders start and compile beside each other, and each case races when it is ready.

Those that time kernels take turns (`clock.py`). Ours, torch.compile as it is, JAX and races have all of the machine:
who still compiles then stands still, which is no part of its compile time. How many it compiled beside is noted.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from .clock import Clock
from .contenders import EAGER, OURS, compiles_alone
from .race import Race
from .runner import Runner, first_to_answer, where

#: seconds of the time for all that are kept for the race of a case, and for a contender that compiles alone before it
RACE_SECONDS, COMPILE_SECONDS = 12.0, 30.0
#: seconds below which nothing further is begun
LEAST_SECONDS = 20.0
#: seconds after which it is said who compiles
PROGRESS_SECONDS = 60.0
#: bytes of a GPU that a process takes beside its tensors
PROCESS_BYTES = 0.7e9

Pair = tuple[Race, str]


class Field:
    """The cases. At most `at_once` are under way at a time, and as many as are known to fit the `room` of a GPU; 0: one
    after another, and in each of them everybody starts and compiles alone."""

    def __init__(
        self,
        races: Sequence[Race],
        at_once: int,
        deadline: float,
        say: Callable[[str], None],
        room: float = math.inf,
    ):
        self.races, self.at_once, self.deadline, self.say, self.room = races, at_once, deadline, say, room
        self.least = min(LEAST_SECONDS, (deadline - time.monotonic()) / 2)
        #: cases under way, since when, and who of each has not been told to compile yet
        self.open: dict[Race, float] = {}
        self.waiting: dict[Race, list[str]] = {}
        #: who is starting; who compiles, and beside how many others at most
        self.starting: list[Pair] = []
        self.busy: dict[Pair, int] = {}
        self.longest = 0.0
        self.told = time.monotonic()
        self.clock = Clock(None)

    def run(self, work: Callable[[Race], None], done: Callable[[Race], None]) -> None:
        """Prepares all; `work` and `done` with each case that is ready.

        When time runs out, who is ready races. Who found no memory has another try after all.
        """
        queue = list(self.races)
        with tempfile.TemporaryDirectory(prefix="wholestep-bench-") as folder:
            place = Path(folder)
            self.clock = Clock(place / "clock" if self.at_once else None)
            try:
                while self.begin(queue, place) or self.open:
                    self.hear()
                    for race in [race for race in self.open if self.is_ready(race)]:
                        with self.alone():
                            self.finish(race, place, work, done)
                if queue:
                    names = ", ".join(str(race.case) for race in queue)
                    self.say(f"{names}: not begun, {self.left():.0f} s are left")
                for race in self.races:
                    self.again(race, place, work, done)
            finally:
                for race in self.races:
                    race.leave(*race.runners)

    def left(self) -> float:
        return self.deadline - time.monotonic()

    # ---- who begins --------------------------------------------------------------------------------------------------

    def begin(self, queue: list[Race], folder: Path) -> bool:
        """Begins cases of the queue for which there is time and room. Whether it began one."""
        began = False
        while len(self.open) < max(1, self.at_once) and self.left() >= max(self.least, self.longest):
            race = next((race for race in queue if not self.open or self.fits(race)), None)
            if race is None:
                break
            queue.remove(race)
            self.open[race] = time.monotonic()
            self.waiting[race] = [name for name in race.wanted if self.at_once and not compiles_alone(name)]
            if self.at_once:
                for name in race.wanted:
                    race.start(
                        name, folder, None if compiles_alone(name) else self.clock.file
                    )  # the field's has it then
                self.starting += [(race, name) for name in race.wanted if name in race.runners]
            self.share_time()
            began = True
        return began

    def fits(self, race: Race) -> bool:
        """Whether there is memory for it beside those that are open. Ours are not there at the same time."""
        races = [*self.open, race]
        standing = sum(each.bytes_of(name) for each in races for name in each.wanted if not compiles_alone(name))
        alone = max(sum(each.bytes_of(name) for name in each.wanted if compiles_alone(name)) for each in races)
        return standing + alone + PROCESS_BYTES * sum(len(each.wanted) for each in races) <= self.room

    def share_time(self) -> None:
        """Who compiles has until the races of all open cases must begin."""
        for race in self.open:
            race.until(self.deadline - self.reserve(list(self.open)))

    def reserve(self, races: Sequence[Race]) -> float:
        """Seconds kept for some cases to be finished; never most of what is left."""
        alone = [(race, name) for race in races for name in race.wanted if not self.at_once or compiles_alone(name)]
        seconds = sum(race.compile_seconds_of(name, COMPILE_SECONDS) for race, name in alone)
        return min(RACE_SECONDS * len(races) + seconds, max(0.0, self.left()) / 2)

    # ---- who compiles beside others ----------------------------------------------------------------------------------

    def hear(self) -> None:
        """Takes the next answer, if one is waited for, and tells those to compile who can."""
        pairs = [*self.starting, *self.busy]
        if pairs:
            self.take_answer(pairs)
        for race in self.open:
            self.tell(race)
        for pair, beside in self.busy.items():
            self.busy[pair] = max(beside, len(self.busy) - 1)

    def take_answer(self, pairs: Sequence[Pair]) -> None:
        """Waits for one of some, and says meanwhile what they do."""
        runners = [race.runners[name] for race, name in pairs]
        while (place := first_to_answer(runners, self.told + PROGRESS_SECONDS)) is None:
            self.tell_progress()
        race, name = pair = pairs[place]
        if pair in self.starting:
            self.starting.remove(pair)
            race.ready(name)
        else:
            race.check(name, self.busy.pop(pair))

    def tell(self, race: Race) -> None:
        """Tells those of a case to compile who have started: eager first, which says what is right."""
        for name in list(self.waiting[race]):
            eager = EAGER in self.waiting[race] or (race, EAGER) in self.busy
            if (race, name) in self.starting or (name != EAGER and eager):
                continue
            self.waiting[race].remove(name)
            if race.prepare(name):
                self.busy[race, name] = 0

    def tell_progress(self) -> None:
        """Says who compiles, and what each is doing just now."""
        doing = where([race.runners[name] for race, name in self.busy]) if self.busy else []
        for (race, name), words in zip(self.busy, doing, strict=True):
            self.say(f"{race.case} {name}: compiles, {words}")
        self.told = time.monotonic()

    def is_ready(self, race: Race) -> bool:
        """Whether it waits for nobody who compiles beside others."""
        return not self.waiting[race] and not any(race is each for each, _ in [*self.starting, *self.busy])

    # ---- who has the machine -----------------------------------------------------------------------------------------

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Inside the block everybody stands still who compiles, and no kernel of theirs is on the clock.

        Without the clock by the deadline nothing is measured any more: all that is asked then is out of time.
        """
        others: list[Runner] = [race.runners[name] for race, name in [*self.starting, *self.busy]]
        with self.clock.held(self.deadline):
            began = time.monotonic()
            for runner in others:
                runner.stop()
            try:
                yield
            finally:
                if others:
                    self.clock.stop(time.monotonic() - began)
                for runner in others:
                    runner.go()

    def finish(self, race: Race, folder: Path, work: Callable[[Race], None], done: Callable[[Race], None]) -> None:
        """Those compile who do so alone; then the race."""
        end = self.deadline - self.reserve([each for each in self.open if each is not race])
        race.until(before_race(end))
        for name in race.wanted:
            if not self.at_once:
                self.start(race, name, folder)
            if (not self.at_once or compiles_alone(name)) and not race.gave_up(name):
                self.compile(race, name)
        race.until(end)
        work(race)
        race.leave(*(name for name in race.runners if name != OURS or not race.late))
        if self.tries_again(race):
            race.leave_open()
        done(race)
        self.longest = max(self.longest, time.monotonic() - self.open.pop(race))
        self.share_time()

    def start(self, race: Race, name: str, folder: Path) -> None:
        race.start(name, folder)
        if name in race.runners:
            race.ready(name)

    def compile(self, race: Race, name: str) -> None:
        if race.prepare(name):
            race.check(name, 0)

    def tries_again(self, race: Race) -> bool:
        """Whether somebody found no memory who was not alone with ours."""
        return bool(race.late) and sum(len(race.wanted) for race in self.races) > 2

    def again(self, race: Race, folder: Path, work: Callable[[Race], None], done: Callable[[Race], None]) -> None:
        """Another try of each who found no memory beside others, with ours alone; of all where eager found none."""
        if not self.tries_again(race):
            return
        for names in [[name] for name in race.late] if race.reference is not None else [race.wanted]:
            if self.left() < LEAST_SECONDS:
                race.postpone(names)
                continue
            self.say(f"{race.case} {', '.join(names)}: once more, with less memory taken by others")
            race.until(before_race(self.deadline))
            for name in names:
                self.start(race, name, folder)
            for name in names:
                self.compile(race, name)
            race.until(self.deadline)
            if any(name in race.runners for name in names):
                work(race)
            race.leave(*(name for name in race.runners if name != OURS))
        done(race)


def before_race(end: float) -> float:
    """Until when may be compiled for a race that must be over by then; at least half of what is left."""
    return end - min(RACE_SECONDS, max(0.0, end - time.monotonic()) / 2)
