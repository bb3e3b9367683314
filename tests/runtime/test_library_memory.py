"""What libraries take beside a plan is measured call by call and becomes part of it: on a stand-in for the counters."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.runtime.runs import data
from wholestep.dialects.step import StepBuilder
from wholestep.ir.builtin import add_function, finish_function, module
from wholestep.ir.core import Location
from wholestep.ir.types import F32, TensorType
from wholestep.plan import plan_to_module
from wholestep.plan.planner import Planned, planned_function
from wholestep.plan.text import module_to_plan
from wholestep.runtime import library_memory
from wholestep.runtime.bound import BoundPlan

CPU = torch.device("cpu")
KEPT, TAKEN = 32 << 20, 5 << 20


def two_layers() -> Planned:
    """Two products of one kind with a tanh between them, and one of another kind."""
    square = TensorType((8, 8), F32)
    function = add_function(module(), "f", [square, square, TensorType((8, 4), F32)])
    x, w, v = function.regions[0].block.arguments
    b = StepBuilder(function.regions[0].block, loc=Location("decoder", "", 0), phase="forward")
    y = b.contract(b.tanh(b.contract(x, w, spec="ab,bc->ac")), w, spec="ab,bc->ac")
    finish_function(function, [b.contract(y, v, spec="ab,bc->ac")])
    return planned_function(function, CPU)


@pytest.fixture
def library(monkeypatch) -> dict[str, int]:
    """A library that keeps memory from its first product on, and takes and gives back some at products of 4 columns."""
    found = {"handed out": 1000, "in use": 500, "calls": 0}
    monkeypatch.setattr(library_memory, "release", lambda device: None)
    monkeypatch.setattr(library_memory, "handed_out", lambda device: (found["handed out"], found["in use"]))
    run = BoundPlan.run

    def counted(bound: BoundPlan) -> None:
        run(bound)
        if not found["calls"]:
            found["handed out"] += KEPT
            found["in use"] += KEPT
        found["calls"] += 1
        if bound.memory.tensor(bound.plan.launches[0].writes[0]).shape[1] == 4:
            found["handed out"] += TAKEN

    monkeypatch.setattr(BoundPlan, "run", counted)
    return found


def test_what_libraries_take_and_keep_is_part_of_the_plan(library):
    planned = two_layers()
    plan, before = planned.plan, planned.plan.peak
    library_memory.measure(planned, CPU)
    takes = {(launch.name, launch.takes) for launch in plan.launches}
    assert takes == {("step.contract", 0), ("step.tanh", 0), ("step.contract", TAKEN)}
    assert library["calls"] == 2  # equal calls run once
    assert plan.kept_by_libraries == KEPT and plan.peak == before + KEPT + TAKEN
    again = module_to_plan(plan_to_module(plan))
    assert again == plan and again.peak == plan.peak


def test_what_the_allocator_hands_out_beyond_is_part_of_the_plan(monkeypatch):
    """Blocks of a segment lie one after the other; those of other tensors and free ones do not count."""
    tensors = [torch.zeros(1000, dtype=torch.uint8), torch.zeros(3000, dtype=torch.uint8)]
    first, second = (t.untyped_storage().data_ptr() for t in tensors)

    def block(size: int, asked: int) -> dict[str, int]:
        return {"size": size, "requested_size": asked}

    segments = [
        {"address": first - 512, "blocks": [block(512, 100), block(1024, 1000), block(2048, 0)]},
        {"address": second, "blocks": [block(4096, 3000)]},
    ]
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: segments)
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "cudaMallocAsync")
    assert library_memory.handed_beyond(tensors) == 0
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "native")
    assert library_memory.handed_beyond([*tensors, tensors[0][10:20]]) == 24 + 1096
    plan = two_layers().plan
    before, plan.handed_beyond = plan.peak, 1120
    again = module_to_plan(plan_to_module(plan))
    assert again == plan and again.peak == before + 1120


def test_a_call_that_does_not_run_alone_keeps_what_was_planned(library, monkeypatch):
    def fails(bound: BoundPlan) -> Any:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(BoundPlan, "run", fails)
    planned = two_layers()
    before = planned.plan.peak
    library_memory.measure(planned, CPU)
    assert planned.plan.peak == before


def test_a_launch_alone_computes_what_it_does_in_its_plan():
    planned = two_layers()
    last = planned.plan.launches[-1]
    plan = library_memory.alone(planned.plan, last)
    x, w = data(8, 8), data(8, 4)
    bound = BoundPlan(Planned(plan, planned.function, planned.kernels[-1:], []), CPU, [x, w])
    bound.run()
    assert torch.equal(bound.memory.tensor(plan.launches[0].writes[0]), x @ w)
