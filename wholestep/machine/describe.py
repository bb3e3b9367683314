"""A plain record of the machine: CPU, memory, torch, GPUs, and the tools beside them. Read by `wholestep doctor`.

Everything is looked up when asked for, and whatever is absent is None or empty rather than an error.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import metadata, util

from wholestep.machine.cpu import Amx, cpu_field, cpu_flags, protect

ISA_HIGHLIGHTS = (
    "sse4_2",
    "avx2",
    "fma",
    "f16c",
    "avx512f",
    "avx512_vnni",
    "avx512_bf16",
    "avx512_fp16",
    "amx_bf16",
    "amx_fp16",
    "sve",
    "asimd",
    "bf16",
)
COMPILERS = {"g++": "", "clang++": "", "nvcc": "release"}  # and a word of the line that tells the version
MLIR_OPT = ("mlir-opt-22", "mlir-opt")
OPTIONAL_PACKAGES = ("rich", "triton", "xdsl", "transformers", "hypothesis")


@dataclass(frozen=True, slots=True)
class Cuda:
    """One CUDA device."""

    name: str
    memory_bytes: int
    capability: str


@dataclass(frozen=True, slots=True)
class Machine:
    """What was found. Versions are None for what is absent."""

    system: str
    cpu: str
    cores: int
    memory_bytes: int | None
    isa: tuple[str, ...]
    amx: Amx
    python: str
    torch: str | None
    torch_problem: str | None = None
    cuda: tuple[Cuda, ...] = ()
    compilers: dict[str, str | None] = field(default_factory=dict)
    mlir_opt: str | None = None
    packages: dict[str, str | None] = field(default_factory=dict)


def describe() -> Machine:
    """Look at this machine. Imports torch, if it is there, to ask it about GPUs."""
    amx = protect()  # before torch, which may wake oneDNN
    torch_version, torch_problem, cuda = _torch()
    flags = cpu_flags() | frozenset(cpu_field("Features").split())  # 64-bit Arm calls its flags Features
    mlir_opt = next((tool for tool in MLIR_OPT if shutil.which(tool)), None)
    return Machine(
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        cpu=cpu_field("model name") or platform.processor() or platform.machine(),
        cores=usable_cores(),
        memory_bytes=memory_bytes(),
        isa=tuple(name for name in ISA_HIGHLIGHTS if name in flags),
        amx=amx,
        python=platform.python_version(),
        torch=torch_version,
        torch_problem=torch_problem,
        cuda=cuda,
        compilers={tool: tool_version([tool, "--version"], wanted) for tool, wanted in COMPILERS.items()},
        mlir_opt=mlir_opt and tool_version([mlir_opt, "--version"], wanted="version"),
        packages={name: package_version(name) for name in OPTIONAL_PACKAGES},
    )


def usable_cores() -> int:
    """Cores this process may run on, which can be fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def memory_bytes() -> int | None:
    """Physical memory, or None where the system does not tell."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # no sysconf at all (Windows), or not these names
        return None


def tool_version(command: Sequence[str], wanted: str = "") -> str | None:
    """The first line a tool prints of itself that holds `wanted`; None where the tool is absent or cannot run."""
    if shutil.which(command[0]) is None:
        return None
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    lines = [line.strip() for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    return next((line for line in lines if wanted in line), command[0]) if done.returncode == 0 else None


def package_version(name: str) -> str | None:
    """The version of an importable package, without importing it."""
    if util.find_spec(name) is None:
        return None
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "unknown version"


def _torch() -> tuple[str | None, str | None, tuple[Cuda, ...]]:
    """torch's version, what is wrong with it if it cannot be imported, and its CUDA devices."""
    if util.find_spec("torch") is None:
        return None, "torch is not installed", ()
    try:
        import torch
    except (ImportError, OSError) as problem:  # OSError: a shared library of torch does not load
        return None, f"torch is installed but cannot be imported: {problem}", ()
    devices = []
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        seen = torch.cuda.get_device_properties(index)
        devices.append(Cuda(seen.name, seen.total_memory, f"{seen.major}.{seen.minor}"))
    return str(torch.__version__), None, tuple(devices)
