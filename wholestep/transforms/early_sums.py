"""Sums over a gradient that the end of the step asks for, such as its part of the norm, by the kernel that makes it.

Clipping by the norm of all gradients reads each of them once more. Whoever makes a gradient has its numbers at hand: a
kernel that adds up their squares may join it (`fuse.py`), runs in backward then, and only single numbers are left for
the end. Whether a product does that faster than a library's product and a pass is measured. That pass is one launch
for all gradients: each is counted with its bytes, at the best rate that the pass over one of them has.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..ir.core import Op
from ..ir.types import F16
from . import again, tall_products
from .again import CHEAP
from .around import PRODUCT, comes_back, take_along
from .loops import REDUCTIONS
from .regions import Piece, base, is_source, is_view, piece_of

if TYPE_CHECKING:
    from .fuse import Fuser, Group

#: the phase that such sums are part of, and those of ops that may be in their kernel
CLIP, PHASES = "clip", ("loss", "backward", "clip")
#: the half of the program that gradients are made in, and bytes of one that is worth it beside a pass over all of them
BACKWARD, LEAST = 1, 1 << 23


@dataclass(frozen=True, slots=True)
class Pair:
    """A product, the kernel that sums up what it makes, and the kernels before and after they are one."""

    product: Op
    own: Group
    other: Group
    pieces: tuple[Piece, Piece, Piece]

    @property
    def passed(self) -> int:
        """Bytes that the pass moves."""
        return tall_products.bytes_of(self.pieces[1])


def join_sums(fuser: Fuser, groups: list[Group]) -> list[Group]:
    """Lets products take along what sums up the gradients that they make, where that is faster; gives all kernels."""
    assert fuser.seconds is not None
    pairs = list(candidates(fuser, groups))
    if not pairs:
        return groups
    orders = tall_products.likely_orders(fuser.block)
    asked = [piece for pair in pairs for piece in pair.pieces]
    times = iter(fuser.seconds(asked, lambda v: tall_products.strides_of(v, orders)))
    measured = [[next(times) for _ in pair.pieces] for pair in pairs]
    rate = min(passing / pair.passed for pair, (_, passing, _) in zip(pairs, measured, strict=True))
    taken: dict[int, Group] = {}
    for pair, (product, passing, together) in zip(pairs, measured, strict=True):
        apart = product + min(passing, rate * pair.passed)
        if together >= apart:
            why = f"measured: {together * 1e6:.1f} us as one kernel, {apart * 1e6:.1f} us apart"
            fuser.refuse(pair.product, first_reader(pair), why, pair.product.results[0].type.bytes)
        elif not why_not_one(fuser, pair.own, pair.other):  # (what was joined meanwhile may stand between)
            bring(fuser, [pair.product, *pair.other.members])
            take_along(fuser, pair.own, pair.other)
            taken[id(pair.own)] = pair.own
    known = {id(g) for g in groups}
    return [g for g in groups if g.members] + [g for number, g in taken.items() if number not in known]


def candidates(fuser: Fuser, groups: Sequence[Group]) -> Iterator[Pair]:
    """Products of backward, each with a kernel of the end of the step that sums up what it makes."""
    for other in groups:
        product = product_of(fuser, other)
        if product is None or product.results[0].type.bytes < again.LEAST:
            continue
        own = fuser.groups[product]
        if not is_tried(fuser, product) or why_not_one(fuser, own, other):
            continue
        whole = piece_of([*own.members, *other.members], fuser.position)
        old = [piece_of(g.members, fuser.position) for g in (own, other)]
        choice = tall_products.Choice(old, [whole], lambda: None)
        if fuser.products or (choice.worth_it and choice.saved >= tall_products.LEAST):
            yield Pair(product, own, other, (old[0], old[1], whole))


def product_of(fuser: Fuser, group: Group) -> Op | None:
    """The last product whose result a kernel that sums up gradients reads; None of any other kernel."""
    if not group.members or not sums_up(group.members):
        return None
    found = [op for op in read_by(fuser, group) if op.name == PRODUCT and op in fuser.groups]
    return max(found, key=fuser.position.__getitem__, default=None)


def read_by(fuser: Fuser, group: Group) -> list[Op]:
    """Whose results a kernel reads."""
    makers = [base(v).op for v in piece_of(group.members, fuser.position).inputs]
    return [op for op in makers if op is not None and not is_source(op)]


def sums_up(ops: Sequence[Op]) -> bool:
    """Whether ops are sums of the end of the step, with cheap ops that backward has left to it: no update."""
    if any(op.phase not in PHASES or (op.phase != CLIP and op.name not in CHEAP) for op in ops):
        return False
    return any(op.phase == CLIP and op.name in REDUCTIONS for op in ops)


def is_tried(fuser: Fuser, product: Op) -> bool:
    """Products that wait for memory; others only where everything is tried: libraries are hard to beat there."""
    return product.name == PRODUCT and (fuser.products or tall_products.waits_for_memory(product))


def why_not_early(fuser: Fuser, own: Group, other: Group, producer: Op, consumer: Op) -> str:
    """Why a kernel of a later half is not brought to one that it reads from; those two are neighbours."""
    makers = set(own.members).intersection(read_by(fuser, other)) if sums_up(other.members) else set()
    if not makers:
        return f"one is part of {producer.phase}, the other of {consumer.phase}"
    if all(op.name != PRODUCT and max(r.type.bytes for r in op.results) < LEAST for op in makers):
        return "so small a gradient is summed up with others at the end of the step"
    return why_not(fuser, own, other)


def why_not(fuser: Fuser, own: Group, other: Group) -> str:
    """Why a kernel cannot take one of the end of the step along that sums up what it makes, whatever its loops are."""
    if not own.members or not other.members or not sums_up(other.members):
        return "it does not only sum up a gradient"
    if any(fuser.half(op) != BACKWARD for op in own.members):
        return "what it reads is not made in backward"
    read = [v for v in piece_of(other.members, fuser.position).inputs if base(v).op in own.members]
    made = [base(v) for v in read]
    if any(again.is_forbidden(fuser, value, other) for value in made):
        return "it is forbidden"
    if any(v.type.size != base(v).type.size for v in read):
        return "it sums up a part of what is made: the rest would be computed apart"
    if any(value.type.element is F16 for value in made):
        return "it would not see what is too large for f16"  # kernels hand numbers on as they are before rounding
    at = fuser.position[own.members[-1]]
    for maker in read_by(fuser, other):
        if maker not in own.members and fuser.position[maker] > at:
            return f"the gradient would wait for {fuser.names.get(maker, maker.name)}"
    return "another kernel must run between them" if any(comes_back(fuser, own, other, v) for v in made) else ""


def why_not_one(fuser: Fuser, own: Group, other: Group) -> str:
    """The same with their loops."""
    return why_not(fuser, own, other) or tall_products.why_not(
        fuser, piece_of([*own.members, *other.members], fuser.position)
    )


def first_reader(pair: Pair) -> Op:
    """The op that reads the product's result first."""
    made = pair.product.results[0]
    return next(op for op in pair.other.members if any(base(v) is made for v in op.operands))


