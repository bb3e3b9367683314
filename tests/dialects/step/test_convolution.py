"""Convolution against eager PyTorch, bitwise but for the gradient of the bias, which is a sum of its own here."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from .harness import check, forward, gradients, randn

FORWARD = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
TRANSPOSED = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("spatial", "kernel", "stride", "padding", "dilation", "groups"),
    [
        ((9,), (3,), (1,), (0,), (1,), 1),
        ((9,), (3,), (2,), (2,), (2,), 2),
        ((6, 7), (3, 2), (1, 1), (1, 1), (1, 1), 1),
        ((6, 7), (3, 3), (2, 3), (1, 0), (1, 2), 2),
        ((5, 5), (1, 1), (1, 1), (0, 0), (1, 1), 1),
        ((6, 6), (3, 3), (1, 1), (1, 1), (1, 1), 4),
        ((4, 5, 3), (2, 3, 1), (1, 2, 1), (1, 1, 0), (1, 1, 1), 1),
    ],
)
def test_conv(spatial, kernel, stride, padding, dilation, groups, bias):
    x, w = randn(2, 4, *spatial), randn(8, 4 // groups, *kernel, seed=1)
    check(
        "conv",
        [x, w, randn(8, seed=2) if bias else None],
        lambda x, w, b: FORWARD[len(spatial)](x, w, b, stride, padding, dilation, groups),
        exact="values" if bias else "all",
        stride=stride,
        padding=padding,
        dilation=dilation,
        groups=groups,
    )


@pytest.mark.parametrize(
    ("spatial", "kernel", "stride", "before", "after", "groups"),
    [((8, 6), (3, 3), (2, 2), (0, 0), (1, 1), 4), ((7, 9), (5, 3), (1, 2), (1, 2), (2, 0), 1)],
)
def test_padded_before_and_behind_apart(spatial, kernel, stride, before, after, groups):
    x, w = randn(2, 4, *spatial), randn(8, 4 // groups, *kernel, seed=1)
    border = (before[1], after[1], before[0], after[0])
    check(
        "conv",
        [x, w, None],
        lambda x, w, b: F.conv2d(F.pad(x, border), w, b, stride, groups=groups),
        stride=stride,
        padding=before,
        padding_after=after,
        dilation=(1, 1),
        groups=groups,
    )


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("spatial", "kernel", "stride", "padding", "extra", "dilation", "groups"),
    [
        ((5,), (3,), (2,), (1,), (1,), (1,), 1),
        ((4, 5), (3, 2), (2, 3), (1, 0), (1, 2), (1, 1), 2),
        ((4, 5), (2, 2), (2, 2), (0, 0), (), (1, 1), 1),
        ((4, 3), (3, 3), (1, 1), (1, 1), (0, 0), (2, 1), 1),
        ((3, 2, 4), (2, 2, 2), (2, 1, 2), (0, 1, 0), (1, 0, 0), (1, 1, 1), 1),
    ],
)
def test_transposed_conv(spatial, kernel, stride, padding, extra, dilation, groups, bias):
    x, w = randn(2, 4, *spatial), randn(4, 6 // groups, *kernel, seed=1)
    check(
        "conv",
        [x, w, randn(6, seed=2) if bias else None],
        lambda x, w, b: TRANSPOSED[len(spatial)](x, w, b, stride, padding, extra or 0, groups, dilation),
        exact="values" if bias else "all",
        stride=stride,
        padding=padding,
        dilation=dilation,
        groups=groups,
        transposed=True,
        output_padding=extra,
    )


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("groups", [1, 8])
def test_gradients_are_bitwise_eager(layout, groups):
    x = randn(2, 8, 12, 12).float().to(memory_format=layout)
    w = randn(16, 8 // groups, 3, 3, seed=1).float().to(memory_format=layout)
    leaves = [t.clone().requires_grad_() for t in (x, w)]
    y = F.conv2d(*leaves, padding=1, groups=groups)
    dy = randn(*y.shape, seed=3).float().to(memory_format=layout)
    truth = torch.autograd.grad(y, leaves, dy)
    options = dict(stride=(1, 1), padding=(1, 1), dilation=(1, 1), groups=groups)
    for mine, want in zip(gradients("conv", [x, w], [dy], **options), truth, strict=True):
        assert torch.equal(mine, want)
        assert mine.is_contiguous(memory_format=layout) == want.is_contiguous(memory_format=layout)


def test_flops():
    from wholestep.dialects.step import StepBuilder
    from wholestep.ir import F32, Block, TensorType

    block = Block([TensorType((2, 4, 8, 8), F32), TensorType((6, 4, 3, 3), F32)])
    b = StepBuilder(block)
    y = b.conv(*block.arguments, stride=(1, 1), padding=(1, 1), dilation=(1, 1))
    macs = 2 * 6 * 8 * 8 * 4 * 9
    assert y.op.definition.flops(y.op) == 2 * macs
    dx, dw = y.op.definition.derivative(b, y.op, y)
    assert dx.op.definition.flops(dx.op) == dw.op.definition.flops(dw.op) == 2 * macs
    up = b.conv(y, block.arguments[1], stride=(2, 2), padding=(0, 0), dilation=(1, 1), transposed=True)
    assert up.op.definition.flops(up.op) == 2 * (2 * 6 * 8 * 8) * 4 * 9


def test_misfits_are_refused():
    from wholestep.errors import VerifyError

    options = dict(stride=(1,), padding=(0,), dilation=(1,))
    with pytest.raises(VerifyError, match="channels"):
        forward("conv", [randn(2, 4, 5), randn(3, 3, 2)], **options)
    with pytest.raises(VerifyError, match="empty"):
        forward("conv", [randn(2, 4, 5), randn(3, 4, 7)], **options)
    with pytest.raises(ValueError, match="does not fit"):
        forward("conv", [randn(4, 5), randn(4, 4)], **options)
