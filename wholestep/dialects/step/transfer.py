"""Values that wait in host memory: `step.offload` takes a value there, `step.fetch` brings it back.

Both are identities. They are placed after autodiff, by the transformation `offload`; a plan runs them as copies beside
the kernels.
"""

from __future__ import annotations

from ...ir.core import Op
from ...ir.dialect import Operand, Result
from .base import LABELS, Roles, StepOp, step


class Transfer(StepOp):
    """Common rules: the same elements in another memory."""

    differentiable = False
    x = Operand()
    y = Result()

    @staticmethod
    def infer(x):
        return x

    @staticmethod
    def flops(op: Op) -> int:
        return 0

    @staticmethod
    def evaluate(op):
        return lambda x: x.clone()

    @staticmethod
    def roles(op):
        labels = LABELS[: op.x.type.rank]
        return Roles((labels,), (labels,))


@step.op
class Offload(Transfer):
    """x in host memory. Only `step.fetch` reads the result."""

    @staticmethod
    def check(op: Op) -> str | None:
        readers = [user for user in op.y.uses if not user.definition.terminator]
        other = next((user for user in readers if user.definition is not Fetch), None)
        return None if other is None else f"{other.name} reads a value in host memory; step.fetch brings it back first"


@step.op
class Fetch(Transfer):
    """A value that `step.offload` took to host memory, back on the device."""
