"""Host time of a step on a GPU, by one call (`runtime/replay.py`) and the long way, and that both do the same.

`python bench/host_time.py [network] [size]`, in about a minute; bench/results/host_time.md holds the record.
First: 20 steps with another batch each, dropout, and other learning rates from step 10 on, from one checkpoint: the
long way twice (does a step repeat itself?), then by one call. Then microseconds from call to return, alone and in rows:
each line repeats its call as often as LINE seconds of the GPU allow. faults: page faults per call. Alone, a call comes
after a wait for the GPU, in which others have had the processor's caches.
"""

from __future__ import annotations

import copy
import ctypes
import resource
import statistics
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

import wholestep as ws
from wholestep.bench.workload import Case, Workload, build

STEPS, CHANGED = 20, 10
#: seconds that a line may take, about, and how often it calls alone at most and at least
LINE, MOST, LEAST = 3.0, 200, 16


def compiled(work: Workload, drop: float) -> tuple[Any, Any]:
    for name, module in work.model.named_modules():
        if isinstance(module, torch.nn.Dropout) and "attn_dropout" not in name:
            module.p = drop
    optimizer = work.optimizer[0]
    torch.manual_seed(1)
    start = time.perf_counter()
    step = ws.compile(work.model, work.loss_fn, optimizer, work.batch(0, "cuda"), precision="bf16")
    print(f"compile (dropout {drop}) {time.perf_counter() - start:.1f} s")
    return step, optimizer


def trained(work: Workload, step: Any, optimizer: Any, start: Any, by_call: bool, lr: float) -> tuple[Any, ...]:
    """Losses, all state, how many steps one call did, and steps counted."""
    step.load_state_dict(start)
    step._again = None
    if by_call:
        vars(step).pop("_repeatable", None)
    else:
        step._repeatable = lambda *_: None
    losses, fast = [], 0
    for number in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = lr if number < CHANGED else lr * (1 - number / 40)
        fast += step._again is not None
        losses.append(step(*work.batch(number, "cuda")))
    torch.cuda.synchronize()
    held = [*work.model.state_dict().values(), *(t for s in optimizer.state.values() for t in s.values())]
    return torch.stack([x.float() for x in losses]), [t.detach().clone() for t in held], fast, int(step._own.counter)


def same(one: tuple[Any, ...], other: tuple[Any, ...]) -> str:
    differ = sum(not torch.equal(a, b) for a, b in zip(one[1], other[1], strict=True))
    if torch.equal(one[0], other[0]) and not differ:
        return "bit for bit"
    return f"DIFFERENT: losses by {(one[0] - other[0]).abs().max():.3g}, tensors {differ} of {len(one[1])}"


def exactness(work: Workload) -> None:
    step, optimizer = compiled(work, 0.1)
    batches = [work.batch(number, "cuda") for number in range(STEPS)]
    for batch in batches[:3]:
        step(*batch)
    start, lr = copy.deepcopy(step.state_dict()), optimizer.param_groups[0]["lr"]
    one, two, three = (trained(work, step, optimizer, start, by_call, lr) for by_call in (False, False, True))
    why = step._compiled.long_way[1] or "(it does not)"
    print(f"why the long way: {why} | steps by one call {three[2]} of {STEPS} | steps counted {one[3]} {three[3]}")
    print("long way against long way:", same(one, two))
    print("one call against long way:", same(one, three))
    kept = [step(*batch) for batch in batches]  # a user keeps every loss: none may change later
    torch.cuda.synchronize()
    before = [float(loss) for loss in kept]
    for batch in batches:
        step(*batch)
    torch.cuda.synchronize()
    print("kept losses stay:", before == [float(loss) for loss in kept], "| distinct", len(set(before)))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        losses = [round(float(step(*batch)), 4) for batch in batches[:3]]
    torch.cuda.current_stream().wait_stream(stream)
    print("on another stream", losses, "by one call:", step._again is not None)
    found: list[float] = []
    thread = threading.Thread(target=lambda: found.extend(round(float(step(*b)), 4) for b in batches[:3]))
    thread.start()
    thread.join()
    print("in another thread", found)


