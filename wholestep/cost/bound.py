"""The fused bound: the bytes a step must move if everything but its heavy ops were free.

The rule: every contraction, convolution, attention and embedding (forward and backward) runs once, reads each of its
distinct inputs once and writes each output that is used once. The update reads and writes each parameter, each tensor
of optimizer state and each average once, and writes each low-precision copy once. Everything else is free: pointwise
ops, normalisations, reductions, losses, casts, copies, numbers of the host, the reading of gradients by the update. An
input counts the bytes it has in memory: a broadcast its own, views of one tensor no more than that tensor. An embedding
reads the rows that it is asked for, and its gradient writes no more rows than it is given. What runs per micro-batch
counts once for each.

It is the bound of the step as it was captured and differentiated, in the precision it has, before any transformation:
whatever is done to the program later (products that are joined, a loss in chunks, what is computed again, updates that
wait) changes what moves and not the bound. `ws.compile` notes it at the function of the step, where files keep it.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass
from typing import Any

from ..dialects.step.attention import AttentionBackward, AttentionLike
from ..dialects.step.contraction import Contract
from ..dialects.step.control import MicroBatches, root_of
from ..dialects.step.convolution import ConvolutionLike
from ..dialects.step.grouped import GroupedContract
from ..dialects.step.indexing import Embedding, EmbeddingGrad
from ..ir.builtin import lookup
from ..ir.core import Op, Value
from ..transforms.regions import base

HEAVY = (Contract, GroupedContract, ConvolutionLike, AttentionLike, Embedding, EmbeddingGrad)
#: attribute of the function of a step
NOTED = "step.bound"
#: kinds of arguments that the update reads and writes, and of what it only writes
STATE, COPIES = ("parameter", "optimizer_state", "ema"), ("copy",)


@dataclass(frozen=True, slots=True)
class Bound:
    """Bytes of the heavy ops and of the update; `total` is what `moved / bound` divides by."""

    heavy: int
    state_read: int
    state_written: int

    @property
    def total(self) -> int:
        return self.heavy + self.state_read + self.state_written

    def ratio(self, moved: int) -> float:
        """moved / bound: 1 is a step that moves nothing it could fuse away."""
        return moved / self.total if self.total else float("nan")


def fused_bound(function: Op) -> Bound:
    """The bound of a step that nothing was done to yet: equal ops are one by now, and what nobody uses is gone."""
    return Bound(heavy_bytes(function), *state_bytes(function))


def note_bound(function: Op) -> None:
    """Writes the bound of a step down at its function."""
    function.attributes[NOTED] = list(astuple(fused_bound(function)))


def bound_of(function: Op) -> Bound:
    """The bound that was noted; nothing where there is none, as at a function that is no step."""
    return Bound(*function.attributes.get(NOTED, (0, 0, 0)))


def is_bound(noted: Any) -> bool:
    """Whether what a file says is a bound can be one."""
    return isinstance(noted, list) and len(noted) == 3 and all(type(n) is int and n >= 0 for n in noted)


def heavy_bytes(function: Op) -> int:
    """What the heavy ops of a function must move."""
    total, backwards = 0, set[tuple[Value, ...]]()
    for op in function.regions[0].block:
        if op.definition is MicroBatches:
            total += op.count * heavy_bytes(lookup(root_of(op), op.callee))
        elif issubclass(op.definition, HEAVY):
            read, written = least_bytes(op)
            if issubclass(op.definition, AttentionBackward):  # the gradient of a mask is another result of the same
                read = 0 if op.operands in backwards else read
                backwards.add(op.operands)
            total += read + written
    return total


def least_bytes(op: Op) -> tuple[int, int]:
    """What one heavy op reads and writes if it does so once."""
    read, written = read_bytes(op), sum(r.type.bytes for r in op.results if r.uses)
    if op.definition is Embedding:
        read = min(op.weight.type.bytes, written) + op.indices.type.bytes
    elif op.definition is EmbeddingGrad:
        written = min(op.dy.type.bytes, written)
    return read, written


def read_bytes(op: Op) -> int:
    """What an op reads if it does so once: of each tensor what it sees of it, and no more than there is."""
    seen: dict[Value, int] = {}
    for value in dict.fromkeys(op.operands):
        tensor = base(value)
        seen[tensor] = min(seen.get(tensor, 0) + value.type.bytes, tensor.type.bytes)
    return sum(seen.values())


def state_bytes(function: Op) -> tuple[int, int]:
    """Bytes that the update must read and write, however it is done. Counters are numbers."""
    arguments = function.regions[0].block.arguments
    read = written = 0
    for result in function.attributes.get("res_attrs", ()):
        if "step.donates" not in result:
            continue
        kind, type = result["step.kind"], arguments[result["step.donates"]].type
        if kind in STATE and (type.rank or kind != "optimizer_state"):
            read, written = read + type.bytes, written + type.bytes
        elif kind in COPIES:
            written += type.bytes
    return read, written
