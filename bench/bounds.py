"""The fused bound of the benchmark's networks at their sizes, without a GPU: each is captured and differentiated.

`python bench/bounds.py [NAME[@SIZE] ...] [--precision bf16]` prints a table; without names it has the twelve at "full".
The bound hangs on nothing that is done to a program later (docs/ledger.md), so no kernel is chosen and nothing planned.
`--renew FILE` does so for our rows in a file of `wholestep bench`, and replaces their bound and moved / bound by it:
what was moved stays as it was measured. A row says what was recorded before (`facts["renewed"]`).
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from wholestep.api import PIPELINE
from wholestep.bench.results import Entry, Results, locked
from wholestep.bench.workload import Case, build, cases
from wholestep.capture.capture import capture
from wholestep.cost import Bound, fused_bound
from wholestep.ir.collector import collector_paused
from wholestep.ir.passes import run_pipeline
from wholestep.options import Options
from wholestep.training.build import build_step
from wholestep.training.optimizers import plan_optimizer

HEAD = f"{'network':<24} {'heavy ops':>10} {'update':>8} {'bound':>8} GB  {'seconds':>7}"


@collector_paused()
def bound(case: Case, precision: str) -> Bound:
    """The bound of a network's step."""
    work = build(case, "cpu")
    captured = capture(work.model, work.loss_fn, work.batch(0, "cpu"))
    plan = plan_optimizer(work.optimizer[0], captured.parameters)
    program = build_step(captured, plan, Options(precision=precision))
    run_pipeline(program.module, PIPELINE)
    return fused_bound(program.function)


def told(case: Case, precision: str) -> Bound:
    """The same, with a line of the table."""
    start = time.perf_counter()
    found = bound(case, precision)
    gc.collect()
    heavy, update = found.heavy / 1e9, (found.state_read + found.state_written) / 1e9
    name, seconds = f"{case} {precision}", time.perf_counter() - start
    print(f"{name:<24} {heavy:>10.3f} {update:>8.3f} {found.total / 1e9:>8.3f}     {seconds:>7.0f}", flush=True)
    return found


def renew(entries: list[Entry], known: dict[tuple[str, str, str], int]) -> int:
    """Puts the bounds of networks in the place of those that rows have, and gives how many changed."""
    count = 0
    for entry in entries:
        facts = entry.get("facts", {})
        new = known.get((entry["network"], entry["size"], entry["precision"]))
        if new is None or facts.get("bound") in (None, new):
            continue
        first = facts.get("renewed", {}).get("bound before", facts["bound"])
        facts["renewed"] = {"by": "bench/bounds.py", "bound before": first}
        facts["bound"], facts["moved / bound"] = new, facts["moved"] / new
        count += 1
    return count


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="NAME[@SIZE]", help="with --renew: only these of the file")
    parser.add_argument("--precision", default="bf16", help="of a table (default bf16)")
    parser.add_argument("--renew", action="append", type=Path, default=[], metavar="FILE", help="results to renew")
    args = parser.parse_args(arguments)
    wanted = {(case.network, case.size, args.precision): case for case in cases(args.cases, "full")}
    if args.renew:
        rows = [entry for path in args.renew for entry in Results.load(path).entries]
        kept = [(e["network"], e["size"], e["precision"]) for e in rows if "bound" in e.get("facts", {})]
        named = {key[:2] for key in wanted} if args.cases else {key[:2] for key in kept}
        wanted = {key: Case(*key[:2]) for key in sorted(set(kept)) if key[:2] in named}
    print(HEAD)
    known = {key: told(case, key[2]).total for key, case in wanted.items()}
    for path in args.renew:
        with locked(path):
            results = Results.load(path)
            count = renew(results.entries, known)
            results.save(path)
        print(f"{path}: {count} rows renewed")


if __name__ == "__main__":
    main()
