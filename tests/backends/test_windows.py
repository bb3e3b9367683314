"""Convolutions that wait for memory as generated products: PyTorch's numbers, and no other convolutions.

The kernels run in a child process (`triton/child.py`), which answers with the error per offer.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.backends.triton.child import Ask, asking, serve
from wholestep.backends import windows
from wholestep.backends.generated import region_of
from wholestep.backends.kernels import spec_of
from wholestep.backends.providers import Region
from wholestep.dialects.step import StepBuilder, tensor_type
from wholestep.ir import BF16, F32, TensorType, add_function, finish_function, module
from wholestep.ir.core import Op, Value

LAST = torch.channels_last


def convolution(part: str, given: list[torch.Tensor], **how: Any) -> Region:
    """A region of one convolution, or of the gradient of its kernel."""
    function = add_function(module(), "f", [tensor_type(t) for t in given])
    b, values = StepBuilder(function.regions[0].block), function.regions[0].block.arguments
    y = b.conv(*values, **how) if part == "forward" else b.conv_weight_grad(*values, **how)
    finish_function(function, [y])
    return region_of(function, None, [spec_of(t) for t in given], given[0].device)


def run_case(part: str, stride: int, padding: int, laid: bool) -> dict[str, float]:
    """Per offer: the largest difference from PyTorch's result in f64, as a share of the largest value."""
    from wholestep.backends.triton import generate

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    x, w = torch.randn(3, 3, 11, 9), torch.randn(18, 3, 3, 5)
    window: Any = dict(stride=(stride, 1), padding=(padding, padding), dilation=(1, 1))
    y = torch.nn.functional.conv2d(x, w, stride=(stride, 1), padding=padding)
    given = [x, w if part == "forward" else torch.randn_like(y)]
    if part != "forward":
        window["weight_shape"] = tuple(w.shape)
    given = [t.bfloat16().to(device, memory_format=LAST if laid else torch.contiguous_format) for t in given]
    exact = [t.double().cpu() for t in given]
    if part == "forward":
        wanted = torch.nn.functional.conv2d(*exact, stride=(stride, 1), padding=padding)
    else:
        wanted = torch.nn.grad.conv2d_weight(exact[0], w.shape, exact[1], (stride, 1), padding)
    region = convolution(part, given, **window)
    assert windows.why_not(region) == ""
    (spec,) = region.results
    found = {}
    for offer in windows.offers(region)[:: 5 if part == "forward" else 3]:
        call = generate.build([offer.made])[offer.key]
        if isinstance(call, Exception):
            raise call
        scratch = [torch.full(s.shape, float("nan"), dtype=s.dtype, device=device) for s in offer.scratch]
        out = torch.empty_strided(spec.shape, spec.strides, dtype=spec.dtype, device=device).fill_(float("nan"))
        call(*given, out, *scratch)
        error = (out.double().cpu() - wanted).abs().max() / wanted.abs().max()
        found[offer.name] = error.nan_to_num(float("inf")).item()
    return found


@pytest.fixture(scope="module")
def child() -> Iterator[Ask]:
    pytest.importorskip("triton")
    with asking("tests.backends.test_windows") as ask:
        yield ask


@pytest.mark.parametrize("part", ["forward", "weight_grad"])
@pytest.mark.parametrize(("stride", "padding", "laid"), [(2, 1, True), (1, 0, False)])
def test_the_numbers(child: Ask, part: str, stride: int, padding: int, laid: bool) -> None:
    found = child(part, stride, padding, laid)
    assert found and all(name.startswith("windows dot") for name in found)
    assert max(found.values()) < 2e-2, found  # (the interpreter cuts bf16 off)


def op_of(
    channels: int = 3, dtype: Any = BF16, bias: bool = False, size: int = 256, groups: int = 1, out: int = 16
) -> Op:
    types = [TensorType(s, dtype) for s in ((2, channels * groups, size, size), (out, channels, 3, 3), (out,))]
    function = add_function(module(), "f", types)
    x, w, b = function.regions[0].block.arguments
    how: Any = dict(stride=(1, 1), padding=(1, 1), dilation=(1, 1), groups=groups)
    y = StepBuilder(function.regions[0].block).conv(x, w, b if bias else None, **how)
    assert y.op is not None
    return y.op


def test_which_convolutions_it_takes() -> None:
    assert windows.takes(op_of())
    others = [
        op_of(channels=128, out=128),
        op_of(dtype=F32),
        op_of(bias=True),
        op_of(size=16),
        op_of(channels=1, groups=2),
    ]
    assert not any(map(windows.takes, others))


def test_what_is_taken_along() -> None:
    """Sums of what it makes, where channels lie innermost; nothing that makes its image, and no other results."""
    shapes, how = ((2, 3, 32, 32), (16, 3, 3, 3)), dict(stride=(1, 1), padding=(1, 1), dilation=(1, 1))

    def sums(b: Any, x: Value, w: Value) -> list[Value]:
        y = b.conv(x, w, **how)
        return [y, b.sum(b.cast(y, dtype=F32), dims=(0, 2, 3))]

    def before(b: Any, x: Value, w: Value) -> list[Value]:
        return sums(b, b.relu(x), w)

    def after(b: Any, x: Value, w: Value) -> list[Value]:
        y = b.conv(x, w, **how)
        return [y, b.relu(y)]

    def region(build: Any, laid: torch.memory_format = LAST) -> Region:
        function = add_function(module(), "f", [TensorType(s, BF16) for s in shapes])
        block = function.regions[0].block
        finish_function(function, build(StepBuilder(block), *block.arguments))
        given = [torch.empty(s, dtype=torch.bfloat16, memory_format=laid) for s in shapes]
        return region_of(function, None, [spec_of(t) for t in given], given[0].device)

    assert windows.why_not(region(sums)) == "" and all("rows" in o.name for o in windows.offers(region(sums)))
    assert "walks rows of windows" in windows.why_not(region(sums, torch.contiguous_format))
    assert "once for each tap" in windows.why_not(region(before))
    assert "not one image is written" in windows.why_not(region(after))


if __name__ == "__main__":
    serve(run_case)
