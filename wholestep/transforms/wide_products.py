"""Wide products take along what reads their results, where a provider has kernels for that and the clock says so.

Such a product keeps tensor cores busy; an activation or its gradient behind it is then computed beside the next tile,
and what the product makes is not read again (or, where nobody else wants it, not even written). Tall products, which
wait for memory, are `tall_products.py`'s.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .tall_products import afters, is_tall, likely_orders, sizes_of, strides_of, take_faster

if TYPE_CHECKING:
    from .fuse import Fuser, Group

#: the bytes that must be saved for it to be worth measuring
LEAST = 1 << 23


def join_wide(fuser: Fuser, groups: list[Group]) -> list[Group]:
    """Joins wide products with kernels that read their results; gives all kernels."""
    if fuser.follows is None:
        return groups
    wide = [op for op in fuser.nodes if sizes_of(op) and not is_tall(op) and fuser.groups[op].members == [op]]
    wide = [op for op in wide if op.results[0].uses]
    orders = likely_orders(fuser.block)
    found = [c for c in afters(fuser, wide, LEAST) if fuser.follows(c.new[0], lambda v: strides_of(v, orders))]
    take_faster(fuser, found)
    joined = {id(g): g for op in wide if len((g := fuser.groups[op]).members) > 1}
    known = {id(g) for g in groups}
    return [g for g in groups if g.members] + [g for g in joined.values() if id(g) not in known]
