"""Compiles candidates in parallel processes, without a GPU, into Triton's cache.

Workers are separate programs that import Triton alone: nothing is forked from a process that uses CUDA, and the user's
script is not run again. They also compile what launches kernels, which is C code, and CUDA C++ (whose code goes to
whoever asked). What a compile took and needs is kept beside the cache, so that a warm start asks no compiler.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..store import usable_folder
from .worker import assumed, digest, note_of

#: seconds without a job after which a worker ends
IDLE = 20.0
#: numbers of pointers that most kernels have: what launches those is compiled before the first kernel is known
USUAL = range(2, 16)

if TYPE_CHECKING:
    from .families import Function
    from .generate import Candidate


@dataclass(frozen=True)
class CompileInfo:
    """What a candidate took to compile and what its kernels need; of several kernels the most."""

    seconds: float
    registers: int
    #: bytes per thread that did not fit into registers
    spills: int
    shared: int
    #: what Triton calls the kernel in its cache
    hash: str = ""


class CompileError(Exception):
    """A kernel that Triton or ptxas refused; the message is theirs."""


def compile_for(
    candidates: Sequence[Candidate],
    capability: int = 90,
    report: Callable[[int, int], None] | None = None,
    workers: int = 0,
) -> dict[str, CompileInfo | Exception]:
    """Compiles for GPUs of a compute capability; needs Triton and its ptxas, and no GPU."""
    jobs = {c.key: [job_of(c, f, capability) for f in c.functions if f.grid] for c in candidates}
    known = run({digest(j): j for js in jobs.values() for j in js}, report, workers)
    made: dict[str, CompileInfo | Exception] = {}
    for key, wanted in jobs.items():
        answers = [known[digest(j)] for j in wanted]
        errors = [a["error"] for a in answers if "error" in a]
        if errors:
            made[key] = CompileError(errors[0])
        else:
            registers, spills, shared = (
                max((a[n] for a in answers), default=0) for n in ("registers", "spills", "shared")
            )
            made[key] = CompileInfo(sum(a["seconds"] for a in answers), registers, spills, shared)
    return made


def job_of(candidate: Candidate, function: Function, capability: int, aligned: bool = True) -> dict[str, Any]:
    """What a worker is told. `aligned`: tensors start at multiples of 16 bytes (`assumed`)."""
    source = alone(candidate.source, function.name)
    pointers = [candidate.pointers[i] for i in function.arguments]
    return {
        "source": source,
        "file": file_name(source),
        "name": function.name,
        "pointers": pointers,
        "warps": function.warps,
        "stages": 2,
        "aligned": assumed(pointers) if aligned else [],
        "capability": capability,
    }


@lru_cache(maxsize=4096)
def alone(source: str, name: str) -> str:
    """One function of a source with those that it calls: what several candidates share is then compiled once."""
    texts = {text.partition("def ")[2].partition("(")[0]: text for text in re.split(r"^(?=@)", source, flags=re.M)}
    wanted, left = set(), [name]
    while left:
        one = left.pop()
        wanted.add(one)
        left += (set(re.findall(r"\w+", texts[one])) & texts.keys()) - wanted
    return "\n\n".join(text.strip() + "\n" for own, text in texts.items() if own in wanted)


def file_name(source: str) -> str:
    return f"<wholestep {hashlib.sha256(source.encode()).hexdigest()[:16]}>"


def triton_cache() -> Path:
    """Triton's cache folder, which every process of a build shares."""
    own = os.environ.get("TRITON_CACHE_DIR")
    folder = Path(own) if own else (usable_folder() or Path(temporary().name)) / "triton"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@cache
def temporary() -> tempfile.TemporaryDirectory[str]:
    """For this process alone, where nothing can be kept."""
    return tempfile.TemporaryDirectory(prefix="wholestep-")


# ---- worker processes ------------------------------------------------------------------------------------------------


def run(jobs: dict[str, dict[str, Any]], report: Callable[[int, int], None] | None, workers: int) -> dict[str, Any]:
    """The answers to jobs; those that were compiled before are read from the cache."""
    with Compilers(workers, launchers=False) as compilers:
        compilers.add(jobs)
        return compilers.wait(jobs, report)


