"""What bench/kernels_*.py share: calls as CUDA graphs, timed in turns, and where the figures go.

Without a GPU the same path is walked; times then mean nothing.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

Call = Callable[[], Any]
Name = TypeVar("Name")
#: more than any L2 cache of today
FLUSH_BYTES = 256 * 2**20


def as_graph(calls: Sequence[Call], count: int = 1) -> Call:
    """So many calls, out of those given in turn, as one CUDA graph: the host's time does not count.

    Without a GPU: each of them, one after the other.
    """
    if not torch.cuda.is_available():
        return lambda: [call() for call in calls]
    with torch.cuda.stream(torch.cuda.Stream()):
        for call in calls:
            call()
    torch.cuda.synchronize()
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        for i in range(count):
            calls[i % len(calls)]()

    def replay(held: Sequence[Call] = calls) -> None:  # the graph does not keep their tensors
        captured.replay()

    return replay


def in_turns(calls: Mapping[Name, Call], rounds: int, flush: bool = True) -> dict[Name, float]:
    """Median microseconds of each, after a round that does not count; `flush`: nothing is in the L2 cache."""
    if not torch.cuda.is_available():
        return {name: statistics.median(_seconds(call) for _ in range(rounds)) * 1e6 for name, call in calls.items()}
    samples: dict[Name, list[Any]] = {name: [] for name in calls}
    cache = torch.empty(FLUSH_BYTES if flush else 0, dtype=torch.uint8, device="cuda")
    for turn in range(rounds + 1):
        for name, call in calls.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            cache.zero_()
            begin.record()
            call()
            end.record()
            if turn:
                samples[name].append((begin, end))
    torch.cuda.synchronize()
    return {name: 1e3 * statistics.median(b.elapsed_time(e) for b, e in taken) for name, taken in samples.items()}


def _seconds(call: Call) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def publish(text: str, figures: Any, out: Path | None) -> None:
    """Prints a page; where a file is named, writes it there and all figures beside it as .json."""
    print(text)
    if out:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text + "\n")
        out.with_suffix(".json").write_text(json.dumps(figures, indent=1) + "\n")
