"""Loops around an anchor: a depthwise convolution takes along what its neighbours do to one element at a time.

Before it: cheap ops that make the image it reads out of another one and of numbers per channel; the image itself is
then never written. After it: sums per channel over what it makes, and cheap ops that make another image out of that,
such as an activation's gradient, which is then written in its place. Which loops these are is said by their access maps
alone: an image is walked as it is, a vector along the channels. Whoever runs such a region asks `sides_of` for both.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ..dialects.loop import Apply, Constant, Load, Reduce, Space, Store
from ..dialects.step.control import root_of
from ..dialects.step.fused import Fused
from ..ir.attributes import Symbol
from ..ir.builtin import Func
from ..ir.core import Block, Builder, Op, Value
from . import again
from .attention_sides import ATTENTION
from .loops import NotLoops, lowered
from .regions import Bodies, Body, Piece, base, body_of, is_source, is_view, piece_of

if TYPE_CHECKING:
    from .fuse import Fuser, Fusion, Group

#: what each anchor can take along: loops on the image it reads first, loops on what it makes
TAKES = {"step.conv": (True, True), "step.conv_input_grad": (False, True), "step.conv_weight_grad": (True, False)}
#: and the anchor that `tall_products.py` joins with loops of any kind
PRODUCT = "step.contract"
FLOATS = ("f32", "bf16", "f16")
CHANNEL = 1


class NotAround(Exception):
    """Ops are no loops around an anchor; the message says why."""


@dataclass(frozen=True, slots=True)
class Side:
    """The loops on one side of an anchor: a piece of the region, as a function and as a loop kernel."""

    piece: Piece
    function: Op
    kernel: Op

    @property
    def images(self) -> list[Value]:
        """What it reads element by element."""
        return [v for v in self.piece.inputs if v.type.rank > 1]

    @property
    def vectors(self) -> list[Value]:
        """What it reads once per channel."""
        return [v for v in self.piece.inputs if v.type.rank == 1]


@dataclass(frozen=True, slots=True)
class Sides:
    """A region around an anchor."""

    anchor: Op
    before: Side | None
    after: Side | None

    @property
    def stored(self) -> Value:
        """The image that is written: what the anchor makes, or what the loops after it make of that."""
        made = self.anchor.results[0]
        if self.after is None:
            return made
        return next((v for v in self.after.piece.outputs if v.type.shape == made.type.shape), made)


def sides_of(body: Op) -> Sides:
    """The anchor of a function and the loops before and after it."""
    block = body.regions[0].block
    position: dict[Op, float] = {op: i for i, op in enumerate(block)}
    anchors = [op for op in block if op.name in TAKES]
    if len(anchors) != 1:
        raise NotAround("it has no anchor, or several")
    (anchor,) = anchors
    first = {op for op in makers_of(anchor) if is_work(op)}
    rest = [op for op in block if is_work(op) and op is not anchor and op not in first]
    may_before, may_after = TAKES[anchor.name]
    before = after = None
    if first:
        if not may_before:
            raise NotAround("it takes nothing along on its loads")
        before = side(first, position)
        image = base(anchor.operands[0])
        if before.piece.outputs != [image] or set(through_views(image)) != {anchor}:
            raise NotAround("what is made for it has other readers")
        if any(base(v) is image for v in anchor.operands[1:]):
            raise NotAround("it reads the same image twice")
        if [v.type.shape for v in before.images] != [image.type.shape]:
            raise NotAround("its image is made of several")
        check(before.kernel, image.type.shape, sums=False)
    if rest:
        if not may_after:
            raise NotAround("it takes nothing along on its stores")
        after = side(rest, position)
        made = anchor.results[0]
        images = [v for v in after.piece.outputs if v.type.rank > 1]
        if made not in after.piece.inputs or len(images) + any(u.definition.terminator for u in made.uses) != 1:
            raise NotAround("nothing is read of what it makes, or not one image is written")
        if images and images[0].type is not made.type:
            raise NotAround("it is written in another type")
        check(after.kernel, made.type.shape, sums=True)
        if not any(op.definition is Reduce for op in after.kernel.regions[0].block):
            raise NotAround("nothing is summed up")
    return Sides(anchor, before, after)


def is_work(op: Op) -> bool:
    return not (op.definition.terminator or is_view(op) or is_source(op))


def makers_of(op: Op) -> set[Op]:
    """All that an op needs."""
    found: set[Op] = set()
    pending = [v.op for v in op.operands]
    while pending:
        maker = pending.pop()
        if maker is not None and maker not in found:
            found.add(maker)
            pending += [v.op for v in maker.operands]
    return found


def through_views(value: Value) -> Iterable[Op]:
    return again.through_views(value)


def side(ops: Iterable[Op], position: dict[Op, float]) -> Side:
    piece = piece_of(ops, position)
    function = body_of(piece)
    try:
        return Side(piece, function, lowered(function))
    except NotLoops as error:
        raise NotAround(str(error)) from error


def check(kernel: Op, shape: tuple[int, ...], sums: bool) -> None:
    """Refuses loops that do more than walk images element by element and vectors by channel."""
    rank = len(shape)
    as_it_is = [[int(d == row) for d in range(rank)] + [0] for row in range(rank)]
    by_channel = [as_it_is[CHANNEL]]
    others = tuple(d for d in range(rank) if d != CHANNEL)
    behind: set[Value] = set()  # numbers that wait for a sum
    for argument in kernel.regions[0].block.arguments:
        if argument.type.element.text not in FLOATS:
            raise NotAround(f"a tensor of {argument.type.element}")
    for op in kernel.regions[0].block:
        waits = any(v in behind for v in op.operands)
        if op.definition is Space:
            if tuple(op.sizes) != shape:
                raise NotAround("it walks other dimensions")
        elif op.definition is Load:
            if op.dynamic or op.guarded or op.checked or listed(op) not in (as_it_is, by_channel):
                raise NotAround("a tensor is read in another order")
        elif op.definition is Reduce:
            if not sums or op.kind != "sum" or tuple(op.dims) != others or op.attributes["dtype"].text != "f32":
                raise NotAround("a reduction that is no sum per channel")
            if waits:
                raise NotAround("a sum that waits for another")
            behind.add(op.results[0])
        elif op.definition is Store:
            if op.dynamic or (listed(op) != as_it_is and not (sums and listed(op) == by_channel)):
                raise NotAround("it is written in another order")
            if waits and listed(op) == as_it_is:
                raise NotAround("an image that waits for a sum")
        elif op.definition not in (Apply, Constant) and not op.definition.terminator:
            raise NotAround(f"{op.name} is no function of numbers")
        if waits:
            behind.update(op.results)


def listed(op: Op) -> list[list[int]]:
    return [list(row) for row in op.attributes["map"]]


# ---- joining ---------------------------------------------------------------------------------------------------------


def join_around(fuser: Fuser, groups: list[Group]) -> list[Group]:
    """Lets anchors that a provider takes for itself take their neighbours along; gives the kernels that are left."""
    anchors = [op for op in fuser.nodes if op.name in TAKES and op.groups > 1 and fuser.stands_alone(op)]
    anchors = [op for op in anchors if fuser.groups[op].members == [op] and any(fuser.groups[op] is g for g in groups)]
    read = dict.fromkeys(base(op.operands[0]) for op in anchors if TAKES[op.name][0])
    for value in read:
        take_before(fuser, value, set(anchors))
    for op in anchors:
        if TAKES[op.name][1]:
            take_after(fuser, op)
    return [g for g in groups if g.members]


def take_before(fuser: Fuser, value: Value, anchors: set[Op]) -> None:
    """Has all readers of an image compute it, if they are anchors; it is then not written."""
    readers = list(dict.fromkeys(through_views(value)))
    maker = fuser.groups.get(value.op) if value.op is not None else None
    if maker is None or value.type.bytes < again.LEAST or not fuser.is_fusible(maker.members[0]):
        return
    if any(u not in anchors or not TAKES[u.name][0] or base(u.operands[0]) is not value for u in readers):
        return
    if any(again.is_forbidden(fuser, value, fuser.groups[u]) for u in readers):
        return
    ops = again.makers(value, set(maker.members))
    if ops:
        taking = [fuser.groups[u] for u in readers]
        hand_over(fuser, value, ops, maker, taking, lambda members: why_not(fuser, members))


def hand_over(
    fuser: Fuser, value: Value, ops: set[Op], maker: Group, taking: Sequence[Group], why_not: Callable[[list[Op]], str]
) -> None:
    """Has kernels compute a value that another one makes by these ops and that is then not written; takes everything
    back where one of them cannot be."""
    change = again.Change()
    for group in taking:
        change.members.append((group, list(group.members)))
        again.copy_into(fuser, change, value, ops, group)
    change.members.append((maker, list(maker.members)))
    unread = again.drop_unread(maker)
    left = bool(maker.members) and fuser.bodies(piece_of(maker.members, fuser.position)).why_not
    if left or any(why_not(group.members) for group in taking):
        change.undo(fuser)
        return
    maker.gone += unread
    if not maker.members:
        taking[0].along.append(maker.gone)
    for op in unread:
        for view in [u for r in op.results for u in r.uses]:
            again.erase_views(view)
        op.erase()
    if value.op in maker.members:  # it reads the value itself: what is left of others' views is no reason to write it
        again.erase_unread_views(value)


def take_after(fuser: Fuser, op: Op) -> None:
    """Joins an anchor with the kernels that do nothing but sum up what it makes, or make one image of it beside."""
    own, made = fuser.groups[op], op.results[0]
    for user in list(dict.fromkeys(through_views(made))):
        other = fuser.groups.get(user)
        if other is None or other is own or not other.members or not fuser.is_fusible(user):
            continue
        if {fuser.half(m) for m in other.members} != {fuser.half(op)} or again.is_forbidden(fuser, made, other):
            continue
        if why_not(fuser, [*own.members, *other.members]) or comes_back(fuser, own, other, made):
            continue
        take_along(fuser, own, other)


def take_along(fuser: Fuser, own: Group, other: Group) -> None:
    """Makes a group part of another one, which knows it by itself for when the two come apart."""
    own.along += [[*other.members, *other.gone], *other.along]
    own.members[:] = sorted([*own.members, *other.members], key=fuser.position.__getitem__)
    for member in other.members:
        fuser.groups[member] = own
    other.members.clear()


def why_not(fuser: Fuser, members: Sequence[Op]) -> str:
    piece = piece_of(members, fuser.position)
    if reason := fuser.bodies.problem(piece):
        return reason
    try:
        sides_of(body_of(piece))
    except NotAround as error:
        return str(error)
    return ""


def comes_back(fuser: Fuser, anchor: Group, other: Group, made: Value | None) -> bool:
    """Whether what else than a value a kernel reads hangs on the anchor, by way of any kernels."""
    own, position = set(anchor.members), fuser.position
    first = min((position[m] for m in own), default=math.inf)
    seen = set(other.members)
    pending = [v for m in other.members for v in m.operands if base(v) is not made and v.op not in seen]
    while pending:
        op = pending.pop().op
        if op is None or op in seen:
            continue
        if op in own:
            return True
        group = fuser.groups.get(op)
        members = [op] if group is None else group.members
        seen.update(members)
        if max(position[m] for m in members) > first:  # what is before the anchor hangs on nothing that it makes
            pending += [v for m in members for v in m.operands]
    return False


# ---- taking apart ----------------------------------------------------------------------------------------------------


def divide(function: Op, fusion: Fusion, bodies: Bodies, wanted: Callable[[Op], bool]) -> dict[str, Body]:
    """Makes kernels of their own of an anchor and of the loops around it, where nobody runs them as one; gives the new
    ones by name."""
    root, block = root_of(function), function.regions[0].block
    known = {f.attributes["sym_name"]: f for f in root.regions[0].block if f.definition is Func}
    made: dict[str, Body] = {}
    for op in [o for o in block if o.definition is Fused and wanted(o)]:
        inner = known[op.callee.name].regions[0].block
        pieces = pieces_around(known[op.callee.name])
        if len(pieces) < 2:
            continue
        builder = Builder(block, op, op.loc, op.phase)
        mapping = dict(zip(inner.arguments, op.operands, strict=True))
        for number, piece in enumerate(pieces):
            name = f"{op.callee.name}_{number}"
            if name not in known:
                known[name] = body_of(piece, name).detach()
                root.regions[0].block.append(known[name])
            made[name] = replace(bodies(piece), function=known[name])
            operands = [outside(v, mapping, block, op) for v in piece.inputs]
            types = [v.type for v in piece.outputs]
            part = builder.create(Fused, operands, types, {"callee": Symbol(name)})
            mapping.update(zip(piece.outputs, part.results, strict=True))
            if any(o.name in TAKES or o.name == PRODUCT or o.name in ATTENTION for o in piece.ops):
                fusion.kernels = [(part if o is op else o, sites) for o, sites in fusion.kernels]
        assert inner.last is not None
        for old, new in zip(op.results, inner.last.operands, strict=True):
            old.replace_by(mapping[new])
        op.erase()
    fusion.bodies |= made
    fusion.divided.update(made)
    return made


def pieces_around(body: Op) -> list[Piece]:
    """The loops before an anchor, the anchor and the loops after it; none of a body that is something else."""
    position: dict[Op, float] = {op: i for i, op in enumerate(body.regions[0].block)}
    products = [op for op in position if op.name == PRODUCT or op.name in ATTENTION]
    if len(products) == 1:
        return pieces_of_product(products[0], position)
    try:
        sides = sides_of(body)
    except NotAround:  # what follows is of any kind: a convolution as a product (`wide_products.py`)
        images = [op for op in position if op.name in TAKES]
        return pieces_of_product(images[0], position) if len(images) == 1 else []
    anchor = piece_of([sides.anchor], position)
    before, after = ([] if s is None else [s.piece] for s in (sides.before, sides.after))
    return [*before, anchor, *after]


def pieces_of_product(product: Op, position: dict[Op, float]) -> list[Piece]:
    """What makes each factor of a product or an attention, that, and what reads each of its results."""
    left = {op: None for op in position if is_work(op)}
    pieces: list[list[Op]] = []
    for value in product.operands:
        makers = set() if value.op is None else {value.op, *makers_of(value.op)}
        pieces.append([op for op in left if op in makers])
        left = {op: None for op in left if op not in makers}
    pieces.append([product])
    del left[product]
    for result in product.results[:-1]:  # what reads the last one has everything that is left
        readers = readers_behind(result) & left.keys()
        own = readers.union(*(makers_of(op) for op in readers))
        pieces.append([op for op in left if op in own])
        left = {op: None for op in left if op not in own}
    return [piece_of(ops, position) for ops in (*pieces, list(left)) if ops]


def readers_behind(value: Value) -> set[Op]:
    """All that needs a value."""
    found: set[Op] = set()
    pending = list(value.uses)
    while pending:
        op = pending.pop()
        if op not in found:
            found.add(op)
            pending += [u for r in op.results for u in r.uses]
    return found


def outside(value: Value, mapping: dict[Value, Value], block: Block, at: Op) -> Value:
    """What a value of a body is outside of it; views come along."""
    if value not in mapping:
        view = value.op
        assert view is not None and is_view(view)
        copy = view.clone({v: outside(v, mapping, block, at) for v in view.operands})
        copy.attributes["phase"] = at.phase
        block.insert_before(copy, at)
        mapping[value] = copy.results[0]
    return mapping[value]
