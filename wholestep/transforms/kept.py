"""`cut`: decides by bytes which values of forward are kept for backward, and has it compute the others from those.

A minimum cut between what forward alone can make (products, convolutions, attention, reductions) and what backward
reads, over every value in between that cheap ops make: pointwise ops, casts, views, random numbers, normalisations
given their statistics. A value on the cut is kept and costs its bytes; what lies behind the cut becomes `recompute` and
`renormalize` transformations, which change no bit of a result. For kernels that fuse: there computing again is free.

What counts is bytes: those that are kept, and those that computing again moves beside what backward reads anyway.
- A value that forward writes to memory in any case, because a product reads it, is cheaper to keep than one that would
  be written for backward alone (`writes`). One that a convolution of backward reads has to be written again
  (`rewrites`), and so has one that a product reads (`products`), unless that waits for memory and can compute it while
  it reads (`tall_products.py`). On a GPU, where memory is fast and there is no budget, such a value, an activation or
  what a norm gives, is kept instead (`WITHOUT_BUDGET`), and so is one that is made of arguments of the step, such as
  images in 16 bits, which would be read once more (`anew`). What a convolution alone would have written again is then
  kept for it (`reuses`, which is `reuse.py`), and still computed again by those who read what it is made of.
- An op that *joins* tensors of different origin reads more than it makes, so running it again costs `joins` times the
  bytes of all joined operands but the largest. A value is computed again through at most `joined` of those: every
  other sum of a residual stream is kept, and the next one is added up from it and from what a product wrote. Kernels
  of backward then read two tensors for one. Through two sums they would read three, and be split where that is too
  much for one: more bytes move then, and less memory is saved.
- A value is computed again by at most `ops` ops, from kept tensors of at most `reads` times its own bytes. Where the
  cut goes beyond that, the first value that does counts as one that forward alone can make, and it is cut again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ..dialects.step import StepBuilder
from ..dialects.step.contraction import Contract
from ..dialects.step.normalization import BatchNorm, GroupNorm, LayerNorm, RmsNorm
from ..dialects.step.shape import Concat, Shape, SliceUpdate
from ..dialects.step.sources import Random
from ..errors import InputError
from ..ir.attributes import freeze
from ..ir.builtin import functions
from ..ir.collector import collector_paused
from ..ir.core import Block, Op, Value
from . import backward_forms, reuse  # noqa: F401  (it registers)
from .flow import UNBOUNDED, Network
from .opportunity import Opportunity, matches, near, register_transformation, site_names, sites
from .opportunity import take as take_all
from .recompute import Recompute, bytes_of, is_late, is_made, run_again, why_not
from .regenerate import EARLY
from .regions import ANCHORS
from .tall_products import is_tall

NORMALISATIONS = (LayerNorm, RmsNorm, GroupNorm, BatchNorm)
MOVES = (Shape, SliceUpdate, Concat)
#: an op joins tensors where it reads so much more than the largest, in bytes of what it makes
JOIN = 0.25


@register_transformation
class Renormalize(Recompute):
    """Level 3: a normalised value is computed again from its input; the statistics are kept, as backward reads them.

    ATen's kernels take no statistics and find the same ones again. A kernel that can use those of forward asks
    `recompute.originals` for the op that has them.
    """

    name = "renormalize"

    def makes(self, op: Op) -> Sequence[Value]:
        return op.results[:1] if op.definition in NORMALISATIONS else ()

    def copy(self, op: Op, new: dict[Value, Value]) -> Op:
        if op.definition is not BatchNorm or not op.training:
            return super().copy(op, new)
        # without running statistics: they are no part of the value, and their memory gets the new ones in forward
        operands = [None if v is None else new.get(v, v) for v in (op.x, op.weight, op.bias)]
        builder = StepBuilder(Block(), None, op.loc)
        return BatchNorm.build(builder, *operands, training=True, momentum=op.momentum, eps=op.eps).detach()


@dataclass(frozen=True, slots=True)
class Limits:
    """How far computing again goes; the module's docstring says what each means."""

    ops: int = 30
    reads: float = 4.0
    joins: float = 0.5
    joined: int = 1
    writes: float = 0.25
    rewrites: float = 0.5
    products: float = 0.5
    anew: float = 0.0
    least: int = 4096  # values of fewer bytes are kept for nothing
    reuses: bool = False


