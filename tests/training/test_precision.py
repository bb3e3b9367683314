"""Mixed precision: the option, rules beside PyTorch's own autocast lists, overrides, weight copies, every gradient."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import wholestep as ws
from tests.dialects.step.harness import flat, regroup
from tests.dialects.step.samples import SAMPLES
from wholestep.capture.capture import Captured, capture
from wholestep.capture.slots import Slot
from wholestep.dialects.step import StepBuilder, step, tensor_type
from wholestep.errors import InputError
from wholestep.ir import add_function, finish_function, module, verify
from wholestep.ir.types import BF16, F16, F32, F64
from wholestep.runtime.executor import Executable
from wholestep.torch_private import FakeTensorMode
from wholestep.training.autodiff import gradients
from wholestep.training.precision import Policy, apply_precision, parse_precision, split_weight_copies
from wholestep.training.traced_vjp import VjpCache

# ---- the option ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("option", "low", "default"),
    [
        ("fp32", None, "fp32"),
        ("bf16", BF16, "bf16"),
        ("fp16", F16, "fp16"),
        ({"lm_head": "fp32"}, BF16, "bf16"),
        ({"encoder": "fp16"}, F16, "fp32"),
        ({"encoder": "fp32", "default": "fp16"}, F16, "fp16"),
        ({"encoder": "fp32", "default": "fp32"}, None, "fp32"),
    ],
)
def test_option(option: Any, low: Any, default: str) -> None:
    policy = parse_precision(option)
    assert policy.low is low and policy.default == default
    assert parse_precision(json.loads(json.dumps(policy.option))) == policy


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("bf8", r"one of 'fp32', 'bf16', 'fp16', not 'bf8'; did you mean 'bf16'"),
        ("half", "did you mean 'fp16'"),
        (torch.bfloat16, "did you mean 'bf16'"),
        (16, "must be one of"),
        (None, "must be one of"),
        ({}, "says nothing"),
        ({"lm_head": "f32"}, r"precision\['lm_head'\] must be one of .* did you mean 'fp32'"),
        ({"a": "bf16", "b": "fp16"}, "mixes bf16 and fp16"),
        ({"a": "bf16", "default": "fp16"}, "mixes bf16 and fp16"),
        ({3: "bf16"}, "names of layers and ops, not by 3"),
    ],
)
def test_bad_options(option: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        parse_precision(option)


def test_the_longest_path_wins_and_a_path_beats_an_op() -> None:
    policy = parse_precision(
        {"encoder.layer.0": "fp32", "encoder": "bf16", "softmax": "bf16", "*.layer.1": "fp32", "default": "bf16"}
    )
    assert policy.choose("encoder.layer.0.attention", "step.contract") == ("fp32", False)
    assert policy.choose("encoder.layer.0", "step.softmax") == ("fp32", False)
    assert policy.choose("encoder.layer.1.x", "step.softmax") == ("fp32", False)
    assert policy.choose("encoder.layer.2", "step.softmax") == ("bf16", False)
    assert policy.choose("encoder.layer.00", "step.add") == ("bf16", False)
    assert policy.choose("head", "step.softmax") == ("bf16", True)
    assert parse_precision({"enc": "fp32"}).choose("encoder", "step.add") == ("bf16", False)


# ---- the rules, beside PyTorch's own lists ---------------------------------------------------------------------------


class Low(nn.Module):
    """A linear layer, whose result autocast makes low, and a function of it."""

    def __init__(self, function: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.weight, self.bias = nn.Parameter(torch.ones(8)), nn.Parameter(torch.zeros(8))
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("var", torch.ones(8))
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self, self.layer(x))


def loss_and_output(model: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    out = model(x)
    return out.sum(), out


LIKE_AUTOCAST: dict[str, Callable[..., torch.Tensor]] = {
    "matmul": lambda m, x: x @ x.mT,
    "linear": lambda m, x: F.linear(x, torch.diag(m.weight)),
    "bmm": lambda m, x: torch.bmm(x.unsqueeze(0), x.mT.unsqueeze(0)),
    "conv": lambda m, x: F.conv1d(x.unsqueeze(0), m.weight.expand(4, 8).narrow(1, 0, 4).unsqueeze(-1)),
    "attention": lambda m, x: F.scaled_dot_product_attention(*(x.view(1, 1, 4, 8),) * 3),
    "exp": lambda m, x: x.exp(),
    "expm1": lambda m, x: x.expm1(),
    "log": lambda m, x: x.abs().log(),
    "log2": lambda m, x: x.abs().log2(),
    "log1p": lambda m, x: x.abs().log1p(),
    "rsqrt": lambda m, x: x.abs().rsqrt(),
    "reciprocal": lambda m, x: x.reciprocal(),
    "pow": lambda m, x: x**3,
    "softmax": lambda m, x: x.softmax(-1),
    "log_softmax": lambda m, x: x.log_softmax(-1),
    "logsumexp": lambda m, x: x.logsumexp(-1),
    "sum": lambda m, x: x.sum(-1),
    "prod": lambda m, x: x.prod(-1),
    "cumsum": lambda m, x: x.cumsum(-1),
    "layer_norm": lambda m, x: F.layer_norm(x, (8,), m.weight, m.bias),
    "group_norm": lambda m, x: F.group_norm(x, 2, m.weight, m.bias),
    "batch_norm": lambda m, x: F.batch_norm(x, m.mean, m.var, m.weight, m.bias, True),
    "mse_loss": lambda m, x: F.mse_loss(x, torch.sigmoid(x)),
    "cross_entropy": lambda m, x: F.cross_entropy(x, x.argmax(-1)),
    "vector_norm": lambda m, x: torch.linalg.vector_norm(x, dim=-1),
    "add two": lambda m, x: x + x,
    "add a parameter": lambda m, x: x + m.weight,
    "times a number": lambda m, x: x * 0.1,
    "times one number of a tensor": lambda m, x: x * m.weight.sum(),
    "masked_fill": lambda m, x: x.masked_fill(x > 0, -1e9),
    "times a mask": lambda m, x: x * (x > 0),
    "cat": lambda m, x: torch.cat([x, m.weight.unsqueeze(0)]),
    "where": lambda m, x: torch.where(x > 0, x, m.weight),
    "relu": lambda m, x: F.relu(x),
    "gelu": lambda m, x: F.gelu(x),
    "silu": lambda m, x: F.silu(x),
    "tanh": lambda m, x: x.tanh(),
    "sqrt": lambda m, x: x.abs().sqrt(),
    "sin": lambda m, x: x.sin(),
    "amax": lambda m, x: x.amax(-1),
    "max pool": lambda m, x: F.max_pool1d(x.unsqueeze(0), 2),
    "transpose": lambda m, x: x.mT,
    "select": lambda m, x: x.select(1, 2),
    "embedding": lambda m, x: F.embedding(x.argmax(-1), torch.diag(m.weight)),
}
#: where we differ from PyTorch's lists on purpose: we keep more digits
MORE_DIGITS: dict[str, Callable[..., torch.Tensor]] = {
    "mean": lambda m, x: x.mean(-1),
    "variance": lambda m, x: x.var(-1),
    "exp2": lambda m, x: x.exp2(),
    "rms_norm": lambda m, x: F.rms_norm(x, (8,), m.weight),
    "a product that no parameter reaches": lambda m, x: torch.diag(m.var) @ torch.diag(m.mean) + 0 * x[:1],
}


def ours(function: Callable[..., torch.Tensor]) -> Any:
    captured = capture(Low(function), loss_and_output, (torch.randn(4, 8),))
    apply_precision(captured, parse_precision("bf16"))
    assert captured.loss.type.element is F32
    return captured.outputs[1].type.element


def autocast(function: Callable[..., torch.Tensor]) -> torch.dtype:
    """What PyTorch's CUDA autocast gives, on fake tensors: the lists are there without a GPU."""
    with FakeTensorMode():
        names = dict(weight=(8,), bias=(8,), mean=(8,), var=(8,))
        held = {k: torch.empty(v, device="cuda") for k, v in names.items()}
        holder = SimpleNamespace(**held)
        x, w = torch.empty(4, 8, device="cuda"), torch.empty(8, 8, device="cuda")
        before = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
        torch.set_autocast_enabled("cuda", True)
        torch.set_autocast_dtype("cuda", torch.bfloat16)
        try:
            return function(holder, F.linear(x, w)).dtype
        finally:
            torch.set_autocast_enabled("cuda", before[0])
            torch.set_autocast_dtype("cuda", before[1])
            torch.clear_autocast_cache()


