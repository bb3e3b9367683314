"""The example scripts run at a small size, and each trains like its eager twin, from which one line sets it apart."""

from __future__ import annotations

import difflib
import re
import runpy
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")
torch.set_num_threads(1)
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SMALL = {
    "language_model": ["--steps", "12", "--batch", "2", "--length", "16", "--layers", "1", "--width", "32"],
    "images": ["--steps", "12", "--batch", "8", "--size", "16", "--width", "4"],
}


def run(script: str, monkeypatch, capsys) -> str:
    """What the script prints, run as a script is but in this process, where torch is already imported."""
    arguments = [*SMALL[script.removesuffix(".py").removesuffix("_eager")], "--device", "cpu"]
    monkeypatch.setattr(sys, "argv", [script, *arguments])
    runpy.run_path(str(EXAMPLES / script), run_name="__main__")
    printed = capsys.readouterr()
    assert "step 12/12" in printed.err
    return printed.out


@pytest.mark.parametrize("name", SMALL)
def test_trains_like_its_eager_twin(name, monkeypatch, capsys):
    compiled, eager = (run(script, monkeypatch, capsys) for script in (f"{name}.py", f"{name}_eager.py"))
    ours, theirs = ([float(x) for x in re.findall(r"loss (\S+)", text)] for text in (compiled, eager))
    assert len(ours) == 13 and ours == pytest.approx(theirs, rel=1e-3, abs=1e-3)
    assert ours[-1] < ours[0]
    assert compiled.splitlines()[0] == eager.splitlines()[0]


@pytest.mark.parametrize("name", SMALL)
def test_differs_from_its_eager_twin_in_one_line(name):
    ours, theirs = ((EXAMPLES / f).read_text().splitlines() for f in (f"{name}.py", f"{name}_eager.py"))
    changed = [line for line in difflib.ndiff(theirs, ours) if line[:2] in ("- ", "+ ")]
    assert len(changed) == 2, changed
    assert changed[0] == "-     step = train_step" and changed[1].startswith(
        "+     step = ws.compile(model, loss_fn, optimizer"
    )


def test_lightning_module_trains_like_automatic_optimization(monkeypatch, capsys):
    pytest.importorskip("lightning")
    curves = []
    for arguments in ([], ["--eager"]):
        monkeypatch.setattr(sys, "argv", ["lightning_module.py", "--epochs", "2", *arguments])
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
        runpy.run_path(str(EXAMPLES / "lightning_module.py"), run_name="__main__")
        printed = capsys.readouterr().out
        assert "16 steps, last loss" in printed  # Lightning's own count
        curves.append([float(x) for x in re.findall(r"loss (\S+)", printed)])
    assert len(curves[0]) == 3 and curves[0] == pytest.approx(curves[1], rel=1e-3, abs=1e-3)
    assert curves[0][-1] < curves[0][0]
