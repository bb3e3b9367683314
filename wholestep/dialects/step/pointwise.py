"""Pointwise ops: one output element from one element of each operand, with numpy broadcasting.

Operands share one element type (capture inserts casts), so an op never promotes silently.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch

from ...ir.core import Op, Value
from ...ir.dialect import AnyTensor, Attr, BoolTensor, FloatTensor, Operand, Result
from ...ir.types import BOOL, TensorType
from .base import Roles, StepOp, broadcast_roles, broadcast_shapes, constant_value, step, torch_dtype


class Pointwise(StepOp):
    """Common rules of pointwise ops."""

    pointwise = True
    takes_numbers = False  # whether `evaluate` may be given a Python number for a 0-d constant
    torch_function: ClassVar[Any] = None  # the ATen function that computes it
    cost = 1  # flops per element

    @staticmethod
    def flops(op: Op) -> int:
        return op.results[0].type.size * op.definition.cost  # type: ignore[attr-defined]

    @staticmethod
    def roles(op: Op) -> Roles:
        return broadcast_roles(op)

    @staticmethod
    def evaluate(op: Op):
        return op.definition.torch_function  # type: ignore[attr-defined]


class Unary(Pointwise):
    """y = f(x)."""

    x = Operand()
    y = Result()

    @staticmethod
    def infer(x):
        return x


class FloatUnary(Unary):
    """y = f(x) on floats."""

    x = Operand(FloatTensor)


class Binary(Pointwise):
    """z = f(x, y)."""

    takes_numbers = True
    converts = True
    x = Operand()
    y = Operand()
    z = Result()

    @staticmethod
    def infer(x, y):
        return TensorType(broadcast_shapes(x.shape, y.shape), x.element)

    @staticmethod
    def check(op):
        return None if op.x.type.element is op.y.type.element else "operands differ in element type"


class Compare(Binary):
    """A comparison; the result is boolean."""

    differentiable = False

    @staticmethod
    def infer(x, y):
        return TensorType(broadcast_shapes(x.shape, y.shape), BOOL)


def _reduce_both(b, op, dx, dy):
    """Gradients of a binary op brought back to the operands' shapes."""
    return [
        None if dx is None else b.sum_to(dx, op.operands[0].type.shape),
        None if dy is None else b.sum_to(dy, op.operands[1].type.shape),
    ]


# ---- unary -----------------------------------------------------------------------------------------------------------


def unary(name: str, function, doc: str, derivative=None, base=FloatUnary, cost: int = 1, precision: str = "follow"):
    """Declares a unary op from its torch function and its derivative `d(b, dy, x, y)`."""

    def rule(b, op, dy):
        return [derivative(b, dy, op.operands[0], op.results[0])]

    fields = {
        "__doc__": doc,
        "name": name,
        "__module__": __name__,
        "torch_function": staticmethod(function),
        "cost": cost,
        "precision": precision,
    }
    if derivative is not None:
        fields["derivative"] = staticmethod(rule)
    return step.op(type(name.title().replace("_", ""), (base,), fields))


def _zero(b, dy, x, y):
    return b.zeros_like(x)


TWO_OVER_SQRT_PI = 2 / math.sqrt(math.pi)

