"""`early_norm`: BatchNorm's statistics of a product before the product is computed, from what it reads.

A product y = x W' has the mean W mean(x) and the variance diag(W cov(x) W'). Where W makes few channels into many, x
and its covariance are small, and a kernel that reads x once more tells both before a single y is there. The product's
own kernel then ends with what follows the norm, such as a residual sum and its activation, which is written anyway: y
is neither written nor read. With `through_norm` backward does not ask for it either, and has the covariance from here.
Statistics are of products in f32, not of rounded ones.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..dialects.step import StepBuilder
from ..dialects.step.contraction import Contract
from ..dialects.step.normalization import BatchNorm, BatchNormGrad
from ..ir.core import Op, Value
from . import through_norm
from .opportunity import Change, Place, Transformation, register_transformation
from .regions import lineage, readers_of
from .through_norm import Site, site_of

#: bytes that are worth one product of x and some small kernels more
LEAST = 1 << 26


@register_transformation
class EarlyNorm(Transformation):
    """Level 3: a norm behind a product whose gradient needs no y."""

    name = "early_norm"
    level = 3

    def places(self, function: Op) -> Iterator[Place]:
        for op in function.regions[0].block:
            site = norm_site(op)
            if site is not None:
                yield op, why_not(op, site) or change(site)

    def apply(self, op: Op) -> None:
        site = norm_site(op)
        assert op.parent is not None and site is not None
        b = StepBuilder(op.parent, op, op.loc, op.phase)
        weight = through_norm.weight_of(b, site)
        total, square = through_norm.sums_of(b, site), through_norm.square_of(b, site)
        centre, turned = through_norm.spread(b, site, weight, total, square)
        mean = b.sum(b.mul(weight, b.reshape(centre, shape=(1, centre.type.size))), dims=(1,))
        variance = b.maximum(b.sum(b.mul(turned, weight), dims=(1,)), 0.0)
        for old, new in zip(op.results, BatchNorm.expand(b, op, (mean, variance)), strict=True):
            old.replace_by(b.cast_to(new, old.type.element))
        op.erase()


def norm_site(op: Op) -> Site | None:
    """The product before a norm in training, with the readers of the norm's gradient."""
    if op.definition is not BatchNorm or not op.training:
        return None
    grads = [u for u in op.mean.uses if u.definition is BatchNormGrad and u.x is op.x]
    return site_of(grads[0]) if len(grads) == 1 else None


def why_not(op: Op, site: Site) -> str:
    (grad,) = (u for u in op.mean.uses if u.definition is BatchNormGrad)
    reason = through_norm.why_not(grad, site, -change(site).bytes)
    if reason or through_norm.is_made_on_the_way(grad, site):
        return f"backward reads the product: {reason or 'the gradient is computed from it'}"
    if set(readers_of(site.product.result)) != {op, grad}:
        return "others read the product"
    end, beside = chain(op.y)
    if not beside:
        return "nothing is added to what the norm gives: to write it costs as much as to write the product"
    if all(u.definition is Contract for u in readers_of(end)):
        return "products alone read what comes of it, and may compute it on load"
    rival = next((r for v in beside if (r := rival_of(v)) is not None), None)
    if rival is not None and (rival.definition is Contract or wins(rival, op, site)):
        return "what it is added to is a product too, which ends with the sum"
    if -change(site).bytes < LEAST:
        return "it is too small to be worth some small kernels more"
    return ""


def wins(rival: Op, op: Op, site: Site) -> bool:
    """Whether the other norm of a sum should be the early one: its x is smaller, or as small and it comes first."""
    theirs = norm_site(rival)
    if theirs is None or theirs.x.type.bytes > site.x.type.bytes:
        return False
    block = op.parent
    assert block is not None
    return theirs.x.type.bytes < site.x.type.bytes or next(o for o in block if o in (op, rival)) is rival


def change(site: Site) -> Change:
    """y is not written and read; x is read once more."""
    x, y = site.x.type, site.product.result.type
    inner = next(n for n, c in zip(x.shape, site.rows, strict=True) if c == site.inner)
    return Change(bytes=x.bytes - 2 * y.bytes, flops=2 * inner * x.size)


def chain(value: Value) -> tuple[Value, list[Value]]:
    """What cheap ops make of a value as long as each has one reader, and what they read beside it of its size."""
    size, beside = value.type.size, list[Value]()
    while True:
        users = list(dict.fromkeys(value.uses))
        if len(users) != 1 or users[0].parent is None or len(users[0].results) != 1:
            return value, beside
        (user,) = users
        if getattr(user.definition, "pointwise", False):
            beside += [v for v in user.operands if v is not value and v.type.size == size]
        elif not getattr(user.definition, "views", False):
            return value, beside
        value = user.results[0]


def rival_of(value: Value) -> Op | None:
    """The norm, or the product of one that is early already, that makes a value without anybody else reading it."""
    for made in lineage(value):
        if made.op is None or len(readers_of(made)) != 1:
            return None
        if made.op.definition in (BatchNorm, Contract):
            return made.op
    return None
