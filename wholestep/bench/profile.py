"""Where the time of a step goes, by kernel family: ours with the bytes of its ledger, others with what they name.

A family is told from a kernel's name; of our own launches the plan says it. Others' bytes are those of the tensors an
operator reads and writes, which PyTorch's execution trace lists: what it reads twice counts once. Kernels that replay
from a CUDA graph have no operator around them, and no bytes.
"""

from __future__ import annotations

import json
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..cost.ledger import group_of
from ..runtime.kernels_report import family_of, launched
from ..runtime.report import movement_of_step
from .trace import Ran, bytes_of, ran_on_device, ran_on_host

#: what a kernel is, by its name: the first that is found. "generated" comes first, since names of generated kernels
#: hold the names of what was fused
PATTERNS: tuple[tuple[str, str], ...] = (
    ("generated", r"^triton_(poi|red|per|for)_|cpp_fused|^(pointwise|rows|sums|finish|batch)"),
    (
        "copies",
        r"memcpy|memset|nchwtonhwc|nhwctonchw|direct_copy|catarray|aten::(copy_|clone|contiguous|cat|fill_|zero_)$",
    ),
    ("attention", r"sdpa|flash|fmha|attention"),
    ("convolution", r"conv|dgrad|wgrad|fprop|winograd|implicit_gemm|depthwise"),
    ("optimizer", r"adam|multi_tensor_apply"),
    ("gemm", r"gemm|nvjet|cublas|splitk|triton_(mm|tem)|matmul|contract|gemv|aten::(addmm|mm|bmm|baddbmm|linear)$"),
    ("library", r"at::native|aten::|elementwise|reduce_kernel|softmax|norm|embedding|bn_fw|bn_bw|index"),
)
FAMILIES = (*(name for name, _ in PATTERNS), "other")
SHOWN = 25
#: what a launch of our plan is, by the name of its op
OPS = (("gemm", "contract"), ("convolution", "conv"), ("attention", "attention"))


@dataclass
class Part:
    """A family, or kernels of one name, in one step. `bytes` is None where nothing is known of any of them."""

    us: float = 0.0
    calls: float = 0.0
    bytes: float | None = None

    def add(self, us: float, calls: float, moved: float | None) -> None:
        self.us += us
        self.calls += calls
        if moved is not None:
            self.bytes = (self.bytes or 0.0) + moved

    def to_dict(self) -> dict[str, Any]:
        return {"us": self.us, "calls": self.calls, "bytes": self.bytes}


@dataclass
class Profile:
    """What one contender runs in a step."""

    families: dict[str, Part] = field(default_factory=dict)
    kernels: dict[tuple[str, str], Part] = field(default_factory=dict)

    def add(self, family: str, name: str, us: float, calls: float, moved: float | None) -> None:
        for part in (self.families.setdefault(family, Part()), self.kernels.setdefault((family, name), Part())):
            part.add(us, calls, moved)

    def to_dict(self) -> dict[str, Any]:
        most = sorted(self.kernels.items(), key=lambda item: -item[1].us)[:SHOWN]
        return {
            "us": sum(part.us for part in self.families.values()),
            "calls": sum(part.calls for part in self.families.values()),
            "families": {name: self.families[name].to_dict() for name in FAMILIES if name in self.families},
            "top": [{"name": name[:160], "family": family} | part.to_dict() for (family, name), part in most],
        }


def family_by_name(name: str) -> str:
    lower = name.lower()
    return next((family for family, pattern in PATTERNS if re.search(pattern, lower)), "other")


# ---- others ----------------------------------------------------------------------------------------------------------


def of_torch(step: Callable[[], Any], device: str, steps: int) -> dict[str, Any]:
    """The profile of a step that PyTorch runs."""
    ran, moved = traced(step, device, steps)
    return summed(ran, moved, steps, device == "cpu").to_dict()


