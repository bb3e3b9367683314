"""The regenerate pass: text in and out, no random value kept for backward, the same masks to the last bit, and
gradients equal to autograd's under the same masks."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import wholestep as ws
from tests.runtime.runs import fresh
from wholestep import ir, transforms
from wholestep.capture.capture import capture
from wholestep.dialects import context
from wholestep.dialects.step import StepBuilder, philox
from wholestep.ir.builtin import finish_function, functions, lookup
from wholestep.ir.passes import run_pipeline
from wholestep.runtime.executor import Executable
from wholestep.training.autodiff import gradients
from wholestep.training.traced_vjp import VjpCache

torch.set_num_threads(1)
KEY = (1234, 5, 6)

# ---- text ------------------------------------------------------------------------------------------------------------

TEXT = """
"builtin.module"() ({
  "func.func"() ({
  ^bb0(%x: tensor<2x3xf32>, %key: tensor<3xi64>):
    %u = "step.random"(%key) {distribution = "uniform", stream = 1 : i64, type = tensor<2x3xf32>, phase = "forward"} : (tensor<3xi64>) -> tensor<2x3xf32>
    %p = "step.constant"() {value = 0.5 : f64, type = tensor<f32>, phase = "forward"} : () -> tensor<f32>
    %keep = "step.ge"(%u, %p) {phase = "forward"} : (tensor<2x3xf32>, tensor<f32>) -> tensor<2x3xi1>
    %mask = "step.cast"(%keep) {dtype = f32, phase = "forward"} : (tensor<2x3xi1>) -> tensor<2x3xf32>
    %y = "step.mul"(%x, %mask) {phase = "forward"} : (tensor<2x3xf32>, tensor<2x3xf32>) -> tensor<2x3xf32>
    %z = "step.exp"(%y) {phase = "loss"} : (tensor<2x3xf32>) -> tensor<2x3xf32>
    %a = "step.mul"(%y, %z) {phase = "backward"} : (tensor<2x3xf32>, tensor<2x3xf32>) -> tensor<2x3xf32>
    %b = "step.mul"(%a, %mask) {phase = "backward"} : (tensor<2x3xf32>, tensor<2x3xf32>) -> tensor<2x3xf32>
    %c = "step.select"(%keep, %b, %a) {phase = "update"} : (tensor<2x3xi1>, tensor<2x3xf32>, tensor<2x3xf32>) -> tensor<2x3xf32>
    "func.return"(%z, %c) : (tensor<2x3xf32>, tensor<2x3xf32>) -> ()
  }) {sym_name = "main", function_type = (tensor<2x3xf32>, tensor<3xi64>) -> (tensor<2x3xf32>, tensor<2x3xf32>)} : () -> ()
}) : () -> ()
"""  # noqa: E501

LINES = [
    "random forward",
    "constant forward",
    "ge forward",
    "cast forward",
    "mul forward",
    "exp loss",
    "mul backward",
    "random backward",
    "ge backward",
    "cast backward",
    "mul backward",
    "select update",
    "return ",
]


def lines(module: ir.Op, name: str = "main") -> list[str]:
    return [f"{op.name.partition('.')[2]} {op.phase}" for op in lookup(module, name).regions[0].block]


def test_text() -> None:
    module = ir.parse(TEXT, context())
    inputs = [torch.randn(2, 3), torch.tensor(KEY)]
    before = Executable(lookup(module, "main"))(inputs)
    run_pipeline(module, "regenerate")
    ir.verify(module)
    assert lines(module) == LINES
    text = ir.print_op(module)
    assert lines(ir.parse(text, context())) == LINES
    after = Executable(lookup(module, "main"))(inputs)
    assert all(torch.equal(x, y) for x, y in zip(before, after, strict=True))


def test_cse_does_not_undo_it_and_again_changes_nothing() -> None:
    module = ir.parse(TEXT, context())
    run_pipeline(module, "regenerate,cse,dce,regenerate,cse")
    assert lines(module) == LINES


def test_cse_still_merges_random_numbers_of_one_phase() -> None:
    again = TEXT.replace(
        '    %y = "step.mul"', "    %v = " + TEXT.split("%u = ")[1].split("\n")[0] + '\n    %y = "step.mul"'
    )
    module = ir.parse(again, context())
    assert lines(module).count("random forward") == 2
    run_pipeline(module, "cse")
    assert lines(module).count("random forward") == 1


@pytest.mark.parametrize(
    ("op", "again"),
    [
        ('"step.sum"(%u) {dims = array<i64: 0>, keepdim = true, phase = "forward"}', True),
        ('"step.slice"(%u) {dim = 0 : i64, start = 0 : i64, end = 1 : i64, stride = 1 : i64, phase = "forward"}', True),
        ('"step.add"(%u, %x) {phase = "forward"}', False),
    ],
)
def test_what_is_computed_again(op: str, again: bool) -> None:
    """Reductions and parts of random numbers are; what depends on the data is not."""
    operands = "tensor<2x3xf32>, tensor<2x3xf32>" if "%x" in op else "tensor<2x3xf32>"
    result = "tensor<2x3xf32>" if "%x" in op else "tensor<1x3xf32>"
    text = TEXT.replace("    %p = ", f"    %s = {op} : ({operands}) -> {result}\n    %p = ").replace(
        '"step.mul"(%y, %z) {phase = "backward"} : (tensor<2x3xf32>, tensor<2x3xf32>)',
        f'"step.mul"(%y, %s) {{phase = "backward"}} : (tensor<2x3xf32>, {result})',
    )
    module = ir.parse(text, context())
    ir.verify(module)
    run_pipeline(module, "regenerate")
    ir.verify(module)
    name = op.partition('"step.')[2].partition('"')[0]
    assert lines(module).count(f"{name} forward") == 1
    assert lines(module).count(f"{name} backward") == int(again)


# ---- models ----------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """Dropout, attention with dropout, stochastic depth as torchvision writes it, channel dropout, Gumbel noise."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)
        self.out = nn.Linear(8, 8)
        self.gate = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 2, 4).permute(2, 0, 3, 1, 4)
        h = self.attend(q, k, v).transpose(1, 2).flatten(2)
        h = self.channels(self.elements(self.out(h)))
        h = x + h * self.depth(h)
        return h * torch.softmax(self.gate(h) + self.gumbel(h), -1)

    def attend(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v, dropout_p=0.3, is_causal=True)

    def elements(self, h):
        return F.dropout(h, 0.25)

    def channels(self, h):
        return F.dropout1d(h, 0.2)

    def depth(self, h):
        noise = torch.empty([h.shape[0], 1, 1], dtype=h.dtype)
        return noise.bernoulli_(0.7).div_(0.7)

    def gumbel(self, h):
        return -torch.empty_like(h).exponential_().log()


