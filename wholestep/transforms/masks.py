"""`fold-masks`: attention masks that hang on nothing but positions are looked at once, when the step is compiled.

A mask that lets position i see positions 0 to i becomes `causal`; one that lets everything through goes. The kernels
for both are faster and no mask is stored. Masks that depend on the batch stay.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from ..dialects.step import StepOp
from ..dialects.step.attention import AttentionLike
from ..ir.builtin import functions
from ..ir.core import Op, Value
from ..ir.passes import register_pass

#: masks with more elements than this are left alone
LARGEST = 1 << 26


@register_pass("fold-masks")
def fold_masks(module: Op) -> None:
    """Replaces constant attention masks by what they mean."""
    known: dict[Value, str] = {}
    for function in functions(module):
        for op in [o for o in function.regions[0].block if issubclass(o.definition, AttentionLike)]:
            mask = op.mask
            if mask is None or op.causal or mask.type.element.kind != "bool":
                continue
            if mask not in known:
                known[mask] = meaning(mask, op.q.type.shape[-2], op.k.type.shape[-2])
            if known[mask]:
                op.set_operands([v for v in op.operands if v is not mask])
                op.attributes["causal"] = known[mask] == "causal"


def meaning(mask: Value, length: int, keys: int) -> str:
    """What a mask says: "causal", "all", or "" where it says more or cannot be known."""
    if math.prod(mask.type.shape) > LARGEST or mask.type.shape[-2:] not in ((length, keys), (1, keys), (length, 1)):
        return ""
    found = constant_tensor(mask, {})
    if found is None:
        return ""
    if bool(found.all()):
        return "all"
    if mask.type.shape[-2:] != (length, keys):
        return ""
    causal = torch.ones(length, keys, dtype=torch.bool).tril()
    return "causal" if bool((found == causal).all()) else ""


def constant_tensor(value: Value, known: dict[Value, torch.Tensor | None]) -> torch.Tensor | None:
    """What a value is where it follows from constants alone; None where it does not, or is random."""
    if value not in known:
        op = value.op
        known[value] = None
        if op is not None and issubclass(op.definition, StepOp) and hasattr(op.definition, "evaluate"):
            inputs = [constant_tensor(v, known) for v in op.operands]
            if all(v is not None for v in inputs) and len(op.results) == 1 and op.definition.pure:
                rule: Any = op.definition.evaluate  # type: ignore[attr-defined]
                run = rule(op)
                with torch.no_grad():
                    known[value] = run(*inputs) if inputs else run(device=torch.device("cpu"))
    return known[value]
