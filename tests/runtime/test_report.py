"""What `step.report()` says, line by line."""

from __future__ import annotations

import re

import torch
from torch import nn

import wholestep as ws
from tests.runtime.runs import Body, adamw, data, fresh, squares


def test_content():
    model = fresh(lambda: Body(lambda m, x: torch.special.erfcx(m.layer(x)), spare=nn.Linear(2, 2)))
    step = ws.compile(model, squares, adamw(model), (data(3, 4),), clip_norm=1.0)
    report = step.report()
    assert list(report.seconds) == ["capture", "autodiff + update", "passes", "verify", "build"]
    assert all(s > 0 for s in report.seconds.values())
    assert list(report.ops) == ["forward", "loss", "backward", "clip", "update"]
    assert all(n > 0 for n in report.ops.values())
    assert report.parameters == 2 and report.untouched == ["spare.weight", "spare.bias"]
    assert report.opaque == {"aten.special_erfcx.default": 1}
    assert report.compilations == 1 and report.verified is None
    text = str(report)
    assert "no step has run yet" in text
    for phase in report.ops:
        assert re.search(rf"^  {phase} +\d+$", text, re.M)
    for name in report.seconds:
        assert re.search(rf"^  {re.escape(name)} +\d+\.\d\d$", text, re.M)
    assert "AdamW updates 2 parameters in the program" in text
    assert "no gradient reaches 2 parameters, which stay as they are: spare.weight, spare.bias" in text
    assert "operators without an op of ours, run by ATen: aten.special_erfcx.default x1" in text
    assert "gradients traced from PyTorch's autograd: aten.special_erfcx.default x1" in text
    assert "agreed" not in text
    for _ in range(3):
        step(data(3, 4))
    assert re.search(r"^3 steps, median \d+\.\d ms \(first \d+\.\d ms\)$", str(step.report()), re.M)
