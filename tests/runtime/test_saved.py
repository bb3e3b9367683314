"""`step.save` and `ws.load`: what is loaded trains as what was saved, and no file can do more than that."""

from __future__ import annotations

import collections
import copy
import functools
import json
import os
import random
import re
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import wholestep as ws
from tests.runtime.runs import Perceptron, adamw, data, fresh, sgd
from wholestep.capture.structure import flatten
from wholestep.dialects.step.opaque import target_problem
from wholestep.errors import InputError, SavedStepError
from wholestep.runtime import saved as saved_module
from wholestep.runtime.saved import digest
from wholestep.torch_private import schema_of

X = data(6, 4)
Outputs = collections.namedtuple("Outputs", ["loss", "prediction"])


def squares(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).pow(2).mean()


def lively() -> nn.Module:
    """BatchNorm, dropout, an operator without a handler (its gradient traced), a tensor made in forward."""

    class Lively(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm, self.second = nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            weights = torch.tensor([[1.0, 2.0, 3.0, 4.0, 5.0]])
            h = F.dropout(torch.special.i0e(self.norm(self.first(x))), 0.2, self.training)
            return self.second(h * weights)

    return Lively()


def saved(tmp_path: Any, make: Callable[[], nn.Module] = lively, optimizer: Any = adamw, loss: Any = squares) -> Any:
    """A saved step: its path, the model, the optimizer and the step it was saved from."""
    model = fresh(make)
    opt = optimizer(model)
    step = ws.compile(model, loss, opt, (X,))
    path = tmp_path / "model.step"
    step.save(path)
    return path, model, opt, step


@pytest.fixture(scope="module")
def lively_text(tmp_path_factory: Any) -> str:
    """The file of the lively model trained by AdamW."""
    return saved(tmp_path_factory.mktemp("lively"))[0].read_text()


@pytest.fixture
def lively_file(lively_text: str, tmp_path: Any) -> Any:
    path = tmp_path / "model.step"
    path.write_text(lively_text)
    return path


def contents(path: Any) -> dict[str, Any]:
    return json.loads(path.read_text())["content"]


def rewrite(path: Any, change: Callable[[dict[str, Any]], None]) -> None:
    """Edits the content of a file and gives it a checksum that fits."""
    whole = json.loads(path.read_text())
    change(whole["content"])
    whole["sha256"] = digest(whole["content"])
    path.write_text(json.dumps(whole))


def sub(pattern: str, new: str) -> Callable[[dict[str, Any]], None]:
    """An edit of the program's text: the first line that has the pattern."""

    def change(content: dict[str, Any]) -> None:
        lines = content["programs"][0]["text"]
        index = next(i for i, line in enumerate(lines) if re.search(pattern, line))
        lines[index] = re.sub(pattern, new, lines[index], count=1)

    return change


# ---- what is loaded is what was saved --------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", [adamw, sgd])
def test_a_loaded_step_trains_exactly_as_the_one_that_was_saved(tmp_path, optimizer):
    path, model, _, step = saved(tmp_path, optimizer=optimizer)
    step(X)
    twin = fresh(lively)
    twin_opt = optimizer(twin)
    loaded = ws.load(path, twin, squares, twin_opt)
    loaded.load_state_dict(copy.deepcopy(step.state_dict()))
    for _ in range(4):
        assert torch.equal(step(X), loaded(X))
    for a, b in zip(model.state_dict().values(), twin.state_dict().values(), strict=True):
        assert torch.equal(a, b)
    assert str(loaded.program()) == str(step.program())


@pytest.mark.parametrize(
    "options",
    [
        {"clip_norm": 0.1},
        {"clip_norm": float("inf")},
        {"clip_value": 0.01, "skip_nonfinite": True},
        {"accumulate": 3},
        {"ema": 0.9},
        {"precision": "bf16", "accumulate": 2, "ema": 0.9},
        {"precision": {"default": "fp16", "second": "fp32"}, "loss_scale": 256.0},
    ],
    ids=str,
)
def test_every_option_goes_with_the_file(tmp_path, options):
    model, twin = fresh(lively), fresh(lively)
    step = ws.compile(model, squares, adamw(model), (X,), **options)
    step.save(tmp_path / "a.step")
    loaded = ws.load(tmp_path / "a.step", twin, squares, adamw(twin))
    assert loaded.options == step.options
    for _ in range(3):
        assert torch.equal(step(X), loaded(X))
    ours, theirs = loaded.state_dict(), step.state_dict()
    assert ours.keys() == theirs.keys()
    flat: list[list[torch.Tensor]] = [[], []]
    for tensors, state in zip(flat, (ours, theirs), strict=True):
        flatten(state, tensors, [])
    assert all(torch.equal(a, b) for a, b in zip(*flat, strict=True))


def test_every_shape_that_was_compiled_goes_with_the_file(tmp_path, monkeypatch):
    model, twin = fresh(Perceptron), fresh(Perceptron)
    step = ws.compile(model, squares, sgd(model), (X,), shapes="bucket")
    step(X), step(X[:4])
    step.save(tmp_path / "a.step")
    assert len(contents(tmp_path / "a.step")["programs"]) == 2
    loaded = ws.load(tmp_path / "a.step", twin, squares, sgd(twin))
    loaded.load_state_dict(copy.deepcopy(step.state_dict()))
    monkeypatch.setattr(torch.export, "export", None)
    for batch in (X, X[:4], X):
        assert torch.equal(step(batch), loaded(batch))


def test_loading_neither_captures_nor_differentiates(lively_file, monkeypatch):
    path = lively_file

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("traced")

    monkeypatch.setattr(torch.export, "export", refuse)
    monkeypatch.setattr("wholestep.training.build.gradients", refuse)
    monkeypatch.setattr("wholestep.training.traced_vjp.make_fx", refuse)
    twin = fresh(lively)
    step = ws.load(path, twin, squares, adamw(twin))
    assert step(X).isfinite()


def test_a_step_that_is_saved_again_gives_the_same_file(lively_file, tmp_path):
    path = lively_file
    twin = fresh(lively)
    ws.load(path, twin, squares, adamw(twin)).save(tmp_path / "again.step")
    assert (tmp_path / "again.step").read_text() == path.read_text()


def test_the_file_is_readable_text(tmp_path):
    path, *_ = saved(tmp_path)
    content = contents(path)
    lines = content["programs"][0]["text"]
    assert sum("step.adamw_update" in line or "step.adam" in line for line in lines) == len(
        list(fresh(lively).parameters())
    )
    assert content["made_with"]["torch"] == torch.__version__
    assert content["decisions"] == []
    assert "first.weight" in content["made_for"]["model"]["parameters"]
    assert path.read_text().isascii()


def test_a_loaded_step_compiles_again_when_a_layer_is_frozen(tmp_path):
    path, *_ = saved(tmp_path, Perceptron, sgd)
    twin = fresh(Perceptron)
    eager = copy.deepcopy(twin)
    step = ws.load(path, twin, squares, sgd(twin))
    opt = sgd(eager)
    for frozen in (False, True, True):
        for m in (twin, eager):
            m.first.requires_grad_(not frozen)
        step(X)
        opt.zero_grad()
        squares(eager, X).backward()
        opt.step()
    for a, b in zip(twin.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(a, b)


def test_keyword_batches_and_nested_outputs_come_back(tmp_path):
    def loss(model: nn.Module, batch: dict[str, Any]) -> dict[str, Any]:
        out = model(batch["x"])
        return {"loss": out.mean(), "rest": [out, {"scale": batch["scale"], "inf": float("inf")}]}

    model = fresh(Perceptron)
    step = ws.compile(model, loss, sgd(model), {"x": X, "scale": 3})
    step.save(tmp_path / "a.step")
    twin = fresh(Perceptron)
    loaded = ws.load(tmp_path / "a.step", twin, loss, sgd(twin))
    ours, theirs = loaded(x=X, scale=3), step(x=X, scale=3)
    assert ours.keys() == theirs.keys() and ours["rest"][1] == {"scale": 3, "inf": float("inf")}
    assert torch.equal(ours["rest"][0], theirs["rest"][0])


def test_classes_of_outputs_are_handed_over_and_never_looked_up(tmp_path):
    def loss(model: nn.Module, x: torch.Tensor) -> Outputs:
        out = model(x)
        return Outputs(out.mean(), out)

    path, *_ = saved(tmp_path, Perceptron, sgd, loss)
    twin = fresh(Perceptron)
    with pytest.raises(SavedStepError, match=r"Outputs.*containers="):
        ws.load(path, twin, loss, sgd(twin))
    out = ws.load(path, twin, loss, sgd(twin), containers=(Outputs,))(X)
    assert type(out) is Outputs and out.prediction.shape == (6, 3)


def test_writers_at_the_same_time_leave_one_whole_file(tmp_path):
    path, _, _, step = saved(tmp_path, Perceptron, sgd)
    threads = [threading.Thread(target=lambda: [step.save(path) for _ in range(3)]) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    twin = fresh(Perceptron)
    ws.load(path, twin, squares, sgd(twin))
    assert os.listdir(tmp_path) == ["model.step"]


def test_a_save_that_fails_leaves_the_old_file(tmp_path, monkeypatch):
    path, _, _, step = saved(tmp_path, Perceptron, sgd)
    before = path.read_text()

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(saved_module.os, "fsync", full)
    with pytest.raises(SavedStepError, match="No space left"):
        step.save(path)
    assert path.read_text() == before and os.listdir(tmp_path) == ["model.step"]
    with pytest.raises(SavedStepError, match="cannot be written"):
        step.save(tmp_path / "missing" / "model.step")


# ---- another model, another optimizer --------------------------------------------------------------------------------


class Wider(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 5), nn.Linear(5, 7)


def changed_setting() -> nn.Module:
    model = fresh(lively)
    model.norm.momentum = 0.5
    return model


def evaluated() -> nn.Module:
    model = fresh(lively)
    model.norm.eval()
    return model


def frozen() -> nn.Module:
    model = fresh(lively)
    model.first.bias.requires_grad_(False)
    return model


def extended() -> nn.Module:
    model = fresh(lively)
    model.third = nn.Linear(2, 2)
    return model


def double() -> nn.Module:
    return fresh(lively).double()


def buffered() -> nn.Module:
    model = fresh(lively)
    model.register_buffer("more", torch.zeros(3))
    return model


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (changed_setting, r"layer norm: setting momentum is 0\.5 here and was 0\.1"),
        (evaluated, "layer norm: it is in eval mode here"),
        (frozen, "parameter first.bias: it is frozen here"),
        (extended, "layer third was not there"),
        (double, "parameter first.weight: type is 'tensor<5x4xf64>'"),
        (buffered, "buffer more was not there"),
        (Perceptron, r"layer \(model\): class is"),
    ],
)
def test_another_model_is_refused_by_the_name_of_what_differs(lively_file, make, message):
    path = lively_file
    other = make()
    with pytest.raises(SavedStepError, match=message):
        ws.load(path, other, squares, adamw(other))


def test_what_a_loss_function_has_bound_is_compared(tmp_path):
    def scaled(factor: float) -> Callable[..., torch.Tensor]:
        return lambda model, x: model(x).pow(2).mean() * factor

    class Times:
        def __init__(self, factor: float) -> None:
            self.factor = factor

        def __call__(self, model: nn.Module, x: torch.Tensor) -> torch.Tensor:
            return model(x).pow(2).mean() * self.factor

    def times(model: nn.Module, x: torch.Tensor, factor: float) -> torch.Tensor:
        return model(x).pow(2).mean() * factor

    pairs = [
        (scaled(2.0), scaled(3.0)),
        (Times(2.0), Times(3.0)),
        (functools.partial(times, factor=2.0), functools.partial(times, factor=3.0)),
        (lambda model, x: model(x).pow(2).mean(), lambda model, x: model(x).abs().mean()),
    ]
    for loss, other in pairs:
        path, model, optimizer, _ = saved(tmp_path, Perceptron, sgd, loss)
        ws.load(path, model, loss, optimizer)
        with pytest.raises(SavedStepError, match=r"the loss function: (settings|the text of its code)"):
            ws.load(path, model, other, optimizer)


class Times(nn.Module):
    """A layer with a list, a function and a tensor that are no parameters."""

    def __init__(self, sizes: Any = (2, 3), act: Any = torch.tanh, scale: float = 1.0) -> None:
        super().__init__()
        self.layer, self.sizes, self.act, self.scale = nn.Linear(4, 3), list(sizes), act, torch.full((3,), scale)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(self.layer(x)) * self.sizes[0] * self.scale


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sizes": (5, 3)}, "setting sizes is"),
        ({"act": torch.sigmoid}, "setting act is 'sigmoid' here and was 'tanh'"),
        ({"scale": 2.0}, "the tensor scale has other values here"),
    ],
)
def test_settings_and_tensors_of_a_layer_are_compared(tmp_path, change, message):
    path, *_ = saved(tmp_path, Times, sgd)
    same, other = Times(), Times(**change)
    ws.load(path, same, squares, sgd(same))
    with pytest.raises(SavedStepError, match=message):
        ws.load(path, other, squares, sgd(other))


