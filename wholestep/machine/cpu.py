"""CPU features that are announced but may not be usable.

AMX needs a permission from the kernel. Where the CPU announces AMX and the kernel refuses it (some virtual machines and
sandboxes), bf16 through oneDNN can die with SIGILL; `protect` asks the kernel and, on a no, caps oneDNN below AMX.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from functools import cache

ISA_VARIABLE = "ONEDNN_MAX_CPU_ISA"
ISA_CAP = "AVX512_CORE_BF16"  # the widest instruction set below AMX that still has bf16

#: instructions that change how fast matrix products are: CPUs of one name, as a virtual machine tells it, may lack some
RATE_FLAGS = ("avx2", "avx512f", "avx512_bf16", "avx512_fp16", "amx_bf16", "amx_fp16", "sve", "bf16")

_ISA_VARIABLES = (ISA_VARIABLE, "DNNL_MAX_CPU_ISA")  # oneDNN reads the second, older name where the first is unset
_AMX_FLAGS = frozenset({"amx_tile", "amx_bf16"})
_SYS_ARCH_PRCTL = 158
_ARCH_REQ_XCOMP_PERM = 0x1023
_XFEATURE_XTILEDATA = 18


@dataclass(frozen=True, slots=True)
class Amx:
    """Where this process stands with AMX.

    `granted` is None where nobody was asked. `cap` is the oneDNN instruction-set cap in force, if any, and
    `capped_here` says whether Wholestep set it in this process. `error` is the errno of a refusal.
    """

    announced: bool
    granted: bool | None = None
    cap: str | None = None
    capped_here: bool = False
    error: int | None = None

    @property
    def safe(self) -> bool:
        """Whether bf16 through oneDNN keeps away from AMX instructions that would kill the process."""
        return self.granted is not False or (self.cap is not None and not _admits_amx(self.cap))

    @property
    def verdict(self) -> str:
        """One sentence for a person."""
        if not self.announced:
            return "AMX is not announced by this CPU; nothing to do"
        if self.granted:
            return "AMX is announced and granted; oneDNN may use it"
        refusal = "AMX is announced by the CPU but refused by the kernel"
        if self.error:
            refusal += f" ({os.strerror(self.error)})"
        if self.capped_here:
            return f"{refusal}; Wholestep set {ISA_VARIABLE}={self.cap}, so bf16 runs without it"
        if self.safe:
            return f"{refusal}; oneDNN was already capped at {self.cap}, so bf16 runs without it"
        return f"{refusal}, yet {self.cap} lets oneDNN use it: bf16 can die with SIGILL; unset {ISA_VARIABLE}"


@cache
def protect() -> Amx:
    """Ask for AMX once and cap oneDNN if the kernel refuses. Cheap, safe to call often, imports no torch.

    It must come before oneDNN's first use in this process: oneDNN reads the cap once.
    """
    if platform.system() != "Linux" or platform.machine().lower() not in ("x86_64", "amd64"):
        return Amx(announced=False)
    return settle(cpu_flags(), request_amx, os.environ)


def settle(flags: frozenset[str], request: Callable[[], int], environ: MutableMapping[str, str]) -> Amx:
    """The decision itself, from the CPU's flags, the kernel's answer (0 or an errno) and the environment."""
    if not flags >= _AMX_FLAGS:
        return Amx(announced=False)
    cap = next((environ[name] for name in _ISA_VARIABLES if environ.get(name)), None)
    error = request()
    if error == 0:
        return Amx(announced=True, granted=True, cap=cap)
    if cap is not None:
        return Amx(announced=True, granted=False, cap=cap, error=error)
    environ[ISA_VARIABLE] = ISA_CAP
    return Amx(announced=True, granted=False, cap=ISA_CAP, capped_here=True, error=error)


def request_amx() -> int:
    """Ask the kernel for the AMX tile state of this process: 0 when granted, else an errno."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    ctypes.set_errno(0)
    arguments = (ctypes.c_long(number) for number in (_SYS_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA))
    if libc.syscall(*arguments) == 0:
        return 0
    return ctypes.get_errno() or errno.ENOSYS


def cpu_flags(path: str = "/proc/cpuinfo") -> frozenset[str]:
    """The feature flags of the first processor; empty where the system does not list them."""
    return frozenset(cpu_field("flags", path).split())


def rate_flags() -> tuple[str, ...]:
    """The instructions of this CPU that change how fast products are; AMX only where this process may use it."""
    return usable(cpu_flags() | frozenset(cpu_field("Features").split()), protect())


def usable(flags: frozenset[str], amx: Amx) -> tuple[str, ...]:
    """Those of some flags that change rates, in order."""
    refused = amx.granted is False
    return tuple(name for name in RATE_FLAGS if name in flags and not (refused and name.startswith("amx")))


def cpu_field(name: str, path: str = "/proc/cpuinfo") -> str:
    """One field of the first processor that has it, or an empty string. Stops reading there."""
    try:
        with open(path, encoding="utf-8", errors="replace") as lines:
            for line in lines:
                key, _, value = line.partition(":")
                if key.strip() == name:
                    return value.strip()
    except FileNotFoundError:
        pass  # not Linux, or a sandbox without /proc: nothing is announced
    return ""


def _admits_amx(cap: str) -> bool:
    """Whether a oneDNN cap still lets AMX instructions through."""
    return "AMX" in cap.upper() or cap.upper() in ("ALL", "DEFAULT")
