"""What cannot be captured: one error with the user's file and line, what was met, the rewrite, and no trace dump."""

from __future__ import annotations

import os
import random
import re
import textwrap
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import wholestep as ws
from tests import warm
from tests.runtime.runs import Body, compare, data, fresh, sgd, squares
from wholestep.capture.export import calling_convention
from wholestep.errors import CaptureError, InputError

HERE = Path(__file__).name


def branch(m, x):
    h = m.layer(x)
    if h.sum() > 0:  # LINE branch
        return h
    return -h


def repeat(m, x):
    h = m.layer(x)
    for _ in range(int(h.abs().sum())):  # LINE repeat
        h = h + 1
    return h


def read_item(m, x):
    h = m.layer(x)
    return h * h.max().item()  # LINE read_item


def read_list(m, x):
    return m.layer(x) * sum(x.tolist()[0])  # LINE read_list


def to_numpy(m, x):
    return m.layer(x) * torch.from_numpy(np.abs(x.numpy()))  # LINE to_numpy


def condition(m, x):
    return m.layer(x) if (x > 0).all() else x  # LINE condition


def gradient_inside(m, x):
    x = x.clone().requires_grad_()
    (g,) = torch.autograd.grad(m.layer(x).sum(), x, create_graph=True)
    return g * m.layer(x)


def hooked(m, x):
    h = m.layer(x)
    h.register_hook(lambda g: g * 2)  # LINE hooked
    return h


def broken(m, x):
    return m.layer(x) + undefined_name  # noqa: F821  LINE broken


def mixed(m, x):
    return m.layer(x.double())  # LINE mixed


def rolled(m, x):
    return m.layer(x) * random.random()  # LINE rolled


def shuffled(m, x):
    return m.layer(x) if np.random.rand() < 0.3 else x * m.layer(x)  # LINE shuffled


def convert(m, x):
    return m.layer.to(torch.float64)(x.double()).float()  # LINE convert


def no_shapes(m, x):
    return torch.nn.functional.ctc_loss(m.layer(x)[:, None], torch.ones(1, 1).long(), (3,), (1,))  # LINE no_shapes


def formatted(m, x):
    h = m.layer(x)
    print(f"{h.mean():.2f}")  # LINE formatted
    return h


def packed(m, x):
    sequences = nn.utils.rnn.pack_padded_sequence(x[:, None], x[0, :1].abs().long(), enforce_sorted=False)
    return nn.GRU(4, 4)(sequences)[1]  # LINE packed


REFUSED = [
    (packed, "a size is made of the values in a tensor, as pack_padded_sequence does", "mask what is too much"),
    (formatted, "a tensor is formatted as a number", "beside the loss"),
    (convert, r"a module is moved or converted \(.to\(\), .half\(\)\) inside forward", "before the step is compiled"),
    (no_shapes, "the shape of an operator's result is not known", "replace the operator"),
    (branch, "depends on the values in a tensor", "torch.where"),
    (repeat, "depends on the values in a tensor", "torch.where"),
    (condition, "depends on the values in a tensor", "torch.where"),
    (read_item, r"a number is read out of a tensor \(.item\(\)\)", "keep it a tensor"),
    (read_list, "a number is read out of a tensor", "keep it a tensor"),
    (to_numpy, "a tensor leaves torch for numpy", "stay with torch operations"),
    (hooked, "a gradient hook is set in forward", "torch.autograd.Function"),
    (broken, "the model failed while it was captured: NameError: name 'undefined_name'", ""),
    (mixed, "tensors of different dtypes meet", r"batch.to\(torch.float32\)"),
    (rolled, "random number of Python's `random` or of numpy", "draw with torch.rand"),
    (shuffled, "random number of Python's `random` or of numpy", "set the probability to 0"),
]


def refusal(function, *batch, **attributes) -> str:
    model = fresh(lambda: Body(function, **attributes))
    with pytest.raises(CaptureError) as caught:
        ws.compile(model, squares, sgd(model), batch or (data(3, 4),))
    assert caught.value.__cause__ is None, "torch's own trace is chained only on request"
    return str(caught.value)


