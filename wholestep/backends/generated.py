"""A chosen way to run a region as a kernel of the plan: how its results lie, and what they may be written over."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, zip_longest
from typing import Any

import torch

from ..dialects.loop import Load, NoSchedule, Reduce, Store, outputs_of, schedule, space_of, varying
from ..dialects.loop.schedule import Schedule, stored_along
from ..dialects.step import torch_dtype
from ..dialects.step.convolution import ConvolutionLike
from ..dialects.strides import is_dense, is_laid_out, row_major, runs
from ..ir.core import Op, Value
from ..ir.types import TensorType
from ..transforms.attention_sides import ATTENTION
from ..transforms.tall_products import likely_orders, strides_of
from . import depthwise
from .choose import Chosen
from .kernels import KERNEL, Kernel, Ref, Spec, Step
from .providers import Region
from .wgmma import windows

#: times that a table is smaller than a region's largest operand
SMALL = 16


def region_of(
    body: Op,
    kernel: Op | None,
    operands: Sequence[Spec],
    device: torch.device,
    wanted: Sequence[tuple[int, ...] | None] = (),
) -> Region:
    """A region on operands that lie in a certain way. Convolutions lie as libraries want them, not as loops would.

    wanted: strides of results that somebody asks for; a loop can write in any, loops around a depthwise convolution
    and products of windows pixels with something between them.
    """
    block = body.regions[0].block
    convolves = any(issubclass(op.definition, ConvolutionLike) for op in block)
    if convolves:
        kernel = None
    assert block.last is not None
    types = [v.type for v in block.last.operands]
    layouts = result_layouts(kernel, operands, types, as_product_lies(body, operands))
    anchor = next((op for op in block if op.name in ATTENTION), None)
    if anchor is not None:
        layouts = [as_heads_lie(anchor, t) or own for t, own in zip(types, layouts, strict=True)]
    if convolves:
        asked_for = zip(block.last.operands, wanted, strict=False)
        wanted = [s if depthwise.writes_so(body, v, s) or windows.writes_so(body, v, s) else None for v, s in asked_for]
    if kernel is not None or convolves or anchor is not None:
        layouts = [asked or own for own, asked in zip_longest(layouts, wanted[: len(layouts)])]
    results = tuple(Spec(t.shape, s, torch_dtype(t.element)) for t, s in zip(types, layouts, strict=True))
    return Region(body, kernel, tuple(operands), results, device)


def as_heads_lie(anchor: Op, type: TensorType) -> tuple[int, ...] | None:
    """Strides of a result that has the shape of one of an attention: row by row with all heads in a row, as libraries
    write it and products read it. None of any other."""
    if type.rank != 4 or all(type.shape != v.type.shape for v in (anchor.q, anchor.k, *anchor.results)):
        return None
    _, heads, rows, width = type.shape
    return rows * heads * width, width, heads * width, 1


def as_product_lies(body: Op, operands: Sequence[Spec]) -> list[tuple[int, ...]]:
    """Strides of the results of a region around one product, as they would be if the product were written row by row
    and the rest kept to that; none where large operands lie otherwise (tables of rotary positions may). Heads that were
    split off its columns stay there."""
    block = body.regions[0].block
    most = max((s.bytes for s in operands), default=0)
    plain = all(s.strides == row_major(s.shape) for s in operands if s.bytes * SMALL >= most)
    if not plain or [op.name for op in block].count("step.contract") != 1:
        return []
    assert block.last is not None
    orders = likely_orders(block)
    return [strides_of(v, orders) for v in block.last.operands]


def result_layouts(
    kernel: Op | None,
    operands: Sequence[Spec],
    types: Sequence[TensorType],
    of_product: Sequence[tuple[int, ...]] = (),
) -> list[tuple[int, ...]]:
    """Strides of the results: as the largest operand of the same shape lies, else as a product's would, else in the
    order in which the largest operand is walked."""
    found = []
    by_size = sorted(operands, key=lambda s: -s.bytes)
    order = None if kernel is None else memory_order(kernel, operands)
    stores = {} if kernel is None else {op.operands[1]: op for op in kernel.regions[0].block if op.definition is Store}
    arguments = [] if kernel is None else outputs_of(kernel)
    for number, type in enumerate(types):
        alike = next((s for s in by_size if s.shape == type.shape and is_dense(s.shape, s.strides)), None)
        if alike is not None:
            found.append(alike.strides)
        elif kernel is None:
            found.append(as_images_lie(by_size, type.shape))
        elif of_product:
            found.append(of_product[number])
        elif order is None:
            found.append(row_major(type.shape))
        else:
            found.append(strides_in_order(stores[arguments[number]], type.shape, order))
    return found


def as_images_lie(operands: Sequence[Spec], shape: tuple[int, ...]) -> tuple[int, ...]:
    """Channels-last where the first operand of the same rank is, as libraries do it; else row by row."""
    order = (0, *range(2, len(shape)), 1)
    image = next((s for s in operands if len(s.shape) == len(shape)), None)
    if len(shape) < 4 or image is None or not is_laid_out(image.shape, image.strides, order):
        return row_major(shape)
    laid = row_major([shape[d] for d in order])
    return tuple(laid[order.index(d)] for d in range(len(shape)))


def memory_order(kernel: Op, operands: Sequence[Spec]) -> dict[int, int] | None:
    """The place of each iteration dimension when the largest operand is walked as it lies, the outermost first.
    Dimensions that it does not have stay where they are among the others."""
    arguments = kernel.regions[0].block.arguments
    largest, spec = None, None
    for argument, s in zip(arguments, operands, strict=False):
        if each_apart(s.shape, s.strides) and (spec is None or s.bytes > spec.bytes):
            largest, spec = argument, s
    if largest is None or spec is None:
        return None
    load = next((op for op in kernel.regions[0].block if op.definition is Load and op.operands[0] is largest), None)
    if load is None:
        return None
    steps = address_steps(load, spec.strides, len(space_of(kernel)))
    dims = varying(kernel) if load.attributes["dynamic"] else {}
    for number, dim in zip(load.operands[1:], load.attributes["dynamic"], strict=True):
        for d in dims[number]:  # an index that is computed moves along that dimension as well
            steps[d] = max(steps[d], spec.strides[dim])
    walked = iter(sorted((d for d, step in enumerate(steps) if step), key=lambda d: (-abs(steps[d]), d)))
    return {next(walked) if step else d: i for i, (d, step) in enumerate(enumerate(steps))}


def each_apart(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether each element has a place of its own, dimension by dimension: in a dense tensor, or in a slice of one."""
    reach = 1
    for stride, size in sorted((st, n) for n, st in zip(shape, strides, strict=True) if n != 1):
        if size and stride < reach:
            return False
        reach = stride * size
    return True


