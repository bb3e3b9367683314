"""Group norms of channels-last images: sums by channel first, the numbers of PyTorch, and who is left alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import wholestep as ws
from tests.runtime.runs import data
from wholestep.dialects.step import StepBuilder
from wholestep.ir.builtin import add_function, finish_function, module
from wholestep.ir.core import Op, Value
from wholestep.ir.types import BF16, F32, ScalarType, TensorType
from wholestep.ir.verify import verify
from wholestep.runtime.executor import Executable
from wholestep.transforms.fuse import fuse
from wholestep.transforms.group_norms import by_channel
from wholestep.transforms.layout_rules import channels_last

#: sizes of images, and how many groups
CASES = {
    "groups": ((2, 12, 5, 4), 3),
    "one group": ((2, 6, 3, 3), 1),
    "each channel": ((3, 6, 4, 2), 6),
    "volume": ((2, 8, 2, 3, 4), 4),
    "sequence": ((2, 6, 7), 2),
    "one image": ((1, 8, 6, 6), 2),
}


def norm(
    shape: tuple[int, ...], groups: int, weight: bool, bias: bool, last: bool = True, element: ScalarType = F32
) -> tuple[Op, list[TensorType]]:
    """y, mean, rstd, dx and what there is of dw and db, of images that lie channels-last or not."""
    vector = TensorType((shape[1],), element)
    types = [TensorType(shape, element), TensorType(shape, element), *[vector] * (weight + bias)]
    root = module()
    function = add_function(root, "f", types)
    x, dy, *rest = function.regions[0].block.arguments
    given = iter(rest)
    w = next(given) if weight else None
    c = next(given) if bias else None
    b = StepBuilder(function.regions[0].block, phase="forward")
    image = b.layout(x, order=channels_last(len(shape))) if last else x
    y, mean, rstd = b.group_norm(image, w, c, groups=groups, eps=1e-4)
    b.phase = "backward"
    dx, dw, db = b.group_norm_grad(dy, image, mean, rstd, w, groups=groups)
    results: list[Value] = [y, mean, rstd, dx, *([dw] if weight else []), *([db] if bias else [])]
    finish_function(function, results)
    return function, types


def inputs(types: list[TensorType]) -> list[torch.Tensor]:
    """Channels that lie far from one another, as they do behind a convolution."""
    found = []
    for seed, type in enumerate(types):
        made = data(*type.shape, seed=seed)
        if type.rank > 1:
            made = made + 4 * data(type.shape[1], seed=9).reshape(-1, *[1] * (type.rank - 2))
        found.append(made.to(torch.bfloat16 if type.element is BF16 else torch.float32))
    return found


def expected(given: list[torch.Tensor], groups: int, weight: bool, bias: bool) -> list[torch.Tensor]:
    """What PyTorch's autograd gives, in double precision."""
    x, dy, *rest = (t.double() for t in given)
    leaves = [x, *rest]
    for leaf in leaves:
        leaf.requires_grad_()
    w = leaves[1] if weight else None
    c = leaves[-1] if bias else None
    ones = torch.ones(x.shape[1], dtype=x.dtype) if w is None else w  # (autograd wants a weight beside a bias)
    y = nn.functional.group_norm(x, groups, ones, c, eps=1e-4)
    rows = x.detach().reshape(x.shape[0], groups, -1)
    statistics = [rows.mean(2), (rows.var(2, correction=0) + 1e-4).rsqrt()]
    return [y.detach(), *statistics, *torch.autograd.grad(y, leaves, dy)]


@pytest.mark.parametrize(("weight", "bias"), [(True, True), (True, False), (False, True), (False, False)])
@pytest.mark.parametrize("name", CASES)
def test_by_channel_gives_what_pytorch_does(name: str, weight: bool, bias: bool) -> None:
    shape, groups = CASES[name]
    function, types = norm(shape, groups, weight, bias)
    by_channel(function)
    verify(function)
    assert not [op for op in function.regions[0].block if "group_norm" in op.name]
    given = inputs(types)
    found = Executable(function)(given)
    for mine, want in zip(found, expected(given, groups, weight, bias), strict=True):
        torch.testing.assert_close(mine.double(), want, rtol=1e-4, atol=1e-4)


