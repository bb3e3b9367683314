"""A kernel of the loop dialect made ready for code: strides are put into its accesses, dimensions merged.

Every number of the kernel becomes a `Number` that knows along which dimensions it varies. Whole numbers that are sums
of loop indices stay such sums, so that two dimensions can be walked as one wherever no sum tells them apart.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...dialects.loop import Apply, Constant, Index, Load, Random, Reduce, Store, compute_type, schedule, space_of
from ...ir.core import Op, Value
from ...ir.types import I64, ScalarType
from ..kernels import Spec

#: functions that cost as much as reading many numbers: their results are kept rather than computed again
EXPENSIVE = frozenset(
    ("exp", "exp2", "expm1", "log", "log2", "log1p", "sin", "cos", "tanh", "sigmoid", "erf", "pow", "atan2", "fmod")
    + ("rem", "floor_div", "random")
)
SMALL = 2**31 - 1


@dataclass(slots=True)
class Linear:
    """A sum of loop indices with coefficients, and a constant."""

    terms: dict[int, int] = field(default_factory=dict)
    constant: int = 0

    def plus(self, other: Linear, factor: int = 1) -> Linear:
        terms = dict(self.terms)
        for d, c in other.terms.items():
            terms[d] = terms.get(d, 0) + c * factor
        return Linear({d: c for d, c in terms.items() if c}, self.constant + other.constant * factor)

    def times(self, factor: int) -> Linear:
        return Linear({d: c * factor for d, c in self.terms.items() if c * factor}, self.constant * factor)

    def range(self, sizes: Sequence[int]) -> tuple[int, int]:
        low = high = self.constant
        for d, c in self.terms.items():
            reach = c * max(sizes[d] - 1, 0)
            low, high = low + min(reach, 0), high + max(reach, 0)
        return low, high


@dataclass(slots=True, eq=False)
class Guard:
    """An index that may lie outside of its dimension: 0 <= at + number < size."""

    at: Linear
    number: Number | None
    size: int


@dataclass(slots=True, eq=False)
class Number:
    """One number at a point. `kind` is linear, constant, load, random, reduce or the name of a function."""

    name: str
    kind: str
    type: ScalarType
    args: tuple[Number, ...] = ()
    linear: Linear = field(default_factory=Linear)  # of a linear number, or where a load reads
    value: Any = None  # of a constant
    tensor: int = -1
    steps: tuple[int, ...] = ()  # what each computed index of a load is multiplied with
    guards: tuple[Guard, ...] = ()
    looks_up: bool = False  # of a load: whether an index of it is computed
    how: str = ""  # of a reduction
    dims: frozenset[int] = frozenset()  # of a reduction
    attributes: dict[str, Any] = field(default_factory=dict)
    varies: frozenset[int] = frozenset()
    low: int | None = None  # bounds of a whole number, where they are known
    high: int | None = None

    @property
    def walked(self) -> frozenset[int]:
        """The dimensions that have to be walked to compute it."""
        return self.varies | self.dims

    @property
    def is_expensive(self) -> bool:
        """Whether it costs as much as reading many numbers. Dividing whole numbers by a constant does not."""
        by_constant = len(self.args) == 2 and self.args[1].kind == "linear" and not self.args[1].linear.terms
        return self.kind in EXPENSIVE and not (self.type.kind == "int" and by_constant)

    @property
    def is_small(self) -> bool:
        """Whether 32 bits are enough for it."""
        return self.low is not None and self.high is not None and self.low >= -SMALL and self.high <= SMALL


@dataclass(slots=True, eq=False)
class Writing:
    """A number that is written to an output."""

    value: Number
    tensor: int
    at: Linear

    @property
    def walked(self) -> frozenset[int]:
        return self.value.varies | frozenset(self.at.terms)


@dataclass(slots=True)
class Walk:
    """A kernel: the sizes of its dimensions, its numbers in order, what it writes, and how it may be scheduled."""

    sizes: list[int]
    specs: Sequence[Spec]
    elements: list[ScalarType]
    numbers: list[Number]
    writings: list[Writing]
    row: frozenset[int]
    outer: frozenset[int]
    along: list[Number]
    across: list[Number]

    @property
    def reductions(self) -> list[Number]:
        return [n for n in self.numbers if n.kind == "reduce"]

    def points(self, dims: Iterable[int]) -> int:
        return math.prod(self.sizes[d] for d in dims)

    def needed(self) -> list[Number]:
        """The numbers that what is written is computed from, in order."""
        found = set[Number]()
        stack = [w.value for w in self.writings]
        while stack:
            number = stack.pop()
            if number not in found:
                found.add(number)
                stack.extend(number.args)
        return [n for n in self.numbers if n in found]

    def levels(self) -> dict[Number, int]:
        """How many reductions come one after the other before each number is known."""
        level: dict[Number, int] = {}
        for n in self.numbers:
            level[n] = max((level[a] for a in n.args), default=0) + (n.kind == "reduce")
        return level


def walk_of(function: Op, specs: Sequence[Spec]) -> Walk:
    """Reads a kernel; NoSchedule where it is none."""
    plan = schedule(function)
    reader = Reader(function, specs)
    walk = Walk(
        list(space_of(function)),
        specs,
        [a.type.element for a in function.regions[0].block.arguments],
        reader.numbers,
        reader.writings,
        frozenset(plan.row),
        frozenset(plan.outer),
        [reader.known[op.results[0]] for op in plan.along],
        [reader.known[op.results[0]] for op in plan.across],
    )
    walk.numbers = walk.needed()
    merge(walk)
    for n in walk.numbers:
        n.varies = varies(n)
        bounds(n, walk.sizes)
    return walk


class Reader:
    """The ops of a kernel as numbers."""

    def __init__(self, function: Op, specs: Sequence[Spec]):
        block = function.regions[0].block
        self.specs, self.sizes = specs, space_of(function)
        self.tensors = {a: i for i, a in enumerate(block.arguments)}
        self.known: dict[Value, Number] = {}
        self.numbers: list[Number] = []
        self.writings: list[Writing] = []
        for op in block:
            if op.definition is Store:
                self.store(op)
            elif op.results:
                number = self.number(op)
                self.known[op.results[0]] = number
                self.numbers.append(number)

    def number(self, op: Op) -> Number:
        kind, name, type = op.definition, f"v{len(self.numbers)}", compute_type(op.results[0].type)
        if kind is Load:
            return self.load(op, name, type)
        args = tuple(self.known[v] for v in op.operands)
        if kind is Index:
            return Number(name, "linear", I64, linear=Linear({op.attributes["dim"]: 1}))
        if kind is Constant:
            value = op.attributes["value"]
            if type is I64:
                return Number(name, "linear", I64, linear=Linear({}, int(value)))
            return Number(name, "constant", type, value=value)
        if kind is Random:
            return Number(name, "random", type, args, attributes=dict(op.attributes))
        if kind is Reduce:
            dims = frozenset(op.attributes["dims"])
            return Number(name, "reduce" if dims else "cast", type, args, how=op.attributes["kind"], dims=dims)
        assert kind is Apply
        fn = op.attributes["fn"]
        if fn == "rounded":
            fn = f"rounded_{op.attributes['dtype']}"
        linear = self.linear(fn, args) if type is I64 else None
        if linear is not None:
            return Number(name, "linear", I64, linear=linear)
        return Number(name, fn, type, args)

    def linear(self, fn: str, args: Sequence[Number]) -> Linear | None:
        if fn not in ("add", "sub", "mul", "neg", "cast") or any(a.kind != "linear" for a in args):
            return None
        x, y = args[0].linear, args[-1].linear
        if fn == "mul":
            if y.terms:
                x, y = y, x
            return None if y.terms else x.times(y.constant)
        return x.plus(y, -1 if fn == "sub" else 1) if len(args) == 2 else x.times(-1) if fn == "neg" else x

    def load(self, op: Op, name: str, type: ScalarType) -> Number:
        tensor = self.tensors[op.operands[0]]
        spec = self.specs[tensor]
        computed = dict(
            zip(op.attributes["dynamic"], (self.known[v] for v in op.operands[1:]), strict=True)
        )  # by dimension
        where, guards, args, steps = Linear(), [], [], []
        for dim, (row, size, stride) in enumerate(zip(op.attributes["map"], spec.shape, spec.strides, strict=True)):
            at = row_of(row)
            number = computed.get(dim)
            if number is not None and number.kind == "linear":
                at, number = at.plus(number.linear), None
            where = where.plus(at, stride)
            if number is not None:
                args.append(number)
                steps.append(stride)
            low, high = at.range(self.sizes)
            if op.attributes["guarded"] and (number is not None or low < 0 or high >= size):
                guards.append(Guard(at, number, size))
        return Number(
            name,
            "load",
            type,
            tuple(args),
            where,
            value=float("nan") if op.attributes["checked"] and type.kind == "float" else 0,
            tensor=tensor,
            steps=tuple(steps),
            guards=tuple(guards),
            looks_up=bool(computed),
        )

    def store(self, op: Op) -> None:
        tensor = self.tensors[op.operands[1]]
        at = Linear()
        for row, stride in zip(op.attributes["map"], self.specs[tensor].strides, strict=True):
            at = at.plus(row_of(row), stride)
        self.writings.append(Writing(self.known[op.operands[0]], tensor, at))


def row_of(row: Sequence[int]) -> Linear:
    return Linear({d: c for d, c in enumerate(row[:-1]) if c}, row[-1])


# ---- merging ---------------------------------------------------------------------------------------------------------


def sums(walk: Walk) -> Iterator[Linear]:
    """Every sum of loop indices that the kernel computes."""
    for n in walk.numbers:
        yield n.linear
        yield from (g.at for g in n.guards)
    yield from (w.at for w in walk.writings)


def merge(walk: Walk) -> None:
    """Removes dimensions of one step, and walks two as one where each sum has the outer as whole steps of the inner."""
    everything = list(sums(walk))
    for d, size in enumerate(walk.sizes):
        if size == 1:
            for s in everything:
                s.terms.pop(d, None)
            forget(walk, d)
    classes = [walk.row, walk.outer, *(n.dims for n in walk.numbers)]
    alive = [d for d in range(len(walk.sizes)) if d in walk.row | walk.outer]
    changed = True
    while changed:
        changed = False
        for a in alive:
            for b in alive:
                if a != b and all((a in c) == (b in c) for c in classes):
                    size = walk.sizes[b]
                    if all(s.terms.get(a, 0) == s.terms.get(b, 0) * size for s in everything):
                        walk.sizes[b] = walk.sizes[a] * size
                        for s in everything:
                            s.terms.pop(a, None)
                        forget(walk, a)
                        alive.remove(a)
                        classes = [walk.row, walk.outer, *(n.dims for n in walk.numbers)]
                        changed = True
                        break
            if changed:
                break


def forget(walk: Walk, dim: int) -> None:
    """Takes a dimension out; a reduction along it alone becomes the number itself."""
    walk.row, walk.outer = walk.row - {dim}, walk.outer - {dim}
    for n in walk.numbers:
        n.dims = n.dims - {dim}
        if n.kind == "reduce" and not n.dims:
            n.kind = "cast"
    walk.along = [n for n in walk.along if n.kind == "reduce"]
    walk.across = [n for n in walk.across if n.kind == "reduce"]


def varies(n: Number) -> frozenset[int]:
    """The dimensions it changes along (arguments come first)."""
    found = frozenset(n.linear.terms).union(*(a.varies for a in n.args), *(g.at.terms for g in n.guards))
    return found - n.dims


def bounds(n: Number, sizes: Sequence[int]) -> None:
    """The least and largest value of a whole number, as far as it follows from sizes."""
    if n.kind == "linear":
        n.low, n.high = n.linear.range(sizes)
        return
    if n.type.kind != "int" or any(a.low is None or a.high is None for a in n.args):
        return
    ends = [(a.low, a.high) for a in n.args]
    if n.kind in ("add", "sub", "mul"):
        (a, b), (c, d) = ends
        assert a is not None and b is not None and c is not None and d is not None
        if n.kind == "add":
            n.low, n.high = a + c, b + d
        elif n.kind == "sub":
            n.low, n.high = a - d, b - c
        else:
            products = (a * c, a * d, b * c, b * d)
            n.low, n.high = min(products), max(products)
    elif n.kind in ("floor_div", "rem"):
        (a, b), (c, d) = ends
        assert a is not None and b is not None and c is not None
        if c == d and c > 0:
            n.low, n.high = (a // c, b // c) if n.kind == "floor_div" else (0, c - 1)
