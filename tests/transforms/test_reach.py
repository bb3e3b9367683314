"""What must run before what, against walks along paths."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest

from wholestep.transforms.reach import Reach


class Node:
    """As much of an op as is asked of it."""

    def __init__(self, *makers: Node):
        self.operands = [SimpleNamespace(op=maker) for maker in makers]


def paths(nodes: list[Any], groups: dict[Any, int]) -> dict[Any, set[Any]]:
    """Per op all that must run before it, where ops of a group run together."""
    needs = {n: {v.op for v in n.operands} for n in nodes}
    while True:
        grown = {}
        for n in nodes:
            own = {m for m in nodes if groups[m] == groups[n]}
            found = set().union(*(needs[m] for m in own)) - own
            found |= {m for f in found for m in nodes if groups[m] == groups[f]}
            grown[n] = found.union(*(needs[f] for f in found)) - own
        if grown == needs:
            return needs
        needs = grown


@pytest.mark.parametrize("seed", range(6))
def test_groups_need_what_any_of_their_ops_needs(seed: int) -> None:
    draw = random.Random(seed)
    nodes: list[Any] = []
    for _ in range(90):  # (more than fit one word)
        nodes.append(Node(*draw.sample(nodes, min(len(nodes), draw.randint(0, 2)))))
    reach, groups = Reach(nodes), {n: i for i, n in enumerate(nodes)}
    for _ in range(25):
        one, other = draw.sample(nodes, 2)
        wanted = paths(nodes, groups)
        assert all(reach.needs(a, b) == (b in wanted[a]) for a in draw.sample(nodes, 20) for b in nodes)
        members = [n for n in nodes if groups[n] in (groups[one], groups[other])]
        outside = {m for n in members for m in wanted[n]} - set(members)
        if any(wanted[m] & set(members) for m in outside):
            continue  # something must run between them
        bits = reach.needed(members)
        assert {n for i, n in enumerate(nodes) if int(bits[i >> 6]) >> (i & 63) & 1} == outside
        behind = {nodes[i] for i in reach.behind(reach.bits(members))}
        assert behind - set(members) == {n for n in nodes if wanted[n] & set(members)} - set(members)
        reach.unite(members)
        groups |= dict.fromkeys(members, groups[one])