def test_changed_code_is_noticed(tmp_path):
    path, *_ = saved(tmp_path, Perceptron, sgd)

    class Perceptron2(Perceptron):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(torch.relu(self.first(x)))

    Perceptron2.__qualname__, Perceptron2.__module__ = Perceptron.__qualname__, Perceptron.__module__
    other = fresh(Perceptron2)
    with pytest.raises(SavedStepError, match="the text of its forward has changed"):
        ws.load(path, other, squares, sgd(other))

    def squares_(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return model(x).pow(2).sum()

    twin = fresh(Perceptron)
    with pytest.raises(SavedStepError, match="the loss function: function is"):
        ws.load(path, twin, squares_, sgd(twin))


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (sgd, r"it is torch\.optim\.sgd\.SGD here and was 'torch\.optim\.adamw\.AdamW'"),
        (
            lambda m: torch.optim.AdamW(m.parameters(), amsgrad=True),
            "max_exp_avg_sq is 'tensor<5x4xf32>' here and was None",
        ),
        (lambda m: torch.optim.AdamW([{"params": [p]} for p in m.parameters()]), "6 param groups here and had 1"),
        (lambda m: torch.optim.AdamW(list(m.parameters())[1:]), "parameter 'first.weight'"),
    ],
)
def test_another_optimizer_is_refused(tmp_path, optimizer, message):
    path, *_ = saved(tmp_path, optimizer=lambda m: torch.optim.AdamW(m.parameters()))
    other = fresh(lively)
    with pytest.raises(SavedStepError, match=message):
        ws.load(path, other, squares, optimizer(other))


