"""C++ text of a kernel: a structure puts nests of loops together.

phases: each reduction is a walk over all points, by chunks whose results are combined in order; then all is written.
    Without reductions this is a plain pointwise kernel.
rows: all passes over one row come one after the other, while it is in the cache; sums over rows are gathered by chunks.
lanes: the same for a block of rows that lie side by side in memory, one row per lane of a vector.
Chunks do not depend on the number of threads, so neither do results.

An element that is looked up once per row is read before the row is walked, so that results may be written over it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from .nest import ALONE, Aim, Loop, Nests, Options
from .text import HOW, STORED, c_type, neutral_of, sum_text
from .walk import Linear, Number, Walk, Writing

#: beside expensive ones: dearer than reading a number again, where each point would compute it and not each row
DEAR = frozenset(("sqrt", "rsqrt", "div", "reciprocal"))
STRUCTURES = ("phases", "rows", "lanes")
#: rows side by side that one task walks
LANE_ROWS = 64
#: bytes of a row's intermediate numbers that are kept on the stack between passes
ROW_BYTES = 256 * 1024


def is_dear(n: Number) -> bool:
    return n.is_expensive or n.kind in DEAR


def source_of(walk: Walk, name: str, options: Options) -> tuple[str, int]:
    """The function as text, and the bytes of scratch memory it needs."""
    code = Code(walk, options)
    getattr(code, options.structure)()
    # what it gives says whether an index that was read lay outside of its table
    head = [f'extern "C" int {name}(void** tensors) {{', "  int outside = 0;"]
    written = {w.tensor for w in walk.writings}
    for i, element in enumerate(walk.elements):
        type = STORED[element.text] if i in written else f"const {STORED[element.text]}"
        head.append(f"  {type}* const p{i} = ({type}*)tensors[{i}];")
    if code.scratch:
        head.append(f"  char* const scratch = (char*)tensors[{len(walk.elements)}];")
    return "\n".join([*head, *code.lines, "  return outside;", "}", ""]), code.scratch


class Code(Nests):
    """The nests of one kernel."""

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
                is_dear(n)
                and inner in n.varies
                and n.varies != dims
                and 2 * self.walk.points(n.varies) <= self.walk.points(dims)
            ):
                found.append(n)
        self.keep(found)

    def keep(self, numbers: Sequence[Number]) -> None:
        """Numbers are computed now, each into an array of its own."""
        for n in numbers:
            order = sorted(n.varies)
            self.memory(f"{n.name}_kept", c_type(n), self.walk.points(order))
            place = f"{n.name}_kept[{self.row_major(order)}]"
            self.everywhere(n.varies, [Aim(n, n.varies, place)])
            self.names[n] = place

    def looked_up(self) -> list[Number]:
        """What is looked up once per row in tensors that a result may be written over."""
        walk, specs = self.walk, self.walk.specs
        if not walk.along:
            return []
        written = {(s.dtype, s.bytes) for s in (specs[w.tensor] for w in walk.writings)}
        once = [n for n in walk.numbers if n.looks_up and not n.varies & walk.row]
        alike = [n for n in once if (specs[n.tensor].dtype, specs[n.tensor].bytes) in written]
        return [n for n in alike if all(a.kind != "reduce" for a in self.behind(n))]

    def row_major(self, order: Sequence[int]) -> str:
        """The number of an element of an array over some dimensions."""
        linear, stride = Linear(), 1
        for d in reversed(order):
            linear, stride = linear.plus(Linear({d: stride})), stride * self.walk.sizes[d]
        return sum_text(linear)

    # ---- phases ------------------------------------------------------------------------------------------------------

    def phases(self) -> None:
        self.keep(self.looked_up())
        level = self.walk.levels()
        groups: dict[tuple[int, tuple[int, ...], tuple[int, ...]], list[Number]] = {}
        for n in self.walk.reductions:
            groups.setdefault((level[n], tuple(sorted(n.dims)), tuple(sorted(n.walked))), []).append(n)
        writings = list(self.walk.writings)
        for key in sorted(groups):
            along = self.along_with(groups[key], level) if key == max(groups) else []
            self.reduce_everywhere(groups[key], along)
            writings = [w for w in writings if w not in along]
        self.write(writings)

    def along_with(self, group: Sequence[Number], level: dict[Number, int]) -> list[Writing]:
        """What is known, and written, at each point where the last reductions are, so that it is computed once.

        Nothing that waits for as many reductions is left for later: that may read what this is written over.
        """
        here = [w for w in self.walk.writings if w.walked == group[0].walked]
        later = [w for w in here if {w.value, *self.behind(w.value)} & {*group}]
        first = min((level[w.value] for w in later), default=len(level))
        return [w for w in here if w not in later and level[w.value] < first]

    def write(self, writings: Iterable[Writing]) -> None:
        groups: dict[tuple[int, ...], list[Aim]] = {}
        for w in writings:
            groups.setdefault(tuple(sorted(w.walked)), []).append(Aim(w.value, w.walked, writing=w))
        for dims, aims in groups.items():
            self.everywhere(frozenset(dims), aims)

    def reduce_everywhere(self, group: Sequence[Number], along: Sequence[Writing] = ()) -> None:
        """Reductions over the same dimensions: tasks for parts of what is kept and chunks of what is reduced. What goes
        along is written on the way."""
        size, dims, walked = self.walk.sizes, group[0].dims, group[0].walked
        written = [Aim(w.value, w.walked, writing=w) for w in along]
        plain = [*(Aim(n, walked, how=n.how) for n in group), *written]
        order = self.order(walked, plain)
        inner = order[-1]
        kept, reduced = [d for d in order if d not in dims], [d for d in order if d in dims]
        count = self.walk.points(kept)
        self.keep_dear(walked, inner, plain)
        width = min(2048, size[inner]) if inner in kept else 1
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
            self.nest(loops, [*aims, *written])
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
                parts.append((f"b{lane}", -(-size[lane] // LANE_ROWS)))
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
        """What each pass over a row is for. A sum over rows goes with the first pass that can have it, and so does what
        is written at each point; what is written once per row may take the memory of what any pass reads."""
        level = self.walk.levels()
        depth = max((level[n] for n in self.walk.along), default=0)
        found: list[list[Aim]] = [[] for _ in range(depth + 1)]
        for n in self.walk.along:
            found[level[n] - 1].append(Aim(n, n.walked, n.name, n.how))
        for n in self.walk.across:
            place = f"{n.name}_chunk[{self.row_major(sorted(n.varies))}]"
            found[level[n] - 1].append(Aim(n, n.walked, place, n.how))
        everywhere = self.walk.row | self.walk.outer
        for w in early:
            found[level[w.value] if w.walked == everywhere else -1].append(Aim(w.value, w.walked, writing=w))
        return found

    def row_passes(self, passes: list[list[Aim]], row: Sequence[int], lane: int | None) -> None:
        walk, size = self.walk, self.walk.sizes
        block = None if lane is None else self.blocked(lane, LANE_ROWS)
        width = 1 if lane is None else min(size[lane], LANE_ROWS)
        kept_bytes = 0
        first = self.looked_up()
        if block is None:
            for n in self.needed([Aim(n, n.varies) for n in first]):
                self.compute(n)
        else:
            self.keep_in_lanes(first, block, width)
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
                    own = [d for d in row if d in n.varies]
                    total = walk.points(own) * 8
                    if kept_bytes + total > ROW_BYTES:
                        break
                    kept_bytes += total
                    self.line(f"alignas(64) {c_type(n)} {n.name}_kept[{walk.points(own)}];")
                    added.append(Aim(n, n.varies, f"{n.name}_kept[{self.row_major(own)}]"))
            else:
                self.keep_in_lanes(self.dear_in_lanes(aims, row, block), block, width)
            self.one_pass([*aims, *added], row, block)
            for aim in added:
                self.names[aim.number] = aim.place
            for aim in aims:
                if aim.how and aim.number in walk.along:
                    self.names[aim.number] = aim.place

    def one_pass(self, aims: Sequence[Aim], row: Sequence[int], block: Loop | None) -> None:
        """One nest per set of dimensions that is walked; what has none of the row's is done once per row."""
        groups: dict[tuple[tuple[int, ...], tuple[int, ...]], list[Aim]] = {}
        lane = None if block is None else block.dim
        for aim in aims:
            kept = not aim.how and aim.writing is None  # on the way, by a nest over the whole row
            dims = tuple(d for d in row if kept or d in aim.walked)
            missing = tuple(sorted(self.walk.outer - aim.walked)) if aim.writing is not None else ()
            if aim.writing is not None and not aim.walked <= self.walk.row | self.walk.outer:
                dims = tuple(self.whole_order(aim.walked - self.walk.outer))  # it is written more than once
            groups.setdefault((dims, missing), []).append(aim)
        for (dims, missing), group in sorted(groups.items(), key=lambda g: -len(g[0][0])):
            loops = [Loop(d, "0", str(self.walk.sizes[d])) for d in dims]
            if block is not None and lane not in missing:
                loops.append(block)
            outside = dict(self.names)
            first = [f"i{d} == 0" if d != lane else f"b{d} == 0" for d in missing]
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
            if n.is_expensive and n in here and n in self.needed(later, [*along, *found]):
                found.append(n)
        return found

    def dear_in_lanes(self, aims: Sequence[Aim], row: Sequence[int], block: Loop) -> list[Number]:
        """Dear numbers that are the same along a row."""
        same = [n for n in self.needed(aims) if block.dim in n.varies and not n.varies & frozenset(row)]
        return [n for n in same if is_dear(n)]

    def keep_in_lanes(self, numbers: Sequence[Number], block: Loop, width: int) -> None:
        """Numbers that are the same along a row, computed now, once per lane."""
        for n in numbers:
            self.line(f"alignas(64) {c_type(n)} {n.name}_kept[{width}];")
            place = f"{n.name}_kept[i{block.dim} - {block.low}]"
            self.nest([block], [Aim(n, n.varies, place)])
            self.names[n] = place
