"""`sums_through`: bias gradients of keys and values without a look at theirs are the same numbers, up to rounding."""

from __future__ import annotations

import copy
import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import wholestep as ws
from tests.dialects.loop.provider import LoopReference, registered
from tests.plan.networks import Case, TinyGPT, next_word
from tests.runtime.runs import adamw, data, fresh
from tests.transforms.test_fuse import program, root_of
from tests.transforms.test_through_norm import changes, counted
from wholestep import api
from wholestep.dialects.step import torch_dtype
from wholestep.ir.core import Op, Value
from wholestep.ir.passes import run_pipeline
from wholestep.ir.types import BF16, F32, F64, ScalarType, TensorType
from wholestep.ir.verify import verify
from wholestep.runtime.executor import Executable
from wholestep.transforms import sums_through
from wholestep.transforms.opportunity import opportunities, take, transformations

NAME = "sums_through"
BEFORE = ("shared_input", "join_slices")
ROWS, LENGTH, WIDTH, HEADS = 4, 16, 16, 2
QUERIES = "gradients of queries sum up to nothing that is known before"
MASKED = "probabilities of a position that sees nothing do not sum up to 1, and its mask may hide all from one"
NOT_THERE = "the gradient of attention's result would have to be summed up instead"


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sums_through, "LEAST", 0)


