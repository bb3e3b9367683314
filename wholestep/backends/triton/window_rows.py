"""Products over windows with few channels as products over rows of windows: such a kernel, rewritten.

Where channels lie innermost, the columns of a window and their channels are one run of memory. It becomes one
dimension, which begins before the window and ends behind it, so that every run starts at a multiple of a few elements
and has a power of two of them: loads are wide, share their conditions and need no divisions. What is beside the window
is multiplied by 0 (an infinite number there is seen), or not stored. Windows of neighbouring pixels may share a run:
each has columns of its own then.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ...dialects.loop import Index, Load, Reduce, Space, Store
from ...ir.builtin import add_function, finish_function, module
from ...ir.core import Op, Value
from ...ir.types import TensorType
from ..kernels import Spec
from .families import power_of_two
from .walk import Walk

#: elements of a run up to which it is worth it: pixels of many channels are loaded in wide pieces as they are
LONGEST = 64
#: a tile of tensor cores
SHORTEST = 16
#: how much longer than what is read of it a run may be
WASTE = 3
#: bytes of the widest load
WIDEST = 16

Map = list[list[int]]
#: the dimensions of a tensor that columns and channels walk
Places = tuple[int, int | None]


@dataclass(frozen=True)
class Run:
    """The dimensions of a kernel that walk a row of a window in the image: its columns, and their channels."""

    image: Op
    column: int
    #: None where there is one
    channel: int | None
    channels: int
    #: the window's own place along a row, and how many elements lie between two of them
    place: int
    step: int
    #: elements of one window's row
    size: int

    @property
    def dims(self) -> frozenset[int]:
        return frozenset([self.column] if self.channel is None else [self.column, self.channel])


@dataclass(frozen=True)
class Rows:
    """A kernel over rows of windows, and how its tensors are seen."""

    function: Op
    specs: list[Spec]
    #: elements between two windows that share a run, which the last dimension counts
    step: int
    #: whether what these windows give is stored in the same places: it is to be added up
    meet: bool


@dataclass(frozen=True)
class Laid:
    """How a run is laid out: elements in front of the window, elements in all, windows that share it."""

    lead: int
    width: int
    together: int


def by_rows(function: Op, specs: Sequence[Spec], together: int = 1) -> Rows | None:
    """The kernel over rows of windows, `together` of which share a run; None where it is no such kernel."""
    walk = Walk(function, specs)
    run = next((r for op in walk.ops if (r := run_of(walk, op)) is not None and fits(walk, r)), None)
    if run is None or walk.in_bits or (together > 1 and not shares(walk, run, together)):
        return None
    laid = layout(walk, run, together)
    return None if laid is None else rewritten(walk, run, laid)


def run_of(walk: Walk, op: Op) -> Run | None:
    """The run of windows that a load reads, if it does; windows are smaller than the image."""
    if op.definition is not Load or op.attributes["dynamic"] or op.attributes["checked"]:
        return None
    spec, rows = walk.specs[walk.number[op.operands[0]]], op.attributes["map"]
    inner = [d for d, s in enumerate(spec.strides) if s == 1 and spec.shape[d] > 1]
    if len(inner) != 1:
        return None
    channel, channels = only(rows[inner[0]]), spec.shape[inner[0]]
    if channel is None:
        channels = 1
    elif walk.sizes[channel] != channels:
        return None
    for row, stride, size in zip(rows, spec.strides, spec.shape, strict=True):
        dims = [d for d, c in enumerate(row[:-1]) if c and walk.sizes[d] > 1]
        if stride != channels or size == 1 or len(dims) != 2:
            continue
        column, place = sorted(dims, key=lambda d: walk.sizes[d])
        length = walk.sizes[column] * channels
        if row[column] == 1 and row[place] > 0 and length <= LONGEST:
            return Run(op, column, channel, channels, place, row[place] * channels, length)
    return None


def only(row: Sequence[int]) -> int | None:
    """The dimension that an index is."""
    dims = [d for d, c in enumerate(row[:-1]) if c]
    return dims[0] if len(dims) == 1 and row[dims[0]] == 1 and row[-1] == 0 else None


def fits(walk: Walk, run: Run) -> bool:
    """Whether everything that changes along the run lies along it in memory, and something ends where windows end."""
    own = run.dims
    along = [op for op in walk.accesses if touches(op, own)]
    tensors = {tensor_of(op) for op in along}
    sums = [op for op in walk.ops if op.definition is Reduce]
    if any(op.definition is Index and op.attributes["dim"] in own for op in walk.ops):
        return False
    if any(tensor_of(op) in tensors and places(walk, run, op) is None for op in walk.accesses):
        return False
    if not sums or any(len(own & set(op.attributes["dims"])) not in (0, len(own)) for op in sums):
        return False
    ends = [op for op in along if ends_there(walk, run, op)]
    if is_summed(walk, run):
        product = sums[0].operands[0].op
        return product is not None and any(op.definition is Load and op.results[0] in product.operands for op in ends)
    return len(sums) == 1 and all(op in ends for op in walk.accesses if op.definition is Store)


def touches(op: Op, dims: Iterable[int]) -> bool:
    return any(row[d] for row in op.attributes["map"] for d in dims)


def places(walk: Walk, run: Run, op: Op) -> Places | None:
    """Where a run lies in a tensor, if it is one run of memory there."""
    rows, spec = op.attributes["map"], walk.specs[walk.number[tensor_of(op)]]
    columns = [d for d, row in enumerate(rows) if row[run.column]]
    if len(columns) != 1 or rows[columns[0]][run.column] != 1 or op.attributes["dynamic"]:
        return None
    (column,) = columns
    if run.channel is None:
        return column, None
    channels = [d for d, row in enumerate(rows) if row[run.channel]]
    if len(channels) != 1:
        return None
    (channel,) = channels
    if only(rows[channel]) != run.channel or spec.shape[channel] != run.channels:
        return None
    return (column, channel) if spec.strides[column] == run.channels * spec.strides[channel] else None


def tensor_of(op: Op) -> Value:
    return op.operands[0 if op.definition is Load else 1]


def ends_there(walk: Walk, run: Run, op: Op) -> bool:
    """Whether a tensor has the window's columns and nothing else along them."""
    found = places(walk, run, op)
    if found is None:
        return False
    column, _ = found
    spec = walk.specs[walk.number[tensor_of(op)]]
    return only(op.attributes["map"][column]) == run.column and spec.shape[column] * run.channels == run.size