def address_steps(op: Op, strides: Sequence[int], dims: int) -> list[int]:
    """How far an access moves in memory with each iteration dimension."""
    steps = [0] * dims
    for row, stride in zip(op.attributes["map"], strides, strict=True):
        for d, c in enumerate(row[:-1]):
            steps[d] += c * stride
    return steps


def strides_in_order(store: Op, shape: Sequence[int], order: dict[int, int]) -> tuple[int, ...]:
    """Dense strides whose dimensions are in the order of the iteration dimensions they are stored along."""
    ranks = []
    for dim, row in enumerate(store.attributes["map"]):
        along = [d for d, c in enumerate(row[:-1]) if c]
        ranks.append((max((order[d] for d in along), default=-1), dim))
    strides, step = [0] * len(shape), 1
    for _, dim in sorted(ranks, reverse=True):
        strides[dim] = step
        step *= max(shape[dim], 1)
    return tuple(strides)


def overwritable(kernel: Op | None, operands: Sequence[Spec], results: Sequence[Spec]) -> list[frozenset[int]]:
    """Per result: operands whose memory it may take.

    Each point must read exactly the element that it writes, and write it in the last walk over its row: kernels of long
    rows walk them once per reduction that others wait for, and read again what they have read before. Or the element
    is read for nothing but what is stored after the reduction of all other dimensions, which is done once: not where
    sums over all rows keep a dimension that the element does not lie along, since several programs finish those.

    What is looked up once per row, such as the logit of its target, is read before the row is walked: it may be any
    element of the row.
    """
    if kernel is None:
        return [frozenset() for _ in results]
    block = kernel.regions[0].block
    sizes = space_of(kernel)
    everything = {d for d, n in enumerate(sizes) if n > 1}
    loads: dict[Value, list[Op]] = {}
    for op in block:
        if op.definition is Load:
            loads.setdefault(op.operands[0], []).append(op)
    stores = {op.operands[1]: op for op in block if op.definition is Store}
    try:
        walks = walks_before(kernel)
        facts = Facts(schedule(kernel), varying(kernel), reduced_before(kernel))
    except NoSchedule:  # a product with sums of its result: tiles of rows and columns, in any order
        return [frozenset() for _ in results]
    last = max(walks[op.operands[0]] for op in stores.values())
    found = []
    for argument, result in zip(outputs_of(kernel), results, strict=True):
        store = stores[argument]
        taken: set[int] = set()
        walked = stored_along(store)
        in_last_walk = walks[store.operands[0]] == last
        for number, spec in enumerate(operands if store.attributes.get("bits") is None else ()):
            if spec.dtype != result.dtype or runs(spec.shape, spec.strides) != runs(result.shape, result.strides):
                continue
            read = loads.get(block.arguments[number], [])
            place = place_of(store, result.strides, sizes)
            if in_last_walk and last and walked == everything:
                read = [op for op in read if not is_of_its_row(facts, op, spec, place, walks)]
            if any(place_of(op, spec.strides, sizes) != place or op.attributes["dynamic"] for op in read):
                continue
            if any(op.attributes.get("bits") is not None for op in read):  # others read the same byte
                continue
            if in_last_walk if walked == everything else is_over_before(facts, store, read, in_last_walk):
                taken.add(number)
        found.append(frozenset(taken))
    return found


