"""A step that is done again by one call of C++: it does what the long way does, and leaves to it what it cannot tell.

The CUDA driver is a stand-in: copies copy memory of the host, and launching the graph runs the launches of the plan.
"""

from __future__ import annotations

import ctypes
import itertools
import math
import os
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import wholestep as ws
from tests.runtime.runs import data, fresh
from wholestep.backends.host import HOST, _divide
from wholestep.errors import InputError
from wholestep.plan.launches import _Flattener
from wholestep.runtime import counters, record, replay_source, train_step
from wholestep.runtime.cells import Cells
from wholestep.runtime.cuda_graph import Graphed
from wholestep.runtime.graph_nodes import DriverError
from wholestep.runtime.replay import Arguments, Operation, Replay, functions_of_python, native_replay
from wholestep.runtime.train_step import TrainStep
from wholestep.torch_private import functions_of_torch, thread_functions

P, N = ctypes.c_void_p, ctypes.c_size_t


class Graph:
    """The launches of a plan, as a graph that was captured."""

    def __init__(self, replay: Callable[[], None]) -> None:
        self.replay = replay

    def raw_cuda_graph_exec(self) -> int:
        return id(self)


class Driver:
    """The calls of the CUDA driver that a step makes, on memory of the host; what was called, and what is to fail."""

    context = 99

    def __init__(self, device: torch.device) -> None:
        self.called: list[str] = []
        self.fails: dict[str, int] = {}
        self.current_stream, self.waited = 7, 0
        kinds: list[tuple[Any, Any]] = [
            (ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int32, P), self.stream),
            (ctypes.CFUNCTYPE(ctypes.c_int, P), self.current),
            (ctypes.CFUNCTYPE(ctypes.c_int, P, P, N, P), partial(self.copy, "numbers")),
            (ctypes.CFUNCTYPE(ctypes.c_int, P, P, N, P), partial(self.copy, "copy")),
            (ctypes.CFUNCTYPE(ctypes.c_int, P, ctypes.c_uint32, N, P), self.fill),
            (ctypes.CFUNCTYPE(ctypes.c_int, P, P), self.launch),
            (ctypes.CFUNCTYPE(ctypes.c_int, P), self.query),
            (ctypes.CFUNCTYPE(ctypes.c_int, P, P), self.record),
        ]
        self.held = [kind(function) for kind, function in kinds]
        self.functions = [record.address_of(function) for function in self.held]

    def answer(self, name: str) -> int:
        self.called.append(name)
        return self.fails.get(name, 0)

    def stream(self, device: int, into: int) -> int:
        P.from_address(into).value = self.current_stream
        return 0

    def current(self, into: int) -> int:
        P.from_address(into).value = self.context
        return 0

    def copy(self, name: str, to: int, source: int, size: int, stream: int) -> int:
        assert stream == self.current_stream
        ctypes.memmove(to, source, size)
        return self.answer(name)

    def fill(self, to: int, bits: int, count: int, stream: int) -> int:
        (ctypes.c_uint32 * count).from_address(to)[:] = [bits] * count
        return self.answer("fill")

    def launch(self, graph: int, stream: int) -> int:
        if not self.fails.get("launch"):
            ctypes.cast(graph, ctypes.py_object).value.replay()
        return self.answer("launch")

    def query(self, event: int) -> int:
        return 0 if self.waited else self.fails.get("query", 0)

    def record(self, event: int, stream: int) -> int:
        self.waited = 0
        return self.answer(f"record {event}")

    def handles(self) -> list[int]:
        return [1, 2]

    def pinned(self, size: int) -> torch.Tensor:
        return torch.zeros(size, dtype=torch.uint8)

    def wait(self, half: int) -> None:
        self.called.append(f"wait {half}")
        self.waited = 1

    def meet_stream(self, ring: torch.Tensor, there: torch.Tensor) -> int:
        self.called.append("meet")
        return self.current_stream


