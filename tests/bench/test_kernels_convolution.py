"""bench/kernels_convolution.py walks its path without a GPU: what it calls right is, and its page has every case."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from bench import kernels_convolution

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU it measures")


def test_the_same_path_with_the_ops_of_pytorch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels_convolution, "ROUNDS", 1)
    assert kernels_convolution.main(["--dry", "--out", str(tmp_path / "page.md")]) == 0
    page, figures = (tmp_path / "page.md").read_text(), json.loads((tmp_path / "page.json").read_text())
    assert page.count("- ok: ") == 27 and "FAILED" not in page
    timed = [f for f in figures if not f.get("small")]
    assert [{"cudnn", "alone", "with", "rest", "apart"} <= f.keys() for f in timed] == [True] * 3


def test_what_is_wrong_is_named_and_not_timed(capsys: pytest.CaptureFixture[str]) -> None:
    bench, (job, *_) = kernels_convolution.Bench(), kernels_convolution.jobs(True)[-3:]
    wrong = {"nobody": (RuntimeError("it cannot"), ()), "zeros": (lambda *tensors: tensors[-1].zero_(), ())}
    found = bench.measure(job, {}, wrong, {})
    said = capsys.readouterr().out
    assert "FAILED: alone, nobody: it cannot" in said and "FAILED: alone, zeros: off by" in said
    assert bench.failed == 2 and "alone" not in found and "cudnn" in found
