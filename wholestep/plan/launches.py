"""A function of the program as flat lists: what is launched, on which values, and which values are views of others.

Follows the reference executor: ops without a reader are left out, constants are made once, absorbed casts are their
operand, arithmetic on single numbers stays on the host. Inner loops of the planner only ever see these lists.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch

from ..backends.absorption import absorb_casts
from ..backends.aten import lower
from ..backends.batched import Batch, batched_region
from ..backends.choose import Choices, Chosen
from ..backends.generated import kernel_of, region_of
from ..backends.host import host_function
from ..backends.kernels import KERNEL, Kernel, Kernels, Operand, Spec, scratch_places
from ..backends.providers import Region
from ..dialects.step import constant_value, ir_dtype, torch_dtype
from ..dialects.step.fused import Fused
from ..dialects.step.layout import Layout
from ..dialects.step.shape import Concat
from ..dialects.step.transfer import Fetch, Offload
from ..dialects.strides import Strides, is_dense, row_major, runs, same_places, strides_in, view_of
from ..errors import WholestepError
from ..ir.core import Op, Value
from ..ir.dialect import OpDef
from ..ir.hashing import structural_hash
from ..ir.types import ScalarType, TensorType
from ..transforms.late_updates import AHEAD
from ..transforms.regions import Piece, body_of
from .joins import Joins, Part, offsets_of, relaid

UI8 = ScalarType("ui8")
ARGUMENT, CONSTANT, HOST, LAUNCH, VIEW, PINNED = "argument", "constant", "host", "launch", "view", "pinned"
#: copies to and from host memory each have a stream beside that of the kernels
STREAMS: dict[type[OpDef], int] = {Offload: 1, Fetch: 2}


@dataclass(slots=True)
class Flat:
    """Values and launches by number. Values: what each is, its type and strides, and the value whose memory it is."""

    kind: list[str] = field(default_factory=list)
    type: list[TensorType] = field(default_factory=list)
    strides: list[Strides] = field(default_factory=list)
    root: list[int] = field(default_factory=list)
    offset: list[int] = field(default_factory=list)  # from the root, in bytes
    maker: list[int] = field(default_factory=list)  # number of the op that makes the value
    made_by: list[int] = field(default_factory=list)  # number of the launch that makes the value

    op: list[int] = field(default_factory=list)
    name: list[str] = field(default_factory=list)
    phase: list[str] = field(default_factory=list)
    layer: list[str] = field(default_factory=list)
    provider: list[str] = field(default_factory=list)
    reads: list[tuple[int, ...]] = field(default_factory=list)
    writes: list[tuple[int, ...]] = field(default_factory=list)  # -1 where nobody reads a result
    over: list[tuple[tuple[int, ...], ...]] = field(
        default_factory=list
    )  # per write: positions in reads it may replace
    stream: list[int] = field(default_factory=list)
    awaits: list[int] = field(default_factory=list)  # of a wait: the copy on another stream it waits for
    body: list[int] = field(default_factory=list)  # number of the plan that a launch of micro-batches runs
    workspace: list[int] = field(default_factory=list)  # the value that is memory for the launch alone
    kernel: list[Kernel | None] = field(default_factory=list)
    raises: list[bool] = field(
        default_factory=list
    )  # whether the launch may fail: for its batch, or for lack of memory

    arguments: int = 0
    ahead: frozenset[int] = frozenset()  # arguments that may change though the rest of the step may still fail
    ready: dict[int, int] = field(default_factory=dict)  # value that a copy on another stream makes -> its wait
    after: dict[int, tuple[int, ...]] = field(default_factory=dict)  # value written in parts -> who writes those
    concats: dict[Op, Strides] = field(default_factory=dict)  # concatenations that are launches, and how they lie
    wholes: dict[Op, int] = field(default_factory=dict)  # concatenations that are written in parts, and their values
    unasked: dict[str, str] = field(default_factory=dict)  # ops whose calls could not be traced, and why
    results: list[tuple[int, int]] = field(default_factory=list)  # value, the argument it replaces or -1
    undecided: list[Region] = field(default_factory=list)  # regions that no provider has been chosen for
    rivals: list[Region] = field(default_factory=list)  # so of ops that stand alone: ATen runs them until it is
    op_by_op: list[Op] = field(default_factory=list)  # regions that ATen is to run: their ops belong into the program

    def value(self, kind: str, type: TensorType, strides: Strides, maker: int, made_by: int = -1) -> int:
        """A new value that has its own memory."""
        number = len(self.kind)
        self.kind.append(kind)
        self.type.append(type)
        self.strides.append(strides)
        self.root.append(number)
        self.offset.append(0)
        self.maker.append(maker)
        self.made_by.append(made_by)
        return number

    def launch(self, op: int, provider: str, reads: tuple[int, ...], kernel: Kernel | None = None) -> int:
        self.op.append(op)
        self.provider.append(provider)
        self.reads.append(reads)
        self.writes.append(())
        self.over.append(())
        self.kernel.append(kernel)
        self.raises.append(False)
        self.name.append("copy")
        self.phase.append("")
        self.layer.append("")
        self.stream.append(0)
        self.awaits.append(-1)
        self.body.append(-1)
        self.workspace.append(-1)
        return len(self.op) - 1

    def bytes(self, value: int) -> int:
        return self.type[value].bytes

    def makers(self, value: int) -> tuple[int, ...]:
        """The launches after which a value is there; -1 for what is there before the step."""
        root = self.root[value]
        if root in self.after:
            return self.after.get(value) or (self.made_by[value],)
        return (self.ready.get(root, self.made_by[root]),)


@dataclass(slots=True)
class Body:
    """What a launch of micro-batches must know of the plan it runs: its number, its arena, its results' strides."""

    number: int
    arena: int
    strides: list[Strides]


