"""`inner_sums`: sums that wait for a factor of each image are the same numbers, up to rounding, from one look less."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.plan.networks import Case
from tests.runtime.runs import data
from tests.transforms.test_fuse import program, root_of
from tests.transforms.test_through_norm import changes, counted
from wholestep.dialects.step import torch_dtype
from wholestep.ir.core import Op, Value
from wholestep.ir.passes import run_pipeline
from wholestep.ir.types import BF16, F32, ScalarType, TensorType
from wholestep.ir.verify import verify
from wholestep.runtime.executor import Executable
from wholestep.transforms import kept
from wholestep.transforms.fuse import fuse
from wholestep.transforms.inner_sums import InnerSums
from wholestep.transforms.opportunity import take, transform
from wholestep.transforms.regions import base

NAMES = ("pointwise_convolution", "inner_sums")
WIDTH, SIDE = 16, 8


class Gate(nn.Module):
    """Squeeze and excite."""

    def __init__(self) -> None:
        super().__init__()
        self.reduce, self.expand = nn.Conv2d(WIDTH, 4, 1), nn.Conv2d(4, WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        squeezed = nn.functional.silu(self.reduce(nn.functional.adaptive_avg_pool2d(x, 1)))
        return x * torch.sigmoid(self.expand(squeezed))


def network(activation: type[nn.Module]) -> nn.Module:
    conv = nn.Conv2d(WIDTH, WIDTH, 3, padding=1, groups=WIDTH, bias=False)
    before = [nn.Conv2d(3, WIDTH, 3, 2, 1, bias=False), conv, nn.BatchNorm2d(WIDTH), activation()]
    return nn.Sequential(*before, Gate(), nn.Conv2d(WIDTH, 5, 1), nn.Tanh(), nn.AdaptiveAvgPool2d(1), nn.Flatten())


def case_of(precision: str = "bf16", activation: type[nn.Module] = nn.SiLU, side: int = SIDE) -> Case:
    torch.manual_seed(0)
    target = torch.randint(0, 5, (6,), generator=torch.Generator().manual_seed(0))
    images = data(6, 3, 2 * side, 2 * side)
    case = Case((network(activation), nn.functional.cross_entropy, (images, target)), "sgd", precision=precision)
    transform(case.program.module, force=["channels_last *"])
    return case


@pytest.mark.parametrize("activation", [nn.SiLU, nn.ReLU, nn.ReLU6, nn.Hardswish, nn.GELU, nn.Identity])
def test_a_step_is_as_near_to_f32_as_before(activation: type[nn.Module]) -> None:
    exact = changes(case_of("fp32", activation))
    case = case_of("bf16", activation)
    take(case.program.module, NAMES[:1])
    before = changes(case)
    done = take(case.program.module, NAMES[1:])
    verify(case.program.module)
    run_pipeline(case.program.module, "cse,dce")
    assert [key.partition(" ")[0] for key in done] == ["inner_sums"]
    assert counted(case.program.function, "batch_norm_grad") == 0
    after = changes(case)
    for name, want in exact.items():
        old, new = (float((x[name] - want).norm() / want.norm()) for x in (before, after))
        assert new <= 1.5 * old + 1e-3, (name, old, new)


def test_in_f32_they_are_the_same() -> None:
    case = case_of("fp32")
    before = changes(case)
    assert len(take(case.program.module, NAMES[1:])) == 1
    verify(case.program.module)
    for name, new in changes(case).items():
        torch.testing.assert_close(new, before[name], rtol=1e-4, atol=1e-6)


def readers(function: Op, large: int) -> list[Op]:
    """Kernels of backward that read two tensors so large."""
    block = function.regions[0].block
    fused = [op for op in block if op.name == "step.fused" and op.phase == "backward"]
    return [op for op in fused if sum(base(v).type.size >= large for v in op.operands) >= 2]


def test_pixels_are_read_once_less() -> None:
    """Sums over pixels are one kernel, and the sums over the batch read none."""
    counts = []
    for names in (NAMES[:1], NAMES):
        case = case_of(side=64)
        take(case.program.module, names)
        kept.cut(case.program.module)
        run_pipeline(case.program.module, "cse,dce")
        fuse(case.program.function)
        counts.append(len(readers(case.program.function, 6 * WIDTH * 64 * 64)))
    assert counts == [3, 2]


Build = Callable[..., Value]
GATE = (4, 6, 1, 1)


def ran(build: Build, element: ScalarType = F32, side: int = 8) -> tuple[Any, list[torch.Tensor], list[torch.Tensor]]:
    """What is found where BatchNorm's gradient is made of g, x and two gates, and all results before and after."""
    image, gate, vector = TensorType((4, 6, side, side), element), TensorType(GATE, element), TensorType((6,), F32)

    def whole(b: Any, g: Value, x: Value, s: Value, t: Value, weight: Value) -> list[Value]:
        y, mean, rstd, *_ = b.batch_norm(x, weight, training=True)
        return [*b.batch_norm_grad(build(b, g, y, s, t), x, mean, rstd, weight)]

    function = program([image, image, gate, gate, vector], whole)
    arguments = function.regions[0].block.arguments
    inputs = [data(*v.type.shape, seed=i).to(torch_dtype(v.type.element)) for i, v in enumerate(arguments)]
    found = [what for _, what in InnerSums().places(function)]
    before = Executable(function)(inputs)
    take(root_of(function), NAMES[1:])
    verify(root_of(function))
    return found, before, Executable(function)(inputs)


