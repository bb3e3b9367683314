"""A plan bound to memory: one arena, every buffer a view of it, every launch a list of calls with fixed arguments.

Running it is a flat loop over those calls. What the host must compute first (schedules, counters) are Python numbers;
kernels read them as numbers, or from cells: 0-d tensors that are filled before the loop.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import numpy
import torch

from ..backends.aten import lower
from ..backends.host import host_function, with_constants
from ..backends.kernels import (
    COPY,
    FILL,
    KERNEL,
    MUTATE,
    NEW,
    OUT,
    VIEW,
    Kernel,
    Number,
    Ref,
    Spec,
    replaced,
    scratch_places,
)
from ..dialects.step import constant_value, torch_dtype
from ..dialects.strides import is_dense
from ..errors import WholestepError
from ..ir.core import Op
from ..plan.plan import Launch, Plan
from ..plan.planner import Planned
from ..torch_private import foreach_copy, without_detour

Call = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class HostValue:
    """A number of the host, where an argument of a call is one."""

    buffer: int


class Late:
    """A call with numbers of the host among its arguments: they are looked up when it runs."""

    __slots__ = ("args", "call", "kwargs", "values")

    def __init__(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], values: list[Any]):
        self.call, self.args, self.kwargs, self.values = call, args, kwargs, values

    def __call__(self) -> None:
        values = self.values

        def now(value: Any) -> Any:
            return values[value.buffer] if type(value) is HostValue else value

        self.call(*[replaced(a, now) for a in self.args], **{k: replaced(v, now) for k, v in self.kwargs.items()})


#: elements of tensors that a GPU copies together: larger ones are copied faster one by one
TOGETHER = 1 << 21
#: bytes that a GPU moves at once
WORD = 16


class Made:
    """A call that makes its results itself: they are copied to their places."""

    __slots__ = ("call", "outs")

    def __init__(self, call: Callable[..., Any], outs: tuple[torch.Tensor | None, ...]):
        self.call, self.outs = call, outs

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        made = self.call(*args, **kwargs)
        outs: list[torch.Tensor] = []
        values: list[torch.Tensor] = []
        for out, value in zip(self.outs, made if isinstance(made, list | tuple) else (made,), strict=True):
            if out is not None and value is not None:
                if out.shape != value.shape:
                    raise WholestepError(f"{self.call} gives {list(value.shape)} where {list(out.shape)} was planned")
                if out.is_cuda and out.numel() <= TOGETHER and len(self.outs) > 1:
                    outs.append(out)
                    values.append(value)
                elif out.is_cuda and out.dtype == value.dtype and not is_dense(out.shape, out.stride()):
                    wide, words = in_words(out), in_words(value)
                    if wide is not None and words is not None:
                        wide.copy_(words)
                    else:
                        out.copy_(value)
                else:
                    out.copy_(value)
        if len(outs) == 1:  # of one tensor foreach takes longer
            outs[0].copy_(values[0])
        else:
            foreach_copy(outs, values)


def in_words(tensor: torch.Tensor) -> torch.Tensor | None:
    """A tensor as words of 16 bytes, which a GPU copies faster than single elements; None where it is no such words.

    Between tensors that fill their memory alike that makes no difference: those are copied as one stretch.
    """
    count = WORD // tensor.element_size()
    *outer, last = tensor.stride() or (0,)
    if last != 1 or tensor.shape[-1] % count or tensor.data_ptr() % WORD or any(s % count for s in outer):
        return None
    return tensor.view(torch.complex128)


class Choice:
    """Copies one of two tensors, by a number of the host; nothing where the one chosen lies in its place already."""

    __slots__ = ("condition", "moves", "values")

    def __init__(self, values: list[Any], condition: int, x: torch.Tensor, y: torch.Tensor, out: torch.Tensor):
        self.values, self.condition = values, condition
        self.moves = [None if same_memory(source, out) else (out, source) for source in (y, x)]

    def __call__(self) -> None:
        move = self.moves[bool(self.values[self.condition])]
        if move is not None:
            move[0].copy_(move[1])


class Beside:
    """The calls of one launch on a stream of its own, after all that the stream of the kernels has been given so far.
    In a graph that is captured they are a branch, which the wait for them joins again."""

    __slots__ = ("calls", "over", "started", "stream")

    def __init__(self, calls: list[Call], stream: torch.cuda.Stream):
        self.calls, self.stream = calls, stream
        self.started, self.over = torch.cuda.Event(), torch.cuda.Event()

    def __call__(self) -> None:
        self.started.record(torch.cuda.current_stream(self.stream.device))
        self.stream.wait_event(self.started)
        with torch.cuda.stream(self.stream):
            for call, args, kwargs in self.calls:
                call(*args, **kwargs)
            self.over.record(self.stream)

    def wait(self) -> None:
        torch.cuda.current_stream(self.stream.device).wait_event(self.over)


@dataclass(slots=True)
class HostCall:
    """Arithmetic on numbers of the host."""

    function: Callable[..., Any]
    reads: tuple[int, ...]
    write: int
    kind: tuple[Any, ...]  # equal for calls that compute alike
    name: str = ""  # of the op
    constants: tuple[float | None, ...] = ()  # by operand: None where it is a buffer


class HostNumbers:
    """The arithmetic on numbers of the host. While all counters agree, what is computed alike is computed once."""

    def __init__(self, calls: list[HostCall], counters: Sequence[int], needed: set[int]):
        self.calls, self.counters = calls, list(counters)
        alike: dict[int, Any] = dict.fromkeys(counters, "counter")
        first: dict[Any, int] = {}
        for call in calls:
            key = (call.kind, tuple(alike.get(n, n) for n in call.reads))
            first.setdefault(key, call.write)
            alike[call.write] = key
        #: whose number a buffer has while all counters agree
        self.stands_for = {call.write: first[alike[call.write]] for call in calls}
        self.stands_for |= dict.fromkeys(counters, self.counters[0] if counters else -1)
        stands_for = self.stands_for
        once = [
            replace(c, reads=tuple([stands_for.get(n, n) for n in c.reads]))
            for c in calls
            if stands_for[c.write] == c.write
        ]
        moving = set(counters)
        for call in once:
            if not moving.isdisjoint(call.reads):
                moving.add(call.write)
        #: what no counter changes is computed again only where what it follows from has changed
        self.moving = [c for c in once if c.write in moving]
        self.steady = [c for c in once if c.write not in moving]
        self._moving, self._steady = (
            [(c.function, c.reads, c.write) for c in some] for some in (self.moving, self.steady)
        )
        made = {call.write for call in once}
        self.given = sorted({n for call in self.steady for n in call.reads} - made)
        self.known: list[Any] | None = None
        self.copies = [(n, stands_for[n]) for n in sorted(needed) if stands_for.get(n, n) != n]

    def compute(self, values: list[Any], agree: bool = False) -> bool:
        """What follows from the numbers given; true where each was computed once: `spread` then gives it to all.

        agree: all counters are known to be one number, which is in the place of the first.
        """
        if not agree and len({values[n] for n in self.counters}) > 1:
            self.known = None
            for call in self.calls:
                values[call.write] = call.function(*[values[n] for n in call.reads])
            return False
        self.settle(values)
        for function, reads, write in self._moving:
            values[write] = function(*[values[n] for n in reads])
        return True

    def settle(self, values: list[Any]) -> None:
        """What follows from the numbers given and from no counter."""
        given = [values[n] for n in self.given]
        if given != self.known:
            self.known = given
            for function, reads, write in self._steady:
                values[write] = function(*[values[n] for n in reads])

    def spread(self, values: list[Any]) -> None:
        """Gives numbers that were computed once to all who have them."""
        for number, source in self.copies:
            values[number] = values[source]


class Cells:
    """Numbers of the host in memory that kernels read: side by side on the device, so that one copy brings them all.

    On a GPU the copy leaves from pinned memory and nobody waits for it: two halves of that memory take turns, and one
    is written again only once every copy from it has left.
    """

    HALF = 8

    def __init__(self, planned: Planned, device: torch.device, key: torch.device | None = None, room: int = 0):
        self.device = device
        wanted: dict[torch.dtype, dict[int, None]] = {}
        buffers = planned.plan.buffers
        for launch, kernel in zip(planned.plan.launches, planned.kernels, strict=True):
            if kernel is None:
                continue
            taken = numbers_taken(kernel)
            for position, number in enumerate(launch.reads):
                if buffers[number].space == "host" and position not in taken:
                    wanted.setdefault(torch_dtype(buffers[number].type.element), {})[number] = None
        self.numbers = sorted(((d, list(n)) for d, n in wanted.items()), key=lambda item: -item[0].itemsize)
        sizes = [(torch.int64, 3), *((dtype, len(numbers)) for dtype, numbers in self.numbers)]
        cuda = device.type == "cuda"
        size = sum(d.itemsize * n for d, n in sizes)
        aligned = -(-size // 8) * 8
        #: the cells, and bytes behind them for what is to arrive by the same copy
        self.memory = torch.zeros(aligned + room, dtype=torch.uint8, device=device)
        self.there, self.room = self.memory[:size], self.memory[aligned:]
        parts = split_bytes(self.there, sizes)
        self.tensors = {
            number: part[i]
            for part, (_, numbers) in zip(parts[1:], self.numbers, strict=True)
            for i, number in enumerate(numbers)
        }
        #: seed, step and micro-batch, where random numbers are made
        self.key = parts[0] if key is None or key == device else torch.zeros(3, dtype=torch.int64)
        self.here = [self.there]
        if cuda:
            self.here = [torch.zeros_like(self.there, device="cpu").pin_memory() for _ in range(2 * self.HALF)]
        #: the same memory as arrays: the key, then the numbers by type
        self.arrays = [[part.numpy() for part in split_bytes(here, sizes)] for here in self.here]
        self.left: list[torch.cuda.Event | None] = [None, None]
        self.turn = -1
        #: by type: the numbers to look at while all counters agree, and for each cell which of them it holds
        self.once: list[tuple[list[int], Any]] = []
        #: by block of memory and type: those numbers as they stand there; None where it holds others
        self.held: list[list[Any]] = [[None] * len(self.numbers) for _ in self.here]

    def share(self, stands_for: Mapping[int, int]) -> None:
        """Tells whose number a cell has while all counters agree."""
        self.once = []
        for _, numbers in self.numbers:
            sources = [stands_for.get(n, n) for n in numbers]
            distinct = sorted(set(sources))
            place = {n: i for i, n in enumerate(distinct)}
            self.once.append((distinct, numpy.array([place[n] for n in sources])))

    def layout(self) -> list[tuple[int, str, int]]:
        """Where each cell is, what it is, and whose number it has while all counters agree. The key comes before."""
        found, at = [], 3 * torch.int64.itemsize
        for (dtype, _), (distinct, place) in zip(self.numbers, self.once, strict=True):
            for source in place.tolist():
                found.append((at, str(dtype).removeprefix("torch."), distinct[source]))
                at += dtype.itemsize
        return found

    def fill(self, values: list[Any], key: Sequence[int], alike: bool = False) -> None:
        """Puts the numbers of a step where its kernels read them. `alike`: each was computed once."""
        turn = self.turn = (self.turn + 1) % len(self.here)
        half, first = divmod(turn, self.HALF)
        if not first and (event := self.left[half]) is not None:
            event.synchronize()
        if self.key.device != self.there.device:
            self.key.numpy()[:] = key
        mine, *arrays = self.arrays[turn]
        mine[:] = key
        held = self.held[turn]
        for i, array in enumerate(arrays):
            if alike:
                distinct, place = self.once[i]
                numbers = [values[n] for n in distinct]
                if numbers != held[i]:
                    held[i] = numbers
                    array[:] = numpy.array(numbers, array.dtype)[place]
            else:
                held[i] = None
                array[:] = [values[n] for n in self.numbers[i][1]]
        if self.there.is_cuda:
            self.there.copy_(self.here[turn], non_blocking=True)
            if first == self.HALF - 1:
                event = self.left[half] = self.left[half] or torch.cuda.Event()
                event.record()


def split_bytes(memory: torch.Tensor, sizes: list[tuple[torch.dtype, int]]) -> list[torch.Tensor]:
    """Bytes as vectors of these types and lengths, one after the other."""
    parts, at = [], 0
    for dtype, count in sizes:
        parts.append(memory[at : at + count * dtype.itemsize].view(dtype))
        at += count * dtype.itemsize
    return parts


@dataclass(slots=True)
class Memory:
    """Where the tensors of a plan are."""

    plan: Plan
    arena: torch.Tensor
    arguments: Sequence[torch.Tensor | None]
    cells: Cells
    pinned: torch.Tensor
    constants: dict[int, torch.Tensor] = field(default_factory=dict)
    known: dict[int, torch.Tensor] = field(default_factory=dict)

    def tensor(self, number: int) -> torch.Tensor:
        """The tensor of a buffer."""
        found = self.known.get(number)
        if found is None:
            found = self.known[number] = self._make(number)
        return found

    def _make(self, number: int) -> torch.Tensor:
        buffer, owner = self.plan.buffers[number], self.plan.owner(number)
        if buffer.space == "host":
            return self.cells.tensors[number]
        dtype = torch_dtype(buffer.type.element)
        if buffer.space in ("arena", "pinned"):
            start = self.plan.buffers[owner].offset
            inner = buffer.offset if owner != number else 0
            memory = self.arena if buffer.space == "arena" else self.pinned
            return self.at(start + inner, Spec(buffer.type.shape, buffer.strides, dtype), memory)
        base = self.arguments[owner] if buffer.space == "external" else self.constants[owner]
        assert base is not None
        if number == owner:
            return base
        offset = base.storage_offset() + buffer.offset // dtype.itemsize
        return base.as_strided(buffer.type.shape, buffer.strides, offset)

    def at(self, offset: int, spec: Spec, memory: torch.Tensor | None = None) -> torch.Tensor:
        """Memory of the arena, or of another block, as a tensor."""
        memory = self.arena if memory is None else memory
        if not spec.bytes:
            return torch.empty_strided(spec.shape, spec.strides, dtype=spec.dtype, device=memory.device)
        flat = memory[offset : offset + spec.bytes].view(spec.dtype)
        return flat.as_strided(spec.shape, spec.strides, flat.storage_offset())


class BoundPlan:
    """A plan on given memory. `arguments` has a tensor for each argument that is not a number of the host."""

    def __init__(
        self,
        planned: Planned,
        device: torch.device,
        arguments: Sequence[torch.Tensor | None],
        arena: torch.Tensor | None = None,
        cells: Cells | None = None,
        counters: Sequence[int] = (),
        pinned: torch.Tensor | None = None,
    ):
        self.planned, self.device = planned, device
        plan = self.plan = planned.plan
        self.ops = list(planned.function.regions[0].block)
        if arena is None:
            arena = torch.empty(plan.arena, dtype=torch.uint8, device=device)
        self.arena = arena
        self.cells = Cells(planned, device) if cells is None else cells
        self.pinned = pinned_memory(plan, device) if pinned is None else pinned
        self.memory = Memory(plan, arena, arguments, self.cells, self.pinned)
        #: launches on streams of their own, by position
        self.beside: dict[int, Beside] = {}
        self.streams: dict[int, torch.cuda.Stream] = {}
        #: numbers of the host, by buffer
        self.values: list[Any] = [None] * len(plan.buffers)
        self.host: list[HostCall] = []
        self.calls: list[Call] = []
        #: the position of the launch that each call belongs to, and the launch and op it comes from
        self.origin: list[int] = []
        self.sites: list[tuple[Launch, Op | None]] = []
        #: numbers of the host that calls take as they are: a captured graph keeps them
        self.taken: set[int] = set()
        for number, buffer in enumerate(plan.buffers):
            if buffer.space == "constant" and buffer.base < 0:
                self.memory.constants[number] = lower(self.ops[buffer.op], device).run()
        with torch.no_grad():
            for position, launch in enumerate(plan.launches):
                self.bind(position, launch)
        needed = {*self.taken, *self.cells.tensors, *(r.buffer for r in plan.results if r.way == "host")}
        needed.update(n for launch in plan.launches if launch.provider == "choose" for n in launch.reads[:1])
        self.numbers = HostNumbers(self.host, counters, needed)
        self.cells.share(self.numbers.stands_for)

    # ---- numbers of the host -----------------------------------------------------------------------------------------

    def fill_in(self, key: Sequence[int], agree: bool) -> bool:
        """Computes what follows from the numbers of the step and sends it to where kernels read it.

        True where each number was computed once and `spread_numbers` has not been called: calls that take numbers as
        they are need them all, a graph that is replayed does not. `agree`: all counters are the number of the first.
        """
        alike = self.numbers.compute(self.values, agree)
        self.cells.fill(self.values, key, alike)
        return alike

    def spread_numbers(self) -> None:
        self.numbers.spread(self.values)

    # ---- launches ----------------------------------------------------------------------------------------------------

    def bind(self, position: int, launch: Launch) -> None:
        if launch.provider == "host":
            op = self.ops[launch.op]
            function = host_function(op)
            assert function is not None
            constants = tuple([constant_value(v) for v in op.operands])
            kind = (op.name, op.attributes.get("rounding"), *map(repr, constants))
            self.host.append(
                HostCall(with_constants(function, op), launch.reads, launch.writes[0], kind, op.name, constants)
            )
            return
        before = len(self.calls)
        if launch.provider == "wait":
            self.calls += [(self.beside[p].wait, (), {}) for p in self.last_of(position, launch) if p in self.beside]
        elif launch.provider == "copy":
            out, source = self.memory.tensor(launch.writes[0]), self.memory.tensor(launch.reads[0])
            self.copy(out, source, **({"non_blocking": True} if launch.stream else {}))
        elif launch.provider == "choose":
            condition, x, y = launch.reads
            tensors = [self.memory.tensor(n) for n in (x, y, launch.writes[0])]
            self.calls.append((Choice(self.values, condition, *tensors), (), {}))
        elif launch.provider == "micro_batches":
            self.bind_micro_batches(launch)
        else:
            kernel = self.planned.kernels[position]
            if kernel is None:
                raise WholestepError(f"the plan has no kernel for {launch.name} of layer {launch.layer}")
            self.bind_kernel(launch, kernel)
        if launch.stream and self.device.type == "cuda":
            found = self.beside[position] = Beside(self.calls[before:], self.stream(launch.stream))
            self.calls[before:] = [(found, (), {})]
        added = len(self.calls) - before
        self.origin += [position] * added
        missing = len(self.calls) - len(self.sites)
        self.sites += [(launch, self.ops[launch.op] if launch.op >= 0 else None)] * missing

    def last_of(self, position: int, wait: Launch) -> tuple[int, ...]:
        """What a wait waits for; nothing where the next one waits for something later of the same streams."""
        launches = self.plan.launches
        after = launches[position + 1] if position + 1 < len(launches) else None
        if after is None or after.provider != "wait" or after.stream != wait.stream:
            return wait.waits
        later = {launches[p].stream: p for p in after.waits}
        return tuple([p for p in wait.waits if later.get(launches[p].stream, -1) < p])

    def stream(self, number: int) -> torch.cuda.Stream:
        """A stream of the plan beside that of the kernels."""
        if number not in self.streams:
            self.streams[number] = torch.cuda.Stream(self.device)
        return self.streams[number]

    def copy(self, out: torch.Tensor, source: torch.Tensor, **how: bool) -> None:
        if not same_memory(out, source):
            self.calls.append((out.copy_, (source,), how))

    def bind_kernel(self, launch: Launch, kernel: Kernel) -> None:
        """The calls of a kernel on the memory of a launch."""
        memory, buffers = self.memory, self.plan.buffers
        used = [w >= 0 for w in launch.writes]
        offsets, _ = scratch_places(kernel, used, self.plan.alignment)
        tensors: dict[int, torch.Tensor] = {}
        placed: dict[int, list[int]] = {}  # address -> operands that start there: a batch has hundreds
        for position, number in enumerate(launch.reads):
            if buffers[number].space != "host" or number in memory.cells.tensors:
                tensors[position] = memory.tensor(number)
                placed.setdefault(tensors[position].data_ptr(), []).append(position)
        for result, number in zip(kernel.results, launch.writes, strict=True):
            if number < 0 or result < 0:
                continue
            found, spec = memory.tensor(number), kernel.memory[result]
            if tuple(found.shape) != spec.shape or found.stride() != spec.strides:
                found = found.as_strided(spec.shape, spec.strides, found.storage_offset())
            tensors[result] = found
            for position in placed.get(found.data_ptr(), ()):  # torch compares even strides of dimensions of size 1
                if same_memory(tensors[position], found):
                    tensors[position] = found
        if launch.workspace >= 0:
            start = buffers[self.plan.owner(launch.workspace)].offset
            for number, offset in offsets.items():
                tensors[number] = memory.at(start + offset, kernel.memory[number])
        for number, spec in kernel.memory.items():
            if number not in tensors and not spec.bytes:
                tensors[number] = torch.empty_strided(spec.shape, spec.strides, dtype=spec.dtype, device=self.device)
        late = False

        def bound(value: Any) -> Any:
            nonlocal late
            if isinstance(value, Ref):
                return tensors[value.number]
            if isinstance(value, Number):
                late = True
                self.taken.add(launch.reads[value.operand])
                return HostValue(launch.reads[value.operand])
            return value

        for step in kernel.steps:
            late = False
            args = replaced(step.args, bound)
            kwargs = {k: replaced(v, bound) for k, v in step.kwargs.items()}
            if step.kind == VIEW:
                made = step.call(*args, **kwargs)
                views = made if isinstance(made, list | tuple) else (made,)
                base = next(a for a in args if isinstance(a, torch.Tensor))
                if any(
                    v.numel() and v.untyped_storage().data_ptr() != base.untyped_storage().data_ptr() for v in views
                ):
                    raise WholestepError(f"{launch.name}: {step.call} was planned as a view and is a copy")
                tensors.update(zip(step.makes, views, strict=True))
                continue
            call = step.call
            if step.kind == COPY:
                self.copy(*args)
                continue
            if step.kind == FILL:
                out, value = args
                call, args = out.fill_, (value,)
            elif step.kind == OUT:
                kwargs.update(zip(step.outs, [tensors[n] for n in step.makes], strict=True))
            elif step.kind == NEW:
                call = Made(call, tuple(tensors.get(n) if n >= 0 else None for n in step.makes))
            elif step.kind == KERNEL:
                args = (*args, *[tensors[n] for n in step.makes])
            else:
                assert step.kind == MUTATE
            call = without_detour(call)
            self.calls.append((Late(call, args, kwargs, self.values), (), {}) if late else (call, args, kwargs))

    def bind_micro_batches(self, launch: Launch) -> None:
        """The body once per micro-batch, in the workspace of the launch; its results are gathered as they come."""
        op, memory = self.ops[launch.op], self.memory
        body = self.planned.bodies[launch.body]
        arena, pinned = memory.tensor(launch.workspace), pinned_memory(body.plan, self.device)
        inputs: list[torch.Tensor] = [memory.tensor(n) for n in launch.reads]
        keys: dict[int, torch.Tensor] = {}
        for i, kind in enumerate(op.given):
            if kind == "key":
                keys[i] = inputs[i].new_zeros(op.count, 3)
                keys[i][:, 2] = torch.arange(op.count)
                self.calls.append((keys[i][:, :2].copy_, (inputs[i][:2].expand(op.count, 2),), {}))
        carried = [i for i, result in enumerate(op.carried) if result >= 0]
        # what one micro-batch hands to the next, in two sets that take turns: a new value may be a part of an old one
        turns = [{i: torch.empty_like(inputs[i]) for i in carried} for _ in range(2)]
        for number in range(op.count):
            arguments = [
                keys[i][number] if kind == "key" else x.chunk(op.count)[number] if kind == "split" else x
                for i, (x, kind) in enumerate(zip(inputs, op.given, strict=True))
            ]
            if number:
                arguments = [turns[(number - 1) % 2].get(i, x) for i, x in enumerate(arguments)]
            inner = BoundPlan(body, self.device, arguments, arena, pinned=pinned)
            self.sites += [(launch, op)] * (len(self.calls) - len(self.sites)) + inner.sites
            self.calls += inner.calls
            outputs = inner.results()
            for i, (kind, write) in enumerate(zip(op.taken, launch.writes, strict=True)):
                if write < 0:
                    continue
                out = memory.tensor(write)
                if kind == "concat":
                    self.copy(out.chunk(op.count)[number], outputs[i])
                elif kind in ("sum", "mean") and number:
                    self.calls.append((out.add_, (outputs[i],), {}))
                elif kind != "last" or number == op.count - 1:
                    self.copy(out, outputs[i])
            for i, held in turns[number % 2].items():
                self.copy(held, outputs[op.carried[i]])
        for kind, write in zip(op.taken, launch.writes, strict=True):
            if kind == "mean" and write >= 0:
                self.calls.append((memory.tensor(write).div_, (op.count,), {}))

    def around(self, head: list[Call], tail: list[Call]) -> None:
        """Calls that are not the program's own, before and after it."""
        self.calls = [*head, *self.calls, *tail]
        self.origin = [-1] * len(head) + self.origin + [-1] * len(tail)
        watch: list[tuple[Launch, Op | None]] = [(Launch(-1, (), (), "aten", name="watch"), None)]
        self.sites = watch * len(head) + self.sites + watch * len(tail)

    # ---- running -----------------------------------------------------------------------------------------------------

    def outputs(self, which: Sequence[int], alike: bool = False) -> list[Any]:
        """Some of the results, where they lie; numbers of the host are tensors too.

        alike: each number stands only where it was computed.
        """
        found: list[Any] = []
        for i in which:
            r = self.plan.results[i]
            if r.way == "host":
                number = self.numbers.stands_for.get(r.buffer, r.buffer) if alike else r.buffer
                dtype = torch_dtype(self.plan.buffers[r.buffer].type.element)
                found.append(torch.tensor(self.values[number], dtype=dtype))
            else:
                found.append(self.memory.tensor(r.buffer))
        return found

    def results(self) -> list[Any]:
        """What the program gives, where it lies; numbers of the host are numbers."""
        return [self.values[r.buffer] if r.way == "host" else self.memory.tensor(r.buffer) for r in self.plan.results]

    def run(self) -> None:
        """One step: every call in turn."""
        remaining = iter(self.calls)
        try:
            with torch.no_grad():
                for call, args, kwargs in remaining:
                    call(*args, **kwargs)
        except Exception as error:
            self.fail(error, len(self.calls) - operator.length_hint(remaining) - 1)

    def run_in_ranges(self, enter: Callable[[str], Any], leave: Callable[[], Any]) -> None:
        """One step with every launch of the plan between `enter("ws:<its position>")` and `leave()`."""
        at = -1
        try:
            with torch.no_grad():
                for at, (call, args, kwargs) in enumerate(self.calls):
                    enter(f"ws:{self.origin[at]}")
                    call(*args, **kwargs)
                    leave()
        except Exception as error:
            self.fail(error, at)

    def fail(self, error: Exception, at: int) -> NoReturn:
        """Raises what a call raised, with the user's layer, and notes how far the step has come."""
        found = error if isinstance(error, WholestepError) else at_launch(error, *self.sites[at])
        found.launch_position = self.origin[at]  # type: ignore[attr-defined]
        if found is error:
            raise error
        raise found from error