DTYPES = {torch.bfloat16: BF16, torch.float32: F32}


@pytest.mark.parametrize("name", LIKE_AUTOCAST)
def test_rules_are_those_of_autocast(name: str) -> None:
    function = LIKE_AUTOCAST[name]
    try:
        expected = autocast(function)
    except RuntimeError as error:
        if "not linked with support for cuda" not in str(error):
            raise
        pytest.skip("this call needs a CUDA build even on fake tensors")
    assert ours(function) is DTYPES[expected]


@pytest.mark.parametrize("name", MORE_DIGITS)
def test_where_we_keep_more_digits(name: str) -> None:
    assert ours(MORE_DIGITS[name]) is F32


# ---- what the pass keeps ---------------------------------------------------------------------------------------------


def names_and_types(captured: Captured, name: str) -> list[str]:
    return [
        str([str(v.type.element) for v in op.operands])
        for op in captured.function.regions[0].block
        if op.name == f"step.{name}"
    ]


def captured_of(function: Callable[..., torch.Tensor], option: Any = "bf16") -> Captured:
    captured = capture(Low(function), loss_and_output, (torch.randn(4, 8),))
    apply_precision(captured, parse_precision(option))
    finish_function(captured.function, [captured.loss, *captured.outputs])
    verify(captured.module)
    return captured


