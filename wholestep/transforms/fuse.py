"""Fusion: which ops become one kernel. Neighbours are joined as long as one walk over the data can do both.

Legality comes from the loop form of the joined piece (`regions.py`, `loops.py`): its access maps must fit into one
walk. Profit is bytes: what is no longer written and read between the two. Ops are met in program order and join the
kernels of what they read, the largest tensor first; then kernels that read the same large tensors are joined.
"""

from __future__ import annotations

import fnmatch
import itertools
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..dialects.step import StepBuilder, constant_value
from ..dialects.step.control import root_of
from ..dialects.step.fused import Fused
from ..ir.attributes import Symbol, freeze
from ..ir.builtin import Func
from ..ir.core import Builder, Op, Value
from ..ir.types import I64, TensorType
from .again import CHEAP, compute_again
from .again_wishes import AgainWishes
from .around import join_around
from .around_attention import join_attention
from .early_sums import bring, draw_near, join_sums, why_not_early
from .expand import expand_ops, has_expansion
from .fusion_wishes import bytes_between, join_forced, note_neighbours, replay
from .group_norms import by_channel
from .loops import is_primitive
from .opportunity import meant, site_names
from .put_off import UPDATE, may_wait, put_off
from .reach import Reach
from .recompute import originals
from .regions import (
    ANCHORS,
    Bodies,
    Body,
    Piece,
    base,
    body_of,
    could_be_pieces,
    is_source,
    is_view,
    matters_how_large,
    piece_of,
    readers_of,
)
from .remembered import Keeper, digest_of, recall, remember
from .side_by_side import join_parts
from .sliced_products import join_sliced
from .tall_products import join_tall
from .wide_products import first_wide, join_wide

#: ops of one half are joined; forward values are not kept waiting for backward, nor gradients for the update
HALVES = {"forward": 0, "loss": 1, "backward": 1, "clip": 2, "update": 2}
#: at most so many ops are looked at together; longer programs are cut into parts
WINDOW = 16_000


#: measured seconds of pieces, each by the best of the providers; the second says the strides of what they read
Seconds = Callable[[Sequence[Piece], Callable[[Value], tuple[int, ...]] | None], list[float]]
#: says which pieces may be asked for after the next ones, on operands that lie so
Expect = Callable[[Sequence[Piece], Callable[[Value], tuple[int, ...]]], None]
#: whether a provider has a kernel for a wide product with what follows it
Follows = Callable[[Piece, Callable[[Value], tuple[int, ...]] | None], bool]


