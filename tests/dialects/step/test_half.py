"""Neural-network ops in 16-bit floats: types hold, statistics are float32, expansions agree with the kernels."""

from __future__ import annotations

import pytest
import torch

from wholestep.dialects.step import step

from .harness import close, converted, forward
from .samples import SAMPLES

MODULES = ("softmax", "normalization", "losses", "attention", "convolution", "pooling", "indexing")
STATISTICS = ("mean", "rstd", "logsumexp")
CASES = [
    pytest.param(name, *case, id=f"{name}-{i}")
    for name, cases in SAMPLES.items()
    if step.ops[name].__module__.rpartition(".")[2] in MODULES
    for i, case in enumerate(cases)
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("name", "operands", "attributes"), CASES)
def test_types_and_expansion(name, operands, attributes, dtype):
    fields = [f.name for f in step.ops[name].operand_fields]
    operands = converted(operands, dtype)
    operands = [t.float() if f in STATISTICS else t for f, t in zip(fields, operands, strict=False)]
    results = forward(name, operands, **attributes)  # checks the types, too
    if step.ops[name].expand is None:
        return
    for mine, want in zip(forward(name, operands, expanded=True, **attributes), results, strict=True):
        close(mine, want, dtype, "expansion")
