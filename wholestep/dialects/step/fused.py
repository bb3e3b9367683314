"""A region: what one kernel does. Its body is a function of the module, so that equal regions have one body."""

from __future__ import annotations

from ...ir.builtin import lookup
from ...ir.core import Op
from ...ir.dialect import AnyTensor, Attr, Operand, Result
from .base import StepOp, step
from .control import root_of


@step.op
class Fused(StepOp):
    """Runs a function of the module as one kernel of some provider."""

    differentiable = False
    inputs = Operand(AnyTensor, "one per argument of the function", variadic=True)
    outputs = Result(AnyTensor, "one per result of the function", variadic=True)
    callee = Attr("symbol", "the function")

    @staticmethod
    def check(op: Op) -> str | None:
        try:
            wanted = lookup(root_of(op), op.callee).function_type
        except KeyError as error:
            return str(error.args[0])
        if tuple(v.type for v in op.operands) != wanted.inputs or tuple(r.type for r in op.results) != wanted.results:
            return f"it does not fit the function {op.callee.name}: {wanted}"
        return None

    @staticmethod
    def flops(op: Op) -> int:
        body = lookup(root_of(op), op.callee).regions[0].block
        return sum(inner.definition.flops(inner) for inner in body if issubclass(inner.definition, StepOp))
