"""Kernels that read a product at several places, rewritten so that each point makes all that are read together.

Rotary positions combine an element of a head with the one half a head away: in loops, sums of products of one row with
columns a constant number of steps apart. The dimension along which they lie apart is cut into stretches of that many
steps, and what is done at a point is done for the same place of each stretch. Conditions that tell stretches from one
another are decided then, and sums that several stretches read are one. Which dimension that is, access maps say.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence

from ...dialects.loop import Apply, Constant, Index, Load, Reduce, Space, Store, space_of
from ...ir.builtin import add_function, finish_function, module
from ...ir.core import Builder, Op, Value
from ...ir.passes import run_pipeline
from ...ir.types import BOOL, I64

#: the most stretches that a dimension is cut into
MOST = 8
#: functions of whole numbers whose ends are those of what they take
COUNTED = {"add": operator.add, "mul": operator.mul}


def unrolled(function: Op) -> Op:
    """The kernel with dimensions cut along which its products lie apart; the kernel itself where there are none."""
    while (cut := cut_of(function)) is not None:
        function = Unrolling(function, *cut).made
    return function


def cut_of(function: Op) -> tuple[int, int] | None:
    """A dimension along which columns of one factor are read some steps apart, and the length of its stretches."""
    ops, sizes = list(function.regions[0].block), space_of(function)
    reduced = {d for op in ops if op.definition is Reduce for d in op.attributes["dims"]}
    steps: dict[int, list[int]] = {}
    for one, other in neighbours([op for op in ops if is_product(op)]):
        for dim, step in apart(one, other, sizes):
            if dim not in reduced:
                steps.setdefault(dim, []).append(step)
    for dim, found in steps.items():
        length = math.gcd(sizes[dim], *found)
        if 1 < sizes[dim] // length <= MOST:
            return dim, length
    return None


def is_product(op: Op) -> bool:
    """Whether an op is a sum of products."""
    product = op.operands[0].op if op.definition is Reduce and op.attributes["kind"] == "sum" else None
    return product is not None and product.definition is Apply and product.attributes["fn"] == "mul"


def neighbours(products: Sequence[Op]) -> list[tuple[Op, Op]]:
    """Loads of one tensor, the first and another, that are factors of products whose other factor is the same."""
    first: dict[tuple[Value, Value], Op] = {}
    found = []
    for op in products:
        product = op.operands[0].op
        assert product is not None
        for one, other in (product.operands, reversed(product.operands)):
            load = other.op
            if load is not None and load.definition is Load and not load.attributes["dynamic"]:
                before = first.setdefault((one, load.operands[0]), load)
                found += [(before, load)] if before is not load else []
    return found


def apart(one: Op, other: Op, sizes: Sequence[int]) -> list[tuple[int, int]]:
    """The dimensions along which two loads lie a constant number of steps apart, and how many. A load that stands still
    along a dimension is met by the other at one of its steps."""
    maps = zip(one.attributes["map"], other.attributes["map"], strict=True)
    differing = [(a, b) for a, b in maps if list(a) != list(b)]
    if len(differing) != 1:
        return []
    ((row, moved),) = differing
    still = [d for d, (c, e) in enumerate(zip(row[:-1], moved[:-1], strict=True)) if c != e]
    if still:
        return [(still[0], 1)] if len(still) == 1 and 0 in (row[still[0]], moved[still[0]]) else []
    by = abs(moved[-1] - row[-1])
    steps = {dim: by // abs(c) for dim, c in enumerate(row[:-1]) if c and not by % c}
    return [(dim, step) for dim, step in steps.items() if step < sizes[dim]]


class Unrolling:
    """One kernel in the making: every stretch of a dimension by the same point."""

    def __init__(self, function: Op, dim: int, length: int):
        self.dim = dim
        block = function.regions[0].block
        sizes = space_of(function)
        self.sizes = (*sizes[:dim], length, *sizes[dim + 1 :])
        root = module()
        self.made = add_function(root, function.attributes["sym_name"], [a.type for a in block.arguments])
        self.b = Builder(self.made.regions[0].block)
        Space.build(self.b, sizes=self.sizes)
        #: what whole numbers may be, and truths that are known
        self.ranges: dict[Value, tuple[int, int]] = {}
        self.truths: dict[Value, bool] = {}
        stores = []
        for first in range(0, sizes[dim], length):
            mapping = dict(zip(block.arguments, self.made.regions[0].block.arguments, strict=True))
            for op in block:
                if op.definition is Store:
                    along = any(row[dim] for row in op.attributes["map"])
                    stores += [self.moved(op, mapping, first)] if along or not first else []
                elif op.definition is not Space and not op.definition.terminator:
                    mapping[op.results[0]] = self.copied(op, mapping, first)
        for op in stores:  # whatever is read is read before
            self.made.regions[0].block.append(op)
        finish_function(self.made, [])
        run_pipeline(root, "cse,dce")

    def copied(self, op: Op, mapping: dict[Value, Value], first: int) -> Value:
        """What an op gives in the stretch that begins there."""
        args = [mapping[v] for v in op.operands]
        if op.definition is Index:
            return self.index(op, first)
        if op.definition is Apply:
            known = self.decided(op, args)
            if known is not None:
                return known
        new = self.moved(op, mapping, first) if op.definition is Load else op.clone(dict(mapping))
        self.made.regions[0].block.append(new)
        result = new.results[0]
        if op.definition is Constant and result.type is I64:
            self.ranges[result] = (op.attributes["value"],) * 2
        elif op.definition is Apply and op.attributes["fn"] in COUNTED and all(v in self.ranges for v in args):
            one, other = (self.ranges[v] for v in args)
            ends = [COUNTED[op.attributes["fn"]](x, y) for x in one for y in other]
            self.ranges[result] = min(ends), max(ends)
        return result

    def index(self, op: Op, first: int) -> Value:
        number, dim = Index.build(self.b, dim=op.attributes["dim"]).result, op.attributes["dim"]
        start = first if dim == self.dim else 0
        if start:
            begin = Constant.build(self.b, value=start, dtype=I64).result
            number = Apply.build(self.b, [number, begin], fn="add", dtype=I64).result
        self.ranges[number] = start, start + self.sizes[dim] - 1
        return number

    def moved(self, op: Op, mapping: dict[Value, Value], first: int) -> Op:
        """A load or store in the stretch that begins there."""
        new = op.clone(dict(mapping))
        rows = [[*row[:-1], row[-1] + row[self.dim] * first] for row in op.attributes["map"]]
        if self.sizes[self.dim] == 1:
            rows = [[*row[: self.dim], 0, *row[self.dim + 1 :]] for row in rows]
        new.attributes["map"] = rows
        if op.definition is Load and op.attributes["guarded"] and not op.attributes["dynamic"]:
            shape = op.operands[0].type.shape
            new.attributes["guarded"] = not all(self.inside(row, n) for row, n in zip(rows, shape, strict=True))
        return new

    def inside(self, row: Sequence[int], size: int) -> bool:
        reach = [c * (n - 1) for c, n in zip(row[:-1], self.sizes, strict=True)]
        return row[-1] + sum(r for r in reach if r < 0) >= 0 and row[-1] + sum(r for r in reach if r > 0) < size

    def decided(self, op: Op, args: Sequence[Value]) -> Value | None:
        """What a function of numbers gives where a condition is known; None where none is."""
        fn, truths = op.attributes["fn"], [self.truths.get(v) for v in args]
        if fn == "select" and truths[0] is not None:
            chosen = args[1 if truths[0] else 2]
            if chosen.type is op.results[0].type:
                return chosen
            return Apply.build(self.b, [chosen], fn="cast", dtype=op.attributes["dtype"]).result
        if fn == "bit_not" and truths[0] is not None:
            return self.truth(not truths[0])
        if fn == "bit_and" and any(t is not None for t in truths):
            return self.truth(False) if False in truths else args[truths[0] is not None]
        if fn == "lt" and all(v in self.ranges for v in args):
            (low, high), (least, most) = (self.ranges[v] for v in args)
            if high < least or low >= most:
                return self.truth(high < least)
        return None

    def truth(self, value: bool) -> Value:
        made = Constant.build(self.b, value=value, dtype=BOOL).result
        self.truths[made] = value
        return made
