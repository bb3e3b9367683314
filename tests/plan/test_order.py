"""Orders keep every dependence, never cost memory, and find what a list schedule can find."""

from __future__ import annotations

import pytest
import torch

from tests.plan.networks import Case, convnet, gpt
from wholestep.backends.kernels import Kernels
from wholestep.dialects.step import StepBuilder
from wholestep.ir.builtin import add_function, finish_function, module
from wholestep.ir.types import F32, TensorType
from wholestep.plan import plan_function
from wholestep.plan.aliases import assign
from wholestep.plan.launches import flatten
from wholestep.plan.liveness import Graph, build_graph
from wholestep.plan.order import best_order, list_schedule, look_ahead, sink
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
    orders = [early, sink(graph, program), sink(graph, early), look_ahead(graph, rank), best_order(graph, phases)[1]]
    for order in orders:
        assert sorted(order) == program
        position = {i: p for p, i in enumerate(order)}
        assert all(position[i] < position[j] for i in program for j in graph.successors[i])
    _, best, found, program_peak = best_order(graph, phases)
    assert program_peak == assign(graph, program).peak
    assert found.peak == min(program_peak, found.peak) == assign(graph, best).peak


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
