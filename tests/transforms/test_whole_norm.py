"""The norm of gradients that are slices of one product is that of the product; norms and training stay eager's."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import wholestep as ws
from tests.dialects.loop.provider import LoopReference, registered
from tests.runtime.runs import assert_same, data, fresh
from tests.transforms.test_early_sums import COLUMNS, GRADIENT, ROWS, clipped, fused, of
from tests.transforms.test_fuse import root_of
from tests.transforms.test_tall_products import Clock, joined, small  # noqa: F401  (a fixture of all tests here)
from wholestep import api
from wholestep.ir.core import Op, Value
from wholestep.ir.passes import run_pipeline
from wholestep.transforms.opportunity import opportunities, take

NAME = "whole_norm"


def parts(b: Any, dy: Value, x: Value, w: Value, last: int = ROWS) -> list[Value]:
    """Gradients that are thirds of a product, up to a row."""
    b.phase = "backward"
    whole = b.contract(dy, x, spec=GRADIENT)
    third = ROWS // 3
    cuts = [b.slice(whole, dim=0, start=i, end=i + third) for i in range(0, last, third)]
    return clipped(b, cuts, b.slice(w, dim=0, start=0, end=third))


def test_one_sum_for_all_parts_which_the_product_takes_along() -> None:
    function = of(parts)
    assert fused(of(parts), Clock(), products=True)[1] == []
    assert len(take(root_of(function), [NAME])) == 1
    run_pipeline(root_of(function), "cse,dce")
    sums = [op.operands[0].type.shape for op in function.regions[0].block if op.name == "step.sum"]
    assert (ROWS, COLUMNS) in sums and sums.count((ROWS // 3, COLUMNS)) == 1  # (that of the small one, over rows)
    assert joined(function, Clock(), products=True)[1] == [GRADIENT]


def why_not(function: Op) -> list[str]:
    return [o.why_not for o in opportunities(root_of(function), names=[NAME])]


def test_where_a_part_is_missing() -> None:
    assert why_not(of(parts)) == [""]
    assert why_not(of(lambda *a: parts(*a, last=ROWS * 2 // 3))) == [
        "some parts of what the gradients are cut out of are none"
    ]
    assert why_not(of(lambda b, dy, x, w: clipped(b, [b.contract(dy, x, spec=GRADIENT)], w))) == []


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.out = nn.LayerNorm(64), nn.Linear(64, 64)
        self.q, self.k, self.v = (nn.Linear(64, 64, bias=bias) for bias in (True, False, False))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x)
        heads = [layer(x).unflatten(-1, (4, 16)).transpose(1, 2) for layer in (self.q, self.k, self.v)]
        return self.out(F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2))


def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_step_is_eagers(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "DEFAULTS", tuple(replace(d, device="") for d in api.DEFAULTS))
    model, x = fresh(Attention), data(4, 32, 64)
    twin = copy.deepcopy(model)
    optimizer, other = (torch.optim.SGD(m.parameters(), lr=0.5) for m in (model, twin))
    options: Any = dict(clip_norm=0.05, precision=precision, providers=["aten", "loops"], tune=False)
    with registered(LoopReference):
        step = ws.compile(model, loss, optimizer, (x,), **options)
        assert sum(key.startswith(f"{NAME} ") for key in step.recipe) == 1
        step(x)
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
        expected = loss(twin, x)
    expected.backward()
    norm = nn.utils.clip_grad_norm_(twin.parameters(), 0.05)
    other.step()
    near = dict(rtol=1e-5, atol=1e-7) if precision == "fp32" else dict(rtol=2e-2, atol=1e-4)
    torch.testing.assert_close(step.last.grad_norm, norm, **near)
    assert_same(model, twin, *((1e-5, 1e-6) if precision == "fp32" else (5e-2, 1e-3)))
