"""ATen handlers: shapes, views, joining and splitting, indexing, casts."""

from __future__ import annotations

from typing import Any

from ..dialects.step import StepBuilder, normalize_dim
from ..ir.core import Value
from ..ir.types import BOOL, I64
from .aten_pointwise import operand
from .importer import Importer, aten


@aten(
    "view", "_unsafe_view", "reshape", "view_as", "reshape_as", "flatten.using_ints", "unflatten.int", "squeeze",
    "squeeze.dim", "squeeze.dims", "unsqueeze", "_reshape_alias", "ravel", complex_too=True,
)  # fmt: skip
def _reshape(imp, x, *_, **__):
    return imp.b.reshape_to(x, imp.expected[0].shape)


@aten("expand", "expand_as", "broadcast_to", complex_too=True)
def _expand(imp, x, *_, **__):
    return imp.b.broadcast_to(x, imp.expected[0].shape)


@aten("transpose.int", "swapaxes", "swapdims", complex_too=True)
def _transpose(imp, x, i, j):
    if x.type.rank == 0:
        return x
    return imp.b.swap(x, normalize_dim(i, x.type.rank), normalize_dim(j, x.type.rank))


@aten("t", complex_too=True)
def _t(imp, x):
    return x if x.type.rank < 2 else imp.b.swap(x)


@aten("mT", "adjoint", "mH", "matrix_H")
def _matrix_transpose(imp, x):
    return imp.b.swap(x) if x.type.rank >= 2 else x


@aten("numpy_T", complex_too=True)
def _numpy_t(imp, x):
    return imp.b.transpose(x, order=tuple(reversed(range(x.type.rank)))) if x.type.rank > 1 else x


@aten("permute", complex_too=True)
def _permute(imp, x, dims):
    return imp.b.transpose(x, order=tuple(normalize_dim(d, x.type.rank) for d in dims)) if x.type.rank else x


@aten("movedim.int", "movedim.intlist", "moveaxis.int", "moveaxis.intlist")
def _movedim(imp, x, source, destination):
    rank = x.type.rank
    if rank == 0:
        return x
    source = [source] if isinstance(source, int) else source
    destination = [destination] if isinstance(destination, int) else destination
    places = {normalize_dim(d, rank): normalize_dim(s, rank) for s, d in zip(source, destination, strict=True)}
    rest = iter(i for i in range(rank) if i not in places.values())
    return imp.b.transpose(x, order=tuple(places[i] if i in places else next(rest) for i in range(rank)))


@aten(
    "contiguous", "clone", "alias", "lift_fresh_copy", "lift_fresh", "lift", "resolve_conj", "resolve_neg", "positive"
)
def _same(imp, x, *_, **__):
    return x


@aten("detach")
def _detach(imp, x):
    return imp.b.detach(x)


@aten(
    "to.dtype", "to.dtype_layout", "to.device", "to.other", "_to_copy", "type_as", "copy",
)  # fmt: skip
def _to(imp, x, *args, **kwargs):
    return imp.b.broadcast_to(imp.b.cast_to(x, imp.expected[0].element, rounds=True), imp.expected[0].shape)


@aten("to.prim_Device", "to.prim_dtype", "to.prim_other")
def _to_prim(imp, x, *_, **__):
    return imp.b.cast_to(x, imp.expected[0].element, rounds=True)


def cut(b: StepBuilder, x: Value, dim: int, start: int, end: int, stride: int = 1) -> Value:
    """A slice; x itself where it is all of it."""
    if start == 0 and end >= x.type.shape[dim] and stride == 1:
        return x
    return b.slice(x, dim=dim, start=start, end=end, stride=stride)


def _bounds(size: int, start: int | None, end: int | None) -> tuple[int, int]:
    start = 0 if start is None else start + size if start < 0 else start
    end = size if end is None else end + size if end < 0 else end
    start = min(max(start, 0), size)
    return start, min(max(end, start), size)


@aten("slice.Tensor", complex_too=True)
def _slice(imp, x, dim=0, start=None, end=None, step=1):
    dim = normalize_dim(dim, x.type.rank)
    start, end = _bounds(x.type.shape[dim], start, end)
    return cut(imp.b, x, dim, start, end, step)


