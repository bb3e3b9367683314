"""The kernel families: pointwise blocks and tiles, rows with what is summed over them, and plain sums.

A family writes one or two kernel functions for a configuration (block sizes, warps, how many programs). Sums over more
than one program go through partial sums in scratch memory, in a fixed order, that a small second kernel finishes.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from ...dialects.loop import Reduce, Store, schedule
from ...ir.core import Op, Value
from ..kernels import Spec
from .cases import stretches
from .online import Online, pairs
from .scalars import NoText, accumulator_type, combined, neutral, number_type
from .text import Axis, Text, axis, module_text
from .walk import Dim, Walk, fast_dim

#: the longest row that one program keeps in registers, and the longest that it walks in several passes
LONGEST_HELD = 16384
LONGEST_ROW = 2**20
#: multiprocessors of the GPU that configurations are first guessed for; timing decides
PROCESSORS = 132
#: bytes that are still at hand when all of them are read again
CACHE = 1 << 24
#: warps of the kernel that finishes sums: it waits for memory most of its time
FINISHING = 8
TORCH = {
    "tl.float32": torch.float32,
    "tl.float64": torch.float64,
    "tl.int64": torch.int64,
    "tl.int32": torch.int32,
    "tl.int16": torch.int16,
    "tl.int8": torch.int8,
    "tl.uint8": torch.uint8,
}


@dataclass(frozen=True)
class Blocks:
    """Pointwise: `block` neighbouring points per program."""

    block: int
    warps: int

    def __str__(self) -> str:
        return f"flat {self.block} w{self.warps}"


@dataclass(frozen=True)
class Tiles:
    """Pointwise where tensors disagree about the fastest dimension: tiles over both. Or where some tensors lie along
    the fastest dimension alone: tiles of runs (`Family.runs`), for each of which these are read once."""

    high: int
    wide: int
    warps: int

    def __str__(self) -> str:
        return f"tile {self.high}x{self.wide} w{self.warps}"


@dataclass(frozen=True)
class Rows:
    """`rows` rows at a time. `block` covers a row, which is then read once, or (`looped`) walks along it in passes."""

    rows: int
    block: int
    warps: int
    looped: bool = False
    #: how many programs share the rows, where something is summed over them; otherwise each has its own rows
    programs: int = 0
    #: how many turns of a program's rows, or of its walk along one, are under way at a time
    stages: int = 1

    def __str__(self) -> str:
        shared = f" p{self.programs}" if self.programs else ""
        ahead = f" s{self.stages}" if self.stages > 1 else ""
        return f"row x{self.rows} {'loop ' if self.looped else ''}{self.block}{shared} w{self.warps}{ahead}"


@dataclass(frozen=True)
class Sums:
    """Tiles of `reduced` x `kept` points; `programs` of them share each sum. `stages` tiles are under way at a time."""

    reduced: int
    kept: int
    programs: int
    warps: int
    stages: int = 1

    def __str__(self) -> str:
        ahead = f" s{self.stages}" if self.stages > 1 else ""
        return f"sum {self.reduced}x{self.kept} p{self.programs} w{self.warps}{ahead}"


@dataclass(frozen=True)
class Cases:
    """Pointwise, a part of the programs for every tensor of a concatenation: `block` neighbouring points each."""

    block: int
    warps: int

    def __str__(self) -> str:
        return f"cases {self.block} w{self.warps}"


Config = Blocks | Tiles | Rows | Sums | Cases


@dataclass(frozen=True)
class Function:
    """One kernel function: which tensors it takes (arguments, then scratch), how many programs, how many warps."""

    name: str
    arguments: tuple[int, ...]
    grid: int
    warps: int


@dataclass(frozen=True)
class Generated:
    """The source of one candidate."""

    source: str
    functions: tuple[Function, ...]
    scratch: tuple[Spec, ...]


#: functions, how many programs each has, and scratch memory
Written = tuple[list[Text], list[int], tuple[Spec, ...]]


class Family:
    """What a kernel needs, before a configuration is chosen."""

    def __init__(self, function: Op, specs: Sequence[Spec]):
        self.function = function
        self.texts: dict[Config, Generated] = {}
        self.walk = walk = Walk(function, specs)
        self.reductions = [op for op in walk.ops if op.definition is Reduce and not walk.trivial(op)]
        self.stores = [op for op in walk.ops if op.definition is Store]
        self.behind: dict[Value, frozenset[Op]] = {}
        for op in walk.ops:
            found = frozenset().union(*(self.behind.get(v, frozenset()) for v in op.operands))
            for result in op.results:
                self.behind[result] = found | ({op} if op in self.reductions else set())
        used = walk.used_dims()
        kinds = {frozenset(op.attributes["dims"]) & used for op in self.reductions}
        #: whether rows come back: some number needs a whole row before it can be computed
        self.inner = any(
            self.dims(op) & frozenset(r.attributes["dims"])
            for op in walk.ops
            for v in op.operands
            for r in self.behind.get(v, ())
            if r is not op
        )
        if not self.reductions:
            self.kind = "pointwise"
            self.row = used
        elif len(kinds) == 1 and not self.inner:
            self.kind = "sums"
            self.row = used - next(iter(kinds))  # what is kept
        else:
            self.kind = "rows"
            plan = schedule(function)
            self.row = frozenset(plan.row) & used
        across = set(plan.across) if self.kind == "rows" else set(self.reductions)
        self.across = [op for op in self.reductions if op in across]
        self.along = [op for op in self.reductions if op not in across]
        self.after = [s for s in self.stores if self.behind[s.operands[0]] & across]
        self.before = [s for s in self.stores if s not in self.after]
        membership = {d: tuple(d in op.attributes["dims"] for op in self.reductions) for d in used}
        dims = walk.merged(lambda d: (d in self.row, membership[d]))
        self.inside = [d for d in dims if d.parts[-1] in self.row]
        self.outside = [d for d in dims if d.parts[-1] not in self.row]
        if self.kind == "sums":
            self.inside.sort(key=self.stands_still)
        self.check()

    def stands_still(self, dim: Dim) -> bool:
        """Whether the largest tensor does not change along a dimension and is more than a cache holds: where that is
        walked inside of other dimensions, it is read once."""
        largest = self.walk.heavy()[0]
        return self.walk.bytes(largest) > CACHE and not self.walk.access_dims(largest) & set(dim.parts)

    def dims(self, op: Op) -> frozenset[int]:
        """The dimensions an op changes along; a store changes along its output's."""
        if op in self.walk.accesses:
            dims = self.walk.access_dims(self.walk.accesses[op])
            return dims if op.results else dims | self.walk.dims_of[op.operands[0]]
        return self.walk.dims_of[op.results[0]]

    def check(self) -> None:
        """Says what no configuration can do."""
        for op in self.across:
            if self.behind[op.operands[0]] & set(self.across):
                raise NoText("a sum over what another sum over all rows gives")
        if self.kind != "rows":
            return
        outside = frozenset(p for d in self.outside for p in d.parts)
        if not self.row:
            raise NoText("a total is written back to the points it is made of")
        if any(frozenset(r.attributes["dims"]) & (self.row | outside) != self.row for r in self.along):
            raise NoText("it needs whole rows along different dimensions at once")
        for op in self.walk.ops:
            for r in {r for v in op.operands for r in self.behind.get(v, ()) if r in self.across and r is not op}:
                if self.dims(op) & frozenset(r.attributes["dims"]):
                    raise NoText("a total over all rows is used in every row")
        written = frozenset().union(*(self.dims(s) for s in self.after))
        for op in self.across:
            dims = frozenset(op.attributes["dims"])
            if not outside <= dims:
                raise NoText("it sums over some of the rows only")
            if not self.kept(op):
                if dims & self.row and not self.row <= dims:
                    raise NoText("it sums over a part of a row along which nothing changes")
            elif not self.row - self.kept(op) <= dims or not written <= self.kept(op):
                raise NoText("its sums over all rows keep different parts of a row")
        if self.length > LONGEST_ROW:
            raise NoText(f"rows of {self.length} elements are too long for one program; sum them in a kernel before it")
        if self.length > LONGEST_HELD and any(self.kept(op) for op in self.across):
            raise NoText(f"sums over whole rows of {self.length} elements do not fit into registers")

    def kept(self, op: Op) -> frozenset[int]:
        """The dimensions of a row that a sum over rows keeps."""
        return self.walk.dims_of[op.results[0]] & self.row

    @property
    def length(self) -> int:
        return math.prod(d.size for d in self.inside)

    @property
    def count(self) -> int:
        return math.prod(d.size for d in self.outside)

    # ---- the functions -----------------------------------------------------------------------------------------------

    @functools.cached_property
    def cases(self) -> list[Family]:
        """The kernels of which a pointwise one consists along a dimension, where it is better taken apart."""
        found = stretches(self.function, self.walk.specs) if self.kind == "pointwise" else []
        return [Family(function, self.walk.specs) for function in found]

    def generate(self, config: Config) -> Generated:
        if config not in self.texts:
            self.texts[config] = self.written(config)
        return self.texts[config]

    def written(self, config: Config) -> Generated:
        if isinstance(config, Cases):
            return self.by_case(config)
        if isinstance(config, Blocks):
            texts, grids, scratch = self.blocks(config)
        elif isinstance(config, Tiles):
            texts, grids, scratch = self.tiles(config)
        elif isinstance(config, Rows):
            texts, grids, scratch = self.rows(config)
        else:
            texts, grids, scratch = self.sums(config)
        assert set(self.stores) <= set().union(*(text.written for text in texts)), "a result that nothing writes"
        functions, arguments = [], []
        for text, grid in zip(texts, grids, strict=True):
            arguments.append(pointers_in(text))
            warps = config.warps if text is texts[0] else FINISHING
            functions.append(Function(text.name, tuple(int(n[1:]) for n in arguments[-1]), grid, warps))
        return Generated(module_text(texts, arguments), tuple(functions), scratch)

    def blocks(self, config: Blocks) -> Written:
        x = axis("x", self.inside, config.block, 0)
        text = Text(self.walk, (x,), "pointwise")
        text.start(x, f"{text.pid()} * {config.block}")
        text.ready(text.needed(self.stores))
        return [text], [x.blocks], ()

    def by_case(self, config: Cases) -> Generated:
        main = Text(self.walk, (), "cases")
        main.line(f"pid = {main.pid()}")
        texts, arguments, begin = [], [], 0
        for number, case in enumerate(self.cases):
            x = axis("x", case.inside, config.block, 0)
            text = Text(case.walk, (x,), f"case_{number}")
            text.start(x, f"pid * {config.block}")
            text.ready(text.needed(case.stores))
            arguments.append([*pointers_in(text), "pid"])
            main.line(f"if (pid >= {begin}) & (pid < {begin + x.blocks}):")
            main.line(f"    case_{number}({', '.join([*arguments[-1][:-1], f'pid - {begin}'])})")
            texts.append(text)
            begin += x.blocks
        used = pointers_in(main)
        source = module_text([*texts, main], [*arguments, used])
        return Generated(source, (Function("cases", tuple(int(n[1:]) for n in used), begin, config.warps),), ())

    def tiles(self, config: Tiles) -> Written:
        both = self.fast_dims()
        if both is not None:
            across, along = both
            y, x = axis("y", [across], config.high, 0), axis("x", [along], config.wide, 1)
        else:
            assert self.runs is not None, "tiles are for tensors that disagree, or of which some are short"
            across, along = self.runs
            n = rows_of_run(across, along, config.wide)
            y = Axis("y", (), config.high, 0, points=across.size // n, along=(across,))
            x = Axis("x", (across, along), config.wide, 1, points=n * along.size, begins=f"y * {n}")
        rest = [d for d in self.inside if d not in (across, along)]
        z = axis("z", rest, 1, None)
        text = Text(self.walk, (z, y, x), "tiles")
        text.line(f"pid = {text.pid()}")
        text.start(z, f"pid // {y.blocks * x.blocks}")
        text.start(y, f"pid // {x.blocks} % {y.blocks} * {config.high}")
        text.start(x, f"pid % {x.blocks} * {config.wide}")
        text.ready(text.needed(self.stores))
        return [text], [z.size * y.blocks * x.blocks], ()

    def fast_dims(self) -> tuple[Dim, Dim] | None:
        """The dimension that most bytes are walked along, after one that other large tensors walk along instead."""
        walk = self.walk
        heavy = walk.heavy()
        weight: dict[Dim, int] = {}
        reach: dict[Dim, set[Dim]] = {}
        for access in heavy:
            fast = fast_dim(access, self.inside)
            if fast is not None and walk.bytes(access) * 8 >= walk.bytes(heavy[0]):
                weight[fast] = weight.get(fast, 0) + walk.bytes(access)
                reach.setdefault(fast, set()).update(d for d in self.inside if access.offset.terms[d.parts[-1]])
        order = sorted(weight, key=lambda d: -weight[d])
        others = [d for d in order[1:] if order[0] in reach[d] and d in reach[order[0]]]
        return (others[0], order[0]) if others else None

    @functools.cached_property
    def runs(self) -> tuple[Dim, Dim] | None:
        """Two dimensions that lie one after the other, where some tensors lie along the second and not the first."""
        if self.kind != "pointwise" or len(self.inside) < 2:
            return None
        across, along = self.inside[-2:]
        outputs = [self.walk.accesses[op].offset for op in self.stores]
        if any(f.terms[along.parts[-1]] != 1 or f.terms[across.parts[-1]] != along.size for f in outputs):
            return None
        reach = [self.walk.access_dims(a) for op, a in self.walk.accesses.items() if op not in self.stores]
        short = any(along.parts[-1] in dims and across.parts[-1] not in dims for dims in reach)
        return (across, along) if short else None

    def rows(self, config: Rows) -> Written:
        if config.looped and any(self.kept(op) for op in self.across):
            raise NoText("sums over rows that are not held whole")
        r = axis("r", self.outside, config.rows, 0 if config.rows > 1 else None)
        c = axis("c", self.inside, config.block, 1 if config.rows > 1 else 0)
        text = Text(self.walk, (r, c), "rows")
        targets = [*self.across, *self.before]
        text.line(f"pid = {text.pid()}")
        everything = text.needed(targets)
        text.ready(everything)
        if not config.looped:
            text.start(c, "0")
            text.ready(everything)
        sums: dict[Op, tuple[str, list[Axis]]] = {}
        for op in self.across:
            axes = [r, c] if frozenset(op.attributes["dims"]) & self.row or self.kept(op) else [r]
            sums[op] = text.accumulator(op, axes), axes
        programs = min(config.programs, r.blocks) if self.across else 0
        if not self.across:
            text.start(r, f"pid * {config.rows}")
            self.one_row(text, r, c, config, sums)
            return [text], [r.blocks], ()
        programs = max(programs, 1)
        stages = 1 if config.looped else config.stages
        with text.loop(f"b in {counted(f'pid, {r.blocks}, {programs}', stages)}"):
            text.start(r, f"b * {config.rows}")
            self.one_row(text, r, c, config, sums)
        partials = []
        for i, op in enumerate(self.across):
            name, axes = sums[op]
            vector = bool(self.kept(op))
            number = text.total(op, name, axes, [r] if vector else axes)
            place = f"p{len(self.walk.specs) + i} + pid"
            if vector:
                where, mask = f"{place} * {c.size} + c", text.mask([c])
                text.line(f"tl.store({where}, {number.text}{f', mask={mask}' if mask else ''})")
            else:
                text.line(f"tl.store({place}, {number.text})")
            partials.append((op, vector))
        finish, grid = self.finish(c, programs, partials)
        scratch = tuple(self.scratch(op, programs, c.size if vector else 0) for op, vector in partials)
        return [text, finish], [programs, grid], scratch

    def one_row(self, text: Text, r: Axis, c: Axis, config: Rows, sums: dict[Op, tuple[str, list[Axis]]]) -> None:
        """The reductions along a row, in order, then what is written and what is summed over rows."""
        along = counted(f"0, {c.size}, {c.block}", config.stages)
        targets = [*self.across, *self.before]
        # what is read once per row comes before any walk: the row may be written over it in the last one
        text.ready([op for op in text.needed(targets) if op.definition is not Store and c not in text.op_axes(op)])
        if not config.looped:
            for op in text.needed(targets):
                if op not in self.reductions:
                    text.ready([op])
                elif op in sums:
                    text.accumulate(sums[op][0], op, sums[op][1])
                else:
                    axes = [a for a in (r, c) if a is c or a in text.value_axes(op.operands[0])]
                    text.known(op, text.total(op, text.operand(op, axes), axes, [c]))
            return
        left = [op for op in self.along if op in text.needed(targets)]
        while left:
            now = [op for op in left if not self.behind[op.operands[0]] & set(left)]
            values = text.needed([v.op for op in now for v in op.operands if v.op is not None])
            text.ready(values)
            at_once = [Online(text, pair, c) for pair in pairs(self, now, left)] if config.rows == 1 else []
            paired = {op for o in at_once for op in (o.pair.maximum, o.pair.sum)}
            totals = []
            for op in now:
                if op in paired:
                    continue
                axes = [a for a in (r, c) if a is c or a in text.value_axes(op.operands[0])]
                totals.append((op, text.accumulator(op, axes), axes))
            with text.loop(f"c0 in {along}"):
                text.start(c, "c0")
                text.ready(values)
                for op, name, axes in totals:
                    text.accumulate(name, op, axes)
                for one in at_once:
                    one.step()
            for op, name, axes in totals:
                text.known(op, text.total(op, name, axes, [c]))
            for one in at_once:
                one.finish()
            left = [op for op in left if op not in now and op not in paired]
        last = text.needed(targets)
        text.ready(last)
        for op in self.across:
            if c not in sums[op][1]:
                text.accumulate(sums[op][0], op, sums[op][1])
        wide = [op for op in self.across if c in sums[op][1]]
        stores = [op for op in self.before if c in text.op_axes(op)]
        if wide or stores:
            with text.loop(f"c0 in {along}"):
                text.start(c, "c0")
                text.ready(text.needed([*wide, *stores]))
                for op in wide:
                    text.accumulate(sums[op][0], op, sums[op][1])

    def scratch(self, op: Op, programs: int, size: int) -> Spec:
        dtype = TORCH[accumulator_type(op.attributes["dtype"])]
        return Spec((programs, size), (size, 1), dtype) if size else Spec((programs,), (1,), dtype)

    def sums(self, config: Sums) -> Written:
        k = axis("k", self.inside, config.kept, 1 if config.kept > 1 else None)
        n = axis("n", self.outside, config.reduced, 0)
        text = Text(self.walk, (n, k), "sums", folds=self.walk.rough)
        text.line(f"pid = {text.pid()}")
        everything = text.needed([*self.across, *self.before])
        text.ready(everything)
        text.start(k, f"pid % {max(k.blocks, 1)} * {config.kept}")
        text.ready(everything)
        sums = []
        for op in self.across:
            axes = [a for a in (n, k) if a is n or a in text.value_axes(op.operands[0])]
            sums.append((op, text.accumulator(op, axes), axes))
        programs = config.programs
        steps = f"pid // {max(k.blocks, 1)} * {n.block}, {n.size}, {programs * n.block}"
        with text.loop(f"n0 in {counted(steps, config.stages)}"):
            text.start(n, "n0", n.alone)  # what lies along the first dimension is read once for a block
            text.ready(everything)
            for op, name, axes in sums:
                text.accumulate(name, op, axes, [n])
        partials = []
        for i, (op, name, axes) in enumerate(sums):
            number = text.total(op, name, axes, [n])
            if programs == 1:
                text.known(op, number)
                continue
            vector = bool(self.kept(op))
            place = f"p{len(self.walk.specs) + i} + pid // {k.blocks}"
            if vector:
                mask = text.mask(text.tiled([k]))
                text.line(f"tl.store({place} * {k.size} + k, {number.text}{f', mask={mask}' if mask else ''})")
            else:
                text.line(f"tl.store({place}, {number.text})")
            partials.append((op, vector))
        if programs == 1:
            text.ready(text.needed(self.after))
            return [text], [k.blocks], ()
        finish, grid = self.finish(k, programs, partials)
        scratch = tuple(self.scratch(op, programs, k.size if vector else 0) for op, vector in partials)
        return [text, finish], [k.blocks * programs, grid], scratch

    def finish(self, row: Axis, programs: int, partials: Sequence[tuple[Op, bool]]) -> tuple[Text, int]:
        """The second kernel: adds up the partial sums in `p` and computes what comes after them."""
        strides: dict[Dim, int] = {}
        for dim in reversed(row.dims):
            strides[dim] = math.prod(d.size for d in row.dims[row.dims.index(dim) + 1 :])
        kept = frozenset().union(*(self.kept(op) for op, _ in partials), *(self.dims(s) for s in self.after))
        stay = [d for d in row.dims if self.kind == "sums" or set(d.parts) & kept]
        gone = [d for d in row.dims if d not in stay] if any(vector for _, vector in partials) else []
        size = math.prod(d.size for d in stay)
        parts = programs * math.prod(d.size for d in gone)
        block = min(power_of_two(size), 16)
        k = axis("k", stay, block, 1 if block > 1 else None)
        q = axis("q", [], min(power_of_two(parts), 4096 // block), 0)
        text = Text(self.walk, (k, q), "finish")
        text.line(f"pid = {text.pid()}")
        text.start(k, f"pid * {block}")
        for vectors in (True, False):  # in one walk each: their loads wait together
            some = [(i, op) for i, (op, vector) in enumerate(partials) if vector is vectors]
            if not some:
                continue
            axes = [q, k] if vectors else [q]
            totals = [text.accumulator(op, axes) for _, op in some]
            count = parts if vectors else programs
            with text.loop(f"q0 in range(0, {count}, {q.block})"):
                text.line(f"q = (q0 + tl.arange(0, {q.block})){text.expand(q)}")
                inside = [f"(q < {count})"] if count % q.block else []
                inner, terms = math.prod(d.size for d in gone), []
                if vectors:
                    terms.append(f"q // {inner} * {row.size}" if inner > 1 else f"q * {row.size}")
                    for dim in gone:
                        inner //= dim.size
                        terms.append(f"q // {inner} % {dim.size} * {strides[dim]}")
                    terms += [f"{text.index(d)} * {strides[d]}" for d in stay]
                else:
                    terms.append("q")
                mask = text.mask(text.tiled([k]) if vectors else [], inside)
                for (i, op), total in zip(some, totals, strict=True):
                    kind, type = op.attributes["kind"], accumulator_type(op.attributes["dtype"])
                    tail = f", mask={mask}, other={neutral(kind, type)})" if mask else ")"
                    text.line(f"part{i} = tl.load(p{len(self.walk.specs) + i} + ({' + '.join(terms)}){tail}")
                    text.line(f"{total} = {combined(kind, total, f'part{i}', type)}")
            for (_, op), total in zip(some, totals, strict=True):
                text.known(op, text.total(op, total, axes, [q]))
        text.ready(text.needed(self.after))
        return text, k.blocks


def rows_of_run(across: Dim, along: Dim, wide: int) -> int:
    """How many rows make a run of whole tiles, which is better than tiles that are a part empty."""
    n = wide // math.gcd(wide, along.size)
    return n if across.size % n == 0 else 1


def pointers_in(text: Text) -> list[str]:
    """The tensors that a function reads or writes."""
    return [f"p{n}" for n in sorted({int(n) for n in re.findall(r"\bp(\d+)\b", "\n".join(text.lines))})]


def power_of_two(n: int) -> int:
    """The smallest power of two that is not smaller."""
    return 1 << max(n - 1, 0).bit_length()


def unsupported(specs: Iterable[Spec], function: Op) -> str:
    """A reason if a tensor is of a type that is not generated."""
    return unsupported_among(specs, function.regions[0].block.arguments)


def unsupported_among(specs: Iterable[Spec], tensors: Iterable[Value]) -> str:
    for tensor, spec in zip(tensors, specs, strict=True):
        try:
            number_type(tensor.type.element)
        except NoText:
            return f"tensors of type {tensor.type.element} are not generated"
        if str(tensor.type.element).startswith("f8"):
            return f"tensors of type {tensor.type.element} are not generated"
        if any(s < 0 for s in spec.strides):
            return "a tensor has a negative stride"
    return ""


def counted(steps: str, stages: int) -> str:
    """What a loop counts, with so many turns under way at a time."""
    return f"tl.range({steps}, num_stages={stages})" if stages > 1 else f"range({steps})"
