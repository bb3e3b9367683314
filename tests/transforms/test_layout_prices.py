"""Layouts by the clock: the cheapest labelling of all, asked for no more than it hangs on, and the model beside it."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from tests.transforms.test_layout import program
from wholestep.dialects.step import StepBuilder
from wholestep.ir.builtin import finish_function
from wholestep.ir.core import Op, Value
from wholestep.transforms.layout import LAST, ROWS, ChannelsLast, Decision
from wholestep.transforms.layout_prices import Move, Pair, Timing, timed_by
from wholestep.transforms.opportunity import transform

IMAGE, KERNEL = (2, 8, 6, 6), (8, 8, 3, 3)
BANDWIDTH = 1e9


class FakeClock:
    """Knows what each op takes, by the number of its kernel's argument, and a price for every byte of a copy."""

    bandwidth, launch = BANDWIDTH, 1e-9

    def __init__(self, pair: Callable[[Op], Pair | None], copy: float = 1.0, limit: float = float("inf")):
        self.pair, self.copy, self.most = pair, copy, limit
        self.asked: list[Op] = []
        self.moved: list[Move] = []

    def ops(self, cases: dict[str, Op]) -> dict[str, Pair | None]:
        self.asked += cases.values()
        return {case: self.pair(op) for case, op in cases.items()}

    def moves(self, moves: Sequence[Move]) -> dict[Move, float | None]:
        self.moved += moves
        return {m: self.copy * 2 * m.type.bytes / self.bandwidth for m in moves}

    def limit(self, op: Op) -> float:
        return self.most