@aten("narrow", complex_too=True)
def _narrow(imp, x, dim, start, length):
    dim = normalize_dim(dim, x.type.rank)
    start = start + x.type.shape[dim] if start < 0 else start
    return cut(imp.b, x, dim, start, start + length)


@aten("select.int", complex_too=True)
def _select(imp, x, dim, index):
    dim = normalize_dim(dim, x.type.rank)
    index = index + x.type.shape[dim] if index < 0 else index
    return imp.b.reshape(cut(imp.b, x, dim, index, index + 1), shape=imp.expected[0].shape)


def _split(imp: Importer, x: Value, dim: int) -> list[Value]:
    out, at = [], 0
    dim = normalize_dim(dim, x.type.rank)
    for type in imp.expected:
        out.append(cut(imp.b, x, dim, at, at + type.shape[dim]))
        at += type.shape[dim]
    return out


@aten(
    "split.Tensor",
    "split_with_sizes",
    "chunk",
    "split.sizes",
    "tensor_split.sections",
    "tensor_split.indices",
    "unsafe_split.Tensor",
    "unsafe_chunk",
)
def _split_any(imp, x, _, dim=0):
    return _split(imp, x, dim)


@aten("unbind.int")
def _unbind(imp, x, dim=0):
    dim = normalize_dim(dim, x.type.rank)
    return [imp.b.reshape(cut(imp.b, x, dim, i, i + 1), shape=type.shape) for i, type in enumerate(imp.expected)]


@aten("cat", "concat", "concatenate")
def _cat(imp, xs, dim=0):
    element, shape = imp.expected[0].element, imp.expected[0].shape
    # an empty vector may be joined with anything, as torch allows
    xs = [imp.b.cast_to(x, element) for x in xs if not (x.type.shape == (0,) and len(shape) != 1)]
    if not xs:
        return NotImplemented
    return imp.b.concat(xs, dim=normalize_dim(dim, len(shape))) if len(xs) > 1 else xs[0]


@aten("atleast_1d", "atleast_2d", "atleast_3d", complex_too=True)
def _atleast(imp, x):
    return imp.b.reshape_to(x, imp.expected[0].shape)


@aten("stack")
def _stack(imp, xs, dim=0):
    element, shape = imp.expected[0].element, imp.expected[0].shape
    dim = normalize_dim(dim, len(shape))
    xs = [imp.b.unsqueeze(imp.b.cast_to(x, element), dim) for x in xs]
    return imp.b.concat(xs, dim=dim) if len(xs) > 1 else xs[0]


@aten("repeat", "tile")
def _repeat(imp, x, repeats):
    b = imp.b
    rank = max(len(repeats), x.type.rank)
    repeats = [1] * (rank - len(repeats)) + list(repeats)
    shape = [1] * (rank - x.type.rank) + list(x.type.shape)
    apart = [n for d in shape for n in (1, d)]
    wide = [n for r, d in zip(repeats, shape, strict=True) for n in (r, d)]
    return b.reshape_to(b.broadcast_to(b.reshape_to(x, apart), wide), imp.expected[0].shape)


@aten("repeat_interleave.self_int")
def _repeat_interleave(imp, x, repeats, dim=None, output_size=None):
    b = imp.b
    if dim is None:
        x, dim = b.reshape_to(x, (x.type.size,)), 0
    dim = normalize_dim(dim, x.type.rank)
    shape = x.type.shape
    wide = b.broadcast_to(b.unsqueeze(x, dim + 1), (*shape[: dim + 1], repeats, *shape[dim + 1 :]))
    return b.reshape_to(wide, imp.expected[0].shape)


