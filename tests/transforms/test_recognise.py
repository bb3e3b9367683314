"""Activations that are written out: found by what they compute, left alone where that is something else."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import wholestep as ws
from wholestep.dialects.step import StepBuilder
from wholestep.ir.builtin import add_function, finish_function, module
from wholestep.ir.core import Op
from wholestep.ir.passes import run_pipeline
from wholestep.ir.types import F32, TensorType
from wholestep.transforms.recognise import recognise

SHAPE = TensorType((4, 6), F32)


def new_gelu(b, x):
    inner = b.mul(b.add(x, b.mul(b.pow(x, 3.0), 0.044715)), math.sqrt(2 / math.pi))
    return b.mul(b.mul(x, 0.5), b.add(b.tanh(inner), 1.0))


def fast_gelu(b, x):  # with a constant that was cut off
    inner = b.mul(b.mul(x, 0.7978845608), b.add(b.mul(b.mul(x, 0.044715), x), 1.0))
    return b.mul(b.mul(x, 0.5), b.add(b.tanh(inner), 1.0))


def erf_gelu(b, x):
    return b.mul(b.mul(x, 0.5), b.add(b.erf(b.div(x, math.sqrt(2.0))), 1.0))


def swish(b, x):
    return b.mul(b.sigmoid(x), x)


def quick_gelu(b, x):
    return b.mul(b.sigmoid(b.mul(x, 1.702)), x)


def of_two(b, x):
    return b.mul(b.sigmoid(b.exp(x)), x)


def wrong_constant(b, x):
    inner = b.mul(b.add(x, b.mul(b.pow(x, 3.0), 0.0447)), math.sqrt(2 / math.pi))
    return b.mul(b.mul(x, 0.5), b.add(b.tanh(inner), 1.0))


def made(build) -> tuple[Op, list[str]]:
    function = add_function(module(), "f", [SHAPE])
    block = function.regions[0].block
    finish_function(function, [build(StepBuilder(block), block.arguments[0])])
    recognise(function)
    root = function.parent.parent.parent
    run_pipeline(root, "dce")
    return function, [op.name for op in function.regions[0].block if not op.definition.terminator]


@pytest.mark.parametrize(
    ("build", "name", "kind"),
    [
        (new_gelu, "step.gelu", "tanh"),
        (fast_gelu, "step.gelu", "tanh"),
        (erf_gelu, "step.gelu", "none"),
        (swish, "step.silu", None),
    ],
)
def test_it_is_found(build, name: str, kind: str | None) -> None:
    function, names = made(build)
    assert names == [name]
    (op,) = (o for o in function.regions[0].block if o.name == name)
    assert kind is None or op.approximate == kind


@pytest.mark.parametrize("build", [quick_gelu, of_two, wrong_constant])
def test_what_is_another_function_stays(build) -> None:
    assert not {"step.gelu", "step.silu"} & set(made(build)[1])


class Written(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.up(x)
        return self.down(0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0)))))


@pytest.mark.parametrize(("providers", "found"), [(["aten", "cpp"], True), (["aten"], False)])
def test_a_step_has_it_where_kernels_are_generated(providers: list[str], found: bool) -> None:
    torch.manual_seed(0)
    model, eager = Written(), Written()
    eager.load_state_dict(model.state_dict())
    x, y = torch.randn(32, 16), torch.randint(0, 4, (32,))
    loss = nn.CrossEntropyLoss()
    step = ws.compile(model, loss, torch.optim.SGD(model.parameters(), lr=0.1), (x, y), providers=providers, tune=False)
    assert ("gelu_grad" in str(step.program())) is found
    optimizer = torch.optim.SGD(eager.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        wanted = loss(eager(x), y)
        wanted.backward()
        optimizer.step()
        torch.testing.assert_close(step(x, y), wanted.detach())
    for got, want in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(got, want)
