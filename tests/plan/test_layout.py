"""Results lie where kernels put them."""

from __future__ import annotations

import torch

from wholestep.dialects.step import StepBuilder
from wholestep.ir.builtin import add_function, finish_function, module
from wholestep.ir.types import F32, TensorType
from wholestep.plan import plan_function


def test_kernels_keep_the_layout_of_transposed_operands() -> None:
    """A pointwise result of a transposed tensor is planned as the kernel writes it, so no copy is needed."""
    function = add_function(module(), "f", [TensorType((4, 6), F32)])
    (x,) = function.regions[0].block.arguments
    b = StepBuilder(function.regions[0].block)
    finish_function(function, [b.exp(b.transpose(x, order=(1, 0)))])
    plan, _ = plan_function(function)
    want = torch.exp(torch.empty(4, 6).T).stride()
    assert plan.buffers[plan.results[0].buffer].strides == want == (1, 6)
