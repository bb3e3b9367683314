"""What a step does beside arithmetic on one batch: a function per micro-batch, and a check on all gradients."""

from __future__ import annotations

import torch

from ...ir.builtin import lookup
from ...ir.core import Op
from ...ir.dialect import AnyTensor, Attr, FloatTensor, Operand, Result
from ...ir.types import BOOL, TensorType
from ...torch_private import foreach_norm
from .base import StepOp, step

#: how an input reaches the micro-batches, and how their results are put together
GIVEN = ("same", "split", "key")
TAKEN = ("sum", "mean", "concat", "last")


@step.op
class MicroBatches(StepOp):
    """Runs a function of the module `count` times, once per micro-batch, one after the other.

    An input is the `same` every time, `split` along its first dimension, or the random `key`, whose last entry counts
    micro-batches. `carried` names for each input the result that takes its place the next time (-1 for none). Results
    are added up (`sum`), averaged (`mean`), put behind each other (`concat`) or taken from the `last` micro-batch.
    """

    differentiable = False
    inputs = Operand(AnyTensor, "one per argument of the function", variadic=True)
    outputs = Result(AnyTensor, "one per result of the function", variadic=True)
    callee = Attr("symbol", "the function")
    count = Attr("int", "how many micro-batches")
    given = Attr("list", 'per input: "same", "split" or "key"')
    taken = Attr("list", 'per result: "sum", "mean", "concat" or "last"')
    carried = Attr("ints", "per input: the result that replaces it for the next micro-batch, or -1")

    @staticmethod
    def check(op: Op) -> str | None:
        try:
            callee = lookup(root_of(op), op.callee)
        except KeyError as error:
            return str(error.args[0])
        wanted = callee.function_type
        if len(wanted.inputs) != len(op.operands) or len(wanted.results) != len(op.results):
            return f"the function {op.callee.name} takes {len(wanted.inputs)} and gives {len(wanted.results)} values"
        if len(op.given) != len(op.operands) or len(op.carried) != len(op.operands) or len(op.taken) != len(op.results):
            return "given, carried and taken must have one entry per input or result"
        if op.count < 1 or any(g not in GIVEN for g in op.given) or any(t not in TAKEN for t in op.taken):
            return f"count must be positive, given one of {GIVEN} and taken one of {TAKEN}"
        for value, kind, type, result in zip(op.operands, op.given, wanted.inputs, op.carried, strict=True):
            if value.type is not (scaled(type, op.count) if kind == "split" else type):
                return f"an input of type {value.type} does not give {op.count} micro-batches of {type}"
            if result >= len(op.results) or (result >= 0 and wanted.results[result] is not type):
                return f"result {result} cannot take the place of an input of type {type}"
        for value, kind, type in zip(op.results, op.taken, wanted.results, strict=True):
            if value.type is not (scaled(type, op.count) if kind == "concat" else type):
                return f"results of type {type} do not make a {value.type}"
        return None

    @staticmethod
    def flops(op: Op) -> int:
        body = lookup(root_of(op), op.callee).regions[0].block
        return op.count * sum(inner.definition.flops(inner) for inner in body if issubclass(inner.definition, StepOp))


def scaled(type: TensorType, count: int) -> TensorType | None:
    """The type of `count` tensors behind each other; None for a 0-d tensor."""
    return TensorType((type.shape[0] * count, *type.shape[1:]), type.element) if type.shape else None


def root_of(op: Op) -> Op:
    """The module an op is in."""
    while op.parent is not None and op.parent.parent is not None and op.parent.parent.parent is not None:
        op = op.parent.parent.parent
    return op


@step.op
class AllFinite(StepOp):
    """Whether no element of any tensor is infinite or NaN."""

    precision = "high"
    differentiable = False
    xs = Operand(FloatTensor, "the tensors", variadic=True)
    y = Result(doc="one boolean")

    @staticmethod
    def infer(xs):
        return TensorType((), BOOL)

    @staticmethod
    def check(op):
        return None if op.operands else "there must be a tensor to look at"

    @staticmethod
    def flops(op: Op) -> int:
        return sum(v.type.size for v in op.operands)

    @staticmethod
    def evaluate(op):
        def run(*tensors):
            largest = foreach_norm([t for t in tensors if t.numel()], float("inf"))
            if not largest:
                return torch.ones((), dtype=torch.bool, device=tensors[0].device)
            return torch.stack([t.double() for t in largest]).isfinite().all()

        return run

    @staticmethod
    def expand(b, op):
        found = None
        for x in op.operands:
            mine = b.all(b.lt(b.abs(x), float("inf")), dims=tuple(range(x.type.rank)))
            found = mine if found is None else b.bit_and(found, mine)
        return found
