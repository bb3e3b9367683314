"""`summed_products`: a sum of products is one product, of what they multiply side by side.

Layers whose outputs are added up, such as skip connections to the end of a network, each write one, and a kernel reads
all of them. Instead what they read lies in one memory (the plan has it written there, `plan/joins.py`), their weights
side by side, and one product sums over both. It is added up before it is rounded and not after, in another order. The
gradients of their weights, which all read that of the sum, are one product as well.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ..dialects.step import StepBuilder, constant_value
from ..dialects.step.contraction import Contract, parse_spec
from ..dialects.step.pointwise import Add
from ..ir.attributes import freeze
from ..ir.core import Op, Value
from ..ir.types import F32
from .expand import has_expansion
from .join_slices import continues, drop, summands
from .loops import is_primitive
from .opportunity import Change, Place, Transformation, register_transformation
from .regions import ANCHORS, base, is_view
from .shared_input import ALIGNED

#: products below which one of them does better with the sum behind it
FEWEST = 3


@dataclass(frozen=True, slots=True)
class Summed:
    """A sum: the products of one kind among its summands, the views behind the first, and the other summands."""

    products: tuple[Op, ...]
    views: tuple[Op, ...]
    others: tuple[Value, ...]


@register_transformation
class SummedProducts(Transformation):
    """Level 2: the last of a chain of sums, and the products that it adds up."""

    name = "summed_products"
    level = 2

    def places(self, function: Op) -> Iterator[Place]:
        for op in function.regions[0].block:
            summed = summed_of(op)
            if summed is not None and len(summed.products) >= FEWEST:
                weights = sum(p.rhs.type.bytes for p in summed.products)
                # every product is written and read; weights are put side by side; gradients read theirs once
                less = 2 * len(summed.products) * op.result.type.bytes - 2 * weights
                less += sum(g.shared.type.bytes * (len(g.ops) - 1) for g in gradients_of(op, summed))
                yield op, why_not(summed) or Change(-less)

    def apply(self, op: Op) -> None:
        summed = summed_of(op)
        assert op.parent is not None and summed is not None
        b = StepBuilder(op.parent, op, op.loc, op.phase)
        first, gradients = summed.products[0], gradients_of(op, summed)
        left, right = dims_of(first)
        rows = b.concat([p.lhs for p in summed.products], dim=left)
        weights = b.concat([p.rhs for p in summed.products], dim=right)
        y = b.contract(
            rows, weights, together(b, [p.addend for p in summed.products]), spec=first.spec, wide=first.wide
        )
        for view in summed.views:
            copy = view.clone({view.operands[0]: y})
            op.parent.insert_before(copy, op)
            y = copy.results[0]
        for other in summed.others:
            y = b.add(y, other)
        op.result.replace_by(y)
        drop(op)
        for each in gradients:
            each.put_together(rows)


@dataclass(frozen=True, slots=True)
class Gradients:
    """Products that read one and the same value beside what the summed products read, in the order of these: gradients
    of their weights. first: the one that comes first in the program."""

    ops: tuple[Op, ...]
    #: which operand of theirs that value is
    side: int
    first: Op

    @property
    def shared(self) -> Value:
        return self.ops[0].operands[self.side]

    def put_together(self, rows: Value) -> None:
        """One product with all that the others read side by side; each of them is a part of its result."""
        first = self.first
        assert first.parent is not None
        labels = parse_spec(first.spec)
        dim = labels[2].index(labels[1 - self.side][-1])
        b = StepBuilder(first.parent, first, first.loc, first.phase)
        factors = (first.operands[self.side], rows) if self.side == 0 else (rows, first.operands[self.side])
        y, at = b.contract(*factors, spec=first.spec, wide=first.wide), 0
        for op in self.ops:
            end = at + op.result.type.shape[dim]
            op.result.replace_by(b.slice(y, dim=dim, start=at, end=end))
            at = end
        for op in self.ops:
            drop(op)


def gradients_of(total: Op, summed: Summed) -> list[Gradients]:
    """The products behind a sum that read what the summed ones do, one for each, and all the same beside that."""
    assert total.parent is not None
    place = {op: number for number, op in enumerate(total.parent)}
    found: list[dict[object, tuple[Op, int]]] = []
    for product in summed.products:
        views = views_of(product.lhs)
        mine: dict[object, tuple[Op, int]] = {}
        for user, operand in seen_by(base(product.lhs)):
            if user.definition is not Contract or place.get(user, -1) < place[total] or user.addend is not None:
                continue
            side = 1 - list(user.operands).index(operand)
            other = user.operands[side]
            *factors, out = parse_spec(user.spec)
            columns = factors[1 - side][-1]
            if views_of(operand) == views and columns in out and columns not in factors[side]:
                mine[user.spec, user.wide, side, base(other), views_of(other)] = user, side
        found.append(mine)
    result = []
    for key, (_, side) in found[0].items():
        if all(key in mine for mine in found):
            ops = tuple(mine[key][0] for mine in found)
            result.append(Gradients(ops, side, min(ops, key=lambda op: place[op])))
    return result


def seen_by(value: Value) -> Iterator[tuple[Op, Value]]:
    """Who reads a value by way of views, and as which value."""
    for user in dict.fromkeys(value.uses):
        if is_view(user):
            yield from seen_by(user.result)
        else:
            yield user, value


def views_of(value: Value) -> tuple[object, ...]:
    """How a value is seen, from what is in memory on."""
    found: list[object] = []
    while value.op is not None and is_view(value.op):
        found.insert(0, shown(value.op))
        value = value.op.operands[0]
    return tuple(found)


def summed_of(op: Op) -> Summed | None:
    """What a sum adds up, where it is the last of a chain; None where it is none."""
    if op.definition is not Add or continues(op):
        return None
    kinds: dict[object, list[tuple[Value, Op, tuple[Op, ...]]]] = {}
    others: list[Value] = []
    for value in summands(op):
        maker, views = product_of(value)
        if maker is not None and maker.phase == op.phase and value.type is op.result.type:
            kinds.setdefault(kind_of(maker, views), []).append((value, maker, views))
        elif constant_value(value) != 0:
            others.append(value)
    if not kinds:
        return None
    most = max(kinds.values(), key=len)
    others += [value for found in kinds.values() if found is not most for value, _, _ in found]
    return Summed(tuple(maker for _, maker, _ in most), most[0][2], tuple(others))


def kind_of(product: Op, views: Sequence[Op]) -> object:
    """Equal for products that can be one, by what they do and how they are looked at."""
    bias = None if product.addend is None else product.addend.type
    return product.spec, product.wide, product.lhs.type.element, bias, tuple(map(shown, views))


def product_of(value: Value) -> tuple[Op | None, tuple[Op, ...]]:
    """The product that a value shows, and the views of it, where nobody else reads any of them."""
    views: list[Op] = []
    while value.op is not None and is_view(value.op) and len(value.uses) == 1:
        views.insert(0, value.op)
        value = value.op.operands[0]
    is_product = value.op is not None and value.op.definition is Contract and len(value.uses) == 1
    return value.op if is_product else None, tuple(views)


def dims_of(op: Op) -> tuple[int, int]:
    """The dimension that a product sums over, in either factor; -1 where those are several, or none."""
    left, right, out = parse_spec(op.spec)
    inner = [label for label in left if label not in out]
    return (left.index(inner[0]), right.index(inner[0])) if len(inner) == 1 else (-1, -1)


def why_not(summed: Summed) -> str:
    first = summed.products[0]
    if dims_of(first)[0] != first.lhs.type.rank - 1 or set.intersection(*map(set, parse_spec(first.spec))):
        return "they sum over something else than the columns of rows"
    if first.addend is not None and first.addend.type.rank != 1:
        return "something else than a bias is added to them"
    for product in summed.products:
        if product.lhs.type.shape[-1] * product.lhs.type.element.bits // 8 % ALIGNED:
            return f"parts of a row would not begin at multiples of {ALIGNED} bytes"
        maker = base(product.lhs).op
        if maker is None or maker.name in ANCHORS or not (is_primitive(maker) or has_expansion(maker)):
            return "what they read is written by a library, or by nobody: it would be copied side by side"
    if len({base(p.lhs) for p in summed.products}) < len(summed.products):
        return "some of them read the same"
    if sum(p.lhs.type.bytes for p in summed.products) > sum(p.result.type.bytes for p in summed.products):
        return "what they read takes more memory than what they make, and would have to wait for the last of it"
    return ""


def shown(view: Op) -> object:
    """Equal for views that show the same of equal values."""
    attributes = {k: freeze(v) for k, v in view.attributes.items() if k != "phase"}
    return view.name, frozenset(attributes.items()), view.operands[0].type, view.result.type


def together(b: StepBuilder, vectors: Sequence[Value | None]) -> Value | None:
    """The sum of vectors; none where there are none."""
    known = [v for v in vectors if v is not None]
    if not known:
        return None
    total = b.cast_to(known[0], F32)
    for vector in known[1:]:
        total = b.add(total, b.cast_to(vector, F32))
    return b.cast_to(total, known[0].type.element)
