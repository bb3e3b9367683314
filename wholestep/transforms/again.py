"""`compute_again`: kernels compute what others would have to write for them, where that moves fewer bytes.

After ops are joined, a tensor that passes from one kernel to others may be cheap to compute from what these read
anyway, or from what is in memory anyway, such as a normalised value from what was normalised and its statistics. Each
reader then gets the cheap ops that make it, and the tensor is not written where nobody else reads it. What counts is
bytes; legality is that of any kernel.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..dialects.step import StepBuilder
from ..dialects.step.normalization import RowNorm
from ..ir.core import Block, Op, Value
from .regions import base, is_source, is_view, piece_of

if TYPE_CHECKING:
    from .fuse import Fuser, Group

#: ops that cost next to nothing beside the bytes they read
CHEAP = frozenset(
    f"step.{n}"
    for n in ("cast", "neg", "abs", "relu", "add", "sub", "mul", "select", "lt", "le", "gt", "ge", "eq", "ne")
    + ("spread_rows",)
)
#: and those that may run once more per kernel all the same
RUN_AGAIN = CHEAP | {f"step.{n}" for n in ("sigmoid", "silu", "sigmoid_grad", "silu_grad", "minimum", "maximum")}
#: the least bytes of a tensor that is worth it, the most ops that make it, the most kernels that compute it
LEAST, OPS, READERS = 1 << 20, 32, 3
#: how often all kernels are gone through: what one has taken over may let it hand on less
ROUNDS = 3


def compute_again(fuser: Fuser, groups: list[Group]) -> list[Group]:
    """Goes through what the kernels hand to each other, the last kernel first; gives the kernels that are left."""
    order = sorted(groups, key=lambda g: fuser.position[g.members[-1]])
    for _ in range(ROUNDS):
        moved = False
        for group in reversed(order):
            for value in piece_of(group.members, fuser.position).outputs if group.members else ():
                if value.type.bytes >= LEAST and value.op in group.members:
                    moved |= move(fuser, group, value)
        if not moved:
            break
    return [g for g in groups if g.members]


def move(fuser: Fuser, group: Group, value: Value) -> bool:
    """Has the kernels that read a value compute it, if that saves bytes; says whether one does."""
    assert value.op is not None
    if issubclass(value.op.definition, RowNorm):
        return normalise_again(fuser, group, value)
    ops = makers(value, set(group.members))
    readers, written = other_readers(fuser, group, value) if ops else ([], False)
    if not readers:
        return False
    leaves = {base(v) for op in ops for v in op.operands if v.op not in ops}
    leaves = {v for v in leaves if v.op is None or not is_source(v.op)}
    size = value.type.bytes
    prices = [price(fuser, other, leaves) for other in readers]
    all_of_them = not written and sum(prices) < size * (len(readers) + 1)
    if all_of_them and attempt(fuser, group, value, ops, readers):
        return True
    cheaper = [other for other, more in zip(readers, prices, strict=True) if more < size]
    return any([attempt(fuser, group, value, ops, [other]) for other in cheaper])


def other_readers(fuser: Fuser, group: Group, value: Value) -> tuple[list[Group], bool]:
    """The other kernels that read a value, none where they may not compute it; whether it is written in any case."""
    readers: dict[int, Group] = {}
    written = False
    for user in through_views(value):
        other = fuser.groups.get(user)
        if other is None or not fuser.is_fusible(other.members[0]):
            written = True
        elif other is not group:
            readers[id(other)] = other
    found, own = list(readers.values()), half(fuser, group)
    if len(found) > READERS or any(half(fuser, o) != own or is_forbidden(fuser, value, o) for o in found):
        return [], written
    return found, written


def price(fuser: Fuser, reader: Group, leaves: Iterable[Value]) -> int:
    """Bytes that a kernel reads more if it reads these as well."""
    has = {base(v) for v in piece_of(reader.members, fuser.position).inputs}
    return sum(v.type.bytes for v in leaves if v not in has)


def normalise_again(fuser: Fuser, group: Group, value: Value) -> bool:
    """Has kernels compute a normalised value from what was normalised and its statistics, where that is in memory."""
    op = value.op
    assert op is not None
    x, members = base(op.operands[0]), set(group.members)
    rule = getattr(op.definition, "normalised", None)
    if rule is None or value is not op.results[0] or (x.op in members and not leaves_kernel(x, members)):
        return False
    readers, written = other_readers(fuser, group, value)
    if written or sum(price(fuser, other, [x]) for other in readers) >= value.type.bytes * (len(readers) + 1):
        return False
    formula = Block()
    made = rule(StepBuilder(formula, None, op.loc, op.phase), op, *op.results[1:])
    ops = list(formula)
    fuser.position.update((one, i) for i, one in enumerate(ops))
    done = bool(readers) and attempt(fuser, group, value, set(ops), readers, made)
    for one in reversed(ops):
        del fuser.position[one]
        one.erase()
    return done


def makers(value: Value, members: set[Op]) -> set[Op]:
    """The cheap ops of a kernel that make a value, with the views between them; none if they are too many.

    What they take from the kernel's other ops has to be written by it already.
    """
    found: set[Op] = set()
    pending = [value.op]
    while pending:
        op = pending.pop()
        assert op is not None
        if op in found:
            continue
        if op in members and (op.name not in RUN_AGAIN or len(op.results) != 1):
            if op is value.op or any(r in found_operands(found) and not leaves_kernel(r, members) for r in op.results):
                return set()
            continue
        if op not in members and not (is_view(op) and base(op.results[0]).op in members):
            continue
        found.add(op)
        pending += [v.op for v in op.operands if v.op is not None]
    return found if sum(not is_view(op) for op in found) <= OPS else set()


def found_operands(ops: Iterable[Op]) -> set[Value]:
    return {v for op in ops for v in op.operands}


def leaves_kernel(value: Value, members: set[Op]) -> bool:
    return any(u not in members for u in through_views(value))


def through_views(value: Value) -> Iterator[Op]:
    """Who reads a value, views left out."""
    for user in dict.fromkeys(value.uses):
        if is_view(user):
            yield from through_views(user.results[0])
        else:
            yield user


def half(fuser: Fuser, group: Group) -> int:
    return max(map(fuser.half, group.members))


def is_forbidden(fuser: Fuser, value: Value, other: Group) -> bool:
    assert value.op is not None
    name = fuser.names[value.op]
    return any(
        fnmatch.fnmatchcase(f"{fuser.names[u]} <- {name}", pattern)
        for pattern in fuser.forbid
        for u in other.members
        if u in fuser.names
    )


@dataclass(slots=True)
class Change:
    """What was done to the program, so that it can be taken back."""

    made: list[Op] = field(default_factory=list)
    operands: list[tuple[Op, tuple[Value, ...]]] = field(default_factory=list)
    members: list[tuple[Group, list[Op]]] = field(default_factory=list)

    def undo(self, fuser: Fuser) -> None:
        for op, operands in reversed(self.operands):
            op.set_operands(operands)
        for op in reversed(self.made):
            fuser.groups.pop(op, None)
            del fuser.position[op]
            op.erase()
        for group, members in self.members:
            group.members[:] = members


def attempt(
    fuser: Fuser, group: Group, value: Value, ops: set[Op], readers: list[Group], instead: Value | None = None
) -> bool:
    """Gives each reader its own copy of the ops; takes everything back if one of the kernels could not be written.

    instead: what the ops make, where that is not the value itself.
    """
    change = Change()
    for other in readers:
        change.members.append((other, list(other.members)))
        copy_into(fuser, change, value, ops, other, instead)
    change.members.append((group, list(group.members)))
    unread = drop_unread(group)
    touched = [*readers, group] if group.members else readers
    if any(fuser.bodies(piece_of(g.members, fuser.position)).why_not for g in touched):
        change.undo(fuser)
        return False
    for op in unread:
        for view in [u for r in op.results for u in r.uses]:
            erase_views(view)
        op.erase()
    return True


def copy_into(
    fuser: Fuser, change: Change, value: Value, ops: set[Op], other: Group, instead: Value | None = None
) -> None:
    new: dict[Value, Value] = {}
    readers = [(u, u.operands) for u in other.members if any(base(v) is value for v in u.operands)]
    first = readers[0][0]
    at = fuser.position[first]

    def copied(op: Op) -> None:
        copy = op.clone(new)
        copy.attributes["phase"] = first.attributes.get("phase", op.phase)
        fuser.block.insert_before(copy, first)
        fuser.position[copy] = at - 0.5 + len(change.made) * 1e-6
        change.made.append(copy)
        new.update(zip(op.results, copy.results, strict=True))
        if not is_view(op) and not is_source(op):
            fuser.groups[copy] = other
            other.members.append(copy)

    def seen(shown: Value) -> Value:
        """The same view of the copy."""
        if shown not in new:
            assert shown.op is not None and is_view(shown.op)
            seen(shown.op.operands[0])
            copied(shown.op)
        return new[shown]

    for op in sorted(ops, key=fuser.position.__getitem__):
        copied(op)
    new[value] = new[value if instead is None else instead]
    for user, operands in readers:
        change.operands.append((user, tuple(operands)))
        user.set_operands([seen(v) if base(v) is value else v for v in operands])
    other.members.sort(key=fuser.position.__getitem__)


def drop_unread(group: Group) -> list[Op]:
    """Ops of a kernel that nobody reads any more are no part of it; gives them, readers first."""
    unread: dict[Op, None] = {}
    for op in reversed(group.members):
        if all(u in unread for r in op.results for u in through_views(r)):
            unread[op] = None
    group.members[:] = [op for op in group.members if op not in unread]
    return list(unread)


def erase_views(op: Op) -> None:
    for user in list(op.results[0].uses):
        erase_views(user)
    op.erase()
