"""Wide products, and convolutions, take along what reads their results or sums up a factor of theirs, where a provider
has kernels for that and the clock says so.

Such a product keeps tensor cores busy; an activation or its gradient behind it is then computed beside the next tile,
and what the product makes is not read again (or, where nobody else wants it, not even written). A gradient that a
weight's gradient is made of is summed up on the way for that of a bias. Statistics of what a convolution makes, and
the sums of a norm's gradient behind that of its input, are what it takes along. Tall products, which wait for memory,
are `tall_products.py`'s.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from ..ir.core import Op
from . import again
from .around import comes_back, take_along
from .regions import base, piece_of
from .tall_products import (
    Choice,
    afters,
    has_wide_windows,
    heavy,
    is_tall,
    likely_orders,
    sizes_of,
    strides_of,
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
    wide = [op for op in fuser.nodes if is_wide(op) and op.results[0].uses and fuser.groups[op].members == [op]]
    products = [op for op in wide if sizes_of(op)]
    orders = likely_orders(fuser.block)

    def able(choice: Choice) -> bool:
        assert fuser.follows is not None
        return fuser.follows(choice.new[0], lambda v: strides_of(v, orders))

    take_faster(fuser, heavy(fuser, filter(able, afters(fuser, wide)), LEAST))
    take_faster(fuser, heavy(fuser, beside(fuser, products, able)))
    joined = {id(g): g for op in wide if len((g := fuser.groups[op]).members) > 1}
    known = {id(g) for g in groups}
    return [g for g in groups if g.members] + [g for g in joined.values() if id(g) not in known]


def is_wide(op: Op) -> bool:
    """Whether an op may take along what reads its result."""
    return (bool(sizes_of(op)) and not is_tall(op)) or has_wide_windows(op)


def beside(fuser: Fuser, products: Sequence[Op], able: Callable[[Choice], bool]) -> Iterator[Choice]:
    """Kernels that read nothing large but a factor of a product, each with the last product that stands alone and may
    take it along."""
    met: set[int] = set()
    for op in reversed(products):
        own = fuser.groups[op]
        if own.members != [op]:
            continue
        for value in dict.fromkeys(map(base, op.operands)):
            for user in dict.fromkeys(again.through_views(value)):
                other = fuser.groups.get(user)
                if other is None or other is own or id(other) in met or not other.members:
                    continue
                if {fuser.half(m) for m in other.members} != {fuser.half(op)} or not fuser.is_fusible(user):
                    continue
                old = [piece_of(g.members, fuser.position) for g in (own, other)]
                large = {base(v) for v in old[1].inputs if v.type.bytes >= again.LEAST}
                if large != {value} or any(v.type.bytes >= again.LEAST for v in old[1].outputs):
                    continue
                if (value.op is not None and again.is_forbidden(fuser, value, own)) or apart(fuser, own, other):
                    continue
                whole = piece_of([*own.members, *other.members], fuser.position)
                choice = Choice(old, [whole], functools.partial(take_beside, fuser, own, other))
                if choice.worth_it and not why_not(fuser, whole) and able(choice):
                    met.add(id(other))
                    yield choice


def apart(fuser: Fuser, one: Group, other: Group) -> bool:
    """Whether one of two kernels needs what the other makes, by way of any others."""
    return comes_back(fuser, one, other, None) or comes_back(fuser, other, one, None)


def take_beside(fuser: Fuser, own: Group, other: Group) -> None:
    """One kernel of both, unless what was joined meanwhile stands between."""
    if own.members and other.members and not apart(fuser, own, other):
        take_along(fuser, own, other)
