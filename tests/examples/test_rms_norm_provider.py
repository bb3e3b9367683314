"""The example of a provider from outside the package: its kernels run in the step, which trains as eager PyTorch does.

Triton reads TRITON_INTERPRET when it is imported, so the example runs in a child process.
"""

from __future__ import annotations

import os
import re
import runpy
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from tests import warm
from wholestep.backends.providers import forget_provider

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "rms_norm_provider.py"
STEPS, BATCH, WIDTH = 3, 21, 40  # neither divides into blocks
ARGUMENTS = ["--device", "cpu", "--steps", str(STEPS), "--batch", str(BATCH), "--width", str(WIDTH)]


def printed(cache: Path) -> str:
    own = {"WHOLESTEP_CACHE": str(cache), "TRITON_INTERPRET": "1"}
    done = warm.run([str(EXAMPLE), *ARGUMENTS], os.environ | own)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def eager_losses() -> list[float]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, WIDTH), nn.RMSNorm(WIDTH, eps=1e-6), nn.Linear(WIDTH, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x, y = torch.randn(BATCH, 32), torch.arange(BATCH) % 4
    found = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        found.append(float(loss.detach()))
    return found


def test_it_runs_forward_and_backward_and_trains_like_eager(tmp_path):
    pytest.importorskip("triton")
    text = printed(tmp_path)
    assert [float(n) for n in re.findall(r"loss (\S+)", text)] == pytest.approx(eager_losses(), abs=2e-5)
    assert text.splitlines()[STEPS:] == [f"{p} of layer 1 was run by hand_written" for p in ("forward", "backward")]


def test_without_a_gpu_or_the_interpreter_it_steps_aside(monkeypatch, capsys):
    pytest.importorskip("triton")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(sys, "argv", ["rms_norm_provider.py", *ARGUMENTS])
    try:
        runpy.run_path(str(EXAMPLE), run_name="__main__")
    finally:
        forget_provider("hand_written")
    text = capsys.readouterr().out
    assert len(re.findall(r"loss (\S+)", text)) == STEPS and "hand_written" not in text
