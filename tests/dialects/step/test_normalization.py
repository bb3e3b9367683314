"""Normalisations against eager PyTorch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from .harness import check, forward, gradients, randn


@pytest.mark.parametrize("affine", ["none", "weight", "both"])
@pytest.mark.parametrize(("shape", "trailing"), [((4, 6), 1), ((2, 3, 5), 2), ((2, 3, 5), 1), ((3, 4), 2), ((7,), 1)])
def test_layer_norm(shape, trailing, affine):
    inner = shape[-trailing:]
    weight = None if affine == "none" else randn(*inner, seed=1)
    bias = randn(*inner, seed=2) if affine == "both" else None
    check(
        "layer_norm",
        [randn(*shape), weight, bias],
        lambda x, w, b: torch.native_layer_norm(x, inner, w, b, 1e-3),
        exact="all",
        trailing=trailing,
        eps=1e-3,
    )


def test_layer_norm_in_bf16_keeps_wide_statistics():
    x, w, b = (t.bfloat16() for t in (randn(4, 16), randn(16), randn(16, seed=1)))
    y, mean, rstd = forward("layer_norm", [x, w, b], eps=1e-5, trailing=1)
    assert torch.equal(y, F.layer_norm(x, (16,), w, b))
    assert mean.dtype is rstd.dtype is torch.float32
    for weight in (w, w.float()):
        args = [t.clone().requires_grad_() for t in (x, weight, weight)]
        dy = randn(4, 16, seed=5).bfloat16()
        truth = torch.autograd.grad(F.layer_norm(args[0], (16,), *args[1:]), args, dy)
        for got, want in zip(gradients("layer_norm", [x, weight, weight], [dy, None, None]), truth, strict=True):
            assert torch.equal(got, want)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(("shape", "trailing"), [((4, 6), 1), ((2, 3, 5), 2), ((3, 4), 2)])
def test_rms_norm(shape, trailing, weighted):
    inner = shape[-trailing:]
    weight = randn(*inner, seed=1) if weighted else None
    check(
        "rms_norm",
        [randn(*shape), weight],
        lambda x, w: F.rms_norm(x, inner, w, 1e-3),
        exact="all",
        trailing=trailing,
        eps=1e-3,
    )
    dims = tuple(range(len(shape) - trailing, len(shape)))

    def both(x, w):
        return F.rms_norm(x, inner, w, 1e-3), torch.rsqrt(x.pow(2).mean(dims, keepdim=True) + 1e-3)

    check("rms_norm", [randn(*shape), weight], both, trailing=trailing, eps=1e-3)


def test_rms_norm_in_bf16():
    x, w, dy = randn(4, 16).bfloat16(), randn(16).bfloat16(), randn(4, 16, seed=3).bfloat16()
    args = [t.clone().requires_grad_() for t in (x, w)]
    y = F.rms_norm(args[0], (16,), args[1], 1e-6)
    assert torch.equal(forward("rms_norm", [x, w])[0], y.detach())
    for got, want in zip(gradients("rms_norm", [x, w], [dy, None]), torch.autograd.grad(y, args, dy), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("affine", ["none", "both"])
@pytest.mark.parametrize(("shape", "groups"), [((2, 6), 3), ((2, 6, 5), 2), ((3, 4, 5, 3), 4), ((2, 4, 2, 3, 2), 1)])
def test_group_norm(shape, groups, affine):
    weight, bias = (None, None) if affine == "none" else (randn(shape[1], seed=1), randn(shape[1], seed=2))
    inner = 1
    for d in shape[2:]:
        inner *= d
    check(
        "group_norm",
        [randn(*shape), weight, bias],
        lambda x, w, b: torch.native_group_norm(x, w, b, shape[0], shape[1], inner, groups, 1e-3),
        exact="values",
        groups=groups,
        eps=1e-3,
    )
    check(
        "group_norm",
        [randn(*shape), weight, bias],
        lambda x, w, b: F.group_norm(x, groups, w, b, 1e-3),
        exact="all",
        groups=groups,
        eps=1e-3,
    )


@pytest.mark.parametrize("affine", ["none", "both"])
@pytest.mark.parametrize("running", [False, True])
@pytest.mark.parametrize("shape", [(4, 3), (2, 3, 5), (2, 3, 4, 5), (2, 3, 2, 3, 2)])
def test_batch_norm_in_training(shape, running, affine):
    weight, bias = (None, None) if affine == "none" else (randn(3, seed=1), randn(3, seed=2))
    state = [randn(3, seed=3), randn(3, seed=4).abs()] if running else [None, None]

    def reference(x, w, b, mean, var):
        mean, var = (None if t is None else t.detach().clone() for t in (mean, var))
        y = F.batch_norm(x, mean, var, w, b, True, 0.3, 1e-3)
        dims = [i for i in range(x.dim()) if i != 1]
        rstd = torch.rsqrt(x.var(dims, correction=0) + 1e-3)
        return (y, x.mean(dims), rstd) if mean is None else (y, x.mean(dims), rstd, mean, var)

    check("batch_norm", [randn(*shape), weight, bias, *state], reference, training=True, momentum=0.3, eps=1e-3)


@pytest.mark.parametrize("affine", ["none", "weight", "both"])
@pytest.mark.parametrize("shape", [(4, 3), (2, 3, 4, 5), (1, 3, 1, 1)])
def test_batch_norm_with_running_statistics(shape, affine):
    weight = None if affine == "none" else randn(3, seed=1)
    bias = randn(3, seed=2) if affine == "both" else None
    mean, var = randn(3, seed=3), randn(3, seed=4).abs()

    def reference(x, w, b, *_):
        return F.batch_norm(x, mean.to(x.dtype), var.to(x.dtype), w, b, False, 0.3, 1e-3)

    check("batch_norm", [randn(*shape), weight, bias, mean, var], reference, training=False, momentum=0.3, eps=1e-3)


def test_batch_norm_is_bitwise_eager_and_keeps_channels_last():
    x = randn(2, 3, 4, 5).float().to(memory_format=torch.channels_last)
    w, b, mean, var = (randn(3, seed=s).float().abs() for s in range(4))
    state = mean.clone(), var.clone()
    truth = F.batch_norm(x, *state, w, b, True, 0.1, 1e-5)
    y, _, _, new_mean, new_var = forward("batch_norm", [x, w, b, mean, var])
    assert torch.equal(y, truth) and torch.equal(new_mean, state[0]) and torch.equal(new_var, state[1])
    assert y.is_contiguous(memory_format=torch.channels_last)


def test_batch_norm_in_bf16():
    x, dy = randn(4, 3, 5).bfloat16(), randn(4, 3, 5, seed=1).bfloat16()
    for w in (randn(3).bfloat16(), randn(3).float()):
        args = [t.clone().requires_grad_() for t in (x, w, w)]
        mean, var = torch.zeros(3, dtype=w.dtype), torch.ones(3, dtype=w.dtype)
        y = F.batch_norm(args[0], mean.clone(), var.clone(), *args[1:], True)
        results = forward("batch_norm", [x, w, w, mean, var])
        assert torch.equal(results[0], y.detach()) and results[1].dtype is torch.float32
        got = gradients("batch_norm", [x, w, w, mean, var], [dy, None, None, None, None])
        for mine, want in zip(got, torch.autograd.grad(y, args, dy), strict=False):
            assert torch.equal(mine, want)


def test_bad_norms_are_refused():
    from wholestep.errors import VerifyError

    with pytest.raises(VerifyError, match="groups"):
        forward("group_norm", [randn(2, 4, 3)], groups=3)
    with pytest.raises(VerifyError, match="weight must have shape"):
        forward("layer_norm", [randn(2, 4), randn(3)], trailing=1)
    with pytest.raises(VerifyError, match="training must be true"):
        forward("batch_norm", [randn(2, 4)], training=False)
    with pytest.raises(VerifyError, match="come together"):
        forward("batch_norm", [randn(2, 4), None, None, randn(4)])
    with pytest.raises(VerifyError, match="one value per channel"):
        forward("batch_norm", [randn(1, 4)])
