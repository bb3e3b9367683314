"""A depthwise convolution takes along what makes its image and what sums up its result; everything else stays apart."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.transforms.test_fuse import program, regions_of, root_of
from wholestep.dialects.step import torch_dtype
from wholestep.ir import BF16, F32, TensorType, verify
from wholestep.ir.builtin import lookup
from wholestep.ir.core import Op
from wholestep.runtime.executor import Executable
from wholestep.transforms import again, regions
from wholestep.transforms.around import TAKES, NotAround, sides_of
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
        (lambda b, x, m, r, w, dz: [(z := b.conv(x, w, **WINDOW)), b.relu(z)], "no number per channel"),
    ],
)  # fmt: skip
def test_reasons(build: Build, why: str) -> None:
    with pytest.raises(NotAround, match=why):
        sides_of(of(build))
