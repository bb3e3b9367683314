"""Pieces of a program as the body of one kernel: which ops belong to it, what goes in and out, and its loop form.

Views cost nothing and are no work of their own: a piece takes along the views and constants that its ops look through.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ..dialects.loop import NoSchedule, Schedule, Store, schedule, varying
from ..ir.attributes import attribute_text
from ..ir.builtin import add_function, finish_function, module
from ..ir.core import Op, Value
from ..ir.hashing import structural_hash
from ..ir.types import TensorType
from . import attention_sides
from .expand import expand_where, has_expansion
from .loops import NotLoops, is_primitive, lowered

#: an attribute of ops that are kept out of kernels for now, such as concatenations whose parts are written in place:
#: the bytes of parts that are copied there
HELD = "plan.held"
#: a kernel has at most so many tensors, and so many ops
POINTERS, OPS = 30, 240
#: and with a concatenation so many more for each tensor that it joins: no point reads more than one of those
JOINED = 2
#: the longest row of which a kernel needs everything at once
LONGEST_ROW = 1 << 17
#: the longest over which columns are summed beside what is done along the row
SUMMED_ROW = 1 << 14
#: and of one whose elements are no neighbours: the statistics of a channel are a kernel of their own
STREWN_ROW = 1 << 11


def is_view(op: Op) -> bool:
    """An op that only looks at memory in another way."""
    return bool(getattr(op.definition, "views", False))


def readers_of(value: Value) -> list[Op]:
    """Who reads a value, through views as well."""
    found: list[Op] = []
    for user in dict.fromkeys(value.uses):
        found += readers_of(user.results[0]) if is_view(user) else [user]
    return found


def lineage(value: Value) -> Iterator[Value]:
    """What a value was before pointwise ops, as long as each reads one tensor of its size; views are looked through."""
    size = value.type.size
    while True:
        value = base(value)
        yield value
        op = value.op
        if op is None or not getattr(op.definition, "pointwise", False):
            return
        large = [v for v in op.operands if v.type.size == size]
        if len(large) != 1:
            return
        (value,) = large


def follows_product(value: Value) -> bool:
    """Whether a value is computed element by element from a product of its size, which may end with it."""
    size, pending, seen = value.type.size, [value], set[Value]()
    while pending:
        value = base(pending.pop())
        op = value.op
        if op is None or value in seen or value.type.size != size:
            continue
        seen.add(value)
        if op.name == "step.contract":
            return True
        if getattr(op.definition, "pointwise", False):
            pending += op.operands
    return False


def is_library(op: Op) -> bool:
    """Whether an op is no part of a generated kernel."""
    return op.name in ANCHORS or not (is_primitive(op) or has_expansion(op))


def is_source(op: Op) -> bool:
    """An op that makes its value out of nothing."""
    return not op.operands and bool(op.results)


def is_stream(value: Value) -> bool:
    """The number of a random op's stream: an operand of kernels, in which equal layers differ."""
    return bool(value.uses) and all(u.name == "step.random" and u.number is value for u in value.uses)


def base(value: Value) -> Value:
    """The value that a view, seen through any number of views, looks at."""
    while (op := value.op) is not None and is_view(op):
        value = op.operands[0]
    return value


@dataclass(slots=True)
class Piece:
    """Ops that would be one kernel, in program order, with the views and constants they need."""

    ops: list[Op]
    inputs: list[Value]
    outputs: list[Value]