def test_softmax_stays_low_between_products() -> None:
    captured = captured_of(lambda m, x: (x @ x.mT).softmax(-1) @ x)
    assert names_and_types(captured, "softmax") == ["['bf16']"]
    captured = captured_of(lambda m, x: (x @ x.mT).softmax(-1).log() @ x)
    assert names_and_types(captured, "softmax") == ["['f32']"]


def test_batch_norm_takes_the_low_tensor_and_f32_vectors() -> None:
    captured = captured_of(LIKE_AUTOCAST["batch_norm"])
    assert names_and_types(captured, "batch_norm") == ["['bf16', 'f32', 'f32', 'f32', 'f32']"]


def test_finite_masks_stay_finite() -> None:
    lowest = torch.finfo(torch.float32).min
    for option, limit in (("bf16", torch.finfo(torch.bfloat16).min), ("fp16", -65504.0)):
        captured = captured_of(lambda m, x: x.masked_fill(x > 0, lowest), option)
        block = captured.function.regions[0].block
        (select,) = [op for op in block if op.name == "step.select"]
        numbers = [v.op.attributes["value"] for v in select.operands if v.op and v.op.name == "step.constant"]
        assert numbers == [limit]


def test_buffers_keep_their_type_and_doubles_are_left_alone() -> None:
    def function(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
        m.mean.copy_(x[0])
        return x.double() * 2

    captured = capture(Low(function), loss_and_output, (torch.randn(4, 8),))
    apply_precision(captured, parse_precision("bf16"))
    assert [(s.name, v.type.element) for s, v in captured.changed] == [("mean", F32)]
    assert captured.outputs[1].type.element is F64


def test_opaque_ops_take_the_types_they_were_captured_with() -> None:
    captured = captured_of(lambda m, x: torch.special.i0(x) @ x.mT)
    assert names_and_types(captured, "opaque") == ["['f32']"]


# ---- overrides -------------------------------------------------------------------------------------------------------


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
        self.head = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))


