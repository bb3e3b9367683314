"""`put_off`: a cheap op that only a later phase reads is moved to right before its reader.

A long program is joined part by part. The cast of a gradient stands where backward made the gradient, its update at the
end of the program, and where they are in different parts the wide copy is written and read. So is the sum of the two
gradients of a tied weight. What waits instead is no larger, or is waited for by an update, which runs at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..ir.core import Op
from .again import CHEAP
from .regions import base, is_view

if TYPE_CHECKING:
    from .fuse import Fuser

#: the half of the updates, and how many times as much as their result the operands of a sum may be that is left to them
UPDATE, SUMMED = 2, 2


def put_off(fuser: Fuser) -> int:
    """Moves ops of one half of a program to their first reader, where all are in a later one; says how many."""
    position = {op: i for i, op in enumerate(fuser.block)}
    later: dict[Op, int] = {}  # the half that ops were moved to
    for op in reversed(list(fuser.block)):
        along, readers = readers_of(op)
        if not readers or (len(readers) > 1 and any(u in later for u in readers)):
            continue  # (where those are now is not known)
        half = min(later.get(u, fuser.half(u)) for u in readers)
        if half <= fuser.half(op) or not is_worth_it(op, half):
            continue
        if all(map(fuser.is_fusible, (op, *readers))):
            first = min(readers, key=position.__getitem__)
            for one in (op, *along):
                one.detach()
                fuser.block.insert_before(one, first)
            later[op] = half
    return len(later)


def readers_of(op: Op) -> tuple[list[Op], list[Op]]:
    """Views of what a cheap op makes, one of the other, and the readers of the last; none if it has other readers."""
    along: list[Op] = []
    if op.name not in CHEAP or len(op.results) != 1:
        return along, []
    value = op.results[0]
    while True:
        users = list(dict.fromkeys(value.uses))
        if len(users) == 1 and is_view(users[0]):
            along.append(users[0])
            value = users[0].results[0]
        elif any(is_view(u) or u.definition.terminator for u in users):
            return along, []
        else:
            return along, users


def is_worth_it(op: Op, half: int) -> bool:
    """Whether what waits instead of the result is small enough."""
    read = sum(v.type.bytes for v in {base(v) for v in op.operands} if v.type.size > 1)
    return may_wait(read, op.results[0].type.bytes, half)


def may_wait(read: int, made: int, half: int) -> bool:
    """Whether so many bytes may wait for a later half instead of those that are made of them. An update runs as soon as
    it can: a sum of two gradients may be left to it."""
    return read <= (SUMMED * made if half == UPDATE else made)
