"""Matrix products, of quantised integers too, sums of products by formula, determinants."""

from __future__ import annotations

from ...capture.aten_nn import matmul
from ...dialects.step import StepBuilder
from ...ir.core import Value
from ..context import Context, Tensor
from . import operator
from .casts import shifted, to_integers
from .support import F32, F64, I32, one_number, wide


@operator("Gemm")
def gemm(c: Context, x: Tensor, y: Tensor, addend: Tensor | None = None):
    b = c.b
    if x.rank != 2 or y.rank != 2:
        raise c.wrong(f"it multiplies matrices, not tensors of rank {x.rank} and {y.rank}")
    left = "km" if c.attribute("transA") else "mk"
    right = "nk" if c.attribute("transB") else "kn"
    alpha, beta = c.attribute("alpha"), c.attribute("beta")
    if not x.is_float and (alpha != int(alpha) or beta != int(beta)):
        raise c.unsupported("integers times a fraction are not supported", "cast to float")
    lhs, rhs = wide(b, x.value), wide(b, y.value)
    bias = None
    if addend is not None and beta != 0:
        rows, columns = x.shape[left.index("m")], y.shape[right.index("n")]
        if any(have not in (1, want) for have, want in zip(addend.shape[::-1], (columns, rows), strict=False)):
            raise c.wrong(f"its third input of shape {list(addend.shape)} does not fit [{rows}, {columns}]")
        bias = wide(b, addend.value)
        bias = bias if beta == 1 else b.mul(bias, beta)
    if alpha == 1:
        return b.cast_to(b.contract(lhs, rhs, bias, spec=f"{left},{right}->mn"), x.element)
    product = b.mul(b.contract(lhs, rhs, spec=f"{left},{right}->mn"), alpha)
    if bias is not None:
        product = b.add(product, b.broadcast_to(bias, product.type.shape))
    return b.cast_to(product, x.element)


@operator("MatMul")
def matmul_(c: Context, x: Tensor, y: Tensor):
    return c.b.cast_to(product(c, wide(c.b, x.value), wide(c.b, y.value)), x.element)


def product(c: Context, x: Value, y: Value) -> Value:
    if x.type.rank == 0 or y.type.rank == 0:
        raise c.wrong("it multiplies at least vectors, not single numbers")
    if 0 in x.type.shape or 0 in y.type.shape:
        raise c.unsupported("products of empty matrices are not supported", "leave them out")
    return matmul(c.b, x, y)


@operator("MatMulInteger")
def matmul_integer(c: Context, x: Tensor, y: Tensor, x_zero: Tensor | None = None, y_zero: Tensor | None = None):
    left = shifted(c, x, x_zero, F64, rows_of(x_zero))
    right = shifted(c, y, y_zero, F64)
    return c.b.cast_to(product(c, left, right), I32)  # exact in doubles


def rows_of(zero: Tensor | None) -> tuple[int, ...] | None:
    """A zero point per row stands before the columns."""
    return (*zero.shape, 1) if zero is not None and zero.rank == 1 else None


@operator("QLinearMatMul")
def qlinear_matmul(
    c: Context, x: Tensor, x_scale: Tensor, x_zero: Tensor, y: Tensor, y_scale: Tensor, y_zero: Tensor,
    scale: Tensor, zero: Tensor,
):  # fmt: skip
    b = c.b
    if any(t.size != 1 for t in (scale, zero)):
        raise c.unsupported("a result with several scales is not supported", "dequantise, multiply and quantise")
    left = shifted(c, x, x_zero, F64, rows_of(x_zero))
    right = shifted(c, y, y_zero, F64)
    whole = b.cast_to(product(c, left, right), F32)
    scales = [b.cast_to(s.value, F32) for s in (x_scale, y_scale)]
    scales = [one_number(b, s) if s.type.size == 1 else s for s in scales]
    if scales[0].type.rank == 1:
        scales[0] = b.unsqueeze(scales[0], 1)
    factor = b.div(b.mul(scales[0], scales[1]), one_number(b, b.cast_to(scale.value, F32)))
    return to_integers(c, b.mul(whole, factor), one_number(b, b.cast_to(zero.value, I32)), zero.type)


@operator("Det")
def det(c: Context, x: Tensor):
    return c.opaque("aten.linalg_det.default", x.value)


# ---- einsum ----------------------------------------------------------------------------------------------------------


