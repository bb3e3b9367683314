"""`inner_sums`: BatchNorm's sums over a batch that wait for a factor of each image, from sums over its pixels.

    sum over n, p of f'(u) (g s[n] + d[n])  =  sum over n of s[n] (sum over p of f'(u) g) + d[n] (sum over p of f'(u))

A gate such as that of squeeze and excite has the gradient sum over p of g a: all pixels are read for it. What it adds
to the gradient of a (d above) is known only then, and BatchNorm's gradient reads all pixels once more for its two
sums. But neither s nor d depends on the pixel: sums of what they are multiplied by can be made where the gate's
gradient is, from one look at the same tensors, and what is left is small. (Sums over a gradient that is written, such
as those for a bias, are made on the way; what BatchNorm makes of it needs its sums first.) Sums are in f32, in another
order.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from ..dialects.step import StepBuilder, constant_value
from ..dialects.step.normalization import BatchNorm, BatchNormGrad, per_channel
from ..dialects.step.pointwise import ActivationGrad, Add, Cast, Div, Mul, Select, Sub
from ..dialects.step.reductions import Mean, Sum, reduced_shape
from ..dialects.step.shape import Broadcast
from ..ir.core import Op, Value
from ..ir.types import F32
from .opportunity import Change, Place, Transformation, register_transformation
from .regions import is_source

#: a sum of more parts than that stays as it is: each is two sums more for the kernel that reads the pixels
PARTS = 4
#: so many values are looked at for what a factor is computed from
LOOKED = 400


@dataclass(frozen=True, slots=True)
class Part:
    """One summand: a tensor, or 1 everywhere, that goes through linear ops, times factors that inner dims share."""

    tensor: Value | None
    #: ops, each with the operand that the tensor is
    through: tuple[tuple[Op, int], ...] = ()
    factors: tuple[Value, ...] = ()
    negative: bool = False

    @property
    def read(self) -> list[Value]:
        """What it is computed from, without its factors."""
        given = [] if self.tensor is None else [self.tensor]
        return given + [v for op, side in self.through for n, v in enumerate(op.operands) if n != side]


@dataclass(frozen=True, slots=True)
class Site:
    """A norm's gradient, what it is a sum of, and an earlier sum over the inner dimensions of the same tensors."""

    op: Op
    parts: tuple[Part, ...]
    earlier: Op

    @property
    def inner(self) -> tuple[int, ...]:
        return self.earlier.dims

    @property
    def read(self) -> list[Value]:
        return [*(v for part in self.parts for v in part.read), self.op.x]

    @property
    def tensors(self) -> set[Value]:
        """The large ones that are read for it."""
        return set().union(*map(read_for, self.read))


@register_transformation
class InnerSums(Transformation):
    """Level 3: a norm's gradient, and a sum over fewer dimensions that factors of it are computed from."""

    name = "inner_sums"
    level = 3

    def places(self, function: Op) -> Iterator[Place]:
        block = function.regions[0].block
        position = {op: i for i, op in enumerate(block)}
        for op in block:
            found = site_of(op, position) if op.definition is BatchNormGrad else None
            if found is not None:
                yield op, found if isinstance(found, str) else change(found)

    def apply(self, op: Op) -> None:
        assert op.parent is not None
        position = {o: i for i, o in enumerate(op.parent)}
        site = site_of(op, position)
        assert isinstance(site, Site)
        for needed in made_after(site, position) or ():
            needed.detach()
            op.parent.insert_before(needed, site.earlier)
        first = StepBuilder(op.parent, site.earlier, site.earlier.loc, site.earlier.phase)
        b = StepBuilder(op.parent, op, op.loc, op.phase)
        mean = per_channel(first, first.cast_to(op.mean, F32), op.x.type.rank)
        distance = first.sub(first.cast_to(op.x, F32), mean)
        tensors = [tensor_of(first, part, op.x.type.shape) for part in site.parts]
        sums = [added(b, site, [first.sum(t, dims=site.inner, keepdim=True) for t in tensors])]
        sums.append(added(b, site, [first.sum(first.mul(t, distance), dims=site.inner, keepdim=True) for t in tensors]))
        db, off = (b.reshape(b.sum(v, dims=outer(site), keepdim=True), shape=(op.x.type.shape[1],)) for v in sums)
        dw = b.mul(off, b.cast_to(op.rstd, F32))
        for old, new in zip(op.results, BatchNormGrad.expand(b, op, (dw, db)), strict=True):
            old.replace_by(new)
        op.erase()


def tensor_of(b: StepBuilder, part: Part, shape: tuple[int, ...]) -> Value:
    """What a part sums up, in f32 and without its factors."""
    made = b.full(1.0, shape, F32) if part.tensor is None else b.broadcast_to(b.cast_to(part.tensor, F32), shape)
    for op, side in part.through:
        given = [made if n == side else wide(b, v) for n, v in enumerate(op.operands)]
        attributes = {k: v for k, v in op.attributes.items() if k != "phase"}
        made = getattr(b, op.name.partition(".")[2])(*given, **attributes)
    return made


def wide(b: StepBuilder, value: Value) -> Value:
    """A value in f32; conditions as they are."""
    return b.cast_to(value, F32) if value.type.element.kind == "float" else value


def added(b: StepBuilder, site: Site, sums: list[Value]) -> Value:
    """Sums of parts with their factors, added up."""
    total = None
    for part, one in zip(site.parts, sums, strict=True):
        for factor in part.factors:
            one = b.mul(one, b.cast_to(factor, F32))
        one = b.neg(one) if part.negative else one
        total = one if total is None else b.add(total, one)
    assert total is not None
    return total