def spread(number: int, taps: int = 3) -> dict[str, Any]:
    """The window of a convolution that keeps the size of its image; no two numbers are alike."""
    return {"stride": (1, 1), "padding": (number * (taps // 2),) * 2, "dilation": (number,) * 2}


def number_of(op: Op) -> int:
    return op.dilation[0]


def chain(length: int, equal: bool = False, taps: int = 3) -> Op:
    """Convolutions one after another, from a matrix to a matrix: what comes and goes lies row by row. No two are alike,
    unless `equal`."""
    root, b, (x, *kernels), function = program((2, 8 * 36), *[(8, 8, taps, taps)] * length)
    y = branch(b, b.reshape(x, shape=IMAGE), kernels, [1] * length if equal else range(1, length + 1), taps)
    finish_function(function, [b.reshape(y, shape=(2, 8 * 36))])
    return root


def branch(b: StepBuilder, y: Value, kernels: Sequence[Value], numbers: Sequence[int], taps: int = 3) -> Value:
    for number, w in zip(numbers, kernels, strict=True):
        y = b.exp(b.conv(y, w, None, **spread(number, taps)))
    return y


def decided(root: Op, clock: FakeClock) -> tuple[Decision, list[int]]:
    """The decision about the only function, and the labels of its convolutions."""
    (function,) = [op for op in root.regions[0].block if op.name == "func.func"]
    with timed_by(Timing(clock)):
        decision = ChannelsLast().decision(function)
    return decision, [decision.label(op) for op in function.regions[0].block if op.name == "step.conv"]


def test_one_slow_layout_flips_the_choice() -> None:
    for pair, label in (((9.0, 1.0), LAST), ((1.0, 9.0), ROWS)):
        decision, labels = decided(chain(2), FakeClock(lambda op, pair=pair: pair))  # type: ignore[misc]
        assert labels == [label] * 2
        assert decision.verdict.by == "measured times" and decision.verdict.timed == 2
        assert f"{label * 2} of 2 convolutions" in str(decision.verdict)


def test_where_each_op_would_convert_back_and_forth_the_whole_stays_in_one_layout() -> None:
    """The second of three is quicker row by row, by less than the copies before and after it take."""
    image = 2 * 4 * 2 * 8 * 36 / BANDWIDTH
    gain = 1.5 * image
    times = [(1.0, 0.5), (0.1, 0.1 + gain), (1.0, 0.5)]
    decision, labels = decided(chain(3, taps=1), FakeClock(lambda op: times[number_of(op) - 1]))
    assert labels == [LAST] * 3
    alone = [LAST if last < rows else ROWS for rows, last in times]
    assert alone == [LAST, ROWS, LAST]  # what op by op would do, which takes longer
    apart = list(decision.side)
    apart[decision.costed[1].node] = False
    assert decision.seconds(apart) > decision.seconds(decision.side)
    times[1] = (0.1, 0.1 + 10 * image)
    assert decided(chain(3, taps=1), FakeClock(lambda op: times[number_of(op) - 1]))[1] == alone


def test_padding_between_two_convolutions_keeps_their_layout() -> None:
    """It writes as it reads: no copy, however dear, stands in the way of the second, which nobody can time."""
    root, b, (x, one, two), function = program((2, 8 * 36), KERNEL, (8, 1, 3, 3))
    first = b.conv(b.reshape(x, shape=IMAGE), one, None, **spread(1))
    wide = b.pad(first, low=(0, 0, 0, 0), high=(0, 0, 1, 1), value=0.0)
    second = b.conv(wide, two, None, stride=(2, 2), padding=(0, 0), dilation=(1, 1), groups=8)
    finish_function(function, [b.sum(second, dims=(0, 2, 3))])
    clock = FakeClock(lambda op: (1.0, 0.5) if op.name == "step.conv" and op.groups == 1 else None, copy=10.0)
    decision, labels = decided(root, clock)
    assert labels == [LAST, LAST]
    assert wide not in [v for v, _ in decision.copies(decision.side)]


def test_the_labels_are_the_cheapest_of_all() -> None:
    """Against every labelling, with random times, in a program with a branch; copies cost more than their bytes."""
    rng = random.Random(0)
    for _ in range(8):
        unit = 2 * 4 * 2 * 8 * 36 / BANDWIDTH
        times = [(rng.uniform(0, 4) * unit, rng.uniform(0, 4) * unit) for _ in range(5)]
        root, b, (x, *kernels), function = program((2, 8 * 36), *[KERNEL] * 5)
        first = b.conv(b.reshape(x, shape=IMAGE), kernels[0], None, **spread(1))
        left = branch(b, first, kernels[1:3], (2, 3))
        right = branch(b, first, kernels[3:], (4, 5))
        finish_function(function, [b.reshape(v, shape=(2, v.type.size // 2)) for v in (left, right)])
        decision, _ = decided(root, FakeClock(lambda op, times=times: times[number_of(op) - 1], rng.uniform(1, 2)))  # type: ignore[misc]
        free = [node for node in range(2, decision.nodes) if node not in dict(decision.pinned)]
        costs = []
        for labels in itertools.product((False, True), repeat=len(free)):
            side = [False] * decision.nodes
            for node, label in zip(free, labels, strict=True):
                side[node] = label
            for move in {m for _, m in decision.copies(side) if m is not None} - set(decision.prices.moved):
                decision.prices.ask((), [move])
            costs.append(decision.seconds(side))
        assert decision.seconds(decision.side) == pytest.approx(min(costs), rel=1e-6)


def test_equal_ops_are_asked_for_once_and_copies_only_where_the_answer_has_them() -> None:
    clock = FakeClock(lambda op: (9.0, 1.0))
    _, labels = decided(chain(5, equal=True), clock)
    assert len(clock.asked) == 1 and labels == [LAST] * 5
    shapes = {m.type.shape for m in clock.moved}
    assert shapes == {IMAGE, KERNEL} and all(m.source != m.target for m in clock.moved)
    rows = FakeClock(lambda op: (1.0, 9.0))
    decided(chain(5, equal=True), rows)
    assert rows.moved == []


def test_an_op_is_not_asked_for_where_its_time_changes_nothing() -> None:
    """The first and the last of six convolutions are heavy, and those between too light to be worth copies: half of
    them are timed, the heavy ones among them, and then the others are clear."""
    clock = FakeClock(lambda op: (9.0, 1.0) if number_of(op) in (1, 6) else (1e-9, 1e-9))
    clock.limit = lambda op: 1.0 if number_of(op) in (1, 6) else 1e-12  # type: ignore[method-assign]
    decision, labels = decided(chain(6, taps=1), clock)
    assert len(clock.asked) == 4 and {1, 6} <= set(map(number_of, clock.asked))
    assert decision.verdict.clear == 2 and "2 ops clear without" in str(decision.verdict)
    assert labels == [LAST] * 6
    everything = FakeClock(clock.pair)
    assert decided(chain(6, taps=1), everything)[1] == labels and len(everything.asked) == 6


def test_what_the_clock_cannot_tell_is_modelled() -> None:
    modelled = [op.change for op in ChannelsLast().find(chain(3))]
    decision, labels = decided(chain(3), FakeClock(lambda op: None))
    assert decision.verdict.modelled == 3 and decision.verdict.timed == 0
    assert labels == [LAST] * 3 and modelled[0].bytes < 0  # as the model alone would have it
    one = FakeClock(lambda op: None if number_of(op) == 2 else (1.0, 9.0))
    assert decided(chain(3), one)[1] == [ROWS] * 3


def test_a_layout_that_is_asked_for_by_name_is_modelled_where_the_clock_has_no_use_for_it() -> None:
    root, timing = chain(3), Timing(FakeClock(lambda op: (1.0, 9.0)), insist=True)
    with timed_by(timing):
        (opportunity,) = ChannelsLast().find(root)
        assert not opportunity.why_not and "it was asked for" in timing.verdicts["f"].by
        assert transform(root, force=["channels_last *"])
        (again,) = ChannelsLast().find(root)
        assert again.why_not.startswith("done: f: 3 of 3")
    with timed_by(Timing(FakeClock(lambda op: (1.0, 9.0)))):
        (refused,) = ChannelsLast().find(chain(3))
    assert "run as well row by row (f: 0 of 3" in refused.why_not and "measured times" in refused.why_not


def test_the_change_that_is_predicted_has_measured_seconds() -> None:
    with timed_by(Timing(FakeClock(lambda op: (3.0, 1.0)))):
        (opportunity,) = ChannelsLast().find(chain(2))
    assert opportunity.change.seconds == pytest.approx(-4.0, rel=1e-3)
    assert ChannelsLast().find(chain(2))[0].change.seconds is None
