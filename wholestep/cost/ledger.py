"""The ledger: the bytes each kernel of a step reads and writes, with the cause, layer and phase of every one of them.

A kernel reads each distinct operand once and writes each result that somebody uses once. Every (kernel, operand or
result) is one `Move` with one cause, so sums by cause, layer and phase all add up to the same total.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from ..dialects.step.attention import AttentionLike
from ..dialects.step.base import StepOp
from ..dialects.step.contraction import Contract
from ..dialects.step.control import MicroBatches
from ..dialects.step.convolution import ConvolutionLike
from ..dialects.step.indexing import Embedding, EmbeddingGrad, Gather, Index
from ..dialects.step.sources import Random
from ..ir.core import Location, Op, Value
from .storage import Executed, Storage, argument_kinds

#: why bytes move
CAUSES = {
    "weights": "parameters, buffers and low-precision copies",
    "casts": "casts between float types that run on their own",
    "gradients": "gradients of parameters, from backward to the update",
    "optimizer state": "moments, averages, loss scale",
    "saved activations": "made in forward or loss, read in backward or later",
    "transients": "everything else that is made and read within the step",
    "masks": "booleans, random draws, and what attention takes as its mask",
    "batch": "what the step is given",
    "workspace": "tensors fixed at compile time, copies that a kernel makes of its operands",
    "communication": "between devices",
}
KIND_CAUSES = {
    "parameter": "weights", "buffer": "weights", "copy": "weights", "optimizer_state": "optimizer state",
    "ema": "optimizer state", "scaler": "optimizer state", "hyper": "optimizer state", "fresh": "optimizer state",
    "batch": "batch", "random_key": "batch", "constant": "workspace",
}  # fmt: skip
#: the ops of the fused bound
ANCHORS = (Contract, ConvolutionLike, AttentionLike, Embedding, EmbeddingGrad)
BEFORE, AFTER = ("forward", "loss"), ("backward", "clip", "update")
PHASES = (*BEFORE, *AFTER)
COPY = "copy into place"
IN_PLACE = "in place"


@dataclass(slots=True)
class Buffer:
    """Memory that kernels read and write. It is in use from kernel `first` to kernel `last` of the ledger's list."""

    name: str
    type: str
    bytes: int
    cause: str
    kind: str = ""  # of an argument
    producer: int = -1  # the kernel that makes it; -1 for an argument or a tensor fixed at compile time
    first: int = 0
    last: int = 0


@dataclass(slots=True)
class Move:
    """Bytes that one run of a kernel reads from, or writes to, one buffer. `inside`: it is no operand or result."""

    buffer: int
    written: bool
    bytes: int
    cause: str
    inside: bool = False


@dataclass(slots=True)
class Kernel:
    """One call of a provider, run `times` times per step."""

    name: str
    phase: str
    loc: Location
    times: int = 1
    launches: int = 1
    flops: int = 0
    element: str = ""
    #: a matrix product, convolution or attention, priced by the machine's rate for such
    matrix: bool = False
    anchor: bool = False
    moves: list[Move] = field(default_factory=list)

    @property
    def bytes(self) -> int:
        """Per step."""
        return self.times * sum(m.bytes for m in self.moves)


