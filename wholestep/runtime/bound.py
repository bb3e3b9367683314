"""A plan bound to memory: one arena, every buffer a view of it, every launch a list of calls with fixed arguments.

Running it is a flat loop over those calls. What the host must compute first (schedules, counters) are Python numbers;
kernels read them as numbers, or from cells: 0-d tensors that are filled before the loop.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch

from ..backends.aten import lower
from ..backends.host import host_function, with_constants
from ..backends.kernels import COPY, FILL, KERNEL, MUTATE, NEW, OUT, VIEW, Kernel, Number, Ref, replaced, scratch_places
from ..dialects.step import constant_value, torch_dtype
from ..errors import WholestepError
from ..ir.core import Op
from ..plan.plan import Launch
from ..plan.planner import Planned
from ..torch_private import without_detour
from .allocated import Allocated
from .calls import Beside, Call, Choice, Counted, HostValue, Late, Made, Watched, same_memory, settled
from .cells import Cells
from .host_numbers import HostCall, HostNumbers
from .memory import Memory, pinned_memory


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
        allocated: Allocated | None = None,
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
        #: whether operators that are given the tensors to write, and kernels of providers, are watched: until a step
        #: has run
        self.first = True
        #: what launches took beside the plan's memory in that step
        self.allocated = Allocated() if allocated is None else allocated
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
            if step.kind in (OUT, MUTATE):
                where = f"{step.call}, for {launch.name} of layer {launch.layer or '(none)'},"
                call = Watched(call, [tensors[n] for n in step.makes], where)
            elif step.kind == KERNEL and self.device.type == "cpu":
                call = Counted(call, launch, self.allocated)
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
        turns = [{i: empty_as(inputs[i]) for i in carried} for _ in range(2)]
        for number in range(op.count):
            arguments = [
                keys[i][number] if kind == "key" else x.chunk(op.count)[number] if kind == "split" else x
                for i, (x, kind) in enumerate(zip(inputs, op.given, strict=True))
            ]
            if number:
                arguments = [turns[(number - 1) % 2].get(i, x) for i, x in enumerate(arguments)]
            inner = BoundPlan(body, self.device, arguments, arena, pinned=pinned, allocated=self.allocated)
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
        if self.first:
            self.settle()

    def run_after(self, position: int, wanted: Callable[[Launch], bool]) -> None:
        """Runs the launches after a position that are wanted."""
        with torch.no_grad():
            for (call, args, kwargs), at in zip(self.calls, self.origin, strict=True):
                if at > position and wanted(self.plan.launches[at]):
                    call(*args, **kwargs)

    def settle(self) -> None:
        """After the first step: calls that wrote where they were told to are watched no more, and none is counted."""
        self.calls = [(settled(call), args, kwargs) for call, args, kwargs in self.calls]
        self.first = False

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
        if self.first:
            self.settle()

    def fail(self, error: Exception, at: int) -> NoReturn:
        """Raises what a call raised, with the user's layer, and notes how far the step has come."""
        found = error if isinstance(error, WholestepError) else at_launch(error, *self.sites[at])
        found.launch_position = self.origin[at]  # type: ignore[attr-defined]
        if found is error:
            raise error
        raise found from error


def at_launch(error: Exception, launch: Launch, op: Op | None) -> Exception:
    """The error with the user's layer in it; torch's out-of-memory and runtime errors stay what they are."""
    where = op.loc if op is not None else launch.layer
    for kind in (torch.OutOfMemoryError, MemoryError, IndexError, RuntimeError):
        if isinstance(error, kind):
            return kind(f"{launch.name} of layer {where}: {error}")
    return WholestepError(f"{launch.name} of layer {where}: {error}")


def empty_as(x: torch.Tensor) -> torch.Tensor:
    """Memory for a tensor that lies exactly as another does, gaps and all."""
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
