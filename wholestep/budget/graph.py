"""What a memory budget decides about: kernels of forward, the memory each makes and reads, what running it again costs.

Read off a plan of the step, where views and casts that a kernel does on the way have gone. Every memory that backward
reads is kept from forward, or its kernel runs again in backward. A fused kernel whose readers are fused too runs inside
of those: that costs what it reads beyond what they would have read, and nothing is written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ..cost.ledger import Kernel, Ledger, Move
from ..cost.roofline import roofline
from ..dialects.step import StepOp
from ..dialects.step.control import root_of
from ..dialects.step.fused import Fused
from ..ir.builtin import lookup
from ..ir.core import Op
from ..ir.hashing import structural_hash
from ..machine.description import Description
from ..plan import Plan
from ..plan.plan import Launch, aligned
from ..plan.planner import Planned
from ..transforms.regenerate import EARLY
from ..transforms.regions import ANCHORS
from .trials import origins

#: seconds that running any op again costs at least, so that no op runs again for nothing
LEAST_SECONDS = 1e-9
#: launches that no op running again would repeat: numbers of the host, copies beside the kernels
UNPRICED = ("host", "copy", "wait")
#: attributes that differ from layer to layer without a difference in cost
IGNORED = ("phase", "stream")
#: ops that read no more of their first operand than they give
LOOK_UPS = ("step.embedding", "step.gather", "step.index")


@dataclass(slots=True)
class Memory:
    """What an op of forward makes. `late`: backward reads it. `fixed`: the step gives it back, so it stays anyway."""

    node: int
    bytes: int
    late: bool = False
    fixed: bool = False
    buffer: int = -1  # its number in the plan


@dataclass(slots=True)
class Node:
    """One kernel of forward: what it costs to run it again, the memories it makes and those it reads."""

    seconds: float
    makes: tuple[int, ...] = ()
    reads: tuple[int, ...] = ()
    #: whether it may run again, and whether backward has a copy of it anyway (copies.py)
    again: bool = True
    there: bool = False
    #: how it looks, for finding repeated layers; equal for equal ops
    looks: str = ""
    layer: str = ""
    #: the program's ops that it does
    ops: tuple[Op, ...] = ()


@dataclass(slots=True)
class Graph:
    """The kernels of forward in program order."""

    nodes: list[Node] = field(default_factory=list)
    memories: list[Memory] = field(default_factory=list)

    def add(self, node: Node, made: Sequence[Memory]) -> None:
        """Adds a kernel with what it makes."""
        first = len(self.memories)
        node.makes = tuple(range(first, first + len(made)))
        self.memories += made
        self.nodes.append(node)

    def late_bytes(self, node: int) -> int:
        """Bytes that are kept for backward where the kernel does not run again."""
        found = [self.memories[m] for m in self.nodes[node].makes]
        return sum(m.bytes for m in found if m.late and not m.fixed)


def graph_of(planned: Planned, program: Sequence[Op], machine: Description) -> Graph:
    """The graph of a planned function. planned: with marks (`trials.py`). program: the ops that the marks number."""
    plan, ops, marks = planned.plan, list(planned.function.regions[0].block), origins(planned)
    late: dict[int, bool] = {}  # memory that backward reads, and whether fused kernels alone do
    fixed = {owner(plan, r.buffer) for r in plan.results}
    for launch in plan.launches:
        if launch.provider == "wait":
            continue
        if launch.op < 0:  # a copy into place of what the step gives back
            fixed.update(owner(plan, b) for b in launch.reads)
        elif launch.phase not in EARLY:
            for number in {owner(plan, b) for b in launch.reads}:
                late[number] = late.get(number, True) and ops[launch.op].definition is Fused
    launches = [x for x in plan.launches if x.op >= 0 and x.phase in EARLY and x.reads and x.provider not in UNPRICED]
    launches.sort(key=lambda launch: launch.op)
    inside = [goes_inside(plan, launch, ops[launch.op], late) for launch in launches]
    graph = Graph()
    number_of: dict[int, list[int]] = {}  # of the memories that a buffer is: one for each part of a concatenation
    for launch, seconds in zip(launches, price(launches, ops, plan, machine, inside), strict=True):
        op = ops[launch.op]
        done = tuple([program[n] for n in marks[launch.op]])
        if op.definition is not Fused and [o.name for o in done] != [op.name]:
            done = ()  # a part of some op
        node = Node(seconds, ops=done, looks=structural_hash(op, IGNORED), layer=done[0].loc.layer if done else "")
        node.reads = tuple(dict.fromkeys(m for b in launch.reads for m in number_of.get(owner(plan, b), ())))
        node.again = bool(done) and all(o.definition.pure and issubclass(o.definition, StepOp) for o in done)
        used = [b for b in launch.writes if b >= 0]
        sizes = [aligned(plan.buffers[b].type.bytes, plan.alignment) for b in used]
        graph.add(
            node,
            [
                Memory(len(graph.nodes), size, owner(plan, b) in late, owner(plan, b) in fixed, b)
                for b, size in zip(used, sizes, strict=True)
            ],
        )
        for buffer, number in zip(used, node.makes, strict=True):
            number_of.setdefault(owner(plan, buffer), []).append(number)
    read = {m for node in graph.nodes for m in node.reads}
    for index, memory in enumerate(graph.memories):
        if memory.fixed and (memory.late or index in read):  # it is there anyway: nobody should read another
            graph.nodes[memory.node].again = False
    return graph


def goes_inside(plan: Plan, launch: Launch, op: Op, late: dict[int, bool]) -> bool:
    """Whether a kernel that runs again does so inside of its readers."""
    if op.definition is not Fused or has_anchor(op):
        return False
    return all(late.get(owner(plan, b), True) for b in launch.writes if b >= 0)


def has_anchor(op: Op) -> bool:
    """Whether a fused kernel has a product, a convolution or attention inside."""
    return any(inner.name in ANCHORS for inner in lookup(root_of(op), op.callee).regions[0].block)


def owner(plan: Plan, number: int) -> int:
    """The buffer whose value a buffer shows: itself, or what it is a view of."""
    buffer = plan.buffers[number]
    return buffer.of if buffer.share == "view" else number


def price(
    launches: Sequence[Launch], ops: Sequence[Op], plan: Plan, machine: Description, inside: Sequence[bool] = ()
) -> list[float]:
    """Seconds that each launch takes at the machine's limits; for those inside of their readers, what it adds there."""
    kernels = []
    for launch, free in zip(launches, inside or [False] * len(launches), strict=True):
        op = ops[launch.op]
        made = sum(plan.buffers[b].type.bytes for b in launch.writes if b >= 0)
        sizes = [plan.buffers[b].type.bytes for b in dict.fromkeys(launch.reads)]
        if op.name in LOOK_UPS:
            sizes[0] = min(sizes[0], made)
        moved = max(0, sum(sizes) - made) if free else sum(sizes) + made
        kernel = Kernel(op.name, op.phase, op.loc, launches=0 if free else 1, moves=[Move(0, False, moved, "")])
        if issubclass(op.definition, StepOp) and not free:
            kernel.flops = op.definition.flops(op)
            kernel.matrix = has_anchor(op) if op.definition is Fused else op.definition.precision == "low"
        element = plan.buffers[launch.reads[0]].type.element.text
        kernel.element = element if element in machine.gemm else slowest(machine, element)
        kernels.append(kernel)
    return [max(s, LEAST_SECONDS) for s in roofline(Ledger(kernels, []), machine).kernels]


def slowest(machine: Description, element: str) -> str:
    """The element type whose matrix products stand in for those nobody measured."""
    return min(machine.gemm, key=lambda known: (machine.gemm[known], known), default=element)
