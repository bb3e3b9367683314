"""Reading and writing by index tensors. `index` and `index_put` take negative ones; gradients of repeats accumulate."""

from __future__ import annotations

import torch

from ...ir.core import Op, Value
from ...ir.dialect import AnyTensor, Attr, FloatTensor, IntTensor, Operand, Result
from ...ir.types import BOOL, I32, TensorType
from .base import LABELS, Roles, StepOp, broadcast_shapes, step, torch_dtype
from .support import present, spread

aten = torch.ops.aten


class Indexing(StepOp):
    """Common rules: reading costs no arithmetic."""

    @staticmethod
    def flops(op: Op) -> int:
        return 0


# ---- embedding -------------------------------------------------------------------------------------------------------


@step.op
class Embedding(Indexing):
    """Rows of a table: y[i, ...] = weight[indices[i]]."""

    moves = True
    weight = Operand(AnyTensor, "the table: [rows, width]")
    indices = Operand(IntTensor)
    y = Result()
    padding_idx = Attr("int", "a row that receives no gradient; -1 for none", -1)

    @staticmethod
    def infer(weight, indices, padding_idx):
        return weight.with_shape((*indices.shape, *weight.shape[1:]))

    @staticmethod
    def check(op):
        return None if op.weight.type.rank == 2 else "the table must be [rows, width]"

    @staticmethod
    def evaluate(op):
        return aten.embedding.default

    @staticmethod
    def element(k, op, index):
        return k.at(op.weight, [k.computed(k.at(op.indices, index[:-1])), index[-1]])

    @staticmethod
    def derivative(b, op, dy):
        return [b.embedding_grad(dy, op.indices, rows=op.weight.type.shape[0], padding_idx=op.padding_idx), None]

    @staticmethod
    def expand(b, op):
        return b.index(op.weight, [op.indices], dims=(0,))

    @staticmethod
    def roles(op):
        labels = LABELS[: op.indices.type.rank]
        return Roles(("ZY", labels), (labels + "Y",), whole="Z")


@step.op
class EmbeddingGrad(StepOp):
    """dweight of an embedding: each row the sum of dy where it was read."""

    precision = "high"
    dy = Operand(FloatTensor)
    indices = Operand(IntTensor)
    dweight = Result()
    rows = Attr("int", "rows of the table")
    padding_idx = Attr("int", "a row that receives no gradient; -1 for none", -1)

    @staticmethod
    def infer(dy, indices, rows, padding_idx):
        return dy.with_shape((rows, *dy.shape[len(indices.shape) :]))

    @staticmethod
    def evaluate(op):
        rows, padding = op.rows, op.padding_idx
        return lambda dy, indices: aten.embedding_dense_backward.default(dy, indices, rows, padding, False)

    @staticmethod
    def expand(b, op):
        dy, padding = op.dy, op.padding_idx
        if padding >= 0:
            dy = b.select(b.eq(b.unsqueeze(op.indices, -1), padding), 0.0, dy)
        return b.index_put(b.zeros_like(op.dweight), [op.indices], dy, dims=(0,), accumulate=True)

    @staticmethod
    def flops(op):
        return op.dy.type.size

    @staticmethod
    def roles(op):
        labels = LABELS[: op.indices.type.rank]
        return Roles((labels + "Y", labels), ("ZY",), whole="Z")


@step.op
class RowSums(StepOp):
    """Gradients of embeddings without the rows that nobody reads, of several tables of one size at once.

    The tokens of a table are sorted by the row that they read, those of a row in their order. Where the first token of
    a row is, the sums have that of dy of all its tokens; they are zero elsewhere. Places say where each row's sum is,
    -1 for a row that receives no gradient. `spread_rows` makes the gradient of both.
    """

    precision = "high"
    dys = Operand(FloatTensor, "one per table", variadic=True)
    indices = Operand(IntTensor, "one per table", variadic=True)
    ys = Result(doc="the sums of each table: [tokens, width]; then the places of each: [rows]", variadic=True)
    rows = Attr("int", "rows of a table")
    padding_idx = Attr("int", "a row that receives no gradient; -1 for none", -1)
    dtype = Attr("dtype", "element type of the sums")

    @staticmethod
    def infer(dys, indices, rows, padding_idx, dtype):
        sums = [TensorType((i.size, *dy.shape[len(i.shape) :]), dtype) for dy, i in zip(dys, indices, strict=True)]
        return [*sums, *(TensorType((rows,), I32) for _ in indices)]

    @staticmethod
    def check(op):
        if len(op.dys) != len(op.indices) or not op.dys:
            return "there must be as many gradients as index tensors, and at least one"
        if any(dy.type.shape != (*i.type.shape, dy.type.shape[-1]) for dy, i in zip(op.dys, op.indices, strict=True)):
            return "a gradient must have a row per index"
        return None

    @staticmethod
    def evaluate(op):
        rows, padding, dtype = op.rows, op.padding_idx, torch_dtype(op.dtype)

        def run(dys, indices):
            found = [row_sums(dy, i, rows, padding, dtype) for dy, i in zip(dys, indices, strict=True)]
            return *(sums for sums, _ in found), *(places for _, places in found)

        return spread(op, run)

    @staticmethod
    def flops(op):
        return sum(dy.type.size for dy in op.dys)


