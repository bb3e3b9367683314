"""How long a call takes: the least of several, of as many as it takes to see that least again and again.

One that is clearly slower than what it has to beat is soon given up. On a GPU a call that launches quickly is timed
while the device is busy with the one before, others as part of a graph, so that launching costs nothing.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable
from contextlib import suppress

import torch

#: seconds that timing one call may take on a CPU
PATIENCE = 0.04
#: the least is known once so many calls took at most so many times as long
SEEN, NEAR = 4, 1.05
#: so many, where what it has to beat takes no more than so many times as long, nor less
SEEN_IF_CLOSE, CLOSE = 12, 1.2
#: a call is made twice where both took so many times as long as what it has to beat, and so many seconds
CLEARLY, SLOW = 3.0, 1e-3
#: on a GPU once: where it took so many times as long, and so many seconds more, which launching may take
CLEARLY_ON_GPU, LAUNCHING = 2.0, 1e-4
#: launching a call takes no part in its time where the device takes so many times as long for it
BUSY = 5.0

Call = Callable[[], object]


def on_cpu(call: Call, to_beat: float = math.inf, before: float = 0.0, patience: float | None = None) -> float:
    """before: seconds that it took when it was called last: where that is long and clearly too slow it is enough.
    patience: seconds that timing may take, if it is not `PATIENCE`."""
    clock, best, near, calls = time.perf_counter, math.inf, list[float](), 0
    patience = PATIENCE if patience is None else patience
    if before > max(CLEARLY * to_beat, patience):
        return before
    end = clock() + patience
    while True:
        start = clock()
        call()
        now, calls = clock(), calls + 1
        best = min(best, now - start)
        near = [t for t in (*near, now - start) if t <= NEAR * best]
        if now >= end or (calls > 1 and best > max(CLEARLY * to_beat, SLOW)):
            return best
        close = best / CLOSE < to_beat < best * CLOSE
        if len(near) >= (SEEN_IF_CLOSE if close else SEEN):
            return best


def make_room(device: torch.device) -> None:
    """Gives memory that torch holds for later back: a graph cannot take it, nor others what a graph had. Seldom, as it
    takes long."""
    free, whole = torch.cuda.mem_get_info(device)
    if free < whole // 2:
        torch.cuda.empty_cache()


def on_gpu(
    call: Call, device: torch.device, to_beat: float = math.inf, stream: torch.cuda.Stream | None = None
) -> float:
    stream = torch.cuda.Stream(device) if stream is None else stream
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        alone, launching = once(call, stream)
        too_slow = CLEARLY_ON_GPU * to_beat + LAUNCHING
        if too_slow < alone < BUSY * launching:  # what takes long may be what a library does in its first call
            alone, launching = min((alone, launching), once(call, stream))
        if alone > too_slow:
            return alone
        count = min(10, max(1, int(1e-3 / max(alone, 1e-6))))  # a slow one shows in fewer calls

        def calls() -> None:
            for _ in range(count):
                call()

        graph = None if alone > BUSY * launching else captured(calls, device)
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(4)]
        for mark in marks:
            calls() if graph is None else graph.replay()
            mark.record(stream)
    stream.synchronize()
    best = min(a.elapsed_time(b) for a, b in itertools.pairwise(marks)) / count / 1e3
    if graph is not None:
        graph.reset()
    return best


def once(call: Call, stream: torch.cuda.Stream) -> tuple[float, float]:
    """Seconds that one call takes, and those for launching it."""
    first, then = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start = time.perf_counter()
    first.record(stream)
    call()
    then.record(stream)
    launching = time.perf_counter() - start
    then.synchronize()
    return first.elapsed_time(then) / 1e3, launching


def captured(calls: Call, device: torch.device) -> torch.cuda.CUDAGraph:
    """What calls do as one graph of the current stream."""
    graph = torch.cuda.CUDAGraph()
    make_room(device)
    graph.capture_begin()  # (torch.cuda.graph would give all free memory back to the driver first, each time)
    try:
        calls()
    except Exception:
        with suppress(RuntimeError):  # the graph is void: what it says about that is not the reason
            graph.capture_end()
        graph.reset()
        raise
    graph.capture_end()
    return graph
