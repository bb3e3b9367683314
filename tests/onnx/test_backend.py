"""The official ONNX backend tests pass as docs/onnx.md says: none is wrong, and none fails that is not listed there.

Every second of the node cases runs, without those that are slow to make; WHOLESTEP_ONNX=all runs all and counts them.
"""

from __future__ import annotations

import os
import re
from collections import Counter

import pytest

from .backend import BEGIN, END, KINDS, PAGE, cases, judge

ALL = os.environ.get("WHOLESTEP_ONNX") == "all"
#: passes of each set at least
AT_LEAST = {"node": 1850, "pytorch-converted": 82, "pytorch-operator": 35, "simple": 21}


def listed() -> tuple[dict[str, list[int]], set[str]]:
    """Counts of each set, and the names of the cases that do not pass, as the page has them."""
    part = PAGE.read_text().split(BEGIN)[1].split(END)[0]
    counts = {}
    for kind in KINDS:
        row = re.search(rf"^\| {kind} \|(.*)\|$", part, re.MULTILINE)
        assert row is not None
        counts[kind] = [int(cell) for cell in row.group(1).split("|")]
    return counts, set(re.findall(r"\btest_\w+", part.partition("###")[2]))


@pytest.mark.parametrize("kind", KINDS)
def test_every_case_passes_or_is_listed(kind):
    counts, failing = listed()
    step = 2 if kind == "node" and not ALL else 1
    outcomes = [judge(case) for case in list(cases(kind, slow=ALL))[::step]]
    assert outcomes
    assert [o for o in outcomes if o.verdict not in ("pass", "unsupported")] == []
    assert [o for o in outcomes if o.verdict != "pass" and o.name not in failing] == []
    assert [o.name for o in outcomes if o.verdict == "pass" and o.name in failing] == []
    if step == 1:
        found = Counter(o.verdict for o in outcomes)
        assert [len(outcomes), found["pass"], found["unsupported"], 0] == counts[kind][:4]


def test_the_page_says_enough_passes():
    counts, _ = listed()
    for kind, least in AT_LEAST.items():
        _, passed, _, bad, _ = counts[kind]
        assert passed >= least
        assert bad == 0


def test_a_wrong_answer_would_be_seen():
    import numpy as np

    case = next(c for c in cases("pytorch-operator") if c.name == "test_operator_exp")
    assert judge(case).verdict == "pass"
    ((given, wanted),) = case.data
    spoiled = type(case)(case.name, case.kind, case.model, [(given, [np.add(wanted[0], 0.01)])], case.rtol, case.atol)
    assert judge(spoiled).verdict == "wrong"
