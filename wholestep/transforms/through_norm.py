"""`through_norm`: the gradients of a product that BatchNorm stands behind, without reading the product's result again.

BatchNorm's gradient is that of its result, less its mean and less a multiple of the normalised product, per channel. A
product of that with something is a sum of three: the middle one needs sums of columns alone, and the last is linear in
the product y = x W', so that it follows from x, which is smaller where W makes few channels into many:

    dW = e (g' x - mean(g) sum(x)) - q W (x' x - n mean(x) mean(x)')    q = weight rstd^2 dweight / n, e = weight rstd
    dx = g (e W) - x (W' q W) + a vector

The gradient of BatchNorm's weight is the sum over W times g' x. Three readers of y become readers of x, and backward
need not keep y. Where an activation stands behind the norm, g is computed from y; that is no loss where the kernel that
makes g reads y anyway, as that of a depthwise convolution's gradient does (`around.py`). With x beside g in one memory
(`plan/joins.py`) both products of g are one with those of x. Sums are in f32 and in another order; what BatchNorm gives
is not rounded in between.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ..dialects.step import StepBuilder
from ..dialects.step.contraction import Contract, parse_spec
from ..dialects.step.convolution import ConvInputGrad
from ..dialects.step.normalization import BatchNorm, BatchNormGrad
from ..dialects.step.shape import Concat, Transpose
from ..ir.core import Op, Value
from ..ir.types import BF16, F32, ScalarType
from .inner_sums import read_for
from .opportunity import Change, Place, Transformation, register_transformation
from .regions import ANCHORS
from .tall_products import is_tall

#: how many times as large as x the product must be: x is written beside the gradient, and read there by both products
WIDER = 2
#: bytes, moved or kept, that are worth some small kernels more: about 35 us of a large GPU's memory
LEAST = 1 << 27
#: bytes that its memory moves while it multiplies once for the small matrices: in f32, or in bf16 twice
RATE, RATE_BF16 = 0.07, 0.03
#: bytes that small kernels move for each element of the weight
SMALL = 90
#: multiplications and additions of a small product from which on it is made in bf16
MUCH = 1 << 28
#: so many values are looked at for what a gradient is computed from
LOOKED = 200


@dataclass(frozen=True, slots=True)
class Reader:
    """A product that reads BatchNorm's gradient: itself, the transposes before it, and its labels of the channels."""

    op: Op
    orders: tuple[tuple[int, ...], ...]
    #: which operand the gradient is
    side: int
    channel: str

    @property
    def other(self) -> Value:
        return self.op.operands[1 - self.side]

    def placed(self, gradient: Value, other: Value) -> tuple[Value, Value]:
        """The operands in the order of the product's."""
        return (gradient, other) if self.side == 0 else (other, gradient)

    @property
    def labels(self) -> tuple[str, str]:
        """Of the gradient and of the other operand."""
        parts = parse_spec(self.op.spec)
        return parts[self.side], parts[1 - self.side]

    @property
    def out(self) -> str:
        return parse_spec(self.op.spec)[2]


@dataclass(frozen=True, slots=True)
class Site:
    """A product before a norm, and the products that read the norm's gradient: inputs' and the weight's."""

    product: Op
    x: Value
    weight: Value
    #: whether the weight lies with its result's channels first
    channels_first: bool
    inputs: tuple[Reader, ...]
    own: Reader

    @property
    def rows(self) -> str:
        """The labels of x."""
        left, right, _ = parse_spec(self.product.spec)
        return left if self.x is self.product.lhs else right

    @property
    def in_rows(self) -> bool:
        """Whether x and the product have the same rows, and channels behind them."""
        out = parse_spec(self.product.spec)[2]
        return self.rows[:-1] == out[:-1] and self.rows[-1] == self.inner

    @property
    def inner(self) -> str:
        """The label that the product sums over."""
        return next(c for c in self.rows if c not in parse_spec(self.product.spec)[2])


