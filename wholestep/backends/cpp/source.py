"""C++ text of a kernel. One *nest* of loops computes a set of aims; a structure puts nests together.

phases: each reduction is a walk over all points, by chunks whose partial results are combined in order; then all is written.
    Without reductions this is a plain pointwise kernel.
rows: all passes over one row come one after the other, while it is in the cache; sums over rows are gathered by chunks.
lanes: the same for a block of rows that lie side by side in memory, one row per lane of a vector.
Chunks do not depend on the number of threads, so neither do results.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cmp_to_key

from ...ir.types import ScalarType
from .walk import EXPENSIVE, Guard, Linear, Number, Walk, Writing

STORED = {"f64": "double", "f32": "float", "bf16": "bf16", "f16": "f16", "i1": "b8"} | {
    "i64": "i64",
    "i32": "i32",
    "i16": "i16",
    "i8": "i8",
    "ui8": "u8",
}
COMPUTED = STORED | {"bf16": "float", "f16": "float", "i1": "bool"}
HOW = {"sum": "Sum", "prod": "Prod", "max": "Max", "min": "Min", "or": "Or", "and": "And"}
#: dearer than reading a number again, where it would be computed at every point instead of once per row
DEAR = EXPENSIVE | {"sqrt", "rsqrt", "div", "reciprocal"}
STRUCTURES = ("phases", "rows", "lanes")
#: bytes of a row's intermediate numbers that are kept on the stack between passes
ROW_BYTES = 256 * 1024
#: numbers below which starting threads takes longer than the work
ALONE = 16384


@dataclass(frozen=True, slots=True)
class Options:
    """What can be chosen about a kernel."""

    structure: str
    block: int = 4096  # numbers along the innermost dimension that one task takes
    tile: int = 0  # how far the other dimension is walked with it, where two arguments disagree about the fast one

    @property
    def name(self) -> str:
        return f"{self.structure} {self.block}" + (f" tile {self.tile}" if self.tile else "")


@dataclass(frozen=True, slots=True, eq=False)
class Loop:
    dim: int
    low: str
    high: str


@dataclass(frozen=True, slots=True, eq=False)
class Aim:
    """What a nest is for: a number added to what is at a place (`how` says by which reduction), kept there, or written."""

    number: Number
    walked: frozenset[int]
    place: str = ""
    how: str = ""
    writing: Writing | None = None


def source_of(walk: Walk, name: str, options: Options) -> tuple[str, int]:
    """The function as text, and the bytes of scratch memory it needs."""
    code = Code(walk, options)
    getattr(code, options.structure)()
    head = [f'extern "C" void {name}(void** tensors) {{']
    written = {w.tensor for w in walk.writings}
    for i, element in enumerate(walk.elements):
        type = STORED[element.text] if i in written else f"const {STORED[element.text]}"
        head.append(f"  {type}* const p{i} = ({type}*)tensors[{i}];")
    if code.scratch:
        head.append(f"  char* const scratch = (char*)tensors[{len(walk.elements)}];")
    return "\n".join([*head, *code.lines, "}", ""]), code.scratch


class Code:
    """The text of one kernel in the making. `names` says how each number that is known here is called."""

    def __init__(self, walk: Walk, options: Options):
        self.walk, self.options = walk, options
        self.lines: list[str] = []
        self.indent = 1
        self.names: dict[Number, str] = {}
        self.scratch = 0

    # ---- text --------------------------------------------------------------------------------------------------------

    def line(self, text: str) -> None:
        self.lines.append("  " * self.indent + text)

    def open(self, text: str = "") -> None:
        self.line(f"{text} {{" if text else "{")
        self.indent += 1

    def close(self) -> None:
        self.indent -= 1
        self.line("}")

    def memory(self, name: str, type: str, count: int) -> None:
        """An array of its own in the scratch memory."""
        self.line(f"{type}* const {name} = ({type}*)(scratch + {self.scratch});")
        self.scratch += -(-max(count, 1) * 8 // 64) * 64

    def tasks(self, parts: Sequence[tuple[str, int]], work: int) -> None:
        """Opens a loop over all combinations of indices, shared among threads if there is enough to do."""
        count = math.prod(n for _, n in parts)
        if count == 1:
            self.open()
        else:
            if work >= ALONE:
                self.line("#pragma omp parallel for schedule(static)")
            self.open(f"for (i64 task = 0; task < {count}; ++task)")
        rest = "task"
        for k, (name, n) in enumerate(reversed(parts)):
            last = k == len(parts) - 1
            if n == 1 or count == 0:
                self.line(f"const i64 {name} = 0;")
            else:
                self.line(f"const i64 {name} = {rest}{'' if last else f' % {n}'};")
                if not last:
                    rest = f"{rest} / {n}"

    # ---- numbers -----------------------------------------------------------------------------------------------------

    def compute(self, n: Number) -> None:
        """A statement that gives a number its name."""
        assert n.kind != "reduce", "a reduction is computed by a pass of its own"
        if n.kind == "constant":
            self.names[n] = literal(n.value, n.type)
            return
        if n.kind == "linear" and not n.linear.terms:
            self.names[n] = f"({c_type(n)}){number_text(n.linear.constant)}"
            return
        self.line(f"const {c_type(n)} {n.name} = {self.expression(n)};")
        self.names[n] = n.name

    def expression(self, n: Number) -> str:
        if n.kind == "linear":
            return f"({c_type(n)})({sum_text(n.linear)})"
        args = [self.names[a] for a in n.args]
        if n.kind == "load":
            return self.load(n, args)
        if n.kind == "random":
            element = n.args[3]
            whole = "i32" if element.is_small else "i64"
            seed, step, micro_batch, at = args
            stream, digits = n.attributes["stream"], n.attributes["digits"]
            where = f"(u32)(({whole}){at} >> 2), (u32){at}"
            return f"uniform({seed}, {step}, {micro_batch}, {where} & 3, {stream}u, {digits})"
        return apply(n, args)

    def load(self, n: Number, args: Sequence[str]) -> str:
        where = sum_text(n.linear)
        for arg, step in zip(args, n.steps, strict=True):
            where += f" + (i64){arg} * {step}"
        read = f"get(p{n.tensor}, {where})"
        if not n.guards:
            return read
        if 0 in self.walk.specs[n.tensor].shape:
            return literal(0, n.type)
        inside = " & ".join(self.inside(g) for g in n.guards)
        return f"{inside} ? {read} : {literal(0, n.type)}"

    def inside(self, guard: Guard) -> str:
        at = sum_text(guard.at)
        low, high = guard.at.range(self.walk.sizes)
        if guard.number is None and -(2**31) < low and high < 2**31 and guard.size < 2**31:
            return f"((u32)({at}) < {guard.size}u)"
        if guard.number is not None:
            at += f" + (i64){self.names[guard.number]}"
        return f"((u64)({at}) < {guard.size}ull)"

    # ---- nests -------------------------------------------------------------------------------------------------------

    def needed(self, aims: Iterable[Aim], known: Iterable[Number] = ()) -> list[Number]:
        """The numbers that have to be computed for some aims, in order."""
        found: set[Number] = set()
        known = {*self.names, *known}
        stack = [a for aim in aims for a in (aim.number.args if aim.how else (aim.number,))]
        while stack:
            number = stack.pop()
            if number not in found and number not in known:
                found.add(number)
                stack.extend(number.args)
        return [n for n in self.walk.numbers if n in found]

    def nest(self, loops: Sequence[Loop], aims: Sequence[Aim]) -> None:
        """Loops inside of one another; each number is computed in the outermost one that it does not change along."""
        position = {loop.dim: k for k, loop in enumerate(loops, 1)}

        def depth(dims: Iterable[int]) -> int:
            return max((position.get(d, 0) for d in dims), default=0)

        numbers: list[list[Number]] = [[] for _ in range(len(loops) + 1)]
        here: list[list[Aim]] = [[] for _ in range(len(loops) + 1)]
        for n in self.needed(aims):
            numbers[depth(n.varies)].append(n)
        for aim in aims:
            here[depth(aim.walked)].append(aim)
        for n in numbers[0]:
            self.compute(n)
        for aim in here[0]:
            self.reach(aim)
        if not loops:
            return
        outside = dict(self.names)
        for k, loop in enumerate(loops[:-1], 1):
            self.open(f"for (i64 i{loop.dim} = {loop.low}; i{loop.dim} < {loop.high}; ++i{loop.dim})")
            for n in numbers[k]:
                self.compute(n)
            for aim in here[k]:
                self.reach(aim)
        self.innermost(loops[-1], numbers[-1], here[-1])
        for _ in loops[:-1]:
            self.close()
        self.names = outside

    def innermost(self, loop: Loop, numbers: Sequence[Number], aims: Sequence[Aim]) -> None:
        """A loop for vectors. What it reduces is gathered in lanes that go on side by side."""
        lanes = [aim for aim in aims if aim.how and loop.dim in aim.number.dims]
        for aim in lanes:
            type, neutral = c_type(aim.number), neutral_of(aim.number)
            self.line(f"alignas(64) {type} {aim.number.name}_lanes[LANES];")
            self.line(f"begin<{type}>({aim.number.name}_lanes, {neutral});")
        i = f"i{loop.dim}"
        outside, self.lines = self.lines, []
        self.indent += 2 if lanes else 1
        for n in numbers:
            self.compute(n)
        for aim in aims:
            self.reach(aim, f"{aim.number.name}_lanes[lane]" if aim in lanes else "")
        self.indent -= 2 if lanes else 1
        body, self.lines = self.lines, outside
        if not lanes:
            self.line("#pragma omp simd")
            self.open(f"for (i64 {i} = {loop.low}; {i} < {loop.high}; ++{i})")
            self.lines += body
            self.close()
            return
        self.open(f"for (i64 first = {loop.low}; first < {loop.high}; first += LANES)")
        self.open(f"if (first + LANES <= {loop.high})")
        for count in ("LANES", f"{loop.high} - first"):
            self.line("#pragma omp simd")
            self.open(f"for (i64 lane = 0; lane < {count}; ++lane)")
            self.line(f"const i64 {i} = first + lane;")
            self.lines += body
            self.close()
            self.close()
            if count == "LANES":
                self.open("else")
        self.close()
        for aim in lanes:
            how = HOW[aim.how]
            self.line(f"{aim.place} = {how}::of({aim.place}, total<{how}>({aim.number.name}_lanes));")

    def reach(self, aim: Aim, place: str = "") -> None:
        name = self.names[aim.number.args[0]] if aim.how else self.names[aim.number]
        if aim.writing is not None:
            type = COMPUTED[self.walk.elements[aim.writing.tensor].text]
            self.line(f"put(p{aim.writing.tensor}, {sum_text(aim.writing.at)}, ({type}){name});")
        elif aim.how:
            place = place or aim.place
            value = f"To<{c_type(aim.number)}>::from({name})"
            self.line(f"{place} = {HOW[aim.how]}::of({place}, {value});")
        else:
            self.line(f"{aim.place} = {name};")

    # ---- orders ------------------------------------------------------------------------------------------------------

    def order(self, dims: Iterable[int], aims: Sequence[Aim]) -> list[int]:
        """Dimensions as the data lies in memory, the fastest last: the accesses vote with their bytes."""
        accesses = [(n.linear, n.tensor, n.varies) for n in self.needed(aims) if n.kind == "load"]
        accesses += [(a.writing.at, a.writing.tensor, a.walked) for a in aims if a.writing is not None]
        votes = [(at.terms, self.walk.points(on) * self.walk.specs[t].dtype.itemsize) for at, t, on in accesses]

        def before(a: int, b: int) -> int:
            """Negative where a goes outside of b."""
            tally = 0
            for terms, weight in votes:
                if a in terms and b in terms:
                    x, y = abs(terms[a]), abs(terms[b])
                    tally += weight * ((x < y) - (x > y))
            return tally or a - b

        return sorted(dims, key=cmp_to_key(before))

    def other_fast(self, inner: int, order: Sequence[int], aims: Sequence[Aim]) -> int | None:
        """A dimension that is the fast one of some argument, where it is not the innermost."""
        sums = [n.linear for n in self.needed(aims) if n.kind == "load"] + [a.writing.at for a in aims if a.writing]
        for d in reversed(order):
            if d != inner and any(abs(s.terms.get(d, 0)) == 1 and abs(s.terms.get(inner, 0)) > 8 for s in sums):
                return d
        return None

    # ---- pointwise ---------------------------------------------------------------------------------------------------

    def everywhere(self, dims: frozenset[int], aims: Sequence[Aim]) -> None:
        """A nest over all points of some dimensions, by threads."""
        order = self.order(dims, aims)
        if not order:
            self.open()
            outside = dict(self.names)
            self.nest([], aims)
            self.names = outside
            self.close()
            return
        if 0 in (self.walk.sizes[d] for d in order):
            return
        aims = [*aims]
        self.keep_dear(dims, order[-1], aims)
        *outer, inner = order
        size = self.walk.sizes
        parts, loops, last = [], [], []
        block = min(self.options.block, size[inner])
        other = self.other_fast(inner, outer, aims) if self.options.tile else None
        if other is not None:
            block = min(4 * self.options.tile, size[inner])
            outer.remove(other)
            parts.append((f"b{other}", -(-size[other] // self.options.tile)))
            last.append(self.blocked(other, self.options.tile))
        parts.append((f"b{inner}", -(-size[inner] // block)))
        last.append(self.blocked(inner, block))
        flat: list[tuple[str, int]] = []
        for d in outer:
            if math.prod(n for _, n in flat) < 512:
                flat.append((f"i{d}", size[d]))
            else:
                loops.append(Loop(d, "0", str(size[d])))
        self.tasks([*flat, *parts], self.walk.points(order))
        outside = dict(self.names)
        self.nest([*loops, *last], aims)
        self.names = outside
        self.close()

    def blocked(self, dim: int, block: int) -> Loop:
        size = self.walk.sizes[dim]
        if block >= size:
            return Loop(dim, "0", str(size))
        low = f"b{dim} * {block}"
        return Loop(dim, low, f"({low} + {block} < {size} ? {low} + {block} : {size})")

    def keep_dear(self, dims: frozenset[int], inner: int, aims: Sequence[Aim]) -> None:
        """Numbers that would be computed at every point though they are the same for many: once each, into memory."""
        found = []
        needed = self.needed(aims)
        for n in needed:
            if (
                n.kind in DEAR
                and inner in n.varies
                and n.varies != dims
                and 2 * self.walk.points(n.varies) <= self.walk.points(dims)
            ):
                found.append(n)
        for n in found:
            order = sorted(n.varies)
            self.memory(f"{n.name}_kept", c_type(n), self.walk.points(order))
            place = f"{n.name}_kept[{self.row_major(order)}]"
            self.everywhere(n.varies, [Aim(n, n.varies, place)])
            self.names[n] = place

    def row_major(self, order: Sequence[int]) -> str:
        """The number of an element of an array over some dimensions."""
        linear, stride = Linear(), 1
        for d in reversed(order):
            linear, stride = linear.plus(Linear({d: stride})), stride * self.walk.sizes[d]
        return sum_text(linear)

    # ---- phases ------------------------------------------------------------------------------------------------------

    def phases(self) -> None:
        level = self.walk.levels()
        groups: dict[tuple[int, tuple[int, ...], tuple[int, ...]], list[Number]] = {}
        for n in self.walk.reductions:
            groups.setdefault((level[n], tuple(sorted(n.dims)), tuple(sorted(n.walked))), []).append(n)
        for key in sorted(groups):
            self.reduce_everywhere(groups[key])
        self.write(self.walk.writings)

    def write(self, writings: Iterable[Writing]) -> None:
        groups: dict[tuple[int, ...], list[Aim]] = {}
        for w in writings:
            groups.setdefault(tuple(sorted(w.walked)), []).append(Aim(w.value, w.walked, writing=w))
        for dims, aims in groups.items():
            self.everywhere(frozenset(dims), aims)

    def reduce_everywhere(self, group: Sequence[Number]) -> None:
        """Reductions over the same dimensions: tasks for parts of what is kept and chunks of what is reduced."""
        size, dims, walked = self.walk.sizes, group[0].dims, group[0].walked
        order = self.order(walked, [Aim(n, walked, how=n.how) for n in group])
        inner = order[-1]
        kept, reduced = [d for d in order if d not in dims], [d for d in order if d in dims]
        count = self.walk.points(kept)
        self.keep_dear(walked, inner, [Aim(n, walked, how=n.how) for n in group])
        width = min(512, size[inner]) if inner in kept else 1
        parts = [(f"i{d}", size[d]) for d in kept if d != inner]
        if inner in kept:
            parts.append((f"b{inner}", -(-size[inner] // max(width, 1))))
        split = (
            max(reduced[:-1] or reduced, key=lambda d: size[d])
            if inner not in kept
            else max(reduced, key=size.__getitem__)
        )
        if size[split] < 8 and inner not in kept:
            split = inner
        points = self.walk.points(order)
        chunks = self.chunks(points, math.prod(n for _, n in parts), size[split], count, self.walk.points(reduced))
        length = max(-(-size[split] // chunks), 1)
        chunks = max(-(-size[split] // length), 1)
        for n in group:
            self.memory(f"{n.name}_sums", c_type(n), chunks * count)
        if 0 not in (n for _, n in parts):
            self.tasks([*parts, ("chunk", chunks)], points)
            loops = []
            for d in reduced:
                if d == split and chunks > 1:
                    low = f"chunk * {length}"
                    high = f"({low} + {length} < {size[d]} ? {low} + {length} : {size[d]})"
                    loops.append(Loop(d, low, high))
                else:
                    loops.append(Loop(d, "0", str(size[d])))
            aims = []
            if inner in kept:
                loops.append(self.blocked(inner, width))
                low = loops[-1].low
            for n in group:
                if inner in kept:
                    self.line(f"alignas(64) {c_type(n)} {n.name}_here[{width}];")
                    self.line(f"for (i64 k = 0; k < {width}; ++k) {n.name}_here[k] = {neutral_of(n)};")
                    aims.append(Aim(n, walked, f"{n.name}_here[i{inner} - {low}]", n.how))
                else:
                    self.line(f"{c_type(n)} {n.name} = {neutral_of(n)};")
                    aims.append(Aim(n, walked, n.name, n.how))
            outside = dict(self.names)
            self.nest(loops, aims)
            for n in group:
                here = f"{n.name}_sums[chunk * {count} + {self.row_major(kept)}]"
                if inner in kept:
                    loop = loops[-1]
                    self.open(f"for (i64 i{inner} = {loop.low}; i{inner} < {loop.high}; ++i{inner})")
                    self.line(f"{here} = {n.name}_here[i{inner} - {low}];")
                    self.close()
                else:
                    self.line(f"{here} = {n.name};")
            self.names = outside
            self.close()
        for n in group:
            self.combine(n, chunks, kept)

    def chunks(self, points: int, tasks: int, size: int, kept: int, reduced: int) -> int:
        """Into how many chunks a reduction is cut: for work for all threads, and so that no sum gets too long."""
        if points < ALONE or not size:
            return 1
        wanted = max(-(-64 // max(tasks, 1)), reduced // 4096)
        room = max((4 << 20) // (8 * max(kept, 1)), 8)
        return max(min(wanted, size, room, points // 4096), 1)

    def combine(self, n: Number, chunks: int, kept: Sequence[int]) -> None:
        """Adds the results of all chunks to the first, in order."""
        count = self.walk.points(kept)
        if chunks > 1 and count:
            width = min(count, 256)
            self.tasks([("part", -(-count // width))], chunks * count)
            low = f"part * {width}"
            self.open(f"for (i64 chunk = 1; chunk < {chunks}; ++chunk)")
            self.line("#pragma omp simd")
            self.open(f"for (i64 k = {low}; k < ({low} + {width} < {count} ? {low} + {width} : {count}); ++k)")
            here = f"{n.name}_sums[k]"
            self.line(f"{here} = {HOW[n.how]}::of({here}, {n.name}_sums[chunk * {count} + k]);")
            self.close()
            self.close()
            self.close()
        self.names[n] = f"{n.name}_sums[{self.row_major(kept)}]"

    # ---- rows --------------------------------------------------------------------------------------------------------

    def rows(self) -> None:
        self.by_rows(None)

    def lanes(self) -> None:
        lane = self.fast_outer()
        assert lane is not None and not self.walk.across
        self.by_rows(lane)

    def writing_aims(self) -> list[Aim]:
        return [Aim(w.value, w.walked, writing=w) for w in self.walk.writings]

    def whole_order(self, dims: Iterable[int]) -> list[int]:
        """Dimensions by the accesses of the whole kernel."""
        names, self.names = self.names, {}
        order = self.order(dims, self.writing_aims())
        self.names = names
        return order

    def fast_outer(self) -> int | None:
        """The dimension of rows that is faster in memory than any within them; None where rows lie as they should."""
        order = self.whole_order(self.walk.row | self.walk.outer)
        return order[-1] if order and order[-1] in self.walk.outer else None

    def by_rows(self, lane: int | None) -> None:
        walk, size = self.walk, self.walk.sizes
        row, outer = self.whole_order(walk.row), [d for d in self.whole_order(walk.outer) if d != lane]
        count = walk.points(outer)
        late = {n for n in walk.numbers if any(a in walk.across for a in self.behind(n))}
        early = [w for w in walk.writings if w.value not in late and w.value not in walk.across]
        last = [w for w in walk.writings if w not in early]
        passes = self.passes(early)
        points = walk.points([*walk.outer, *row])
        chunks = 1
        if walk.across:
            kept = max(walk.points(n.varies) for n in walk.across)
            chunks = self.chunks(points, 1, count, kept, count)
            length = max(-(-count // chunks), 1)
            chunks = max(-(-count // length), 1)
            for n in walk.across:
                self.memory(f"{n.name}_sums", c_type(n), chunks * walk.points(n.varies))
            self.tasks([("chunk", chunks)], points)
            for n in walk.across:
                kept = walk.points(n.varies)
                self.line(f"{c_type(n)}* const {n.name}_chunk = {n.name}_sums + chunk * {kept};")
                self.line(f"for (i64 k = 0; k < {kept}; ++k) {n.name}_chunk[k] = {neutral_of(n)};")
            high = f"(chunk + 1) * {length} < {count} ? (chunk + 1) * {length} : {count}"
            self.open(f"for (i64 line = chunk * {length}; line < ({high}); ++line)")
            rest = "line"
            for k, d in enumerate(reversed(outer)):
                final = k == len(outer) - 1
                self.line(f"const i64 i{d} = {rest}{'' if final else f' % {size[d]}'};")
                rest = f"{rest} / {size[d]}"
        else:
            parts = [(f"i{d}", size[d]) for d in outer]
            if lane is not None:
                parts.append((f"b{lane}", -(-size[lane] // min(size[lane], 64))))
            self.tasks(parts, points)
        outside = dict(self.names)
        self.row_passes(passes, row, lane)
        self.names = outside
        if walk.across:
            self.close()
        self.close()
        for n in walk.across:
            self.combine(n, chunks, sorted(n.varies))
        self.write(last)

    def behind(self, n: Number) -> set[Number]:
        found: set[Number] = set()
        stack = [n]
        while stack:
            for a in stack.pop().args:
                if a not in found:
                    found.add(a)
                    stack.append(a)
        return found

    def passes(self, early: Sequence[Writing]) -> list[list[Aim]]:
        """What each pass over a row is for. A sum over rows goes with the first pass that can have it, writing with the last."""
        level = self.walk.levels()
        depth = max((level[n] for n in self.walk.along), default=0)
        found: list[list[Aim]] = [[] for _ in range(depth + 1)]
        for n in self.walk.along:
            found[level[n] - 1].append(Aim(n, n.walked, n.name, n.how))
        for n in self.walk.across:
            place = f"{n.name}_chunk[{self.row_major(sorted(n.varies))}]"
            found[level[n] - 1].append(Aim(n, n.walked, place, n.how))
        for w in early:
            found[-1].append(Aim(w.value, w.walked, writing=w))
        return found

    def row_passes(self, passes: list[list[Aim]], row: Sequence[int], lane: int | None) -> None:
        walk, size = self.walk, self.walk.sizes
        block = None if lane is None else self.blocked(lane, min(size[lane], 64))
        width = 1 if lane is None else min(size[lane], 64)
        kept_bytes = 0
        for k, aims in enumerate(passes):
            added: list[Aim] = []
            for n, aim in [(aim.number, aim) for aim in aims if aim.how and aim.number in walk.along]:
                if block is None:
                    self.line(f"{c_type(n)} {n.name} = {neutral_of(n)};")
                else:
                    self.line(f"alignas(64) {c_type(n)} {n.name}_here[{width}];")
                    self.line(f"for (i64 k = 0; k < {width}; ++k) {n.name}_here[k] = {neutral_of(n)};")
                    place = f"{n.name}_here[i{lane} - {block.low}]"
                    aims[aims.index(aim)] = Aim(n, aim.walked, place, n.how)
            if block is None:
                for n in self.needed_again(passes, k, row):
                    total = walk.points(row) * 8
                    if kept_bytes + total > ROW_BYTES:
                        break
                    kept_bytes += total
                    self.line(f"alignas(64) {c_type(n)} {n.name}_kept[{walk.points(row)}];")
                    added.append(Aim(n, n.walked | frozenset(row), f"{n.name}_kept[{self.row_major(row)}]"))
            else:
                self.keep_in_lanes(aims, row, block, width)
            self.one_pass([*aims, *added], row, block)
            for aim in added:
                self.names[aim.number] = aim.place
            for aim in aims:
                if aim.how and aim.number in walk.along:
                    self.names[aim.number] = aim.place

    def one_pass(self, aims: Sequence[Aim], row: Sequence[int], block: Loop | None) -> None:
        """One nest per set of dimensions that is walked; what has none of the row's is done once per row."""
        groups: dict[tuple[tuple[int, ...], tuple[int, ...]], list[Aim]] = {}
        lane = () if block is None else (block.dim,)
        for aim in aims:
            dims = tuple(d for d in row if d in aim.walked)
            missing = tuple(sorted(self.walk.outer - aim.walked)) if aim.writing is not None else ()
            groups.setdefault((dims, missing), []).append(aim)
        for (dims, missing), group in sorted(groups.items(), key=lambda g: -len(g[0][0])):
            loops = [Loop(d, "0", str(self.walk.sizes[d])) for d in dims]
            if block is not None and lane[0] not in missing:
                loops.append(block)
            outside = dict(self.names)
            fixed = [d for d in missing if d not in lane]
            first = [f"i{d} == 0" for d in fixed]
            if block is not None and lane[0] in missing:
                first.append(f"{block.low} == 0")
            if first:  # the same for many rows: the first of them writes it
                self.open(f"if ({' && '.join(first)})")
            self.nest(loops, group)
            if first:
                self.close()
                self.names = outside

    def needed_again(self, passes: Sequence[Sequence[Aim]], k: int, row: Sequence[int]) -> list[Number]:
        """Expensive numbers of the row that this pass computes and a later one needs as well."""
        later = [aim for aims in passes[k + 1 :] for aim in aims]
        if not row or not later:
            return []
        along = set(self.walk.along)
        here = {
            n for n in self.needed([a for a in passes[k] if set(row) <= a.walked], along) if n.varies & self.walk.row
        }
        found: list[Number] = []
        for n in reversed(self.walk.numbers):
            if n.kind in EXPENSIVE and n in here and n in self.needed(later, [*along, *found]):
                found.append(n)
        return found

    def keep_in_lanes(self, aims: Sequence[Aim], row: Sequence[int], block: Loop, width: int) -> None:
        """Dear numbers that are the same along a row, once per lane."""
        for n in self.needed(aims):
            if n.kind in DEAR and block.dim in n.varies and not n.varies & frozenset(row):
                self.line(f"alignas(64) {c_type(n)} {n.name}_kept[{width}];")
                place = f"{n.name}_kept[i{block.dim} - {block.low}]"
                self.nest([block], [Aim(n, n.varies, place)])
                self.names[n] = place


