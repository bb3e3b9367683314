"""Shapes: asking for them and changing them. A shape is always known, so what is computed from it is known too."""

from __future__ import annotations

import math

import torch
from onnx import TensorProto

from ...ir.core import Value
from ...ir.types import BOOL, I64, TensorType
from ..context import Context, Item, Items, Tensor
from ..dtypes import element_of
from . import operator
from .support import LONGEST, along, axes_of, cut, joined, limited, one_number, positions, vector, wide


@operator("Shape")
def shape(c: Context, x: Tensor):
    start, end = c.attribute("start", 0), c.attribute("end", x.rank)
    start, end = (min(max(v + x.rank if v < 0 else v, 0), x.rank) for v in (start, end))
    return c.constant(torch.tensor(x.shape[start:end], dtype=torch.int64))


@operator("Size")
def size(c: Context, x: Tensor):
    return c.constant(torch.tensor(x.size, dtype=torch.int64))


@operator("Identity")
def identity(c: Context, x: Item):
    return x


@operator("Reshape", until=4)
def reshape_by_attribute(c: Context, x: Tensor):
    return reshaped(c, x, list(c.attribute("shape") or []))


@operator("Reshape", since=5)
def reshape(c: Context, x: Tensor, target: Tensor):
    return reshaped(c, x, c.ints(target, "shape"))


def reshaped(c: Context, x: Tensor, wanted: list[int]) -> Value:
    if not c.attribute("allowzero"):
        if any(d == 0 for d in wanted[x.rank :]):
            raise c.wrong(f"its shape {wanted} copies a dimension that the input {list(x.shape)} does not have")
        wanted = [x.shape[i] if d == 0 else d for i, d in enumerate(wanted)]
    if wanted.count(-1) > 1 or any(d < -1 for d in wanted):
        raise c.wrong(f"{wanted} is not a shape")
    if -1 in wanted:
        rest = math.prod(d for d in wanted if d != -1)
        if rest == 0 or x.size % rest:
            raise c.wrong(f"{list(x.shape)} cannot be reshaped to {wanted}")
        wanted[wanted.index(-1)] = x.size // rest
    return c.b.reshape_to(x.value, wanted)


@operator("Flatten")
def flatten(c: Context, x: Tensor):
    axis = c.attribute("axis")
    if not -x.rank <= axis <= x.rank:
        raise c.wrong(f"axis {axis} is out of range for rank {x.rank}")
    axis = axis + x.rank if axis < 0 else axis
    return c.b.reshape_to(x.value, (math.prod(x.shape[:axis]), math.prod(x.shape[axis:])))


@operator("Squeeze")
def squeeze(c: Context, x: Tensor, axes: Tensor | None = None):
    dims = axes_of(c, axes, x.rank)
    if dims is None:
        dims = tuple(i for i, d in enumerate(x.shape) if d == 1)
    if any(x.shape[d] != 1 for d in dims):
        raise c.wrong(f"it removes the dimensions {list(dims)} of {list(x.shape)}, which are not all 1")
    return c.b.reshape_to(x.value, [d for i, d in enumerate(x.shape) if i not in dims])


@operator("Unsqueeze")
def unsqueeze(c: Context, x: Tensor, axes: Tensor | None = None):
    given = c.attribute("axes") if axes is None else c.ints(axes, "axes")
    rank = x.rank + len(given)
    dims = {c.axis(a, rank) for a in given}
    if len(dims) != len(given):
        raise c.wrong(f"its axes {list(given)} name a dimension twice")
    rest = iter(x.shape)
    return c.b.reshape_to(x.value, [1 if i in dims else next(rest) for i in range(rank)])


@operator("Transpose")
def transpose(c: Context, x: Tensor):
    order = c.attribute("perm")
    order = list(reversed(range(x.rank))) if order is None else [c.axis(a, x.rank) for a in order]
    if sorted(order) != list(range(x.rank)):
        raise c.wrong(f"{order} is not an order of {x.rank} dimensions")
    return x.value if order == list(range(x.rank)) else c.b.transpose(x.value, order=tuple(order))


