"""Grouped products: rows that are sorted by group, each times the matrix of its group, as experts of a mixture are.

`ends` says where each group ends: rows from the end of the one before. Groups may be empty, and rows beyond the last
end belong to none: their results are zero. How long groups are is seen when the step runs; all shapes are static.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ...ir.core import Op
from ...ir.dialect import Attr, FloatTensor, IntTensor, Operand, Result
from .base import Roles, StepOp, step, torch_dtype

#: rows by the matrix of their group, which lies either way, and the sum over the rows of each group
ROWS, TURNED, SUMS = SPECS = ("mk,gkn->mn", "mk,gnk->mn", "mk,mn->gkn")

#: `torch.ops.wholestep.grouped_product_` writes where it is told
OPERATORS = torch.library.Library("wholestep", "FRAGMENT")
OPERATORS.define("grouped_product_(Tensor(a!) out, Tensor lhs, Tensor rhs, Tensor ends) -> ()")


@torch.no_grad()
def grouped_product(out: torch.Tensor, lhs: torch.Tensor, rhs: torch.Tensor, ends: torch.Tensor) -> None:
    """[rows, k] by [groups, k, n] gives [rows, n]; [rows, k] by [rows, n] gives [groups, k, n]."""
    if has_kernel(lhs, rhs):
        by_one_kernel(out, lhs, rhs, ends)
        return
    start = 0
    for group, end in enumerate(ends.tolist()):
        rows = slice(start, max(start, end))
        if rhs.dim() == 3:
            torch.mm(lhs[rows], rhs[group], out=out[rows])
        else:
            torch.mm(lhs[rows].t(), rhs[rows], out=out[group])
        start = rows.stop
    if rhs.dim() == 3:
        out[start:].zero_()


def by_one_kernel(out: torch.Tensor, lhs: torch.Tensor, rhs: torch.Tensor, ends: torch.Tensor) -> None:
    """By PyTorch's own, which leaves rows of no group, and on some GPUs what empty groups give, as memory was."""
    found = F.grouped_mm(lhs if rhs.dim() == 3 else lhs.t(), rhs, offs=ends.int())
    if rhs.dim() == 3:
        made = (torch.arange(len(out), device=out.device) < ends[-1]).unsqueeze(1)
    else:
        made = (ends.diff(prepend=ends.new_zeros(1)) > 0).view(-1, 1, 1)
    torch.where(made, found, found.new_zeros(()), out=out)


def has_kernel(lhs: torch.Tensor, rhs: torch.Tensor) -> bool:
    """Whether PyTorch has one kernel for all groups, which does not ask the host where they end. It reads 16 bytes at a
    time, of rows that lie one after the other and of matrices that lie either way."""
    if not lhs.is_cuda or lhs.dtype is not torch.bfloat16 or torch.cuda.get_device_capability(lhs.device) < (8, 0):
        return False
    near = lhs.stride(-1) == 1 and (rhs.stride(-1) == 1 or (rhs.dim() == 3 and rhs.stride(-2) == 1))
    return near and not any(x.data_ptr() % 16 or any(s % 8 for s in x.stride() if s != 1) for x in (lhs, rhs))


OPERATORS.impl("grouped_product_", grouped_product, "CompositeExplicitAutograd")
OPERATORS.impl("grouped_product_", lambda out, lhs, rhs, ends: None, "Meta")


@step.op
class GroupedContract(StepOp):
    """A product per group: rows of the left side by the matrix of their group, or sums over the rows of each group."""

    precision = "low"
    lhs = Operand(FloatTensor, "rows, sorted by group")
    rhs = Operand(FloatTensor, "a matrix per group, or as many rows")
    ends = Operand(IntTensor, "where each group ends; [groups], none before the one before it")
    y = Result()
    spec = Attr("str", "what is multiplied: m rows, g their group", choices=SPECS)

    @staticmethod
    def infer(lhs, rhs, ends, spec):
        groups = ends.shape[0]
        if spec == SUMS:
            return lhs.with_shape((groups, lhs.shape[1], rhs.shape[1]))
        return lhs.with_shape((lhs.shape[0], rhs.shape[2 if spec == ROWS else 1]))

    @staticmethod
    def check(op):
        lhs, rhs, ends = (v.type for v in op.operands)
        if ends.rank != 1 or lhs.rank != 2 or rhs.rank != (2 if op.spec == SUMS else 3):
            return f"{op.spec} does not fit ranks {lhs.rank}, {rhs.rank} and {ends.rank}"
        if lhs.element is not rhs.element:
            return "operands differ in element type"
        if op.spec == SUMS:
            return None if lhs.shape[0] == rhs.shape[0] else "both sides must have as many rows"
        if rhs.shape[0] != ends.shape[0]:
            return "there must be a matrix per group"
        return None if lhs.shape[1] == rhs.shape[1 if op.spec == ROWS else 2] else "rows do not fit the matrices"

    @staticmethod
    def flops(op: Op) -> int:
        return 2 * op.lhs.type.size * (op.rhs if op.spec == SUMS else op.y).type.shape[-1]

    @staticmethod
    def roles(op: Op) -> Roles:
        inputs, out = op.spec.split("->")
        return Roles((*inputs.split(","), "g"), (out,), whole="mg")

    @staticmethod
    def derivative(b, op, dy):
        x, w, ends = op.operands
        dy = b.cast_to(dy, x.type.element)
        if op.spec == SUMS:
            return [
                b.grouped_contract(w, dy, ends, spec=TURNED),
                b.grouped_contract(x, dy, ends, spec=ROWS),
                None,
            ]
        dx = b.grouped_contract(dy, w, ends, spec=TURNED if op.spec == ROWS else ROWS)
        both = (x, dy) if op.spec == ROWS else (dy, x)
        return [dx, b.grouped_contract(*both, ends, spec=SUMS), None]

    @staticmethod
    def evaluate(op: Op):
        shape, dtype, turned = op.y.type.shape, torch_dtype(op.y.type.element), op.spec == TURNED

        def run(lhs, rhs, ends):
            out = torch.empty(shape, dtype=dtype, device=lhs.device)
            torch.ops.wholestep.grouped_product_(out, lhs, rhs.transpose(1, 2) if turned else rhs, ends)
            return out

        return run
