"""What `step.report()` says, line by line."""

from __future__ import annotations

import json
import re

import torch
from torch import nn

import wholestep as ws
from tests.runtime.runs import Body, adamw, data, fresh, squares
from wholestep.transforms.opportunity import Change, Transformation, forget_transformation, register_transformation


def test_content():
    model = fresh(lambda: Body(lambda m, x: torch.special.erfcx(m.layer(x)), spare=nn.Linear(2, 2)))
    step = ws.compile(model, squares, adamw(model), (data(3, 4),), clip_norm=1.0)
    report = step.report()
    assert list(report.seconds) == ["capture", "autodiff + update", "passes", "verify", "plan"]
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


def test_movement_is_part_of_it(monkeypatch):
    monkeypatch.setenv("WHOLESTEP_MACHINE", "h200")
    model = fresh(lambda: Body(lambda m, x: torch.tanh(m.layer(x))))
    step = ws.compile(model, squares, adamw(model), (data(300, 4),), clip_norm=1.0)
    report = step.report()
    assert report.movement is not None and report.bytes == report.movement.ledger.total > 0
    text = str(report)
    assert len(text.splitlines()) < 60
    for cause in report.movement.ledger.by_cause():
        assert re.search(rf"^  {cause} +[\d.]+ \w+ +[\d.]+ \w+ +[\d.]+%$", text, re.M)
    assert f"= {report.movement.ratio:.2f}" in text and re.search(r"contract .* layer at \w+\.py:\d+$", text, re.M)
    assert "at the limits of NVIDIA H200" in text and "measured" not in text.split("at the limits")[1].splitlines()[0]
    step(data(300, 4))
    assert re.search(r"at the limits of NVIDIA H200: .*; measured [\d.]+ \w+$", str(step.report()), re.M)


def test_flops_by_precision_count_every_micro_batch():
    totals = []
    for count in (1, 2):
        model = fresh(lambda: nn.Sequential(nn.Linear(4, 4)))
        step = ws.compile(model, squares, adamw(model), (data(4, 4),), precision="bf16", accumulate=count)
        totals.append(sum(n for group in step.report().precision.values() for n in group.values()))
    assert totals[0] == totals[1] > 0


class Louder(Transformation):
    """A transformation of a user's own: it notes that it was there."""

    name, level = "louder", 1

    def places(self, function):
        yield from ((op, Change()) for op in function.regions[0].block if op.name == "step.tanh")

    def apply(self, op):
        op.attributes["test.louder"] = True


def test_what_was_done_to_the_program_is_in_every_format():
    register_transformation(Louder)
    try:
        model = fresh(lambda: nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.GELU()) for _ in range(4))))
        step = ws.compile(model, squares, adamw(model), (data(8, 4),), force=["louder *", "recompute */gelu#*"])
    finally:
        forget_transformation("louder")
    tanh = [key.partition(" ")[2] for key in step.recipe if key.startswith("louder ")]
    assert len(tanh) == 4
    text, plain, html = str(step.report()), json.loads(step.report("json")), step.report("html")
    assert re.search(rf"^  louder +4  {re.escape(', '.join(tanh[:3]))}, \.\.\.$", text, re.M)
    assert plain["recipe"] == step.recipe
    assert plain["transformations"]["louder"] == {"count": 4, "sites": tanh[:3]}
    assert list(plain["transformations"]) == ["louder", "recompute"] and plain["budget"] is None
    assert '<td>louder</td><td class="n" data-v="4">4</td>' in html and tanh[3] in html.partition("<pre>")[0]
    assert "transformations: none" in str(ws.compile(model, squares, adamw(model), (data(8, 4),)).report())


def test_what_became_of_a_budget_is_in_every_format():
    model = fresh(lambda: nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(16, 16), nn.GELU()))))
    step = ws.compile(model, squares, adamw(model), (data(400, 16),), memory_budget=0.8)
    budget = step.budget
    assert budget.recomputed > 0
    text, plain, html = str(step.report()), json.loads(step.report("json")), step.report("html")
    assert all(re.search(rf"^ *{re.escape(line)}$", text, re.M) for line in str(budget).splitlines())
    assert plain["budget"]["peak_after"] == budget.peak_after and plain["budget"]["recomputed"] == budget.recomputed
    assert plain["transformations"]["recompute"]["count"] == budget.recomputed
    assert "<h2>Memory budget</h2>" in html and str(budget).splitlines()[0] in html.partition("Memory budget</h2>")[2]


def test_launches_are_counted_once():
    model = fresh(lambda: nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Tanh()))
    step = ws.compile(model, squares, adamw(model), (data(8, 4),))
    report, launches = step.report(), step.plan().launches
    host, kernels = sum(p.provider == "host" for p in launches), report.movement.ledger.launches
    assert host > 0 and report.execution["host_numbers"] == host
    ran = len(launches) - host
    assert kernels > ran  # a layer norm is copied to its place
    stated = f"{len(launches)} launches: {ran} that run {kernels} kernels and {host} numbers of the host; order"
    assert stated in str(report) and f"\n{kernels} kernels, " in str(report)
