"""Attention by the C++ provider against PyTorch's formula and its autograd in float64; what it takes, and what not."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import wholestep as ws
from wholestep.backends import cpp
from wholestep.backends.cpp import attention
from wholestep.backends.kernels import Spec
from wholestep.backends.providers import Region
from wholestep.dialects.step import StepBuilder
from wholestep.ir.builtin import add_function, finish_function, module
from wholestep.ir.types import BF16

from .kernels import tensor

pytestmark = pytest.mark.skipif(bool(cpp.missing()), reason=cpp.missing())

#: batch, heads of q and of k, rows, keys, columns of q and of v, whether causal
CASES = {
    "one number": (1, 1, 1, 1, 1, 1, 1, False),
    "a sequence": (2, 3, 3, 64, 64, 32, 32, False),
    "causal": (2, 3, 3, 150, 150, 32, 32, True),
    "odd sizes": (3, 2, 2, 37, 53, 20, 24, False),
    "more rows than keys, causal": (2, 2, 2, 75, 41, 17, 9, True),
    "fewer rows than keys, causal": (2, 2, 2, 41, 75, 16, 40, True),
    "shared keys": (2, 6, 2, 70, 70, 16, 16, True),
    "one head of keys": (1, 5, 1, 33, 60, 8, 8, False),
    "many keys": (1, 2, 2, 20, 3000, 16, 16, False),
    "keys a power of two": (1, 2, 2, 64, 1024, 16, 16, True),
    "wide": (1, 2, 2, 30, 45, 256, 200, True),
}
DRAW = torch.Generator().manual_seed(11)


def numbers(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=DRAW)


def by_rows(batch, heads, rows, columns):
    """Heads lie beside each other in a row, as a projection leaves them."""
    return numbers(batch, rows, heads, columns).transpose(1, 2)


def region_of(operands, results, mask=None, e=None, **options):
    """An attention, or the gradients of one where dout comes first, as a region by itself."""
    kind = {} if e is None else {"e": e}
    given = [*operands, *([] if mask is None else [mask])]
    function = add_function(module(), "attention", [tensor(*x.shape, **kind) for x in given])
    b, (*values, last) = StepBuilder(function.regions[0].block), function.regions[0].block.arguments
    values, masked = (values, last) if mask is not None else ([*values, last], None)
    made = (b.attention if len(operands) == 3 else b.attention_grad)(*values, masked, **options)
    finish_function(function, list(made))
    specs = [Spec(tuple(x.shape), x.stride(), x.dtype) for x in (*given, *results)]
    return Region(function, None, tuple(specs[: len(given)]), tuple(specs[len(given) :]), torch.device("cpu"))


def run(operands, results, **options):
    """By the provider, in memory that holds something else before; what lies behind its scratch memory stays."""
    it = region_of(operands, results, **options)
    assert attention.runs(it) and attention.why_not(it) == ""
    (offer,) = attention.offers(it)
    (size,) = offer.scratch[0].shape
    memory = torch.full((size + 64,), 3.5)
    attention.build([offer])[offer.key](*operands, *results, memory[:size])
    assert (memory[size:] == 3.5).all()
    return results


def both(batch, heads, others, rows, keys, width, value_width, causal, scale=0.3):
    """Results and gradients by the provider, with what was given."""
    q, k = by_rows(batch, heads, rows, width), by_rows(batch, others, keys, width)
    v, dout = by_rows(batch, others, keys, value_width), by_rows(batch, heads, rows, value_width)
    options = {"causal": causal, "scale": scale, "enable_gqa": heads != others}
    out, sums = torch.full_like(dout, 7.0), torch.full((batch, heads, rows), 7.0)
    run([q, k, v], [out, sums], **options)
    gradients = [torch.full_like(x, 7.0) for x in (q, k, v)]
    run([dout, q, k, v, out, sums], gradients, **options)
    return (q, k, v, dout), (out, sums), gradients


@pytest.mark.parametrize("case", CASES)
def test_it_is_the_formula(case, threads):
    *_, causal = sizes = CASES[case]
    (q, k, v, dout), (out, sums), gradients = both(*sizes)
    inputs = [x.double().requires_grad_() for x in (q, k, v)]
    shared = q.size(1) // k.size(1)
    keys, values = (x.repeat_interleave(shared, 1) for x in inputs[1:])
    scores = inputs[0] @ keys.mT * 0.3
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), float("-inf"))
    expected = scores.softmax(-1) @ values
    expected.backward(dout.double())
    torch.testing.assert_close(out.double(), expected.detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(sums.double(), scores.detach().logsumexp(-1), rtol=1e-6, atol=1e-5)
    for made, x in zip(gradients, inputs, strict=True):
        torch.testing.assert_close(made.double(), x.grad, rtol=1e-5, atol=2e-5)


def test_results_do_not_depend_on_threads():
    found, before = [], torch.get_num_threads()
    for count in (1, 2, 3, 8):
        DRAW.manual_seed(2)
        torch.set_num_threads(count)
        _, results, gradients = both(1, 3, 3, 90, 90, 16, 16, True)
        found.append([*results, *gradients])
    torch.set_num_threads(before)
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))


def test_large_scores_and_a_negative_scale():
    (q, k, v, _), (out, _), gradients = both(1, 2, 2, 40, 50, 8, 8, False, scale=-60.0)
    expected = (q.double() @ k.double().mT * -60.0).softmax(-1) @ v.double()
    torch.testing.assert_close(out.double(), expected, rtol=1e-3, atol=1e-3)
    assert all(x.isfinite().all() for x in gradients)


def test_what_is_not_taken():
    q, out, sums = by_rows(2, 2, 8, 4), by_rows(2, 2, 8, 4), numbers(2, 2, 8)
    options = {"causal": False, "scale": 1.0, "enable_gqa": False}

    def why(q=q, k=q, mask=None, out=out, **more):
        return attention.why_not(region_of([q, k, k], [out, sums], mask, **options, **more))

    assert why() == ""
    assert why(mask=numbers(8, 8)) == "it has a mask"
    assert "float32" in why(q.bfloat16(), q.bfloat16(), out=out.bfloat16(), e=BF16)
    assert why(numbers(2, 2, 4, 8).mT) == "its rows are not neighbours in memory"
    assert "too long" in why(by_rows(2, 2, 8, 300), by_rows(2, 2, 8, 300), out=by_rows(2, 2, 8, 300))
    assert "too long" in why(k=by_rows(2, 2, 40_000, 4))
    rank = region_of([numbers(2, 8, 4)] * 3, [numbers(2, 8, 4), numbers(2, 8)], **options)
    assert attention.why_not(rank) == "it has no batch of heads"


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mixed, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.mixed(x).unflatten(-1, (3, 4, 4)).permute(2, 0, 3, 1, 4)
        made = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(made.transpose(1, 2).flatten(2))


def test_a_step_takes_it_where_it_is_faster(monkeypatch):
    """The clock decides, here one that says so; gradients are PyTorch's."""
    torch.manual_seed(0)
    model, twin = Attends(), Attends()
    twin.load_state_dict(model.state_dict())
    batch = torch.randn(3, 20, 16), torch.randn(3, 20, 16)
    monkeypatch.setattr("wholestep.backends.choose.MARGIN", 1e9)
    optimizers = [torch.optim.SGD(m.parameters(), 0.1) for m in (model, twin)]
    step = ws.compile(model, nn.MSELoss(), optimizers[0], batch, providers=["aten", "cpp"])
    by = {launch.name: launch.provider for launch in step.plan().launches}
    assert by["step.attention"] == by["step.attention_grad"] == "cpp"
    for _ in range(3):
        loss = step(*batch)
        optimizers[1].zero_grad()
        expected = nn.functional.mse_loss(twin(batch[0]), batch[1])
        expected.backward()
        optimizers[1].step()
        torch.testing.assert_close(loss, expected.detach())
    for own, other in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(own, other, rtol=1e-5, atol=1e-6)


def test_what_was_measured_holds_where_nothing_is_timed(monkeypatch):
    """`tune=False` takes a known winner for an op that stands alone, and ATen where none is known."""
    monkeypatch.setattr("wholestep.backends.choose.MARGIN", 1e9)

    def provider(rows: int, tune: bool) -> str:
        model = Attends()
        batch = torch.randn(2, rows, 16), torch.randn(2, rows, 16)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        step = ws.compile(model, nn.MSELoss(), optimizer, batch, providers=["aten", "cpp"], tune=tune)
        return next(launch.provider for launch in step.plan().launches if launch.name == "step.attention")

    assert provider(12, tune=True) == provider(12, tune=False) == "cpp"
    assert provider(14, tune=False) == "aten"
