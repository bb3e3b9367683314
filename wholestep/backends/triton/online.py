"""The largest number of a long row and the sum of exponentials below it, from one walk along the row instead of two.

exp(x - m) is exp(x - h) * exp(h - m) for any h. Neighbours along a row, as many as one thread loads at a time, are
summed with the largest of them so far; where that grows, their sum shrinks. At the end all are brought to that of the
row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...dialects.loop import Apply
from ...ir.core import Op, Value
from ...ir.types import F32
from .scalars import Number, apply, combined, reduced
from .text import Axis, Text

if TYPE_CHECKING:
    from .families import Family

FLOAT = "tl.float32"


@dataclass(frozen=True)
class Pair:
    """A maximum along a row, the sum of exp(x - shift) along it, and the shift, which comes from the maximum."""

    maximum: Op
    sum: Op
    shift: Value


def pairs(family: Family, now: Sequence[Op], left: Sequence[Op]) -> list[Pair]:
    """Of the reductions along rows that are left to do the pairs whose maximum is to be found now."""
    found: list[Pair] = []
    largest = {op.operands[0]: op for op in now if op.attributes["kind"] == "max" and op.attributes["dtype"] is F32}
    for op in left:
        if op.attributes["kind"] != "sum" or op.attributes["dtype"] is not F32:
            continue
        power = applied(op.operands[0], "exp")
        less = None if power is None else applied(power.operands[0], "sub")
        if less is None or less.operands[0] not in largest:
            continue
        maximum, shift = largest[less.operands[0]], less.operands[1]
        along = op.attributes["dims"] != maximum.attributes["dims"] or family.walk.dims_of[shift] & family.row
        alone = family.behind.get(shift, frozenset()) & set(left) == {maximum}  # of what is still to come
        if alone and not along and all(p.maximum is not maximum for p in found):
            found.append(Pair(maximum, op, shift))
    return found


def applied(value: Value, fn: str) -> Op | None:
    """The op that makes a value in f32 by a function; None where another does."""
    op = value.op
    if op is None or op.definition is not Apply or op.attributes["fn"] != fn or op.attributes["dtype"] is not F32:
        return None
    return op


class Online:
    """A pair in the making."""

    def __init__(self, text: Text, pair: Pair, c: Axis):
        self.text, self.pair, self.c = text, pair, c
        self.together = min(16 // text.walk.heavy()[0].itemsize, c.block)
        threads = f"({c.block // self.together},)"
        self.largest, self.sum = text.fresh("a"), text.fresh("a")
        text.line(f'{self.largest} = tl.full({threads}, float("-inf"), {FLOAT})')
        text.line(f"{self.sum} = tl.full({threads}, 0.0, {FLOAT})")

    def step(self) -> None:
        """What is done with one part of a row."""
        text, (x, new, old, shift) = self.text, (self.text.fresh() for _ in range(4))
        parts = f"({self.c.block // self.together}, {self.together})"
        text.line(f"{x} = tl.reshape({text.operand(self.pair.maximum, [self.c])}, {parts})")
        most, helpers = reduced("max", x, 1, False, FLOAT)
        text.helpers.update(helpers)
        text.line(f"{new} = {combined('max', self.largest, most, FLOAT)}")
        text.line(f"{old} = {finite(self.largest)}")
        text.line(f"{shift} = {finite(new)}")
        shrunk = f'tl.where({self.largest} == float("-inf"), 0.0, {self.exp(f"{old} - {shift}")})'
        text.line(f"{self.sum} = {self.sum} * {shrunk} + tl.sum({self.exp(f'{x} - {shift}[:, None]')}, 1)")
        text.line(f"{self.largest} = {new}")

    def finish(self) -> None:
        """What the row gives."""
        text, pair = self.text, self.pair
        most, helpers = reduced("max", self.largest, None, False, FLOAT)
        text.helpers.update(helpers)
        text.known(pair.maximum, Number(most, FLOAT))
        if pair.shift.op is not None:
            text.ready(text.needed([pair.shift.op]))
        shift = text.names[pair.shift].text
        scaled = f"{self.sum} * {self.exp(f'{finite(self.largest)} - {shift}')}"
        total = f"tl.sum(tl.where({self.sum} == 0.0, 0.0, {scaled}), 0)"
        none = f'tl.where(tl.abs({shift}) == float("inf"), float("nan"), {total})'  # (less itself it is no number)
        text.known(pair.sum, Number(none, FLOAT))

    def exp(self, x: str) -> str:
        number, helpers = apply("exp", [Number(f"({x})", FLOAT)], F32, self.text.walk.rough)
        self.text.helpers.update(helpers)
        return number.text


def finite(x: str) -> str:
    """A number to subtract: 0 for one that is infinite, of which nothing would be left."""
    return f'tl.where(tl.abs({x}) == float("inf"), 0.0, {x})'
