"""Pooling and its gradients as loops, against PyTorch: every kind of window, equal numbers, infinities and NaN."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.dialects.loop.programs import outputs_for
from tests.dialects.step.test_pooling import ADAPTIVE, AVERAGE, MAX, WINDOWS
from wholestep.dialects.loop.reference import run
from wholestep.dialects.step import StepBuilder, tensor_type
from wholestep.ir import F32, TensorType, add_function, finish_function, module, verify
from wholestep.ir.core import Op
from wholestep.transforms.backward_forms import FORMS
from wholestep.transforms.loops import NotLoops, lowered
from wholestep.transforms.opportunity import opportunities, take
from wholestep.transforms.regions import Bodies, piece_of

STRANGE = torch.tensor([float("nan"), float("-inf"), float("inf"), 1.0, 1.0, -2.0, 0.0, -0.0], dtype=torch.float64)


def loops(build: Any, *inputs: torch.Tensor) -> Callable[..., list[torch.Tensor]]:
    """The loops of some ops, for inputs such as these."""
    function = add_function(module(), "f", [tensor_type(t) for t in inputs])
    block = function.regions[0].block
    made = build(StepBuilder(block), *block.arguments)
    finish_function(function, made if isinstance(made, list | tuple) else [made])
    kernel = lowered(function)
    verify(kernel.parent.parent.parent)

    def made_of(*inputs: torch.Tensor) -> list[torch.Tensor]:
        found = outputs_for(function)
        run(kernel, list(inputs), found)
        return found

    return made_of


def results(build: Any, *inputs: torch.Tensor) -> list[torch.Tensor]:
    """What the loops of some ops give."""
    return loops(build, *inputs)(*inputs)


def drawn(shape: tuple[int, ...], kind: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    if kind == "numbers":
        return torch.randn(shape, generator=generator, dtype=torch.float64)
    choice = torch.randint(0, 3 if kind == "equal" else len(STRANGE), shape, generator=generator)
    return choice.double() if kind == "equal" else STRANGE[choice]


@pytest.mark.parametrize(("shape", "kernel", "stride", "padding"), WINDOWS)
def test_max_pool(shape, kernel, stride, padding) -> None:
    n = len(kernel)
    for d, ceil in itertools.product((1, 2), (False, True)):
        how = dict(kernel=kernel, stride=stride, padding=padding, dilation=(d,) * n, ceil_mode=ceil)
        sample = drawn(shape, "numbers")
        pool = loops(lambda b, x, how=how: b.max_pool(x, **how), sample)
        pool_short = loops(lambda b, x, how=how: b.max_pool(x, in_window=True, **how), sample)
        dy, *positions = (*pool(sample), pool_short(sample)[1])
        assert [p.dtype for p in positions] == [torch.int64, torch.uint8]
        gradients = [
            loops(lambda b, dy, i, how=how: b.max_pool_grad(dy, i, input_shape=shape, **how), dy, p) for p in positions
        ]
        for kind in ("numbers", "equal", "strange"):
            x = drawn(shape, kind).requires_grad_()
            values, places = MAX[n](x, kernel, stride, padding, d, ceil, True)
            mine, at = pool(x.detach())
            torch.testing.assert_close(mine, values.detach(), rtol=0, atol=0, equal_nan=True)
            assert torch.equal(at, places)
            dy = drawn(values.shape, "numbers")
            (wanted,) = torch.autograd.grad(values, x, dy)
            for gradient, where in zip(gradients, (places, pool_short(x.detach())[1]), strict=True):
                torch.testing.assert_close(gradient(dy, where)[0], wanted)


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize(("shape", "kernel", "stride", "padding"), [*WINDOWS, ((2, 3, 9, 8), (6, 6), (3, 2), (1, 3))])
def test_average_pool(shape, kernel, stride, padding, include) -> None:
    n, x = len(kernel), drawn(shape, "numbers").requires_grad_()
    for ceil, divisor in itertools.product((False, True), (None, 5) if n > 1 else (None,)):
        how = dict(kernel=kernel, stride=stride, padding=padding, ceil_mode=ceil, count_include_pad=include)
        how["divisor_override"] = divisor
        y = AVERAGE[n](x, kernel, stride, padding, ceil, include, *([divisor] if n > 1 else []))
        (mine,) = results(lambda b, x, how=how: b.avg_pool(x, **how), x.detach())
        torch.testing.assert_close(mine, y.detach())
        dy = drawn(y.shape, "numbers")
        (dx,) = results(lambda b, dy, how=how: b.avg_pool_grad(dy, input_shape=shape, **how), dy)
        torch.testing.assert_close(dx, torch.autograd.grad(y, x, dy)[0])


@pytest.mark.parametrize(
    ("shape", "size"),
    [((2, 3, 9), (3,)), ((2, 3, 9), (4,)), ((3, 8, 7), (4, 5)), ((1, 2, 3, 4), (7, 4)), ((1, 2, 5, 6, 7), (2, 6, 3))],
)
def test_adaptive_average_pool_gradient(shape, size) -> None:
    x = drawn(shape, "numbers").requires_grad_()
    y = ADAPTIVE[len(size)](x, size)
    dy = drawn(y.shape, "numbers")
    (dx,) = results(lambda b, dy: b.adaptive_avg_pool_grad(dy, size=size, input_shape=shape), dy)
    torch.testing.assert_close(dx, torch.autograd.grad(y, x, dy)[0])


def test_a_large_window_is_left_to_aten() -> None:
    how = dict(kernel=(6, 6), stride=(1, 1), padding=(0, 0), dilation=(1, 1))
    with pytest.raises(NotLoops, match="36 elements"):
        results(lambda b, x: b.max_pool(x, **how), drawn((1, 2, 8, 8), "numbers"))
    places = torch.zeros(1, 2, 3, 3, dtype=torch.int64)
    with pytest.raises(NotLoops, match="36 windows"):
        results(lambda b, dy, i: b.max_pool_grad(dy, i, input_shape=(1, 2, 8, 8), **how), places.double(), places)


# ---- programs --------------------------------------------------------------------------------------------------------

POOL = dict(kernel=(3, 3), stride=(2, 2), padding=(1, 1), dilation=(1, 1))


def program(shown: bool = False) -> tuple[Op, Op]:
    root = module()
    function = add_function(root, "f", [TensorType((2, 4, 6, 6), F32), TensorType((2, 4, 3, 3), F32)])
    x, dy = function.regions[0].block.arguments
    values, places = StepBuilder(function.regions[0].block, phase="forward").max_pool(x, **POOL)
    dx = StepBuilder(function.regions[0].block, phase="backward").max_pool_grad(
        dy, places, input_shape=(2, 4, 6, 6), **POOL
    )
    finish_function(function, [values, dx, *([places] if shown else [])])
    return root, function


def test_positions_are_kept_in_one_byte() -> None:
    from wholestep.runtime.executor import Executable

    root, function = program()
    x, dy = torch.randn(2, 4, 6, 6), torch.randn(2, 4, 3, 3)
    wanted = Executable(function)([x, dy])
    (found,) = [o for o in opportunities(root) if o.transformation == "short_positions"]
    assert found.change.saved == -72 * 7
    assert take(root, FORMS, ["short_positions */elsewhere/*"]) == [found.key]
    verify(root)
    assert [str(op.indices.type.element) for op in function.regions[0].block if op.name == "step.max_pool"] == ["ui8"]
    assert all(map(torch.equal, Executable(function)([x, dy]), wanted))
    assert take(root, FORMS) == []


def test_positions_that_are_shown_stay() -> None:
    root, _ = program(shown=True)
    (found,) = [o for o in opportunities(root) if o.transformation == "short_positions"]
    assert "other than its gradient" in found.why_not and take(root, FORMS) == []


def test_pooling_takes_along_what_comes_before_it() -> None:
    """A kernel reads x once and writes what is pooled; what is between is computed for each window."""
    function = add_function(module(), "f", [TensorType((2, 4, 6, 6), F32)])
    block = function.regions[0].block
    b = StepBuilder(block)
    finish_function(function, b.max_pool(b.relu(b.detach(block.arguments[0])), **POOL))
    ops = [op for op in block if not op.definition.terminator]
    piece = piece_of(ops, {op: n for n, op in enumerate(ops)})
    body = Bodies()(piece)
    assert body.why_not == "" and body.schedule.sizes == (2, 4, 3, 3) and not body.schedule.along
    x = torch.randn(2, 4, 6, 6)
    found = [torch.empty(2, 4, 3, 3), torch.empty(2, 4, 3, 3, dtype=torch.int64)]
    run(body.kernel, [x], found)
    values, places = F.max_pool2d(x.relu(), 3, 2, 1, return_indices=True)
    assert torch.equal(found[0], values) and torch.equal(found[1], places)


def test_a_slice_of_a_gradient_that_no_window_sees_is_zero() -> None:
    how = dict(kernel=(1,), stride=(3,), padding=(0,), ceil_mode=False, input_shape=(2, 7))
    dy, places = drawn((2, 3), "numbers"), torch.tensor([[0, 3, 6]] * 2)
    for place, wanted in ((1, torch.zeros(2, 1, dtype=torch.float64)), (3, dy[:, 1:2])):
        (mean,) = results(lambda b, d, at=place: b.slice(b.avg_pool_grad(d, **how), dim=1, start=at, end=at + 1), dy)
        torch.testing.assert_close(mean, wanted)
        (largest,) = results(
            lambda b, d, i, at=place: b.slice(b.max_pool_grad(d, i, dilation=(1,), **how), dim=1, start=at, end=at + 1),
            dy,
            places,
        )
        torch.testing.assert_close(largest, wanted)
