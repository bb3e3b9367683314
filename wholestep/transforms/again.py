"""`compute_again`: kernels compute what others would have to write for them, where that moves fewer bytes.

After ops are joined, a tensor that passes from one kernel to others may be cheap to compute from what these read
anyway, or from what is in memory anyway, such as a normalised value from what was normalised and its statistics. Each
reader then gets the cheap ops that make it, and the tensor is not written where nobody else reads it. What counts is
bytes; legality is that of any kernel. What a user asks of it is in `again_wishes.py`.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..dialects.step import StepBuilder
from ..dialects.step.normalization import RowNorm
from ..errors import InputError
from ..ir.core import Block, Op, Value
from .again_wishes import INTO, NAME, is_meant, is_unwanted, site
from .opportunity import near
from .regions import base, is_source, is_view, piece_of

if TYPE_CHECKING:
    from .fuse import Fuser, Group

#: ops that cost next to nothing beside the bytes they read
CHEAP = frozenset(
    f"step.{n}"
    for n in ("cast", "neg", "abs", "relu", "add", "sub", "mul", "select", "lt", "le", "gt", "ge", "eq", "ne")
    + ("spread_rows", "unpack_bits")
)
#: and those that may run once more per kernel all the same
RUN_AGAIN = CHEAP | {
    f"step.{n}"
    for n in ("exp", "sigmoid", "silu", "sigmoid_grad", "silu_grad", "minimum", "maximum", "upsample")
    + ("cross_entropy_grad",)
}
#: the least bytes of a tensor that is worth it, the most ops that make it, the most kernels that compute it
LEAST, OPS, READERS = 1 << 20, 32, 3
#: how often all kernels are gone through: what one has taken over may let it hand on less
ROUNDS = 3


@dataclass(slots=True)
class Handed:
    """A value that a kernel hands to others: who they are, what makes it, and why they cannot compute it themselves."""

    value: Value
    group: Group
    readers: list[Group]
    #: whether it is written in any case
    written: bool
    why: str = ""
    ops: set[Op] = field(default_factory=set)
    #: what its kernel would have to write for that, such as the statistics of rows
    besides: set[Value] = field(default_factory=set)
    #: per reader: bytes that it reads more if it computes the value
    prices: list[int] = field(default_factory=list)
    #: computed from what was normalised
    by_statistics: bool = False

    @property
    def bytes(self) -> int:
        """What moves more per step if all readers compute it."""
        saved = self.value.type.bytes * (len(self.readers) + (not self.written))
        return sum(self.prices) + self.more - saved

    @property
    def more(self) -> int:
        """What its kernel writes more then."""
        return sum(value.type.bytes for value in self.besides)


def compute_again(fuser: Fuser, groups: list[Group]) -> list[Group]:
    """Goes through what the kernels hand to each other, the last kernel first; gives the kernels that are left."""
    order = sorted(groups, key=lambda g: fuser.position[g.members[-1]], reverse=True)
    if fuser.recipe or fuser.again.recipe:
        replay(fuser)
    else:
        take_forced(fuser, order)
        for _ in range(ROUNDS):
            if not any([move(fuser, handed) for handed in handed_on(fuser, order, LEAST)]):
                break
    note(fuser, order)
    return [g for g in groups if g.members]


def handed_on(fuser: Fuser, groups: Iterable[Group], least: int = 0) -> Iterator[Handed]:
    """What kernels hand to each other of at least so many bytes, as it stands when its turn comes."""
    for group in groups:
        for value in piece_of(group.members, fuser.position).outputs if group.members else ():
            if value.type.bytes >= least and value.op in group.members:
                found = handed_by(fuser, group, value)
                if found.readers:
                    yield found


def handed_by(fuser: Fuser, group: Group, value: Value, wanted: Sequence[Group] | None = None) -> Handed:
    """How other kernels, all that read it or those that are wanted, could compute a value, or why they cannot."""
    readers, written = other_readers(fuser, group, value)
    readers = readers if wanted is None else [other for other in readers if any(other is w for w in wanted)]
    found = Handed(value, group, readers, written)
    if not readers:
        return found
    found.why = why_not_by(fuser, found)
    op, members = value.op, set(group.members)
    assert op is not None
    if issubclass(op.definition, RowNorm):
        x = base(op.operands[0])
        found.by_statistics = True
        if getattr(op.definition, "normalised", None) is None or value is not op.results[0]:
            found.why = found.why or "it does not follow from what was normalised and its statistics"
        elif x.op in members and not leaves_kernel(x, members):
            found.why = found.why or "what was normalised is not in memory"
        elif written:
            found.why = found.why or "it is written in any case"
        leaves = {x}
    else:
        found.ops, found.besides = makers_beside(value, members)
        if not found.ops:
            found.why = found.why or "it is not made by a few cheap ops from what is in memory"
        leaves = {base(v) for one in found.ops for v in one.operands if v.op not in found.ops}
        leaves = {v for v in leaves if v.op is None or not is_source(v.op)}
    found.prices = [0 if found.why else price(fuser, other, leaves) for other in readers]
    return found


def move(fuser: Fuser, handed: Handed) -> bool:
    """Has the kernels that read a value compute it, if that saves bytes; says whether one does."""
    if handed.why:
        return False
    size = handed.value.type.bytes
    if (not handed.written and handed.bytes < 0) and not take(fuser, handed, handed.readers):
        return True
    if handed.by_statistics:
        return False
    cheaper = [other for other, more in zip(handed.readers, handed.prices, strict=True) if more + handed.more < size]
    return any([not take(fuser, handed, [other]) for other in cheaper])


def take(fuser: Fuser, handed: Handed, readers: list[Group]) -> str:
    """Has some readers compute a value, which is noted; why not, where they cannot."""
    key = site(fuser, handed.value, readers)
    how = normalise_again if handed.by_statistics else attempt
    why = how(fuser, handed.group, handed.value, handed.ops, readers)
    if why:
        fuser.tried[key] = why
    else:
        fuser.fusion.again.append(key)
    return why


# ---- what a user asks ------------------------------------------------------------------------------------------------


def replay(fuser: Fuser) -> None:
    """Does what a recipe says, in its order, as far as it is about the ops that the fuser looks at."""
    here = f"{fuser.function.attributes['sym_name']}/"
    by_name, everywhere = {fuser.names[op]: op for op in fuser.nodes}, set(fuser.names.values())
    for line in fuser.again.recipe:
        producer, _, into = line.removeprefix(f"{NAME} ").partition(INTO)
        if not producer.startswith(here):
            continue
        if not into:
            raise InputError(f"{line!r} does not say who computes it: '{NAME} <producer>{INTO}<consumer>'")
        for name in (producer, *into.split(" + ")):
            if name not in everywhere:
                raise InputError(f"{line!r} is not possible: the step has no op {name!r}{near(name, everywhere)}")
        if producer not in by_name:
            continue  # an op of another part of a long program
        op = by_name[producer]
        readers = [fuser.groups[by_name[name]] for name in into.split(" + ") if name in by_name]
        handed = handed_by(fuser, fuser.groups[op], op.results[0], readers)
        why = "not all of them read it" if len(handed.readers) < len(readers) else handed.why
        why = why or take(fuser, handed, readers)
        if why:
            raise InputError(f"{line!r} is not possible: {why}")
        fuser.fusion.asked.add(line)


def take_forced(fuser: Fuser, groups: Sequence[Group]) -> None:
    """Has kernels compute what they must; InputError where a pattern fits some of which none can be."""
    for pattern in fuser.again.force:
        reasons = {}
        for handed in handed_on(fuser, groups):
            key = site(fuser, handed.value, handed.readers)
            if is_meant(key, pattern):
                reasons[key] = handed.why or take(fuser, handed, handed.readers)
        if not reasons:
            continue
        fuser.fusion.asked.add(pattern)
        if all(reasons.values()):
            key, why = next(iter(reasons.items()))
            raise InputError(f"'{NAME} {key}' is not possible: {why}")


def note(fuser: Fuser, groups: Sequence[Group]) -> None:
    """What kernels still hand to each other of what a cheap op makes: how many bytes more would move if they computed
    it, or why they cannot."""
    for handed in handed_on(fuser, groups):
        maker = handed.value.op
        assert maker is not None
        if maker.name not in RUN_AGAIN and not issubclass(maker.definition, RowNorm):
            continue
        key = site(fuser, handed.value, handed.readers)
        fuser.fusion.handed[key] = handed.bytes, handed.why or fuser.tried.get(key, "")


# ---- who reads, at what price ----------------------------------------------------------------------------------------


def other_readers(fuser: Fuser, group: Group, value: Value) -> tuple[list[Group], bool]:
    """The other kernels that read a value; whether it is written in any case."""
    readers: dict[int, Group] = {}
    written = False
    for user in through_views(value):
        other = fuser.groups.get(user)
        if other is None or not fuser.is_fusible(other.members[0]):
            written = True
        elif other is not group:
            readers[id(other)] = other
    return list(readers.values()), written


def why_not_by(fuser: Fuser, handed: Handed) -> str:
    """Why the readers of a value may not compute it, whatever makes it."""
    pairs = any(is_forbidden(fuser, handed.value, other) for other in handed.readers)
    if is_unwanted(fuser, site(fuser, handed.value, handed.readers)) or pairs:
        return "it is forbidden"
    if len(handed.readers) > READERS:
        return f"{len(handed.readers)} kernels read it"
    elsewhere = any(half(fuser, other) != half(fuser, handed.group) for other in handed.readers)
    return "it is read in another part of the step" if elsewhere else ""


def price(fuser: Fuser, reader: Group, leaves: Iterable[Value]) -> int:
    """Bytes that a kernel reads more if it reads these as well."""
    has = {base(v) for v in piece_of(reader.members, fuser.position).inputs}
    return sum(v.type.bytes for v in leaves if v not in has)


def normalise_again(fuser: Fuser, group: Group, value: Value, ops: set[Op], readers: list[Group]) -> str:
    """Has kernels compute a normalised value from what was normalised and its statistics, or says why not."""
    op = value.op
    assert op is not None and not ops
    formula = Block()
    rule = getattr(op.definition, "normalised")  # noqa: B009  (not every op has one)
    made = rule(StepBuilder(formula, None, op.loc, op.phase), op, *op.results[1:])
    new = list(formula)
    fuser.position.update((one, i) for i, one in enumerate(new))
    why = attempt(fuser, group, value, set(new), readers, made)
    for one in reversed(new):
        del fuser.position[one]
        one.erase()
    return why


def makers_beside(value: Value, members: set[Op]) -> tuple[set[Op], set[Value]]:
    """The cheap ops of a kernel that make a value, with the views between them; none if they are too many. Beside them,
    what they take from the kernel's other ops that it does not write yet."""
    found: set[Op] = set()
    others: set[Op] = set()
    pending = [value.op]
    while pending:
        op = pending.pop()
        assert op is not None
        if op in found:
            continue
        if op in members and (op.name not in RUN_AGAIN or len(op.results) != 1):
            others.add(op)
            continue
        if op not in members and not (is_view(op) and base(op.results[0]).op in members):
            continue
        found.add(op)
        pending += [v.op for v in op.operands if v.op is not None]
    if sum(not is_view(op) for op in found) > OPS:
        return set(), set()
    taken = {v for op in found for v in op.operands}
    return found, {r for op in others for r in op.results if r in taken and not leaves_kernel(r, members)}


