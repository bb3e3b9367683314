"""What the launches of a plan really do: the operators that each of them runs, and the memory every one touches.

Follows `runtime/bound.py` call by call, without memory: views are taken on tensors of the meta device, copies of a
tensor onto itself are left out. The ledger and the cache model both count what is listed here.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from ..backends.kernels import (
    COPY,
    FILL,
    KERNEL,
    MUTATE,
    NEW,
    VIEW,
    Kernel,
    Ref,
    Spec,
    Step,
    collect,
    replaced,
    scratch_places,
)
from ..dialects.loop import Load, inputs_of, space_of, varying
from ..dialects.step import torch_dtype
from ..dialects.step.fused import Fused
from ..dialects.strides import Strides
from ..ir.core import Op
from ..plan.plan import Launch, Plan
from ..plan.planner import Planned
from ..torch_private import schema_of

#: operators that write all of the tensor they change, and do not read it
OVERWRITES = frozenset({"aten::copy_", "aten::fill_", "aten::zero_", "wholestep::random_"})
#: operators that read no more of their first tensor than they give
LOOK_UPS = frozenset({"aten::index_select", "aten::gather", "aten::index", "aten::embedding", "aten::take"})
#: the same for launches whose operators are not known
ROWS = ("step.embedding", "step.gather", "step.index")
#: memory: the plan's own block, what a provider allocates by itself while an operator runs
ARENA, MADE = "arena", "made"


@dataclass(frozen=True, slots=True)
class Place:
    """A tensor in memory: which memory, its first byte there, shape, strides in elements, bytes of an element.

    `base` is the first byte of the tensor that it is a view of.
    """

    memory: Hashable
    offset: int
    shape: tuple[int, ...]
    strides: Strides
    element: int
    base: int = 0

    @property
    def bytes(self) -> int:
        """Bytes of its distinct elements: what a broadcast repeats counts once."""
        if 0 in self.shape:
            return 0
        steps = [(n, s) for n, s in zip(self.shape, self.strides, strict=True) if n > 1 and s]
        return self.element * min(prod(n for n, _ in steps), 1 + sum((n - 1) * s for n, s in steps))

    @property
    def key(self) -> tuple[Any, ...]:
        """Equal for the same elements in the same places."""
        steps = [(n, s) for n, s in zip(self.shape, self.strides, strict=True) if n != 1]
        return (self.memory, self.offset, self.element, *steps)

    @property
    def held(self) -> tuple[Any, ...]:
        """Equal for the same elements in whatever order, as of a matrix and its transpose."""
        steps: list[tuple[int, int]] = []
        for stride, size in sorted(zip(self.strides, self.shape, strict=True)):
            if size == 1 or not stride:
                continue
            if steps and stride == steps[-1][0] * steps[-1][1]:
                steps[-1] = (steps[-1][0] * size, steps[-1][1])
            else:
                steps.append((size, stride))
        return (self.memory, self.offset, self.element, *steps)

    def part(self, count: int, number: int) -> Place:
        """One of `count` equal parts along the first dimension."""
        rows = self.shape[0] // count
        first = self.offset + number * rows * self.strides[0] * self.element
        return Place(self.memory, first, (rows, *self.shape[1:]), self.strides, self.element, self.base)


@dataclass(frozen=True, slots=True)
class Access:
    """Bytes that an operator reads or writes. `buffer` is that of the plan, -1 for what lives inside the launch alone;
    `inside`: it serves the launch itself, as scratch does and the copy of a result to its place."""

    place: Place
    written: bool
    bytes: int
    buffer: int = -1
    inside: bool = False


#: what one operator reads and writes
Call = list[Access]


@dataclass(slots=True)
class Gathering:
    """A call that a launch of micro-batches adds to its body's, for one of its results (-1: for its key)."""

    what: str  # sum, mean, concat, last, carry, key
    result: int
    call: Call


@dataclass(frozen=True, slots=True)
class Loop:
    """How a launch of micro-batches runs its body, as `step.micro_batches` has it."""

    count: int
    given: Sequence[str]
    taken: Sequence[str]
    carried: Sequence[int]


