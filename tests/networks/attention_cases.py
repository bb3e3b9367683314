"""Small networks whose attention computes what stands around it, in Triton's interpreter, beside eager PyTorch.

Run by `test_interpreted.py` in a process of its own: Triton reads TRITON_INTERPRET when it is imported.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import wholestep as ws
from wholestep.backends.providers import Triton, forget_provider, register_provider
from wholestep.transforms.around_attention import UNMEASURED

#: relative distance of losses, and of what parameters have changed by; the interpreter cuts bf16 off instead of
#: rounding it to nearest
LOSSES, CHANGES = {"fp32": 1e-5, "bf16": 2e-2}, {"fp32": 1e-4, "bf16": 5e-2}
HEADS, SHARED, WIDTH, ROWS, STEPS = 4, 2, 8, 19, 2
ATTENTION, GRADIENT = "step/-/forward/attention#0", "step/-/backward/attention_grad#0"
FORWARD = ["fuse *attention#0 <- *", "fuse * <- *attention#0"]
ALL = [*FORWARD, "fuse *attention_grad#0 <- *", "fuse * <- *attention_grad#0"]


class Interpreted(Triton):
    """The Triton provider where there is no GPU."""

    name, devices = "interpreted", ("cpu",)


@pytest.fixture(autouse=True)
def interpreted() -> Iterator[None]:
    register_provider(Interpreted)
    yield
    forget_provider(Interpreted.name)


class Rotary(nn.Module):
    """Attention with rotary positions, heads that share keys, and a gate behind it."""

    cos: torch.Tensor
    sin: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(24, (HEADS + 2 * SHARED) * WIDTH)
        self.out = nn.Linear(HEADS * WIDTH, 24)
        angle = torch.arange(ROWS)[:, None] * torch.logspace(0, -1, WIDTH // 2).repeat(2)
        self.register_buffer("cos", angle.cos())
        self.register_buffer("sin", angle.sin())

    def turned(self, x: torch.Tensor) -> torch.Tensor:
        one, other = x.chunk(2, -1)
        return x * self.cos + torch.cat((-other, one), -1) * self.sin

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.qkv(x).split([HEADS * WIDTH, SHARED * WIDTH, SHARED * WIDTH], -1)
        q, k, v = (t.view(*x.shape[:2], -1, WIDTH).transpose(1, 2) for t in parts)
        q, k = self.turned(q).to(v.dtype), self.turned(k).to(v.dtype)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.out(F.silu(y.transpose(1, 2).flatten(2)))


class Biased(nn.Module):
    """Attention with norms of queries and keys, a bias of positions that is learned, and a residual behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(24, 24) for _ in range(4))
        self.norm, self.bias = nn.RMSNorm(6), nn.Parameter(torch.randn(4, ROWS, ROWS) / 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (layer(x).view(*x.shape[:2], 4, 6).transpose(1, 2) for layer in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(self.norm(q), self.norm(k), v, attn_mask=self.bias)
        return self.out(x + torch.tanh(y.transpose(1, 2).flatten(2)))


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).float().square().mean()


def compiled(
    x: torch.Tensor, kind: type[nn.Module] = Rotary, **options: Any
) -> tuple[ws.TrainStep, nn.Module, list[float]]:
    torch.manual_seed(0)
    model = kind()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    step = ws.compile(model, loss_of, optimizer, (x,), providers=["aten", Interpreted.name], tune=False, **options)
    return step, model, [float(step(x)) for _ in range(STEPS)]


def eager(x: torch.Tensor, kind: type[nn.Module] = Rotary, low: bool = False) -> tuple[nn.Module, list[float]]:
    torch.manual_seed(0)
    model, losses = kind(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(STEPS):
        with torch.autocast("cpu", torch.bfloat16, enabled=low):
            loss = loss_of(model, x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return model, losses


def alone(step: ws.TrainStep) -> list[str]:
    """The attentions that are launches of their own."""
    names = [launch.name.removeprefix("step.") for launch in step.plan().launches]
    return [name for name in names if name.startswith("attention")]


def kernels_of(step: ws.TrainStep) -> list[set[str]]:
    """The ops of each kernel that has an attention."""
    lines = [line.removeprefix("fuse ").split(" + ") for line in step.recipe if line.startswith("fuse ")]
    return [set(sites) for sites in lines if ATTENTION in sites or GRADIENT in sites]


def trained_alike(kind: type[nn.Module], precision: str, force: list[str]) -> ws.TrainStep:
    """A step with forced kernels; losses and parameters are eager's."""
    torch.manual_seed(1)
    x = torch.randn(2, ROWS, 24)
    step, model, losses = compiled(x, kind, precision=precision, force=force)
    wanted, true = eager(x, kind, precision == "bf16")
    torch.testing.assert_close(losses, true, rtol=LOSSES[precision], atol=0)
    torch.manual_seed(0)
    for mine, own, first in zip(model.parameters(), wanted.parameters(), kind().parameters(), strict=True):
        assert (mine - own).norm() < CHANGES[precision] * (own - first).norm() + 1e-6
    return step


def test_norms_before_a_mask_that_is_learned() -> None:
    step = trained_alike(Biased, "fp32", ALL[:-1])  # (what reads the gradients also sums over rows)
    assert alone(step) == ["attention_mask_grad"]
    for site in ("*norm/forward/rms_norm#0", "*norm/forward/rms_norm#1", "*forward/tanh#0", "*forward/add#0"):
        assert "are one kernel" in step.why_not(ATTENTION, site)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_positions_before_and_a_gate_behind(precision: str) -> None:
    step = trained_alike(Rotary, precision, ALL)
    assert alone(step) == []  # no library runs one
    for a, b in ((ATTENTION, "*forward/silu#0"), (ATTENTION, "*forward/add#1"), (GRADIENT, "*backward/silu_grad#0")):
        said = step.why_not(a, b)
        assert "are one kernel of" in said and said.endswith(f"run by {Interpreted.name}"), said
    assert "  attention " in "\n".join(step.report().kernels.lines())


def test_a_recipe_has_the_same_kernels() -> None:
    x = torch.randn(2, ROWS, 24)
    step, _, losses = compiled(x, force=FORWARD)
    assert alone(step) == ["attention_grad"]
    again, _, same = compiled(x, recipe=step.recipe)
    assert kernels_of(again) == kernels_of(step) and len(kernels_of(step)) == 1
    torch.testing.assert_close(same, losses, rtol=1e-6, atol=0)


def test_unmeasured_and_unforced_a_library_runs_it() -> None:
    x = torch.randn(2, ROWS, 24)
    step, _, _ = compiled(x)
    assert alone(step) == ["attention", "attention_grad"]
    said = step.why_not(ATTENTION, "*forward/silu#0")
    assert said.endswith(UNMEASURED)
    with pytest.raises(ws.WholestepError, match="one is part of forward, the other of backward"):
        compiled(x, force=["fuse *attention_grad#0 <- *forward/attention#0"])
