"""Single numbers on the host: learning rates, bias corrections and step counters are Python floats while a step runs.

Their arithmetic is exact double arithmetic, as eager optimizers do it, and costs no kernel launch and no device sync.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

from ..dialects.step import constant_value
from ..ir.core import Op

INF, NAN = math.inf, math.nan


def _divide(x: float, y: float) -> float:
    try:
        return x / y
    except ZeroDivisionError:
        return NAN if x == 0 or math.isnan(x) else math.copysign(INF, x) * math.copysign(1.0, y)


def _power(x: float, y: float) -> float:
    try:
        return math.pow(x, y)
    except OverflowError:
        return INF
    except (ValueError, ZeroDivisionError):
        return INF if x == 0 else NAN


def _guarded(function: Callable[[float], float], otherwise: Callable[[float], float]) -> Callable[[float], float]:
    def run(x: float) -> float:
        try:
            return function(x)
        except (ValueError, OverflowError):
            return otherwise(x)

    return run


#: ops on numbers, with torch's results where Python would raise
HOST: dict[str, Callable[..., Any]] = {
    "step.add": operator.add,
    "step.sub": operator.sub,
    "step.mul": operator.mul,
    "step.pow": _power,
    "step.neg": operator.neg,
    "step.abs": abs,
    "step.sqrt": _guarded(math.sqrt, lambda x: NAN),
    "step.exp": _guarded(math.exp, lambda x: INF),
    "step.log": _guarded(math.log, lambda x: -INF if x == 0 else NAN),
    "step.reciprocal": lambda x: _divide(1.0, x),
    "step.lt": operator.lt,
    "step.le": operator.le,
    "step.gt": operator.gt,
    "step.ge": operator.ge,
    "step.eq": operator.eq,
    "step.ne": operator.ne,
    "step.select": lambda condition, x, y: x if condition else y,
    "step.maximum": lambda x, y: NAN if x != x or y != y else max(x, y),
    "step.minimum": lambda x, y: NAN if x != x or y != y else min(x, y),
}
_WIDE = {"f64", "f32", "i1"}


def host_function(op: Op) -> Callable[..., Any] | None:
    """How to compute an op on Python numbers; None for an op that must run on tensors."""
    if any(v.type.rank or v.type.element.text not in _WIDE for v in (*op.operands, *op.results)):
        return None
    if op.name == "step.cast":
        return float if op.result.type.element.text != "i1" and op.operands[0].type.element.text != "i1" else None
    if op.name == "step.div":
        return _divide if op.rounding == "none" else None
    return HOST.get(op.name)


def with_constants(function: Callable[..., Any], op: Op) -> Callable[..., Any]:
    """A function on the operands that are not constants."""
    template = [constant_value(v) for v in op.operands]
    if all(c is None for c in template):
        return function
    if len(template) == 2:
        left, right = template
        if right is not None:
            return lambda x: function(x, right)
        return lambda y: function(left, y)

    def run(*given: Any) -> Any:
        rest = iter(given)
        return function(*(next(rest) if c is None else c for c in template))

    return run
