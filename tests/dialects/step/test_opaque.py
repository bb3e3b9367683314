"""Operators that run as they are: how the tensors that they get lie in memory."""

from __future__ import annotations

import pytest
import torch

from wholestep.dialects.step.opaque import compact

#: shape, strides, and the strides that an operator sees
LAYOUTS = [
    ((2, 3), (3, 1), (3, 1)),
    ((2, 3), (1, 2), (3, 1)),
    ((2, 1), (1, 2), (1, 1)),  # without gaps, and yet `kron` fails on it
    ((2, 3, 4, 5), (60, 1, 15, 3), (60, 1, 15, 3)),  # channels last stay
    ((2, 3, 1, 1), (3, 1, 3, 3), (3, 1, 3, 3)),
]


@pytest.mark.parametrize(("shape", "strides", "wanted"), LAYOUTS)
def test_how_operands_lie(shape: tuple[int, ...], strides: tuple[int, ...], wanted: tuple[int, ...]) -> None:
    x = torch.empty_strided(shape, strides).copy_(torch.rand(shape))
    assert compact(x).stride() == wanted
    assert torch.equal(compact(x), x)


def test_an_operator_that_views_what_it_has_made() -> None:
    x = torch.rand(2).as_strided((2, 1), (1, 2))
    assert torch.kron(compact(x), torch.rand(3, 2)).shape == (6, 2)
