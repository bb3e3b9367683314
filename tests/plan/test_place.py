"""Placers: no two stretches that live at once share a byte, bounds are met, and the choice is the best of all."""

from __future__ import annotations

import importlib.util
import random

import pytest

from wholestep.plan import place as placing
from wholestep.plan.place import place

PLACERS = ["best_fit_along_time", "best_fit_against_time", "most_crowded_first"]
if importlib.util.find_spec("omnimalloc") is not None:
    PLACERS.append("omnimalloc")


def instance(seed: int, count: int = 120) -> tuple[list[int], list[int], list[int], int]:
    draw = random.Random(seed)
    start = [draw.randrange(100) for _ in range(count)]
    end = [s + 1 + min(draw.randrange(40), draw.randrange(40)) for s in start]
    size = [64 * draw.choice((0, 1, 1, 2, 5, 16, 100)) for _ in range(count)]
    bound = max(sum(z for s, e, z in zip(start, end, size, strict=True) if s <= t < e) for t in range(141))
    return start, end, size, bound


def check(start: list[int], end: list[int], size: list[int], offsets: list[int]) -> int:
    """Every pair of neighbours in time apart in space; returns the height."""
    for i in range(len(size)):
        assert offsets[i] >= 0 and offsets[i] % 64 == 0
        for j in range(i):
            together = start[i] < end[j] and start[j] < end[i]
            apart = offsets[i] + size[i] <= offsets[j] or offsets[j] + size[j] <= offsets[i]
            assert apart or not together or not size[i] or not size[j]
    return max((o + z for o, z in zip(offsets, size, strict=True) if z), default=0)


@pytest.mark.parametrize("name", PLACERS)
def test_each_placer_is_right(name: str) -> None:
    for seed in range(8):
        start, end, size, bound = instance(seed)
        live = [i for i, z in enumerate(size) if z]
        found = getattr(placing, name)(live, start, end, size, bound)
        height = check(start, end, size, [found.get(i, 0) for i in range(len(size))])
        assert bound <= height < 1.6 * bound


def test_the_best_is_taken() -> None:
    for seed in range(8):
        start, end, size, bound = instance(seed)
        best = place(start, end, size, bound)
        assert check(start, end, size, best.offsets) == best.size
        assert best.size <= place(start, end, size, bound, external=False).size
        assert place(start, end, size, bound) == best


def training(seed: int, layers: int = 40) -> tuple[list[int], list[int], list[int], int]:
    """Lifetimes as a training step has them: what backward reads lives from its layer's forward to its backward."""
    draw = random.Random(seed)
    start, end, size = [], [], []
    for layer in range(layers):
        for _ in range(3):
            start.append(layer)
            end.append(2 * layers - layer)
            size.append(64 * draw.choice((1, 2, 5, 16, 100)))
    for time in range(2 * layers):  # and what is gone after an op or two
        start.append(time)
        end.append(time + draw.choice((1, 2)))
        size.append(64 * draw.choice((1, 30, 60, 90)))
    bound = max(sum(z for s, e, z in zip(start, end, size, strict=True) if s <= t < e) for t in range(2 * layers))
    return start, end, size, bound


def test_most_crowded_first_leaves_no_gap_in_a_step() -> None:
    gaps = 0
    for seed in range(8):
        start, end, size, bound = training(seed)
        live = list(range(len(size)))
        found = placing.most_crowded_first(live, start, end, size, bound)
        assert check(start, end, size, [found[i] for i in live]) == bound
        largest = placing.in_turn(sorted(live, key=lambda i: -size[i]), start, end, size)
        gaps += check(start, end, size, [largest[i] for i in live]) - bound
    assert gaps  # which the largest first, whenever it lives, leaves


def test_how_much_lives_at_once() -> None:
    start, end, size = [0, 2, 0, 5], [2, 6, 4, 6], [5, 6, 2, 3]
    assert placing.crowds([0, 1, 2, 3], start, end, size) == {0: 7, 1: 9, 2: 8, 3: 9}


def test_nothing_to_place() -> None:
    assert place([], [], [], 0).size == 0
    assert place([0], [1], [0], 0).offsets == [0]


def test_without_omnimalloc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    start, end, size, bound = instance(3)
    found = place(start, end, size, bound)
    assert found.placer != "omnimalloc"
    check(start, end, size, found.offsets)
