"""Runs eight of the ten cases of `interpreted_cases.py`: Triton kernels of whole networks, interpreted, in processes of
their own.

Each network once. Two run in bf16 alone; in fp32 they have the same kernels but for their casts, and would take ten
seconds more.
"""

from __future__ import annotations

import os

import pytest

from bench.networks import NAMES
from tests import warm

PARTS = {
    "words": ["gpt2-fp32", "bert_large-fp32", "llama-bf16", "wavenet-fp32", "dlrm-fp32"],
    "images": ["vit-fp32", "resnet50-bf16", "efficientnet_b0-fp32"],
}
#: what is tested beside two steps, by the network that is for
MORE = {"resnet50-bf16": "test_gradients_through_norms", "wavenet-fp32": "test_skip_connections_are_one_product"}


@pytest.mark.parametrize("cases", PARTS.values(), ids=PARTS)
def test_networks_in_the_interpreter(cases: list[str]) -> None:
    pytest.importorskip("triton")
    pytest.importorskip("transformers")
    tests = [f"test_two_steps[{name}]" for name in cases] + [MORE[name] for name in cases if name in MORE]
    done = warm.run(
        ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "ignore",
         *(f"tests/networks/interpreted_cases.py::{test}" for test in tests)],
        os.environ | {"TRITON_INTERPRET": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-6000:]
    assert f"{len(tests)} passed" in done.stdout


def test_products_turn_queries_and_keys() -> None:
    pytest.importorskip("triton")
    pytest.importorskip("transformers")
    done = warm.run(
        ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "ignore", "tests/networks/rotary_cases.py"],
        os.environ | {"TRITON_INTERPRET": "1"},
    )
    assert done.returncode == 0, done.stdout[-6000:]
    assert "2 passed" in done.stdout


def test_attention_computes_what_stands_around_it() -> None:
    pytest.importorskip("triton")
    done = warm.run(
        ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "ignore", "tests/networks/attention_cases.py"],
        os.environ | {"TRITON_INTERPRET": "1"},
    )
    assert done.returncode == 0, done.stdout[-6000:]
    assert "5 passed" in done.stdout


def test_every_network_is_among_them() -> None:
    assert sorted(name.partition("-")[0] for part in PARTS.values() for name in part) == sorted(NAMES)
