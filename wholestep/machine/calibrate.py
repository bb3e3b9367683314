"""Measures a machine for its description: memory, matrix products, the cost of a call, links to the host, the cache.

Every figure is a median. The CPU takes under 20 seconds by the clock, a CUDA device under 60 by its own events. It uses
as many threads as torch is set to. A description says by how much repeats differed, and whether others were at work.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from wholestep.machine.cpu import cpu_field, protect, rate_flags
from wholestep.machine.description import STEADY, Description
from wholestep.machine.neighbours import Neighbours

REPEATS = 7
CALLS = 2000
#: a matrix product grows until one takes this long, so that starting it does not show
LONG_ENOUGH = 0.02
ELEMENTS = {"f64": "float64", "f32": "float32", "bf16": "bfloat16", "f16": "float16"}
CPU_CACHES = "/sys/devices/system/cpu/cpu0/cache"
#: sizes read again and again to find the cache's end, as shares of what the device says it has
CACHE_SIZES = (0.25, 0.375, 0.5, 0.625, 0.75, 0.875, 1.0, 1.125, 1.25, 1.5, 4.0)
#: a cache that reads less than this much faster than memory cannot be told from it by the clock
CONTRAST = 1.15

Clock = Callable[[Callable[[], Any]], float]


def calibrate(device: str = "cpu") -> Description:
    """The description of this machine's CPU, or of a CUDA device."""
    protect()  # before torch, which may wake oneDNN
    import torch

    neighbours = Neighbours(torch, device)
    spreads: dict[str, float] = {}
    if not device.startswith("cuda"):
        found = calibrate_cpu(torch, Stopwatch(cpu_clock, spreads))
    else:
        with torch.cuda.device(device):
            found = calibrate_cuda(torch, Stopwatch(cuda_clock(torch), spreads))
    return judged(found, spreads, neighbours.at_work())


def judged(found: Description, spreads: dict[str, float], others: str) -> Description:
    """A description that says whether it is to be trusted."""
    worst = max(spreads, key=lambda what: spreads[what])
    busy = [f"repeats of {worst} differ by {spreads[worst]:.0%}"] if spreads[worst] > STEADY else []
    return replace(found, spread=spreads[worst], busy="; ".join([*busy, *filter(None, [others])]))


def calibrate_cpu(torch: Any, watch: Stopwatch) -> Description:
    size, where = 1 << 27, f"torch {torch.__version__}, {torch.get_num_threads()} threads"
    cache = cpu_cache_bytes()
    sources = {
        "bandwidth": f"median of {REPEATS} copies of {size >> 20} MiB, bytes read plus written; {where}",
        "gemm": f"median of {REPEATS} square products at the largest size tried, by element type; {where}",
        "launch_seconds": f"median of {REPEATS} runs of {CALLS} additions of 16 numbers, per call; {where}",
        "cache_bytes": "size of the last cache of the first core as the system tells it; shared with other cores",
        "instructions": "those that change rates, as the system tells them; AMX only where the kernel grants it",
    }
    if cache is None:
        del sources["cache_bytes"]
    found = Description(
        name=cpu_field("model name") or "unknown CPU",
        kind="cpu",
        bandwidth=copy_bandwidth(torch, "cpu", watch, size),
        gemm={e: gemm_rate(torch, "cpu", watch, e, getattr(torch, t), 128, 2048) for e, t in ELEMENTS.items()},
        launch_seconds=launch_cost(torch, "cpu", watch),
        cache_bytes=cache,
        cores=torch.get_num_threads(),
        instructions=rate_flags(),
        sources=sources,
    )
    watch.again(found.bandwidth, copy_bandwidth(torch, "cpu", watch, size))
    return found


