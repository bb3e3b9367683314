"""`symmetric_product`: the gradient of x times itself is one product, and the same numbers."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.plan.networks import Case
from tests.runtime.runs import data
from wholestep.ir.verify import verify
from wholestep.runtime.executor import Executable
from wholestep.transforms import symmetric_product  # noqa: F401  (it registers)
from wholestep.transforms.opportunity import take, transformations

NAMES = ("symmetric_product",)


class Pairs(nn.Module):
    """Products of all pairs of some vectors, written in three ways; `other` is a product of different ones."""

    def __init__(self, how: str):
        super().__init__()
        self.layer, self.how = nn.Linear(6, 15), how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        vectors = torch.tanh(self.layer(x)).reshape(4, 3, 5)
        if self.how == "batches":
            return torch.bmm(vectors, vectors.transpose(1, 2)).flatten(1)
        if self.how == "einsum":
            return torch.einsum("bic,bjc->bji", vectors, vectors).flatten(1)
        if self.how == "one":
            rows = vectors.reshape(4, 15)
            return rows.t() @ rows
        return torch.bmm(vectors, torch.sin(vectors).transpose(1, 2)).flatten(1)


@pytest.mark.parametrize("how, products", [("batches", 1), ("einsum", 1), ("one", 0), ("other", 0)])
def test_two_products_of_one_gradient_are_one(how: str, products: int) -> None:
    torch.manual_seed(0)
    weights = torch.randn(15, 15) if how == "one" else torch.randn(4, 9)  # (the gradient must not be symmetric)
    case = Case((Pairs(how), lambda y, t: (y * t).sin().sum(), (data(4, 6), weights)), "sgd")
    before = Executable(case.program.function, "cpu", case.numbers)([x.clone() for x in case.inputs])
    found = transformations()["symmetric_product"].find(case.program.module)
    assert len(take(case.program.module, NAMES)) == products
    assert all("move more" in o.why_not for o in found if how == "one") and (len(found) == 1) == (how != "other")
    verify(case.program.module)
    after = Executable(case.program.function, "cpu", case.numbers)([x.clone() for x in case.inputs])
    for mine, want in zip(after, before, strict=True):
        torch.testing.assert_close(mine, want, rtol=1e-5, atol=1e-6)