# ---- text of numbers -------------------------------------------------------------------------------------------------


def c_type(n: Number) -> str:
    """The type a number is computed in; whole numbers that are known to be small take 32 bits."""
    return "i32" if n.type.text == "i64" and n.is_small else COMPUTED[n.type.text]


def number_text(value: int) -> str:
    return "(-9223372036854775807ll - 1)" if value == -(2**63) else f"{value}ll"


def literal(value: float | int | bool, type: ScalarType) -> str:
    if type.kind == "bool":
        return "true" if value else "false"
    if type.kind == "int":
        return f"({COMPUTED[type.text]}){number_text(int(value))}"
    value = float(value)
    name = COMPUTED[type.text]
    if name == "float" and math.isfinite(value):
        value = (
            math.copysign(math.inf, value)
            if abs(value) >= 0x1.FFFFFFp127
            else struct.unpack("f", struct.pack("f", value))[0]
        )
    if math.isnan(value):
        return f'({name})__builtin_nan("")'
    if math.isinf(value):
        return f"({name}){'-' if value < 0 else ''}__builtin_inf()"
    return f"({name}){value.hex()}"


def neutral_of(n: Number) -> str:
    if n.how in ("sum", "or"):
        return literal(0, n.type)
    if n.how in ("prod", "and"):
        return literal(1, n.type)
    sign = -1 if n.how == "max" else 1
    if n.type.kind == "float":
        return literal(sign * math.inf, n.type)
    if n.type.kind == "bool":
        return literal(sign > 0, n.type)
    if n.type.text.startswith("ui"):
        return literal(2**n.type.bits - 1 if sign > 0 else 0, n.type)
    return literal(2 ** (n.type.bits - 1) - 1 if sign > 0 else -(2 ** (n.type.bits - 1)), n.type)


