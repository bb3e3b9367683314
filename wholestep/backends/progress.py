"""How far a compile is, as a bar on a terminal that goes away when it is done. Elsewhere nothing is shown."""

from __future__ import annotations

import shutil
import sys
import time
from dataclasses import dataclass, field
from typing import TextIO

#: seconds of work before a bar is worth a look
AFTER = 1.0
WIDTH = 24


@dataclass(slots=True)
class Bar:
    """Called with what is done, how much of it, and of how much."""

    stream: TextIO = field(default_factory=lambda: sys.stderr)
    began: float = field(default_factory=time.monotonic)
    drawn: int = 0

    def __call__(self, what: str, done: int, total: int) -> None:
        if not self.stream.isatty() or time.monotonic() - self.began < AFTER:
            return
        filled = WIDTH * done // max(total, 1)
        text = f"wholestep: {what} [{'#' * filled}{' ' * (WIDTH - filled)}] {done}/{total}"
        text = "" if done >= total else text[: shutil.get_terminal_size().columns - 1]
        if text or self.drawn:
            self.stream.write("\r" + text.ljust(self.drawn) + ("" if text else "\r"))
            self.stream.flush()
        self.drawn = len(text)