#: where bytes that move count more than those that are kept
WITHOUT_BUDGET = Limits(products=1.25, anew=1.0, reuses=True)


def cut(module: Op, forbid: Sequence[str] = (), limits: Limits | None = None) -> list[str]:
    """Keeps as few bytes of forward for backward as it can; gives the recipe of it.

    forbid: keys or patterns of opportunities that are not taken: `recompute`, `renormalize` and the forms of backward
    ops that are taken first (`backward_forms.py`).
    """
    done = [*take_all(module, backward_forms.FORMS, forbid), *take(module, choose(module, forbid, limits))]
    return [*done, *(take_all(module, ["reuse"], forbid) if limits is not None and limits.reuses else ())]


def choose(module: Op, forbid: Sequence[str] = (), limits: Limits | None = None) -> list[str]:
    """The keys of what `cut` would apply, consumers before their producers. The program stays as it is."""
    names = site_names(module)
    found: list[str] = []
    with collector_paused():
        for function in functions(module):
            values = Values(function.regions[0].block, limits or Limits())
            if forbid:
                values.cheap -= {op for op in values.cheap if matches(opportunity(op, names), forbid)}
            found += [opportunity(op, names).key for op in reversed(minimum(values))]
    return found


def take(module: Op, keys: Iterable[str]) -> list[str]:
    """Applies `recompute` and `renormalize` keys all at once, in one walk per function; gives them back."""
    hows = {how.name: how for how in (Recompute(), Renormalize())}
    places = sites(module)
    by_block: dict[Block, dict[Op, str]] = {}
    keys = list(dict.fromkeys(keys))
    for key in keys:
        name, _, site = key.partition(" ")
        op = places.get(site)
        if name not in hows or op is None or op.parent is None:
            raise InputError(f"the program has no opportunity {key!r}{near(site, places)}")
        by_block.setdefault(op.parent, {})[op] = key
    for block, chosen in by_block.items():
        given_back = set(block.last.operands) if block.last is not None else set()
        for op, key in chosen.items():
            reason = why_not(op, hows[key.partition(" ")[0]].late(op), given_back)
            if reason:
                raise InputError(f"{key!r} is not possible: {reason}")
        run_again([(hows[key.partition(" ")[0]], op) for op, key in chosen.items()])
        merge(block)
    return keys


def opportunity(op: Op, names: dict[Op, str]) -> Opportunity:
    """What a cheap op is computed again by."""
    return Opportunity((Renormalize if op.definition in NORMALISATIONS else Recompute).name, names[op])


def is_cheap(op: Op) -> bool:
    """Whether a fused kernel computes the first result of the op on the way, from its operands and statistics."""
    if not op.operands or not op.definition.pure:
        return False
    if op.definition in NORMALISATIONS or op.definition is Random:
        return True
    return len(op.results) == 1 and (getattr(op.definition, "pointwise", False) or issubclass(op.definition, MOVES))


def is_view(op: Op) -> bool:
    return getattr(op.definition, "views", False) and len(op.operands) == 1


def base_of(value: Value) -> Value:
    """The value whose memory a view shows; any other value itself."""
    while value.op is not None and is_view(value.op):
        value = value.op.operands[0]
    return value


