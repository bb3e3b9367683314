"""What opportunities are predicted to change: beside what the ledger counts once they are taken, and its time."""

from __future__ import annotations

import pytest

from tests.cost.models import convolution_step, language_step, moved
from wholestep.machine.description import Description
from wholestep.runtime.predicted import predicted
from wholestep.transforms.opportunity import Change, Opportunity, sites

MACHINE = Description("an example", "cuda", bandwidth=1e9, gemm={"f32": 1e9})
LINKS = {"host_to_device": 1e8, "device_to_host": 2e8}


@pytest.mark.parametrize(
    ("make", "options", "kinds"),
    [
        (language_step, {}, {"embedding", "layer_norm", "attention", "gelu", "transpose", "cross_entropy"}),
        (language_step, {"accumulate": 2}, {"layer_norm", "contract"}),
        (language_step, {"precision": "bf16"}, {"layer_norm", "cast"}),
        (convolution_step, {}, {"conv", "batch_norm"}),
    ],
)
def test_what_runs_again_moves_what_the_ledger_then_says(make, options, kinds):
    plain = make(**options)
    before = moved(plain).ledger.total
    tried: dict[tuple[str, str], Opportunity] = {}
    for opportunity in plain.opportunities():
        kind = opportunity.site.rpartition("/")[2].partition("#")[0]
        if opportunity.transformation in ("recompute", "renormalize") and not opportunity.why_not and kind in kinds:
            tried.setdefault((opportunity.transformation, kind), opportunity)
    for (_, kind), opportunity in tried.items():
        difference = moved(make.__wrapped__(**options, force=[opportunity.key])).ledger.total - before
        if kind == "cross_entropy":  # what nobody reads of it any more is not computed in forward
            assert difference <= opportunity.change.bytes
        else:
            assert difference == opportunity.change.bytes, opportunity
    assert {kind for _, kind in tried} == kinds


def test_time_at_the_limits_of_a_machine():
    step = language_step()
    module, planned = step.program(), step._compiled.planned
    at = {op.name: site for site, op in reversed(sites(module).items())}
    found = {
        "bytes": Opportunity("direct", at["step.gelu"], Change(bytes=-3_000, flops=9_000)),
        "products": Opportunity("direct", at["step.contract"], Change(bytes=3_000, flops=9_000)),
        "fewer bytes, more products": Opportunity("direct", at["step.contract"], Change(bytes=-3_000, flops=9_000)),
        "a link": Opportunity("offload", at["step.gelu"], Change(bytes=4_000, saved=-1_000)),
        "its own word": Opportunity("direct", at["step.gelu"], Change(bytes=-3_000, seconds=0.5)),
        "a refused fusion": Opportunity("fuse", "step/a/forward/gelu#0 <- step/b", Change(bytes=-2_000), "it is large"),
        "nothing": Opportunity("direct", at["step.gelu"], why_not="it reads as it lies"),
    }

    def seconds(machine):
        return {what: o.change.seconds for what, o in zip(found, priced(machine), strict=True)}

    def priced(machine):
        return predicted(module, list(found.values()), planned, machine)

    want = {"bytes": -3e-6, "products": 9e-6, "fewer bytes, more products": 6e-6, "a link": None, "its own word": 0.5}
    want |= {"a refused fusion": -2e-6, "nothing": None}
    assert seconds(MACHINE) == pytest.approx(want)
    linked = Description("another", "cuda", bandwidth=1e9, links=LINKS)  # it does not tell how fast products are
    assert seconds(linked) == pytest.approx(
        want | {"products": 3e-6, "fewer bytes, more products": -3e-6, "a link": 1.5e-5}
    )
    assert seconds(None) == dict.fromkeys(found) | {"its own word": 0.5}
    assert str(priced(MACHINE)[0]).endswith(": bytes -3,000, saved +0, flops +9,000, time -3.0 us")
    assert str(priced(None)[0]).endswith(": bytes -3,000, saved +0, flops +9,000")


def test_a_step_prices_on_the_machine_that_is_described(monkeypatch):
    monkeypatch.setenv("WHOLESTEP_MACHINE", "h200")
    listed = [o for o in language_step().opportunities() if not o.why_not and o.change.bytes]
    assert listed and all((o.change.seconds > 0) == (o.change.bytes > 0) for o in listed)