unary("neg", torch.neg, "-x.", lambda b, dy, x, y: b.neg(dy), base=Unary)
unary("abs", torch.abs, "|x|.", lambda b, dy, x, y: b.mul(dy, b.sign(x)), base=Unary)
unary("sign", torch.sign, "-1, 0 or 1.", _zero, base=Unary)
unary("exp", torch.exp, "e to the x.", lambda b, dy, x, y: b.mul(dy, y), cost=4, precision="high")
unary("exp2", torch.exp2, "2 to the x.", lambda b, dy, x, y: b.mul(b.mul(dy, y), math.log(2)), cost=4, precision="high")
unary(
    "expm1", torch.expm1, "e to the x, minus 1.", lambda b, dy, x, y: b.mul(dy, b.add(y, 1.0)), cost=4, precision="high"
)
unary("log", torch.log, "Natural logarithm.", lambda b, dy, x, y: b.div(dy, x), cost=4, precision="high")
unary(
    "log2",
    torch.log2,
    "Binary logarithm.",
    lambda b, dy, x, y: b.div(dy, b.mul(x, math.log(2))),
    cost=4,
    precision="high",
)
unary("log1p", torch.log1p, "log(1 + x).", lambda b, dy, x, y: b.div(dy, b.add(x, 1.0)), cost=4, precision="high")
unary("sqrt", torch.sqrt, "Square root.", lambda b, dy, x, y: b.div(dy, b.mul(y, 2.0)), cost=2)
unary(
    "rsqrt",
    torch.rsqrt,
    "1 / sqrt(x).",
    lambda b, dy, x, y: b.mul(b.mul(dy, b.pow(y, 3.0)), -0.5),
    cost=2,
    precision="high",
)
unary(
    "reciprocal",
    torch.reciprocal,
    "1 / x.",
    lambda b, dy, x, y: b.neg(b.mul(dy, b.mul(y, y))),
    cost=2,
    precision="high",
)
unary("sin", torch.sin, "Sine.", lambda b, dy, x, y: b.mul(dy, b.cos(x)), cost=8)
unary("cos", torch.cos, "Cosine.", lambda b, dy, x, y: b.neg(b.mul(dy, b.sin(x))), cost=8)
unary("tanh", torch.tanh, "Hyperbolic tangent.", lambda b, dy, x, y: b.tanh_grad(dy, y), cost=8)
unary("sigmoid", torch.sigmoid, "1 / (1 + exp(-x)).", lambda b, dy, x, y: b.sigmoid_grad(dy, y), cost=6)
unary(
    "erf",
    torch.erf,
    "Error function.",
    lambda b, dy, x, y: b.mul(dy, b.mul(b.exp(b.neg(b.mul(x, x))), TWO_OVER_SQRT_PI)),
    cost=8,
)
unary("relu", torch.relu, "max(x, 0).", lambda b, dy, x, y: b.select(b.le(y, 0.0), 0.0, dy), base=Unary)
unary("floor", torch.floor, "Largest integer not above x.", _zero, base=Unary)
unary("ceil", torch.ceil, "Smallest integer not below x.", _zero, base=Unary)
unary("round", torch.round, "Nearest integer, ties to even.", _zero, base=Unary)
unary("trunc", torch.trunc, "Integer part.", _zero, base=Unary)


@step.op
class IsNan(Unary):
    """Where x is not a number."""

    name = "isnan"
    differentiable = False
    torch_function = staticmethod(torch.isnan)

    @staticmethod
    def infer(x):
        return x.with_element(BOOL)


@step.op
class BitNot(Unary):
    """Boolean negation (bitwise on integers)."""

    name = "bit_not"
    differentiable = False
    torch_function = staticmethod(torch.bitwise_not)


@step.op
class Silu(FloatUnary):
    """x * sigmoid(x)."""

    cost = 8
    torch_function = staticmethod(torch.nn.functional.silu)

    @staticmethod
    def derivative(b, op, dy):
        return [b.silu_grad(dy, op.x)]

    @staticmethod
    def expand(b, op):
        return b.mul(op.x, b.sigmoid(op.x))


@step.op
class Gelu(FloatUnary):
    """Gaussian error linear unit, exact or by tanh."""

    cost = 12
    approximate = Attr("str", "how the Gaussian integral is computed", "none", choices=("none", "tanh"))

    @staticmethod
    def infer(x, approximate):  # type: ignore[override]
        return x

    @staticmethod
    def evaluate(op):
        kind = op.approximate
        return lambda x: torch.ops.aten.gelu.default(x, approximate=kind)

    @staticmethod
    def derivative(b, op, dy):
        return [b.gelu_grad(dy, op.x, approximate=op.approximate)]

    @staticmethod
    def expand(b, op):
        x = op.x
        if op.approximate == "none":
            return b.mul(b.mul(x, 0.5), b.add(b.erf(b.mul(x, math.sqrt(0.5))), 1.0))
        return b.mul(x, b.sigmoid(b.mul(x, cubic(b, b.mul(x, x), 1))))  # (1 + tanh(z)) / 2 is sigmoid(2 z)


