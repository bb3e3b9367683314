"""When copies to and from host memory are issued and waited for, so that they run beside the kernels.

An order has each copy followed by its wait. Here the wait for an offload moves down and a fetch moves up, by as much
work as the copy takes on its link. At most `DEPTH` copies each way are under way, which bounds what they hold.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right

from ..machine.description import shipped
from .launches import STREAMS, Fetch, Flat, Offload
from .liveness import Graph

#: copies in one direction that may be under way at once
DEPTH = 2


def link_slowdown(device: str) -> float:
    """Bytes that kernels read and write while one byte travels to or from the host, by the shipped machine of its kind.

    Kernels that compute much take longer than that: then a copy is over earlier than it is waited for.
    """
    found = next((d for _, d in shipped() if d.kind == device and d.links), None)
    return 1.0 if found is None else found.bandwidth / min(found.links.values())


def overlapped(flat: Flat, graph: Graph, order: list[int], slowdown: float) -> list[int]:
    """The order with copies issued early and waited for late."""
    wait_of = {copy: wait for wait, copy in enumerate(flat.awaits) if copy >= 0}
    moving = {i for i in order if flat.awaits[i] >= 0 or flat.stream[i] == STREAMS[Fetch]}
    work = [i for i in order if i not in moving]
    slot = {launch: p for p, launch in enumerate(work)}
    done = [0]  # bytes that the kernels before each slot read and write
    for i in work:
        done.append(done[-1] + (0 if flat.stream[i] else traffic(flat, i)))
    offloads = [i for i in work if flat.stream[i] == STREAMS[Offload]]
    first_read = {
        i: min([slot[r] for r in graph.readers[flat.writes[i][0]] if r in slot], default=len(work))
        for i in order
        if flat.stream[i] == STREAMS[Fetch]
    }
    fetches = sorted(first_read, key=lambda i: (first_read[i], i))
    #: what lies on the host -> the slot before which it must be back
    needed = {flat.reads[i][0]: first_read[i] for i in reversed(fetches)}

    release: dict[int, int] = {}  # what lies on the host -> the slot before which its copy is waited for
    free = 0.0
    for n, copy in enumerate(offloads):
        value = flat.writes[copy][0]
        free = max(free, done[slot[copy] + 1]) + slowdown * flat.bytes(value)
        latest = needed.get(value, len(work))
        if n + DEPTH < len(offloads):
            later = offloads[n + DEPTH]
            maker = flat.made_by[flat.root[flat.reads[later][0]]]
            latest = min(latest, slot.get(maker, slot[later]))
        release[value] = max(slot[copy] + 1, min(bisect_left(done, free), latest))

    issue: dict[int, int] = {}
    start = float(done[-1])
    for n in reversed(range(len(fetches))):
        copy = fetches[n]
        value = flat.reads[copy][0]
        start = min(start, done[first_read[copy]]) - slowdown * flat.bytes(value)
        earliest = release[value]
        if n >= DEPTH:
            earliest = max(earliest, first_read[fetches[n - DEPTH]] + 1)
        issue[copy] = min(max(bisect_right(done, start) - 1, earliest), first_read[copy])

    before: list[list[int]] = [[] for _ in range(len(work) + 1)]
    for copy in offloads:
        before[release[flat.writes[copy][0]]].append(wait_of[copy])
    for copy in fetches:
        before[issue[copy]].append(copy)
    for copy in fetches:
        before[first_read[copy]].append(wait_of[copy])
    out: list[int] = []
    for position, moved in enumerate(before):
        out += moved
        out += work[position : position + 1]
    return out


def traffic(flat: Flat, launch: int) -> int:
    """Bytes that a launch reads and writes, each operand once."""
    return sum(flat.bytes(v) for v in {*flat.reads[launch], *[w for w in flat.writes[launch] if w >= 0]})


def waits_of(flat: Flat, order: list[int]) -> list[tuple[int, ...]]:
    """Per launch of an order: positions on other streams that must be over before it runs.

    A wait names its launch. What runs on another stream comes after all that the kernels' stream was given before it:
    the last launch there, and what that stream has waited for since.
    """
    position = {launch: p for p, launch in enumerate(order)}
    last: tuple[int, ...] = ()
    out: list[tuple[int, ...]] = []
    for p, launch in enumerate(order):
        if flat.awaits[launch] >= 0:
            waits: tuple[int, ...] = (position[flat.awaits[launch]],)
            last = (*last, *waits)
        elif flat.stream[launch]:
            waits = tuple([p for p in last if flat.stream[order[p]] != flat.stream[launch]])
        else:
            waits, last = (), (p,)
        out.append(waits)
    return out
