"""The benchmark of fifty steps as a dry run, and its page where something goes wrong."""

from __future__ import annotations

import json
import pathlib

import pytest

from bench import fifty

pytest.importorskip("transformers")


def test_dry_run(tmp_path: pathlib.Path) -> None:
    arguments = ["--device", "cpu", "--size", "tiny", "--steps", "4", "--networks", "dlrm", "--providers", "aten"]
    assert fifty.main([*arguments, "--out", str(tmp_path)]) == 0
    found = json.loads((tmp_path / "fifty.json").read_text())["networks"]["dlrm"]
    for system in ("eager", "wholestep", "again"):
        assert len(found[system]["losses"]) == 4 and found[system]["ms"] > 0
    assert found["again"]["losses"] == found["eager"]["losses"]
    assert sum(share["launches"] for share in found["wholestep"]["report"]["kernels"]["providers"].values()) > 0
    assert "| dlrm | 4 rows" in (tmp_path / "fifty.md").read_text()


def test_a_network_that_fails_or_is_over_its_time_is_on_the_page(tmp_path: pathlib.Path) -> None:
    arguments = ["--device", "cpu", "--size", "tiny", "--steps", "4", "--networks", "dlrm", "--out", str(tmp_path)]
    assert fifty.main([*arguments, "--providers", "aten,nobody"]) == 1
    page = (tmp_path / "fifty.md").read_text()
    assert "wholestep: InputError: there is no provider 'nobody'" in page and "not known" in page
    assert fifty.main([*arguments, "--limit", "0.1"]) == 1
    assert "the process: over its limit" in (tmp_path / "fifty.md").read_text()


def test_losses_that_part_are_no_agreement() -> None:
    losses = [2.0, 1.9, 1.8, 1.7, 1.6]
    found = {"eager": {"losses": losses}, "wholestep": {"losses": [1.03 * x for x in losses]}}
    assert fifty.verdict(found) == "DISAGREES"
    assert fifty.verdict(found | {"again": {"losses": [1.02 * x for x in losses]}}) == "agrees"
    assert fifty.verdict({"eager": {"losses": losses}}) == "not known"
