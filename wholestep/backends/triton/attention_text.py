"""Writes an attention with its surroundings as Triton functions.

A program has a block of rows and walks the rows of the other matrix a block at a time; what it reads is computed where
it is loaded, what it makes goes through the loops behind it while it is a tile. Forward keeps the largest score and the
sum of powers of each row as it goes, so that no score is ever written. Gradients are two functions: that of queries,
which also leaves sum(dout * out) of each row for the other, and that of keys and values; or one, whose programs have
all keys. Steps of the walk in which everything is seen are a loop of their own, without conditions. What a program
computes for itself may be a tensor of the region as well: whoever has a block of it, or sees all of it, stores it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch

from ...dialects.loop import Load, Reduce, Store
from ...dialects.step.base import torch_dtype
from ...dialects.strides import row_major
from ...ir.core import Op, Value
from ...transforms.attention_sides import PER_ROW
from ...transforms.attention_sides import Side as Loops
from ..kernels import Spec
from .attention import SHORTEST, WIDEST, Attention, Tile
from .contraction import FACTORS, Tensors
from .contraction_text import Side
from .families import Function, Generated, pointers_in, power_of_two
from .generate import interpreting
from .scalars import NoText, Number
from .text import Axis, Text, axis, module_text
from .walk import Access, Dim, Form

LOG2E, LN2 = 1 / math.log(2), math.log(2)
LOW = 'float("-inf")'


@dataclass
class Part(Side):
    """A tile of an operand or of a result, with the loops that make or read it."""

    numbers: Sequence[int] = ()
    #: what the anchor makes, and the tile that it is
    made: Value | None = None
    tile_of: str = ""

    def pointer(self, access: Access) -> str:
        return f"p{self.numbers[access.argument]}"

    @property
    def batch(self) -> Axis:
        return self.axes[0]

    @property
    def rows(self) -> Axis:
        return self.axes[1]

    def ready(self, ops: Iterable[Op]) -> None:
        """As ever; and sums along the columns, of which a tile has all."""
        wanted = list(ops)
        super().ready(wanted)
        whole = all(a in self.open for a in self.axes)
        sums = [op for op in wanted if whole and op.definition is Reduce and op.results[0] not in self.names]
        for op in sums:
            if op.operands[0] in self.names:
                axes = list(self.axes[1:])
                self.known(op, self.total(op, self.operand(op, axes, axes[1:]), axes, axes[1:]))
                self.ready(wanted)
                return

    def load(self, op: Op) -> None:
        if op.operands[0] is not self.made:
            super().load(op)
            return
        self.bind(op.results[0], Number(self.seen(op), "tl.float32"))

    def seen(self, op: Op) -> str:
        """The tile as a load sees it: as it is, or with its columns at other places."""
        if len(self.axes) == 2:
            return self.tile_of
        *own, constant = op.attributes["map"][-1]
        assert self.made is not None
        size, columns = self.made.type.shape[-1], self.axes[2]
        inner, as_it_is = 1, not constant and columns.size == size
        for dim in reversed(columns.dims):
            as_it_is = as_it_is and own[dim.parts[-1]] == inner
            inner *= dim.size
        if as_it_is:
            return self.tile_of
        form, at = Form(tuple(own), constant), self.fresh("at")
        high, wide = self.rows.block, columns.block
        self.line(f"{at} = tl.broadcast_to({self.form_text(form)}, ({high}, {wide})).to(tl.int32)")
        inside = f"tl.minimum(tl.maximum({at}, 0), {size - 1})"
        text = f"tl.gather({self.tile_of}, {inside}, 1)"
        low, largest = form.range(self.walk.sizes)
        if low < 0 or largest >= size:
            text = f"tl.where(({at} >= 0) & ({at} < {size}), {text}, 0.0)"
        return text


@dataclass
class Kernel:
    """One function in the making: its lines, and how it walks."""

    name: str
    lines: list[str] = field(default_factory=list)
    depth: int = 1
    helpers: set[str] = field(default_factory=set)

    def line(self, text: str) -> None:
        self.lines.append("    " * self.depth + text)


def generate(attention: Attention, tile: Tile) -> Generated:
    return Writer(attention, tile).generated()


class Writer:
    """The functions of one configuration."""

    def __init__(self, attention: Attention, tile: Tile):
        self.attention, self.tile = attention, tile
        self.anchor, self.sides = attention.anchor, attention.sides
        self.queries, self.keys = self.anchor.q.type.shape[-2], self.anchor.k.type.shape[-2]
        self.batches = math.prod(self.anchor.q.type.shape[:-2])
        self.group = attention.group
        mask = self.anchor.mask
        #: whether masks are numbers that are added: those may be too large to be scaled
        self.adds = mask is not None and mask.type.element.kind == "float"
        #: scores are powers of two where nothing is in the way
        self.unit = 1.0 if self.adds else LOG2E
        self.functions: list[tuple[Kernel, int]] = []
        self.scratch: tuple[Spec, ...] = ()

    def generated(self) -> Generated:
        if self.attention.is_forward:
            self.forward()
        elif self.tile.at_once:
            self.gradients()
        else:
            self.scratch = (Spec((self.batches, self.queries), (self.queries, 1), torch.float32),)
            self.by_queries()
            if {"dk", "dv"} & self.sides.after.keys():
                self.by_keys()
        texts, arguments, functions = [], [], []
        for kernel, grid in self.functions:
            text = Text(self.walk_of(next(iter(self.sides.before.values()))), (), kernel.name, kernel.lines)
            text.helpers = kernel.helpers
            texts.append(text)
            arguments.append(pointers_in(text))
            used = tuple(int(n[1:]) for n in arguments[-1])
            functions.append(Function(kernel.name, used, grid, self.tile.warps))
        return Generated(module_text(texts, arguments), tuple(functions), self.scratch)

    # ---- tiles -------------------------------------------------------------------------------------------------------

    def walk_of(self, loops: Loops, made: bool = False) -> Tensors:
        """The forms of a side. What the anchor reads or makes lies nowhere; what it makes is walked row by row."""
        type = loops.value.type
        strides = row_major(type.shape) if made else (0,) * type.rank
        own = Spec(type.shape, strides, torch_dtype(type.element))
        return Tensors(loops.kernel, [self.attention.specs[n] if n >= 0 else own for n in loops.numbers])

    def part(self, kernel: Kernel, name: str, mark: str, high: int, wide: int, tile_of: str = "") -> Part:
        """A tile of an operand; of a result where the tile has a name."""
        loops = (self.sides.after if tile_of else self.sides.before)[name]

        def dims(which: Sequence[int]) -> list[Dim]:
            return [Dim((d,), loops.sizes[d]) for d in which if loops.sizes[d] != 1]

        columns = dims(loops.columns)
        if tile_of and name not in PER_ROW:
            if not columns:
                raise NoText("a single column of what it makes is read")
            size = math.prod(d.size for d in columns)
            wide = wide if size == loops.value.type.shape[-1] else max(SHORTEST, power_of_two(size))
            if wide > WIDEST:
                raise NoText(f"{size} columns are made of a row, too many for a tile")
        axes = [axis(f"{mark}z", dims(loops.lead), 1, None), axis(f"{mark}r", dims(loops.rows), high, 0)]
        if name not in PER_ROW:
            axes.append(axis(f"{mark}c", columns, wide, 1))
        made = loops.value if tile_of else None
        return Part(
            self.walk_of(loops, bool(tile_of)), tuple(axes), kernel.name, kernel.lines, kernel.depth,
            mark=mark, numbers=loops.numbers, made=made, tile_of=tile_of, helpers=kernel.helpers,
        )  # fmt: skip

    def opened(
        self, kernel: Kernel, name: str, mark: str, high: int, wide: int, batch: str, stores: bool, only: str = ""
    ) -> tuple[Part, list[Op]]:
        """A tile of an operand whose batch and columns are known, and what it computes.

        stores: whether tensors of the region that are made on the way are written here; only: by which programs.
        """
        loops, part = self.sides.before[name], self.part(kernel, name, mark, high, wide)
        block = loops.kernel.regions[0].block
        (target,) = (op for op in block if op.definition is Store and op.operands[1] is loops.value)
        factor = target.operands[0]
        assert factor.op is not None
        written = loops.stores if stores else []
        if not written and factor.op.definition is Load and str(factor.type) in FACTORS:
            part.raw = [factor]  # (nothing else is computed from it)
        if only:
            part.only = {part.walk.accesses[op].argument: only for op in written}
        wanted = [factor.op, *written]
        part.ready(part.needed(wanted))
        part.start(part.batch, batch)
        if len(part.axes) > 2 and name != "mask":
            part.start(part.axes[2], "0")
        part.ready(part.needed(wanted))
        return part, wanted

    def computed(self, part: Part, name: str, wanted: Sequence[Op], first: str, inside: bool = False) -> str:
        """The tile of an operand from a row on. inside: all of its rows are there."""
        part.start(part.rows, first)
        if inside:
            part.masks.pop(part.rows.name, None)
        part.ready(part.needed(wanted))
        factor = wanted[0].results[0]
        number = part.names[factor]
        text, axes = number.text, part.tile
        missing = any(a not in part.value_axes(factor) for a in axes)
        if missing:
            text = f"tl.broadcast_to({text}, {part.shape(axes)})"
        mask = part.mask(axes)
        if mask and (missing or part.raw is None) and name != "mask":
            text = f"tl.where({mask}, {text}, 0.0)"
        tile = f"{part.mark}_tile"
        part.line(f"{tile} = {text}")
        return tile

    def factor(self, text: str) -> str:
        """A tile in the type in which it is multiplied."""
        type = FACTORS[str(self.attention.element)]
        # the interpreter multiplies the bits of bf16
        return f"{text}.to({type})" + (".to(tl.float32)" if interpreting() and type == "tl.bfloat16" else "")

    def dot(self, one: str, other: str, total: str = "") -> str:
        exact = ', input_precision="ieee"' if str(self.attention.element) == "f32" else ""
        return f"tl.dot({self.factor(one)}, {self.factor(other)}{f', {total}' if total else ''}{exact})"

    def store(self, kernel: Kernel, name: str, tile: str, high: int, wide: int, batch: str, first: str) -> None:
        """The loops behind a tile of a result."""
        part = self.part(kernel, name, name, high, wide, tile)
        stores = self.sides.after[name].stores
        for own, at in zip(part.axes, (batch, first, "0"), strict=False):
            part.start(own, at)
        part.ready(part.needed(stores))
        assert part.written >= set(stores), f"a result of {name} that nothing writes"

    # ---- the walk ----------------------------------------------------------------------------------------------------

    def places(self, kernel: Kernel, rows: int) -> int:
        """The block of rows and the batch of a program; how many blocks there are. Where later rows see more, the last
        come first."""
        blocks = -(-rows // self.tile.rows)
        wide = any(self.walk_of(side).wide for side in (*self.sides.before.values(), *self.sides.after.values()))
        kernel.line("pid = tl.program_id(0)" + (".to(tl.int64)" if wide else ""))
        turned = self.anchor.causal and kernel.name != "by_keys"
        kernel.line(f"block = {f'{blocks - 1} - ' if turned else ''}pid % {blocks}")
        kernel.line(f"batch = pid // {blocks}")
        kernel.line(f"first = block * {self.tile.rows}")
        return blocks

    def over_keys(self, kernel: Kernel) -> list[tuple[str, bool]]:
        """The loops over keys, and whether some of what they walk is not seen."""
        high, step, keys = self.tile.rows, self.tile.step, self.keys
        if not self.anchor.causal:
            whole = keys // step * step
            tail = [(f"{whole}, {keys}, {step}", True)] if keys % step else []
            return [*([(f"0, {whole}, {step}", False)] if whole else []), *tail]
        kernel.line(f"whole = tl.minimum(first, {keys}) // {step} * {step}")
        kernel.line(f"last = tl.minimum(first + {high}, {keys})")
        return [(f"0, whole, {step}", False), (f"whole, last, {step}", True)]

    def over_queries(self, kernel: Kernel) -> list[tuple[str, bool]]:
        """The loops over queries, and whether some of what they walk does not see a key of the block."""
        high, step, rows = self.tile.rows, self.tile.step, self.queries
        whole = rows // step * step
        tail = [(f"{whole}, {rows}, {step}", True)] if rows % step else []
        if not self.anchor.causal:
            return [*([(f"0, {whole}, {step}", False)] if whole else []), *tail]
        kernel.line(f"begin = first // {step} * {step}")
        kernel.line(f"middle = tl.minimum((first + {high + step - 1}) // {step} * {step}, {whole})")
        return [(f"begin, middle, {step}", True), (f"middle, {whole}, {step}", False), *tail]

    def loop(self, kernel: Kernel, name: str, bounds: str) -> None:
        kernel.line(f"for {name} in tl.range({bounds}, num_stages={self.tile.stages}):")
        kernel.depth += 1

    def scores(self, kernel: Kernel, q: str, k: str, conditions: Sequence[str], mask: str) -> None:
        """`score`: of rows x keys, minus infinity where a row does not see a key."""
        kernel.line(f"score = {self.dot(q, f'tl.trans({k})')} * {self.anchor.scale * self.unit!r}")
        if mask and self.adds:
            kernel.line(f"score = score + {mask}")
        seen = [*([f"({mask} != 0)"] if mask and not self.adds else []), *conditions]
        if seen:
            kernel.line(f"score = tl.where({' & '.join(seen)}, score, {LOW})")

    def power(self, text: str) -> str:
        """e to what was a difference of scores."""
        return f"tl.exp2(({text}) * {LOG2E!r})" if self.adds else f"tl.exp2({text})"

    def seen(self, kernel: Kernel, row: str, key: str, high: int, wide: int, masked: bool, edge: str) -> list[str]:
        """What must hold for a row to see a key, where not everything is seen."""
        if not masked:
            return []
        kernel.line(f"rows = ({row} + tl.arange(0, {high}))[:, None]")
        kernel.line(f"keys = ({key} + tl.arange(0, {wide}))[None, :]")
        return [*(["(rows >= keys)"] if self.anchor.causal else []), edge]

    def mask(self, kernel: Kernel, batch: str, high: int, wide: int, row: str, key: str) -> str:
        """The tile of the mask, or nothing where there is none."""
        if self.anchor.mask is None:
            return ""
        part, wanted = self.opened(kernel, "mask", "m", high, wide, batch, False)
        part.start(part.axes[2], key)
        return self.computed(part, "mask", wanted, row)

    def forward(self) -> None:
        kernel, tile, attention = Kernel("attention"), self.tile, self.attention
        blocks = self.places(kernel, self.queries)
        q, wanted = self.opened(kernel, "q", "q", tile.rows, attention.width, "batch", True)
        query = self.computed(q, "q", wanted, "first")
        kernel.line(f"top = tl.full(({tile.rows},), {LOW}, tl.float32)")
        kernel.line(f"total = tl.zeros(({tile.rows},), tl.float32)")
        kernel.line(f"out = tl.zeros(({tile.rows}, {attention.depth}), tl.float32)")
        only = f"(block == {blocks - 1})" + (f" & (batch % {self.group} == 0)" if self.group > 1 else "")
        shared = [n for n in ("k", "v", "mask") if n in self.sides.before and self.sides.before[n].stores]
        if shared and self.anchor.causal and self.queries < self.keys:
            raise NoText(f"no row sees all keys, so that nobody computes all of {shared[0]} to store it")
        for bounds, masked in self.over_keys(kernel):
            self.loop(kernel, "s", bounds)
            tiles = []
            for name, wide in (("k", attention.width), ("v", attention.depth)):
                part, wanted = self.opened(kernel, name, name, tile.step, wide, self.key_batch, True, only)
                tiles.append(self.computed(part, name, wanted, "s", not masked))
            mask = self.mask(kernel, "batch", tile.rows, tile.step, "first", "s")
            edge = f"(keys < {self.keys})"
            conditions = self.seen(kernel, "first", "s", tile.rows, tile.step, masked, edge)
            self.scores(kernel, query, tiles[0], conditions, mask)
            kernel.line("new = tl.maximum(top, tl.max(score, 1))")
            # a row that has seen nothing yet
            kernel.line(f"base = tl.where(new == {LOW}, 0.0, new)" if mask else "base = new")
            kernel.line(f"p = {self.power('score - base[:, None]')}")
            kernel.line(f"less = {self.power('top - base')}")
            kernel.line("total = total * less + tl.sum(p, 1)")
            kernel.line("out = out * less[:, None]")
            kernel.line(f"out = {self.dot('p', tiles[1], 'out')}")
            kernel.line("top = new")
            kernel.depth -= 1
        if self.anchor.mask is not None:
            kernel.line("empty = total == 0.0")
            kernel.line("total = tl.where(empty, 1.0, total)")
            kernel.line("top = tl.where(empty, 0.0, top)")
        kernel.line("out = out / total[:, None]")
        log = "tl.log2(total)" if not self.adds else "tl.log(total)"
        kernel.line(f"logsumexp = (top + {log})" + ("" if self.adds else f" * {LN2!r}"))
        for name in self.sides.after:
            self.store(kernel, name, name, tile.rows, attention.depth, "batch", "first")
        self.functions.append((kernel, blocks * self.batches))

    @property
    def key_batch(self) -> str:
        """The batch of keys that one of queries reads."""
        return f"batch // {self.group}" if self.group > 1 else "batch"

    # ---- gradients ---------------------------------------------------------------------------------------------------

    def by_queries(self) -> None:
        """The gradient of queries, and sum(dout * out) of each row."""
        kernel, tile, attention = Kernel("by_queries"), self.tile, self.attention
        blocks = self.places(kernel, self.queries)
        widths = {"q": attention.width, "dout": attention.depth, "out": attention.depth, "logsumexp": 0}
        held = {}
        for name, wide in widths.items():
            part, wanted = self.opened(kernel, name, name, tile.rows, wide, "batch", True)
            held[name] = self.computed(part, name, wanted, "first")
        kernel.line(f"delta = tl.sum({held['dout']}.to(tl.float32) * {held['out']}.to(tl.float32), 1)")
        kernel.line(f"row = first + tl.arange(0, {tile.rows})")
        inside = f", mask=row < {self.queries}" if self.queries % tile.rows else ""
        kernel.line(f"tl.store(p{len(attention.specs)} + batch * {self.queries} + row, delta{inside})")
        if "dq" in self.sides.after:
            kernel.line(f"dq = tl.zeros(({tile.rows}, {attention.width}), tl.float32)")
            kernel.line(f"least = {held['logsumexp']} * {self.unit!r}")
            for bounds, masked in self.over_keys(kernel):
                self.loop(kernel, "s", bounds)
                tiles = []
                for name, wide in (("k", attention.width), ("v", attention.depth)):
                    part, wanted = self.opened(kernel, name, name, tile.step, wide, self.key_batch, False)
                    tiles.append(self.computed(part, name, wanted, "s", not masked))
                mask = self.mask(kernel, "batch", tile.rows, tile.step, "first", "s")
                edge = f"(keys < {self.keys})"
                conditions = self.seen(kernel, "first", "s", tile.rows, tile.step, masked, edge)
                self.scores(kernel, held["q"], tiles[0], conditions, mask)
                kernel.line(f"p = {self.power('score - least[:, None]')}")
                kernel.line(f"dp = {self.dot(held['dout'], f'tl.trans({tiles[1]})')}")
                kernel.line("ds = p * (dp - delta[:, None])")
                kernel.line(f"dq = {self.dot('ds', tiles[0], 'dq')}")
                kernel.depth -= 1
            kernel.line(f"dq = dq * {self.anchor.scale!r}")
            self.store(kernel, "dq", "dq", tile.rows, attention.width, "batch", "first")
        self.functions.append((kernel, blocks * self.batches))

    def by_keys(self) -> None:
        """The gradients of keys and values, over all queries of the heads that share them."""
        kernel, tile, attention = Kernel("by_keys"), self.tile, self.attention
        blocks = self.places(kernel, self.keys)
        held, made = self.own_keys(kernel)
        loops = self.over_queries(kernel)
        batch = self.own_heads(kernel)
        for bounds, masked in loops:
            self.loop(kernel, "l", bounds)
            tiles = {}
            for name, wide in (("q", attention.width), ("dout", attention.depth), ("logsumexp", 0)):
                part, wanted = self.opened(kernel, name, name, tile.step, wide, batch, False)
                tiles[name] = self.computed(part, name, wanted, "l", not masked)
            kernel.line(f"row = l + tl.arange(0, {tile.step})")
            inside = f", mask=row < {self.queries}, other=0.0" if masked and self.queries % tile.step else ""
            kernel.line(f"delta = tl.load(p{len(attention.specs)} + {batch} * {self.queries} + row{inside})")
            kernel.line(f"least = {tiles['logsumexp']} * {self.unit!r}")
            mask = self.mask(kernel, batch, tile.step, tile.rows, "l", "first")
            edge = f"(rows < {self.queries})"
            conditions = self.seen(kernel, "l", "first", tile.step, tile.rows, masked, edge)
            self.scores(kernel, tiles["q"], held["k"], conditions, mask)
            kernel.line(f"p = {self.power('score - least[:, None]')}")
            if "dv" in made:
                kernel.line(f"dv = {self.dot('tl.trans(p)', tiles['dout'], 'dv')}")
            if "dk" in made:
                kernel.line(f"dp = {self.dot(tiles['dout'], f'''tl.trans({held['v']})''')}")
                kernel.line("ds = p * (dp - delta[:, None])")
                kernel.line(f"dk = {self.dot('tl.trans(ds)', tiles['q'], 'dk')}")
            kernel.depth -= 1
        self.store_keys(kernel, made)
        self.functions.append((kernel, blocks * (self.batches // self.group)))

    def own_keys(self, kernel: Kernel) -> tuple[dict[str, str], dict[str, int]]:
        """The keys and values of a program, and the sums for their gradients that are asked for, with their widths."""
        widths = {"k": self.attention.width, "v": self.attention.depth}
        held = {}
        for name, wide in widths.items():
            part, wanted = self.opened(kernel, name, name, self.tile.rows, wide, "batch", True)
            held[name] = self.computed(part, name, wanted, "first")
        made = {f"d{name}": wide for name, wide in widths.items() if f"d{name}" in self.sides.after}
        for name, wide in made.items():
            kernel.line(f"{name} = tl.zeros(({self.tile.rows}, {wide}), tl.float32)")
        return held, made

    def store_keys(self, kernel: Kernel, made: dict[str, int]) -> None:
        """What the sums for keys and values are in the end, behind all loops."""
        kernel.depth = 1
        if "dk" in made:
            kernel.line(f"dk = dk * {self.anchor.scale!r}")
        for name, wide in made.items():
            self.store(kernel, name, name, self.tile.rows, wide, "batch", "first")

    def own_heads(self, kernel: Kernel) -> str:
        """The batch of queries that a program of keys walks: one, or those of the heads that share them, in a loop."""
        if self.group == 1:
            return "batch"
        kernel.line(f"for head in range(0, {self.group}):")
        kernel.depth += 1
        kernel.line(f"own = batch * {self.group} + head")
        return "own"

    def gradients(self) -> None:
        """All gradients of a head of keys by one program, which has all of them and walks queries. Scores lie with keys
        as rows, so that they are multiplied from where they are."""
        kernel, tile, attention = Kernel("gradients"), self.tile, self.attention
        self.places(kernel, tile.rows)
        held, made = self.own_keys(kernel)
        batch = self.own_heads(kernel)
        self.loop(kernel, "l", f"0, {self.queries}, {tile.step}")
        tiles = {}
        wides = {"q": attention.width, "dout": attention.depth, "out": attention.depth, "logsumexp": 0}
        for name, wide in wides.items():
            part, wanted = self.opened(kernel, name, name, tile.step, wide, batch, True)
            tiles[name] = self.computed(part, name, wanted, "l", not self.queries % tile.step)
        kernel.line(f"delta = tl.sum({tiles['dout']}.to(tl.float32) * {tiles['out']}.to(tl.float32), 1)")
        kernel.line(f"least = {tiles['logsumexp']} * {self.unit!r}")
        mask = self.mask(kernel, batch, tile.step, tile.rows, "l", "0")
        kernel.line(f"keys = tl.arange(0, {tile.rows})[:, None]")
        kernel.line(f"rows = (l + tl.arange(0, {tile.step}))[None, :]")
        conditions = ["(rows >= keys)"] if self.anchor.causal else []
        conditions += [f"(keys < {self.keys})"] if self.keys < tile.rows else []
        self.scores(kernel, held["k"], tiles["q"], conditions, f"tl.trans({mask})" if mask else "")
        kernel.line(f"p = {self.power('score - least[None, :]')}")
        if "dv" in made:
            kernel.line(f"dv = {self.dot('p', tiles['dout'], 'dv')}")
        kernel.line(f"dp = {self.dot(held['v'], f'''tl.trans({tiles['dout']})''')}")
        kernel.line("ds = p * (dp - delta[None, :])")
        if "dk" in made:
            kernel.line(f"dk = {self.dot('ds', tiles['q'], 'dk')}")
        if "dq" in self.sides.after:
            kernel.line(f"dq = tl.trans({self.dot(f'''tl.trans({held['k']})''', 'ds')}) * {self.anchor.scale!r}")
            self.store(kernel, "dq", "dq", tile.step, attention.width, batch, "l")
        self.store_keys(kernel, made)
        self.functions.append((kernel, self.batches // self.group))