def draw_near(fuser: Fuser) -> int:
    """Moves sums over gradients to behind what makes these, so that both are in one part of a program that is joined
    part by part; says how many. They stay ops of the end of the step: where they are not joined they are one batch."""
    position = {op: i for i, op in enumerate(fuser.block)}
    count = 0
    for op in list(fuser.block):
        if op.phase != CLIP or op.name not in REDUCTIONS or op.operands[0].type.size == 1:
            continue
        chain, makers = chain_of(op)
        if not makers or any(fuser.half(o) != BACKWARD for o in makers):
            continue
        last = max(makers, key=position.__getitem__)
        below = last.next
        for one in sorted((o for o in chain if position[o] > position[last]), key=position.__getitem__):
            below = one.next if one is below else below
            one.detach()
            fuser.block.insert_before(one, below)
        count += 1
    return count


def chain_of(op: Op) -> tuple[set[Op], list[Op]]:
    """A sum with the ops that only it needs and those that make one number of its result; whose results they read."""
    chain, makers, pending = {op}, list[Op](), [op]
    while pending:
        for maker in (v.op for v in pending.pop().operands):
            if maker is None or maker in chain:
                continue
            passed = is_view(maker) or is_source(maker)
            if passed or (maker.name in CHEAP and chain.issuperset(u for r in maker.results for u in r.uses)):
                chain.add(maker)
                pending.append(maker)
            else:
                makers.append(maker)
    value = op.results[0]
    while len(value.uses) == 1 and (user := next(iter(value.uses))).phase == CLIP and len(user.operands) == 1:
        chain.add(user)
        value = user.results[0]
    return chain, makers


def bring(fuser: Fuser, members: Sequence[Op]) -> None:
    """Makes a kernel of backward that sums of the end of the step are part of one of backward: they are moved behind
    what makes the gradient, with the views and constants that they look through."""
    if not any(op.phase == CLIP for op in members) or any(op.phase not in PHASES for op in members):
        return
    makers = [op for op in members if op.phase != CLIP and op.name not in CHEAP]  # (cheap ones have been put off)
    if not makers:
        return
    last = max(makers, key=fuser.position.__getitem__)
    at, below = fuser.position[last], last.next
    moved = [op for op in piece_of(members, fuser.position).ops if fuser.position[op] > at]
    for number, op in enumerate(moved, 1):
        if not is_source(op):
            op.attributes["phase"] = last.phase
        fuser.position[op] = at + number / (len(moved) + 1)
        below = op.next if op is below else below
        op.detach()
        fuser.block.insert_before(op, below)
