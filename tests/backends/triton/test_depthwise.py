"""Depthwise kernels against PyTorch's convolution in float64, for every configuration, in memory with guarded edges.

The kernels run in a child process (`child.py`), which answers with the largest error over its bound.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests import warm
from tests.backends.triton.child import Ask, asking, serve

PARTS = ("forward", "input_grad", "weight_grad")
#: relative size of one rounding; the interpreter cuts bf16 off instead of rounding it to nearest
ROUNDING = {"bfloat16": 2**-7, "float16": 2**-11, "float32": 2**-24}
#: what f32 sums may lose, as a share of the sum of absolute products
SUMMING = 4e-6
GUARD = 4096

SMALL_CONFIG = {"columns": 3, "rows": 2, "vector": 1, "warps": 1, "images": 2, "prefetch": True}

#: shape, kernel, stride, padding, dtype
CASES = {
    "batch 1, odd channels, smaller than a tile": ((1, 3, 5, 6), 3, 1, 1, "float32"),
    "smaller than the kernel": ((2, 2, 3, 2), 5, 1, 2, "bfloat16"),
    "one pixel": ((1, 1, 1, 1), 3, 2, 1, "float32"),
    "stride 2, odd sizes": ((2, 5, 7, 9), 3, 2, 1, "float16"),
    "stride 2, a row never read": ((1, 4, 6, 8), 3, 2, 0, "float32"),
    "stride 2, 5x5": ((1, 6, 5, 4), 5, 2, 2, "bfloat16"),
    "stride 2, 7x7": ((1, 3, 5, 3), 7, 2, 3, "float16"),
    "no padding": ((1, 4, 4, 5), 3, 1, 0, "float16"),
    "all the padding there can be": ((1, 6, 3, 3), 3, 2, 2, "float32"),
    "even kernel": ((1, 6, 4, 3), 4, 1, 2, "bfloat16"),
    "2x2, stride 2": ((2, 6, 5, 6), 2, 2, 0, "float32"),
    "rectangular": ((2, 6, 6, 7), (3, 5), (2, 1), (1, 2), "float32"),
    "one row of taps, stride 2": ((1, 2, 5, 4), (1, 3), 2, (0, 1), "bfloat16"),
    "more threads than one program": ((3, 72, 3, 8), 3, 1, 1, "bfloat16"),
}


# ------------------------------------------------------------------------------------------------- the child's side


def guarded(shape: tuple[int, ...], dtype: torch.dtype, device: str, channels_last: bool) -> torch.Tensor:
    """A tensor of NaN amid NaN: what is read beside it shows in the result, what is written there shows as well."""
    numel = torch.Size(shape).numel()
    memory = torch.full((numel + 2 * GUARD,), float("nan"), dtype=dtype, device=device)
    layout = torch.channels_last if channels_last else torch.contiguous_format
    strides = torch.empty(shape, device="meta", memory_format=layout).stride()
    return memory.as_strided(shape, strides, GUARD)


def broken_guards(tensor: torch.Tensor) -> bool:
    memory = tensor.as_strided((tensor.numel() + 2 * GUARD,), (1,), 0)
    return not bool(torch.cat([memory[:GUARD], memory[-GUARD:]]).isnan().all())


def convolve(part: str, x: torch.Tensor, w: torch.Tensor, dy: torch.Tensor | None, stride: Any, padding: Any):
    """The float64 result, by PyTorch's convolution and its autograd."""
    x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
    y = F.conv2d(x, w, stride=stride, padding=padding, groups=x.shape[1])
    if part == "forward" or dy is None:
        return y.detach()
    return torch.autograd.grad(y, x if part == "input_grad" else w, dy)[0]


