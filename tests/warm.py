"""Python programs in processes of their own that need not import torch again: they are forks of one that has.

Importing wholestep and what a first capture needs takes four seconds of a core. `run` and `start` take what would
follow `python` on a command line. What hash seeds or the import of torch do can only be seen in a fresh interpreter.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).resolve().parents[1]
LARGEST = 1 << 17  # bytes of a request: a program's arguments and environment


# ---- the tests' side -------------------------------------------------------------------------------------------------


def run(
    arguments: Sequence[str], environment: Mapping[str, str], cwd: Path = ROOT, input: str = "", timeout: float = 240
) -> subprocess.CompletedProcess[str]:
    """As `subprocess.run` of a Python program, with one thread and with what it printed."""
    (done,) = run_at_once(1, arguments, environment, cwd, input, timeout)
    return done


def run_at_once(
    count: int,
    arguments: Sequence[str],
    environment: Mapping[str, str],
    cwd: Path = ROOT,
    input: str = "",
    timeout: float = 240,
) -> list[subprocess.CompletedProcess[str]]:
    """The same program several times, all at the same time."""
    with contextlib.ExitStack() as stack:

        def file(text: str = "") -> IO[str]:
            made = stack.enter_context(tempfile.TemporaryFile("w+"))
            made.write(text)
            made.seek(0)  # which also writes what waits
            return made

        files = [(file(input), file(), file()) for _ in range(count)]
        running = [start(arguments, environment, *three, cwd=cwd) for three in files]
        statuses = [process.wait(timeout) for process in running]
        return [
            subprocess.CompletedProcess(list(arguments), status, *(_written(f) for f in three[1:]))
            for status, three in zip(statuses, files, strict=True)
        ]


def _written(file: IO[str]) -> str:
    file.seek(0)
    return file.read()


@dataclass(frozen=True)
class Process:
    """A program that is running. Its processes are one group."""

    group: int
    ended: IO[bytes]

    def wait(self, timeout: float = 240) -> int:
        """Its exit status; a negative number is the signal that ended it. After `timeout` seconds it is ended."""
        with self.ended:
            if not select.select([self.ended], [], [], timeout)[0]:
                os.killpg(self.group, signal.SIGKILL)
                raise TimeoutError(f"the program did not end within {timeout:g} s")
            return int(self.ended.readline())


def start(
    arguments: Sequence[str],
    environment: Mapping[str, str],
    stdin: IO[Any],
    stdout: IO[Any],
    stderr: IO[Any],
    cwd: Path = ROOT,
) -> Process:
    """As `subprocess.Popen` of a Python program, on files that are open."""
    request = json.dumps([list(arguments), dict(environment), str(cwd)]).encode()
    reading, writing = os.pipe()
    files = [stdin.fileno(), stdout.fileno(), stderr.fileno(), writing]
    socket.send_fds(_forking(environment.get("TRITON_INTERPRET", "")), [request], files)
    os.close(writing)
    ended = open(reading, "rb", buffering=0)  # noqa: SIM115 - the process keeps it
    return Process(int(ended.readline()), ended)


@functools.cache
def _forking(interpreted: str) -> socket.socket:
    """A way to the process that forks; Triton reads TRITON_INTERPRET when it is imported, so there may be two."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    command = [sys.executable, "-m", "tests.warm", str(theirs.fileno())]
    own = {"OMP_NUM_THREADS": "1", "TRITON_INTERPRET": interpreted, "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
    environment = os.environ | own  # the last: what has asked CUDA itself has no forks that can use it
    process = subprocess.Popen(command, cwd=ROOT, env=environment, pass_fds=[theirs.fileno()])
    theirs.close()
    atexit.register(process.wait)
    atexit.register(ours.close)  # it ends when nobody is there to ask; what was registered last runs first
    return ours


# ---- the process that forks ------------------------------------------------------------------------------------------


def warm() -> None:
    """Imports what programs of the tests import."""
    import wholestep  # noqa: F401 - before torch: it looks at the processor first

    # isort: split
    import torch

    torch.export.export(torch.nn.ReLU(), (torch.zeros(1),), strict=False)
    gc.collect()
    gc.freeze()  # what was imported is not walked, so its pages stay shared


def serve(requests: socket.socket) -> list[str] | None:
    """Forks for every request. Returns in the forks, with what they are to run; at the end, with None."""
    while True:
        message, files, *_ = socket.recv_fds(requests, LARGEST, 4)
        if not message:
            return None
        keeper = os.fork()
        if keeper == 0:
            os.setpgid(0, 0)
            requests.close()
            arguments, environment, cwd = json.loads(message)
            *streams, ended = files
            os.write(ended, f"{os.getpid()}\n".encode())
            program = os.fork()
            if program:
                status = os.waitstatus_to_exitcode(os.waitpid(program, 0)[1])
                os.write(ended, f"{status}\n".encode())
                os._exit(0)
            os.close(ended)
            for number, stream in enumerate(streams):
                os.dup2(stream, number)
                os.close(stream)
            os.environ.clear()
            os.environ.update(environment)
            os.chdir(cwd)
            return list(arguments)
        for file in files:
            os.close(file)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def become(arguments: list[str]) -> None:
    """Runs `-m MODULE ...`, `-c CODE ...` or `FILE ...` as Python would."""
    kind, *rest = arguments
    if kind == "-m":
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif kind == "-c":
        sys.argv = ["-c", *rest[1:]]
        sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(rest[0], "<string>", "exec"), sys.modules["__main__"].__dict__)
    else:
        sys.argv = arguments
        sys.path[0] = str(Path(kind).parent)
        runpy.run_path(kind, run_name="__main__")


def main() -> None:
    requests = socket.socket(fileno=int(sys.argv[1]))
    warm()
    program = serve(requests)
    if program is not None:
        become(program)


if __name__ == "__main__":
    main()
