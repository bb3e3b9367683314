"""From step ops to one kernel of the loop dialect.

First the dimensions of all values are *unified*: an op says by its roles which dimensions go together, a reshape splits
a dimension into parts. What is left are the iteration dimensions. Then every output is pulled: the element of a value
at an index is computed by its op's own `element` rule from elements of its operands, until a load is reached. Slices,
padding, concatenation and transposes are nothing but changes of the index.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ..dialects.loop import (
    FUNCTIONS,
    ROUNDED,
    Apply,
    Constant,
    Index,
    Load,
    Random,
    Reduce,
    Space,
    Store,
    compute_type,
)
from ..dialects.step.base import StepOp
from ..ir.builtin import add_function, finish_function, module
from ..ir.core import Block, Builder, Op, Value
from ..ir.passes import run_pipeline
from ..ir.types import BOOL, I64, ScalarType
from .expand import expand_where, has_expansion


class NotLoops(Exception):
    """The ops cannot be one kernel; the message says why, in the user's words."""


class TwoAsOne(NotLoops):
    """Two dimensions of one tensor are said to go together."""


# ---- indices ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Affine:
    """A sum of iteration dimensions with coefficients, and a constant; `terms` are sorted (dimension, coefficient)."""

    terms: tuple[tuple[int, int], ...] = ()
    constant: int = 0

    def __add__(self, other: Affine | int) -> Affine:
        if isinstance(other, int):
            return Affine(self.terms, self.constant + other)
        total = dict(self.terms)
        for dim, c in other.terms:
            total[dim] = total.get(dim, 0) + c
        return Affine(tuple(sorted((d, c) for d, c in total.items() if c)), self.constant + other.constant)

    def __mul__(self, factor: int) -> Affine:
        return Affine(tuple((d, c * factor) for d, c in self.terms if factor), self.constant * factor)


@dataclass(frozen=True, slots=True)
class Computed:
    """An index that is a number of the kernel; `checked`: it was read from a tensor, and may be wrong."""

    number: Value
    checked: bool = False


Place = Affine | Computed


