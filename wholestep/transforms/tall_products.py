"""Tall products, such as 1x1 convolutions of large images, take their neighbours along where the clock says so.

Such a product has so few multiplications per element that it waits for memory: what makes the rows that it reads, and
what is done to those that it makes (BatchNorm's sums, a residual gradient), costs next to nothing inside of it. Whether
one kernel really is faster than a library's product and kernels beside it is measured, for all readers of a value
together: it is either written once or computed by each of them. What others than such products read as well, such as a
residual sum, is written by the one that computes it on the way. Who must wait for other readers of a wide result
computes the product once more instead of reading it. A convolution of few channels, such as that of a
photograph, is such a product for those who sum up what it makes.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..dialects.step.contraction import parse_spec
from ..dialects.strides import view_of
from ..ir.core import Block, Op, Value
from . import again, around
from .around import comes_back, hand_over, take_along
from .loops import REDUCTIONS, NotLoops, lowered
from .regions import Piece, base, is_view, piece_of

if TYPE_CHECKING:
    from .fuse import Fuser, Group

#: multiplications per element that is read or written, up to which a product is tried
RIDGE = 256
#: how much longer than wide the matrix of rows is
TALL = 8
#: the share of bytes, and the bytes of all kernels that are alike, that must be saved for it to be worth measuring:
#: kernels take long to compile, but equal ones only once
WORTH, LEAST = 0.05, 1 << 26
#: so many times as long may what moves less take: kernels are timed alone, and fewer bytes leave more of the cache and
#: of the power to others
TIE = 1.12
#: how many times as large as what a product reads its result must be, that it is computed twice
WIDER = 2
#: elements in a row of a window up to which a convolution is such a product
ROW = 64

#: said where there is no kernel to measure
NOBODY = "no provider has a kernel for both that is right"

Order = tuple[int, ...]


def is_tall(op: Op) -> bool:
    """Whether an op is a product of 16-bit numbers that waits for memory, one of whose sizes is much the longest."""
    short = sorted(sizes_of(op))
    return bool(short) and short[2] >= TALL * short[1] and waits_for_memory(op)


def waits_for_memory(op: Op) -> bool:
    """Whether an op is a product of 16-bit numbers with few multiplications per element that is read or written."""
    sides = sizes_of(op)
    if not sides:
        return False
    m, n, k = sides
    return m * n * k <= RIDGE * (m * n + m * k + n * k)


def sizes_of(op: Op) -> list[int]:
    """Rows, columns and summed elements of a product of 16-bit numbers without batches; none of anything else."""
    if op.name != "step.contract" or op.lhs.type.element.text not in ("bf16", "f16"):
        return []
    left, right, out = parse_spec(op.spec)
    size = dict(zip(left + right, (*op.lhs.type.shape, *op.rhs.type.shape), strict=True))
    if set(left) & set(right) & set(out):
        return []
    sides = []
    for labels in (set(left) & set(out), set(right) & set(out), set(left) & set(right)):
        product = 1
        for label in labels:
            product *= size[label]
        sides.append(product)
    return sides


def has_small_windows(op: Op) -> bool:
    """Whether an op is a convolution of few channels."""
    return op.name == "step.conv" and op.groups == 1 and op.w.type.shape[1] * op.w.type.shape[-1] <= ROW


def has_wide_windows(op: Op) -> bool:
    """Whether an op is a convolution of 16-bit images over so many channels that it is a product of their windows, or
    the input gradient of one."""
    if op.name not in ("step.conv", "step.conv_input_grad") or has_small_windows(op):
        return False
    if op.groups > 1 or op.transposed or len(op.stride) != 2:
        return False
    return op.w.type.element.text in ("bf16", "f16")


@dataclass(slots=True)
class Choice:
    """Kernels as they are and as they would be; the second where it is measured to be faster."""

    old: list[Piece]
    new: list[Piece]
    apply: Callable[[], None]
    #: who makes and who reads what lies between them, pair by pair (of kernels beside each other, one of each)
    pairs: Sequence[tuple[Op, Op]] = ()
    #: of a concatenation among the old ones that lies in place: itself, and the share of it that is copied there
    join: Piece | None = None
    copied: float = 1.0

    @property
    def saved(self) -> int:
        """Bytes that move less."""
        return round(self.before([bytes_of(piece) for piece in self.old])) - sum(map(bytes_of, self.new))

    def before(self, each: Sequence[float]) -> float:
        """What the old ones take together, of bytes or seconds that each has."""
        return sum(own * self.copied if piece is self.join else own for own, piece in zip(each, self.old, strict=True))

    @property
    def worth_it(self) -> bool:
        """Whether enough of its bytes is saved; whether these are many is a matter of how many are alike."""
        return self.saved >= max(WORTH * sum(map(bytes_of, self.old)), 1)


def why_not(fuser: Fuser, piece: Piece) -> str:
    """Why a product and its neighbours are no kernel. It is walked in tiles: a walk by rows is not asked of it."""
    if any(has_small_windows(op) for op in piece.ops):
        return around.why_not(fuser, [op for op in piece.ops if around.is_work(op)])
    if not any(op.name == "step.contract" or has_wide_windows(op) for op in piece.ops):
        return fuser.bodies(piece).why_not
    body = fuser.bodies(piece)
    if body.why_not and body.function is not None and body.rows is None:
        try:
            body.kernel, body.why_not = lowered(body.function), ""
        except NotLoops as error:
            return str(error)
    return body.why_not


def bytes_of(piece: Piece) -> int:
    return sum(v.type.bytes for v in (*piece.inputs, *piece.outputs))


def join_tall(fuser: Fuser, groups: list[Group], then: Callable[[], list[Choice]] = list) -> list[Group]:
    """Lets tall products take along what makes their factors, then what reads their results, then what makes factors
    that others read as well, then sums of what they read; gives all kernels. then: what may be asked after all that."""
    tall = [op for op in fuser.nodes if is_tall(op) and len(fuser.groups[op].members) == 1 and op.results[0].uses]
    images = [op for op in fuser.nodes if has_small_windows(op) and fuser.stands_alone(op)]
    products = tall + [op for op in images if len(fuser.groups[op].members) == 1]
    kinds = [(befores, tall), (afters, products), (on_the_way, tall), (once_more, tall), (beside, tall)]
    for (kind, among), after in itertools.zip_longest(kinds, kinds[1:]):
        found = heavy(fuser, kind(fuser, among))
        later: list[Choice] = []
        if found and fuser.expect is not None:  # most of what is asked for next is the same whatever is decided now
            later = [*(heavy(fuser, after[0](fuser, after[1])) if after else ()), *(then() if kind is befores else ())]
        take_faster(fuser, found, later)
    joined = {id(g): g for op in products if len((g := fuser.groups[op]).members) > 1}
    known = {id(g) for g in groups}
    return [g for g in groups if g.members] + [g for g in joined.values() if id(g) not in known]


def take_faster(fuser: Fuser, choices: Iterable[Choice], later: Iterable[Choice] = ()) -> None:
    """Joins what is faster as one kernel, or as fast and moves less. later: choices that may come next."""
    assert fuser.seconds is not None
    wanted = list(choices)
    if not wanted:
        return
    orders = likely_orders(fuser.block)

    def laid(value: Value) -> tuple[int, ...]:
        return strides_of(value, orders)

    if fuser.expect is not None:
        fuser.expect([p for c in later for p in (*c.old, *c.new)], laid)
    times = iter(fuser.seconds([p for c in wanted for p in (*c.old, *c.new)], laid))
    for choice in wanted:
        before, after = choice.before([next(times) for _ in choice.old]), sum(next(times) for _ in choice.new)
        if after < (before if choice.saved <= 0 else TIE * before):
            choice.apply()
            continue
        why = f"measured: {after * 1e6:.1f} us as one kernel, {before * 1e6:.1f} us apart"
        for pair in choice.pairs:
            if all(op in fuser.names for op in pair):  # (copies of ops have no name)
                fuser.refuse(*pair, why if math.isfinite(after) else NOBODY, choice.saved)


def named(fuser: Fuser, group: Group) -> Op:
    """An op of a kernel by which it is known: copies have no name."""
    return next((op for op in group.members if op in fuser.names), group.members[0])


def heavy(fuser: Fuser, found: Iterable[Choice], least: int | None = None) -> list[Choice]:
    """The choices that save many bytes together with those that are like them, or so many at least."""
    choices = list(found)
    kinds = [tuple(id(fuser.bodies(p)) for p in (*c.old, *c.new)) for c in choices]
    saved = dict.fromkeys(kinds, 0)
    for kind, choice in zip(kinds, choices, strict=True):
        saved[kind] += choice.saved
    return [c for kind, c in zip(kinds, choices, strict=True) if saved[kind] >= (LEAST if least is None else least)]


# ---- before a product ------------------------------------------------------------------------------------------------


def befores(fuser: Fuser, products: Sequence[Op]) -> Iterator[Choice]:
    """Large factors that tall products read, and beside them at most the kernel that makes them, cheaply."""
    among = set(products)
    for value in dict.fromkeys(v for op in products for seen in op.operands for v in parts_of(fuser, base(seen))):
        maker = fuser.groups.get(value.op) if value.op is not None else None
        if maker is None or value.type.bytes < again.LEAST or not fuser.is_fusible(maker.members[0]):
            continue
        joins, readers = read_by(fuser, value, maker)
        if any(u not in among or again.is_forbidden(fuser, value, fuser.groups[u]) for u in readers):
            continue
        if any(fuser.half(u) != again.half(fuser, maker) for u in readers):
            continue
        ops = again.makers(value, set(maker.members))
        if ops:
            choice = before(fuser, value, maker, readers, ops, joins)
            if choice is not None:
                yield choice


def is_join(fuser: Fuser, op: Op | None) -> bool:
    """Whether an op is a concatenation that costs nothing, because its parts are written where it lies."""
    return op is not None and op.name == "step.concat" and fuser.alone(op) and op in fuser.groups


def parts_of(fuser: Fuser, value: Value) -> list[Value]:
    """A value; what it consists of, where that lies in one memory."""
    if not is_join(fuser, value.op):
        return [value]
    assert value.op is not None
    return [base(v) for v in value.op.operands]


def read_by(fuser: Fuser, value: Value, maker: Group) -> tuple[list[Op], list[Op]]:
    """The concatenations in place that a value is a part of, and who reads it, by way of those as well."""
    users = [u for u in dict.fromkeys(again.through_views(value)) if u not in maker.members]
    joins = [u for u in users if is_join(fuser, u)]
    readers = [u for u in users if u not in joins] + [u for j in joins for u in again.through_views(j.results[0])]
    return joins, list(dict.fromkeys(readers))


def before(
    fuser: Fuser, value: Value, maker: Group, readers: Sequence[Op], ops: set[Op], joins: Sequence[Op] = ()
) -> Choice | None:
    """joins: concatenations that readers read from parts then, since the value is no longer in memory."""
    work = [op for op in ops if not is_view(op)]
    new = []
    for reader in readers:
        members = fuser.groups[reader].members
        own = {r for op in members for r in op.results}
        read = [j for j in joins if any(base(v) is j.results[0] for v in reader.operands)]
        piece = piece_of([*members, *work, *read], fuser.position)
        new.append(Piece(piece.ops, piece.inputs, [v for v in piece.outputs if v in own]))
    left = still_read(maker, value, {*readers, *joins})
    if left:
        rest, written = piece_of(left, fuser.position), set(piece_of(maker.members, fuser.position).outputs) - {value}
        new.append(Piece(rest.ops, rest.inputs, [v for v in rest.outputs if v in written]))
    taking = [fuser.groups[u] for u in readers]
    old = [piece_of(g.members, fuser.position) for g in (maker, *taking)]

    def refused(members: Sequence[Op]) -> str:
        return why_not(fuser, piece_of(members, fuser.position))

    def apply() -> None:
        for join in joins:
            own = [g for g in taking if any(base(v) is join.results[0] for m in g.members for v in m.operands)]
            hand_over(fuser, join.results[0], {join}, fuser.groups[join], own, refused)
        hand_over(fuser, value, ops, maker, taking, refused)

    assert value.op is not None
    choice = Choice(old, new, apply, [(value.op, readers[0])])
    return None if not choice.worth_it or any(why_not(fuser, piece) for piece in new) else choice


def still_read(maker: Group, value: Value, readers: set[Op]) -> list[Op]:
    """The ops of a kernel that others than these readers of a value need."""
    unread: set[Op] = set()
    for op in reversed(maker.members):
        users = (u for r in op.results for u in again.through_views(r))
        if all(u in unread or (op is value.op and u in readers) for u in users):
            unread.add(op)
    return [op for op in maker.members if op not in unread]


# ---- after a product -------------------------------------------------------------------------------------------------


def afters(fuser: Fuser, products: Sequence[Op]) -> Iterator[Choice]:
    """Kernels that read what a product makes, each with its first such product."""
    met: set[int] = set()
    for op in products:
        own, made = fuser.groups[op], op.results[0]
        if made.type.bytes < again.LEAST:
            continue
        for user in list(dict.fromkeys(again.through_views(made))):
            other = fuser.groups.get(user)
            if other is None or other is own or not other.members or id(other) in met or not fuser.is_fusible(user):
                continue
            if {fuser.half(m) for m in other.members} != {fuser.half(op)} or again.is_forbidden(fuser, made, other):
                continue
            whole = piece_of([*own.members, *other.members], fuser.position)
            old = [piece_of(g.members, fuser.position) for g in (own, other)]
            choice = Choice(old, [whole], functools.partial(take, fuser, own, other, made), [(op, user)])
            if choice.worth_it and not comes_back(fuser, own, other, made) and not why_not(fuser, whole):
                met.add(id(other))
                yield choice


def take(fuser: Fuser, own: Group, other: Group, made: Value) -> None:
    """One kernel of a product and of one that reads what it makes, or makes what it reads, unless what was joined
    meanwhile stands between."""
    maker, reader = (own, other) if made.op in own.members else (other, own)
    if not other.members or comes_back(fuser, maker, reader, made):
        return
    if why_not(fuser, piece_of([*own.members, *other.members], fuser.position)):
        return
    take_along(fuser, own, other)


# ---- before a product and for others ---------------------------------------------------------------------------------


def on_the_way(fuser: Fuser, products: Sequence[Op]) -> Iterator[Choice]:
    """Kernels that make large factors cheaply, each with the first tall product that may write those for all others."""
    met: set[int] = set()
    for op in products:
        own = fuser.groups[op]
        for seen in op.operands:
            value = base(seen)
            maker = fuser.groups.get(value.op) if value.op is not None else None
            if maker is None or maker is own or id(maker) in met or value.type.bytes < again.LEAST:
                continue
            if seen.type.size != value.type.size or again.is_forbidden(fuser, value, own):
                continue
            if {fuser.half(m) for m in maker.members} != {fuser.half(op)} or not makes_only(fuser, maker, value):
                continue
            whole = piece_of([*maker.members, *own.members], fuser.position)
            old = [piece_of(g.members, fuser.position) for g in (maker, own)]
            assert value.op is not None
            choice = Choice(old, [whole], functools.partial(take, fuser, own, maker, value), [(value.op, op)])
            if choice.worth_it and not comes_back(fuser, maker, own, value) and not why_not(fuser, whole):
                met.add(id(maker))
                yield choice
                break  # (it is measured with one of them)


def makes_only(fuser: Fuser, maker: Group, value: Value) -> bool:
    """Whether a kernel is nothing but cheap ops that make a value, and bits that tell something of it."""
    work = {op for op in again.makers(value, set(maker.members)) if not is_view(op)}
    beside = set(maker.members) - work
    told = all(op.name in again.CHEAP or op.name == "step.pack_bits" for op in beside)
    return bool(work) and told and all(map(fuser.is_fusible, maker.members))


# ---- once more for another reader ------------------------------------------------------------------------------------


def once_more(fuser: Fuser, products: Sequence[Op]) -> Iterator[Choice]:
    """Kernels that read what a product makes of much less, and that must wait for others who read it: they multiply
    once more instead."""
    for op in products:
        own, made = fuser.groups[op], op.results[0]
        if made.type.bytes < max(again.LEAST, WIDER * sum(v.type.bytes for v in op.operands)):
            continue
        if any(base(v).op in own.members for v in op.operands):
            continue
        outside = {id(g): g for u in again.through_views(made) if (g := fuser.groups.get(u)) not in (None, own)}
        for other in outside.values():
            if not all(map(fuser.is_fusible, other.members)) or again.is_forbidden(fuser, made, other):
                continue
            if {fuser.half(m) for m in other.members} != {fuser.half(op)}:
                continue
            old = [piece_of(g.members, fuser.position) for g in (own, other)]
            whole = piece_of([op, *other.members], fuser.position)
            new = [Piece(whole.ops, whole.inputs, [v for v in whole.outputs if v is not made])]
            written = len(outside) > 1 or any(u.definition.terminator for u in again.through_views(made))
            first = old[0].outputs if written else [v for v in old[0].outputs if v is not made]
            if not first:
                continue
            new.insert(0, Piece(old[0].ops, old[0].inputs, first))

            def refused(members: Sequence[Op]) -> str:
                return why_not(fuser, piece_of(members, fuser.position))

            apply = functools.partial(hand_over, fuser, made, {op}, own, [other], refused)
            choice = Choice(old, new, apply, [(op, named(fuser, other))])
            if choice.worth_it and not any(why_not(fuser, piece) for piece in new):
                yield choice


# ---- beside a product ------------------------------------------------------------------------------------------------


def beside(
    fuser: Fuser, products: Sequence[Op], able: Callable[[Choice], bool] = lambda choice: True
) -> Iterator[Choice]:
    """Kernels that sum something up and read nothing large but what a product reads, each with the last product that
    may take it along."""
    met: set[int] = set()
    for op in reversed(products):
        own = fuser.groups[op]
        mine = piece_of(own.members, fuser.position)
        for value in dict.fromkeys(base(v) for v in mine.inputs if v.type.bytes >= again.LEAST):
            for user in dict.fromkeys(again.through_views(value)):
                other = fuser.groups.get(user)
                if other is None or other is own or id(other) in met or not other.members:
                    continue
                if {fuser.half(m) for m in other.members} != {fuser.half(op)} or not fuser.is_fusible(user):
                    continue
                theirs = piece_of(other.members, fuser.position)
                large = {base(v) for v in theirs.inputs if v.type.bytes >= again.LEAST}
                if large != {value} or any(v.type.bytes >= again.LEAST for v in theirs.outputs):
                    continue
                if not sums_along(other.members, sizes_of(op)[2]) or not sums_factor(op, own, other):
                    continue
                if (value.op is not None and again.is_forbidden(fuser, value, own)) or apart(fuser, own, other):
                    continue
                whole = piece_of([*own.members, *other.members], fuser.position)
                both = functools.partial(take_beside, fuser, own, other)
                choice = Choice([mine, theirs], [whole], both, [(op, named(fuser, other))])
                if choice.worth_it and not why_not(fuser, whole) and able(choice):
                    met.add(id(other))
                    yield choice


def sums_along(ops: Iterable[Op], length: int) -> bool:
    """Whether some ops reduce something, and whatever they reduce is so long."""
    reduced = [op for op in ops if op.name in REDUCTIONS]
    return bool(reduced) and all(op.operands[0].type.size == length * op.results[0].type.size for op in reduced)


def sums_factor(op: Op, own: Group, other: Group) -> bool:
    """Whether what a kernel sums up is a factor of a product, as far as both are computed from the same."""
    factors = [made_of(v, own.members) for v in op.operands]
    return all(made_of(o.operands[0], other.members) in factors for o in other.members if o.name in REDUCTIONS)


def made_of(value: Value, members: Sequence[Op]) -> object:
    """How some ops make a value; how it is seen or cast does not count."""
    value = base(value)
    if value.op is None or value.op not in members:
        return value
    if value.op.name == "step.cast":
        return made_of(value.op.operands[0], members)
    attributes = {k: v for k, v in value.op.attributes.items() if k != "phase"}
    return value.op.name, str(sorted(attributes.items())), *(made_of(v, members) for v in value.op.operands)


def apart(fuser: Fuser, one: Group, other: Group) -> bool:
    """Whether one of two kernels needs what the other makes, by way of any others."""
    return comes_back(fuser, one, other, None) or comes_back(fuser, other, one, None)


def take_beside(fuser: Fuser, own: Group, other: Group) -> None:
    """One kernel of both, unless what was joined meanwhile stands between."""
    if own.members and other.members and not apart(fuser, own, other):
        take_along(fuser, own, other)


# ---- how tensors will lie --------------------------------------------------------------------------------------------


def likely_orders(block: Block) -> dict[Value, Order]:
    """Of values that will not lie row by row: their dimensions in the order of memory, the outermost first.

    A guess for the sake of measuring: kernels write as the largest tensor lies that they read, and what is broadcast
    lies nowhere.
    """
    found: dict[Value, Order] = {}
    for op in block:
        if op.definition.terminator or not op.operands or op.name == "step.contract":
            continue
        order: Order | None = None
        if op.name == "step.layout":
            order = tuple(op.order)
        elif op.name == "step.transpose":
            own = order_of(op.operands[0], found)
            order = tuple(tuple(op.order).index(d) for d in own)
        elif op.name == "step.reshape":
            seen = view_of(op, op.operands[0].type.shape, strides_of(op.operands[0], found))
            order = None if seen is None else tuple(sorted(range(len(seen[0])), key=lambda d: -seen[0][d]))
        else:
            rank = max(r.type.rank for r in op.results)
            alike = [v for v in op.operands if v.type.rank == rank and v.type.size > 1]
            order = order_of(max(alike, key=lambda v: (v in found, v.type.bytes)), found) if alike else None
        for result in op.results:
            if order is not None and len(order) == result.type.rank and order != tuple(range(len(order))):
                found[result] = order
    return found


def order_of(value: Value, orders: dict[Value, Order]) -> Order:
    return orders.get(value, tuple(range(value.type.rank)))


def strides_of(value: Value, orders: dict[Value, Order]) -> tuple[int, ...]:
    """Strides without gaps; those of the whole where a value is cut out of one, such as rows that were filled up."""
    if value.op is not None and value.op.name == "step.slice":
        whole = value.op.operands[0]
        seen = view_of(value.op, whole.type.shape, strides_of(whole, orders))
        assert seen is not None
        return seen[0]
    strides, step = [0] * value.type.rank, 1
    for dim in reversed(order_of(value, orders)):
        strides[dim] = step
        step *= value.type.shape[dim]
    return tuple(strides)