def products(option: Any) -> dict[str, str]:
    captured = capture(Two(), loss_and_output, (torch.randn(4, 8),))
    apply_precision(captured, parse_precision(option))
    block = captured.function.regions[0].block
    return {op.loc.layer: str(op.results[0].type.element) for op in block if op.name == "step.contract"}


def test_overrides_by_layer_and_op() -> None:
    assert products("bf16") == {"body.0": "bf16", "body.2": "bf16", "head": "bf16"}
    assert products({"head": "fp32"}) == {"body.0": "bf16", "body.2": "bf16", "head": "f32"}
    assert products({"body": "bf16"}) == {"body.0": "bf16", "body.2": "bf16", "head": "f32"}
    assert products({"body.*": "fp32", "body.2": "bf16", "default": "bf16"}) == {
        "body.0": "f32",
        "body.2": "bf16",
        "head": "bf16",
    }
    assert products({"contract": "fp32"}) == dict.fromkeys(("body.0", "body.2", "head"), "f32")
    assert products({"step.contract": "fp32", "head": "bf16", "default": "bf16"})["head"] == "bf16"


@pytest.mark.parametrize(
    ("key", "near"), [("haed", "'head'"), ("body.7", "'body"), ("softmax", ""), ("Body", "'body'"), ("geluu", "'gelu'")]
)
def test_a_key_that_names_nothing(key: str, near: str) -> None:
    with pytest.raises(InputError, match=f"names '{key}', which is no layer and no op of this program") as caught:
        products({key: "fp32"})
    assert near in str(caught.value)


def test_an_op_forced_low() -> None:
    captured = captured_of(lambda m, x: x.exp(), {"exp": "bf16", "default": "bf16"})
    assert names_and_types(captured, "exp") == ["['bf16']"]


# ---- weight copies ---------------------------------------------------------------------------------------------------


def batch_at(captured: Captured) -> int:
    (place,) = [i for i, slot in enumerate(captured.slots) if slot.kind == "batch"]
    return place


def test_casts_of_parameters_become_arguments() -> None:
    captured = capture(Two(), loss_and_output, (torch.randn(4, 8),))
    apply_precision(captured, parse_precision("bf16"))
    block = captured.function.regions[0].block
    slots: list[Slot] = []

    def argument(slot: Slot) -> Any:
        slots.append(slot)
        return block.add_argument(slot.type, slot.name)

    copies = split_weight_copies(block, captured, argument)
    assert sorted(copies) == sorted(captured.parameters) and len(slots) == 6
    assert copies["head.weight"] == Slot(
        "copy", "head.weight as bf16", ("copy", "head.weight"), copies["head.weight"].type
    )
    assert str(copies["head.weight"].type) == "tensor<8x8xbf16>"
    narrowed = [op for op in block if op.name == "step.cast" and op.dtype is BF16]
    assert [op.operands[0] for op in narrowed] == [block.arguments[batch_at(captured)]]  # x, nothing else
    finish_function(captured.function, captured.outputs)
    verify(captured.module)


def test_casts_of_the_model_round_and_ours_need_not() -> None:
    model = Low(lambda m, x: m.layer(x.half().float()))
    captured = capture(model, loss_and_output, (torch.randn(4, 8),))
    apply_precision(captured, parse_precision("bf16"))
    block = captured.function.regions[0].block
    types = {(str(op.operands[0].type.element), str(op.dtype), op.rounds) for op in block if op.name == "step.cast"}
    assert types == {("bf16", "f16", True), ("f16", "f32", True), ("f32", "bf16", None), ("bf16", "f32", None)}


