"""The graph: operations in blocks in regions, values with their uses, source locations.

The vocabulary is MLIR's; the objects are slotted and linked so that 100,000 ops build in about a second.
Regions hold at most one block: control flow is structured, so a value dominates what follows it and what nests below.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .attributes import Attribute
from .collector import collector_paused
from .types import FunctionType, Type

if TYPE_CHECKING:
    from .dialect import OpDef


@dataclass(frozen=True, slots=True)
class Location:
    """Where an op comes from: the module path in the user's model, and the file and line of the user's code."""

    layer: str = ""
    file: str = ""
    line: int = 0

    def __str__(self) -> str:
        place = f"{self.file}:{self.line}" if self.file else ""
        return " at ".join(part for part in (self.layer, place) if part) or "unknown"

    @property
    def words(self) -> str:
        """` in layer head at train.py:7`, or as much of it as is known."""
        return f" in layer {self}" if self.layer else f" at {self}" if self.file else ""


UNKNOWN = Location()


class Value:
    """The result of an op or an argument of a block. `uses` maps each using op to how often it uses the value."""

    __slots__ = ("index", "name", "op", "owner", "type", "uses")

    def __init__(self, type: Any, owner: Op | Block, index: int, name: str | None = None):
        self.type = type
        self.owner = owner
        #: the op that makes this value; None for a block argument
        self.op = owner if isinstance(owner, Op) else None
        self.index = index
        self.uses: dict[Op, int] = {}
        self.name = name

    def replace_by(self, new: Value) -> None:
        """Every use of this value becomes a use of `new`."""
        if new is self:
            return
        for op in list(self.uses):
            op.replace_operand(self, new)

    def __repr__(self) -> str:
        made_by = self.owner.name if isinstance(self.owner, Op) else "argument"
        return f"<{self.name or self.index} of {made_by} : {self.type}>"


class Op:
    """One operation. `op.x` reads the operand, result or attribute that its definition declares as `x`."""

    __slots__ = ("attributes", "definition", "loc", "next", "operands", "parent", "prev", "regions", "results")

    def __init__(
        self,
        definition: type[OpDef],
        operands: Iterable[Value] = (),
        result_types: Iterable[Type] = (),
        attributes: dict[str, Attribute] | None = None,
        regions: Sequence[Region] = (),
        loc: Location = UNKNOWN,
    ):
        self.definition = definition
        self.operands = operands = tuple(operands)
        self.attributes = attributes if attributes is not None else {}
        self.loc = loc
        self.parent: Block | None = None
        self.prev: Op | None = None
        self.next: Op | None = None
        self.results = tuple([Value(t, self, i) for i, t in enumerate(result_types)])
        self.regions: list[Region] = list(regions)
        if regions:
            for region in regions:
                region.parent = self
        for value in operands:
            uses = value.uses
            uses[self] = uses[self] + 1 if self in uses else 1

    @property
    def name(self) -> str:
        return self.definition.name

    @property
    def result(self) -> Value:
        """The only result."""
        (value,) = self.results
        return value

    @property
    def phase(self) -> str:
        """Which part of the training step this op belongs to: forward, loss, backward, clip, update or empty."""
        return self.attributes.get("phase", "")

    def __getattr__(self, name: str) -> Any:
        if name == "definition" or name.startswith("__"):  # an op that is not made yet, or a protocol of Python
            raise AttributeError(name)
        try:
            return self.definition.field(self, name)
        except KeyError:
            raise AttributeError(f"{self.definition.name} has no operand, result or attribute {name!r}") from None

    def set_operands(self, operands: Iterable[Value]) -> None:
        """Replaces all operands, keeping use lists right."""
        self.drop_operands()
        self.operands = tuple(operands)
        for value in self.operands:
            value.uses[self] = value.uses.get(self, 0) + 1

    def replace_operand(self, old: Value, new: Value) -> None:
        """Reads `new` wherever it reads `old`. Others are not touched: the end of a step has thousands of operands."""
        operands, place, count = list(self.operands), -1, old.uses.pop(self)
        for _ in range(count):
            place = operands.index(old, place + 1)
            operands[place] = new
        self.operands = tuple(operands)
        new.uses[self] = new.uses.get(self, 0) + count

    def drop_operands(self) -> None:
        for value in self.operands:
            left = value.uses[self] - 1
            if left:
                value.uses[self] = left
            else:
                del value.uses[self]
        self.operands = ()

    def detach(self) -> Op:
        """Takes the op out of its block; operands and results stay as they are."""
        block = self.parent
        if block is None:
            return self
        if self.prev is not None:
            self.prev.next = self.next
        else:
            block.first = self.next
        if self.next is not None:
            self.next.prev = self.prev
        else:
            block.last = self.prev
        self.parent = self.prev = self.next = None
        return self

    def erase(self) -> None:
        """Removes the op for good; its results must be unused."""
        for value in self.results:
            if value.uses:
                raise ValueError(f"cannot erase {self.name}: its result {value.index} is still used")
        for inner in self.walk():
            inner.drop_operands()
        self.detach()

    def walk(self) -> Iterator[Op]:
        """This op and everything nested in it, in program order. The op at hand may be erased meanwhile."""
        yield self
        for region in self.regions:
            for block in region.blocks:
                op = block.first
                while op is not None:
                    following = op.next
                    if op.regions:
                        yield from op.walk()
                    else:
                        yield op
                    op = following

    def clone(self, mapping: dict[Value, Value] | None = None) -> Op:
        """A deep copy. Operands found in `mapping` are replaced; the mapping gains old result -> new result."""
        mapping = {} if mapping is None else mapping
        with collector_paused():
            return self._clone(mapping)

    def _clone(self, mapping: dict[Value, Value]) -> Op:
        new = Op(
            self.definition,
            [mapping.get(v, v) for v in self.operands],
            [r.type for r in self.results],
            self.attributes.copy(),
            (),
            self.loc,
        )
        made = new.results
        for old in self.results:
            fresh = made[old.index]
            fresh.name = old.name
            mapping[old] = fresh
        for region in self.regions:
            copy = Region()
            copy.parent = new
            new.regions.append(copy)
            for block in region.blocks:
                copy.append(block._clone(mapping))
        return new

    def __str__(self) -> str:
        from .printer import print_op

        return print_op(self)

    def __repr__(self) -> str:
        return f"<{self.name} {self.loc}>"


class Block:
    """A straight line of ops; a doubly linked list, so inserting and erasing are constant time."""

    __slots__ = ("arguments", "first", "last", "parent")

    def __init__(self, argument_types: Iterable[Type] = ()):
        self.arguments = [Value(t, self, i) for i, t in enumerate(argument_types)]
        self.first: Op | None = None
        self.last: Op | None = None
        self.parent: Region | None = None

    def __iter__(self) -> Iterator[Op]:
        op = self.first
        while op is not None:
            following = op.next
            yield op
            op = following

    def __reversed__(self) -> Iterator[Op]:
        op = self.last
        while op is not None:
            before = op.prev
            yield op
            op = before

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def _clone(self, mapping: dict[Value, Value]) -> Block:
        new = Block([a.type for a in self.arguments])
        for old_argument, new_argument in zip(self.arguments, new.arguments, strict=True):
            new_argument.name = old_argument.name
            mapping[old_argument] = new_argument
        before: Op | None = None
        op = self.first
        while op is not None:
            copy = op._clone(mapping)
            copy.parent, copy.prev = new, before
            if before is None:
                new.first = copy
            else:
                before.next = copy
            before = copy
            op = op.next
        new.last = before
        return new

    def add_argument(self, type: Type, name: str | None = None) -> Value:
        value = Value(type, self, len(self.arguments), name)
        self.arguments.append(value)
        return value

    def append(self, op: Op) -> Op:
        return self.insert_before(op, None)

    def insert_before(self, op: Op, anchor: Op | None) -> Op:
        """Puts a detached op before `anchor`; at the end where anchor is None."""
        if op.parent is not None:
            raise ValueError(f"{op.name} is already in a block; detach it first")
        op.parent = self
        before = self.last if anchor is None else anchor.prev
        op.prev, op.next = before, anchor
        if before is None:
            self.first = op
        else:
            before.next = op
        if anchor is None:
            self.last = op
        else:
            anchor.prev = op
        return op


class Region:
    """A list of blocks owned by an op; Wholestep's dialects use at most one."""

    __slots__ = ("blocks", "parent")

    def __init__(self, blocks: Iterable[Block] = ()):
        self.blocks: list[Block] = []
        self.parent: Op | None = None
        for block in blocks:
            self.append(block)

    def append(self, block: Block) -> Block:
        block.parent = self
        self.blocks.append(block)
        return block

    @property
    def block(self) -> Block:
        """The only block."""
        (block,) = self.blocks
        return block


class Builder:
    """Makes ops at an insertion point; each gets the builder's current location and phase."""

    def __init__(self, block: Block, before: Op | None = None, loc: Location = UNKNOWN, phase: str = ""):
        self.block, self.before, self.loc, self.phase = block, before, loc, phase

    def insert(self, op: Op) -> Op:
        return self.block.insert_before(op, self.before)

    def create(
        self,
        definition: type[OpDef],
        operands: Iterable[Value] = (),
        result_types: Iterable[Type] = (),
        attributes: dict[str, Attribute] | None = None,
        regions: Sequence[Region] = (),
    ) -> Op:
        attributes = {} if attributes is None else attributes
        if self.phase:
            attributes["phase"] = self.phase
        return self.insert(Op(definition, operands, result_types, attributes, regions, self.loc))


def function_type(block: Block, results: Sequence[Value]) -> FunctionType:
    """The type of a function with this body and these results."""
    return FunctionType(tuple(a.type for a in block.arguments), tuple(r.type for r in results))
