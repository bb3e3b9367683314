"""Writes a matrix product with its surroundings as Triton functions.

The first function walks tiles of the summed dimension with `tl.dot` and then writes the tile of results. Sums of the
result leave one partial sum per tile, which further functions add up in a fixed order. Where the summed dimension is
split over programs, a second function adds up the parts, writes the results and sums them up. Where it is short, a
program may stay for many tiles of rows: it reads the next ones meanwhile, and keeps the second factor and its sums.
Sums of a factor are taken in the same walk, and finished as those of the result are. Outputs that lie as a factor
does are stored where that is computed, by one of the programs that compute it. Where results are read at several
places at once, a tile has the columns of each, one run after the other, and its sums come apart by these.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from ...ir.core import Op, Value
from ..kernels import Spec
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


@dataclass
class Side(Text):
    """One of the three tiles: rows x summed, summed x columns, rows x columns. Its names begin with `mark`."""

    mark: str = ""
    #: a factor that is a load: it stays in its own type
    raw: Value | None = None
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
        if value is self.raw:
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
        self.high, self.wide = self.added_axes()
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
        for number, (a, b) in enumerate(rounds):
            for side, ops in zip((a, b), targets[number], strict=True):
                side.start(self.z, "0")
                side.start(side.axes[2], f"{number * tile.k}")
                if side is b:
                    side.start(self.n, f"column * {tile.n}")
                side.ready(side.needed(ops))
            b.line(f"weights{number} = {self.factor(b, column)}")
        wanted = [*product.stores, *product.others]
        text.names[product.dot.results[0]] = Number("total", "tl.float32")
        beside = [op for op in text.needed(wanted) if product.dot not in product.sums_behind(op)]
        text.start(self.z, "0")
        text.start(self.n, f"column * {tile.n}")
        text.ready(beside)
        shape = min(tile.m // 16, tile.warps), 8
        for number, _ in enumerate(product.sums):
            text.line(f"sum{number} = tl.zeros({(*shape, tile.n)}, tl.float32)")
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
            text.line(f"sum{number} += {self.rows_added(text.operand(own.op, axes))}")
        text.depth = 1
        for number, own in enumerate(product.sums):
            over = [x for x in axes if x.name not in own.kept]
            rows = math.prod(shape)
            held = f"tl.reshape(sum{number}, ({rows}, {tile.n}))"
            self.keep(text, number, own, text.total(own.op, held, axes, over).text)
        for a, b in rounds:
            text.helpers |= a.helpers | b.helpers
        self.texts.append((text, tile.programs, tile.warps))
        self.finish([*self.partials, *self.asides])

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

    def rows_added(self, value: str) -> str:
        """A tile with the rows that one thread has added up, which costs nothing: tensor cores give it the rows i and
        i + 8 of sixteen, and of every so many sixteens as there are warps."""
        sixteens, n = self.tile.m // 16, self.tile.n
        high = min(sixteens, self.tile.warps)
        value = f"tl.sum(tl.reshape({value}, ({sixteens}, 2, 8, {n})), 1)"
        return value if high == sixteens else f"tl.sum(tl.reshape({value}, ({sixteens // high}, {high}, 8, {n})), 0)"

    def after(self, text: Side) -> None:
        """What is computed from the tile of sums, piece by piece; a piece has columns of every run."""
        product, count, run = self.product, self.tile.pieces, self.n.run
        names = ["total"]
        while len(names) < count * product.parts:
            high, wide = self.tile.m, self.tile.n // len(names) // 2
            for name in names:
                text.line(f"{name} = tl.permute(tl.reshape({name}, ({high}, 2, {wide})), (0, 2, 1))")
                text.line(f"{name}_0, {name}_1 = tl.split({name})")
            names = [f"{name}_{half}" for name in names for half in (0, 1)]
        columns = axis("n", self.n.dims, run // count, 1)
        totals: dict[Op, str] = {}
        for i in range(count):
            piece = Side(product.walk, (self.z, self.m, columns), text.name, text.lines, mark=f"c{i}" if i else "c")
            self.open(piece, columns, f"column * {run}" + (f" + {i * columns.block}" if i else ""))
            for dot, name in zip(product.dots, names[i::count], strict=True):
                piece.names[dot.results[0]] = Number(name, "tl.float32")
            piece.ready(piece.needed([*product.stores, *product.others]))
            for number, own in enumerate(product.sums):
                value = self.part_of(piece, own).text
                if "n" in own.kept:
                    self.keep(piece, number, own, value)
                elif i == 0:
                    totals[own.op] = f"sum{number}"
                    piece.line(f"sum{number} = {value}")
                else:
                    kind, type = own.op.attributes["kind"], accumulator_type(own.op.attributes["dtype"])
                    piece.line(f"sum{number} = {combined(kind, f'sum{number}', value, type)}")
            text.helpers |= piece.helpers
        for number, own in enumerate(product.sums):
            if own.op in totals:
                self.keep(piece, number, own, totals[own.op])
        self.finish([*self.partials, *self.asides])

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
        side.raw = factor if product.plain(factor) else None
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
        if side.raw is None and mask:
            text = f"tl.where({mask}, {text}, 0.0)"
        if side.raw is None and type != "tl.float32":
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
        met, step, y, x = 1, 0, self.high, self.wide
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
            blocks = self.z.blocks, self.high.blocks, self.wide.blocks
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
        made = self.partials[number]
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
        mask = text.mask([a for a in text.axes if a.name in own.kept])
        text.line(f"tl.store(p{made.argument} + ({' + '.join(place)}), {value}{f', mask={mask}' if mask else ''})")

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