def test_copies_are_read_through_views() -> None:
    captured = capture(
        Low(lambda m, x: x @ m.layer.weight.mT[:, :4].reshape(8, 2, 2)[:, 0]), loss_and_output, (torch.randn(4, 8),)
    )
    apply_precision(captured, parse_precision("fp16"))
    block = captured.function.regions[0].block
    copies = split_weight_copies(block, captured, lambda s: block.add_argument(s.type, s.name))
    assert sorted(copies) == ["layer.bias", "layer.weight"]
    narrowed = [op for op in block if op.name == "step.cast" and op.dtype is F16]
    assert [op.operands[0] for op in narrowed] == [block.arguments[batch_at(captured)]]
    finish_function(captured.function, captured.outputs)
    verify(captured.module)


# ---- every op's gradient, with the types mixed precision gives it ----------------------------------------------------

FIXED = {"batch_norm": 3, "cross_entropy": 1, "nll_loss": 1}  # operands from here on have no gradient in eager either
CASES = [
    pytest.param(name, *case, id=f"{name}-{i}")
    for name, cases in SAMPLES.items()
    if step.ops[name].derivative is not None and step.ops[name].differentiable
    for i, case in enumerate(cases)
    if case[0] and isinstance(flat(case[0])[0], torch.Tensor) and flat(case[0])[0].dtype is torch.float64
]


def program(name: str, operands: list[Any], attributes: dict[str, Any], option: str | None) -> list[torch.Tensor]:
    """Loss and gradients of one op whose first operand comes out of a matrix product; the others are parameters."""
    tensors = [t.float() if t.is_floating_point() else t for t in flat(operands)]
    root = module()
    function = add_function(root, "main", [tensor_type(t) for t in tensors])
    block = function.regions[0].block
    b = StepBuilder(block, phase="forward")
    values = list(block.arguments)
    if tensors[0].dim():
        eye = b.cast(
            b.eq(
                b.unsqueeze(b.iota(start=0, stride=1, type=count(tensors[0].shape[-1])), 0),
                b.unsqueeze(b.iota(start=0, stride=1, type=count(tensors[0].shape[-1])), 1),
            ),
            dtype=F32,
        )
        lead = "abcdefg"[: tensors[0].dim() - 1]
        values[0] = b.contract(values[0], eye, spec=f"{lead}y,yz->{lead}z")
    op = step.ops[name].build(b, *regroup(operands, values), **attributes)
    result = op.results[0]
    weights = b.sin(b.cast(b.iota(start=1, stride=1, type=count(result.type.size)), dtype=F32))
    rows = b.reshape_to(b.cast_to(result, F32), (result.type.size,))
    loss = b.sum(b.mul(rows, weights), dims=(0,))
    slots = [Slot("parameter", f"p{i}", ("parameter", f"p{i}"), tensor_type(t)) for i, t in enumerate(tensors)]
    exported: Any = SimpleNamespace(loss_index=0)
    captured = Captured(root, function, slots, loss, [loss], [], {}, exported, {}, {})
    if option is not None:
        apply_precision(captured, Policy(option))
    last = FIXED.get(name, len(tensors))
    wrt = [v for i, v in enumerate(block.arguments) if v.type.element.kind == "float" and i < last]
    b = StepBuilder(block, phase="backward")
    grads = gradients(b, captured.loss, wrt, VjpCache())
    finish_function(function, [captured.loss, *(g for g in grads if g is not None)])
    verify(root)
    return Executable(function)(tensors)


def count(size: int) -> Any:
    return tensor_type(torch.empty(size, dtype=torch.int64))


@pytest.mark.parametrize("option", ["bf16", "fp16"])
@pytest.mark.parametrize(("name", "operands", "attributes"), CASES)
def test_gradients_with_mixed_types(name: str, operands: list[Any], attributes: dict[str, Any], option: str) -> None:
    mixed = program(name, operands, attributes, option)
    exact = program(name, operands, attributes, None)
    assert len(mixed) == len(exact)
    if name in ("floor", "ceil", "round", "trunc", "sign", "rem", "topk", "sort", "max_pool", "amax", "amin", "div"):
        return  # a rounding moves elements across a border; types and kernels are what is tested here
    for mine, want in zip(mixed, exact, strict=True):
        assert mine.dtype is want.dtype
        scale = want.abs().amax().clamp(min=1.0)
        torch.testing.assert_close(mine / scale, want / scale, rtol=0.1, atol=0.1, equal_nan=True)


