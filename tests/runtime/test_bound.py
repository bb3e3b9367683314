"""Numbers of the host: what does not change from step to step is neither computed nor sent to its place again."""

from __future__ import annotations

import operator
from types import SimpleNamespace
from typing import Any

import torch

from wholestep.ir.types import F32, TensorType
from wholestep.plan.plan import Buffer, Launch
from wholestep.runtime.cells import Cells
from wholestep.runtime.host_numbers import HostCall, HostNumbers


def test_what_no_counter_changes_is_computed_when_its_numbers_change() -> None:
    """Rate 0 and counters 1 and 2: -rate, and counter + 1 for both, times that."""
    asked: list[str] = []

    def noted(name: str, function: Any) -> Any:
        return lambda *given: (asked.append(name), function(*given))[1]

    calls = [HostCall(noted("neg", operator.neg), (0,), 3, ("neg",))]
    calls += [HostCall(noted("add", lambda x: x + 1), (n,), n + 3, ("add",)) for n in (1, 2)]
    calls += [HostCall(noted("mul", operator.mul), (3, n + 3), n + 5, ("mul",)) for n in (1, 2)]
    numbers = HostNumbers(calls, [1, 2], {6, 7})
    values: list[Any] = [0.5, 1.0, 1.0, *[None] * 5]

    def step(rate: float, *counters: float) -> list[str]:
        asked.clear()
        values[0], values[1:3] = rate, counters
        if numbers.compute(values):
            numbers.spread(values)
        assert values[6:] == [-rate * (c + 1) for c in counters]
        return sorted(asked)

    assert step(0.5, 1.0, 1.0) == ["add", "mul", "neg"]
    assert step(0.5, 2.0, 2.0) == ["add", "mul"]
    assert step(0.25, 3.0, 3.0) == ["add", "mul", "neg"]
    assert step(0.25, 4.0, 1.0) == ["add", "add", "mul", "mul", "neg"]
    assert step(0.25, 5.0, 5.0) == ["add", "mul", "neg"]


def test_cells_hold_the_numbers_of_their_step() -> None:
    """Numbers that stay, change, and are no longer alike."""
    numbers = [Buffer(TensorType((), F32), (), "host", "batch") for _ in range(2)]
    plan = SimpleNamespace(buffers=numbers, launches=[Launch(0, (0, 1), (), "aten")])
    planned: Any = SimpleNamespace(plan=plan, kernels=[SimpleNamespace(steps=[])])
    cells = Cells(planned, torch.device("cpu"))
    cells.share({1: 0})
    for one, other, alike in (
        (2.0, 2.0, True),
        (2.0, 2.0, True),
        (3.0, 3.0, True),
        (3.0, 1.0, False),
        (3.0, 3.0, True),
    ):
        cells.fill([one, None if alike else other], (0, 0, 0), alike)
        assert [float(cells.tensors[n]) for n in (0, 1)] == [one, other]
    # at multiples of 16 bytes, so that kernels that read them are those for aligned tensors
    begin = cells.memory.data_ptr()
    assert [t.data_ptr() - begin for t in cells.tensors.values()] == [at for at, _, _ in cells.layout()] == [32, 48]