def page_faults() -> int:
    """Of this process so far. Linux makes it meet some on purpose, to see which memory is used from where."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def alone(call: Callable[[], Any], times: int) -> str:
    found, faults = [], 0
    for _ in range(times):
        torch.cuda.synchronize()
        before, start = page_faults(), time.perf_counter()
        call()
        found.append(time.perf_counter() - start)
        faults += page_faults() - before
    found.sort()
    return f"{found[times // 2] * 1e6:6.1f} (p10 {found[times // 10] * 1e6:.1f}, faults {faults / times:.1f})"


def in_a_row(call: Callable[[], Any], count: int, times: int) -> str:
    """The median call, and the mean."""
    found = []
    for _ in range(times):
        torch.cuda.synchronize()
        for _ in range(count):
            start = time.perf_counter()
            call()
            found.append(time.perf_counter() - start)
    return f"{statistics.median(found) * 1e6:6.1f} (mean {statistics.mean(found) * 1e6:.1f})"


def show(name: str, call: Callable[[], Any]) -> None:
    torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    torch.cuda.synchronize()
    calls = LINE / (time.perf_counter() - start)  # what they run on the GPU included
    rows = min(30, max(4, int(calls / 20)))
    alones = min(MOST, max(LEAST, int(calls / 2)))
    print(f"{name:44s} alone {alone(call, alones)}   row of 8 {in_a_row(call, 8, rows)}", flush=True)


def times(work: Workload) -> None:
    step, optimizer = compiled(work, 0.0)
    batch = work.batch(0, "cuda")
    for _ in range(8):
        step(*batch)
    torch.cuda.synchronize()
    inner, again = step._compiled, step._again
    print("why the long way:", inner.long_way[1] or "(it does not)")
    show("STEP by one call", lambda: step(*batch))
    turn = 0

    def with_new_lr() -> None:
        nonlocal turn
        turn += 1
        optimizer.param_groups[0]["lr"] = 1e-4 / (1 + turn % 7)
        step(*batch)

    show("  with a new lr each time (setting it included)", with_new_lr)
    if again is not None:
        parts(inner, again, batch)
    show("STEP by one call, once more", lambda: step(*batch))
    show("graph.replay() of torch", inner.static.graph.graph.replay)
    torch.cuda.synchronize()
    step._again, step._repeatable = None, lambda *_: None
    show("STEP the long way", lambda: step(*batch))


def parts(inner: Any, again: Any, batch: Any) -> None:
    named: dict[str, Any] = {}
    batch = tuple(batch)
    show("  the one call of C++", lambda: again.once(batch, named, again.new_results()))
    show("   results of a step, made ahead", again.new_results)
    snapshot = inner.snapshot
    checks = {"tensors": snapshot.tensors, "tables": snapshot.untouched, "groups": again.groups}
    for name, check in (checks | {"versions": again.counted}).items():
        if check is not None:
            show(f"   check of {name}", check.same)
    driver, pointer = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p
    stream, given = pointer(torch.cuda.current_stream().cuda_stream), again._arguments
    copy_in, launch = driver["cuMemcpyHtoDAsync_v2"], driver["cuGraphLaunch"]
    copy_in.argtypes, launch.argtypes = (pointer, pointer, ctypes.c_size_t, pointer), (pointer, pointer)
    show(
        f"   driver: numbers to the device ({given.size} B)",
        lambda: copy_in(given.there, given.ring, given.size, stream),
    )
    show("   driver: the graph's launch", lambda: launch(given.graph, stream))


def main() -> None:
    network, size = [*sys.argv[1:], *("gpt2", "few")[len(sys.argv) - 1 :]]
    exactness(build(Case(network, size), "cuda"))
    times(build(Case(network, size), "cuda"))


if __name__ == "__main__":
    main()
