"""Comparisons, truth values and choices by them."""

from __future__ import annotations

from ...ir.core import Value
from ...ir.types import BOOL
from ..context import Context, Tensor
from . import operator
from .support import lined_up, ordered, wide

COMPARISONS = {"Less": "lt", "LessOrEqual": "le", "Greater": "gt", "GreaterOrEqual": "ge"}
LOGIC = {"And": "bit_and", "Or": "bit_or", "Xor": "bit_xor"}


@operator(*COMPARISONS)
def compare(c: Context, x: Tensor, y: Tensor):
    left, right = lined_up(c, x, y)
    return getattr(c.b, COMPARISONS[c.name])(ordered(c.b, left), ordered(c.b, right))


@operator("Equal")
def equal(c: Context, x: Tensor, y: Tensor):
    left, right = lined_up(c, x, y)
    return c.b.eq(wide(c.b, left), wide(c.b, right))


@operator(*LOGIC)
def logic(c: Context, x: Tensor, y: Tensor):
    return getattr(c.b, LOGIC[c.name])(*lined_up(c, x, y))


@operator("Not")
def negation(c: Context, x: Tensor):
    return c.b.bit_not(x.value)


@operator("Where")
def where(c: Context, condition: Tensor, x: Tensor, y: Tensor):
    return select(c, condition.value, x.value, y.value)


def select(c: Context, condition: Value, x: Value, y: Value) -> Value:
    b, element = c.b, x.type.element
    assert condition.type.element is BOOL
    return b.cast_to(b.select(condition, wide(b, x), wide(b, y)), element)
