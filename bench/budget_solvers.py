"""Who solves the integer programs of a memory budget faster: HiGHS, as `wholestep/budget/exact.py` does, or CP-SAT.

Networks are fitted into shares of their peak, down to one that nothing fits; every program that is solved on the way is
kept and solved again by both, one at a time. Where both end in time they must reach the same objective. CP-SAT takes
whole numbers alone: prices are rounded to a billionth of the largest. Models are built anew every time, which counts.
Run: `pip install ortools`, then `python bench/budget_solvers.py [--networks NAME:SIZE ...] [--most N]`.
bench/results/budget_solvers.md holds the record.
"""

from __future__ import annotations

import argparse
import importlib
import math
import os
import platform
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import wholestep as ws
from bench import networks
from wholestep import api
from wholestep.budget import exact
from wholestep.budget.program import Program
from wholestep.errors import MemoryBudgetError
from wholestep.machine.describe import describe, package_version, usable_cores

NETWORKS = ("gpt2:cpu", "gpt2:few", "bert_large:cpu", "vit:cpu", "resnet50:cpu", "efficientnet_b0:cpu")
SHARES = (0.9, 0.75, 0.6, 0.45, 0.01)
#: how often each program is solved by each; the fastest counts
TIMES = 3
#: what the largest price is as a whole number
PRICE = 10**9
#: how far objectives may be apart: solvers stop at a gap of a millionth
TOLERANCE = 1e-5

Found = tuple[Sequence[float], float] | None
Solver = Callable[[Program, int | None], Found]


@dataclass
class Row:
    """The programs of one network, and the seconds of each solver for each of them."""

    network: str
    programs: list[tuple[Program, int | None]]
    seconds: dict[str, list[float]] = field(default_factory=dict)
    #: programs that a solver did not finish in the time it has, by solver
    unproved: dict[str, int] = field(default_factory=dict)
    #: programs that all finished, and those of them whose objectives differ
    proved: int = 0
    differ: int = 0


class Enough(Exception):
    """The budget has been fitted: the step itself is not wanted."""


def programs_of(
    name: str, size: str, providers: Sequence[str], shares: Sequence[float]
) -> list[tuple[Program, int | None]]:
    """Every program that is solved while a network is fitted, with its limit."""
    network, found = networks.build(name, size), {}
    solve, fit = exact.solve, api.fit_budget

    def watched(program: Program, limit: int | None) -> Found:
        found.setdefault((repr(program), limit), (program, limit))
        return solve(program, limit)

    def only_fit(*arguments: Any, **named: Any) -> Any:
        fit(*arguments, **named)
        raise Enough

    exact.solve, api.fit_budget = watched, only_fit  # type: ignore[assignment]
    try:
        for share in shares:
            try:
                optimizer, _ = network.optimizer(network.model)
                batch = network.make_batch(0, "cpu")
                ws.compile(network.model, network.loss_fn, optimizer, batch, memory_budget=share,
                           providers=list(providers), tune=False)  # fmt: skip
            except (Enough, MemoryBudgetError):
                pass
    finally:
        exact.solve, api.fit_budget = solve, fit
    return list(found.values())


def cp_sat(program: Program, limit: int | None, workers: int = 1) -> Found:
    """As `exact.solve`, by CP-SAT."""
    from ortools.sat.python import cp_model  # type: ignore[import-untyped,import-not-found,unused-ignore]

    model = cp_model.CpModel()
    variables = [model.new_int_var(0, upper, "") for upper in program.upper]
    for terms, at_most in program.rows:
        model.add(weighted(cp_model, variables, terms) <= whole(at_most))
    scale = (max(program.cost, default=0.0) or 1.0) / PRICE
    if limit is None:
        most = sum(held + sum(int(abs(c)) * program.upper[v] for v, c in terms) for terms, held in program.memory)
        target: Any = model.new_int_var(0, most, "")
    else:
        target = cp_model.LinearExpr.weighted_sum(variables, [round(c / scale) for c in program.cost])
    for terms, held in program.memory:
        model.add(weighted(cp_model, variables, terms) + held <= (target if limit is None else limit))
    model.minimize(target)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds, solver.parameters.num_workers = exact.TIME_LIMIT, workers
    status = solver.solve(model)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return None
    return [float(solver.value(v)) for v in variables], solver.best_objective_bound * scale


def weighted(cp_model: Any, variables: Sequence[Any], terms: Iterable[tuple[int, float]]) -> Any:
    terms = list(terms)
    return cp_model.LinearExpr.weighted_sum([variables[v] for v, _ in terms], [whole(c) for _, c in terms])


