"""Attention against eager PyTorch's scaled_dot_product_attention."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from .harness import check, forward, gradients, randint, randn


def eager(**options):
    def run(q, k, v, mask=None):
        return F.scaled_dot_product_attention(q, k, v, mask, **options)

    return run


def qkv(*lead, length=5, keys=7, width=4, value_width=None):
    return [
        randn(*lead, length, width, seed=1),
        randn(*lead, keys, width, seed=2),
        randn(*lead, keys, value_width or width, seed=3),
    ]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lead", [(2, 3), (1, 1), (2,), (), (2, 1, 3)])
def test_plain_and_causal(lead, causal):
    check("attention", qkv(*lead), eager(is_causal=causal, scale=0.3), causal=causal, scale=0.3)
    check("attention", qkv(*lead, keys=3), eager(is_causal=causal, scale=0.3), causal=causal, scale=0.3)


@pytest.mark.parametrize("causal", [False, True])
def test_negative_scale(causal):
    """Eager's fused CPU kernel gives NaN for a causal mask and a negative scale; its formula does not, nor do we."""

    def formula(q, k, v):
        return torch.ops.aten._scaled_dot_product_attention_math(q, k, v, is_causal=causal, scale=-0.3)[0]

    check("attention", qkv(2, 3), formula, causal=causal, scale=-0.3)


def test_value_width_differs():
    check("attention", qkv(2, 3, value_width=6), eager(scale=0.5), scale=0.5)


MASKS = [(5, 7), (1, 7), (5, 1), (2, 3, 5, 7), (2, 1, 1, 7), (1, 3, 5, 7), (1, 5, 7), (3, 1, 7)]


@pytest.mark.parametrize("shape", MASKS)
def test_float_mask_and_its_gradient(shape):
    check("attention", [*qkv(2, 3), randn(*shape, seed=9)], eager(scale=0.3), scale=0.3)


@pytest.mark.parametrize("shape", MASKS)
def test_boolean_mask(shape):
    mask = randint(3, *shape, seed=3) > 0
    check("attention", [*qkv(2, 3), mask], eager(scale=0.3), scale=0.3)


def test_rows_that_see_nothing_are_zero():
    mask = torch.ones(5, 7, dtype=torch.bool)
    mask[2] = False
    for given in (mask, torch.zeros(5, 7).double().masked_fill(~mask, float("-inf"))):
        out, lse = forward("attention", [*qkv(2, 3), given], scale=0.5)
        assert out[:, :, 2].abs().max() == 0 and lse[:, :, 2].abs().max() == 0
    check("attention", [*qkv(2, 3), mask], eager(scale=0.5), scale=0.5)
    check("attention", [*qkv(3), mask], eager(scale=0.5), scale=0.5)


@pytest.mark.parametrize("causal", [False, True])
def test_grouped_heads(causal):
    q, _, _ = qkv(2, 6)
    _, k, v = qkv(2, 2)
    options = dict(causal=causal, scale=0.4, enable_gqa=True)
    check("attention", [q, k, v], eager(is_causal=causal, scale=0.4, enable_gqa=True), **options)


def test_grouped_heads_with_a_mask():
    q, _, _ = qkv(2, 6)
    _, k, v = qkv(2, 2)
    mask = randn(2, 6, 5, 7, seed=4)
    check("attention", [q, k, v, mask], eager(scale=0.4, enable_gqa=True), scale=0.4, enable_gqa=True)


@pytest.mark.parametrize("causal", [False, True])
def test_logsumexp(causal):
    for lead in ((2, 3), (2,)):
        q, k, v = qkv(*lead)
        scores = q @ k.mT * 0.3
        if causal:
            scores = scores.masked_fill(~torch.ones(5, 7, dtype=torch.bool).tril(), float("-inf"))
        _, lse = forward("attention", [q, k, v], causal=causal, scale=0.3)
        torch.testing.assert_close(lse, torch.logsumexp(scores, -1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("masked", [None, "bool", "float", "causal"])
@pytest.mark.parametrize("own", [3, 1])
def test_bitwise_eager_where_it_is_fused(dtype, masked, own):
    tensors = [t.to(dtype) for t in qkv(2, 3, length=33, keys=33, width=16)]
    tensors[1:] = [t[:, :own].contiguous() for t in tensors[1:]]
    mask = {"bool": torch.ones(33, 33, dtype=torch.bool).tril(), "float": randn(2, 1, 33, 33).to(dtype)}.get(masked)
    leaves = [t.clone().requires_grad_() for t in tensors]
    out = F.scaled_dot_product_attention(*leaves, mask, is_causal=masked == "causal", scale=0.25, enable_gqa=own < 3)
    dy = torch.randn(out.shape, generator=torch.Generator().manual_seed(3)).to(dtype)
    truth = torch.autograd.grad(out, leaves, dy)
    options = dict(causal=masked == "causal", scale=0.25, enable_gqa=own < 3)
    operands = tensors if mask is None else [*tensors, mask]
    assert torch.equal(forward("attention", operands, **options)[0], out.detach())
    for mine, want in zip(gradients("attention", operands, [dy, None], **options), truth, strict=False):
        assert torch.equal(mine, want)


def test_transposed_operands():
    """Heads split off by a transpose, as models do; and a last dimension that is not dense in memory."""
    q, k, v = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in qkv(2, 3))
    check("attention", [q, k, v], eager(scale=0.3), scale=0.3)
    q, k, v = (t.mT.contiguous().mT for t in qkv(2, 3))
    truth = F.scaled_dot_product_attention(q, k, v, scale=0.3)
    torch.testing.assert_close(forward("attention", [q, k, v], scale=0.3)[0], truth)


def test_misfits_are_refused():
    from wholestep.errors import VerifyError

    q, k, v = qkv(2, 3)
    with pytest.raises(VerifyError, match="exclude"):
        forward("attention", [q, k, v, randn(5, 7)], causal=True, scale=1.0)
    with pytest.raises(VerifyError, match="does not broadcast"):
        forward("attention", [q, k, v, randn(4, 7)], scale=1.0)
    with pytest.raises(VerifyError, match="batch"):
        forward("attention", [q[:, :1], k, v], scale=1.0)
