"""`pad`: products filled up with zeros give the same numbers, and it says where it is of no use."""

from __future__ import annotations

import pytest
import torch

import wholestep as ws
from tests.runtime.runs import adamw, data, fresh, squares
from wholestep import api, ir
from wholestep.dialects.step import StepBuilder, tensor_type
from wholestep.errors import InputError
from wholestep.ir.builtin import add_function, finish_function, module
from wholestep.ir.core import Op
from wholestep.runtime.executor import Executable
from wholestep.transforms import pad
from wholestep.transforms.opportunity import Opportunity, transform

LOW = torch.bfloat16


def product(*tensors: torch.Tensor, spec: str = "ab,bc->ac") -> tuple[Op, Op]:
    """A module whose function is one product, with an addend where there is a third tensor."""
    root = module()
    function = add_function(root, "f", [tensor_type(t) for t in tensors])
    b = StepBuilder(function.regions[0].block, phase="forward")
    y = b.contract(*function.regions[0].block.arguments, spec=spec)
    return root, finish_function(function, [y])


def found(root: Op) -> list[Opportunity]:
    return pad.Pad().find(root)


def names(function: Op) -> list[str]:
    return [op.name for op in function.regions[0].block]


@pytest.fixture
def any_size(monkeypatch):
    monkeypatch.setattr(pad, "WORTH", 0)
    monkeypatch.setattr(pad, "PAYS", 0)


@pytest.mark.parametrize(
    ("left", "right", "spec", "padded"),
    [
        ((16, 24), (24, 37), "ab,bc->ac", {"c": (37, 40)}),
        ((16, 50), (24, 50), "ab,cb->ac", {"b": (50, 56)}),  # the reduced dimension: nothing to cut off afterwards
        ((32, 50), (50, 16), "ab,bc->ac", {"b": (50, 56)}),
        ((13, 50), (37, 50), "ab,cb->ac", {"b": (50, 56), "c": (37, 40)}),
        ((3, 9, 12), (3, 12, 9), "nab,nbc->nac", {"b": (12, 16), "c": (9, 16)}),
        ((4, 8), (8, 1030), "ab,bc->ac", {"c": (1030, 1088)}),  # large dimensions go to whole tiles
    ],
    ids=str,
)
def test_a_filled_product_gives_the_same_numbers(any_size, left, right, spec, padded):
    x, y = data(*left).to(LOW), data(*right, seed=1).to(LOW)
    root, function = product(x, y, spec=spec)
    (op,) = [op for op in function.regions[0].block if op.name == "step.contract"]
    assert pad.unaligned(op) == padded
    assert len(transform(root, force=["pad *"])) == 1
    ir.verify(root)
    assert "step.pad" in names(function) and found(root) == []
    assert names(function).count("step.slice") == sum(label in spec.partition("->")[2] for label in padded)
    (mine,) = Executable(function)([x, y])
    want = torch.einsum(spec, x.double(), y.double())
    assert mine.dtype == LOW and mine.shape == want.shape
    torch.testing.assert_close(mine.double(), want, rtol=1.6e-2, atol=1e-2)


def test_of_a_small_operand_only_the_distance_of_rows_is_filled(any_size):
    x, y = data(4, 50, 32).to(LOW), data(37, 50, seed=1).to(LOW)
    root, function = product(x, y, spec="nbc,ab->nca")
    (op,) = [op for op in function.regions[0].block if op.name == "step.contract"]
    assert pad.rows_apart(op) == {"b"}
    (opportunity,) = found(root)
    assert opportunity.change.bytes == 2 * 37 * 50 * 2 and opportunity.change.flops < 2 * 4 * 32 * 50 * 4
    assert len(transform(root, force=["pad *"])) == 1 and found(root) == []
    ir.verify(root)
    (op,) = [op for op in function.regions[0].block if op.name == "step.contract"]
    assert op.lhs.op is None and op.rhs.type.shape == (40, 50) and op.result.type.shape == (4, 32, 40)
    (mine,) = Executable(function)([x, y])
    want = torch.einsum("nbc,ab->nca", x.double(), y.double())
    torch.testing.assert_close(mine.double(), want, rtol=1.6e-2, atol=2e-2)


def test_a_copy_that_takes_longer_than_it_saves_is_not_made(monkeypatch):
    monkeypatch.setattr(pad, "WORTH", 0)
    (opportunity,) = found(product(data(64, 27, 64).to(LOW), data(64, 64, 27).to(LOW), spec="nab,nbc->nac")[0])
    assert "would take longer" in opportunity.why_not
    (opportunity,) = found(product(data(256, 64).to(LOW), data(64, 27).to(LOW))[0])
    assert not opportunity.why_not