def summed(ran: Iterable[Ran], moved: Mapping[int, int], steps: int, host: bool = False) -> Profile:
    """What ran, per step. An operator's bytes count with the first kernel that it launches.

    host: what ran are operators; those of the library that move nothing (views, new tensors) are "other".
    """
    profile, counted = Profile(), set[int]()
    for each in ran:
        number = next((number for _, number in reversed(each.inside) if number in moved), -1)
        size = None if number < 0 else 0 if number in counted else moved[number] / steps
        counted.add(number)
        family = family_by_name(each.name)
        family = "other" if host and family == "library" and size is None else family
        profile.add(family, each.name, each.us / steps, 1 / steps, size)
    return profile


def traced(step: Callable[[], Any], device: str, steps: int, listing: bool = True) -> tuple[list[Ran], dict[int, int]]:
    """What ran in some steps, and the bytes of its operators."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    step()
    with tempfile.TemporaryDirectory() as folder:
        trace, listed = Path(folder, "trace.json"), Path(folder, "operators.json")
        observer = torch.profiler.ExecutionTraceObserver().register_callback(str(listed)) if listing else None
        with torch.profiler.profile(activities=activities, execution_trace_observer=observer) as profiler:
            for _ in range(steps):
                step()
            if device == "cuda":
                torch.cuda.synchronize()
        profiler.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text())["traceEvents"]
        moved = bytes_of(json.loads(listed.read_text())["nodes"]) if listing else {}
    return (ran_on_device(events) if device == "cuda" else ran_on_host(events, moved)), moved


# ---- ours ------------------------------------------------------------------------------------------------------------


def of_ours(whole: Any, step: Callable[[], Any], device: str, steps: int) -> dict[str, Any]:
    """The profile of a compiled step, launch by launch of its plan, with the ledger's bytes.

    On a GPU also what the profiler sees of the step as it runs otherwise, as one CUDA graph: "as a graph".
    """
    static = whole._compiled.static
    if static is None:
        return of_torch(step, device, steps)
    if device == "cuda":
        graph, _ = traced(step, device, steps, listing=False)
        seconds = by_launch(launch_ranges(static, step, steps), steps)
        found = of_launches(whole, seconds).to_dict()
        return found | {"as a graph": summed(graph, {}, steps).to_dict()}
    return of_launches(whole, timed_launches(static, step, steps)).to_dict()


def timed_launches(static: Any, step: Callable[[], Any], steps: int) -> dict[int, float]:
    """Microseconds of each launch on a CPU, which runs one after the other: the median of some steps."""
    spent: dict[int, list[float]] = {}
    number, began, current = -1, 0.0, 0

    def enter(name: str) -> None:
        nonlocal number, began
        number, began = int(name.removeprefix("ws:")), time.perf_counter()

    def leave() -> None:
        # a launch may be several calls
        spent.setdefault(number, [0.0] * steps)[current] += (time.perf_counter() - began) * 1e6

    step()
    static.ranges = (enter, leave)
    try:
        for current in range(steps):  # noqa: B007
            step()
    finally:
        static.ranges = None
    return {launch: statistics.median(each) for launch, each in spent.items()}


def launch_ranges(static: Any, step: Callable[[], Any], steps: int) -> list[Ran]:
    """What a GPU runs of each launch: the step goes launch by launch, each in a range that the profiler shows."""
    open_ranges: list[Any] = []

    def enter(name: str) -> None:
        open_ranges.append(torch.profiler.record_function(name))
        open_ranges[-1].__enter__()

    def leave() -> None:
        open_ranges.pop().__exit__(None, None, None)

    static.ranges = (enter, leave)
    try:
        return traced(step, "cuda", steps, listing=False)[0]
    finally:
        static.ranges = None


def by_launch(ran: Sequence[Ran], steps: int) -> dict[int, float]:
    """Microseconds per step of each launch of the plan; -1 for what runs outside of all."""
    spent: dict[int, float] = {}
    for each in ran:
        name = next((name for name, _ in reversed(each.inside) if name.startswith("ws:")), "ws:-1")
        number = int(name.removeprefix("ws:"))
        spent[number] = spent.get(number, 0.0) + each.us / steps
    return spent


def of_launches(whole: Any, spent: Mapping[int, float]) -> Profile:
    """Times by launch joined with the ledger."""
    movement = movement_of_step(whole)
    profile, seen = Profile(), set[int]()
    ops = {id(p): list(p.function.regions[0].block) for p in (movement.planned, *movement.planned.bodies)}
    for kernel, planned, position in launched(movement):
        launch = planned.plan.launches[position] if position >= 0 else None
        op = ops[id(planned)][launch.op] if launch is not None and launch.op >= 0 else None
        provider = launch.provider if launch is not None else "aten"
        kind = family_of(planned, op, provider)
        family = family_of_launch(kernel.name, kernel.phase, provider, kind)
        name = f"{kernel.phase} {kernel.name} {kind if kind != 'library' else ''} by {provider}, {group_of(kernel)}"
        us = spent.get(kernel.launch, 0.0) if kernel.launch not in seen else 0.0  # of micro-batches: once for all
        seen.add(kernel.launch)
        profile.add(family, " ".join(name.split()), us, kernel.times, kernel.bytes)
    for number, us in spent.items():
        if number not in seen and us > 0:
            name = "outside of the plan" if number < 0 else movement.planned.plan.launches[number].name
            profile.add("other", name, us, 1, None)
    return profile


def family_of_launch(name: str, phase: str, provider: str, kind: str) -> str:
    if provider == "copy" or name == "copy":
        return "copies"
    named = next((family for family, word in OPS if word in name), None)
    if named is not None:
        return named
    if phase == "update":
        return "optimizer"
    if kind == "contraction":
        return "gemm"
    return "library" if kind == "library" else "generated"


# ---- as text ---------------------------------------------------------------------------------------------------------


def table_of(profiles: Mapping[str, Mapping[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Columns and rows: a family per row, a contender per column, microseconds and megabytes per step."""
    present = [f for f in FAMILIES if any(f in found["families"] for found in profiles.values())]
    rows = [[family, *(cell(found["families"].get(family)) for found in profiles.values())] for family in present]
    rows.append(["in all", *(f"{found['us']:,.0f} us" for found in profiles.values())])
    if any("step_us" in found for found in profiles.values()):
        rows.append(["a step takes", *(f"{found.get('step_us', 0.0):,.0f} us" for found in profiles.values())])
    rows.append(["kernels", *(f"{found['calls']:,.0f}" for found in profiles.values())])
    return ["family", *profiles], rows


