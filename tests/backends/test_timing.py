"""How long a call takes: as many calls as it takes to see the least again, by a clock that a test sets."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from types import SimpleNamespace

import pytest

from wholestep.backends import timing


def timed(seconds: Iterable[float], monkeypatch: pytest.MonkeyPatch, *to_beat: float) -> tuple[float, int]:
    """What is told of a call that takes so long, time after time, and how often it was called."""
    now, count, left = 0.0, 0, iter(seconds)

    def call() -> None:
        nonlocal now, count
        now, count = now + next(left), count + 1

    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: now))
    return timing.on_cpu(call, *to_beat), count


def test_a_call_that_takes_the_same_every_time_is_soon_known(monkeypatch: pytest.MonkeyPatch) -> None:
    found, count = timed(itertools.chain([9e-4], itertools.repeat(1e-4)), monkeypatch)
    assert found == pytest.approx(1e-4) and count == 1 + timing.SEEN


def test_a_call_that_is_disturbed_gets_more_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The least came late and once: it is looked for until there is no patience left."""
    disturbed = itertools.chain([8e-3, 4e-3, 2e-3, 1e-4], (8e-3 / (1 + 0.1 * i) for i in itertools.count()))
    found, count = timed(disturbed, monkeypatch)
    assert found == pytest.approx(1e-4) and count > timing.SEEN


def test_where_it_is_close_more_calls_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    assert timed(itertools.repeat(1e-4), monkeypatch, 1.1e-4)[1] == timing.SEEN_IF_CLOSE
    assert timed(itertools.repeat(1e-4), monkeypatch, 2e-4)[1] == timing.SEEN


def test_what_is_clearly_slower_is_soon_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    assert timed(itertools.repeat(4e-3), monkeypatch, 1e-3) == (pytest.approx(4e-3), 2)
    assert timed(itertools.chain([4e-3], itertools.repeat(1e-3)), monkeypatch, 1e-3)[0] == pytest.approx(1e-3)
    assert timed([], monkeypatch, 1e-3, 0.5) == (0.5, 0)
    assert timed(itertools.repeat(0.5), monkeypatch, math.inf, 0.5) == (0.5, 1)