@dataclass(slots=True)
class Regions:
    """The bodies of regions, with their loop forms, by symbol, the choices of who runs them, and batches of them.

    Layers are alike, and a function is flattened again once something is chosen: what was worked out is kept.
    """

    bodies: dict[str, tuple[Op, Op | None]]
    choices: Choices
    batches: dict[str, Batch] = field(default_factory=dict)
    known: dict[tuple[object, ...], Region] = field(default_factory=dict)
    kernels: dict[tuple[str, int], Kernel] = field(default_factory=dict)

    def region(self, name: str, operands: list[Spec], device: torch.device, wanted: list[Strides | None]) -> Region:
        """The region of that name on operands that lie so; wanted: how results should lie."""
        key = (name, tuple(operands), tuple(wanted))
        found = self.known.get(key)
        if found is None:
            batch = self.batches.get(name)
            if batch is not None:
                found = batched_region(batch, operands, device, wanted)
            else:
                found = region_of(*self.bodies[name], operands, device, wanted)
            self.known[key] = found
        return found

    def alone(self, op: Op, operands: list[Spec], results: list[Spec], device: torch.device) -> Region:
        """The region that one op is, with results that lie so."""
        key = (structural_hash([op], ("phase",)), tuple(operands), tuple(results))
        found = self.known.get(key)
        if found is None:
            body = body_of(Piece([op], list(op.operands), list(op.results)))
            found = self.known[key] = Region(body, None, tuple(operands), tuple(results), device)
        return found

    def kernel(self, region: Region, chosen: Chosen | None) -> Kernel:
        """What runs a region."""
        key = (region.key, id(chosen))  # (what was chosen stays as long as this does)
        found = self.kernels.get(key)
        if found is None:
            found = self.kernels[key] = kernel_of(region, chosen)
        return found