def row_sums(
    dy: torch.Tensor, indices: torch.Tensor, rows: int, padding: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """The sums and places of one table."""
    named, order = torch.sort(indices.reshape(-1), stable=True)
    tokens, width, wide = named.numel(), dy.shape[-1], torch.promote_types(dtype, torch.float32)
    first = torch.cat([torch.ones_like(named[:1], dtype=torch.bool), named[1:] != named[:-1]])
    begins = torch.where(first, torch.arange(tokens, device=named.device), 0).cummax(0).values
    counts = (named >= 0) & (named < rows) & (named != padding)
    # what does not count goes behind all others
    sums = torch.zeros((tokens + 1, width), dtype=wide, device=dy.device)
    sums = sums.index_add(0, torch.where(counts, begins, tokens), dy.reshape(-1, width)[order].to(wide))
    places = torch.full((rows + 1,), -1, dtype=torch.int32, device=dy.device)
    places = places.index_put((torch.where(counts, named, rows),), begins.to(torch.int32))
    return sums[:-1].to(dtype), places[:-1]


@step.op
class SpreadRows(Indexing):
    """Rows at their places, zeros in between: y[i] = sums[places[i]], or zeros where places[i] is negative."""

    moves = True
    sums = Operand()
    places = Operand(IntTensor, "per row where it is, -1 for none")
    y = Result()

    @staticmethod
    def infer(sums, places):
        return sums.with_shape((*places.shape, *sums.shape[1:]))

    @staticmethod
    def evaluate(op):
        def run(sums, places):
            there = (places >= 0).reshape(-1, *(1 for _ in sums.shape[1:]))
            return torch.where(there, sums[places.clamp_min(0)], 0)

        return run

    @staticmethod
    def element(k, op, index):
        place = k.at(op.places, index[:1])
        nobody = k.apply("lt", place, k.constant(0, op.places.type.element), dtype=BOOL)
        value = k.at(op.sums, [k.computed(place, checked=False), *index[1:]])
        return k.choose(nobody, k.constant(0, op.y.type.element), value)

    @staticmethod
    def roles(op):
        labels = LABELS[: op.sums.type.rank - 1]
        return Roles(("Z" + labels, "Y"), ("Y" + labels,), whole="Z")


# ---- one index tensor along one dimension ----------------------------------------------------------------------------


class AlongDim(Indexing):
    """An op whose index tensor names positions along one dimension and has as many dimensions as x."""

    @staticmethod
    def check(op):
        x, index = op.x.type, op.index.type
        if not 0 <= op.dim < max(1, x.rank):
            return "dim is out of range"
        if max(1, x.rank) != max(1, index.rank):
            return "the index must have as many dimensions as x"
        if x.rank and any(i > d for j, (i, d) in enumerate(zip(index.shape, x.shape, strict=False)) if j != op.dim):
            return "the index is larger than x beside dim"
        return None

    @staticmethod
    def roles(op: Op) -> Roles:
        x, index = op.x.type, op.index.type
        labels = LABELS[: x.rank]
        own = labels[op.dim : op.dim + 1]
        # a dimension of which the index covers only a part cannot be split either
        partial = "".join(c for c, i, d in zip(labels, index.shape, x.shape, strict=False) if i != d and c != own)
        place = labels.replace(own, "Z") if own else labels
        shape = op.results[0].type.shape
        specs = [labels if v is op.operands[0] else place for v in op.operands]
        out = place if op.definition is Gather and shape == index.shape else labels
        return Roles(tuple(specs), (out,), whole=own + partial)


def _same_elements(op: Op) -> str | None:
    if op.src.type.shape != op.index.type.shape:
        return "src and index must have one shape"
    return AlongDim.check(op) if op.src.type.element is op.x.type.element else "x and src differ in element type"


@step.op
class Gather(AlongDim):
    """y[i, j] = x[index[i, j], j] for dim = 0, and alike for others."""

    moves = True
    x = Operand()
    index = Operand(IntTensor)
    y = Result()
    dim = Attr("int", "dimension, counted from the front")

    @staticmethod
    def infer(x, index, dim):
        return x.with_shape(index.shape)

    @staticmethod
    def evaluate(op):
        dim = op.dim
        return lambda x, index: aten.gather.default(x, dim, index)

    @staticmethod
    def element(k, op, index):
        picked = k.computed(k.at(op.index, index))
        return k.at(op.x, [picked if d == op.dim else place for d, place in enumerate(index)])

    @staticmethod
    def derivative(b, op, dy):
        return [b.scatter_add(b.zeros_like(op.x), op.index, dy, dim=op.dim), None]


class ScatterLike(AlongDim):
    """x with elements of src put where index says."""

    x = Operand()
    index = Operand(IntTensor)
    src = Operand()
    y = Result()
    dim = Attr("int", "dimension, counted from the front")

    @staticmethod
    def infer(x, index, src, dim):
        return x

    check = staticmethod(_same_elements)


@step.op
class ScatterAdd(ScatterLike):
    """x with y[index[i, j], j] += src[i, j] for dim = 0, and alike for others."""

    @staticmethod
    def evaluate(op):
        dim = op.dim
        return lambda x, index, src: aten.scatter_add.default(x, dim, index, src)

    @staticmethod
    def derivative(b, op, dy):
        return [dy, None, b.gather(dy, op.index, dim=op.dim)]

    @staticmethod
    def flops(op):
        return op.src.type.size


@step.op
class Scatter(ScatterLike):
    """x with y[index[i, j], j] = src[i, j] for dim = 0, and alike for others. A position named twice takes either."""

    @staticmethod
    def evaluate(op):
        dim = op.dim
        return lambda x, index, src: aten.scatter.src(x, dim, index, src)

    @staticmethod
    def derivative(b, op, dy):
        zeros = b.zeros_like(op.src)
        return [b.scatter(dy, op.index, zeros, dim=op.dim), None, b.gather(dy, op.index, dim=op.dim)]


@step.op
class IndexAdd(Indexing):
    """x with slices of src added: y[index[i]] += src[i] along one dimension."""

    x = Operand()
    index = Operand(IntTensor, "a vector")
    src = Operand()
    y = Result()
    dim = Attr("int", "dimension, counted from the front")

    @staticmethod
    def infer(x, index, src, dim):
        return x

    @staticmethod
    def check(op):
        x, src, dim = op.x.type, op.src.type, op.dim
        if x.element is not src.element:
            return "x and src differ in element type"
        if op.index.type.rank != 1:
            return "the index must be a vector"
        if not 0 <= dim < x.rank:
            return "dim is out of range"
        want = (*x.shape[:dim], op.index.type.shape[0], *x.shape[dim + 1 :])
        return None if src.shape == want else f"src must have shape {want}"

    @staticmethod
    def evaluate(op):
        dim = op.dim
        return lambda x, index, src: aten.index_add.default(x, dim, index, src)

    @staticmethod
    def derivative(b, op, dy):
        return [dy, None, b.index(dy, [op.index], dims=(op.dim,))]

    @staticmethod
    def expand(b, op):
        return b.index_put(op.x, [op.index], op.src, dims=(op.dim,), accumulate=True)

    @staticmethod
    def flops(op):
        return op.src.type.size

    @staticmethod
    def roles(op):
        labels = LABELS[: op.x.type.rank]
        own = labels[op.dim]
        return Roles((labels, "Z", labels.replace(own, "Z")), (labels,), whole=own)


# ---- several index tensors at once -----------------------------------------------------------------------------------


def is_given(k, index: Value) -> bool:
    """Whether an index tensor is read by a kernel as it is, or known to whoever writes the kernel.

    Kernels are tried with indices that every table has; what is computed of those, it might not have.
    """
    op = index.op
    if index in k.arguments or op is None or not op.operands:
        return True
    return (getattr(op.definition, "views", False) or op.name == "step.cast") and is_given(k, op.operands[0])


def first_of(dims: tuple[int, ...]) -> int:
    """The dimension of x[indices] that the index dimensions begin at."""
    return dims[0] if dims == tuple(range(dims[0], dims[0] + len(dims))) else 0


def indexed_shape(x: TensorType, indices: list[TensorType], dims: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of x[indices]: index dimensions in place of the indexed ones if those are neighbours, else first."""
    common = broadcast_shapes(*(i.shape for i in indices))
    at = first_of(dims)
    rest = [d for i, d in enumerate(x.shape) if i not in dims]
    return (*rest[:at], *common, *rest[at:])


def place_indices(dims: tuple[int, ...], indices: list) -> list:
    """Index tensors by dimension, None where a dimension is taken whole: the argument of ATen's index."""
    out: list = [None] * (dims[-1] + 1)
    for dim, index in zip(dims, indices, strict=True):
        out[dim] = index
    return out


def _check_indices(op: Op) -> str | None:
    if not op.dims or len(op.dims) != len(op.indices):
        return "there must be one index tensor per indexed dimension, and at least one"
    if list(op.dims) != sorted(set(op.dims)) or op.dims[0] < 0 or op.dims[-1] >= op.x.type.rank:
        return "dims must rise and lie within x"
    if any(i.type.element.kind == "bool" for i in op.indices):
        return "a boolean mask gives a shape that depends on data"
    return None


def _index_roles(op: Op, values: Value | None) -> Roles:
    x = op.x.type
    labels = LABELS[: x.rank]
    indices = [i.type for i in op.indices]
    common = broadcast_shapes(*(i.shape for i in indices))
    names = LABELS[x.rank : x.rank + len(common)]
    specs = []
    for index in indices:
        tail, sizes = names[len(common) - len(index.shape) :], common[len(common) - len(index.shape) :]
        specs.append("".join(" " if d == 1 and n != 1 else c for c, d, n in zip(tail, index.shape, sizes, strict=True)))
    dims = op.dims
    at = first_of(dims)
    rest = "".join(c for i, c in enumerate(labels) if i not in dims)
    picked = rest[:at] + names + rest[at:]
    whole = "".join(labels[d] for d in dims)
    if values is None:
        return Roles((labels, *specs), (picked,), whole=whole)
    return Roles((labels, *specs, picked[len(picked) - values.type.rank :]), (labels,), whole=whole)


@step.op
class Index(Indexing):
    """x[:, i, j, :]: some dimensions indexed by integer tensors that broadcast together, the others taken whole.

    The index dimensions stand in place of the indexed ones where those are neighbours, in front otherwise.
    """

    moves = True
    x = Operand()
    indices = Operand(IntTensor, "one per indexed dimension", variadic=True)
    y = Result()
    dims = Attr("ints", "the indexed dimensions, rising")

    @staticmethod
    def infer(x, indices, dims):
        return x.with_shape(indexed_shape(x, indices, dims))

    check = staticmethod(_check_indices)

    @staticmethod
    def evaluate(op):
        dims = op.dims
        return lambda x, *indices: aten.index.Tensor(x, place_indices(dims, indices))

    @staticmethod
    def element(k, op, index):
        if not all(is_given(k, i) for i in op.indices):
            k.refuse("its indices are computed in the same kernel")
        common = broadcast_shapes(*(i.type.shape for i in op.indices))
        at = first_of(op.dims)
        picked, rest = index[at : at + len(common)], iter((*index[:at], *index[at + len(common) :]))
        places = [None if d in op.dims else next(rest) for d in range(op.x.type.rank)]
        for dim, tensor in zip(op.dims, op.indices, strict=True):
            own = picked[len(picked) - tensor.type.rank :]
            own = [k.nowhere if n == 1 else place for place, n in zip(own, tensor.type.shape, strict=True)]
            places[dim] = k.from_end(k.at(tensor, own), op.x.type.shape[dim])
        return k.at(op.x, places)

    @staticmethod
    def derivative(b, op, dy):
        return present(op, b.index_put(b.zeros_like(op.x), op.indices, dy, dims=op.dims, accumulate=True), None)

    @staticmethod
    def roles(op):
        return _index_roles(op, None)


@step.op
class IndexPut(Indexing):
    """x with x[:, i, j, :] replaced by values, or with values added; values broadcast to that place."""

    x = Operand()
    indices = Operand(IntTensor, "one per indexed dimension", variadic=True)
    values = Operand()
    y = Result()
    dims = Attr("ints", "the indexed dimensions, rising")
    accumulate = Attr("bool", "whether values are added, repeats included", False)

    @staticmethod
    def infer(x, indices, values, dims, accumulate):
        return x

    @staticmethod
    def check(op):
        wrong = _check_indices(op)
        if wrong:
            return wrong
        place = indexed_shape(op.x.type, [i.type for i in op.indices], op.dims)
        try:
            fits = broadcast_shapes(place, op.values.type.shape) == place
        except ValueError:
            fits = False
        if not fits:
            return f"values of shape {op.values.type.shape} do not broadcast to {place}"
        return None if op.x.type.element is op.values.type.element else "x and values differ in element type"

    @staticmethod
    def evaluate(op):
        dims, accumulate = op.dims, op.accumulate
        return spread(op, lambda x, i, values: aten.index_put.default(x, place_indices(dims, i), values, accumulate))

    @staticmethod
    def derivative(b, op, dy):
        dvalues = b.sum_to(b.index(dy, op.indices, dims=op.dims), op.values.type.shape)
        dx = dy
        if not op.accumulate:
            zero = b.full(0, (), dy.type.element)
            dx = b.index_put(dy, op.indices, zero, dims=op.dims)
        return present(op, dx, None, dvalues)

    @staticmethod
    def flops(op):
        return op.values.type.size if op.accumulate else 0

    @staticmethod
    def roles(op):
        return _index_roles(op, op.values)
