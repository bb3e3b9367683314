"""From a program to its plan: flat launches, order, sharing, addresses."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from math import prod

import torch

from ..backends.batched import batch_of
from ..backends.choose import Choices
from ..backends.generated import region_of
from ..backends.host import host_function
from ..backends.kernels import NEW, Kernel, Kernels, Spec
from ..backends.providers import Region
from ..dialects.step import torch_dtype
from ..dialects.step.control import root_of
from ..dialects.step.fused import Fused
from ..dialects.strides import Strides, row_major
from ..errors import InputError, WholestepError
from ..ir.builtin import lookup
from ..ir.collector import collector_paused
from ..ir.core import Op, Value
from ..ir.hashing import program_hash
from ..transforms.around import divide
from ..transforms.batch import WAIT, Batches, batch, unbatch
from ..transforms.expand import expanded
from ..transforms.fuse import Fusion, dissolve, fuse
from ..transforms.fusion_wishes import Wishes
from ..transforms.late_updates import BESIDE, KEPT
from ..transforms.regions import HELD, Bodies, Piece, body_of
from ..transforms.side_updates import runs_beside
from .ahead import ahead_launches, before_use, beside_forward
from .aliases import Assignment, assign
from .joined import Joined
from .joins import Joins, held_back
from .launches import CONSTANT, HOST, PINNED, VIEW, Body, Flat, Regions, flatten
from .liveness import Graph, build_graph
from .overlap import link_slowdown, overlapped, waits_of
from .place import Placement
from .plan import Buffer, Launch, Plan, Returned, aligned
from .remembered import Memory
from .side import add_waits, hurried, keep_arguments, released, side_launches

#: bytes that addresses are multiples of
ALIGNMENT = {"cpu": 64, "cuda": 256}
#: how often a function is flattened until ATen takes no part any more, and until the rest is run op by op
ATTEMPTS, MOST = 6, 100
_LIFETIMES = {
    "parameter": "param", "optimizer_state": "opt_state", KEPT: "grad", "batch": "batch", "constant": "constant",
}  # fmt: skip
_NUMBERS = ("hyper", "fresh", "random_key")
_EARLY, _LATE, _END = ("forward", "loss"), ("backward", "clip", "update"), ("clip", "update")


@dataclass(slots=True)
class Planned:
    """A plan with what runs it: the function its op numbers count in, and a kernel per launch that has one."""

    plan: Plan
    function: Op
    kernels: list[Kernel | None]
    bodies: list[Planned]
    #: what was fused, where providers other than ATen compete
    fusion: Fusion | None = None


def plan_function(
    function: Op,
    device: torch.device | str = "cpu",
    numbers: Iterable[int] = (),
    *,
    strides: Sequence[Strides | None] | None = None,
    reorder: bool = True,
    omnimalloc: bool = True,
    whole_updates: bool | None = None,
) -> tuple[Plan, Op]:
    """The plan of a function, and the expanded copy of it that the plan's op numbers count in.

    numbers: arguments that are single numbers on the host. strides: of arguments that do not lie row by row.
    reorder=False keeps program order; omnimalloc=False uses our own placers alone. whole_updates: the state changes
    only once nothing else is left to do, so that a step that fails leaves it as it was; by default so on a CPU.
    """
    planned = planned_function(function, device, numbers, strides, reorder, omnimalloc, whole_updates)
    return planned.plan, planned.function


def planned_function(
    function: Op,
    device: torch.device | str = "cpu",
    numbers: Iterable[int] = (),
    strides: Sequence[Strides | None] | None = None,
    reorder: bool = True,
    omnimalloc: bool = True,
    whole_updates: bool | None = None,
    choices: Choices | None = None,
    wishes: Wishes | None = None,
    kernels: Kernels | None = None,
    pieces: Bodies | None = None,
) -> Planned:
    """As `plan_function`, with the kernels. choices: who runs regions; without it every op is run by ATen.

    wishes: what a user asks of fusion. kernels, pieces: what was traced and lowered for other plans of this device.
    """
    with collector_paused():
        where = torch.device(device)
        if where.type not in ALIGNMENT:
            raise WholestepError(f"no plan can be made for {where.type}; devices are {', '.join(ALIGNMENT)}")
        whole = where.type == "cpu" if whole_updates is None else whole_updates
        known, lowered = kernels or Kernels(where), Bodies() if pieces is None else pieces
        asked = wishes or Wishes()
        planner = _Planner(root_of(function), where, known, reorder, omnimalloc, whole, choices, asked, lowered)
        return planner.plan(planner.expanded(function), numbers, strides)


@dataclass(slots=True)
class _Planner:
    """Plans a function and those it runs per micro-batch; calls that are alike are traced once for all of them."""

    root: Op  # the module that symbols are found in
    device: torch.device
    kernels: Kernels
    reorder: bool
    omnimalloc: bool
    whole_updates: bool
    choices: Choices | None = None
    wishes: Wishes = field(default_factory=Wishes)
    pieces: Bodies = field(default_factory=Bodies)

    @property
    def alignment(self) -> int:
        return ALIGNMENT[self.device.type]

    @property
    def memory(self) -> Memory:
        """What earlier compiles have found."""
        return Memory(None if self.choices is None else self.choices.objects)

    def expanded(self, function: Op) -> Op:
        """What is planned: ops that ATen cannot run are expanded; by general rules where kernels are generated."""
        return expanded(function, self.device if self.choices is None else None)

    def seconds(
        self, pieces: Sequence[Piece], strides: Callable[[Value], tuple[int, ...]] | None = None
    ) -> list[float]:
        """Measured seconds of pieces on operands that lie so, or row by row."""
        assert self.choices is not None
        return self.choices.times([self.region(piece, strides) for piece in pieces])

    def expect(self, pieces: Sequence[Piece], strides: Callable[[Value], tuple[int, ...]]) -> None:
        """Notes pieces whose kernels are compiled while others are measured: these may be measured later."""
        assert self.choices is not None
        self.choices.expected = [self.region(piece, strides) for piece in pieces]

    def region(self, piece: Piece, strides: Callable[[Value], tuple[int, ...]] | None) -> Region:
        """A piece on operands that lie so, or row by row."""
        body = self.pieces(piece)
        function = body.function if body.function is not None else body_of(piece)
        laid = [row_major(v.type.shape) if strides is None else strides(v) for v in piece.inputs]
        types = [v.type for v in piece.inputs]
        specs = [Spec(t.shape, s, torch_dtype(t.element)) for t, s in zip(types, laid, strict=True)]
        return region_of(function, body.kernel, specs, self.device)

    def follows(self, piece: Piece, strides: Callable[[Value], tuple[int, ...]] | None = None) -> bool:
        """Whether somebody runs a wide product with what follows it."""
        assert self.choices is not None
        return bool(self.choices.followers(self.region(piece, strides)))

    def flatten(
        self,
        function: Op,
        numbers: Iterable[int],
        strides: Sequence[Strides | None] | None,
        find: Callable[[Op, Sequence[Strides]], Body],
        alignment: int,
    ) -> tuple[Flat, Fusion | None]:
        """The launches. Regions that nothing is known of are decided about; those that ATen runs are taken apart."""
        numbers = list(numbers)

        def flat_with(regions: Regions | None, joins: Joins) -> Flat:
            return flatten(function, self.kernels, numbers, strides, find, alignment, regions, joins)

        joined = Joined(function, self.device, flat_with, alignment, self.whole_updates, self.memory)
        if self.choices is None:
            return joined.within_peak(joined), None
        takes, held = self.choices.takes, held_back(function, self.device)
        for op, copied in held.items():
            op.attributes[HELD] = copied
        fusion = fuse(
            function,
            numbers,
            self.pieces,
            self.wishes.forbid,
            lambda op: host_function(op) is not None,
            lambda op: HELD in op.attributes or takes(op),
            recipe=self.wishes.recipe,
            force=self.wishes.force,
            seconds=self.seconds if self.choices.measure and self.device.type == "cuda" else None,
            products=self.choices.products,
            kept=self.choices.objects,
            follows=self.follows if self.choices.measure and self.choices.followers() else None,
            attends=any(p.attends for p in self.choices.providers),
            expect=self.expect if self.choices.ahead is not None else None,
        )
        root = root_of(function)
        sites = release(function, fusion) if held else {}
        bodies = {name: (lookup(root, name), body.kernel) for name, body in fusion.bodies.items()}
        batches = Batches()
        if any(p.batching for p in self.choices.providers):
            batches = batch(function, fusion, None if self.whole_updates else WAIT, self.wishes.forbid)
        batched = {name: batch_of([bodies[part] for part in parts]) for name, parts in batches.parts.items()}
        regions = Regions(bodies, self.choices, batched)
        flat = joined.within_peak(lambda: self.decided(function, joined, regions, fusion, batches), regions)
        fusion.apart |= {sites[op]: why for op, why in joined.joins.refused.items() if op in sites}
        return flat, fusion

    def decided(self, function: Op, joined: Joined, regions: Regions, fusion: Fusion, batches: Batches) -> Flat:
        """The launches once every region has its provider."""
        assert self.choices is not None
        attempt = -1
        while True:
            flat, attempt = joined(regions), attempt + 1
            single = [r for r in flat.undecided if not r.parts]
            if flat.undecided and attempt >= MOST:
                self.take_apart(function, regions, fusion, batches, set(function.regions[0].block))
            elif single and attempt < ATTEMPTS:
                self.choices.decide([*flat.rivals, *single], [r for r in flat.undecided if r.parts])
            elif single:  # late without ATen: layouts keep changing with what it runs
                self.choices.decide(single, aten=False)
            elif flat.op_by_op:
                self.take_apart(function, regions, fusion, batches, set(flat.op_by_op))
            elif flat.undecided:  # batches come last: they read what the others make, as it lies in the end
                self.choices.decide(flat.undecided)
            elif flat.rivals:
                self.choices.decide(flat.rivals)
            else:
                return flat

    def take_apart(self, function: Op, regions: Regions, fusion: Fusion, batches: Batches, lost: set[Op]) -> None:
        """Puts the ops of regions that ATen runs back into the program; batches and kernels around an anchor fall into
        regions first."""
        unbatch(function, fusion, batches, lost.__contains__)
        parts, root = divide(function, fusion, self.pieces, lost.__contains__), root_of(function)
        regions.bodies |= {name: (lookup(root, name), part.kernel) for name, part in parts.items()}
        dissolve(function, lost.__contains__)

    def plan(
        self, function: Op, numbers: Iterable[int] = (), strides: Sequence[Strides | None] | None = None
    ) -> Planned:
        bodies: list[Planned] = []
        known: dict[tuple[Op, tuple[Strides, ...]], Body] = {}

        def find(op: Op, given: Sequence[Strides]) -> Body:
            key = (op, tuple(given))
            if key not in known:
                body = self.plan(self.expanded(lookup(self.root, op.callee)), strides=given)
                bodies.append(body)
                laid = [body.plan.buffers[r.buffer].strides for r in body.plan.results]
                known[key] = Body(len(bodies) - 1, body.plan.arena, laid)
            return known[key]

        alignment = self.alignment
        flat, fusion = self.flatten(function, numbers, strides, find, alignment)
        used = sorted({number for number in flat.body if number >= 0})  # operands may have lain otherwise before
        bodies = [bodies[number] for number in used]
        flat.body = [used.index(number) if number >= 0 else -1 for number in flat.body]
        graph = build_graph(flat, alignment, self.whole_updates)
        if self.reorder:
            name, order, found, program_peak = self.memory.order(graph, flat.phase)
        else:
            name, order = "program", list(range(len(flat.op)))
            found = assign(graph, order)
            program_peak = found.peak
        streams = _Streams(flat, graph, function, self)
        order, found = streams.issued(order, found)
        placement = self.memory.placement(found, alignment, self.omnimalloc)
        if name != "program" and placement.size > program_peak:  # gaps may have eaten what the order gained
            program = list(range(len(graph.reads)))
            program, plain = streams.issued(program, assign(graph, program))
            other = self.memory.placement(plain, alignment, self.omnimalloc)
            if other.size < placement.size:
                name, order, found, placement = "program", program, plain, other
        graph = streams.graph
        kinds, names = argument_words(function)
        plan = Plan(
            function.attributes["sym_name"],
            program_hash(function, root_of(function)),
            self.device.type,
            alignment,
            name,
            placement.placer,
            placement.size,
            found.peak,
            program_peak,
            bodies=[b.plan for b in bodies],
            assumed=sorted(flat.unasked),
        )
        fill(plan, flat, graph, order, found, placement, kinds)
        for buffer, argument_name in zip(plan.buffers, names, strict=False):
            buffer.name = argument_name
        kernels = [flat.kernel[launch] for launch in order]
        kernels += [None] * (len(plan.launches) - len(kernels))
        return Planned(plan, function, kernels, bodies, fusion)


class _Streams:
    """What runs beside the kernels' stream: copies to and from the host, and updates where a function asks for it."""

    def __init__(self, flat: Flat, graph: Graph, function: Op, planner: _Planner):
        self.flat, self.graph, self.without_waits = flat, graph, graph
        self.copies, self.hurry = any(flat.stream), planner.reorder
        self.slowdown = link_slowdown(planner.device.type) if self.copies else 1.0
        self.waits: dict[int, int] = {}
        #: updates of the step before
        self.ahead = ahead_launches(flat)
        beside = bool(self.ahead) and BESIDE in function.attributes
        if not beside and not runs_beside(function):
            return
        if planner.whole_updates:
            raise InputError(
                "side-updates runs updates beside backward on a second stream of a GPU; on a CPU nothing changes "
                "before the whole step has been computed. Leave it out of force= and of the recipe here"
            )
        side = self.ahead if beside else side_launches(flat, list(function.regions[0].block))
        self.waits = add_waits(flat, side)
        self.graph = build_graph(flat, planner.alignment)
        for each in (self.graph, self.without_waits):
            keep_arguments(flat, each, side)

    def issued(self, order: list[int], found: Assignment) -> tuple[list[int], Assignment]:
        """The order with other streams' launches issued early and waited for late, and who has which memory then."""
        if self.copies:
            order = overlapped(self.flat, self.without_waits, order, self.slowdown)
            found = assign(self.without_waits, order)
        if self.ahead and self.waits:
            order = beside_forward(self.flat, self.without_waits, order, self.ahead, self.waits)
            return order, assign(self.graph, order)
        if self.ahead:
            return before_use(self.flat, self.graph, order, found, self.ahead)
        if self.waits:
            if self.hurry:
                order = hurried(self.flat, self.without_waits, order, list(self.waits))
                found = assign(self.without_waits, order)
            order = released(self.flat, self.without_waits, order, found, self.waits)
            found = assign(self.graph, order)
        return order, found