def test_hyper_parameters_are_read_from_the_optimizer_that_is_given(tmp_path):
    path, *_ = saved(tmp_path, Perceptron, sgd)
    twin, eager = fresh(Perceptron), fresh(Perceptron)
    ws.load(path, twin, squares, sgd(twin, lr=0.5))(X)
    opt = sgd(eager, lr=0.5)
    squares(eager, X).backward()
    opt.step()
    for a, b in zip(twin.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(a, b)


class SignDescent(torch.optim.Optimizer):
    """An optimizer that is traced, with state of its own."""

    def __init__(self, params: Any, lr: float = 0.01):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if "mean" not in state:
                    state["mean"] = torch.zeros_like(p)
                state["mean"].mul_(0.9).add_(p.grad, alpha=0.1)
                p.add_(state["mean"].sign(), alpha=-group["lr"])


def test_a_step_with_somebodys_own_optimizer_is_saved(tmp_path):
    path, _, _, step = saved(tmp_path, Perceptron, lambda m: SignDescent(m.parameters()))
    twin = fresh(Perceptron)
    loaded = ws.load(path, twin, squares, SignDescent(twin.parameters()))
    for _ in range(3):
        assert torch.equal(step(X), loaded(X))


# ---- what cannot be saved --------------------------------------------------------------------------------------------


@torch.library.custom_op("wholestep_test_saved::double", mutates_args=())
def double_op(x: torch.Tensor) -> torch.Tensor:
    return x * 2


double_op.register_fake(lambda x: torch.empty_like(x))
double_op.register_autograd(lambda ctx, g: g * 2)


class Custom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return double_op(self.inner(x))


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.custom = Custom()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.custom(x).sum(1)


def test_a_step_with_somebodys_own_operator_is_not_saved_and_the_layer_is_named(tmp_path):
    model = fresh(Head)
    step = ws.compile(model, squares, sgd(model), (X,))
    with pytest.raises(SavedStepError, match=r"layer custom.*wholestep_test_saved\.double\.default is not an operator"):
        step.save(tmp_path / "a.step")
    assert not os.listdir(tmp_path)


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return gradient * 3 * x**2 * 0.5  # not the true gradient: the custom one must be in the program


class Cubic(Perceptron):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Cube.apply(super().forward(x))


def test_custom_autograd_functions_are_part_of_the_program(tmp_path):
    path, _, _, step = saved(tmp_path, Cubic, sgd)
    twin = fresh(Cubic)
    loaded = ws.load(path, twin, squares, sgd(twin))
    for _ in range(3):
        assert torch.equal(step(X), loaded(X))


# ---- bad files -------------------------------------------------------------------------------------------------------


def refused(path: Any, message: str, make: Callable[[], nn.Module] = lively, optimizer: Any = adamw) -> None:
    model = fresh(make)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(SavedStepError, match=message) as caught:
        ws.load(path, model, squares, optimizer(model))
    assert isinstance(caught.value, InputError)
    assert all(torch.equal(a, b) for a, b in zip(before.values(), model.state_dict().values(), strict=True))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "is empty"),
        (b"hello", "it is no JSON"),
        (b"\x80\x04\x95not text", "it is not text"),
        (b"[1, 2]", "does not say it is one"),
        (b"{}", "does not say it is one"),
        (b'{"format": "wholestep step", "version": 99}', "version 99 of the format"),
        (b'{"format": "wholestep step", "version": 1, "content": {}, "sha256": "00"}', "changed or damaged"),
        (b'{"format": "wholestep step", "version": 1, "content": NaN}', "NaN is no number"),
        (b"[" * 200_000, "it is no JSON"),
        (b'{"a":' * 200_000, "it is no JSON"),
        (b'{"format": "wholestep step", "version": 1, "content": ' + b"9" * 10_000 + b"}", "it is no JSON"),
    ],
)
def test_files_that_are_no_saved_step(tmp_path, text, message):
    path = tmp_path / "bad.step"
    path.write_bytes(text)
    refused(path, message)


