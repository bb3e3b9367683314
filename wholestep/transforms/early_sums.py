"""Sums over a gradient that the end of the step asks for, such as its part of the norm, by the kernel that makes it.

Clipping by the norm of all gradients reads each of them once more. A product whose result is a gradient has the numbers
at hand: it takes along the kernel that adds up their squares, which then runs in backward, and only single numbers are
left for the end. Whether that is faster than a library's product and a pass is measured. That pass is one launch for all
gradients: each is counted with its bytes, at the best rate that the pass over one of them has.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..ir.core import Op
from . import again, tall_products
from .again import CHEAP
from .around import comes_back, take_along
from .loops import REDUCTIONS
from .regions import Piece, base, is_source, piece_of

if TYPE_CHECKING:
    from .fuse import Fuser, Group

#: the phase that such sums are part of, and those of ops that may be in their kernel
CLIP, PHASES = "clip", ("backward", "clip")


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
    measured = [(pair, *(next(times) for _ in pair.pieces)) for pair in pairs]
    rate = min(passing / pair.passed for pair, _, passing, _ in measured)
    taken = []
    for pair, product, passing, together in measured:
        apart = product + min(passing, rate * pair.passed)
        if together >= apart:
            why = f"measured: {together * 1e6:.1f} us as one kernel, {apart * 1e6:.1f} us apart"
            fuser.refuse(pair.product, first_reader(pair), why, pair.product.results[0].type.bytes)
        elif not why_not(fuser, pair.own, pair.other, pair.product):  # (what was joined meanwhile may stand between)
            bring(fuser, [pair.product, *pair.other.members])
            take_along(fuser, pair.own, pair.other)
            taken.append(pair.own)
    known = {id(g) for g in groups}
    return [g for g in groups if g.members] + [g for g in {id(g): g for g in taken}.values() if id(g) not in known]


def candidates(fuser: Fuser, groups: Sequence[Group]) -> Iterator[Pair]:
    """Products of backward, each with a kernel of the end of the step that sums up what it makes."""
    for other in groups:
        product = product_of(fuser, other)
        if product is None or product.results[0].type.bytes < again.LEAST:
            continue
        own = fuser.groups[product]
        if not is_tried(fuser, product) or why_not(fuser, own, other, product):
            continue
        whole = piece_of([*own.members, *other.members], fuser.position)
        old = [piece_of(g.members, fuser.position) for g in (own, other)]
        choice = tall_products.Choice(old, [whole], lambda: None)
        if (fuser.products or choice.worth_it) and not tall_products.why_not(fuser, whole):
            yield Pair(product, own, other, (old[0], old[1], whole))


def product_of(fuser: Fuser, group: Group) -> Op | None:
    """The last product whose result a kernel that sums up gradients reads; None of any other kernel."""
    if not group.members or not sums_up(group.members):
        return None
    read = [base(v).op for v in piece_of(group.members, fuser.position).inputs]
    found = [op for op in read if op is not None and op.name == "step.contract" and op in fuser.groups]
    return max(found, key=fuser.position.__getitem__, default=None)


def sums_up(ops: Sequence[Op]) -> bool:
    """Whether ops are sums of the end of the step, with cheap ops that backward has left to it: no update."""
    if any(op.phase not in PHASES or (op.phase != CLIP and op.name not in CHEAP) for op in ops):
        return False
    return any(op.phase == CLIP and op.name in REDUCTIONS for op in ops)


def is_tried(fuser: Fuser, product: Op) -> bool:
    """Products that wait for memory; others only where everything is tried: libraries are hard to beat there."""
    return product.name == "step.contract" and (fuser.products or tall_products.waits_for_memory(product))


def why_not_early(fuser: Fuser, own: Group, other: Group) -> str:
    """Why a kernel of the end of the step is not brought to one of backward: the first must be a product's."""
    product = product_of(fuser, other)
    if product is None or product not in own.members:
        return f"one is part of {own.members[-1].phase}, the other of {other.members[-1].phase}"
    return why_not(fuser, own, other, product)


def why_not(fuser: Fuser, own: Group, other: Group, product: Op) -> str:
    """Why a product's kernel cannot take a kernel of the end of the step along, whatever their loops are."""
    if not sums_up(other.members):
        return "it does not only sum up a gradient"
    if not own.members or any(op.phase != "backward" for op in own.members):
        return "the product is not one of backward"
    made, at = product.results[0], fuser.position[product]
    if again.is_forbidden(fuser, made, other):
        return "it is forbidden"
    inside = {*own.members, *other.members}
    for value in piece_of(other.members, fuser.position).inputs:
        maker = base(value).op
        if maker is not None and maker not in inside and not is_source(maker) and fuser.position[maker] > at:
            return f"the product would wait for {fuser.names.get(maker, maker.name)}"
    return "another kernel must run between them" if comes_back(fuser, own, other, made) else ""


def first_reader(pair: Pair) -> Op:
    """The op that reads the product's result first."""
    made = pair.product.results[0]
    return next(op for op in pair.other.members if any(base(v) is made for v in op.operands))


def bring(fuser: Fuser, members: Sequence[Op]) -> None:
    """Moves the sums of a kernel that a product of backward is in to behind that product, with the views and constants
    that they look through: the kernel is one of backward."""
    products = [op for op in members if op.name == "step.contract" and op.phase == "backward"]
    if not products or not any(op.phase == CLIP for op in members) or any(op.phase not in PHASES for op in members):
        return
    last = max(products, key=fuser.position.__getitem__)
    at, below = fuser.position[last], last.next
    moved = [op for op in piece_of(members, fuser.position).ops if fuser.position[op] > at]
    for number, op in enumerate(moved, 1):
        if not is_source(op):
            op.attributes["phase"] = last.phase
        fuser.position[op] = at + number / (len(moved) + 1)
        below = below.next if op is below else below
        op.detach()
        fuser.block.insert_before(op, below)