def run_case(
    part: str,
    shape: list[int],
    k: Any,
    stride: Any,
    padding: Any,
    dtype: str,
    config: dict[str, Any] | None = None,
    every: bool = False,
) -> dict[str, float]:
    """The largest error over its bound, by configuration: right results are at most 1. NaN counts as infinite."""
    from wholestep.backends.triton import depthwise

    device = "cuda" if torch.cuda.is_available() else "cpu"
    element = getattr(torch, dtype)
    torch.manual_seed(0)
    n, c = shape[:2]
    kernel = depthwise.pair(k)
    out_shape = (n, c, *depthwise.output_size(*shape[2:], kernel, stride, padding))
    reason = depthwise.why_not(shape, (c, 1, *kernel), stride, padding, 1, c, element)
    assert reason == "", reason

    def drawn(size: tuple[int, ...], channels_last: bool = True, kind: torch.dtype = element) -> torch.Tensor:
        return guarded(size, kind, device, channels_last).copy_(torch.randn(size))

    x, dy, w = drawn(tuple(shape)), drawn(out_shape), drawn((c, 1, *kernel), channels_last=False)
    exact = [t.double().cpu() for t in (x, w, dy)]
    want = convolve(part, *exact, stride, padding)
    bound = ROUNDING[dtype] * want.abs() + SUMMING * convolve(part, *(t.abs() for t in exact), stride, padding) + 1e-30
    how: dict[str, Any] = {"stride": stride, "padding": padding}
    chosen = [depthwise.Config(**config)] if config else depthwise.configs(part, shape, k, stride, element)
    found = {}
    for own in chosen if every else chosen[:1]:
        if part == "input_grad":
            result = guarded(tuple(shape), element, device, True)
            touched = [result]
            depthwise.input_grad(dy, w, result, config=own, **how)
        elif part == "weight_grad":
            result = guarded(tuple(w.shape), element, device, False)
            size = depthwise.partials_shape(out_shape, w.shape, own)
            touched = [result, guarded(size, torch.float32, device, False)]
            depthwise.weight_grad(x, dy, *touched, config=own, **how)
        else:
            result = guarded(out_shape, element, device, True)
            touched = [result]
            depthwise.forward(x, w, result, config=own, **how)
        error = ((result.double().cpu() - want).abs() / bound).max().item()
        if any(broken_guards(t) for t in (x, dy, w, *touched)):
            error = float("inf")
        found[str(own)] = error if error == error else float("inf")
    return found


# ------------------------------------------------------------------------------------------------- the tests' side


@pytest.fixture(scope="module")
def child() -> Iterator[Ask]:
    pytest.importorskip("triton")
    with asking("tests.backends.triton.test_depthwise") as ask:
        yield ask


def assert_right(errors: dict[str, float], least: int = 1) -> None:
    assert len(errors) >= least
    assert all(error <= 1 for error in errors.values()), errors


#: the list depends on the number of taps; on the stride only for the input gradient
#: (the largest windows take long to interpret: one part of them)
LISTS = [(part, k, 1) for part in PARTS for k in (3, 5)] + [
    ("forward", 7, 1),
    ("input_grad", 3, 2),
    ("input_grad", 5, 2),
]


