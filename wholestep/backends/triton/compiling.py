"""Compiles candidates in parallel processes, without a GPU, into Triton's cache.

Workers are separate programs that import Triton alone: nothing is forked from a process that uses CUDA, and the user's
script is not run again. What a compile took and needs is kept beside the cache, so that a warm start asks no compiler.
"""

from __future__ import annotations

import hashlib
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..store import cache_folder
from .worker import digest, note_of

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
    """What a worker is told. `aligned`: all tensors start at multiples of 16 bytes."""
    return {
        "source": candidate.source,
        "file": file_name(candidate.source),
        "name": function.name,
        "pointers": [candidate.pointers[i] for i in function.arguments],
        "warps": function.warps,
        "stages": 2,
        "aligned": aligned,
        "capability": capability,
    }


def file_name(source: str) -> str:
    return f"<wholestep {hashlib.sha256(source.encode()).hexdigest()[:16]}>"


def triton_cache() -> Path:
    """Triton's cache folder, which every process of a build shares."""
    own = os.environ.get("TRITON_CACHE_DIR")
    folder = Path(own) if own else cache_folder() / "triton"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


# ---- worker processes ------------------------------------------------------------------------------------------------


def run(jobs: dict[str, dict[str, Any]], report: Callable[[int, int], None] | None, workers: int) -> dict[str, Any]:
    """The answers to jobs; those that were compiled before are read from the cache."""
    with Compilers(workers) as compilers:
        compilers.add(jobs)
        return compilers.wait(jobs, report)


class Compilers:
    """Worker processes that compile while the caller does something else. At the end of the context they are gone, and
    what nobody waited for is not compiled to its end: Triton's cache only ever gets whole files."""

    def __init__(self, workers: int = 0):
        self.folder = triton_cache()
        self.most = workers or cores()
        self.jobs: dict[str, dict[str, Any]] = {}
        self.answers: dict[str, dict[str, Any]] = {}
        self.answered = threading.Condition()
        self.todo: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self.threads: list[threading.Thread] = []
        self.workers: list[subprocess.Popen[str]] = []

    def __enter__(self) -> Compilers:
        return self

    def __exit__(self, *error: object) -> None:
        with suppress(queue.Empty):
            while True:
                self.todo.get_nowait()
        for _ in self.threads:
            self.todo.put(None)
        for worker in list(self.workers):
            worker.kill()
        for thread in self.threads:
            thread.join()

    def add(self, jobs: Mapping[str, dict[str, Any]]) -> None:
        """Begins with jobs, one after the other; those that were compiled before are read from the cache."""
        for key, job in jobs.items():
            if key in self.jobs:
                continue
            self.jobs[key] = job
            kept = read(self.folder, key)
            if kept is not None:
                with self.answered:
                    self.answers[key] = kept
                continue
            self.todo.put(key)
            if len(self.threads) < self.most:
                self.threads.append(threading.Thread(target=self.work, daemon=True))
                self.threads[-1].start()

    def wait(self, keys: Iterable[str], report: Callable[[int, int], None] | None = None) -> dict[str, Any]:
        """The answers to some jobs, as soon as there are all."""
        wanted = list(keys)
        with self.answered:
            while True:
                done = sum(key in self.answers for key in wanted)
                if report is not None:
                    report(done, len(wanted))
                if done == len(wanted):
                    return {key: self.answers[key] for key in wanted}
                self.answered.wait()

    def work(self) -> None:
        worker: subprocess.Popen[str] | None = None
        while (key := self.todo.get()) is not None:
            try:
                if worker is None or worker.poll() is not None:
                    worker = start(self.folder)
                    self.workers.append(worker)
                answer = ask(worker, self.jobs[key])
                if "error" not in answer:
                    write(self.folder, key, answer)
            except (OSError, ValueError) as error:  # whoever waits is told
                answer = {"error": f"{type(error).__name__}: {error}", "seconds": 0.0}
            with self.answered:
                self.answers[key] = answer
                self.answered.notify_all()
        if worker is not None:
            assert worker.stdin is not None
            worker.stdin.close()
            worker.wait()


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