def outer(site: Site) -> tuple[int, ...]:
    """The dimensions that are summed over in the end."""
    return tuple(d for d in range(site.op.x.type.rank) if d != 1 and d not in site.inner)


# ---- what fits -------------------------------------------------------------------------------------------------------


def site_of(op: Op, position: dict[Op, int]) -> Site | str | None:
    """How a norm's sums follow from earlier ones, or why they do not; None where no factor waits for such a sum."""
    found: Site | str | None = None
    known: dict[tuple[int, ...], list[Part]] = {}
    for earlier in sums_before(op.dy, op.x):
        dims = earlier.dims
        parts = known.setdefault(dims, parts_of(op.dy, dims, op.x.type.rank))
        if not any(part.factors for part in parts):
            continue
        site = Site(op, tuple(parts), earlier)
        why = why_not(site, position)
        if not why:
            return site
        found = found or why
    return found


def sums_before(value: Value, like: Value) -> Iterator[Op]:
    """Sums over some dimensions, not the channels, of tensors of one shape that a value is computed from, the last
    first; beyond them is not looked."""
    pending, known = [value], set[Value]()
    while pending and len(known) <= LOOKED:
        one = pending.pop(0)
        op = one.op
        if one in known or op is None:
            continue
        known.add(one)
        if op.definition in (Sum, Mean) and op.x.type.shape == like.type.shape:
            if 1 not in op.dims and len(op.dims) < op.x.type.rank - 1:
                yield op
        elif one.type.size < like.type.size or is_cheap(op):
            pending += op.operands


def parts_of(value: Value, inner: tuple[int, ...], rank: int) -> list[Part]:
    """A value as a sum of products with what the inner dimensions share; one part without factors where it is none."""
    op = value.op
    if is_shared(value, inner, rank):
        return [Part(None, factors=(value,))]
    found: list[Part] = []
    if op is None:
        pass
    elif op.definition in (Add, Sub):
        left, right = (parts_of(v, inner, rank) for v in op.operands)
        found = left + ([negated(p) for p in right] if op.definition is Sub else right)
    elif op.name == "step.neg":
        found = [negated(p) for p in parts_of(op.x, inner, rank)]
    elif op.definition is Broadcast or (op.definition is Cast and not op.rounds):
        found = parts_of(op.operands[0], inner, rank)
    elif op.definition is Mul:
        for side in (0, 1):
            factor, parts = op.operands[1 - side], parts_of(op.operands[side], inner, rank)
            if is_shared(factor, inner, rank):
                return [replace(p, factors=(*p.factors, factor)) for p in parts]
            if any(p.factors for p in parts):
                found = passed(parts, op, side)
    elif op.definition is Div or issubclass(op.definition, ActivationGrad):
        found = passed(parts_of(op.operands[0], inner, rank), op, 0)
    elif op.definition is Select and 0 in map(constant_value, op.operands[1:]):
        side = 2 if constant_value(op.operands[1]) == 0 else 1
        found = passed(parts_of(op.operands[side], inner, rank), op, side)
    return found if any(p.factors for p in found) else [Part(value)]


def passed(parts: list[Part], op: Op, side: int) -> list[Part]:
    return [replace(p, through=(*p.through, (op, side))) for p in parts]


def negated(part: Part) -> Part:
    return replace(part, negative=not part.negative)


def is_shared(value: Value, inner: tuple[int, ...], rank: int) -> bool:
    """Whether a value that is broadcast to so many dimensions is the same all over the inner ones."""
    missing = rank - value.type.rank
    return all(d < missing or value.type.shape[d - missing] == 1 for d in inner)


def why_not(site: Site, position: dict[Op, int]) -> str:
    if any(user is not site.op for user in site.op.dy.uses):
        return "the gradient is read by others too: who writes it sums it up on the way"
    if len(site.parts) > PARTS:
        return "it is a sum of too many parts"
    if made_after(site, position) is None:
        return "what is summed up is known only after the factors"
    if not read_for(site.earlier.x) >= site.tensors:
        return "the sum that factors are computed from does not read the same tensors"
    if change(site).bytes >= 0:
        return "sums over the inner dimensions are as large as what is read"
    return ""


def made_after(site: Site, position: dict[Op, int]) -> list[Op] | None:
    """Cheap ops that stand behind the earlier sum and can stand before it: what is summed up is computed from them.
    None where it needs others."""
    pending, found = [*site.read, site.op.mean], set[Op]()
    while pending:
        op = pending.pop().op
        if op is None or op in found or position[op] < position[site.earlier]:
            continue
        if len(found) > LOOKED or not (is_cheap(op) or is_source(op)):
            return None
        found.add(op)
        pending += op.operands
    return sorted(found, key=position.__getitem__)


def is_cheap(op: Op) -> bool:
    """Whether a kernel that reads what an op reads computes it on the way."""
    return bool(getattr(op.definition, "pointwise", False) or getattr(op.definition, "views", False))


def read_for(value: Value) -> set[Value]:
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
        elif op is not None and is_cheap(op):
            pending += op.operands
        elif constant_value(one) is None:
            found.add(one)
    return found


def change(site: Site) -> Change:
    """The tensors are read once less; two sums of each part are written, and read."""
    sums, shape = 2 * len(site.parts), site.op.x.type.shape
    small = math.prod(reduced_shape(shape, site.inner, False))
    read = sum(v.type.bytes for v in site.tensors)
    return Change(bytes=2 * 4 * sums * small - read, flops=2 * sums * site.op.x.type.size)