def calibrate_cuda(torch: Any, watch: Stopwatch) -> Description:
    """The current CUDA device."""
    size, where = 1 << 30, f"torch {torch.__version__}, CUDA events"
    wake_up(torch)
    told = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
    share, cache_rate, why = cache_speed(torch, watch, told)
    reads = f"median of {REPEATS} replays of a graph of sums over one buffer, for buffers of many sizes; {where}"
    sources = {
        "bandwidth": f"median of {REPEATS} copies of {size >> 20} MiB, bytes read plus written; {where}",
        "read_bandwidth": f"median of {REPEATS} sums over {size >> 20} MiB; {where}",
        "write_bandwidth": f"median of {REPEATS} fills of {size >> 20} MiB; {where}",
        "gemm": f"median of {REPEATS} square products of random numbers at the largest size tried, by element type; "
        f"f32 in full precision, tf32 is f32 with torch's precision 'high'; {where}",
        "launch_seconds": f"median of {REPEATS} runs of {CALLS} additions of 16 numbers, per call, by the host's clock "
        f"with the wait at the end; {where}",
        "graph_launch_seconds": f"median of {REPEATS} replays of a graph of {CALLS} such calls, per kernel; {where}",
        "links": f"median of {REPEATS} copies of 256 MiB of pinned memory; {where}",
        "cache_bytes": "L2 as torch.cuda.get_device_properties tells it",
        "cache_share": why or f"where a read costs half-way between cache and memory; {reads}",
        "cache_bandwidth": why if cache_rate is None else f"from a quarter of the cache to half of it; {reads}",
    }
    found = Description(
        name=torch.cuda.get_device_name(),
        kind="cuda",
        bandwidth=copy_bandwidth(torch, "cuda", watch, size),
        gemm=cuda_gemm_rates(torch, watch),
        launch_seconds=launch_cost(torch, "cuda", Stopwatch(cpu_clock, watch.spreads)),
        graph_launch_seconds=graph_launch_cost(torch, watch),
        overlapped=True,
        links=link_speeds(torch, watch),
        read_bandwidth=read_bandwidth(torch, watch, size),
        write_bandwidth=write_bandwidth(torch, watch, size),
        cache_bytes=told,
        cache_share=share,
        cache_bandwidth=cache_rate,
        sources=sources,
    )
    watch.again(found.bandwidth, copy_bandwidth(torch, "cuda", watch, size))
    return found


# ---- clocks ----------------------------------------------------------------------------------------------------------


def cpu_clock(run: Callable[[], Any]) -> float:
    """Seconds of one run."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def cuda_clock(torch: Any) -> Clock:
    """Seconds of one run by the device's own events."""

    def measure(run: Callable[[], Any]) -> float:
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        first.record()
        run()
        last.record()
        last.synchronize()
        return first.elapsed_time(last) / 1e3

    return measure


class Stopwatch:
    """A clock that is asked several times, and notes by how much its answers differ."""

    def __init__(self, clock: Clock, spreads: dict[str, float]):
        self.clock, self.spreads = clock, spreads

    def median(self, what: str, run: Callable[[], Any]) -> float:
        """The median time of several runs; the first does not count."""
        self.clock(run)
        times = sorted(self.clock(run) for _ in range(REPEATS))
        middle = statistics.median(times)
        self.note(what, (times[-2] - times[0]) / middle)  # not the last: one interruption does no harm to a median
        return middle

    def again(self, first: float, last: float) -> None:
        """Notes what the same measurement gave at the start and at the end."""
        self.note("copies at the start and at the end", abs(first - last) / min(first, last))

    def note(self, what: str, spread: float) -> None:
        self.spreads[what] = max(spread, self.spreads.get(what, 0.0))


def wake_up(torch: Any, seconds: float = 0.5) -> None:
    """Work until an idle device has raised its clocks."""
    a = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        for _ in range(20):
            a @ a
        torch.cuda.synchronize()


# ---- memory and products ---------------------------------------------------------------------------------------------


