"""What a generator asks of a kernel's access maps: offsets in memory, guards, and which iteration dimensions are one.

Everything is an affine *form* of the iteration dimensions: the offset of an access, an index that is compared with a
limit. Two dimensions may be walked as one when every form agrees; they are put into the order of the largest tensors'
memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from ...dialects.loop import Apply, Constant, Index, Load, Reduce, Space, Store, space_of
from ...ir.core import Op, Value
from ...ir.types import I64
from ..kernels import Spec
from .scalars import NoText

#: what is looked up more often than this is taken to be in a cache
MANY_TIMES = 8

T = TypeVar("T")


class Latest(Generic[T]):
    """Makes something of a kernel and its tensors, and has the latest at hand: it is asked whether a kernel can be
    written, and then how."""

    def __init__(self, make: Callable[[Op, Sequence[Spec]], T]):
        self.make = make
        self.kept: tuple[Op, tuple[Spec, ...], T] | None = None

    def __call__(self, function: Op, specs: Sequence[Spec]) -> T:
        kept = self.kept
        if kept is None or kept[0] is not function or kept[1] != tuple(specs):
            self.kept = kept = (function, tuple(specs), self.make(function, specs))
        return kept[2]


@dataclass(frozen=True, slots=True)
class Form:
    """A sum of iteration dimensions with coefficients, and a constant."""

    terms: tuple[int, ...]
    constant: int = 0

    @property
    def dims(self) -> frozenset[int]:
        return frozenset(d for d, c in enumerate(self.terms) if c)

    def range(self, sizes: Sequence[int]) -> tuple[int, int]:
        """Its smallest and largest value."""
        reach = [c * (n - 1) for c, n in zip(self.terms, sizes, strict=True) if n]
        low = sum(r for r in reach if r < 0)
        return self.constant + low, self.constant + sum(reach) - low


@dataclass(frozen=True, slots=True)
class Guard:
    """An index that may leave its dimension: a form, maybe plus a computed number."""

    form: Form
    number: Value | None
    size: int


@dataclass(frozen=True, slots=True)
class Access:
    """Where a load or store goes: an offset in elements, computed numbers with their strides, and what to check. With
    `bits` the offset counts bits of bytes."""

    argument: int
    offset: Form
    numbers: tuple[tuple[Value, int], ...]
    guards: tuple[Guard, ...]
    itemsize: int
    bits: bool = False


@dataclass(frozen=True, slots=True)
class Dim:
    """Some iteration dimensions that are walked as one; a form's coefficient is that of the last of them."""

    parts: tuple[int, ...]
    size: int


