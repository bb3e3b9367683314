"""Attention as the anchor of a region: the loops that make what it reads and those that read what it makes.

The body of such a region falls into *sides*, each a loop kernel of its own: one per operand of the anchor, computed on
load, and one per result, computed on its tiles. An attention walks a batch of matrices, so every side has to walk the
same: dimensions of the batch, rows, and columns. That is read off the access maps, whatever the ops are called. Whoever
runs the region asks `sides_of` for all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ..dialects.loop import Load, Reduce, Store, space_of
from ..dialects.loop.schedule import stored_along
from ..dialects.step import StepBuilder
from ..ir.builtin import add_function, finish_function, module
from ..ir.core import Op, Value
from .loops import NotLoops, lowered

#: the anchors: attention, and its gradients by queries, keys and values
FORWARD, BACKWARD = "step.attention", "step.attention_grad"
ATTENTION = frozenset((FORWARD, BACKWARD))
#: operands that are a number per row and not a row of numbers, and results that are
PER_ROW = frozenset(("logsumexp",))


class NoSides(Exception):
    """A body is no attention with loops around it; the message says why, for a user."""


@dataclass(frozen=True, slots=True)
class Side:
    """The loops that make an operand of the anchor, or read a result of it.

    numbers: per argument of the kernel that of the region's tensor, -1 for what the anchor reads or makes itself. lead,
    rows, columns: the iteration dimensions that walk the batch, the rows and the columns, the outermost first.
    """

    kernel: Op
    numbers: tuple[int, ...]
    value: Value
    lead: tuple[int, ...]
    rows: tuple[int, ...]
    columns: tuple[int, ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        return space_of(self.kernel)

    @property
    def stores(self) -> list[Op]:
        """Stores of tensors of the region."""
        block = self.kernel.regions[0].block
        return [op for op in block if op.definition is Store and op.operands[1] is not self.value]

    @property
    def is_plain(self) -> bool:
        """Whether an operand or a result is a tensor of the region, and nothing is computed."""
        return [op.definition for op in self.kernel.regions[0].block][1:-1] == [Load, Store]


@dataclass(frozen=True, slots=True)
class Sides:
    """A region around an attention: its sides by the names of the anchor's operands and results."""

    anchor: Op
    before: dict[str, Side] = field(default_factory=dict)
    after: dict[str, Side] = field(default_factory=dict)

    @property
    def is_bare(self) -> bool:
        """Whether nothing is computed around the anchor."""
        return all(side.is_plain for side in (*self.before.values(), *self.after.values()))


def names_of(op: Op) -> tuple[dict[str, Value], dict[str, Value]]:
    """The operands and the results of an anchor by name, as far as they are there."""
    fields = [f.name for f in op.definition.operand_fields]
    operands = {name: value for name in fields if (value := getattr(op, name)) is not None}
    return operands, {f.name: r for f, r in zip(op.definition.result_fields, op.results, strict=True)}


def why_not(body: Op) -> str:
    """Why a body is no attention with loops around it; empty where it is one."""
    try:
        sides_of(body)
    except (NoSides, NotLoops) as error:
        return str(error)
    return ""


def sides_of(body: Op) -> Sides:
    """The anchor of a function and the loops around it."""
    block = body.regions[0].block
    assert block.last is not None
    anchors = [op for op in block if op.name in ATTENTION]
    if len(anchors) != 1:
        raise NoSides("a kernel has one attention, not several")
    (anchor,) = anchors
    operands, results = names_of(anchor)
    if min(anchor.q.type.shape[-2], anchor.k.type.shape[-2], anchor.q.type.shape[-1], anchor.v.type.shape[-1]) < 2:
        raise NoSides("an attention of single rows or columns has no tiles")
    made = {name: {value} for name, value in results.items()}  # and what is computed from it
    for op in block:
        for known in made.values():
            if op is not anchor and not known.isdisjoint(op.operands):
                known.update(op.results)
    before, after = {n: [v] for n, v in operands.items()}, {n: list[Value]() for n in results}
    for value in block.last.operands:
        behind = [name for name, known in made.items() if value in known]
        if len(behind) > 1:
            raise NoSides(f"what reads it needs {' and '.join(behind)} at once, which no tile has")
        (after[behind[0]] if behind else before[maker_of(value, operands)]).append(value)
    tensors = {v: i for i, v in enumerate((*block.arguments, *block.last.operands))}
    full = (*anchor.q.type.shape[:-1], anchor.k.type.shape[-2])
    found = Sides(anchor)
    for name, values in before.items():
        found.before[name] = before_side(name, values, tensors, full if name == "mask" else ())
    for name, values in after.items():
        if values:
            found.after[name] = after_side(name, results[name], values, tensors)
    return found


def maker_of(value: Value, operands: dict[str, Value]) -> str:
    """The operand that a value shares most of its work with: whoever computes that has the value on the way."""
    own = makers([value])
    shared = {name: len(own & makers([v])) for name, v in operands.items() if name != "mask"}
    found = max(shared, key=shared.__getitem__)
    if not shared[found]:
        raise NoSides("one of its results is made beside the attention")
    return found