@dataclass(slots=True)
class Ledger:
    """All kernels of one step, in the order they run, and the memory between them."""

    kernels: list[Kernel]
    buffers: list[Buffer]
    #: what the update must read and write, however it is done: (bytes read, bytes written)
    state: tuple[int, int] = (0, 0)

    @property
    def read(self) -> int:
        return sum(k.times * m.bytes for k in self.kernels for m in k.moves if not m.written)

    @property
    def written(self) -> int:
        return sum(k.times * m.bytes for k in self.kernels for m in k.moves if m.written)

    @property
    def total(self) -> int:
        """Bytes read and written per step."""
        return sum(k.bytes for k in self.kernels)

    @property
    def flops(self) -> int:
        return sum(k.times * k.flops for k in self.kernels)

    @property
    def launches(self) -> int:
        return sum(k.launches for k in self.kernels)

    def by(self, key: Callable[[Kernel, Move], str]) -> dict[str, tuple[int, int]]:
        """Bytes (read, written) per step, grouped; the largest group first."""
        found: dict[str, list[int]] = {}
        for kernel in self.kernels:
            for move in kernel.moves:
                found.setdefault(key(kernel, move), [0, 0])[move.written] += kernel.times * move.bytes
        return {k: (r, w) for k, (r, w) in sorted(found.items(), key=lambda item: (-sum(item[1]), item[0]))}

    def by_cause(self) -> dict[str, tuple[int, int]]:
        return self.by(lambda kernel, move: move.cause)

    def by_phase(self) -> dict[str, tuple[int, int]]:
        found = self.by(lambda kernel, move: kernel.phase)
        return {phase: found[phase] for phase in (*PHASES, "other") if phase in found}

    def by_layer(self) -> dict[str, tuple[int, int]]:
        return self.by(lambda kernel, move: kernel.loc.layer or "(no layer)")

    def by_layer_group(self) -> dict[str, tuple[int, int]]:
        return self.by(lambda kernel, move: group_of(kernel))

    def by_kernel(self) -> dict[str, tuple[int, int]]:
        return self.by(lambda kernel, move: kernel.name)