class Walk:
    """The forms of one kernel with its arguments' layouts."""

    def __init__(self, function: Op, specs: Sequence[Spec]):
        self.function = function
        self.specs = tuple(specs)
        self.block = function.regions[0].block
        self.sizes = space_of(function)
        self.ops = [op for op in self.block if op.definition is not Space and not op.definition.terminator]
        self.number = {argument: i for i, argument in enumerate(self.block.arguments)}
        self.forms: dict[Value, Form] = {}
        for op in self.ops:
            form = self.form_of(op)
            if form is not None:
                self.forms[op.results[0]] = form
        self.accesses = {op: self.access(op) for op in self.ops if op.definition in (Load, Store)}
        #: forms that are numbers of the kernel: the random element, an index that is compared
        consumed = {v for op in self.ops for v in op.operands if not op.results or op.results[0] not in self.forms}
        self.counted = [f for v, f in self.forms.items() if v in consumed and f.dims]
        self.dims_of: dict[Value, frozenset[int]] = {}
        #: of accesses, by who they are: they are asked for often
        self.changes: dict[int, frozenset[int]] = {}
        self.vary()
        self.changes = {id(access): self.access_dims(access) for access in self.accesses.values()}
        #: whether all large tensors hold 16-bit numbers, whose rounding hides the last bits of what f32 functions give
        heavy = [a for a in self.accesses.values() if self.specs[a.argument].dtype.is_floating_point]
        most = max((self.bytes(a) // a.itemsize for a in heavy), default=0)
        self.rough = bool(heavy) and all(a.itemsize <= 2 for a in heavy if self.bytes(a) // a.itemsize * 16 > most)

    def beside_one(self, value: Value) -> bool:
        """Whether a number, or its square, is only ever added to 1: then its last bits near 0 are lost anyway."""
        users = [op for op in self.ops if value in op.operands]
        return bool(users) and all(self.meets_one(op, value) for op in users)

    def meets_one(self, op: Op, value: Value) -> bool:
        if op.definition is not Apply:
            return False
        if op.attributes["fn"] == "mul":
            return all(v is value for v in op.operands) and self.beside_one(op.results[0])
        others = [v.op for v in op.operands if v is not value]
        return op.attributes["fn"] in ("add", "sub") and any(
            o is not None and o.definition is Constant and abs(o.attributes["value"]) == 1 for o in others
        )

    # ---- forms -------------------------------------------------------------------------------------------------------

    def form_of(self, op: Op) -> Form | None:
        """The form of an integer number that is one."""
        if not op.results or op.results[0].type is not I64:
            return None
        zero = (0,) * len(self.sizes)
        if op.definition is Index:
            return Form(tuple(int(d == op.attributes["dim"]) for d in range(len(self.sizes))))
        if op.definition is Constant:
            return Form(zero, int(op.attributes["value"]))
        if op.definition is not Apply:
            return None
        args = [self.forms[v] for v in op.operands if v in self.forms]
        if len(args) != len(op.operands):
            return None
        fn = op.attributes["fn"]
        if fn in ("add", "sub"):
            sign = 1 if fn == "add" else -1
            terms = tuple(a + sign * b for a, b in zip(args[0].terms, args[1].terms, strict=True))
            return Form(terms, args[0].constant + sign * args[1].constant)
        if fn == "mul" and not (args[0].dims and args[1].dims):
            form, factor = (args[0], args[1].constant) if args[0].dims else (args[1], args[0].constant)
            return Form(tuple(c * factor for c in form.terms), form.constant * factor)
        return None

    def access(self, op: Op) -> Access:
        tensor = op.operands[0] if op.definition is Load else op.operands[1]
        indices = op.operands[1:] if op.definition is Load else op.operands[2:]
        argument = self.number[tensor]
        spec = self.specs[argument]
        rows = [Form(tuple(row[:-1]), row[-1]) for row in op.attributes["map"]]
        terms = [0] * len(self.sizes)
        constant = 0
        bits = op.attributes.get("bits")
        shape, strides = spec.shape, spec.strides
        if bits is not None:
            if strides[bits] != 1:
                raise NoText("bits of one byte are no neighbours in memory")
            shape = tuple(n * 8 if d == bits else n for d, n in enumerate(shape))
            strides = tuple(1 if d == bits else s * 8 for d, s in enumerate(strides))
        for row, stride in zip(rows, strides, strict=True):
            constant += row.constant * stride
            for d, c in enumerate(row.terms):
                terms[d] += c * stride
        computed = dict(zip(op.attributes["dynamic"], indices, strict=True))
        guards = []
        if op.definition is Store or op.attributes.get("guarded"):
            for dim, (row, size) in enumerate(zip(rows, shape, strict=True)):
                low, high = row.range(self.sizes)
                if low < 0 or high >= size or (dim in computed and op.definition is Load):
                    guards.append(Guard(row, computed.get(dim), size))
        numbers = tuple((v, strides[dim]) for dim, v in computed.items())
        offset = Form(tuple(c if n > 1 else 0 for c, n in zip(terms, self.sizes, strict=True)), constant)
        return Access(argument, offset, numbers, tuple(guards), spec.dtype.itemsize, bits is not None)

    def bytes(self, access: Access) -> int:
        """How many bytes an access touches, where every element is touched once. What is looked up many times over is
        at hand: it counts as what there is."""
        touched = math.prod(self.sizes[d] for d in self.access_dims(access))
        there = math.prod(self.specs[access.argument].shape)
        return access.itemsize * (there if access.numbers and touched > MANY_TIMES * there else touched)

    def access_dims(self, access: Access) -> frozenset[int]:
        """The iteration dimensions that an access changes along."""
        if (known := self.changes.get(id(access))) is not None:
            return known
        dims = access.offset.dims.union(*(g.form.dims for g in access.guards))
        dims = dims.union(*(self.dims_of[v] for v, _ in access.numbers))
        return frozenset(d for d in dims if self.sizes[d] != 1)

    def vary(self) -> None:
        """Finds the iteration dimensions that each number changes along: not those with a stride of zero."""
        for op in self.ops:
            if not op.results:
                continue
            result = op.results[0]
            if result in self.forms:
                found = self.forms[result].dims
            elif op.definition is Load:
                found = self.access_dims(self.accesses[op])
            else:
                found = frozenset().union(*(self.dims_of[v] for v in op.operands))
                if op.definition is Reduce:
                    found -= frozenset(op.attributes["dims"])
            self.dims_of[result] = frozenset(d for d in found if self.sizes[d] != 1)

    def trivial(self, op: Op) -> bool:
        """Whether a reduction has one point only."""
        return all(self.sizes[d] == 1 for d in op.attributes["dims"])

    def used_dims(self) -> frozenset[int]:
        """All iteration dimensions that something changes along or is reduced over."""
        dims = frozenset().union(*self.dims_of.values())
        dims = dims.union(*(self.access_dims(a) for a in self.accesses.values()))
        for op in self.ops:
            if op.definition is Reduce:
                dims |= frozenset(op.attributes["dims"])
        return frozenset(d for d in dims if self.sizes[d] != 1)

    def all_forms(self) -> list[Form]:
        guards = [g.form for a in self.accesses.values() for g in a.guards]
        return [*(a.offset for a in self.accesses.values()), *guards, *self.counted]

    # ---- order -------------------------------------------------------------------------------------------------------

    def heavy(self) -> list[Access]:
        """The accesses, those that touch most bytes first."""
        return sorted(self.accesses.values(), key=lambda a: -self.bytes(a))

    def memory_order(self) -> list[int]:
        """The iteration dimensions as the largest tensors lie in memory, the fastest last."""
        order: list[int] = []
        for access in self.heavy():
            new = [d for d in sorted(access.offset.dims) if d not in order]
            order = sorted(new, key=lambda d: -abs(access.offset.terms[d])) + order
        return [*(d for d in sorted(self.used_dims()) if d not in order), *(d for d in order if self.sizes[d] != 1)]

    def merged(self, kind: Callable[[int], object]) -> list[Dim]:
        """The dimensions in memory order, those of one kind made one wherever every form allows it."""
        forms = self.all_forms()
        used = self.used_dims()
        dims = [Dim((d,), self.sizes[d]) for d in self.memory_order() if d in used]

        def fits(outer: Dim, inner: Dim) -> bool:
            a, b = outer.parts[-1], inner.parts[-1]
            return kind(a) == kind(b) and all(f.terms[a] == f.terms[b] * inner.size for f in forms)

        while True:
            pair = next(((a, b) for a in dims for b in dims if a is not b and fits(a, b)), None)
            if pair is None:
                return dims
            outer, inner = pair
            dims[dims.index(inner)] = Dim(outer.parts + inner.parts, outer.size * inner.size)
            dims.remove(outer)

    @property
    def wide(self) -> bool:
        """Whether 32 bits are too few for an offset."""
        limit = 2**31 - 2**20
        reach = [sum((n - 1) * abs(s) for n, s in zip(x.shape, x.strides, strict=True)) for x in self.specs]
        reach += [8 * reach[n] for n in self.in_bits]
        return max(reach, default=0) >= limit or math.prod(self.sizes) >= limit

    @property
    def in_bits(self) -> list[int]:
        """The arguments whose offsets count bits."""
        return [a.argument for a in self.accesses.values() if a.bits]


def fast_dim(access: Access, dims: Sequence[Dim]) -> Dim | None:
    """The dimension along which an access walks through memory in the smallest steps."""
    steps = [(abs(access.offset.terms[d.parts[-1]]), d) for d in dims if access.offset.terms[d.parts[-1]]]
    return min(steps, key=lambda s: s[0])[1] if steps else None
