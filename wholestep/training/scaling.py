"""Loss scaling and skipped updates inside the program, as `torch.amp.GradScaler` does them, without asking the host.

The scale and the count of good steps are state on the device. Where a gradient is not finite every new value of the
update is replaced by the old one.
"""

from __future__ import annotations

from ..capture.slots import Slot
from ..dialects.step import StepBuilder
from ..errors import OptimizerError
from ..ir.core import Value
from ..ir.types import F32, F64, I64, TensorType
from ..options import Scaling
from .optimizer_plan import OptimizerPlan

SCALE = Slot("scaler", "loss scale", ("scaler", "scale"), TensorType((), F32))
TRACKER = Slot("scaler", "steps since the loss scale changed", ("scaler", "growth_tracker"), TensorType((), I64))
SKIPPED = Slot("scaler", "skipped updates", ("scaler", "skipped"), TensorType((), I64))


def unscale(b: StepBuilder, grads: dict[str, Value], scale: Value) -> dict[str, Value]:
    """Gradients divided by the loss scale, by its reciprocal in double precision."""
    inverse = b.cast_to(b.reciprocal(b.cast_to(scale, F64)), F32)
    return {name: b.mul(grad, b.cast_to(inverse, grad.type.element)) for name, grad in grads.items()}


def next_scale(b: StepBuilder, scale: Value, tracker: Value, finite: Value, how: Scaling) -> tuple[Value, Value]:
    """The scale after this step, and the number of steps since it last changed."""
    steps = b.add(tracker, 1)
    grown = b.mul(scale, how.growth_factor)
    due = b.ge(steps, how.growth_interval)
    can_grow = b.bit_and(due, b.lt(grown, float("inf")))
    kept = b.select(can_grow, grown, scale)
    backed_off = b.mul(scale, how.backoff_factor)
    zero = b.full(0, (), I64)
    return b.select(finite, kept, backed_off), b.select(finite, b.select(due, zero, steps), zero)


def check_skippable(plan: OptimizerPlan) -> None:
    """Refuses optimizers whose step leaves traces that only the host could take back."""
    name = type(plan.optimizer).__name__
    for fqn in plan.parameters:
        if plan.group(fqn).get("dampening"):
            raise OptimizerError(
                f"{name} with dampening starts its buffer on its first update, which cannot be skipped inside the "
                "program (skip_nonfinite or fp16); set dampening=0, or train in bf16"
            )
        kept = plan.host_state(fqn)
        if kept:
            raise OptimizerError(
                f"{name} keeps {', '.join(kept)} as Python numbers or makes them on its first update, which a program "
                "cannot take back where it skips an update (skip_nonfinite, fp16); train in bf16 or fp32"
            )
