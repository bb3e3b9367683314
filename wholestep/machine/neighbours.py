"""Whether a machine is left to itself while it is measured: what others take of it makes every figure too low.

Linux tells how long programs have waited for a CPU (/proc/pressure); elsewhere the load of the last minute has to do.
Of a GPU torch tells how busy it is before we are, where nvidia-ml-py is installed.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

PRESSURE = "/proc/pressure/cpu"
#: shares of the time that somebody waited for a CPU, and that a GPU was in use, from which figures are far off
WAITING, IN_USE = 0.05, 0.1


class Neighbours:
    """Looks at others from when it is made until it is asked."""

    def __init__(self, torch: Any, device: str, pressure: str = PRESSURE):
        self.cuda, self._pressure = device.startswith("cuda"), pressure
        self._in_use = gpu_in_use(torch, device) if self.cuda else None
        self._load, self._threads = load_average(), torch.get_num_threads()
        self._waited, self._start = seconds_waited(pressure), time.perf_counter()

    def at_work(self) -> str:
        """What others did meanwhile; "" where nothing is known of them, or too little to matter."""
        if self.cuda:
            return judge_gpu(self._in_use)
        waited, before = seconds_waited(self._pressure), self._waited
        if waited is None or before is None:
            return judge_load(self._load, self._threads, os.cpu_count() or 1)
        return judge_waiting(waited - before, time.perf_counter() - self._start)


def judge_gpu(in_use: float | None) -> str:
    if in_use is None or in_use < IN_USE:
        return ""
    return f"the GPU was in use {in_use:.0%} of the time before"


def judge_waiting(waited: float, seconds: float) -> str:
    share = waited / seconds if seconds > 0 else 0.0
    return f"programs waited for a CPU {share:.0%} of the time" if share > WAITING else ""


def judge_load(load: float | None, threads: int, cores: int) -> str:
    """The cores that others leave must do for our threads."""
    if load is None or load + threads <= cores + 0.5:
        return ""
    return f"the load was {load:.1f} before, and {threads} of {cores} cores are measured"


def seconds_waited(path: str = PRESSURE) -> float | None:
    """Seconds since the start of the system in which some program waited for a CPU; None where it does not tell."""
    try:
        text = Path(path).read_text(encoding="ascii")
    except OSError:  # another system, or a kernel without it
        return None
    total = next((word for word in text.split() if word.startswith("total=")), "")
    return int(total[6:]) / 1e6 if total[6:].isdigit() else None


def load_average() -> float | None:
    """Of the last minute; None where the system does not tell."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else None


def gpu_in_use(torch: Any, device: str) -> float | None:
    """The share of the last moments in which a GPU ran kernels; None where that cannot be asked."""
    try:
        return float(torch.cuda.utilization(device)) / 100
    except Exception:  # without nvidia-ml-py, or refused by the driver, whose errors have no common class
        return None