@pytest.mark.parametrize(("part", "k", "stride"), LISTS)
def test_every_configuration_is_right(child: Ask, part: str, k: int, stride: int) -> None:
    assert_right(child(part, (2, 4, 2, 9), k, stride, k // 2, "bfloat16", every=True), least=3)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("part", PARTS)
def test_sizes(child: Ask, part: str, case: str) -> None:
    assert_right(child(part, *CASES[case]))


@pytest.mark.parametrize("part", ["forward", "weight_grad"])
def test_short_walks_over_several_images(child: Ask, part: str) -> None:
    assert_right(child(part, (3, 3, 5, 7), 3, 1, 1, "float32", config=SMALL_CONFIG))


@pytest.mark.parametrize("rows", [2, 3])
def test_short_walks_of_the_input_gradient_begin_at_either_phase(child: Ask, rows: int) -> None:
    config = SMALL_CONFIG | {"columns": 4, "rows": rows, "prefetch": False}
    assert_right(child("input_grad", (1, 3, 7, 6), 3, 2, 1, "float32", config=config))


def test_the_judge_sees_a_wrong_result() -> None:
    x, w, dy = torch.randn(1, 2, 4, 4).double(), torch.randn(2, 1, 3, 3).double(), torch.randn(1, 2, 4, 4).double()
    want = convolve("input_grad", x, w, dy, 1, 1)
    flipped = convolve("input_grad", x, w.flip(2, 3), dy, 1, 1)
    assert not torch.allclose(want, flipped)
    spilled = guarded((2, 2, 3, 3), torch.float32, "cpu", True)
    assert not broken_guards(spilled)
    spilled.as_strided((1,), (1,), GUARD - 1).fill_(1.0)
    assert broken_guards(spilled)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, ""),
        ({"dtype": torch.float64}, "float64"),
        ({"groups": 4}, "not depthwise"),
        ({"weight_shape": (16, 1, 3, 3)}, "not depthwise"),
        ({"dilation": 2}, "dilation 2"),
        ({"weight_shape": (8, 1, 9, 9)}, "kernel 9x9"),
        ({"stride": 3}, "stride 3"),
        ({"padding": 3}, "not smaller than the kernel"),
        ({"shape": (0, 8, 9, 9)}, "nothing to compute"),
        ({"shape": (1, 8, 1, 1), "padding": 0}, "nothing to compute"),
        ({"shape": (1, 8, 30000, 30000)}, "32-bit"),
        ({"shape": (8, 9, 9)}, "dimensions"),
    ],
)
def test_why_not(change: dict[str, Any], reason: str) -> None:
    pytest.importorskip("triton")
    from wholestep.backends.triton.depthwise import why_not

    case = dict(
        shape=(2, 8, 9, 9), weight_shape=(8, 1, 3, 3), stride=1, padding=1, dilation=1, groups=8, dtype=torch.bfloat16
    )
    answer = why_not(**case | change)
    assert answer == "" if reason == "" else reason in answer


def test_what_does_not_fit_is_refused_before_anything_runs() -> None:
    pytest.importorskip("triton")
    from wholestep.backends.triton import depthwise
    from wholestep.errors import InputError

    x = torch.empty(2, 4, 6, 6).contiguous(memory_format=torch.channels_last)
    w = torch.empty(4, 1, 3, 3)
    how: dict[str, Any] = dict(stride=1, padding=1, config=depthwise.Config(4, 4))
    with pytest.raises(InputError, match="channels-last"):
        depthwise.forward(torch.empty(2, 4, 6, 6), w, x, **how)
    with pytest.raises(InputError, match="output has shape"):
        depthwise.forward(x, w, torch.empty(2, 4, 8, 8).contiguous(memory_format=torch.channels_last), **how)
    with pytest.raises(InputError, match="partials must be float32 of shape"):
        depthwise.weight_grad(x, x, w, torch.empty(1, 9, 4), **how)
    with pytest.raises(InputError, match="multiple of the configuration's vector"):
        depthwise.forward(x, w, x, **how | {"config": depthwise.Config(4, 4, vector=3)})
    small = torch.empty(2, 4, 3, 3).contiguous(memory_format=torch.channels_last)
    with pytest.raises(InputError, match="multiple of the stride"):
        depthwise.input_grad(small, w, x, stride=2, padding=1, config=depthwise.Config(3, 4))


def test_kernels_compile_for_a_gpu_that_is_not_here() -> None:
    """The interpreter accepts more than the compiler does."""
    pytest.importorskip("triton")
    script = (
        "from bench.kernels_depthwise import Layer, candidates, compile_for_sm90\n"
        "for part in ('weight_grad', 'forward'):\n"
        "    layer = Layer(16, 14, 3, 1, 4)\n"
        "    found = compile_for_sm90(part, layer, candidates(part, layer)[0])\n"
        "    assert found['registers'] <= 255 and found['spilled'] == 0, found\n"
    )
    done = warm.run(["-c", script], os.environ)
    assert done.returncode == 0, done.stderr


if __name__ == "__main__":
    serve(run_case)