def layer_group(layer: str) -> str:
    """A layer with the numbers of repeated blocks left out: `h.3.attn` and `h.7.attn` are one group."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.|$)", "*", layer) or "(the model itself)"


def group_of(kernel: Kernel) -> str:
    return layer_group(kernel.loc.layer) if kernel.loc.layer else "(no layer)"


def make_ledger(executed: Executed) -> Ledger:
    """The ledger of a whole step."""
    writer = Writer()
    writer.function(executed)
    writer.finish()
    return Ledger(writer.kernels, writer.buffers, writer.state)


class Writer:
    """Walks the functions of a step in the order they run."""

    def __init__(self) -> None:
        self.kernels: list[Kernel] = []
        self.buffers: list[Buffer] = []
        self.state = (0, 0)

    def function(self, executed: Executed) -> None:
        """The step's own function."""
        function = executed.function
        storage, block = Storage(executed), function.regions[0].block
        kinds = argument_kinds(function)
        assert block.last is not None
        donated = donations(function)
        hints = {storage.root[v]: KIND_CAUSES[kinds[target]] for v, target in donated if kinds[target] in KIND_CAUSES}
        place = {value: self.argument(value, kind) for value, kind in zip(block.arguments, kinds, strict=True)}
        self.body(executed, storage, place, hints, times=1)
        for value in block.last.operands:
            self.keep(storage, place, value)
        launches = 1
        for value, target in donated:
            argument = block.arguments[target]
            if argument in storage.host:
                continue
            self.note_state(kinds[target], argument.type.bytes)
            if storage.root[value] is argument:
                continue
            if executed.in_place and fits_in_place(storage, value, argument):
                self.buffers[place[storage.root[value]]].kind = IN_PLACE
                continue
            cause = KIND_CAUSES.get(kinds[target], "transients")
            made_by = storage.root[value].op
            copy = Kernel(COPY, "update", made_by.loc if made_by is not None else Location(), launches=launches)
            copy.moves = [
                Move(place[storage.root[value]], False, storage.bytes[value], cause),
                Move(place[argument], True, argument.type.bytes, cause),
            ]
            self.kernels.append(copy)
            launches = 0  # all copies are one call

    def argument(self, value: Value, kind: str) -> int:
        cause = "masks" if value.type.element.kind == "bool" else KIND_CAUSES.get(kind, "batch")
        return self.buffer(
            Buffer(value.name or f"argument {value.index}", value.type.text, value.type.bytes, cause, kind)
        )

    def buffer(self, buffer: Buffer) -> int:
        self.buffers.append(buffer)
        return len(self.buffers) - 1

    def body(
        self, executed: Executed, storage: Storage, place: dict[Value, int], hints: Mapping[Value, str], times: int
    ) -> None:
        """The kernels of one function; `place` has the buffers of its arguments and gains those of its values."""
        roles = roles_of(storage, hints)
        for op in storage.kernels:
            for value in op.operands:
                root = storage.root[value]
                if root not in place:  # a tensor fixed at compile time
                    place[root] = self.buffer(
                        Buffer("fixed", root.type.text, storage.bytes[root], roles[root], "fixed")
                    )
            if op.definition is MicroBatches:
                self.micro_batches(op, executed.bodies[op], storage, place, roles)
                continue
            kernel = Kernel(op.name.removeprefix("step."), op.phase or "other", op.loc, times, times)
            if issubclass(op.definition, StepOp):
                kernel.flops = op.definition.flops(op)
                kernel.matrix = op.definition.precision == "low"
            kernel.anchor = issubclass(op.definition, ANCHORS)
            kernel.element = (op.operands or op.results)[0].type.element.text
            kernel.moves = self.moves(op, storage, place, roles)
            for result in op.results:
                if result.uses:
                    place[result] = self.made(result, storage.bytes[result], roles[result], len(self.kernels))
                    cause = "casts" if is_float_cast(op) else roles[result]
                    kernel.moves.append(Move(place[result], True, storage.bytes[result], cause))
            self.kernels.append(kernel)

    def made(self, value: Value, size: int, cause: str, index: int) -> int:
        return self.buffer(Buffer(value.name or "", value.type.text, size, cause, "", index, index, index))

    def moves(self, op: Op, storage: Storage, place: dict[Value, int], roles: dict[Value, str]) -> list[Move]:
        """What an op reads, and what it copies on the way."""
        found: list[Move] = []
        cast = is_float_cast(op)
        seen: set[Value] = set()
        for value in op.operands:
            if value in seen or storage.is_free(value):
                continue
            seen.add(value)
            root = storage.root[value]
            size = storage.bytes[value]
            if value is op.operands[0] and op.definition in (Embedding, Gather, Index):
                size = min(size, op.results[0].type.bytes)  # only the rows that are asked for
            found.append(Move(place[root], False, size, "casts" if cast else roles[root]))
        for value in storage.copied.get(op, ()):
            size = value.type.bytes
            found += [Move(place[storage.root[value]], w, size, "workspace", inside=True) for w in (True, False)]
        if op in storage.extra:
            size, addend = op.results[0].type.bytes, storage.root[op.operands[2]]
            found += [Move(place[addend], w, size, "workspace", inside=True) for w in (True, False)]
        return found

    def micro_batches(
        self, op: Op, body: Executed, outer: Storage, place: dict[Value, int], roles: dict[Value, str]
    ) -> None:
        """The function behind `step.micro_batches`, `count` times, and the sums of its results."""
        storage, block = Storage(body), body.function.regions[0].block
        assert block.last is not None
        start, kinds = len(self.kernels), argument_kinds(body.function)
        inner = {a: place[outer.root[v]] for a, v in zip(block.arguments, op.operands, strict=True)}
        hints: dict[Value, str] = {}
        for value, taken in zip(block.last.operands, op.taken, strict=True):
            if taken == "sum":
                hints[storage.root[value]] = "gradients"
        for index, result in enumerate(op.carried):
            if result >= 0:
                hints[storage.root[block.last.operands[result]]] = KIND_CAUSES.get(kinds[index], "transients")
        self.body(body, storage, inner, hints, times=op.count)
        for value, result, taken in zip(block.last.operands, op.results, op.taken, strict=True):
            self.keep(storage, inner, value)
            root, index = storage.root[value], len(self.kernels)
            if taken == "last" or not result.uses:
                place[result] = inner[root]
                continue
            size, cause = storage.bytes[value], roles[result]
            made = place[result] = self.made(result, result.type.bytes, cause, index)
            self.buffers[made].first = start
            loc = root.op.loc if root.op is not None else op.loc
            name = {"sum": "sum over micro-batches", "mean": "mean over micro-batches"}.get(taken, "concat")
            launches = 1 if taken == "concat" else op.count
            kernel = Kernel(name, "backward" if taken == "sum" else "loss", loc, 1, launches)
            kernel.moves = [Move(inner[root], False, op.count * size, cause), Move(made, True, op.count * size, cause)]
            if taken != "concat":
                kernel.flops = (op.count - 1) * result.type.size
                kernel.moves.append(Move(made, False, (op.count - 1) * size, cause))
            self.kernels.append(kernel)

    def keep(self, storage: Storage, place: dict[Value, int], value: Value) -> None:
        """A returned value is in use until now."""
        root = storage.root[value]
        if root not in place:
            place[root] = self.buffer(Buffer("fixed", root.type.text, storage.bytes[root], "workspace", "fixed"))
        self.buffers[place[root]].last = len(self.kernels)

    def note_state(self, kind: str, size: int) -> None:
        read, written = self.state
        if kind in ("parameter", "optimizer_state", "ema"):
            self.state = (read + size, written + size)
        elif kind == "copy":
            self.state = (read, written + size)

    def finish(self) -> None:
        """Every buffer is in use from its first kernel to its last; arguments are there all the time."""
        end = len(self.kernels) - 1
        for index, kernel in enumerate(self.kernels):
            for move in kernel.moves:
                buffer = self.buffers[move.buffer]
                buffer.last = max(buffer.last, index)
        for buffer in self.buffers:
            buffer.last = min(buffer.last, end)
            if buffer.producer < 0:
                buffer.first, buffer.last = 0, end


