"""A progress line on stderr: drawn over itself on a terminal, one plain line per report where output goes to a file.

It knows nothing of training: `fit` gives it how far it is and what to say.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

_BAR_WIDTH = 20


class ProgressLine:
    """`show` draws; `close` ends the line so that whatever is printed next starts on a fresh one."""

    def __init__(self, total: int | None, stream: TextIO | None = None):
        self.total = total
        self.stream = stream if stream is not None else sys.stderr
        self._on_terminal = self.stream.isatty()
        self._drawn = 0  # characters now on the terminal's line

    def show(self, done: int, note: str) -> None:
        """Draws (terminal) or prints (file) where the run is."""
        of_all = f"{done}/{self.total}" if self.total is not None else str(done)
        if not self._on_terminal:
            self._write(f"step {of_all}  {note}\n")
            return
        text = f"step {of_all} {self._bar(done)}{note}"[: shutil.get_terminal_size().columns - 1]
        self._write("\r" + text.ljust(self._drawn))
        self._drawn = len(text)

    def close(self) -> None:
        if self._drawn:
            self._write("\n")
            self._drawn = 0

    def _bar(self, done: int) -> str:
        if self.total is None:
            return ""
        filled = _BAR_WIDTH * done // self.total
        return f"[{'#' * filled}{' ' * (_BAR_WIDTH - filled)}] "

    def _write(self, text: str) -> None:
        self.stream.write(text)
        self.stream.flush()


@contextmanager
def progress_line(total: int | None, shown: bool) -> Iterator[ProgressLine | None]:
    """A line that is closed however the block ends; None where nothing is to be shown."""
    line = ProgressLine(total) if shown else None
    try:
        yield line
    finally:
        if line is not None:
            line.close()


def short(number: float) -> str:
    """A count in a few characters: 950, 12.3k, 4.56M."""
    for limit, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= limit:
            return f"{number / limit:.3g}{unit}"
    return f"{number:.3g}"