@operator("Concat")
def concat(c: Context, *xs: Tensor):
    axis = c.axis(c.attribute("axis", 1), xs[0].rank)
    return joined(c.b, [x.value for x in xs], axis)


@operator("Split")
def split(c: Context, x: Tensor, sizes: Tensor | None = None):
    axis = c.axis(c.attribute("axis", 0), x.rank)
    given = c.attribute("split") if sizes is None else c.ints(sizes, "sizes")
    if given is None:
        given = equal_parts(c, x.shape[axis], c.attribute("num_outputs") or c.outputs)
    if sum(given) != x.shape[axis] or any(n < 0 for n in given):
        raise c.wrong(f"its parts {list(given)} do not make up a dimension of size {x.shape[axis]}")
    out, at = [], 0
    for n in given:
        out.append(cut(c.b, x.value, axis, at, at + n))
        at += n
    return out


def equal_parts(c: Context, size: int, count: int) -> list[int]:
    """Parts of one size, of which the last may be smaller."""
    if not 0 < count <= max(size, c.outputs):
        raise c.wrong(f"a dimension of size {size} does not make {count} parts")
    part = -(-size // count)
    return [max(0, min(part, size - i * part)) for i in range(count)]


@operator("Slice", until=9)
def slice_by_attributes(c: Context, x: Tensor):
    starts, ends = c.attribute("starts"), c.attribute("ends")
    return sliced(c, x, starts, ends, c.attribute("axes"), None)


@operator("Slice", since=10)
def slice_by_inputs(
    c: Context, x: Tensor, starts: Tensor, ends: Tensor, axes: Tensor | None = None, steps: Tensor | None = None
):
    return sliced(
        c, x, c.ints(starts, "starts"), c.ints(ends, "ends"),
        None if axes is None else c.ints(axes, "axes"), None if steps is None else c.ints(steps, "steps"),
    )  # fmt: skip


def sliced(c: Context, x: Tensor, starts: list[int], ends: list[int], axes: list[int] | None, steps: list[int] | None):
    b, value = c.b, x.value
    axes = list(range(len(starts))) if axes is None else axes
    steps = [1] * len(starts) if steps is None else steps
    if not len(starts) == len(ends) == len(axes) == len(steps):
        raise c.wrong("its starts, ends, axes and steps differ in number")
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        axis = c.axis(axis, x.rank)
        if step == 0:
            raise c.wrong("a step of its is zero")
        chosen = range(value.type.shape[axis])[start:end:step]
        if step < 0 and len(chosen):
            value = backwards(b, cut(b, value, axis, chosen[-1], chosen[0] + 1, -step), axis)
        elif len(chosen):
            value = cut(b, value, axis, chosen[0], chosen[-1] + 1, step)
        else:
            value = b.slice(value, dim=axis, start=0, end=0)
    return value


def backwards(b, x: Value, axis: int) -> Value:
    element = x.type.element
    return b.cast_to(b.flip(wide(b, x), dims=(axis,)), element)


@operator("Expand")
def expand(c: Context, x: Tensor, target: Tensor):
    wanted = c.ints(target, "shape")
    shape = torch.broadcast_shapes(x.shape, tuple(wanted))
    return c.b.broadcast_to(x.value, tuple(shape))


@operator("Tile", until=5)
def tile_one_axis(c: Context, x: Tensor, tiles: Tensor, axis: Tensor):
    repeats = [1] * x.rank
    repeats[c.axis(int(c.number(axis, "axis")), x.rank)] = int(c.number(tiles, "tiles"))
    return tiled(c, x, repeats)


@operator("Tile", since=6)
def tile(c: Context, x: Tensor, repeats: Tensor):
    return tiled(c, x, c.ints(repeats, "repeats"))


def tiled(c: Context, x: Tensor, repeats: list[int]) -> Value:
    if len(repeats) != x.rank or any(r < 0 for r in repeats):
        raise c.wrong(f"it repeats a tensor of rank {x.rank} {repeats} times")
    apart = [n for d in x.shape for n in (1, d)]
    repeated = [n for r, d in zip(repeats, x.shape, strict=True) for n in (r, d)]
    value = c.b.broadcast_to(c.b.reshape_to(x.value, apart), repeated)
    return c.b.reshape_to(value, [r * d for r, d in zip(repeats, x.shape, strict=True)])


# ---- borders ---------------------------------------------------------------------------------------------------------


@operator("Pad", until=10)
def pad_by_attributes(c: Context, x: Tensor):
    pads = c.attribute("pads") or c.attribute("paddings")
    return padded(c, x, list(pads), None, c.attribute("value"))


@operator("Pad", since=11)
def pad(c: Context, x: Tensor, pads: Tensor, value: Tensor | None = None, axes: Tensor | None = None):
    number = 0 if value is None or c.attribute("mode") != "constant" else c.number(value, "value")
    return padded(c, x, c.ints(pads, "pads"), None if axes is None else c.ints(axes, "axes"), number)


def padded(c: Context, x: Tensor, pads: list[int], axes: list[int] | None, number: float) -> Value:
    b, mode = c.b, c.attribute("mode")
    dims = list(range(x.rank)) if axes is None else [c.axis(a, x.rank) for a in axes]
    if len(pads) != 2 * len(dims):
        raise c.wrong(f"it has {len(pads)} widths for {len(dims)} dimensions")
    low, high = [0] * x.rank, [0] * x.rank
    for i, d in enumerate(dims):
        low[d], high[d] = pads[i], pads[len(dims) + i]
    value, element = wide(b, x.value), x.element
    for d in range(x.rank):  # a negative width takes away
        n = value.type.shape[d]
        if low[d] < 0 or high[d] < 0:
            if -min(low[d], 0) - min(high[d], 0) > n:
                raise c.wrong("it takes away more than there is")
            value = cut(b, value, d, -min(low[d], 0), n + min(high[d], 0))
            low[d], high[d] = max(low[d], 0), max(high[d], 0)
    if mode == "constant":
        if not any(low) and not any(high):
            return b.cast_to(value, element)
        kind = element.kind
        number = float(number) if kind == "float" else bool(number) if kind == "bool" else int(number)
        return b.cast_to(b.pad(value, low=tuple(low), high=tuple(high), value=number), element)
    if mode not in ("reflect", "edge", "wrap"):
        raise c.wrong(f"{mode!r} is not a way of padding")
    for d in range(x.rank):
        if low[d] or high[d]:
            value = continued(c, value, d, low[d], high[d], mode)
    return b.cast_to(value, element)


def continued(c: Context, x: Value, dim: int, low: int, high: int, mode: str) -> Value:
    """A border made of the tensor's own elements."""
    n = x.type.shape[dim]
    if n == 0 or (mode == "reflect" and n == 1 and max(low, high) > 0):
        raise c.wrong(f"it pads a dimension of size {n} with its own elements")
    limited(c, low + n + high, LONGEST)
    places = torch.arange(-low, n + high)
    if mode == "edge":
        places = places.clamp(0, n - 1)
    elif mode == "wrap":
        places = places.remainder(n)
    else:
        places = places.remainder(2 * n - 2)
        places = torch.where(places < n, places, 2 * n - 2 - places)
    return c.b.index(x, [vector(c, places)], dims=(dim,))


# ---- blocks ----------------------------------------------------------------------------------------------------------


@operator("DepthToSpace")
def depth_to_space(c: Context, x: Tensor):
    b, s = c.b, c.attribute("blocksize")
    n, channels, *spatial = four(c, x)
    if s < 1 or channels % (s * s):
        raise c.wrong(f"{channels} channels do not make blocks of {s} by {s}")
    rest = channels // (s * s)
    if c.attribute("mode", "DCR") == "DCR":
        value = b.transpose(b.reshape_to(x.value, (n, s, s, rest, *spatial)), order=(0, 3, 4, 1, 5, 2))
    else:
        value = b.transpose(b.reshape_to(x.value, (n, rest, s, s, *spatial)), order=(0, 1, 4, 2, 5, 3))
    return b.reshape_to(value, (n, rest, spatial[0] * s, spatial[1] * s))


@operator("SpaceToDepth")
def space_to_depth(c: Context, x: Tensor):
    b, s = c.b, c.attribute("blocksize")
    n, channels, height, width = four(c, x)
    if s < 1 or height % s or width % s:
        raise c.wrong(f"an image of {height} by {width} does not divide into blocks of {s}")
    value = b.reshape_to(x.value, (n, channels, height // s, s, width // s, s))
    first = c.attribute("mode", "DCR") == "DCR"  # whether the place in the block comes before the channel
    value = b.transpose(value, order=(0, 3, 5, 1, 2, 4) if first else (0, 1, 3, 5, 2, 4))
    return b.reshape_to(value, (n, channels * s * s, height // s, width // s))


def four(c: Context, x: Tensor) -> tuple[int, ...]:
    if x.rank != 4:
        raise c.wrong(f"its input has rank {x.rank}, not 4")
    return x.shape


# ---- patterns --------------------------------------------------------------------------------------------------------


@operator("Trilu")
def trilu(c: Context, x: Tensor, k: Tensor | None = None):
    b, diagonal = c.b, 0 if k is None else int(c.number(k, "diagonal"))
    if x.rank < 2:
        raise c.wrong(f"its input has rank {x.rank}, not 2 or more")
    if x.size == 0:
        return x.value
    row, column = positions(b, x.shape[-2]), positions(b, x.shape[-1], start=-diagonal)
    compare = b.ge if c.attribute("upper") else b.le
    keep = compare(b.unsqueeze(column, 0), b.unsqueeze(row, 1))
    value = wide(b, x.value)
    zero = b.full(0, (), value.type.element)
    return b.cast_to(b.select(keep, value, zero), x.element)


@operator("EyeLike")
def eye_like(c: Context, x: Tensor):
    b, kind = c.b, c.attribute("dtype", x.type)
    element = element_of(kind)
    if x.rank != 2 or element is None:
        raise c.wrong(f"it makes a matrix of numbers, not of rank {x.rank}")
    row, column = positions(b, x.shape[0]), positions(b, x.shape[1], start=-c.attribute("k"))
    return c.tensor(b.cast_to(b.eq(b.unsqueeze(row, 1), b.unsqueeze(column, 0)), element), kind)


@operator("Range")
def range_(c: Context, start: Tensor, limit: Tensor, delta: Tensor):
    parts = [(start, "start"), (limit, "limit"), (delta, "delta")]
    first, last, step = (c.known(v, what).reshape(()) for v, what in parts)
    if step == 0:
        raise c.wrong("its delta is zero")
    span = (last - first).to(torch.promote_types(first.dtype, torch.float32))
    count = max(0, math.ceil((span / step).item() if start.is_float else -((first - last) // step).item()))
    first, step = first.item(), step.item()
    if start.element in (I64, element_of(TensorProto.INT32)):
        return c.b.iota(start=first, stride=step, type=TensorType((count,), start.element))
    places = c.b.cast_to(positions(c.b, count), start.element)
    return c.b.add(c.b.mul(places, step), first)


@operator("OneHot")
def one_hot(c: Context, indices: Tensor, depth: Tensor, values: Tensor):
    b, count = c.b, int(c.number(depth, "depth"))
    rank = indices.rank + 1
    axis = c.axis(c.attribute("axis"), rank)
    if values.shape != (2,) or count < 0:
        raise c.wrong("its values must be two numbers, off and on, and its depth not negative")
    index = b.cast_to(wide(b, indices.value), I64)
    index = b.select(b.lt(index, 0), b.add(index, count), index)
    found = b.eq(b.unsqueeze(index, axis), along(b, positions(b, count), axis, rank))
    pair = wide(b, values.value)
    off, on = (one_number(b, cut(b, pair, 0, i, i + 1)) for i in (0, 1))
    assert found.type.element is BOOL
    return b.cast_to(b.select(found, on, off), values.element)


# ---- sequences -------------------------------------------------------------------------------------------------------


@operator("SequenceEmpty", folds=False)
def sequence_empty(c: Context):
    return Items()


@operator("SequenceConstruct", folds=False)
def sequence_construct(c: Context, *xs: Tensor):
    return Items(xs)


@operator("SequenceLength", folds=False)
def sequence_length(c: Context, items: Items):
    return c.constant(torch.tensor(len(items), dtype=torch.int64))


@operator("SequenceAt", folds=False)
def sequence_at(c: Context, items: Items, position: Tensor):
    return items[place_in(c, position, len(items))]


@operator("SequenceInsert", folds=False)
def sequence_insert(c: Context, items: Items, x: Tensor, position: Tensor | None = None):
    at = len(items) if position is None else place_in(c, position, len(items), end=True)
    return Items([*items[:at], x, *items[at:]])


@operator("SequenceErase", folds=False)
def sequence_erase(c: Context, items: Items, position: Tensor | None = None):
    at = place_in(c, position, len(items)) if position is not None else len(items) - 1
    if not items:
        raise c.wrong("the sequence is empty")
    return Items([*items[:at], *items[at + 1 :]])


def place_in(c: Context, position: Tensor, length: int, end: bool = False) -> int:
    at = int(c.number(position, "position"))
    if not -length <= at < length + end:
        raise c.wrong(f"position {at} is outside of a sequence of {length}")
    return at + length if at < 0 else at


@operator("ConcatFromSequence", folds=False)
def concat_from_sequence(c: Context, items: Items):
    if not items or not all(isinstance(x, Tensor) for x in items):
        raise c.wrong("it joins a sequence of at least one tensor")
    new = bool(c.attribute("new_axis"))

    def rule(inner: Context, *xs: Tensor):
        axis = inner.axis(c.attribute("axis"), xs[0].rank + new)
        values = [inner.b.unsqueeze(x.value, axis) if new else x.value for x in xs]
        return inner.tensor(joined(inner.b, values, axis), xs[0].type)

    return c.apply(rule, *items)


@operator("SplitToSequence", folds=False)
def split_to_sequence(c: Context, x: Tensor, sizes: Tensor | None = None):
    axis = c.axis(c.attribute("axis"), x.rank)
    length, squeezed = x.shape[axis], sizes is None and not c.attribute("keepdims")
    if sizes is None:
        parts = [1] * limited(c, length)
    elif sizes.rank == 0:
        part = int(c.number(sizes, "size"))
        if part < 1:
            raise c.wrong(f"parts of size {part} cannot be made")
        limited(c, length // part)
        parts = [min(part, length - at) for at in range(0, length, part)]
    else:
        parts = c.ints(sizes, "sizes")
        if sum(parts) != length or any(n < 0 for n in parts):
            raise c.wrong(f"its parts {parts} do not make up a dimension of size {length}")

    def rule(inner: Context, x: Tensor):
        out, at = [], 0
        for n in parts:
            value = cut(inner.b, x.value, axis, at, at + n)
            if squeezed:
                value = inner.b.reshape_to(value, x.shape[:axis] + x.shape[axis + 1 :])
            out.append(inner.tensor(value, x.type))
            at += n
        return Items(out)

    return c.apply(rule, x)


@operator("Optional", folds=False)
def optional(c: Context, x: Item = None):
    return x


@operator("OptionalHasElement", folds=False)
def optional_has_element(c: Context, x: Item = None):
    return c.constant(torch.tensor(x is not None))


@operator("OptionalGetElement", folds=False)
def optional_get_element(c: Context, x: Item):
    if x is None:
        raise c.wrong("the optional has no element")
    return x