def release(function: Op, fusion: Fusion) -> dict[Op, str]:
    """Makes concatenations that were kept out of kernels ops of the function again; gives their sites."""
    root, block = root_of(function), function.regions[0].block

    def is_held(op: Op) -> bool:
        return any(HELD in inner.attributes for inner in lookup(root, op.callee).regions[0].block)

    for op in block:  # (a recipe has them in no kernel)
        op.attributes.pop(HELD, None)
    held = [op for op in block if op.definition is Fused and is_held(op)]
    names = {op: site for op, (site, *_) in fusion.kernels if op in held}
    fusion.kernels = [kernel for kernel in fusion.kernels if kernel[0] not in names]
    fusion.apart |= dict.fromkeys(names.values(), "its parts are written where it lies, so that it costs nothing")
    dissolve(function, lambda op: op in names)
    found = [op for op in block if HELD in op.attributes]
    for op in found:
        del op.attributes[HELD]
    return dict(zip(found, [names[op] for op in held], strict=True))


def argument_words(function: Op) -> tuple[list[str], list[str]]:
    """What each argument is, by the kinds of slots, and its name; empty where the function does not say."""
    count = len(function.regions[0].block.arguments)
    described = function.attributes.get("arg_attrs") or [{}] * count
    return [a.get("step.kind", "") for a in described], [a.get("step.name", "") for a in described]


