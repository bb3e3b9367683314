"""The example of a provider from outside the package: its kernels run in the step, which trains as eager PyTorch does.

Triton reads TRITON_INTERPRET when it is imported, so the example runs in a child process.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

ROOT = Path(__file__).resolve().parents[2]
STEPS, BATCH, WIDTH = 4, 21, 40  # neither divides into blocks


def printed(cache: Path, **environment: str) -> str:
    arguments = ["--device", "cpu", "--steps", str(STEPS), "--batch", str(BATCH), "--width", str(WIDTH)]
    known = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    known |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "WHOLESTEP_CACHE": str(cache)} | environment
    command = [sys.executable, str(ROOT / "examples" / "rms_norm_provider.py"), *arguments]
    done = subprocess.run(command, env=known, capture_output=True, text=True)
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
    text = printed(tmp_path, TRITON_INTERPRET="1")
    assert [float(n) for n in re.findall(r"loss (\S+)", text)] == pytest.approx(eager_losses(), abs=2e-5)
    assert text.splitlines()[STEPS:] == [f"{p} of layer 1 was run by hand_written" for p in ("forward", "backward")]


def test_without_a_gpu_or_the_interpreter_it_steps_aside(tmp_path):
    pytest.importorskip("triton")
    text = printed(tmp_path)
    assert len(re.findall(r"loss (\S+)", text)) == STEPS and "hand_written" not in text
