"""Masks that hang on positions alone become causal attention or go; masks of the batch stay."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import wholestep as ws
from wholestep.dialects.step import StepBuilder
from wholestep.ir.builtin import add_function, finish_function, functions, module
from wholestep.ir.passes import run_pipeline
from wholestep.ir.types import BOOL, F32, I64, TensorType
from wholestep.transforms import masks  # noqa: F401  (registers the pass)


def attention_of(build, length: int = 6) -> tuple[bool, bool]:
    """Whether attention is causal and has a mask, after folding the mask that `build` makes."""
    root = module()
    heads = TensorType((2, 3, length, 4), F32)
    function = add_function(root, "f", [heads, heads, heads, TensorType((length, length), BOOL)])
    q, k, v, given = function.regions[0].block.arguments
    b = StepBuilder(function.regions[0].block)
    row = b.reshape(b.iota(start=0, stride=1, type=TensorType((length,), I64)), shape=(length, 1))
    column = b.iota(start=0, stride=1, type=TensorType((length,), I64))
    mask = build(b, row, column, given)
    finish_function(function, [b.attention(q, k, v, mask, causal=False, scale=0.5, enable_gqa=False)[0]])
    run_pipeline(root, "fold-masks")
    (op,) = [o for f in functions(root) for o in f.regions[0].block if o.name == "step.attention"]
    return op.causal, op.mask is not None


@pytest.mark.parametrize(
    ("build", "expected"),
    [
        (lambda b, row, column, given: b.ge(row, column), (True, False)),
        (lambda b, row, column, given: b.broadcast_to(b.le(column, row), (2, 1, 6, 6)), (True, False)),
        (lambda b, row, column, given: b.ge(b.add(row, 6), column), (False, False)),  # everything is seen
        (lambda b, row, column, given: b.gt(row, column), (False, True)),  # nobody sees itself
        (lambda b, row, column, given: b.bit_and(b.ge(row, column), b.gt(column, b.sub(row, 3))), (False, True)),
        (lambda b, row, column, given: b.bit_and(b.ge(row, column), given), (False, True)),
        (lambda b, row, column, given: given, (False, True)),
    ],
    ids=["causal", "broadcast", "all", "strict", "window", "with batch", "batch"],
)
def test_what_a_mask_means(build, expected) -> None:
    assert attention_of(build) == expected


def test_a_step_with_a_causal_mask_trains_like_eager() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = (t.unflatten(-1, (2, 4)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
            at = torch.arange(x.shape[1])
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=at[:, None] >= at[None])
            return self.out(y.transpose(1, 2).flatten(2))

    torch.manual_seed(0)
    model = Model()
    x = torch.randn(2, 5, 8)
    step = ws.compile(
        model, lambda m, x: m(x).pow(2).mean(), torch.optim.SGD(model.parameters(), 0.1), (x,), verify=True
    )
    step(x)
    assert step.verified and "causal = true" in str(step.program())
