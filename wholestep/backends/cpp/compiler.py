"""From generated text to functions that can be called: finds a C++ compiler, compiles units in parallel, loads them.

Objects are kept by what they were made from: source, flags, compiler and processor. Only bytes whose checksum was
verified are loaded, from a folder that nobody else can write. A unit that fails is compiled again kernel by kernel, so
that one bad kernel does not take others with it.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import platform
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from ...errors import WholestepError
from ..store import Objects, usable_folder

FLAGS = (
    *("-std=gnu++17", "-O3", "-march=native", "-fopenmp", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off"),
    *("-fwrapv", "-fno-strict-aliasing", "-w", "-shared", "-fPIC", "-x", "c++"),
)
#: seconds after which a compiler that has not finished is stopped
TIMEOUT = 120.0
#: kernels in one unit at most; one whose text is so long is a unit by itself
UNIT, LONG = 12, 8000
HEADER = Path(__file__).with_name("functions.h")
PROBE = """
extern "C" float wholestep_probe(const float* x) {
  float s = 0;
#pragma omp parallel for simd reduction(+ : s)
  for (int i = 0; i < 1024; ++i) s += x[i] / 3;
  return s;
}
"""


class CompilerError(WholestepError):
    """The C++ compiler is missing, or it failed on a kernel."""


@dataclass(frozen=True, slots=True)
class Compiler:
    """A compiler that was seen to work, and all that its objects depend on beside the source."""

    command: str
    flags: tuple[str, ...]
    identity: str

    def compile(self, source: str, timeout: float = TIMEOUT) -> bytes:
        """The shared object of a source; CompilerError with what the compiler said."""
        with tempfile.TemporaryDirectory(prefix="wholestep-") as folder:
            text, made = Path(folder, "kernels.cpp"), Path(folder, "kernels.so")
            text.write_text(source)
            run_compiler([self.command, *self.flags, "-o", str(made), str(text), "-x", "none", *runtime()], timeout)
            return made.read_bytes()


def run_compiler(command: Sequence[str], timeout: float) -> None:
    try:
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
    except OSError as error:
        raise CompilerError(f"{command[0]} cannot be run: {error.strerror or error}") from None
    with process:
        try:
            said, _ = process.communicate(timeout=timeout)
        except BaseException as error:
            os.killpg(process.pid, signal.SIGKILL)  # the compiler proper is a child of what we started
            process.wait()
            if isinstance(error, subprocess.TimeoutExpired):
                raise CompilerError(f"{command[0]} did not finish within {timeout:g} s") from None
            raise
    if process.returncode:
        lines = [line for line in said.splitlines() if "error" in line] or said.splitlines() or ["no message"]
        raise CompilerError(f"{command[0]} failed ({process.returncode}): {lines[0][:300]}")


def runtime() -> list[str]:
    """torch's own OpenMP library: its threads and ours are the same, `torch.set_num_threads` holds for both."""
    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError:
        return []
    loaded = sorted({line.split()[-1] for line in maps.splitlines() if "/libgomp" in line})
    return [f"-Wl,--as-needed,{loaded[0]}"] if loaded else []


# ---- finding one -----------------------------------------------------------------------------------------------------


def working_compiler() -> Compiler | str:
    """The first compiler that works, or why there is none."""
    return _compiler(os.environ.get("CXX", ""), os.environ.get("PATH", ""))


@cache
def _compiler(chosen: str, path: str) -> Compiler | str:
    problems = []
    for name in [chosen] if chosen else ["g++", "clang++"]:
        command = shutil.which(name, path=path)
        if command is None:
            problems.append(f"{name} is not installed" if not chosen else f"CXX={name} is no program")
            continue
        try:
            found = Compiler(command, FLAGS, identity(command))
            key = digest(PROBE, found.identity)
            objects = kept()
            if objects.read("so", key) is None:
                objects.write("so", key, found.compile(PROBE, timeout=60))
            return found
        except CompilerError as error:
            problems.append(str(error))
    return "; ".join(problems)