@dataclass(slots=True)
class Values:
    """What there is to decide about in one block."""

    block: Block
    limits: Limits
    early: list[Op] = field(default_factory=list)
    cheap: set[Op] = field(default_factory=set)  # ops of forward that may be computed again
    read: list[Value] = field(default_factory=list)  # values of forward that a later phase reads
    written: set[Value] = field(default_factory=set)  # what forward writes to memory in any case: a product reads it
    rewritten: dict[Value, float] = field(default_factory=dict)  # what a product of a later phase reads from memory
    given_back: set[Value] = field(default_factory=set)
    behind: dict[Value, set[Value] | None] = field(default_factory=dict)  # (`arguments_behind`)

    def __post_init__(self) -> None:
        read: dict[Value, None] = {}
        for op in self.block:
            if op.phase in EARLY:
                self.early.append(op)
                if is_cheap(op):
                    self.cheap.add(op)
            elif is_late(op):
                read.update((v, None) for v in op.operands if v.op is not None and v.op.phase in EARLY)
            if op.name in ANCHORS and op.phase in EARLY:
                self.written.update(map(base_of, op.operands))
                self.written.update(op.results)
            elif op.name in ANCHORS and not is_tall(op):
                price = self.limits.products if op.definition is Contract else self.limits.rewrites
                for base in map(base_of, op.operands):
                    self.rewritten[base] = max(price, self.rewritten.get(base, 0.0))
        self.read = list(read)
        if self.block.last is not None:
            self.given_back.update(map(base_of, self.block.last.operands))

    def is_there(self, value: Value) -> bool:
        """Whether keeping a value costs nothing: an argument, a constant, a result of the step, a few bytes."""
        base = base_of(value)
        if not is_made(base) or base in self.given_back or bytes_of(base) < self.limits.least:
            return True
        return base.op is not None and base.op.phase not in EARLY

    def cost(self, value: Value) -> int:
        """What keeping a value costs. A view is kept by keeping what it shows."""
        if is_view(value.op) and value.op in self.cheap:  # type: ignore[arg-type]
            return UNBOUNDED
        return int(bytes_of(value) * (1.0 if value in self.written else 1.0 + self.limits.writes))

    def cost_again(self, value: Value, surplus: int) -> int:
        """What computing a value again costs, where its op reads `surplus` bytes more than it makes."""
        rewritten = self.rewritten.get(value, 0.0)
        read = sum(map(bytes_of, self.arguments_behind(value) or ())) if rewritten else 0
        return int(self.limits.joins * surplus + self.limits.anew * read + rewritten * bytes_of(value))

    def arguments_behind(self, value: Value) -> set[Value] | None:
        """The arguments of the step that cheap ops make a value of; None where they need something else as well."""
        if not is_made(base_of(value)):
            return {base_of(value)}
        if value not in self.behind:
            self.behind[value] = None
            if value.op in self.cheap:
                found = [self.arguments_behind(v) for v in value.op.operands]  # type: ignore[union-attr]
                known = [each for each in found if each is not None]
                self.behind[value] = set[Value]().union(*known) if len(known) == len(found) else None
        return self.behind[value]

    def sources(self, value: Value) -> list[Value] | None:
        """What a value is computed again from, beside what is there anyway; None where it cannot be."""
        op = value.op
        assert op is not None
        if op not in self.cheap or value is not op.results[0]:
            return None
        operands = dict.fromkeys(op.operands)
        if op.definition in NORMALISATIONS:
            operands.update((r, None) for r in op.results[1:3] if r.uses)
        return [v for v in operands if not self.is_there(v)]


def minimum(values: Values) -> list[Op]:
    """The ops to compute again, in program order: the minimum cut within the limits."""
    wanted = [v for v in values.read if not values.is_there(v)]
    sources: dict[Value, list[Value] | None] = {}  # of every value that matters
    pending = list(wanted)
    while pending:
        value = pending.pop()
        if value not in sources:
            sources[value] = made_of = values.sources(value)
            pending += made_of or ()
    # statistics before what is normalised with them
    order = [r for op in values.early for r in reversed(op.results) if r in sources]
    number = {v: 2 * n for n, v in enumerate(order)}  # the value as it is made; one more is the value as it is read
    start, end = 2 * len(order), 2 * len(order) + 1
    network = Network(end + 1)
    joins: set[Value] = set()
    for value, surplus in zip(order, joined(order, sources, set(values.read)), strict=True):
        made_of, node = sources[value], number[value]
        network.add(node, node + 1, values.cost(value))
        if made_of is None:
            network.add(start, node, UNBOUNDED)
            continue
        for source in made_of:
            network.add(number[source] + 1, node, UNBOUNDED)
        network.add(start, node, values.cost_again(value, surplus))
        if surplus >= JOIN * bytes_of(value):
            joins.add(value)
    for value in wanted:
        network.add(number[value] + 1, end, UNBOUNDED)
    while True:
        network.push(start, end)
        behind = network.before_sink(end)
        kept = {v for v, node in number.items() if behind[node + 1] and not behind[node]}
        again = needed(wanted, kept, sources)
        beyond = beyond_limits([v for v in order if v in again], kept, sources, values.limits, joins)
        if not beyond:
            return [v.op for v in order if v in again and v.op is not None]
        for value in beyond:
            network.add(start, number[value], UNBOUNDED)