def place_of(op: Op, strides: Sequence[int], sizes: Sequence[int], without: Sequence[int] = ()) -> list[int]:
    """Where an access goes in memory: a step per iteration dimension, none where it has one index only, and a constant.

    without: dimensions of the tensor that do not count.
    """
    found = [0] * (len(sizes) + 1)
    for dim, (row, stride) in enumerate(zip(op.attributes["map"], strides, strict=True)):
        for d, c in enumerate(row):
            if dim not in without and (d == len(sizes) or sizes[d] > 1):
                found[d] += c * stride
    return found


@dataclass(frozen=True, slots=True)
class Facts:
    """How a kernel walks, what its numbers change along, and what is reduced before each op."""

    walk: Schedule
    dims: dict[Value, frozenset[int]]
    behind: dict[Op, frozenset[int]]


def is_of_its_row(facts: Facts, load: Op, spec: Spec, stored: Sequence[int], walks: dict[Value, int]) -> bool:
    """Whether a load looks up, before the row is walked, one element of the row that is stored there."""
    walk, dims, looked_up = facts.walk, facts.dims[load.results[0]], load.attributes["dynamic"]
    if not looked_up or walks[load.results[0]] or load in walk.after or not dims.isdisjoint(walk.row):
        return False
    if not dims and walk.after:  # what finishes sums over all rows may read it again
        return False
    begins = place_of(load, spec.strides, walk.sizes, looked_up)
    if begins != [0 if d in walk.row else step for d, step in enumerate(stored)]:
        return False
    steps = sorted(((stored[d], walk.sizes[d]) for d in walk.row), reverse=True)
    reach = sorted(((spec.strides[d], spec.shape[d]) for d in looked_up), reverse=True)
    return runs([n for _, n in steps], [s for s, _ in steps]) == runs([n for _, n in reach], [s for s, _ in reach])


