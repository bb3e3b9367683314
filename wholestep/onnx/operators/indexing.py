"""Picking elements by indices, and putting them there."""

from __future__ import annotations

from typing import Any

import torch

from ...ir.core import Value
from ...ir.types import I64
from ..context import Context, Tensor
from . import operator
from .support import STORED, along, computed, cut, from_front, positions, vector


@operator("Gather")
def gather(c: Context, x: Tensor, indices: Tensor):
    axis = c.axis(c.attribute("axis"), x.rank)
    index = from_front(c, indices, x.shape[axis])
    if indices.constant is not None and indices.size == 1:  # one slice is a view
        at = int(indices.constant.reshape(()).item()) % x.shape[axis]
        part = cut(c.b, x.value, axis, at, at + 1)
        return c.b.reshape_to(part, (*x.shape[:axis], *indices.shape, *x.shape[axis + 1 :]))
    if axis == 0 and x.rank == 2 and x.is_float and indices.rank:
        return c.b.embedding(x.value, index)
    return c.b.index(x.value, [index], dims=(axis,))


@operator("GatherElements")
def gather_elements(c: Context, x: Tensor, indices: Tensor):
    axis = c.axis(c.attribute("axis"), x.rank)
    index = from_front(c, indices, x.shape[axis])
    return computed(c, lambda v: c.b.gather(v, index, dim=axis), x.value)


@operator("GatherND")
def gather_nd(c: Context, x: Tensor, indices: Tensor):
    b, batch = c.b, c.attribute("batch_dims", 0)
    if indices.rank < 1 or not 0 <= batch < min(x.rank, indices.rank):
        raise c.wrong(f"{batch} batch dimensions do not fit ranks {x.rank} and {indices.rank}")
    count = indices.shape[-1]
    if not 1 <= count <= x.rank - batch or x.shape[:batch] != indices.shape[:batch]:
        raise c.wrong(f"indices of shape {list(indices.shape)} do not fit the shape {list(x.shape)}")
    parts = tuple_parts(c, indices, x.shape[batch : batch + count])
    lead = indices.rank - 1
    own = [along(b, positions(b, x.shape[i]), i, lead) for i in range(batch)]
    return b.index(x.value, [*own, *parts], dims=tuple(range(batch + count)))


def tuple_parts(c: Context, indices: Tensor, sizes: tuple[int, ...]) -> list[Value]:
    """The columns of a tensor of index tuples, each counted from the front."""
    b, last = c.b, indices.rank - 1
    out = []
    for i, size in enumerate(sizes):
        if indices.constant is not None:
            part = c.constant(indices.constant[..., i])
        else:
            part = c.tensor(b.reshape_to(cut(b, indices.value, last, i, i + 1), indices.shape[:-1]), indices.type)
        out.append(from_front(c, part, size))
    return out


@operator("ScatterElements", "Scatter")
def scatter_elements(c: Context, x: Tensor, indices: Tensor, updates: Tensor):
    b, axis = c.b, c.axis(c.attribute("axis"), x.rank)
    how = c.attribute("reduction", "none")
    index = from_front(c, indices, x.shape[axis])
    if how == "none":
        return computed(c, lambda v, u: b.scatter(v, index, u, dim=axis), x.value, updates.value)
    if how == "add":
        return computed(c, lambda v, u: b.scatter_add(v, index, u, dim=axis), x.value, updates.value)
    kinds = {"mul": "prod", "max": "amax", "min": "amin"}
    if how not in kinds:
        raise c.wrong(f"{how!r} is not a way of putting elements together")
    if x.element.text == "ui64":
        raise c.unsupported("64-bit unsigned numbers are not supported", "cast to int64")

    def run(v: Value, u: Value) -> Value:
        return c.opaque("aten.scatter_reduce.two", v, axis, index, u, kinds[how], include_self=True)

    return computed(c, run, x.value, updates.value)