def fill(
    plan: Plan,
    flat: Flat,
    graph: Graph,
    order: list[int],
    found: Assignment,
    placement: Placement,
    kinds: list[str],
) -> None:
    """Writes down buffers, launches and results."""
    plan.buffers = buffers_of(flat, graph, found, placement, kinds, plan.alignment)
    for launch, waits in zip(order, waits_of(flat, order), strict=True):
        reads, writes = flat.reads[launch], flat.writes[launch]
        pairs = tuple(
            [
                (w, p)
                for w, write in enumerate(writes)
                if write >= 0 and found.took[write]
                for p, value in enumerate(reads)
                if flat.root[value] == found.old[write]
            ]
        )
        plan.launches.append(
            Launch(
                flat.op[launch],
                reads,
                writes,
                flat.provider[launch],
                pairs,
                flat.stream[launch],
                flat.name[launch],
                flat.phase[launch],
                flat.layer[launch],
                flat.body[launch],
                flat.workspace[launch],
                0 if (kernel := flat.kernel[launch]) is None else made_inside(kernel),
                waits,
            )
        )
    give_back(plan, flat, graph, found)
    plan.note_uses()


def made_inside(kernel: Kernel) -> int:
    """The most bytes of results that one of a kernel's operators makes by itself, wherever they are copied to."""
    made = [[kernel.memory[n] for n in step.makes if n >= 0] for step in kernel.steps if step.kind == NEW]
    return max([sum(prod(spec.shape) * spec.dtype.itemsize for spec in specs) for specs in made], default=0)


