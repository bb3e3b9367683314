"""Loops around an anchor (`transforms/around.py`) as Triton functions that a kernel calls on its loads and its stores.

`before(value, known)` makes what a kernel reads; `after(value, seen, known)` gives what it sums over what it makes, and
at the end what it stores where that is not the value itself; `ends` turns the sums into results. Numbers per channel
are read once (`..._once`), and a chain of sums and products with them is one multiply-add per element.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ...dialects.loop import Apply, Constant, Load, Reduce, Store
from ...ir.core import Op, Value
from .scalars import Number, apply, helper_text, literal, number_type

F32 = "tl.float32"


@dataclass(frozen=True)
class Hook:
    """Functions of a side, and which arguments of its loop kernel they read: per channel, and beside the value."""

    source: str
    vectors: tuple[int, ...]
    beside: tuple[int, ...] = ()
    sums: int = 0
    #: whether they make what is stored
    stores: bool = False


@dataclass(frozen=True, slots=True)
class Line:
    """A number of an element that is `base * scale + shift`; scale and shift are numbers per channel."""

    base: Number
    scale: Number | None = None
    shift: Number | None = None


@dataclass
class Writer:
    """Writes the loops of one side. `once` is written before the walk, `each` for every element."""

    kernel: Op
    name: str
    rough: bool
    once: list[str] = field(default_factory=list)
    each: list[str] = field(default_factory=list)
    exported: list[str] = field(default_factory=list)
    helpers: set[str] = field(default_factory=set)
    vectors: list[int] = field(default_factory=list)
    beside: list[int] = field(default_factory=list)
    channel: dict[Value, Number] = field(default_factory=dict)
    element: dict[Value, Line] = field(default_factory=dict)
    written: dict[Value, Number] = field(default_factory=dict)

    def run(self, value: Value) -> Hook:
        """value: the argument that the kernel hands over itself."""
        block = self.kernel.regions[0].block
        sums = [op for op in block if op.definition is Reduce]
        images = [op for op in block if is_image(op)]
        wanted = [op.operands[0] for op in (*sums, *images)]
        needed = makers(wanted)
        for op in block:
            if op not in needed:
                continue
            if op.definition is Load:
                self.load(op, value, block.arguments.index(op.operands[0]))
            elif op.definition is Constant:
                self.channel[op.results[0]] = constant(op)
            else:
                self.apply(op)
        found = [self.text(v).to(F32) for v in wanted]
        answer = f"({', '.join(found)},)" if sums else found[0]
        exported = "".join(f"{text}, " for text in self.exported)
        source = function(f"{self.name}_once", "pointers, channel", self.once, f"({exported})")
        source += function(self.name, "value, seen, known" if sums else "value, known", self.each, answer)
        text = helper_text(sorted(self.helpers)) + source
        return Hook(text, tuple(self.vectors), tuple(self.beside), len(sums), bool(sums and images))

    def load(self, op: Op, value: Value, number: int) -> None:
        argument, result = op.operands[0], op.results[0]
        if argument.type.rank == 1:
            if number not in self.vectors:
                self.vectors.append(number)
            text = f"tl.load(pointers[{self.vectors.index(number)}] + channel).to({F32})"
            self.channel[result] = self.line(self.once, "c", Number(text, F32))
        elif argument is value:
            self.element[result] = Line(Number("value", F32))
        else:
            if number not in self.beside:
                self.beside.append(number)
            self.element[result] = Line(Number(f"seen[{self.beside.index(number)}]", F32))

    def apply(self, op: Op) -> None:
        fn, result, kind = op.fn, op.results[0], number_type(op.attributes["dtype"])
        if all(v in self.channel for v in op.operands):
            args = [self.channel[v] for v in op.operands]
            self.channel[result] = self.line(self.once, "c", self.called(fn, args, op, False))
            return
        lines = [self.element.get(v) for v in op.operands]
        first = lines[0]
        if fn == "cast" and first is not None and kind == first.base.type == F32:
            self.element[result] = first
            return
        if fn in ("add", "sub", "mul") and kind == F32 and (lines.count(None) == 1):
            line = next(v for v in lines if v is not None)
            number = next(self.channel[v] for v in op.operands if v not in self.element)
            if line.base.type == number.type == F32:
                self.element[result] = self.moved(fn, line, number, first is None)
                return
        args = [self.text(v) for v in op.operands]
        self.element[result] = Line(self.line(self.each, "v", self.called(fn, args, op, self.rough)))

    def moved(self, fn: str, line: Line, number: Number, turned: bool) -> Line:
        """A line after one more sum or product with a number per channel; `turned`: the number comes first."""
        scale, shift = line.scale, line.shift
        if fn == "mul":
            scale = number if scale is None else self.sum_of(f"{scale.text} * {number.text}")
            return Line(line.base, scale, None if shift is None else self.sum_of(f"{shift.text} * {number.text}"))
        if fn == "sub" and turned:
            scale = self.sum_of("-1.0 * " + ("1.0" if scale is None else scale.text))
            shift = number if shift is None else self.sum_of(f"{number.text} - {shift.text}")
            return Line(line.base, scale, shift)
        sign = "-" if fn == "sub" else ""
        text = f"{sign}{number.text}" if shift is None else f"{shift.text} {sign or '+'} {number.text}"
        return Line(line.base, scale, self.sum_of(text))

    def sum_of(self, text: str) -> Number:
        return self.line(self.once, "c", Number(text, F32))

    def called(self, fn: str, args: Sequence[Number], op: Op, rough: bool) -> Number:
        number, helpers = apply(fn, list(args), op.attributes["dtype"], rough)
        self.helpers.update(helpers)
        return number

    def text(self, value: Value) -> Number:
        """A number as `each` has it."""
        if value in self.channel:
            return self.known(self.channel[value])
        if value not in self.written:
            line = self.element[value]
            number = line.base
            if line.scale is not None or line.shift is not None:
                text = number.text if line.scale is None else f"{number.text} * {self.known(line.scale).text}"
                text = text if line.shift is None else f"{text} + {self.known(line.shift).text}"
                number = self.line(self.each, "v", Number(text, F32))
            self.written[value] = number
        return self.written[value]

    def known(self, number: Number) -> Number:
        """A number per channel, handed on to `each`."""
        if number.value is not None:
            return number
        if number.text not in self.exported:
            self.exported.append(number.text)
        return Number(f"known[{self.exported.index(number.text)}]", number.type)

    def line(self, lines: list[str], prefix: str, number: Number) -> Number:
        if number.value is not None:
            return number
        name = f"{prefix}{len(lines)}"
        lines.append(f"{name} = {number.text}")
        return Number(name, number.type)


def is_image(op: Op) -> bool:
    """Whether an op writes a number of every element."""
    return op.definition is Store and op.operands[1].type.rank > 1


def makers(values: Sequence[Value]) -> set[Op]:
    """The ops that make some numbers; what a sum is made of is left out."""
    found: set[Op] = set()
    pending = list(values)
    while pending:
        op = pending.pop().op
        if op is not None and op not in found:
            found.add(op)
            pending += op.operands if op.definition is Apply else ()
    return found


def constant(op: Op) -> Number:
    kind = number_type(op.attributes["dtype"])
    return Number(literal(op.value, kind), kind, op.value)


def function(name: str, arguments: str, lines: Sequence[str], answer: str) -> str:
    body = "\n".join(f"    {line}" for line in (*lines, f"return {answer}"))
    return f"@triton.jit\ndef {name}({arguments}):\n{body}\n\n\n"


def hook(kernel: Op, value: int, name: str) -> Hook:
    """The functions of one side; `value` is the number of the argument that the anchor reads or makes."""
    argument = kernel.regions[0].block.arguments[value]
    return Writer(kernel, name, argument.type.element.bits < 32).run(argument)


def ends(kernel: Op, name: str) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
    """A kernel that adds up partial sums and computes the results from them: its source, and which arguments it reads
    and writes. It is called with the partial sums, then those."""
    block = kernel.regions[0].block
    stores = [op for op in block if op.definition is Store and not is_image(op)]
    sums = [op.results[0] for op in block if op.definition is Reduce]
    needed = makers([op.operands[0] for op in stores])
    reads: list[int] = []
    helpers: set[str] = set()
    numbers: dict[Value, Number] = {}
    lines = ["column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)", "there = column < C"]
    for op in block:
        if op not in needed:
            continue
        result = op.results[0]
        if op.definition is Constant:
            numbers[result] = constant(op)
            continue
        if op.definition is Reduce:
            which, width = sums.index(result), len(sums)
            text = f"add_up(partials, column + {which} * C, there, 0, PARTS, {width} * C, ROWS, COLUMNS)"
            made = Number(text, F32)
        elif op.definition is Load:
            number = block.arguments.index(op.operands[0])
            if number not in reads:
                reads.append(number)
            made = Number(f"tl.load(r{reads.index(number)} + column, mask=there, other=0.0).to({F32})", F32)
        else:
            made, more = apply(op.fn, [numbers[v] for v in op.operands], op.attributes["dtype"])
            helpers.update(more)
        if made.value is None:
            lines.append(f"v{len(lines)} = {made.text}")
            made = Number(f"v{len(lines) - 1}", made.type)
        numbers[result] = made
    for i, op in enumerate(stores):
        text = numbers[op.operands[0]].to(F32)
        lines.append(f"tl.store(w{i} + column, ({text}).to(w{i}.dtype.element_ty), mask=there)")
    given = [f"r{i}" for i in range(len(reads))] + [f"w{i}" for i in range(len(stores))]
    arguments = ", ".join(["partials", *given, *(f"{n}: tl.constexpr" for n in ("PARTS", "C", "ROWS", "COLUMNS"))])
    source = "@triton.jit\ndef " + f"{name}({arguments}):\n" + "\n".join(f"    {line}" for line in lines) + "\n\n\n"
    return (
        helper_text(sorted(helpers)) + source,
        tuple(reads),
        tuple(block.arguments.index(op.operands[1]) for op in stores),
    )