@operator("ScatterND")
def scatter_nd(c: Context, x: Tensor, indices: Tensor, updates: Tensor):
    b, how = c.b, c.attribute("reduction", "none")
    if indices.rank < 1 or not 1 <= indices.shape[-1] <= x.rank:
        raise c.wrong(f"indices of shape {list(indices.shape)} do not fit the shape {list(x.shape)}")
    count = indices.shape[-1]
    if updates.shape != (*indices.shape[:-1], *x.shape[count:]):
        raise c.wrong(f"updates of shape {list(updates.shape)} do not fit indices {list(indices.shape)}")
    parts = tuple_parts(c, indices, x.shape[:count])
    dims = tuple(range(count))
    if how in ("none", "add"):
        return computed(
            c, lambda v, u: b.index_put(v, parts, u, dims=dims, accumulate=how == "add"), x.value, updates.value
        )
    kinds = {"mul": "prod", "max": "amax", "min": "amin"}
    if how not in kinds:
        raise c.wrong(f"{how!r} is not a way of putting elements together")
    if x.element.text in STORED:
        raise c.unsupported("unsigned numbers of this width are not supported", "cast to int64")
    rows = 1
    for d in x.shape[:count]:
        rows *= d
    width = x.size // rows if rows else 0
    flat: Value | None = None
    for part, size in zip(parts, x.shape[:count], strict=True):
        flat = part if flat is None else b.add(b.mul(flat, size), part)
    assert flat is not None
    number = flat.type.size
    index = b.broadcast_to(b.reshape_to(flat, (number, 1)), (number, width))
    out = c.opaque(
        "aten.scatter_reduce.two", b.reshape_to(x.value, (rows, width)), 0, index,
        b.reshape_to(updates.value, (number, width)), kinds[how], include_self=True,
    )  # fmt: skip
    return b.reshape_to(out, x.shape)


@operator("TensorScatter")
def tensor_scatter(c: Context, cache: Tensor, update: Tensor, at: Tensor | None = None):
    b, axis = c.b, c.axis(c.attribute("axis"), cache.rank)
    size, length = cache.shape[axis], update.shape[axis]
    if axis == 0 or length > size:
        raise c.wrong("its sequence dimension is the batch, or the update is longer than the cache")
    place = b.unsqueeze(positions(b, length), 0)
    if at is not None:
        place = b.add(b.unsqueeze(b.cast_to(at.value, I64), 1), place)
    if c.attribute("mode") == "circular":
        place = b.rem(place, size)
    shape = tuple(d if i == axis else cache.shape[0] if i == 0 else 1 for i, d in enumerate(update.shape))
    place = b.reshape_to(b.broadcast_to(place, (cache.shape[0], length)), shape)
    index = b.broadcast_to(place, update.shape)
    return computed(c, lambda v, u: b.scatter(v, index, u, dim=axis), cache.value, update.value)


@operator("ReverseSequence")
def reverse_sequence(c: Context, x: Tensor, lengths: Tensor):
    b, batch, time = c.b, c.attribute("batch_axis"), c.attribute("time_axis")
    if {batch, time} != {0, 1} or x.rank < 2:
        raise c.wrong("its batch and time axes must be 0 and 1")
    place = along(b, positions(b, x.shape[time]), time, x.rank)
    length = along(b, b.cast_to(lengths.value, I64), batch, x.rank)
    turned = b.sub(b.sub(length, 1), place)
    index = b.broadcast_to(b.select(b.lt(place, length), turned, place), x.shape)
    return computed(c, lambda v: b.gather(v, index, dim=time), x.value)


# ---- results whose size depends on the data --------------------------------------------------------------------------


@operator("NonZero")
def non_zero(c: Context, x: Tensor):
    return c.constant(torch.atleast_1d(c.known(x, "input") != 0).nonzero().T.contiguous())


@operator("Compress")
def compress(c: Context, x: Tensor, condition: Tensor):
    b, axis = c.b, c.attribute("axis")
    value = x.value
    if axis is None:
        value, axis = b.reshape_to(value, (x.size,)), 0
    axis = c.axis(axis, value.type.rank)
    chosen = c.known(condition, "condition").nonzero().reshape(-1)
    if chosen.numel() and int(chosen[-1]) >= value.type.shape[axis]:
        raise c.wrong("its condition is longer than the dimension")
    return b.index(value, [vector(c, chosen)], dims=(axis,))


@operator("Unique")
def unique(c: Context, x: Tensor):
    """Values as numpy gives them: the first occurrence of each, in rising order or in the order of appearance."""
    known, axis = c.known(x, "input"), c.attribute("axis")
    tensor = known.reshape(-1) if axis is None else known.movedim(c.axis(axis, x.rank), 0)
    order: Any = torch.unique(tensor, sorted=True, return_inverse=True, return_counts=True, dim=0)
    values, inverse, counts = order
    first = torch.full((values.shape[0],), tensor.shape[0], dtype=torch.int64)
    first = first.scatter_reduce(0, inverse, torch.arange(tensor.shape[0]), "amin")
    if not c.attribute("sorted"):
        appearance = first.argsort()
        rank = appearance.argsort()
        values, first, counts, inverse = values[appearance], first[appearance], counts[appearance], rank[inverse]
    if axis is not None:
        values = values.movedim(0, c.axis(axis, x.rank))
    made = (values.contiguous(), first, inverse, counts)
    return [c.constant(made[0], x.type), *(c.constant(t.to(torch.int64)) for t in made[1:])]
