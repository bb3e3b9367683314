"""Contenders take turns one at a time; one that fails, ends or is too late is said and stops nobody."""

from __future__ import annotations

import sys
import time
from itertools import pairwise

from bench.turns import Contender, race

#: notes when each turn begins and ends; what it does otherwise is its name
BODY = """
import os, pathlib, sys, time
sys.path.insert(0, {root!r})
from bench.turns import serve
kind, folder = sys.argv[1], pathlib.Path(sys.argv[3])

def measure():
    if kind == "breaks":
        raise ValueError("half way")
    start = time.time()
    time.sleep(0.05)
    return {{"span": [start, time.time()]}}

def prepare():
    if kind == "late":
        time.sleep(60)
    if kind == "ends":
        print("a last word", flush=True)
        os._exit(3)
    return {{"kind": kind}}, measure

serve(folder, prepare, sys.stdin)
"""


def run(tmp_path, kinds: list[str], ready: float) -> tuple[dict, list[str]]:
    """What a race of these finds, and the order in which they were started."""
    script = tmp_path / "body.py"
    script.write_text(BODY.format(root=__file__.rsplit("/tests/", 1)[0]))
    order: list[str] = []

    def maker(kind: str):
        def make() -> Contender:
            order.append(kind)
            return Contender(kind, [sys.executable, str(script), kind], tmp_path / kind)

        return make

    now = time.time()
    found = race({k: maker(k) for k in kinds}, 3, now + ready, now + 120, quiet=lambda name: name == "quiet")
    return found, order


def test_turns(tmp_path):
    kinds = ["quiet", "one", "two", "breaks", "ends"]
    found, order = run(tmp_path, kinds, 60)
    assert list(found) == kinds and order[-1] == "quiet"
    spans = sorted(turn["span"] for k in ("quiet", "one", "two") for turn in found[k]["turns"])
    assert len(spans) == 9
    assert all(before[1] <= after[0] for before, after in pairwise(spans))
    assert found["one"]["kind"] == "one" and "error" not in found["one"]
    assert found["breaks"]["error"] == "ValueError: half way" and found["breaks"]["turns"] == []
    assert found["ends"]["error"] == "exit code 3: a last word"


def test_one_that_is_late_is_ended(tmp_path):
    found, _ = run(tmp_path, ["late"], 0.5)
    assert found["late"] == {"error": "no ready when the time was over", "turns": []}
