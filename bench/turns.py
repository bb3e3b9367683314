"""Contenders in processes of their own that get ready at once and are then measured one at a time, in turns.

A contender is a command. When it is ready it writes what it has found so far, then measures once for each line it reads
(`serve`). `race` starts them, waits, and gives each its turns while the others do nothing.
"""

from __future__ import annotations

import json
import os
import pathlib
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any, TextIO

Found = dict[str, Any]


def describe(error: BaseException) -> str:
    """An error in one line."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:300]}"


def write(file: pathlib.Path, found: Found) -> None:
    """Writes a file that is whole as soon as it is there."""
    part = file.with_suffix(".part")
    part.write_text(json.dumps(found))
    part.rename(file)


def serve(folder: pathlib.Path, prepare: Callable[[], tuple[Found, Callable[[], Found]]], turns: TextIO) -> None:
    """The body of a contender: gets ready, then measures once for each line of `turns`. What fails is written down."""
    try:
        found, measure = prepare()
        write(folder / "ready.json", found)
        for number, _ in enumerate(turns):
            write(folder / f"turn{number}.json", measure())
    except Exception as error:
        traceback.print_exc()
        write(folder / "failed.json", {"error": describe(error)})


class Contender:
    """A process that gets ready and waits for its turns."""

    def __init__(self, name: str, command: list[str], folder: pathlib.Path, environ: dict[str, str] | None = None):
        self.name, self.folder = name, folder
        folder.mkdir(parents=True)
        self.log = folder / "log"
        self.process = subprocess.Popen(
            [*command, "--folder", str(folder)],
            stdin=subprocess.PIPE,
            stdout=self.log.open("w"),
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONUNBUFFERED": "1", **(environ or {})},
            start_new_session=True,
        )
        self.asked = 0
        self.error = ""

    def has(self, name: str) -> Found | None:
        """What it has written; None while it has not. Notices that it has failed or ended."""
        file = self.folder / f"{name}.json"
        if not file.exists() and not self.error:
            failed, over = self.folder / "failed.json", self.process.poll() is not None
            if failed.exists():
                self.error = json.loads(failed.read_text())["error"]
            elif over and not file.exists():
                tail = (self.log.read_text().strip().splitlines() or [""])[-1][:300]
                self.error = f"exit code {self.process.returncode}: {tail}"
        return json.loads(file.read_text()) if file.exists() else None

    def wait_for(self, name: str, deadline: float) -> Found | None:
        """The same, as soon as it is there; None once it has failed, which an end of time is."""
        while (found := self.has(name)) is None and not self.error:
            if time.time() > deadline:
                self.error = f"no {name} when the time was over"
                self.end()
            time.sleep(0.02)
        return found

    def turn(self, deadline: float) -> Found | None:
        """Lets it measure once."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(b"go\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass  # it has ended: the wait says how
        self.asked += 1
        return self.wait_for(f"turn{self.asked - 1}", deadline)

    def end(self) -> None:
        """Ends it with all processes it has started."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        if self.process.stdin is not None:
            self.process.stdin.close()


def race(
    makers: dict[str, Callable[[], Contender]],
    turns: int,
    ready_by: float,
    deadline: float,
    quiet: Callable[[str], bool] = lambda name: False,
) -> dict[str, Found]:
    """What each contender found: when it was ready, and a list of its turns; an error where it had one.

    quiet: contenders that measure while they get ready: those start after all others, one after the other.
    """
    together = {name: make() for name, make in makers.items() if not quiet(name)}
    running = dict(together)
    found: dict[str, Found] = {}
    try:
        for name, contender in together.items():
            found[name] = contender.wait_for("ready", ready_by) or {}
            print(f"  {name}: {contender.error or 'ready'}", flush=True)
        for name, make in makers.items():
            if quiet(name):
                running[name] = make()
                found[name] = running[name].wait_for("ready", deadline) or {}
                print(f"  {name}: {running[name].error or 'ready'}", flush=True)
        for name in makers:
            found[name]["turns"] = []
        for _ in range(turns):
            for name in makers:
                if not running[name].error and (measured := running[name].turn(deadline)):
                    found[name]["turns"].append(measured)
    finally:
        for contender in running.values():
            contender.end()
    for name, contender in running.items():
        if contender.error:
            found[name]["error"] = contender.error
            print(f"--- {name}: {contender.error}\n{contender.log.read_text()[-1500:]}", flush=True)
    return {name: found[name] for name in makers}


def own_command(file: str, *arguments: str) -> list[str]:
    """The command of a contender that is the same script."""
    return [sys.executable, file, *arguments]
