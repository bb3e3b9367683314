"""`wide_loss`: a loss of filled rows is the loss of the rows themselves, and its gradient needs no copy."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import wholestep as ws
from tests.runtime.runs import adamw, data, fresh
from wholestep import ir
from wholestep.dialects.step import StepBuilder, tensor_type
from wholestep.errors import InputError
from wholestep.ir.builtin import add_function, finish_function, module
from wholestep.ir.core import Op
from wholestep.ir.passes import run_pipeline
from wholestep.runtime.executor import Executable
from wholestep.transforms import pad, wide_loss
from wholestep.transforms.opportunity import transform

LOW = torch.bfloat16


@pytest.fixture(autouse=True)
def any_size(monkeypatch):
    monkeypatch.setattr(pad, "WORTH", 0)
    monkeypatch.setattr(pad, "PAYS", 0)


def head(x: torch.Tensor, w: torch.Tensor, target: torch.Tensor, smoothing: float = 0.0) -> tuple[Op, Op]:
    """A linear layer, the loss of its classes, and the gradients of both operands."""
    root = module()
    function = add_function(root, "f", [tensor_type(t) for t in (x, w, target)])
    b = StepBuilder(function.regions[0].block, phase="forward")
    rows, weight, wanted = function.regions[0].block.arguments
    y = b.contract(rows, weight, spec="abk,nk->abn")
    classes, count = w.shape[0], x.shape[0] * x.shape[1]
    wide = b.cast(b.reshape(y, shape=(count, classes)), dtype=ir.F32)
    loss, lse = b.cross_entropy(wide, wanted, label_smoothing=smoothing)
    seed = b.full(1.0, (), ir.F32)
    dwide = b.cross_entropy_grad(seed, wide, wanted, lse, label_smoothing=smoothing)
    dy = b.reshape(b.cast(dwide, dtype=y.type.element), shape=y.type.shape)
    dx, dw = b.contract(dy, weight, spec="abn,nk->abk"), b.contract(dy, rows, spec="abn,abk->nk")
    return root, finish_function(function, [loss, dx, dw, b.sum(dy, dims=(0, 1))])


def operands(classes: int) -> list[torch.Tensor]:
    target = torch.randint(0, classes, (12,), generator=torch.Generator().manual_seed(3))
    target[2] = -100
    return [data(3, 4, 16).to(LOW), data(classes, 16, seed=1).to(LOW), target]


def test_the_loss_of_filled_rows_is_the_same_and_nothing_is_cut_or_filled_again():
    given = operands(37)
    root, function = head(*given)
    want = Executable(function)(given)
    transform(root, force=["pad *"])
    assert len(wide_loss.WideLoss().find(root)) == 1
    (key,) = transform(root, force=["wide_loss *"])
    assert key == "wide_loss f/-/forward/cross_entropy#0" and wide_loss.WideLoss().find(root) == []
    ir.verify(root)
    run_pipeline(root, "cse,dce")
    (gradient,) = [op for op in function.regions[0].block if op.name == "step.cross_entropy_grad"]
    assert gradient.result.type.shape == (12, 40)
    filled = [op.result.type.shape for op in function.regions[0].block if op.name == "step.pad"]
    assert filled == [(40, 16)]  # the weight
    for mine, theirs in zip(Executable(function)(given), want, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1.6e-2, atol=1e-3)
    torch.testing.assert_close(Executable(function)(given)[0], want[0], rtol=1e-6, atol=0)


def test_where_it_is_not_possible_it_says_why():
    root, _ = head(*operands(37), smoothing=0.1)
    transform(root, force=["pad *"])
    (opportunity,) = wide_loss.WideLoss().find(root)
    assert "looks at all classes" in opportunity.why_not
    with pytest.raises(InputError, match="looks at all classes"):
        transform(root, force=["wide_loss *"])
    assert wide_loss.WideLoss().find(head(*operands(40))[0]) == []


class Language(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(37, 16), nn.Linear(16, 37)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.head(torch.tanh(self.table(ids))).flatten(0, 1).float(), ids.flatten())


def test_in_a_whole_step():
    ids = torch.randint(0, 37, (4, 6), generator=torch.Generator().manual_seed(0))

    def run(**options) -> tuple[list[str], list[float]]:
        model = fresh(Language)
        options |= {"precision": "bf16", "providers": ["aten"]}
        step = ws.compile(model, lambda m, ids: m(ids), adamw(model), (ids,), **options)
        return step.recipe, [float(step(ids)) for _ in range(4)]

    _, losses = run()
    recipe, others = run(force=["pad *", "wide_loss *"])
    assert recipe[-1].startswith("wide_loss ") and others == pytest.approx(losses, rel=1e-2)
