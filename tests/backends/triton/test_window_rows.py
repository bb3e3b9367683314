"""Convolutions of few channels over rows of windows against PyTorch in float64, in memory with guarded edges.

The kernels run in a child process (`child.py`), which answers with the error per candidate.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.backends.triton.child import Ask, asking, serve
from tests.backends.triton.test_contraction import (
    NHWC,
    assert_right,
    errors_of,
    guarded,
    loops,
    strides_of,
)
from wholestep.backends.kernels import Spec
from wholestep.backends.triton.window_rows import by_rows
from wholestep.dialects.step.base import torch_dtype
from wholestep.ir.core import Op
from wholestep.ir.types import F32, ScalarType, TensorType

Shape = tuple[int, ...]


def kernel(part: str, x: Shape, w: Shape, element: ScalarType, **how: Any) -> tuple[Op, list[TensorType]]:
    """The loops of a convolution, of one with BatchNorm's sums, or of the gradient of its kernel."""
    sizes = zip(x[2:], w[2:], how["padding"], how["stride"], strict=True)
    y = (x[0], w[0], *((n + 2 * p - k) // s + 1 for n, k, p, s in sizes))
    types = [TensorType(s, element) for s in ((x, y) if part == "weight_grad" else (x, w))]

    def build(b: Any, *values: Any) -> Any:
        if part == "weight_grad":
            return b.conv_weight_grad(*values, weight_shape=w, **how)
        made = b.conv(*values, **how)
        if part == "forward":
            return made
        wide = b.cast(made, dtype=F32)
        return [made, b.sum(wide, dims=(0, 2, 3)), b.sum(b.mul(wide, wide), dims=(0, 2, 3))]

    function, results = loops(types, build)
    return function, [*types, *results]


def run_case(
    part: str, x: Shape, w: Shape, element: str, stride: int, padding: int, together: int, tiles: list[dict[str, int]]
) -> dict[str, float]:
    """Per tile: the largest difference as a share of the largest value, over what is allowed."""
    from wholestep.backends.triton import contraction, generate

    device = "cuda" if torch.cuda.is_available() else "cpu"
    x, w, how = tuple(x), tuple(w), dict(stride=(stride, stride), padding=(padding, padding), dilation=(1, 1))
    function, types = kernel(part, x, w, ScalarType(element), **how)
    torch.manual_seed(0)
    tensors = []
    for type in types:
        strides = strides_of(type.shape, NHWC if type.rank == 4 else None)
        tensors.append(guarded(type.shape, strides, torch_dtype(type.element), device))
    for tensor in tensors[:2]:
        tensor.copy_(torch.randn(tensor.shape))
    one, two = (t.double().cpu() for t in tensors[:2])
    if part == "weight_grad":
        wanted = [torch.nn.grad.conv2d_weight(one, w, two, stride, padding)]
    else:
        y = torch.nn.functional.conv2d(one, two, stride=stride, padding=padding)
        wanted = [y, y.sum((0, 2, 3)), y.square().sum((0, 2, 3))]
    specs = [Spec(tuple(t.shape), tuple(t.stride()), t.dtype) for t in tensors]
    rows = by_rows(function, specs, together)
    assert rows is not None
    product = contraction.Contraction(rows.function, rows.specs, rows)
    chosen = [contraction.Tile(**t) for t in tiles] or product.tiles()[:1]
    made = [generate.candidate(product, tile) for tile in chosen]
    return errors_of(made, tensors[:2], tensors[2:], wanted[: len(tensors) - 2], element)


@pytest.fixture(scope="module")
def child() -> Iterator[Ask]:
    pytest.importorskip("triton")
    with asking("tests.backends.triton.test_window_rows") as ask:
        yield ask


#: image, kernel, stride, padding: odd sizes, every number of channels
WINDOWS = [
    ((2, 3, 13, 16), (20, 3, 7, 7), 2, 3),
    ((2, 1, 9, 19), (17, 1, 5, 7), 1, 0),
    ((2, 4, 10, 12), (16, 4, 3, 3), 1, 1),
    ((2, 2, 15, 15), (16, 2, 5, 5), 2, 2),
]
STEM = WINDOWS[0]
SPLIT = [dict(m=64, n=256, k=16, warps=4, stages=2, split=s) for s in (3, 20)]


@pytest.mark.parametrize("part", ["forward", "weight_grad"])
@pytest.mark.parametrize(("x", "w", "stride", "padding"), WINDOWS)
def test_the_numbers(child: Ask, part: str, x: Shape, w: Shape, stride: int, padding: int) -> None:
    assert_right(child(part, x, w, "bf16", stride, padding, 1, []))


@pytest.mark.parametrize("element", ["f32", "f16"])
@pytest.mark.parametrize("part", ["statistics", "weight_grad"])
def test_other_types(child: Ask, part: str, element: str) -> None:
    assert_right(child(part, (2, 3, 9, 12), (16, 3, 3, 3), element, 2, 1, 1, []))


@pytest.mark.parametrize("together", [1, 2])
def test_programs_that_stay(child: Ask, together: int) -> None:
    """With all rows of a window at once, and one after the other."""
    tiles = [dict(m=64, n=64, k=k, warps=4, stages=s, programs=p) for k, s, p in ((256, 2, 1), (32, 1, 3))]
    assert_right(child("statistics", *STEM[:2], "bf16", *STEM[2:], together, tiles), least=2)


@pytest.mark.parametrize(("x", "w", "stride", "padding"), [STEM, WINDOWS[2]])
def test_windows_that_share_a_run(child: Ask, x: Shape, w: Shape, stride: int, padding: int) -> None:
    """In the gradient of a kernel each gives a part of the same numbers."""
    assert_right(child("statistics", x, w, "bf16", stride, padding, 2, []))
    assert_right(child("weight_grad", x, w, "bf16", stride, padding, 2, SPLIT), least=2)


def test_loads_are_wide() -> None:
    """Runs begin so far in front of their first window that they start at a multiple of 4 or, for two, of 8 bytes."""
    function, types = kernel(
        "forward", (2, 3, 224, 224), (64, 3, 7, 7), ScalarType("bf16"), stride=(2, 2), padding=(3, 3), dilation=(1, 1)
    )
    specs = [Spec(t.shape, strides_of(t.shape, NHWC), torch.bfloat16) for t in types]
    alone, shared = (2, 64, 112, 112, 7, 32, 1, 1), (2, 64, 112, 56, 7, 32, 1, 2)
    for together, sizes, constant in ((1, alone, -10), (2, shared, -12)):
        found = by_rows(function, specs, together)
        assert found is not None
        block = found.function.regions[0].block
        assert [op.attributes["sizes"] for op in block if op.name == "loop.space"] == [sizes]
        image = next(op for op in block if op.name == "loop.load" and op.operands[0] is block.arguments[0])
        assert found.specs[0].shape == (2, 224, 672) and image.attributes["map"][2][-1] == constant


def test_other_kernels_stay_as_they_are() -> None:
    """Channels that lie apart, many of them, taps that lie apart."""
    for w, layout, dilation in (((16, 3, 3, 3), None, 1), ((16, 64, 3, 3), NHWC, 1), ((16, 3, 3, 3), NHWC, 2)):
        how = dict(stride=(1, 1), padding=(0, 0), dilation=(dilation, dilation))
        x = (2, w[1], 9, 9) if dilation == 1 else (2, 3, 7 + 2 * dilation, 7 + 2 * dilation)
        kernels = [TensorType(x, ScalarType("bf16")), TensorType(w, ScalarType("bf16"))]
        function, results = loops(kernels, lambda b, x, w, how=how: b.conv(x, w, **how))
        specs = [Spec(t.shape, strides_of(t.shape, layout), torch.bfloat16) for t in (*kernels, *results)]
        assert by_rows(function, specs) is None


if __name__ == "__main__":
    serve(run_case)