def late(b: Any, g: Value, y: Value, gate: Value) -> Value:
    """Something of each image that is computed from the gradient of a gate."""
    return b.tanh(b.mul(b.sum(b.mul(g, y), dims=(2, 3), keepdim=True), gate))


def products(b: Any, g: Value, y: Value, s: Value, t: Value) -> Value:
    inside = b.sub(b.neg(b.mul(s, g)), b.broadcast(late(b, g, y, t), shape=g.type.shape))
    return b.add(b.silu_grad(inside, y), b.mul(g, y))


def channels(b: Any, g: Value, y: Value, s: Value, t: Value) -> Value:
    vector = b.sum(s, dims=(0,))  # [6, 1, 1]
    return b.mul(b.mul(b.add(g, late(b, g, y, t)), vector), b.tanh(y))


def a_row(b: Any, g: Value, y: Value, s: Value, t: Value) -> Value:
    """Sums over one dimension of two."""
    summed = b.sum(b.mul(g, y), dims=(3,), keepdim=True)
    return b.mul(g, b.tanh(b.mul(summed, s)))


@pytest.mark.parametrize("build", [products, channels, a_row])
def test_whatever_is_linear(build: Build) -> None:
    found, before, after = ran(build)
    assert len(found) == 1 and found[0].bytes < 0
    for old, new in zip(before, after, strict=True):
        torch.testing.assert_close(new, old, rtol=1e-4, atol=1e-4)


def curved(b: Any, g: Value, y: Value, s: Value, t: Value) -> Value:
    factor = late(b, g, y, t)
    return b.add(b.tanh(b.mul(g, factor)), factor)


def other(b: Any, g: Value, y: Value, s: Value, t: Value) -> Value:
    return b.mul(g, b.tanh(b.sum(y, dims=(2, 3), keepdim=True)))


def many(b: Any, g: Value, y: Value, s: Value, t: Value) -> Value:
    factor = late(b, g, y, t)
    parts = [b.mul(g, factor), b.mul(y, factor), b.mul(g, s), b.mul(y, t), factor]
    whole = parts[0]
    for part in parts[1:]:
        whole = b.add(whole, part)
    return whole


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (curved, "what is summed up is known only after the factors"),
        (other, "the sum that factors are computed from does not read the same tensors"),
        (many, "it is a sum of too many parts"),
    ],
)
def test_why_not(build: Build, reason: str) -> None:
    found, before, after = ran(build)
    assert found == [reason]
    assert all(torch.equal(x, y) for x, y in zip(before, after, strict=True))


def test_where_sums_are_as_large_as_pixels() -> None:
    assert ran(products, BF16, side=3)[0] == ["sums over the inner dimensions are as large as what is read"]


def test_a_gradient_that_others_read_too() -> None:
    """A residual: whoever writes the gradient for it has its sums on the way."""

    def build(b: Any, g: Value, x: Value, s: Value, t: Value, weight: Value) -> list[Value]:
        y, mean, rstd, *_ = b.batch_norm(x, weight, training=True)
        dy = products(b, g, y, s, t)
        return [dy, *b.batch_norm_grad(dy, x, mean, rstd, weight)]

    image, gate = TensorType((4, 6, 8, 8), F32), TensorType(GATE, F32)
    function = program([image, image, gate, gate, TensorType((6,), F32)], build)
    ((_, why),) = InnerSums().places(function)
    assert why == "the gradient is read by others too: who writes it sums it up on the way"


def test_factors_that_wait_for_nothing_are_no_place() -> None:
    assert ran(lambda b, g, y, s, t: b.mul(g, s))[0] == []