@dataclass(frozen=True, slots=True)
class Touch:
    """An access inside a kernel: the tensor whose memory it is, by its number, and the part that is seen."""

    tensor: int
    offset: int
    spec: Spec
    written: bool


@dataclass(slots=True)
class Operator:
    """One operator of a kernel. `makes`: tensors that it allocates itself and that are then copied to their places."""

    kind: str
    touches: list[Touch]
    looks_up: bool
    makes: tuple[int, ...] = ()


class Frame:
    """A plan on given memory: where each of its buffers is, and what its launches do.

    A plan without its kernels counts each launch as one operator that reads its operands and writes its results.
    """

    def __init__(self, planned: Planned | Plan, start: int = 0, arguments: Sequence[Place] | None = None):
        self.bodies: Sequence[Planned | Plan] = planned.bodies
        self.kernels: Sequence[Kernel | None] | None = None
        self.ops: list[Op] | None = None
        self.loops: dict[str, Op] = {}
        if isinstance(planned, Plan):
            self.plan = planned
        else:
            self.plan, self.kernels = planned.plan, planned.kernels
            self.ops = list(planned.function.regions[0].block)
            bodies = {} if planned.fusion is None else planned.fusion.bodies
            self.loops = {name: body.kernel for name, body in bodies.items() if body.kernel is not None}
        self.start = start
        self.arguments = arguments
        self.operators: dict[int, list[Operator]] = {}
        self.asked: dict[str, list[int]] = {}

    # ---- memory ------------------------------------------------------------------------------------------------------

    def place(self, number: int) -> Place:
        """Where a buffer is."""
        buffer, owner = self.plan.buffers[number], self.plan.owner(number)
        shape, strides, element = buffer.type.shape, buffer.strides, buffer.type.element.bytes
        inner = 0 if number == owner else buffer.offset
        if buffer.space == "arena":
            base = self.start + self.plan.buffers[owner].offset
            return Place(ARENA, base + inner, shape, strides, element, base)
        if buffer.space == "external" and self.arguments is not None:
            given = self.arguments[owner]
            if number == owner:
                return given
            return Place(given.memory, given.offset + inner, shape, strides, element, given.base)
        return Place((buffer.space, self.plan.function, owner), inner, shape, strides, element)

    def read(self, number: int) -> Access:
        place = self.place(number)
        return Access(place, False, place.bytes, number)

    def write(self, number: int) -> Access:
        place = self.place(number)
        return Access(place, True, place.bytes, number)

    # ---- launches ----------------------------------------------------------------------------------------------------

    def calls(self, position: int) -> list[Call]:
        """The operators of a launch that is no launch of micro-batches, in turn."""
        launch = self.plan.launches[position]
        if launch.provider in ("host", "wait"):
            return []
        if launch.provider == "copy":
            return copied(self.read(launch.reads[0]), self.write(launch.writes[0]))
        if launch.provider == "choose":  # by a number of the host; in most steps the one that lies in place already
            _, x, y = launch.reads
            out = self.write(launch.writes[0])
            in_place = out.place.key in (self.place(x).key, self.place(y).key)
            return [] if in_place else copied(self.read(x), out)
        kernel = None if self.kernels is None else self.kernels[position]
        return self.as_one(launch) if kernel is None else self.operated(launch, kernel)

    def as_one(self, launch: Launch) -> list[Call]:
        reads = [self.read(n) for n in dict.fromkeys(launch.reads) if self.plan.buffers[n].space != "host"]
        writes = [self.write(n) for n in launch.writes if n >= 0]
        if launch.name in ROWS and reads:
            reads[0] = limited(reads[0], sum(w.bytes for w in writes))
        return [[*reads, *writes]]

    def operated(self, launch: Launch, kernel: Kernel) -> list[Call]:
        """The operators of a kernel on the memory of a launch, with the copies of what they allocate."""
        buffers = self.plan.buffers
        at: dict[int, tuple[Hashable, int, int]] = {}  # tensor of the kernel -> memory, first byte, base
        buffer_of: dict[int, int] = {}
        bound = [(p, n) for p, n in enumerate(launch.reads) if buffers[n].space != "host"]
        bound += [(r, n) for r, n in zip(kernel.results, launch.writes, strict=True) if r >= 0 and n >= 0]
        for tensor, number in bound:
            place = self.place(number)
            at[tensor], buffer_of[tensor] = (place.memory, place.offset, place.base), number
        if launch.workspace >= 0:
            start = self.start + buffers[self.plan.owner(launch.workspace)].offset
            offsets, _ = scratch_places(kernel, [w >= 0 for w in launch.writes], self.plan.alignment)
            at |= {tensor: (ARENA, start + offset, start + offset) for tensor, offset in offsets.items()}
        most = self.elements_read(launch)
        out: list[Call] = []
        made = 0  # bytes that the launch's operators have allocated
        for operator in self.known(launch, kernel):
            found: dict[Any, Access] = {}
            copies: list[Call] = []
            for touch in operator.touches:
                spec, number = touch.spec, buffer_of.get(touch.tensor, -1)
                if touch.tensor in operator.makes and touch.written:
                    fresh = Place(MADE, made, spec.shape, spec.strides, spec.dtype.itemsize, made)
                    made += spec.bytes
                    found[True, fresh.key] = Access(fresh, True, fresh.bytes, number, number < 0)
                    if touch.tensor in at and spec.bytes:
                        memory, first, base = at[touch.tensor]
                        place = Place(memory, first, spec.shape, spec.strides, spec.dtype.itemsize, base)
                        read = Access(fresh, False, fresh.bytes, number, True)
                        copies.append([read, Access(place, True, place.bytes, number, True)])
                elif touch.tensor in at:
                    memory, first, base = at[touch.tensor]
                    place = Place(memory, first + touch.offset, spec.shape, spec.strides, spec.dtype.itemsize, base)
                    access = Access(place, touch.written, place.bytes, number, number < 0)
                    if not touch.written and touch.tensor < len(most):
                        access = limited(access, most[touch.tensor] * place.element)
                    held = place.key if touch.written else place.held  # (what is read twice comes from memory once)
                    other = found.get((touch.written, held), access)
                    found[touch.written, held] = max(access, other, key=lambda a: a.bytes)
            call = list(found.values())
            if operator.kind == COPY and len(call) == 2 and call[0].place.key == call[1].place.key:
                continue  # onto itself
            if operator.looks_up and operator.touches[0].tensor in at:
                call[0] = limited(call[0], sum(a.bytes for a in call if a.written))
            out += [self.each_byte_once(call) if operator.kind == KERNEL else call, *copies]
        return out

    def each_byte_once(self, call: Call) -> Call:
        """Views of one buffer that a kernel walks side by side read no more than the buffer has."""
        left: dict[int, int] = {}
        out: Call = []
        for access in call:
            if not access.written and access.buffer >= 0:
                buffer = self.plan.buffers[access.buffer]
                root = buffer.of if buffer.share == "view" else access.buffer
                room = left.setdefault(root, self.place(root).bytes)
                access = limited(access, room)
                left[root] = room - access.bytes
            out.append(access)
        return out

    def elements_read(self, launch: Launch) -> list[int]:
        """Of each operand of a region how many elements its loops ask for at most; empty for other launches."""
        op = self.ops[launch.op] if self.ops is not None and launch.op >= 0 else None
        if op is None or op.definition is not Fused or op.callee.name not in self.loops:
            return []
        name = op.callee.name
        if name not in self.asked:
            self.asked[name] = elements_read(self.loops[name])
        return self.asked[name]

    def known(self, launch: Launch, kernel: Kernel) -> list[Operator]:
        """The operators of a kernel; launches that are alike have one kernel."""
        found = self.operators.get(id(kernel))
        if found is None:
            buffers = [self.plan.buffers[n] for n in launch.reads]
            specs = [Spec(b.type.shape, b.strides, torch_dtype(b.type.element)) for b in buffers]
            found = self.operators[id(kernel)] = operators_of(kernel, specs)
        return found

    # ---- micro-batches -----------------------------------------------------------------------------------------------

    def loop(self, launch: Launch) -> Loop:
        if self.ops is not None:
            op = self.ops[launch.op]
            return Loop(op.count, op.given, op.taken, op.carried)
        return self.guessed_loop(launch)

    def guessed_loop(self, launch: Launch) -> Loop:
        """The same by sizes alone, where the program is not at hand."""
        body, buffers = self.plan.bodies[launch.body], self.plan.buffers
        shares = [buffers[n].type.bytes // max(body.buffers[i].type.bytes, 1) for i, n in enumerate(launch.reads)]
        parts = [body.buffers[r.buffer].type.bytes for r in body.results]
        taken = [
            "concat" if n >= 0 and buffers[n].type.bytes > part else "sum"
            for n, part in zip(launch.writes, parts, strict=True)
        ]
        given = ["split" if share > 1 else "same" for share in shares]
        return Loop(max([1, *shares]), given, taken, [-1] * len(given))

    def turns(self, launch: Launch) -> Iterator[tuple[Frame, list[Gathering]]]:
        """The body on the memory of each micro-batch, and the calls that gather its results after it."""
        loop = self.loop(launch)
        inputs = [self.place(n) for n in launch.reads]
        start = self.start + self.plan.buffers[self.plan.owner(launch.workspace)].offset
        held = {
            i: Place(("held", launch.op, i), 0, inputs[i].shape, inputs[i].strides, inputs[i].element)
            for i, result in enumerate(loop.carried)
            if result >= 0
        }
        writes = [self.write(n) if n >= 0 else None for n in launch.writes]
        known: dict[int, list[Operator]] = {}
        for number in range(loop.count):
            arguments = list(inputs)
            first: list[Gathering] = []
            for i, kind in enumerate(loop.given):
                if kind == "split":
                    arguments[i] = inputs[i].part(loop.count, number)
                elif kind == "key":
                    keys = Place(("keys", launch.op, i), 0, (loop.count, 3), (3, 1), inputs[i].element)
                    arguments[i] = Place(keys.memory, number * 3 * keys.element, (3,), (1,), keys.element)
                    if not number:
                        key = inputs[i]
                        seen = Place(key.memory, key.offset, (2,), key.strides, key.element, key.base)
                        to = Place(keys.memory, 0, (loop.count, 2), (3, 1), keys.element)
                        read = Access(seen, False, seen.bytes, launch.reads[i])
                        first.append(Gathering("key", -1, [read, Access(to, True, to.bytes, -1, True)]))
                if number and i in held:
                    arguments[i] = held[i]
            frame = Frame(self.bodies[launch.body], start, arguments)
            frame.operators = known
            yield frame, first + list(self.gathered(frame, loop, writes, held, number))

    def gathered(
        self, frame: Frame, loop: Loop, writes: Sequence[Access | None], held: dict[int, Place], number: int
    ) -> Iterator[Gathering]:
        """What follows the body of one micro-batch; reads of the body's results have no buffer of this plan."""
        last = number == loop.count - 1
        outputs = [frame.place(r.buffer) for r in frame.plan.results]
        for i, (kind, out) in enumerate(zip(loop.taken, writes, strict=True)):
            if out is None:
                continue
            made = Access(outputs[i], False, outputs[i].bytes)
            again = Access(out.place, False, out.bytes, out.buffer)
            if kind == "concat":
                part = out.place.part(loop.count, number)
                for call in copied(made, Access(part, True, part.bytes, out.buffer)):
                    yield Gathering(kind, i, call)
            elif kind in ("sum", "mean") and number:
                yield Gathering(kind, i, [made, again, out])
            elif kind != "last" or last:
                for call in copied(made, out):
                    yield Gathering(kind, i, call)
        for i, place in held.items():
            source = outputs[loop.carried[i]]
            for call in copied(Access(source, False, source.bytes), Access(place, True, place.bytes, -1, True)):
                yield Gathering("carry", loop.carried[i], call)
        for i, (kind, out) in enumerate(zip(loop.taken, writes, strict=True)):
            if last and kind == "mean" and out is not None:
                yield Gathering(kind, i, [Access(out.place, False, out.bytes, out.buffer), out])


def copied(source: Access, out: Access) -> list[Call]:
    """A copy; none where both are the same memory already."""
    return [] if source.place.key == out.place.key else [[source, out]]


def limited(access: Access, most: int) -> Access:
    return Access(access.place, access.written, min(access.bytes, most), access.buffer, access.inside)


def elements_read(kernel: Op) -> list[int]:
    """Of each tensor that a loop kernel reads: how many elements its loads ask for at most.

    A load asks for one at each point of the dimensions that its address changes along, so a look-up asks for the rows
    that it is given and not for the whole table.
    """
    sizes, dims = space_of(kernel), varying(kernel)
    asked = dict.fromkeys(inputs_of(kernel), 0)
    for op in kernel.regions[0].block:
        if op.definition is Load:
            asked[op.operands[0]] += prod(sizes[d] for d in dims[op.results[0]])
    return list(asked.values())


# ---- kernels ---------------------------------------------------------------------------------------------------------


def operators_of(kernel: Kernel, operands: Sequence[Spec]) -> list[Operator]:
    """The operators of a kernel, views left out: what each touches. What runs as a whole reads its scratch after."""
    tensors: dict[int, torch.Tensor] = {}
    root: dict[int, int] = {}
    scratch = {number for number, *_ in kernel.scratch}
    scratch -= {n for step in kernel.steps if step.kind != VIEW for n in reads_and_writes(step)[0]}
    for number, spec in (*enumerate(operands), *kernel.memory.items()):
        tensors[number] = torch.empty_strided(spec.shape, spec.strides, dtype=spec.dtype, device="meta")
        root[number] = number

    def bound(value: Any) -> Any:
        return tensors[value.number] if isinstance(value, Ref) else value

    out: list[Operator] = []
    for step in kernel.steps:
        if step.kind == VIEW:
            made = step.call(*replaced(step.args, bound), **{k: replaced(v, bound) for k, v in step.kwargs.items()})
            base = ordered((*step.args, *step.kwargs.values()))[0]
            for number, view in zip(step.makes, made if isinstance(made, list | tuple) else (made,), strict=True):
                tensors[number], root[number] = view, root[base]
            continue
        reads, writes = reads_and_writes(step)
        touches = [touch(tensors[n], root[n], False) for n in reads]
        touches += [touch(tensors[n], root[n], True) for n in writes]
        makes = tuple([n for n in step.makes if n >= 0]) if step.kind == NEW else ()
        looks_up = operator_name(step) in LOOK_UPS and bool(reads)
        touches += [touch(tensors[n], root[n], False) for n in writes if step.kind == KERNEL and n in scratch]
        out.append(Operator(step.kind, touches, looks_up, makes))
    return out


def touch(tensor: torch.Tensor, root: int, written: bool) -> Touch:
    spec = Spec(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype)
    return Touch(root, int(tensor.storage_offset()) * tensor.element_size(), spec, written)


def operator_name(step: Step) -> str:
    """The name of a registered operator; empty for a call that runs as a whole."""
    return schema_of(step.call).name if hasattr(step.call, "overloadpacket") else ""


def reads_and_writes(step: Step) -> tuple[list[int], list[int]]:
    """Tensors that an operator reads and writes, by number, each in the order of its arguments."""
    if step.kind in (COPY, FILL):
        out, source = step.args
        return [source.number] if isinstance(source, Ref) and step.kind == COPY else [], [out.number]
    if step.kind != MUTATE:
        return ordered((*step.args, *step.kwargs.values())), [n for n in step.makes if n >= 0]
    schema = schema_of(step.call)
    reads: list[Any] = []
    for position, argument in enumerate(schema.arguments):
        value = step.args[position] if position < len(step.args) else step.kwargs.get(argument.name)
        changed = argument.alias_info is not None and argument.alias_info.is_write
        if not changed or not (argument.kwarg_only or schema.name in OVERWRITES):
            reads.append(value)
    return ordered(reads), list(step.makes)


def ordered(values: Sequence[Any]) -> list[int]:
    """The tensors in nested arguments, the first one first."""
    out: dict[int, None] = {}
    for value in values:
        if isinstance(value, list | tuple):
            out |= dict.fromkeys(ordered(value))
        else:
            found: set[int] = set()
            collect(value, found)
            out |= dict.fromkeys(found)
    return list(out)
