"""Input gradients of convolutions in other forms: the same numbers, and nothing but what is possible."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.dialects.step.harness import randn
from wholestep.dialects.loop.reference import run
from wholestep.dialects.step import StepBuilder, tensor_type
from wholestep.ir import BF16, F64, TensorType, add_function, finish_function, module, verify
from wholestep.ir.core import Op
from wholestep.ir.passes import run_pipeline
from wholestep.runtime.executor import Executable
from wholestep.transforms.backward_forms import FORMS, GradientAsConvolution, OwnPadding
from wholestep.transforms.loops import lowered
from wholestep.transforms.opportunity import opportunities, take
from wholestep.transforms.pointwise_convolution import StridedGradient

CASES = [
    (GradientAsConvolution, (2, 4, 6, 5), (3, 3), (1, 1), (1, 1), (1, 1)),
    (GradientAsConvolution, (1, 4, 9, 9), (3, 2), (1, 1), (2, 0), (2, 1)),
    (GradientAsConvolution, (1, 4, 3, 4, 5), (1, 3, 2), (1, 1, 1), (0, 1, 1), (1, 1, 1)),
    (StridedGradient, (2, 4, 6, 5), (1, 1), (2, 2), (0, 0), (1, 1)),
    (StridedGradient, (2, 4, 7, 9), (1, 1), (3, 1), (0, 0), (1, 1)),
    (StridedGradient, (1, 4, 4, 5, 6), (1, 1, 1), (2, 2, 3), (0, 0, 0), (1, 1, 1)),
]


@pytest.mark.parametrize(("form", "shape", "kernel", "stride", "padding", "dilation"), CASES)
def test_the_same_to_the_last_digits(form: Any, shape, kernel, stride, padding, dilation) -> None:
    x, w = randn(*shape), randn(6, 4, *kernel, seed=1)
    how = dict(stride=stride, padding=padding, dilation=dilation)
    convolve = torch.nn.functional.conv2d if len(kernel) == 2 else torch.nn.functional.conv3d
    leaf = x.clone().requires_grad_()
    y = convolve(leaf, w, **how)
    dy = randn(*y.shape, seed=2)
    (wanted,) = torch.autograd.grad(y, leaf, dy)
    root = module()
    function = add_function(root, "f", [tensor_type(dy), tensor_type(w)])
    block = function.regions[0].block
    dx = StepBuilder(block, phase="backward").conv_input_grad(*block.arguments, input_shape=shape, **how)
    finish_function(function, [dx])
    form().apply(dx.op)
    verify(root)
    assert not any(op.name == "step.conv_input_grad" for op in block)
    torch.testing.assert_close(Executable(function)([dy, w])[0], wanted, rtol=1e-12, atol=1e-12)


def program(stride: int, taps: int, padding: int, groups: int = 1, laid: bool = True) -> tuple[Op, Op]:
    """A gradient of bf16 images that lie channels-last."""
    root = module()
    size = (8 + 2 * padding - taps) // stride + 1
    types = [TensorType((2, 8, size, size), BF16), TensorType((8, 8 // groups, taps, taps), BF16)]
    function = add_function(root, "f", types)
    dy, w = function.regions[0].block.arguments
    b = StepBuilder(function.regions[0].block, phase="backward")
    dy = b.layout(dy, order=(0, 2, 3, 1)) if laid else dy
    how = dict(stride=(stride,) * 2, padding=(padding,) * 2, dilation=(1, 1), groups=groups)
    finish_function(function, [b.relu(b.conv_input_grad(dy, w, input_shape=(2, 8, 8, 8), **how))])
    return root, function


@pytest.mark.parametrize(
    ("options", "taken", "reason"),
    [
        ((1, 3, 1), "gradient_as_convolution", ""),
        ((2, 1, 0), "strided_gradient", ""),
        ((2, 3, 1), "", "skips pixels"),
        ((1, 3, 3), "", "pads by more"),
        ((1, 3, 1, 2), "", "in 2 groups"),
        ((2, 1, 0, 2), "", "in groups"),
        ((2, 1, 1), "", "it pads"),
        ((1, 3, 1, 1, False), "", "channels-last"),
        ((2, 1, 0, 1, False), "", "not channels-last"),
    ],
)
def test_what_is_taken(options: tuple[Any, ...], taken: str, reason: str) -> None:
    root, _ = program(*options)
    forms = [o for o in opportunities(root) if o.transformation in ("gradient_as_convolution", "strided_gradient")]
    assert len(forms) == 1 and reason in forms[0].why_not and bool(forms[0].why_not) == bool(reason)
    done = take(root, FORMS)
    verify(root)
    assert done == ([f"{taken} f/-/backward/conv_input_grad#0"] if taken else [])
    if taken:
        assert forms[0].change.bytes < 0
        again, _ = program(*options)
        assert take(again, FORMS, [f"{taken} *"]) == []


def test_zeros_between_pixels_are_part_of_the_reader() -> None:
    """The kernel that reads the gradient of a convolution that skips pixels reads the product alone."""
    small, other = randn(1, 4, 2, 3), randn(1, 4, 4, 5, seed=1)
    function = add_function(module(), "f", [tensor_type(small), tensor_type(other)])
    block = function.regions[0].block
    b = StepBuilder(block)
    wide = b.slice_grad(block.arguments[0], dim=2, start=0, end=3, stride=2, size=4)
    wide = b.slice_grad(wide, dim=3, start=0, end=5, stride=2, size=5)
    finish_function(function, [b.relu(b.add(wide, block.arguments[1]))])
    found = torch.empty(1, 4, 4, 5, dtype=torch.float64)
    run(lowered(function), [small, other], [found])
    other[:, :, ::2, ::2] += small
    assert torch.equal(found, other.relu())


def padded_program(element: Any = F64, groups: int = 4, border: tuple[int, int] = (0, 1)) -> tuple[Op, Op]:
    """A convolution of an image that was padded on its own, with both gradients; every second pixel is a window's."""
    low, high = border
    size = 8 + low + high
    out = (size - 3) // 2 + 1
    types = [TensorType(s, element) for s in ((2, 4, 8, 8), (4, 4 // groups, 3, 3), (2, 4, out, out))]
    root = module()
    function = add_function(root, "f", types)
    block = function.regions[0].block
    x, w, dy = block.arguments
    b = StepBuilder(block)
    how = dict(stride=(2, 2), padding=(0, 0), dilation=(1, 1), groups=groups)
    wide = b.layout(b.pad(x, low=(0, 0, low, low), high=(0, 0, high, high), value=0.0), order=(0, 2, 3, 1))
    y = b.conv(wide, w, None, **how)
    dx = b.conv_input_grad(dy, w, input_shape=(2, 4, size, size), **how)
    dx = b.slice(b.slice(dx, dim=2, start=low, end=low + 8), dim=3, start=low, end=low + 8)
    finish_function(function, [y, dx, b.conv_weight_grad(wide, dy, weight_shape=w.type.shape, **how)])
    return root, function


@pytest.mark.parametrize("border", [(0, 1), (1, 2)])
def test_a_padded_image_is_read_without_its_border(border: tuple[int, int]) -> None:
    _, function = padded_program(border=border)
    inputs = [randn(*v.type.shape, seed=i) for i, v in enumerate(function.regions[0].block.arguments)]
    wanted = Executable(function)(inputs)
    root, function = padded_program(border=border)
    for op in [o for o in function.regions[0].block if o.name.startswith("step.conv")]:
        OwnPadding().apply(op)
    run_pipeline(root, "dce")
    verify(root)
    assert not {op.name for op in function.regions[0].block} & {"step.pad", "step.slice"}
    for mine, true in zip(Executable(function)(inputs), wanted, strict=True):
        torch.testing.assert_close(mine, true, rtol=1e-12, atol=1e-12)


def test_loops_of_a_convolution_that_pads_before_and_behind_apart() -> None:
    x, w = randn(1, 2, 4, 4), randn(2, 1, 3, 3, seed=1)
    function = add_function(module(), "f", [tensor_type(x), tensor_type(w)])
    block = function.regions[0].block
    how = dict(stride=(2, 2), padding=(0, 0), padding_after=(1, 1), dilation=(1, 1), groups=2)
    finish_function(function, [StepBuilder(block).conv(*block.arguments, None, **how)])
    found = torch.empty(1, 2, 2, 2, dtype=torch.float64)
    run(lowered(function), [x, w], [found])
    wanted = torch.nn.functional.conv2d(torch.nn.functional.pad(x, (0, 1, 0, 1)), w, stride=2, groups=2)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def test_who_pads_itself() -> None:
    for options, reason in (((BF16,), ""), ((F64,), "16 bits"), ((BF16, 2), "groups of several")):
        root, _ = padded_program(*options)
        mine = [o for o in opportunities(root) if o.transformation == "own_padding"]
        assert len(mine) == 3 and all(reason in o.why_not and bool(o.why_not) == bool(reason) for o in mine)
        assert all((o.change.bytes < 0) == (not reason) for o in mine)
        assert len(take(root, FORMS)) == (0 if reason else 3)
