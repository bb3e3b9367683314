"""A contender's process, seen from the parent: orders go in, answers come out, and it ends when it is told to.

It has caches of its own in a temporary folder, so that what it compiles is compiled cold.
"""

from __future__ import annotations

import json
import math
import os
import re
import secrets
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .workload import NETWORKS, Case

#: what a process runs: the time that importing Wholestep takes after torch counts as a part of its compile time
START = (
    "import sys, time; sys.path.insert(0, sys.argv.pop(1)); import torch; start = time.perf_counter(); "
    "from wholestep.bench import worker; worker.main(time.perf_counter() - start)"
)
CACHES = {
    "WHOLESTEP_CACHE": "wholestep",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TRITON_CACHE_DIR": "triton",
    "CUDA_CACHE_PATH": "cuda",
}

#: the signal by which a process is asked what it does, one that is ignored by default (LLVM, by which Triton compiles
#: in the process itself, takes over SIGUSR1 and others); seconds it has to write its stack; frames of it that are told
ASKED, HEARING, FRAMES = signal.SIGURG, 0.5, 8


@dataclass(frozen=True)
class Settings:
    """How races are run. `together`: how many cases are under way at once; 0: everybody starts and compiles alone."""

    device: str
    precision: str
    steps: int = 50
    rounds: int = 7
    block_seconds: float = 0.4
    limit: float = 300.0
    together: int = 0
    profile: bool = False
    threads: int = 0
    networks: str = NETWORKS
    bind: dict[str, int] = field(default_factory=dict)

    @property
    def names_kernels(self) -> bool:
        """Whether kernels that PyTorch generates for a CPU name themselves, for profiles: that costs a little, and
        such times are not kept."""
        return self.profile and self.device == "cpu"


class Failed(Exception):
    """A contender did not do what it was told. `out_of_time`: the time for all was over, which says nothing of it."""

    def __init__(self, why: str, out_of_memory: bool = False, out_of_time: bool = False):
        super().__init__(why)
        self.out_of_memory, self.out_of_time = out_of_memory, out_of_time