def cell(part: Mapping[str, Any] | None) -> str:
    if part is None:
        return "-"
    moved = "" if part["bytes"] is None else f", {part['bytes'] / 1e6:,.1f} MB"
    return f"{part['us']:,.0f} us{moved}"


def differences(profiles: Mapping[str, Mapping[str, Any]], ours: str) -> list[str]:
    """Families by how much longer ours takes than the contender that takes least for it: the worst first.

    Families are not alike between contenders (what one fuses another leaves to a library): a hint, not a sum.
    """
    others = [found for name, found in profiles.items() if name != ours]
    if ours not in profiles or not others:
        return []
    found = []
    for family, part in profiles[ours]["families"].items():
        known = [other["families"][family]["us"] for other in others if family in other["families"]]
        if known:
            found.append((part["us"] - min(known), family, part["us"], min(known)))
    return [
        f"{family}: {us:,.0f} us, best {best:,.0f} ({more:+,.0f})" for more, family, us, best in sorted(found)[::-1]
    ]


def top_rows(found: Mapping[str, Any], count: int) -> list[list[str]]:
    """The kernels that take longest: microseconds, calls, bytes, and what that is per second."""
    rows = []
    for kernel in found["top"][:count]:
        moved, us = kernel["bytes"], kernel["us"]
        size = "-" if moved is None else f"{moved / 1e6:,.2f}"
        rate = "-" if moved is None or us <= 0 else f"{moved / us / 1e3:,.0f}"
        rows.append([kernel["family"], kernel["name"][:90], f"{us:,.1f}", f"{kernel['calls']:,.0f}", size, rate])
    return rows


TOP_COLUMNS = ("family", "kernel", "us", "calls", "MB", "GB/s")
