"""Who reads and writes which memory: the flat program as a graph of launches, and what must come before what.

Views are gone here: a memory is read wherever one of its views is.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ..dialects.strides import same_places
from .launches import ARGUMENT, HOST, LAUNCH, PINNED, Flat
from .plan import aligned

#: readers of what outlives the step
FOREVER = 1 << 60


@dataclass(slots=True)
class Graph:
    """Launches over memory. A memory is named by the value that has it first; arguments come first of all."""

    arguments: int
    reads: list[tuple[int, ...]]  # per launch: memories read, each once; only those whose end matters
    writes: list[tuple[int, ...]]  # per launch: memories that begin
    over: list[tuple[tuple[int, ...], ...]]  # per launch and write: memories that it may take
    size: list[int]  # per memory, aligned
    readers: list[list[int]]  # per memory: launches that read it
    count: list[int]  # per memory: how many readers it has; one more where it outlives the step
    target: list[int]  # per memory: the argument it replaces, or -1
    replaced_by: list[int]  # per argument: the memory that replaces it, or -1
    maker: list[int]  # per memory: the launch it begins at
    successors: list[list[int]]  # per launch: launches that must come later
    before: list[int]  # per launch: how many launches must come earlier
    looks: list[int] = field(default_factory=list)  # per launch: equal where the same runs on memory of the same kind


def build_graph(flat: Flat, alignment: int, whole_updates: bool = False) -> Graph:
    """The graph of a flat program. With `whole_updates` nothing but updates comes after the first change of state."""
    values, launches = len(flat.kind), len(flat.op)
    root, kind, made_by = flat.root, flat.kind, flat.made_by
    count = [0] * values
    readers: list[list[int]] = [[] for _ in range(values)]
    replaced_by = [-1] * flat.arguments
    target = [-1] * values
    early = [flat.raises[i] or (whole_updates and flat.phase[i] != "update") for i in range(launches)]
    barrier = max([i for i in range(launches) if early[i]], default=-1)
    for value, argument in flat.results:
        count[root[value]] += FOREVER
        if made_by[value] <= barrier and argument not in flat.ahead:
            continue  # the step may still fail, and must leave the state as it was
        if argument >= 0 and can_replace(flat, value, argument) and target[value] < 0 and replaced_by[argument] < 0:
            target[value], replaced_by[argument] = argument, value
    size = [aligned(flat.bytes(v), alignment) if kind[v] == LAUNCH else 0 for v in range(values)]
    for argument in range(flat.arguments):
        if replaced_by[argument] < 0:
            count[argument] = FOREVER
    reads, writes, over = [], [], []
    predecessors: list[set[int]] = []
    for i in range(launches):
        mine = dict.fromkeys(root[v] for v in flat.reads[i])
        if flat.after:
            first = {maker for v in flat.reads[i] for maker in flat.makers(v)} | {flat.awaits[i]}
            begun_before = [root[v] for v in flat.writes[i] if v >= 0 and made_by[root[v]] != i]
            first.update([made_by[r] for r in begun_before])  # the first to write a part begins the memory of all
            mine |= dict.fromkeys(begun_before)
        else:
            first = {flat.ready.get(r, made_by[r]) for r in mine} | {flat.awaits[i]}
        predecessors.append(first - {i, -1})
        kept = tuple([r for r in mine if kind[r] in (LAUNCH, ARGUMENT)])
        for r in kept:
            readers[r].append(i)
            count[r] += 1
        reads.append(kept)
        begins = {
            root[v]: tuple(dict.fromkeys([root[flat.reads[i][p]] for p in positions]))
            for v, positions in zip(flat.writes[i], flat.over[i] or [()] * len(flat.writes[i]), strict=True)
            if v >= 0 and kind[v] not in (HOST, PINNED) and made_by[root[v]] == i
        }
        begun, places = tuple(begins), list(begins.values())
        if flat.workspace[i] >= 0:
            begun = (*begun, flat.workspace[i])
            places.append(())
        writes.append(begun)
        over.append(tuple(places))
    for argument, new in enumerate(replaced_by):  # old values are read before the new one is written, where they can be
        if new >= 0 and all(i <= made_by[new] for i in readers[argument]):
            predecessors[made_by[new]].update(i for i in readers[argument] if i != made_by[new])
    for i in range(launches):  # whatever may fail comes before anything that changes the state
        if early[i] and i != barrier:
            predecessors[barrier].add(i)
        elif i > barrier >= 0 and any(target[v] >= 0 for v in writes[i]):
            predecessors[i].add(barrier)
    successors: list[list[int]] = [[] for _ in range(launches)]
    for i, mine_before in enumerate(predecessors):
        for p in sorted(mine_before):
            successors[p].append(i)
    before = [len(p) for p in predecessors]
    return Graph(
        flat.arguments,
        reads,
        writes,
        over,
        size,
        readers,
        count,
        target,
        replaced_by,
        made_by,
        successors,
        before,
        looks_of(flat, count, readers, target),
    )


def looks_of(flat: Flat, count: list[int], readers: list[list[int]], target: list[int]) -> list[int]:
    """Numbers for launches: equal for the same kernel on the same types, with results that are used as often."""
    numbers: dict[tuple[object, ...], int] = {}
    looks = []
    for i in range(len(flat.op)):
        read = tuple([id(flat.type[v]) for v in flat.reads[i]])  # types are made once, see `can_replace`
        made = tuple(
            [
                (id(flat.type[v]), len(readers[v]), count[v] >= FOREVER, target[v] >= 0) if v >= 0 else ()
                for v in flat.writes[i]
            ]
        )
        key = (flat.name[i], flat.provider[i], flat.stream[i], flat.body[i], read, made)
        looks.append(numbers.setdefault(key, len(numbers)))
    return looks


def can_replace(flat: Flat, value: int, argument: int) -> bool:
    """Whether a new value may be written straight into the argument's memory: same type, same places, made here."""
    return (
        flat.kind[value] == LAUNCH
        and flat.kind[argument] == ARGUMENT
        and flat.type[value] is flat.type[argument]
        and same_places(flat.type[value].shape, flat.strides[value], flat.strides[argument])
    )
