"""Orders keep every dependence, never cost memory, find what a list schedule can find, and plan equal layers alike."""

from __future__ import annotations

import random

import pytest
import torch

from tests.plan.networks import Case, convnet, gpt
from wholestep.backends.kernels import Kernels
from wholestep.dialects.step import StepBuilder
from wholestep.ir.builtin import add_function, finish_function, module
from wholestep.ir.types import F32, TensorType
from wholestep.plan import plan_function
from wholestep.plan.aliases import assign
from wholestep.plan.hills import hills
from wholestep.plan.launches import flatten
from wholestep.plan.liveness import FOREVER, Graph, build_graph
from wholestep.plan.order import best_order, by_template, list_schedule, look_ahead, searched, sink
from wholestep.plan.templates import instance_graph, repeated_launches, replay
from wholestep.transforms.expand import expanded


def graph_of(case: Case) -> tuple[Graph, list[str]]:
    flat = flatten(expanded(case.program.function), Kernels(torch.device("cpu")), case.numbers)
    return build_graph(flat, 64), flat.phase


@pytest.mark.parametrize("network", [gpt, convnet])
def test_every_order_keeps_dependences(network: object) -> None:
    graph, phases = graph_of(Case(network()))  # type: ignore[operator]
    program = list(range(len(graph.reads)))
    rank = [0 if p in ("clip", "update") else 1 for p in phases]
    early = list_schedule(graph, rank)
    _, best, found, program_peak = best_order(graph, phases)
    for order in (early, sink(graph, program), sink(graph, early), look_ahead(graph, rank), hills(graph, early), best):
        check(graph, order)
    assert program_peak == assign(graph, program).peak
    assert found.peak == min(program_peak, found.peak) == assign(graph, best).peak


def check(graph: Graph, order: list[int]) -> None:
    """Every launch once, and after all that must come before it."""
    assert sorted(order) == list(range(len(graph.reads)))
    position = {i: p for p, i in enumerate(order)}
    assert all(position[i] < position[j] for i in order for j in graph.successors[i])


def test_gradients_do_not_wait_for_the_end() -> None:
    """Without clipping a parameter is updated as soon as its gradient is there, so gradients are never all alive."""
    root = module()
    width, layers = 64, 12
    matrix = TensorType((width, width), F32)
    function = add_function(root, "step", [TensorType((1, width), F32)] + [matrix] * layers)
    b = StepBuilder(function.regions[0].block, phase="forward")
    x, *weights = function.regions[0].block.arguments
    saved = []
    for w in weights:
        saved.append(x)
        x = b.contract(x, w, spec="ab,bc->ac")
    b.phase = "backward"
    grads, dx = [], x
    for w, seen in zip(reversed(weights), reversed(saved), strict=True):
        grads.append(b.contract(seen, dx, spec="ab,ac->bc"))
        dx = b.contract(dx, w, spec="ac,bc->ab")
    b.phase = "update"
    new = [b.sub(w, b.mul(g, 0.1)) for w, g in zip(weights, reversed(grads), strict=True)]
    finish_function(function, [x, *new], None, [{}, *({"step.donates": i + 1} for i in range(layers))])
    plan, _ = plan_function(function, whole_updates=False)
    assert plan.program_order_bound > layers * matrix.bytes
    assert plan.arena < 3 * matrix.bytes
    assert plan.order != "program"


def layers(seed: int, count: int, ops: int = 9, larger: int = -1, rewired: int = -1) -> Graph:
    """Equal layers of random launches, one after the other; one may make more, or read something else, than the others.

    A layer's last launch reads what no other did, and is all that the next layer sees.
    """
    draw = random.Random(seed)
    block = []
    for n in range(ops):
        sources = sorted(draw.sample(range(n + 1), min(n + 1, draw.choice((1, 1, 2)))))  # 0 is the layer's input
        block.append((sources, 64 * draw.choice((1, 2, 4, 8, 16))))
    unread = [n for n in range(1, ops + 1) if all(n not in sources for sources, _ in block)]
    block.append((unread, 64))
    reads, size, looks = list[tuple[int, ...]](), [0], []
    for layer in range(count):
        made = [len(reads)]
        for n, (sources, bytes) in enumerate(block):
            seen = [0 if layer == rewired and n == 1 else k for k in sources]
            reads.append(tuple([made[k] for k in seen]))
            size.append(2 * bytes if layer == larger and n == 3 else bytes)
            made.append(len(reads))
            looks.append(hash((n, size[-1])))
    readers: list[list[int]] = [[] for _ in size]
    for i, mine in enumerate(reads):
        for memory in mine:
            readers[memory].append(i)
    outlives = {0, len(reads)}
    return Graph(
        1,
        reads,
        [(i + 1,) for i in range(len(reads))],
        [((),)] * len(reads),
        size,
        readers,
        [len(found) + FOREVER * (m in outlives) for m, found in enumerate(readers)],
        [-1] * len(size),
        [-1],
        list(range(-1, len(reads))),
        readers[1:],
        [sum(m > 0 for m in mine) for mine in reads],
        looks,
    )