class Dimensions:
    """Dimensions of tensors as sequences of parts that can be united and split: what remains is iterated over."""

    def __init__(self) -> None:
        self.size: list[int] = []
        self.same: list[int] = []  # the part this one is
        self.parts: list[tuple[int, ...]] = []  # what it was split into

    def new(self, size: int) -> tuple[int, ...]:
        """A dimension of a tensor; of size one it needs no index."""
        if size == 1:
            return ()
        self.size.append(size)
        self.same.append(len(self.same))
        self.parts.append(())
        return (len(self.same) - 1,)

    def root(self, part: int) -> int:
        while self.same[part] != part:
            self.same[part] = self.same[self.same[part]]
            part = self.same[part]
        return part

    def resolve(self, parts: Sequence[int]) -> list[int]:
        """The parts as they are now, the outermost first."""
        found: list[int] = []
        for part in parts:
            root = self.root(part)
            found += self.resolve(self.parts[root]) if self.parts[root] else [root]
        return found

    def split(self, part: int, inner: int) -> tuple[int, int]:
        made = (self.new(self.size[part] // inner)[0], self.new(inner)[0])
        self.parts[part] = made
        return made

    def unify(self, one: Sequence[int], other: Sequence[int]) -> None:
        """Makes two sequences of equal size the same parts, from the innermost on."""
        left, right = self.resolve(one), self.resolve(other)
        while left and right:
            a, b = left.pop(), right.pop()
            if a == b:
                continue
            m, n = self.size[a], self.size[b]
            if m == n:
                self.same[b] = a
                right = self.resolve(right)
                left = self.resolve(left)
            elif m > n and m % n == 0:
                outer, inner = self.split(a, n)
                left, right = [*self.resolve(left), outer, inner], [*self.resolve(right), b]
            elif n > m and n % m == 0:
                outer, inner = self.split(b, m)
                left, right = [*self.resolve(left), a], [*self.resolve(right), outer, inner]
            else:
                raise NotLoops(f"a reshape mixes dimensions of {m} and {n}")
        if left or right:
            raise NotLoops("a reshape changes the number of elements")


# ---- lowering --------------------------------------------------------------------------------------------------------


def is_primitive(op: Op) -> bool:
    """Whether an op has an element rule, so that it need not be expanded."""
    kind = op.definition
    if kind.name == "step.random":
        return op.distribution == "uniform" and op.y.type.element.bits <= 32
    if getattr(kind, "element", None) is None and getattr(kind, "pointwise", False):
        return kind.name.partition(".")[2] in FUNCTIONS
    return getattr(kind, "element", None) is not None


def only_moves(op: Op) -> bool:
    """Whether each element of a result comes from one of every operand, whatever walks along it."""
    kind = op.definition
    return kind.terminator or not op.operands or any(getattr(kind, name, False) for name in ("pointwise", "views"))


def lowered(body: Op) -> Op:
    """The kernel, in a module of its own, that computes what a function of the step dialect returns.

    Its arguments are those of the function, then one output per result. NotLoops where it cannot be one kernel.
    """
    root = module()
    copy = body.clone()
    root.regions[0].block.append(copy)
    expand_where(copy, lambda op: has_expansion(op) and not is_primitive(op))
    run_pipeline(root, "cse,dce")
    made = Lowering(copy).function
    new_root = module()
    made.detach()
    new_root.regions[0].block.append(made)
    run_pipeline(new_root, "cse,dce")
    return made


class Lowering:
    """One kernel in the making; what `element` rules are given."""

    nowhere = Affine()

    def __init__(self, body: Op):
        block = body.regions[0].block
        assert block.last is not None
        for op in block:
            if op is not block.last and not is_primitive(op):
                raise NotLoops(f"{op.name.partition('.')[2]} cannot be written as loops")
        try:
            self.unify(block)
        except TwoAsOne:
            if not all(only_moves(op) for op in block):
                raise
            self.unify(block, apart=("step.transpose",))  # a tensor and its transpose: one of them is read across
        results = block.last.operands
        self.sizes: list[int] = []
        self.number: dict[int, int] = {}  # of a part among the iteration dimensions
        self.order(results, block)
        inputs = [a.type for a in block.arguments]
        outputs = [r.type for r in results]
        self.root = module()
        self.function = add_function(self.root, body.attributes["sym_name"], [*inputs, *outputs], loc=body.loc)
        own = self.function.regions[0].block
        self.arguments = dict(zip(block.arguments, own.arguments[: len(inputs)], strict=True))
        self.b = Builder(own)
        Space.build(self.b, sizes=tuple(self.sizes))
        self.known: dict[tuple[Value, tuple[Place, ...]], Value] = {}
        # whatever is read is read before anything is written: results may take the memory of operands
        walked = [unpacked(result) for result in results]
        numbers = [self.at(value, self.home(value)) for value in walked]
        for number, value, result, argument in zip(numbers, walked, results, own.arguments[len(inputs) :], strict=True):
            bits = None if value is result or result.op is None else result.op.dim
            Store.build(self.b, number, argument, [], map=[self.row(p) for p in self.home(value)], bits=bits)
        self.even_rows()
        finish_function(self.function, [])

    # ---- dimensions --------------------------------------------------------------------------------------------------

    def unify(self, block: Block, apart: Sequence[str] = ()) -> None:
        """Makes dimensions one that ops say go together, but those of ops that are `apart`."""
        dims = self.dimensions = Dimensions()
        self.homes: dict[Value, list[tuple[int, ...]]] = {}
        for argument in block.arguments:
            self.homes[argument] = [dims.new(n) for n in argument.type.shape]
        for op in block:
            for result in op.results:
                self.homes[result] = [dims.new(n) for n in result.type.shape]
            if op.definition.name == "step.reshape":
                self.join_reshape(op)
                continue
            roles = op.definition.roles(op) if issubclass(op.definition, StepOp) else None
            if roles is None or op.definition.name in apart:
                continue
            seen: dict[str, tuple[tuple[int, ...], int]] = {}
            values, spoken = (*op.operands, *op.results), (*roles.operands, *roles.results)
            for number, (value, labels) in enumerate(zip(values, spoken, strict=True)):
                first_labels = spoken[values.index(value)] if number < len(op.operands) else labels
                for label, own, parts, size in zip(
                    labels, first_labels, self.homes[value], value.type.shape, strict=True
                ):
                    if label == " " or size == 1 or label != own:  # (a product with itself reads it across once)
                        continue
                    first, known = seen.setdefault(label, (parts, size))
                    if known == size and first is not parts:
                        dims.unify(first, parts)
        for op in block:
            self.split_alike(op)
        for value, home in self.homes.items():
            walked = dims.resolve([p for d in home for p in d])
            if len(set(walked)) != len(walked):
                raise TwoAsOne(f"two dimensions of {value.type} would be walked as one")

    def split_alike(self, op: Op) -> None:
        """A dimension that is shifted by whole rows of inner parts keeps those parts, so that its index is simple."""
        dims = self.dimensions
        for inner_value, outer_value, dim, offset in shifts(op):
            parts = dims.resolve(self.homes[inner_value][dim])
            whole = self.homes[outer_value][dim]
            size = outer_value.type.shape[dim]
            for first in range(1, len(parts)):
                width = math.prod(dims.size[p] for p in parts[first:])
                if offset % width == 0 and size % width == 0 and size > width:
                    dims.unify(whole, [*dims.new(size // width), *parts[first:]])
                    break

    def join_reshape(self, op: Op) -> None:
        """Dimension by dimension where sizes agree, so that nothing is split without need."""
        if 0 in op.x.type.shape:
            return
        self.dimensions.unify([p for d in self.homes[op.x] for p in d], [p for d in self.homes[op.y] for p in d])

    def order(self, results: Sequence[Value], block: Block) -> None:
        """Numbers the iteration dimensions: those of the largest result first, then what reductions add."""
        wanted = sorted(map(unpacked, results), key=lambda v: -v.type.size)
        reduced = [op.operands[0] for op in block if op.definition.name in REDUCTIONS]
        if reduced and (not wanted or max(v.type.size for v in reduced) > wanted[0].type.size):
            wanted = [max(reduced, key=lambda v: v.type.size), *wanted]
        for value in (*wanted, *reduced):
            for part in self.dimensions.resolve([p for d in self.homes[value] for p in d]):
                if part not in self.number:
                    self.number[part] = len(self.sizes)
                    self.sizes.append(self.dimensions.size[part])

    def walk(self, size: int) -> Affine:
        """A new iteration dimension, for a rule that needs one of its own."""
        part = self.dimensions.new(size)
        if not part:
            return Affine()
        self.number[part[0]] = len(self.sizes)
        self.sizes.append(size)
        first = self.function.regions[0].block.first
        assert first is not None
        first.attributes["sizes"] = tuple(self.sizes)
        return Affine(((self.number[part[0]], 1),))

    def home(self, value: Value) -> tuple[Affine, ...]:
        """The index of a value as iteration dimensions."""
        return tuple(self.place(parts) for parts in self.homes[value])

    def place(self, parts: Sequence[int]) -> Affine:
        found, stride = Affine(), 1
        for part in reversed(self.dimensions.resolve(parts)):
            if part not in self.number:  # of a value that is only ever seen at other indices
                return Affine()
            found += Affine(((self.number[part], stride),))
            stride *= self.dimensions.size[part]
        return found

    def range(self, place: Affine) -> tuple[int, int]:
        """The smallest and largest value of an index."""
        low = high = place.constant
        for dim, c in place.terms:
            reach = c * (self.sizes[dim] - 1)
            low, high = low + min(reach, 0), high + max(reach, 0)
        return low, high

    def even_rows(self) -> None:
        """Brings access maps that were made before a dimension was added to full length."""
        for op in self.function.regions[0].block:
            if op.definition in (Load, Store):
                missing = [0] * len(self.sizes)
                op.attributes["map"] = [[*row[:-1], *missing[len(row) - 1 :], row[-1]] for row in op.attributes["map"]]

    # ---- what rules use ----------------------------------------------------------------------------------------------

    def at(self, value: Value, index: Sequence[Place]) -> Value:
        """The number a value has at an index."""
        index = tuple(
            Affine() if n == 1 and isinstance(p, Affine) else p for p, n in zip(index, value.type.shape, strict=True)
        )
        key = (value, index)
        found = self.known.get(key)
        if found is None:
            if value in self.arguments:
                found = self.load(self.arguments[value], index)
            else:
                op = value.op
                assert op is not None
                if op.definition.element is None:  # type: ignore[attr-defined]
                    found = self.pointwise(op, index)
                else:
                    found = op.definition.element(self, op, index)  # type: ignore[attr-defined]
                    if isinstance(found, tuple):  # a number per result
                        found = found[op.results.index(value)]
            self.known[key] = found
        return found

    def load(self, tensor: Value, index: tuple[Place, ...]) -> Value:
        """An element of an argument. Outside of it there are zeros, but where an index that was read leads there."""
        read = [isinstance(place, Computed) and place.checked for place in index]
        if not any(read):
            return self.load_at(tensor, index)
        there = [mine or self.between(p, 0, n) for p, n, mine in zip(index, tensor.type.shape, read, strict=True)]
        inside: Value | bool = True
        for condition in there:
            inside = self.both(inside, condition)
        if inside is True:
            return self.load_at(tensor, index)
        first, moved = self.constant(0, I64), list(index)
        for dim, (place, mine) in enumerate(zip(index, read, strict=True)):
            if mine or there[dim] is not True:  # elsewhere no index is wrong
                moved[dim] = Computed(self.choose(inside, self.as_number(place), first), mine)
        value = self.load_at(tensor, tuple(moved))
        return self.choose(inside, value, self.constant(0, tensor.type.element))

    def load_at(self, tensor: Value, index: tuple[Place, ...]) -> Value:
        numbers, dynamic, rows, guarded, checked = [], [], [], False, False
        for dim, (place, size) in enumerate(zip(index, tensor.type.shape, strict=True)):
            if isinstance(place, Computed):
                numbers.append(place.number)
                dynamic.append(dim)
                rows.append(self.row(Affine()))
                guarded = True  # nobody knows what an index tensor of the batch holds
                checked = checked or place.checked
                continue
            low, high = self.range(place)
            guarded = guarded or low < 0 or high >= size
            rows.append(self.row(place))
        return Load.build(
            self.b, tensor, numbers, map=rows, dynamic=tuple(dynamic), guarded=guarded, checked=checked
        ).result

    def bit(self, tensor: Value, index: Sequence[Place], dim: int) -> Value:
        """A truth value of bytes that hold eight of them along a dimension."""
        if tensor not in self.arguments:
            raise NotLoops("bits are packed where they are stored, and not read in the same kernel")
        rows = []
        for place, size, number in zip(index, tensor.type.shape, range(len(index)), strict=True):
            if isinstance(place, Computed):
                raise NotLoops("bits are not looked up")
            low, high = self.range(place)
            if low < 0 or high >= size * (8 if number == dim else 1):
                raise NotLoops("there are no bits outside of their tensor")
            rows.append(self.row(place))
        return Load.build(self.b, self.arguments[tensor], [], map=rows, bits=dim).result

    def row(self, place: Affine) -> list[int]:
        """A row of an access map; all rows of a kernel are made equally long at its end."""
        coefficients = dict(place.terms)
        return [*(coefficients.get(d, 0) for d in range(len(self.sizes))), place.constant]

    def pointwise(self, op: Op, index: tuple[Place, ...]) -> Value:
        args = []
        for operand in op.operands:
            own = index[len(index) - operand.type.rank :]
            shape = operand.type.shape  # of size one: the same number everywhere, however the index was computed
            args.append(self.at(operand, [self.nowhere if n == 1 else p for p, n in zip(own, shape, strict=True)]))
        name = op.definition.name.partition(".")[2]
        rounding = op.attributes.get("rounding", "none")
        if name == "div" and rounding != "none":
            name = f"{rounding}_div"
        elif name == "rem" and rounding == "trunc":
            name = "fmod"
        dtype = op.results[0].type.element
        if op.attributes.get("rounds") and compute_type(dtype) is not dtype:
            if dtype not in ROUNDED:
                raise NotLoops(f"a kernel does not round to {dtype} on the way")
            name = "rounded"
        return self.apply(name, *args, dtype=dtype)

    def apply(self, fn: str, *args: Value, dtype: ScalarType) -> Value:
        first, *rest = args
        if len({v.type for v in rest}) > 1:  # a sum is wider than what it is a sum of
            wide = compute_type(dtype)
            rest = [v if v.type is wide else self.apply("cast", v, dtype=wide) for v in rest]
        return Apply.build(self.b, [first, *rest], fn=fn, dtype=dtype).result

    def constant(self, value: float | int | bool, dtype: ScalarType) -> Value:
        return Constant.build(self.b, value=value, dtype=dtype).result

    def as_number(self, place: Place) -> Value:
        """An index as a number of the kernel."""
        if isinstance(place, Computed):
            return place.number
        total: Value | None = None
        for dim, c in place.terms:
            term = Index.build(self.b, dim=dim).result
            if c != 1:
                term = self.apply("mul", term, self.constant(c, I64), dtype=I64)
            total = term if total is None else self.apply("add", total, term, dtype=I64)
        if total is None:
            return self.constant(place.constant, I64)
        if place.constant:
            total = self.apply("add", total, self.constant(place.constant, I64), dtype=I64)
        return total

    def linear(self, index: Sequence[Place], shape: Sequence[int]) -> Value:
        """The row-major number of an element."""
        if all(isinstance(p, Affine) for p in index):
            total, stride = Affine(), 1
            for place, size in zip(reversed(index), reversed(shape), strict=True):
                assert isinstance(place, Affine)
                total, stride = total + place * stride, stride * size
            return self.as_number(total)
        number = self.constant(0, I64)
        for place, size in zip(index, shape, strict=True):
            number = self.apply("mul", number, self.constant(size, I64), dtype=I64)
            number = self.apply("add", number, self.as_number(place), dtype=I64)
        return number

    def below(self, place: Place, limit: int) -> Value | bool:
        """Whether an index is below a limit, where that is known beforehand as True or False."""
        if isinstance(place, Affine):
            low, high = self.range(place)
            if high < limit:
                return True
            if low >= limit:
                return False
        return self.apply("lt", self.as_number(place), self.constant(limit, I64), dtype=BOOL)

    def between(self, place: Place, low: int, high: int) -> Value | bool:
        """Whether low <= index < high."""
        below = self.below(place, low)
        enough = not below if isinstance(below, bool) else self.apply("bit_not", below, dtype=BOOL)
        return self.both(enough, self.below(place, high))

    def both(self, one: Value | bool, other: Value | bool) -> Value | bool:
        if isinstance(one, bool) or isinstance(other, bool):
            return other if one is True else one if other is True else False
        return self.apply("bit_and", one, other, dtype=BOOL)

    def choose(self, condition: Value | bool, value: Value, other: Value) -> Value:
        if isinstance(condition, bool):
            return value if condition else other
        return self.apply("select", condition, value, other, dtype=value.type)

    def computed(self, number: Value, checked: bool = True) -> Computed:
        return Computed(number if number.type is I64 else self.apply("cast", number, dtype=I64), checked)

    def from_end(self, number: Value, size: int) -> Computed:
        """An index that was read from a tensor; a negative one counts from the end of its dimension."""
        place = self.computed(number).number
        negative = self.apply("lt", place, self.constant(0, I64), dtype=BOOL)
        from_end = self.apply("add", place, self.constant(size, I64), dtype=I64)
        return Computed(self.apply("select", negative, from_end, place, dtype=I64), True)

    def counted(self, place: Place, start: float, stride: float, dtype: ScalarType) -> Value:
        """start + index * stride."""
        number = self.as_number(place)
        if dtype is not I64:
            number = self.apply("cast", number, dtype=dtype)
        if stride != 1:
            number = self.apply("mul", number, self.constant(stride, dtype), dtype=dtype)
        return self.apply("add", number, self.constant(start, dtype), dtype=dtype) if start else number

    def scaled(self, place: Place, by: int) -> Place:
        if isinstance(place, Affine):
            return place * by
        return Computed(self.apply("mul", place.number, self.constant(by, I64), dtype=I64)) if by != 1 else place

    def joined(self, places: Sequence[Place], shape: Sequence[int]) -> Place:
        """The row-major number of some dimensions as one index."""
        if len(places) == 1:
            return places[0]
        total: Place = Affine()
        for place, size in zip(places, shape, strict=True):
            total = self.scaled(total, size)
            if isinstance(total, Affine) and isinstance(place, Affine):
                total = total + place
            else:
                numbers = self.as_number(total), self.as_number(place)
                total = Computed(self.apply("add", *numbers, dtype=I64))
        return total

    def quotient(self, place: Place, by: int) -> tuple[Place, Value | bool]:
        """An index divided, and whether nothing is left over."""
        if isinstance(place, Affine) and not any(c % by for _, c in place.terms) and not place.constant % by:
            return Affine(tuple((d, c // by) for d, c in place.terms), place.constant // by), True
        number, divisor = self.as_number(place), self.constant(by, I64)
        rest = self.apply("rem", number, divisor, dtype=I64)
        exact = self.apply("eq", rest, self.constant(0, I64), dtype=BOOL)
        return Computed(self.apply("floor_div", number, divisor, dtype=I64)), exact

    def shifted(self, place: Place, by: int) -> Place:
        if isinstance(place, Affine):
            return place + by
        if not by:
            return place
        return Computed(self.apply("add", place.number, self.constant(by, I64), dtype=I64), place.checked)

    def anywhere(self, place: Place) -> Place:
        """An index that may lie outside of its tensor, where there are zeros."""
        return Computed(place.number) if isinstance(place, Computed) else place

    def part(self, place: Place, low: int, high: int, size: int) -> Place:
        """An index of `size` elements as one of those from low to high. Where it is meant for the others it is 0: to
        leave the part is no mistake in the data, to leave all of them is."""
        moved = self.shifted(place, -low)
        if isinstance(moved, Affine) or not moved.checked:
            return moved
        here, known = self.between(place, low, high), self.between(place, 0, size)
        assert not isinstance(here, bool)
        others = self.both(known, self.apply("bit_not", here, dtype=BOOL))
        return Computed(self.choose(others, self.constant(0, I64), moved.number), True)

    def divided(self, place: Place, by: int) -> tuple[Place, Place]:
        """Quotient and remainder of an index."""
        if isinstance(place, Computed):
            divisor = self.constant(by, I64)
            whole = self.apply("floor_div", place.number, divisor, dtype=I64)
            return Computed(whole), Computed(self.apply("rem", place.number, divisor, dtype=I64))
        quotient = Affine(tuple((d, c // by) for d, c in place.terms if c % by == 0), place.constant // by)
        rest = Affine(tuple((d, c) for d, c in place.terms if c % by), place.constant % by)
        low, high = self.range(rest)
        if low < 0 or high >= by:
            return self.divided(Computed(self.as_number(place)), by)
        return quotient, rest

    def refuse(self, why: str) -> None:
        """For a rule that is no good for an op."""
        raise NotLoops(why)

    def reduce(
        self, value: Value, kind: str, places: Sequence[Affine], index: Sequence[Place], dtype: ScalarType
    ) -> Value:
        """Combines a number along the dimensions that some places stand for; `index` is where it is asked for."""
        dims = tuple(sorted({d for p in places for d, _ in p.terms}))
        for place in index:
            if isinstance(place, Affine) and any(d in dims for d, _ in place.terms):
                raise NotLoops("it reduces along a dimension that is walked beside it")
        if not dims:
            return value if value.type is compute_type(dtype) else self.apply("cast", value, dtype=compute_type(dtype))
        return Reduce.build(self.b, value, kind=kind, dims=dims, dtype=compute_type(dtype)).result

    def random(self, op: Op, index: Sequence[Place], digits: int) -> Value:
        parts = [self.at(op.key, (Affine((), i),)) for i in range(3)]
        element = self.linear(index, op.type.shape)
        stream = self.constant(op.stream, I64) if op.number is None else self.at(op.number, ())
        return Random.build(self.b, *parts, element, stream, digits=digits).result


def unpacked(result: Value) -> Value:
    """What is walked for a result: where it holds bits, the truth values that they are."""
    packs = result.op is not None and result.op.name == "step.pack_bits"
    return result.op.operands[0] if packs else result  # type: ignore[union-attr]


def shifts(op: Op) -> list[tuple[Value, Value, int, int]]:
    """Pairs of values of which the first is a stretch of the second along a dimension, and where it begins."""
    name = op.definition.name
    if name in ("step.slice_grad", "step.slice_update") and op.stride == 1:
        return [(op.x, op.y, op.dim, op.start)]
    if name == "step.slice" and op.stride == 1:
        return [(op.y, op.x, op.dim, op.start)]
    if name == "step.concat":
        found, at = [], 0
        for x in op.operands:
            found.append((x, op.y, op.dim, at))
            at += x.type.shape[op.dim]
        return found
    return []


REDUCTIONS = {f"step.{name}" for name in ("sum", "amax", "amin", "any", "all", "prod")}


def points(function: Op) -> int:
    """How many points a kernel walks."""
    first = function.regions[0].block.first
    assert first is not None
    return math.prod(first.attributes["sizes"])