def test_paths_that_are_no_files(tmp_path):
    refused(tmp_path / "missing.step", "does not exist")
    refused(tmp_path, "is not a file")
    os.mkfifo(tmp_path / "pipe")
    refused(tmp_path / "pipe", "is not a file")


def test_a_file_that_was_cut_or_edited_is_refused(lively_file):
    path = lively_file
    text = path.read_text()
    path.write_text(text[: len(text) // 2])
    refused(path, "was cut short")
    path.write_text(text.replace("step.exp", "step.log").replace("0.1", "0.2", 1))
    refused(path, "changed or damaged")


def test_a_pickle_is_not_opened(tmp_path):
    path, called = tmp_path / "evil.step", tmp_path / "called"

    class Evil:
        def __reduce__(self) -> Any:
            return os.system, (f"touch {called}",)

    torch.save(Evil(), path)
    refused(path, "is not a saved step")
    assert not called.exists()


# ---- hostile files: edited, with the right checksum ------------------------------------------------------------------


def put(*where: Any, value: Any) -> Callable[[dict[str, Any]], None]:
    """An edit of one entry of the first program."""

    def change(content: dict[str, Any]) -> None:
        *path, last = where
        place = content["programs"][0]
        for key in path:
            place = place[key]
        place[last] = value

    return change


TARGET = r'target = "[^"]*"'
SLOTS = {"parameter": 0, "batch": -1}


@pytest.mark.parametrize(
    "target",
    [
        "os.system", "os.system.default", "builtins.eval.default", "aten.from_file.default", "torch.load",
        "torch.load.default", "load_library.x.y", "aten.__class__.__bases__", "aten.save.default", "aten.add_.Tensor",
        "aten.add.out", "wholestep_test_saved.double.default", "prim.device.default", "aten.manual_seed.default",
        "aten.sin", "aten.nothing.default", "aten.set_.source_Storage", "aten..default", "aten.sin.default\\0A",
        "profiler._record_function_enter.default", "_c10d_functional.all_reduce.default", "../../x.y.z",
    ],
)  # fmt: skip
def test_a_file_names_no_operator_but_pytorchs_own_on_tensors(lively_file, target):
    path = lively_file
    rewrite(path, sub(TARGET, f'target = "{target}"'))
    refused(path, "damaged")


def test_operators_with_text_arguments_are_known_by_name():
    """A new operator of PyTorch that takes text and gives a tensor must be looked at before a file may name it."""
    known = {
        "mode", "padding", "assert_msg", "UPLO", "driver", "activation", "reduce", "algorithm", "rounding_mode",
        "equation", "norm", "approximate", "p", "ord", "indexing", "interpolation", "padding_side", "side",
        "pad_mode", "a", "b",
    }  # fmt: skip
    allowed, strange = 0, []
    for name in dir(torch.ops.aten):
        packet = getattr(torch.ops.aten, name)
        for overload in packet.overloads() if hasattr(packet, "overloads") else ():
            target = f"aten.{name}.{overload}"
            if target_problem(target) is None and "name" not in overload:  # (of dimensions, up to torch 2.12)
                allowed += 1
                arguments = schema_of(getattr(packet, overload)).arguments
                strange += [(target, a.name) for a in arguments if "str" in str(a.type) and a.name not in known]
    assert not strange and allowed > 20


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (sub(r"step\.tanh|step\.mul", "os.system"), "unknown op"),
        (sub(TARGET, "target = 3 : i64"), "target"),
        (sub(r"arguments = \[", "arguments = " + "[" * 150), "nested"),
        (sub(r"\{tensor = 0 : i64\}", "{tensor = 99 : i64}"), "its argument"),
        (sub(r"\{tensor = 0 : i64\}", '{file = "x"}'), "its argument"),
        (sub(r"tensor<6x4xf32>", "tensor<999999999x999999999xf32>"), "damaged"),
        (put("slots", 0, "source", value=["parameter", "missing.weight"]), "there is no parameter for its source"),
        (put("slots", 0, "source", value=["attribute", "__class__"]), "there is no parameter"),
        (put("slots", 0, "kind", value="hyper"), "nothing that this optimizer or step keeps"),
        (put("slots", 0, "type", value="tensor<9999999x9999999xf32>"), "is a tensor<5x4xf32>, not a"),
        (put("slots", 0, "type", value="tensor<" + "1x" * 70 + "f32>"), "too many dimensions"),
        (put("slots", 0, "type", value="tensor<5x4xf31>"), "unknown element type"),
        (lambda c: c["programs"][0]["slots"].pop(), "there is no argument|arguments are not those"),
        (put("results", value=[]), "results"),
        (put("results", 0, value={"kind": "output"}), "first results are not the outputs"),
        (put("results", 1, value={"kind": "state", "slot": 1000}), "there is no argument 1000"),
        (put("results", 1, value={"kind": "state", "slot": -1}), "there is no argument -1"),
        (put("updated", value=["first.weight"]), "damaged"),
        (put("updated", value=["missing"]), "no parameter 'missing'"),
        (put("untouched", value=[["x"]]), "no list of names"),
        (put("loss_index", value=7), "there is no output 7"),
        (put("output", value={"container": "os.system", "entries": []}), "not known here"),
        (put("output", value={"container": "builtins.list", "entries": [[1, {"tensor": 0}]]}), "keys"),
        (put("output", value={"tensor": 5}), "each tensor once"),
        (put("batch", value={"tensor": 0}), "a batch is a tuple"),
        (put("entry", value="main"), "no function 'main'"),
        (put("entry", value=["main"]), "no function"),
        (put("text", value=["module"]), "damaged"),
        (put("text", value="module"), "no list of lines"),
        (put("text", value=[]), "no function"),
        (sub(r"step\.bound = \[", "step.bound = [-"), "no bound of what a step moves"),
        (sub(r"step\.bound = \[", "step.bound = [1 : i64, "), "no bound of what a step moves"),
        (put("opaque", value={"x": "y"}), "opaque counts"),
        (lambda c: c["programs"][0].pop("text"), "a program has the entries"),
        (lambda c: c.update(programs=[]), "no list of programs"),
        (lambda c: c.update(programs=[1]), "a program has the entries"),
        (lambda c: c.update(options=[]), "options or decisions"),
        (lambda c: c.update(options={"exec": "import os"}), "options"),
        (lambda c: c.update(decisions=[{"run": "x"}]), "no name"),
        (lambda c: c.update(made_for={}), "which model"),
        (lambda c: c.update(made_for={"model": 1, "optimizer": 2}), "another model"),
    ],
)
def test_a_hostile_edit_is_refused(lively_file, change, message):
    path = lively_file
    rewrite(path, change)
    model = fresh(lively)
    with pytest.raises(InputError, match=message):
        ws.load(path, model, squares, adamw(model))