def whole(number: float) -> int:
    """A coefficient, which must be a whole number."""
    if number != int(number):
        raise ValueError(f"{number} is no whole number")
    return int(number)


def objective(program: Program, limit: int | None, found: Found) -> float | None:
    """What a solution costs; without a limit what it holds. ValueError where it is none."""
    if found is None:
        return None
    values = [round(v) for v in found[0]]
    held = max((sum(c * values[v] for v, c in terms) + h for terms, h in program.memory), default=0)
    if any(sum(c * values[v] for v, c in terms) > at_most for terms, at_most in program.rows):
        raise ValueError("a solution breaks the wiring")
    if limit is not None and held > limit:
        raise ValueError("a solution holds more than its limit")
    return float(held) if limit is None else sum(c * v for c, v in zip(program.cost, values, strict=True))


def measured(network: str, programs: list[tuple[Program, int | None]], solvers: dict[str, Solver]) -> Row:
    row = Row(network, programs, {name: [] for name in solvers}, dict.fromkeys(solvers, 0))
    for program, limit in programs:
        reached = []
        for name, solve in solvers.items():
            times = []
            for _ in range(TIMES):
                start = time.perf_counter()
                found = solve(program, limit)
                times.append(time.perf_counter() - start)
                if times[-1] > 1:
                    break  # long enough to be told from noise
            row.seconds[name].append(min(times))
            row.unproved[name] += min(times) >= exact.TIME_LIMIT
            reached.append(objective(program, limit, found))
        if any(seconds[-1] >= exact.TIME_LIMIT for seconds in row.seconds.values()):
            continue
        first = reached[0]
        row.proved += 1
        row.differ += any(
            (other is None) != (first is None)
            or (other is not None and first is not None and abs(other - first) > TOLERANCE * max(first, other))
            for other in reached
        )
    return row


def line(row: Row) -> str:
    sizes = [len(program.cost) for program, _ in row.programs]
    variables = f"{min(sizes)}-{max(sizes)}" if sizes else "-"
    shown = [row.network, str(len(row.programs)), variables]
    for name, seconds in row.seconds.items():
        late = f" ({row.unproved[name]} unproved)" if row.unproved[name] else ""
        shown.append(f"{sum(seconds):.2f} / {max(seconds, default=0):.3f}{late}")
    return "| " + " | ".join([*shown, f"{row.proved - row.differ} of {row.proved}"]) + " |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="+", default=NETWORKS, metavar="NAME:SIZE")
    parser.add_argument("--providers", nargs="+", default=["aten"], help="aten alone decides about every op")
    parser.add_argument("--shares", nargs="+", type=float, default=SHARES, help="budgets, of the peak")
    parser.add_argument("--most", type=int, help="programs per network, taken evenly from all")
    arguments = parser.parse_args()
    if package_version("ortools") is None:
        print("ortools is not installed: pip install ortools", file=sys.stderr)
        return 1
    importlib.import_module("ortools.sat.python.cp_model")  # once, which does not count
    cores = usable_cores()
    solvers: dict[str, Solver] = {"HiGHS": exact.solve, "CP-SAT, 1 worker": cp_sat}
    solvers[f"CP-SAT, {cores} workers"] = lambda program, limit: cp_sat(program, limit, cores)
    packages = ", ".join(f"{name} {package_version(name)}" for name in ("scipy", "ortools", "torch"))
    machine = f"{describe().cpu}, {cores} cores, load {os.getloadavg()[0]:.1f}"
    print(f"{machine}; {packages}, Python {platform.python_version()}")
    print(f"providers {', '.join(arguments.providers)}; budgets {', '.join(map(str, arguments.shares))} of the peak\n")
    print("| network | programs | variables |" + "".join(f" {name}: s of all / of the slowest |" for name in solvers),
          "same objective |")  # fmt: skip
    print("|---|---:|---:|" + "---:|" * len(solvers) + "---|", flush=True)
    differ = 0
    for network in arguments.networks:
        name, _, size = network.partition(":")
        programs = programs_of(name, size or "cpu", arguments.providers, arguments.shares)
        every = 1 if arguments.most is None else max(1, math.ceil(len(programs) / arguments.most))
        row = measured(network, programs[::every], solvers)
        print(line(row), flush=True)
        differ += row.differ
    return 1 if differ else 0


if __name__ == "__main__":
    sys.exit(main())