def cubic(b, square, times: int):
    """What the approximation of GELU has for 2 z / x, or its derivative for that of 2 z (`times` 3)."""
    twice = math.sqrt(8 / math.pi)
    return b.add(b.mul(square, times * 0.044715 * twice), twice)


class ActivationGrad(Pointwise):
    """dx = dy * f'(x): the backward of an activation, as one op."""

    dy = Operand(FloatTensor)
    x = Operand(FloatTensor)
    dx = Result()

    @staticmethod
    def infer(dy, x):
        return x

    @staticmethod
    def check(op):
        return None if op.dy.type is op.x.type else "dy and x differ in type"


@step.op
class TanhGrad(ActivationGrad):
    """dy * (1 - y^2), with y = tanh(x)."""

    cost = 3
    torch_function = staticmethod(torch.ops.aten.tanh_backward.default)

    @staticmethod
    def expand(b, op):
        return b.mul(op.dy, b.sub(1.0, b.mul(op.x, op.x)))


@step.op
class SigmoidGrad(ActivationGrad):
    """dy * y * (1 - y), with y = sigmoid(x)."""

    cost = 3
    torch_function = staticmethod(torch.ops.aten.sigmoid_backward.default)

    @staticmethod
    def expand(b, op):
        return b.mul(op.dy, b.mul(b.sub(1.0, op.x), op.x))


@step.op
class SiluGrad(ActivationGrad):
    """dy * silu'(x)."""

    cost = 10
    torch_function = staticmethod(torch.ops.aten.silu_backward.default)

    @staticmethod
    def expand(b, op):
        s = b.sigmoid(op.x)
        return b.mul(op.dy, b.mul(s, b.add(b.mul(op.x, b.sub(1.0, s)), 1.0)))


@step.op
class GeluGrad(ActivationGrad):
    """dy * gelu'(x)."""

    cost = 16
    approximate = Attr("str", "how the Gaussian integral is computed", "none", choices=("none", "tanh"))

    @staticmethod
    def infer(dy, x, approximate):  # type: ignore[override]
        return x

    @staticmethod
    def evaluate(op):
        kind = op.approximate
        return lambda dy, x: torch.ops.aten.gelu_backward.default(dy, x, approximate=kind)

    @staticmethod
    def expand(b, op):
        x = op.x
        if op.approximate == "none":
            z = b.mul(x, math.sqrt(0.5))
            cdf = b.mul(b.add(b.erf(z), 1.0), 0.5)
            pdf = b.mul(b.exp(b.neg(b.mul(z, z))), 1 / math.sqrt(2 * math.pi))
            return b.mul(op.dy, b.add(cdf, b.mul(x, pdf)))
        square = b.mul(x, x)
        s = b.sigmoid(b.mul(x, cubic(b, square, 1)))
        rest = b.mul(b.mul(x, cubic(b, square, 3)), b.sub(1.0, s))
        return b.mul(op.dy, b.mul(s, b.add(rest, 1.0)))


@step.op
class Cast(Unary):
    """x with another element type.

    A kernel computes in f32 and may leave out a rounding to 16 bits of what it does not store, but not where the
    program itself has the cast (`rounds`). The gradient of such a cast is cast by one as well, as autograd does it.
    """

    dtype = Attr("dtype", "element type of the result")
    rounds = Attr("bool", "whether it rounds also inside of a kernel", optional=True)

    @staticmethod
    def infer(x, dtype, rounds):  # type: ignore[override]
        return x.with_element(dtype)

    @staticmethod
    def evaluate(op):
        dtype = torch_dtype(op.dtype)
        return lambda x: x.to(dtype)

    @staticmethod
    def derivative(b, op, dy):
        return [b.cast(dy, dtype=op.x.type.element, rounds=op.rounds)]

    @staticmethod
    def flops(op):
        return 0


@step.op
class Detach(Unary):
    """x, but no gradient flows back through it."""

    differentiable = False
    moves = True
    views = True
    torch_function = staticmethod(lambda x: x)
    cost = 0

    @staticmethod
    def element(k, op, index):
        return k.at(op.x, index)


