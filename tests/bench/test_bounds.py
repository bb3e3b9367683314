"""Bounds of the benchmark's networks: computed from the captured step alone, and put into results."""

from __future__ import annotations

import pytest

import wholestep as ws
from bench.bounds import bound, main, renew
from tests.cost.models import moved
from wholestep.bench.results import Results
from wholestep.bench.workload import Case, build


def row(contender: str, **facts: float) -> dict:
    where = {"device": "cuda", "machine": "m", "network": "dlrm", "size": "tiny", "precision": "bf16"}
    return {**where, "contender": contender, **({"facts": facts} if facts else {})}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_it_is_what_a_compiled_step_says(precision):
    work = build(Case("dlrm", "tiny"), "cpu")
    batch, optimizer = work.batch(0, "cpu"), work.optimizer[0]
    step = ws.compile(work.model, work.loss_fn, optimizer, batch, precision=precision, tune=False)
    assert bound(Case("dlrm", "tiny"), precision) == moved(step).bound


def test_rows_are_renewed_and_say_so(tmp_path, capsys):
    path, new = tmp_path / "bench.json", bound(Case("dlrm", "tiny"), "bf16").total
    ours, same = row("wholestep", moved=4 * new, bound=17), row("aten", moved=2 * new, bound=new)
    Results([row("eager"), ours, same]).save(path)
    main(["--renew", str(path)])
    assert "dlrm@tiny bf16" in capsys.readouterr().out
    theirs, renewed, unchanged = Results.load(path).entries
    assert theirs == row("eager") and unchanged == same
    note = {"by": "bench/bounds.py", "bound before": 17}
    assert renewed["facts"] == {"moved": 4 * new, "bound": new, "moved / bound": 4.0, "renewed": note}


def test_what_was_recorded_first_stays_known():
    entry = row("wholestep", moved=100, bound=10)
    for total in (20, 50):
        assert renew([entry], {("dlrm", "tiny", "bf16"): total}) == 1
    assert renew([entry], {("dlrm", "tiny", "bf16"): 50}) == 0
    assert entry["facts"]["moved / bound"] == 2.0 and entry["facts"]["renewed"]["bound before"] == 10
