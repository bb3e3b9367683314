"""Contractions, convolutions and average pooling as loops: the float64 reference against PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from wholestep.dialects.loop import Load, Reduce
from wholestep.dialects.loop.reference import run
from wholestep.dialects.step import StepBuilder
from wholestep.dialects.step.base import tensor_type
from wholestep.ir.builtin import add_function, finish_function, module
from wholestep.ir.core import Op
from wholestep.ir.verify import verify
from wholestep.transforms.loops import lowered

Build = Callable[..., Any]


def kernel(inputs: Sequence[torch.Tensor], build: Build) -> tuple[Op, list[torch.Tensor]]:
    """The lowered kernel of some step ops, and what it gives."""
    function = add_function(module(), "k", [tensor_type(x) for x in inputs])
    made = build(StepBuilder(function.regions[0].block), *function.regions[0].block.arguments)
    results = made if isinstance(made, list) else [made]
    finish_function(function, results)
    loops = lowered(function)
    verify(loops.parent.parent.parent)
    outputs = [torch.full(r.type.shape, 7.0, dtype=torch.float64) for r in results]
    run(loops, list(inputs), outputs)
    return loops, outputs


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64)


def same(found: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("spec", "left", "right"),
    [
        ("mk,nk->mn", (3, 4), (5, 4)),
        ("km,kn->nm", (4, 3), (4, 5)),
        ("abk,nk->abn", (2, 3, 4), (5, 4)),
        ("bhmk,bhnk->bhmn", (2, 3, 4, 5), (2, 3, 6, 5)),
        ("abm,abn->mn", (2, 3, 4), (2, 3, 5)),
        ("m,n->mn", (3,), (4,)),
        ("mk,nk->mn", (3, 1), (4, 1)),
        ("mk,k->m", (3, 4), (4,)),
    ],
)
def test_contraction(spec: str, left: tuple[int, ...], right: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    x, y = drawn(*left), drawn(*right)
    _, (found,) = kernel([x, y], lambda b, x, y: b.contract(x, y, spec=spec))
    same(found, torch.einsum(spec, x, y))


@pytest.mark.parametrize("shape", [(5,), (3, 5), (1, 5), (3, 1), (2, 3, 5)])
def test_addend(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    x, y, z = drawn(2, 3, 4), drawn(5, 4), drawn(*shape)
    _, (found,) = kernel([x, y, z], lambda b, x, y, z: b.contract(x, y, z, spec="abk,nk->abn"))
    same(found, x @ y.T + z)


def test_neighbours_are_written_around_one_sum() -> None:
    torch.manual_seed(0)
    x, scale, w, bias = drawn(6, 4), drawn(4), drawn(5, 4), drawn(5)

    def build(b: StepBuilder, x: Any, scale: Any, w: Any, bias: Any) -> list[Any]:
        y = b.contract(b.relu(b.mul(x, scale)), w, bias, spec="mk,nk->mn")
        return [y, b.tanh(y), b.sum(b.tanh(y), dims=(0,))]

    loops, (found, act, total) = kernel([x, scale, w, bias], build)
    wanted = F.linear((x * scale).relu(), w, bias)
    same(found, wanted)
    same(act, wanted.tanh())
    same(total, wanted.tanh().sum(0))
    assert sum(op.definition is Reduce for op in loops.regions[0].block) == 2


def test_merged_heads_are_read_without_computed_indices() -> None:
    torch.manual_seed(0)
    x, w = drawn(2, 3, 5, 4), drawn(7, 12)

    def build(b: StepBuilder, x: Any, w: Any) -> Any:
        merged = b.reshape(b.transpose(x, order=(0, 2, 1, 3)), shape=(2, 5, 12))
        return b.contract(merged, w, spec="abk,nk->abn")

    loops, (found,) = kernel([x, w], build)
    same(found, x.transpose(1, 2).reshape(2, 5, 12) @ w.T)
    assert all(not op.attributes["dynamic"] for op in loops.regions[0].block if op.definition is Load)


def test_split_heads_are_written_without_computed_indices() -> None:
    torch.manual_seed(0)
    x, w = drawn(2, 5, 6), drawn(12, 6)

    def build(b: StepBuilder, x: Any, w: Any) -> Any:
        y = b.reshape(b.contract(x, w, spec="abk,nk->abn"), shape=(2, 5, 3, 4))
        return b.transpose(y, order=(0, 2, 1, 3))

    _, (found,) = kernel([x, w], build)
    same(found, (x @ w.T).reshape(2, 5, 3, 4).transpose(1, 2))


def test_a_contraction_of_a_contraction() -> None:
    torch.manual_seed(0)
    x, y, z = drawn(3, 4), drawn(4, 5), drawn(5, 2)
    _, (found,) = kernel(
        [x, y, z], lambda b, x, y, z: b.contract(b.contract(x, y, spec="mk,kn->mn"), z, spec="mk,kn->mn")
    )
    same(found, x @ y @ z)


# ---- convolutions ----------------------------------------------------------------------------------------------------

#: x, kernel, stride, padding, dilation, groups
CONVOLUTIONS = {
    "1x1": ((2, 3, 4, 5), (6, 3, 1, 1), 1, 0, 1, 1),
    "1x1, stride 2": ((2, 3, 4, 5), (6, 3, 1, 1), 2, 0, 1, 1),
    "3x3": ((2, 3, 5, 4), (4, 3, 3, 3), 1, 1, 1, 1),
    "3x3, stride 2": ((1, 3, 7, 6), (4, 3, 3, 3), 2, 1, 1, 1),
    "a last row never read": ((1, 2, 6, 6), (3, 2, 3, 3), 2, 0, 1, 1),
    "dilation": ((1, 2, 7, 8), (3, 2, 3, 3), 1, 2, 2, 1),
    "one dimension": ((2, 3, 9), (4, 3, 4), 3, 2, 1, 1),
    "three dimensions": ((1, 2, 3, 4, 3), (3, 2, 2, 2, 2), 1, 1, 1, 1),
    "groups": ((2, 4, 5, 4), (6, 2, 3, 3), 1, 1, 1, 2),
    "depthwise": ((2, 4, 5, 4), (4, 1, 3, 3), 2, 1, 1, 4),
    "depthwise, two outputs each": ((1, 3, 4, 4), (6, 1, 3, 3), 1, 1, 1, 3),
    "one channel": ((1, 1, 4, 4), (3, 1, 3, 3), 1, 1, 1, 1),
}


def window(rank: int, stride: int, padding: int, dilation: int, groups: int) -> dict[str, Any]:
    return dict(stride=(stride,) * rank, padding=(padding,) * rank, dilation=(dilation,) * rank, groups=groups)


@pytest.mark.parametrize("case", CONVOLUTIONS)
def test_convolution_and_its_gradients(case: str) -> None:
    torch.manual_seed(0)
    shape, weight, *rest = CONVOLUTIONS[case]
    how = window(len(shape) - 2, *rest)
    x, w, bias = drawn(*shape).requires_grad_(), drawn(*weight).requires_grad_(), drawn(weight[0])
    y = torch.convolution(
        x, w, bias, how["stride"], how["padding"], how["dilation"], False, (0,) * (len(shape) - 2), how["groups"]
    )
    dy = torch.randn_like(y)
    dx, dw = torch.autograd.grad(y, [x, w], dy)
    x, w = x.detach(), w.detach()
    _, (found,) = kernel([x, w, bias], lambda b, x, w, bias: b.conv(x, w, bias, **how))
    same(found, y.detach())
    _, (found,) = kernel([dy, w], lambda b, dy, w: b.conv_input_grad(dy, w, input_shape=shape, **how))
    same(found, dx)
    _, (found,) = kernel([x, dy], lambda b, x, dy: b.conv_weight_grad(x, dy, weight_shape=weight, **how))
    same(found, dw)


@pytest.mark.parametrize(
    ("shape", "weight", "stride", "padding", "extra", "groups"),
    [
        ((2, 3, 4, 3), (3, 4, 3, 3), 1, 1, 0, 1),
        ((1, 3, 3, 4), (3, 2, 3, 3), 2, 1, 1, 1),
        ((1, 4, 3, 3), (4, 3, 2, 2), 2, 0, 0, 2),
    ],
)
def test_transposed_convolution_and_its_gradients(shape, weight, stride, padding, extra, groups) -> None:
    torch.manual_seed(0)
    how = window(2, stride, padding, 1, groups) | dict(transposed=True, output_padding=(extra, extra))
    x, w = drawn(*shape).requires_grad_(), drawn(*weight).requires_grad_()
    y = F.conv_transpose2d(x, w, None, stride, padding, extra, groups)
    dy = torch.randn_like(y)
    dx, dw = torch.autograd.grad(y, [x, w], dy)
    x, w = x.detach(), w.detach()
    _, (found,) = kernel([x, w], lambda b, x, w: b.conv(x, w, **how))
    same(found, y.detach())
    _, (found,) = kernel([dy, w], lambda b, dy, w: b.conv_input_grad(dy, w, input_shape=shape, **how))
    same(found, dx)
    _, (found,) = kernel([x, dy], lambda b, x, dy: b.conv_weight_grad(x, dy, weight_shape=weight, **how))
    same(found, dw)


def test_padding_is_zero_behind_a_shift() -> None:
    torch.manual_seed(0)
    x, w, shift = drawn(1, 3, 4, 4), drawn(2, 3, 3, 3), drawn(3, 1, 1)
    how = window(2, 1, 1, 1, 1)
    _, (found,) = kernel([x, w, shift], lambda b, x, w, shift: b.conv(b.add(x, shift), w, **how))
    same(found, F.conv2d(x + shift, w, padding=1))


def test_dimensions_of_a_convolution_are_affine() -> None:
    x, w = drawn(1, 3, 5, 5), drawn(2, 3, 3, 3)
    loops, _ = kernel([x, w], lambda b, x, w: b.conv(x, w, **window(2, 2, 1, 1, 1)))
    assert all(not op.attributes["dynamic"] for op in loops.regions[0].block if op.definition is Load)


@pytest.mark.parametrize("include", [True, False])
@pytest.mark.parametrize(
    ("shape", "k", "stride", "padding", "ceil", "divisor"),
    [
        ((2, 3, 4, 6), 2, 2, 0, False, None),
        ((2, 3, 5, 6), 3, 2, 1, False, None),
        ((1, 2, 6, 5), 3, 2, 1, True, None),
        ((1, 2, 6, 5), 3, 3, 1, True, 5),
    ],
)
def test_average_pooling(shape, k, stride, padding, ceil, divisor, include) -> None:
    torch.manual_seed(0)
    x = drawn(*shape)
    how = dict(kernel=(k, k), stride=(stride, stride), padding=(padding, padding), ceil_mode=ceil)
    how |= dict(count_include_pad=include, divisor_override=divisor)
    wanted = F.avg_pool2d(x.exp(), k, stride, padding, ceil, include, divisor)
    _, (found,) = kernel([x], lambda b, x: b.avg_pool(b.exp(x), **how))
    same(found, wanted)