def line_of(function) -> int:
    lines = Path(__file__).read_text().splitlines()
    return next(i for i, text in enumerate(lines, 1) if text.endswith(f"LINE {function.__name__}"))


@pytest.mark.parametrize("function, what, instead", REFUSED, ids=[f.__name__ for f, _, _ in REFUSED])
def test_one_error_names_the_line_what_was_met_and_the_rewrite(function, what, instead):
    text = refusal(function)
    assert f"{HERE}:{line_of(function)} in {function.__name__}" in text
    assert re.search(what, text) and re.search(instead, text)
    assert len(text.splitlines()) <= 6
    if "failed while" not in text:
        assert "docs/capture.md" in text


def test_gradients_inside_the_model_are_refused():
    assert "gradients are taken inside the model" in refusal(gradient_inside)
    assert "torch.func (grad, jacrev, vmap)" in refusal(lambda m, x: m.layer(x) + torch.func.jacrev(torch.sum)(x))
    assert "torch.func (vmap, grad)" in refusal(lambda m, x: torch.vmap(torch.sin)(m.layer(x)))


def test_a_batch_that_does_not_fit_names_the_layer_and_nothing_is_logged(caplog):
    model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 2))
    with pytest.raises(
        CaptureError, match=r"in layer 0 \(Linear\): RuntimeError: .*\nTry: call it eagerly on the example"
    ):
        ws.compile(model, squares, sgd(model), (data(3, 6),))
    assert not [r for r in caplog.records if r.levelname in ("WARNING", "ERROR", "CRITICAL")]


def test_distributions_need_not_be_told_to_leave_values_alone(monkeypatch):
    from torch.distributions import Categorical, Distribution, Normal, kl_divergence

    monkeypatch.setattr(Distribution, "_validate_args", True)  # Dynamo, once it has run, leaves False

    def likelihood(m, x):
        normal = Normal(m.layer(x), x.exp())
        return Categorical(logits=m.layer(x)).entropy() + kl_divergence(normal, Normal(0.0, 1.0)).sum(-1)

    def eager(model, batch):
        return squares(model, *batch)

    compare(fresh(lambda: Body(likelihood)), squares, [(data(3, 4),)] * 2, eager)
    with pytest.raises(ValueError, match="to satisfy the constraint"):
        Normal(torch.zeros(2), -torch.ones(2))


def test_warnings_of_the_model_and_its_loss_are_kept():
    def warned(m, x):
        warnings.warn("look here", UserWarning, stacklevel=1)
        return m.layer(x)

    model = fresh(lambda: Body(warned))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        ws.compile(model, nn.MSELoss(), sgd(model), (data(3, 4), data(3, 1)), providers=["aten"])
    found = [str(w.message).strip() for w in said]
    assert len(found) == 2 and "look here" in found and any("target size" in text for text in found), found


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")
def test_modules_of_torchscript_are_refused_by_name():
    scripted = torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.Tanh()))
    text = refusal(lambda m, x: m.layer(x) - scripted(x))
    assert "a module of TorchScript" in text and "made from" in text and f"{HERE}:" in text


def test_views_by_strides_have_a_gradient():
    def windows(m, x):
        return m.layer(x).as_strided((5, 4), (2, 1)) * 2  # they overlap

    compare(fresh(lambda: Body(windows)), squares, [(data(3, 4),)] * 2, lambda m, b: squares(m, *b), providers=["aten"])


def test_python_counters_that_steer_the_program_are_refused_and_restored():
    def count(m, x):
        m.calls += 1
        return m.layer(x) * m.calls

    model = fresh(lambda: Body(count, calls=3))
    with pytest.raises(CaptureError, match=r"in Body.forward\n[\s\S]*Python attribute calls[\s\S]*make it a buffer"):
        ws.compile(model, squares, sgd(model), (data(3, 4),))
    assert model.calls == 3


