"""Runs most of `interpreted_cases.py`: the Triton kernels of whole networks, interpreted, in a process of its own."""

from __future__ import annotations

import os

import pytest

from tests import warm

PARTS = {"words": "gpt2 or dlrm", "images": "(efficient or resnet50) and bf16"}


@pytest.mark.parametrize("networks", PARTS.values(), ids=PARTS)
def test_networks_in_the_interpreter(networks: str) -> None:
    pytest.importorskip("triton")
    pytest.importorskip("transformers")
    done = warm.run(
        ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "ignore", "-k", networks,
         "tests/networks/interpreted_cases.py"],
        os.environ | {"TRITON_INTERPRET": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-6000:]
    assert " passed" in done.stdout and "skipped" not in done.stdout