@aten("roll")
def _roll(imp, x, shifts, dims=()):
    b, shape = imp.b, x.type.shape
    shifts = [shifts] if isinstance(shifts, int) else list(shifts)
    dims = [dims] if isinstance(dims, int) else list(dims)
    if not dims:
        x, dims = b.reshape_to(x, (x.type.size,)), [0]
    for shift, dim in zip(shifts, dims, strict=True):
        dim = normalize_dim(dim, x.type.rank)
        size = x.type.shape[dim]
        shift = shift % size if size else 0
        if shift:
            tail, head = cut(b, x, dim, size - shift, size), cut(b, x, dim, 0, size - shift)
            x = b.concat([tail, head], dim=dim)
    return b.reshape_to(x, shape)


@aten("flip")
def _flip(imp, x, dims):
    return imp.b.flip(x, dims=tuple(normalize_dim(d, x.type.rank) for d in dims)) if x.type.rank else x


@aten("constant_pad_nd", "pad")
def _pad(imp, x, widths, *rest, mode="constant", value=None):
    if rest and isinstance(rest[0], str):
        mode, value = rest[0], rest[1] if len(rest) > 1 else value
    elif rest:
        value = rest[0]
    if mode != "constant":
        return NotImplemented
    rank = x.type.rank
    low, high = [0] * rank, [0] * rank
    for i in range(len(widths) // 2):
        low[rank - 1 - i], high[rank - 1 - i] = widths[2 * i], widths[2 * i + 1]
    if not any(low) and not any(high):
        return x
    value = 0 if value is None else value
    kind = x.type.element.kind
    value = float(value) if kind == "float" else bool(value) if kind == "bool" else int(value)
    return imp.b.pad(x, low=tuple(low), high=tuple(high), value=value)


@aten("slice_scatter")
def _slice_scatter(imp, x, src, dim=0, start=None, end=None, step=1):
    dim = normalize_dim(dim, x.type.rank)
    start, end = _bounds(x.type.shape[dim], start, end)
    return imp.b.slice_update(x, src, dim=dim, start=start, end=end, stride=step)


@aten("select_scatter")
def _select_scatter(imp, x, src, dim, index):
    dim = normalize_dim(dim, x.type.rank)
    index = index + x.type.shape[dim] if index < 0 else index
    return imp.b.slice_update(x, imp.b.unsqueeze(src, dim), dim=dim, start=index, end=index + 1)


# ---- indexing --------------------------------------------------------------------------------------------------------


@aten("embedding")
def _embedding(imp, weight, indices, padding_idx=-1, scale_grad_by_freq=False, sparse=False):
    if scale_grad_by_freq:
        return NotImplemented
    return imp.b.embedding(weight, indices, padding_idx=padding_idx)


@aten("gather")
def _gather(imp, x, dim, index, sparse_grad=False):
    if x.type.rank == 0 or index.type.rank != x.type.rank:
        return NotImplemented
    return imp.b.gather(x, index, dim=normalize_dim(dim, x.type.rank))


@aten("take_along_dim")
def _take_along_dim(imp, x, index, dim=None):
    if dim is None or x.type.rank == 0 or index.type.rank != x.type.rank:
        return NotImplemented
    b, dim = imp.b, normalize_dim(dim, x.type.rank)
    if any(i != dim and d != e for i, (d, e) in enumerate(zip(x.type.shape, index.type.shape, strict=True))):
        return NotImplemented
    index = b.cast_to(index, I64)
    return b.gather(x, b.select(b.lt(index, 0), b.add(index, x.type.shape[dim]), index), dim=dim)


@aten("index_select")
def _index_select(imp, x, dim, index):
    if x.type.rank == 0 or index.type.rank != 1:
        return NotImplemented
    return imp.b.index(x, [index], dims=(normalize_dim(dim, x.type.rank),))


def _index_lists(x: Value, indices: Any) -> tuple[list[Value], tuple[int, ...]] | None:
    """Index tensors and the dimensions they index; None for what only ATen can do (masks, empty)."""
    given = [(i, v) for i, v in enumerate(indices) if v is not None]
    if not given or any(v.type.element in (BOOL,) or v.type.element.text == "ui8" for _, v in given):
        return None
    return [v for _, v in given], tuple(i for i, _ in given)


@aten("index.Tensor", "_unsafe_index.Tensor")
def _index(imp, x, indices):
    found = _index_lists(x, indices)
    if found is None:
        return NotImplemented
    values, dims = found
    return imp.b.index(x, [imp.b.cast_to(v, I64) for v in values], dims=dims)


@aten("index_put", "_unsafe_index_put")
def _index_put(imp, x, indices, values, accumulate=False):
    b = imp.b
    if len(indices) == 1 and indices[0] is not None and indices[0].type.element is BOOL and values.type.size == 1:
        mask, values = indices[0], b.reshape_to(values, ())
        if accumulate:
            return NotImplemented
        mask = b.reshape_to(mask, (*mask.type.shape, *(1,) * (x.type.rank - mask.type.rank)))
        return b.select(mask, values, x)
    found = _index_lists(x, indices)
    if found is None:
        return NotImplemented
    tensors, dims = found
    return b.index_put(x, [b.cast_to(v, I64) for v in tensors], values, dims=dims, accumulate=accumulate)


@aten("scatter_add")
def _scatter_add(imp, x, dim, index, src):
    if x.type.rank == 0 or index.type.rank != x.type.rank or src.type.rank != x.type.rank:
        return NotImplemented
    return imp.b.scatter_add(x, index, src, dim=normalize_dim(dim, x.type.rank))


@aten("scatter.src")
def _scatter(imp, x, dim, index, src):
    if x.type.rank == 0 or index.type.rank != x.type.rank or src.type.shape != index.type.shape:
        return NotImplemented
    return imp.b.scatter(x, index, src, dim=normalize_dim(dim, x.type.rank))


@aten("scatter.value")
def _scatter_value(imp, x, dim, index, value):
    if x.type.rank == 0 or index.type.rank != x.type.rank:
        return NotImplemented
    src = imp.b.full(value, index.type.shape, x.type.element)
    return imp.b.scatter(x, index, src, dim=normalize_dim(dim, x.type.rank))


@aten("index_add")
def _index_add(imp, x, dim, index, source, alpha=1):
    if x.type.rank == 0 or index.type.rank != 1:
        return NotImplemented
    source = source if alpha == 1 else imp.b.mul(source, alpha)
    return imp.b.index_add(x, index, source, dim=normalize_dim(dim, x.type.rank))


@aten("index_fill.int_Scalar", "index_fill.int_Tensor")
def _index_fill(imp, x, dim, index, value):
    if x.type.rank == 0 or index.type.rank != 1:
        return NotImplemented
    b, dim = imp.b, normalize_dim(dim, x.type.rank)
    size = x.type.shape[dim]
    chosen = b.index_put(
        b.full(False, (size,), BOOL), [b.cast_to(index, I64)], b.full(True, (), BOOL), dims=(0,), accumulate=False
    )
    mask = b.reshape_to(chosen, tuple(size if i == dim else 1 for i in range(x.type.rank)))
    return b.select(mask, b.reshape_to(operand(b, value, x.type.element), ()), x)


@aten("one_hot")
def _one_hot(imp, x, num_classes=-1):
    b = imp.b
    classes = b.iota(start=0, stride=1, type=imp.expected[0].with_shape((imp.expected[0].shape[-1],)))
    return b.cast(b.eq(b.unsqueeze(x, -1), classes), dtype=I64)


@aten("fill.Scalar", "fill.Tensor")
def _fill(imp, x, value):
    out = operand(imp.b, value, imp.expected[0].element)
    return imp.b.broadcast_to(out, imp.expected[0].shape)


@aten("broadcast_tensors", complex_too=True)
def _broadcast_tensors(imp, xs):
    return [imp.b.broadcast_to(x, type.shape) for x, type in zip(xs, imp.expected, strict=True)]


@aten("meshgrid", "meshgrid.indexing")
def _meshgrid(imp, xs, indexing="ij"):
    b, out = imp.b, []
    for i, x in enumerate(xs):
        place = i if indexing == "ij" or len(xs) < 2 or i > 1 else 1 - i
        shape = imp.expected[i].shape
        wide = b.reshape_to(x, tuple(x.type.size if j == place else 1 for j in range(len(shape))))
        out.append(b.broadcast_to(wide, shape))
    return out
