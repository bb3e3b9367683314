"""`symmetric_product`: the gradient of x times itself as one product instead of two.

Both products read the same gradient, one of them turned around, and the same x; what they give is added. Instead the
gradient and the turned gradient are added, which rounds before the product and not after it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ..dialects.step import StepBuilder
from ..dialects.step.contraction import Contract, parse_spec
from ..dialects.step.pointwise import Add, Cast
from ..dialects.step.shape import Transpose
from ..ir.core import Op, Value
from .direct import stored, under
from .opportunity import Change, Place, Transformation, register_transformation


@dataclass(frozen=True)
class Product:
    """A product that a sum reads: its operands without transposes, and their labels and those of the summand."""

    operands: tuple[Value, Value]
    labels: tuple[str, str]
    out: str


@dataclass(frozen=True)
class Pair:
    """Two products of one factor with a gradient, of which the second is turned; how the first is written."""

    gradient: Value
    order: tuple[int, ...]
    factor: Value
    spec: str


@register_transformation
class SymmetricProduct(Transformation):
    """Level 2: a sum of two products, and those."""

    name = "symmetric_product"
    level = 2

    def places(self, function: Op) -> Iterator[Place]:
        for op in function.regions[0].block:
            pair = pair_of(op) if op.definition is Add else None
            if pair is not None:
                moved, dearer = change(op, pair), "to add up the gradients would move more than the product does"
                yield op, Change(moved) if moved < 0 else dearer

    def apply(self, op: Op) -> None:
        pair = pair_of(op)
        assert op.parent is not None and pair is not None
        b = StepBuilder(op.parent, op, op.loc, op.phase)
        gradient = b.add(pair.gradient, b.transpose(pair.gradient, order=pair.order))
        y = b.contract(gradient, pair.factor, spec=pair.spec)
        op.result.replace_by(b.cast_to(y, op.result.type.element))
        op.erase()


def change(op: Op, pair: Pair) -> int:
    """Bytes: the sum of the gradients, without the second product and its summand."""
    made = op.result.type.size * pair.factor.type.element.bits // 8
    return 2 * pair.gradient.type.bytes - pair.factor.type.bytes - 2 * made


def pair_of(op: Op) -> Pair | None:
    """What a sum adds, if that is such a pair."""
    first, second = (product_of(v) for v in op.operands)
    if first is None or second is None or op.operands[0].type.shape != op.operands[1].type.shape:
        return None
    for factor in (0, 1):
        for other in (0, 1):
            mine, theirs = first.operands[factor], second.operands[other]
            if mine is theirs and first.operands[1 - factor] is second.operands[1 - other] is not mine:
                found = turned(first, second, factor, other)
                if found is not None:
                    return found
    return None


def turned(first: Product, second: Product, factor: int, other: int) -> Pair | None:
    """The pair, if the second product becomes the first when the gradient's dimensions change places."""
    same: dict[str, str] = {}
    pairs = [*zip(second.out, first.out, strict=True), *zip(second.labels[other], first.labels[factor], strict=True)]
    for theirs, mine in pairs:
        if same.setdefault(theirs, mine) != mine:
            return None
    gradient, wanted = [same.get(c, "") for c in second.labels[1 - other]], first.labels[1 - factor]
    if len(set(same.values())) != len(same) or sorted(gradient) != sorted(wanted) or "".join(gradient) == wanted:
        return None
    order = tuple(gradient.index(c) for c in wanted)
    spec = f"{wanted},{first.labels[factor]}->{first.out}"
    return Pair(first.operands[1 - factor], order, first.operands[factor], spec)


def product_of(value: Value) -> Product | None:
    """The product that a summand is, seen through a cast and transposes that nobody else reads."""
    orders = []
    while value.op is not None and len(value.uses) == 1 and value.op.definition in (Cast, Transpose):
        if value.op.attributes.get("rounds"):
            return None  # the program rounds each summand
        if value.op.definition is Transpose:
            orders.append(value.op.order)
        value = value.op.operands[0]
    op = value.op
    if op is None or op.definition is not Contract or op.addend is not None or len(value.uses) != 1:
        return None
    left, right, out = parse_spec(op.spec)
    for order in reversed(orders):
        out = "".join(out[i] for i in order)
    return Product((under(op.lhs), under(op.rhs)), (stored(op.lhs, left), stored(op.rhs, right)), out)
