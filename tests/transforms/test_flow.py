"""Maximum flow against SciPy's, and the cut against its flow."""

from __future__ import annotations

import random

import numpy
import pytest
from scipy.sparse import csr_matrix
from scipy.sparse.csgraph import maximum_flow

from wholestep.transforms.flow import Network

Edge = tuple[int, int, int]


def edges_of(seed: int, nodes: int) -> list[Edge]:
    draw = random.Random(seed)
    return [(*draw.sample(range(nodes), 2), draw.randint(0, 9)) for _ in range(draw.randint(0, 4 * nodes))]  # type: ignore[misc]


def flow_by_scipy(nodes: int, edges: list[Edge]) -> int:
    matrix = numpy.zeros((nodes, nodes), dtype=numpy.int32)
    for tail, head, capacity in edges:
        matrix[tail, head] += capacity
    return maximum_flow(csr_matrix(matrix), 0, nodes - 1).flow_value


@pytest.mark.parametrize("seed", range(60))
def test_flow_and_cut(seed: int) -> None:
    nodes = 2 + seed % 17
    edges = edges_of(seed, nodes)
    network, flow = Network(nodes), 0
    half = len(edges) // 2
    for part in (edges[:half], edges[half:]):  # more edges may come when there is flow already
        for edge in part:
            network.add(*edge)
        flow += network.push(0, nodes - 1)
    assert flow == flow_by_scipy(nodes, edges)
    behind = network.before_sink(nodes - 1)
    assert behind[nodes - 1] and not behind[0]
    assert sum(c for tail, head, c in edges if behind[head] and not behind[tail]) == flow


def test_of_two_minimum_cuts_the_one_nearest_to_the_sink() -> None:
    network = Network(4)
    for node in range(3):
        network.add(node, node + 1, 5)
    assert network.push(0, 3) == 5
    assert network.before_sink(3) == [False, False, False, True]
