"""Pooling against eager PyTorch."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from wholestep.dialects.step import StepBuilder, tensor_type
from wholestep.dialects.step.pooling import Places, possible_winners
from wholestep.ir import add_function, module

from .harness import check, forward, randn

MAX = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}
AVERAGE = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}
ADAPTIVE = {1: F.adaptive_avg_pool1d, 2: F.adaptive_avg_pool2d, 3: F.adaptive_avg_pool3d}

WINDOWS = [
    ((2, 3, 9), (2,), (2,), (0,)),
    ((2, 3, 10), (3,), (2,), (1,)),
    ((3, 8), (3,), (3,), (1,)),
    ((2, 3, 8, 7), (2, 2), (2, 2), (0, 0)),
    ((2, 3, 8, 7), (3, 2), (2, 3), (1, 1)),
    ((3, 8, 7), (3, 3), (2, 2), (1, 1)),
    ((2, 3, 8, 8), (3, 3), (1, 1), (1, 1)),
    ((2, 2, 5, 6, 7), (2, 3, 2), (2, 2, 3), (1, 1, 0)),
]


@pytest.mark.parametrize("ceil_mode", [False, True])
@pytest.mark.parametrize(("shape", "kernel", "stride", "padding"), WINDOWS)
def test_max_pool(shape, kernel, stride, padding, ceil_mode):
    n = len(kernel)
    for dilation in (1, 2):
        options = dict(kernel=kernel, stride=stride, padding=padding, dilation=(dilation,) * n, ceil_mode=ceil_mode)
        check(
            "max_pool",
            [randn(*shape)],
            lambda x, d=dilation: MAX[n](x, kernel, stride, padding, d, ceil_mode, True),
            exact="all",
            **options,
        )


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("ceil_mode", [False, True])
@pytest.mark.parametrize(("shape", "kernel", "stride", "padding"), WINDOWS)
def test_avg_pool(shape, kernel, stride, padding, ceil_mode, include):
    n = len(kernel)
    options = dict(kernel=kernel, stride=stride, padding=padding, ceil_mode=ceil_mode, count_include_pad=include)
    check(
        "avg_pool",
        [randn(*shape)],
        lambda x: AVERAGE[n](x, kernel, stride, padding, ceil_mode, include),
        exact="all",
        **options,
    )
    if n > 1:
        check(
            "avg_pool",
            [randn(*shape)],
            lambda x: AVERAGE[n](x, kernel, stride, padding, ceil_mode, include, 5),
            exact="all",
            divisor_override=5,
            **options,
        )


@pytest.mark.parametrize(
    ("shape", "size"),
    [
        ((2, 3, 9), (3,)),
        ((2, 3, 10), (4,)),
        ((2, 3, 7), (1,)),
        ((2, 3, 8, 6), (1, 1)),
        ((2, 3, 8, 6), (4, 3)),
        ((2, 3, 7, 5), (3, 2)),
        ((3, 7, 5), (2, 5)),
        ((2, 3, 2, 2), (3, 5)),
        ((2, 2, 5, 4, 6), (2, 4, 3)),
        ((2, 2, 5, 4, 6), (1, 1, 1)),
    ],
)
def test_adaptive_avg_pool(shape, size):
    check("adaptive_avg_pool", [randn(*shape)], lambda x: ADAPTIVE[len(size)](x, size), exact="all", size=size)


def test_misfits_are_refused():
    from wholestep.errors import VerifyError

    with pytest.raises(VerifyError, match="half"):
        forward("avg_pool", [randn(2, 3, 9)], kernel=(2,), stride=(2,), padding=(2,))
    with pytest.raises(VerifyError, match="one to three"):
        forward("adaptive_avg_pool", [randn(2, 3, 9, 9, 9)], size=(2,))


@pytest.mark.parametrize("in_window", [False, True])
@pytest.mark.parametrize(("shape", "kernel", "stride", "padding"), [*WINDOWS, ((3, 6, 11, 10), (3, 3), (2, 2), (1, 1))])
def test_made_up_winners_lie_in_their_windows(shape, kernel, stride, padding, in_window):
    """Partial windows of `ceil_mode` too: ATen's gradient writes wherever it is told to."""
    n = len(kernel)
    for dilation in (1, 2):
        options = dict(kernel=kernel, stride=stride, padding=padding, dilation=(dilation,) * n, ceil_mode=True)
        function = add_function(module(), "f", [tensor_type(randn(*shape))])
        b = StepBuilder(function.regions[0].block)
        values, indices = b.max_pool(function.regions[0].block.arguments[0], in_window=in_window, **options)
        op = b.max_pool_grad(values, indices, input_shape=shape, **options).op
        winners = possible_winners(op, torch.device("cpu"))
        if in_window:
            winners = Places(op, shape, values.type.shape).in_x(winners)
        assert ((winners >= 0) & (winners < math.prod(shape[-n:]))).all()
        for dim, size in enumerate(shape[-n:]):
            at = winners // math.prod(shape[len(shape) - n + dim + 1 :]) % size
            starts = torch.arange(values.type.shape[dim - n]) * stride[dim] - padding[dim]
            taps = at - starts.view(*[-1 if d == dim else 1 for d in range(n)])
            assert ((taps % dilation == 0) & (taps >= 0) & (taps <= dilation * (kernel[dim] - 1))).all()
