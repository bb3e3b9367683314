"""Counters that are neighbours in memory: read and written in one go, on a device without waiting for it."""

from __future__ import annotations

import pytest
import torch

from wholestep.runtime.counters import Vector


def packed(count: int, value: float = 5.0) -> list[torch.Tensor]:
    """Counters of an optimizer, neighbours in memory, each a tensor of its own."""
    counters, memory = [torch.tensor(value) for _ in range(count)], torch.full((count,), value)
    for i, counter in enumerate(counters):
        counter.data = memory[i]
    return counters


def on_device(counters: list[torch.Tensor], sources: list[int]) -> Vector:
    """A vector that takes its memory for a device's, where reading waits."""
    vector = Vector(counters, list(range(len(counters))), [10 + i for i in range(len(counters))], sources)
    vector.array = None
    return vector


def test_numbers_on_the_host_are_always_read():
    counters = packed(3)
    vector = Vector(counters, [0, 1, 2], [3, 4, 5], [3, 3, 3])
    assert vector.agreed() == 5
    counters[1].data.add_(1)
    assert vector.agreed() is None and vector.read() == [5, 6, 5]
    vector.write([0, 0, 0, 7.0, 8.0, 9.0], alike=False)
    assert [float(c) for c in counters] == [7, 8, 9]
    vector.write([0, 0, 0, 4.0, None, None], alike=True)
    assert [float(c) for c in counters] == [4, 4, 4]


def test_numbers_on_a_device_are_read_once(monkeypatch):
    counters = packed(3)
    vector = on_device(counters, [10, 10, 10])
    assert vector.agreed() == 5
    monkeypatch.setattr(torch.Tensor, "tolist", lambda self: pytest.fail("the step waits for the device"))
    values = [None] * 10 + [6.0]
    vector.write(values, alike=True)
    assert vector.agreed() == 6 and vector.read() == [6, 6, 6] and float(counters[2]) == 6


@pytest.mark.parametrize("write", ["user", "eager step", "another program"])
def test_what_others_write_is_read_again(write):
    counters = packed(2)
    vector, other = on_device(counters, [10, 10]), on_device(counters, [10, 10])
    vector.write([None] * 10 + [6.0, 6.0], alike=True)
    assert vector.agreed() == other.agreed() == 6
    if write == "user":
        counters[1].fill_(9)
    elif write == "eager step":
        torch._foreach_add_(counters, 1)
    else:
        other.write([None] * 10 + [7.0, 7.0], alike=True)
    wanted = {"user": [6, 9], "eager step": [7, 7], "another program": [7, 7]}[write]
    assert vector.read() == wanted and vector.agreed() == (None if write == "user" else 7)
