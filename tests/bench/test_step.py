"""The benchmark of whole steps as a dry run: tiny networks on the CPU, eager and ours in turns."""

from __future__ import annotations

import time

import pytest
import torch

from bench.step import SMALL, SYSTEMS, measure_time, page, workload

pytest.importorskip("transformers")


def test_systems_take_turns_and_agree():
    kept = []
    found = measure_time(
        workload(SMALL[2], "cpu", small=True), ["eager", "wholestep"], "cpu", time.time() + 60, 1, keep=kept.append
    )
    assert set(found["systems"]) == {"eager", "wholestep"} and kept[-1] == found
    for row in found["systems"].values():
        assert row["agrees"] and len(row["losses"]) == 3 and row["ms"] > 0 and row["host_us"] > 0
    ours = found["systems"]["wholestep"]
    assert ours["in_turns_with"] == ["eager"] and ours["compile_seconds"] > 0


def test_a_system_without_time_left_or_that_fails_is_on_the_page(monkeypatch):
    given = workload(SMALL[0], "cpu", small=True)
    late = measure_time(given, ["eager"], "cpu", time.time() - 1, 1)
    assert late["systems"]["eager"] == {"error": "not run: no time left"}
    monkeypatch.setattr(given.model, "forward", lambda **batch: 1 / 0)
    broken = measure_time(given, ["eager"], "cpu", time.time() + 60, 1)
    assert broken["systems"]["eager"]["error"].startswith("ZeroDivisionError")
    record = {"command": "c", "machine": "m", "torch": "t", "transformers": "f", "python": "p", "memory": {}}
    text = page(record | {"time": {"late": late, "broken": broken}})
    assert "not run: no time left" in text and "ZeroDivisionError" in text


def test_workloads_are_the_same_every_time():
    first, second = (workload(SMALL[0], "cpu", small=True) for _ in range(2))
    assert torch.equal(first.batch["input_ids"], second.batch["input_ids"])
    assert all(torch.equal(a, b) for a, b in zip(first.model.parameters(), second.model.parameters(), strict=True))
    assert set(SYSTEMS) == {"eager", "compile", "reduce-overhead", "wholestep"}
    with pytest.raises(SystemExit, match="unknown workload"):
        workload("vit:8", "cpu")
