"""One nest of loops: every number is computed as far outside as it can be, the innermost loop is for vectors.

Conditions on the innermost index (padding, concatenation, slices) cut its loop into stretches in which they are known.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cmp_to_key

from .text import COMPUTED, HOW, apply, c_type, literal, neutral_of, number_text, sum_text
from .walk import Guard, Linear, Number, Walk, Writing

COMPARED = {"lt": operator.lt, "le": operator.le, "gt": operator.gt, "ge": operator.ge}
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
    """What a nest is for: a number reduced into a place (`how` names the reduction), kept there, or written."""

    number: Number
    walked: frozenset[int]
    place: str = ""
    how: str = ""
    writing: Writing | None = None


class Nests:
    """The text of one kernel in the making. `names` says how each number that is known here is called."""

    def __init__(self, walk: Walk, options: Options):
        self.walk, self.options = walk, options
        self.lines: list[str] = []
        self.indent = 1
        self.names: dict[Number, str] = {}
        self.scratch = 0
        #: inside of a stretch: the dimension, and its first index
        self.known_at: tuple[int, int] | None = None
        #: loads whose conditions are the same for the whole innermost loop, which was begun
        self.settled: dict[Number, str] = {}
        #: the dimension of the innermost loop, inside of it
        self.inner: int | None = None

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
        if n.kind in COMPARED and self.known_at is not None:
            difference = difference_of(n)
            if difference is not None and abs(alone(difference, self.known_at[0])) == 1:
                value = alone(difference, self.known_at[0]) * self.known_at[1] + difference.constant
                self.names[n] = literal(COMPARED[n.kind](value, 0), n.type)
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
            seed, step, micro_batch, at, stream = args
            digits = n.attributes["digits"]
            where = f"(u32)(({whole}){at} >> 2), (u32){at}"
            return f"uniform({seed}, {step}, {micro_batch}, {where} & 3, (u32){stream}, {digits})"
        if n.kind == "select" and self.inner in n.varies and self.inner not in n.args[0].varies:
            return f"either({args[0]}, ({c_type(n)}){args[1]}, ({c_type(n)}){args[2]})"
        return apply(n, args)

    def load(self, n: Number, args: Sequence[str]) -> str:
        where = sum_text(n.linear)
        for arg, step in zip(args, n.steps, strict=True):
            where += f" + (i64){arg} * {step}"
        read = f"get(p{n.tensor}, {where})"
        if not n.guards:
            return read
        if 0 in self.walk.specs[n.tensor].shape:
            return literal(n.value, n.type)
        other = literal(n.value, n.type)
        if n in self.settled:
            return f"either({n.name}_inside, get(p{n.tensor}, {n.name}_at + {self.settled[n]}), {other})"
        inside = " & ".join(self.inside(g) for g in n.guards)
        if n.value:
            other = f"(__atomic_store_n(&outside, 1, __ATOMIC_RELAXED), {other})"
        return f"{inside} ? {read} : {other}"

    def inside(self, guard: Guard) -> str:
        at = sum_text(guard.at)
        if self.known_at is not None and guard.number is None and abs(alone(guard.at, self.known_at[0])) == 1:
            value = alone(guard.at, self.known_at[0]) * self.known_at[1] + guard.at.constant
            return "true" if 0 <= value < guard.size else "false"
        number, (low, high) = guard.number, guard.at.range(self.walk.sizes)
        if number is not None:
            at += f" + (i64){self.names[number]}"
            if number.is_small and number.low is not None and number.high is not None:
                low, high = low + number.low, high + number.high
            else:
                low, high = -(2**63), 2**63
        # g++ 12 vectorises conditions of 64 bits beside numbers of 32 wrongly
        if low > -(2**31) and high < 2**31 and guard.size < 2**31:
            return f"((u32)({at}) < {guard.size}u)"
        return f"((u64)({at}) < {guard.size}ull)"

    def settle(self, loop: Loop, start: int, numbers: Sequence[Number]) -> bool:
        """Opens a block with the conditions of loads that the innermost loop does not change: these then read in any
        case, from the tensor's beginning if need be, since what is read on a condition keeps a loop from vectors."""
        for n in numbers:
            if n.kind != "load" or 0 in self.walk.specs[n.tensor].shape or any(loop.dim in a.varies for a in n.args):
                continue
            step = n.linear.terms.get(loop.dim, 0)
            inner = [g for g in n.guards if loop.dim in g.at.terms]
            if step <= 0 or len(inner) == len(n.guards) or any(self.inside(g) != "true" for g in inner):
                continue
            if not self.settled:
                self.open()
            self.settled[n] = sum_text(Linear({loop.dim: step}))
            inside = " & ".join(self.inside(g) for g in n.guards if g not in inner)
            where = sum_text(n.linear.plus(Linear({loop.dim: step}), -1))
            for arg, times in zip(n.args, n.steps, strict=True):
                where += f" + (i64){self.names[arg]} * {times}"
            self.line(f"const bool {n.name}_inside = {inside};")
            self.line(f"const i64 {n.name}_at = {n.name}_inside ? {where} : {-step * start};")
            if n.value:
                self.line(f"if (!{n.name}_inside) __atomic_store_n(&outside, 1, __ATOMIC_RELAXED);")
        return bool(self.settled)

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
        """The loops for vectors: one, or one per stretch between the places where a condition changes."""
        lanes = [aim for aim in aims if aim.how and loop.dim in aim.number.dims]
        for aim in lanes:
            type, neutral = c_type(aim.number), neutral_of(aim.number)
            self.line(f"alignas(64) {type} {aim.number.name}_lanes[LANES];")
            self.line(f"begin<{type}>({aim.number.name}_lanes, {neutral});")
        drawn = [n for n in numbers if drawn_in_order(n, loop.dim)]
        if drawn:
            loop = self.draw(drawn, loop)
        outside = dict(self.names)
        turns = self.turns(loop.dim, numbers) if not lanes else []
        ends = [*turns, self.walk.sizes[loop.dim]]
        for start, end in zip([0, *turns], ends, strict=True):
            low = loop.low if start == 0 else f"({loop.low} > {start} ? {loop.low} : {start})"
            high = loop.high if end == ends[-1] else f"({loop.high} < {end} ? {loop.high} : {end})"
            self.known_at, self.inner = (loop.dim, start) if turns else None, loop.dim
            settled = self.settle(loop, start, numbers)
            self.vectors(Loop(loop.dim, low, high), [n for n in numbers if n not in drawn], aims, lanes)
            if settled:
                self.close()
            self.known_at, self.inner, self.settled, self.names = None, None, {}, dict(outside)
        if drawn:
            self.close()
        for aim in lanes:
            how = HOW[aim.how]
            self.line(f"{aim.place} = {how}::of({aim.place}, total<{how}>({aim.number.name}_lanes));")

    def vectors(self, loop: Loop, numbers: Sequence[Number], aims: Sequence[Aim], lanes: Sequence[Aim]) -> None:
        """A loop that becomes vectors. What it reduces is gathered in lanes that go on side by side."""
        i = f"i{loop.dim}"
        outside, self.lines = self.lines, []
        self.indent += 3 if lanes else 1
        for n in numbers:
            self.compute(n)
        for aim in aims:
            self.reach(aim, f"{aim.number.name}_lanes[lane]" if aim in lanes else "")
        self.indent -= 3 if lanes else 1
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

    def draw(self, drawn: Sequence[Number], loop: Loop) -> Loop:
        """Opens a loop over short stretches for which random numbers are drawn beforehand, four from each block."""
        i = f"i{loop.dim}"
        for n in drawn:
            self.line(f"alignas(64) float {n.name}_drawn[DRAWN + 8];")
        self.open(f"for (i64 stretch = {loop.low}; stretch < {loop.high}; stretch += DRAWN)")
        self.line(f"const i64 end = stretch + DRAWN < {loop.high} ? stretch + DRAWN : {loop.high};")
        for n in drawn:
            seed, step, micro_batch, _, stream = (self.names.get(a, "") for a in n.args)
            element = sum_text(n.args[3].linear).replace(i, "stretch")
            digits = n.attributes["digits"]
            key = f"{seed}, {step}, {micro_batch}, {element}, end - stretch, (u32){stream}, {digits}"
            self.line(f"const float* const {n.name} = draw({n.name}_drawn, {key});")
            self.names[n] = f"{n.name}[{i} - stretch]"
        return Loop(loop.dim, "stretch", "end")

    def turns(self, dim: int, numbers: Sequence[Number]) -> list[int]:
        """Where along a dimension conditions on its index alone change their answers; none if there are too many."""
        found: set[int] = set()
        for n in numbers:
            for g in n.guards:
                if g.number is None and abs(alone(g.at, dim)) == 1:
                    c, k = alone(g.at, dim), g.at.constant
                    found |= {-k, g.size - k} if c == 1 else {k - g.size + 1, k + 1}
            if n.kind in COMPARED:
                difference = difference_of(n)
                if difference is not None and abs(alone(difference, dim)) == 1:
                    c, k = alone(difference, dim), difference.constant
                    found.add(-k + (n.kind in ("le", "gt")) if c == 1 else k + (n.kind in ("lt", "ge")))
        inside = sorted(t for t in found if 0 < t < self.walk.sizes[dim])
        return inside if len(inside) <= 4 else []

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


def alone(linear: Linear, dim: int) -> int:
    """The coefficient of a dimension in a sum that has no other; 0 if it has."""
    return linear.terms.get(dim, 0) if len(linear.terms) == 1 else 0


def difference_of(n: Number) -> Linear | None:
    """The difference of two sums of indices that are compared."""
    x, y = n.args
    return x.linear.plus(y.linear, -1) if x.kind == y.kind == "linear" else None


def drawn_in_order(n: Number, dim: int) -> bool:
    """Whether a random number's element goes up by one along a dimension and its key stays."""
    if n.kind != "random" or n.args[3].kind != "linear":
        return False
    return n.args[3].linear.terms.get(dim) == 1 and all(dim not in a.varies for a in n.args[:3])