def joined(order: Sequence[Value], sources: dict[Value, list[Value] | None], read: set[Value]) -> list[int]:
    """Of each value the bytes that its op reads beyond its largest operand, of operands that have another origin.

    A product of factors that backward reads has none: the kernel of its gradient reads them all.
    """
    origin: dict[Value, int] = {}  # a bit per value that forward alone can make
    found: list[int] = []
    for value in order:
        made_of = sources[value]
        covered = surplus = 0
        if made_of is None:
            covered = 1 << len(found)
        by_gradient = value.op is not None and value.op.name == "step.mul" and read.issuperset(made_of or ())
        for source in sorted(made_of or (), key=bytes_of, reverse=True):
            if covered and origin[source] & ~covered and not by_gradient:
                surplus += bytes_of(source)
            covered |= origin[source]
        origin[value] = covered
        found.append(surplus)
    return found


def needed(wanted: Sequence[Value], kept: set[Value], sources: dict[Value, list[Value] | None]) -> set[Value]:
    """The values that have to be computed again where these are kept."""
    again: set[Value] = set()
    pending = [v for v in wanted if v not in kept]
    while pending:
        value = pending.pop()
        if value not in again:
            again.add(value)
            pending += [v for v in sources[value] or () if v not in kept]
    return again


def beyond_limits(
    again: Sequence[Value],
    kept: set[Value],
    sources: dict[Value, list[Value] | None],
    limits: Limits,
    joins: set[Value],
) -> list[Value]:
    """The first values on each way that take too many ops or joins, or read too much; what follows starts anew."""
    beyond: list[Value] = []
    leaves: dict[Value, set[Value]] = {v: {v} for v in kept}
    cones: dict[Value, set[Value]] = {}
    for value in again:
        op, made_of = value.op, sources[value] or []
        assert op is not None
        leaves[value] = set().union(*[leaves[v] for v in made_of])
        cones[value] = set().union(*[cones.get(v, ()) for v in made_of])
        if is_view(op):
            continue
        cones[value].add(value)
        read = sum(map(bytes_of, leaves[value]))
        long = len(cones[value]) > limits.ops or len(cones[value] & joins) > limits.joined
        if long or read > limits.reads * bytes_of(value):
            beyond.append(value)
            leaves[value], cones[value] = {value}, set()
    return beyond


def merge(block: Block) -> None:
    """Merges copies with ops of later phases that compute the same, such as numbers drawn again; the first stays."""
    known: dict[object, Op] = {}
    for op in block:
        if not is_late(op) or not op.definition.pure or not op.results:
            continue
        attributes = frozenset([(k, freeze(v)) for k, v in op.attributes.items() if k not in ("phase", "again")])
        first = known.setdefault((op.definition, op.operands, attributes), op)
        if first is not op and (first.attributes.get("again") or op.attributes.get("again")):
            for old, new in zip(op.results, first.results, strict=True):
                old.replace_by(new)
            op.erase()


def kept_values(block: Block) -> list[Value]:
    """Values that forward makes and a later phase reads, each memory once: a view counts as what it is a view of."""
    found: dict[Value, None] = {}
    for op in block:
        if is_late(op):
            for value in op.operands:
                base = base_of(value)
                if is_made(base) and base.op is not None and base.op.phase in EARLY:
                    found[base] = None
    return list(found)


def kept_bytes(module: Op) -> int:
    """Bytes of forward that later phases read, in all functions."""
    return sum(bytes_of(v) for f in functions(module) for v in kept_values(f.regions[0].block))
