"""Tables and progress bars for people: rich where it is installed, plain text where it is not.

Commands talk to a `Console` and never to rich itself, so that everything runs with torch alone.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import util
from typing import Any, Protocol, TextIO

WITHOUT_RICH = "(rich is not installed: plain text instead of drawn tables and live progress bars)"
_WIDTH_IN_FILES = 120


class Bar(Protocol):
    """A running progress bar."""

    def update(self, done: float, note: str = "") -> None: ...


class Console:
    """Prints to one stream. `use_rich` None means: if it is there."""

    def __init__(self, stream: TextIO | None = None, use_rich: bool | None = None):
        self.stream = stream if stream is not None else sys.stdout
        self._rich: Any = None
        if use_rich if use_rich is not None else util.find_spec("rich") is not None:
            from rich.console import Console as RichConsole

            width = None if self.stream.isatty() else _WIDTH_IN_FILES
            self._rich = RichConsole(file=self.stream, width=width, highlight=False, markup=False, emoji=False)
        else:
            self.line(WITHOUT_RICH)

    def line(self, text: str = "") -> None:
        if self._rich is not None:
            self._rich.print(text, soft_wrap=True)
        else:
            print(text, file=self.stream, flush=True)

    def heading(self, text: str) -> None:
        self.line()
        if self._rich is not None:
            self._rich.print(text, style="bold")
        else:
            self.line(text)

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> None:
        """A table whose first `left` columns are text and whose other columns are numbers, flush right."""
        if self._rich is None:
            self.line(plain_table(columns, rows, left))
            return
        from rich import box
        from rich.table import Table

        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        for index, name in enumerate(columns):
            table.add_column(name, justify="left" if index < left else "right", overflow="fold")
        for row in rows:
            table.add_row(*row)
        self._rich.print(table)

    @contextmanager
    def progress(self, what: str, total: float) -> Iterator[Bar]:
        """A bar that fills from 0 to `total` while the block runs."""
        if self._rich is None:
            yield _PlainBar(self, what, total)
            return
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (
            TextColumn("{task.description:<10}"),
            BarColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[note]}"),
        )
        with Progress(*columns, console=self._rich) as progress:
            yield _RichBar(progress, progress.add_task(what, total=total, note=""))


def plain_table(columns: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """The table as aligned text with a rule under the header."""
    widths = [max(len(cell) for cell in column) for column in zip(columns, *rows, strict=True)]
    ruled = [columns, ["-" * width for width in widths], *rows]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if index < left else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in ruled
    )


class _RichBar:
    def __init__(self, progress: Any, task: Any):
        self._progress, self._task = progress, task

    def update(self, done: float, note: str = "") -> None:
        self._progress.update(self._task, completed=done, note=note)


class _PlainBar:
    """Prints a line at each quarter of the way."""

    def __init__(self, console: Console, what: str, total: float):
        self._console, self._what, self._total, self._quarters = console, what, total, 0

    def update(self, done: float, note: str = "") -> None:
        quarters = min(4, int(4 * done / self._total)) if self._total > 0 else 4
        if quarters > self._quarters:
            self._quarters = quarters
            self._console.line(f"{self._what}: {25 * quarters} %  {note}".rstrip())
