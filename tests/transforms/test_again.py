"""What kernels hand to each other is computed again by the reader where that moves fewer bytes; results stay."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.dialects.loop.programs import Drawn
from tests.dialects.loop.provider import run_fused
from tests.transforms.test_fuse import program, regions_of, root_of
from wholestep.ir import F32, I64, TensorType, verify
from wholestep.ir.core import Op
from wholestep.runtime.executor import Executable
from wholestep.transforms import again
from wholestep.transforms.fuse import fuse

ROWS = 4096  # too many to be held at once where they are strewn: sums over them are a kernel of their own


def normalised(b: Any, x: Any, mean: Any, dy: Any) -> list[Any]:
    """As in backward of BatchNorm and relu: two sums over what is also needed, point by point, after them."""
    y = b.relu(b.sub(x, mean))
    masked = b.mul(dy, y)
    total = b.sum(masked, dims=(0,), keepdim=True)
    return [b.mul(b.sub(masked, total), y)]


def shared(b: Any, x: Any, mean: Any, dy: Any) -> list[Any]:
    """The value is a result of the program as well: it is written in any case."""
    y = b.relu(b.sub(x, mean))
    total = b.sum(b.mul(dy, y), dims=(0,), keepdim=True)
    return [y, b.mul(total, y)]


def in_turn(b: Any, x: Any, mean: Any, dy: Any) -> list[Any]:
    """As around squeeze-and-excite: the second kernel hands on less once it computes what the first would hand it."""
    y = b.silu(b.sub(x, mean))
    given = b.mul(b.add(dy, b.sum(b.mul(dy, y), dims=(0,), keepdim=True)), y)
    return [b.mul(b.sub(given, b.sum(given, dims=(0,), keepdim=True)), x)]


def of(build: Any) -> tuple[Op, list[torch.Tensor]]:
    types = [TensorType((ROWS, 8), F32), TensorType((1, 8), F32), TensorType((ROWS, 8), F32)]
    torch.manual_seed(0)
    return program(types, build), [torch.randn(t.shape) for t in types]


def large(function: Op) -> list[tuple[int, int]]:
    """How many large tensors each kernel reads and writes."""
    return [
        (sum(v.type.size >= ROWS for v in op.operands), sum(v.type.size >= ROWS for v in op.results))
        for op in regions_of(function)
    ]


def run(function: Op, inputs: list[torch.Tensor], **options: Any) -> Any:
    wanted = Executable(function)(inputs)
    fusion = fuse(function, **options)
    verify(root_of(function))
    for mine, true in zip(run_fused(function, inputs, fusion), wanted, strict=True):
        torch.testing.assert_close(mine.float(), true, rtol=1e-5, atol=1e-5)
    return fusion


def test_a_value_between_two_kernels_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(again, "LEAST", 1 << 40)
    function, inputs = of(normalised)
    run(function, inputs)
    assert sum(written for _, written in large(function)) > 1
    monkeypatch.setattr(again, "LEAST", 0)
    function, inputs = of(normalised)
    run(function, inputs)
    assert large(function) == [(2, 0), (2, 1)]


def test_what_a_kernel_has_taken_over_lets_it_hand_on_less(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(again, "LEAST", 0)
    monkeypatch.setattr(again, "ROUNDS", 1)
    function, inputs = of(in_turn)
    run(function, inputs)
    assert large(function) == [(2, 0), (2, 1), (2, 1)]
    monkeypatch.setattr(again, "ROUNDS", 3)
    function, inputs = of(in_turn)
    run(function, inputs)
    assert large(function) == [(2, 0), (2, 0), (2, 1)]


@pytest.mark.parametrize("options", [{}, {"weight": True}, {"label_smoothing": 0.1}, {"reduction": "sum"}], ids=str)
def test_statistics_are_written_so_that_a_gradient_is_not(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the gradient of a loss over enlarged images: rows of classes and cells of pixels are no one walk."""
    monkeypatch.setattr(again, "LEAST", 0)
    options = dict(options)
    weighted = options.pop("weight", False)

    def build(b: Any, x: Any, target: Any, dy: Any, weight: Any) -> list[Any]:
        factors, weight = (8, 4), weight if weighted else None
        y = b.upsample(x, factors=factors)
        loss, logsumexp = b.cross_entropy(y, target, weight, ignore_index=3, **options)
        dy = b.cross_entropy_grad(dy, y, target, logsumexp, weight, ignore_index=3, **options)
        return [loss, b.upsample_cells_grad(dy, factors=factors)]

    types = [TensorType(shape, F32) for shape in ((2, 7, 3, 5), (2, 24, 20), (), (7,))]
    types[1] = TensorType(types[1].shape, I64)
    torch.manual_seed(0)
    inputs = [torch.randn(2, 7, 3, 5), torch.randint(0, 7, (2, 24, 20)), torch.tensor(2.0), torch.rand(7)]
    function = program(types, build)
    fusion = run(function, inputs)
    assert all(v.type.size < 2 * 7 * 24 * 20 for op in regions_of(function) for v in op.results)
    assert any("upsample_shares" in line for line in fusion.again)
    x = inputs[0].requires_grad_()
    y = torch.nn.functional.interpolate(x, size=(24, 20), mode="bilinear")
    weight = inputs[3] if weighted else None
    loss = torch.nn.functional.cross_entropy(y, inputs[1], weight, ignore_index=3, **options)
    (wanted,) = torch.autograd.grad(loss, x, inputs[2])
    mine = run_fused(function, [t.detach() for t in inputs], fusion)
    torch.testing.assert_close(mine[0].float(), loss.detach())
    torch.testing.assert_close(mine[1].float(), wanted, rtol=1e-4, atol=1e-6)