def donation(content: dict[str, Any]) -> None:
    lines = content["programs"][0]["text"]
    index = next(i for i, line in enumerate(lines) if "step.donates = " in line)
    lines[index] = re.sub(r"step\.donates = \d+", "step.donates = 4000", lines[index], count=1)


def test_a_result_that_replaces_no_argument_is_refused(lively_file):
    path = lively_file
    rewrite(path, donation)
    refused(path, "description of its arguments and results")


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"dtype": "f32", "shape": [1 << 30, 1 << 9], "data": ""}, "larger than"),
        ({"dtype": "f32", "shape": [5], "data": "AAAA"}, "3 bytes, its shape asks for 20"),
        ({"dtype": "f32", "shape": [-5], "data": ""}, "no shape"),
        ({"dtype": "f32", "shape": [5], "data": "!!!"}, "not base64"),
        ({"dtype": "os", "shape": [5], "data": ""}, "damaged"),
    ],
)
def test_constants_are_bounded_and_checked(lively_file, entry, message):
    path = lively_file
    names = list(contents(path)["programs"][0]["constants"])
    assert names
    rewrite(path, put("constants", names[0], value=entry))
    refused(path, message)


def test_a_tensor_out_of_nothing_may_not_be_huge(lively_file):
    """A program that would ask for a petabyte when it is loaded is refused before anything is allocated."""
    path = lively_file

    def change(content: dict[str, Any]) -> None:
        lines = content["programs"][0]["text"]
        index = next(i for i, line in enumerate(lines) if line.lstrip().startswith("^bb0"))
        kind = "tensor<9999999x99999xf32>"
        lines.insert(index + 1, f'  %huge = "step.constant"() {{value = 1.0 : f64, type = {kind}}} : () -> {kind}')

    rewrite(path, change)
    refused(path, "bytes of constant tensors")


