"""Optimizer updates as one kernel each, for GPUs: what `torch.optim` runs with `fused=True`.

The updates of `optimizers.py` expand to these where a device has a rule for it here: counters and everything else that
is one number stay ordinary ops, and all elements are read and written once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch

from ...ir.core import Op, Value
from ...ir.dialect import Attr, Operand, Result
from ...ir.types import BF16, F16, F32, ScalarType
from .base import StepBuilder, step
from .optimizers import Number, OptimizerUpdate, RealTensor, advance, hyper, maximize_option
from .support import spread

#: element types of parameters that are updated so; f64 stays with the ordinary ops, since the rate is an f32 here
ELEMENTS = (F32, F16, BF16)


class FusedUpdate(OptimizerUpdate):
    """Common rules of fused updates. The gradient is read alone; the rate is an f32 number on the device."""

    #: numbers that the kernel takes as Python floats
    floats: ClassVar[tuple[str, ...]] = ()
    #: numbers that the kernel reads from the device, and their element types
    device_numbers: ClassVar[dict[str, ScalarType]] = {"lr": F32}

    @staticmethod
    def check(op):
        for name, element in op.definition.device_numbers.items():
            if getattr(op, name).type.element is not element:
                return f"{name} must be {element.text}"
        elements = {v.type.element for v in (op.parameter, op.gradient, *(old for _, old in states_of(op)))}
        if len(elements) > 1:
            return "parameter, gradient and states must have one element type"
        return OptimizerUpdate.check(op)


def states_of(op: Op) -> list[tuple[str, Value]]:
    """The states that an update carries, by name."""
    names = op.definition.states  # type: ignore[attr-defined]
    return [(name, getattr(op, name)) for name in names if getattr(op, name) is not None]


def on_device(number: Any, like: torch.Tensor) -> torch.Tensor:
    """A number as an f32 tensor beside `like`; itself where it is one already."""
    if isinstance(number, torch.Tensor) and number.device == like.device and number.dtype is torch.float32:
        return number
    return torch.as_tensor(number, dtype=torch.float32, device=like.device)


def laid_out_like(x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """x with the strides of `like`, which the kernels want of all their tensors; copied only where elements move."""
    if x.stride() == like.stride():
        return x
    if all(a == b for a, b, n in zip(x.stride(), like.stride(), x.shape, strict=True) if n != 1):
        return x.as_strided(like.shape, like.stride())
    return torch.empty_like(like).copy_(x)


def copies(parameter: torch.Tensor, *states: torch.Tensor | None) -> list[torch.Tensor]:
    """What a kernel writes: copies of the parameter and of the states there are, all laid out alike."""
    new = parameter.clone()
    return [new, *(laid_out_like(t, new).clone() for t in states if t is not None)]


# ---- the kernels -----------------------------------------------------------------------------------------------------
#
# PyTorch's own operators say that they write into gradients, which they only do to unscale them, and have no shape
# function for a rate that lies on the device. These say what is written and do the same.

_ADAM = """(Tensor(a!) parameter, Tensor gradient, Tensor(b!) exp_avg, Tensor(c!) exp_avg_sq,
Tensor(d!)? max_exp_avg_sq, Tensor new_step, Tensor lr, float beta1, float beta2, float weight_decay, float eps,
bool decoupled, bool maximize) -> ()"""
_SGD = """(Tensor(a!) parameter, Tensor gradient, Tensor(b!)? momentum_buffer, Tensor lr, float weight_decay,
float momentum, float dampening, bool nesterov, bool maximize) -> ()"""


@torch.library.custom_op(
    "wholestep::fused_adam_", mutates_args=("parameter", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"), schema=_ADAM
)
def adam_(
    parameter, gradient, average, square, top, new_step, lr, beta1, beta2, weight_decay, eps, decoupled, maximize
):
    """Adam or AdamW in place."""
    aten = torch.ops.aten
    kernel = aten._fused_adamw_ if decoupled else aten._fused_adam_
    tops = [] if top is None else [top]
    numbers = {"lr": lr, "beta1": beta1, "beta2": beta2, "weight_decay": weight_decay, "eps": eps}
    lists = [parameter], [gradient], [average], [square], tops, [new_step]
    kernel.tensor_lr(*lists, **numbers, amsgrad=top is not None, maximize=maximize)


@torch.library.custom_op("wholestep::fused_sgd_", mutates_args=("parameter", "momentum_buffer"), schema=_SGD)
def sgd_(parameter, gradient, buffer, lr, weight_decay, momentum, dampening, nesterov, maximize):
    """Gradient descent in place."""
    torch.ops.aten._fused_sgd_.tensor_lr(
        [parameter],
        [gradient],
        [] if buffer is None else [buffer],
        weight_decay=weight_decay,
        momentum=momentum,
        lr=lr,
        dampening=dampening,
        nesterov=nesterov,
        maximize=maximize,
        is_first_step=False,
    )


@adam_.register_fake
def _(*operands, **options):
    """It only writes into what it is given."""


@sgd_.register_fake
def _(*operands, **options):
    """It only writes into what it is given."""


# ---- the ops ---------------------------------------------------------------------------------------------------------


class FusedAdamLike(FusedUpdate):
    """What the fused forms of Adam and AdamW share."""

    states = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
    cost = 16
    floats = ("beta1", "beta2", "weight_decay", "eps")
    device_numbers: ClassVar[dict[str, ScalarType]] = {"lr": F32, "new_step": F32}
    decoupled: ClassVar[bool] = False
    exp_avg = Operand(RealTensor, "average of gradients")
    exp_avg_sq = Operand(RealTensor, "average of squared gradients")
    max_exp_avg_sq = Operand(RealTensor, "largest average so far (AMSGrad)", optional=True)
    new_step = Operand(Number, "updates so far, this one included")
    lr = hyper("learning rate")
    beta1 = hyper("decay of the average")
    beta2 = hyper("decay of the squared average")
    weight_decay = hyper("weight decay")
    eps = hyper("added to the denominator")
    new_exp_avg = Result(RealTensor)
    new_exp_avg_sq = Result(RealTensor)
    new_max_exp_avg_sq = Result(RealTensor, "with AMSGrad", variadic=True)
    maximize = maximize_option()

    @staticmethod
    def evaluate(op):
        decoupled, maximize = op.definition.decoupled, op.maximize

        def run(parameter, gradient, average, square, top, count, lr, beta1, beta2, weight_decay, eps):
            new = copies(parameter, average, square, top)
            adam_(
                new[0],
                laid_out_like(gradient, new[0]),
                new[1],
                new[2],
                new[3] if top is not None else None,
                on_device(count, parameter),
                on_device(lr, parameter),
                float(beta1),
                float(beta2),
                float(weight_decay),
                float(eps),
                decoupled,
                maximize,
            )
            return tuple(new)

        return spread(op, run)


@step.op
class FusedAdam(FusedAdamLike):
    """Adam in one kernel; AMSGrad where the running maximum is given."""


@step.op
class FusedAdamw(FusedAdamLike):
    """AdamW in one kernel; AMSGrad where the running maximum is given."""

    decoupled = True


@step.op
class FusedSgd(FusedUpdate):
    """Gradient descent in one kernel, with momentum where a buffer is given; the buffer starts as zeros."""

    states = ("momentum_buffer",)
    cost = 6
    floats = ("weight_decay", "momentum", "dampening")
    momentum_buffer = Operand(RealTensor, "running sum of gradients", optional=True)
    lr = hyper("learning rate")
    weight_decay = hyper("weight decay, added to the gradient")
    momentum = hyper("share of the buffer kept", optional=True)
    dampening = hyper("share of the gradient left out of the buffer, 0 on the first update", optional=True)
    new_momentum_buffer = Result(RealTensor, "the new buffer, with momentum", variadic=True)
    nesterov = Attr("bool", "look one momentum step ahead", False)
    maximize = maximize_option()

    @staticmethod
    def check(op):
        parts = (op.momentum_buffer, op.momentum, op.dampening)
        if any(p is None for p in parts) and any(p is not None for p in parts):
            return "momentum_buffer, momentum and dampening come together"
        return FusedUpdate.check(op)

    @staticmethod
    def evaluate(op):
        nesterov, maximize = op.nesterov, op.maximize

        def run(parameter, gradient, buffer, lr, weight_decay, momentum, dampening):
            new = copies(parameter, buffer)
            sgd_(
                new[0],
                laid_out_like(gradient, new[0]),
                new[1] if buffer is not None else None,
                on_device(lr, parameter),
                float(weight_decay),
                0.0 if momentum is None else float(momentum),
                0.0 if dampening is None else float(dampening),
                nesterov,
                maximize,
            )
            return tuple(new) if buffer is not None else new[0]

        return spread(op, run)


# ---- how the ordinary updates become these ---------------------------------------------------------------------------


def fits(op: Op) -> bool:
    """Whether parameter and states have one element type that the kernels take."""
    element = op.parameter.type.element
    states = [v for name, v in states_of(op) if name != "step"]
    return element in ELEMENTS and all(v.type is op.parameter.type for v in states)


def fused_adam(b: StepBuilder, op: Op) -> Sequence[Value] | None:
    """Adam and AdamW as one kernel and a counter; None where they do not fit."""
    if not fits(op):
        return None
    count, _ = advance(b, op)
    build = b.fused_adamw if op.decoupled else b.fused_adam
    new, *states = build(
        op.parameter,
        b.cast_to(op.gradient, op.parameter.type.element),
        op.exp_avg,
        op.exp_avg_sq,
        op.max_exp_avg_sq,
        b.cast_to(count, F32),
        b.cast_to(op.lr, F32),
        op.beta1,
        op.beta2,
        op.weight_decay,
        op.eps,
        maximize=op.maximize,
    )
    return [new, count, *states]


def fused_sgd(b: StepBuilder, op: Op) -> Sequence[Value] | None:
    """Gradient descent as one kernel; None where it does not fit.

    Eager starts the buffer as a copy of the first gradient. Ours is zeros then, so without dampening the first update
    is like any other.
    """
    if not fits(op):
        return None
    dampening = None
    if op.dampening is not None:
        dampening = b.select(b.ne(op.fresh, 0.0), 0.0, op.dampening)
    built = b.fused_sgd(
        op.parameter,
        b.cast_to(op.gradient, op.parameter.type.element),
        op.momentum_buffer,
        b.cast_to(op.lr, F32),
        op.weight_decay,
        op.momentum,
        dampening,
        nesterov=op.nesterov,
        maximize=op.maximize,
    )
    return [built] if isinstance(built, Value) else list(built)


#: expansions by kind of device and op, tried before the op's own; each gives None where the op does not fit
EXPANSIONS: dict[str, dict[str, Callable[[StepBuilder, Op], Sequence[Value] | None]]] = {
    "cuda": {"step.adam": fused_adam, "step.sgd": fused_sgd},
}