def sum_text(linear: Linear) -> str:
    """A sum of loop indices."""
    terms = [f"i{d}" if c == 1 else f"{c} * i{d}" for d, c in sorted(linear.terms.items())]
    if linear.constant or not terms:
        terms.append(str(linear.constant))
    return " + ".join(terms)


_OPERATORS = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
_ARITHMETIC = {"add": "+", "sub": "-", "mul": "*"}
_BITS = {"bit_and": "&", "bit_or": "|", "bit_xor": "^"}
_DIVISIONS = {"floor_div": "floor_div", "trunc_div": "trunc_div", "rem": "rem_any", "fmod": "fmod_any"}
_CHOICES = {"maximum": "larger", "minimum": "smaller"}
_WHOLE = {"floor", "ceil", "round", "trunc"}


def apply(n: Number, args: Sequence[str]) -> str:
    """A function of numbers as an expression."""
    fn, type = n.kind, c_type(n)
    kind = n.type.kind
    if fn == "cast":
        return f"To<{type}>::from({args[0]})"
    if fn == "select":
        return f"{args[0]} ? ({type}){args[1]} : ({type}){args[2]}"
    if fn in _OPERATORS:
        return f"{args[0]} {_OPERATORS[fn]} {args[1]}"
    if fn == "isnan":
        return f"{args[0]} != {args[0]}"
    wide = type
    if type == "i32" and n.type.text == "i64" and not all(a.is_small for a in n.args):
        wide = "i64"  # large numbers whose result is small
    given = [f"({wide}){a}" for a in args]
    if fn in _ARITHMETIC:
        if kind == "bool":
            return f"{args[0]} {'&' if fn == 'mul' else '|' if fn == 'add' else '^'} {args[1]}"
        return f"({type})({given[0]} {_ARITHMETIC[fn]} {given[1]})"
    if fn in _BITS:
        return f"({type})({given[0]} {_BITS[fn]} {given[1]})"
    if fn in _CHOICES:
        return f"({type}){_CHOICES[fn]}<{wide}>({given[0]}, {given[1]})"
    if fn == "div" and kind == "float":
        return f"{given[0]} / {given[1]}"
    if fn in _DIVISIONS or fn == "div":
        return f"({type}){_DIVISIONS.get(fn, 'trunc_div')}({given[0]}, {given[1]})"
    if fn == "pow":
        return power(n, given, type)
    if fn == "neg":
        return f"({type})-{given[0]}"
    if fn == "bit_not":
        return f"!{args[0]}" if kind == "bool" else f"({type})~{given[0]}"
    if fn == "reciprocal":
        return f"({type})1 / {given[0]}"
    if fn == "rsqrt":
        return f"({type})1 / sqrt_({given[0]})"
    if fn in _WHOLE and kind != "float":
        return given[0]
    return f"({type}){fn}_({given[0]}" + "".join(f", {a}" for a in given[1:]) + ")"


def power(n: Number, given: Sequence[str], type: str) -> str:
    exponent = n.args[1].value if n.args[1].kind == "constant" else None
    x = given[0]
    if n.type.kind != "float":
        return f"int_pow<{type}>({x}, {given[1]})"
    if exponent in (1, 2, 3):
        return " * ".join([x] * int(exponent))
    if exponent == -1:
        return f"({type})1 / {x}"
    return f"pow_({x}, {given[1]})"