# ---- noise -----------------------------------------------------------------------------------------------------------


def mutate(text: str, draw: random.Random) -> str:
    """One small damage: flipped characters, a cut, a repeated or dropped piece, two tokens exchanged."""
    how = draw.randrange(6)
    at = draw.randrange(len(text))
    if how == 0:
        return text[:at] + chr(draw.randrange(32, 127)) + text[at + 1 :]
    if how == 1:
        return text[:at]
    if how == 2:
        size = draw.randrange(1, 60)
        return text[:at] + text[at : at + size] + text[at:]
    if how == 3:
        return text[:at] + text[at + draw.randrange(1, 60) :]
    tokens = [m.span() for m in re.finditer(r"[A-Za-z_.]+|\d+", text[at : at + 4000])]
    if len(tokens) < 2:
        return text[:at]
    (a, b), (c, d) = sorted(draw.sample(tokens, 2))
    piece = text[at : at + 4000]
    return text[:at] + piece[:a] + piece[c:d] + piece[b:c] + piece[a:b] + piece[d:] + text[at + 4000 :]


def mutate_value(value: Any, draw: random.Random) -> Any:
    """Damage within the content of a file, which stays JSON."""
    if isinstance(value, dict) and value:
        key = draw.choice(list(value))
        return {k: mutate_value(v, draw) if k == key else v for k, v in value.items()}
    if isinstance(value, list) and value:
        index = draw.randrange(len(value))
        how = draw.randrange(8)
        if how == 0:
            return value[:index] + value[index + 1 :]
        if how == 1:
            return [*value, value[index]]
        return [mutate_value(v, draw) if i == index else v for i, v in enumerate(value)]
    if isinstance(value, str) and value and draw.randrange(4):
        return mutate(value, draw)
    return draw.choice([None, True, -1, 0, 1, 1 << 40, 0.5, "", "x", [], {}, [[]], {"float": "nan"}])