def copy_bandwidth(torch: Any, device: str, watch: Stopwatch, size: int) -> float:
    source = torch.ones(size // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    return 2 * size / watch.median("copies", lambda: target.copy_(source))


def read_bandwidth(torch: Any, watch: Stopwatch, size: int) -> float:
    source, out = torch.ones(size // 4, device="cuda"), torch.zeros((), device="cuda")
    return size / watch.median("reads", lambda: torch.sum(source, dim=0, out=out))


def write_bandwidth(torch: Any, watch: Stopwatch, size: int) -> float:
    target = torch.empty(size // 4, device="cuda")
    return size / watch.median("writes", lambda: target.fill_(1.0))


def gemm_rate(torch: Any, device: str, watch: Stopwatch, name: str, dtype: Any, smallest: int, largest: int) -> float:
    """Flops per second of a product that is large enough. Of random numbers: zeros and ones take less power."""
    n = smallest
    while True:
        a = torch.randn(n, n, device=device).to(dtype)
        out = torch.empty_like(a)
        run = lambda a=a, out=out: torch.mm(a, a, out=out)  # noqa: E731
        # the shortest of three: one that was interrupted says nothing about the size
        if n == largest or min(watch.clock(run) for _ in range(3)) > LONG_ENOUGH:
            return 2 * n**3 / watch.median(f"{name} products", run)
        n *= 2


def cuda_gemm_rates(torch: Any, watch: Stopwatch) -> dict[str, float]:
    """By element type; float32 in full precision and, as tf32, in the precision torch calls high."""
    before = torch.get_float32_matmul_precision()
    rates: dict[str, float] = {}
    try:
        for name, dtype, precision in (
            ("f64", torch.float64, "highest"),
            ("f32", torch.float32, "highest"),
            ("tf32", torch.float32, "high"),
            ("bf16", torch.bfloat16, "highest"),
            ("f16", torch.float16, "highest"),
        ):
            torch.set_float32_matmul_precision(precision)
            rates[name] = gemm_rate(torch, "cuda", watch, name, dtype, 2048, 16384)
    finally:
        torch.set_float32_matmul_precision(before)
    return rates


# ---- calls and links -------------------------------------------------------------------------------------------------


def launch_cost(torch: Any, device: str, watch: Stopwatch) -> float:
    """Seconds per call of a small kernel, called again and again; on CUDA what the host and the queue take together."""
    x = torch.ones(16, device=device)
    out = torch.empty_like(x)
    wait = torch.cuda.synchronize if device.startswith("cuda") else lambda: None

    def run() -> None:
        for _ in range(CALLS):
            torch.add(x, x, out=out)
        wait()

    return watch.median("calls", run) / CALLS


def graph_launch_cost(torch: Any, watch: Stopwatch) -> float:
    """Seconds per small kernel of a CUDA graph, one after the other."""
    x = torch.ones(16, device="cuda")
    out = torch.empty_like(x)
    graph = captured(torch, lambda: torch.add(x, x, out=out), CALLS)
    return watch.median("calls of a graph", graph.replay) / CALLS


def captured(torch: Any, run: Callable[[], Any], times: int) -> Any:
    """A CUDA graph of several runs."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()  # what a first call sets up must not happen while a graph is captured
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(times):
            run()
    return graph


def link_speeds(torch: Any, watch: Stopwatch) -> dict[str, float]:
    size = 1 << 28
    host = torch.ones(size, dtype=torch.uint8).pin_memory()
    there = torch.empty(size, dtype=torch.uint8, device="cuda")
    return {
        "host_to_device": size / watch.median("copies from the host", lambda: there.copy_(host, non_blocking=True)),
        "device_to_host": size / watch.median("copies to the host", lambda: host.copy_(there, non_blocking=True)),
    }


# ---- caches ----------------------------------------------------------------------------------------------------------


def cpu_cache_bytes(path: str = CPU_CACHES) -> int | None:
    """The largest cache of the first core; None where the system does not tell."""
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    found = []
    for file in Path(path).glob("index*/size"):
        text = file.read_text(encoding="utf-8").strip()
        if text[:-1].isdigit() and text[-1] in units:
            found.append(int(text[:-1]) * units[text[-1]])
    return max(found, default=None)


def cache_speed(torch: Any, watch: Stopwatch, told: int) -> tuple[float | None, float | None, str]:
    """The share of the cache that holds data, bytes read from it per second, and what is wrong where one is missing.

    A buffer is read over and over by the kernels of one graph. While it fits, reads come from the cache.
    """
    sizes = [int(part * told) // 4096 * 4096 for part in CACHE_SIZES]
    return judge_cache(sizes, [seconds_per_read(torch, watch, size) for size in sizes], told)


def judge_cache(sizes: Sequence[int], seconds: Sequence[float], told: int) -> tuple[float | None, float | None, str]:
    """The first size and one twice as large lie in the cache: what they have in common is not reading."""
    double = min(range(len(sizes)), key=lambda i: abs(sizes[i] - 2 * sizes[0]))
    rate = (seconds[double] - seconds[0]) / (sizes[double] - sizes[0])
    if rate <= 0:
        return None, None, "a larger buffer was read as fast as a smaller one: nothing can be told"
    fixed = max(seconds[0] - rate * sizes[0], 0.0)
    end = cache_end(sizes, [(t - fixed) / size for t, size in zip(seconds, sizes, strict=True)])
    if end is None:
        return None, 1 / rate, f"reading the cache is less than {CONTRAST} times as fast as reading memory"
    return min(1.0, end / told), 1 / rate, ""


def seconds_per_read(torch: Any, watch: Stopwatch, size: int) -> float:
    source, out = torch.ones(size // 4, device="cuda"), torch.zeros((), device="cuda")
    times = min(64, max(8, (1 << 31) // size))
    graph = captured(torch, lambda: torch.sum(source, dim=0, out=out), times)
    return watch.median("reads from the cache", graph.replay) / times


def cache_end(sizes: Sequence[float], costs: Sequence[float]) -> float | None:
    """The size at which a byte first costs half-way from the cheapest to the last; None if all cost alike."""
    low, high = min(costs), costs[-1]
    if high < CONTRAST * low:
        return None
    middle = (low + high) / 2
    i = next(i for i in range(costs.index(low) + 1, len(costs)) if costs[i] >= middle)
    part = (middle - costs[i - 1]) / (costs[i] - costs[i - 1])
    return sizes[i - 1] + part * (sizes[i] - sizes[i - 1])
