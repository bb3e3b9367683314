"""Convolutions in given memory: which plans have them on a GPU, and that the calls mean what ATen's convolution does.

cuDNN itself needs a GPU; here a stand-in behind its operator shows that it is called with the right arguments.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from wholestep.backends.convolutions import by_quick_kernels, convolve, in_parts, one_convolution, starts_slowly
from wholestep.backends.generated import region_of
from wholestep.backends.kernels import Kernel, Operand, spec_of, trace
from wholestep.dialects.step import StepBuilder, tensor_type
from wholestep.ir import add_function, finish_function, module

aten = torch.ops.aten
LAST = torch.channels_last


def window(rank: int, stride: int = 1, padding: int = 1, dilation: int = 1, transposed: bool = False, groups: int = 1):
    n = rank - 2
    return (stride,) * n, (padding,) * n, (dilation,) * n, transposed, (0,) * n, groups


def tensors(shapes: Sequence[Sequence[int]], layout: Any = torch.contiguous_format, dtype: Any = torch.float32):
    generator = torch.Generator().manual_seed(0)
    made = [torch.randn(*s, generator=generator, dtype=dtype) for s in shapes]
    return [t.contiguous(memory_format=layout) if t.dim() == 4 else t for t in made]


def kernel(shapes: Sequence[Sequence[int]], args: tuple, layout: Any = LAST, dtype: Any = torch.bfloat16) -> Kernel:
    """The kernel of a convolution of these tensors on a GPU."""
    given = tensors(shapes, layout, dtype)

    def run(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return aten.convolution.default(x, w, bias, *args)

    found, why = trace(run, [Operand(spec_of(t), "cuda") for t in given], [spec_of(run(*given))], torch.device("cuda"))
    assert why == ""
    return found


def kinds(found: Kernel) -> list[str]:
    return [s.kind for s in found.steps if s.kind != "view"]


IMAGE, WEIGHT = (2, 8, 6, 5), (4, 8, 3, 3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("layout", [LAST, torch.contiguous_format], ids=str)
def test_a_convolution_makes_its_result_in_place(layout: Any, dtype: Any) -> None:
    found = kernel([IMAGE, WEIGHT], window(4, 2), layout, dtype)
    assert kinds(found) == ["out"] and not found.allocates
    (result,) = found.specs
    assert torch.empty_strided(result.shape, result.strides).is_contiguous(memory_format=layout)
    assert found.over == [frozenset()]  # windows overlap: nothing may be written over what is read


def test_a_bias_is_added_in_place_and_a_sequence_is_an_image_of_one_row() -> None:
    assert kinds(kernel([IMAGE, WEIGHT, (4,)], window(4))) == ["out", "mutate"]
    found = kernel([(2, 8, 20), (4, 8, 3), (4,)], window(3, 2))
    assert kinds(found) == ["out", "mutate"] and found.specs[0].strides == (40, 10, 1)


@pytest.mark.parametrize(
    ("shapes", "args", "layout", "dtype"),
    [
        ([IMAGE, (8, 4, 3, 3)], window(4, transposed=True), LAST, torch.bfloat16),
        ([IMAGE, (8, 1, 3, 3)], window(4, groups=8), torch.contiguous_format, torch.bfloat16),  # ATen's own kernel
        ([IMAGE, WEIGHT], window(4), LAST, torch.float64),
    ],
    ids=["transposed", "depthwise row by row", "float64"],
)
def test_what_cudnn_would_not_do_is_left_to_aten(shapes: Any, args: tuple, layout: Any, dtype: Any) -> None:
    assert kinds(kernel(shapes, args, layout, dtype)) == ["new"]


@pytest.mark.parametrize("shapes", [[IMAGE, WEIGHT, (4,)], [(2, 8, 20), (4, 8, 3), (4,)]], ids=["image", "sequence"])
def test_the_parts_give_the_same_bits(shapes: Any) -> None:
    given = tensors(shapes)
    args = (*given, *window(given[0].dim(), 2, 2, 2))
    want = aten.convolution.default(*args)
    parts = in_parts(args, want, "cuda")
    assert parts is not None and in_parts(args, want, "cpu") is None
    torch.testing.assert_close(parts(), want, rtol=1e-5, atol=1e-6)


@pytest.fixture
def asked() -> Iterator[list[tuple]]:
    """A stand-in for cuDNN, and how it was called."""
    calls: list[tuple] = []

    def stand_in(x, w, padding, stride, dilation, groups, benchmark, deterministic, tf32, *, out):  # type: ignore[no-untyped-def]
        calls.append((benchmark, deterministic, tf32))
        return out.copy_(torch.nn.functional.conv2d(x, w, None, stride, padding, dilation, groups))

    library = torch.library.Library("aten", "IMPL")
    library.impl("cudnn_convolution.out", stand_in, "CPU")
    yield calls
    del library  # takes the stand-in out again


def test_cudnn_is_called_with_the_arguments_of_the_convolution(asked: list[tuple]) -> None:
    x, w = tensors([(2, 8, 12, 15), (6, 4, 3, 2)])
    args = (x, w, None, (2, 1), (1, 3), (1, 2), False, (0, 0), 2)
    want = aten.convolution.default(*args)
    out = torch.full_like(want, float("nan"))
    convolve(*args, out=out)
    torch.testing.assert_close(out, want)
    cudnn = torch.backends.cudnn
    assert asked == [(cudnn.benchmark, cudnn.deterministic, cudnn.allow_tf32)]


@pytest.mark.parametrize("layout", [LAST, torch.contiguous_format], ids=str)
def test_a_region_of_one_convolution_is_timed_as_a_plan_runs_it(asked: list[tuple], layout: Any) -> None:
    """Where the layout that it asks for is the one there; otherwise a copy would be part of it."""
    w, x = tensors([WEIGHT, IMAGE], layout)
    function = add_function(module(), "f", [tensor_type(t) for t in (w, x)])
    b, (kernel, image) = StepBuilder(function.regions[0].block), function.regions[0].block.arguments
    y = b.conv(b.layout(image, order=(0, 2, 3, 1)), kernel, stride=(2, 1), padding=(1, 0), dilation=(1, 1))
    finish_function(function, [y])
    run = one_convolution(region_of(function, None, [spec_of(w), spec_of(x)], torch.device("cuda")))
    assert (run is None) == (layout is not LAST)
    assert one_convolution(region_of(function, None, [spec_of(w), spec_of(x)], torch.device("cpu"))) is None
    if run is not None:
        want = torch.nn.functional.conv2d(x, w, None, (2, 1), (1, 0))
        out = torch.full_like(want, float("nan"))
        run(w, x, out)
        torch.testing.assert_close(out, want)
        assert len(asked) == 1


@pytest.mark.parametrize(("groups", "device"), [(8, "cuda"), (1, "cuda"), (4, "cuda"), (8, "cpu")])
def test_depthwise_convolutions_that_are_compared_with_do_without_cudnn(groups: int, device: str) -> None:
    """It compiles a kernel for each of them; where results alone count those that ATen has will do."""
    w, x = tensors([(8, 8 // groups, 3, 3), IMAGE])
    function = add_function(module(), "f", [tensor_type(t) for t in (w, x)])
    b, (kernel, image) = StepBuilder(function.regions[0].block), function.regions[0].block.arguments
    y = b.conv(image, kernel, stride=(1, 1), padding=(1, 1), dilation=(1, 1), groups=groups)
    finish_function(function, [y])
    region = region_of(function, None, [spec_of(w), spec_of(x)], torch.device(device))
    is_on = torch._C._get_cudnn_enabled
    with pytest.raises(KeyError), by_quick_kernels(region):
        assert is_on() == (groups != 8 or device == "cpu") == (not starts_slowly(region))
        raise KeyError
    assert is_on()
