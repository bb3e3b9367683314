"""When a plan is launched, captured and replayed, and what becomes of a capture that fails: on a stand-in for a GPU.

The stand-in counts captures, replays and launches; launches run on the CPU, but not while they are captured.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import wholestep as ws
from tests.runtime.runs import Perceptron, adamw, data, fresh, squares
from wholestep.dialects.step import StepBuilder
from wholestep.ir.builtin import add_function, finish_function, module
from wholestep.ir.core import Location
from wholestep.ir.types import F32, TensorType
from wholestep.plan.planner import Planned, planned_function
from wholestep.plan.side import SIDE
from wholestep.runtime import cuda_graph
from wholestep.runtime.allocated import SLACK
from wholestep.runtime.bound import BoundPlan
from wholestep.runtime.calls import Beside
from wholestep.runtime.cuda_graph import MOST_CAPTURES, Graphed
from wholestep.runtime.graph_nodes import DriverError
from wholestep.transforms.side_updates import MARK

CPU = torch.device("cpu")
X = data(8)


class Device:
    """What torch.cuda does for a graph, and its counters of memory."""

    def __init__(self) -> None:
        self.capturing = False
        self.captured = self.replayed = self.launched = 0
        self.handed_out = 1000
        self.captured_on: Any = None

    def take(self, size: int) -> None:
        """Memory that a kernel takes and gives back."""
        self.handed_out += size

    def counted(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """A call of the plan that is counted; while a graph is captured nothing is computed."""

        def run(*args: Any, **kwargs: Any) -> None:
            if not self.capturing:
                self.launched += 1
                call(*args, **kwargs)

        return run


@pytest.fixture
def device(monkeypatch) -> Device:
    it = Device()

    class Graph:
        def __init__(self, keep_graph: bool = False) -> None:
            assert keep_graph  # its nodes are changed before it is instantiated
            self.ready = False

        def instantiate(self) -> None:
            self.ready = True

        def replay(self) -> None:
            assert self.ready
            it.replayed += 1

    @contextlib.contextmanager
    def capture(graph: Graph, capture_error_mode: str, stream: Any = None) -> Iterator[None]:
        assert isinstance(graph, Graph) and capture_error_mode == "thread_local"
        it.captured_on = stream
        it.capturing = True
        it.captured += 1
        try:
            yield
        finally:
            it.capturing = False

    monkeypatch.setattr(cuda_graph, "without_memsets", lambda graph, where: 0)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda where: None)

    def stats(where: torch.device) -> dict[str, Any]:
        return {"allocated_bytes": {"all": {"allocated": it.handed_out}}}

    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", stats)
    return it


def bound_plan(device: Device) -> BoundPlan:
    """tanh(x) * rate, cos(...): the rate is a number of the host that a kernel takes as it is."""
    function = add_function(module(), "f", [TensorType((8,), F32), TensorType((), F32)])
    x, rate = function.regions[0].block.arguments
    b = StepBuilder(function.regions[0].block, loc=Location("decoder.rotary", "", 0), phase="forward")
    finish_function(function, [b.cos(b.mul(b.tanh(x), rate))])
    bound = BoundPlan(planned_function(function, CPU, [1]), CPU, [X.clone(), None])
    bound.calls = [(device.counted(call), args, kwargs) for call, args, kwargs in bound.calls]
    bound.values[1] = 0.5
    return bound


def result(bound: BoundPlan) -> torch.Tensor:
    return bound.results()[0]


def test_a_graph_that_cannot_be_made_ready_is_one_warning(device, monkeypatch):
    def fails(graph, where):
        raise DriverError("cuGraphAddKernelNode_v2 failed with CUDA error 1")

    monkeypatch.setattr(cuda_graph, "without_memsets", fails)
    bound = bound_plan(device)
    graphed = Graphed(bound)
    graphed.run()
    with pytest.warns(UserWarning, match="launch by launch.*cannot be made ready.*cuGraphAddKernelNode_v2 failed"):
        graphed.run()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        graphed.run()
    assert graphed.graph is None and device.launched == 9
    assert torch.equal(result(bound), torch.cos(torch.tanh(X) * 0.5))


def test_launch_then_capture_then_replay(device):
    bound = bound_plan(device)
    graphed = Graphed(bound)
    assert bound.taken == {1}
    graphed.run()
    assert (device.launched, device.captured, device.replayed) == (3, 0, 0)
    assert torch.equal(result(bound), torch.cos(torch.tanh(X) * 0.5))
    graphed.run()
    assert (device.launched, device.captured, device.replayed) == (3, 1, 1)
    for _ in range(5):
        graphed.run()
    assert (device.launched, device.captured, device.replayed) == (3, 1, 6)
    assert graphed.refused == ""


def fail_in_capture(device: Device, bound: BoundPlan, number: int) -> None:
    call, args, kwargs = bound.calls[number]

    def run(*args: Any, **kwargs: Any) -> None:
        if device.capturing:
            raise RuntimeError("operation not permitted when stream is capturing\nmore about it")
        call(*args, **kwargs)

    bound.calls[number] = (run, args, kwargs)


def test_a_capture_that_fails_is_one_warning_that_names_the_launch(device):
    bound = bound_plan(device)
    fail_in_capture(device, bound, 2)
    graphed = Graphed(bound)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(5):
            result(bound).zero_()
            graphed.run()
            assert torch.equal(result(bound), torch.cos(torch.tanh(X) * 0.5))
    (warning,) = caught
    text = str(warning.message)
    assert "launch by launch" in text and "step.cos of layer decoder.rotary" in text
    assert "operation not permitted when stream is capturing" in text and "more about it" not in text
    assert "step.cos of layer decoder.rotary cannot be part of a CUDA graph" in graphed.refused
    assert (device.launched, device.captured, device.replayed) == (15, 1, 0)


def test_a_number_that_changes_is_captured_again(device):
    bound = bound_plan(device)
    graphed = Graphed(bound)
    for rate, captures in ((0.5, 0), (0.5, 1), (0.5, 1), (0.25, 2), (0.25, 2), (0.5, 3)):
        bound.values[1] = rate
        graphed.run()
        assert device.captured == captures
    assert device.launched == 3 and device.replayed == 5


def test_numbers_that_never_stay_end_the_capturing(device):
    bound = bound_plan(device)
    graphed = Graphed(bound)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for number in range(MOST_CAPTURES + 5):
            bound.values[1] = float(number)
            graphed.run()
    assert device.captured == device.replayed == MOST_CAPTURES
    assert torch.equal(result(bound), torch.cos(torch.tanh(X) * (MOST_CAPTURES + 4)))
    (warning,) = caught
    assert "change too often to be part of a graph" in str(warning.message)
    assert graphed.refused and graphed.graph is None


def takes(device: Device, bound: BoundPlan, number: int, size: int) -> None:
    call, args, kwargs = bound.calls[number]

    def run(*args: Any, **kwargs: Any) -> None:
        device.take(size)
        call(*args, **kwargs)

    bound.calls[number] = (run, args, kwargs)


def test_memory_that_a_kernel_takes_beside_the_plan_is_noticed(device):
    bound = bound_plan(device)
    takes(device, bound, 0, SLACK // 2)  # the allocator rounds up: not worth a word
    takes(device, bound, 2, 5 << 20)
    graphed = Graphed(bound)
    graphed.run()
    assert graphed.bound.allocated.unplanned == {"step.cos": 5 << 20}
    assert graphed.bound.allocated.bytes == 5 << 20


def test_memory_that_the_plan_knows_of_is_not(device):
    bound = bound_plan(device)
    takes(device, bound, 2, 5 << 20)
    bound.plan.launches[2].makes = 5 << 20
    graphed = Graphed(bound)
    graphed.run()
    assert graphed.bound.allocated.unplanned == {} and graphed.bound.allocated.bytes == 5 << 20


def test_a_step_reports_what_its_kernels_took(device):
    model = fresh(Perceptron)
    step = ws.compile(model, squares, adamw(model), (data(6, 4),))
    step(data(6, 4))
    static = step._compiled.static
    assert static is not None and static.bound is not None
    at = next(i for i, (launch, _) in enumerate(static.bound.sites) if launch.name == "step.tanh")
    takes(device, static.bound, at, 7 << 20)
    static.graph = Graphed(static.bound)
    step(data(6, 4))
    found = step.report().execution
    assert found["unplanned"] == {"step.tanh": 7 << 20} and found["taken"] == 7 << 20
    assert found["by"] == "from the plan, as one CUDA graph from the second step on"
    assert "more than planned: step.tanh 7.3 MB" in str(step.report())
    fail_in_capture(device, static.bound, at)
    with pytest.warns(UserWarning, match="step.tanh of layer"):
        step(data(6, 4))
    found = step.report().execution
    assert found["by"] == "from the plan, launch by launch" and "step.tanh of layer" in found["why"]
    assert found["why"] in str(step.report())


class Streams:
    """Streams and events of a GPU as a list of what they were told."""

    def __init__(self, monkeypatch) -> None:
        self.told: list[str] = []
        self.current = "main"
        streams, names = self, iter(("started", "over") * 9)

        class Event:
            def __init__(self) -> None:
                self.name = next(names)

            def record(self, stream: Any) -> None:
                streams.told.append(f"{stream.name} records {self.name}")

        class Stream:
            device = torch.device("cuda", 0)

            def __init__(self, device: Any = None, priority: int = 0, name: str = "side") -> None:
                self.name, self.priority = name, priority

            def wait_event(self, event: Event) -> None:
                streams.told.append(f"{self.name} waits for {event.name}")

        @contextlib.contextmanager
        def on(stream: Stream) -> Iterator[None]:
            before, self.current = self.current, stream.name
            yield
            self.current = before

        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "Stream", Stream)
        monkeypatch.setattr(torch.cuda, "stream", on)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream(name=streams.current))

    def call(self, *args: Any) -> None:
        self.told.append(f"{self.current} runs {args[0]}")


def test_a_launch_beside_the_kernels_is_a_branch_that_its_wait_joins(monkeypatch):
    streams = Streams(monkeypatch)
    update = Beside([(streams.call, ("one",), {}), (streams.call, ("two",), {})], torch.cuda.Stream())
    update()
    streams.call("product")
    update.wait()
    assert streams.told == [
        "main records started",
        "side waits for started",
        "side runs one",
        "side runs two",
        "side records over",
        "main runs product",
        "main waits for over",
    ]


def side_plan() -> tuple[Planned, list[torch.Tensor]]:
    """Two parameters with their gradients: updates on a stream of their own, both waited for at the end.

    Larger values before them make room for gradients that wait.
    """
    function = add_function(module(), "f", [TensorType((8,), F32)] * 2 + [TensorType((64, 8), F32)])
    first, second, many = function.regions[0].block.arguments
    b = StepBuilder(function.regions[0].block, phase="forward")
    x = b.sum(b.cos(b.tanh(many)), dims=(0,))
    b.phase = "backward"
    gradients = [b.tanh(x), b.cos(b.mul(x, x))]
    b.phase = "update"
    new = [b.sub(w, g) for w, g in zip((first, second), gradients, strict=True)]
    finish_function(function, new)
    function.attributes["res_attrs"] = [{"step.donates": 0}, {"step.donates": 1}]
    function.attributes[MARK] = True
    return planned_function(function, CPU, whole_updates=False), [torch.ones(8), torch.ones(8), data(64, 8)]


def test_updates_beside_run_in_order_where_there_are_no_streams(device):
    planned, arguments = side_plan()
    assert [x.stream for x in planned.plan.launches if x.phase == "update" and x.provider == "aten"] == [SIDE, SIDE]
    graphed = Graphed(BoundPlan(planned, CPU, arguments))
    assert not graphed.bound.beside
    graphed.run()
    first, second, many = arguments
    x = many.tanh().cos().sum(0)
    assert torch.equal(first, 1 - x.tanh()) and torch.equal(second, 1 - torch.cos(x * x))
    graphed.run()
    assert device.captured == 1 and device.captured_on is None


def test_kernels_of_a_graph_go_before_its_branches(device, monkeypatch):
    """Where a plan has launches beside, the rest is captured on a stream of high priority; one wait joins them all."""
    streams = Streams(monkeypatch)
    planned, arguments = side_plan()
    bound = BoundPlan(planned, CPU, arguments)
    bound.device, bound.calls, bound.origin, bound.sites = torch.device("cuda", 0), [], [], []
    for position, launch in enumerate(planned.plan.launches):  # as on a GPU
        bound.bind(position, launch)
    waits = [p for p, x in enumerate(planned.plan.launches) if x.provider == "wait"]
    assert len(bound.beside) >= 2 and len(waits) == len(bound.beside)
    graphed = Graphed(bound)
    graphed.warm = True
    graphed.run()
    assert device.captured_on.priority == -1
    assert streams.told.count("main waits for over") == 1 and streams.told[-1] == "main waits for over"
    assert streams.told.count("side waits for started") == len(waits)


def test_numbers_that_agree_are_looked_at_once(device):
    """A graph captured while two numbers differed does not stand for a step in which they are one."""
    bound = bound_plan(device)
    bound.taken, bound.numbers.stands_for = {1, 2}, {2: 1}
    graphed = Graphed(bound)
    for other in (0.5, 0.25):
        bound.values[1], bound.values[2] = 0.5, other
        graphed.capture()
        assert graphed.replay()
        assert graphed.replay(alike=True) == (other == 0.5)
    bound.values[1] = bound.values[2] = 0.25
    assert not graphed.replay() and not graphed.replay(alike=True)