def test_statistics_of_16_bits_are_wide() -> None:
    function, types = norm((2, 8, 6, 6), 2, True, True, element=BF16)
    by_channel(function)
    given = inputs(types)
    found = Executable(function)(given)
    assert [t.dtype for t in found[1:3]] == [torch.float32, torch.float32]
    assert {t.dtype for t in (*found[:1], *found[3:])} == {torch.bfloat16}
    for mine, want in zip(found, expected(given, 2, True, True), strict=True):
        torch.testing.assert_close(mine.double(), want, rtol=2e-2, atol=2e-2)


def test_a_gradient_without_its_forward_takes_what_it_is_given() -> None:
    shape, groups = CASES["groups"]
    _, types = norm(shape, groups, True, False)
    given = inputs(types)
    want = expected(given, groups, True, False)
    root = module()
    statistic = TensorType((shape[0], groups), F32)
    alone = add_function(root, "f", [types[0], types[1], statistic, statistic, types[2]])
    x, dy, mean, rstd, w = alone.regions[0].block.arguments
    b = StepBuilder(alone.regions[0].block, phase="backward")
    image = b.layout(x, order=channels_last(len(shape)))
    dx, dw, _ = b.group_norm_grad(dy, image, mean, rstd, w, groups=groups)
    finish_function(alone, [dx, dw])
    by_channel(alone)
    found = Executable(alone)([given[0], given[1], want[1].float(), want[2].float(), given[2]])
    for mine, true in zip(found, want[3:], strict=True):
        torch.testing.assert_close(mine.double(), true, rtol=1e-4, atol=1e-4)


def test_images_that_lie_row_by_row_are_left_alone() -> None:
    for function, _ in (norm((2, 12, 5, 4), 3, True, True, last=False), norm((2, 12, 1, 1), 3, True, True)):
        before = str(function)
        by_channel(function)
        assert str(function) == before


def test_kernels_of_images_walk_channels_as_one() -> None:
    """Numbers per channel are made group by group in small kernels of their own."""
    function, _ = norm((2, 12, 16, 16), 3, True, True)
    fusion = fuse(function)
    large = [b.kernel for b in fusion.bodies.values() if b.function is not None and reads_image(b.function)]
    assert len(large) >= 3  # statistics, the sums of the gradient, and what is normalised
    small = [f for f in fusion.bodies.values() if f.function is not None and not reads_image(f.function)]
    assert small and len(fusion.kernels) <= 12
    for body in fusion.bodies.values():
        assert body.function is not None
        if reads_image(body.function):  # beside images, what it reads and makes has a number for each channel
            types = [v.type for v in body.function.regions[0].block.arguments]
            assert all(t.shape[1:] not in ((3,), (3, 1)) for t in types)


def reads_image(function: Op) -> bool:
    return any(v.type.size == 2 * 12 * 256 for v in function.regions[0].block.arguments)


class Block(nn.Module):
    """A residual block as diffusion models have them."""

    def __init__(self, inputs: int, outputs: int):
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(4, inputs), nn.Conv2d(inputs, outputs, 3, padding=1)
        self.norm2, self.conv2 = nn.GroupNorm(4, outputs), nn.Conv2d(outputs, outputs, 3, padding=1)
        self.short = nn.Conv2d(inputs, outputs, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.conv1(nn.functional.silu(self.norm1(x)))
        return self.short(x) + self.conv2(nn.functional.silu(self.norm2(y)))


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), Block(8, 16), Block(16, 8), nn.Conv2d(8, 3, 1))


@pytest.mark.parametrize("force", [[], ["channels_last *"]], ids=["rows", "channels-last"])
def test_networks_train_as_they_do_eagerly(force: list[str]) -> None:
    images, target = data(2, 3, 16, 16), data(2, 3, 16, 16, seed=1)
    losses, states = [], []
    for compiled in (False, True):
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        step: Any = None
        if compiled:
            options: dict[str, Any] = {"force": force, "forbid": [] if force else ["channels_last *"], "tune": False}
            step = ws.compile(model, nn.functional.mse_loss, optimizer, (images, target), **options)
        found = []
        for _ in range(4):
            if compiled:
                found.append(float(step(images, target)))
                continue
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(images), target)
            loss.backward()
            optimizer.step()
            found.append(float(loss.detach()))
        losses.append(found)
        states.append(model.state_dict())
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    for key, tensor in states[0].items():
        torch.testing.assert_close(states[1][key], tensor, rtol=1e-3, atol=1e-4, msg=lambda m: f"{key}: {m}")  # noqa: B023
