"""bench/plan.py times the first plan of a process, whatever was planned before it."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "bench" / "plan.py"


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    spec = importlib.util.spec_from_file_location("bench_plan", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_first_plan_of_a_process_is_the_figure(bench, monkeypatch):
    """A clock that only planning moves: by 9 the first time in a process, by 3 from then on."""
    now, plans, planned = [0.0], [0], bench.plan_function(bench.recurrent(2), "cpu", [])

    def slow(*args, **options):
        plans[0] += 1
        now[0] += 9.0 if plans[0] == 1 else 3.0
        return planned

    monkeypatch.setattr(bench, "plan_function", slow)
    monkeypatch.setattr(bench, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    found = bench.measure(bench.recurrent(2), [])
    for kind in bench.KINDS:
        assert (found[kind]["seconds"], found[kind]["again_seconds"]) == (9.0, 3.0)
    assert plans == [0] and found["ops"] > 100
    once = bench.measure(bench.recurrent(2), [], again=False)
    assert "again_seconds" not in once["whole"] and once["early"]["seconds"] == 9.0
    record = {"machine": "a", "load": 1.5, "torch": "b", "omnimalloc": "c", "python": "d", "gpt2_layers": {}}
    page = bench.report(record | {"networks": {"gpt2": found}, "recurrent": {"2 steps": once}})
    assert "first plan of a process" in page and "others were at work" in page and "| 9.00 | 0.00 | 3.00 |" in page


def test_a_process_that_fails_is_an_error(bench, capfd):
    with pytest.raises(RuntimeError, match="says why above"):
        bench.apart(lambda: 1 / 0)
    assert "ZeroDivisionError" in capfd.readouterr().err
