"""A step that is done again: where nothing has changed and it runs as one CUDA graph, a single call of C++ does it all.

The call looks at everything first (`record.py`), then computes the numbers of the host, copies them and the batch,
launches the graph and copies the results out. What it cannot tell goes the long way, in Python: the same step, at more
host time.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from ..backends.cpp.compiler import Compiler, build_all, digest, working_compiler
from ..capture.structure import Leaf
from ..errors import InputError
from ..torch_private import foreach_copy, functions_of_torch, thread_functions, torch_library
from ..training.optimizer_plan import OptimizerPlan
from .cells import Cells
from .counters import Vector
from .graph_nodes import DriverError
from .host_numbers import HostCall
from .own_state import OwnState
from .places import place_of_holders
from .record import NativeRecord, Record, Subjects, Walker, address_of, longs, native, pointers, record
from .replay_source import FAILED, GROUPS, HALF, KINDS, LAID, MOST_PARTS, OPERATIONS, SOURCE, STREAM, WAIT

if TYPE_CHECKING:
    from .compiled import Compiled

#: what C++ asks of the driver, and what it is about where that fails: by the number it gives then
ASKED = (
    ("cuMemcpyHtoDAsync", "the numbers of the step"),
    ("cuMemcpyDtoDAsync", "the batch"),
    ("cuGraphLaunch", "the graph of the step"),
    ("cuMemsetD32Async", "the optimizer's counters"),
    ("cuMemcpyDtoDAsync", "the results of the step"),
    ("cuEventRecord", "an event"),
)
DRIVER = (
    *("cuCtxGetCurrent", "cuMemcpyHtoDAsync_v2", "cuMemcpyDtoDAsync_v2", "cuMemsetD32Async"),
    *("cuGraphLaunch", "cuEventQuery", "cuEventRecord"),
)
#: of Python's stable interface
PYTHON = (
    *("PyList_GetItem", "PyTuple_Size", "PyTuple_GetItem", "PyDict_Size", "PyDict_GetItem", "PyDict_SetItem"),
    *("PyList_Append", "PyFloat_FromDouble", "PyLong_FromLong", "Py_DecRef"),
)
POINTER, METH_FASTCALL = ctypes.c_void_p, 0x80
#: results are made ahead for this many steps, where those of one are no more bytes than that
READY, SMALL = 16, 1 << 12


class LongWay(Exception):
    """Why a step goes through Python every time."""


# ---- records of C++ --------------------------------------------------------------------------------------------------


class Operation(ctypes.Structure):
    """Arithmetic on registers."""

    _fields_ = longs("kind out x y z")


class Cell(ctypes.Structure):
    """Where a number goes in the memory that kernels read."""

    _fields_ = longs("offset kind source")


class Fixed(ctypes.Structure):
    """The tensor that a tensor of the batch is copied to."""

    _fields_ = (*pointers("object memory"), *longs("bytes source"))


class Result(ctypes.Structure):
    """Memory that is copied to a tensor of the user."""

    _fields_ = (*pointers("memory"), *longs("bytes"))


class Neighbours(ctypes.Structure):
    """Counters side by side in memory."""

    _fields_ = (*pointers("memory"), *longs("offset count wide here source"), *pointers("first written"))


class Entry(ctypes.Structure):
    """What a table must have under a key."""

    _fields_ = pointers("table key value")


class Rate(ctypes.Structure):
    """Where a learning rate is, and the register that it goes to, or -1."""

    _fields_ = (*pointers("table key"), *longs("place"))


class Method(ctypes.Structure):
    """`PyMethodDef`: a function of C++ that Python calls."""

    _fields_ = (("name", ctypes.c_char_p), ("function", POINTER), ("flags", ctypes.c_int), ("doc", ctypes.c_char_p))


class Arguments(ctypes.Structure):
    """The argument of the call: `struct Replay` of `replay_source.py`."""

    _fields_ = (
        *pointers("item parts_of part members get set append number_of answer_of drop"),
        *pointers("address dimensions sizes strides type device index bump observed autocast inference process"),
        *pointers("stream context to_device on_device fill launch query record"),
        *longs("owner number"),
        *pointers("known_stream known_context graph event0 event1"),
        *longs("walks quiet entries"),
        *pointers("groups walk news entry holders durations optimizer called yes"),
        *longs("parts fixed results inside"),
        *pointers("tensor_type dict_type key batch result"),
        *longs("operations cells vectors counter"),
        *pointers("registers operation cell vector"),
        *longs("rates settled"),
        *pointers("rate settle kept_groups float_type double_of"),
        *longs("seed"),
        *pointers("step ring there"),
        *longs("size apart turn failed error"),
    )


# ---- functions -------------------------------------------------------------------------------------------------------


class Cuda:
    """What a step needs of the CUDA driver, and of torch's streams, events and pinned memory."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        try:
            driver, streams = ctypes.CDLL("libcuda.so.1"), torch_library("libtorch_cuda.so")
            calls = [streams["aoti_torch_get_current_cuda_stream"], *(driver[name] for name in DRIVER)]
        except (OSError, AttributeError) as error:
            raise LongWay(f"a function of CUDA is missing: {error}") from None
        #: of the current stream, the current context, copies to and on the device, fills, launches, events
        self.functions = list(map(address_of, calls))
        context = POINTER()
        if driver["cuCtxGetCurrent"](ctypes.byref(context)) or not context.value:
            raise LongWay("this thread has no CUDA context")
        self.context = context.value
        self.events = [torch.cuda.Event() for _ in range(2)]
        for event in self.events:
            event.record(torch.cuda.current_stream(device))

    def handles(self) -> list[int]:
        """The events as the driver knows them."""
        return [event.cuda_event for event in self.events]

    def pinned(self, size: int) -> torch.Tensor:
        return torch.zeros(size, dtype=torch.uint8, pin_memory=True)

    def wait(self, half: int) -> None:
        """Until every copy from a half of the pinned memory has left."""
        self.events[half].synchronize()

    def meet_stream(self, ring: torch.Tensor, there: torch.Tensor) -> int:
        """The current stream. A copy by torch tells its allocator that this stream reads the pinned memory."""
        there.copy_(ring[: there.numel()], non_blocking=True)
        return torch.cuda.current_stream(self.device).cuda_stream