def test_damaged_files_give_a_clear_error_or_load(tmp_path):
    """350 damaged files, most with a checksum that fits the damage: an InputError or a step, nothing else."""
    path, *_ = saved(tmp_path, Perceptron, sgd)
    text = path.read_text()
    whole = json.loads(text)
    model = fresh(Perceptron)
    optimizer = sgd(model)
    draw = random.Random(0)
    outcomes = collections.Counter[str]()
    for number in range(350):
        if number % 7 == 0:
            path.write_text(mutate(text, draw))
        else:
            parts = ("programs", "programs", "programs", "made_for", "options", "decisions")
            part = draw.choice(parts)
            content = {**whole["content"], part: mutate_value(whole["content"][part], draw)}
            path.write_text(json.dumps({**whole, "content": content, "sha256": digest(content)}))
        try:
            ws.load(path, model, squares, optimizer)
            outcomes["loaded"] += 1
        except InputError as error:
            assert len(str(error)) > 20
            outcomes["refused"] += 1
    assert outcomes["refused"] > 200 and outcomes["loaded"] > 5, outcomes


def test_no_name_of_a_file_is_imported(lively_file):
    path = lively_file
    rewrite(path, put("output", value={"container": "antigravity.x", "entries": []}))
    refused(path, "not known here")
    assert "antigravity" not in sys.modules


def test_a_step_whose_model_has_changed_is_not_saved(tmp_path):
    """The program would be written for a mode that it was not compiled for."""
    model = fresh(lambda: nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)))
    step = ws.compile(model, squares, adamw(model), (data(3, 4),))
    model.eval()
    with pytest.raises(InputError, match="run a step, then save"):
        step.save(tmp_path / "stale.step")
    assert not (tmp_path / "stale.step").exists()
    step(data(3, 4))
    step.save(tmp_path / "fresh.step")
