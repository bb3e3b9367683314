"""Writes a matrix product with its surroundings as Triton functions.

The first function walks tiles of the summed dimension with `tl.dot` and then writes the tile of results. Sums of the
result leave one partial sum per tile, which further functions add up in a fixed order. Where the summed dimension is
split over programs, a second function adds up the parts, writes the results and sums them up. Where it is short, a
program may stay for many tiles of rows: it reads the next ones meanwhile, and keeps the second factor and its sums.
Sums of a factor are taken in the same walk, and finished as those of the result are. Outputs that lie as a factor
does are stored where that is computed, by one of the programs that compute it. Where results are read at several
places at once, a tile has the columns of each, one run after the other, and its sums come apart by these. For what
follows, a large tile of sums is cut into pieces, and written so that threads seldom exchange numbers (`pieces.py`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from ...dialects.loop import Load
from ...ir.core import Op, Value
from ..kernels import Spec
from . import pieces
from .contraction import FACTORS, Contraction, Span, Sum
from .contraction_tiles import Tile
from .families import TORCH, Function, Generated, power_of_two
from .generate import interpreting
from .scalars import Number, accumulator_type, combined, neutral
from .text import Axis, Text, axis, module_text
from .walk import Access, Dim

#: tiles of rows that are walked together, so that they share what they read of the columns
GROUP = 8
#: the most partial sums that one program adds up, and how many times as many where all give a single number; more are
#: brought to FOLDED by a function in between
MOST_PARTIALS, SINGLE = 512, 8
FOLDED = 64
#: parts of a sum that are added up without a loop
STRAIGHT = 16
#: rounds of a product that ptxas may write out one after the other
WRITTEN_OUT = 4
#: how many times as many elements such a program has where the result is summed up
SUMMED = 4
#: columns that a program of a finishing function has
COLUMNS = 32
#: registers of a thread for vectors that it keeps
VECTORS = 64


@dataclass
class Side(Text):
    """One of the three tiles: rows x summed, summed x columns, rows x columns. Its names begin with `mark`."""

    mark: str = ""
    #: what is a load and stays in its own type: a factor, or what is packed
    raw: Sequence[Value] = ()
    #: per output that several programs compute alike: which of them stores it
    only: dict[int, str] = field(default_factory=dict)
    #: where each run of the tile's columns begins, in elements behind the first
    apart: Sequence[int] = (0,)
    #: the stretch of what is summed that it is for, where that is made of one of several tensors side by side
    span: Span | None = None

    def fresh(self, prefix: str = "v") -> str:
        return f"{self.mark}_{super().fresh(prefix)}"

    def index(self, dim: Dim) -> str:
        return f"{self.mark}_{super().index(dim)}"

    def bind(self, value: Value, number: Number) -> None:
        if value in self.raw:
            own, bare = FACTORS[str(value.type)], number.text.removesuffix(".to(tl.float32)")
            wide = bare == number.text and own != number.type  # inside of what guards a row that is looked up
            number = Number(f"{bare}.to({own})" if wide else bare, own)
        super().bind(value, number)

    def offset(self, access: Access) -> str:
        if len(self.apart) == 1:
            return super().offset(access)
        columns = self.axes[1]
        run = f"(tl.arange(0, {columns.block}) // {columns.run}){self.expand(columns)}{self.widened}"
        step = self.apart[1]
        if all(begin == i * step for i, begin in enumerate(self.apart)):
            return f"{super().offset(access)} + {run} * {step}"
        begins = " + ".join(f"({run} == {i}) * {begin}" for i, begin in enumerate(self.apart) if begin)
        return f"{super().offset(access)} + {begins}"

    def taken(self, op: Op) -> Sequence[Value]:
        return op.operands if self.span is None else self.span.taken(self.walk, op)

    def guards(self, access: Access) -> list[str]:
        own = self.only.get(access.argument)
        if self.span is not None:
            access = replace(access, guards=tuple(g for g in access.guards if not self.span.holds(g)))
        return [*super().guards(access), *([] if own is None else [own])]


@dataclass
class Partials:
    """The partial sums of one sum of the result: scratch memory of rows x width."""

    sum: Sum
    argument: int
    rows: int

    @property
    def type(self) -> str:
        return accumulator_type(self.sum.op.attributes["dtype"])

    @property
    def spec(self) -> Spec:
        return Spec((self.rows, self.sum.width), (self.sum.width, 1), TORCH[self.type])


def generate(product: Contraction, tile: Tile) -> Generated:
    return Writer(product, tile).generated()


class Writer:
    """The functions of one configuration."""

    def __init__(self, product: Contraction, tile: Tile):
        self.product = product
        self.tile = tile
        self.texts: list[tuple[Text, int, int]] = []
        self.scratch: list[Spec] = []
        dims = product.dims
        self.z = axis("z", dims["z"], 1, None)
        self.m = axis("m", dims["m"], tile.m, 0)
        self.n = Axis("n", dims["n"], tile.n, 1, turns=product.parts)
        #: programs that share a column of tiles
        self.stay = tile.programs // self.n.blocks
        #: the rows and columns of a program that adds up what programs have that share a sum
        self.tall, self.wide = self.added_axes()
        self.partials = [self.partial(own) for own in product.sums]
        #: of sums of a factor, a row per part of what is summed over
        self.asides = [self.aside(op) for op in product.beside]

    def generated(self) -> Generated:
        if self.tile.programs:
            self.stays()
        else:
            self.dot()
        functions, arguments = [], []
        for text, grid, warps in self.texts:
            used = sorted({int(n) for n in re.findall(r"\bp(\d+)\b", "\n".join(text.lines))})
            arguments.append([f"p{n}" for n in used])
            functions.append(Function(text.name, tuple(used), grid, warps))
        return Generated(module_text([t for t, *_ in self.texts], arguments), tuple(functions), tuple(self.scratch))

    def memory(self, spec: Spec) -> int:
        """Scratch memory; returns the number of the argument."""
        self.scratch.append(spec)
        return len(self.product.walk.specs) + len(self.scratch) - 1

    # ---- the product -------------------------------------------------------------------------------------------------

    def dot(self) -> None:
        product, tile = self.product, self.tile
        walk, size = product.walk, product.size["k"]
        summed = product.dims["k"]
        lines: list[str] = []
        row, column = product.factors
        result = Side(walk, (self.z, self.m, self.n), "dot", lines, mark="c")
        self.places(result)
        blocks = -(-size // tile.k)
        each = -(-blocks // tile.split) * tile.k
        for number, span in enumerate(product.spans(tile)):
            mark = number or ""
            sides = [
                Side(walk, (self.z, self.m, axis("ak", summed, tile.k, 1)), "dot", lines, mark=f"a{mark}", span=span),
                Side(walk, (self.z, self.n, axis("bk", summed, tile.k, 0)), "dot", lines, mark=f"b{mark}", span=span,
                     apart=product.apart),
            ]  # fmt: skip
            targets = [
                self.computed(0, sides[0], "column", self.n.blocks),
                self.computed(1, sides[1], "row", self.m.blocks),
            ]
            for side, ops, place in zip(sides, targets, ("row", "column"), strict=True):
                side.ready(side.needed(ops))
                side.start(self.z, "batch")
                side.ready(side.needed(ops))
                side.start(side.axes[1], f"{place} * {side.axes[1].run}")
                side.ready(side.needed(ops))
            if not number:
                result.line(f"total = tl.zeros(({tile.m}, {tile.n}), tl.float32)")
                for aside, made in enumerate(self.asides):
                    shape = (tile.m, 1) if made.sum.kept == ("m",) else (1, tile.n)
                    result.line(f"aside{aside} = tl.zeros({shape}, tl.float32)")
            first, end = "0", self.unknown(each if tile.split > 1 else size)
            if span is not None:
                first, end = str(span.first), str(span.end)
            result.line(f"for k in tl.range({first}, {end}, {tile.k}, num_stages={tile.stages}):")
            texts = []
            for side, factor, ops in zip(sides, (row, column), targets, strict=True):
                side.depth += 1
                own_axis = side.axes[2]
                side.start(own_axis, "k" if tile.split == 1 else f"part * {each} + k")
                if blocks % tile.split and own_axis.name not in side.masks:  # the last part is shorter
                    side.masks[own_axis.name] = f"in_{own_axis.name}"
                    side.line(f"in_{own_axis.name} = {own_axis.name} < {size}")
                side.ready(side.needed(ops))
                texts.append(self.factor(side, factor))
            sides[0].line(f"total = tl.dot({texts[0]}, {texts[1]}, total{self.precision})")
            for aside, made in enumerate(self.asides):
                own = "mn".index(made.sum.kept[0])
                sides[0].line(f"aside{aside} += tl.sum(({texts[own]}).to(tl.float32), {1 - own}, keep_dims=True)")
        self.keep_asides(result, sides)
        grid = self.z.size * self.m.blocks * self.n.blocks
        self.texts.append((result, grid * tile.split, tile.warps))
        for side in sides:
            result.helpers |= side.helpers
        if tile.split > 1:
            self.open(result, self.n, f"column * {tile.n}")
            self.split(result)
            return
        self.after(result)

    def unknown(self, end: int) -> str:
        """Where the loop over the summed dimension ends. Of factors as they lie its rounds are so short that ptxas
        writes them all out if it knows how many there are, which takes it seconds: a kernel has one row of programs."""
        short = all(map(self.product.plain, self.product.factors))
        return f"{end} * tl.num_programs(1)" if short and end > WRITTEN_OUT * self.tile.k else f"{end}"

    def keep_asides(self, text: Side, sides: Sequence[Side]) -> None:
        """Writes the sums of factors, by the first of those programs that read the same of a factor."""
        part = "part" if self.tile.split > 1 else "0"
        for number, made in enumerate(self.asides):
            (name,) = made.sum.kept
            own, other = (sides[0], self.n) if name == "m" else (sides[1], self.m)
            program = "column" if other is self.n else "row"
            mask = own.mask([own.axes[1]], [f"({program} == 0)"] if other.blocks > 1 else [])
            place = f"{part} * {made.sum.width} + {name}"
            text.line(f"tl.store(p{made.argument} + ({place}), aside{number}{f', mask={mask}' if mask else ''})")

    def stays(self) -> None:
        """The product by programs that stay for many tiles of rows; a longer sum is written round by round."""
        product, tile = self.product, self.tile
        lines: list[str] = []
        row, column = product.factors
        text = Side(product.walk, (self.z, self.m, self.n), "dot", lines, mark="c")
        text.line(f"pid = {text.pid()}")
        text.line(f"column = pid % {self.n.blocks}")
        text.line(f"first = pid // {self.n.blocks}")
        rounds = [self.round(lines, k) for k in range(0, product.size["k"], tile.k)]
        targets = [
            (self.computed(0, a, "column", self.n.blocks), self.computed(1, b, "first", self.stay)) for a, b in rounds
        ]
        again = self.read_again([(a, ops) for (a, _), (ops, _) in zip(rounds, targets, strict=True)])
        for number, (a, b) in enumerate(rounds):
            for side, ops in zip((a, b), targets[number], strict=True):
                side.start(self.z, "0")
                side.start(side.axes[2], f"{number * tile.k}")
                if side is b:
                    side.start(self.n, f"column * {tile.n}")
                side.ready(op for op in side.needed(ops) if op not in again)
            b.line(f"weights{number} = {self.factor(b, column)}")
        wanted = [*product.stores, *product.others]
        text.names[product.dot.results[0]] = Number("total", "tl.float32")
        beside = [op for op in text.needed(wanted) if product.dot not in product.sums_behind(op)]
        text.start(self.z, "0")
        text.start(self.n, f"column * {tile.n}")
        text.ready(beside)
        for number, _ in enumerate(product.sums):
            text.line(f"sum{number} = tl.zeros({self.high, tile.n}, tl.float32)")
        # in rounds, what lies along the first dimension of rows, such as images, is read once for rows of one of these
        alone = len(rounds) > 1 and product.rows is None and self.m.alone
        text.line(f"for row in tl.range(first, {self.m.blocks}, {self.stay}, num_stages={tile.stages}):")
        for number, (a, _) in enumerate(rounds):
            a.depth = text.depth = 2
            a.start(self.m, f"row * {tile.m}", alone)
            a.ready(a.needed(targets[number][0]))
            if not number:
                text.start(self.m, f"row * {tile.m}")
                text.ready(beside)  # what else is read is under way while factors are multiplied
            before = ", total" if number else ""
            text.line(f"total = tl.dot({self.factor(a, row)}, weights{number}{before}{self.precision})")
        text.ready(text.needed(wanted))
        axes = [self.m, self.n]
        for number, own in enumerate(product.sums):
            text.line(f"sum{number} += {self.rows_added(text.operand(own.op, axes), tile.n)}")
        text.depth = 1
        for number, own in enumerate(product.sums):
            over = [x for x in axes if x.name not in own.kept]
            self.keep(text, number, own, text.total(own.op, f"sum{number}", axes, over).text)
        for a, b in rounds:
            text.helpers |= a.helpers | b.helpers
        self.texts.append((text, tile.programs, tile.warps))
        self.finish([*self.partials, *self.asides])

    def read_again(self, sides: Sequence[tuple[Side, Sequence[Op]]]) -> set[Op]:
        """The vectors along what is summed that are read for every tile of rows: where they would take too many
        registers, or have an element for each thread, in whose order Triton would compute the whole factor. (That is
        better than in the order of tensor cores where warps share rows: each would compute all of these.)"""
        tile, found, count = self.tile, set(), 0
        for side, ops in sides:
            needed = side.needed(ops)
            vectors = [op for op in needed if op.definition is Load and self.is_vector(side, op)]
            combined = {v for op in needed if op.results and self.is_vector(side, op) for v in op.operands}
            found |= {op for op in vectors if op.results[0] not in combined}
            count += len(vectors)
        one_each = tile.k >= 32 * tile.warps
        return found if (tile.m >= 16 * tile.warps if one_each else count * tile.k // 4 > VECTORS) else set()

    def is_vector(self, side: Side, op: Op) -> bool:
        return side.tiled(side.op_axes(op)) == [side.axes[2]]

    def round(self, lines: list[str], first: int) -> tuple[Side, Side]:
        """The sides of one round over the summed dimension."""
        number = first // self.tile.k or ""
        walk, summed = self.product.walk, self.product.dims["k"]
        spans = self.product.spans(self.tile)
        span = next((s for s in spans if s is not None and s.first <= first < s.end), None)
        a, b = (axis(f"{side}k{number}", summed, self.tile.k, place) for side, place in (("a", 1), ("b", 0)))
        return (
            Side(walk, (self.z, self.m, a), "dot", lines, mark=f"a{number}", span=span),
            Side(walk, (self.z, self.n, b), "dot", lines, mark=f"b{number}", span=span),
        )

    @property
    def high(self) -> int:
        """Rows that remain of a tile where each thread has added up its own."""
        return 8 * min(self.tile.m // 16, self.tile.warps)

    def rows_added(self, value: str, columns: int) -> str:
        """A tile with the rows that one thread has added up, which costs nothing: tensor cores give it the rows i and
        i + 8 of sixteen, and of every so many sixteens as there are warps."""
        sixteens, high = self.tile.m // 16, self.high // 8
        value = f"tl.sum(tl.reshape({value}, ({sixteens}, 2, 8, {columns})), 1)"
        if high < sixteens:
            value = f"tl.sum(tl.reshape({value}, ({sixteens // high}, {high}, 8, {columns})), 0)"
        return f"tl.reshape({value}, ({self.high}, {columns}))"

    def after(self, text: Side) -> None:
        """What is computed from the tile of sums, piece by piece; a piece has columns of every run. Or all is read
        before the first and stored behind the last: pieces are then in the order that tensor cores leave."""
        product, count, run, at_once = self.product, self.tile.pieces, self.n.run, self.tile.at_once
        # where sums are made of it as well, a piece goes through shared memory once for all
        packs = count > 1 and not at_once and product.packs and bool(product.sums)
        held = self.read(self.whole(text), "total") if at_once else {}
        late = [op for op in product.stores if at_once and product.stored_type(op)]
        names = {name: self.cut(text, name) for name in held or ["total"]}
        columns = axis("n", self.n.dims, run // count, 1)
        for i in range(count):
            piece = Side(product.walk, (self.z, self.m, columns), text.name, text.lines, mark=f"c{i}" if i else "c")
            self.open(piece, columns, f"column * {run}" + (f" + {i * columns.block}" if i else ""))
            there, own = held, {name: cuts[i::count] for name, cuts in names.items()}
            if packs:
                there = self.read(piece, own["total"][0])
                own = {name: [name] for name in there} or own
            self.unpack(piece, there, own)
            piece.ready(op for op in piece.needed([*product.stores, *product.others]) if op not in late)
            for number, op in enumerate(late):
                piece.line(f"stored{number}_{i} = {self.stored(piece, op)}")
            self.add_piece(piece, i)
            text.helpers |= piece.helpers
        for number, summed in enumerate(product.sums):
            if "n" not in summed.kept:
                self.keep(piece, number, summed, f"sum{number}")
        self.store_whole(text, late)
        if at_once:
            self.keep_columns(text, self.n, f"column * {run}", range(count))
        self.finish([*self.partials, *self.asides])

    def cut(self, text: Side, name: str) -> list[str]:
        return pieces.cut(text, name, self.tile.pieces * self.product.parts, self.tile.m, self.tile.n)

    def read(self, side: Side, total: str) -> dict[str, list[pieces.Packed]]:
        """Reads what is beside a tile of sums, and packs it with these. Returns what each integer has."""
        types = {op.results[0]: self.product.read_type(op) for op in self.product.beside_rows}
        side.raw = [value for value, type in types.items() if type != "tl.int1"]
        side.ready(self.product.beside_rows)
        side.raw = []
        held = {f"held{i}": group for i, group in enumerate(pieces.grouped(types))}
        for name, group in held.items():
            side.line(f"{name} = {pieces.with_sums(total, [p.into(side.names[p.value].text) for p in group])}")
        return held

    def unpack(
        self, piece: Side, held: Mapping[str, Sequence[pieces.Packed]], names: Mapping[str, Sequence[str]]
    ) -> None:
        """What a piece has: of a product, or of each of several; and what was read beside."""
        for name, own in names.items():
            for packed in held.get(name, ()):
                piece.bind(packed.value, packed.out_of(own[0]))
            for dot, total in zip(self.product.dots, own, strict=True):
                piece.names[dot.results[0]] = Number(pieces.sums_in(total) if held else total, "tl.float32")

    def whole(self, text: Side) -> Side:
        """What is read or stored of a whole tile."""
        side = Side(self.product.walk, (self.z, self.m, self.n), text.name, text.lines, mark="t")
        self.open(side, self.n, f"column * {self.tile.n}")
        return side

    def stored(self, piece: Side, op: Op) -> str:
        """What is stored of a piece, over all of it."""
        value, axes = op.operands[0], piece.tile
        text = piece.names[value].to(self.product.stored_type(op))
        whole = all(a in piece.value_axes(value) for a in axes)
        return text if whole else f"tl.broadcast_to({text}, {piece.shape(axes)})"

    def store_whole(self, text: Side, stores: Sequence[Op]) -> None:
        """Stores what all pieces have."""
        count, tile = self.tile.pieces, self.tile
        side = self.whole(text) if stores else text
        for number, op in enumerate(stores):
            names = [f"stored{number}_{i}" for i in range(count)]
            name = pieces.side_by_side(text, names, tile.m, tile.n // count)
            side.names[op.operands[0]] = Number(name, self.product.stored_type(op))
            side.store(op)

    def add_piece(self, piece: Side, i: int) -> None:
        """What a piece adds to sums of the result."""
        axes = piece.axes[1:]
        for number, own in enumerate(self.product.sums):
            name = f"sum{number}"
            if self.product.sums_columns(own):
                value = piece.operand(own.op, axes)
                piece.line(f"{name}_{i} = {self.rows_added(value, axes[1].block) if self.tile.at_once else value}")
                continue
            value = self.part_of(piece, own).text
            if "n" in own.kept:
                self.keep(piece, number, own, value)
                continue
            kind, type = own.op.attributes["kind"], accumulator_type(own.op.attributes["dtype"])
            piece.line(f"{name} = {combined(kind, name, value, type) if i else value}")
        if not self.tile.at_once:
            self.keep_columns(piece, axes[1], piece.starts["n"], [i])

    def keep_columns(self, text: Side, columns: Axis, first: str, parts: Sequence[int]) -> None:
        """Writes partial sums of columns, two sums at a time: threads exchange what they have of both at once."""
        sums, wide = self.product.sums, columns.block
        high = self.high if self.tile.at_once else self.tile.m
        numbers = [i for i, own in enumerate(sums) if self.product.sums_columns(own)]
        for kept in dict.fromkeys(sums[i].kept for i in numbers):
            alike = [i for i in numbers if sums[i].kept == kept]
            for pair in (alike[i : i + 2] for i in range(0, len(alike), 2)):
                names = [f"sum{number}_{i}" for number in pair for i in parts]
                value = f"tl.sum({pieces.side_by_side(text, names, high, wide // len(parts))}, 0, keep_dims=True)"
                own = replace(columns, block=len(pair) * wide, turns=len(pair))
                side = Side(self.product.walk, (self.z, self.m, own), text.name, text.lines, mark="s")
                self.open(side, own, first)
                places = [self.place(i, sums[i]) for i in pair]
                place = places[0]
                if len(pair) > 1:
                    place = f"tl.where(tl.arange(0, {2 * wide})[None, :] < {wide}, {places[0]}, {places[1]})"
                mask = side.mask([own])
                text.line(f"tl.store({place}, {value}{f', mask={mask}' if mask else ''})")

    def places(self, text: Text) -> None:
        """The tile of a program: rows of tiles in groups, so that neighbours in time read the same columns."""
        rows, columns = self.m.blocks, self.n.blocks
        text.line(f"pid = {text.pid()}")
        if self.tile.split > 1:
            text.line(f"part = pid // {self.z.size * rows * columns}")
        text.line(f"batch = pid // {rows * columns} % {self.z.size}" if self.z.size > 1 else "batch = 0")
        text.line(f"pid = pid % {rows * columns}")
        text.line(f"group = pid // {GROUP * columns}")
        text.line(f"high = tl.minimum({rows} - group * {GROUP}, {GROUP})" if rows % GROUP else f"high = {GROUP}")
        text.line(f"row = group * {GROUP} + pid % {GROUP * columns} % high")
        text.line(f"column = pid % {GROUP * columns} // high")

    @property
    def precision(self) -> str:
        """f32 is multiplied exactly."""
        return ', input_precision="ieee"' if str(self.product.factors[0].type) == "f32" else ""

    def computed(self, number: int, side: Side, place: str, blocks: int) -> list[Op]:
        """What a side computes: its factor and outputs that lie as it does, which the first of some blocks stores."""
        product, factor = self.product, self.product.factors[number]
        assert factor.op is not None
        side.raw = [factor] if product.plain(factor) else []
        stored = product.stored_with(number)
        if blocks > 1:
            side.only = {product.walk.accesses[op].argument: f"({place} == 0)" for op in stored}
        return [factor.op, *stored]

    def factor(self, side: Side, factor: Value) -> str:
        """A factor over its whole tile in the type it is multiplied in, 0 outside of the summed dimension."""
        number, type = side.names[factor], FACTORS[str(factor.type)]
        text = number.text
        axes = side.tile
        if any(a not in side.value_axes(factor) for a in axes):
            text = f"tl.broadcast_to({text}, {side.shape(axes)})"
        mask = side.mask([side.axes[2]])
        if not side.raw and mask:
            text = f"tl.where({mask}, {text}, 0.0)"
        if not side.raw and type != "tl.float32":
            text = f"({text}).to({type})"
        # the interpreter multiplies the bits of bf16
        return f"{text}.to(tl.float32)" if interpreting() and type == "tl.bfloat16" else text

    def open(self, text: Side, columns: Axis, first: str) -> None:
        text.start(self.z, "batch")
        text.start(self.m, f"row * {self.m.block}")
        text.start(columns, first)
        if self.n.size % self.n.run and columns.name not in text.masks:  # the last tile has fewer pieces
            text.masks[columns.name] = f"in_{columns.name}"
            text.line(f"in_{columns.name} = {columns.name} < {columns.size}")

    # ---- a split product ---------------------------------------------------------------------------------------------

    def split(self, text: Side) -> None:
        product, tile = self.product, self.tile
        count = self.z.size
        m, n = self.m.size, self.n.size
        strides = (count * m * n, m * n, n, 1)
        argument = self.memory(Spec((tile.split, count, m, n), strides, torch.float32))
        wide = strides[0] * tile.split >= 2**31
        part = "part.to(tl.int64)" if wide else "part"
        place = f"{part} * {strides[0]} + batch * {strides[1]} + m * {n} + n"
        mask = text.mask(text.tile)
        text.line(f"tl.store(p{argument} + ({place}), total{f', mask={mask}' if mask else ''})")
        met, step, y, x = 1, 0, self.tall, self.wide
        if product.rows is not None and product.meets:
            met, step = self.m.dims[0].size, product.rows.step
        added = Side(product.walk, (self.z, y, x), "add_parts", mark="c")
        added.line(f"pid = {added.pid()}")
        added.start(self.z, f"pid // {y.blocks * x.blocks}")
        added.start(y, f"pid // {x.blocks} % {y.blocks} * {y.block}")
        added.start(x, f"pid % {x.blocks} * {x.block}")
        added.line(f"place = z * {strides[1]} + m * {n} + n")
        at = "place.to(tl.int64)" if wide else "place"

        def load(part: str) -> str:
            found = []
            for i in range(met):
                mask = added.mask(added.tile, [f"(n < {n - i * step})"] if i else [])
                place = f"({at} + {part})" if not i else f"({at} + {part} + {i * (y.size * n + step)})"
                found.append(f"tl.load(p{argument} + {place}{f', mask={mask}, other=0' if mask else ''})")
            return " + ".join(found)

        added.line(f"total = {load('0')}")
        if tile.split > STRAIGHT:
            with added.loop(f"part in tl.range(1, {tile.split}, num_stages=4)"):
                added.line(f"total += {load(f'part * {strides[0]}')}")
        for i in range(1, tile.split if tile.split <= STRAIGHT else 1):
            added.line(f"total += {load(str(i * strides[0]))}")
        added.names[product.dot.results[0]] = Number("total", "tl.float32")
        added.ready(added.needed([*product.stores, *product.others]))
        for made in self.partials:
            added.line(f"tl.store(p{made.argument} + pid, {self.part_of(added, made.sum).text})")
        self.texts.append((added, count * y.blocks * x.blocks, 4))
        self.finish([*self.partials, *self.asides])

    def added_axes(self) -> tuple[Axis, Axis]:
        """More rows at a time where the result is summed up: partial sums are fewer."""
        product = self.product
        columns, points = min(power_of_two(self.n.size), 128), 1024 if self.tile.split <= STRAIGHT else 256
        points *= SUMMED if product.sums else 1
        dims = self.m.dims[1:] if product.meets else self.m.dims
        return axis("m", dims, max(points // columns, 1), 0), axis("n", self.n.dims, columns, 1)

    # ---- sums of the result ------------------------------------------------------------------------------------------

    def partial(self, own: Sum) -> Partials:
        """The memory of a sum's partial sums: one row per tile that adds to it."""
        rows = own.columns
        blocks = self.z.blocks, self.stay or self.m.blocks, self.n.blocks
        if self.tile.split > 1:
            blocks = self.z.blocks, self.tall.blocks, self.wide.blocks
        for name, there in zip("zmn", blocks, strict=True):
            rows *= 1 if name in own.kept else there
        made = Partials(own, 0, rows)
        made.argument = self.memory(made.spec)
        return made

    def aside(self, op: Op) -> Partials:
        """The memory of a factor's partial sums."""
        number = self.product.summed_factor(op)
        assert number is not None
        name = "mn"[number]
        made = Partials(Sum(op, (name,), self.product.size[name]), 0, self.tile.split)
        made.argument = self.memory(made.spec)
        return made

    def part_of(self, text: Side, own: Sum) -> Number:
        """What a tile adds to a sum."""
        axes = list(text.axes[1:])
        over = [a for a in axes if a.name not in own.kept]
        return text.total(own.op, text.operand(own.op, axes), axes, over)

    def keep(self, text: Side, number: int, own: Sum, value: str) -> None:
        """Writes a partial sum to its place."""
        mask = text.mask([a for a in text.axes if a.name in own.kept])
        text.line(f"tl.store({self.place(number, own)}, {value}{f', mask={mask}' if mask else ''})")

    def place(self, number: int, own: Sum) -> str:
        """Where the partial sums of a tile are written."""
        axes = {"z": self.z, "m": self.m, "n": self.n}
        row = ""
        for name, where in (("z", "batch"), ("m", "first" if self.stay else "row"), ("n", "column")):
            if name not in own.kept and self.product.groups[name]:
                blocks = self.stay if self.stay and name == "m" else axes[name].blocks
                row = f"({row}) * {blocks} + {where}" if row else where
        scale = own.width * own.columns
        place = [f"({row or 0}) * {scale}"]
        for name in own.kept:
            scale //= axes[name].size
            place.append(f"{name} * {scale}" if scale != 1 else name)
        return f"p{self.partials[number].argument} + ({' + '.join(place)})"

    def finish(self, partials: Sequence[Partials]) -> None:
        """The functions that add up partial sums and write what is made of them, one per kind of output."""
        alike: dict[tuple[int, int], list[Partials]] = {}
        for given in partials:
            alike.setdefault((given.rows, given.sum.width), []).append(given)
        folded: list[Partials] = []
        for (rows, width), own in alike.items():
            folded += self.fold(own) if rows > MOST_PARTIALS * (SINGLE if width == 1 else 1) else own
        ends = [*self.product.after, *self.product.aside]
        for number, kept in enumerate(dict.fromkeys(map(self.product.kept, ends))):
            stores = [op for op in ends if self.product.kept(op) == kept]
            self.finished(f"finish{number}", kept, stores, folded)

    def fold(self, given: Sequence[Partials]) -> list[Partials]:
        """Fewer partial sums of some sums that have equally many."""
        width = given[0].sum.width
        k, q = self.columns([], width)
        blocks = -(-width // k.block)
        text = Text(self.product.walk, (q, k), f"fold{given[0].argument}")
        text.line(f"pid = {text.pid()}")
        lanes = f" + tl.arange(0, {k.block}){text.expand(k)}" if k.position else ""
        text.line(f"k = pid % {blocks} * {k.block}{lanes}")
        text.line(f"row = pid // {blocks}")
        mask = [f"(k < {width})"] if width % k.block else []
        made = []
        for own in given:
            folded = Partials(own.sum, 0, FOLDED)
            folded.argument = self.memory(folded.spec)
            total = text.accumulator(own.sum.op, [q, k])
            with text.loop(f"q0 in range(row * {q.block}, {own.rows}, {FOLDED * q.block})"):
                self.add(text, own, q, total, width, mask)
            number = text.total(own.sum.op, total, [q, k], [q])
            tail = f", mask={mask[0]})" if mask else ")"
            text.line(f"tl.store(p{folded.argument} + row * {width} + k, {number.text}{tail}")
            made.append(folded)
        self.texts.append((text, FOLDED * blocks, 4))
        return made

    def columns(self, dims: Sequence[Dim], width: int) -> tuple[Axis, Axis]:
        """The axes of a function that adds up partial sums: its columns, and the partial sums."""
        block = min(power_of_two(width), COLUMNS)
        return axis("k", dims, block, 1 if block > 1 else None), axis("q", [], 1024 // block, 0)

    def add(self, text: Text, given: Partials, q: Axis, total: str, width: int, mask: Sequence[str]) -> None:
        """One round of adding up rows of partial sums from q0 on."""
        kind, type = given.sum.op.attributes["kind"], given.type
        text.line(f"q = (q0 + tl.arange(0, {q.block})){text.expand(q)}")
        inside = " & ".join([*mask, *([f"(q < {given.rows})"] if given.rows % q.block else [])])
        place = f"q * {width} + k" if width > 1 else "q"
        tail = f", mask={inside}, other={neutral(kind, type)})" if inside else ")"
        text.line(f"part = tl.load(p{given.argument} + ({place}){tail}")
        text.line(f"{total} = {combined(kind, total, 'part', type)}")

    def finished(self, name: str, kept: Sequence[str], stores: Sequence[Op], partials: Sequence[Partials]) -> None:
        product = self.product
        summed = frozenset().union(*(p.sum.op.attributes["dims"] for p in partials if p.sum.kept == kept))
        dims = [d for n in kept for d in product.dims[n] if not summed & frozenset(d.parts)]
        width = 1
        for d in dims:
            width *= d.size
        k, q = self.columns(dims, width)
        text = Text(product.walk, (k, q), name)
        text.line(f"pid = {text.pid()}")
        text.start(k, f"pid * {k.block}")
        wanted = set(text.needed(stores))
        for given in partials:
            op = given.sum.op
            if op not in wanted:
                continue
            axes = [q, k] if given.sum.kept else [q]
            total = text.accumulator(op, axes)
            with text.loop(f"q0 in range(0, {given.rows}, {q.block})"):
                mask = [text.mask([k])] if given.sum.kept and "k" in text.masks else []
                self.add(text, given, q, total, given.sum.width, mask)
            text.known(op, text.total(op, total, axes, [q]))
        text.ready(text.needed(stores))
        self.texts.append((text, k.blocks, 4))