def flatten(
    function: Op,
    kernels: Kernels,
    numbers: Iterable[int] = (),
    strides: Sequence[Strides | None] | None = None,
    find: Callable[[Op, Sequence[Strides]], Body] | None = None,
    alignment: int = 64,
    regions: Regions | None = None,
    joins: Joins | None = None,
) -> Flat:
    """The launches of an expanded function, by the kernels of one device.

    numbers: arguments that are single numbers on the host. strides: of the arguments, where they do not lie row by row.
    find: the plan of the function that an op of micro-batches names, for operands that lie so. regions: who runs
    regions. joins: concatenations whose parts are to be written in place.
    """
    return _Flattener(function, kernels, numbers, strides, find, alignment, regions, joins).flat


class _Flattener:
    """One walk over the ops, in program order."""

    def __init__(
        self,
        function: Op,
        kernels: Kernels,
        numbers: Iterable[int],
        strides: Sequence[Strides | None] | None,
        find: Callable[[Op, Sequence[Strides]], Body] | None,
        alignment: int,
        regions: Regions | None = None,
        joins: Joins | None = None,
    ):
        self.flat = Flat()
        self.regions, self.joins = regions, joins or Joins()
        self.relaid: dict[tuple[int, tuple[tuple[int, Strides], ...]], Kernel] = {}
        self.kernels, self.device = kernels, kernels.device
        self.find, self.alignment = find, alignment
        self.absorption = absorb_casts(function)
        self.numbers: dict[Value, int] = {}
        block = function.regions[0].block
        assert block.last is not None
        self.places_of_joins = {op: n for n, op in enumerate(block) if op in self.joins.strides}
        on_host = set(numbers)
        for i, argument in enumerate(block.arguments):
            given = strides[i] if strides is not None else None
            kind = HOST if i in on_host else ARGUMENT
            self.numbers[argument] = self.flat.value(kind, argument.type, given or row_major(argument.type.shape), -1)
        self.flat.arguments = len(block.arguments)
        self.flat.ahead = frozenset(function.attributes.get(AHEAD, ()))
        absorbed = self.absorption.casts
        described = function.attributes.get("res_attrs") or [{} for _ in block.last.operands]
        donated = zip(block.last.operands, [words.get("step.donates", -1) for words in described], strict=True)
        self.places = {value: place for value, place in donated if place >= 0}
        for number, op in enumerate(block):
            if op is block.last or not any(r.uses for r in op.results):
                continue
            if op in absorbed:
                self.numbers[op.result] = self.numbers[op.operands[0]]
            elif not op.operands:
                for result in op.results:
                    self.numbers[result] = self.flat.value(CONSTANT, result.type, row_major(result.type.shape), number)
            elif op.definition in STREAMS:
                self.as_transfer(op, number)
            elif not self.on_host(op, number) and not self.as_view(op, number) and not self.as_join(op, number):
                self.as_launch(op, number)
        self.give_back(function, block.last)
        self.flat.unasked = self.kernels.untraced

    def on_host(self, op: Op, number: int) -> bool:
        """Arithmetic on numbers of the host alone."""
        flat, values = self.flat, self.numbers
        if not any(flat.kind[values[v]] == HOST for v in op.operands) or host_function(op) is None:
            return False
        if not all(flat.kind[values[v]] == HOST or constant_value(v) is not None for v in op.operands):
            return False
        reads = tuple(values[v] for v in op.operands if constant_value(v) is None)
        launch = flat.launch(number, "host", reads)
        for result in op.results:
            values[result] = flat.value(HOST, result.type, (), number, launch)
        flat.writes[launch] = tuple(values[r] for r in op.results)
        self.describe(launch, op)
        return True

    def as_view(self, op: Op, number: int) -> bool:
        """The same memory seen otherwise."""
        flat = self.flat
        if not op.definition.views or len(op.operands) != 1:  # type: ignore[attr-defined]
            return False
        base = self.numbers[op.operands[0]]
        if flat.kind[base] == HOST:
            return False
        found = view_of(op, flat.type[base].shape, flat.strides[base])
        if found is None or (op.definition.converts and flat.type[base] is not op.operands[0].type):  # type: ignore[attr-defined]
            return False  # (it does the cast that was absorbed before it)
        strides, offset = found
        element = flat.type[base].element  # not the op's own where a cast before it is absorbed
        value = flat.value(VIEW, TensorType(op.result.type.shape, element), strides, number, flat.made_by[base])
        flat.root[value] = flat.root[base]
        flat.offset[value] = flat.offset[base] + offset * element.bytes
        if base in flat.after:
            flat.after[value] = flat.after[base]
        self.numbers[op.result] = value
        return True

    def as_join(self, op: Op, number: int) -> bool:
        """A concatenation whose parts are in place. Those that are not are copied there."""
        flat, place = self.flat, self.joins.inner.get(op)
        whole = flat.wholes.get(op if place is None else place.join, -1)
        if whole < 0:
            return False
        place = place or Part(op, flat.strides[whole], 0)
        makers: list[int] = []
        for value, further in zip(op.operands, offsets_of(op, place.strides), strict=True):
            found, offset = self.numbers[value], place.offset + further
            if (flat.root[found], flat.offset[found]) == (whole, offset * op.result.type.element.bytes) and same_places(
                value.type.shape, flat.strides[found], place.strides
            ):
                makers += flat.after.get(found) or (flat.made_by[found],)
            elif value.type.size:
                copy = flat.launch(number, "copy", (found,))
                part = self.part(Part(place.join, place.strides, offset), value.type, number, copy)
                flat.writes[copy] = (part,)
                self.describe(copy, op)
                makers.append(copy)
        if place.join is not op:
            whole = self.part(place, op.result.type, number, makers[-1])
        flat.after[whole] = tuple(dict.fromkeys(makers))
        self.numbers[op.result] = whole
        return True

    def part(self, part: Part, type: TensorType, number: int, launch: int) -> int:
        """A value that a launch writes inside of a concatenation, which has memory from its first part on."""
        flat = self.flat
        whole = flat.wholes.get(part.join)
        if whole is None:
            maker, laid = self.places_of_joins[part.join], self.joins.strides[part.join]
            whole = flat.wholes[part.join] = flat.value(LAUNCH, part.join.result.type, laid, maker, launch)
        value = flat.value(VIEW, type, part.strides, number, launch)
        flat.root[value], flat.offset[value] = whole, part.offset * type.element.bytes
        return value

    def as_transfer(self, op: Op, number: int) -> None:
        """A copy to or from host memory on a stream of its own, and the wait for it.

        Until that wait the copy's source is in use, and nothing may read its result.
        """
        flat, source = self.flat, self.numbers[op.operands[0]]
        fetches = op.definition is Fetch
        if fetches != (flat.kind[source] == PINNED) or flat.type[source] is not op.result.type:
            raise WholestepError(f"{op.name} of layer {op.loc.layer or '(none)'} reads {flat.kind[source]} memory")
        if not fetches and not is_dense(op.result.type.shape, flat.strides[source]):
            source = self.compact(op, number, source)
        copy = flat.launch(number, "copy", (source,))
        flat.stream[copy] = STREAMS[op.definition]
        kind = LAUNCH if fetches else PINNED
        made = flat.value(kind, op.result.type, flat.strides[source], number, copy)
        flat.writes[copy] = (made,)
        self.numbers[op.result] = made
        self.describe(copy, op)
        wait = flat.launch(-1, "wait", (made if fetches else source,))
        self.describe(wait, op)
        flat.name[wait] = "wait"
        flat.awaits[wait], flat.ready[made] = copy, wait

    def compact(self, op: Op, number: int, value: int) -> int:
        """A copy of a value that lies row by row: only what fills its memory travels as one stretch."""
        flat, type = self.flat, self.flat.type[value]
        launch = flat.launch(number, "copy", (value,))
        copy = flat.value(LAUNCH, type, row_major(type.shape), number, launch)
        flat.writes[launch] = (copy,)
        self.describe(launch, op)
        return copy

    def as_launch(self, op: Op, number: int) -> None:
        flat, values = self.flat, self.numbers
        used = tuple([bool(r.uses) for r in op.results])
        types = [r.type for r in op.results]
        body: Body | None = None
        kernel: Kernel | None = None
        if op.definition.name == "step.micro_batches":
            assert self.find is not None
            operands, provider = op.operands, "micro_batches"
            body = self.find(op, [flat.strides[values[v]] for v in operands])  # rows of a batch lie as the batch does
            layouts = [
                row_major(t.shape) if taken in ("concat", "mean") else s
                for t, taken, s in zip(types, op.taken, body.strides, strict=True)
            ]
        elif op.definition is Fused:
            operands = op.operands
            provider, kernel = self.as_region(op)
            layouts = [s.strides for s in kernel.specs]
        elif self.chooses_on_host(op):
            operands, provider = op.operands, "choose"
            laid, shape = flat.strides[values[operands[1]]], types[0].shape
            layouts = [laid if is_dense(shape, laid) else row_major(shape)]
        else:
            written = self.absorption.written.get(op)
            if written is not None:
                types = [types[0].with_element(ir_dtype(written))]
            call = lower(op, self.device, written)
            operands, provider = call.operands, "aten"
            asked = [self.operand(op, v) for v in operands]
            specs = [Spec(t.shape, row_major(t.shape), torch_dtype(t.element)) for t in types]
            kernel = self.relay(op, types, used, self.kernels(op, call.run, asked, specs, used))
            layouts = [s.strides for s in kernel.specs]
            provider, kernel = self.by_others(op, asked, kernel)
            if op.definition is Concat:
                flat.concats[op] = layouts[0]
        reads = tuple([values[v] for v in operands])
        launch = flat.launch(number, provider, reads, kernel)
        writes = []
        for result, type, strides, wanted in zip(op.results, types, layouts, used, strict=True):
            value, part = -1, self.joins.parts.get(result)
            if part is not None and wanted and kernel is not None and lies_so(part, result, type, strides):
                value = self.part(part, type, number, launch)
            elif wanted:
                value = flat.value(LAUNCH, type, strides, number, launch)
            if wanted:
                values[result] = value
            writes.append(value)
        flat.writes[launch] = tuple(writes)
        seen: dict[int, list[int]] = {}  # root -> positions of the operands that see its memory
        for position, value in enumerate(reads):
            seen.setdefault(flat.root[value], []).append(position)
        flat.over[launch] = tuple([self.replaceable(launch, i, seen) for i in range(len(writes))])
        flat.raises[launch] = body is not None or self.may_raise(op, kernel)
        space = body.arena if body is not None else self.scratch(launch, writes)
        if body is not None:
            flat.body[launch] = body.number
        if body is not None or space:
            flat.workspace[launch] = flat.value(LAUNCH, TensorType((space,), UI8), (1,), number, launch)
        self.describe(launch, op)

    def relay(self, op: Op, types: Sequence[TensorType], used: Sequence[bool], kernel: Kernel) -> Kernel:
        """The kernel with results that are parts of a concatenation as they lie there, where it can write them so."""
        parts = [
            self.joins.parts.get(r) if u and t is r.type else None
            for r, t, u in zip(op.results, types, used, strict=True)
        ]
        asked = tuple([(i, part.strides) for i, part in enumerate(parts) if part is not None])
        if not asked:
            return kernel
        key = (id(kernel), asked)
        if key not in self.relaid:
            self.relaid[key] = relaid(kernel, dict(asked), self.device)
        return self.relaid[key]

    def by_others(self, op: Op, asked: Sequence[Operand], kernel: Kernel) -> tuple[str, Kernel]:
        """Who runs an op that stands alone, and its kernel: ATen's, unless another was chosen."""
        if self.regions is None or not self.regions.choices.runs_alone(op.name):
            return "aten", kernel
        specs = [o.spec for o in asked if o.spec is not None]
        if len(specs) != len(set(op.operands)):  # (a number of the host, or one tensor twice)
            return "aten", kernel
        region = self.regions.alone(op, specs, kernel.specs, self.device)
        chosen = self.regions.choices.of_one_op(region)
        if chosen is None:
            self.flat.rivals.append(region)
        if chosen is None or chosen.run is None:
            return "aten", kernel
        return chosen.provider, self.regions.kernel(region, chosen)

    def as_region(self, op: Op) -> tuple[str, Kernel]:
        """Who runs a region, and its kernel; what nobody has decided about yet is noted."""
        assert self.regions is not None
        specs = [s for v in op.operands if (s := self.operand(op, v).spec) is not None]
        wanted = [self.wanted(r) for r in op.results]
        region = self.regions.region(op.callee.name, specs, self.device, wanted)
        chosen = self.regions.choices.known.get(region.key)
        if chosen is None:
            self.flat.undecided.append(region)
        elif chosen.run is None:
            self.flat.op_by_op.append(op)
        return "" if chosen is None else chosen.provider, self.regions.kernel(region, chosen)

    def wanted(self, result: Value) -> Strides | None:
        """How a result of a region had best lie: as a part of a concatenation, as every reader copies it by a
        `step.layout`, or as the argument lies that it replaces. None where it does not matter."""
        if result in self.joins.parts:
            return self.joins.parts[result].strides
        orders = {user.order if user.definition is Layout else None for user in result.uses}
        order = orders.pop() if len(orders) == 1 else None
        if order is not None:
            return strides_in(result.type.shape, order)
        place = self.places.get(result)
        if place is None or self.flat.type[place] is not result.type or self.flat.kind[place] != ARGUMENT:
            return None
        return laid if is_dense(result.type.shape, laid := self.flat.strides[place]) else None

    def may_raise(self, op: Op, kernel: Kernel | None) -> bool:
        """Whether a launch may fail: it looks numbers of the batch up, or makes memory. On a GPU neither stops it."""
        if self.device.type != "cpu":
            return op.phase in ("forward", "loss") and op.name == "step.opaque"
        looks_up = any(v.type.element.kind == "int" and v.type.rank for v in op.operands)
        return looks_up or (kernel is not None and kernel.allocates)

    def operand(self, op: Op, value: Value) -> Operand:
        """What a kernel is told of an operand. A number of the host is a Python number or lies in a cell."""
        flat, number = self.flat, self.numbers[value]
        type = flat.type[number]
        if flat.kind[number] == HOST:
            if self.is_number(op, number):
                return Operand(None, "cpu")
            return Operand(Spec((), (), torch_dtype(type.element)), self.device.type)
        return Operand(Spec(type.shape, flat.strides[number], torch_dtype(type.element)), self.device.type)

    def scratch(self, launch: int, writes: list[int]) -> int:
        """Bytes that a kernel needs beside its operands and results, with room for results that nobody reads."""
        kernel = self.flat.kernel[launch]
        return 0 if kernel is None else scratch_places(kernel, [w >= 0 for w in writes], self.alignment)[1]

    def chooses_on_host(self, op: Op) -> bool:
        """Whether a select only has to hand on one of two tensors, by a condition that is a number on the host.

        On a GPU that would be decided when a graph is captured, so there both are read."""
        if op.name != "step.select" or self.device.type != "cpu":
            return False
        condition, *others = [self.numbers[v] for v in op.operands]
        kinds, types = self.flat.kind, self.flat.type
        return kinds[condition] == HOST and all(kinds[v] != HOST and types[v] is op.result.type for v in others)

    def is_number(self, op: Op, value: int) -> bool:
        """Whether the op's ATen call gets a Python number for this number of the host.

        A CUDA graph would keep it as it was when captured: there only what an op says it must have so.
        """
        flat = self.flat
        if self.device.type != "cpu":
            taken = [getattr(op, name) for name in getattr(op.definition, "floats", ())]
            return any(v is not None and self.numbers[v] == value for v in taken)
        if op.definition.name in ("step.axpy", "step.addcmul", "step.addcdiv", "step.lerp"):
            *others, scale = [self.numbers[v] for v in op.operands]
            return value == scale and not any(flat.kind[v] == HOST for v in others)
        takes = getattr(op.definition, "takes_numbers", False)
        return takes and any(flat.kind[self.numbers[v]] != HOST for v in op.operands)

    def describe(self, launch: int, op: Op) -> None:
        flat = self.flat
        flat.name[launch] = op.definition.name
        flat.phase[launch] = op.phase
        flat.layer[launch] = op.loc.layer

    def replaceable(self, launch: int, index: int, seen: dict[int, list[int]]) -> tuple[int, ...]:
        """Positions of operands that a result may be written over, once nobody else reads their memory.

        The operand must fill its memory and lie as the result will; another operand of the launch that sees the same
        memory in another way would read what has been written already.
        """
        flat = self.flat
        reads, write, kernel = flat.reads[launch], flat.writes[launch][index], flat.kernel[launch]
        if write < 0 or flat.root[write] != write:
            return ()
        if kernel is not None:
            candidates = sorted(kernel.over[index])
        else:
            candidates = [1, 2] if flat.provider[launch] == "choose" else []
        type, places = flat.type[write], self.lies(launch, write)
        found = []
        for position in candidates:
            value = reads[position]
            root = flat.root[value]
            if (
                flat.type[value].element is type.element
                and flat.kind[root] in (LAUNCH, ARGUMENT)
                and flat.offset[value] == 0
                and flat.bytes(root) == type.bytes
                and self.lies(launch, value) == places
                and self.alone(launch, value, candidates, seen[root])
            ):
                found.append(position)
        return tuple(found)

    def alone(self, launch: int, value: int, candidates: Sequence[int], positions: Sequence[int]) -> bool:
        """Whether every operand that sees the memory of `value`, at those positions, sees it alike and may be written
        over too."""
        flat, reads = self.flat, self.flat.reads[launch]
        element, places = flat.type[value].element, self.lies(launch, value)
        return all(
            position in candidates
            and flat.type[v := reads[position]].element is element
            and self.lies(launch, v) == places
            for position in positions
        )

    def lies(self, launch: int, value: int) -> tuple[tuple[int, int], ...]:
        """What is equal for values of a launch that may take each other's memory: where elements are, in order. PyTorch
        goes by shapes as well, and refuses a result that lies alike in another shape."""
        shape, strides, kernel = self.flat.type[value].shape, self.flat.strides[value], self.flat.kernel[launch]
        if kernel is not None and all(step.kind == KERNEL for step in kernel.steps):
            return runs(shape, strides)
        return tuple((size, 0 if size == 1 else stride) for size, stride in zip(shape, strides, strict=True))

    def give_back(self, function: Op, last: Op) -> None:
        """Notes the results. One that is an old value of an argument about to be replaced is copied out of its way."""
        flat = self.flat
        described = function.attributes.get("res_attrs") or [{} for _ in last.operands]
        replaced = [a.get("step.donates", -1) for a in described]
        lost = set(replaced)
        for value, argument in zip([self.numbers[v] for v in last.operands], replaced, strict=True):
            root = flat.root[value]
            if root in lost and flat.kind[root] == ARGUMENT and value != argument:
                type = flat.type[value]
                launch = flat.launch(-1, "copy", (value,))
                copy = flat.value(LAUNCH, type, row_major(type.shape), -1, launch)
                flat.writes[launch] = (copy,)
                value = copy
            flat.results.append((value, argument))


def lies_so(part: Part, result: Value, type: TensorType, strides: Strides) -> bool:
    """Whether a result of this type and with these strides is what a concatenation has as its part."""
    return type is result.type and same_places(type.shape, strides, part.strides)
