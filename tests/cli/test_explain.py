"""`wholestep explain`: scripts that run until their first step, saved steps that are only read, friendly errors."""

from __future__ import annotations

import json
import re
import shutil
import sys

import pytest

from tests.cost.models import language_step, moved
from wholestep.cli import main
from wholestep.runtime.saved import digest
from wholestep.runtime.train_step import TrainStep

SCRIPT = """
import sys
import torch
from torch import nn
import wholestep as ws
import helper_beside_the_script

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 1)

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))

def train():
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = (torch.ones(2, 4), torch.ones(2, 1))
    step = ws.compile(model, nn.MSELoss(), optimizer, batch)
    for number in range(100):
        try:
            step(*batch)
        except Exception:
            print("held back")
        print("step", number, *sys.argv[1:])

if __name__ == "__main__":
    train()
"""


def explain(*arguments: str) -> int:
    return main.main(["explain", *map(str, arguments)])


@pytest.fixture
def script(tmp_path):
    (tmp_path / "helper_beside_the_script.py").write_text("")
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    yield path
    sys.modules.pop("helper_beside_the_script", None)


def test_a_script_runs_until_its_first_step(script, capsys, tmp_path):
    before = (TrainStep.__init__, TrainStep.__call__, list(sys.argv), list(sys.path))
    page, data = tmp_path / "out.html", tmp_path / "out.json"
    assert explain(script, "--html", page, "--json", data, "--machine", "h200", "--", "--lr", "3") == 0
    out = capsys.readouterr().out
    assert "step 0" not in out and "held back" not in out
    assert "moved / bound" in out and "NVIDIA H200" in out and "1 steps, median" in out and "train.py:" in out
    plain = json.loads(data.read_text())
    assert plain["movement"]["moved"]["total"] > 0 and len(plain["step_seconds"]) == 1
    assert page.read_text().startswith("<!DOCTYPE html>")
    assert before == (TrainStep.__init__, TrainStep.__call__, list(sys.argv), list(sys.path))


def test_more_steps_and_arguments(script, capsys):
    assert explain(script, "--steps", "3", "--", "word") == 0
    out = capsys.readouterr().out
    assert "step 1 word" in out and "step 2" not in out and "3 steps, median" in out


def test_a_script_that_only_compiles(script, capsys):
    script.write_text(SCRIPT.replace("range(100)", "range(0)"))
    assert explain(script) == 0
    assert "no step has run yet" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("print('hello')", "ended without compiling a step"),
        ("import sys; sys.exit(3)", "ended with 3 before it compiled"),
        ("1 / 0", "failed before a step was compiled: ZeroDivisionError"),
        ("def", "SyntaxError"),
    ],
)
def test_scripts_without_a_step(text, message, tmp_path, capsys):
    path = tmp_path / "train.py"
    path.write_text(text)
    assert explain(path) == 1
    assert message in capsys.readouterr().err


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("saved") / "model.step"
    step = language_step(precision="bf16", accumulate=2)
    step.save(path)
    return path, step


def test_a_saved_step_is_priced_without_its_model(saved, capsys, tmp_path, monkeypatch):
    path, step = saved
    monkeypatch.setattr(TrainStep, "__call__", None)  # nothing runs
    data = tmp_path / "out.json"
    assert explain(path, "--json", data, "--html", tmp_path / "out.html") == 0
    out = capsys.readouterr().out
    assert "a step saved by Wholestep" in out and "by layer group" in out
    assert json.loads(data.read_text())["moved"]["total"] == moved(step).ledger.total


@pytest.mark.skipif(shutil.which("c++") is None and shutil.which("g++") is None, reason="needs a C++ compiler")
def test_a_saved_step_is_planned_as_it_is_run(tmp_path, capsys, monkeypatch):
    step = language_step(providers=("aten", "cpp"))
    step.save(tmp_path / "model.step")
    report = step.report()
    assert {"cpp"} < set(report.kernels.providers)
    monkeypatch.setattr("wholestep.backends.choose.on_cpu", None)  # nothing is timed
    assert explain(tmp_path / "model.step", "--json", tmp_path / "out.json", "--html", tmp_path / "out.html") == 0
    out, plain = capsys.readouterr().out, json.loads((tmp_path / "out.json").read_text())
    assert (
        plain["moved"]["total"] == report.movement.ledger.total and plain["kernels"] == report.movement.ledger.launches
    )
    assert plain["recipe"] == step.recipe and re.search(r"^  fuse +\d+  step/", out, re.M)
    assert "its plan for a CPU; kernels that were not timed on this machine are guessed" in out
    assert "<td>fuse</td>" in (tmp_path / "out.html").read_text()


def test_a_saved_step_of_a_provider_that_is_not_known_here(tmp_path, capsys):
    step = language_step(level=1)
    step.save(tmp_path / "model.step")
    whole = json.loads((tmp_path / "model.step").read_text())
    whole["content"]["options"] |= {"providers": ["mine"], "level": 2}
    (tmp_path / "model.step").write_text(json.dumps(whole | {"sha256": digest(whole["content"])}))
    assert explain(tmp_path / "model.step") == 0
    assert "there is no provider 'mine'" in (out := capsys.readouterr().out) and "ATen runs every op" in out


def test_files_that_are_neither(tmp_path, saved, capsys):
    path, _ = saved
    (tmp_path / "notes.txt").write_text("hello")
    (tmp_path / "other.json").write_text("{}")
    (tmp_path / "bad.step").write_text(path.read_text().replace("step.contract", "step.contrast"))
    for name, message in (
        ("absent.py", "is not there"),
        ("notes.txt", "neither a Python script"),
        ("other.json", "not a saved step"),
        ("bad.step", "changed or damaged"),
        (".", "is a folder"),
    ):
        assert explain(tmp_path / name) == 1
        assert message in capsys.readouterr().err
    assert explain(path, "--machine", "abacus") == 1
    assert "no machine description 'abacus'" in capsys.readouterr().err
    assert explain(path, "--steps", "0") == 1
    assert "--steps" in capsys.readouterr().err
    assert explain(path, "--bind", "batch=8") == 1
    assert "Try: without --bind" in capsys.readouterr().err


def test_where_nothing_can_be_written_is_said_before_the_script_runs(script, capsys, tmp_path):
    for file, why in ((tmp_path / "absent" / "x.html", "there is no folder"), (tmp_path, "it is a folder")):
        assert explain(script, "--html", file) == 1
        shown = capsys.readouterr()
        assert f"cannot be written: {why}" in shown.err and "Try: " in shown.err and "step" not in shown.out
