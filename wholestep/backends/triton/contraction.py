"""Matrix products with what stands before and after them: which kernels are of this family, and their candidates.

Such a kernel has one sum of products whose factors share summed dimensions and differ in others: its rows and columns.
What computes a factor is written into the loop over tiles, what follows on the tile of sums (`contraction_text.py`).
What makes a factor may be an output as well: it is stored by the programs of one column, or row, of tiles. Where the
result is read at several places at once (`unrolled.py`), there are several such sums, of the same rows with columns a
constant apart: they are parts of one tile. All of it is read off the access maps.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from ...dialects.loop import Apply, Load, Reduce, Store
from ...dialects.step.bits import GROUP
from ...ir.core import Op, Value
from ...ir.types import F32
from ..kernels import Spec
from .contraction_tiles import ROUNDS, Demand, Tile, choices
from .families import Generated, power_of_two, unsupported
from .scalars import SLOW, NoText
from .unrolled import MOST, unrolled
from .walk import Guard, Latest, Walk
from .window_rows import Rows, by_rows

if TYPE_CHECKING:
    from .generate import Candidate

#: Triton's types of factors, by element type
FACTORS = {"bf16": "tl.bfloat16", "f16": "tl.float16", "f32": "tl.float32"}
#: sides below which a tile would be mostly empty
SHORTEST = 16
#: how many neighbouring windows share a run of the image
TOGETHER = (2, 1)
NOTHING: frozenset[int] = frozenset()


def why_not(function: Op, specs: Sequence[Spec]) -> str:
    """ "" if the kernel is a matrix product that this family writes, else a reason for a user."""
    try:
        product = product_of(function, specs)
        tiles = product.tiles()
        if not tiles:
            return "no tile fits into shared memory and registers"
        product.generate(tiles[0])
    except NoText as error:
        return str(error)
    return ""


def candidates(function: Op, specs: Sequence[Spec]) -> list[Candidate]:
    """The best guess first, then alternatives worth timing."""
    from .generate import draft

    product = product_of(function, specs)
    rows = over_rows(function, specs) if product.parts == 1 else []
    tiles = product.tiles()[:2] if rows else product.tiles()
    return [*rows, *(draft(product, tile, str(tile), tile.likely) for tile in tiles)]


def over_rows(function: Op, specs: Sequence[Spec]) -> list[Candidate]:
    """Ways to walk windows by their rows, where the kernel sums over windows of few channels."""
    from .generate import draft

    found = []
    for together in TOGETHER:
        rows = by_rows(function, specs, together)
        if rows is not None:
            product = Contraction(rows.function, rows.specs, rows)
            shared = f"rows{together if together > 1 else ''}"
            found.append([draft(product, tile, f"{tile} {shared}") for tile in product.tiles()[:4]])
    return [c for turn in itertools.zip_longest(*found) for c in turn if c is not None]


@dataclass(frozen=True)
class Sum:
    """A sum of the result: the axes it keeps, how many numbers it gives, and of how many columns it makes one."""

    op: Op
    kept: tuple[str, ...]
    width: int
    columns: int = 1


class Tensors(Walk):
    """The forms of a product: no program counts all points that rows, columns and the summed dimension make."""

    @property
    def wide(self) -> bool:
        """Whether 32 bits are too few for an offset."""
        sizes = [spec.bytes // spec.dtype.itemsize for spec in self.specs]
        return max(*sizes, *(8 * sizes[n] for n in self.in_bits), 0) >= 2**31 - 2**20


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch of a dimension that is summed: there some comparisons are decided, and what they choose is known."""

    dim: int
    first: int
    end: int

    def border(self, walk: Walk, op: Op) -> int | None:
        """Where a number is chosen by whether the dimension is below something: by what."""
        if op.definition is not Apply or op.attributes["fn"] != "select" or op.operands[0].op is None:
            return None
        asked = op.operands[0].op
        if asked.definition is not Apply or asked.attributes["fn"] != "lt":
            return None
        index, than = (walk.forms.get(v) for v in asked.operands)
        if index is None or than is None or than.dims or index.dims != {self.dim} or index.terms[self.dim] != 1:
            return None
        return than.constant - index.constant

    def taken(self, walk: Walk, op: Op) -> Sequence[Value]:
        """What an op is computed from here."""
        border = self.border(walk, op)
        if border is None or self.first < border < self.end:
            return op.operands
        return op.operands[1:2] if self.end <= border else op.operands[2:3]

    def holds(self, guard: Guard) -> bool:
        """Whether an index stays within its tensor here."""
        form = guard.form
        if guard.number is not None or form.dims != {self.dim} or form.terms[self.dim] < 0:
            return False
        low, high = (form.constant + form.terms[self.dim] * at for at in (self.first, self.end - 1))
        return low >= 0 and high < guard.size


