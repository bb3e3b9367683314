"""bench/tiles.py without a GPU: it finds products that compute a factor, and more tiles than are offered."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from bench import tiles

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU it measures")


def test_the_heaviest_regions_with_their_tiles(tmp_path: Path) -> None:
    kept = tmp_path / "regions.json"
    tiles.main(["resnet50:2", "--most", "8", "--out", str(tmp_path / "page.md"), "--write", str(kept)])
    tiles.main(["--read", str(kept), "--most", "8", "--out", str(tmp_path / "again.md")])
    again = (tmp_path / "again.md").read_text().replace("--read regions.json", "resnet50:2")
    assert again == (tmp_path / "page.md").read_text()
    page, figures = (tmp_path / "page.md").read_text(), json.loads((tmp_path / "page.json").read_text())
    assert page.count("- resnet50, ") == len(figures) == 2 and figures[0]["bytes"] >= figures[1]["bytes"]
    assert all("contract" in f["region"] and len(f["tiles"]) == 8 for f in figures) and "nothing is timed" in page
    assert all(" by" in f["tiles"][0][1] for f in figures)