class GivenMasks(Block):
    """The same in eager PyTorch, with the numbers that the program draws: one stream per call, in order."""

    def numbers(self, stream: int, shape, distribution: str = "uniform") -> torch.Tensor:
        return philox.draw(distribution, tuple(shape), torch.float64, KEY, stream)

    def attend(self, q, k, v):
        length = q.shape[-2]
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
        seen = torch.ones(length, length, dtype=torch.bool).tril()
        weights = torch.softmax(scores.masked_fill(~seen, -math.inf), -1)
        return weights * (self.numbers(1, weights.shape) >= 0.3) / 0.7 @ v

    def elements(self, h):
        return h * (self.numbers(2, h.shape) >= 0.25) / 0.75

    def channels(self, h):
        return h * (self.numbers(3, (*h.shape[:2], 1)) >= 0.2) / 0.8

    def depth(self, h):
        return (self.numbers(4, (h.shape[0], 1, 1)) < 0.7).double() / 0.7

    def gumbel(self, h):
        return -self.numbers(5, h.shape, "exponential").log()


def squares(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().sum()


class Differentiated:
    """A captured model with its gradients, as one function that gives the loss and them."""

    def __init__(self, model: nn.Module, x: torch.Tensor):
        self.captured = captured = capture(model, squares, (x,))
        self.module, self.function = captured.module, captured.function
        self.block = block = self.function.regions[0].block
        places = {s.name: a for s, a in zip(captured.slots, block.arguments, strict=True) if s.kind == "parameter"}
        grads = gradients(StepBuilder(block, phase="backward"), captured.loss, list(places.values()), VjpCache())
        self.names = list(places)
        finish_function(self.function, [captured.loss, *grads])
        run_pipeline(self.module, "cse,dce")
        self.inputs = [
            {"parameter": lambda s: captured.parameters[s.name].detach(), "batch": lambda s: x}.get(
                s.kind, lambda s: torch.tensor(KEY)
            )(s)
            for s in captured.slots
        ]

    def run(self) -> list[torch.Tensor]:
        return Executable(self.function)(self.inputs)


def model_and_batch(kind: type[Block] = Block) -> tuple[nn.Module, torch.Tensor]:
    x = torch.randn(4, 5, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return fresh(lambda: kind().double()), x


def kept_randomness(function: ir.Op) -> list[ir.Op]:
    """Early ops that see nothing but random numbers and constants, and whose result a later phase uses."""
    only_random: dict[ir.Value, bool] = {}  # of values that depend on no data: whether they depend on a random op
    kept = []
    for op in function.regions[0].block:
        if op.name == "step.random" or all(v in only_random for v in op.operands):
            random = op.name == "step.random" or any(only_random[v] for v in op.operands)
            only_random.update(dict.fromkeys(op.results, random))
            users = {u.phase for r in op.results for u in r.uses}
            if random and op.phase in ("forward", "loss") and users & {"backward", "clip", "update"}:
                kept.append(op)
    return kept


def test_no_random_value_is_kept() -> None:
    program = Differentiated(*model_and_batch())
    assert len({op.stream for op in program.block if op.name == "step.random"}) == 5
    assert len(kept_randomness(program.function)) >= 4  # before the pass they are
    run_pipeline(program.module, "regenerate")
    ir.verify(program.module)
    assert kept_randomness(program.function) == []
    executed = Executable(program.function).function  # nor after what the executor does to it
    assert kept_randomness(executed) == []


def test_masks_are_the_same_to_the_last_bit() -> None:
    program = Differentiated(*model_and_batch())
    copies = transforms.regenerate.regenerate_in(program.block)
    assert {old.op.stream for old in copies if old.op.name == "step.random"} == {1, 2, 3, 4}
    assert program.block.last is not None
    program.block.last.set_operands([v for pair in copies.items() for v in pair])
    executable = Executable(program.function)
    drawn = [(op.stream, op.phase) for *_, op in executable.calls if op.name == "step.random"]
    assert {(stream, "backward") for stream in (1, 2, 3, 4)} < set(drawn)  # both are really computed
    results = executable(program.inputs)
    for old, again in zip(results[::2], results[1::2], strict=True):
        assert torch.equal(old, again)
    first = {float(r.flatten()[0]) for v, r in zip(copies, results[::2], strict=True) if v.op.name == "step.random"}
    assert len(first) == 4  # and no two layers share their numbers


def test_the_pass_changes_no_bit_of_the_results() -> None:
    program = Differentiated(*model_and_batch())
    before = program.run()
    run_pipeline(program.module, "regenerate")
    assert all(torch.equal(x, y) for x, y in zip(before, program.run(), strict=True))


def test_gradients_are_those_of_autograd_under_the_same_masks() -> None:
    model, x = model_and_batch()
    program = Differentiated(model, x)
    run_pipeline(program.module, "regenerate")
    loss, *grads = program.run()
    twin, _ = model_and_batch(GivenMasks)
    expected = squares(twin, x)
    expected.backward()
    torch.testing.assert_close(loss, expected.detach())
    parameters = dict(twin.named_parameters())
    assert set(program.names) == set(parameters)
    for name, grad in zip(program.names, grads, strict=True):
        torch.testing.assert_close(grad, parameters[name].grad, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize(
    "function",
    [
        lambda x: F.dropout(x, 0.1),
        lambda x: F.dropout1d(x, 0.1),
        lambda x: F.alpha_dropout(x, 0.1, training=True),
        lambda x: F.feature_alpha_dropout(x, 0.1, training=True),
        lambda x: F.rrelu(x, training=True),
        lambda x: x * torch.bernoulli(torch.full_like(x, 0.1)),
        lambda x: x * torch.empty_like(x).bernoulli_(0.1),
        lambda x: x * torch.empty_like(x).bernoulli_(torch.full_like(x, 0.1)),
        lambda x: torch.native_dropout(x, 0.1, True)[0],
    ],
)
def test_masks_are_drawn_in_single_precision_at_least(function, dtype: torch.dtype) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 6).to(dtype)

        def forward(self, x):
            return function(self.layer(x)[None])

    program = Differentiated(Model(), torch.ones(3, 4, dtype=dtype))
    (drawn,) = [op for op in program.block if op.name == "step.random"]
    assert drawn.y.type.element.text == ("f64" if dtype is torch.float64 else "f32")
    run_pipeline(program.module, "regenerate")
    assert kept_randomness(program.function) == []
    assert all(t.isfinite().all() for t in program.run())


def test_dropout_keeps_the_share_it_should_in_bf16() -> None:
    """Drawn with the eight bits of bf16, a rate of 0.001 would be 0.0039 or nothing."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(400, 500, dtype=torch.bfloat16))

        def forward(self, x):
            return F.dropout(self.weight, 0.001) * x

    program = Differentiated(Model(), torch.ones((), dtype=torch.bfloat16))
    run_pipeline(program.module, "regenerate")
    _, gradient = program.run()
    dropped = int((gradient == 0).sum())
    assert abs(dropped - 200) < 4 * math.sqrt(200)


# ---- compiled steps --------------------------------------------------------------------------------------------------

OPTIONS = [{}, {"precision": "bf16"}, {"precision": "fp16"}, {"accumulate": 2}, {"clip_norm": 1.0, "ema": 0.9}]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_compiled_steps_keep_no_randomness(options) -> None:
    model, x = fresh(Block), torch.randn(4, 5, 8)
    step = ws.compile(model, squares, torch.optim.AdamW(model.parameters()), (x,), **options)
    drawn = set()
    for function in functions(step.program()):
        assert kept_randomness(function) == []
        block = function.regions[0].block
        drawn |= {(op.stream, op.phase) for op in block if op.name == "step.random"}
    assert {(stream, phase) for stream in (1, 2, 3, 4) for phase in ("forward", "backward")} < drawn


class Masked(nn.Module):
    """Its gradient is the masks themselves, doubled and added."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2, 50))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([F.dropout(row, 0.5) for row in self.weight]).sum() * x.mean()


def masked_step(accumulate: int, seed: int = 5):
    torch.manual_seed(seed)
    model = Masked()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, maximize=True)
    x = torch.ones(accumulate, 3)
    return model, x, ws.compile(model, lambda m, x: m(x), optimizer, (x,), accumulate=accumulate)


@pytest.mark.parametrize("accumulate", [1, 3])
def test_each_layer_step_and_micro_batch_has_its_own_masks(accumulate: int) -> None:
    model, x, step = masked_step(accumulate)
    seen = []
    for counter in range(3):
        before = model.weight.detach().clone()
        step(x)
        change = torch.zeros(2, 50)
        for micro in range(accumulate):
            for row in range(2):
                mask = philox.draw("uniform", (50,), torch.float32, (5, counter, micro), row + 1) >= 0.5
                change[row] += mask * 2 / accumulate
                seen.append(tuple(mask.tolist()))
        torch.testing.assert_close(model.weight.detach() - before, change)
    assert len(set(seen)) == 6 * accumulate


def test_a_seed_repeats_a_run_and_a_checkpoint_continues_it() -> None:
    def train(model, x, step, steps):
        for _ in range(steps):
            step(x)
        return model.weight.detach().clone()

    whole, other = train(*masked_step(2), 5), train(*masked_step(2, seed=6), 5)
    assert torch.equal(train(*masked_step(2), 5), whole) and not torch.equal(other, whole)
    model, x, step = masked_step(2)
    train(model, x, step, 2)
    saved = copy.deepcopy(step.state_dict())
    assert saved["random"] == {"seed": 5, "counter": 2}
    model, x, step = masked_step(2, seed=99)  # in another process, with another seed
    step.load_state_dict(saved)
    assert torch.equal(train(model, x, step, 3), whole)
