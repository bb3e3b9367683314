"""Wide products, and convolutions, take along what reads their results or sums up a factor of theirs, where a provider
has kernels for that and the clock says so.

Such a product keeps tensor cores busy; an activation or its gradient behind it is then computed beside the next tile,
and what the product makes is not read again (or, where nobody else wants it, not even written). A kernel that goes on
from sums of what it reads is cut behind them. A gradient that a weight's gradient is made of is summed up on the way
for that of a bias. Statistics of what a convolution makes, and the sums of a norm's gradient behind that of its input,
are what it takes along. Tall products, which wait for memory, are `tall_products.py`'s.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ..dialects.step.reductions import Reduction
from ..ir.core import Op, Value
from . import again
from .around import take_along
from .regions import base, piece_of
from .tall_products import (
    Choice,
    afters,
    beside,
    has_wide_windows,
    heavy,
    is_tall,
    likely_orders,
    sizes_of,
    strides_of,
    take,
    take_faster,
    why_not,
)

if TYPE_CHECKING:
    from .fuse import Fuser, Group

#: bytes that all kernels that are alike must save to be worth measuring: few, since other sizes are the same kernel
LEAST = 1 << 24


def join_wide(fuser: Fuser, groups: list[Group]) -> list[Group]:
    """Joins wide products with their neighbours; gives all kernels."""
    if fuser.follows is None:
        return groups
    wide = wide_among(fuser)
    products = [op for op in wide if sizes_of(op)]
    able = able_by(fuser)
    take_faster(fuser, first_wide(fuser))
    cuts: list[Group] = []
    take_faster(fuser, heavy(fuser, filter(able, up_to_sums(fuser, products, cuts))))
    alone = [op for op in products if fuser.groups[op].members == [op]]
    take_faster(fuser, heavy(fuser, beside(fuser, alone, able)))
    joined = {id(g): g for op in wide if len((g := fuser.groups[op]).members) > 1}
    known = {id(g) for g in groups}
    return [g for g in (*groups, *cuts) if g.members] + [g for g in joined.values() if id(g) not in known]


def wide_among(fuser: Fuser) -> list[Op]:
    """The wide products that stand alone."""
    left = [op for op in fuser.nodes if op.parent is not None]  # what others compute instead is gone
    return [op for op in left if is_wide(op) and op.results[0].uses and fuser.groups[op].members == [op]]


def able_by(fuser: Fuser) -> Callable[[Choice], bool]:
    """Whether a provider has a kernel for a choice."""
    orders, follows = likely_orders(fuser.block), fuser.follows
    assert follows is not None
    return lambda choice: follows(choice.new[0], lambda v: strides_of(v, orders))


def first_wide(fuser: Fuser) -> list[Choice]:
    """What reads the results of wide products, as it is taken along first."""
    if fuser.follows is None:
        return []
    return heavy(fuser, filter(able_by(fuser), afters(fuser, wide_among(fuser))), LEAST)


def up_to_sums(fuser: Fuser, products: Sequence[Op], cuts: list[Group]) -> Iterator[Choice]:
    """Kernels that read what a product makes and go on from sums of it, cut behind these, and before what they need
    first: that is put to the cuts."""
    for op in products:
        own, made = fuser.groups[op], op.results[0]
        readers = {id(g): g for u in again.through_views(made) if (g := fuser.groups.get(u)) is not None}
        if own.members != [op] or len(readers) != 1 or made.type.bytes < again.LEAST:
            continue
        (other,) = readers.values()
        parts = cut(other.members, made)
        if not parts[-1] or {fuser.half(m) for m in other.members} != {fuser.half(op)}:
            continue
        if not all(map(fuser.is_fusible, parts[1])) or again.is_forbidden(fuser, made, other):
            continue
        before, whole, rest = (piece_of(p, fuser.position) for p in (parts[0], [op, *parts[1]], parts[2]))
        old = [piece_of(g.members, fuser.position) for g in (own, other)]
        new = [whole, rest, *([before] if parts[0] else [])]
        choice = Choice(
            old, new, functools.partial(take_part, fuser, own, other, parts, made, cuts), [(op, parts[1][0])]
        )
        if choice.worth_it and not any(why_not(fuser, piece) for piece in new):
            yield choice


def cut(members: Sequence[Op], made: Value) -> tuple[list[Op], list[Op], list[Op]]:
    """The ops of a kernel that reads a product's result: what they need first, those up to sums of it, the rest;
    nothing where these hang together otherwise."""
    hang, late, among = set[Op](), set[Op](), set(members)
    needs: dict[Op, set[Op]] = {}  # of each op, those of the kernel that it is made of
    for op in members:
        seen = [base(v) for v in op.operands]
        makers = {v.op for v in seen if v.op in among and v.op is not None}
        needs[op] = makers.union(*(needs[m] for m in makers))
        if made in seen or makers & hang:
            hang.add(op)
        if makers & late or any(m in hang and issubclass(m.definition, Reduction) for m in makers):
            late.add(op)
    own = hang - late
    if not late:
        return [], [], []
    needed = set[Op]().union(*(needs[op] for op in own)) - hang
    own |= {op for op in needed if op.results[0].type.size >= made.type.size}  # such as what tells columns apart
    needed -= own
    if any(own & needs[op] for op in needed):
        return [], [], []
    return (
        [op for op in members if op in needed],
        [op for op in members if op in own],
        [op for op in members if op not in own | needed],
    )


def take_part(
    fuser: Fuser, own: Group, other: Group, parts: Sequence[Sequence[Op]], made: Value, cuts: list[Group]
) -> None:
    """One kernel of a product and some ops of one that reads its result, others of what comes before and after."""
    before, part, _ = parts
    if set(other.members) != {op for ops in parts for op in ops}:
        return
    groups = [replace(other, members=list(ops), gone=[], along=[]) for ops in (before, part)]
    for group in groups:
        fuser.groups.update(dict.fromkeys(group.members, group))
    other.members[:] = parts[-1]
    take(fuser, own, groups[1], made)
    if groups[1].members:  # something was joined meanwhile that stands between
        for group in groups:
            take_along(fuser, other, group)
    cuts.append(groups[0])


def is_wide(op: Op) -> bool:
    """Whether an op may take along what reads its result."""
    return (bool(sizes_of(op)) and not is_tall(op)) or has_wide_windows(op)
