"""A plan as flat lists: the actions in issue order, the buffers, and which value and which memory each buffer is.

Three numbers tell buffers apart. A *storage* is memory: an alloc or an external. A *version* is a value in it: that of
the storage itself, or of a `move.reuse`. A *buffer* is an SSA value: a version, or a view of one.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ...ir.builtin import Return
from ...ir.core import Op, Value
from ...ir.types import TensorType
from ...ir.verify import InvalidOp
from .actions import Action, Results, Wait
from .base import extent, layout
from .buffers import Alloc, Arena, External, Reuse, View


@dataclass(slots=True)
class Version:
    """One value in memory: who writes it, through which buffers, and who reads it."""

    op: Op
    storage: int
    start: int  # bytes from the start of the storage
    old: int  # the version whose memory it takes; -1 for the first in its storage
    given: bool  # it holds a value from the start
    buffer: int = -1  # the buffer that is all of it
    writes: list[tuple[int, int]] = field(default_factory=list)  # (action, buffer)
    reads: list[tuple[int, int]] = field(default_factory=list)
    reused_by: int = -1
    given_back: bool = False


@dataclass(slots=True)
class Flat:
    """The lists. An action's number is its place in issue order."""

    function: Op
    arenas: list[Op] = field(default_factory=list)
    storages: list[Op] = field(default_factory=list)  # the alloc or external
    versions: list[Version] = field(default_factory=list)
    values: list[Value] = field(default_factory=list)  # per buffer
    version: list[int] = field(default_factory=list)  # per buffer
    start: list[int] = field(default_factory=list)  # per buffer: bytes from the start of its storage
    actions: list[Op] = field(default_factory=list)
    reads: list[list[int]] = field(default_factory=list)  # per action: buffers
    writes: list[list[int]] = field(default_factory=list)
    sequence: list[Op] = field(default_factory=list)  # actions and waits, in issue order
    number: dict[Op, int] = field(default_factory=dict)  # of an action
    result: Op | None = None

    def type(self, buffer: int) -> TensorType:
        return self.values[buffer].owner.attributes["type"]  # type: ignore[union-attr]

    def strides(self, buffer: int) -> tuple[int, ...] | None:
        return self.values[buffer].owner.attributes.get("strides")  # type: ignore[union-attr]

    def storage(self, buffer: int) -> int:
        return self.versions[self.version[buffer]].storage

    def span(self, buffer: int) -> tuple[int, int]:
        """First byte and one past the last, from the start of the storage."""
        start = self.start[buffer]
        return start, start + extent(self.type(buffer), self.strides(buffer))

    def region(self, buffer: int) -> tuple:
        """Equal for two buffers of one storage whose elements are in the same places in the same order."""
        type = self.type(buffer)
        return self.start[buffer], type.element.bytes, layout(type, self.strides(buffer))

    def lifetime(self, buffer: int) -> str:
        return self.versions[self.version[buffer]].op.attributes["lifetime"]

    # ---- words for messages ----

    def name(self, buffer: int) -> str:
        """A buffer by its name in the text, or by its slot, with what it holds."""
        value = self.values[buffer]
        version = self.versions[self.version[buffer]]
        slot = self.storages[version.storage].attributes.get("slot")
        if value.name:
            name = f"%{value.name}"
        elif slot is not None:
            name = f"of {slot!r}"
        else:
            name = f"number {buffer}"
        where = f" of {slot!r}" if slot is not None and value.name and value.name != slot else ""
        return f"buffer {name}{where} ({self.type(buffer)}, {version.op.attributes['lifetime']})"

    def action(self, number: int) -> str:
        """An action by its number and layer."""
        op = self.actions[number]
        layer = f" of {op.loc.layer}" if op.loc.layer else ""
        return f"{op.name.removeprefix('move.')} {number}{layer}"


def plans(root: Op) -> list[Op]:
    """The functions of a module that hold move ops."""
    found = []
    for function in root.regions[0].block:
        if function.name == "func.func" and any(op.definition.dialect == "move" for op in function.regions[0].block):
            found.append(function)
    return found


def flatten(function: Op) -> Flat:
    """Reads a plan; InvalidOp for an op that has no place in one."""
    flat = Flat(function)
    buffers: dict[Value, int] = {}
    if function.regions[0].block.arguments:
        raise InvalidOp(function, "a plan has no arguments: it names the tensors of the user by move.external")
    for op in function.regions[0].block:
        definition = op.definition
        if flat.result is not None and definition is not Return:
            raise InvalidOp(op, "it follows move.result, which is the last op of a plan before func.return")
        if issubclass(definition, Action):
            _add_action(flat, op, definition, buffers)
        elif definition is Wait:
            flat.sequence.append(op)
        elif definition is Arena:
            flat.arenas.append(op)
        elif definition is Alloc or definition is External or definition is Reuse or definition is View:
            _add_buffer(flat, op, buffers)
        elif definition is Results:
            flat.result = op
            for value in op.operands:
                flat.versions[flat.version[buffers[value]]].given_back = True
        elif definition is not Return:
            raise InvalidOp(op, "it has no place in a plan, which holds move ops alone")
    return flat


def _add_buffer(flat: Flat, op: Op, buffers: dict[Value, int]) -> None:
    definition = op.definition
    start = 0
    if definition is View:
        base = buffers[op.operands[0]]
        version, start = flat.version[base], flat.start[base] + op.attributes["offset"]
    elif definition is Reuse:
        base = buffers[op.operands[0]]
        start, old = flat.start[base], flat.version[base]
        version = len(flat.versions)
        flat.versions.append(Version(op, flat.versions[old].storage, start, old, False, len(flat.values)))
        if flat.versions[old].reused_by >= 0:
            other = flat.name(flat.versions[flat.versions[old].reused_by].buffer)
            raise InvalidOp(op, f"the memory of {flat.name(base)} is taken twice, also by {other}")
        flat.versions[old].reused_by = version
    else:
        version = len(flat.versions)
        given = definition is External and op.attributes["lifetime"] != "output"
        flat.versions.append(Version(op, len(flat.storages), 0, -1, given, len(flat.values)))
        flat.storages.append(op)
    buffers[op.results[0]] = len(flat.values)
    flat.values.append(op.results[0])
    flat.version.append(version)
    flat.start.append(start)


def _add_action(flat: Flat, op: Op, definition: type[Action], buffers: dict[Value, int]) -> None:
    number = len(flat.actions)
    reads, writes, _ = definition.accesses(op)
    flat.number[op] = number
    flat.actions.append(op)
    flat.sequence.append(op)
    flat.reads.append([buffers[v] for v in reads])
    flat.writes.append([buffers[v] for v in writes])
    versions, version = flat.versions, flat.version
    for buffer in flat.reads[-1]:
        versions[version[buffer]].reads.append((number, buffer))
    for buffer in flat.writes[-1]:
        versions[version[buffer]].writes.append((number, buffer))
