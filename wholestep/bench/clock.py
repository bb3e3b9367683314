"""One clock for contenders that compile at once: whoever trains has the device to itself meanwhile, and whoever times a
kernel, if that comes soon: there are tens of thousands of kernels, and all who compile would wait for one.

It is a file that is locked. In it are the seconds for which those that compile were stopped, because somebody else was
measured: neither they nor waiting for the clock are a part of anybody's compile time.
"""

from __future__ import annotations

import fcntl
import os
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

#: seconds between two looks at a clock that somebody else has, where there is a limit to waiting
LOOK = 0.002
#: seconds for which somebody who times a kernel waits for the others: it is timed many times, and its least time counts
PATIENCE = 0.1


class Clock:
    """A process's view of the clock. Without a file it is nobody else's, and nobody waits for it."""

    def __init__(self, file: Path | str | None):
        self.file = None if file is None else Path(file)
        #: seconds for which this process waited for the clock, and was not stopped
        self.waited = 0.0
        #: how often it had it, for how many seconds in all, and at most; how often it went on without
        self.turns, self.had, self.longest, self.without = 0, 0.0, 0.0, 0
        self._turn = threading.RLock()
        self._depth = 0

    def now(self) -> float:
        """Seconds in which this process could work, from some point in time on."""
        return time.perf_counter() - self.waited - self.stopped()

    def facts(self) -> dict[str, float]:
        return {name: getattr(self, name) for name in ("waited", "turns", "had", "longest", "without")}

    def stopped(self) -> float:
        """Seconds for which all who compile have been stopped."""
        text = "" if self.file is None or not self.file.exists() else self.file.read_text()
        return float(text) if text else 0.0

    def stop(self, seconds: float) -> None:
        """Says that all were stopped for some more seconds; whoever does so has the clock."""
        assert self.file is not None
        self.file.write_text(repr(self.stopped() + seconds))

    def turn(self) -> AbstractContextManager[bool]:
        """The clock for a kernel's time: had by now, or done without."""
        return self.held(time.monotonic() + PATIENCE)

    @contextmanager
    def held(self, deadline: float | None = None) -> Iterator[bool]:
        """The clock is this process's; also inside of a block that has it already. False: not by the deadline."""
        with self._turn:
            if self.file is None or self._depth:
                yield True
                return
            began = self.now()
            handle = os.open(self.file, os.O_RDWR | os.O_CREAT)
            try:
                have = taken(handle, deadline)
                self.waited += self.now() - began
                self._depth, start = 1, time.perf_counter()
                yield have
                if have:
                    seconds = time.perf_counter() - start
                    self.turns, self.had, self.longest = self.turns + 1, self.had + seconds, max(self.longest, seconds)
                else:
                    self.without += 1
            finally:
                self._depth = 0
                os.close(handle)  # which unlocks it


def taken(handle: int, deadline: float | None) -> bool:
    """Waits for a lock; False where the deadline comes first."""
    if deadline is None:
        fcntl.flock(handle, fcntl.LOCK_EX)
        return True
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > deadline:
                return False
            time.sleep(LOOK)