def donations(function: Op) -> list[tuple[Value, int]]:
    """Results that replace an argument, with its index."""
    last = function.regions[0].block.last
    listed = function.attributes.get("res_attrs") or ()
    assert last is not None
    return [
        (value, attributes["step.donates"])
        for value, attributes in zip(last.operands, listed, strict=False)
        if "step.donates" in attributes
    ]


def fits_in_place(storage: Storage, value: Value, argument: Value) -> bool:
    """Whether the kernel that makes a value can write it where the argument lives."""
    root = storage.root[value]
    return root.op is not None and root not in storage.fixed and storage.bytes[root] == argument.type.bytes


def is_float_cast(op: Op) -> bool:
    if op.name != "step.cast":
        return False
    have, want = op.operands[0].type.element, op.result.type.element
    return have is not want and have.kind == want.kind == "float"


def roles_of(storage: Storage, hints: Mapping[Value, str]) -> dict[Value, str]:
    """Why the bytes of each buffer of a function move."""
    roles: dict[Value, str] = {}
    readers: dict[Value, set[str]] = {}
    masks: set[Value] = set()
    for op in storage.kernels:
        for value in op.operands:
            readers.setdefault(storage.root[value], set()).add(op.phase)
        if issubclass(op.definition, AttentionLike) and op.mask is not None:
            masks.add(storage.root[op.mask])
    kinds = argument_kinds(storage.executed.function)
    for value in dict.fromkeys(storage.root.values()):
        maker = value.op
        if value.type.element.kind == "bool" or value in masks or (maker is not None and maker.definition is Random):
            roles[value] = "masks"
        elif maker is None:
            roles[value] = KIND_CAUSES.get(kinds[value.index], "batch")
        elif value in storage.fixed:
            roles[value] = "workspace"
        else:
            roles[value] = hints.get(value) or role_by_phase(maker, value, readers.get(value, set()))
    return roles


def role_by_phase(op: Op, value: Value, readers: Iterable[str]) -> str:
    if op.definition is MicroBatches:
        return "gradients" if op.taken[value.index] == "sum" else "transients"
    if op.phase in BEFORE and any(phase in AFTER for phase in readers):
        return "saved activations"
    if op.phase in ("backward", "clip") and any(phase in ("clip", "update") and phase != op.phase for phase in readers):
        return "gradients"
    return "transients"