class Runner:
    """A contender's process, seen from the parent."""

    def __init__(
        self,
        case: Case,
        contender: str,
        settings: Settings,
        folder: Path,
        deadline: float,
        caches: Path | None = None,
        clock: Path | None = None,
    ):
        self.contender, self.deadline = contender, deadline
        self.limit = self.left = settings.limit  # seconds that it may work, and may still work
        #: since its last order: seconds for which it was stopped, and since when it is
        self.rested, self.stopped = 0.0, 0.0
        #: seconds by order, of orders whose answer was waited for at once
        self.seconds: dict[str, float] = {}
        place = folder / f"{contender.replace(':', '-')}-{secrets.token_hex(4)}"
        place.mkdir(parents=True)
        self.log, self.caches = place / "log", caches or place
        environ = dict(os.environ) | {name: str(self.caches / cache) for name, cache in CACHES.items()}
        environ |= {"PYTHONUNBUFFERED": "1", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        if settings.names_kernels:
            environ["TORCHINDUCTOR_CPP_ENABLE_KERNEL_PROFILE"] = "1"
        root = str(Path(__file__).resolve().parents[2])
        reading, writing = os.pipe()
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", START, root, str(writing)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environ,
                pass_fds=(writing,),
                start_new_session=True,
            )
        os.close(writing)
        self.answers, self.rest = reading, b""
        who: dict[str, Any] = {"contender": contender, "case": (case.network, case.size), "bind": settings.bind}
        who["clock"] = None if clock is None else str(clock)
        how = {name: getattr(settings, name) for name in ("precision", "device", "threads", "networks")}
        try:
            self.tell("begin", **who, **how)  # it answers when it has imported what it needs
        except BaseException:
            self.end()
            raise

    def tell(self, do: str, **more: Any) -> None:
        """Gives an order. What it answers is for `hear`."""
        assert self.process.stdin is not None
        self.told, self.rested = time.monotonic(), 0.0
        try:
            self.process.stdin.write((json.dumps({"do": do} | more) + "\n").encode())
            self.process.stdin.flush()
        except BrokenPipeError:
            raise Failed(f"its process has ended: {self.last_words()}") from None

    def times_left(self) -> tuple[float, float]:
        """Seconds that are left to it since its last order, and to all."""
        now = time.monotonic()
        return self.left - (now - self.told - self.rested), self.deadline - now

    def hear(self) -> dict[str, Any]:
        """The answer to the last order; Failed where it is an error, or takes longer than is left."""
        while b"\n" not in self.rest:
            own, all_left = self.times_left()
            if not select.select([self.answers], [], [], max(0.0, min(own, all_left, 1.0)))[0]:
                if min(own, all_left) > 0:
                    continue
                if own <= all_left:
                    raise Failed(f"over its limit of {self.limit:.0f} s, {self.where()}")
                raise Failed(f"no time was left for all, {self.where()}", out_of_time=True)
            read = os.read(self.answers, 1 << 20)
            if not read:
                self.process.wait()
                raise Failed(f"its process ended with code {self.process.returncode}: {self.last_words()}")
            self.rest += read
        self.left -= time.monotonic() - self.told - self.rested
        line, _, self.rest = self.rest.partition(b"\n")
        answer = json.loads(line)
        if "error" in answer:
            raise Failed(answer["error"], answer.get("out_of_memory", False))
        return answer

    def ask(self, do: str, **more: Any) -> dict[str, Any]:
        start = time.monotonic()
        self.tell(do, **more)
        answer = self.hear()
        self.seconds[do] = self.seconds.get(do, 0.0) + time.monotonic() - start
        return answer

    def stop(self) -> None:
        """It and whatever it has started stand still, until `go`."""
        self.stopped = time.monotonic()
        self.signal(signal.SIGSTOP)

    def go(self) -> None:
        self.rested += time.monotonic() - self.stopped
        self.signal(signal.SIGCONT)

    def signal(self, number: int) -> None:
        with suppress(ProcessLookupError):  # it and its children are gone
            os.killpg(self.process.pid, number)

    def last_words(self) -> str:
        lines = [line for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        return lines[-1].strip()[:300] if lines else "it said nothing"

    def where(self) -> str:
        """What a process that does not answer is doing: innermost frames of its stack, which it writes to its log."""
        return where([self])[0]

    def kill(self) -> None:
        """Ends the process and whatever it has started, at once: it has said all it knows."""
        self.signal(signal.SIGKILL)

    def end(self) -> None:
        """`kill`, and what is left of it goes too."""
        self.kill()
        self.process.wait()
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):  # the last order was never read
            self.process.stdin.close()
        os.close(self.answers)


def where(runners: Sequence[Runner]) -> list[str]:
    """What processes are doing that have not answered, asked at once."""
    said = [runner.log.stat().st_size for runner in runners]
    for runner in runners:
        with suppress(ProcessLookupError):
            os.kill(runner.process.pid, ASKED)
    time.sleep(HEARING)
    found = []
    for runner, start in zip(runners, said, strict=True):
        found.append(told(runner.log.read_bytes()[start:].decode(errors="replace")))
    return found


def told(stack: str) -> str:
    """The innermost frames of what a process has written."""
    lines = re.findall(r'File "([^"]+)", line (\d+) in (\S+)', stack)
    frames = [f"{function} ({Path(file).name}:{line})" for file, line, function in lines[:FRAMES]]
    return "in " + " < ".join(frames) if frames else "and does not say where"


def first_to_answer(runners: Sequence[Runner], until: float = math.inf) -> int | None:
    """The place of one that can be heard without waiting: it has answered, or has no time left to. None: nobody by
    then."""
    while time.monotonic() < until:
        least = min(min(runner.times_left()) for runner in runners)
        answered = select.select([runner.answers for runner in runners], [], [], max(0.0, min(least, 1.0)))[0]
        for place, runner in enumerate(runners):
            if runner.answers in answered or min(runner.times_left()) <= 0:
                return place
    return None