def give_back(plan: Plan, flat: Flat, graph: Graph, found: Assignment) -> None:
    """Notes the results, and copies to their place those that could not be made there."""
    for value, argument in flat.results:
        way = "output"
        if flat.kind[value] == HOST:
            way = "host"
        elif argument >= 0 and value == argument:
            way = "same"
        elif argument >= 0:
            way = "in_place" if graph.target[value] == argument and found.place[value] == argument else "copy"
        if way == "copy":
            layer = flat.layer[flat.made_by[value]] if flat.made_by[value] >= 0 else ""
            old = plan.buffers[argument]
            new = Buffer(old.type, old.strides, "external", old.lifetime, "donated", argument, found.holder[argument])
            plan.launches.append(
                Launch(-1, (value,), (len(plan.buffers),), "copy", name="copy", phase="update", layer=layer)
            )
            value = len(plan.buffers)
            plan.buffers.append(new)
        plan.results.append(Returned(value, argument, way))


def buffers_of(
    flat: Flat, graph: Graph, found: Assignment, placement: Placement, kinds: list[str], alignment: int
) -> list[Buffer]:
    """One buffer per value, with its memory. What waits in host memory lies there side by side."""
    arguments, pinned = graph.arguments, 0
    lifetimes = lifetimes_of(flat, graph, found, kinds)
    owner: dict[int, int] = {}  # place of the arena -> the first value there
    out: list[Buffer] = []
    for value, kind in enumerate(flat.kind):
        root = flat.root[value]
        place, root_kind = found.place[root], flat.kind[root]
        buffer = Buffer(flat.type[value], flat.strides[value], "arena", lifetimes[root])
        buffer.op = flat.maker[value]
        buffer.argument = value if value < arguments else -1
        if root_kind == HOST:
            buffer.space = "host"
        elif root_kind == PINNED:
            buffer.space, buffer.offset = "pinned", pinned
            pinned += aligned(flat.bytes(value), alignment)
        elif root_kind == CONSTANT:
            buffer.space = "constant"
            buffer.base = root if value != root else -1
        elif place < arguments:
            buffer.space = "external"
            buffer.base = place if value != place else -1
        elif place in owner:
            buffer.base = owner[place]
        else:
            owner[place] = value
            buffer.offset = placement.offsets[place - arguments]
        if kind == VIEW:
            buffer.share, buffer.offset, buffer.of = "view", flat.offset[value], root
        elif buffer.base >= 0:
            buffer.share, buffer.of = "in_place" if found.took[value] else "donated", found.old[value]
        out.append(buffer)
    return out


