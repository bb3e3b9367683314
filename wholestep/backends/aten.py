"""The ATen provider: runs every op of the step dialect through PyTorch's own kernels.

An op without an `evaluate` rule runs through its expansion, flattened into the caller's program once per op.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch

from ..dialects.step import constant_value
from ..dialects.step.pointwise import is_scalar_number
from ..errors import WholestepError
from ..ir.core import Op, Value
from .absorption import writer


@dataclass(slots=True)
class Call:
    """One instruction: a callable, the operand values it takes (None where `numbers` holds a Python number)."""

    op: Op
    run: Callable[..., Any]
    operands: tuple[Value, ...]
    results: tuple[Value, ...]


def run_calls(calls: Iterable[Call], values: dict[Value, Any]) -> None:
    """Runs calls one after the other; their results are added to the values."""
    for call in calls:
        made = call.run(*[values[v] for v in call.operands])
        values.update(zip(call.results, made if isinstance(made, list | tuple) else (made,), strict=True))


def lower(op: Op, device: torch.device, written: torch.dtype | None = None) -> Call:
    """The call that runs an op. Pointwise ops take constants as numbers, so that ATen rounds them as eager does.

    `written` is the float type to write where that is not the op's own.
    """
    rule = getattr(op.definition, "evaluate", None)
    if rule is None:
        raise WholestepError(f"{op.name} (at {op.loc}) has neither an ATen implementation nor an expansion")
    run = rule(op) if written is None else writer(op, written, device)
    operands = op.operands
    if not operands:
        tensor = run(device=device)  # constants and counting: made once, when the program is built
        return Call(op, lambda: tensor, (), op.results)
    if getattr(op.definition, "takes_device", False):  # random numbers: the key alone does not say where they go
        if device.type == "cuda":
            device_random()
        return Call(op, partial(run, device=device), operands, op.results)
    if getattr(op.definition, "takes_numbers", False):
        left, right = operands
        if is_scalar_number(right) and not is_scalar_number(left):
            number = constant_value(right)
            return Call(op, lambda x, run=run, number=number: run(x, number), (left,), op.results)
        if is_scalar_number(left) and not is_scalar_number(right):
            number = constant_value(left)
            return Call(op, lambda x, run=run, number=number: run(number, x), (right,), op.results)
    return Call(op, run, operands, op.results)


@cache
def device_random() -> bool:
    """Whether random numbers can be made on a GPU from a key that lies there; asks for the kernel once."""
    if importlib.util.find_spec("triton") is None:
        return False
    module: Any = importlib.import_module("wholestep.backends.triton_random")
    module.register()
    return True
