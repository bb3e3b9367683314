"""Products that are read in slices, each by a kernel of its own, are computed slice by slice where the clock says so.

Queries and keys of one product (`shared_input.py`) are turned for their positions by two kernels, which walk different
numbers of heads. Each may compute its own columns; the product is then not written. No column is computed twice.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from ..ir.core import Op, Value
from .again import is_forbidden, through_views
from .around import PRODUCT, hand_over
from .regions import Piece, base, is_view, piece_of
from .tall_products import Choice, take_faster, why_not

if TYPE_CHECKING:
    from .fuse import Fuser, Group


def join_sliced(fuser: Fuser, groups: list[Group]) -> list[Group]:
    """Lets readers of slices compute them; gives the kernels that are left."""
    take_faster(fuser, choices(fuser))
    return [g for g in groups if g.members]


def choices(fuser: Fuser) -> Iterator[Choice]:
    for op in fuser.nodes:
        if op.name != PRODUCT or not op.results[0].uses or fuser.groups[op].members != [op]:
            continue
        made, readers = op.results[0], readers_of_slices(fuser, op.results[0])
        new = [with_product(fuser, op, group) for group in readers]
        if not new or any(why_not(fuser, piece) for piece in new):
            continue
        old = [piece_of(g.members, fuser.position) for g in (fuser.groups[op], *readers)]
        apart = functools.partial(reason, fuser)
        yield Choice(old, new, functools.partial(hand_over, fuser, made, {op}, fuser.groups[op], readers, apart))


def readers_of_slices(fuser: Fuser, made: Value) -> list[Group]:
    """The kernels that read a product, where there are several and each reads other slices of it; else none."""
    assert made.op is not None
    readers: dict[int, Group] = {}
    shown: dict[tuple[int, Value], int] = {}
    for user in through_views(made):
        group = fuser.groups.get(user)
        if group is None or not fuser.is_fusible(user) or is_forbidden(fuser, made, group):
            return []
        if set(map(fuser.half, group.members)) != {fuser.half(made.op)}:
            return []
        readers[id(group)] = group
        for value in user.operands:
            if base(value) is made:
                part = first_view(value)
                shown[id(group), part] = part.type.size
    apart = sum(shown.values()) <= made.type.size
    return list(readers.values()) if len(readers) > 1 and apart else []


def first_view(value: Value) -> Value:
    """The outermost view that a value is seen through; the value where there is none."""
    while (op := value.op) is not None and is_view(op) and base(value) is not op.operands[0]:
        value = op.operands[0]
    return value


def with_product(fuser: Fuser, op: Op, group: Group) -> Piece:
    """A kernel and the product that it reads, which is not written."""
    piece = piece_of([op, *group.members], fuser.position)
    return Piece(piece.ops, piece.inputs, [v for v in piece.outputs if v.op is not op])


def reason(fuser: Fuser, members: Sequence[Op]) -> str:
    return why_not(fuser, piece_of(members, fuser.position))
