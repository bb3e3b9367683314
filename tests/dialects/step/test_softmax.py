"""Softmax and log-softmax against eager PyTorch."""

from __future__ import annotations

import pytest
import torch.nn.functional as F

from .harness import check, randn

SHAPES = [(5,), (3, 4), (2, 3, 5), (2, 3, 4, 5)]


@pytest.mark.parametrize("shape", SHAPES)
def test_softmax_along_every_dimension(shape):
    for dim in range(len(shape)):
        check("softmax", [randn(*shape)], lambda x, dim=dim: F.softmax(x, dim), exact="all", dim=dim)
        check("log_softmax", [randn(*shape)], lambda x, dim=dim: F.log_softmax(x, dim), exact="all", dim=dim)


def test_softmax_of_a_scalar():
    check("softmax", [randn()], lambda x: F.softmax(x, 0), dim=0)
    check("log_softmax", [randn()], lambda x: F.log_softmax(x, 0), dim=0)