def test_sums_of_a_filled_operand_are_sums_of_what_is_in_memory(any_size):
    x, y = data(16, 37).to(LOW), data(37, 24, seed=1).to(LOW)
    root = module()
    function = add_function(root, "f", [tensor_type(x), tensor_type(y)])
    b = StepBuilder(function.regions[0].block, phase="backward")
    dy = b.neg(function.regions[0].block.arguments[0])
    product = b.contract(dy, function.regions[0].block.arguments[1], spec="ab,bc->ac")
    finish_function(function, [product, b.sum(dy, dims=(0,)), b.sum(dy, dims=(1,))])
    assert len(transform(root, force=["pad *"])) == 1
    ir.verify(root)
    columns, rows = [op for op in function.regions[0].block if op.name == "step.sum"]
    assert columns.operands[0].op.name == "step.pad" and rows.operands[0].op.name == "step.neg"
    for mine, want in zip(Executable(function)([x, y])[1:], (-x.sum(0), -x.sum(1)), strict=True):
        torch.testing.assert_close(mine, want)


def test_the_predicted_change(any_size):
    root, _ = product(data(16, 24).to(LOW), data(24, 37).to(LOW))
    (opportunity,) = found(root)
    assert opportunity.key == "pad f/-/forward/contract#0"
    assert opportunity.change.bytes == 2 * 24 * 37 * 2  # the right operand alone: read, and written filled up
    assert opportunity.change.flops == pytest.approx(2 * 16 * 24 * (40 - 37), abs=1)


def test_small_products_are_left_alone():
    root, _ = product(data(16, 24).to(LOW), data(24, 37).to(LOW))
    (opportunity,) = found(root)
    assert "too small to be worth copies" in opportunity.why_not
    with pytest.raises(InputError, match="too small to be worth copies"):
        transform(root, force=["pad *"])


@pytest.mark.parametrize("shape", [(37,), (16, 37), (16, 1), (1, 37)])
def test_an_addend_is_filled_where_it_has_the_dimension(any_size, shape):
    x, y, z = data(16, 21).to(LOW), data(21, 37, seed=1).to(LOW), data(*shape, seed=2).to(LOW)
    root, function = product(x, y, z)
    assert len(transform(root, force=["pad *"])) == 1
    ir.verify(root)
    (mine,) = Executable(function)([x, y, z])
    torch.testing.assert_close(mine.double(), x.double() @ y.double() + z.double(), rtol=1.6e-2, atol=2e-2)


def test_wide_elements_and_aligned_rows_have_no_opportunity(any_size):
    assert found(product(data(16, 24), data(24, 37))[0]) == []
    assert found(product(data(16, 24).to(LOW), data(24, 40).to(LOW))[0]) == []
    assert found(product(data(13, 24).to(LOW), data(24, 40).to(LOW))[0]) == []  # 13 is no row


def layers() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(24, 37), torch.nn.Tanh(), torch.nn.Linear(37, 8, bias=False))


def run(**options) -> tuple[ws.TrainStep, list[float]]:
    model = fresh(layers)
    step = ws.compile(model, squares, adamw(model), (data(16, 24),), precision="bf16", providers=["aten"], **options)
    return step, [float(step(data(16, 24, seed=s))) for s in range(4)]


def test_in_a_whole_step(any_size):
    plain, losses = run()
    filled, others = run(force=["pad *"])
    assert plain.recipe == [] and len(filled.recipe) >= 3
    assert "step.pad" in str(filled.program()) and "step.pad" not in str(plain.program())
    assert others == pytest.approx(losses, rel=2e-2)
    again, same = run(recipe=filled.recipe)
    assert again.recipe == filled.recipe and same == others


def test_levels_and_forbid_decide_where_it_is_taken_by_itself(any_size, monkeypatch):
    monkeypatch.setattr(api, "DEFAULTS", (api.Default("pad", device="cpu"),))
    by_level = {level: run(level=level)[0].recipe for level in (0, 1, 3)}
    assert by_level[0] == [] and by_level[1] == by_level[3] and len(by_level[1]) >= 3
    assert run(forbid=["pad *"])[0].recipe == []
    backward = run(forbid=["pad */backward/*"])[0].recipe
    assert backward and not any("/backward/" in key for key in backward)
