"""The benchmark of whole steps as a dry run: tiny networks on the CPU, eager and ours."""

from __future__ import annotations

import json

import pytest
import torch

from bench.step import SMALL, SYSTEMS, measure, merged, page, prepare, summary, workload

pytest.importorskip("transformers")

MACHINE = {"machine": "m", "torch": "t", "transformers": "f", "python": "p"}


def test_systems_agree_and_are_on_the_page():
    rows = {}
    for system in ("eager", "wholestep-aten"):
        found, step = prepare(workload(SMALL[2], "cpu", small=True), system, "cpu")
        rows[system] = found | {"turns": [measure(step, "cpu")]}
    eager = dict(rows["eager"])
    rows = {system: summary(found, eager) for system, found in rows.items()}
    for row in rows.values():
        assert row["agrees"] and len(row["losses"]) == 3 and row["turns"] == 1
        assert min(row["ms"], row["host_us"], row["queued_us"]) > 0
    assert rows["wholestep-aten"]["planned"] > 0
    rows["compile"] = summary({"error": "over its time", "turns": []}, eager)
    text = page(MACHINE | {"workloads": {"w": {"what": "tiny", "systems": rows}}})
    assert "| compile | - | - to - |" in text and "over its time" in text and "wholestep-aten: planned peak" in text


def test_a_loss_that_is_not_that_of_eager_is_said():
    row = summary({"losses": [3.0, 2.0, 1.5], "turns": []}, {"losses": [3.0, 2.0, 1.0]})
    assert not row["agrees"] and row["loss_difference"] == 0.5


def test_what_was_measured_before_stays(tmp_path):
    file = tmp_path / "step.json"
    first = MACHINE | {"workloads": {"a": {"what": "A", "systems": {"eager": {"ms": 1}, "compile": {"ms": 2}}}}}
    file.write_text(json.dumps(first))
    second = MACHINE | {
        "workloads": {"a": {"what": "A", "systems": {"eager": {"ms": 3}}}, "b": {"what": "B", "systems": {}}}
    }
    both = merged(second, file)
    assert both["workloads"]["a"]["systems"] == {"eager": {"ms": 3}, "compile": {"ms": 2}} and "b" in both["workloads"]
    assert merged(second | {"torch": "other"}, file)["workloads"] == second["workloads"]


def test_workloads_are_the_same_every_time():
    first, second = (workload(SMALL[0], "cpu", small=True) for _ in range(2))
    assert torch.equal(first.batch["input_ids"], second.batch["input_ids"])
    assert all(torch.equal(a, b) for a, b in zip(first.model.parameters(), second.model.parameters(), strict=True))
    assert set(SYSTEMS) == {"eager", "compile", "reduce-overhead", "wholestep-aten", "wholestep"}
    with pytest.raises(SystemExit, match="unknown workload"):
        workload("vit:8", "cpu")