def is_over_before(facts: Facts, store: Op, loads: Sequence[Op], in_last_walk: bool) -> bool:
    """Whether nobody reads an element any more when one is stored there after the reduction of all other dimensions.

    The element itself must be stored after such reductions, and all that comes of these loads as well; none of their
    walks come later. What finishes sums over all rows runs once for each point that any of them keeps.
    """
    walk, dims, behind = facts.walk, facts.dims, facts.behind
    everything = {d for d, n in enumerate(walk.sizes) if n > 1}
    walked = stored_along(store)
    if not everything - walked <= behind[store]:
        return False
    if store in walk.after and any(not everything - walked <= set(op.attributes["dims"]) for op in walk.across):
        return False
    found: dict[Op, None] = {}
    pending = [user for op in loads for user in op.results[0].uses]
    while pending:
        op = pending.pop()
        if op not in found:
            found[op] = None
            pending += [user for r in op.results for user in r.uses]
    ends = [op for op in found if op.definition is Store]
    if not ends or any(not everything - walked <= behind[op] or not stored_along(op) <= walked for op in ends):
        return False
    by_rows = any(not dims[r] <= walked for op in found for r in op.results)
    return not by_rows or in_last_walk


def reduced_before(kernel: Op) -> dict[Op, frozenset[int]]:
    """Of each op the dimensions along which a reduction is over when it runs."""
    found: dict[Op, frozenset[int]] = {}
    for op in kernel.regions[0].block:
        found[op] = frozenset().union(*(found[v.op] for v in op.operands if v.op is not None))
        if op.definition is Reduce:
            found[op] |= frozenset(op.attributes["dims"])
    return found


def walks_before(kernel: Op) -> dict[Value, int]:
    """Of each number, how many walks over the row must be over before it is known."""
    block = kernel.regions[0].block
    along = set(schedule(kernel).along) if any(op.definition is Reduce for op in block) else set()
    found: dict[Value, int] = {}
    for op in block:
        behind = max((found.get(v, 0) for v in op.operands), default=0)
        for result in op.results:
            found[result] = behind + (op in along)
    return found


def kernel_of(region: Region, chosen: Chosen | None) -> Kernel:
    """The kernel that runs a region; without a choice one that only says what it needs."""
    count = len(region.operands)
    scratch = () if chosen is None else chosen.scratch
    results = list(range(count, count + len(region.results)))
    inner = list(range(count + len(results), count + len(results) + len(scratch)))
    memory = dict(zip([*results, *inner], [*region.results, *scratch], strict=True))
    run = unchosen if chosen is None or chosen.run is None else chosen.run
    step = Step(KERNEL, run, tuple(Ref(i) for i in range(count)), {}, (*results, *inner))
    kernel = Kernel(count, [step], memory, results, list(region.results))
    known: dict[Any, list[frozenset[int]]] = {}  # most parts of a batch are like others
    for part, first in parts_of(region):
        alike = (part.kernel, part.operands, part.results)
        if alike not in known:
            known[alike] = overwritable(*alike)
        kernel.over += [frozenset([first + n for n in taken]) for taken in known[alike]]
    kernel.scratch = [(n, 0, 1) for n in inner]
    return kernel


def parts_of(region: Region) -> list[tuple[Region, int]]:
    """The regions that one is made of, and where the operands of each begin; of most it is only itself."""
    parts = region.parts or (region,)
    return list(zip(parts, accumulate([0, *(len(p.operands) for p in parts)]), strict=False))


def unchosen(*tensors: torch.Tensor) -> None:
    raise RuntimeError("no provider was chosen for this region yet")
