"""What a user asks of fusion: the kernels of a recipe and no others, pairs that must be joined, pairs that must not.

A recipe has a line per kernel, "fuse <site> + <site> + ..."; `force` and `forbid` name pairs, or patterns of them, as
"fuse <consumer> <- <producer>". What cannot be done is an InputError that says why; so is what fits nothing. What is
asked of computing again, which is decided with it, is in `again_wishes.py`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..errors import InputError
from ..ir.core import Op, Value
from .again_wishes import NAME
from .attention_sides import ATTENTION
from .early_sums import is_tried
from .opportunity import fits, meant, near
from .regions import is_view, piece_of, readers_of

if TYPE_CHECKING:
    from .fuse import Fuser, Fusion, Group

PREFIX = "fuse "


@dataclass(frozen=True, slots=True)
class Wishes:
    """Lines and patterns that begin with "fuse ", or are about computing again; of `forbid` also those of any name."""

    recipe: tuple[str, ...] = ()
    force: tuple[str, ...] = ()
    forbid: tuple[str, ...] = ()

    @classmethod
    def among(cls, recipe: Iterable[str], force: Iterable[str], forbid: Iterable[str]) -> Wishes:
        """Those of the options of a step that are about fusion."""
        unwanted = [f"{PREFIX}*" if k == PREFIX.strip() else k for k in forbid if is_wish(k) or meant(k) is None]
        found = cls(tuple(filter(is_wish, recipe)), tuple(filter(is_wish, force)), tuple(unwanted))
        if found.recipe and found.force:
            raise InputError(
                f"recipe says which kernels there are: put the ops of {found.force[0]!r} into one line of it"
            )
        return found

    def check(self, fusions: Sequence[Fusion]) -> None:
        """Refuses what fitted nothing in any function of the step: a misspelt name must not pass unseen."""
        kinds = (("recipe", self.recipe), ("force", self.force), ("forbid", self.forbid))
        for option, key in ((option, key) for option, keys in kinds for key in filter(is_wish, keys)):
            if not fusions:
                why = "nothing is fused: only ATen may run this step; see providers= and level="
                raise InputError(f"{option} names {key!r}, but {why}")
            if not any(key in (f.forbidden if option == "forbid" else f.asked) for f in fusions):
                raise InputError(f"{option} names {key!r}, which fits no fusion; step.opportunities() lists them")


def is_wish(key: str) -> bool:
    return key.partition(" ")[0] in (PREFIX.strip(), NAME)


def not_fused(keys: Iterable[str]) -> list[str]:
    """Keys of an option that are not about fusion."""
    return [k for k in keys if not is_wish(k)]


# ---- a recipe --------------------------------------------------------------------------------------------------------


def replay(fuser: Fuser, recipe: Sequence[str]) -> list[Group]:
    """The kernels of a recipe that are in the ops that the fuser looks at."""
    here = f"{fuser.function.attributes['sym_name']}/"
    by_name = {fuser.names[op]: op for op in fuser.nodes}
    everywhere = set(fuser.names.values())
    made: list[Group] = []
    fuser.fusion.replayed = True
    taken: dict[Op, str] = {}
    for line in recipe:
        sites = line.removeprefix(PREFIX).split(" + ")
        if not sites[0].startswith(here):
            continue
        for site in sites:
            if site not in everywhere:
                raise InputError(f"{line!r} is not possible: the step has no op {site!r}{near(site, everywhere)}")
        found = [by_name[site] for site in sites if site in by_name]
        if not found:
            continue  # ops of another part of a long program
        why = "its ops are too far apart in the program" if len(found) < len(sites) else ""
        twice = next((op for op in found if op in taken), None)
        if twice is not None:
            why = f"{fuser.names[twice]} is in {taken[twice]!r} already"
        why = why or why_not_together(fuser, found)
        if why:
            raise InputError(f"{line!r} is not possible: {why}")
        fuser.fusion.asked.add(line)
        taken.update(dict.fromkeys(found, line))
        made.append(fuser.gather(found))
    return made


def why_not_together(fuser: Fuser, ops: Sequence[Op]) -> str:
    """Why ops cannot be one kernel; empty where they can."""
    if len(ops) == 1 and fuser.stands_alone(ops[0]):
        return ""
    if len(ops) == 1 and fuser.seconds is not None and is_tried(fuser, ops[0]):
        return ""  # what it took along, or who computes it, are lines of their own
    for op in ops:
        if why := why_apart(fuser, op, len(ops) > 1):
            return f"{fuser.names[op]}: {why}"
    reach = fuser.reach
    needed = reach.needed(ops)
    for i in reach.behind(reach.bits(ops)).tolist():
        if int(needed[i >> 6]) >> (i & 63) & 1 and not is_view(fuser.nodes[i]):
            return f"{fuser.names[fuser.nodes[i]]} must run between its ops"
    return fuser.bodies(piece_of(ops, fuser.position)).why_not


def why_apart(fuser: Fuser, op: Op, with_others: bool = True) -> str:
    """Why an op cannot be part of a kernel. A product or an attention is not made one by itself, but with its
    neighbours it can be."""
    return "" if with_others and is_anchor(op) else fuser.why_apart(op)


def is_anchor(op: Op) -> bool:
    return op.name == "step.contract" or op.name in ATTENTION


# ---- forced pairs ----------------------------------------------------------------------------------------------------


def join_forced(fuser: Fuser, force: Sequence[str]) -> None:
    """Joins the pairs that must be; InputError where a pattern fits some of which none can be."""
    if not force:
        return
    pairs = list(neighbours(fuser))
    for pattern in force:
        fitting = [(p, c) for p, c in pairs if fits(f"{PREFIX}{fuser.names[c]} <- {fuser.names[p]}", pattern)]
        if not fitting:
            continue
        fuser.fusion.asked.add(pattern)
        reasons = [why_not_joined(fuser, producer, consumer) for producer, consumer in fitting]
        if all(reasons):
            producer, consumer = (fuser.names[op] for op in fitting[0])
            raise InputError(f"'{PREFIX}{consumer} <- {producer}' is not possible: {reasons[0]}")


def why_not_joined(fuser: Fuser, producer: Op, consumer: Op) -> str:
    """Joins two ops; why not, where that is not possible."""
    for op in (producer, consumer):
        if why := why_apart(fuser, op):
            return f"{fuser.names[op]}: {why}"
    a, b = fuser.groups[producer], fuser.groups[consumer]
    if a is b or fuser.try_join(a, b, producer, consumer):
        return ""
    return fuser.fusion.refusals[fuser.names[producer], fuser.names[consumer]]


def neighbours(fuser: Fuser) -> Iterator[tuple[Op, Op]]:
    """Producers with their consumers, then ops that read the same value one after the other."""
    readers: dict[Value, list[Op]] = {}
    for op in fuser.nodes:
        if is_view(op):
            continue
        for value in fuser.read(op):
            readers.setdefault(value, []).append(op)
            if value.op in fuser.groups:
                yield value.op, op
    for among in readers.values():
        yield from itertools.pairwise(among)


# ---- what is noted for questions -------------------------------------------------------------------------------------


def note_neighbours(fuser: Fuser) -> None:
    """Who reads whose results, and which ops are no part of any kernel: joined ops are gone when a user asks."""
    for op, name in fuser.names.items():
        if is_view(op) or not op.operands:
            continue
        fuser.fusion.reads[name] = [fuser.names[v.op] for v in fuser.read(op) if v.op in fuser.names]
        if why := fuser.why_apart(op):
            fuser.fusion.apart[name] = why


def bytes_between(fuser: Fuser, producer: Op, consumer: Op) -> int:
    """Bytes that are read, and maybe written, because two ops are not one kernel."""
    read = fuser.read(consumer)
    made = [v for v in read if v.op is producer]
    if made:
        return sum(v.type.bytes * (1 + (set(readers_of(v)) <= {consumer})) for v in made)
    return sum(v.type.bytes for v in set(read) & set(fuser.read(producer)))