# ---- as a user meets it ----------------------------------------------------------------------------------------------


def test_masters_stay_the_users_parameters() -> None:
    torch.manual_seed(0)
    model = Two()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    train = ws.compile(model, lambda m, x: m(x).square().mean(), optimizer, (torch.randn(4, 8),), precision="bf16")
    before = model.head.weight.detach().clone()
    train(torch.randn(4, 8))
    assert model.head.weight.dtype is torch.float32
    change = (model.head.weight - before).abs()
    assert 0 < change.max() < 1e-3  # finer than bf16 could hold beside a weight
    assert not torch.equal(model.head.weight, model.head.weight.bfloat16().float())


def test_a_weight_that_the_model_casts_to_the_other_type_itself():
    """One copy per weight: the model's own cast to float16 stays a cast."""

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x):
            return self.layer(x) + self.layer.weight.half().float().sum()

    torch.manual_seed(0)
    model = Both()
    twin = copy.deepcopy(model)
    step = ws.compile(
        model,
        lambda m, x: m(x).pow(2).mean(),
        torch.optim.SGD(model.parameters(), lr=0.1),
        (torch.ones(2, 4),),
        precision="bf16",
    )
    with torch.autocast("cpu", torch.bfloat16):
        expected = twin(torch.ones(2, 4)).pow(2).mean()
    torch.testing.assert_close(step(torch.ones(2, 4)), expected.detach().float(), rtol=2e-2, atol=1e-3)
    copies = {source[1]: t.dtype for source, t in step._own.tensors.items() if source[0] == "copy"}
    assert copies == {"layer.weight": torch.bfloat16, "layer.bias": torch.bfloat16}


@pytest.mark.parametrize(("precision", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_what_the_user_takes_out_of_autocast_stays_in_float32(precision: str, dtype: torch.dtype) -> None:
    """`with torch.autocast(..., enabled=False)` inside the model means the same as under autocast."""

    class Guarded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.low, self.high = nn.Linear(4, 8), nn.Linear(8, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.low(x)
            with torch.autocast("cpu", enabled=False):
                return self.high(x.float())

    torch.manual_seed(0)
    model, x = Guarded(), torch.randn(6, 4)
    with torch.autocast("cpu", dtype):
        expected = model(x).detach()
    step = ws.compile(
        model,
        lambda m, x: {"loss": (y := m(x)).pow(2).mean(), "y": y},
        torch.optim.SGD(model.parameters(), lr=0.1),
        (x,),
        precision=precision,
    )
    torch.testing.assert_close(step(x)["y"], expected, rtol=1e-6, atol=1e-7)
    low = precision.replace("fp", "f")
    assert {k: list(v) for k, v in step.report().precision.items()} == {"high": ["f32"], "low": [low]}


def test_instance_norm_rounds_where_autocast_does() -> None:
    torch.manual_seed(0)
    norm = nn.InstanceNorm2d(4, affine=True)
    with torch.no_grad():
        norm.weight.uniform_(0.5, 1.5)
        norm.bias.normal_()
    model = nn.Sequential(nn.Conv2d(3, 4, 3), norm, nn.Conv2d(4, 2, 3))
    x, target, twin = torch.randn(2, 3, 10, 10), torch.randn(2, 2, 6, 6), copy.deepcopy(model)
    before = copy.deepcopy(model.state_dict())
    with torch.autocast("cpu", torch.bfloat16):
        out = twin(x)
    F.mse_loss(out.float(), target).backward()
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    ws.compile(model, F.mse_loss, optimizer, (x, target), precision="bf16", providers=["aten"])(x, target)
    for name, parameter in twin.named_parameters():
        gradient = before[name] - model.get_parameter(name).detach()
        torch.testing.assert_close(gradient, parameter.grad, rtol=1e-4, atol=1e-5, msg=name)
