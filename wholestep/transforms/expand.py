"""`expand`: replaces ops by the smaller step ops they consist of, by each op's own `expand` rule.

`expand{ops=adam}` expands one kind (names joined by `+`), `expand{ops=required}` those that ATen cannot run as it is,
plain `expand` everything that can be, until nothing is left to expand. On some devices an op has an expansion of its
own there, into fewer kernels (`dialects/step/fused_updates.py`).
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..dialects.step import StepBuilder
from ..dialects.step.fused_updates import EXPANSIONS
from ..errors import IRError
from ..ir.builtin import functions, module
from ..ir.core import Op, Value
from ..ir.passes import register_pass, run_pipeline


def has_expansion(op: Op) -> bool:
    """Whether the op has an expansion."""
    return getattr(op.definition, "expand", None) is not None


def needs_expansion(op: Op) -> bool:
    """Whether the op runs only through its expansion."""
    return has_expansion(op) and op.definition.evaluate is None  # type: ignore[attr-defined]


def expansion(builder: StepBuilder, op: Op, device: str = "") -> list[Value]:
    """The results of an op by smaller ones: by the device's own rule where that fits, else by the op's."""
    rule = EXPANSIONS.get(device, {}).get(op.name)
    out = rule(builder, op) if rule is not None else None
    if out is None:
        out = op.definition.expand(builder, op)  # type: ignore[attr-defined]
    return [out] if isinstance(out, Value) else list(out)


def expand_ops(ops: list[Op], device: str = "") -> None:
    """Replaces ops by their expansions on a kind of device, in place; the new ops keep their location and phase.

    Readers are rewired once, after all expansions are there: a function's return may read a thousand of them.
    """
    new: dict[Value, Value] = {}
    for op in ops:
        assert op.parent is not None
        builder = StepBuilder(op.parent, op, op.loc, op.phase)
        new.update(zip(op.results, expansion(builder, op, device), strict=True))
    for user in dict.fromkeys(user for old in new for user in old.uses):
        user.set_operands([latest(v, new) for v in user.operands])
    for op in ops:
        op.erase()


def latest(value: Value, new: dict[Value, Value]) -> Value:
    """What a value has become: an expansion may hand on a value that is itself replaced."""
    while value in new:
        value = new[value]
    return value


def expand_where(function: Op, wanted: Callable[[Op], bool], device: str = "") -> int:
    """Expands every op of a function that is wanted, and what that gives, until none is left; returns how many."""
    block, count = function.regions[0].block, 0
    pending = [op for op in block if wanted(op)]
    while pending:
        expand_ops(pending, device)
        count += len(pending)
        pending = [op for op in block if wanted(op)]
    return count


def expanded(function: Op, device: torch.device | str | None = None) -> Op:
    """A copy of the function in which ops that only run through their expansion are expanded, with repeats merged.

    `device` is where it will run; without one it is as on a CPU.
    """
    kind = "" if device is None else torch.device(device).type
    root = module()
    copy = function.clone()
    root.regions[0].block.append(copy)
    if expand_where(copy, needs_expansion, kind):
        run_pipeline(root, "cse,dce")
    return copy


@register_pass("expand")
def expand(module: Op, *, ops: str = "all") -> None:
    """Replaces ops by smaller ones: ops=all, ops=required (no ATen implementation) or names such as ops=adam+gelu."""
    chosen = {f"step.{name}" for name in ops.split("+")}
    wanted: Callable[[Op], bool]
    if ops == "all":
        wanted = has_expansion
    elif ops == "required":
        wanted = needs_expansion
    else:
        wanted = lambda op: op.name in chosen  # noqa: E731
    for function in functions(module):
        for op in function.regions[0].block:
            if wanted(op) and not has_expansion(op):
                raise IRError(f"{op.name} has no expansion")
        expand_where(function, wanted)