# ---- binary ----------------------------------------------------------------------------------------------------------


@step.op
class Add(Binary):
    """x + y."""

    commutative = True
    torch_function = staticmethod(torch.add)

    @staticmethod
    def derivative(b, op, dz):
        return _reduce_both(b, op, dz, dz)


@step.op
class Sub(Binary):
    """x - y."""

    torch_function = staticmethod(torch.sub)

    @staticmethod
    def derivative(b, op, dz):
        return _reduce_both(b, op, dz, b.neg(dz))

    @staticmethod
    def evaluate(op):
        return lambda x, y: torch.sub(x, y) if isinstance(x, torch.Tensor) else torch.rsub(y, x)


@step.op
class Mul(Binary):
    """x * y."""

    commutative = True
    torch_function = staticmethod(torch.mul)

    @staticmethod
    def derivative(b, op, dz):
        return _reduce_both(b, op, b.mul(dz, op.y), b.mul(dz, op.x))


@step.op
class Div(Binary):
    """x / y on floats; on integers the quotient rounded as `rounding` says."""

    cost = 2
    rounding = Attr("str", "how the quotient is rounded", "none", choices=("none", "floor", "trunc"))

    @staticmethod
    def infer(x, y, rounding):  # type: ignore[override]
        return Binary.infer(x, y)

    @staticmethod
    def evaluate(op):
        mode = None if op.rounding == "none" else op.rounding
        if op.rounding == "none":
            return lambda x, y: torch.div(x, y) if isinstance(x, torch.Tensor) else torch.mul(torch.reciprocal(y), x)
        return lambda x, y: torch.div(x, y, rounding_mode=mode)

    @staticmethod
    def derivative(b, op, dz):
        if op.rounding != "none":
            return [b.zeros_like(op.x), b.zeros_like(op.y)]
        dx = b.div(dz, op.y)
        return _reduce_both(b, op, dx, b.mul(b.neg(dz), b.div(b.div(op.x, op.y), op.y)))


@step.op
class Rem(Binary):
    """Remainder: with the sign of y (`floor`) or of x (`trunc`)."""

    cost = 4
    rounding = Attr("str", "how the quotient was rounded", "floor", choices=("floor", "trunc"))

    @staticmethod
    def infer(x, y, rounding):  # type: ignore[override]
        return Binary.infer(x, y)

    @staticmethod
    def evaluate(op):
        return torch.remainder if op.rounding == "floor" else torch.fmod

    @staticmethod
    def derivative(b, op, dz):
        dy = b.mul(b.neg(dz), b.div(op.x, op.y, rounding=op.rounding))
        return _reduce_both(b, op, dz, dy)


@step.op
class Pow(Binary):
    """x to the power y."""

    precision = "high"
    cost = 8
    torch_function = staticmethod(torch.pow)

    @staticmethod
    def derivative(b, op, dz):
        x, y = op.x, op.y
        exponent = constant_value(y)
        if exponent == 0:
            return [b.zeros_like(x), None]
        if exponent is not None:
            dx = b.mul(dz, b.mul(b.pow(x, b.full(exponent - 1, y.type.shape, y.type.element)), exponent))
            return [b.sum_to(dx, x.type.shape), None]
        one = b.full(1, (), y.type.element)
        dx = b.select(b.eq(y, 0), b.zeros_like(dz), b.mul(dz, b.mul(y, b.pow(x, b.sub(y, one)))))
        # where x = 0 and y >= 0 the slope in y is 0, not 0 * log 0
        flat = b.bit_and(b.eq(x, 0), b.ge(y, 0))
        dy = b.select(flat, b.zeros_like(dz), b.mul(dz, b.mul(op.z, b.log(x))))
        return _reduce_both(b, op, dx, dy)