class Attention(nn.Module):
    """One projection or three, and whatever else people do to attention."""

    def __init__(self, joined: bool = False, keys: int = WIDTH, bias: bool = True, turned: bool = False, **how: Any):
        super().__init__()
        self.joined, self.turned, self.how = joined, turned, how
        self.sizes = (WIDTH, keys, keys)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, n) for n in ([sum(self.sizes)] if joined else self.sizes))
        self.out = nn.Linear(WIDTH, WIDTH, bias)
        self.register_buffer("seen", data(ROWS, 1, LENGTH, LENGTH) > -0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = [p for layer in self.layers for p in (layer(x).split(self.sizes, -1) if self.joined else [layer(x)])]
        q, k, v = (p.unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for p in parts)
        if self.turned:
            places = torch.arange(LENGTH).unsqueeze(1) * torch.arange(1, WIDTH // HEADS + 1) * 0.1
            q, k = q * places.cos(), k * places.cos()
        how = self.how | ({"attn_mask": self.seen} if self.how.get("attn_mask") else {})
        y = F.scaled_dot_product_attention(q, k, v, enable_gqa=k.shape[1] != q.shape[1], **how)
        return self.out(y.transpose(1, 2).flatten(2))

    def biases(self) -> list[torch.Tensor]:
        """Of queries, keys and values."""
        return [b for layer in self.layers for b in layer.bias.detach().split(self.sizes if self.joined else WIDTH)]


class Multihead(nn.Module):
    """PyTorch's own, with sequences first inside: heads and batches are one dimension for a while."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.inner(x, x, x, need_weights=False)[0]
        return y

    def biases(self) -> list[torch.Tensor]:
        return [*self.inner.in_proj_bias.detach().split(WIDTH)]


class Cross(nn.Module):
    """More keys than queries, and fewer with `flip`; under `causal` a query sees keys up to its own place."""

    def __init__(self, flip: bool) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.flip = flip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        short, long = x[:, : LENGTH // 2], x
        given, seen = (long, short) if self.flip else (short, long)
        q, k, v = (
            layer(y).unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for layer, y in ((self.q, given), (self.k, seen), (self.v, seen))
        )
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))

    def biases(self) -> list[torch.Tensor]:
        return [layer.bias.detach() for layer in (self.q, self.k, self.v)]


#: networks, how many sums have another way, and whether values are among those
NETWORKS: dict[str, tuple[Any, int, bool]] = {
    "one projection": (lambda: Attention(joined=True), 1, True),
    "three": (Attention, 2, True),
    "causal": (lambda: Attention(is_causal=True), 2, True),
    "grouped heads": (lambda: Attention(keys=WIDTH // HEADS), 2, True),
    "grouped heads of one projection": (lambda: Attention(joined=True, keys=WIDTH // HEADS, is_causal=True), 1, True),
    "mask": (lambda: Attention(attn_mask=True), 1, False),
    "mask of one projection": (lambda: Attention(joined=True, attn_mask=True), 1, False),
    "no bias behind": (lambda: Attention(bias=False), 1, False),
    "sequences first": (Multihead, 1, True),
    "more keys": (lambda: Cross(False), 2, True),
    "fewer keys": (lambda: Cross(True), 2, True),
}


def squares(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(model(x)).square().sum()


def case_of(make: Any, **options: Any) -> Case:
    return Case((fresh(make), squares, (data(ROWS, LENGTH, WIDTH),)), "sgd", **options)


def looked_at(function: Op) -> list[Op]:
    """Ops whose results sums over many rows read, seen through views and concatenations."""
    pending = [op.operands[0] for op in function.regions[0].block if op.name == "step.sum" and op.x.type.rank > 1]
    found = []
    while pending:
        op = pending.pop().op
        if op is not None and op.name in ("step.reshape", "step.transpose", "step.cast", "step.concat", "step.slice"):
            pending += op.operands
        elif op is not None:
            found.append(op)
    return found


# ---- the same numbers ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NETWORKS)
def test_gradients_are_autograds(name: str) -> None:
    make, count, values = NETWORKS[name]
    model, x = fresh(make).double(), data(ROWS, LENGTH, WIDTH).double()
    twin, first = copy.deepcopy(model), [b.clone() for b in model.biases()]
    optimizer, other = (torch.optim.SGD(m.parameters(), lr=0.01) for m in (model, twin))
    force = [*(["join_slices"] if count == 1 and name not in ("mask", "no bias behind") else []), NAME]
    step = ws.compile(model, squares, optimizer, (x,), providers=["aten"], force=force)
    assert sum(key.startswith(f"{NAME} ") for key in step.recipe) == count
    for _ in range(3):
        expected = squares(twin, x)
        expected.backward()
        other.step()
        other.zero_grad()
        torch.testing.assert_close(step(x).double(), expected.detach(), rtol=1e-6, atol=0)
    for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-11)
    q, k, v = (torch.equal(a, b) for a, b in zip(model.biases(), first, strict=True))
    assert (q, k, v) == (False, True, False)
    assert values == (not any(MASKED in o.why_not or NOT_THERE in o.why_not for o in step.opportunities()))


@pytest.mark.parametrize("name", NETWORKS)
def test_in_bf16_they_are_as_near_as_before(name: str) -> None:
    exact, case = (case_of(NETWORKS[name][0], precision=p) for p in ("fp32", "bf16"))
    wanted, before = changes(exact), changes(case)
    take(case.program.module, BEFORE)
    assert take(case.program.module, [NAME])
    verify(case.program.module)
    run_pipeline(case.program.module, "cse,dce")
    for key, new in changes(case).items():
        old, now = (float((x - wanted[key]).norm() / wanted[key].norm()) for x in (before[key], new))
        assert now <= 1.5 * old + 1e-3, (key, old, now)


def test_with_dropout_keys_have_none_and_values_are_summed() -> None:
    """Attention is then softmax and two products."""
    for precision in ("fp32", "bf16"):
        case = case_of(lambda: Attention(dropout_p=0.5), precision=precision)
        before, sums = changes(case), counted(case.program.function, "sum")
        assert len(take(case.program.module, [NAME])) == 1
        verify(case.program.module)
        run_pipeline(case.program.module, "cse,dce")
        assert counted(case.program.function, "sum") == sums - 1
        for key, new in changes(case).items():
            torch.testing.assert_close(new, before[key], rtol=2e-2, atol=1e-6 if precision == "fp32" else 2e-3)


def test_rotary_positions_are_left_alone() -> None:
    """The same vector added to all keys before they are turned is another for each position."""
    found = opportunities(case_of(lambda: Attention(turned=True)).program.module, names=[NAME])
    assert [not o.why_not for o in found] == [True]  # values are not turned
    assert ".2/backward/sum#" in found[0].site


# ---- which sums ------------------------------------------------------------------------------------------------------


def behind_a_norm(joined: bool = False) -> Case:
    """Layers that `shared_input` makes one."""
    model = fresh(lambda: nn.Sequential(nn.LayerNorm(WIDTH), Attention(joined)))
    return Case((model, squares, (data(2 * ROWS, LENGTH, WIDTH),)), "sgd")


@pytest.mark.parametrize("joined", [True, False])
def test_only_queries_are_read(joined: bool) -> None:
    case = behind_a_norm(joined)
    take(case.program.module, BEFORE)
    assert len(take(case.program.module, [NAME])) == 1
    run_pipeline(case.program.module, "cse,dce")
    block = case.program.function.regions[0].block
    seen = [op for op in looked_at(case.program.function) if op.name == "step.attention_grad"]
    assert len(seen) == 1  # of the three that it has
    assert any(op.name == "step.sum" and op.x.type.shape == (WIDTH, WIDTH) for op in block)  # that of values
    if not joined:  # who read slices of the sum reads parts
        assert not any(op.name == "step.slice" and op.result.type.rank == 1 for op in block if op.phase == "backward")


def gradients(element: ScalarType, which: int, dims: tuple[int, ...], shared: int = 1, **how: Any) -> Op:
    """A sum of one of attention's gradients, whose result's gradient is a product that has a bias behind it."""
    heads, few = (2, 2 * shared, 32, 4), (2, 2, 32, 4)
    rows, weight = TensorType((2, 32, 6), element), TensorType((6, 8 * shared), element)

    def build(b: Any, dy: Value, w: Value, q: Value, k: Value, v: Value) -> list[Value]:
        out, logsumexp = b.attention(q, k, v, scale=0.5, enable_gqa=shared > 1, **how)
        bias = b.sum(dy, dims=(0, 1))
        dout = b.transpose(
            b.reshape(b.contract(dy, w, spec="abn,nk->abk"), shape=(2, 32, 2 * shared, 4)), order=(0, 2, 1, 3)
        )
        made = b.attention_grad(dout, q, k, v, out, logsumexp, scale=0.5, enable_gqa=shared > 1, **how)
        return [bias, b.sum(made[which], dims=dims)]

    return program([rows, weight, *(TensorType(s, element) for s in (heads, few, few))], build)


def inputs_of(function: Op) -> list[torch.Tensor]:
    types = [v.type for v in function.regions[0].block.arguments]
    return [data(*t.shape, seed=i).to(torch_dtype(t.element)) for i, t in enumerate(types)]


SUBSETS = [dims for n in range(5) for dims in itertools.combinations(range(4), n)]


@pytest.mark.parametrize("which, shared", [(0, 1), (1, 1), (1, 3), (2, 1), (2, 3)])
def test_any_dimensions(which: int, shared: int) -> None:
    """Nothing is done but to sums over positions; to values' where they are over all rows, as a bias's are."""
    rows = [(0, 2), (0, 1, 2), (0, 2, 3)]
    for dims, causal in itertools.product(SUBSETS, (False, True)):
        function = gradients(F64, which, dims, shared, causal=causal)
        inputs = inputs_of(function)
        before = Executable(function)(inputs)
        assert bool(take(root_of(function), [NAME])) == {0: False, 1: 2 in dims, 2: dims in rows}[which], dims
        verify(root_of(function))
        for old, new in zip(before, Executable(function)(inputs), strict=True):
            torch.testing.assert_close(new, old, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("element", [F32, BF16])
@pytest.mark.parametrize("which", [1, 2])
def test_results_keep_their_types(element: ScalarType, which: int) -> None:
    function = gradients(element, which, (0, 2))
    before = Executable(function)(inputs_of(function))
    assert len(take(root_of(function), [NAME])) == 1
    verify(root_of(function))
    near = dict(rtol=1e-4, atol=1e-4) if element is F32 else dict(rtol=5e-2, atol=0.5)
    for old, new in zip(before, Executable(function)(inputs_of(function)), strict=True):
        torch.testing.assert_close(new, old, **near)


def test_why_not() -> None:
    def reasons(make: Any, *names: str) -> dict[str, str]:
        case = case_of(make)
        take(case.program.module, names)
        found = transformations()[NAME].find(case.program.module)
        assert found == transformations()[NAME].find(case.program.module)
        return {o.site.split("/")[1]: o.why_not for o in found}

    layers = [f"layers.{i}" for i in range(3)]
    assert reasons(Attention) == dict(zip(layers, (QUERIES, "", ""), strict=True))
    assert reasons(lambda: Attention(attn_mask=True)) == dict(zip(layers, (QUERIES, "", MASKED), strict=True))
    assert reasons(lambda: Attention(bias=False)) == dict(zip(layers, (QUERIES, "", NOT_THERE), strict=True))
    assert reasons(lambda: Attention(joined=True), "join_slices") == {"layers.0": ""}
    (found,) = opportunities(root_of(gradients(F32, 1, (0,))), names=[NAME])
    assert found.why_not == "it is no sum over all positions"
    (found,) = opportunities(root_of(gradients(F32, 2, (2,))), names=[NAME])  # no bias's gradient is one of each image
    assert found.why_not == NOT_THERE


def test_small_sums_are_left_but_where_they_are_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sums_through, "LEAST", 1 << 20)
    found = opportunities(case_of(Attention).program.module, names=[NAME])
    small = "it is too small to be worth some small kernels more"
    assert sorted(o.why_not for o in found) == sorted(["", QUERIES, small])


def test_change() -> None:
    case = behind_a_norm()
    tensor, weight = 4 * 2 * ROWS * LENGTH * WIDTH, 4 * WIDTH * WIDTH

    def found() -> list[int]:
        return sorted(o.change.bytes for o in opportunities(case.program.module, names=[NAME]) if not o.why_not)

    assert found() == [-tensor, weight - tensor]
    take(case.program.module, ["shared_input"])
    assert found() == [weight - 2 * tensor]


# ---- whole steps -----------------------------------------------------------------------------------------------------


def test_a_gpt_trains_as_eager_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU. Keys' biases have no gradient here; eager's is noise, of which AdamW makes steps of its own size."""
    monkeypatch.setattr(api, "DEFAULTS", tuple(replace(d, device="") for d in api.DEFAULTS))
    model = fresh(TinyGPT)
    twin, ids = copy.deepcopy(model), torch.randint(0, 31, (16, 8), generator=torch.Generator().manual_seed(0))

    def loss(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
        return next_word(model(ids), ids)

    optimizer, other = (torch.optim.AdamW(m.parameters(), lr=1e-3, weight_decay=0.0) for m in (model, twin))
    keys = slice(16, 32)
    first = [layer.attention.qkv.bias.detach()[keys].clone() for layer in model.layers]
    with registered(LoopReference):
        step = ws.compile(model, loss, optimizer, (ids,), providers=["aten", "loops"], tune=False, verify=True)
        assert sum(key.startswith(f"{NAME} ") for key in step.recipe) == len(model.layers)
        for _ in range(4):
            expected = loss(twin, ids)
            expected.backward()
            other.step()
            other.zero_grad()
            torch.testing.assert_close(step(ids), expected.detach(), rtol=1e-5, atol=1e-6)
        again = copy.deepcopy(model)
        same = ws.compile(
            again, loss, adamw(again), (ids,), providers=["aten", "loops"], tune=False, recipe=step.recipe
        )
        assert same.recipe == step.recipe
        torch.testing.assert_close(same(ids), step(ids))
        loss(twin, ids).backward()
        other.step()
        plain = copy.deepcopy(model)
        options: Any = dict(providers=["aten", "loops"], tune=False, forbid=[NAME])
        without = ws.compile(plain, loss, torch.optim.SGD(plain.parameters()), (ids,), **options)
        assert "join_slices" in str(without.recipe) and NAME not in str(without.recipe)
    for old, layer, theirs in zip(first, model.layers, twin.layers, strict=True):
        assert torch.equal(old, layer.attention.qkv.bias[keys])
        with torch.no_grad():
            theirs.attention.qkv.bias[keys] = old
    for (name, mine), theirs in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=2e-5, msg=lambda m: f"{name}: {m}")  # noqa: B023
