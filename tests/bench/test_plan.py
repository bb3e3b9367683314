"""The benchmark of planning makes both kinds of plan, and its page and plot hold what was measured."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from typing import Any

from bench import plan
from wholestep.backends import kernels


def test_both_kinds_of_plan_are_measured_and_drawn() -> None:
    traced = kernels.trace
    found = {f"{steps} steps": plan.measure(plan.recurrent(steps), [], repeats=1) for steps in (2, 6)}
    assert kernels.trace is traced
    for row in found.values():
        assert row["tracing_seconds"] > 0 and row["whole"]["launches"] == row["early"]["launches"]
        assert row["early"]["lower_bound"] <= row["whole"]["lower_bound"]
    record: dict[str, Any] = {"machine": "m", "torch": "t", "python": "p", "omnimalloc": "o", "load": 0.0}
    record |= {"networks": {"gpt2": found["2 steps"]}, "gpt2_layers": found, "recurrent": found}
    page = plan.report(record)
    assert page.count("state last (CPU)") == page.count("updates early (CUDA)") == 5
    drawing = ElementTree.fromstring(plan.plot(record))
    lines = [e for e in drawing.iter() if e.tag.endswith("polyline")]
    assert len(lines) == 4 and all(len(e.get("points", "").split()) == 2 for e in lines)