@step.op
class Atan2(Binary):
    """Angle of the point (y, x), with x the second operand."""

    takes_numbers = False
    cost = 16
    torch_function = staticmethod(torch.atan2)

    @staticmethod
    def derivative(b, op, dz):
        square = b.add(b.mul(op.x, op.x), b.mul(op.y, op.y))
        scale = b.select(
            b.eq(square, 0), 0.0, b.div(dz, square)
        )  # the origin has no angle: autograd's slope there is 0
        return _reduce_both(b, op, b.mul(scale, op.y), b.neg(b.mul(scale, op.x)))


def _extremum_gradient(b, op, dz, wins):
    """Torch gives half of the gradient to each side of a tie."""
    half = b.mul(dz, 0.5)
    tie = b.eq(op.x, op.y)
    zero = b.zeros_like(dz)
    dx = b.select(tie, half, b.select(wins, dz, zero))
    dy = b.select(tie, half, b.select(wins, zero, dz))
    return _reduce_both(b, op, dx, dy)


@step.op
class Maximum(Binary):
    """The larger of the two; NaN wins."""

    commutative = True
    torch_function = staticmethod(torch.maximum)

    @staticmethod
    def evaluate(op):
        return lambda x, y: _extremum(torch.maximum, torch.clamp_min, x, y)

    @staticmethod
    def derivative(b, op, dz):
        return _extremum_gradient(b, op, dz, b.gt(op.x, op.y))


@step.op
class Minimum(Binary):
    """The smaller of the two; NaN wins."""

    commutative = True
    torch_function = staticmethod(torch.minimum)

    @staticmethod
    def evaluate(op):
        return lambda x, y: _extremum(torch.minimum, torch.clamp_max, x, y)

    @staticmethod
    def derivative(b, op, dz):
        return _extremum_gradient(b, op, dz, b.lt(op.x, op.y))


def _extremum(function, with_number, x, y):
    """maximum or minimum where one side may be a number."""
    if not isinstance(y, torch.Tensor):
        return with_number(x, y)
    if not isinstance(x, torch.Tensor):
        return with_number(y, x)
    return function(x, y)


def comparison(name: str, function, doc: str, commutative: bool = False, base: type = Compare):
    """Declares a comparison or boolean op."""
    return step.op(
        type(
            name.title().replace("_", ""),
            (base,),
            {
                "__doc__": doc,
                "name": name,
                "__module__": __name__,
                "commutative": commutative,
                "differentiable": False,
                "evaluate": staticmethod(lambda op: lambda x, y: _ordered(function, x, y)),
            },
        )
    )


_MIRROR = {torch.lt: torch.gt, torch.le: torch.ge, torch.gt: torch.lt, torch.ge: torch.le}


def _ordered(function, x, y):
    """A comparison where a number may stand on the left."""
    if isinstance(x, torch.Tensor):
        return function(x, y)
    return _MIRROR.get(function, function)(y, x)


comparison("eq", torch.eq, "x equals y.", commutative=True)
comparison("ne", torch.ne, "x differs from y.", commutative=True)
comparison("lt", torch.lt, "x is below y.")
comparison("le", torch.le, "x is not above y.")
comparison("gt", torch.gt, "x is above y.")
comparison("ge", torch.ge, "x is not below y.")
comparison("bit_and", torch.bitwise_and, "Boolean or bitwise and.", commutative=True, base=Binary)
comparison("bit_or", torch.bitwise_or, "Boolean or bitwise or.", commutative=True, base=Binary)
comparison("bit_xor", torch.bitwise_xor, "Boolean or bitwise exclusive or.", commutative=True, base=Binary)


@step.op
class Select(Pointwise):
    """x where the condition holds, y elsewhere."""

    converts = True
    condition = Operand(BoolTensor)
    x = Operand(AnyTensor)
    y = Operand(AnyTensor)
    z = Result()

    @staticmethod
    def infer(condition, x, y):
        return TensorType(broadcast_shapes(condition.shape, x.shape, y.shape), x.element)

    @staticmethod
    def check(op):
        return None if op.x.type.element is op.y.type.element else "branches differ in element type"

    @staticmethod
    def evaluate(op):
        number = constant_value(op.x)
        if is_scalar_number(op.x) and op.y.type.shape == op.result.type.shape == op.condition.type.shape:
            # may be done in place; what is repeated has no layout of its own, there the condition decides
            return lambda condition, _, y: (
                torch.where(condition, number, y) if 0 in y.stride() else y.clone().masked_fill_(condition, number)
            )
        return torch.where

    @staticmethod
    def derivative(b, op, dz):
        zero = b.full(0, (), dz.type.element)
        dx = b.sum_to(b.select(op.condition, dz, zero), op.x.type.shape)
        dy = b.sum_to(b.select(op.condition, zero, dz), op.y.type.shape)
        return [None, dx, dy]


