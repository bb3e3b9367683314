"""Measures a machine for its description: copy bandwidth, matrix products, the cost of a call, links to the host.

Every figure is a median. Under 20 seconds; the CPU by the clock, a CUDA device by its own events. It uses as many
threads as torch is set to.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

from wholestep.machine.cpu import cpu_field, protect
from wholestep.machine.description import Description

REPEATS = 7
CALLS = 2000
#: a matrix product grows until one takes this long, so that starting it does not show
LONG_ENOUGH = 0.02
ELEMENTS = {"f64": "float64", "f32": "float32", "bf16": "bfloat16", "f16": "float16"}


def calibrate(device: str = "cpu") -> Description:
    """The description of this machine's CPU, or of a CUDA device."""
    protect()  # before torch, which may wake oneDNN
    import torch

    cuda = device.startswith("cuda")
    clock = cuda_clock(torch, device) if cuda else cpu_clock
    size = 1 << 30 if cuda else 1 << 27
    where = f"torch {torch.__version__}, " + ("CUDA events" if cuda else f"{torch.get_num_threads()} threads")
    sources = {
        "bandwidth": f"median of {REPEATS} copies of {size >> 20} MiB, bytes read plus written; {where}",
        "gemm": f"median of {REPEATS} square products at the largest size tried, by element type; {where}",
        "launch_seconds": f"median of {REPEATS} runs of {CALLS} additions of 16 numbers, per call; {where}",
    }
    links: dict[str, float] = {}
    if cuda:
        links = link_speeds(torch, device, clock)
        sources["links"] = f"median of {REPEATS} copies of 256 MiB of pinned memory; {where}"
    return Description(
        name=torch.cuda.get_device_name(device) if cuda else cpu_field("model name") or "unknown CPU",
        kind="cuda" if cuda else "cpu",
        bandwidth=bandwidth(torch, device, clock, size),
        gemm={name: gemm_rate(torch, device, clock, getattr(torch, dtype), cuda) for name, dtype in ELEMENTS.items()},
        launch_seconds=launch_cost(torch, device),
        overlapped=cuda,
        links=links,
        cores=None if cuda else torch.get_num_threads(),
        sources=sources,
    )


Clock = Callable[[Callable[[], Any]], float]


def cpu_clock(run: Callable[[], Any]) -> float:
    """Seconds of one run."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def cuda_clock(torch: Any, device: str) -> Clock:
    """Seconds of one run by the device's own events."""

    def measure(run: Callable[[], Any]) -> float:
        with torch.cuda.device(device):
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            first.record()
            run()
            last.record()
            torch.cuda.synchronize()
            return first.elapsed_time(last) / 1e3

    return measure


def median(clock: Clock, run: Callable[[], Any]) -> float:
    """The median time of several runs; the first does not count."""
    clock(run)
    return statistics.median(clock(run) for _ in range(REPEATS))


def bandwidth(torch: Any, device: str, clock: Clock, size: int) -> float:
    source = torch.ones(size // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    return 2 * size / median(clock, lambda: target.copy_(source))


def gemm_rate(torch: Any, device: str, clock: Clock, dtype: Any, cuda: bool) -> float:
    """Flops per second of a product that is large enough."""
    n, largest = (2048, 16384) if cuda else (128, 2048)
    while True:
        a = torch.ones(n, n, dtype=dtype, device=device)
        out = torch.empty_like(a)
        run = lambda a=a, out=out: torch.mm(a, a, out=out)  # noqa: E731
        # the shortest of three: one that was interrupted says nothing about the size
        if n == largest or min(clock(run) for _ in range(3)) > LONG_ENOUGH:
            return 2 * n**3 / median(clock, run)
        n *= 2


def launch_cost(torch: Any, device: str) -> float:
    """Seconds per call of a small kernel, called again and again; on CUDA what the host and the queue take together."""
    x = torch.ones(16, device=device)
    out = torch.empty_like(x)
    wait = torch.cuda.synchronize if device.startswith("cuda") else lambda: None

    def run() -> None:
        for _ in range(CALLS):
            torch.add(x, x, out=out)
        wait()

    return median(cpu_clock, run) / CALLS


def link_speeds(torch: Any, device: str, clock: Clock) -> dict[str, float]:
    size = 1 << 28
    host = torch.ones(size, dtype=torch.uint8).pin_memory()
    there = torch.empty(size, dtype=torch.uint8, device=device)
    return {
        "host_to_device": size / median(clock, lambda: there.copy_(host, non_blocking=True)),
        "device_to_host": size / median(clock, lambda: host.copy_(there, non_blocking=True)),
    }
