"""What a user sees of kernels: `step.why_not`, fusions among the opportunities, and who runs what in the report."""

from __future__ import annotations

import json
import re
import time

import pytest
import torch
from torch import nn

import wholestep as ws
from tests.runtime.loops_provider import Loops, launcher, loops  # noqa: F401  (a fixture)
from wholestep.backends.providers import Offer, forget_provider, register_provider
from wholestep.errors import InputError
from wholestep.runtime.kernels_report import KernelsReport, Share

pytestmark = pytest.mark.usefixtures("loops")
X, Y = torch.randn(12, 16, generator=torch.Generator().manual_seed(5)), torch.arange(12) % 3
GELU, NORM, PRODUCT = "step/1/forward/gelu#0", "step/2/forward/layer_norm#0", "step/0/forward/contract#0"


def compiled(**options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    options = {"providers": ["aten", "loops"], "tune": False} | options
    return ws.compile(model, nn.CrossEntropyLoss(), optimizer, (X, Y), **options)


@pytest.fixture(autouse=True)
def nothing_is_measured_yet(tmp_path, monkeypatch):
    monkeypatch.setenv("WHOLESTEP_CACHE", str(tmp_path))


# ---- why not ---------------------------------------------------------------------------------------------------------


def test_why_not():
    step = compiled()
    one = step.why_not(GELU, NORM)
    found = re.fullmatch(rf"{GELU} and {NORM} are one kernel of 2 ops, launch (\d+) of step, run by loops", one)
    launch = step.plan().launches[int(found[1])]
    assert (launch.name, launch.phase, launch.layer, launch.provider) == ("step.fused", "forward", "2", "loops")
    assert step.why_not("*forward/gelu#*", "*forward/layer_norm#*") == one
    assert step.why_not(PRODUCT, GELU) == f"{PRODUCT} and {GELU} are not one kernel: a library runs it ({PRODUCT})"
    assert "one is part of backward, the other of update" in step.why_not("*/layer_norm_grad#0", "step/2/update/lerp#*")
    far = step.why_not(GELU, "step/3/update/sqrt#1")
    assert far == f"{GELU} and step/3/update/sqrt#1 are no neighbours: neither reads what the other makes"


def test_why_not_of_micro_batches():
    step = compiled(accumulate=2)
    sentence = step.why_not("*forward/gelu#0", "*forward/layer_norm#0")
    assert re.search(r"are one kernel of 2 ops, launch \d+ of micro_batch, run by loops$", sentence)


def test_why_not_asks_for_ops_that_are_there():
    step = compiled()
    with pytest.raises(InputError, match=rf"'\*gleu\*' fits no op of the step; near it are .*{GELU}"):
        step.why_not("*gleu*", NORM)
    with pytest.raises(InputError, match="are the same op; name two"):
        step.why_not(GELU, "*forward/gelu#0")
    assert compiled(providers=["aten"]).why_not(GELU, NORM).startswith("nothing is fused in this step: only ATen")


def test_why_not_takes_names_of_layers_and_ops():
    step = compiled()
    assert step.why_not("1", "2") == step.why_not("gelu", "2/forward") == step.why_not(GELU, NORM)
    assert step.why_not("0", "1") == step.why_not(PRODUCT, GELU)
    with pytest.raises(InputError, match=r"'2\.norm' fits no op of the step"):
        step.why_not("2.norm", "1")
    with pytest.raises(InputError, match="cross_entropy_grad#0 is no part of a kernel by itself: it is a view"):
        step.why_not("cross_entropy_grad", NORM)
    with pytest.raises(InputError, match=r"named by text, .* not by int"):
        step.why_not(1, 2)


def test_why_not_where_aten_is_faster(monkeypatch):
    def slow(region):
        run = launcher(region)
        return lambda *tensors: (time.sleep(0.02), run(*tensors))[1]

    monkeypatch.setattr(Loops, "build", lambda self, offers, report=None: {o.key: slow(o.made) for o in offers})
    step = compiled(tune=True)
    assert "loops" not in {launch.provider for launch in step.plan().launches}
    sentence = step.why_not(GELU, NORM)
    assert (
        sentence
        == f"{GELU} and {NORM} could be one kernel, but ATen runs their ops one by one: nobody else does it faster"
    )


def test_refused_fusions_are_opportunities():
    step = compiled()
    found = {o.key: o for o in step.opportunities() if o.transformation == "fuse"}
    gradient = found["fuse step/2/update/lerp#0 <- step/2/backward/layer_norm_grad#0"]
    assert gradient.why_not == "one is part of backward, the other of update"
    assert gradient.change.bytes == -32 * 4  # addcmul reads the gradient too, so it is written anyway
    together = {site for line in step.recipe if line.startswith("fuse ") for site in [line]}
    for opportunity in found.values():
        consumer, producer = opportunity.site.split(" <- ")
        assert not any(consumer in line and producer in line for line in together), opportunity
    assert not [o for o in compiled(providers=["aten"]).opportunities() if o.transformation == "fuse"]


# ---- the report ------------------------------------------------------------------------------------------------------


def test_shares_add_up_to_the_ledger(monkeypatch):
    monkeypatch.setenv("WHOLESTEP_MACHINE", "h200")
    for accumulate in (1, 2):
        step = compiled(accumulate=accumulate)
        report = step.report()
        kernels, ledger = report.kernels, report.movement.ledger
        assert set(kernels.providers) >= {"loops", "aten"}
        assert set(kernels.families) == {"library", "rows", "pointwise"}
        for shares in (kernels.providers, kernels.families):
            assert sum(s.bytes for s in shares.values()) == ledger.total
            assert sum(s.launches for s in shares.values()) == ledger.launches
            assert sum(s.seconds for s in shares.values()) == pytest.approx(report.movement.roofline.seconds)
        plans = [(step.plan(), 1), *((body, accumulate) for body in step.plan().bodies)]
        run = sum(times for plan, times in plans for x in plan.launches if x.provider == "loops")
        assert kernels.providers["loops"].launches == run
        # three vectors of 32 and one of 3 are updated by equal kernels, so there are fewer than launches
        assert 0 < kernels.distinct < run


def test_text_and_json(monkeypatch):
    monkeypatch.setenv("WHOLESTEP_MACHINE", "h200")
    step = compiled()
    text = str(step.report())
    assert re.search(r"^  loops +\d+ +\d+ +[\d.]+ MB +[\d.]+% +[\d.]+%$", text, re.M)
    assert re.search(r"^  library +\d+ +- +[\d.]+ MB +[\d.]+% +[\d.]+%$", text, re.M)
    assert re.search(
        r"^  time: 0 of \d+ kernels were timed alone .*; the others count what .* \(modelled\)$", text, re.M
    )
    for phase in ("capture", "autodiff + update", "passes", "verify", "plan", "generate", "build", "measure"):
        assert re.search(rf"^  {re.escape(phase)} +\d+\.\d\d$", text, re.M)
    found = json.loads(step.report("json"))["kernels"]
    assert found["providers"]["loops"]["timed"] == 0 and found["distinct"] == step.report().kernels.distinct
    assert "kernels               count" in step.report("html")
    plain = compiled(providers=["aten"])
    assert "kernels: ATen runs every op; see providers= and level=" in str(plain.report())


class Three(Loops):
    """Has three ways: one that is wrong, one that cannot be built, and that of the reference."""

    name = "three"

    def offers(self, region):
        return [Offer(name, f"{name} {region.key}", made=region) for name in ("wrong", "unbuilt", "right")]

    def build(self, offers, report=None):
        ways = {"wrong": lambda *tensors: None, "unbuilt": RuntimeError("no compiler")}
        return {o.key: ways.get(o.name) or launcher(o.made) for o in offers}


@pytest.fixture
def three():
    yield register_provider(Three)
    forget_provider("three")


def test_measured_times_and_what_was_excluded(three):
    first = compiled(providers=["three"], tune=True)
    kernels = first.report().kernels
    share = kernels.providers["three"]
    assert share.timed == share.launches > 0 and share.measured > 0 and share.modelled == 0
    assert kernels.providers["aten"].timed == 0
    assert {e.way for e in kernels.excluded} == {"three:wrong", "three:unbuilt"}
    text = "\n".join(kernels.lines())
    assert f"{len(kernels.excluded)} ways to run a region were excluded:" in text
    assert "three:unbuilt: not built: RuntimeError: no compiler" in text
    assert re.search(rf"time: {share.timed} of \d+ kernels were timed alone when they were chosen, [\d.]+ [mu]s;", text)
    again = compiled(providers=["three"], tune=True).report().kernels  # from the store: nothing is timed again
    assert again.providers["three"].timed == share.timed
    assert again.providers["three"].measured == pytest.approx(share.measured)


def test_what_a_provider_declines_is_counted():
    class Never(Loops):
        name = "never"

        def claims(self, region):
            return "it is Sunday"

    register_provider(Never)
    try:
        kernels = compiled(providers=["aten", "never"]).report().kernels
    finally:
        forget_provider("never")
    assert set(kernels.providers) == {"aten"} and kernels.declined["never"]["it is Sunday"] > 3
    assert re.search(r"never does not run \d+ regions: it is Sunday \(\d+\)", "\n".join(kernels.lines()))


def test_without_a_description_shares_of_time_are_of_what_was_timed() -> None:
    shares = {
        "cpp": Share(launches=2, bytes=10, timed=2, measured=3e-3),
        "aten": Share(launches=2, bytes=30, timed=1, measured=1e-3, modelled=None),
    }
    lines = KernelsReport(shares, {}).lines()
    assert lines[1].endswith("25.0%  75.0%") and lines[2].endswith("75.0%  25.0%")
    assert "3 of 4 kernels were timed" in lines[3] and "shares are of these alone" in lines[3]
    shares["aten"].modelled = 2e-3
    assert KernelsReport(shares, {}).lines()[1].endswith("50.0%")
