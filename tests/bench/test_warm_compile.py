"""bench/warm_compile.py: what a process answers, and that a warm compile over its bar is told."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "bench" / "warm_compile.py"


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    spec = importlib.util.spec_from_file_location("bench_warm_compile", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_process_answers_with_seconds_by_phase(bench: ModuleType) -> None:
    found = json.loads(json.dumps(bench.once("dlrm@tiny", "cpu")))
    assert found["seconds"] == pytest.approx(found["compile"] + found["first step"])
    assert {"capture", "plan"} <= set(found["phases"]) and sum(found["phases"].values()) < found["compile"]


@pytest.mark.parametrize(("warm", "status"), [(2.0, 0), (9.0, 1)])
def test_processes_of_a_case_share_a_cache_and_a_slow_one_is_told(
    bench: ModuleType, warm: float, status: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    caches: list[str] = []

    def apart(case: str, device: str, cache: str) -> dict[str, Any]:
        seconds = 20.0 if case == "dlrm@tiny" or cache not in caches else warm  # one has no bar
        caches.append(cache)
        return {"phases": {"plan": 1.0}, "compile": seconds - 0.5, "first step": 0.5, "seconds": seconds}

    monkeypatch.setattr(bench, "apart", apart)
    monkeypatch.setattr(bench.sys, "argv", ["x", "gpt2@tiny", "dlrm@tiny", "--out", str(tmp_path / "page.md")])
    assert bench.main() == status
    assert len(set(caches[:3])) == len(set(caches[3:])) == 1 and len(caches) == 6 and len(set(caches)) == 2
    page = (tmp_path / "page.md").read_text()
    assert "| gpt2@tiny | cold | 20.00 | 19.50 | 0.50 | plan 1.00 |" in page
    assert f"| gpt2@tiny | warm again | {warm:.2f} (≤ 5) | {warm - 0.5:.2f} | 0.50 | plan 1.00 |" in page