@step.op
class Lerp(Pointwise):
    """x + weight * (y - x), computed as torch does."""

    x = Operand(FloatTensor)
    y = Operand(FloatTensor)
    weight = Operand(FloatTensor)
    z = Result()
    cost = 3
    torch_function = staticmethod(torch.lerp)

    @staticmethod
    def infer(x, y, weight):
        return TensorType(broadcast_shapes(x.shape, y.shape, weight.shape), x.element)

    @staticmethod
    def derivative(b, op, dz):
        return [
            b.sum_to(b.mul(dz, b.sub(1.0, op.weight)), op.x.type.shape),
            b.sum_to(b.mul(dz, op.weight), op.y.type.shape),
            b.sum_to(b.mul(dz, b.sub(op.y, op.x)), op.weight.type.shape),
        ]

    @staticmethod
    def expand(b, op):
        return b.add(op.x, b.mul(op.weight, b.sub(op.y, op.x)))


class Scaled(Pointwise):
    """x + scale * f(others), rounded once as ATen's fused forms do; `scale` is a single number of any float type."""

    x = Operand(FloatTensor)
    y = Operand(FloatTensor)
    result = Result()

    @staticmethod
    def infer(x, y, *rest):
        return TensorType(broadcast_shapes(x.shape, y.shape, *(r.shape for r in rest)), x.element)

    @staticmethod
    def check(op):
        return None if op.scale.type.size == 1 else "scale is a single number"


def scaled(run, other):
    """A call with the scale as a Python number, or, where it lives on a GPU and reading it would wait, as a tensor."""

    def call(*tensors):
        scale = tensors[-1]
        if isinstance(scale, torch.Tensor):
            if scale.device.type != "cpu":
                return other(*tensors[:-1], scale.to(tensors[0].dtype))
            scale = scale.item()
        return run(*tensors[:-1], scale)

    return call


@step.op
class Axpy(Scaled):
    """x + scale * y."""

    cost = 2
    scale = Operand(FloatTensor)

    @staticmethod
    def evaluate(op):
        return scaled(lambda x, y, s: torch.add(x, y, alpha=s), lambda x, y, s: x + s * y)

    @staticmethod
    def expand(b, op):
        return b.add(op.x, b.mul(op.y, b.cast_to(op.scale, op.x.type.element)))


@step.op
class Addcmul(Scaled):
    """x + scale * y * z."""

    cost = 3
    z = Operand(FloatTensor)
    scale = Operand(FloatTensor)

    @staticmethod
    def evaluate(op):
        return scaled(lambda x, y, z, s: torch.addcmul(x, y, z, value=s), lambda x, y, z, s: x + s * y * z)

    @staticmethod
    def expand(b, op):
        return b.add(op.x, b.mul(b.mul(op.y, b.cast_to(op.scale, op.x.type.element)), op.z))


@step.op
class Addcdiv(Scaled):
    """x + scale * y / z."""

    cost = 4
    z = Operand(FloatTensor)
    scale = Operand(FloatTensor)

    @staticmethod
    def evaluate(op):
        return scaled(lambda x, y, z, s: torch.addcdiv(x, y, z, value=s), lambda x, y, z, s: x + s * (y / z))

    @staticmethod
    def expand(b, op):
        return b.add(op.x, b.div(b.mul(op.y, b.cast_to(op.scale, op.x.type.element)), op.z))


def is_scalar_number(value: Value) -> bool:
    """A 0-d constant, which a pointwise op may take as a Python number."""
    return value.type.rank == 0 and constant_value(value) is not None
