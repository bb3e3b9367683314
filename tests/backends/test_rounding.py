"""Casts that a model has round inside of one kernel too: forward and backward give eager's bits.

By C++ kernels, and by Triton's in its interpreter: that is `python -m tests.backends.test_rounding`.
"""

from __future__ import annotations

import copy
import os
from typing import Any

import pytest
import torch
from torch import nn

import wholestep as ws
from tests import warm
from wholestep.backends import cpp
from wholestep.backends.providers import Triton, register_provider

SHAPE = (8, 64)


class Quantised(nn.Module):
    """The gradients of c and d show what was rounded in forward, those of a and b what was rounded in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Parameter(torch.randn(SHAPE)) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.a).half().float() * self.c + (x * self.b).bfloat16().float() * self.d


class Norm(nn.Module):
    """Llama's, in bf16. The weight is a power of two, so that products with it are exact."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(SHAPE, dtype=torch.bfloat16))
        self.scale = nn.Parameter(torch.randn(SHAPE))
        self.register_buffer("weight", torch.full(SHAPE[1:], 0.5, dtype=torch.bfloat16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.bfloat16() + self.shift
        h = x.to(torch.float32)
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)
        return (self.weight * h.to(x.dtype)).float() * self.scale


def loss_fn(y: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    return (y * t).sum()


def differing(model: nn.Module, provider: str) -> list[int]:
    """How many numbers of each parameter differ from eager's after a step that subtracts the gradient."""
    x, t = torch.randn(SHAPE), torch.randn(SHAPE)
    eager = copy.deepcopy(model)
    loss_fn(eager(x), t).backward()
    torch.optim.SGD(eager.parameters(), lr=1.0).step()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    step = ws.compile(model, loss_fn, optimizer, (x, t), providers=["aten", provider], tune=False)
    step(x, t)
    assert {p.provider for p in step.plan().launches} <= {provider, "host"}  # no cast goes through memory by itself
    return [int((p != q).sum()) for p, q in zip(model.parameters(), eager.parameters(), strict=True)]


def check(provider: str) -> None:
    torch.manual_seed(0)
    assert differing(Quantised(), provider) == [0, 0, 0, 0]
    found = differing(Norm(), provider)  # a mean in another order may turn the rounding of a number around
    assert max(found) <= 3, found


@pytest.mark.skipif(bool(cpp.missing()), reason=cpp.missing())
def test_kernels_in_cpp(tmp_path, monkeypatch):
    monkeypatch.setenv("WHOLESTEP_CACHE", str(tmp_path))
    check("cpp")


def test_kernels_in_triton(tmp_path):
    pytest.importorskip("triton")
    environment = os.environ | {"TRITON_INTERPRET": "1", "WHOLESTEP_CACHE": str(tmp_path)}
    done = warm.run(["-m", "tests.backends.test_rounding"], environment)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


class Interpreted(Triton):
    """The Triton provider where there is no GPU."""

    name, devices = "interpreted", ("cpu",)


def round_to_nearest() -> None:
    """Lets the interpreter round to bf16 as a GPU does: it cuts off."""
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    cut_off = InterpreterBuilder.cast_impl

    def cast(builder: Any, source: Any, target: Any) -> Any:
        if source.dtype.scalar != tl.float32 or target.scalar != tl.bfloat16:
            return cut_off(builder, source, target)
        bits = torch.from_numpy(source.data.copy()).bfloat16().view(torch.int16)
        return TensorHandle(bits.numpy().view("uint16"), tl.bfloat16)

    InterpreterBuilder.cast_impl = cast


if __name__ == "__main__":
    round_to_nearest()
    register_provider(Interpreted)
    check(Interpreted.name)
