"""What a memory budget decides about: ops of forward, the memory each makes and reads, what running it again costs.

Read off a plan of the step, where views and casts that a kernel does on the way have gone. Every memory that backward
reads is kept from forward, or its op runs again in backward.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ..cost.ledger import Kernel, Ledger, Move
from ..cost.roofline import roofline
from ..dialects.step import StepOp
from ..ir.core import Op
from ..machine.description import Description
from ..plan import Plan
from ..plan.plan import Launch, aligned
from ..transforms.regenerate import EARLY

#: seconds that running any op again costs at least, so that no op runs again for nothing
LEAST_SECONDS = 1e-9
#: launches that no op running again would repeat: numbers of the host, copies beside the kernels
UNPRICED = ("host", "copy", "wait")
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
    """One op of forward: what it costs to run it again, the memories it makes and those it reads."""

    seconds: float
    makes: tuple[int, ...] = ()
    reads: tuple[int, ...] = ()
    #: whether it may run again
    again: bool = True
    #: how it looks, for finding repeated layers; equal for equal ops
    looks: str = ""
    layer: str = ""
    op: Op | None = None


@dataclass(slots=True)
class Graph:
    """The ops of forward in program order."""

    nodes: list[Node] = field(default_factory=list)
    memories: list[Memory] = field(default_factory=list)

    def add(self, node: Node, made: Sequence[Memory]) -> None:
        """Adds an op with what it makes."""
        first = len(self.memories)
        node.makes = tuple(range(first, first + len(made)))
        self.memories += made
        self.nodes.append(node)

    def late_bytes(self, node: int) -> int:
        """Bytes that are kept for backward where the op does not run again."""
        found = [self.memories[m] for m in self.nodes[node].makes]
        return sum(m.bytes for m in found if m.late and not m.fixed)


def graph_of(plan: Plan, planned: Sequence[Op], originals: Mapping[int, Op], machine: Description) -> Graph:
    """The graph of a planned function. planned: its ops by number. originals: the program's ops by the same numbers."""
    late: set[int] = set()
    fixed = {owner(plan, r.buffer) for r in plan.results}
    for launch in plan.launches:
        if launch.provider == "wait":
            continue
        if launch.op < 0:  # a copy into place of what the step gives back
            fixed.update(owner(plan, b) for b in launch.reads)
        elif launch.phase not in EARLY:
            late.update(owner(plan, b) for b in launch.reads)
    launches = [x for x in plan.launches if x.op >= 0 and x.phase in EARLY and x.reads and x.provider not in UNPRICED]
    launches.sort(key=lambda launch: launch.op)
    graph = Graph()
    number: dict[int, int] = {}  # of the memory that a buffer is
    for launch, seconds in zip(launches, price(launches, planned, plan, machine), strict=True):
        op = originals.get(launch.op)
        node = Node(seconds, layer=launch.layer, op=op)
        node.reads = tuple(dict.fromkeys(number[o] for b in launch.reads if (o := owner(plan, b)) in number))
        node.again = op is not None and op.definition.pure and issubclass(op.definition, StepOp)
        used = [b for b in launch.writes if b >= 0]
        sizes = [aligned(plan.buffers[b].type.bytes, plan.alignment) for b in used]
        graph.add(
            node,
            [Memory(len(graph.nodes), size, b in late, b in fixed, b) for b, size in zip(used, sizes, strict=True)],
        )
        number.update(zip(used, node.makes, strict=True))
    read = {m for node in graph.nodes for m in node.reads}
    for index, memory in enumerate(graph.memories):
        if memory.fixed and (memory.late or index in read):  # it is there anyway: nobody should read another
            graph.nodes[memory.node].again = False
    return graph


def owner(plan: Plan, number: int) -> int:
    """The buffer whose value a buffer shows: itself, or what it is a view of."""
    buffer = plan.buffers[number]
    return buffer.of if buffer.share == "view" else number


def price(launches: Sequence[Launch], planned: Sequence[Op], plan: Plan, machine: Description) -> list[float]:
    """Seconds that running each launch again takes at the machine's limits."""
    kernels = []
    for launch in launches:
        op = planned[launch.op]
        made = sum(plan.buffers[b].type.bytes for b in launch.writes if b >= 0)
        sizes = [plan.buffers[b].type.bytes for b in dict.fromkeys(launch.reads)]
        if op.name in LOOK_UPS:
            sizes[0] = min(sizes[0], made)
        kernel = Kernel(op.name, op.phase, op.loc, moves=[Move(0, False, sum(sizes) + made, "")])
        if issubclass(op.definition, StepOp):
            kernel.flops = op.definition.flops(op)
            kernel.matrix = op.definition.precision == "low"
        element = plan.buffers[launch.reads[0]].type.element.text
        kernel.element = element if element in machine.gemm else slowest(machine, element)
        kernels.append(kernel)
    return [max(s, LEAST_SECONDS) for s in roofline(Ledger(kernels, []), machine).kernels]


def slowest(machine: Description, element: str) -> str:
    """The element type whose matrix products stand in for those nobody measured."""
    return min(machine.gemm, key=lambda known: (machine.gemm[known], known), default=element)