def lifetimes_of(flat: Flat, graph: Graph, found: Assignment, kinds: list[str]) -> list[str]:
    """Why each memory is there: what it is an argument for, or which phases write and read it."""
    outputs = {flat.root[value] for value, argument in flat.results if argument < 0}
    copied = {flat.root[value] for value, argument in flat.results if argument >= 0}
    spaces = set(flat.workspace)
    out: list[str] = []
    for value, kind in enumerate(flat.kind):
        place = found.place[value]
        if value < graph.arguments:
            slot = kinds[value]
            out.append("batch" if slot in _NUMBERS else _LIFETIMES.get(slot, "state" if slot else "batch"))
        elif kind == CONSTANT:
            out.append("constant")
        elif kind == PINNED:
            out.append("activation")
        elif 0 <= place < graph.arguments:
            out.append(out[place])
        elif value in outputs:
            out.append("output")
        elif value in spaces:
            out.append("workspace")
        else:
            made = flat.phase[flat.made_by[value]] if flat.made_by[value] >= 0 else ""
            read = {flat.phase[i] for i in graph.readers[value]}
            if value in copied:
                read.add("update")
            if made in _EARLY and not read.isdisjoint(_LATE):
                out.append("activation")
            elif made == "backward" and not read.isdisjoint(_END):
                out.append("grad")
            else:
                out.append("transient")
    return out
