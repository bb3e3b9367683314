"""Runs most of `interpreted_cases.py`: the Triton kernels of whole networks, interpreted, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PARTS = {"words": "gpt2 or dlrm", "images": "resnet or efficient"}


@pytest.mark.parametrize("networks", PARTS.values(), ids=PARTS)
def test_networks_in_the_interpreter(networks: str) -> None:
    pytest.importorskip("triton")
    pytest.importorskip("transformers")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "ignore", "-k", networks,
         "tests/networks/interpreted_cases.py"],
        cwd=ROOT, env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-6000:]
    assert " passed" in done.stdout and "skipped" not in done.stdout