def pinned_memory(plan: Plan, device: torch.device) -> torch.Tensor:
    """Host memory for what a plan takes there, page-locked where a GPU copies from and to it."""
    return torch.empty(plan.pinned, dtype=torch.uint8, pin_memory=device.type == "cuda" and plan.pinned > 0)


def at_launch(error: Exception, launch: Launch, op: Op | None) -> Exception:
    """The error with the user's layer in it; torch's out-of-memory and runtime errors stay what they are."""
    where = op.loc if op is not None else launch.layer
    for kind in (torch.OutOfMemoryError, MemoryError, IndexError, RuntimeError):
        if isinstance(error, kind):
            return kind(f"{launch.name} of layer {where}: {error}")
    return WholestepError(f"{launch.name} of layer {where}: {error}")


def numbers_taken(kernel: Kernel) -> set[int]:
    """The operands that a kernel takes as Python numbers."""
    found: set[int] = set()

    def look(value: Any) -> Any:
        if isinstance(value, Number):
            found.add(value.operand)
        return value

    for step in kernel.steps:
        replaced(step.args, look)
        replaced(tuple(step.kwargs.values()), look)
    return found


def same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are the same elements in the same places."""
    return (
        one.data_ptr() == other.data_ptr()
        and one.dtype == other.dtype
        and one.shape == other.shape
        and all(a == b or n == 1 for n, a, b in zip(one.shape, one.stride(), other.stride(), strict=True))
        and one.device == other.device
    )
