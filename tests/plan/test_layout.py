"""Strides of views agree with PyTorch's own, and results lie where kernels put them."""

from __future__ import annotations

import itertools
import random

import torch

from wholestep.dialects.step import StepBuilder
from wholestep.ir.builtin import add_function, finish_function, module
from wholestep.ir.types import F32, TensorType
from wholestep.plan import plan_function
from wholestep.plan.layout import is_dense, reshaped, row_major, same_places


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


def test_kernels_keep_the_layout_of_transposed_operands() -> None:
    """A pointwise result of a transposed tensor is planned as the kernel writes it, so no copy is needed."""
    function = add_function(module(), "f", [TensorType((4, 6), F32)])
    (x,) = function.regions[0].block.arguments
    b = StepBuilder(function.regions[0].block)
    finish_function(function, [b.exp(b.transpose(x, order=(1, 0)))])
    plan, _ = plan_function(function)
    want = torch.exp(torch.empty(4, 6).T).stride()
    assert plan.buffers[plan.results[0].buffer].strides == want == (1, 6)
