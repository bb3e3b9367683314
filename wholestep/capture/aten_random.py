"""ATen handlers: random numbers and what is made with them. Each call draws from a stream of its own.

Masks are drawn in float32, whatever is masked (in float64 for float64), so that their probabilities are exact enough.
"""

from __future__ import annotations

from ..ir.core import Value
from ..ir.types import BOOL, F64, TensorType
from .aten_pointwise import leaky_relu
from .importer import Importer, aten, mask_element

# ---- numbers ---------------------------------------------------------------------------------------------------------


@aten("rand", "rand_like")
def _rand(imp, *_, **__):
    return imp.random("uniform", imp.expected[0])


@aten("randn", "randn_like")
def _randn(imp, *_, **__):
    return imp.random("normal", imp.expected[0])


@aten("normal_functional")
def _normal(imp, x, mean=0.0, std=1.0, **_):
    return imp.b.add(imp.b.mul(imp.random("normal", x.type), std), mean)


@aten("normal.Tensor_float", "normal.float_Tensor", "normal.Tensor_Tensor", "normal.float_float")
def _normal_of(imp, mean=0.0, std=1.0, *_, **__):
    b, type = imp.b, imp.expected[0]
    # autograd lets no gradient through the parameters of the distribution
    mean, std = (b.detach(b.cast_to(v, type.element)) if isinstance(v, Value) else v for v in (mean, std))
    return b.add(b.mul(imp.random("normal", type), std), mean)


@aten("randint", "randint.low")
def _randint(imp, *args, **_):
    return integers(imp, *((0, args[0]) if isinstance(args[1], list | tuple) else args[:2]))


@aten("randint_like", "randint_like.low_dtype")
def _randint_like(imp, x, *bounds, **_):
    return integers(imp, *((0, *bounds) if len(bounds) == 1 else bounds))


def integers(imp: Importer, low: int, high: int) -> Value:
    """Whole numbers from low up to high, evenly."""
    b, type = imp.b, imp.expected[0]
    uniform = imp.random("uniform", TensorType(type.shape, F64))
    return b.cast(b.add(b.floor(b.mul(uniform, float(high - low))), float(low)), dtype=type.element)


# ---- masks -----------------------------------------------------------------------------------------------------------


def uniform_for(imp: Importer, x: Value, shape: tuple[int, ...] | None = None) -> Value:
    """Uniform numbers for the elements of x, or for the places of another shape."""
    return imp.random("uniform", TensorType(x.type.shape if shape is None else shape, mask_element(x.type.element)))


def per_channel(x: Value) -> tuple[int, ...]:
    """The shape of a mask that keeps or drops whole channels."""
    return (*x.type.shape[:2], *(1,) * (x.type.rank - 2))


@aten("bernoulli")
def _bernoulli(imp, p, **_):
    uniform = uniform_for(imp, p)
    return imp.b.cast_to(imp.b.lt(uniform, imp.b.cast_to(p, uniform.type.element)), imp.expected[0].element)


@aten("bernoulli.p")
def _bernoulli_p(imp, x, p=0.5, **_):
    return imp.b.cast_to(imp.b.lt(uniform_for(imp, x), p), imp.expected[0].element)


def dropout(imp: Importer, x: Value, p: float, shape: tuple[int, ...] | None = None) -> Value:
    """x with a share p of its elements set to zero and the rest scaled; the mask is drawn again in backward."""
    if p == 1:
        return imp.b.mul(x, 0.0)
    return apply_mask(imp, x, imp.b.ge(uniform_for(imp, x, shape), p), p)


def apply_mask(imp: Importer, x: Value, keep: Value, p: float) -> Value:
    return imp.b.mul(imp.b.mul(x, imp.b.cast(keep, dtype=x.type.element)), 1 / (1 - p))


@aten("dropout")
def _dropout(imp, x, p, train):
    return x if not train or p == 0 else dropout(imp, x, p)


@aten("feature_dropout")
def _feature_dropout(imp, x, p, train):
    return x if not train or p == 0 else dropout(imp, x, p, per_channel(x))


@aten("native_dropout")
def _native_dropout(imp, x, p, train):
    if not train or p == 0:
        return [x, imp.b.full(True, x.type.shape, BOOL)]
    keep = imp.b.ge(uniform_for(imp, x), p)
    return [imp.b.mul(x, 0.0) if p == 1 else apply_mask(imp, x, keep, p), keep]


@aten("alpha_dropout")
def _alpha_dropout(imp, x, p, train):
    return x if not train or p == 0 else alpha_dropout(imp, x, p, x.type.shape)


@aten("feature_alpha_dropout")
def _feature_alpha_dropout(imp, x, p, train):
    return x if not train or p == 0 else alpha_dropout(imp, x, p, per_channel(x))


def alpha_dropout(imp: Importer, x: Value, p: float, shape: tuple[int, ...]) -> Value:
    """Dropout that keeps mean and variance of what selu gives: what is dropped becomes its lower limit."""
    b = imp.b
    if p == 1:
        return b.mul(x, 0.0)
    lowest = 1.7580993408473766
    scale = 1 / ((lowest * lowest * p + 1) * (1 - p)) ** 0.5
    keep = b.cast(b.ge(uniform_for(imp, x, shape), p), dtype=x.type.element)
    shift = b.add(b.mul(b.sub(keep, 1.0), lowest * scale), lowest * scale * p)
    return b.add(b.mul(x, b.mul(keep, scale)), shift)


@aten("rrelu")
def _rrelu(imp, x, lower=1 / 8, upper=1 / 3, training=False, **_):
    if not training:
        return leaky_relu(imp, x, (lower + upper) / 2)
    b = imp.b
    slope = b.add(b.mul(uniform_for(imp, x), float(upper - lower)), float(lower))
    return b.select(b.le(x, 0), b.mul(x, b.cast_to(slope, x.type.element)), x)
