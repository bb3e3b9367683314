"""The order of launches: several list schedules are tried, the best is improved by bounded local search.

Layers that repeat are then planned from one template: the instance at the peak is ordered in the same way by itself,
and its order replayed in all instances. Program order is always among those tried, so the result is never worse. Every
order keeps the dependences of the graph, and that old values of arguments are read before the new ones are written.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heapify, heappop, heappush

from .aliases import Assignment, assign
from .hills import hills
from .liveness import Graph
from .templates import Template, in_words, instance_graph, repeated_launches, replay

#: how many ready launches the look-ahead compares
LOOK_AHEAD = 6
#: local search stops after this many launches have been walked over, and after this many moves; in a template more
SEARCH_EFFORT = 150_000
MOVES, TEMPLATE_MOVES = 40, 400
#: what small hills and templates must gain, as a share: addresses may lose less than that in gaps
LEAST_GAIN = 0.001


def best_order(graph: Graph, phases: list[str]) -> tuple[str, list[int], Assignment, int]:
    """The best order found: its name, the launches, who has which memory, and the peak of program order."""
    name, order, found, program_peak = searched(graph, phases)
    templates = repeated_launches(graph, order)
    improved = by_template(graph, phases, order, found, templates)
    if improved is not None:
        order, found = improved
        name = f"{name}, inside templates"
    words = in_words(templates, len(order))
    return (f"{name} (templates: {words} launches)" if words else name), order, found, program_peak


def searched(graph: Graph, phases: list[str], moves: int = MOVES) -> tuple[str, list[int], Assignment, int]:
    """As `best_order`, without a thought for what repeats. moves: what local search may try."""
    program = list(range(len(graph.reads)))
    first = assign(graph, program)
    best = ("program", program, first)
    tried = {tuple(program)}

    def consider(name: str, order: list[int], gain: float = 0.0) -> None:
        nonlocal best
        if tuple(order) in tried:
            return
        tried.add(tuple(order))
        found = assign(graph, order)
        if found.peak < best[2].peak * (1 - gain):
            best = (name, order, found)

    update = ["update" if phase in ("clip", "update") else "" for phase in phases]
    early = list_schedule(graph, [0 if u else 1 for u in update])
    consider("early updates", early)
    consider("late producers", sink(graph, program))
    consider("early updates, late producers", sink(graph, early))
    consider("look-ahead", look_ahead(graph, [0 if u else 1 for u in update]))
    name, order, found = best
    improved = local_search(graph, order, found, lambda o: assign(graph, o), moves)
    if improved is not None:
        name, order, found = best = (f"{name}, local search", *improved)
    small = hills(graph, order)
    consider(f"{name}, small hills", small, LEAST_GAIN)
    consider(f"{name}, small hills, late producers", sink(graph, small), LEAST_GAIN)
    return *best, first.peak


def quick(graph: Graph, phases: list[str]) -> tuple[list[int], Assignment]:
    """The best of the orders that take one walk each: to compare programs by."""
    program = list(range(len(graph.reads)))
    early = list_schedule(graph, [0 if phase in ("clip", "update") else 1 for phase in phases])
    tried = [(order, assign(graph, order)) for order in (program, early, sink(graph, program), sink(graph, early))]
    return min(tried, key=lambda t: t[1].peak)


def by_template(
    graph: Graph, phases: list[str], order: list[int], found: Assignment, templates: list[Template]
) -> tuple[list[int], Assignment] | None:
    """Plans the template that has the peak, while that lowers it. None where nothing was gained."""
    start, refused = found.peak, set[Template]()
    while order:
        at = peak_position(found, len(order))
        template = next((t for t in templates if t.start <= at < t.end), None)
        if template is None or template in refused:
            break
        begin = at - (at - template.start) % template.length
        small = instance_graph(graph, order, begin, template.length)
        inner_phases = ["", *[phases[i] for i in order[begin : begin + template.length]]]
        candidate = replay(order, template, searched(small, inner_phases, TEMPLATE_MOVES)[1])
        trial = assign(graph, candidate)
        if trial.peak < found.peak * (1 - LEAST_GAIN):
            order, found = candidate, trial
        else:
            refused.add(template)
    return (order, found) if found.peak < start else None


def list_schedule(graph: Graph, rank: list[int]) -> list[int]:
    """Ready launches of the lowest rank first, in program order among equals."""
    before = graph.before[:]
    ready = [(rank[i], i) for i, count in enumerate(before) if not count]
    heapify(ready)
    order = []
    while ready:
        _, i = heappop(ready)
        order.append(i)
        for j in graph.successors[i]:
            before[j] -= 1
            if not before[j]:
                heappush(ready, (rank[j], j))
    return order


def look_ahead(graph: Graph, rank: list[int]) -> list[int]:
    """Like `list_schedule`, but of the next few ready launches one that gives back memory goes first."""
    before, remaining, size = graph.before[:], graph.count[:], graph.size
    ready = [(rank[i], i) for i, count in enumerate(before) if not count]
    heapify(ready)
    order: list[int] = []
    while ready:
        near = [heappop(ready) for _ in range(min(LOOK_AHEAD, len(ready)))]
        pick, least = 0, 0
        for at, (_, i) in enumerate(near):
            growth = sum([size[w] for w in graph.writes[i]])
            growth -= sum([size[r] for r in graph.reads[i] if remaining[r] == 1])
            if growth < least:
                pick, least = at, growth
        _, i = near.pop(pick)
        for entry in near:
            heappush(ready, entry)
        order.append(i)
        for r in graph.reads[i]:
            remaining[r] -= 1
        for j in graph.successors[i]:
            before[j] -= 1
            if not before[j]:
                heappush(ready, (rank[j], j))
    return order


def sink(graph: Graph, order: list[int]) -> list[int]:
    """Launches that make more memory live than they release move down to right before their first reader."""
    position = [0] * len(order)
    for p, i in enumerate(order):
        position[i] = p
    last = [max([position[i] for i in found], default=-1) for found in graph.readers]
    key: list[float] = [float(p) for p in position]
    depth = 1.0 / (len(order) + 1)
    for i in reversed(order):
        after = graph.successors[i]
        if not after or not graph.writes[i]:
            continue
        goal = min([key[j] for j in after])
        if goal < position[i] + 1.5:
            continue
        made = sum([graph.size[w] for w in graph.writes[i]])
        held = sum([graph.size[r] for r in graph.reads[i] if last[r] < goal])
        if made > held:
            key[i] = goal - depth
            for r in graph.reads[i]:
                last[r] = max(last[r], int(goal))
    return sorted(order, key=lambda i: (key[i], position[i]))


def local_search(
    graph: Graph,
    order: list[int],
    found: Assignment,
    measure: Callable[[list[int]], Assignment],
    most: int = MOVES,
) -> tuple[list[int], Assignment] | None:
    """Moves launches away from the peak: those after it that release memory to before it, those before it that take
    memory to after it. A move is kept if the peak falls. None where nothing was gained."""
    moves = max(2, min(most, SEARCH_EFFORT // max(1, len(order))))
    best, best_order_ = found, order
    start = found.peak
    refused: set[tuple[int, int]] = set()
    while moves > 0 and order:
        peak_at = peak_position(best, len(best_order_))
        move = next_move(graph, best_order_, peak_at, refused)
        if move is None:
            break
        launch, candidate = move
        moves -= 1
        trial = measure(candidate)
        if trial.peak < best.peak:
            best, best_order_ = trial, candidate
            refused.clear()
        else:
            refused.add((launch, peak_at))
    return (best_order_, best) if best.peak < start else None


def peak_position(found: Assignment, launches: int) -> int:
    """The position of the launch at which most bytes are live."""
    change = [0] * (launches + 2)
    for s, e, size in zip(found.start, found.end, found.size, strict=True):
        change[s] += size
        change[e] -= size
    live = most = at = 0
    for p in range(launches):
        live += change[p]
        if live > most:
            most, at = live, p
    return at


def next_move(
    graph: Graph, order: list[int], peak_at: int, refused: set[tuple[int, int]], window: int = 64
) -> tuple[int, list[int]] | None:
    """The first move across the peak that the dependences allow and that was not refused: (launch, new order)."""
    at_peak = order[peak_at]
    for p in range(peak_at + 1, min(len(order), peak_at + window)):  # pull up what releases memory
        i = order[p]
        if (i, peak_at) in refused or not any(graph.size[r] for r in graph.reads[i]):
            continue
        between = order[peak_at:p]
        if any(i in graph.successors[j] for j in between):
            continue
        return i, order[:peak_at] + [i] + between + order[p + 1 :]
    for p in range(peak_at - 1, max(-1, peak_at - window), -1):  # push down what takes memory
        i = order[p]
        if (i, peak_at) in refused or not any(graph.size[w] for w in graph.writes[i]):
            continue
        after = set(graph.successors[i])
        if at_peak in after or any(j in after for j in order[p + 1 : peak_at]):
            continue
        return i, order[:p] + order[p + 1 : peak_at + 1] + [i] + order[peak_at + 1 :]
    return None
