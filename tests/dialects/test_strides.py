"""Strides of views agree with PyTorch's own."""

from __future__ import annotations

import itertools
import random

import torch

from wholestep.dialects.strides import is_dense, reshaped, row_major, same_places


def shapes_of(count: int) -> list[tuple[int, ...]]:
    """Shapes of up to four dimensions with this many elements, with ones among them."""
    found = set()
    sizes = [d for d in range(1, count + 1) if count % d == 0]
    for rank in range(1, 5):
        for shape in itertools.product(sizes, repeat=rank):
            if torch.Size(shape).numel() == count:
                found.add(shape)
    return sorted(found)


def test_reshape_is_a_view_exactly_where_it_is_one_in_torch() -> None:
    draw = random.Random(0)
    shapes = shapes_of(12)
    views = copies = 0
    for _ in range(3000):
        shape, new = draw.choice(shapes), draw.choice(shapes)
        order = draw.sample(range(len(shape)), len(shape))
        x = torch.empty(shape).permute(order)
        if draw.random() < 0.4:
            x = x[..., :: draw.choice((1, 2))] if draw.random() < 0.5 else x.unsqueeze(0).expand(3, *x.shape)
        if x.numel() != 12:
            new = (x.numel(),) if draw.random() < 0.5 else (1, x.numel(), 1)
        found = reshaped(x.shape, x.stride(), new)
        try:
            want = x.view(new).stride()
        except RuntimeError:
            want = None
        assert (found is None) == (want is None), (x.shape, x.stride(), new)
        if found is not None and want is not None:
            assert same_places(new, found, want)
            views += 1
        else:
            copies += 1
    assert views > 500 and copies > 500


def test_reshape_of_scalars_and_empty_tensors() -> None:
    assert reshaped((), (), (1, 1)) == (1, 1)
    assert reshaped((0, 3), (3, 1), (3, 0)) == row_major((3, 0))
    assert reshaped((1,), (1,), ()) == ()


def test_dense() -> None:
    assert is_dense((2, 3), (3, 1)) and is_dense((2, 3), (1, 2)) and is_dense((2, 1, 3), (3, 77, 1))
    assert not is_dense((2, 3), (4, 1)) and not is_dense((2, 3), (0, 1))


def test_rows() -> None:
    assert row_major((2, 3, 4)) == (12, 4, 1) == torch.empty(2, 3, 4).stride()
    assert row_major((2, 0, 4)) == torch.empty(2, 0, 4).stride() and row_major(()) == ()
