"""Casts that kernels do on the way: the same numbers to the last bit, and bytes counted on both sides."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import wholestep as ws
from tests.runtime.runs import Perceptron, adamw, data, fresh
from tests.transforms.test_casts import cast, function
from wholestep import ir
from wholestep.backends.absorption import OUT, Absorption, CastBytes, absorb_casts
from wholestep.dialects.step import StepBuilder, ir_dtype, tensor_type
from wholestep.ir import add_function, finish_function, module
from wholestep.ir.builtin import lookup
from wholestep.plan import launches
from wholestep.runtime import executor
from wholestep.runtime.cast_bytes import autocast_casts, program_casts
from wholestep.runtime.executor import Executable


def both(main: ir.Op, inputs: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch) -> tuple[CastBytes, CastBytes]:
    """Runs a function with casts absorbed and with every cast explicit, bitwise equal; gives what was counted."""
    with_absorption = Executable(main)
    absorbed = with_absorption(inputs)
    with monkeypatch.context() as patch:
        patch.setattr(executor, "absorb_casts", lambda function: Absorption())
        explicit_program = Executable(main)
    explicit = explicit_program(inputs)
    for mine, want in zip(absorbed, explicit, strict=True):
        assert mine.dtype is want.dtype and torch.equal(mine, want)
    assert explicit_program.casts.absorbed == 0
    together = with_absorption.casts
    assert together.executed + together.absorbed == explicit_program.casts.executed
    return together, explicit_program.casts


X, Y = data(4, 3).bfloat16(), data(4, 3, seed=1)
SUM = '%s = "step.sum"(%a) {dims = array<i64: 0>, keepdim = false} : (tensor<4x3xf32>) -> tensor<3xf32>'


@pytest.mark.parametrize(
    ("lines", "result", "absorbed"),
    [
        ('%s = "step.add"(%a, %y) : (tensor<4x3xf32>, tensor<4x3xf32>) -> tensor<4x3xf32>', "4x3xf32", True),
        ('%s = "step.mul"(%y, %a) : (tensor<4x3xf32>, tensor<4x3xf32>) -> tensor<4x3xf32>', "4x3xf32", True),
        ('%s = "step.mul"(%a, %a) : (tensor<4x3xf32>, tensor<4x3xf32>) -> tensor<4x3xf32>', "4x3xf32", False),
        ('%s = "step.exp"(%a) : (tensor<4x3xf32>) -> tensor<4x3xf32>', "4x3xf32", False),
        (SUM, "3xf32", True),
        (SUM.replace("sum", "mean"), "3xf32", True),
        (SUM.replace("sum", "prod"), "3xf32", True),
        ('%s = "step.cumsum"(%a) {dim = 1 : i64} : (tensor<4x3xf32>) -> tensor<4x3xf32>', "4x3xf32", True),
        (
            '%k = "step.constant"() {value = 0.1, type = tensor<f32>} : () -> tensor<f32>\n'
            '%s = "step.mul"(%a, %k) : (tensor<4x3xf32>, tensor<f32>) -> tensor<4x3xf32>',
            "4x3xf32",
            False,
        ),
        (
            '%k = "step.gt"(%y, %a) : (tensor<4x3xf32>, tensor<4x3xf32>) -> tensor<4x3xi1>\n'
            '%s = "step.select"(%k, %a, %y) : (tensor<4x3xi1>, tensor<4x3xf32>, tensor<4x3xf32>) -> tensor<4x3xf32>',
            "4x3xf32",
            True,
        ),
    ],
)
def test_readers_widen(lines: str, result: str, absorbed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    root = function(
        "%x: tensor<4x3xbf16>, %y: tensor<4x3xf32>",
        cast("a", "x", "4x3xbf16", "4x3xf32") + "\n" + lines,
        "%s",
        f"tensor<{result}>",
    )
    counted, _ = both(lookup(root, "main"), [X, Y], monkeypatch)
    assert (counted.absorbed, counted.count) == ((72, 0) if absorbed else (0, 1))


def test_of_two_narrow_operands_one_is_cast(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [cast("a", "x", "4x3xbf16", "4x3xf32"), cast("b", "y", "4x3xbf16", "4x3xf32")]
    lines.append('%s = "step.add"(%a, %b) : (tensor<4x3xf32>, tensor<4x3xf32>) -> tensor<4x3xf32>')
    root = function("%x: tensor<4x3xbf16>, %y: tensor<4x3xbf16>", "\n".join(lines), "%s", "tensor<4x3xf32>")
    counted, _ = both(lookup(root, "main"), [X, Y.bfloat16()], monkeypatch)
    assert counted == CastBytes(executed=72, absorbed=72, count=1)


def test_a_cast_that_somebody_needs_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [cast("a", "x", "4x3xbf16", "4x3xf32")]
    lines.append('%s = "step.add"(%a, %y) : (tensor<4x3xf32>, tensor<4x3xf32>) -> tensor<4x3xf32>')
    root = function(
        "%x: tensor<4x3xbf16>, %y: tensor<4x3xf32>", "\n".join(lines), "%s, %a", "tensor<4x3xf32>, tensor<4x3xf32>"
    )
    assert both(lookup(root, "main"), [X, Y], monkeypatch)[0].count == 1


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("down", [True, False])
@pytest.mark.parametrize("name", OUT)
def test_producers_write_the_other_type(
    name: str, down: bool, low: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = (torch.float32, low) if down else (low, torch.float32)
    count = 2 if name.endswith("_grad") or name in ("step.add", "step.sub", "step.mul", "step.div") else 1
    inputs = [(data(4, 3, seed=i).abs() + 0.1).to(source) for i in range(count)]
    root = module()
    main = add_function(root, "main", [tensor_type(t) for t in inputs])
    block = main.regions[0].block
    b = StepBuilder(block)
    result = getattr(b, name.removeprefix("step."))(*block.arguments)
    finish_function(main, [b.cast(result, dtype=ir_dtype(target))])
    counted, _ = both(main, inputs, monkeypatch)
    assert counted == CastBytes(executed=0, absorbed=72, count=0)


@pytest.mark.parametrize("name", ["sub", "div", "mul"])
def test_numbers_on_the_left(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    root = module()
    main = add_function(root, "main", [tensor_type(Y)])
    block = main.regions[0].block
    b = StepBuilder(block)
    finish_function(main, [b.cast(getattr(b, name)(1.5, block.arguments[0]), dtype=ir_dtype(torch.bfloat16))])
    both(main, [Y], monkeypatch)


def low_perceptron(**options: Any) -> ws.TrainStep:
    model = fresh(Perceptron)
    return ws.compile(model, lambda m, x: m(x).pow(2).mean(), adamw(model), (data(6, 4),), precision="bf16", **options)


def test_a_whole_step_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    step = low_perceptron(clip_norm=1.0)
    with monkeypatch.context() as patch:
        for module in (executor, launches):
            patch.setattr(module, "absorb_casts", lambda function: Absorption())
        explicit = low_perceptron(clip_norm=1.0)
        assert explicit._compiled.executable.casts.absorbed == 0
    for seed in range(4):
        assert torch.equal(step(data(6, 4, seed=seed)), explicit(data(6, 4, seed=seed)))
    for mine, want in zip(step.model.parameters(), explicit.model.parameters(), strict=True):
        assert torch.equal(mine, want)
    assert step.report().casts.absorbed > 0 == explicit.report().casts.absorbed


def test_copies_of_weights_are_written_by_the_commit() -> None:
    step = low_perceptron()
    main = step._compiled.executable.function
    found = absorb_casts(main)
    returned = [op for op in found.narrow if list(op.result.uses) == [main.regions[0].block.last]]
    assert len(returned) == 4  # two weights and two biases
    step(data(6, 4))
    for name, parameter in step.model.named_parameters():
        copy = step._own.tensors["copy", name]
        assert copy.dtype is torch.bfloat16 and torch.equal(copy, parameter.detach().bfloat16())


# ---- counting --------------------------------------------------------------------------------------------------------


def test_autocast_counted_by_hand() -> None:
    """x, weight and bias go down, the result goes up for the loss; its gradient goes down, two gradients up."""
    torch.manual_seed(0)
    layer = nn.Linear(4, 3)
    x = torch.randn(5, 4)
    before = [p.clone() for p in layer.parameters()]
    counted = autocast_casts(layer, nn.MSELoss(), (x, torch.randn(5, 3)), torch.bfloat16)
    down, up, grads = 5 * 4 + 3 * 4 + 3, 5 * 3, 5 * 3 + 3 * 4 + 3
    assert counted == CastBytes(executed=6 * (down + up + grads), absorbed=0, count=7)
    for p, old in zip(layer.parameters(), before, strict=True):
        assert torch.equal(p, old) and p.grad is None


def test_autocast_is_counted_without_a_trace_in_the_model() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.norm, self.calls = nn.Linear(4, 4), nn.BatchNorm1d(4), 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return self.norm(self.layer(x))

    model = Counting()
    counted = autocast_casts(model, lambda m, x: m(x).pow(2).mean(), (data(6, 4),), torch.bfloat16)
    assert isinstance(counted, CastBytes) and counted.count > 3
    assert model.calls == 0 and int(model.norm.num_batches_tracked) == 0
    assert torch.equal(model.norm.running_mean, torch.zeros(4))


def test_autocast_of_a_convolution_network() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(64, 5))
    batch = (data(2, 3, 6, 6), torch.tensor([1, 3]))
    counted = autocast_casts(model, nn.CrossEntropyLoss(), batch, torch.float16)
    assert isinstance(counted, CastBytes), counted
    weights, x, logits = 4 * 27 + 4 + 64 * 5 + 5, 2 * 3 * 36, 2 * 5
    # both layers' weights down and their gradients up, the picture down, the logits up and their gradient down
    assert counted.executed == 6 * (2 * weights + x + 2 * logits)


def test_what_cannot_be_counted_says_why() -> None:
    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        y = model(x)
        return y.sum() if float(y.detach().sum()) > 0 else -y.sum()

    reason = autocast_casts(Perceptron(), loss, (data(6, 4),), torch.bfloat16)
    assert isinstance(reason, str) and "data" in reason.lower()


def test_accumulation_counts_every_micro_batch() -> None:
    once, twice = low_perceptron(), low_perceptron(accumulate=2)
    # every micro-batch casts its own weight gradients: four parameters more
    assert twice._compiled.executable.casts.count >= once._compiled.executable.casts.count + 4
    assert twice._compiled.executable.casts.executed > once._compiled.executable.casts.executed
    assert program_casts(once._compiled.executable) == once.report().casts