#: takes a batch (a tuple, and what has names), a list of results and, from who has the lock, whether it was copied
Once = Callable[..., int]


def native_replay(arguments: Arguments) -> Once:
    """The compiled call, for these arguments; raises `LongWay` where there is none."""
    try:
        compiler = working_compiler()
    except InputError as error:  # there is no folder to keep anything in
        raise LongWay(str(error)) from None
    found = compiler if isinstance(compiler, str) else _native_replay(compiler)
    if isinstance(found, str):
        raise LongWay(found)
    # Python's lock is kept: nobody changes what is looked at, and no signal comes in between
    make = ctypes.pythonapi["PyCFunction_NewEx"]
    make.argtypes, make.restype = (POINTER, ctypes.py_object, POINTER), ctypes.py_object
    once: Once = make(ctypes.addressof(found), ctypes.addressof(arguments).to_bytes(8, sys.byteorder), None)
    return once


def build_ahead() -> None:
    """Calls the C++ compiler in a thread, so that the first step need not wait for it. What fails is said there."""

    def build() -> None:
        native()
        with suppress(LongWay):
            native_replay(Arguments())

    threading.Thread(target=build, name="wholestep-build", daemon=True).start()


@cache
def _native_replay(compiler: Compiler) -> Method | str:
    name = f"wholestep_replay_{digest(SOURCE)[:16]}"
    built = build_all([(name, SOURCE.replace("NAME", name))], compiler)[name]
    if isinstance(built, Exception):
        return str(built)
    return Method(b"once", address_of(built), METH_FASTCALL, None)


def functions_of_python() -> list[int]:
    return [address_of(ctypes.pythonapi[name]) for name in PYTHON]


def address_of_record(of: Record) -> int:
    """Where C++ finds what was written down."""
    if not isinstance(of, NativeRecord) or not of.readable:
        raise LongWay("C++ cannot read all that must stay as it is")
    return of.at