def test_what_is_written_in_any_case_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(again, "LEAST", 0)
    function, inputs = of(shared)
    run(function, inputs)
    assert large(function) == [(2, 1), (1, 1)]


def test_a_normalised_residual_is_computed_from_what_was_normalised(monkeypatch: pytest.MonkeyPatch) -> None:
    """x is in memory for backward anyway, so y is not written for the residual sum behind the product."""
    monkeypatch.setattr(again, "LEAST", 0)

    def build(b: Any, x: Any, mean: Any, w: Any) -> list[Any]:
        x = b.mul(x, 2.0)
        y, *_ = b.layer_norm(x, None, None, trailing=1, eps=1e-5)
        return [x, b.add(y, b.contract(b.relu(y), w, spec="nk,km->nm"))]

    types = [TensorType((ROWS, 8), F32), TensorType((1, 8), F32), TensorType((8, 8), F32)]
    function = program(types, build)
    run(function, [torch.randn(t.shape) for t in types])
    full = [[v.type.shape == (ROWS, 8) for v in op.operands].count(True) for op in regions_of(function)]
    made = [[v.type.shape == (ROWS, 8) for v in op.results].count(True) for op in regions_of(function)]
    assert (full, made) == ([1, 2], [2, 1])  # x and the product's factor are written; x and the product read


def test_forbidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(again, "LEAST", 0)
    function, inputs = of(normalised)
    run(function, inputs, forbid=["fuse * <- *mul#0"])
    assert sum(written for _, written in large(function)) > 1


def test_random_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(again, "LEAST", 0)
    count = 0
    attempt = again.attempt

    def counted(*args: Any) -> str:
        nonlocal count
        why = attempt(*args)
        count += not why
        return why

    monkeypatch.setattr(again, "attempt", counted)
    for seed in range(200, 225):
        drawn = Drawn(seed, ops=10 + seed % 30)
        wanted = Executable(drawn.function)(drawn.inputs)
        fusion = fuse(drawn.function)
        verify(root_of(drawn.function))
        for mine, true in zip(run_fused(drawn.function, drawn.inputs, fusion), wanted, strict=True):
            torch.testing.assert_close(mine, true, rtol=1e-8, atol=1e-10, msg=lambda m: f"seed {seed}: {m}")  # noqa: B023
    assert count > 8