def shares(walk: Walk, run: Run, together: int) -> bool:
    """Whether neighbouring windows can share a run: nothing else that lies along it hangs on their place."""
    if walk.sizes[run.place] % together:
        return False
    if any(op.definition is Index and op.attributes["dim"] == run.place for op in walk.ops):
        return False
    along = [op for op in walk.accesses if touches(op, run.dims) and op is not run.image]
    return not any(touches(op, {run.place}) for op in along) and is_summed(walk, run) != place_is_summed(walk, run)


def product_of(walk: Walk) -> Op:
    return next(op for op in walk.ops if op.definition is Reduce)


def is_summed(walk: Walk, run: Run) -> bool:
    """Whether the product sums over runs: else they are its columns, as in the gradient of a kernel."""
    return run.column in product_of(walk).attributes["dims"]


def place_is_summed(walk: Walk, run: Run) -> bool:
    return run.place in product_of(walk).attributes["dims"]


def layout(walk: Walk, run: Run, together: int) -> Laid | None:
    """Runs that start at multiples of as many elements as possible without being longer."""
    access, spec = walk.accesses[run.image], walk.specs[walk.number[run.image.operands[0]]]
    own = run.dims
    others = [c * (together if d == run.place else 1) for d, c in enumerate(access.offset.terms) if d not in own]
    found = places(walk, run, run.image)
    assert found is not None
    others.append(spec.shape[found[0]] * run.channels)
    covered = run.size + (together - 1) * run.step
    leads = []
    for vector in (1, 2, 4, 8):
        if vector * access.itemsize <= WIDEST and all(c % vector == 0 for c in others):
            leads.append(access.offset.constant % vector)
    width = max(SHORTEST, power_of_two(covered + min(leads[1:], default=0)))
    lead = next(lead for lead in reversed(leads) if lead + covered <= width)
    return Laid(lead, width, together) if width <= min(LONGEST, WASTE * covered) else None


def rewritten(walk: Walk, run: Run, laid: Laid) -> Rows:
    """The kernel: the dimension of columns is that of the run, that of channels has one point, and the last one are
    the windows that share a run."""
    merged: dict[Value, Places] = {}
    for op in walk.accesses:
        if touches(op, {run.column}):
            found = places(walk, run, op)
            assert found is not None
            merged[tensor_of(op)] = found
    specs, types = [], []
    for value, spec in zip(walk.block.arguments, walk.specs, strict=True):
        shape, strides = list(spec.shape), list(spec.strides)
        if value in merged:
            column, channel = merged[value]
            if channel is not None:
                shape[column], strides[column] = shape[column] * run.channels, strides[channel]
                del shape[channel], strides[channel]
        specs.append(Spec(tuple(shape), tuple(strides), spec.dtype))
        types.append(TensorType(tuple(shape), value.type.element))
    function = add_function(module(), "rows", types)
    block = function.regions[0].block
    mapping = dict(zip(walk.block.arguments, block.arguments, strict=True))
    for op in walk.block:
        if op.definition.terminator:
            continue
        copy = op.clone(mapping)
        block.append(copy)
        if op.definition is Space:
            sizes = list(walk.sizes)
            sizes[run.column] = laid.width
            if run.channel is not None:
                sizes[run.channel] = 1
            sizes[run.place] //= laid.together
            copy.attributes["sizes"] = (*sizes, laid.together)
        elif op in walk.accesses:
            copy.attributes["map"] = mapped(op, run, laid, merged.get(tensor_of(op)))
            if op.definition is Load and tensor_of(op) in merged:
                copy.attributes["guarded"] = True
        elif op.definition is Reduce and op is not product_of(walk) and run.place in op.attributes["dims"]:
            copy.attributes["dims"] = (*op.attributes["dims"], len(walk.sizes))
    finish_function(function, [])
    return Rows(function, specs, run.step, laid.together > 1 and not is_summed(walk, run))


def mapped(op: Op, run: Run, laid: Laid, merged: Places | None) -> Map:
    """The map of an access over the new dimensions."""
    rows: Map = []
    for dim, row in enumerate(op.attributes["map"]):
        *terms, constant = row
        terms.append(terms[run.place])
        terms[run.place] *= laid.together
        if merged is not None and dim == merged[1]:
            continue
        if merged is not None and dim == merged[0]:
            terms = [c * run.channels for c in terms]
            terms[run.column] = 1
            terms[-1] -= run.step  # the run begins with that of the first window
            constant = constant * run.channels - laid.lead
        rows.append([*terms, constant])
    return rows
