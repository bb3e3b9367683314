"""Thousands of mutated files: a clear error of ours or a right import; no crash, no hang, no memory without bound."""

from __future__ import annotations

import json
import os

import pytest

from tests import warm

pytest.importorskip("onnx")

COUNT = 2000


def test_mutated_files():
    done = warm.run(["-m", "tests.onnx.fuzz", str(COUNT), "0"], os.environ)
    assert done.returncode == 0, done.stderr[-4000:]
    seen = json.loads(done.stdout.splitlines()[-1])
    assert sum(seen.values()) == COUNT
    # every kind of end is met: the files are neither all hopeless nor all harmless
    assert {"OnnxFileError", "OnnxGraphError", "OnnxUnsupportedError"} <= seen.keys()
    assert seen.get("as onnxruntime", 0) + seen.get("imported", 0) > 100