def test_python_counters_that_steer_nothing_are_left_alone():
    def count(m, x):
        m.calls += 1
        m.log.append(m.calls)
        return m.layer(x)

    model = fresh(lambda: Body(count, calls=3, log=[]))
    ws.compile(model, squares, sgd(model), (data(3, 4),))
    assert model.calls == 3 and model.log == []


SCRIPT = """
import torch, wholestep as ws
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        h = self.layer(x)
        if h.sum() > 0:
            return h
        return -h

model = Net()
try:
    ws.compile(model, lambda m, x: m(x).mean(), torch.optim.SGD(model.parameters(), lr=0.1), (torch.ones(2, 4),))
except ws.WholestepError as error:
    print("cause:", type(error.__cause__).__name__)
    print(error)
"""


@pytest.mark.parametrize("trace", ["", "1"])
def test_nothing_is_printed_unless_asked(tmp_path, trace):
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(SCRIPT))
    environment = {k: v for k, v in os.environ.items() if k != "WHOLESTEP_TRACE"}
    done = warm.run([str(script)], environment | ({"WHOLESTEP_TRACE": trace} if trace else {}))
    assert done.returncode == 0, done.stderr
    assert f"{script}:12 in forward\n    if h.sum() > 0:\ncannot be captured: " in done.stdout
    if trace:
        assert "cause: NoneType" not in done.stdout
        assert "torch.ops.aten" in done.stderr
    else:
        assert "cause: NoneType" in done.stdout
        assert done.stderr == ""


# ---- calling conventions ---------------------------------------------------------------------------------------------


def called(loss_fn, batch):
    """Which arguments a loss gets: the model as `model`, its output as `model(...)`."""

    class Echo(nn.Module):
        def forward(self, *args, **kwargs):
            return ("output", *args, *kwargs.items())

    model = Echo()
    out = calling_convention(model, loss_fn, batch)(batch)
    return tuple("model" if a is model else a for a in out)


def test_conventions():
    def spy(*args, **kwargs):
        return (*args, *kwargs.items())

    assert called(lambda model, x, y: spy(model, x, y), (1, 2)) == ("model", 1, 2)
    assert called(lambda output, y: spy(output, y), (1, 2)) == (("output", 1), 2)
    assert called(lambda output, y: spy(output, y), (1, 2, 3)) == (("output", 1, 2), 3)
    assert called(lambda output: spy(output), (1, 2)) == (("output", 1, 2),)
    assert called(lambda model, x, y=None: spy(model, x, y), (1, 2)) == ("model", 1, 2)
    assert called(lambda model, *batch: spy(model, *batch), (1, 2)) == ("model", 1, 2)
    assert called(lambda *everything: spy(*everything), (1, 2)) == ("model", 1, 2)
    assert called(lambda output, y, w=None, **k: spy(output, y, w), (1, 2)) == (("output", 1), 2, None)
    assert called(lambda model, b: spy(model, b), {"x": 1}) == ("model", {"x": 1})
    assert called(lambda model, x: spy(model, x), {"x": 1}) == ("model", 1)
    assert called(lambda model, **b: spy(model, **b), {"x": 1, "y": 2}) == ("model", ("x", 1), ("y", 2))


@pytest.mark.parametrize(
    "loss_fn, batch, message",
    [
        (lambda a, b, c, d, e: 0, (1, 2), r"takes 5 arguments \(a, b, c, d, e\) and the batch has 2 parts"),
        (lambda: 0, (1, 2), "takes 0 arguments"),
        (lambda model, x: 0, (1, 2), r"takes 2 arguments \(model, x\) and the batch has 2 parts"),
        (lambda model, x, z: 0, {"x": 1, "y": 2}, r"takes \(model, x, z\) but the batch has the keys \['x', 'y'\]"),
        (nn.MSELoss(), {"x": 1, "y": 2}, r"so what is the target of MSELoss is not known; write a function"),
    ],
)
def test_conventions_that_fit_nothing(loss_fn, batch, message):
    with pytest.raises(InputError, match=message):
        calling_convention(nn.Identity(), loss_fn, batch)