@operator("Einsum")
def einsum(c: Context, *xs: Tensor):
    b = c.b
    inputs, result = parsed(c, c.attribute("equation"), [x.rank for x in xs])
    sizes: dict[str, int] = {}
    values = []
    for x, labels in zip(xs, inputs, strict=True):
        value, labels = diagonals(b, wide(b, x.value), labels)
        for label, size in zip(labels, value.type.shape, strict=True):
            if sizes.get(label, 1) == 1:
                sizes[label] = size
        values.append((value, labels))
    for i, (value, labels) in enumerate(values):  # a label of size one is broadcast: leave it out
        kept = [j for j, label in enumerate(labels) if value.type.shape[j] == sizes[label]]
        if any(value.type.shape[j] not in (1, sizes[label]) for j, label in enumerate(labels)):
            raise c.wrong(f"the sizes of its inputs do not fit the equation {c.attribute('equation')!r}")
        shape = [value.type.shape[j] for j in kept]
        values[i] = (b.reshape_to(value, shape), "".join(labels[j] for j in kept))
    done, labels = values[0]
    for i, (value, more) in enumerate(values[1:], start=1):
        later = "".join(other for _, other in values[i + 1 :]) + result
        done, labels = pair(b, done, labels, value, more, later)
    done, labels = summed(b, done, labels, result)
    missing = [label for label in result if label not in labels]
    if missing:  # only of size one
        done, labels = b.reshape_to(done, (*done.type.shape, *(1,) * len(missing))), labels + "".join(missing)
    order = tuple(labels.index(label) for label in result)
    done = done if order == tuple(range(len(order))) else b.transpose(done, order=order)
    return b.cast_to(done, xs[0].element)


def parsed(c: Context, equation: str, ranks: list[int]) -> tuple[list[str], str]:
    """The labels of inputs and result; the dimensions of an ellipsis get capital letters that nobody else uses."""
    left, arrow, result = equation.replace(" ", "").partition("->")
    inputs = left.split(",")
    if len(inputs) != len(ranks):
        raise c.wrong(f"its equation {equation!r} is for {len(inputs)} inputs, and it has {len(ranks)}")
    free = [chr(code) for code in (*range(65, 91), *range(97, 123)) if chr(code) not in equation]
    hidden = [rank - len(labels.replace("...", "")) for labels, rank in zip(inputs, ranks, strict=True)]
    if any(n < 0 or (n and "..." not in labels) for n, labels in zip(hidden, inputs, strict=True)):
        raise c.wrong(f"its equation {equation!r} does not fit inputs of rank {ranks}")
    most = max((n for n, labels in zip(hidden, inputs, strict=True) if "..." in labels), default=0)
    if most > len(free):
        raise c.unsupported("it has too many dimensions", "reshape its inputs")
    dots = "".join(free[:most])
    full = [labels.replace("...", dots[most - n :]) for n, labels in zip(hidden, inputs, strict=True)]
    if arrow:
        result = result.replace("...", dots)
    else:
        every = "".join(full)
        result = dots + "".join(sorted(s for s in set(every) if every.count(s) == 1 and s not in dots))
    if len(set(result)) != len(result) or any(s not in "".join(full) for s in result):
        raise c.wrong(f"its equation {equation!r} has a result that its inputs do not give")
    return full, result


def diagonals(b: StepBuilder, x: Value, labels: str) -> tuple[Value, str]:
    """A label that stands twice in one input means its diagonal."""
    for label in dict.fromkeys(labels):
        while labels.count(label) > 1:
            first = labels.index(label)
            second = labels.index(label, first + 1)
            rest = [i for i in range(x.type.rank) if i not in (first, second)]
            size = x.type.shape[first]
            flat = b.reshape_to(
                b.transpose(x, order=(first, second, *rest)), (size * size, *(x.type.shape[i] for i in rest))
            )
            x = b.slice(flat, dim=0, start=0, end=size * size, stride=size + 1)
            labels = label + "".join(labels[i] for i in rest)
    return x, labels


def summed(b: StepBuilder, x: Value, labels: str, needed: str) -> tuple[Value, str]:
    """Sums over the labels that nobody needs."""
    lone = tuple(i for i, label in enumerate(labels) if label not in needed)
    if not lone:
        return x, labels
    return b.sum(x, dims=lone), "".join(label for label in labels if label in needed)


def pair(b: StepBuilder, x: Value, left: str, y: Value, right: str, later: str) -> tuple[Value, str]:
    x, left = summed(b, x, left, right + later)
    y, right = summed(b, y, right, left + later)
    out = "".join(label for label in dict.fromkeys(left + right) if label in later)
    return b.contract(x, y, spec=f"{left},{right}->{out}"), out