@register_transformation
class ThroughNorm(Transformation):
    """Level 3: a norm's gradient, and the products that read it."""

    name = "through_norm"
    level = 3

    def places(self, function: Op) -> Iterator[Place]:
        for op in function.regions[0].block:
            site = site_of(op) if op.definition is BatchNormGrad else None
            if site is not None:
                yield op, why_not(op, site) or change(op, site)

    def apply(self, op: Op) -> None:
        site = site_of(op)
        assert op.parent is not None and site is not None
        b = StepBuilder(op.parent, op, op.loc, op.phase)
        rank, channels = op.x.type.rank, op.x.type.shape[1]
        count = float(op.x.type.size // channels)

        def column(value: Value) -> Value:
            return b.reshape(value, shape=(channels, 1))

        weight = weight_of(b, site)
        mean, rstd = (b.cast_to(v, F32) for v in (op.mean, op.rstd))
        # what is summed over all rows
        db = b.sum(b.cast_to(op.dy, F32), dims=tuple(d for d in range(rank) if d != 1))
        rows, inner, out = site.rows, site.inner, parse_spec(site.product.spec)[2]
        channel = next(c for c in out if c not in rows)
        dims = seen(op.x)[1]
        gradient = op.dy
        if dims != sorted(dims):
            gradient = b.transpose(gradient, order=tuple(dims.index(d) for d in range(rank)))
        both = b.concat([gradient, site.x], dim=rank - 1) if lies_beside(op, site) else None
        spec = f"{out},{rows}->{channel}{inner}"
        if both is None or has_square(site) or not is_tall(site.own.op):
            product, square = b.contract(gradient, site.x, spec=spec, wide=True), square_of(b, site)
        else:  # both products read x and wait for it, so that they are one: of the gradient with x beside it
            made = b.contract(both, site.x, spec=spec, wide=True)
            product = b.slice(made, dim=0, start=0, end=channels)
            square = b.slice(made, dim=0, start=channels, end=made.type.shape[0])
        total = sums_of(b, site)
        _, turned = spread(b, site, weight, total, square)
        # the vectors
        dw = b.mul(rstd, b.sub(b.sum(b.mul(weight, product), dims=(1,)), b.mul(mean, db)))
        scale = rstd if op.weight is None else b.mul(rstd, b.cast_to(op.weight, F32))
        slope = b.mul(b.mul(scale, rstd), b.div(dw, count))
        shift = b.mul(scale, b.div(db, count))
        away = b.sub(b.mul(slope, mean), shift)  # what all rows of x are multiplied by
        # the weight's gradient
        own = b.sub(b.mul(column(scale), product), b.mul(column(b.mul(slope, count)), turned))
        own = b.sub(own, b.mul(column(shift), b.reshape(total, shape=(1, total.type.size))))
        own = own if site.own.out[0] == site.own.channel else b.transpose(own, order=(1, 0))
        new = b.cast_to(own, site.own.op.result.type.element)
        for reader in site.inputs:
            into_input(op, site, reader, both, weight, scale, slope, away)
        for old, value in ((op.dw, dw), (op.db, db)):
            old.replace_by(b.cast_to(value, old.type.element))
        site.own.op.result.replace_by(new)
        for reader in (*site.inputs, site.own):
            reader.op.erase()
        forget(op.dx)
        op.erase()


def into_input(
    op: Op,
    site: Site,
    reader: Reader,
    both: Value | None,
    weight: Value,
    scale: Value,
    slope: Value,
    away: Value,
) -> None:
    """The gradient of an input: of the scaled weight, and of x by a small matrix."""
    assert op.parent is not None
    b = StepBuilder(op.parent, reader.op, reader.op.loc, reader.op.phase)
    _, labels = reader.labels
    first = labels[0] == reader.channel
    matrix = b.cast_to(reader.other, F32)
    matrix = matrix if first else b.transpose(matrix, order=(1, 0))
    channels = matrix.type.shape[0]

    def column(value: Value) -> Value:
        return b.reshape(value, shape=(channels, 1))

    low = reader.other.type.element
    scaled = b.cast_to(b.mul(column(scale), matrix), low)
    scaled = scaled if first else b.transpose(scaled, order=(1, 0))
    small = small_product(b, b.mul(column(slope), weight), matrix, low, "oz,oc->zc")
    small = b.cast_to(b.neg(small), low)
    vector = b.sum(b.mul(column(away), matrix), dims=(0,))
    theirs = rows_of(op, site, reader)
    wanted = next(c for c in reader.out if c not in theirs.values())
    vector = b.reshape(vector, shape=tuple(vector.type.size if c == wanted else 1 for c in reader.out))
    out = parse_spec(site.product.spec)[2]
    if both is not None and "".join(theirs) == out[:-1] and reader.labels[0][-1] == reader.channel:
        whole = b.concat([scaled, small if first else b.transpose(small, order=(1, 0))], dim=0 if first else 1)
        made = b.contract(*reader.placed(both, whole), spec=reader.op.spec)
        made = b.cast_to(b.add(b.cast_to(made, F32), vector), reader.op.result.type.element)
    else:
        gradient = op.dy
        for order in reader.orders:
            gradient = b.transpose(gradient, order=order)
        made = b.contract(*reader.placed(gradient, scaled), spec=reader.op.spec)
        spare = next(c for c in "zyxwv" if c not in reader.out)
        spec = "".join(spare if c == site.inner else theirs[c] for c in site.rows)
        part = b.contract(site.x, small, spec=f"{spec},{spare}{wanted}->{reader.out}")
        made = b.add(made, b.cast_to(b.add(b.cast_to(part, F32), vector), made.type.element))
    reader.op.result.replace_by(made)


def lies_beside(op: Op, site: Site) -> bool:
    """Whether x is put beside the gradient; of two norms of one sum that reads more: the other's product is apart."""
    if not site.in_rows or is_part(op.dy):
        return False
    others = [site_of(u) for u in op.dy.uses if u.definition is BatchNormGrad and u is not op]
    return not any(o is not None and o.in_rows and o.x.type.bytes > site.x.type.bytes for o in others)


def is_part(value: Value) -> bool:
    """Whether a value lies in one memory with others already; it cannot do so twice."""
    return any(u.definition is Concat or (u.definition is Transpose and is_part(u.result)) for u in value.uses)


def forget(value: Value) -> None:
    """Erases the views of a value that nobody reads."""
    for user in list(dict.fromkeys(value.uses)):
        forget(user.results[0])
        user.erase()


def rows_of(op: Op, site: Site, reader: Reader) -> dict[str, str]:
    """The reader's label of each of the product's rows."""
    dims, out = seen(op.x)[1], parse_spec(site.product.spec)[2]
    mine = list(range(len(dims)))  # of the reader's dimensions, which one of the norm's they are
    for order in reader.orders:
        mine = [mine[i] for i in order]
    return {out[dims[m]]: c for m, c in zip(mine, reader.labels[0], strict=True) if m != 1}


# ---- what a product reads, summed up ---------------------------------------------------------------------------------


def weight_of(b: StepBuilder, site: Site) -> Value:
    """The weight in f32, with its result's channels first."""
    weight = b.cast_to(site.weight, F32)
    return weight if site.channels_first else b.transpose(weight, order=(1, 0))


def sums_of(b: StepBuilder, site: Site) -> Value:
    """The sum of all rows of x."""
    return b.sum(b.cast_to(site.x, F32), dims=tuple(d for d, c in enumerate(site.rows) if c != site.inner))


def square_of(b: StepBuilder, site: Site) -> Value:
    """x' x."""
    spare = next(c for c in "zyxwv" if c not in site.rows + parse_spec(site.product.spec)[2])
    spec = f"{site.rows.replace(site.inner, spare)},{site.rows}->{spare}{site.inner}"
    return b.contract(site.x, site.x, spec=spec, wide=True)


def has_square(site: Site) -> bool:
    """Whether somebody computes x' x already, as `early_norm` does."""
    return any(u.definition is Contract and u.wide and u.lhs is u.rhs for u in site.x.uses)


def spread(b: StepBuilder, site: Site, weight: Value, total: Value, square: Value) -> tuple[Value, Value]:
    """The mean of x, and the weight times its covariance: around the mean, which variances are small beside."""
    width = total.type.size
    count = float(site.x.type.size // width)
    centre = b.div(total, count)
    around = b.mul(b.reshape(centre, shape=(width, 1)), b.reshape(centre, shape=(1, width)))
    return centre, small_product(b, b.sub(b.div(square, count), around), weight, site.weight.type.element, "zc,oz->oc")


def small_product(b: StepBuilder, one: Value, other: Value, held: ScalarType, spec: str) -> Value:
    """A product of f32 matrices whose second one has numbers of a shorter type alone: where that is bf16, the first is
    one of its numbers and what these leave, and tensor cores multiply both, if there is much to do. 16 bits of it
    count."""
    made = b.contract(one, other, spec=spec)
    assert made.op is not None
    if held is not BF16 or Contract.flops(made.op) < MUCH:
        return made
    made.op.erase()
    short = b.cast_to(other, held)
    return b.add(*(b.contract(part, short, spec=spec, wide=True) for part in in_two(b, one, held)))


def in_two(b: StepBuilder, x: Value, held: ScalarType) -> tuple[Value, Value]:
    """The nearest numbers of a shorter type, and what these leave. The first cast rounds in every kernel: one that went
    on with what it has would leave nothing."""
    high = b.cast_to(x, held, rounds=True)
    return high, b.cast_to(b.sub(x, b.cast_to(high, F32)), held)


# ---- what fits -------------------------------------------------------------------------------------------------------


def site_of(op: Op) -> Site | None:
    """The products around a norm's gradient; None where others read it or it has none."""
    made, dims = seen(op.x)
    product = made.op
    if product is None or product.definition is not Contract or product.addend is not None or product.wide:
        return None
    left, right, out = parse_spec(product.spec)
    channel = out[dims[1]]
    pair = [(product.lhs, left, product.rhs, right), (product.rhs, right, product.lhs, left)]
    x, rows, weight, own = pair[0] if channel in right else pair[1]
    if channel in rows or len(own) != 2 or {c for c in out if c != channel} != set(rows) - set(own):
        return None
    readers = readers_of(op.dx)
    if not readers:
        return None
    inputs, weights = [], []
    for reader in readers:
        _, other = reader.labels
        if len(other) == 2 and reader.channel in other and reader.channel not in reader.out:
            inputs.append(reader)
        elif len(reader.out) == 2 and reader.channel in reader.out and reader.channel not in other:
            weights.append(reader)
        else:
            return None
    if len(weights) != 1:
        return None
    site = Site(product, x, weight, own[0] == channel, tuple(inputs), weights[0])
    return site if reads_alike(op, site) else None


def readers_of(value: Value, orders: tuple[tuple[int, ...], ...] = ()) -> list[Reader]:
    """The products that read a gradient through transposes; none where anybody else does."""
    found: list[Reader] = []
    for user in dict.fromkeys(value.uses):
        if user.definition is Transpose:
            below = readers_of(user.result, (*orders, user.order))
            if not below:
                return []
            found += below
        elif user.definition is Contract and user.addend is None and not user.wide:
            sides = [n for n, v in enumerate(user.operands) if v is value]
            if len(sides) != 1:
                return []
            found.append(Reader(user, orders, sides[0], ""))
        else:
            return []
    return [named(reader, value.type.rank) if not reader.channel else reader for reader in found]


def named(reader: Reader, rank: int) -> Reader:
    """The reader with its label of the norm's channels."""
    dims = list(range(rank))
    for order in reader.orders:
        dims = [dims[i] for i in order]
    return Reader(reader.op, reader.orders, reader.side, reader.labels[0][dims.index(1)])


def reads_alike(op: Op, site: Site) -> bool:
    """Whether the weight's gradient is one of the same x, row by row."""
    (mine, own), (theirs, other) = seen(site.x), seen(site.own.other)
    if mine is not theirs:
        return False
    same = rows_of(op, site, site.own) | {site.inner: next(c for c in site.own.labels[1] if c in site.own.out)}
    stored = {place: same[c] for place, c in zip(own, site.rows, strict=True)}
    return all(stored[place] == c for place, c in zip(other, site.own.labels[1], strict=True))


def seen(value: Value) -> tuple[Value, list[int]]:
    """What a value is a transpose of, and for each of its dimensions which one of that it is."""
    dims = list(range(value.type.rank))
    while value.op is not None and value.op.definition is Transpose:
        dims = [value.op.order[d] for d in dims]
        value = value.op.operands[0]
    return value, dims


def why_not(op: Op, site: Site, more: int = 0) -> str:
    """more: bytes that somebody else saves if it is done."""
    y, x = site.product.result.type, site.x.type
    if y.element.bits != 16:
        return "sums over products of 32 bits are slow"
    if y.bytes < WIDER * x.bytes:
        return "what the product reads is not much smaller than what it makes"
    found = change(op, site)
    rate = RATE_BF16 if site.weight.type.element is BF16 and found.flops >= 2 * MUCH else RATE
    if more - found.bytes - found.saved < LEAST + rate * found.flops and not has_square(site):
        return "it is too small to be worth some small kernels more"
    if is_made_of(op.dy, site.product.result) and not is_made_on_the_way(op, site):
        return "the gradient is computed from the product, which is read for it anyway"
    return ""


def change(op: Op, site: Site) -> Change:
    """Readers of y read x, which is written for them; y is not kept, unless the gradient is computed from it. Products
    that do not wait for memory read BatchNorm's gradient from there, so that it is a pass over y."""
    y, x, readers = site.product.result.type.bytes, site.x.type.bytes, 1 + len(site.inputs)
    inner = next(n for n, c in zip(site.x.type.shape, site.rows, strict=True) if c == site.inner)
    flops = 2 * readers * inner * site.weight.type.size
    small = SMALL * site.weight.type.size
    if is_made_on_the_way(op, site):
        return Change(bytes=readers * (x - y) + 2 * x + small, flops=flops)
    if not lies_beside(op, site):  # what x gives is a product of its own
        small += 3 * x
    if not all(map(is_tall, (reader.op for reader in (*site.inputs, site.own)))):
        return Change(bytes=(1 + readers) * x - 4 * y + small, saved=-y, flops=flops)
    return Change(bytes=(1 + readers) * (x - y) + small, saved=-y, flops=flops)


def is_made_on_the_way(op: Op, site: Site) -> bool:
    """Whether a depthwise convolution's gradient and the product are all that the gradient is computed from: the kernel
    that makes the one reads the other for its sums, and can write what an activation makes of both (`around.py`)."""
    made = site.product.result
    others = read_for(op.dy) - {made}
    if len(others) != 1 or list(op.dy.uses) != [op]:
        return False
    maker = others.pop().op
    return maker is not None and maker.definition is ConvInputGrad and maker.w.type.shape[1] == 1 and maker.groups > 1


def is_made_of(value: Value, product: Value) -> bool:
    """Whether cheap ops make a value out of what a product makes, beside what products read from memory."""
    pending, known = [value], set[Value]()
    while pending:
        one = pending.pop()
        if one is product:
            return True
        if one in known or len(known) > LOOKED:
            continue
        known.add(one)
        op = one.op
        if op is None or op.name in ANCHORS or (one is not value and is_in_memory(one)):
            continue
        if op.definition is BatchNorm:
            pending.append(op.x)
        elif getattr(op.definition, "pointwise", False) or getattr(op.definition, "views", False):
            pending += op.operands
    return False


def is_in_memory(value: Value) -> bool:
    """Whether a product reads a value, through views or not."""
    for user in value.uses:
        if user.name in ANCHORS or (getattr(user.definition, "views", False) and is_in_memory(user.results[0])):
            return True
    return False
