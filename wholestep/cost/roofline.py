"""Time of a step on a described machine: each kernel is as slow as the slowest of its bytes, its products, its launch.

bytes / copy bandwidth; for matrix products, convolutions and attention flops / the machine's GEMM rate for their
element type. Where launches are queued ahead (a GPU) a kernel takes at least the launch cost, else the cost is added.
What the description does not tell counts nothing and is listed in `unknown`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..machine.description import Description
from .ledger import Kernel, Ledger


@dataclass(frozen=True, slots=True)
class Roofline:
    """Seconds per kernel in the ledger's order, for one step, and how much of it each limit claims."""

    machine: str
    kernels: Sequence[float]
    memory: float
    compute: float
    launch: float
    unknown: Sequence[str] = ()

    @property
    def seconds(self) -> float:
        return sum(self.kernels)


def roofline(ledger: Ledger, machine: Description) -> Roofline:
    """The time a step would take if every kernel ran at the machine's limits."""
    launch_cost = machine.launch_seconds or 0.0
    unknown = [] if machine.launch_seconds is not None else ["launch cost"]
    times: list[float] = []
    claimed = {"memory": 0.0, "compute": 0.0, "launch": 0.0}
    for kernel in ledger.kernels:
        memory = kernel.bytes / machine.bandwidth
        compute = compute_seconds(kernel, machine)
        if compute is None:
            compute = 0.0
            missing = f"GEMM rate of {kernel.element}"
            if missing not in unknown:
                unknown.append(missing)
        launch = kernel.launches * launch_cost
        work = max(memory, compute)
        if machine.overlapped:
            claimed["launch"] += max(0.0, launch - work)
            times.append(max(work, launch))
        else:
            claimed["launch"] += launch
            times.append(work + launch)
        claimed["memory" if memory >= compute else "compute"] += work
    return Roofline(machine.name, times, claimed["memory"], claimed["compute"], claimed["launch"], unknown)


def compute_seconds(kernel: Kernel, machine: Description) -> float | None:
    """Seconds of arithmetic; 0 for what memory limits anyway, None where the machine's rate is not known."""
    if not kernel.matrix or not kernel.flops:
        return 0.0
    rate = machine.gemm.get(kernel.element)
    return None if rate is None else kernel.times * kernel.flops / rate
