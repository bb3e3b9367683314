"""How far a compile is: a bar on a terminal, and nothing elsewhere."""

from __future__ import annotations

import io

import pytest
import torch
from torch import nn

import wholestep as ws
from wholestep.backends import progress
from wholestep.backends.progress import Bar


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_bar_grows_and_goes_away() -> None:
    stream = Terminal()
    bar = Bar(stream, began=0.0)
    for done in (0, 1, 2):
        bar("choosing kernels", done, 2)
    first, second, last = stream.getvalue().split("\rwholestep")[1:][0], *stream.getvalue().split("\r")[2:4]
    assert first == ": choosing kernels [                        ] 0/2" and "[############            ] 1/2" in second
    assert last.strip() == "" and len(last) >= len(second) and stream.getvalue().endswith("\r")


def test_quick_work_and_files_show_nothing() -> None:
    stream, file = Terminal(), io.StringIO()
    Bar(stream)("choosing kernels", 1, 2)
    Bar(file, began=0.0)("choosing kernels", 1, 2)
    assert stream.getvalue() == file.getvalue() == ""


def test_a_compile_shows_how_far_it_is(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    stream = Terminal()
    monkeypatch.setattr(progress.sys, "stderr", stream)
    monkeypatch.setattr(progress, "AFTER", 0.0)
    monkeypatch.setenv("WHOLESTEP_CACHE", str(tmp_path))
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = (torch.randn(4, 4),)
    ws.compile(model, lambda model, x: model(x).square().mean(), optimizer, batch, providers=["aten", "cpp"])
    assert "building cpp kernels [" in stream.getvalue() and "choosing kernels [" in stream.getvalue()
    assert stream.getvalue().endswith("\r")