def least_peak(graph: Graph) -> int:
    """The least peak of all orders there are: every set of launches that can have run, and what it takes."""
    live, reached = {0: 0}, {0: 0}  # sets of launches as bits; the bytes after them, the least peak up to them
    for _ in graph.reads:
        further: dict[int, int] = {}
        for done, peak in reached.items():
            for i, mine in enumerate(graph.reads):
                if done >> i & 1 or any(m and not done >> (m - 1) & 1 for m in mine):
                    continue
                now = done | 1 << i
                most = live[done] + graph.size[i + 1]
                over = [m for m in (*mine, i + 1) if m and graph.count[m] < FOREVER]
                live[now] = most - sum(graph.size[m] for m in over if all(now >> j & 1 for j in graph.readers[m]))
                most = max(peak, most)
                further[now] = min(further.get(now, most), most)
        reached = further
    return min(reached.values())


def test_equal_layers_are_planned_from_one_template() -> None:
    """All layers have the peak, so that no move in one of them lowers it; the same move in all of them does."""
    gained, least = 0, 0
    for seed in range(12):
        graph = layers(seed, 12)
        phases = ["forward"] * len(graph.reads)
        _, plain, before, program_peak = searched(graph, phases)
        templates = repeated_launches(graph, plain)
        assert sum(t.length * t.count for t in templates) >= 0.8 * len(plain)
        improved = by_template(graph, phases, plain, before, templates)
        name, order, found, _ = best_order(graph, phases)
        check(graph, order)
        assert found == assign(graph, order) and "(templates: " in name
        assert found.peak <= before.peak <= program_peak
        assert (found.peak < before.peak) == (improved is not None) == ("inside templates" in name)
        alone = least_peak(layers(seed, 1))
        assert alone <= found.peak
        least += found.peak <= alone + 64  # beside a layer there is the result of the last one, read by it or not
        gained += found.peak < before.peak
        for t in templates:  # instances are alike, whatever was done inside
            runs = [[graph.looks[i] for i in order[s : s + t.length]] for s in range(t.start, t.end, t.length)]
            assert all(run == runs[0] for run in runs)
    assert gained >= 2 and least >= 11


def test_one_layer_alone_is_ordered_as_well_as_can_be() -> None:
    found = [searched(graph, ["forward"] * len(graph.reads))[2].peak for graph in (layers(s, 1) for s in range(20))]
    least = [least_peak(layers(s, 1)) for s in range(20)]
    assert all(f >= x for f, x in zip(found, least, strict=True))
    assert sum(f == x for f, x in zip(found, least, strict=True)) >= 18


@pytest.mark.parametrize("change", ["larger", "rewired"])
def test_a_layer_that_differs_is_in_no_template(change: str) -> None:
    graph, same = layers(3, 12, **{change: 5}), layers(3, 12)
    program = list(range(len(graph.reads)))
    (whole,) = repeated_launches(same, program)
    assert (whole.length, whole.count) == (10, 12)
    templates = [t for t in repeated_launches(graph, program) if t.length == 10]
    assert [t.count for t in templates] == [5, 6]
    odd = 50 + {"larger": 3, "rewired": 1}[change]
    assert not any(t.start <= odd < t.end for t in templates)


def test_an_instance_costs_alone_what_it_costs_in_its_place() -> None:
    """The small graph of an instance sees the same rise of memory, and its order is legal in every instance."""
    graph = layers(7, 6)
    program = list(range(len(graph.reads)))
    (template,) = repeated_launches(graph, program)
    small = instance_graph(graph, program, 20, template.length)
    order = hills(small, list(range(template.length + 1)))
    check(small, order)
    whole = replay(program, template, order)
    check(graph, whole)
    assert assign(graph, whole).peak == assign(small, order).peak  # nothing but one layer's input is alive beside it
    for start, end in ((22, 25), (24, 27), (25, 29)):  # what is read later as well is there all the time
        dies = [m for m, found in enumerate(graph.readers) if 0 < m <= start <= max(found, default=-1) < end]
        part = instance_graph(graph, program, start, end - start)
        assert sorted(part.size[m] for m in part.writes[0]) == sorted(graph.size[m] for m in dies)


def test_layers_of_a_network_repeat_forwards_and_backwards() -> None:
    graph, phases = graph_of(Case(gpt(layers=5), "sgd"))
    name, order, _, _ = best_order(graph, phases)
    assert "(templates: " in name
    repeated = {phases[order[t.start]] for t in repeated_launches(graph, order) if t.count >= 3 and t.length > 8}
    assert {"forward", "backward"} <= repeated