class Network(nn.Module):
    """With dropout, so that a wrong seed shows, and BatchNorm, so that there are buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(nn.functional.dropout(torch.tanh(self.norm(self.first(x))), 0.4, self.training))


def loss_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    out = model(x)
    return (out - y).pow(2).mean(), out


class Run:
    """A compiled step that runs as a graph on the stand-in from its second step on, by one call or the long way."""

    def __init__(
        self, again: bool = True, optimizer: Any = torch.optim.AdamW, named: bool = False, **options: Any
    ) -> None:
        self.drivers: list[Driver] = []
        self.model = fresh(Network)
        self.optimizer = optimizer(self.model.parameters(), lr=0.01)
        torch.manual_seed(3)
        batch: Any = {"x": data(8, 4), "y": data(8, 2)} if named else (data(8, 4), data(8, 2))
        self.step = ws.compile(self.model, loss_of, self.optimizer, batch, providers=["aten"], level=1, **options)
        self.step._repeatable = self.repeatable if again else lambda compiled, static: None
        self.number, self.named = 0, named
        self.results: list[torch.Tensor] = []

    def repeatable(self, compiled: Any, static: Any) -> Replay | None:
        return TrainStep._repeatable(self.step, compiled, static)

    def __call__(self, times: int = 1, strided: bool = False) -> None:
        for _ in range(times):
            self.number += 1
            x, y = data(8, 4, seed=self.number), data(8, 2, seed=100 + self.number)
            x = x.t().contiguous().t() if strided else x
            self.results += self.step(**{"x": x, "y": y}) if self.named else self.step(x, y)
            self.capture()

    def capture(self) -> None:
        """What has run is a graph from now on."""
        for static in [program.static for program in self.step._compiled.programs()]:
            if static is not None and static.bound is not None and static.graph is None:
                static.graph = Graphed(static.bound)
                static.graph.graph, static.graph.kept, static.graph.kept_once = Graph(static.bound.run), (), ()
                assert not static.bound.taken

    @property
    def driver(self) -> Driver:
        return self.step._compiled.again._cuda

    def state(self) -> list[torch.Tensor]:
        held = [t for state in self.optimizer.state.values() for t in state.values()]
        return [*self.results, *self.model.state_dict().values(), *held]


@pytest.fixture(params=["device"], autouse=True)
def like_a_gpu(request, monkeypatch):
    """Numbers of the host lie in memory, and counters are packed, as on a GPU: those of the host or of the device."""
    if isinstance(why := record.native(), str):
        pytest.skip(why)
    monkeypatch.setattr(_Flattener, "is_number", lambda self, op, value: False)
    monkeypatch.setattr(train_step, "Replay", partial(Replay, cuda=Driver))
    make, pack, cells = counters.Counters.__init__, counters.Vector.__init__, Cells.__init__
    rooms: list[torch.Tensor] = []

    def cells_with_room(self: Cells, *args: Any) -> None:
        cells(self, *args)
        rooms.append(self.room)

    def vector(self: counters.Vector, *args: Any) -> None:
        pack(self, *args)
        if request.param == "device":
            self.array = None

    monkeypatch.setattr(Cells, "__init__", cells_with_room)
    monkeypatch.setattr(counters.Counters, "__init__", lambda self, *args: make(self, *args[:-1], rooms[-1]))
    monkeypatch.setattr(counters.Vector, "__init__", vector)
    return request.param


def same(one: Run, other: Run) -> bool:
    """Whether two runs have come to the same, to the last bit."""
    assert one.step._own.counter == other.step._own.counter and one.number == other.number
    return all(torch.equal(a, b) for a, b in zip(one.state(), other.state(), strict=True))


@pytest.mark.parametrize("like_a_gpu", ["host", "device"], indirect=True)
def test_results_and_state_are_those_of_the_long_way():
    again, long = Run(), Run(again=False)
    for run in (again, long):
        scheduler = torch.optim.lr_scheduler.StepLR(run.optimizer, 1, 0.7)
        run(5)
        scheduler.step()
        run(3, strided=True)
        run.optimizer.param_groups[0]["lr"] = 0.02
        run(12)
    assert again.driver.called.count("launch") == 18  # the first is launched, the second shows that there is a graph
    assert same(again, long) and len(set(map(float, again.results[::2]))) == again.step._own.counter == 20
    assert [float(s["step"]) for s in again.optimizer.state.values()] == [20] * 6
    assert "fill" not in again.driver.called  # counters on the device arrive with the numbers


@pytest.mark.parametrize("like_a_gpu", ["host", "device"], indirect=True)
def test_updates_that_wait_for_the_next_forward_go_the_long_way():
    """Three graphs take turns on the same memory and the same counters, and come to what one graph comes to."""
    late, long = Run(clip_norm=0.1, updates="in_next_forward"), Run(again=False, clip_norm=0.1)
    for run in (late, long):
        scheduler = torch.optim.lr_scheduler.StepLR(run.optimizer, 1, 0.7)
        for times in (4, 1, 3, 5):
            run(times)
            scheduler.step()
            run.step.flush()
            run.capture()
        run.optimizer.param_groups[0]["lr"] = 0.02
        run(2)
        run.step.flush()
    assert same(late, long) and late.step._again is None
    both, first, update = list(late.step._compiled.programs())[:3]
    assert all(p.static.replayed for p in (both, first, update))
    assert [p.static.bindings for p in (both, first, update)] == [1, 2, 1]  # once more when there is optimizer state
    assert [float(s["step"]) for s in late.optimizer.state.values()] == [15] * 6


CHANGES: dict[str, Callable[[Run], Any]] = {
    "parameter moved": lambda run: setattr(run.model.first.weight, "data", torch.ones(6, 4)),
    "one counter": lambda run: run.optimizer.state[run.model.first.weight]["step"].add_(1),
    "all counters": lambda run: [state["step"].fill_(3) for state in run.optimizer.state.values()],
    "betas": lambda run: run.optimizer.param_groups[0].__setitem__("betas", (0.8, 0.99)),
    "new attribute": lambda run: setattr(run.model.first, "note", "a user's own"),
    "optimizer loaded": lambda run: run.optimizer.load_state_dict(run.optimizer.state_dict()),
    "step loaded": lambda run: run.step.load_state_dict({**run.step.state_dict(), "random": {"seed": 5, "counter": 0}}),
    "profiled": lambda run: run.step.annotated(data(8, 4), data(8, 2)),
}


def test_what_changes_between_steps_is_noticed():
    again, long = Run(), Run(again=False)
    for run in (again, long):
        run(4)
    for what, change in CHANGES.items():
        for run in (again, long):
            change(run)
            run(4)
        assert same(again, long), what
        assert (again.step._again is None) == (what == "one counter"), what
        assert "fill" in again.driver.called, what  # counters that a former binding has packed lie elsewhere


def calls_of_python(run: Run) -> int:
    """How many functions of these two modules a step calls."""
    files: list[str] = []
    sys.setprofile(lambda frame, event, _: files.append(frame.f_code.co_filename) if event == "call" else None)
    try:
        run(1)
    finally:
        sys.setprofile(None)
    return sum(file.endswith(("/replay.py", "/train_step.py")) for file in files)


def test_what_the_driver_and_the_memory_ask_for():
    run, long = (Run(again, partial(torch.optim.SGD, momentum=0.9), clip_norm=0.1) for again in (True, False))
    long(40)
    run(3)
    driver = run.driver
    driver.fails["query"] = 600
    run(35)
    waits = [c for c in driver.called if c.startswith(("wait", "record"))]
    assert waits == ["record 1", "record 2", "wait 0", "record 1", "wait 1", "record 2", "wait 0"]
    driver.current_stream = 8
    run(1)
    assert driver.called.count("meet") == 2  # torch is told that another stream reads the pinned memory
    driver.context = 1
    run(1)
    assert driver.called.count("launch") == 37 and same(run, long)  # another context: the long way
    assert torch.equal(run.step.last.grad_norm, long.step.last.grad_norm)
    driver.context = 99
    with pytest.raises(InputError, match="dimension 0 is 7"):
        run.step(data(7, 4), data(7, 2))
    with pytest.raises(InputError, match=r"batch.* is torch\.float64"):
        run.step(data(8, 4).double(), data(8, 2))
    run(2)
    assert 1 < calls_of_python(run) < 6
    driver.fails["launch"] = 719
    with pytest.raises(DriverError, match="the graph of the step: cuGraphLaunch failed with CUDA error 719"):
        run(1)


def test_other_learning_rates_are_taken_over_by_one_call():
    again, long = Run(), Run(again=False)
    for run in (again, long):
        run(4)
    settings = [{"lr": 0.02}, {"lr": 0.05}, {"lr": 1}, {"lr": 0.05}, {"lr": 0.02, "eps": 1e-6}, {"lr": 0.02}]
    for number, setting in enumerate(settings):
        for run in (again, long):
            run.optimizer.param_groups[0].update(setting)
        # what is no float, or not the learning rate alone, is read by Python
        assert (calls_of_python(again) < 6) == (number in (0, 1, 3, 5)), setting
        long(1)
        assert same(again, long), setting
        assert again.step._again is not None


def test_what_torch_is_asked_before_a_step_goes_by_one_call():
    again, long = Run(), Run(again=False)
    for run in (again, long):
        run(4)
        with torch.inference_mode():
            run(20)  # more than results are made ahead for
        assert not any(t.is_inference() for t in run.results)
        with torch.autocast("cpu"), pytest.raises(InputError, match="autocast"):
            run(1)
        with torch.profiler.profile() as profile:
            run(1)
        assert "wholestep.step" in [event.name for event in profile.events()]
        assert run.step.last.outputs[1] is run.results[-1] and run.step.last is run.step.last
        run.number -= 1  # the step that was refused
    assert again.driver.called.count("launch") == 23
    assert same(again, long) and len({t.data_ptr() for t in again.results}) == len(again.results)


def test_one_call_leaves_a_step_to_who_has_its_lock_and_to_its_own_process():
    run = Run()
    run(4)
    again, batch = run.step._again, (data(8, 4), data(8, 2))
    with run.step._lock, run.step._lock:
        assert again.once(batch, {}, again.new_results()) == replay_source.IN_TURN
    again._arguments.owner += 1
    assert again.once(batch, {}, again.new_results()) == replay_source.CHANGED
    again._arguments.owner -= 1
    assert again.once(batch, {}, again.new_results()) == replay_source.DONE


def test_a_batch_of_names_goes_by_one_call():
    run, plain = Run(named=True), Run()
    run(4)
    plain(6)
    x, y = data(8, 4, seed=5), data(8, 2, seed=105)
    run.results += run.step(y=y, x=x)
    batch = {"y": data(8, 2, seed=106), "x": data(8, 4, seed=6)}
    run.results += run.step(batch)
    run.number = plain.number
    assert run.driver.called.count("launch") == 4 and same(run, plain)
    for wrong in ({"x": x}, {"x": x, "y": y, "z": x}, {"x": x, "z": y}):
        with pytest.raises(InputError):
            run.step(**wrong)


def test_launches_that_are_looked_at_run_one_by_one():
    run, seen = Run(), list[str]()
    run(4)
    static, launched = run.step._compiled.static, run.driver.called.count("launch")
    static.ranges = (seen.append, lambda: None)
    run(1)
    assert len(seen) >= len(static.plan.launches) // 2 and run.driver.called.count("launch") == launched
    static.ranges = None
    run(3)
    assert run.driver.called.count("launch") > launched


def test_what_goes_the_long_way_is_said():
    run = Run(ema=0.9)
    run(3)
    assert run.step._again is None
    assert "no step is done again by one call, which costs host time: parameters are averaged" in str(run.step.report())


ONE_OPERAND = ("neg", "abs", "sqrt", "exp", "log", "reciprocal", "cast")
NUMBERS = (-math.inf, -1e200, -2.5, -1.0, -0.0, 0.0, 0.3, 1.0, 3.0, 1e200, math.inf, math.nan)


def test_numbers_are_those_of_python():
    """Every operation on special numbers, to the last bit."""
    functions = HOST | {"step.div": _divide, "step.cast": float}
    names = [f"step.{name}" for name in replay_source.OPERATIONS]
    assert set(names) == set(functions)
    cases, wanted = [], []
    for kind, name in enumerate(names):
        operands = {"select": 3}.get(name[5:], 1 if name[5:] in ONE_OPERAND else 2)
        for places in itertools.product(range(len(NUMBERS)), repeat=min(operands, 2)):
            x, y = places[0], places[-1]
            given = [NUMBERS[i] for i in (x, y, 2)][:operands]
            if name == "step.select":
                given[0] = bool(given[0])  # a comparison gives it
            cases.append(Operation(kind, len(NUMBERS) + len(cases), x, y, 2))
            wanted.append(float(functions[name](*given)))
    assert computed(cases)[len(NUMBERS) :] == [pytest.approx(w, rel=0, abs=0, nan_ok=True) for w in wanted]
    assert [math.copysign(1, c) for c, w in zip(computed(cases)[len(NUMBERS) :], wanted, strict=True) if w == w] == [
        math.copysign(1, w) for w in wanted if w == w
    ]


def computed(operations: list[Operation]) -> list[float]:
    """The registers after a step that only computes."""
    driver, native, graph = Driver(torch.device("cpu")), record.native(), Graph(lambda: None)
    assert not isinstance(native, str)
    functions = [*functions_of_python(), *functions_of_torch(), *thread_functions()]
    arguments = Arguments(*functions, record.address_of(ctypes.pythonapi["getpid"]), *driver.functions)
    groups, step, ring = record.record(record.Subjects()), ctypes.c_int64(), driver.pinned(2048)
    registers = (ctypes.c_double * (len(NUMBERS) + len(operations)))(*NUMBERS)
    array = (Operation * len(operations))(*operations)
    arguments.owner, arguments.known_stream, arguments.known_context = os.getpid(), 7, 99
    arguments.graph, arguments.groups, arguments.step = id(graph), groups.at, ctypes.addressof(step)
    arguments.ring = arguments.there = ring.data_ptr()
    arguments.operations, arguments.operation = len(operations), ctypes.addressof(array)
    arguments.registers = ctypes.addressof(registers)
    assert native_replay(arguments)((), {}, [], False) == replay_source.DONE and step.value == 1
    return list(registers)
