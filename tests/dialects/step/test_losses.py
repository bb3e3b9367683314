"""Cross entropy and negative log likelihood against eager PyTorch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from .harness import check, forward, gradients, randint, randn

SHAPES = [(5, 7), (1, 3), (2, 4, 3), (2, 3, 2, 4), (6,)]


def positions(shape):
    return () if len(shape) == 1 else (shape[0], *shape[2:])


def sample(shape, ignore=None):
    classes = shape[0] if len(shape) == 1 else shape[1]
    target = randint(classes, *positions(shape))
    if ignore is not None and target.dim():
        target = target.clone()
        target.view(-1)[0] = ignore
    return randn(*shape) * 3, target, randn(classes, seed=1).abs()


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("shape", SHAPES)
def test_cross_entropy(shape, smoothing, weighted, reduction):
    for ignore in (-100, 1):
        x, target, weight = sample(shape, None if ignore == 1 else ignore)
        options = dict(ignore_index=ignore, reduction=reduction, label_smoothing=smoothing)

        def reference(x, target, weight, options=options):
            weight = weight if weight is None else weight.detach()
            return F.cross_entropy(x, target, weight, **options), torch.logsumexp(x, min(1, x.dim() - 1))

        # a class weight takes no part in differentiation
        check("cross_entropy", [x, target, weight if weighted else None], reference, **options)


def test_cross_entropy_value_is_bitwise_eager():
    x, target, _ = sample((64, 100))
    x = x.float()
    assert torch.equal(forward("cross_entropy", [x, target])[0], F.cross_entropy(x, target))
    leaf = x.clone().requires_grad_()
    (truth,) = torch.autograd.grad(F.cross_entropy(leaf, target), [leaf])
    mine = gradients("cross_entropy", [x, target], [torch.tensor(1.0), None])[0]
    torch.testing.assert_close(mine, truth, rtol=2e-6, atol=1e-9)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_all_ignored(smoothing):
    x, target = randn(3, 4), torch.full((3,), -100)
    loss, _ = forward("cross_entropy", [x, target], label_smoothing=smoothing)
    assert loss.isnan()
    for expanded in (False, True):
        dx = gradients(
            "cross_entropy", [x, target], [torch.tensor(1.0).double(), None], expanded, label_smoothing=smoothing
        )
        assert torch.equal(dx[0], torch.zeros(3, 4).double())
    loss = forward("nll_loss", [x, target])[0]
    assert loss.isnan()


def test_masked_classes_do_not_poison_the_gradient():
    """Logits of minus infinity are how models forbid classes."""
    x, target = randn(3, 5), torch.tensor([1, -100, 4])
    x[:, 0] = float("-inf")

    def reference(x, target, weight):
        return F.cross_entropy(x, target)

    check("cross_entropy", [x, target, None], reference)


def test_cross_entropy_in_bf16():
    x, target = (randn(8, 11) * 2).bfloat16(), randint(11, 8)
    leaf = x.clone().requires_grad_()
    loss = F.cross_entropy(leaf, target)
    got, lse = forward("cross_entropy", [x, target])
    assert lse.dtype is torch.float32 and torch.equal(got, loss.detach())
    (truth,) = torch.autograd.grad(loss, [leaf])
    dx = gradients("cross_entropy", [x, target], [torch.tensor(1.0).bfloat16(), None])[0]
    torch.testing.assert_close(dx, truth, rtol=2e-2, atol=1e-3)


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_nll_loss(shape, weighted, reduction):
    x, target, weight = sample(shape, -100)
    check(
        "nll_loss",
        [x, target, weight if weighted else None],
        lambda x, t, w: F.nll_loss(x, t, w if w is None else w.detach(), reduction=reduction),
        exact="all",
        reduction=reduction,
    )


def test_targets_of_the_wrong_shape_are_refused():
    from wholestep.errors import VerifyError

    with pytest.raises(VerifyError, match="target must have shape"):
        forward("cross_entropy", [randn(3, 4, 2), randint(4, 3)])
