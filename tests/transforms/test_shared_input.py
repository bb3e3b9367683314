"""`shared_input`: layers that read one input are one product; losses, gradients and updates stay those of PyTorch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import wholestep as ws
from tests.plan.networks import Case
from tests.runtime.runs import data
from wholestep.dialects.step.contraction import Contract
from wholestep.ir.core import Op
from wholestep.ir.passes import run_pipeline
from wholestep.ir.verify import verify
from wholestep.transforms import shared_input
from wholestep.transforms.opportunity import take, transformations

ROWS, LENGTH, WIDTH = 8, 16, 16


class Attention(nn.Module):
    """Queries, keys and values of one input, with a norm before; `keys` is the width of keys and values."""

    def __init__(self, keys: int = WIDTH, bias: bool = True, turned: bool = False):
        super().__init__()
        self.norm, self.out, self.turned = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), turned
        self.q = nn.Linear(WIDTH, WIDTH, bias)
        self.k, self.v = nn.Linear(WIDTH, keys, bias), nn.Linear(WIDTH, keys, bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        q, k, v = (layer(y).unflatten(-1, (-1, 8)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        if self.turned:  # as rotary positions do: what the layers give is not kept for backward
            places = torch.arange(LENGTH).unsqueeze(1) * torch.arange(1, 9) * 0.1
            q, k = q * places.cos(), k * places.cos()
        few = k.shape[1] != q.shape[1]
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=few)
        return x + self.out(y.transpose(1, 2).flatten(2))


class Gated(nn.Module):
    """Two layers of one input, of which one gates the other; `frozen` and `tied` change the second."""

    def __init__(self, width: int = 24, frozen: bool = False, tied: bool = False, third: bool = False):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, width), nn.Linear(WIDTH, width)
        self.down, self.third = nn.Linear(width, WIDTH), nn.Linear(WIDTH, width) if third else None
        self.second.weight.requires_grad_(not frozen)
        self.tied = tied

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.silu(self.first(x)) * self.second(x)
        if self.third is not None:
            self.third(x)  # nobody reads it
        again = F.linear(torch.tanh(x), self.second.weight).mean() if self.tied else 0.0
        return x + self.down(y) + again


def loss_of(y: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return ((y - target) ** 2).mean()


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    return data(ROWS, LENGTH, WIDTH), data(ROWS, LENGTH, WIDTH, seed=1)


def net(make: Callable[[], nn.Module], count: int = 2) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), *(make() for _ in range(count)))


def trained(model: nn.Module, dtype: torch.dtype | None = None, **options: Any) -> tuple[list[float], list[str]]:
    """Two steps: eager in a dtype (f32 by autocast to bf16 where that is the dtype), or compiled with options."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    if options:
        step = ws.compile(model, loss_of, optimizer, batch(), providers=["aten"], clip_norm=0.5, **options)
        return [float(step(*batch())) for _ in range(2)], step.recipe
    losses = []
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype is torch.bfloat16):
            loss = loss_of(model.to(wide)(batch()[0].to(wide)), batch()[1].to(wide))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses, []


def products(module: Op, phase: str) -> int:
    return sum(op.definition is Contract and op.phase == phase for op in module.walk())


def distance(one: nn.Module, other: nn.Module) -> float:
    pairs = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    return max(float((x.double() - y.double()).abs().max()) for x, y in pairs)


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "attention": Attention,
    "fewer keys": lambda: Attention(8, bias=False, turned=True),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_trains_as_eager_does(name: str) -> None:
    model = net(NETWORKS[name], 1)
    eager, exact, mixed, low = (copy.deepcopy(model) for _ in range(4))
    losses, recipe = trained(model, force=["shared_input"])
    assert len(recipe) == 1
    torch.testing.assert_close(losses, trained(eager)[0], rtol=1e-5, atol=1e-6)
    assert distance(model, eager) < 1e-5
    # in bf16 it is as near to the truth as eager's own autocast is
    losses, recipe = trained(low, force=["shared_input"], precision="bf16")
    assert len(recipe) == 1
    truth = trained(exact.double(), torch.float64)[0]
    torch.testing.assert_close(losses, truth, rtol=1e-2, atol=1e-2)
    trained(mixed, torch.bfloat16)
    assert distance(low, exact) < 1.25 * distance(mixed, exact)


