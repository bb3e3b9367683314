"""`inner_sums`: sums over a batch that wait for a factor of each image, from sums over the pixels of each image.

    sum over n, p of f'(u) (g s[n] + d[n])  =  sum over n of s[n] (sum over p of f'(u) g) + d[n] (sum over p of f'(u))

A gate such as that of squeeze and excite has the gradient sum over p of g a: all pixels are read for it. What it adds
to the gradient of a (d above) is known only then, and BatchNorm's gradient reads all pixels once more for its two
sums. But neither s nor d depends on the pixel: sums of what they are multiplied by can be made where the gate's
gradient is, from one look at the same tensors, and what is left is small. Sums are in f32 and in another order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from ..dialects.step import StepBuilder, constant_value
from ..dialects.step.normalization import BatchNorm, BatchNormGrad, per_channel
from ..dialects.step.pointwise import ActivationGrad, Add, Cast, Mul, Select, Sub
from ..dialects.step.reductions import Mean, Sum, reduced_shape
from ..dialects.step.shape import Broadcast
from ..ir.core import Op, Value
from ..ir.types import F32
from .opportunity import Change, Place, Transformation, register_transformation

#: a sum of more parts than that stays as it is: each is a sum of its own for the kernel that reads the pixels
PARTS = 4
#: so many values are looked at for what a factor is computed from
LOOKED = 400


@dataclass(frozen=True, slots=True)
class Part:
    """One summand: a tensor, or 1 everywhere, that goes through linear ops, times factors that inner dims share."""

    tensor: Value | None
    through: tuple[Op, ...] = ()
    factors: tuple[Value, ...] = ()
    negative: bool = False


@dataclass(frozen=True, slots=True)
class Site:
    """A sum, what it is a sum of, and an earlier sum over the inner dimensions of the same tensors."""

    op: Op
    parts: tuple[Part, ...]
    earlier: Op

    @property
    def inner(self) -> tuple[int, ...]:
        return self.earlier.dims


@register_transformation
class InnerSums(Transformation):
    """Level 3: a sum, and one over fewer dimensions that its factors are computed from."""

    name = "inner_sums"
    level = 3

    def places(self, function: Op) -> Iterator[Place]:
        position = {op: i for i, op in enumerate(function.regions[0].block)}
        earlier: dict[tuple[int, ...], list[Op]] = {}
        for op in position:
            summed = summed_by(op)
            if summed is not None:
                site = site_of(op, earlier.get(summed[0].type.shape, []), position)
                if site is not None:
                    yield op, site if isinstance(site, str) else change(site)
            if op.definition in (Sum, Mean):
                earlier.setdefault(op.x.type.shape, []).append(op)

    def apply(self, op: Op) -> None:
        assert op.parent is not None
        position = {o: i for i, o in enumerate(op.parent)}
        shape = summed_by(op)[0].type.shape  # type: ignore[index]
        before = [o for o in position if o.definition in (Sum, Mean) and o.x.type.shape == shape]
        site = site_of(op, [o for o in before if position[o] < position[op]], position)
        assert isinstance(site, Site)
        first = StepBuilder(op.parent, site.earlier, site.earlier.loc, site.earlier.phase)
        b = StepBuilder(op.parent, op, op.loc, op.phase)
        if op.definition is Sum:
            (total,) = sums(first, b, site, [None])
            made = b.cast_to(b.reshape_to(total, op.y.type.shape), op.y.type.element)
            op.y.replace_by(made)
        else:
            rank = op.x.type.rank
            distance = first.sub(first.cast_to(op.x, F32), per_channel(first, first.cast_to(op.mean, F32), rank))
            db, dw = (b.reshape(v, shape=(op.x.type.shape[1],)) for v in sums(first, b, site, [None, distance]))
            dw = b.mul(dw, b.cast_to(op.rstd, F32))
            for old, new in zip(op.results, BatchNormGrad.expand(b, op, (dw, db)), strict=True):
                old.replace_by(new)
        op.erase()


def sums(first: StepBuilder, b: StepBuilder, site: Site, weights: list[Value | None]) -> list[Value]:
    """The sum, and that with each of some weights; reduced dimensions stay with size one. `first` builds what is
    summed over inner dimensions, where the pixels are read; b the rest."""
    summed, dims = summed_by(site.op)  # type: ignore[misc]
    outer = tuple(d for d in dims if d not in site.inner)
    tensors = [tensor_of(first, part, summed.type.shape) for part in site.parts]
    found = []
    for weight in weights:
        total = None
        for part, tensor in zip(site.parts, tensors, strict=True):
            weighed = tensor if weight is None else first.mul(tensor, weight)
            one = first.sum(weighed, dims=site.inner, keepdim=True)
            for factor in part.factors:
                one = b.mul(one, b.cast_to(factor, F32))
            one = b.neg(one) if part.negative else one
            total = one if total is None else b.add(total, one)
        found.append(b.sum(total, dims=outer, keepdim=True))
    return found


def tensor_of(b: StepBuilder, part: Part, shape: tuple[int, ...]) -> Value:
    """What a part sums up, without its factors."""
    made = b.full(1.0, shape, F32) if part.tensor is None else b.cast_to(part.tensor, F32)
    made = made if made.type.shape == shape else b.broadcast_to(made, shape)
    for op in part.through:
        if op.definition is Select:
            sides = [b.full(0.0, (), F32) if is_zero(v) else made for v in (op.operands[1], op.operands[2])]
            made = b.select(op.condition, *sides)
        else:
            attributes = {k: v for k, v in op.attributes.items() if k not in ("phase",)}
            made = getattr(b, op.name.partition(".")[2])(made, b.cast_to(op.x, F32), **attributes)
    return made


# ---- what fits -------------------------------------------------------------------------------------------------------


def summed_by(op: Op) -> tuple[Value, tuple[int, ...]] | None:
    """What an op sums up and over which dimensions."""
    if op.definition is BatchNormGrad:
        return op.dy, tuple(d for d in range(op.x.type.rank) if d != 1)
    return (op.x, op.dims) if op.definition is Sum else None


def site_of(op: Op, earlier: list[Op], position: dict[Op, int]) -> Site | str | None:
    """How a sum can be taken from earlier ones, or why it cannot; None where no factor of it waits for one."""
    summed, dims = summed_by(op)  # type: ignore[misc]
    found: Site | str | None = None
    for one in reversed(earlier):
        if not set(one.dims) < set(dims):
            continue
        parts = parts_of(summed, one.dims, summed.type.shape)
        if not any(waits_for(factor, one, summed.type.size) for part in parts for factor in part.factors):
            continue
        why = why_not(op, parts, one, position)
        if not why:
            return Site(op, tuple(parts), one)
        found = found or why
    return found


def parts_of(value: Value, inner: tuple[int, ...], shape: tuple[int, ...]) -> list[Part]:
    """A value as a sum of products with what the inner dimensions share; one part without factors where it is none."""
    op = value.op
    if is_shared(value, inner, len(shape)):
        return [Part(None, factors=(value,))]
    found: list[Part] = []
    if op is None:
        pass
    elif op.definition in (Add, Sub):
        left, right = (parts_of(v, inner, shape) for v in op.operands)
        found = left + ([negated(p) for p in right] if op.definition is Sub else right)
    elif op.name == "step.neg":
        found = [negated(p) for p in parts_of(op.x, inner, shape)]
    elif op.definition is Mul:
        for factor, other in ((op.y, op.x), (op.x, op.y)):
            if is_shared(factor, inner, len(shape)):
                found = [replace(p, factors=(*p.factors, factor)) for p in parts_of(other, inner, shape)]
                break
    elif op.definition is Broadcast or (op.definition is Cast and not op.rounds):
        found = parts_of(op.operands[0], inner, shape)
    elif issubclass(op.definition, ActivationGrad) or (op.definition is Select and any(map(is_zero, op.operands[1:]))):
        given = op.dy if op.definition is not Select else next(v for v in op.operands[1:] if not is_zero(v))
        found = [replace(p, through=(*p.through, op)) for p in parts_of(given, inner, shape)]
    return found if any(p.factors for p in found) else [Part(value)]


def negated(part: Part) -> Part:
    return replace(part, negative=not part.negative)


def is_shared(value: Value, inner: tuple[int, ...], rank: int) -> bool:
    """Whether a value that is broadcast to so many dimensions is the same all over the inner ones."""
    missing = rank - value.type.rank
    return all(d < missing or value.type.shape[d - missing] == 1 for d in inner)


def is_zero(value: Value) -> bool:
    return constant_value(value) == 0


def waits_for(factor: Value, earlier: Op, size: int) -> bool:
    """Whether a factor is computed from a sum, by values that are smaller than what is summed up."""
    pending, known = [factor], set[Value]()
    while pending and len(known) <= LOOKED:
        one = pending.pop()
        if one.op is earlier:
            return True
        if one not in known and one.op is not None and one.type.size < size:
            known.add(one)
            pending += one.op.operands
    return False


def why_not(op: Op, parts: list[Part], earlier: Op, position: dict[Op, int]) -> str:
    needed = [v for part in parts for v in needed_by(part)] + ([op.x, op.mean] if op.definition is BatchNormGrad else [])
    if len(parts) > PARTS:
        return "it is a sum of too many parts"
    if any(v.op is not None and position[v.op] >= position[earlier] for v in needed):
        return "what is summed up is known only after the factors"
    if not read_by(earlier.x) >= set().union(*map(read_by, needed)):
        return "the sum that factors are computed from does not read the same tensors"
    if change(Site(op, tuple(parts), earlier)).bytes >= 0:
        return "sums over the inner dimensions are as large as what is read"
    return ""


def needed_by(part: Part) -> list[Value]:
    """What is read for what a part sums up, without its factors."""
    given = [] if part.tensor is None else [part.tensor]
    for op in part.through:
        given += [op.condition] if op.definition is Select else [op.x]
    return given


def read_by(value: Value) -> set[Value]:
    """The large tensors that a kernel reads for a value, if it computes what is cheap."""
    found, pending, known, size = set[Value](), [value], set[Value](), value.type.size
    while pending:
        one = pending.pop()
        if one in known or one.type.size < size:
            continue
        known.add(one)
        op = one.op
        if op is not None and op.definition is BatchNorm:
            pending.append(op.x)
        elif op is not None and (getattr(op.definition, "pointwise", False) or getattr(op.definition, "views", False)):
            pending += op.operands
        else:
            found.add(one)
    return found


def change(site: Site) -> Change:
    """The tensors are read once less; each part has a sum, twice for BatchNorm, that is written and read."""
    norm = site.op.definition is BatchNormGrad
    needed = [v for part in site.parts for v in needed_by(part)] + ([site.op.x] if norm else [])
    read = sum(v.type.bytes for v in set().union(*map(read_by, needed)))
    small = 1
    for n in reduced_shape(site.earlier.x.type.shape, site.inner, False):
        small *= n
    count = len(site.parts) * (2 if norm else 1)
    return Change(bytes=2 * 4 * count * small - read, flops=2 * count * site.earlier.x.type.size)