def windows(ops: Sequence[Op]) -> Iterator[Sequence[Op]]:
    """Parts of a program that are looked at one at a time."""
    start = 0
    while start < len(ops):
        end = start + WINDOW
        end = quietest(ops, end - WINDOW // 8, end) if end < len(ops) else len(ops)
        yield ops[start:end]
        start = end


def quietest(ops: Sequence[Op], first: int, last: int) -> int:
    """Where a program is best cut: the fewest bytes pass between ops near the cut that might be joined."""
    begin = max(0, 2 * first - last)
    near = {op: i for i, op in enumerate(ops[begin : 2 * last - first], begin) if op.name not in ANCHORS}
    passing = [0] * (last + 2 - begin)
    for op, i in near.items():
        for value in op.results if i < last else ():
            until = max((near[u] for u in value.uses if u in near), default=i)
            if until > i and isinstance(value.type, TensorType):
                passing[i + 1 - begin] += value.type.bytes
                passing[min(until, last) + 1 - begin] -= value.type.bytes
    total = list(itertools.accumulate(passing))
    return min(range(first, last + 1), key=lambda i: (total[i - begin], -i))


def never(op: Op) -> bool:
    return False


@dataclass(slots=True)
class Group:
    """Ops that are one kernel so far."""

    members: list[Op]
    points: int = 1
    #: ops that were members until others computed what they make, and those of kernels that were taken along
    gone: list[Op] = field(default_factory=list)
    along: list[list[Op]] = field(default_factory=list)


@dataclass(slots=True)
class Refusal:
    """Why two neighbours are not one kernel."""

    producer: Op
    consumer: Op
    why: str


@dataclass(slots=True)
class Fusion:
    """What was joined in a function: the ops of each kernel before they were joined, and what was refused."""

    kernels: list[tuple[Op, list[str]]] = field(default_factory=list)
    refusals: dict[tuple[str, str], str] = field(default_factory=dict)
    bodies: dict[str, Body] = field(default_factory=dict)
    #: patterns of `forbid` that fitted something; lines of a recipe and patterns of `force` that did
    forbidden: set[str] = field(default_factory=set)
    asked: set[str] = field(default_factory=set)
    #: whether a recipe said what becomes a kernel
    replayed: bool = False
    #: per refusal: bytes that move because of it
    gains: dict[tuple[str, str], int] = field(default_factory=dict)
    #: what is computed again, by whom; what could be: bytes that move more, and why it cannot be
    again: list[str] = field(default_factory=list)
    handed: dict[str, tuple[int, str]] = field(default_factory=dict)
    #: per op: whose results it reads; and of those that are no part of any kernel, why
    reads: dict[str, list[str]] = field(default_factory=dict)
    apart: dict[str, str] = field(default_factory=dict)
    #: regions that are parts of what nobody runs as one
    divided: set[str] = field(default_factory=set)


class Fuser:
    """Joins the ops of one function, which is changed in place."""

    def __init__(
        self,
        function: Op,
        host: Iterable[int] = (),
        bodies: Bodies | None = None,
        forbid: Sequence[str] = (),
        runs_on_host: Callable[[Op], bool] = never,
        alone: Callable[[Op], bool] = never,
        recipe: Sequence[str] = (),
        force: Sequence[str] = (),
        seconds: Seconds | None = None,
        products: bool = False,
        kept: Keeper | None = None,
        follows: Follows | None = None,
        attends: bool = False,
        expect: Expect | None = None,
    ):
        self.function = function
        # (what a user asks for, or the clock decides, does not follow from the program)
        self.kept = None if recipe or force or forbid or products else kept
        self.program = ""
        self.seconds, self.products, self.follows, self.attends = seconds, products, follows, attends
        self.expect = expect
        self.block = function.regions[0].block
        self.bodies = bodies if bodies is not None else Bodies()
        self.again = AgainWishes.among(recipe, force, forbid)
        self.forbid = [pattern for pattern in forbid if pattern.startswith("fuse ") or meant(pattern) is None]
        self.recipe = [line for line in recipe if line not in self.again.recipe]
        self.force = [pattern for pattern in force if pattern not in self.again.force]
        self.runs_on_host, self.alone = runs_on_host, alone
        self.on_host = {self.block.arguments[i] for i in host}
        self.fusion = Fusion()
        self.single: dict[Op, str] = {}
        #: what kernels were to compute again and cannot
        self.tried: dict[str, str] = {}

    def run(self) -> Fusion:
        self.note_host()
        by_channel(self.function)
        self.reuse_statistics()
        self.number_streams()
        self.take_apart()
        self.share_vectors()
        self.duplicate()
        put_off(self)
        if len(self.block) > WINDOW:
            draw_near(self)
        ops = [op for op in self.block if not op.definition.terminator]
        self.position: dict[Op, float] = {op: i for i, op in enumerate(self.block)}
        names = site_names(root_of(self.function))
        self.names = {op: names.get(op, op.name) for op in ops}
        self.groups: dict[Op, Group] = {}
        note_neighbours(self)
        chosen: list[Group] = []
        for window in windows(ops):
            chosen += self.join(window)
        self.emit(chosen)
        return self.fusion

    # ---- preparing ---------------------------------------------------------------------------------------------------

    def note_host(self) -> None:
        """Numbers of the host stay there."""
        for op in self.block:
            if op.operands and self.runs_on_host(op):
                known = [v in self.on_host or constant_value(v) is not None for v in op.operands]
                if all(known) and any(v in self.on_host for v in op.operands):
                    self.on_host.update(op.results)

    def reuse_statistics(self) -> None:
        """What backward normalises again it computes from the statistics that forward has kept."""
        for copy, first in originals(self.block).items():
            rule = getattr(copy.definition, "normalised", None)
            if rule is None or any(r.uses for r in copy.results[1:]):
                continue
            statistics = first.results[1 : 1 + STATISTICS[copy.name]]
            builder = StepBuilder(self.block, copy, copy.loc, copy.phase)
            copy.results[0].replace_by(rule(builder, copy, *statistics))
            copy.erase()

    def number_streams(self) -> None:
        """Random ops get their stream as an operand, so that the kernels of equal layers are equal."""
        for op in [o for o in self.block if o.name == "step.random" and o.number is None and is_primitive(o)]:
            builder = StepBuilder(self.block, op, op.loc, op.phase)
            stream = builder.full(op.stream, (), I64)
            drawn = builder.random(op.key, stream, distribution=op.distribution, stream=0, type=op.type)
            op.result.replace_by(drawn)
            op.erase()

    def is_fusible(self, op: Op) -> bool:
        """Whether an op may be part of a kernel at all."""
        return not self.why_apart(op)

    def why_apart(self, op: Op) -> str:
        """Why an op is no part of a kernel; empty where it may be."""
        found = self.single.get(op)
        if found is None:
            found = self.single[op] = self.reason_apart(op)
        return found

    def reason_apart(self, op: Op) -> str:
        if op.definition.terminator or is_view(op) or is_source(op):
            return "it is no work of its own"
        if not any(r.uses for r in op.results):
            return "nobody reads what it makes"
        if any(r in self.on_host for r in op.results):
            return "it is a number of the host"
        if op.name in ANCHORS:
            return "a library runs it"
        if self.alone(op):
            return "a provider takes it for itself"
        if not (is_primitive(op) or has_expansion(op)):
            return "it has no loop form"
        position = {o: i for i, o in enumerate([*self.sources(op), op])}
        return self.bodies.why_not(piece_of([op], position))

    def sources(self, op: Op) -> list[Op]:
        """Views and constants that an op looks through, in some order that respects them."""
        found: dict[Op, None] = {}

        def visit(value: Value) -> None:
            maker = value.op
            if maker is None or maker in found or not (is_view(maker) or is_source(maker)):
                return
            for v in maker.operands:
                visit(v)
            found[maker] = None

        for v in op.operands:
            visit(v)
        return list(found)

    def take_apart(self) -> None:
        """Expands ops that are no kernel by themselves but whose parts may be, such as BatchNorm or a mean loss."""
        known: dict[tuple[str, str], bool] = {}
        wanted = []
        for op in self.block:
            if op.definition.terminator or not has_expansion(op) or is_primitive(op) or op.name in ANCHORS:
                continue
            if not any(r.uses for r in op.results) or any(r in self.on_host for r in op.results):
                continue
            if self.is_fusible(op) or self.alone(op):
                continue
            key = (op.name, ",".join(str(v.type) for v in op.operands) + str(sorted(map(str, op.attributes.items()))))
            if key not in known:
                known[key] = could_be_pieces(op)
            if known[key]:
                wanted.append(op)
        if wanted:
            expand_ops(wanted)
            for op in wanted:
                self.single.pop(op, None)
            self.take_apart()

    def share_vectors(self) -> None:
        """Numbers per channel that backward would compute again are those of forward: they are little to keep."""
        known: dict[Any, Op] = {}
        for op in list(self.block):
            values = (*op.operands, *op.results)
            if not op.definition.pure or is_source(op) or any(v.type.rank > 1 or v.type.bytes > LARGE for v in values):
                continue
            attributes = {k: freeze(v) for k, v in op.attributes.items() if k not in ("phase", "again")}
            first = known.setdefault((op.definition, tuple(op.operands), frozenset(attributes.items())), op)
            if first is not op:
                for old, new in zip(op.results, first.results, strict=True):
                    old.replace_by(new)
                op.erase()

    def duplicate(self) -> None:
        """A cheap op whose operands are no larger than its result is computed again by each of its readers.

        Readers come before what they read, so that whole chains are: two kernels then read the 16-bit tensor at the
        beginning of a chain instead of the f32 one at its end. Copies that meet in one kernel become one again there.
        """
        for op in reversed(list(self.block)):
            if op.definition.terminator or not self.is_cheap(op):
                continue
            readers = [u for u in dict.fromkeys(op.results[0].uses) if self.is_fusible(u)]
            others = [u for u in dict.fromkeys(op.results[0].uses) if u not in readers]
            for reader in readers[0 if others else 1 :]:
                copy = op.clone({})
                copy.attributes["phase"] = reader.attributes.get("phase", op.phase)
                self.block.insert_before(copy, reader)
                reader.set_operands([copy.results[0] if v is op.results[0] else v for v in reader.operands])

    def is_cheap(self, op: Op) -> bool:
        if op.name not in CHEAP or len(op.results) != 1 or len(op.results[0].uses) < 2 or not self.is_fusible(op):
            return False
        if len(op.results[0].uses) > READERS or cuts(op):
            return False
        return self.shrinks_backwards(op, self.is_in_memory(op.results[0]))

    def is_in_memory(self, value: Value) -> bool:
        """Whether a value is written in any case: some reader is no part of a kernel."""
        return any(not self.is_fusible(u) for u in readers_of(value))

    # ---- joining -----------------------------------------------------------------------------------------------------

    def join(self, ops: Sequence[Op]) -> list[Group]:
        """The groups of some ops: every op is one to begin with."""
        self.nodes = [op for op in ops if not is_source(op)]
        self.groups = groups = {op: Group([op], size_of(op)) for op in self.nodes}
        self.refused: dict[tuple[Op, Op], tuple[str, int]] = {}
        digest = "" if self.kept is None else digest_of(self)
        if self.kept is None or not recall(self.kept, digest, self):
            self.reach = Reach(self.nodes)
            if self.recipe:
                return self.around(replay(self, self.recipe))
            self.join_all()
            if self.kept is not None:
                remember(self.kept, digest, self)
        chosen = {
            id(g): g for g in groups.values() if any(map(self.is_fusible, g.members)) or self.stands_alone(g.members[0])
        }
        return self.around([g for g in chosen.values() if not self.hands_on(g)])

    def hands_on(self, group: Group) -> bool:
        """Whether a group is nothing but a choice between two tensors that the host has made."""
        first, *others = group.members
        return not others and first.name == "step.select" and first.operands[0] in self.on_host

    def join_all(self) -> None:
        """Joins whatever can be."""
        groups = self.groups
        join_forced(self, self.force)
        fusible = [op for op in self.nodes if self.is_fusible(op)]
        #: they go with their reader rather than with what they read: it is smaller than what they make
        self.waiting = {op for op in fusible if self.goes_with_reader(op)}
        for op in fusible:
            if op not in self.waiting:
                self.join_makers(op)
        for op in fusible:
            if op in self.waiting and len(groups[op].members) == 1:
                self.join_makers(op)
        self.join_siblings(self.nodes)
        if self.seconds is not None and self.products:
            self.join_products(self.nodes, self.seconds)

    def around(self, groups: list[Group]) -> list[Group]:
        """What is done once ops are joined: kernels compute what others wrote for them, anchors take others along."""
        groups = join_attention(self, join_around(self, compute_again(self, groups)))
        if self.seconds is None:
            return groups
        groups = join_parts(self, join_wide(self, join_tall(self, groups, lambda: first_wide(self))))
        groups = join_sums(self, groups)
        return join_sliced(self, groups) if self.products else groups

    def join_makers(self, op: Op) -> None:
        """Joins an op with the kernels of what it reads, the largest first."""
        for maker in self.makers(op):
            if self.groups[maker] is not self.groups[op]:
                self.try_join(self.groups[maker], self.groups[op], maker, op)

    def makers(self, op: Op) -> list[Op]:
        found: list[Op] = []
        for value in sorted(self.read(op), key=lambda v: -v.type.bytes):
            maker = value.op
            if maker in self.groups and self.is_fusible(maker):
                found.append(maker)
                found += self.makers(maker) if maker in self.waiting else []
        return list(dict.fromkeys(found))

    def goes_with_reader(self, op: Op) -> bool:
        readers = readers_of(op.results[0]) if op.name in CHEAP else []
        if len(set(readers)) != 1 or readers[0] not in self.groups or not self.is_fusible(readers[0]):
            return False
        return self.shrinks_backwards(op) and not cuts(op)

    def shrinks_backwards(self, op: Op, strictly: bool = False) -> bool:
        """Whether what an op reads is no larger than what it makes."""
        made = op.results[0].type.bytes
        large = {base(v) for v in op.operands if v.type.bytes * MUCH_SMALLER > made and v.type.size > 1}
        read = sum(v.type.bytes for v in large)
        return read < made if strictly else read <= made

    def stands_alone(self, op: Op) -> bool:
        return self.alone(op) and any(r.uses for r in op.results) and not is_view(op)

    def read(self, op: Op) -> list[Value]:
        return list(dict.fromkeys(base(v) for v in op.operands))

    def join_siblings(self, nodes: list[Op]) -> None:
        """Kernels of one phase that read the same large tensor become one that reads it once."""
        readers: dict[Value, list[Op]] = {}
        for op in nodes:
            if self.is_fusible(op):
                for value in self.read(op):
                    if value.type.bytes >= LARGE and (value.op is None or not is_source(value.op)):
                        readers.setdefault(value, []).append(op)
        for value in sorted(readers, key=lambda v: -v.type.bytes):
            among = readers[value]
            for one, other in itertools.pairwise(among):
                a, b = self.groups[one], self.groups[other]
                near = self.position[other] - self.position[one] <= NEAR
                shares = value.type.size * MUCH_SMALLER >= min(a.points, b.points)  # else they would wait for nothing
                if a is not b and near and shares and one.phase == other.phase:
                    turned = self.reach.needs(a.members[0], b.members[0])
                    self.try_join(*((b, a, other, one) if turned else (a, b, one, other)))

    def join_products(self, nodes: list[Op], seconds: Seconds) -> None:
        """Products take the kernel after them along, or the one before, where that is measured to be faster."""
        found = [(op, group) for op in nodes if op.name == "step.contract" for group in self.neighbours(op)]
        pieces = {}
        for op, group in found:
            whole = piece_of([op, *group.members], self.position)
            if self.reach.between([op], group.members) is None and not self.bodies(whole).why_not:
                parts = [piece_of(m, self.position) for m in ([op], group.members)]
                pieces[op, id(group)] = (whole, *parts)
        times = iter(seconds([p for all in pieces.values() for p in all], None))
        measured = {key: tuple(next(times) for _ in all) for key, all in pieces.items()}
        for op, group in found:
            together, product, rest = measured.get((op, id(group)), (0.0, 0.0, 0.0))
            still = self.groups[op].members == [op] and self.groups[group.members[0]] is group
            if together and still and together < product + rest:
                self.gather([op, *group.members])

    def neighbours(self, op: Op) -> list[Group]:
        """Kernels that alone read a product, such as the update of a weight whose gradient it is, or whose reader it is
        alone."""
        readers = {id(g): g for u in readers_of(op.results[0]) if (g := self.groups.get(u)) is not None}
        own, later = self.half(op), HALVES["update"] if op.phase == "backward" else -1
        found = []
        for group in readers.values():
            halves = set(map(self.half, group.members))
            if len(readers) == 1 and halves in ({own}, {later}) and self.is_fusible(group.members[0]):
                found.append(group)
        for value in self.read(op):
            maker = value.op
            if maker in self.groups and self.is_fusible(maker) and set(readers_of(value)) == {op}:
                group = self.groups[maker]
                found += [group] if set(map(self.half, group.members)) == {own} else []
        return found

    def try_join(self, a: Group, b: Group, producer: Op, consumer: Op) -> bool:
        why = self.why_not(a, b, producer, consumer)
        if why:
            self.refuse(producer, consumer, why, bytes_between(self, producer, consumer))
            return False
        self.gather([*a.members, *b.members])
        return True

    def refuse(self, producer: Op, consumer: Op, why: str, gain: int) -> None:
        """Notes why two are not joined, and the bytes that move because of it."""
        pair = self.names[producer], self.names[consumer]
        self.refused[producer, consumer] = self.fusion.refusals[pair], self.fusion.gains[pair] = why, gain

    def why_not(self, a: Group, b: Group, producer: Op, consumer: Op) -> str:
        key = f"fuse {self.names[consumer]} <- {self.names[producer]}"
        for pattern in self.forbid:
            if fnmatch.fnmatchcase(key, pattern):
                self.fusion.forbidden.add(pattern)
                return "it is forbidden"
        halves = {max(map(self.half, group.members)) for group in (a, b)}
        apart = len(halves) > 1 and not self.may_wait(a, b)
        if apart and (why := why_not_early(self, a, b, producer, consumer)):
            return why
        if a.points * SMALLER < b.points and (len(a.members) > 2 or self.takes_long(a, b)):
            return "the first would be computed again for every row of the second"
        if cuts(producer, {consumer}):
            return "the second would be walked in the parts that the first is made of"
        between = self.reach.between(a.members, b.members)
        if between is not None:
            return f"{self.names[between]} must run between them"
        position = self.position
        return self.bodies.why_not(piece_of([*a.members, *b.members], position))

    def takes_long(self, a: Group, b: Group) -> bool:
        """Whether to compute the first for each point of the second takes longer than one more kernel."""
        return b.points >= MANY and any(op.name not in CHEAP for op in a.members)

    def half(self, op: Op) -> int:
        """Forward, backward or update."""
        return HALVES.get(op.phase, 3)

    def may_wait(self, a: Group, b: Group) -> bool:
        """Whether the first may be put off until the second runs: what it reads is small beside what it gives, and
        nobody else waits for it, so that a narrow gradient is kept instead of a wide one."""
        piece = piece_of(a.members, self.position)
        half = max(map(self.half, b.members))
        if half < max(map(self.half, a.members)):
            return False  # an update of the step before, which forward reads
        others = {u for v in piece.outputs for u in readers_of(v) if u not in b.members}
        if any(half < UPDATE or self.half(u) != half for u in others) or any(op.name not in CHEAP for op in a.members):
            return False
        read, made = (sum(v.type.bytes for v in values) for values in (piece.inputs, piece.outputs))
        return may_wait(read, made, half)

    def gather(self, ops: Iterable[Op]) -> Group:
        """Makes ops, with the groups they are in, one group."""
        old = {id(g): g for op in ops for g in (self.groups[op],)}.values()
        together = {m for g in old for m in g.members}
        bring(self, list(together))
        members = sorted(together, key=self.position.__getitem__)
        if len(members) > 1:
            self.reach.unite(members)
        return self.unite(members)

    def unite(self, members: list[Op]) -> Group:
        """A group of ops, whatever groups they were in."""
        joined = Group(members, max(self.groups[op].points for op in members))
        for op in members:
            self.groups[op] = joined
        return joined

    # ---- writing -----------------------------------------------------------------------------------------------------

    def emit(self, groups: list[Group]) -> None:
        """Replaces the ops of every group by one op that calls their body."""
        root = root_of(self.function)
        order = self.ordered(groups)
        symbols: dict[int, str] = {}
        for group in order:
            piece = piece_of(group.members, self.position)
            body = self.bodies(piece)
            name = symbols.get(id(body))
            if name is None:
                name = symbols[id(body)] = f"region_{len(symbols)}"
                function = body_of(piece, name)
                function.detach()
                root.regions[0].block.append(function)
                self.fusion.bodies[name] = body
            last = group.members[-1]
            builder = Builder(self.block, last, last.loc, last.phase)
            op = builder.create(Fused, piece.inputs, [v.type for v in piece.outputs], {"callee": Symbol(name)})
            for line in self.lines(group):
                self.fusion.kernels.append((op, [self.names[m] for m in line if m in self.names]))
            self.replace(piece, op)
            gone = set(group.members)
            for inner in reversed(piece.ops):
                if inner in gone or not any(r.uses for r in inner.results):
                    inner.erase()
        self.sort()

    def lines(self, group: Group) -> list[list[Op]]:
        """The ops of a kernel as a recipe has them: a kernel that it took along (`around.py`) is a line of its own."""
        taken = {m for line in group.along for m in line}
        return [[*(m for m in group.members if m not in taken), *group.gone], *group.along]

    def replace(self, piece: Piece, op: Op) -> None:
        inside = set(piece.ops)
        for value, new in zip(piece.outputs, op.results, strict=True):
            for user in list(value.uses):
                if user not in inside or is_view(user):
                    user.replace_operand(value, new)

    def ordered(self, groups: list[Group]) -> list[Group]:
        return sorted(groups, key=lambda g: self.position[g.members[-1]])

    def sort(self) -> None:
        """Brings ops into an order in which every value comes before its readers; otherwise as they were."""
        block = self.block
        placed: set[Op] = set()
        waiting: set[Op] = set()  # for what they read: those below in the stack that are not merely beside it
        order: list[Op] = []
        for op in list(block):
            stack = [op]
            while stack:
                top = stack[-1]
                if top in placed:
                    stack.pop()
                    continue
                missing = [v.op for v in top.operands if v.op is not None and v.op not in placed]
                if missing:
                    waiting.add(top)
                    if not waiting.isdisjoint(missing):
                        raise AssertionError(f"{top.name} would have to run before itself")
                    stack += missing
                else:
                    placed.add(top)
                    waiting.discard(top)
                    order.append(stack.pop())
        for op in order:
            op.detach()
            block.append(op)


def size_of(op: Op) -> int:
    """The elements of the largest tensor that an op reads or makes."""
    return max((v.type.size for v in (*op.operands, *op.results)), default=1)


def cuts(op: Op, readers: Container[Op] | None = None) -> bool:
    """Whether much larger ops, among some or all, see what an op makes with its dimensions put together.

    Such are numbers per channel that are made group by group: in one kernel with it those ops would walk the parts, and
    no longer what lies side by side.
    """
    pending = [(v, False) for v in op.results]
    while pending:
        value, together = pending.pop()
        for user in dict.fromkeys(value.uses):
            if is_view(user):
                merges = user.name == "step.reshape" and matters_how_large(user)
                pending.append((user.results[0], together or merges))
            elif together and (readers is None or user in readers) and size_of(user) > SMALLER * value.type.size:
                return True
    return False


#: how many of its results, after the first, are the statistics of a normalisation
STATISTICS = {"step.layer_norm": 2, "step.group_norm": 2, "step.batch_norm": 2, "step.rms_norm": 1}
LARGE, NEAR, SMALLER = 1 << 16, 80, 4
#: so many exponentials take longer than a kernel
MANY = 1 << 22
#: an operand so much smaller than a result does not count; an op with more readers is computed once
MUCH_SMALLER, READERS = 16, 6


def fuse(
    function: Op,
    host: Iterable[int] = (),
    bodies: Bodies | None = None,
    forbid: Sequence[str] = (),
    runs_on_host: Callable[[Op], bool] = never,
    alone: Callable[[Op], bool] = never,
    recipe: Sequence[str] = (),
    force: Sequence[str] = (),
    seconds: Seconds | None = None,
    products: bool = False,
    kept: Keeper | None = None,
    follows: Follows | None = None,
    attends: bool = False,
    expect: Expect | None = None,
) -> Fusion:
    """Joins the ops of a function, in place, into kernels.

    host: arguments that are numbers of the host; runs_on_host: ops that then stay there. alone: ops that some provider
    wants for itself. recipe, force, forbid: what a user asks (`fusion_wishes.py`). seconds: measures pieces, for what
    is decided by the clock: neighbours of tall products, with `products` those of all. kept: what was joined before in
    the same program (`remembered.py`). follows: says which wide products may take along what follows them. attends:
    whether a provider computes what stands around an attention. expect: is told of pieces that may be measured later.
    """
    wishes = (forbid, runs_on_host, alone, recipe, force)
    return Fuser(function, host, bodies, *wishes, seconds, products, kept, follows, attends, expect).run()


def dissolve(function: Op, wanted: Callable[[Op], bool]) -> int:
    """Puts the ops of regions back in place of them; returns how many regions went."""
    root = root_of(function)
    bodies = {f.attributes["sym_name"]: f for f in root.regions[0].block if f.definition is Func}
    block, count = function.regions[0].block, 0
    for op in [o for o in block if o.definition is Fused and wanted(o)]:
        body = bodies[op.callee.name].regions[0].block
        mapping = dict(zip(body.arguments, op.operands, strict=True))
        for inner in body:
            if inner.definition.terminator:
                for old, new in zip(op.results, inner.operands, strict=True):
                    old.replace_by(mapping[new])
                break
            copy = inner.clone(mapping)
            copy.loc = op.loc
            if "phase" in op.attributes:
                copy.attributes["phase"] = op.attributes["phase"]
            block.insert_before(copy, op)
            mapping.update(zip(inner.results, copy.results, strict=True))
        op.erase()
        count += 1
    return count
