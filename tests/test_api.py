"""`ws.compile` as a whole: what it calls first, what it offers, and what two compilations have in common."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
import torch

import wholestep as ws
from tests.conftest import ROOT
from tests.runtime.runs import Perceptron, adamw, data, fresh, sgd, squares
from wholestep import api

X = data(6, 4)


def test_amx_is_settled_before_anything_else(monkeypatch):
    order = []
    monkeypatch.setattr(api.machine, "protect", lambda: order.append("protect"))
    captured = api.capture
    monkeypatch.setattr(api, "capture", lambda *a: (order.append("capture"), captured(*a))[1])
    model = fresh(Perceptron)
    ws.compile(model, squares, sgd(model), (X,))
    assert order == ["protect", "capture"]


def test_importing_settles_amx_before_torch():
    code = (
        "import sys\n"
        "class Watch:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'torch':\n"
        "            asked = sys.modules['wholestep.machine.cpu'].protect.cache_info().currsize\n"
        "            print('protected' if asked else 'late')\n"
        "            sys.meta_path.remove(self)\n"
        "sys.meta_path.insert(0, Watch())\n"
        "import wholestep\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=120)
    assert done.stdout == "protected\n", done.stderr


def test_two_compilations_give_one_text():
    first, second = fresh(Perceptron), fresh(Perceptron)
    texts = [str(ws.compile(m, squares, adamw(m), (X,)).program()) for m in (first, second)]
    assert texts[0] == texts[1]


def test_the_example_batch_is_not_trained_on():
    model = fresh(Perceptron)
    before = [p.detach().clone() for p in model.parameters()]
    ws.compile(model, squares, sgd(model), (X,))
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_a_single_tensor_is_a_batch():
    model = fresh(Perceptron)
    step = ws.compile(model, squares, sgd(model), X)
    assert float(step(X)) > float(step(X))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes(dtype):
    model = fresh(Perceptron).to(dtype)
    step = ws.compile(model, squares, sgd(model), (X.to(dtype),), verify=True)
    loss = step(X.to(dtype))
    assert loss.dtype is dtype and step.verified


def test_every_error_is_one_of_ours():
    for name in ("CaptureError", "InputError", "OptimizerError", "DifferentiationError", "MismatchError", "IRError"):
        assert issubclass(getattr(ws.errors, name), ws.WholestepError)


def test_what_is_lost_without_a_compiler_is_said_once(monkeypatch):
    monkeypatch.setenv("PATH", "")
    model = fresh(Perceptron)
    with pytest.warns(UserWarning, match=r"^no C\+\+ kernels are generated \(g\+\+ is not installed") as said:
        step = ws.compile(model, squares, sgd(model), (X,), providers=["aten", "cpp"])
    assert len(said) == 1
    step(X)
    assert {launch.provider for launch in step.plan().launches} <= {"aten", "host", "choose"}


@pytest.mark.parametrize("option", ["providers", "force"])
@pytest.mark.parametrize("given", [5, "aten", [5]])
def test_what_is_no_list_of_names_is_an_error(option, given):
    model = fresh(Perceptron)
    with pytest.raises(ws.errors.InputError, match=rf"^{option} is a list of .*, not {re.escape(repr(given))}"):
        ws.compile(model, squares, sgd(model), (X,), **{option: given})
