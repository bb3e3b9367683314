"""Products read tensors that are put side by side from where each of them lies, instead of from one memory.

Such a memory costs nothing as far as its parts are written there by who makes them (`plan/joins.py`). A part that
cannot be, such as an activation of forward beside a gradient, is copied to it. Nothing is where products alone read the
whole and there are kernels that take each step of a sum from the part that it is in, if the clock says so.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ..ir.core import Op
from . import again
from .around import hand_over
from .regions import HELD, Piece, piece_of
from .tall_products import Choice, heavy, is_join, is_tall, take_faster, why_not
from .wide_products import LEAST, able_by

if TYPE_CHECKING:
    from .fuse import Fuser, Group


def join_parts(fuser: Fuser, groups: list[Group]) -> list[Group]:
    """Joins concatenations that something is copied to with the products that read them; gives all kernels."""
    choices = list(from_parts(fuser))
    readers = [reader for choice in choices for _, reader in choice.pairs]
    take_faster(fuser, heavy(fuser, choices, LEAST))
    joined = {id(g): g for op in readers if len((g := fuser.groups[op]).members) > 1}
    known = {id(g) for g in groups}
    return [g for g in groups if g.members] + [g for g in joined.values() if id(g) not in known]


def from_parts(fuser: Fuser) -> Iterator[Choice]:
    """Concatenations that products alone read, each with all of these."""
    for op in fuser.nodes:
        copied = op.attributes.get(HELD, 0)
        if not copied or op.parent is None or not is_join(fuser, op):
            continue
        readers = list(dict.fromkeys(again.through_views(op.results[0])))
        taking = [fuser.groups[u] for u in readers if u.name == "step.contract" and u in fuser.groups]
        if not taking or len({id(g) for g in taking}) != len(readers):
            continue
        if any(again.is_forbidden(fuser, op.results[0], g) or again.half(fuser, g) != fuser.half(op) for g in taking):
            continue
        choice = without_copy(fuser, op, copied, readers, taking)
        if choice.worth_it and not any(why_not(fuser, piece) for piece in choice.new) and has_kernels(fuser, choice):
            yield choice


def without_copy(fuser: Fuser, join: Op, copied: int, readers: Sequence[Op], taking: Sequence[Group]) -> Choice:
    """Products that read the parts of a concatenation, for the concatenation with so many bytes copied to it."""
    whole = piece_of([join], fuser.position)
    old, new = [whole], []
    for group in taking:
        own = {r for op in group.members for r in op.results}
        piece = piece_of([*group.members, join], fuser.position)
        old.append(piece_of(group.members, fuser.position))
        new.append(Piece(piece.ops, piece.inputs, [v for v in piece.outputs if v in own]))

    def refused(members: Sequence[Op]) -> str:
        return why_not(fuser, piece_of(members, fuser.position))

    apply = functools.partial(hand_over, fuser, join.results[0], {join}, fuser.groups[join], taking, refused)
    pairs = [(join, reader) for reader in readers]
    return Choice(old, new, apply, pairs, whole, copied / join.results[0].type.bytes)


def has_kernels(fuser: Fuser, choice: Choice) -> bool:
    """Whether there is somebody to ask: tall products are Triton's too, others only who runs wide ones has."""
    wide = [piece for (_, reader), piece in zip(choice.pairs, choice.new, strict=True) if not is_tall(reader)]
    if not wide or fuser.follows is None:
        return not wide
    able = able_by(fuser)
    return all(able(replace(choice, new=[piece])) for piece in wide)
