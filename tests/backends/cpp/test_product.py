"""Matrix products by the C++ provider against einsum in float64: wherever factors lie, by any number of threads."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import wholestep as ws
from wholestep.backends import cpp
from wholestep.backends.cpp import product
from wholestep.backends.kernels import Spec
from wholestep.backends.providers import Region, known_providers, providers_for
from wholestep.dialects.step import StepBuilder
from wholestep.dialects.strides import row_major
from wholestep.ir.builtin import add_function, finish_function, module
from wholestep.ir.types import BF16

from .kernels import tensor

pytestmark = pytest.mark.skipif(bool(cpp.missing()), reason=cpp.missing())

DRAW = torch.Generator().manual_seed(5)


def numbers(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=DRAW)


#: an equation, its operands, and memory for the result where it is not row by row
CASES = {
    "one tile": ("mk,kn->mn", lambda: (numbers(14, 8), numbers(8, 32)), None),
    "one number": ("mk,kn->mn", lambda: (numbers(1, 3), numbers(3, 1)), None),
    "edges": ("mk,kn->mn", lambda: (numbers(37, 29), numbers(29, 51)), None),
    "a narrow edge": ("mk,nk->mn", lambda: (numbers(15, 70), numbers(33, 70)), None),
    "both turned": ("km,nk->mn", lambda: (numbers(45, 61), numbers(67, 45)), None),
    "weight gradient": ("abn,abk->nk", lambda: (numbers(4, 9, 16), numbers(4, 9, 40)), None),
    "rows 2 KB apart": ("mk,nk->mn", lambda: (numbers(40, 512), numbers(24, 512)), None),
    "sums in parts": ("mk,kn->mn", lambda: (numbers(29, 1100), numbers(1100, 40)), None),
    "sums in parts, bias": ("mk,nk->mn", lambda: (numbers(29, 1100), numbers(45, 1100), numbers(45)), None),
    "more panels than there are at a time": ("mk,kn->mn", lambda: (numbers(3, 5), numbers(5, 4200)), None),
    "batch": ("zmk,zkn->zmn", lambda: (numbers(5, 17, 12), numbers(5, 12, 35)), None),
    "a batch in pieces": ("zmk,znk->zmn", lambda: (numbers(150, 3, 4), numbers(150, 5, 4)), None),
    "bias": ("mk,nk->mn", lambda: (numbers(32, 16), numbers(24, 16), numbers(24)), None),
    "written along columns": ("mk,nk->nm", lambda: (numbers(50, 16), numbers(24, 16), numbers(50)), None),
    "images": ("abc,db->acd", lambda: (numbers(4, 8, 16), numbers(24, 8), numbers(24)), None),
    "slices": ("mk,nk->mn", lambda: (numbers(20, 50)[:, 3:40], numbers(70, 37)[::2]), None),
    "spread": ("mk,kn->mn", lambda: (numbers(1, 21).expand(16, 21), numbers(21, 1).expand(21, 9)), None),
    "a part of a whole": ("mk,nk->mn", lambda: (numbers(32, 16), numbers(24, 16)), lambda: numbers(32, 100)[:, 8:32]),
}


def region_of(spec, operands, result, **kind):
    """A contraction as a region by itself."""
    function = add_function(module(), "product", [tensor(*x.shape, **kind) for x in operands])
    block = function.regions[0].block
    finish_function(function, [StepBuilder(block).contract(*[*block.arguments, None][:3], spec=spec)])
    specs = [Spec(tuple(x.shape), x.stride(), x.dtype) for x in (*operands, result)]
    return Region(function, None, tuple(specs[:-1]), (specs[-1],), torch.device("cpu"))


def run(spec, operands, result):
    """By the provider, in memory that holds something else before; what lies behind its scratch memory stays."""
    it = region_of(spec, operands, result)
    assert product.runs(it) and product.why_not(it) == ""
    (offer,) = product.offers(it)
    (scratch,) = offer.scratch
    (size,) = scratch.shape
    memory = torch.full((size + 64,), 3.5)
    product.build([offer])[offer.key](*operands, result, memory[:size])
    assert (memory[size:] == 3.5).all()
    return result


@pytest.mark.parametrize("case", CASES)
def test_it_is_the_contraction(case, threads):
    spec, make, where = CASES[case]
    x, y, *bias = operands = make()
    wanted = torch.einsum(spec, x.double(), y.double()) + (bias[0].double() if bias else 0)
    result = torch.full(wanted.shape, float("nan")) if where is None else where()
    whole = result if result._base is None else result._base
    around = whole.clone()
    before = [t.clone() for t in operands]
    run(spec, operands, result)
    size = torch.einsum(spec, x.double().abs(), y.double().abs()) + (bias[0].double().abs() if bias else 0)
    assert ((result.double() - wanted).abs() <= 1e-6 * size).all()
    assert all(torch.equal(t, b) for t, b in zip(operands, before, strict=True))
    result.copy_(around.as_strided(result.shape, result.stride(), result.storage_offset()))
    torch.testing.assert_close(whole, around, rtol=0, atol=0, equal_nan=True)


def test_sums_do_not_depend_on_threads():
    operands, found = (numbers(75, 1300), numbers(200, 1300)), []
    before = torch.get_num_threads()
    for count in (1, 2, 3, 8):
        torch.set_num_threads(count)
        found.append(run("mk,nk->mn", operands, torch.empty(75, 200)))
    torch.set_num_threads(before)
    assert all(torch.equal(found[0], other) for other in found)


def test_what_is_not_finite_stays_where_it_is():
    x, y = numbers(30, 20), numbers(20, 50)
    x[4, 7], y[3, 49] = float("inf"), float("nan")
    found = run("mk,kn->mn", (x, y), torch.empty(30, 50))
    expected = x @ y
    assert torch.equal(found.isfinite(), expected.isfinite()) and torch.equal(found.isnan(), expected.isnan())


def test_what_is_not_taken():
    def why(spec, operands, *shape, dtype=torch.float32, **kind):
        return product.why_not(region_of(spec, operands, torch.empty(shape, dtype=dtype), **kind))

    low = [numbers(4, 8).bfloat16(), numbers(8, 4).bfloat16()]
    assert "float32" in why("mk,kn->mn", low, 4, 4, dtype=torch.bfloat16, e=BF16)
    assert "copied" in why("bqhd,bkhd->bhqk", [numbers(2, 8, 3, 16), numbers(2, 9, 3, 16)], 2, 3, 8, 9)


def test_a_step_takes_it_where_it_is_faster(monkeypatch):
    """The clock decides, here one that says so; gradients are PyTorch's."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(48, 96), nn.Tanh(), nn.Linear(96, 10))
    twin = nn.Sequential(nn.Linear(48, 96), nn.Tanh(), nn.Linear(96, 10))
    twin.load_state_dict(model.state_dict())
    batch = torch.randn(64, 48), torch.randint(0, 10, (64,))
    ran = []
    launcher = product.launcher
    monkeypatch.setattr(product, "launcher", lambda *given: counted(launcher(*given), ran))
    monkeypatch.setattr("wholestep.backends.choose.MARGIN_OF_PRODUCTS", 1e9)
    step = ws.compile(
        model, nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), 0.1), batch, providers=["aten", "cpp"]
    )
    ran.clear()
    loss = step(*batch)
    assert len(ran) == 5, "two products forward, three backward: nobody wants the gradient of the batch"
    assert step.report().kernels.families["contraction"].launches == 5
    expected = nn.functional.cross_entropy(twin(batch[0]), batch[1])
    expected.backward()
    torch.optim.SGD(twin.parameters(), 0.1).step()
    torch.testing.assert_close(loss, expected.detach())
    for own, other in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(own, other, rtol=1e-5, atol=1e-6)


def counted(run, ran):
    def counting(*tensors):
        ran.append(1)
        run(*tensors)

    return counting


def test_it_competes_with_pytorch_alone():
    assert "cpp" in known_providers()
    found = {p.name: p for p in providers_for(torch.device("cpu"), None)}
    it = region_of("mk,kn->mn", (numbers(4, 8), numbers(8, 4)), torch.empty(4, 4))
    assert found["cpp"].claims(it) == "" and found["cpp"].at_once(it)
    assert [o.name for o in found["cpp"].offers(it)] == ["product"]


def test_memory_is_bounded():
    """Of a vocabulary's columns only some are side by side at a time."""
    huge = region_of("mk,nk->mn", (torch.empty(64, 4096), torch.empty(50000, 4096)), torch.empty(64, 50000))
    (offer,) = product.offers(huge)
    assert offer.scratch[0].bytes == 128 * 32 * 512 * 4
    assert row_major(offer.scratch[0].shape) == (1,)
