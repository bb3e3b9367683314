"""Activations that a model writes out become the ops that they are: tanh-GELU as `0.5 * x * (1 + tanh(...))`, and such.

What an expression computes decides, not how it is written: it is evaluated at some points and compared with what each
activation gives there. One op has a gradient of a few instructions where the chain has one of many, and its name. The
numbers differ in rounding alone, so this is done only where kernels are generated, which round once.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from ..dialects.step import StepBuilder, constant_value
from ..ir.core import Op, Value
from ..ir.types import TensorType

#: how many ops an expression has at most, and by how much of its value it may differ: constants are often cut off
MOST, NEAR = 24, 2e-8
POINTS = np.concatenate([np.linspace(-9.0, 9.0, 61), [1e-3, -1e-3, 20.0]])
BINARY: dict[str, Callable[..., np.ndarray]] = {
    "step.add": np.add,
    "step.sub": np.subtract,
    "step.mul": np.multiply,
    "step.div": np.divide,
    "step.pow": np.power,
}
UNARY: dict[str, Callable[..., np.ndarray]] = {
    "step.neg": np.negative,
    "step.tanh": np.tanh,
    "step.sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "step.erf": np.vectorize(math.erf),
    "step.cast": lambda x: x,
}
#: ops that only an activation has
TELLING = ("step.tanh", "step.erf", "step.sigmoid")


def tanh_gelu(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def gelu(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1 + UNARY["step.erf"](x / math.sqrt(2)))


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


#: what is known: its values, and the op
KNOWN: list[tuple[Callable[[np.ndarray], np.ndarray], Callable[[StepBuilder, Value], Value]]] = [
    (tanh_gelu, lambda b, x: b.gelu(x, approximate="tanh")),
    (gelu, lambda b, x: b.gelu(x, approximate="none")),
    (silu, lambda b, x: b.silu(x)),
]


class NotOne(Exception):
    """An expression is not one of a single tensor."""


def recognise(function: Op) -> int:
    """Replaces expressions that are an activation; returns how many were."""
    found = 0
    for op in list(function.regions[0].block):
        if op.name in ("step.mul", "step.div") and isinstance(op.results[0].type, TensorType):
            found += replaced(op)
    return found


def replaced(op: Op) -> bool:
    """Whether an op was the end of such an expression, and is now the activation itself."""
    seen: set[Value] = set()
    inside: list[Op] = []
    try:
        collect(op.results[0], seen, inside)
    except NotOne:
        return False
    made = op.results[0].type
    leaves = [v for v in seen if v.type.size == made.size and v.type.shape == made.shape]
    if len(leaves) != 1 or len(seen) != 1 or leaves[0].type is not made:
        return False
    if not any(o.name in TELLING for o in inside):
        return False
    x = leaves[0]
    with np.errstate(all="ignore"):
        values = evaluated(op.results[0], {x: POINTS})
        for function, build in KNOWN:
            wanted = function(POINTS)
            if np.all(np.abs(values - wanted) <= NEAR * (1 + np.abs(wanted))):
                assert op.parent is not None
                builder = StepBuilder(op.parent, op, op.loc, op.phase)
                op.results[0].replace_by(build(builder, x))
                return True
    return False


def collect(value: Value, leaves: set[Value], inside: list[Op]) -> None:
    """The tensors that an expression is made of, and its ops."""
    op = value.op
    if constant_value(value) is not None:
        return
    if op is None or (op.name not in BINARY and op.name not in UNARY) or not narrow(op):
        leaves.add(value)
    elif op not in inside:
        inside.append(op)
        if len(inside) > MOST:
            raise NotOne
        for operand in op.operands:
            collect(operand, leaves, inside)
    if len(leaves) > 1:
        raise NotOne


def narrow(op: Op) -> bool:
    """Whether an op may be part of an expression: a cast that the model rounds by is the end of one."""
    return op.name != "step.cast" or not op.attributes.get("rounds")


def evaluated(value: Value, known: dict[Value, np.ndarray]) -> np.ndarray:
    if value in known:
        return known[value]
    constant = constant_value(value)
    if constant is not None:
        return np.asarray(float(constant))
    op = value.op
    assert op is not None
    function = BINARY.get(op.name) or UNARY[op.name]
    known[value] = function(*(evaluated(v, known) for v in op.operands))
    return known[value]
