"""The exact and the greedy choice on small random graphs, against trying every choice there is; repeated layers."""

from __future__ import annotations

import ctypes
import itertools
import os
import random

import pytest

from wholestep.budget.choice import Choice, Segments, cut, measure
from wholestep.budget.exact import Exact
from wholestep.budget.graph import Graph, Memory, Node
from wholestep.budget.greedy import Greedy
from wholestep.budget.silence import without_highs_lines
from wholestep.budget.templates import Template, find_templates


def random_graph(draw: random.Random, ops: int = 9) -> Graph:
    """Ops with one or two results, costs from cheap to dear, some that cannot run again."""
    graph = Graph()
    for number in range(ops):
        node = Node(draw.choice((1e-6, 3e-6, 5e-5, 4e-4)) * draw.uniform(0.5, 1.5), again=draw.random() < 0.9)
        count = len(graph.memories)
        node.reads = tuple(sorted(draw.sample(range(count), min(count, draw.randint(0, 2)))))
        made = [Memory(number, 64 * draw.randint(1, 40), draw.random() < 0.6) for _ in range(draw.choice((1, 1, 2)))]
        if draw.random() < 0.1:
            made[0].fixed, node.again = True, False
        graph.add(node, made)
    return graph


def random_segments(seed: int) -> Segments:
    draw = random.Random(seed)
    graph = random_graph(draw)
    segments = cut(graph, [Template(0, 4, 1), Template(4, 3, 1), Template(7, 2, 1)])
    segments.forward = [64 * draw.randint(0, 20) for _ in range(3)]
    segments.backward = [64 * draw.randint(0, 20) for _ in range(3)]
    return segments


def every_choice(segments: Segments) -> list[Choice]:
    """All choices that are valid."""
    free = [n for n, node in enumerate(segments.graph.nodes) if node.again]
    found = []
    for size in range(len(free) + 1):
        for again in itertools.combinations(free, size):
            try:
                found.append(measure(segments, again))
            except ValueError:  # it reads across segments
                continue
    return found


@pytest.mark.parametrize("seed", range(12))
def test_exact_is_the_best_of_all_choices(seed):
    segments = random_segments(seed)
    choices = every_choice(segments)
    least, most = min(c.memory for c in choices), measure(segments, ()).memory
    exact, greedy = Exact(segments), Greedy(segments)
    assert exact.leanest().choice.memory == least
    for share in (0.0, 0.2, 0.5, 0.8, 1.0):
        limit = int(least + share * (most - least))
        best = min(c.seconds for c in choices if c.memory <= limit)
        solved = exact.cheapest(limit)
        assert solved is not None and solved.choice.memory <= limit
        assert solved.choice.seconds == pytest.approx(best, rel=1e-5, abs=1e-12)
        assert solved.bound <= best * (1 + 1e-5) + 1e-12
        simple = greedy.cheapest(limit)
        assert simple is None or (simple.choice.memory <= limit and simple.choice.seconds >= best * (1 - 1e-9))
    assert exact.cheapest(least - 64) is None and greedy.cheapest(least - 64) is None


def test_greedy_is_not_always_best_but_gets_somewhere():
    gained, lost = 0, 0
    for seed in range(40):
        segments = random_segments(seed)
        most = measure(segments, ()).memory
        limit = (most + Exact(segments).leanest().choice.memory) // 2
        solved, simple = Exact(segments).cheapest(limit), Greedy(segments).cheapest(limit)
        assert solved is not None
        gained += simple is not None
        lost += simple is not None and simple.choice.seconds > solved.choice.seconds * 1.01
    assert gained > 10 and lost > 3


def layer(graph: Graph, reads: tuple[int, ...], kinds: str) -> int:
    """A chain of ops, one per letter; returns its last memory. Capitals are kept for backward."""
    for kind in kinds:
        node = Node({"a": 1e-6, "b": 1e-4}[kind.lower()], reads=reads, looks=kind)
        graph.add(node, [Memory(len(graph.nodes), 64 * (1 + (kind.lower() == "b")), kind.isupper())])
        reads = (len(graph.memories) - 1,)
    return reads[0]


def chain(layers: int) -> Graph:
    graph = Graph()
    last = layer(graph, (), "ab")
    for _ in range(layers):
        last = layer(graph, (last,), "AaBA")
    layer(graph, (last,), "bb")
    return graph


def test_repeated_layers_are_found():
    templates = find_templates(chain(6))
    assert [(t.length, t.count) for t in templates if t.count > 1] == [(4, 6)]
    assert templates[0].start == 0 and templates[-1].end == len(chain(6).nodes)
    assert all(a.end == b.start for a, b in itertools.pairwise(templates))
    assert [t.count for t in find_templates(chain(1))] == [1]


def test_layers_that_are_wired_otherwise_are_not_one_template():
    graph = chain(4)
    graph.nodes[2 + 4 + 2].reads = (2 + 4,)  # in the second layer B reads A itself
    repeated = [t for t in find_templates(graph) if t.count > 1]
    assert repeated and all(not t.start <= 2 + 4 < t.end or t.length != 4 for t in repeated)


@pytest.mark.parametrize("layers", [3, 4])
def test_templates_lose_nothing_on_a_chain_of_layers(layers):
    """One number per op of the template is as good as free choice among the same segments."""
    graph = chain(layers)
    templates = [Template(0, 2, 1), Template(2, 4, layers), Template(2 + 4 * layers, 2, 1)]
    segments = cut(graph, templates)
    free = [n for n, node in enumerate(graph.nodes) if graph.late_bytes(n) or node.looks == "a"]
    choices = []
    for again in itertools.chain.from_iterable(itertools.combinations(free, k) for k in range(len(free) + 1)):
        try:
            choices.append(measure(segments, again))
        except ValueError:
            continue
    exact, most = Exact(segments), measure(segments, ()).memory
    for limit in range(exact.leanest().choice.memory, most + 1, 64):
        solved = exact.cheapest(limit)
        assert solved is not None
        best = min(c.seconds for c in choices if c.memory <= limit)
        assert solved.choice.seconds == pytest.approx(best, rel=1e-5)


def test_lines_of_the_solver_do_not_reach_standard_output_and_those_of_others_do(capfd):
    library = ctypes.CDLL(None)
    library.printf(b"before\n")  # C holds it back
    with without_highs_lines():
        library.printf(b"HighsMipSolverData::transformNewIntegerFeasibleSolution tmpSolver.run();\n")
        os.write(1, b"another thread's\n")
    print("after", flush=True)
    assert capfd.readouterr().out.splitlines() == ["before", "another thread's", "after"]
    with pytest.raises(KeyError), without_highs_lines():
        raise KeyError
    print("still here", flush=True)
    assert capfd.readouterr().out == "still here\n"
