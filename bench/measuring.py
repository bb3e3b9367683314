"""Where the measuring of a cold compile goes: by what is done, and by region.

`python bench/measuring.py [network] [size]`, on a GPU if there is one. It waits for the device after everything that it
times, so that all takes longer than it does by itself: the shares count.
"""

from __future__ import annotations

import collections
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

import wholestep as ws
from wholestep.backends import choose, timing, trial
from wholestep.bench.workload import Case, build

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHOWN = 25
#: what is timed: where it is found, and its name
PARTS: tuple[tuple[Any, str], ...] = (
    *((trial, name) for name in ("neutral_inputs", "difference", "has_nan", "spoilt", "empty", "marks_of")),
    *((choose, name) for name in ("make_room", "on_cpu", "on_gpu")),
    *((choose.Choices, name) for name in ("attempt", "compare")),
    (trial.Exact, "judge"),
    (timing, "captured"),
    (torch.cuda, "empty_cache"),
)


class Clock:
    """Seconds and calls by label."""

    def __init__(self) -> None:
        self.seconds, self.calls = collections.defaultdict[str, float](float), collections.Counter[str]()

    def watch(self, call: Callable[..., Any], label: str) -> Callable[..., Any]:
        def timed(*given: Any, **named: Any) -> Any:
            start = time.perf_counter()
            try:
                return call(*given, **named)
            finally:
                if DEVICE == "cuda":
                    torch.cuda.synchronize()
                self.seconds[label] += time.perf_counter() - start
                self.calls[label] += 1

        return timed


def main() -> None:
    network, size = [*sys.argv[1:], *("efficientnet_b0", "full" if DEVICE == "cuda" else "cpu")[len(sys.argv) - 1 :]]
    clock, regions = Clock(), list[tuple[float, int, list[str]]]()
    compare, op_by_op = choose.Choices.compare, trial.op_by_op

    def watched(self: Any, contest: Any, *rest: Any) -> None:
        start = time.perf_counter()
        compare(self, contest, *rest)
        ways = [f"{t.name} {t.seconds * 1e6:.0f} us {t.why[:40]}".strip() for t in contest.timed]
        regions.append((time.perf_counter() - start, contest.region.bytes, ways))

    choose.Choices.compare = watched  # type: ignore[method-assign]
    trial.op_by_op = lambda region: clock.watch(op_by_op(region), "ATen, op by op")
    for place, name in PARTS:
        setattr(place, name, clock.watch(getattr(place, name), name))
    work = build(Case(network, size), DEVICE)
    precision = "bf16" if DEVICE == "cuda" else "fp32"
    with tempfile.TemporaryDirectory() as folder:
        os.environ["WHOLESTEP_CACHE"] = folder
        start = time.perf_counter()
        batch = work.batch(0, DEVICE)
        step = ws.compile(work.model, work.loss_fn, work.optimizer[0], batch, precision=precision)
        took = time.perf_counter() - start
    assert step.choices is not None
    phases = ", ".join(f"{name} {seconds:.1f}" for name, seconds in step.choices.seconds.items())
    print(f"{network}@{size} on {DEVICE}: compiled in {took:.1f} s; of it {phases}; {len(regions)} regions compared")
    for label, seconds in sorted(clock.seconds.items(), key=lambda each: -each[1]):
        print(f"{label:18s} {seconds:8.2f} s {clock.calls[label]:6d} calls")
    for seconds, size_of, ways in sorted(regions, reverse=True)[:SHOWN]:
        print(f"{seconds:7.3f} s, {size_of / 1e6:8.1f} MB: {'; '.join(ways)}")


if __name__ == "__main__":
    main()
