"""A depthwise convolution takes along what makes its image and what sums up its result; everything else stays apart."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import wholestep as ws
from tests.transforms.test_fuse import program, regions_of, root_of
from wholestep.backends.providers import Cpp, forget_provider, register_provider
from wholestep.dialects.step import torch_dtype
from wholestep.ir import BF16, F32, TensorType, verify
from wholestep.ir.builtin import lookup
from wholestep.ir.core import Op
from wholestep.runtime.executor import Executable
from wholestep.transforms import again, regions
from wholestep.transforms.around import TAKES, NotAround, divide, sides_of
from wholestep.transforms.fuse import Fusion, dissolve, fuse

N, C, SIZE = 2, 4, 6
IMAGE, ROW, KERNEL = (N, C, SIZE, SIZE), (C,), (C, 1, 3, 3)
WINDOW: dict[str, Any] = dict(stride=(1, 1), padding=(1, 1), dilation=(1, 1), groups=C)
DIMS = (0, 2, 3)


def per_channel(b: Any, v: Any) -> Any:
    return b.reshape(v, shape=(C, 1, 1))


def activated(b: Any, x: Any, mean: Any, rstd: Any) -> Any:
    y = b.mul(b.sub(b.cast_to(x, F32), per_channel(b, mean)), per_channel(b, rstd))
    return b.silu(b.cast_to(y, x.type.element))


def statistics(b: Any, z: Any, around: Any) -> list[Any]:
    """As BatchNorm has them: both sums around a number per channel, and what follows from them."""
    off = b.sub(b.cast_to(z, F32), per_channel(b, around))
    first, second = b.mean(off, dims=DIMS), b.mean(b.mul(off, off), dims=DIMS)
    return [b.add(around, first), b.rsqrt(b.add(b.sub(second, b.mul(first, first)), 1e-5))]


def forward(b: Any, x: Any, mean: Any, rstd: Any, w: Any, dz: Any) -> list[Any]:
    z = b.conv(activated(b, x, mean, rstd), w, **WINDOW)
    centre, scale = statistics(b, z, mean)
    return [b.relu(b.mul(b.sub(b.cast_to(z, F32), per_channel(b, centre)), per_channel(b, scale)))]


def backward(b: Any, x: Any, mean: Any, rstd: Any, w: Any, dz: Any) -> list[Any]:
    """The image is read by the convolution and by the gradient of its kernel; sums over the gradient of the image."""
    y = activated(b, x, mean, rstd)
    z = b.conv(y, w, **WINDOW)
    dw = b.conv_weight_grad(y, dz, weight_shape=KERNEL, **WINDOW)
    dy = b.conv_input_grad(dz, w, input_shape=IMAGE, **WINDOW)
    wide = b.cast_to(dy, F32)
    normal = b.mul(b.sub(b.cast_to(x, F32), per_channel(b, mean)), per_channel(b, rstd))
    sums = [b.sum(wide, dims=DIMS), b.sum(b.mul(wide, normal), dims=DIMS)]
    return [z, dw, dy, *sums]


def written(b: Any, *operands: Any) -> list[Any]:
    """The image is a result as well."""
    y = activated(b, *operands[:3])
    return [y, b.conv(y, operands[3], **WINDOW)]


def two_passes(b: Any, x: Any, mean: Any, rstd: Any, w: Any, dz: Any) -> list[Any]:
    """The second sum waits for the first."""
    z = b.conv(x, w, **WINDOW)
    wide = b.cast_to(z, F32)
    first = b.mean(wide, dims=DIMS)
    off = b.sub(wide, per_channel(b, first))
    return [z, first, b.mean(b.mul(off, off), dims=DIMS)]


Build = Callable[..., list[Any]]


def of(build: Build, element: Any = F32) -> Op:
    types = [TensorType(IMAGE, element), TensorType(ROW, F32), TensorType(ROW, F32)]
    return program([*types, TensorType(KERNEL, element), TensorType(IMAGE, element)], build)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(again, "LEAST", 0)
    monkeypatch.setattr(regions, "STREWN_ROW", 16)


def joined(function: Op, **options: Any) -> tuple[Fusion, dict[str, tuple[int, int]]]:
    """Fuses where a provider takes depthwise convolutions; what is computed stays."""
    torch.manual_seed(0)
    types = [v.type for v in function.regions[0].block.arguments]
    inputs = [torch.randn(t.shape).to(torch_dtype(t.element)) for t in types]
    wanted = Executable(function)(inputs)
    fusion = fuse(function, alone=lambda op: op.name in TAKES, **options)
    verify(root_of(function))
    found = around(function)
    dissolve(function, lambda op: True)
    for mine, true in zip(Executable(function)(inputs), wanted, strict=True):
        torch.testing.assert_close(mine, true)
    return fusion, found


def around(function: Op) -> dict[str, tuple[int, int]]:
    """Of each region with a convolution: how many results the loops before it and after it have."""
    found: dict[str, tuple[int, int]] = {}
    for op in regions_of(function):
        body = lookup(root_of(function), op.callee)
        if any(inner.name in TAKES for inner in body.regions[0].block):
            sides = sides_of(body)
            before, after = (0 if s is None else len(s.piece.outputs) for s in (sides.before, sides.after))
            found[sides.anchor.name] = before, after
    return found


@pytest.mark.parametrize("element", [F32, BF16])
def test_forward_reads_one_image_and_gives_statistics(element: Any) -> None:
    _, found = joined(of(forward, element))
    assert found == {"step.conv": (1, 2)}


def test_gradients_compute_the_image_again_and_sum_up_theirs() -> None:
    _, found = joined(of(backward))
    assert found == {"step.conv": (1, 0), "step.conv_weight_grad": (1, 0), "step.conv_input_grad": (0, 2)}


def activation(b: Any, x: Any, mean: Any, rstd: Any, w: Any, dz: Any) -> list[Any]:
    """A product reads the gradient of an activation, and nobody that of the image."""
    normal = b.mul(b.sub(b.cast_to(x, F32), per_channel(b, mean)), per_channel(b, rstd))
    dy = b.conv_input_grad(dz, w, input_shape=IMAGE, **WINDOW)
    g = b.silu_grad(dy, b.cast_to(normal, x.type.element))
    return [b.contract(g, x, spec="nchw,nkhw->ck"), b.sum(b.cast_to(g, F32), dims=DIMS)]


@pytest.mark.parametrize("element", [F32, BF16])
def test_the_gradient_of_an_activation_is_written_in_place_of_an_images(element: Any) -> None:
    _, found = joined(of(activation, element))
    assert found == {"step.conv_input_grad": (0, 2)}


def test_an_image_that_is_written_in_any_case_is_read() -> None:
    _, found = joined(of(written))
    assert found == {"step.conv": (0, 0)}


def test_a_sum_that_waits_for_another_stays_outside() -> None:
    _, found = joined(of(two_passes))
    assert found == {"step.conv": (0, 0)}


def test_what_is_forbidden_stays_apart() -> None:
    _, found = joined(of(forward), forbid=["fuse *conv* <- *silu*"])
    assert found == {"step.conv": (0, 2)}


def test_a_recipe_replays() -> None:
    for build in (forward, backward):
        fusion, found = joined(of(build))
        lines = [f"fuse {' + '.join(sites)}" for _, sites in fusion.kernels]
        replayed, again_found = joined(of(build), recipe=lines)
        assert again_found == found
        assert [f"fuse {' + '.join(sites)}" for _, sites in replayed.kernels] == lines


@pytest.mark.parametrize("build", [forward, backward])
def test_what_nobody_runs_as_one_comes_apart(build: Build) -> None:
    function = of(build)
    inputs = [torch.randn(v.type.shape) for v in function.regions[0].block.arguments]
    wanted = Executable(function)(inputs)
    bodies = regions.Bodies()
    fusion = fuse(function, bodies=bodies, alone=lambda op: op.name in TAKES)
    lines = [sites for _, sites in fusion.kernels]
    kernels = len(regions_of(function))
    parts = divide(function, fusion, bodies, lambda op: True)
    verify(root_of(function))
    assert set(around(function).values()) == {(0, 0)}
    assert len(regions_of(function)) == kernels + {forward: 2, backward: 3}[build]
    assert parts and all(body.kernel is not None for body in parts.values())
    assert [sites for _, sites in fusion.kernels] == lines
    assert all(op.parent is function.regions[0].block for op, _ in fusion.kernels)
    dissolve(function, lambda op: True)
    for mine, true in zip(Executable(function)(inputs), wanted, strict=True):
        torch.testing.assert_close(mine, true)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.BatchNorm2d(C), nn.BatchNorm2d(C)
        self.inner = nn.Conv2d(C, C, 3, 1, 1, groups=C, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.silu(self.second(self.inner(nn.functional.silu(self.first(x)))))


def test_a_step_whose_provider_refuses_them_runs_the_loops_and_the_convolution_apart() -> None:
    class Picky(Cpp):
        """Asks for convolutions and then does not run them."""

        name = "picky"

        def takes(self, op: Op) -> bool:
            return op.name in TAKES

    register_provider(Picky)
    try:
        torch.manual_seed(0)
        x, models, losses = torch.randn(IMAGE), [Block(), Block()], []
        models[1].load_state_dict(models[0].state_dict())
        for model, compiled in zip(models, (False, True), strict=True):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
            if compiled:
                options = {"providers": ["aten", "picky"], "tune": False, "forbid": ["channels_last"]}
                step = ws.compile(model, lambda m, x: m(x).square().mean(), optimizer, (x,), **options)
                losses.append([float(step(x)) for _ in range(3)])
                ran = [(launch.provider, launch.name) for launch in step.plan().launches]
                assert [provider for provider, name in ran if "conv" in name] == ["aten"] * 3
                silus = [provider for provider, name in ran if "silu" in name]
                assert not silus and sum(provider == "picky" for provider, _ in ran) > 6
                continue
            losses.append([])
            for _ in range(3):
                loss = model(x).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses[0].append(loss.item())
    finally:
        forget_provider("picky")
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    torch.testing.assert_close(models[1].state_dict(), models[0].state_dict(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("build", "why"),
    [
        (lambda b, x, m, r, w, dz: [b.relu(x)], "no anchor"),
        (backward, "no anchor, or several"),
        (written, "other readers"),
        (lambda b, x, m, r, w, dz: [b.conv(b.add(x, dz), w, **WINDOW)], "made of several"),
        (lambda b, x, m, r, w, dz: [b.conv(b.relu(b.transpose(x, order=(0, 1, 3, 2))), w, **WINDOW)], "another order"),
        (two_passes, "waits for another"),
        (lambda b, x, m, r, w, dz: [(z := b.conv(x, w, **WINDOW)), b.amax(z, dims=DIMS)], "no sum per channel"),
        (lambda b, x, m, r, w, dz: [(z := b.conv(x, w, **WINDOW)), b.relu(z)], "not one image is written"),
        (lambda b, x, m, r, w, dz: [b.relu(b.conv(x, w, **WINDOW))], "nothing is summed up"),
        (lambda b, x, m, r, w, dz: [b.cast((z := b.conv(x, w, **WINDOW)), dtype=BF16), b.sum(z, dims=DIMS)], "type"),
        (lambda b, x, m, r, w, dz: [b.sub((z := b.conv(x, w, **WINDOW)), per_channel(b, b.sum(z, dims=DIMS)))], "wait"),
    ],
)  # fmt: skip
def test_reasons(build: Build, why: str) -> None:
    with pytest.raises(NotAround, match=why):
        sides_of(of(build))
