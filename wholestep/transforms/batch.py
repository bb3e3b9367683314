"""Horizontal batches: regions that do the same to different tensors become one launch, such as all updates of a step.

A batch is a region whose body calls the regions it is made of, so that it can be taken apart again. Gradients wait for
the others of their batch, which is closed before they are more than a small share of the memory that the step needs.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from ..dialects.step.control import root_of
from ..dialects.step.fused import Fused
from ..ir.attributes import Symbol, attribute_text
from ..ir.builtin import add_function, finish_function, functions, lookup
from ..ir.core import Builder, Location, Op, Value
from .fuse import Fusion
from .late_updates import AHEAD
from .regions import base, is_view

#: phases whose kernels are batched: nothing but the end of the step waits for them
PHASES = ("clip", "update")
#: bytes of gradients that may wait for others of their batch
WAIT = 32 << 20
#: ... as a share of the most bytes that are there at once
SHARE = 0.01
#: bytes that one launch moves at most: launching costs nothing beside more than that
LARGEST = 1 << 30


@dataclass(slots=True)
class Batches:
    """What was batched: per symbol of a batch the symbols of its parts, and the sites of their ops."""

    parts: dict[str, list[str]] = field(default_factory=dict)
    sites: dict[str, list[list[str]]] = field(default_factory=dict)


@dataclass(slots=True)
class Member:
    """A region that could be part of a batch."""

    op: Op
    position: int
    #: the op it has to wait for
    ready: int
    #: before which op its results must be there
    due: int
    #: bytes of gradients that are kept for it alone
    waits: int
    moved: int
    tensors: set[Value]


@dataclass(slots=True)
class Open:
    """A batch that more may join."""

    members: list[Member] = field(default_factory=list)
    last: int = -1
    due: int = 1 << 60
    waits: int = 0
    moved: int = 0
    tensors: set[Value] = field(default_factory=set)

    def fits(self, member: Member) -> bool:
        """Whether a region may join: nobody needs a result before all can run, and no tensor is touched twice."""
        if max(self.last, member.position) >= min(self.due, member.due) or self.moved + member.moved > LARGEST:
            return False
        return self.tensors.isdisjoint(member.tensors)

    def add(self, member: Member) -> None:
        self.members.append(member)
        self.last, self.due = max(self.last, member.position), min(self.due, member.due)
        self.waits += member.waits
        self.moved += member.moved
        self.tensors |= member.tensors


def batch(function: Op, fusion: Fusion, wait: int | None = WAIT, forbid: Sequence[str] = ()) -> Batches:
    """Joins regions of a fused function, in place. wait: bytes of gradients that may be kept waiting; None for any.

    forbid: patterns of fusions that must not be done; "fuse batch" is all that is done here.
    """
    unwanted = [p for p in forbid if fnmatch.fnmatchcase("fuse batch", p)]
    fusion.forbidden.update(unwanted)
    return Batches() if unwanted else Batcher(function, fusion, wait).run()


class Batcher:
    """The batches of one function."""

    def __init__(self, function: Op, fusion: Fusion, wait: int | None):
        self.function, self.fusion, self.wait = function, fusion, wait
        self.block = function.regions[0].block
        self.root = root_of(function)
        self.position = {op: i for i, op in enumerate(self.block)}
        self.found = Batches()

    def run(self) -> Batches:
        kinds: dict[str, str] = {}
        members: list[tuple[str, Member]] = []
        early, apart = self.earliest(), AHEAD in self.function.attributes
        for op in self.block:
            if op.definition is not Fused or op.phase not in PHASES:
                continue
            name = op.callee.name
            if name not in kinds:
                kinds[name] = work(lookup(self.root, op.callee))
            if kinds[name]:  # updates of the step before have nothing to do with the gradients of this one
                members.append((f"{op.phase if apart else ''} {kinds[name]}", self.member(op, early[op])))
        self.used = {f.attributes["sym_name"] for f in functions(self.root)}
        for group in self.groups(sorted(members, key=lambda m: m[1].ready)):
            if len(group.members) > 1:
                self.emit(sorted(group.members, key=lambda m: m.position))
        return self.found

    # ---- what can be batched -----------------------------------------------------------------------------------------

    def earliest(self) -> dict[Op, int]:
        """The position of the last op that each must wait for, if all that ends the step runs as soon as it can."""
        found: dict[Op, int] = {}
        for op in self.block:
            behind = max((found[v.op] for v in op.operands if v.op is not None), default=-1)
            late = op.phase in PHASES or is_view(op) or not op.operands
            found[op] = behind if late else self.position[op]
        return found

    def member(self, op: Op, ready: int) -> Member:
        large = [v for v in op.operands if v.type.size > 1]
        made = {v for v in large if (maker := base(v).op) is not None and maker.phase not in PHASES}
        waits = sum(v.type.bytes for v in made if self.only(op, base(v)))
        moved = sum(v.type.bytes for v in (*op.operands, *op.results))
        # other regions may read other parts of a tensor: nothing is written over a part
        whole = {base(v) for v in large if v.type.size == base(v).type.size}
        return Member(op, self.position[op], ready, self.due(op), waits, moved, whole)

    def only(self, op: Op, value: Value, part: bool = False) -> bool:
        """Whether nobody but this op reads a value or a view of it, and regions like it that read other parts: so that
        its part is kept for it alone."""
        for user in value.uses:
            if is_view(user):
                if not self.only(op, user.results[0], part or user.results[0].type.size < value.type.size):
                    return False
            elif user is not op and not (part and user.phase in PHASES):
                return False
        return True

    def due(self, op: Op) -> int:
        """The first op that reads a result, or a view of one."""
        found = len(self.position)
        for user in {u for r in op.results for u in r.uses}:
            found = min(found, self.due(user) if is_view(user) else self.position[user])
        return found

    # ---- which are one batch -----------------------------------------------------------------------------------------

    def groups(self, members: list[tuple[str, Member]]) -> list[Open]:
        """Regions of one kind together, in the order in which they can run."""
        limit = float("inf") if self.wait is None else min(self.wait, SHARE * self.peak())
        opened: dict[str, Open] = {}
        closed: list[Open] = []
        for kind, member in members:
            while opened:
                waiting = [m for o in opened.values() for m in o.members if m.ready < member.ready]
                if sum(m.waits for m in waiting) <= limit:
                    break
                largest = max(opened, key=lambda k: opened[k].waits)
                closed.append(opened.pop(largest))
            if kind in opened and not opened[kind].fits(member):
                closed.append(opened.pop(kind))
            opened.setdefault(kind, Open()).add(member)
        return [*closed, *opened.values()]

    def peak(self) -> int:
        """The most bytes that are there at once, if no gradient waits for its update.

        A result takes the memory of an operand of its type that nobody reads any more.
        """
        change = np.zeros(len(self.position) + 2, np.int64)
        last: dict[Value, int] = {}
        for op in self.block:
            if is_view(op) or op.phase in PHASES or not op.operands:
                continue
            start = self.position[op]
            ending = [v.type for v in dict.fromkeys(map(base, op.operands)) if last.get(v) == start]
            for value in op.results:
                end = last[value] = self.last_read(value, start)
                change[start] += value.type.bytes
                change[end + 1] -= value.type.bytes
                if value.type in ending:
                    ending.remove(value.type)
                    change[start] -= value.type.bytes
                    change[start + 1] += value.type.bytes
        return int(np.cumsum(change).max())

    def last_read(self, value: Value, start: int) -> int:
        last = start
        for user in value.uses:
            if is_view(user):
                last = max(last, self.last_read(user.results[0], start))
            elif user.phase not in PHASES:
                last = max(last, min(self.position[user], len(self.position) - 1))
        return last

    # ---- writing -----------------------------------------------------------------------------------------------------

    def emit(self, members: list[Member]) -> None:
        """One op in place of the last of its parts."""
        ops = [m.op for m in members]
        name = next(n for i in range(len(self.used) + 1) if (n := f"batch_{i}") not in self.used)
        self.used.add(name)
        body = add_function(self.root, name, [v.type for op in ops for v in op.operands])
        arguments = iter(body.regions[0].block.arguments)
        results: list[Value] = []
        for op in ops:
            call = op.clone()
            call.set_operands([next(arguments) for _ in op.operands])
            body.regions[0].block.append(call)
            results += call.results
        finish_function(body, results)
        last = ops[-1]
        builder = Builder(self.block, last, Location(common([op.loc.layer for op in ops])), last.phase)
        operands = [v for op in ops for v in op.operands]
        made = builder.create(Fused, operands, [r.type for r in results], {"callee": Symbol(name)})
        for old, new in zip([r for op in ops for r in op.results], made.results, strict=True):
            old.replace_by(new)
        self.lower_views(made, last)
        self.found.parts[name] = [op.callee.name for op in ops]
        sites = dict(self.fusion.kernels)
        self.found.sites[name] = [sites.get(op, []) for op in ops]
        gone = set(ops)
        self.fusion.kernels = [(made if op in gone else op, names) for op, names in self.fusion.kernels]
        for op in ops:
            op.erase()

    def lower_views(self, made: Op, last: Op) -> None:
        """Views of what a batch makes come after it."""
        for user in sorted({u for r in made.results for u in r.uses if is_view(u)}, key=self.position.__getitem__):
            if self.position[user] < self.position[last]:
                user.detach()
                self.block.insert_before(user, last)
                self.lower_views(user, last)


def work(body: Op) -> str:
    """What a region does at each point, whatever its size: equal for regions that can be one batch.

    Empty where not all its tensors are one size or single numbers, or some are looked at in another way.
    """
    block = body.regions[0].block
    values = [*block.arguments, *(r for op in block for r in op.results)]
    if len({v.type.shape for v in values if v.type.size > 1}) != 1:
        return ""
    number = {v: i for i, v in enumerate(values)}

    def known(value: Value) -> str:
        return f"{number[value]}{'*' if value.type.size > 1 else value.type.rank}{value.type.element}"

    lines = [" ".join(map(known, block.arguments))]
    for op in block:
        attributes = {k: v for k, v in op.attributes.items() if k != "phase"}
        if is_view(op):
            return ""
        if "dims" in attributes:
            (operand,) = op.operands
            if sorted(attributes.pop("dims")) != list(range(operand.type.rank)):
                return ""
        text = ";".join(f"{k}={attribute_text(attributes[k])}" for k in sorted(attributes))
        lines.append(f"{op.name}({' '.join(map(known, op.operands))}){text}:{' '.join(map(known, op.results))}")
    return "\n".join(lines)


def common(layers: list[str]) -> str:
    """The layer that all of some layers are in."""
    shared: list[str] = []
    for names in zip(*(layer.split(".") for layer in layers), strict=False):
        if len(set(names)) > 1:
            break
        shared.append(names[0])
    return ".".join(shared)


def unbatch(function: Op, fusion: Fusion, batches: Batches, wanted: Callable[[Op], bool]) -> int:
    """Puts the regions of batches back in place of them; returns how many batches went."""
    root, block, count = root_of(function), function.regions[0].block, 0
    for op in [o for o in block if o.definition is Fused and o.callee.name in batches.parts and wanted(o)]:
        body = lookup(root, op.callee).regions[0].block
        mapping = dict(zip(body.arguments, op.operands, strict=True))
        calls = []
        for inner in body:
            if inner.definition.terminator:
                for old, new in zip(op.results, inner.operands, strict=True):
                    old.replace_by(mapping[new])
                break
            copy = inner.clone(mapping)
            block.insert_before(copy, op)
            mapping.update(zip(inner.results, copy.results, strict=True))
            calls.append(copy)
        fusion.kernels = [k for k in fusion.kernels if k[0] is not op]
        fusion.kernels += zip(calls, batches.sites[op.callee.name], strict=True)
        op.erase()
        count += 1
    return count