@dataclass(slots=True)
class Body:
    """A piece as a function, and its loop form or why it has none."""

    function: Op | None
    kernel: Op | None = None
    schedule: Schedule | None = None
    why_not: str = ""
    rows: Rows | None = None


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of a kernel: their sizes, and which limits they have to keep."""

    sizes: tuple[int, ...]
    held: bool
    strewn: bool
    summed: bool

    @property
    def why_not(self) -> str:
        row = math.prod(self.sizes)
        if self.summed and row > SUMMED_ROW:
            return f"sums of every column of rows of {row:,} elements would be held at once"
        if self.held and row > LONGEST_ROW:
            return f"a row of {row:,} elements would be needed at once"
        if self.strewn and row > STREWN_ROW:
            return f"rows of {row:,} elements that are strewn over memory"
        return ""


def piece_of(members: Iterable[Op], position: Mapping[Op, float]) -> Piece:
    """The piece that some ops make; `position` is that of every op of the function."""
    chosen = set(members)
    ops: dict[Op, None] = dict.fromkeys(chosen)
    direct = {v for op in chosen for v in op.operands}
    images = any(op.name in IMAGES for op in chosen)
    inputs: dict[Value, None] = {}

    def need(value: Value) -> None:
        op = value.op
        if op is None or op in chosen:
            if op is None:
                inputs[value] = None
            return
        if is_source(op) and not is_stream(value):
            ops[op] = None
        elif is_view(op) and goes_inside(value, chosen, direct, images):
            ops[op] = None
            need(op.operands[0])
        else:
            inputs[value] = None

    for op in sorted(chosen, key=position.__getitem__):
        for value in op.operands:
            need(value)
    inside = sorted(ops, key=position.__getitem__)
    outputs = [
        r for op in inside if op in chosen for r in op.results if any(reads_outside(user, r, ops) for user in r.uses)
    ]
    order = {value: i for i, value in enumerate(v for op in inside for v in op.operands)}
    return Piece(inside, sorted(inputs, key=lambda v: order.get(v, 0)), outputs)


def goes_inside(value: Value, chosen: set[Op], direct: set[Value], images: bool) -> bool:
    """Whether a view is taken inside of the kernel. A slice of something else is left to strides, so that only what it
    shows is an operand; a layout of something else is a copy that others read too. Rows of a product that a convolution
    sees as an image are left to strides as well: it walks images."""
    root = base(value)
    if root.op in chosen or (root in direct and not images):
        return True
    while (op := value.op) is not None and is_view(op):
        if op.name in ("step.slice", "step.layout") or (images and op.name == "step.transpose"):
            return False
        value = op.operands[0]
    return True


def reads_outside(user: Op, value: Value, ops: dict[Op, None]) -> bool:
    """Whether a reader of a value is not part of the piece; a view inside may be read from outside as well."""
    if user not in ops:
        return True
    return is_view(user) and any(reads_outside(u, user.results[0], ops) for u in user.results[0].uses)


def body_of(piece: Piece, name: str = "region") -> Op:
    """The piece as a function of the step dialect, in a module of its own."""
    root = module()
    function = add_function(root, name, [v.type for v in piece.inputs], loc=piece.ops[-1].loc)
    block = function.regions[0].block
    mapping = dict(zip(piece.inputs, block.arguments, strict=True))
    others = sum(not (is_view(op) or is_source(op)) for op in piece.ops) > 1
    for op in piece.ops:
        copy = op.clone(mapping)
        if others:  # (among which it is an op as any)
            copy.attributes.pop(HELD, None)
        block.append(copy)
        mapping.update(zip(op.results, copy.results, strict=True))
    finish_function(function, [mapping[v] for v in piece.outputs])
    return function


@dataclass(slots=True)
class Bodies:
    """The bodies of pieces; pieces of equal structure, such as those of equal layers, are looked at once."""

    known: dict[tuple[str, tuple[int, ...]], Body] = field(default_factory=dict)
    #: per form: why there is no kernel, and its rows with numbers of sizes instead of sizes
    forms: dict[tuple[object, ...], tuple[str, Rows | None]] = field(default_factory=dict)

    def __call__(self, piece: Piece) -> Body:
        key = (structural_hash(piece.ops, ("phase",)), self.shown(piece))
        found = self.known.get(key)
        if found is None:
            found = self.known[key] = self.make(piece)
        return found

    def why_not(self, piece: Piece) -> str:
        """Why a piece is no kernel; empty where it is one. Pieces that differ in sizes alone are looked at once."""
        if any(matters_how_large(op) for op in piece.ops):
            return self(piece).why_not
        form, sizes = form_of(piece.ops)
        key = (form, self.shown(piece))
        if key not in self.forms:
            body = self(piece)
            rows = body.rows
            if rows is not None:
                rows = replace(rows, sizes=tuple(map(sizes.index, rows.sizes)))
            self.forms[key] = ("" if rows is not None else body.why_not, rows)
        why, rows = self.forms[key]
        if rows is not None:
            return replace(rows, sizes=tuple(sizes[number] for number in rows.sizes)).why_not
        return self(piece).why_not if any(c.isdigit() for c in why) else why  # (that says a size)

    def shown(self, piece: Piece) -> tuple[int, ...]:
        """Which results are seen from outside."""
        wanted = set(piece.outputs)
        return tuple(i for i, r in enumerate(r for op in piece.ops for r in op.results) if r in wanted)

    def make(self, piece: Piece) -> Body:
        problem = self.problem(piece)
        if problem:
            return Body(None, why_not=problem)
        function = body_of(piece)
        if any(op.name in attention_sides.ATTENTION for op in piece.ops):  # it is walked in tiles, not as one loop
            return Body(function, why_not=attention_sides.why_not(function))
        try:
            kernel = lowered(function)
            walk = schedule(kernel)
        except (NotLoops, NoSchedule) as error:
            return Body(function, why_not=str(error))
        largest = max((v.type.size for op in piece.ops for v in (*op.operands, *op.results)), default=1)
        points = math.prod(walk.sizes)
        if points > largest and not any(op.name in ANCHORS for op in piece.ops):
            return Body(function, why_not="they walk different dimensions")
        again = bool(walk.along) and points <= largest and comes_back(kernel, walk)
        row = tuple(walk.sizes[d] for d in walk.row)
        summed = bool(walk.along) and any(varying(kernel)[op.results[0]] & set(walk.row) for op in walk.across)
        rows = Rows(row, again and bool(walk.outer), again and not trailing(walk), summed)
        if rows.why_not:
            return Body(function, why_not=rows.why_not, rows=rows)
        return Body(function, kernel, walk, rows=rows)

    def problem(self, piece: Piece) -> str:
        if not piece.inputs:
            return "it reads nothing"
        for op in piece.ops:
            for value in (*op.operands, *op.results):
                if not isinstance(value.type, TensorType) or value.type.element.kind == "complex":
                    return "complex numbers"
                if value.type.element.text not in ELEMENTS:
                    return f"elements of type {value.type.element}"
                if not value.type.size:
                    return "an empty tensor"
        joined = max((len(op.operands) for op in piece.ops if op.name == "step.concat"), default=0)
        most = POINTERS + JOINED * joined
        if len(piece.inputs) + len(piece.outputs) > most:
            return f"more than {most} tensors in one kernel"
        if len(piece.ops) > OPS:
            return f"more than {OPS} ops in one kernel"
        return ""


#: ops that walk images, whatever these are views of
IMAGES = frozenset(("step.conv", "step.conv_input_grad", "step.conv_weight_grad"))
#: ops that libraries run, though some have a loop form: those are joined with others only by measurement
ANCHORS = frozenset(
    f"step.{n}"
    for n in ("attention", "attention_grad", "attention_mask_grad", "contract", "grouped_contract")
    + ("conv", "conv_input_grad", "conv_weight_grad")
)
ELEMENTS = ("f64", "f32", "bf16", "f16", "i64", "i32", "i16", "i8", "ui8", "i1")


#: ops whose loop form hangs on which sizes are equal or one, but not on how large they are; so are pointwise ones
SIZELESS = frozenset(f"step.{n}" for n in ("broadcast", "constant", "mean", "sum", "transpose"))
#: attributes of theirs that results show, or that are numbers
UNSEEN = frozenset(("phase", "shape", "type", "value"))
#: those of grouped convolutions that say sizes. (Other convolutions wait for products, whose sizes are of their form)
SIZES_TOO = frozenset(("groups", "input_shape", "weight_shape"))


def matters_how_large(op: Op) -> bool:
    """Whether the loop form of an op may hang on how large its dimensions are."""
    if op.name == "step.reshape":
        return [n for n in op.operands[0].type.shape if n != 1] != [n for n in op.results[0].type.shape if n != 1]
    kind = op.definition
    plain = getattr(kind, "pointwise", False) and getattr(kind, "element", None) is None
    return not (plain or op.name in SIZELESS)


def form_of(ops: Sequence[Op]) -> tuple[str, list[int]]:
    """What ops are beside their sizes: text in which equal sizes have equal numbers, and those sizes by number.

    Which value is larger is part of it: dimensions are walked in the order of the largest.
    """
    sizes: dict[int, int] = {1: 0}
    numbers: dict[Value, int] = {}
    lines: list[str] = []

    def text(value: Value) -> str:
        dims = ",".join([str(sizes.setdefault(n, len(sizes))) for n in value.type.shape])
        return f"{value.type.element.text}[{dims}]"

    for op in ops:
        line = [op.definition.name]
        for value in op.operands:
            if value not in numbers:
                numbers[value] = len(numbers)
                line.append(text(value))
            line.append(str(numbers[value]))
        unseen = UNSEEN
        if "groups" in op.attributes and op.groups > 1:
            unseen = UNSEEN | SIZES_TOO
            line.append(f"groups={sizes.setdefault(op.groups, len(sizes))}")
        line += [f"{k}={attribute_text(op.attributes[k])}" for k in sorted(op.attributes) if k not in unseen]
        for value in op.results:
            numbers[value] = len(numbers)
            line.append(text(value))
        lines.append(" ".join(line))
    totals = [value.type.size for value in numbers]
    rank = {n: i for i, n in enumerate(sorted(set(totals)))}
    lines.append(",".join([str(rank[n]) for n in totals]))
    return "\n".join(lines), list(sizes)


def trailing(walk: Schedule) -> bool:
    """Whether the elements of a row are neighbours, where tensors lie row by row."""
    return walk.row == tuple(range(len(walk.sizes)))[len(walk.sizes) - len(walk.row) :]


def comes_back(kernel: Op, walk: Schedule) -> bool:
    """Whether some store along the row needs a reduction over it first."""
    dims = varying(kernel)
    row = set(walk.row)
    behind: set[Value] = set()
    for op in kernel.regions[0].block:
        if op in walk.along or any(v in behind for v in op.operands):
            behind.update(op.results)
            if op.definition is Store and op.operands[0] in behind and dims[op.operands[0]] & row:
                return True
    return False


def could_be_pieces(op: Op) -> bool:
    """Whether everything an op consists of could be part of a kernel."""
    root = module()
    function = add_function(root, "one", [v.type for v in op.operands])
    block = function.regions[0].block
    copy = op.clone(dict(zip(op.operands, block.arguments, strict=False)))
    block.append(copy)
    finish_function(function, copy.results)
    expand_where(function, lambda o: has_expansion(o) and not is_primitive(o))
    return all(o.definition.terminator or is_primitive(o) for o in block)


def values_of(ops: Sequence[Op]) -> list[Value]:
    return [r for op in ops for r in op.results]
