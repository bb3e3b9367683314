"""A region as one matrix product of 16-bit numbers with what follows it, and the text of what follows.

Tensors along rows and columns must lie by rows, 16-bit and aligned, since they are copied as tiles; vectors along one
of them and single numbers may be of any float type. Truth values may be bits (`step/bits.py`), in the order in which
tensor cores have columns: a thread reads and writes those of its own. Sums over all rows or columns leave one partial
sum per tile (per warpgroup where all tiles lie one below another), which a second kernel adds up in a fixed order. A
factor that lies along the result may be summed up while it is there. The first factor may be several tensors side by
side along what is summed, each read where it lies.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ...dialects.loop import Apply, Constant, Load
from ...dialects.step.bits import BYTE, GROUP
from ...ir.builtin import add_function, finish_function, module
from ...ir.core import Op, Value
from ...transforms.loops import NotLoops, lowered
from ..kernels import Spec
from ..triton.contraction import Contraction, Span
from ..triton.scalars import NoText
from ..triton.walk import Access
from .scalars import Number, apply, literal

if TYPE_CHECKING:
    from ..providers import Region

#: shared memory of a block; a tile of a factor, a piece of 64 columns of a tile of results
SHARED, STAGE, SLOT = 227 * 1024, 128 * 64 * 2, 128 * 64 * 2
ROWS, COLUMNS, SUMMED, PIECE = 128, 128, 64, 64
#: stages below which tensor cores wait for memory, and more than which nothing is gained
FEWEST, ENOUGH = 3, 6
#: blocks that run at once on the largest Hopper GPU that there is
BLOCKS = 132
#: sums and tensors of each kind that fit into registers
MOST = 4
NAMES = {torch.bfloat16: "bf16", torch.float16: "f16", torch.float32: "f32"}
SOURCE = Path(__file__).with_name("product.cu")
#: columns of a stretch that is turned with its neighbour: half a head
TURNS = (32, 64)
#: numbers below this one are exact in f32
EXACT = 1 << 24
#: bytes that rows begin at multiples of
ALIGNMENT = 16


@dataclass(frozen=True, slots=True)
class Matrix:
    """A tensor of the region as a matrix: which it is, where it begins in elements, and from one row to the next."""

    argument: int
    begin: int
    stride: int
    rows: int
    columns: int


@dataclass(frozen=True, slots=True)
class Vector:
    """What lies along columns or rows, or is one number."""

    argument: int
    begin: int
    stride: int
    type: str


@dataclass(frozen=True, slots=True)
class Shape:
    """How much of a block's memory goes where: stages of factors, pieces that are read ahead, places of results.
    stays: whether the second factor is fetched once, and stages are of the first."""

    stages: int
    ahead: int
    depth: int
    group: int = 8
    stays: bool = False

    def __str__(self) -> str:
        return f"s{self.stages} a{self.ahead} g{self.group}{' stays' if self.stays else ''}"


class Product:
    """A loop kernel seen as such a product. places: where its tensors are among those of its region."""

    #: whether the rows of its first factor are windows of an image (`windows.py`), and in how many kinds rows come that
    #: have tiles of their own
    windowed, parities = False, 1

    def __init__(self, function: Op, specs: Sequence[Spec], places: Sequence[Place]):
        self.specs, self.places = tuple(specs), tuple(places)
        self.product = Contraction(function, specs)
        self.walk = self.product.walk
        self.check()
        self.vectors: list[Vector] = []
        self.heights: list[Vector] = []
        self.tables: list[Vector] = []
        self.reads: list[Matrix] = []
        self.read_types: list[str] = []
        self.masks: list[Matrix] = []
        self.lines: list[str] = []
        self.endings: dict[str, list[str]] = {"n": [], "m": []}
        self.numbers: dict[Value, Number] = {}
        self.write()

    # ---- what it is --------------------------------------------------------------------------------------------------

    def check(self) -> None:
        p = self.product
        self.turn = self.stretch()
        if p.groups["z"] or len(p.dims["k"]) != 1 or (len(p.dims["n"]) != 1 and not self.turn):
            raise NoText("its factors are no matrices as they lie")
        if p.early or p.rows is not None:
            raise NoText("a factor is computed on the way")
        if str(p.factors[0].type) not in ("bf16", "f16"):
            raise NoText("its factors are no 16-bit numbers")
        if p.parts > 2:
            raise NoText("it reads its result at more than two places")
        if not p.stores:
            raise NoText("it writes nothing of its result")
        for own in p.sums:
            if own.kept not in (("n",), ("m",)) or own.columns != 1 or not p.adds(own.op) or p.parts > 1:
                raise NoText("it has other sums than those over all rows or all columns")
        self.m, self.n, self.k = (p.size[name] for name in "mnk")
        self.n *= 2 if self.turn else 1
        beside = [self.factor(load, "m", span) for load, span in self.side_by_side()]
        self.sides, self.along_a = [matrix for matrix, _ in beside], beside[0][1]
        if any(along != self.along_a for _, along in beside):
            raise NoText("tensors side by side lie along different dimensions")
        self.b, self.along_b = self.factor(self.load_of(p.factors[1]), "n")
        apart = 1 if self.along_b else self.b.stride
        if any(x % apart for x in p.apart):
            raise NoText("the places that its result is read at do not begin with a column")
        self.begins = [x // apart for x in p.apart]
        if self.turn and (self.begins != [0, self.turn] or self.m % ROWS or self.n % COLUMNS):
            raise NoText("the halves that it turns are no stretches of whole tiles")
        self.begins = self.begins[: self.parts]
        self.aside = self.summed_factor()
        if self.parts > 1:  # both are columns of one tensor
            self.b = Matrix(self.b.argument, self.b.begin, self.b.stride, *self.whole_b())

    def stretch(self) -> int:
        """The columns of a stretch, where the result is read at two that are neighbours; 0 where it is not."""
        columns = self.product.dims["n"]
        return columns[1].size if self.product.parts == 2 and len(columns) == 2 and columns[1].size in TURNS else 0

    @property
    def parts(self) -> int:
        """The columns of a tile come from so many places."""
        return 1 if self.turn else self.product.parts

    def whole_b(self) -> tuple[int, int]:
        wide = self.begins[-1] + self.n
        return (self.k, wide) if self.along_b else (wide, self.k)

    def summed_factor(self) -> int:
        """Which factor is summed up beside the product: none, the first or the second."""
        found = {self.product.summed_factor(op) for op in self.product.beside}
        if not found:
            return 0
        (number,) = found if len(self.product.beside) == 1 else (None,)
        if number is None or self.product.parts > 1 or not (self.along_a, self.along_b)[number]:
            raise NoText("several sums stand beside the product, or one of a factor that lies along what is summed")
        return number + 1

    def step(self, access: Access, name: str) -> int:
        """Elements from one point of an axis to the next."""
        *outer, last = self.product.dims[name]
        step = access.offset.terms[last.parts[-1]]
        size = last.size * (2 if self.turn and name == "n" else 1)
        for dim in reversed(outer):
            if access.offset.terms[dim.parts[-1]] != size * step:
                raise NoText("rows or columns of a tensor do not lie at equal distances")
            size *= dim.size
        return step

    def place(self, access: Access) -> str:
        """Where a tensor is looked up at a row and column, in elements."""
        found = [str(access.offset.constant)]
        for name, at in (("m", "up"), ("n", "at")):
            inner = 1
            for dim in reversed(self.product.dims[name]):
                step = access.offset.terms[dim.parts[-1]]
                if step:
                    found.append(f"(u32){at} / {inner}u % {dim.size}u * {step}")
                inner *= dim.size * (2 if self.turn and name == "n" and inner == 1 else 1)
        return " + ".join(found)

    @property
    def a(self) -> Matrix:
        """The first factor; of tensors side by side the first of them."""
        return self.sides[0]

    def side_by_side(self) -> list[tuple[Op, Span | None]]:
        """The tensor that the first factor is, or those that it consists of, each with its stretch of the sum."""
        (factor, _), spans = self.product.factors, self.product.stretches
        if any(joint % SUMMED for joint in self.product.joints) or len(spans) > MOST:
            raise NoText("tensors side by side are too many, or meet within what is summed at once")
        return [(self.load_of(factor, span), span) for span in spans] or [(self.load_of(factor), None)]

    def load_of(self, factor: Value, span: Span | None = None) -> Op:
        """What loads a factor, in a stretch of what is summed."""
        op = factor.op
        while span is not None and op is not None and len(taken := span.taken(self.walk, op)) < len(op.operands):
            op = taken[0].op
        if op is None or op.definition is not Load:
            raise NoText("a factor is computed on the way")
        return op

    def factor(self, load: Op, side: str, span: Span | None = None) -> tuple[Matrix, bool]:
        """A factor as a matrix, or what a stretch of it is, and whether it lies along rows or columns of the result."""
        access = self.walk.accesses[load]
        if access.numbers or any(span is None or not span.holds(guard) for guard in access.guards):
            raise NoText("a factor is looked up, or ends before its tile")
        own, summed = self.step(access, side), self.step(access, "k")
        size = self.n if side == "n" else self.m
        first, end = (0, self.k) if span is None else (span.first, span.end)
        begin = access.offset.constant + first * summed
        if summed == 1:
            return self.aligned(Matrix(access.argument, begin, own, size, end - first)), False
        if own == 1:
            return self.aligned(Matrix(access.argument, begin, summed, end - first, size)), True
        raise NoText("a factor lies neither along what is summed nor along the result")

    def aligned(self, matrix: Matrix) -> Matrix:
        item = self.specs[matrix.argument].dtype.itemsize
        if matrix.stride * item % ALIGNMENT or matrix.begin * item % ALIGNMENT or matrix.stride < matrix.columns:
            raise NoText("rows of a tensor do not begin at multiples of 16 bytes")
        if self.specs[matrix.argument].dtype not in (torch.bfloat16, torch.float16):
            raise NoText("a tensor beside the product holds no 16-bit numbers")
        return matrix

    def beside(self, access: Access) -> Matrix:
        """A tensor along rows and columns."""
        if access.guards or access.numbers or self.step(access, "n") != 1:
            raise NoText("a tensor beside the product does not lie by rows")
        stride = self.step(access, "m")
        return self.aligned(Matrix(access.argument, access.offset.constant, stride, self.m, self.n))

    def bits(self, access: Access) -> Matrix:
        """Truth values along rows and columns, as bytes."""
        if self.product.parts > 1 or access.guards or access.numbers or self.step(access, "n") != 1:
            raise NoText("bits do not lie by rows")
        begin, stride = access.offset.constant, self.step(access, "m")
        if begin % GROUP or stride % GROUP or self.n % GROUP:
            raise NoText("bits of a row do not begin with a group of them")
        return Matrix(access.argument, begin // BYTE, stride // BYTE, self.m, self.n // BYTE)

    # ---- what follows ------------------------------------------------------------------------------------------------

    def write(self) -> None:
        p = self.product
        made = {op.results[0]: Number(f"v[{number}]") for number, op in enumerate(p.dots)}
        sums = {side: [s.op for s in p.sums if s.kept == (side,)] for side in "nm"}
        self.sums, self.crossed = len(sums["n"]), len(sums["m"])
        bits = [op for op in p.stores if self.walk.accesses[op].bits]
        stores = self.pairs([op for op in p.stores if op not in bits])
        self.writes = [self.beside(self.walk.accesses[both[0]]) for both in stores]
        self.packed = [self.bits(self.walk.accesses[op]) for op in bits]
        for part in range(2 if self.turn else 1):  # what only one of two stretches needs is not computed for the other
            given = {"y": [both[part] for both in stores], "s": sums["n"], "a": sums["m"]}
            self.numbers = dict(made)
            if self.turn:
                self.lines.append("} else {" if part else "if (!upper) {")
            for op in self.behind([*(op for ops in given.values() for op in ops), *bits], p.dots):
                self.define(op, self.lines)
            for name, ops in given.items():
                self.lines += [f"{name}[{i}] = {self.numbers[op.operands[0]].number};" for i, op in enumerate(ops)]
            self.lines += [f"t[{i}] = {self.numbers[op.operands[0]].condition};" for i, op in enumerate(bits)]
        self.lines += ["}"] if self.turn else []
        self.write_types = [NAMES[self.specs[m.argument].dtype] for m in self.writes]
        vectors = (self.vectors, self.heights, self.tables)
        matrices = (self.reads, self.writes, self.masks, self.packed)
        most = max(self.sums, self.crossed, *map(len, vectors), *map(len, matrices))
        self.ends: list[Vector] = []
        for side, lines in self.endings.items():
            after = [op for op in p.after if p.behind[op.operands[0]] & set(sums[side])]
            self.finish(after, sums[side], side, lines)
        self.asides: list[str] = []
        self.finish(p.aside, p.beside, "mn"[self.aside - 1], self.asides)
        if most > MOST:
            raise NoText("it has more tensors beside the product than fit")
        if self.shape() is None:
            raise NoText("what is read and written beside the product leaves no room for its factors")

    def pairs(self, stores: Sequence[Op]) -> list[tuple[Op, ...]]:
        """The stores of each result: one, or those of both stretches."""
        if not stores:
            raise NoText("it writes nothing of its result but bits")
        if not self.turn:
            return [(op,) for op in stores]
        place = {op: (a.argument, a.offset.constant) for op in stores for a in (self.walk.accesses[op],)}
        lower = [op for op in stores if (place[op][0], place[op][1] - self.turn) not in place.values()]
        found = [(op, *(o for o in stores if place[o] == (place[op][0], place[op][1] + self.turn))) for op in lower]
        if len(stores) != 2 * len(lower) or any(len(both) != 2 for both in found):
            raise NoText("it stores one of the stretches alone")
        return found

    def finish(self, stores: Sequence[Op], sums: Sequence[Op], side: str, lines: list[str]) -> None:
        """What is made of finished sums that lie along rows or columns."""
        self.numbers = {op.results[0]: Number(f"s[{i}]") for i, op in enumerate(sums)}
        for op in self.behind(stores, sums):
            self.define(op, lines, ending=side)
        for op in stores:
            self.end(op, side, lines)

    def end(self, op: Op, side: str, lines: list[str]) -> None:
        """Writes what is made of finished sums to a vector along rows or columns."""
        access = self.walk.accesses[op]
        if access.guards or access.numbers or self.walk.access_dims(access) - self.product.groups[side]:
            raise NoText("a finished sum is written along other dimensions than those it was made for")
        dtype = self.specs[access.argument].dtype
        if dtype not in NAMES:
            raise NoText("a finished sum is written as no float")
        self.ends.append(Vector(access.argument, access.offset.constant, self.step(access, side), NAMES[dtype]))
        text = self.numbers[op.operands[0]].number
        lines.append(f"{stored(self.ends[-1], f'args.end[{len(self.ends) - 1}]', text)};")

    def behind(self, stores: Sequence[Op], known: Sequence[Op]) -> list[Op]:
        """The ops that some outputs are made of, from what is known on."""
        found: set[Op] = set()
        todo = [op.operands[0].op for op in stores]
        while todo:
            op = todo.pop()
            if op is not None and op not in found and op not in known:
                found.add(op)
                todo += [v.op for v in op.operands]
        return [op for op in self.walk.ops if op in found]

    def define(self, op: Op, lines: list[str], ending: str = "") -> None:
        """Writes an op. ending: the side that finished sums lie along, where it is made of them."""
        if op.definition is Constant:
            value = float(op.attributes["value"])
            self.numbers[op.results[0]] = Number(literal(value), value=value)
            return
        if op.definition is Load:
            self.numbers[op.results[0]] = self.load(op, ending)
            return
        if op.results[0] in self.walk.forms:
            self.numbers[op.results[0]] = Number(self.counted(op.results[0], ending))
            return
        if op.definition is not Apply:
            raise NoText(f"{op.name} is not computed around this product")
        args = [self.numbers[v] for v in op.operands]
        made = apply(op.attributes["fn"], args, op.attributes["dtype"], self.walk.beside_one(op.results[0]))
        if made.value is None:
            name = f"{'e' if ending else 'c'}{len(lines)}"
            lines.append(f"const {'bool' if made.truth else 'float'} {name} = {made.text};")
            made = Number(name, made.truth)
        self.numbers[op.results[0]] = made

    def counted(self, value: Value, ending: str) -> str:
        """The number of a column, as f32 has it."""
        form, (columns,) = self.walk.forms[value], self.product.dims["n"]
        if ending == "m" or not form.dims <= frozenset(columns.parts[-1:]) or self.n >= EXACT:
            raise NoText("it counts along something else than columns")
        return f"(float)(at * {form.terms[columns.parts[-1]]} + {form.constant})"

    def load(self, op: Op, ending: str) -> Number:
        access, p = self.walk.accesses[op], self.product
        dims = self.walk.access_dims(access)
        spec = self.specs[access.argument]
        if access.bits and not ending:
            mask = self.bits(access)
            if mask not in self.masks:
                self.masks.append(mask)
            return Number(f"k[{self.masks.index(mask)}]", truth=True)
        if access.guards or access.numbers or spec.dtype not in NAMES:
            raise NoText("a tensor beside the product is looked up, or holds no floats")
        if not ending and not self.ragged and dims and (self.turn or not self.along(access)):
            table = Vector(access.argument, 0, 1, NAMES[spec.dtype])
            if table not in self.tables:
                self.tables.append(table)
            number = self.tables.index(table)
            return Number(f"looked_up_{table.type}(args.table[{number}], {self.place(access)})")
        if dims and dims <= p.groups["m"] and ending != "n":
            high = Vector(access.argument, access.offset.constant, self.step(access, "m"), NAMES[spec.dtype])
            if high not in self.heights:
                self.heights.append(high)
            number = self.heights.index(high)
            return Number(loaded(high, f"args.row[{number}]", "at") if ending else f"r[{number}]")
        if dims <= p.groups["n"] and (not dims or ending != "m"):
            own = Vector(
                access.argument, access.offset.constant, self.step(access, "n") if dims else 0, NAMES[spec.dtype]
            )
            if own.stride > 1 or own.begin * spec.dtype.itemsize % ALIGNMENT:
                raise NoText("a vector does not lie along columns")
            if own not in self.vectors:
                self.vectors.append(own)
            number = self.vectors.index(own)
            return Number(loaded(own, f"args.vec[{number}]", "at") if ending else f"b[{number}]")
        if ending or not dims <= p.groups["m"] | p.groups["n"] or not dims & p.groups["n"]:
            raise NoText("a tensor beside the product lies along other dimensions than rows and columns")
        matrix = self.beside(access)
        if matrix not in self.reads:
            self.reads.append(matrix)
            self.read_types.append(NAMES[spec.dtype])
        return Number(f"x[{self.reads.index(matrix)}]")

    def along(self, access: Access) -> bool:
        """Whether a tensor has the rows and columns of the product, or one of both."""
        try:
            for name in "mn":
                self.step(access, name)
        except NoText:
            return False
        return True

    # ---- how much of it fits -----------------------------------------------------------------------------------------

    @property
    def columns(self) -> int:
        """Of a tile."""
        return COLUMNS

    @property
    def pieces(self) -> int:
        return self.columns // self.parts // PIECE

    def bytes(self, shape: Shape) -> int:
        """Shared memory of a block."""
        own = max(0, len(self.writes) - len(self.reads))
        slots = 2 * (len(self.reads) * shape.ahead + own * shape.depth) * SLOT
        return self.factors(shape) + slots + 2 * self.sums * 1024 + 16 * shape.stages + 24

    def factors(self, shape: Shape) -> int:
        """Shared memory for tiles of factors."""
        return shape.stages * STAGE * (ROWS + self.columns) // ROWS

    def shape(self, stays: bool = False) -> Shape | None:
        """As many stages as fit, with all read ahead that may be; None where there are too few."""
        for ahead in range(self.pieces, 0, -1):
            for stages in range(ENOUGH, FEWEST, -1):
                shape = Shape(stages, ahead, 1, stays=stays)
                if self.bytes(shape) <= SHARED:
                    return shape
        shape = Shape(FEWEST, 1, 1, stays=stays)
        return shape if self.bytes(shape) <= SHARED else None

    @property
    def high(self) -> int:
        """Rows of tiles."""
        return self.parities * -(-self.m // self.parities // ROWS)

    @property
    def tiles(self) -> int:
        return self.high * -(-self.n // (self.columns // self.parts))

    @property
    def narrow(self) -> bool:
        """Whether there are sums over rows and one column of tiles: then a warpgroup adds up from tile to tile."""
        return self.sums > 0 and self.n <= self.columns // self.parts

    def partials(self, blocks: int = BLOCKS) -> int:
        """Partial sums of each column, where so many blocks run."""
        return 2 * min(blocks, self.tiles) if self.narrow else self.high

    @property
    def ragged(self) -> bool:
        return bool(self.m // self.parities % ROWS or self.n % (self.columns // self.parts))

    @property
    def scratch(self) -> tuple[Spec, ...]:
        rows, columns = self.high, -(-self.n // (self.columns // self.parts))
        shapes: list[tuple[int, ...]] = [(self.partials(), self.n)] * self.sums
        shapes += [(), (columns, self.m), (rows, self.n)][self.aside : self.aside + 1]
        shapes += [(columns, self.m)] * self.crossed
        return tuple(Spec(s, (s[1], 1), torch.float32) for s in shapes if s)

    # ---- text --------------------------------------------------------------------------------------------------------

    def source(self, shape: Shape) -> str:
        """The kernel; sizes are given when it is launched, so that products that differ in them alone are one."""
        given = {
            "NIN": len(self.reads),
            "NOUT": len(self.writes),
            "NVEC": len(self.vectors),
            "NROW": len(self.heights),
            "NTABLE": len(self.tables),
            "NMASK": len(self.masks),
            "NPACKED": len(self.packed),
            "NSUM": self.sums,
            "NACROSS": self.crossed,
            "NEND": len(self.ends),
            "SIDES": len(self.sides),
            "PARTS": self.parts,
            "TURN": self.turn,
            "ALONG_A": int(self.along_a),
            "ALONG_B": int(self.along_b),
            "RAGGED": int(self.ragged),
            "WINDOW": int(self.windowed),
            "PARITIES": self.parities,
            "BN": self.columns,
            "NARROW": int(self.narrow),
            "STAYS": int(shape.stays),
            "ASIDE": self.aside,
            "STAGES": shape.stages,
            "AHEAD": shape.ahead,
            "DEPTH": shape.depth,
            "FACTOR": f'"{self.product.factors[0].type}"',
            "FACTOR_LOW": f"{self.product.factors[0].type}_low",
            "FACTOR_HIGH": f"{self.product.factors[0].type}_high",
        }
        head = "".join(f"#define {name} {value}\n" for name, value in given.items())
        return head + SOURCE.read_text().replace("//GENERATED\n", self.generated)

    @cached_property
    def generated(self) -> str:
        """The functions that `product.cu` calls."""
        vectors = [f"pair_of_{v.type}(args.vec[{i}], x, {self.inside}, {v.stride}, known[{i}] + at);"
                   for i, v in enumerate(self.vectors)]  # fmt: skip
        heights = [f"known[{i}][t] = {loaded(v, f'args.row[{i}]', 'at')};" for i, v in enumerate(self.heights)]
        if heights:  # a thread has rows y, y + 8, y + 64 and y + 72 of a tile
            at = "y + t / 2 * 64 + t % 2 * 8"
            at = f"{at} < args.m ? {at} : 0" if self.ragged else at
            heights = ["#pragma unroll", "for (int t = 0; t < 4; ++t) {", f"const int at = {at};", *heights, "}"]
        unpack = [f"x[{i}] = e ? {t}_high(in[{i}][q]) : {t}_low(in[{i}][q]);" for i, t in enumerate(self.read_types)]
        pack = [f"out[{i}][q] = {t}_pair(one[{i}], other[{i}]);" for i, t in enumerate(self.write_types)]
        return PAIRS + "\n".join(
            (
                function("vectors", "const Args& args, int x, float (&known)[NVEC + 1][4], int at", vectors),
                function("unpack", "const u32 (&in)[NIN + 1][4], int q, int e, float (&x)[NIN + 1]", unpack),
                function("pack", "const float* one, const float* other, u32 (&out)[NOUT + 1][4], int q", pack),
                function("heights", "const Args& args, int y, float (&known)[NROW + 1][4]", heights),
                function("around", AROUND, self.lines),
                function("ending", FINISHED, self.endings["n"]),
                function("crossing", FINISHED, self.endings["m"]),
                function("aside", FINISHED, self.asides),
            )
        )

    @property
    def inside(self) -> str:
        return "x < args.n" if self.ragged else "true"


#: v: the sums, x: tensors beside, b: vectors along columns, r: along rows, k: truth values beside, up and at: row and
#: column, upper: whether it is the second of two stretches; y: results, s: summands of sums over rows, a: over columns,
#: t: truth values that are kept
AROUND = (
    "const Args& args, const float* v, const float* x, const float* b, const float* r, const bool* k, int up, int at, "
    "bool upper, float* y, float* s, float* a, bool* t"
)
FINISHED = "const Args& args, int at, const float* s"
#: two neighbours of a vector, or one number twice
PAIRS = """
__device__ __forceinline__ void pair_of_f32(const void* from, int x, bool inside, int stride, float* to) {
    const float* p = (const float*)from + (inside ? x * stride : 0);
    to[0] = p[0], to[1] = p[stride];
}
__device__ __forceinline__ void pair_of_bf16(const void* from, int x, bool inside, int stride, float* to) {
    const u16* p = (const u16*)from + (inside ? x * stride : 0);
    const u32 pair = stride ? *(const u32*)p : p[0] * 0x10001u;
    to[0] = bf16_low(pair), to[1] = bf16_high(pair);
}
__device__ __forceinline__ void pair_of_f16(const void* from, int x, bool inside, int stride, float* to) {
    const u16* p = (const u16*)from + (inside ? x * stride : 0);
    const u32 pair = stride ? *(const u32*)p : p[0] * 0x10001u;
    to[0] = f16_low(pair), to[1] = f16_high(pair);
}
"""


def function(name: str, arguments: str, lines: Iterable[str]) -> str:
    body = "".join(f"    {line}\n" for line in lines)
    return f"__device__ __forceinline__ void {name}({arguments}) {{\n{body}}}\n"


def loaded(vector: Vector, pointer: str, index: str) -> str:
    """One number of a vector."""
    at = f"[(u64){index} * {vector.stride}]" if vector.stride else "[0]"
    if vector.type == "f32":
        return f"((const float*){pointer}){at}"
    return f"{vector.type}_low(((const u16*){pointer}){at})"


def stored(vector: Vector, pointer: str, text: str) -> str:
    at = f"[at * {vector.stride}]"
    if vector.type == "f32":
        return f"((float*){pointer}){at} = {text}"
    return f"((u16*){pointer}){at} = (u16){vector.type}_pair({text}, 0.0f)"


def product_of(region: Region) -> Product:
    """The product that a region is; NoText where it is none that this kernel does."""
    if region.parts or not any(op.name == "step.contract" for op in region.ops):
        raise NoText("it is no product")
    body, places = in_halves(region)
    whole = body is region.body
    try:
        kernel = region.kernel if whole and region.kernel is not None else lowered(body)
    except NotLoops as error:
        raise NoText(str(error)) from error
    return Product(kernel, [p.spec for p in places], places)


@dataclass(frozen=True, slots=True)
class Place:
    """A tensor of a kernel as a part of a tensor of its region."""

    spec: Spec
    argument: int
    begin: int = 0


def in_halves(region: Region) -> tuple[Op, list[Place]]:
    """A region with its product as two results where all else reads the halves of its columns, such as the gate and
    the other factor of a gated layer: then both are made at the same points. The region itself where that is not so."""
    places = [Place(spec, i) for i, spec in enumerate(region.specs)]
    block = region.body.regions[0].block
    assert block.last is not None
    results, first = list(block.last.operands), len(region.operands)
    for number, value in enumerate(results):
        halves = halves_of(value)
        spec = region.results[number]
        if not halves or spec.strides[-1] != 1:
            continue
        function = add_function(module(), "halves", [a.type for a in block.arguments])
        mapping = dict(zip(block.arguments, function.regions[0].block.arguments, strict=True))
        for op in region.ops:
            copy = op.clone(mapping)
            function.regions[0].block.append(copy)
            mapping.update(zip(op.results, copy.results, strict=True))
        given = [*results[:number], *halves, *results[number + 1 :]]
        finish_function(function, [mapping[v] for v in given])
        wide = spec.shape[-1] // 2
        half = Spec((*spec.shape[:-1], wide), spec.strides, spec.dtype)
        own = [Place(half, first + number), Place(half, first + number, wide)]
        return function, [*places[: first + number], *own, *places[first + number + 1 :]]
    return region.body, places


def halves_of(value: Value) -> list[Value]:
    """The two halves of a product's columns, where it has no other readers than these and who gives it away."""
    if value.op is None or value.op.name != "step.contract":
        return []
    readers = [u for u in dict.fromkeys(value.uses) if not u.definition.terminator]
    last, size = value.type.rank - 1, value.type.shape[-1]
    if len(readers) != 2 or any(u.name != "step.slice" or u.dim != last or u.stride != 1 for u in readers):
        return []
    readers.sort(key=lambda u: u.start)
    if [(u.start, u.end) for u in readers] != [(0, size // 2), (size // 2, size)] or size % 2:
        return []
    return [u.results[0] for u in readers]