@pytest.mark.parametrize(
    "make, forward, backward",
    [
        # forward: the first, one for three layers, the last; backward: two each, but for the input of all
        (Attention, 2 * 2 + 1, 2 * 4 + 1),
        # what backward reads, values, must not keep what it does not read
        (lambda: Attention(bias=False, turned=True), 2 * 3 + 1, 2 * 4 + 1),
        (Gated, 2 * 2 + 1, 2 * 4 + 1),
        (lambda: Gated(third=True), 2 * 2 + 1, 2 * 4 + 1),
        # rows of 20 bytes are not read in parts; backward reads no parts of rows
        (lambda: Gated(width=5), 2 * 3 + 1, 2 * 4 + 1),
        # frozen: only forward; tied: neither
        (lambda: Gated(frozen=True), 2 * 2 + 1, 2 * 5 + 1),
        (lambda: Gated(tied=True), 2 * 4 + 1, 2 * 8 + 1),
    ],
    ids=["attention", "turned", "gated", "unused", "unaligned", "frozen", "tied"],
)
def test_what_becomes_one_product(make: Callable[[], nn.Module], forward: int, backward: int) -> None:
    case = Case((net(make), loss_of, batch()), "sgd")
    done = take(case.program.module, ("shared_input",))
    verify(case.program.module)
    run_pipeline(case.program.module, "cse,dce")
    assert (products(case.program.module, "forward"), products(case.program.module, "backward")) == (forward, backward)
    assert len(done) == (0 if backward == 2 * 8 + 1 else 2)
    assert all(o.why_not for o in transformations()["shared_input"].find(case.program.module))


def test_in_16_bits_what_is_turned_alone_is_left_to_its_product() -> None:
    case = Case((net(lambda: Attention(bias=False, turned=True)), loss_of, batch()), "sgd", precision="bf16")
    assert len(take(case.program.module, ("shared_input",))) == 2
    run_pipeline(case.program.module, "cse,dce")
    assert products(case.program.module, "forward") == 2 * 4 + 1  # all apart; backward has them joined
    assert products(case.program.module, "backward") == 2 * 4 + 1


class Read(nn.Module):
    """Two layers of one input whose outputs are read in a way that parts of rows do not allow."""

    def __init__(self, how: str):
        super().__init__()
        self.first, self.second, self.how = nn.Linear(WIDTH, 8), nn.Linear(WIDTH, 8), how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        one, two = self.first(x), self.second(x)
        if self.how == "flat":
            one, two = one.flatten(1).sin(), two.flatten(1).cos()
        elif self.how == "sorted":
            one, two = one.sort(-1).values, two.sort(-1).values
        return one * two


@pytest.mark.parametrize("how, reason", [("flat", "would copy its part"), ("sorted", "must lie on its own")])
def test_refuses_what_would_be_copied(how: str, reason: str) -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Read(how))
    target = data(ROWS, LENGTH * 8) if how == "flat" else data(ROWS, LENGTH, 8)
    case = Case((model, loss_of, (batch()[0], target)), "sgd")
    layers = shared_input.beside_one_another(case.program.function.regions[0].block)[0]
    reasons: list[str] = []
    assert shared_input.forward_parts(layers, reasons) == []
    assert reason in reasons[0] and "1.first" in reasons[0]


@pytest.mark.parametrize("rows, why_not", [(2, "costs more than one product saves"), (64, "")])
def test_few_rows_stay_apart(rows: int, why_not: str) -> None:
    """With few rows the weights are larger than what is read once less."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Gated())
    case = Case((model, loss_of, (data(rows, WIDTH), data(rows, WIDTH, seed=1))), "sgd")
    (found,) = transformations()["shared_input"].find(case.program.module)
    assert why_not in found.why_not if why_not else not found.why_not and found.change.bytes < 0


def test_micro_batches_and_recipes() -> None:
    model = net(Gated)
    again, eager = copy.deepcopy(model), copy.deepcopy(model)
    losses, recipe = trained(model, force=["shared_input"], accumulate=2)
    assert recipe and trained(again, recipe=recipe, accumulate=2) == (losses, recipe)
    assert distance(model, again) == 0
    torch.testing.assert_close(losses, trained(eager)[0], rtol=1e-5, atol=1e-6)
    assert distance(model, eager) < 1e-5