class Contraction:
    """A kernel seen as a matrix product. Its axes: z (batch), m (rows), n (columns), k (summed).

    rows: where it walks windows by their rows.
    """

    def __init__(self, function: Op, specs: Sequence[Spec], rows: Rows | None = None):
        self.rows = rows
        self.texts: dict[Tile, Generated] = {}
        reason = unsupported(specs, function)
        if reason:
            raise NoText(reason)
        self.walk: Walk = Tensors(unrolled(function), specs)
        self.find_products()
        self.dot, self.parts = self.dots[0], len(self.dots)
        sums = [op for op in self.walk.ops if op.definition is Reduce and op not in self.dots]
        #: sums of a factor along what the product sums over, such as a bias gradient
        self.beside = [op for op in sums if self.summed_factor(op) is not None]
        self.others = [op for op in sums if op not in self.beside]
        self.behind: dict[Value, frozenset[Op]] = {}
        for op in self.walk.ops:
            found = frozenset().union(*(self.behind.get(v, frozenset()) for v in op.operands))
            for result in op.results:
                self.behind[result] = found | ({op} if op.definition is Reduce else set())
        stores = [op for op in self.walk.ops if op.definition is Store]
        #: outputs made of sums of a factor
        self.aside = [s for s in stores if self.behind[s.operands[0]] & set(self.beside)]
        stores = [s for s in stores if s not in self.aside]
        #: outputs made of sums of the result; those that lie along what is summed over, as factors do; all others
        self.after = [s for s in stores if self.behind[s.operands[0]] & set(self.others)]
        summed = frozenset(self.dot.attributes["dims"])
        self.early = [s for s in stores if not self.behind[s.operands[0]] and self.reach(s) & summed]
        self.stores = [s for s in stores if s not in self.after and s not in self.early]
        self.arrange()
        self.check()

    def summed_factor(self, op: Op) -> int | None:
        """The number of the factor that a reduction sums up as the product does; None of any other."""
        real = {d for d in op.attributes["dims"] if self.walk.sizes[d] != 1}
        summed = {d for d in self.dots[0].attributes["dims"] if self.walk.sizes[d] != 1}
        if real != summed or not self.adds(op) or len(self.dots) > 1 or self.rows is not None:
            return None
        value = op.operands[0]
        while value not in self.factors and value.op is not None and value.op.attributes.get("fn") == "cast":
            value = value.op.operands[0]
        if value in self.factors:
            return self.factors.index(value)
        load = value.op
        if load is None or load.definition is not Load:
            return None
        access = self.walk.accesses[load]
        for number, factor in enumerate(self.factors):
            own = None if factor.op is None else self.walk.accesses.get(factor.op)
            if own is not None and (own.argument, own.offset) == (access.argument, access.offset):
                return None if access.guards or access.numbers else number
        return None

    def find_products(self) -> None:
        """The sums of products, those of earlier columns first, and the factors of the first of them."""
        self.dots = [op for op in self.walk.ops if op.definition is Reduce and all(self.roles(op)[:3])]
        if not self.dots:
            raise NoText("it has no matrix product")
        factors = {op: op.operands[0].op.operands for op in self.dots}  # type: ignore[union-attr]
        self.factors, self.apart = list(factors[self.dots[0]]), [0]
        if len(self.dots) == 1:
            return
        shared = [v for v in self.factors if all(v in own for own in factors.values())]
        loads = {op: v.op for op, own in factors.items() for v in own if v not in shared}
        if len(shared) != 1 or len({self.walked(op, load) for op, load in loads.items()}) > 1:
            raise NoText("it has several matrix products")
        if len(self.dots) > MOST or power_of_two(len(self.dots)) != len(self.dots):
            raise NoText(f"it reads its product at {len(self.dots)} places at once, which no tile is cut into")
        begins = {op: self.walk.accesses[load].offset.constant for op, load in loads.items()}  # type: ignore[index]
        self.dots.sort(key=begins.__getitem__)
        self.factors = [shared[0], loads[self.dots[0]].results[0]]  # type: ignore[union-attr]
        #: how many elements of their tensor the columns of each begin behind those of the first
        self.apart = [begins[op] - begins[self.dots[0]] for op in self.dots]

    def walked(self, dot: Op, load: Op | None) -> tuple[object, ...]:
        """How a product walks its columns, wherever they begin; what is computed or may be outside is like no other."""
        access = self.walk.accesses.get(load) if load is not None else None
        if access is None or access.guards or access.numbers:
            return (dot,)
        return access.argument, access.offset.terms, tuple(dot.attributes["dims"]), dot.attributes["dtype"]

    def roles(self, op: Op) -> tuple[frozenset[int], frozenset[int], frozenset[int], frozenset[int]]:
        """The rows, columns, summed and batch dimensions of a sum of products; none of any other reduction."""
        product = op.operands[0].op
        if op.attributes["kind"] != "sum" or product is None or product.definition is not Apply:
            return NOTHING, NOTHING, NOTHING, NOTHING
        if product.attributes["fn"] != "mul":
            return NOTHING, NOTHING, NOTHING, NOTHING
        one, other = (self.walk.dims_of[v] for v in product.operands)
        summed = frozenset(op.attributes["dims"])
        return one - other - summed, other - one - summed, one & other & summed, (one & other) - summed

    def arrange(self) -> None:
        """Which factor has the rows, and the dimensions of every axis in the order of memory."""
        rows, columns, _, batch = self.roles(self.dot)
        if self.parts > 1:  # columns are what lies apart
            turned = bool(rows & self.walk.dims_of[self.factors[1]])
        else:  # results are written along columns
            turned = self.fastest() in rows
        if turned:
            rows, columns = columns, rows
        if turned and self.parts == 1:
            self.factors.reverse()
        summed = frozenset(d for d in self.dot.attributes["dims"] if self.walk.sizes[d] != 1)
        self.groups = {"z": batch, "m": rows, "n": columns, "k": summed}
        axis = {d: name for name, dims in self.groups.items() for d in dims}
        if self.walk.used_dims() - axis.keys():
            raise NoText("its results lie along dimensions that no factor of the product has")
        member = {d: tuple(d in op.attributes["dims"] for op in self.others) for d in axis}
        dims = self.walk.merged(lambda d: (axis[d], member[d]))
        if self.rows is not None:  # windows that share a run come first
            dims.sort(key=lambda d: d.parts != (len(self.walk.sizes) - 1,))
        self.dims = {name: tuple(d for d in dims if axis[d.parts[-1]] == name) for name in self.groups}
        self.size = {name: math.prod(d.size for d in own) for name, own in self.dims.items()}
        self.sums = [self.sum_of(op) for op in self.others]

    def fastest(self) -> int | None:
        """The dimension along which the product's largest output is written in the smallest steps."""
        outputs = [self.walk.accesses[op] for op in (*self.stores, *self.after)]
        largest = next(a for a in self.walk.heavy() if a in outputs).offset
        return min(largest.dims, key=lambda d: abs(largest.terms[d]), default=None)

    def sum_of(self, op: Op) -> Sum:
        reduced = frozenset(op.attributes["dims"])
        kept, columns = [], 1
        for name in ("z", "m", "n"):
            own = self.groups[name]
            part = bool(own & reduced) and not own <= reduced
            if part and (name != "n" or not self.is_outermost(own & reduced)):
                raise NoText("it sums its result over a part of the rows or columns")
            if part:
                columns = math.prod(self.walk.sizes[d] for d in own & reduced)
            if own and not own <= reduced:
                kept.append(name)
        return Sum(op, tuple(kept), math.prod(self.size[n] for n in kept) // columns, columns)

    def is_outermost(self, dims: frozenset[int]) -> bool:
        """Whether dimensions come first among those of the columns: what they hold lies in as many rows."""
        first = self.dims["n"][0]
        return frozenset(first.parts) == dims

    def check(self) -> None:
        """Says what no tile can do."""
        if any(self.behind[v] for v in self.factors):
            raise NoText("a factor of the product needs a sum of its own")
        types = [str(v.type) for v in self.factors]
        if types[0] != types[1] or types[0] not in FACTORS or self.dot.attributes["dtype"] is not F32:
            raise NoText(f"products of {types[0]} and {types[1]} are not multiplied in tiles")
        if min(self.size["m"], self.size["n"] * self.parts, self.size["k"]) < SHORTEST:
            raise NoText(f"a matrix with a side below {SHORTEST} fills no tile")
        for op in self.others:
            if self.behind[op.operands[0]] & set(self.others):
                raise NoText("it sums what is made of a sum of the product's result")
            if not self.behind[op.operands[0]] & set(self.dots):
                raise NoText("it has a sum beside the product that is not one of its result")
            if frozenset(op.attributes["dims"]) & self.groups["k"]:
                raise NoText("it sums its result along the dimension that the product sums over")
        result = frozenset().union(*(self.groups[n] for n in "zmn"))
        if any(self.reach(op) != result for op in self.stores):
            raise NoText("an output does not lie along the rows and columns of the product")
        if any(op not in self.stored_with(0) + self.stored_with(1) for op in self.early):
            raise NoText("an output lies along a part of a factor")
        if self.beside and self.groups["z"]:
            raise NoText("it sums a factor up beside products of several batches")
        for op in self.aside:
            sides = {"mn"[self.summed_factor(r)] for r in self.behind[op.operands[0]] & set(self.beside)}  # type: ignore[index]
            if self.behind[op.operands[0]] - set(self.beside) or [*sides] != [*self.kept(op)]:
                raise NoText("an output is made of sums of a factor and of something else")
        if self.early and self.rows is not None:
            raise NoText("it stores a factor that is walked by rows of windows")
        if self.parts > 1:
            self.check_parts()
        for op in self.walk.ops:
            for r in {r for v in op.operands for r in self.behind.get(v, ()) if r in self.others and r is not op}:
                if self.reach(op) & frozenset(r.attributes["dims"]):
                    raise NoText("a sum of the result is used for elements of it")
        for op in self.after:
            for s in self.sums:
                if s.op in self.behind[op.operands[0]] and s.kept not in ((), self.kept(op)):
                    raise NoText("an output lies along other dimensions than the sum it is made of")

    def check_parts(self) -> None:
        """Says what no tile of several places can do."""
        columns = self.factors[1].op
        assert columns is not None
        there = math.prod(columns.operands[0].type.shape)
        if there < math.prod(self.size[n] for n in "zkn") * self.parts:
            raise NoText("it would compute elements of its product several times")
        if self.stored_with(1):
            raise NoText("it stores columns that its product is read at several places of")

    def reach(self, op: Op) -> frozenset[int]:
        """The dimensions an op changes along."""
        if op in self.walk.accesses:
            dims = self.walk.access_dims(self.walk.accesses[op])
            return dims if op.results else dims | self.walk.dims_of[op.operands[0]]
        return self.walk.dims_of[op.results[0]]

    def kept(self, store: Op) -> tuple[str, ...]:
        """The axes that an output made of sums lies along."""
        return tuple(n for n in ("z", "m", "n") if self.groups[n] & self.reach(store))

    def sums_behind(self, op: Op) -> frozenset[Op]:
        """The reductions that what an op takes is made of."""
        return frozenset().union(*(self.behind.get(v, frozenset()) for v in op.operands))

    def stored_with(self, number: int) -> list[Op]:
        """The outputs that lie as one of the factors does."""
        own = frozenset().union(*(self.groups[n] for n in ("z", "mn"[number], "k")))
        return [op for op in self.early if self.reach(op) == own]

    def plain(self, factor: Value) -> bool:
        """Whether a factor is a tensor as it lies in memory, which nothing else is computed from on the way."""
        stored = self.makers(op.operands[0] for op in self.early)
        return factor.op is not None and factor.op.definition is Load and factor.op not in stored

    def makers(self, values: Iterable[Value], span: Span | None = None) -> list[Op]:
        """The ops that some numbers are made of, up to the product, or in a stretch of what it sums."""
        found: set[Op | None] = {*self.dots}
        todo = [v.op for v in values]
        while todo:
            op = todo.pop()
            if op is not None and op not in found:
                found.add(op)
                todo += [v.op for v in (op.operands if span is None else span.taken(self.walk, op))]
        return [op for op in self.walk.ops if op in found and op not in self.dots]

    @cached_property
    def joints(self) -> list[int]:
        """Where what is summed goes over from one of several tensors side by side to the next; none where rounds do not
        end there."""
        dims = self.dims["k"]
        if len(dims) != 1 or len(dims[0].parts) != 1 or self.early or self.rows is not None or self.parts > 1:
            return []
        whole = Span(dims[0].parts[0], 0, dims[0].size)
        found = {whole.border(self.walk, op) for op in self.makers(self.factors)}
        joints = sorted(b for b in found if b is not None and 0 < b < dims[0].size)
        return [] if any(end % ROUNDS[-1] for end in (*joints, dims[0].size)) else joints

    @property
    def stretches(self) -> list[Span]:
        """What is summed, cut at the joints."""
        if not self.joints:
            return []
        (dim,) = self.dims["k"]
        return [Span(dim.parts[0], *pair) for pair in itertools.pairwise([0, *self.joints, dim.size])]

    def spans(self, tile: Tile) -> Sequence[Span | None]:
        """The stretches that a tile walks one after the other; None: all at once."""
        whole = tile.split > 1 or any(joint % tile.k for joint in self.joints)
        return [None] if whole or not self.joints else self.stretches

    @property
    def stays(self) -> bool:
        """Whether a program may stay for many tiles of rows.

        Not where the sum goes over windows: such programs, with hundreds of loads under conditions of their own, were
        wrong or left their image as Triton 3.6 compiles them for sm_90, where the others of the same text were right.
        By rows of windows loads are few.
        """
        alone = (
            not self.groups["z"]
            and not self.beside
            and not self.meets
            and self.parts == 1
            and (self.rows is not None or len(self.groups["k"]) == 1)
        )
        return alone and all(s.kept in ((), ("n",)) and self.adds(s.op) for s in self.sums)

    @property
    def meets(self) -> bool:
        """Whether the first of the dimensions of rows counts results that are added up, each a step behind the last."""
        return self.rows is not None and self.rows.meet

    def tiles(self) -> list[Tile]:
        """The configurations worth timing."""
        loaded = []
        for name, factor in zip("mn", self.factors, strict=True):
            sides = self.groups[name], self.groups["k"]
            each = []
            for span in (*self.stretches,) or (None,):
                loads = [op for op in self.makers([factor], span) if op.definition is Load]
                wide = [op for op in loads if all(self.reach(op) & own for own in sides)]
                each.append(sum(op.operands[0].type.element.bits // 8 for op in wide))
            loaded.append(max(each))
        after = self.makers(op.operands[0] for op in (*self.stores, *self.others))
        wide = [op for op in after if len(self.kept(op)) > 1 and not self.holds_bits(op)]
        found = choices(
            Demand(
                **(self.size | {"n": self.size["n"] * self.parts}),
                bytes=self.factors[0].type.bits // 8,
                plain=(self.plain(self.factors[0]), self.plain(self.factors[1])),
                loaded=(loaded[0], loaded[1]),
                around=(len([op for op in wide if op.definition is Load]) + len(self.stores)) // self.parts,
                beside=sum(op.operands[0].type.element.bits // 8 for op in wide if op.definition is Load) // self.parts,
                written=max(op.operands[1].type.element.bits // 8 for op in self.stores) if self.stores else 0,
                after=len([op for op in wide if op.definition is not Load]) + len(self.sums),
                splits=self.parts == 1 and all(not s.kept for s in self.sums) and not (self.sums and self.meets),
                stays=self.stays,
                run=self.dims["k"][-1].size if self.rows is not None and self.stays else 0,
                meets=self.meets,
                stored=(bool(self.stored_with(0)), bool(self.stored_with(1))),
                parts=self.parts,
                joints=tuple(self.joints),
                sums=any(map(self.sums_columns, self.sums)),
                slow=any(op.attributes.get("fn") in SLOW for op in self.makers(self.factors)),
                in_order=self.packs and any(map(self.holds_bits, self.stores)),
            )
        )
        return [tile for tile in found if self.fills_bytes(tile)]

    def holds_bits(self, op: Op) -> bool:
        """Whether an op reads or writes truth values of which 32 take four bytes."""
        return op in self.walk.accesses and self.walk.accesses[op].bits

    def fills_bytes(self, tile: Tile) -> bool:
        """Whether no byte of bits that a tile writes is another's as well."""
        early, late = (any(map(self.holds_bits, ops)) for ops in (self.early, self.stores))
        return not (early and tile.k % GROUP) and not (late and tile.n // self.parts // tile.pieces % GROUP)

    def sums_columns(self, own: Sum) -> bool:
        """Whether a sum is one of columns."""
        return "n" in own.kept and "m" not in own.kept and self.parts == 1 and self.adds(own.op)

    @property
    def packs(self) -> bool:
        """Whether all that is read along rows beside sums of tensor cores is so in tiles, and no bits are."""
        read = [self.read_type(op) for op in self.beside_rows]
        tensor_cores = self.parts == 1 and str(self.factors[0].type) != "f32"
        return tensor_cores and all(read) and "tl.int1" not in read

    @cached_property
    def beside_rows(self) -> list[Op]:
        """What is read along rows, for what follows the product."""
        made = self.makers(op.operands[0] for op in (*self.stores, *self.others))
        return [op for op in made if op.definition is Load and self.reach(op) & self.groups["m"]]

    def read_type(self, op: Op) -> str:
        """The type in which a tile of something is read beside the product; "" where it is not read as a tile."""
        access = self.walk.accesses[op]
        if access.guards or access.numbers or not self.reach(op) & self.groups["n"]:
            return ""
        return "tl.int1" if access.bits else FACTORS.get(str(op.operands[0].type.element), "")

    def stored_type(self, op: Op) -> str:
        """The type in which a whole tile of something is stored; "" where it goes piece by piece."""
        bits = self.walk.accesses[op].bits
        return "tl.int1" if bits else FACTORS.get(str(op.operands[1].type.element), "")

    def adds(self, op: Op) -> bool:
        return op.attributes["kind"] == "sum" and op.attributes["dtype"] is F32

    def generate(self, tile: Tile):
        """The source for one configuration."""
        from .contraction_text import generate

        if tile not in self.texts:
            self.texts[tile] = generate(self, tile)
        return self.texts[tile]


product_of = Latest(Contraction)