def makers(value: Value, members: set[Op]) -> set[Op]:
    """The same, where they take nothing from the kernel's other ops but what it writes anyway."""
    found, besides = makers_beside(value, members)
    return set() if besides else found


def leaves_kernel(value: Value, members: set[Op]) -> bool:
    return any(u not in members for u in through_views(value))


def through_views(value: Value) -> Iterator[Op]:
    """Who reads a value, views left out."""
    for user in dict.fromkeys(value.uses):
        if is_view(user):
            yield from through_views(user.results[0])
        else:
            yield user


def half(fuser: Fuser, group: Group) -> int:
    return max(map(fuser.half, group.members))


def is_forbidden(fuser: Fuser, value: Value, other: Group) -> bool:
    assert value.op is not None
    name = fuser.names[value.op]
    return any(
        fnmatch.fnmatchcase(f"fuse {fuser.names[u]} <- {name}", pattern)
        for pattern in fuser.forbid
        for u in other.members
        if u in fuser.names
    )


@dataclass(slots=True)
class Change:
    """What was done to the program, so that it can be taken back."""

    made: list[Op] = field(default_factory=list)
    operands: list[tuple[Op, tuple[Value, ...]]] = field(default_factory=list)
    members: list[tuple[Group, list[Op]]] = field(default_factory=list)

    def undo(self, fuser: Fuser) -> None:
        for op, operands in reversed(self.operands):
            op.set_operands(operands)
        for op in reversed(self.made):
            fuser.groups.pop(op, None)
            del fuser.position[op]
            op.erase()
        for group, members in self.members:
            group.members[:] = members


