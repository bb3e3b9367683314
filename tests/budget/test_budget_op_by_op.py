"""Budgets that fused kernels alone do not reach: parts of a kernel run again, each op decided about by itself."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

import wholestep as ws
from wholestep.budget.copies import note_copies
from wholestep.budget.graph import Graph, Memory, Node
from wholestep.budget.trials import Trials
from wholestep.errors import MemoryBudgetError
from wholestep.ir.core import Op
from wholestep.transforms.recompute import originals

#: what a user may try by hand: the same cheap ops and the same product in every layer
BY_HAND = ("recompute */layer_norm#*", "recompute */gelu#*", "recompute *.up/forward/contract#*")
#: layers, rows
SIZES = [(4, 256)]


class Layer(nn.Module):
    """A layer whose normalisation is fused with the sum that the layer before ends with."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 128), nn.Linear(128, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def compiled(layers: int, rows: int, **options):
    torch.manual_seed(0)
    model = nn.Sequential(*[Layer() for _ in range(layers)], nn.Linear(32, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    x, y = torch.randn(rows, 32), torch.randint(0, 10, (rows,))
    options = {"providers": ["aten", "cpp"], **options}
    step = ws.compile(model, nn.CrossEntropyLoss(), optimizer, (x, y), tune=False, **options)
    return step, [float(step(x, y)) for _ in range(3)]


def least(layers: int, rows: int, **options) -> int:
    with pytest.raises(MemoryBudgetError) as caught:
        compiled(layers, rows, memory_budget=1, **options)
    return int(str(caught.value).partition("Give memory_budget=")[2].split()[0])


@functools.cache
def by_hand(layers: int, rows: int) -> tuple[int, list[float]]:
    step, losses = compiled(layers, rows, force=BY_HAND)
    return step.plan().peak, losses


@pytest.mark.parametrize(("layers", "rows"), SIZES)
def test_what_can_be_reached_by_hand_is_reached(layers, rows):
    peak, losses = by_hand(layers, rows)
    step, others = compiled(layers, rows, memory_budget=peak)
    assert step.plan().peak == step.budget.peak_after <= peak < step.budget.peak_before
    assert any(launch.provider == "cpp" for launch in step.plan().launches)
    assert others == pytest.approx(losses, rel=1e-6)
    found = step.budget
    assert found.greedy_seconds is None or found.greedy_seconds >= found.extra_seconds * (1 - 1e-6)
    replayed, again = compiled(layers, rows, recipe=step.recipe)
    assert replayed.plan().peak == step.plan().peak and again == others


@pytest.mark.parametrize(("layers", "rows"), SIZES)
def test_the_least_that_is_named_is_no_more_than_what_is_reached_by_hand(layers, rows):
    named = least(layers, rows)
    assert named <= by_hand(layers, rows)[0]
    assert named <= least(layers, rows, providers=["aten"])
    assert compiled(layers, rows, memory_budget=named)[0].plan().peak <= named


def test_single_ops_are_looked_at_only_where_nothing_else_fits(monkeypatch):
    asked = []

    def watched(self, function: Op, marked: bool = False, fused: bool = True):
        asked.append(fused)
        return real(self, function, marked, fused)

    real = Trials.planned
    monkeypatch.setattr(Trials, "planned", watched)
    compiled(4, 256, memory_budget=0.9)
    assert asked and all(asked)
    compiled(4, 256, memory_budget=by_hand(4, 256)[0])
    assert asked.count(False) == 1


def test_what_is_forbidden_stays_so_op_by_op():
    peak, _ = by_hand(4, 256)
    step, _ = compiled(4, 256, memory_budget=peak)
    assert any(key.startswith("recompute") and "/layer_norm#" in key for key in step.recipe)
    with pytest.raises(MemoryBudgetError, match="or forbid less"):
        compiled(4, 256, memory_budget=peak, forbid=["recompute */layer_norm#*"])


def test_what_backward_has_a_copy_of_is_not_kept_for_another():
    """A chain a > b > c of forward, where backward has a copy of b: c may run again from what a made."""
    step, _ = compiled(4, 256)
    block = step.program().regions[0].block.first.regions[0].block
    copied = next(op for op in originals(block).values() if op.name == "step.gelu")
    graph = Graph()
    for number, (ops, late) in enumerate([((), True), ((copied,), False), ((), True)]):
        node = Node(1.0, reads=(number - 1,) if number else (), looks="abc"[number], ops=ops)
        graph.add(node, [Memory(number, 64, late)])
    note_copies(graph, block)
    a, b, c = graph.nodes
    assert (a.there, b.there, c.there) == (False, True, False)
    assert c.reads == (0,) and c.seconds == 2.0 and c.looks != "c"
    assert b.reads == (0,) and b.seconds == 1.0 and b.looks == "b"