def identity(command: str) -> str:
    """Compiler, flags and processor: an object of another machine must not be loaded."""
    try:
        done = subprocess.run([command, "--version"], capture_output=True, text=True, errors="replace", timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CompilerError(f"{command} --version fails: {error}") from None
    if done.returncode:
        raise CompilerError(f"{command} --version fails ({done.returncode})")
    libraries = [Path(option.rpartition(",")[2]).name for option in runtime()]
    return "\n".join([command, done.stdout, *FLAGS, *libraries, processor()])


def processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    wanted = ("model name", "flags", "Features", "CPU part")
    return "\n".join(dict.fromkeys(line for line in lines if line.startswith(wanted)))


def kept() -> Objects:
    return Objects(usable_folder())


def digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


@cache
def header() -> str:
    return HEADER.read_text()


# ---- building --------------------------------------------------------------------------------------------------------

Kernel = tuple[str, str]  # the name of a function, and its source
Built = dict[str, Any]  # by name: the function, or the exception


def build_all(
    kernels: Sequence[Kernel],
    using: Compiler,
    report: Callable[[int, int], None] | None = None,
    objects: Objects | None = None,
) -> Built:
    """Every kernel as a function of one pointer, by name; an exception where there is none."""
    objects = kept() if objects is None else objects
    built: Built = {}
    loaded: dict[str, ctypes.CDLL | None] = {}
    missing = []
    for name, text in kernels:
        function = from_cache(name, using, objects, loaded)
        if function is None:
            missing.append((name, text))
        else:
            built[name] = function
    done = len(kernels) - len(missing)
    if report:
        report(done, len(kernels))
    workers = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with ThreadPoolExecutor(workers) as pool:
        units = split(missing, workers)
        for unit, found in zip(units, pool.map(lambda unit: build_unit(unit, using, objects), units), strict=True):
            built |= found
            done += len(unit)
            if report:
                report(done, len(kernels))
    return built


def split(kernels: Sequence[Kernel], workers: int) -> list[list[Kernel]]:
    """The long ones, then units of about equal length, at least one per worker where there is enough."""
    long = [[k] for k in kernels if len(k[1]) > LONG]
    kernels = [k for k in kernels if len(k[1]) <= LONG]
    if not kernels:
        return long
    count = max(-(-len(kernels) // UNIT), min(workers, -(-len(kernels) // 2)))
    units: list[list[Kernel]] = [[] for _ in range(count)]
    lengths = [0] * count
    for kernel in sorted(kernels, key=lambda k: (-len(k[1]), k[0])):
        least = lengths.index(min(lengths))
        units[least].append(kernel)
        lengths[least] += len(kernel[1])
    return [*long, *units]


def from_cache(name: str, using: Compiler, objects: Objects, loaded: dict[str, ctypes.CDLL | None]) -> Any:
    """A kernel that was built before. A small record says in which object it is."""
    record = objects.read("json", digest(name, using.identity))
    if record is None:
        return None
    try:
        unit = json.loads(record)["unit"]
        if unit not in loaded:
            data = objects.read("so", unit)
            loaded[unit] = None if data is None else load(data)
        library = loaded[unit]
        return None if library is None else function_of(library, name)
    except (ValueError, KeyError, TypeError, AttributeError, OSError):
        return None  # damaged, or of another kind: it is built again


def build_unit(unit: Sequence[Kernel], using: Compiler, objects: Objects) -> Built:
    source = "\n".join([header(), *(text for _, text in unit)])
    key = digest(source, using.identity)
    try:
        with objects.lock("so", key):
            data = objects.read("so", key)
            if data is None:
                data = using.compile(source)
                objects.write("so", key, data)
                for name, _ in unit:
                    objects.write("json", digest(name, using.identity), json.dumps({"unit": key}).encode())
        library = load(data)
        return {name: function_of(library, name) for name, _ in unit}
    except (CompilerError, OSError, AttributeError) as error:
        if len(unit) == 1:
            return {unit[0][0]: error if isinstance(error, CompilerError) else CompilerError(str(error))}
        built: Built = {}
        for kernel in unit:
            built |= build_unit([kernel], using, objects)
        return built


def load(data: bytes) -> ctypes.CDLL:
    """Loads exactly these bytes, from a folder that is ours alone. Each time under a new name: names are remembered."""
    with tempfile.TemporaryDirectory(prefix="wholestep-") as folder:
        path = Path(folder, "kernels.so")
        path.write_bytes(data)
        return ctypes.CDLL(str(path))


def function_of(library: ctypes.CDLL, name: str) -> Any:
    function = getattr(library, name)
    function.argtypes, function.restype = [ctypes.c_void_p], ctypes.c_int
    return function