def attempt(
    fuser: Fuser, group: Group, value: Value, ops: set[Op], readers: list[Group], instead: Value | None = None
) -> str:
    """Gives each reader its own copy of the ops. Takes everything back if one of the kernels could not be written, and
    says why.

    instead: what the ops make, where that is not the value itself.
    """
    change = Change()
    for other in readers:
        change.members.append((other, list(other.members)))
        copy_into(fuser, change, value, ops, other, instead)
    change.members.append((group, list(group.members)))
    unread = drop_unread(group)
    touched = [*readers, group] if group.members else readers
    reasons = (fuser.bodies(piece_of(g.members, fuser.position)).why_not for g in touched)
    if why := next(filter(None, reasons), ""):
        change.undo(fuser)
        return why
    group.gone += unread
    if not group.members:  # a recipe has it all the same
        readers[0].along += [group.gone, *group.along]
    for op in unread:
        for view in [u for r in op.results for u in r.uses]:
            erase_views(view)
        op.erase()
    if value.op in group.members:
        erase_unread_views(value)
    return ""


def copy_into(
    fuser: Fuser, change: Change, value: Value, ops: set[Op], other: Group, instead: Value | None = None
) -> None:
    new: dict[Value, Value] = {}
    readers = [(u, u.operands) for u in other.members if any(base(v) is value for v in u.operands)]
    first = readers[0][0]
    at = fuser.position[first]

    def copied(op: Op) -> None:
        copy = op.clone(new)
        copy.attributes["phase"] = first.attributes.get("phase", op.phase)
        fuser.block.insert_before(copy, first)
        fuser.position[copy] = at - 0.5 + len(change.made) * 1e-6
        change.made.append(copy)
        new.update(zip(op.results, copy.results, strict=True))
        if not is_view(op) and not is_source(op):
            fuser.groups[copy] = other
            other.members.append(copy)

    def seen(shown: Value) -> Value:
        """The same view of the copy."""
        if shown not in new:
            assert shown.op is not None and is_view(shown.op)
            seen(shown.op.operands[0])
            copied(shown.op)
        return new[shown]

    for op in sorted(ops, key=fuser.position.__getitem__):
        copied(op)
    new[value] = new[value if instead is None else instead]
    for user, operands in readers:
        change.operands.append((user, tuple(operands)))
        user.set_operands([seen(v) if base(v) is value else v for v in operands])
    other.members.sort(key=fuser.position.__getitem__)


def drop_unread(group: Group) -> list[Op]:
    """Ops of a kernel that nobody reads any more are no part of it; gives them, readers first."""
    unread: dict[Op, None] = {}
    for op in reversed(group.members):
        if all(u in unread for r in op.results for u in through_views(r)):
            unread[op] = None
    group.members[:] = [op for op in group.members if op not in unread]
    return list(unread)


def erase_views(op: Op) -> None:
    for user in list(op.results[0].uses):
        erase_views(user)
    op.erase()


def erase_unread_views(value: Value) -> None:
    """Erases the views of a value that nobody reads."""
    for user in list(dict.fromkeys(value.uses)):
        if is_view(user) and not any(True for _ in through_views(user.results[0])):
            erase_views(user)
