"""What is held beside the kept activations while forward and backward pass through each segment, read off a plan.

The plan's launches are cut into windows: forward's by where the segments' ops run, backward's by where the last reader
of what a segment keeps runs.
"""

from __future__ import annotations

from ..plan import Plan
from .choice import Segments
from .graph import owner


def note_windows(segments: Segments, plan: Plan, beside: int) -> None:
    """Writes down for every segment the bytes in use beside activations, in forward and in backward.

    plan: the one the graph was read off. beside: bytes outside its arena.
    """
    launches = plan.launches
    kernels = [p for p, launch in enumerate(launches) if not launch.stream and launch.provider != "wait"]
    border = next((p for p in kernels if launches[p].phase == "backward"), len(launches))
    ends = [-1] * len(plan.buffers)  # the last reader of each value, through its views; not of what takes its memory
    for position, launch in enumerate(launches):
        for number in launch.reads if launch.op >= 0 else ():  # copies into place come last of all
            ends[owner(plan, number)] = position
    kept = [0] * (len(launches) + 2)
    made, done = [-1] * segments.count, [-1] * segments.count
    for memory in segments.graph.memories:
        if memory.late and not memory.fixed:
            first, last = plan.buffers[memory.buffer].first, ends[memory.buffer]
            kept[first] += memory.bytes
            kept[last + 1] -= memory.bytes
            segment = segments.where[memory.node][3]
            made[segment], done[segment] = max(made[segment], first), max(done[segment], last)
    rest, live = plan.live_bytes(), 0
    for position in range(len(launches)):
        live += kept[position]
        rest[position] = max(0, rest[position] - live) + beside
    start = 0
    for segment in range(segments.count):
        end = max(start, made[segment] + 1) if segment < segments.count - 1 else max(start, border)
        segments.forward[segment] = max(rest[start:end], default=0)
        start = end
    start = border
    for segment in reversed(range(segments.count)):
        end = max(start, min(done[segment] + 1, len(launches))) if segment else len(launches)
        segments.backward[segment] = max(rest[start:end], default=0)
        start = end
