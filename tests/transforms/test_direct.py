"""`direct`: products without the transposes around them give the same numbers, and nothing is copied."""

from __future__ import annotations

import pytest
import torch

import wholestep as ws
from tests.runtime.runs import adamw, data, fresh, squares
from wholestep import ir
from wholestep.dialects.step import StepBuilder, tensor_type
from wholestep.dialects.step.contraction import parse_spec, plan_contraction, shared_lead
from wholestep.ir.builtin import add_function, finish_function, module
from wholestep.ir.core import Op
from wholestep.ir.passes import run_pipeline
from wholestep.runtime.executor import Executable
from wholestep.torch_private import TorchDispatchMode
from wholestep.transforms import direct, pad
from wholestep.transforms.opportunity import take, transform


@pytest.mark.parametrize(
    ("spec", "left", "right", "lead"),
    [
        ("btc,ft->bcf", (3, 5, 7), (4, 5), "b"),
        ("bcf,tf->btc", (3, 7, 4), (5, 4), "b"),
        ("bcf,ft->btc", (3, 7, 4), (4, 5), "b"),
        ("ft,btc->bcf", (4, 5), (3, 5, 7), "b"),  # the batch is that of rhs
        ("abk,nk->abn", (2, 3, 4), (5, 4), ""),  # one product as it lies
        ("abn,abk->nk", (2, 3, 4), (2, 3, 5), ""),
        ("nab,nbc->nac", (2, 3, 4), (2, 4, 5), ""),
    ],
)
def test_a_batch_of_products_that_share_an_operand_copies_nothing(spec, left, right, lead):
    x, y = torch.randn(left, dtype=torch.float64), torch.randn(right, dtype=torch.float64)
    a, b, out = parse_spec(spec)
    assert (shared_lead(a, b, out) or shared_lead(b, a, out)) == lead
    run = plan_contraction(spec, tensor_type(x), tensor_type(y), None)
    made = run(x, y)
    torch.testing.assert_close(made, torch.einsum(spec, x, y))
    assert made.is_contiguous()
    z = torch.randn(made.shape[-1], dtype=torch.float64)
    run = plan_contraction(spec, tensor_type(x), tensor_type(y), tensor_type(z))
    torch.testing.assert_close(run(x, y, z), torch.einsum(spec, x, y) + z)


class Copies(TorchDispatchMode):
    """Notes operators that copy a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen += [str(func)] if "clone" in str(func) or "copy" in str(func) else []
        return func(*args, **(kwargs or {}))


def across(
    x: torch.Tensor, w: torch.Tensor, *addend: torch.Tensor, before: bool = True, behind: bool = False
) -> tuple[Op, Op]:
    """A function with one product, of a transposed operand or with a transposed result."""
    root = module()
    function = add_function(root, "f", [tensor_type(t) for t in (x, w, *addend)])
    b = StepBuilder(function.regions[0].block, phase="forward")
    value, weight, *more = function.regions[0].block.arguments
    made = b.contract(b.transpose(value, order=(0, 2, 1)) if before else value, weight, *more, spec="abk,nk->abn")
    return root, finish_function(function, [b.transpose(made, order=(0, 2, 1)) if behind else made])


@pytest.mark.parametrize("behind", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_a_product_without_the_transposes_gives_the_same_and_copies_nothing(monkeypatch, behind, bias):
    monkeypatch.setattr(direct, "LEAST", 4)
    before = not behind
    x, w, z = data(3, 6, 8), data(5, 6 if before else 8, seed=1), [data(5, seed=2)] if bias else []
    root, function = across(x, w, *z, before=before, behind=behind)
    (want,) = Executable(function)([x, w, *z])
    assert transform(root, force=["direct *"]) == ["direct f/-/forward/contract#0"]
    ir.verify(root)
    run_pipeline(root, "dce")
    assert "step.transpose" not in [op.name for op in function.regions[0].block] and direct.Direct().find(root) == []
    with Copies() as copies:
        (mine,) = Executable(function)([x, w, *z])
    torch.testing.assert_close(mine, want)
    assert copies.seen == [] and mine.is_contiguous()


def test_where_it_is_of_no_use_it_says_why(monkeypatch):
    (small,) = direct.Direct().find(across(data(3, 6, 8), data(5, 6))[0])
    assert "one large product is better" in small.why_not
    monkeypatch.setattr(direct, "LEAST", 4)
    (wide,) = direct.Direct().find(across(data(3, 6, 8), data(5, 6), data(8, 5))[0])
    assert "more than one dimension" in wide.why_not
    assert direct.Direct().find(across(data(3, 6, 8), data(5, 8), before=False)[0]) == []


def test_all_at_once_is_the_same_recipe(monkeypatch):
    monkeypatch.setattr(direct, "LEAST", 4)
    monkeypatch.setattr(pad, "WORTH", 0)
    monkeypatch.setattr(pad, "PAYS", 0)
    given = [t.to(torch.bfloat16) for t in (data(3, 6, 8), data(5, 6, seed=1))]
    (root, function), (other, _) = across(*given), across(*given)
    (want,) = Executable(function)(given)
    assert take(root, ("direct", "pad"), ["pad *"]) == ["direct f/-/forward/contract#0"]
    assert take(root, ("direct", "pad")) == ["pad f/-/forward/contract#0"]
    transform(other, recipe=["direct f/-/forward/contract#0", "pad f/-/forward/contract#0"])
    assert ir.print_op(root) == ir.print_op(other) and "step.pad" in ir.print_op(root)
    (mine,) = Executable(function)(given)
    torch.testing.assert_close(mine, want, rtol=1.6e-2, atol=1e-2)


class Mixed(torch.nn.Module):
    """A layer across positions, then one across channels."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.positions = torch.nn.LayerNorm(16), torch.nn.Linear(9, 8)
        self.back, self.channels = torch.nn.Linear(8, 9), torch.nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.back(torch.tanh(self.positions(self.norm(x).transpose(1, 2)))).transpose(1, 2)
        return self.channels(x + y)


def test_in_a_whole_step(monkeypatch):
    monkeypatch.setattr(direct, "LEAST", 4)

    def run(**options) -> tuple[list[str], list[float]]:
        model = fresh(Mixed)
        step = ws.compile(model, squares, adamw(model), (data(4, 9, 16),), providers=["aten"], **options)
        return step.recipe, [float(step(data(4, 9, 16, seed=s))) for s in range(3)]

    plain, losses = run()
    recipe, others = run(force=["direct *"])
    assert plain == [] and len(recipe) == 4  # two products, forward and input gradients of both
    assert others == pytest.approx(losses, rel=1e-5)