class Compilers:
    """Worker processes that compile while the caller does something else.

    They end some time after the last job, or at once where this is used as a context, in which case what nobody waited
    for is not compiled to its end: Triton's cache only ever gets whole files. launchers: what launches kernels is
    compiled here as well, ahead of the kernels.
    """

    def __init__(self, workers: int = 0, launchers: bool = True):
        self.launchers = launchers
        self.folder = triton_cache()
        self.most = workers or cores()
        self.jobs: dict[str, dict[str, Any]] = {}
        self.answers: dict[str, dict[str, Any]] = {}
        #: what is still to be begun, by weight: what somebody will wait for, and what may be asked for later
        self.wanted: dict[str, float] = {}
        self.perhaps: dict[str, float] = {}
        self.changed = threading.Condition()
        self.closed = False
        self.threads: list[threading.Thread] = []
        self.workers: list[subprocess.Popen[str]] = []

    def __enter__(self) -> Compilers:
        return self

    def __exit__(self, *error: object) -> None:
        with self.changed:
            self.closed = True
            self.drop()
            threads, workers = self.threads[:], self.workers[:]
            self.changed.notify_all()
        for worker in workers:
            worker.kill()
        for thread in threads:
            thread.join()

    def start(self) -> None:
        """Starts all workers: they get ready, and what launches kernels, while there is nothing to compile yet."""
        with self.changed:
            self.add_launchers(USUAL)
            self.employ(self.most)

    def add(self, jobs: Mapping[str, dict[str, Any]], perhaps: bool = False) -> None:
        """Begins with jobs, the heaviest first; those that were compiled before are read from the cache.

        perhaps: nobody may ever wait for them, so others go first. A job may have a function `then`, which is called
        with the code that it gives.
        """
        for key in jobs:
            if key not in self.jobs and (kept := read(self.folder, key)) is not None:
                self.answer(key, kept)
        with self.changed:
            new = (job for key, job in jobs.items() if key not in self.jobs)
            self.add_launchers(len(job["pointers"]) for job in new if "pointers" in job)
            for key, job in jobs.items():
                if key not in self.jobs or key in self.perhaps:
                    self.jobs[key] = job
                    self.perhaps.pop(key, None)
                    (self.perhaps if perhaps else self.wanted)[key] = weight(job)
            self.employ(len(self.jobs) - len(self.answers))
            self.changed.notify_all()

    def add_launchers(self, arguments: Iterable[int]) -> None:
        """Begins with what launches kernels with so many pointers. Nobody waits for it: whoever needs it too early, or
        where it could not be made, compiles it himself."""
        for number in arguments if self.launchers else ():
            key = f"launcher {number}"
            if key not in self.jobs:
                self.jobs[key] = {"launcher": number}
                self.wanted[key] = weight(self.jobs[key])

    def employ(self, count: int) -> None:
        """Has so many workers, or as many as there may be."""
        while len(self.threads) < min(count, self.most):
            self.threads.append(threading.Thread(target=self.work, daemon=True))
            self.threads[-1].start()

    def drop(self) -> None:
        """Forgets what was not begun yet."""
        with self.changed:
            for key in (*self.wanted, *self.perhaps):
                del self.jobs[key]
            self.wanted.clear()
            self.perhaps.clear()

    def wait(self, keys: Iterable[str], report: Callable[[int, int], None] | None = None) -> dict[str, Any]:
        """The answers to some jobs, as soon as there are all."""
        wanted = list(keys)
        with self.changed:
            while True:
                done = sum(key in self.answers for key in wanted)
                if report is not None:
                    report(done, len(wanted))
                if done == len(wanted):
                    return {key: self.answers[key] for key in wanted}
                self.changed.wait()

    def first_done(self, groups: Sequence[Collection[str]]) -> int:
        """Waits until all jobs of one group are answered; which group that is, the first where there are several."""
        with self.changed:
            while True:
                for number, keys in enumerate(groups):
                    if all(key in self.answers for key in keys):
                        return number
                self.changed.wait()

    def answer(self, key: str, answer: dict[str, Any]) -> None:
        with self.changed:
            self.answers[key] = answer
            self.jobs[key] = {}  # (its source is not needed any more)
            self.changed.notify_all()

    def take(self) -> str | None:
        """What is to be compiled next; None where there was nothing for long, or will be nothing."""
        with self.changed:
            self.changed.wait_for(lambda: self.closed or self.wanted or self.perhaps, IDLE)
            pending = self.wanted or self.perhaps
            if self.closed or not pending:
                self.threads.remove(threading.current_thread())
                return None
            key = max(pending, key=pending.__getitem__)
            del pending[key]
            return key

    def work(self) -> None:
        worker: subprocess.Popen[str] | None = None
        with suppress(OSError):  # (the first job says it again)
            worker = self.hire()
        while (key := self.take()) is not None:
            try:
                if worker is None or worker.poll() is not None:
                    worker = self.hire()
                job = self.jobs[key]
                answer = ask(worker, {k: v for k, v in job.items() if k != "then"})
                if "error" not in answer and "source" in job:
                    write(self.folder, key, answer)
                elif "code" in answer:
                    job["then"](base64.b64decode(answer.pop("code")))
            except (OSError, ValueError) as error:  # whoever waits is told
                answer = {"error": f"{type(error).__name__}: {error}", "seconds": 0.0}
            self.answer(key, answer)
        if worker is not None:
            worker.kill()  # (to close its input does not end it where a process was forked that has it too)
            worker.wait()

    def hire(self) -> subprocess.Popen[str]:
        worker = start(self.folder)
        self.workers.append(worker)
        if self.closed:
            worker.kill()
        return worker


def weight(job: dict[str, Any]) -> float:
    """What takes long is begun first, so that nobody waits for it alone at the end: that is what has much text. What
    launches kernels comes before all."""
    return len(job["source"]) if "source" in job else math.inf


def cores() -> int:
    return max(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1, 1)


def start(folder: Path) -> subprocess.Popen[str]:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(folder)
    return subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("worker.py"))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=environment,
    )


def ask(worker: subprocess.Popen[str], job: dict[str, Any]) -> dict[str, Any]:
    assert worker.stdin is not None and worker.stdout is not None
    try:
        worker.stdin.write(json.dumps(job) + "\n")
        worker.stdin.flush()
        line = worker.stdout.readline()
    except OSError as error:
        line = ""
        worker.kill()
        return {"error": f"the compiling process broke off: {error}", "seconds": 0.0}
    if not line:
        return {"error": f"the compiling process ended with status {worker.wait()}", "seconds": 0.0}
    answer: dict[str, Any] = json.loads(line)
    return answer


def read(folder: Path, key: str) -> dict[str, Any] | None:
    """What was kept of an earlier compile; a broken file counts as none."""
    try:
        kept = json.loads(note_of(folder, key).read_text())
        return {**asdict(CompileInfo(**kept)), "seconds": 0.0}
    except (OSError, ValueError, TypeError):
        return None


def write(folder: Path, key: str, answer: dict[str, Any]) -> None:
    path = note_of(folder, key)
    path.parent.mkdir(exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
        json.dump(answer, file)
    os.replace(file.name, path)