def operation_of(call: HostCall) -> int:
    name = call.name.removeprefix("step.")
    if name not in OPERATIONS:
        raise LongWay(f"{call.name} on numbers of the host is not known to C++")
    return OPERATIONS.index(name)


# ---- a step ----------------------------------------------------------------------------------------------------------


class Replay:
    """One compiled program, bound and captured, as it is done again. Raises `LongWay` where that cannot be."""

    def __init__(
        self,
        compiled: Compiled,
        own: OwnState,
        optimizer: torch.optim.Optimizer,
        example: Any,
        cuda: Callable[[torch.device], Cuda] = Cuda,
    ):
        static, snapshot, counters = compiled.static, compiled.snapshot, compiled.counters
        assert static is not None and static.bound is not None and static.graph is not None
        assert snapshot is not None and counters is not None and static.graph.graph is not None
        self.compiled, self.own, self.optimizer = compiled, own, optimizer
        self.static, self.bound, self.graphed, self.graph = static, static.bound, static.graph, static.graph.graph
        self.snapshot, self.counters, self.counted = snapshot, counters, own.counted
        self.refuse(example)
        #: names of the tensors of a batch; None where they have none
        self.keys = list(example) if type(example) is dict else None
        self.parts = len(static.fixed)
        walker = native()
        if isinstance(walker, str):
            raise LongWay(walker)
        self._arguments = Arguments()
        #: does a step and answers 0, or says why not
        self.once = native_replay(self._arguments)
        self._cuda = cuda(static.bound.arena.device)
        self._held: list[Any] = []  # what C++ has the addresses of
        #: results of steps to come
        self.ready: list[list[torch.Tensor]] = []
        #: which of them is what a step returns, where that is one tensor and nothing else is to be done; else -1
        output = compiled.program.captured.exported.output_structure
        self.only = compiled.users[output.index] if isinstance(output, Leaf) and not compiled.skips else -1
        self._place(walker)
        self._records()
        self._tensors()
        self._numbers()
        self.load()

    def refuse(self, example: Any) -> None:
        """Raises where a step does more than C++ knows of."""
        graphed, numbers, counters = self.graphed, self.bound.numbers, self.counters
        moving = {*numbers.counters, *(call.write for call in numbers.moving)}
        reasons = {
            "the batch is a nesting, or more than tensors": self.compiled.flat_batch is None,
            "the batch is neither a tuple nor a dict": type(example) not in (tuple, dict),
            f"the batch has more than {MOST_PARTS} tensors": len(self.static.fixed) > MOST_PARTS,
            "parameters are averaged": self.own.options.ema is not None,
            "the optimizer keeps Python numbers": type(self.compiled.plan).finish is not OptimizerPlan.finish,
            "some counters of the optimizer stand alone": bool(counters.tensors or counters.plain),
            "hyper-parameters are tensors or lists": not self.snapshot.fixed or self.snapshot.settings is None,
            "the graph draws from torch's generator": graphed.draws,
            "the graph holds a number that every step changes": not moving.isdisjoint(graphed.held_once),
            "a batch of one number may be seen through a sign": any(
                t.numel() == 1 and (t.is_floating_point() or t.is_complex()) for t in self.static.fixed
            ),
            "the host watches low-precision copies": bool(self.own.copied_parameters) and self.own.watched is None,
        }
        for reason, holds in reasons.items():
            if holds:
                raise LongWay(reason)

    # ---- what C++ is told --------------------------------------------------------------------------------------------

    def _array(self, kind: Any, members: Sequence[Any]) -> int:
        """The address of an array, which is held."""
        array = (kind * len(members))(*members)
        self._held.append(array)
        return ctypes.addressof(array)

    def _place(self, walker: Walker) -> None:
        """Functions, and where the step runs."""
        arguments, cuda = self._arguments, self._cuda
        if not hasattr(self.graph, "raw_cuda_graph_exec"):
            raise LongWay("this torch does not show what it launches")
        try:
            own = [*functions_of_torch(), *thread_functions(), address_of(ctypes.pythonapi["getpid"])]
        except (OSError, AttributeError) as error:
            raise LongWay(f"this torch does not say how its tensors are read: {error}") from None
        functions = [*functions_of_python(), *own, *cuda.functions]
        for name, address in zip(Arguments._fields_[: len(functions)], functions, strict=True):
            setattr(arguments, name[0], address)
        arguments.owner, arguments.number = os.getpid(), self.bound.arena.device.index or 0
        arguments.known_stream = 2**64 - 1  # none yet: torch is told of each
        arguments.known_context, arguments.graph = cuda.context, self.graph.raw_cuda_graph_exec()
        arguments.event0, arguments.event1 = cuda.handles()
        arguments.inside, arguments.tensor_type, arguments.dict_type = walker.inside, id(torch.Tensor), id(dict)
        own_state, called, holders = self.own, sys.intern("_opt_called"), place_of_holders()
        if holders is None:
            raise LongWay("this Python does not show how often a lock is held")
        arguments.step, arguments.holders = ctypes.addressof(own_state.steps), id(own_state.lock) + holders
        arguments.durations, arguments.optimizer = id(own_state.durations), id(vars(self.optimizer))
        arguments.called, arguments.yes = id(called), id(True)
        self._held += [cuda, own_state.steps, own_state.lock, own_state.durations, vars(self.optimizer), called]

    def _records(self) -> None:
        """What must be as it was, and what must be zero."""
        arguments, snapshot = self._arguments, self.snapshot
        found = [snapshot.tensors, snapshot.untouched, *([self.counted] if self.counted is not None else [])]
        #: the optimizer's groups, whose learning rates may change from step to step
        self.groups = record(Subjects(tagged=snapshot.param_groups))
        self.members = record(Subjects(tables=snapshot.param_groups))
        arguments.kept_groups = address_of_record(self.members)
        arguments.walks, arguments.walk = len(found), self._array(POINTER, list(map(address_of_record, found)))
        entries = [
            (vars(self.compiled), "snapshot", snapshot),
            (vars(self.static), "ranges", None),  # else somebody looks at its launches one by one
            (vars(self.own), "counted", self.counted),
            (vars(self.optimizer), "state", snapshot.state),
            (vars(self.optimizer), "param_groups", snapshot.param_groups),
        ]
        if any(table.get(key) is not value for table, key, value in entries):
            raise LongWay("the optimizer keeps its state or its groups elsewhere")
        arguments.entries = len(entries)
        arguments.entry = self._array(Entry, [Entry(*map(id, entry)) for entry in entries])
        self._held.append(entries)
        if self.own.watched is not None:
            arrived = self.own.watched.arrived
            arguments.quiet, arguments.news = arrived.numel(), arrived.data_ptr()
            self._held.append(arrived)

    def _tensors(self) -> None:
        """The batch and the results."""
        arguments, plan = self._arguments, self.bound.plan
        places = [
            Fixed(id(t), t.data_ptr(), t.numel() * t.element_size(), source)
            for t, (_, source) in zip(self.static.fixed, self.static.batch, strict=True)
        ]
        arguments.parts, arguments.fixed, arguments.batch = self.parts, len(places), self._array(Fixed, places)
        if self.keys is not None:
            arguments.key = self._array(POINTER, list(map(id, self.keys)))
        returned = [plan.results[i] for i in self.compiled.returned]
        if any(r.way == "host" for r in returned):
            raise LongWay("a result is a number of the host")
        self.results = [self.bound.memory.tensor(r.buffer) for r in returned]
        if any(torch.empty_like(t).stride() != t.stride() for t in self.results):
            raise LongWay("a result is scattered in memory")
        taken = [Result(t.data_ptr(), t.numel() * t.element_size()) for t in self.results]
        arguments.results, arguments.result = len(taken), self._array(Result, taken)

    def _numbers(self) -> None:
        """Numbers of the host: registers, what is computed in them, and where they go."""
        arguments, numbers, cells = self._arguments, self.bound.numbers, self.bound.cells
        place: dict[int, int] = {}

        def register(number: int) -> int:
            return place.setdefault(number, len(place))

        placed = [Cell(at, KINDS[kind], register(number)) for at, kind, number in cells.layout()]
        if self.counters.vectors:
            arguments.counter = register(self.counters.first)
        self.written = [record(Subjects(counted=vector.counters)) for vector in self.counters.vectors]
        vectors = [
            neighbours(vector, cells, register(vector.sources[0]), address_of_record(written))
            for vector, written in zip(self.counters.vectors, self.written, strict=True)
        ]
        for call in (*numbers.moving, *numbers.steady):
            for number in (*call.reads, call.write):
                register(number)
        constants: list[float] = []

        def operation(call: HostCall) -> Operation:
            reads, operands = iter(call.reads), []
            for constant in call.constants:
                if constant is None:
                    operands.append(place[next(reads)])
                else:
                    operands.append(len(place) + len(constants))
                    constants.append(float(constant))
            operands += operands[:1] * (3 - len(operands))
            return Operation(operation_of(call), place[call.write], *operands)

        operations = list(map(operation, numbers.moving))
        if rates := self._rates(place):
            settled = list(map(operation, numbers.steady))
            arguments.settled, arguments.settle = len(settled), self._array(Operation, settled)
            arguments.rate, arguments.float_type = self._array(Rate, rates), id(float)
            arguments.double_of = address_of(ctypes.pythonapi["PyFloat_AsDouble"])
        self.rates = len(rates)
        #: the buffers whose numbers are in the first registers; constants come after them
        self.order = list(place)
        moving = {*numbers.counters, *(call.write for call in numbers.moving)}
        self.steady = [(at, number) for number, at in place.items() if number not in moving]
        self.registers = (ctypes.c_double * (len(place) + len(constants)))(*[0.0] * len(place), *constants)
        arguments.operations, arguments.operation = len(operations), self._array(Operation, operations)
        arguments.cells, arguments.cell = len(placed), self._array(Cell, placed)
        arguments.vectors, arguments.vector = len(vectors), self._array(Neighbours, vectors)
        arguments.registers = ctypes.addressof(self.registers)
        size = max([cells.there.numel(), *(v.offset + v.count * 4 for v in vectors)])
        arguments.size, arguments.apart = size, -(-size // 64) * 64
        self.ring = self._cuda.pinned(2 * HALF * arguments.apart)
        arguments.ring, arguments.there = self.ring.data_ptr(), cells.memory.data_ptr()

    def _rates(self, place: dict[int, int]) -> list[Rate]:
        """The learning rate of each group; none where C++ must not take over another, since more hangs on it."""
        numbers, groups = self.bound.numbers, self.snapshot.param_groups
        rates = [(index, slot.source[1]) for index, slot in self.counters.hypers if slot.source[::2] == ("group", "lr")]
        found, reached = {group: index for index, group in rates}, {index for index, _ in rates}
        for call in numbers.steady:
            if not reached.isdisjoint(call.reads):
                reached.add(call.write)
        known = all(call.name.removeprefix("step.") in OPERATIONS for call in numbers.steady)
        plain = len(found) == len(rates) and all("lr" in group for group in groups)
        if not known or not plain or not reached.isdisjoint(self.graphed.held_once):
            return []
        keys = [next(key for key in group if key == "lr") for group in groups]
        self._held.append((groups, keys))
        return [
            Rate(id(group), id(key), place.get(found.get(i, -1), -1))
            for i, (group, key) in enumerate(zip(groups, keys, strict=True))
        ]

    # ---- one step ----------------------------------------------------------------------------------------------------

    def stands(self) -> bool:
        """Whether this is still the program as it is bound and captured."""
        static = self.compiled.static
        return (
            static is self.static
            and static.bound is self.bound
            and static.graph is self.graphed
            and self.graphed.graph is self.graph
            and self.compiled.snapshot is self.snapshot
            and self.own.counted is self.counted
        )

    def load(self) -> None:
        """Takes over from a step that went the long way: its numbers, and how often counters were written by then."""
        values, vectors = self.bound.values, self.counters.vectors
        self.registers[: len(self.order)] = [float(values[n]) for n in self.order]
        for vector in vectors:
            assert vector.common is not None  # the step that has just run has written one number into all
            self.registers[self._arguments.counter] = vector.common
        self._arguments.seed = self.own.seed
        for written in self.written:
            written.keep()
        self.follow_groups()

    def follow_groups(self) -> None:
        """The groups are as they were read, unless somebody has changed them meanwhile: then Python looks at them."""
        self.groups.keep()
        self.members.keep()
        calm, arguments = self.snapshot.untouched_groups.same(), self._arguments
        arguments.groups = address_of_record(self.groups if calm else self.snapshot.untouched_groups)
        arguments.rates = self.rates if calm else 0

    def settle(self) -> None:
        """Before a step goes the long way: counters on the device are known, unless somebody else has written one."""
        for vector, written in zip(self.counters.vectors, self.written, strict=True):
            if vector.array is None and written.same():
                number = self.registers[self._arguments.counter]
                vector.keep([number] * len(vector.counters), number)

    def __call__(self, batch: tuple[Any, ...], named: dict[str, Any]) -> list[torch.Tensor] | None:
        """One step, for who has the lock: its results, the user's to keep. None where something may have changed: then
        nothing was done.
        """
        results, copied = self.new_results(), False
        while answer := self.once(batch, named, results, copied):
            if not self.helped(answer, batch, named):
                return None
            copied |= answer == LAID
            if answer == STREAM:
                results = self.new_results()
        return results

    def new_results(self) -> list[torch.Tensor]:
        """Memory for what a step gives."""
        if not self.ready:
            many = READY if sum(t.numel() * t.element_size() for t in self.results) <= SMALL else 1
            with torch.inference_mode(False):
                self.ready.extend([torch.empty_like(t) for t in self.results] for _ in range(many))
        return self.ready.pop()

    def helped(self, answer: int, batch: tuple[Any, ...], named: dict[str, Any]) -> bool:
        """Does what C++ cannot; whether it is to try again."""
        arguments = self._arguments
        if answer == GROUPS:
            return self.new_numbers()
        if answer == LAID:
            by_name = batch[0] if batch else named
            tensors = batch if self.keys is None else [by_name[key] for key in self.keys]
            with torch.no_grad():
                foreach_copy(self.static.fixed, [tensors[source] for _, source in self.static.batch])
        elif answer == STREAM:
            arguments.known_stream = self._cuda.meet_stream(self.ring, self.bound.cells.there)
            self.ready.clear()  # its memory is of the stream before
        elif answer == WAIT:
            self._cuda.wait(arguments.turn // HALF % 2)
        elif answer == FAILED:
            self.fail()
        else:
            return False
        return True

    def fail(self) -> None:
        """Raises what the driver has answered."""
        self.compiled.snapshot = None
        call, what = ASKED[int(self._arguments.failed)]
        raise DriverError(f"{what}: {call} failed with CUDA error {self._arguments.error}")

    def new_numbers(self) -> bool:
        """Takes over hyper-parameters that have changed; false where more than those has, or the graph holds one."""
        snapshot, values = self.snapshot, self.bound.values
        if not snapshot.holds_groups():
            return False
        if not snapshot.same_groups:
            self.counters.put_hypers(values)
            self.bound.numbers.settle(values)
            if self.graphed.once(values) != self.graphed.kept_once:
                return False
        for place, number in self.steady:
            self.registers[place] = values[number]
        snapshot.keep_groups()
        self.follow_groups()
        return snapshot.fixed


def neighbours(vector: Vector, cells: Cells, source: int, written: int) -> Neighbours:
    """Counters as C++ takes them; their offset where they lie behind the cells and arrive with them, else -1."""
    memory, here = vector.memory, vector.array is not None
    wide = memory.dtype is torch.float64
    if not vector.one:
        raise LongWay("the optimizer's counters do not count alike")
    if (memory.dtype is not torch.float32 and not wide) or (wide and not here):
        raise LongWay(f"the optimizer's counters are {memory.dtype} on {memory.device}")
    count, offset = len(vector.counters), memory.data_ptr() - cells.memory.data_ptr()
    behind = not here and cells.there.numel() <= offset <= cells.memory.numel() - 4 * count
    place = offset if behind else -1
    return Neighbours(memory.data_ptr(), place, count, wide, here, source, id(vector.counters[0]), written)
