"""Memory that a step takes beside what it asks for, measured before the first step: part of the plan.

cuBLAS keeps a workspace from its first product on, cuDNN takes one per call, and some calls make their results
elsewhere. Each distinct call runs once on memory of its own, and the allocator's counters tell what it took. The
allocator itself leaves up to a megabyte at the end of a block that nobody else can have.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import replace

import torch

from ..backends.kernels import Spec
from ..dialects.step import torch_dtype
from ..errors import WholestepError
from ..plan.plan import Buffer, Launch, Plan, aligned
from ..plan.planner import Planned
from ..torch_private import clear_cublas_workspaces
from ..transforms.regions import ANCHORS
from .bound import BoundPlan
from .cells import Cells


def release(device: torch.device) -> None:
    """Gives back what libraries keep and what nobody holds: it would stay between the tensors of the step.

    PyTorch's own compiler does so around its captures. A graph's workspace lies in the graph's memory and stays there.
    """
    torch.cuda.synchronize(device)
    clear_cublas_workspaces()
    torch.cuda.empty_cache()


def handed_out(device: torch.device) -> tuple[int, int]:
    """All bytes that the allocator ever handed out, and those in use now: unlike a peak they need no reset."""
    stats = torch.cuda.memory_stats_as_nested_dict(device).get("allocated_bytes", {}).get("all", {})
    return stats.get("allocated", 0), stats.get("current", 0)


def handed_beyond(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the allocator's blocks that hold some tensors, beyond what was asked for; 0 where it does not tell."""
    if torch.cuda.get_allocator_backend() != "native":
        return 0
    places = sorted(tensor.untyped_storage().data_ptr() for tensor in tensors)
    found = 0
    for segment in torch.cuda.memory_snapshot():
        start = segment["address"]
        for block in segment["blocks"]:
            end = start + block["size"]
            if bisect_left(places, start) < bisect_left(places, end):
                found += block["size"] - block["requested_size"]
            start = end
    return found


@torch.no_grad()
def measure(planned: Planned, device: torch.device) -> None:
    """Notes at every launch of a library what it takes, and in the plan what stays.

    A call that does not run here, for lack of memory or of sensible numbers, keeps what was planned: the first step
    notices whatever it takes beyond that and says so in the report.
    """
    release(device)
    plan = planned.plan
    cells = Cells(Planned(replace(plan, buffers=[], launches=[], results=[]), planned.function, [], []), device)
    known: dict[int, int] = {}
    for position, (launch, kernel) in enumerate(zip(plan.launches, planned.kernels, strict=True)):
        if kernel is None or launch.provider != "aten" or launch.name not in ANCHORS:
            continue
        if id(kernel) not in known:
            known[id(kernel)], kept = taken_by(planned, position, device, cells)
            plan.kept_by_libraries += kept
        launch.takes = known[id(kernel)]
    for body in planned.bodies:
        measure(body, device)
    release(device)


def taken_by(planned: Planned, position: int, device: torch.device, cells: Cells) -> tuple[int, int]:
    """The bytes that a launch takes while it runs, and those that it keeps."""
    launch = planned.plan.launches[position]
    if any(planned.plan.buffers[n].space == "host" for n in launch.reads):
        return 0, 0
    plan = alone(planned.plan, launch)
    try:
        arguments = [
            torch.empty_strided(b.type.shape, b.strides, dtype=torch_dtype(b.type.element), device=device)
            for b in plan.buffers
            if b.space == "external"
        ]
        arena = torch.empty(plan.arena, dtype=torch.uint8, device=device)
        one = Planned(plan, planned.function, [planned.kernels[position]], [])
        bound = BoundPlan(one, device, arguments, arena, cells)
        before, used = handed_out(device)
        bound.run()
        after, now = handed_out(device)
    except (RuntimeError, WholestepError):  # (out of memory is one)
        return 0, 0
    return after - before - (now - used), now - used


def alone(plan: Plan, launch: Launch) -> Plan:
    """A plan of one launch: what it reads are arguments, what it writes and its workspace lie side by side."""
    numbers: dict[int, int] = {}
    buffers: list[Buffer] = []
    for number in launch.reads:
        if number not in numbers:
            numbers[number] = len(buffers)
            old = plan.buffers[number]
            buffers.append(Buffer(old.type, old.strides, "external", "param", argument=len(buffers), op=old.op))
    end = 0
    made: dict[int, int] = {}
    for number in (*launch.writes, launch.workspace):
        if number >= 0:
            made[number] = len(buffers)
            old = plan.buffers[number]
            buffers.append(Buffer(old.type, old.strides, "arena", "transient", offset=end, op=old.op))
            # (a part of a concatenation has gaps)
            spec = Spec(old.type.shape, old.strides, torch_dtype(old.type.element))
            end += aligned(spec.bytes, plan.alignment)
    one = replace(
        launch,
        reads=tuple([numbers[n] for n in launch.reads]),
        writes=tuple([made.get(n, -1) for n in launch.writes]),
        workspace=made.get(launch.workspace, -1),
        in_place=(),
        stream=0,
        waits=(),
    )
    found = replace(plan, arena=end, buffers=buffers, launches=[one], results=[], bodies=[])
    found.note_uses()
    return found
