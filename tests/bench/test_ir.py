"""The benchmark of the core runs and its program is what it says; the figures themselves are not a test's business."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from wholestep import ir

SCRIPT = Path(__file__).resolve().parents[2] / "bench" / "ir.py"


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    spec = importlib.util.spec_from_file_location("bench_ir", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_program_has_the_size_asked_for(bench: ModuleType) -> None:
    root = bench.build(200)
    ir.verify(root)
    assert sum(op.name.startswith("toy.") for op in root.walk()) == 200
    assert {op.phase for op in root.walk()} == {"", "forward", "backward", "update"}


def test_every_action_is_timed(bench: ModuleType) -> None:
    seconds = bench.measure(200, repeat=1)
    assert set(seconds) == {"build", "verify", "print", "clone", "cse", "parse"}
    assert set(bench.BARS) <= set(seconds)


def test_xdsl_takes_the_same_text(bench: ModuleType) -> None:
    pytest.importorskip("xdsl")
    seconds = bench.measure_xdsl(100, ir.print_module(bench.build(100)))
    assert set(seconds) == {"build", "verify", "print", "clone", "cse", "parse"}
