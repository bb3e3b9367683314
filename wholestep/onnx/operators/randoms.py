"""Random numbers. They follow torch's seed (`torch.manual_seed`): seeds in the file are not looked at."""

from __future__ import annotations

from onnx import TensorProto

from ...ir.core import Value
from ...ir.types import I64
from ..context import Context, Tensor
from ..dtypes import element_of, type_name
from . import operator
from .support import F32


@operator("RandomNormal", "RandomUniform", folds=False)
def of_shape(c: Context):
    return drawn(c, list(c.attribute("shape")), c.attribute("dtype"))


@operator("RandomNormalLike", "RandomUniformLike", folds=False)
def like(c: Context, x: Tensor):
    return drawn(c, list(x.shape), c.attribute("dtype") or x.type)


def drawn(c: Context, shape: list[int], kind: int) -> Tensor:
    b, element = c.b, element_of(kind)
    if element is None or element.kind != "float" or any(d < 0 for d in shape):
        raise c.unsupported(f"random {type_name(kind)} are not supported", "draw floats and cast")
    inner = element if element.bits >= 32 else F32
    if "Normal" in c.name:
        value = b.add(b.mul(c.random("normal", shape, inner), c.attribute("scale")), c.attribute("mean"))
    else:
        low, high = c.attribute("low"), c.attribute("high")
        value = b.add(b.mul(c.random("uniform", shape, inner), high - low), low)
    return c.tensor(b.cast_to(value, element), kind)


@operator("Bernoulli", folds=False)
def bernoulli(c: Context, x: Tensor):
    b, kind = c.b, c.attribute("dtype") or x.type
    element = element_of(kind)
    if element is None:
        raise c.unsupported(f"{type_name(kind)} is not supported", "use booleans")
    inner = x.element if x.element.bits >= 32 else F32
    hit = b.lt(c.random("uniform", x.shape, inner), b.cast_to(x.value, inner))
    return c.tensor(b.cast_to(hit, element), kind)


@operator("Multinomial", folds=False)
def multinomial(c: Context, x: Tensor):
    """Classes by their unnormalised log-probabilities: the largest of these plus Gumbel noise."""
    b, count = c.b, c.attribute("sample_size")
    if x.rank != 2 or count < 1:
        raise c.wrong("it needs a matrix, and at least one sample")
    kind = c.attribute("dtype") or TensorProto.INT32
    inner = x.element if x.element.bits >= 32 else F32
    noise: Value = b.neg(b.log(c.random("exponential", (x.shape[0], count, x.shape[1]), inner)))
    index = b.argmax(b.add(b.unsqueeze(b.cast_to(x.value, inner), 1), noise), dim=2)
    element = element_of(kind)
    if element is None:
        raise c.unsupported(f"{type_name(kind)} is not supported", "use int64")
    return c.tensor(b.cast_to(b.cast_to(index, I64), element), kind)
