"""Attention takes its neighbours along where the clock says so: what makes its operands is computed on load, what reads
its results on their tiles.

Which neighbours could be is said by access maps (`attention_sides.py`). Libraries have the quickest attentions, and run
them alone: one kernel of ours has to be faster than the best of theirs and the kernels beside it, which is measured.
Where nothing is measured nothing is joined, unless a user asks for it (`fusion_wishes.py`). What is rotated or cast for
attention is kept for its gradients; those compute it from what was kept anyway where all readers are attentions. Every
pair that stays apart has a reason, which `step.why_not` gives.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..dialects.step.base import StepOp
from ..ir.core import Op, Value
from . import again
from .around import take_along
from .attention_sides import ATTENTION, names_of
from .fusion_wishes import bytes_between
from .regions import base, is_view, piece_of
from .tall_products import Choice, before, heavy, take_faster

if TYPE_CHECKING:
    from .fuse import Fuser, Group

#: operations of an attention for each byte that is saved up to which one kernel is tried: a library's takes a third
#: less time than ours on a large GPU (bench/kernels_attention.py), which is worth its bytes up to about here
FEW = 300
UNMEASURED = "a library runs it, and nothing is measured here: force= makes them one kernel"
TOO_LITTLE = 'a library runs it, and as one kernel too few bytes would be saved to try it, unless tune="max"'


@dataclass(frozen=True, slots=True)
class Neighbour:
    """A kernel beside an attention: who makes and who reads what lies between them, and why they stay apart.

    makes: the operands of the attention that it makes, by name; none where it reads a result.
    """

    group: Group
    producer: Op
    consumer: Op
    why: str
    makes: frozenset[str]

    @property
    def pair(self) -> tuple[Op, Op]:
        return self.producer, self.consumer


def join_attention(fuser: Fuser, groups: list[Group]) -> list[Group]:
    """Joins attentions with their neighbours; gives all kernels."""
    anchors = [op for op in fuser.nodes if op.name in ATTENTION and fuser.groups[op].members == [op]]
    anchors = [op for op in anchors if any(r.uses for r in op.results)]
    if not fuser.attends or not anchors:
        return groups
    if fuser.seconds is not None:
        take_faster(fuser, heavy(fuser, handed_over(fuser, anchors)))
        for among in TRIED:
            take_faster(fuser, heavy(fuser, choices(fuser, anchors, among)))
    for op in anchors:
        note(fuser, op)
    joined = {id(g): g for op in anchors if len((g := fuser.groups[op]).members) > 1}
    known = {id(g) for g in groups}
    return [g for g in groups if g.members] + [g for g in joined.values() if id(g) not in known]


#: operands of forward that a program walks: what makes them is computed once for every block of queries
WALKED = frozenset(("k", "v", "mask"))
#: neighbours that an attention is tried with: all, those that are computed once, those behind it, those before it
TRIED: tuple[Callable[[Neighbour], bool], ...] = (
    lambda n: True,
    lambda n: n.makes.isdisjoint(WALKED),
    lambda n: not n.makes,
    lambda n: bool(n.makes),
)


def note(fuser: Fuser, op: Op) -> None:
    """Says why neighbours of an attention are kernels of their own."""
    for found in neighbours(fuser, op):
        if found.pair not in fuser.refused:
            why = found.why or (UNMEASURED if fuser.seconds is None else TOO_LITTLE)
            fuser.refuse(*found.pair, why, bytes_between(fuser, *found.pair))


def neighbours(fuser: Fuser, op: Op) -> list[Neighbour]:
    """The kernels that make what an attention reads and those that read what it makes, each once."""
    own, found, met = fuser.groups[op], list[Neighbour](), set[int]()
    operands = {name: base(value).op for name, value in names_of(op)[0].items()}
    between = [(maker, op, maker) for maker in dict.fromkeys(operands.values()) if maker is not None]
    between += [(op, user, user) for r in op.results for user in dict.fromkeys(again.through_views(r))]
    for producer, consumer, other in between:
        group = fuser.groups.get(other)
        if group is None or group is own or id(group) in met or not fuser.is_fusible(other):
            continue
        met.add(id(group))
        makes = frozenset(name for name, maker in operands.items() if maker in group.members)
        why = why_apart(fuser, own, group, producer, consumer)
        found.append(Neighbour(group, producer, consumer, why, makes))
    return found


def why_apart(fuser: Fuser, own: Group, group: Group, producer: Op, consumer: Op) -> str:
    """Why a kernel and an attention cannot be one, whoever ran that."""
    reader = fuser.groups[consumer]
    if any(again.is_forbidden(fuser, r, reader) for r in producer.results):
        return "it is forbidden"
    halves = {fuser.half(m) for m in (*own.members, *group.members)}
    if len(halves) > 1:
        return f"one is part of {producer.phase}, the other of {consumer.phase}"
    return why_not_one(fuser, [own, group])


def why_not_one(fuser: Fuser, groups: Sequence[Group]) -> str:
    """Why kernels cannot be one."""
    members = [m for g in groups for m in g.members]
    between = comes_back(fuser, set(members))
    if between is not None:
        return f"{fuser.names.get(between, between.name)} must run between them"
    return fuser.bodies.why_not(piece_of(members, fuser.position))


def comes_back(fuser: Fuser, members: set[Op]) -> Op | None:
    """An op that some ops need and that needs one of them, by way of any kernels; what kernels do is done at once."""
    pending = [v.op for m in members for v in m.operands if base(v).op not in members]
    seen: set[Op] = set()
    first = min(fuser.position[m] for m in members)
    while pending:
        op = pending.pop()
        if op is None or op in seen or fuser.position.get(op, first) < first:  # what comes before all needs none
            continue
        group = fuser.groups.get(op)
        together = [op] if group is None else group.members
        seen.update(together)
        for value in (v for m in together for v in m.operands):
            if base(value).op in members:
                return op
            pending.append(value.op)
    return None


# ---- what the clock decides ------------------------------------------------------------------------------------------


def choices(fuser: Fuser, anchors: Iterable[Op], among: Callable[[Neighbour], bool]) -> Iterator[Choice]:
    """Attentions that stand alone, each with some of its neighbours."""
    for op in anchors:
        own = fuser.groups[op]
        if own.members != [op]:
            continue
        beside = [n for n in neighbours(fuser, op) if not n.why and among(n)]
        every = [own, *(n.group for n in beside)]
        if not beside or why_not_one(fuser, every):
            continue
        old = [piece_of(g.members, fuser.position) for g in every]
        whole = piece_of([m for g in every for m in g.members], fuser.position)
        choice = Choice(old, [whole], functools.partial(take, fuser, every), [n.pair for n in beside])
        if choice.worth_it and is_tried(fuser, choice):
            yield choice


def take(fuser: Fuser, every: Sequence[Group]) -> None:
    """Makes kernels one, unless what was joined meanwhile stands between."""
    own, *others = every
    if all(g.members for g in every) and not why_not_one(fuser, every):
        for other in others:
            take_along(fuser, own, other)


def handed_over(fuser: Fuser, anchors: Sequence[Op]) -> Iterator[Choice]:
    """What is made for attentions alone, forward and backward: all of them compute it, and it is not written."""
    among = set(anchors)
    for value in dict.fromkeys(base(v) for op in anchors for v in op.operands):
        maker = fuser.groups.get(value.op) if value.op is not None else None
        if maker is None or value.type.bytes < again.LEAST or not fuser.is_fusible(maker.members[0]):
            continue
        readers = [u for u in dict.fromkeys(again.through_views(value)) if u not in maker.members]
        if len(readers) < 2 or any(u not in among for u in readers):
            continue
        if any(again.is_forbidden(fuser, value, fuser.groups[u]) for u in readers):
            continue
        ops = made_by(value, maker)
        choice = before(fuser, value, maker, readers, ops) if ops else None
        if choice is not None and is_tried(fuser, choice):
            yield choice


def is_tried(fuser: Fuser, choice: Choice) -> bool:
    """Whether what is saved could make up for a library's attention, which is faster; with `tune="max"` any."""
    anchors = [op for piece in choice.new for op in piece.ops if op.name in ATTENTION]
    return (
        fuser.products
        or sum(op.definition.flops(op) for op in anchors if issubclass(op.definition, StepOp)) <= FEW * choice.saved
    )


def made_by(value: Value, maker: Group) -> set[Op]:
    """The ops of a kernel that make a value out of what is in memory, with the views between them."""
    members, found = set(maker.members), set[Op]()
    pending = [value.op]
    while pending:
        op = pending.pop()
        if op is None or op in found:
            continue
        if op in members or (is_view(op) and base(op.results[0]).op in members):
            found.add(op)
            pending += [v.op for v in op.operands]
    return found
