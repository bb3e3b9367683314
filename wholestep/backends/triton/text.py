"""Writes the ops of a kernel as Triton text over a tile.

A tile has one or two *axes*, each a run of iteration dimensions that is walked as one. A number is written in the shape
it needs: along no axis it is a scalar, along one a vector, and Triton broadcasts where they meet.
"""

from __future__ import annotations

import math
import re
from collections import ChainMap
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from ...dialects.loop import Apply, Constant, Load, Random, Reduce, Store
from ...dialects.step.bits import GROUP
from ...ir.core import Op, Value
from ...ir.types import I32, I64
from .scalars import (
    NEAR_0,
    NoText,
    Number,
    accumulator_type,
    apply,
    combined,
    helper_text,
    literal,
    neutral,
    number_type,
    reduced,
)
from .walk import Access, Dim, Form, Walk

INT32 = 2**31 - 1


@dataclass(frozen=True)
class Axis:
    """Dimensions that are walked as one, the fastest last; `block` of its points at a time."""

    name: str
    dims: tuple[Dim, ...]
    block: int
    #: where it lies in the tile; None: a scalar, one point at a time
    position: int | None
    #: its points, where it walks a part of its dimensions
    points: int | None = None
    #: what the index of its first dimension begins at, in terms of other axes
    begins: str = ""
    #: dimensions that it walks along as well, whose indices are another axis' to tell
    along: tuple[Dim, ...] = ()
    #: how often the points of a block come in it, one run after the other
    turns: int = 1

    @property
    def size(self) -> int:
        return math.prod(d.size for d in self.dims) if self.points is None else self.points

    @property
    def run(self) -> int:
        """How many points a block has."""
        return self.block // self.turns

    @property
    def blocks(self) -> int:
        return -(-self.size // self.run)

    @property
    def alone(self) -> bool:
        """Whether no block has more than one point of the first of several dimensions."""
        inner = math.prod(d.size for d in self.dims[1:])
        return len(self.dims) > 1 and inner > 0 and inner % self.block == 0

    @property
    def parts(self) -> frozenset[int]:
        return frozenset(p for d in (*self.dims, *self.along) for p in d.parts)


def axis(name: str, dims: Iterable[Dim], block: int, position: int | None) -> Axis:
    return Axis(name, tuple(dims), block, position)


@dataclass(frozen=True)
class Line:
    """A number that is `base * scale + shift`, where scale and shift lie along fewer axes than the base."""

    base: str
    scale: str = ""
    shift: str = ""
    axes: frozenset[str] = frozenset()

    @property
    def text(self) -> str:
        product = f"{self.base} * {self.scale}" if self.scale else self.base
        return f"({product} + {self.shift})" if self.shift else f"({product})"


@dataclass
class Text:
    """One kernel function in the making."""

    walk: Walk
    axes: tuple[Axis, ...]
    name: str
    lines: list[str] = field(default_factory=list)
    depth: int = 1
    names: ChainMap[Value, Number] = field(default_factory=ChainMap)
    helpers: set[str] = field(default_factory=set)
    open: tuple[Axis, ...] = ()
    masks: dict[str, str] = field(default_factory=dict)
    starts: dict[str, str] = field(default_factory=dict)
    written: set[Op] = field(default_factory=set)
    #: whether chains become one multiply-add: where what is combined first serves many points, as in a loop
    folds: bool = False
    #: how numbers are lines, by their text
    as_lines: dict[str, Line] = field(default_factory=dict)
    count: int = 0

    # ---- structure ---------------------------------------------------------------------------------------------------

    @property
    def tile(self) -> list[Axis]:
        return sorted((a for a in self.axes if a.position is not None), key=lambda a: a.position or 0)

    def line(self, text: str) -> None:
        self.lines.append("    " * self.depth + text)

    def fresh(self, prefix: str = "v") -> str:
        self.count += 1
        return f"{prefix}{self.count}"

    def pid(self) -> str:
        return "tl.program_id(0).to(tl.int64)" if self.walk.wide else "tl.program_id(0)"

    @property
    def widened(self) -> str:
        return ".to(tl.int64)" if self.walk.wide else ""

    @contextmanager
    def loop(self, header: str) -> Iterator[None]:
        """What is written inside is forgotten at the end."""
        self.line(f"for {header}:")
        names, opened = self.names, self.open
        self.names = names.new_child()
        self.depth += 1
        yield
        self.depth -= 1
        self.names, self.open = names, opened

    def start(self, axis: Axis, first: str, alone: bool = False) -> None:
        """Opens an axis at a point: its index, its mask and the indices of its dimensions.

        alone: the index of the first dimension is a scalar, as it may be where the axis says so (`Axis.alone`).
        """
        n = axis.name
        self.starts[n] = first
        if axis.position is None:
            self.line(f"{n} = {first}")
        else:
            expand = self.expand(axis)
            lanes = f"tl.arange(0, {axis.block})" + (f" % {axis.run}" if axis.turns > 1 else "")
            self.line(f"{n} = ({first} + {lanes}){expand}{self.widened}")
            self.masks.pop(n, None)
            if axis.size % axis.run or not axis.size:
                self.masks[n] = f"in_{n}"
                self.line(f"in_{n} = {n} < {axis.size}")
        if alone:
            inner = math.prod(d.size for d in axis.dims[1:])
            self.line(f"{self.index(axis.dims[0])} = {first} // {inner}")
            self.line(f"{n}_in = ({first} % {inner} + tl.arange(0, {axis.block})){self.expand(axis)}{self.widened}")
            self.indices(replace(axis, dims=axis.dims[1:]), f"{n}_in")
        else:
            self.indices(axis, n)
        self.open = (*self.open, axis)

    def indices(self, axis: Axis, n: str, suffix: str = "") -> None:
        """The indices of an axis' dimensions from its own, `n`."""
        inner = 1
        for k in reversed(range(len(axis.dims))):
            text = n if inner == 1 else f"{n} // {inner}"
            if k:
                text = f"({text}) % {axis.dims[k].size}" if inner > 1 else f"{n} % {axis.dims[k].size}"
            inner *= axis.dims[k].size or 1
            if not k and axis.begins:
                text = f"{axis.begins} + {text}"
            self.line(f"{self.index(axis.dims[k])}{suffix} = {text}")

    def expand(self, axis: Axis) -> str:
        if len(self.tile) < 2:
            return ""
        return "[:, None]" if axis.position == 0 else "[None, :]"

    def index(self, dim: Dim) -> str:
        return "i" + "_".join(map(str, dim.parts))

    def source(self, arguments: Sequence[str]) -> str:
        return f"@triton.jit\ndef {self.name}({', '.join(arguments)}):\n" + "\n".join(self.lines or ["    pass"]) + "\n"

    # ---- axes of numbers ---------------------------------------------------------------------------------------------

    def axes_of(self, dims: frozenset[int]) -> list[Axis]:
        return [a for a in self.axes if a.parts & dims]

    def value_axes(self, value: Value) -> list[Axis]:
        return self.axes_of(self.walk.dims_of[value])

    def op_axes(self, op: Op) -> list[Axis]:
        if op in self.walk.accesses:
            dims = self.walk.access_dims(self.walk.accesses[op])
            if op.definition is Store:
                dims |= self.walk.dims_of[op.operands[0]]
            return self.axes_of(dims)
        return self.axes_of(self.walk.dims_of[op.results[0]])

    def mask(self, axes: Iterable[Axis], extra: Iterable[str] = ()) -> str:
        parts = [*(self.masks[a.name] for a in axes if a.name in self.masks), *extra]
        return " & ".join(parts)

    def shape(self, axes: Iterable[Axis]) -> str:
        names = {a.name for a in axes}
        sizes = [a.block if a.name in names else 1 for a in self.tile]
        return f"({', '.join(map(str, sizes))}{',' if len(sizes) == 1 else ''})"

    def tiled(self, axes: Iterable[Axis]) -> list[Axis]:
        return [a for a in axes if a.position is not None]

    # ---- ops ---------------------------------------------------------------------------------------------------------

    def needed(self, targets: Iterable[Op]) -> list[Op]:
        """The ops that compute what some ops take, and these, in order; nothing that is known already."""
        wanted: set[Op] = set()
        todo = list(targets)
        while todo:
            op = todo.pop()
            if op in wanted or (op.results and op.results[0] in self.names):
                continue
            wanted.add(op)
            if op.results and op.results[0] in self.walk.forms:
                continue
            todo += [v.op for v in self.taken(op) if v.op is not None]
        return [op for op in self.walk.ops if op in wanted]

    def taken(self, op: Op) -> Sequence[Value]:
        """What an op is computed from: all its operands, or the one that it chooses, where that is known."""
        return op.operands

    def ready(self, ops: Iterable[Op]) -> None:
        """Writes those ops that lie along open axes only and whose operands are known."""
        for op in ops:
            if op.definition is Reduce and not self.walk.trivial(op):
                continue
            if op in self.written or (op.results and op.results[0] in self.names):
                continue
            if not all(a in self.open for a in self.op_axes(op)):
                continue
            formed = bool(op.results) and op.results[0] in self.walk.forms
            if formed or all(v in self.names or v in self.walk.number for v in self.taken(op)):
                self.write(op)

    def bind(self, value: Value, number: Number) -> None:
        name = self.fresh()
        self.line(f"{name} = {number.text}")
        self.names[value] = Number(name, number.type)

    def write(self, op: Op) -> None:
        if op.definition is Store:
            self.store(op)
            return
        result = op.results[0]
        if result in self.walk.forms:
            self.names[result] = self.form(self.walk.forms[result])
        elif op.definition is Constant:
            type, value = number_type(op.attributes["dtype"]), op.attributes["value"]
            self.names[result] = Number(literal(value, type), type, value)
        elif op.definition is Load:
            self.load(op)
        elif op.definition is Random:
            self.random(op)
        elif op.definition is Reduce:  # of one point
            type = number_type(op.attributes["dtype"])
            self.bind(result, Number(self.names[op.operands[0]].to(type), type))
        else:
            assert op.definition is Apply, op
            self.apply(op)

    def apply(self, op: Op) -> None:
        args = [self.names[v] for v in self.taken(op)]
        if len(args) < len(op.operands):
            self.names[op.results[0]] = args[0]
            return
        fn, element = op.attributes["fn"], op.attributes["dtype"]
        if fn in ("floor_div", "rem") and element is I64 and all(a.type == "tl.int32" for a in args):
            element = I32  # indices stay narrow
            form, by = self.walk.forms.get(op.operands[0]), args[1].value
            if form is not None and form.range(self.walk.sizes)[0] >= 0 and by is not None and by > 0:
                sign = "//" if fn == "floor_div" else "%"
                self.bind(op.results[0], Number(f"{args[0].text} {sign} {by}", "tl.int32"))
                return
        if self.folds and fn in ("add", "sub", "mul") and self.fold(op, args):
            return
        beside_one = fn in NEAR_0 and self.walk.beside_one(op.results[0])
        number, helpers = apply(fn, args, element, self.walk.rough, beside_one)
        self.helpers.update(helpers)
        if number.value is not None:
            self.names[op.results[0]] = number
        else:
            self.bind(op.results[0], number)

    def fold(self, op: Op, args: Sequence[Number]) -> bool:
        """Makes one multiply-add of a chain of sums and products with numbers that lie along fewer axes: those are
        combined first, and once for all points that share them. It rounds otherwise than the chain does."""
        if number_type(op.attributes["dtype"]) != "tl.float32" or any(a.type != "tl.float32" for a in args):
            return False
        axes = [frozenset(a.name for a in self.tiled(self.value_axes(v))) for v in op.operands]
        wide = 0 if axes[1] < axes[0] else 1
        if not axes[1 - wide] < axes[wide] or any(a.value is not None for a in args):
            return False
        line, number, fn = self.as_lines.get(args[wide].text), args[1 - wide].text, op.attributes["fn"]
        if line is None or not line.axes | axes[1 - wide] < axes[wide]:
            line = Line(args[wide].text)
        scale, shift = line.scale, line.shift
        if fn == "mul":
            scale = self.once(f"{scale} * {number}") if scale else number
            shift = self.once(f"{shift} * {number}") if shift else ""
        elif fn == "add":
            shift = self.once(f"{shift} + {number}") if shift else number
        elif wide == 0:
            shift = self.once(f"{shift} - {number}" if shift else f"-{number}")
        else:
            scale = self.once(f"-{scale}") if scale else "-1.0"
            shift = self.once(f"{number} - {shift}") if shift else number
        line = Line(line.base, scale, shift, line.axes | axes[1 - wide])
        self.bind(op.results[0], Number(line.text, "tl.float32"))
        self.as_lines[self.names[op.results[0]].text] = line
        return True

    def once(self, text: str) -> str:
        """A number with a name."""
        name = self.fresh("c")
        self.line(f"{name} = {text}")
        return name

    def form(self, form: Form) -> Number:
        low, high = form.range(self.walk.sizes)
        if not form.dims:
            type = "tl.int32" if abs(form.constant) <= INT32 else "tl.int64"
            return Number(literal(form.constant, type), type, form.constant)
        narrow = low >= -INT32 and high <= INT32 and not self.walk.wide
        text = self.form_text(form, "" if narrow or self.walk.wide else ".to(tl.int64)")
        name = self.fresh("n")
        self.line(f"{name} = {text}")
        return Number(name, "tl.int32" if narrow else "tl.int64")

    def form_text(self, form: Form, cast: str = "") -> str:
        parts = []
        for a in self.axes:
            for dim in a.dims:
                c = form.terms[dim.parts[-1]]
                if c:
                    parts.append(f"{self.index(dim)}{cast}" if c == 1 else f"{self.index(dim)}{cast} * {c}")
        if form.constant or not parts:
            parts.append(str(form.constant))
        return " + ".join(parts).replace("+ -", "- ")

    def pointer(self, access: Access) -> str:
        return f"p{access.argument}"

    def offset(self, access: Access) -> str:
        text = self.form_text(access.offset)
        for value, stride in access.numbers:
            number = self.names[value]
            text += f" + {number.text}" if stride == 1 else f" + {number.text} * {stride}"
        return text

    def guards(self, access: Access) -> list[str]:
        found = []
        for guard in access.guards:
            low, high = guard.form.range(self.walk.sizes)
            text = self.form_text(guard.form)
            if guard.number is not None:
                text += f" + {self.names[guard.number].text}"
            name = self.fresh("g")
            self.line(f"{name} = {text}")
            if guard.number is not None or low < 0:
                found.append(f"({name} >= 0)")
            if guard.number is not None or high >= guard.size:
                found.append(f"({name} < {guard.size})")
        return found

    def load(self, op: Op) -> None:
        access = self.walk.accesses[op]
        axes = self.op_axes(op)
        guards = self.guards(access)
        mask = self.mask(self.tiled(axes), guards)
        if access.bits:
            self.bind(op.results[0], Number(self.loaded_bits(access, self.tiled(axes), guards), "tl.int1"))
            return
        text = f"tl.load({self.pointer(access)} + ({self.offset(access)})"
        text += f", mask={mask}, other=0)" if mask else ")"
        element = op.operands[0].type.element
        type = number_type(element)
        if element.kind == "float" and element.bits < 32:
            text += f".to({type})"
        if op.attributes["checked"] and guards and element.kind == "float":  # (points beyond the tile stay 0)
            text = f"tl.where({' & '.join(guards)}, {text}, float('nan'))"
        self.bind(op.results[0], Number(text, type))

    def store(self, op: Op) -> None:
        """Where an output lies along fewer dimensions than its tile, the first point alone writes. Points outside of it
        write nothing."""
        self.written.add(op)
        access = self.walk.accesses[op]
        value = self.names[op.operands[0]]
        axes = self.op_axes(op)
        dims = self.walk.access_dims(access)
        once = []
        for a in self.tiled(axes):
            once += [f"({self.index(d)} == 0)" for d in a.dims if not set(d.parts) & dims and d.size > 1]
        if access.bits:
            self.store_bits(access, value, self.tiled(axes), [*once, *self.guards(access)])
            return
        mask = self.mask(self.tiled(axes), [*once, *self.guards(access)])
        tail = f", mask={mask})" if mask else ")"
        self.line(f"tl.store({self.pointer(access)} + ({self.offset(access)}), {value.text}{tail}")

    def loaded_bits(self, access: Access, axes: Sequence[Axis], guards: Sequence[str]) -> str:
        """Truth values: a byte for eight points that lie in it where 32 neighbours of a tile do (`step/bits.py`), and
        otherwise one for each."""
        own = None if guards else self.aligned(access.offset, axes, GROUP)
        if own is None:
            at, mask = self.once(self.offset(access)), self.mask(axes, guards)
            byte = f"({at} >> 5) * 4 + (({at} >> 1) & 3)"
            text = f"tl.load({self.pointer(access)} + ({byte}){f', mask={mask}, other=0' if mask else ''})"
            place = f"((({at} >> 2) & 6) + ({at} & 1)).to(tl.int32)"
            return f"(({text}.to(tl.int32) >> {place}) & 1) != 0"
        at, mask = self.byte_places(access, own, axes, [])
        text = f"tl.load({self.pointer(access)} + ({at}){f', mask={mask}, other=0' if mask else ''})"
        sizes, first = [a.block if a in axes else 1 for a in self.tile], own.position or 0
        sizes[first : first + 1] = [own.block // GROUP, 1, 4, 1]
        n = self.once(f"tl.reshape({text}.to(tl.int32), {tuple(sizes)})")
        sizes[first + 1], sizes[first + 3] = 4, 2
        n = self.once(f"(tl.broadcast_to({n}, {tuple(sizes)}) >> {self.bit_places(first, len(sizes))}) & 1")
        return f"tl.reshape({n}, {self.shape(axes)}) != 0"

    def store_bits(self, access: Access, value: Number, axes: Sequence[Axis], more: Sequence[str]) -> None:
        """32 neighbours of a tile as four bytes. more: what its mask says beside the ends of axes."""
        own = self.aligned(access.offset, axes, GROUP)
        if own is None or access.guards:
            raise NoText("bits of one byte are no neighbours in the tile")
        at, mask = self.byte_places(access, own, axes, more)
        sizes, place = [a.block for a in self.tile], own.position or 0
        kept = [n if a is not own else n // 8 for a, n in zip(self.tile, sizes, strict=True)]
        sizes[place : place + 1] = [own.block // GROUP, 4, 4, 2]
        ones = f"tl.broadcast_to({value.to('tl.int1')}, {self.shape(axes)}).to(tl.int32)"
        n = self.once(f"tl.reshape({ones}, {tuple(sizes)}) << {self.bit_places(place, len(sizes))}")
        self.line(f"{n} = tl.sum(tl.sum({n}, {place + 3}), {place + 1})")
        self.line(f"{n} = tl.reshape({n}, {tuple(kept)}).to(tl.uint8)")
        self.line(f"tl.store({self.pointer(access)} + ({at}), {n}{f', mask={mask}' if mask else ''})")

    def byte_places(self, access: Access, own: Axis, axes: Sequence[Axis], more: Sequence[str]) -> tuple[str, str]:
        """Where the bytes of a tile lie, one for every eighth point of an axis, and their mask."""
        first, eighth = f"{own.name}e", replace(own.dims[-1], size=own.dims[-1].size // 8)
        start = f"({self.starts[own.name]}) // 8"
        self.line(f"{first} = ({start} + tl.arange(0, {own.block // 8})){self.expand(own)}{self.widened}")
        self.indices(replace(own, dims=(*own.dims[:-1], eighth)), first, "e")
        last = own.dims[-1].parts[-1]
        terms = tuple(c if d == last else c // 8 for d, c in enumerate(access.offset.terms))
        at = self.form_text(replace(access.offset, terms=terms, constant=access.offset.constant // 8))
        for dim in own.dims:
            at = re.sub(rf"\b{self.index(dim)}\b", f"{self.index(dim)}e", at)
        ends = [f"({first} < {own.size // 8})"] if own.name in self.masks else []
        return at, self.mask([a for a in axes if a is not own], [*ends, *more])

    def bit_places(self, place: int, rank: int) -> str:
        """The bit of each point: by its eight, which is at place + 1, and by its place in a pair, at place + 3."""
        eights, pairs = (["None"] * rank for _ in range(2))
        eights[place + 1] = pairs[place + 3] = ":"
        return f"(tl.arange(0, 4)[{', '.join(eights)}] * 2 + tl.arange(0, 2)[{', '.join(pairs)}])"

    def aligned(self, form: Form, axes: Sequence[Axis], count: int) -> Axis | None:
        """The axis along which so many neighbours in the tile are neighbours by a form, from a multiple of that on."""
        fast = next((a for a in axes if a.dims and form.terms[a.dims[-1].parts[-1]] == 1), None)
        if fast is None or fast.turns > 1 or fast.block % count or fast.dims[-1].size % count or form.constant % count:
            return None
        others = [d for a in self.axes for d in (*a.dims, *a.along) if d is not fast.dims[-1]]
        return fast if all(form.terms[d.parts[-1]] % count == 0 for d in others) else None

    def random(self, op: Op) -> None:
        seed, counter, micro_batch, element, stream = (self.names[v] for v in op.operands)
        n, bits = self.fresh("r"), op.attributes["digits"]
        quads = self.quads(op)
        at = f"{n}_at"
        if quads is not None:  # four neighbours share a block of words
            points = f"{self.starts[quads.name]} + tl.arange(0, {quads.block // 4}) * 4"
            self.line(f"{quads.name}q = ({points}){self.expand(quads)}{self.widened}")
            self.indices(quads, f"{quads.name}q", "q")
            text = self.form_text(self.walk.forms[op.operands[3]], "" if self.walk.wide else ".to(tl.int64)")
            for dim in quads.dims:
                text = re.sub(rf"\b{self.index(dim)}\b", f"{self.index(dim)}q", text)
            self.line(f"{at} = {text}")
        else:
            self.line(f"{at} = {element.text}")
        self.line(f"{n}_block = ({at} // 4).to(tl.uint32)")
        self.line(f"{n}_zero = {n}_block * 0")
        self.line(
            f"{n}_upper = ({micro_batch.to('tl.int64')} | (({counter.to('tl.int64')} >> 32) << 16)).to(tl.uint32)"
        )
        words = ", ".join(f"{n}_{k}" for k in range(4))
        self.line(
            f"{words} = tl.philox({seed.text}, {n}_block, {n}_zero + {stream.to('tl.int64')}.to(tl.uint32), "
            f"{n}_zero + {counter.text}.to(tl.uint32), {n}_zero + {n}_upper)"
        )
        if quads is not None:
            shape = self.shape(self.tiled(self.op_axes(op)))
            word = f"tl.reshape(tl.join(tl.join({n}_0, {n}_2), tl.join({n}_1, {n}_3)), {shape})"
        else:
            self.line(f"{n}_of = {at} % 4")
            word = f"tl.where({n}_of == 0, {n}_0, tl.where({n}_of == 1, {n}_1, tl.where({n}_of == 2, {n}_2, {n}_3)))"
        self.bind(op.results[0], Number(f"({word} >> {32 - bits}).to(tl.float32) * {2.0**-bits!r}", "tl.float32"))

    def quads(self, op: Op) -> Axis | None:
        """The axis along which four neighbours in the tile have four neighbouring elements, from a multiple of four."""
        form = self.walk.forms.get(op.operands[3])
        axes = self.tiled(self.op_axes(op))
        if form is None or not axes or form.constant % 4:
            return None
        fast = max(axes, key=lambda a: a.position or 0)
        if (
            fast.block % 4
            or form.terms[fast.dims[-1].parts[-1]] != 1
            or (len(fast.dims) > 1 and fast.dims[-1].size % 4)
        ):
            return None
        others = [d for a in self.axes for d in a.dims if d is not fast.dims[-1]]
        return fast if all(form.terms[d.parts[-1]] % 4 == 0 for d in others) else None

    # ---- reductions --------------------------------------------------------------------------------------------------

    def operand(self, op: Op, axes: Sequence[Axis], over: Sequence[Axis] | None = None) -> str:
        """What a reduction takes, over the whole tile of some axes, neutral outside.

        over: the axes that are reduced in the end. What lies outside of others goes into sums that nobody stores.
        """
        type = accumulator_type(op.attributes["dtype"])
        number = self.names[op.operands[0]]
        if type == "tl.int32" and number.type != type:  # truth values among them
            text = number.to("tl.int1") + ".to(tl.int32)" if op.attributes["kind"] in ("or", "and") else number.to(type)
        else:
            text = number.to(type)
        have = self.value_axes(op.operands[0])
        if any(a not in have for a in self.tiled(axes)):
            text = f"tl.broadcast_to({text}, {self.shape(axes)})"
        mask = self.mask(self.tiled(axes if over is None else over))
        kind = op.attributes["kind"]
        return f"tl.where({mask}, {text}, {neutral(kind, type)})" if mask else text

    def accumulator(self, op: Op, axes: Sequence[Axis]) -> str:
        name, type = self.fresh("a"), accumulator_type(op.attributes["dtype"])
        start = neutral(op.attributes["kind"], type)
        self.line(f"{name} = tl.full({self.shape(axes) if self.tiled(axes) else '()'}, {start}, {type})")
        return name

    def accumulate(self, name: str, op: Op, axes: Sequence[Axis], over: Sequence[Axis] | None = None) -> None:
        type = accumulator_type(op.attributes["dtype"])
        self.line(f"{name} = {combined(op.attributes['kind'], name, self.operand(op, axes, over), type)}")

    def total(self, op: Op, text: str, axes: Sequence[Axis], over: Sequence[Axis]) -> Number:
        """A tile over some axes, reduced along those of `over`: with no axis left it is a scalar."""
        type = accumulator_type(op.attributes["dtype"])
        left = [a for a in self.tiled(axes) if a not in over]
        gone = self.tiled(over)
        if gone:
            if not left:
                text, helpers = reduced(op.attributes["kind"], text, None, False, type)
            else:
                text, helpers = reduced(op.attributes["kind"], text, gone[0].position, True, type)
            self.helpers.update(helpers)
        return Number(text, type)

    def known(self, op: Op, number: Number) -> None:
        """Binds the result of a reduction, in its own type."""
        type = number_type(op.attributes["dtype"])
        self.bind(op.results[0], Number(number.to(type) if type != number.type else number.text, type))


def module_text(functions: Sequence[Text], arguments: Sequence[Sequence[str]]) -> str:
    """The source of some kernel functions with their helpers."""
    helpers = sorted({h for f in functions for h in f.helpers})
    bodies = [f.source(a) for f, a in zip(functions, arguments, strict=True)]
    return helper_text(helpers) + "\n\n".join(bodies)
