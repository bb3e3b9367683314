"""Contraction: every matrix product of a training step, forward and backward, is this one op.

The spec is an einsum of two operands in which every label of an operand appears in the other or in the result, so the
derivative is two contractions with the labels exchanged. An addend (a bias) starts the accumulation.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from ...ir.core import Op
from ...ir.dialect import AnyTensor, Attr, Operand, Result
from ...ir.types import F32, TensorType
from .base import Roles, StepOp, step


def parse_spec(spec: str) -> tuple[str, str, str]:
    """The labels of lhs, rhs and result."""
    inputs, out = spec.split("->")
    lhs, rhs = inputs.split(",")
    return lhs, rhs, out


def result_shape(spec: str, lhs: TensorType, rhs: TensorType) -> tuple[int, ...]:
    """The shape of a contraction; ValueError where a label has two sizes."""
    left, right, out = parse_spec(spec)
    if len(left) != lhs.rank or len(right) != rhs.rank:
        raise ValueError(f"{spec} does not fit ranks {lhs.rank} and {rhs.rank}")
    sizes: dict[str, int] = {}
    for label, size in (*zip(left, lhs.shape, strict=True), *zip(right, rhs.shape, strict=True)):
        if sizes.setdefault(label, size) != size:
            raise ValueError(f"label {label} of {spec} has sizes {sizes[label]} and {size}")
    return tuple(sizes[label] for label in out)


@step.op
class Contract(StepOp):
    """Einsum of two tensors, plus an addend that broadcasts to the result."""

    precision = "low"
    lhs = Operand(AnyTensor)
    rhs = Operand(AnyTensor)
    addend = Operand(AnyTensor, "added to the result, such as a bias", optional=True)
    y = Result()
    spec = Attr("str", 'einsum of two operands, such as "mk,nk->mn"')
    wide = Attr("bool", "whether sums of 16-bit products are given as they are added up, in f32", optional=True)

    @staticmethod
    def infer(lhs, rhs, addend, spec, wide):
        return TensorType(result_shape(spec, lhs, rhs), F32 if wide else lhs.element)

    @staticmethod
    def check(op):
        left, right, out = parse_spec(op.spec)
        if any(len(set(labels)) != len(labels) for labels in (left, right, out)):
            return "a label repeats within one tensor"
        for mine, other in ((left, right), (right, left)):
            lost = [c for c in mine if c not in other and c not in out]
            if lost:
                return f"label {lost[0]} is in one operand only and not in the result: sum it before"
        if any(v.type.element is not op.lhs.type.element for v in op.operands):
            return "operands differ in element type"
        if op.wide and (op.addend is not None or op.lhs.type.element.bits != 16):
            return "only sums of 16-bit products without an addend are given in f32"
        return None

    @staticmethod
    def flops(op: Op) -> int:
        left, _, out = parse_spec(op.spec)
        inner = 1
        for label, size in zip(left, op.lhs.type.shape, strict=True):
            if label not in out:
                inner *= size
        return 2 * op.y.type.size * inner

    @staticmethod
    def roles(op: Op) -> Roles:
        left, right, out = parse_spec(op.spec)
        operands = [left, right]
        if op.addend is not None:
            shape = op.addend.type.shape
            tail = out[len(out) - len(shape) :]
            full = op.y.type.shape[len(out) - len(shape) :]
            operands.append("".join(" " if d == 1 and f != 1 else c for c, d, f in zip(tail, shape, full, strict=True)))
        return Roles(tuple(operands), (out,))

    @staticmethod
    def derivative(b, op, dy):
        left, right, out = parse_spec(op.spec)
        dy = b.cast_to(dy, op.lhs.type.element)
        dl = b.contract(dy, op.rhs, spec=f"{out},{right}->{left}")
        dr = b.contract(dy, op.lhs, spec=f"{out},{left}->{right}")
        grads = [dl, dr]
        if op.addend is not None:
            grads.append(b.sum_to(dy, op.addend.type.shape))
        return grads

    @staticmethod
    def element(k, op, index):
        left, right, out = parse_spec(op.spec)
        where = dict(zip(out, index, strict=True))
        summed = {c: walked(k, op.lhs, dim) for dim, c in enumerate(left) if c not in where}
        where |= summed
        element = op.y.type.element
        product = k.apply(
            "mul", k.at(op.lhs, [where[c] for c in left]), k.at(op.rhs, [where[c] for c in right]), dtype=element
        )
        total = k.reduce(product, "sum", list(summed.values()), index, element)
        if op.addend is None:
            return total
        lead = len(index) - op.addend.type.rank
        return k.apply("add", total, k.at(op.addend, index[lead:]), dtype=element)

    @staticmethod
    def evaluate(op: Op) -> Callable[..., torch.Tensor]:
        return plan_contraction(op.spec, op.lhs.type, op.rhs.type, op.addend.type if op.addend else None, bool(op.wide))


def walked(k, value, dim: int):
    """The index along a dimension that a rule sums over, which no result walks: its parts are walked from here on."""
    for part in k.dimensions.resolve(k.homes[value][dim]):
        if part not in k.number:
            k.number[part] = k.walk(k.dimensions.size[part]).terms[0][0]
    return k.home(value)[dim]


def shared_lead(left: str, right: str, out: str) -> str:
    """The first label of lhs, where products of matrices along it move nothing and one large product would.

    It is then a batch of products that share rhs: "abc,db->acd" cannot be one product without a copy of lhs, nor can
    "acb,db->adc" give its result in this order.
    """
    if not left or left[0] not in out[:1] or left[0] in right or any(c in right and c in out for c in left):
        return ""

    def in_place(left: str, out: str) -> bool:
        rows, cols = ("".join(c for c in out if (c in left) == mine) for mine in (True, False))
        inner = "".join(c for c in left if c not in out)
        return bool(rows) and left in (rows + inner, inner + rows) and out in (rows + cols, cols + rows)

    return left[0] if in_place(left[1:], out[1:]) and not in_place(left, out) else ""


def plan_contraction(
    spec: str, lhs: TensorType, rhs: TensorType, addend: TensorType | None, wide: bool = False
) -> Callable[..., torch.Tensor]:
    """A function that computes a contraction by mm, bmm or addmm, the way eager PyTorch would. wide: in f32.

    Labels fall into batch (in both operands and the result), rows (lhs and result), columns (rhs and result) and inner
    (both operands). Each operand is permuted and folded to [batch, rows, inner] or [batch, inner, columns]. Where the
    first label of one operand makes a batch that the other has no part in, the other is seen as often as there are
    products in it.
    """
    left, right, out = parse_spec(spec)
    for labels, other, type, flipped in ((left, right, lhs, False), (right, left, rhs, True)):
        lead = shared_lead(labels, other, out)
        if lead:
            count = type.shape[0]
            shared = f"{left},{lead}{right}->{out}" if not flipped else f"{lead}{left},{right}->{out}"
            grown = (
                (lhs, rhs.with_shape((count, *rhs.shape)))
                if not flipped
                else (lhs.with_shape((count, *lhs.shape)), rhs)
            )
            batched = plan_contraction(shared, *grown, addend, wide)
            if flipped:
                return lambda x, y, *z: batched(x.expand(count, *x.shape), y, *z)
            return lambda x, y, *z: batched(x, y.expand(count, *y.shape), *z)
    batch = [c for c in out if c in left and c in right]
    rows = [c for c in out if c in left and c not in right]
    cols = [c for c in out if c in right and c not in left]
    inner = [c for c in left if c not in out]
    # the result is made in the order [batch, rows, cols] or, where that saves a transpose, [batch, cols, rows]
    if out == "".join(batch + cols + rows) and rows and cols:
        swapped = plan_contraction(f"{right},{left}->{out}", rhs, lhs, addend, wide)
        if addend is None:
            return lambda x, y: swapped(y, x)
        return lambda x, y, z: swapped(y, x, z)
    sizes = dict(zip(left, lhs.shape, strict=True)) | dict(zip(right, rhs.shape, strict=True))

    def size(labels: list[str]) -> int:
        n = 1
        for c in labels:
            n *= sizes[c]
        return n

    n_batch, n_rows, n_cols, n_inner = size(batch), size(rows), size(cols), size(inner)
    natural = batch + rows + cols
    shape = tuple(sizes[c] for c in natural)
    back = tuple(natural.index(c) for c in out)
    identity = back == tuple(range(len(back)))
    fold_left = folder(left, batch, rows, inner, (n_batch, n_rows, n_inner), bool(batch))
    fold_right = folder(right, batch, inner, cols, (n_batch, n_inner, n_cols), bool(batch))
    product = torch.bmm if batch else torch.mm
    if wide:
        product = functools.partial(in_f32, product)
    bias_row = addend is not None and not batch and identity and addend.shape == (n_cols,) and len(cols) == 1

    def run(x, y, z=None):
        a, c = fold_left(x), fold_right(y)
        if z is not None and bias_row:
            result = torch.addmm(z, a, c)
            z = None
        else:
            result = product(a, c)
        result = result.view(shape)
        if not identity:
            result = result.permute(back)
        return result if z is None else result + z

    return run


def in_f32(product: Callable[..., torch.Tensor], a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """A product of 16-bit matrices that is not rounded. PyTorch has none for CPUs."""
    return product(a, b, out_dtype=torch.float32) if a.is_cuda else product(a.float(), b.float())


def folder(
    labels: str, batch: list[str], first: list[str], second: list[str], folded: tuple[int, int, int], batched: bool
):
    """A function that brings a tensor with these labels to [batch, first, second], or [first, second] without batch."""
    order = [*batch, *first, *second]
    perm = tuple(labels.index(c) for c in order)
    shape = folded if batched else folded[1:]
    plain = perm == tuple(range(len(perm)))
    # one transposed matrix: fold as stored, then transpose the view, so that nothing is copied
    stored = [c for c in labels if c in batch]
    swapped = not plain and list(labels) == [*stored, *second, *first] and stored == batch
    if swapped:
        other = (folded[0], folded[2], folded[1]) if batched else (folded[2], folded[1])
        return lambda x: x.reshape(other).transpose(-1, -2)
    if plain:
        return lambda x: x.reshape(shape)
    return lambda x: x.permute(perm).reshape(shape)