def makers(values: Iterable[Value], given: Iterable[Value] = ()) -> set[Op]:
    """The ops that make values out of arguments and of what is given."""
    known, found, pending = set(given), set[Op](), list(values)
    while pending:
        op = pending.pop().op
        if op is not None and op not in found and known.isdisjoint(op.results):
            found.add(op)
            pending += op.operands
    return found


def side_kernel(
    values: Sequence[Value], given: Sequence[Value] = (), shape: Sequence[int] = ()
) -> tuple[Op, list[Value]]:
    """What makes values out of tensors, and of a value that is given, as a loop kernel, and the tensors that it reads.

    shape: that the first is spread to, such as a mask that is the same for all heads.
    """
    found = makers(values, given)
    ops = [op for op in next(iter(found)).parent or () if op in found] if found else []
    read = dict.fromkeys(v for v in (*(v for op in ops for v in op.operands), *values) if v.op is None)
    function = add_function(module(), "side", [v.type for v in (*given, *read)])
    block = function.regions[0].block
    mapping = dict(zip((*given, *read), block.arguments, strict=True))
    for op in ops:
        copy = op.clone(mapping)
        block.append(copy)
        mapping.update(zip(op.results, copy.results, strict=True))
    results = [mapping[v] for v in values]
    if shape:
        results[0] = StepBuilder(block).broadcast_to(results[0], shape)
    finish_function(function, results)
    return lowered(function), list(read)


def before_side(name: str, values: Sequence[Value], tensors: dict[Value, int], shape: Sequence[int]) -> Side:
    """The loops that make an operand, the first of some values; the others are tensors of the region."""
    kernel, read = side_kernel(values, (), shape)
    arguments = kernel.regions[0].block.arguments
    numbers = (*(tensors[v] for v in read), -1, *(tensors[v] for v in values[1:]))
    value = arguments[len(read)]
    (store,) = (op for op in kernel.regions[0].block if op.definition is Store and op.operands[1] is value)
    lead, rows, columns = axes_of(store, value, space_of(kernel), name)
    side = Side(kernel, numbers, value, lead, rows, columns)
    check(side, name)
    return side


def after_side(name: str, result: Value, values: Sequence[Value], tensors: dict[Value, int]) -> Side:
    """The loops that make tensors of the region of a result."""
    kernel, read = side_kernel(values, [result])
    block = kernel.regions[0].block
    value, sizes = block.arguments[0], space_of(kernel)
    numbers = (-1, *(tensors[v] for v in (*read, *values)))
    found = set()
    for op in block:
        if op.definition is Load and op.operands[0] is value:
            if op.dynamic:
                raise NoSides(f"{name} is read at places that are computed")
            found.add(axes_of(op, value, sizes, name, moves=True)[:2])
    if len(found) != 1:
        raise NoSides(f"{name} is read at several rows at once")
    ((lead, rows),) = found
    # whatever else is walked lies along a row of the result: a tile has all of its columns, and any may be read
    columns = tuple(d for d, n in enumerate(sizes) if n > 1 and d not in (*lead, *rows))
    side = Side(kernel, numbers, value, lead, rows, columns)
    check(side, name)
    return side


def axes_of(
    op: Op, value: Value, sizes: Sequence[int], name: str, moves: bool = False
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """The iteration dimensions along which an access walks a batch, rows and columns, all of each.

    moves: whether the columns may be read in any other order.
    """
    maps, shape, per_row = op.attributes["map"], value.type.shape, name in PER_ROW
    found = []
    for row, size in zip(maps[:-1] if moves and not per_row else maps, shape, strict=False):
        dims = sorted((d for d, c in enumerate(row[:-1]) if c), key=lambda d: -row[d])
        inner = 1
        for d in reversed(dims):
            if row[d] != inner:
                raise NoSides(f"the rows of {name} are walked in another order")
            inner *= sizes[d]
        if inner != size or row[-1]:
            raise NoSides(f"what lies around {name} has more or fewer rows than it")
        found.append(tuple(dims))
    if moves and not per_row:
        found.append(())
    if per_row:
        found.append(())
    *batch, rows, columns = found
    return tuple(d for dims in batch for d in dims), rows, columns


def check(side: Side, name: str) -> None:
    """Refuses loops that walk more than the tiles of an operand or a result."""
    walked = {*side.lead, *side.rows, *side.columns}
    per_row, columns = {*side.lead, *side.rows}, {d for d in side.columns if side.sizes[d] > 1}
    if {d for d, n in enumerate(side.sizes) if n > 1} - walked:
        raise NoSides(f"the loops around {name} walk other dimensions than its rows and columns")
    for op in side.kernel.regions[0].block:
        if op.definition is Reduce and {d for d in op.dims if side.sizes[d] > 1} != columns:
            raise NoSides(f"the loops around {name} need a sum that is not one along its columns")
    for op in side.stores:
        if op.dynamic or stored_along(op) not in (walked, per_row):
            raise NoSides(f"what is computed beside {name} lies along a part of its tiles")
