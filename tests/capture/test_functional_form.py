"""Views, in-place calls and switched-off gradients become a pure program with eager's values and gradients.

What cannot become one is refused.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.capture.opinfo import differ, import_function, trace
from wholestep.errors import WholestepError
from wholestep.runtime.executor import Executable
from wholestep.training.autodiff import gradients


def x(*shape, seed=0):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def check(function, *tensors):
    """Results and gradients of the sum of their squares, captured and eager."""
    leaves = [t.clone().requires_grad_(t.is_floating_point()) for t in tensors]

    def squares(*given):
        out = function(*given)
        outs = list(out) if isinstance(out, list | tuple) else [out]
        return [*outs, sum((o * o).sum() for o in outs)]

    expected = squares(*leaves)
    wanted = [t for t in leaves if t.requires_grad]
    truth = torch.autograd.grad(expected[-1], wanted, allow_unused=True)
    graph = trace(squares, [t.clone().requires_grad_(t.is_floating_point()) for t in tensors])
    imported = import_function(graph, list(tensors))
    values = [v for v, t in zip(imported.arguments, leaves, strict=False) if t.requires_grad]
    found = gradients(imported.b, imported.results[-1], values, imported.vjps)
    imported.finish([*imported.results, *(g for g in found if g is not None)])
    results = Executable(imported.function)([*tensors, *imported.extra()])
    for got, want in zip(results, expected, strict=False):
        assert not differ(got, want.detach())
    rest = iter(results[len(expected) :])
    for leaf, mine, want in zip(wanted, found, truth, strict=True):
        got = torch.zeros_like(leaf) if mine is None else next(rest)
        assert not differ(got, torch.zeros_like(leaf) if want is None else want)


def written(look, write):
    """A function that writes through a view of a copy and gives both back."""

    def function(t, *more):
        base = t * 1.0
        view = look(base)
        write(view, *more)
        return [base, view]

    return function


@pytest.mark.parametrize(
    "look",
    [
        lambda t: t.reshape(-1),
        lambda t: t.t().reshape(-1),  # a copy: the base must stay as it is
        lambda t: t.t().contiguous(),
        lambda t: t.contiguous(),
        lambda t: t.to(torch.float64),
        lambda t: t.to(torch.float64, copy=True),
        lambda t: t.to(torch.float32),
        lambda t: F.dropout(t, 0.0),
        lambda t: F.dropout(t, 0.5, training=False),
        lambda t: torch.atleast_2d(t),
        lambda t: torch.broadcast_tensors(t, t)[0],
        lambda t: t.diagonal(),
        lambda t: t[1:].diagonal(),
        lambda t: t.T[::2],
        lambda t: t.flatten(),
        lambda t: t.t().flatten(),
    ],
)
def test_writes_through_views_and_copies(look):
    check(written(look, lambda v: v.mul_(3.0)), x(3, 4))


def test_shape_changes_in_place():
    def function(t):
        y = t * 1.0
        z = y[0]
        y.t_()
        y.unsqueeze_(0)
        y.mul_(2.0)
        y.squeeze_(0).transpose_(0, 1)
        return [y, z]

    check(function, x(3, 4))


@pytest.mark.parametrize(
    "write",
    [
        lambda v: v.pow_(2),
        lambda v: v.pow_(v.detach().abs()),
        lambda v: v.abs_().polygamma_(1),
        lambda v: v.ldexp_(torch.tensor(2)),
        lambda v: v.detach().clone().floor_divide_(2.0),
        lambda v: F.elu_(v),
        lambda v: v.index_fill_(0, torch.tensor([0, 0, 2]), 1.5),
    ],
)
def test_functional_twins(write):
    """In-place calls whose functional form has another overload name or another order of arguments."""
    check(written(lambda t: t.abs() + 0.5, write), x(3, 4))


def test_out():
    def function(t):
        y = torch.zeros(4, 4, dtype=torch.float64)
        torch.mm(t.detach().t(), t.detach(), out=y[:, :])
        return y * t.sum()

    check(function, x(3, 4))


def test_no_gradient_where_gradients_are_off():
    def function(t):
        with torch.no_grad():
            scale = t.abs().sum()
            scale.mul_(2.0)
        return t / scale

    check(function, x(3, 4))


def off(write):
    def function(t):
        y = t * 2.0
        write(y)
        return y

    return function


def in_no_grad(y):
    with torch.no_grad():
        y.mul_(3.0)


@pytest.mark.parametrize("write", [in_no_grad, lambda y: y.detach().mul_(3.0)])
def test_hidden_changes_are_refused(write):
    """Eager keeps the old gradient for the new values; a program cannot, and says so."""
    with pytest.raises(WholestepError, match="changed in place where gradients are switched off"):
        check(off(write), x(3, 4))


def test_as_strided_of_a_view_is_refused():
    with pytest.raises(WholestepError, match="as_strided of a tensor that is itself a view"):
        check(lambda t: (t * 1.0).t().as_strided((2, 2), (3, 1)), x(3, 4))


def test_writes_through_as_strided_are_refused():
    """ATen's operator for them, as_strided_scatter, has a derivative that is wrong in PyTorch itself."""
    with pytest.raises(WholestepError, match=r"in-place change through a view that aten\.as_strided"):
        check(written(lambda t: t.as_strided((2, 2), (4, 1)), lambda v: v.mul_(3.0)), x(3, 4))


@pytest.mark.parametrize("training", [True, False])
def test_instance_norm_keeps_running_statistics(training):
    def function(t):
        mean, variance = torch.zeros(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64)
        y = F.instance_norm(t, mean, variance, use_input_stats=training, momentum=0.3)
        return [y, mean + t.sum() * 0, variance + t.sum() * 0]

    check(function, x(2, 3, 5))


def test_opaque_ops_get_dense_tensors():
    """Kernels that read memory in order are given it so, though `contiguous` calls are not part of a program."""
    check(lambda t: F.pdist(t.t().contiguous()), x(3, 4))
    index = torch.tensor([[0, 2], [1, 1], [2, 0]])
    check(lambda w, i: F.embedding_bag(i.t().contiguous(), w, mode="mean"), x(3, 4), index)
    check(lambda t, w: F.group_norm(t.transpose(1, 2), 2, w[::2]), x(2, 5, 4), x(8))
