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
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..store import cache_folder

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
            most = {n: max((a[n] for a in answers), default=0) for n in ("registers", "spills", "shared")}
            made[key] = CompileInfo(sum(a["seconds"] for a in answers), **most)
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


def digest(job: dict[str, Any]) -> str:
    import triton

    return hashlib.sha256(json.dumps([triton.__version__, job], sort_keys=True).encode()).hexdigest()[:32]


def triton_cache() -> Path:
    """Triton's cache folder, which every process of a build shares."""
    own = os.environ.get("TRITON_CACHE_DIR")
    folder = Path(own) if own else cache_folder() / "triton"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


# ---- worker processes ------------------------------------------------------------------------------------------------


def run(jobs: dict[str, dict[str, Any]], report: Callable[[int, int], None] | None, workers: int) -> dict[str, Any]:
    """The answers to jobs; those that were compiled before are read from the cache."""
    folder = triton_cache()
    answers = {key: kept for key in jobs if (kept := read(folder, key)) is not None}
    todo: queue.SimpleQueue[str] = queue.SimpleQueue()
    for key in jobs:
        if key not in answers:
            todo.put(key)
    left = len(jobs) - len(answers)
    lock = threading.Lock()
    if report is not None:
        report(len(answers), len(jobs))

    def work() -> None:
        worker: subprocess.Popen[str] | None = None
        while True:
            try:
                key = todo.get_nowait()
            except queue.Empty:
                break
            if worker is None or worker.poll() is not None:
                worker = start(folder)
            answer = ask(worker, jobs[key])
            if "error" not in answer:
                write(folder, key, answer)
            with lock:
                answers[key] = answer
                if report is not None:
                    report(len(answers), len(jobs))
        if worker is not None:
            assert worker.stdin is not None
            worker.stdin.close()
            worker.wait()

    threads = [threading.Thread(target=work) for _ in range(min(left, workers or cores()))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return answers


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
        kept = json.loads((folder / "wholestep" / f"{key}.json").read_text())
        return {**asdict(CompileInfo(**kept)), "seconds": 0.0}
    except (OSError, ValueError, TypeError):
        return None


def write(folder: Path, key: str, answer: dict[str, Any]) -> None:
    (folder / "wholestep").mkdir(exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=folder / "wholestep", delete=False) as file:
        json.dump(answer, file)
    os.replace(file.name, folder / "wholestep" / f"{key}.json")
