"""Bytecode that is not installed is made by runs that nobody times, and found by those that are timed."""

from __future__ import annotations

import io
import json
import os
import py_compile
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from wholestep.bench import rehearsal, runner
from wholestep.bench.rehearsal import bytecode, has_bytecode, kinds
from wholestep.bench.runner import Settings
from wholestep.bench.worker import serve

SETTINGS = Settings("cpu", "fp32", steps=3, rounds=2, limit=30.0)
NAMES = ("PYTHONPYCACHEPREFIX", "PYTHONDONTWRITEBYTECODE")


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A package that stands for those of all contenders, and their processes by `fake_worker.py`."""
    monkeypatch.setattr(sys, "pycache_prefix", None)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(rehearsal, "COMPILERS", dict.fromkeys(rehearsal.COMPILERS, ("slow_to_import", "core.py")))
    monkeypatch.setattr(runner, "START", (Path(__file__).parent / "fake_worker.py").read_text())
    monkeypatch.setenv("FAKE_WORKER_JOURNAL", str(tmp_path / "journal"))
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    monkeypatch.delenv("PYTHONPYCACHEPREFIX", raising=False)
    (tmp_path / "slow_to_import").mkdir()
    for name in ("__init__.py", "core.py"):
        (tmp_path / "slow_to_import" / name).write_text("")
    return tmp_path / "slow_to_import"


def test_one_contender_stands_for_all_that_compile_alike() -> None:
    assert kinds(["eager", "wholestep:0.7", "compile-max-autotune", "compile", "max"]) == ["wholestep", "compile"]
    assert kinds(["eager", "checkpoint"]) == [] and kinds(["jax"]) == ["jax"]


def test_bytecode_that_is_installed_is_used(package: Path) -> None:
    assert not has_bytecode("wholestep")
    py_compile.compile(str(package / "core.py"))
    assert has_bytecode("wholestep")
    said: list[str] = []
    before = [os.environ.get(name) for name in NAMES]
    with bytecode(["wholestep", "compile"], SETTINGS, said.append) as there:
        assert there and not said and [os.environ.get(name) for name in NAMES] == before


def test_who_lacks_it_is_rehearsed_once_for_all(package: Path) -> None:
    said: list[str] = []
    with bytecode(["wholestep", "eager", "jax"], SETTINGS, said.append) as there:
        folder = os.environ["PYTHONPYCACHEPREFIX"]
        assert there and os.path.isdir(folder)
        subprocess.run([sys.executable, "-c", "import slow_to_import.core"], cwd=package.parent, check=True)
        assert list(Path(folder).rglob("core.*.pyc")) and not list(package.rglob("*.pyc"))
    assert not os.path.exists(folder) and [os.environ.get(name) for name in NAMES] == [None, "1"]
    assert "without bytecode" in said[0] and said[-1].startswith("rehearsed wholestep, jax in ")
    told = (package.parent / "journal").read_text().split("\n")
    assert sorted(line for line in told if "prepare" in line) == [
        f"rehearsal {n} prepare" for n in ("jax", "wholestep")
    ]


def test_a_rehearsal_that_fails_is_told(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "START", "raise SystemExit('the stage is dark')")
    said: list[str] = []
    with bytecode(["wholestep"], replace(SETTINGS, limit=1.0), said.append) as there:
        assert not there
    assert any("the stage is dark" in line for line in said) and said[-1].startswith("rehearsed nobody in ")


@pytest.mark.parametrize("contender", ["wholestep", "eager"])
def test_what_is_rehearsed_trains(contender: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WHOLESTEP_PROVIDERS", "aten")  # nothing is built
    begin = {"do": "begin", "contender": contender, "case": ["rehearsal", "tiny"], "precision": "fp32"}
    begin |= {"device": "cpu", "threads": 0, "networks": "wholestep.bench.rehearsal", "bind": {}}
    orders = [begin, {"do": "prepare", "steps": 2}, {"do": "end"}]
    answers: list[dict] = []
    serve(io.StringIO("\n".join(map(json.dumps, orders))), answers.append)
    assert len(answers[1]["losses"]) == 2 and answers[1]["losses"][0] == pytest.approx(2.08, abs=0.5)
