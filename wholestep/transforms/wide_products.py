"""Wide products take along what reads their results or sums up a factor of theirs, where a provider has kernels for
that and the clock says so.

Such a product keeps tensor cores busy; an activation or its gradient behind it is then computed beside the next tile,
and what the product makes is not read again (or, where nobody else wants it, not even written). A gradient that a
weight's gradient is made of is summed up on the way for that of a bias. Tall products, which wait for memory, are
`tall_products.py`'s.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .tall_products import Choice, afters, beside, heavy, is_tall, likely_orders, sizes_of, strides_of, take_faster

if TYPE_CHECKING:
    from .fuse import Fuser, Group


def join_wide(fuser: Fuser, groups: list[Group]) -> list[Group]:
    """Joins wide products with their neighbours; gives all kernels."""
    if fuser.follows is None:
        return groups
    wide = [op for op in fuser.nodes if sizes_of(op) and not is_tall(op) and op.results[0].uses]
    wide = [op for op in wide if fuser.groups[op].members == [op]]
    orders = likely_orders(fuser.block)

    def able(choice: Choice) -> bool:
        assert fuser.follows is not None
        return fuser.follows(choice.new[0], lambda v: strides_of(v, orders))

    take_faster(fuser, heavy(fuser, filter(able, afters(fuser, wide))))
    alone = [op for op in wide if fuser.groups[op].members == [op]]
    take_faster(fuser, heavy(fuser, filter(able, beside(fuser, alone))))
    joined = {id(g): g for op in wide if len((g := fuser.groups[op]).members) > 1}
    known = {id(g) for g in groups}
    return [g for g in groups if g.members] + [g for g in joined.values() if id(g) not in known]
