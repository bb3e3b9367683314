"""The zoo's networks at middle size on this CPU: one step beside eager PyTorch's and float64's, then the time of steps.

The networks are those that tests train at tiny sizes (tests/zoo), which no kernel or transformation was written for.
Each has a process of its own; ours, eager and, with `--compile`, torch.compile take turns. Eager and torch.compile have
PyTorch's fused AdamW. `python bench/zoo.py [NAME ...] [--compile] --out FILE.md`, half an hour on two processors.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import os
import pathlib
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import wholestep as ws  # noqa: E402
from tests.zoo.sizes import MIDDLE, VARIABLE  # noqa: E402
from wholestep.bench.results import machine_name  # noqa: E402

ROUNDS, BLOCK = 7, 0.25
#: how far a loss may be from eager's, of it; how far a step from float64's, of its length, unless eager's is half as
#: far: where a relu is next to its kink, rounding makes up to a hundredth, ours or eager's
LOSS_OFF, STEP_OFF = 1e-5, 1e-2
LIMIT = 600
Row = dict[str, Any]


def weights(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().double().flatten() for p in model.parameters() if p.requires_grad])


def compared(entry: Any) -> Row:
    """How far one step of plain gradient descent is from float64's, and eager's from it; from eager's alone where the
    model does not run in float64."""
    model, batch = entry.build()
    twin, exact, before = copy.deepcopy(model), copy.deepcopy(model).double(), weights(model)
    step = ws.compile(model, entry.loss_fn, torch.optim.SGD(trained(model), lr=1.0), batch)
    ours = float(step(**batch) if isinstance(batch, dict) else step(*batch))
    theirs, eager = eager_step(entry, twin, batch)
    try:
        _, truth = eager_step(entry, exact, doubled(batch))
    except RuntimeError:
        truth = eager
    off = [float((found - truth).norm() / truth.norm()) for found in (weights(model) - before, eager)]
    return {"weights": before.numel(), "loss off": abs(ours - theirs) / abs(theirs), "step off": off}


def eager_step(entry: Any, model: torch.nn.Module, batch: Any) -> tuple[float, torch.Tensor]:
    """The loss, and what a step of plain gradient descent adds to the weights."""
    loss = entry.loss(model, batch)
    loss.backward()
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in trained(model)]
    return float(loss.detach()), -torch.cat([g.double().flatten() for g in gradients])


def doubled(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.double() if value.is_floating_point() else value
    if isinstance(value, dict):
        return {name: doubled(each) for name, each in value.items()}
    return tuple(map(doubled, value)) if isinstance(value, list | tuple) else value


def trained(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def timed(entry: Any, others: bool) -> Row:
    """Seconds to the first step of ours, and medians of milliseconds of blocks of steps."""
    model, batch = entry.build()
    twin, third = copy.deepcopy(model), copy.deepcopy(model)

    def optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(trained(model), lr=1e-4, fused=True)

    start = time.perf_counter()
    step = ws.compile(model, entry.loss_fn, optimizer(model), batch)

    def ours() -> None:
        step(**batch) if isinstance(batch, dict) else step(*batch)

    ours()
    ways: dict[str, Callable[[], None]] = {"ours": ours, "eager": stepper(entry.loss, twin, batch, optimizer(twin))}
    row: Row = {"first": time.perf_counter() - start}
    if others:
        ways["compile"] = stepper(torch.compile(entry.loss), third, batch, optimizer(third))
        start = time.perf_counter()
        ways["compile"]()
        row["compile first"] = time.perf_counter() - start
    times: dict[str, list[float]] = {name: [] for name in ways}
    for run in ways.values():
        run()
    for _ in range(ROUNDS):
        for name, run in ways.items():
            count, start = 0, time.perf_counter()
            while time.perf_counter() - start < BLOCK:
                run()
                count += 1
            times[name].append((time.perf_counter() - start) / count * 1e3)
    return row | {name: statistics.median(each) for name, each in times.items()}


def stepper(loss_fn: Any, model: torch.nn.Module, batch: Any, optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    def run() -> None:
        optimizer.zero_grad()
        loss_fn(model, batch).backward()
        optimizer.step()

    return run


def one(name: str, others: bool) -> None:
    """What the process of a network prints."""
    from tests.zoo import ZOO

    warnings.simplefilter("ignore")
    print(json.dumps(compared(ZOO[name]) | timed(ZOO[name], others)), flush=True)


def row_of(name: str, others: bool) -> Row:
    """What a process of its own finds, or why it found nothing."""
    command = [sys.executable, __file__, "--one", name, *(["--compile"] if others else [])]
    try:
        done = subprocess.run(
            command, env=os.environ | {VARIABLE: MIDDLE}, capture_output=True, text=True, timeout=LIMIT
        )
    except subprocess.TimeoutExpired:
        return {"why": f"no result after {LIMIT} s"}
    if done.returncode:
        return {"why": (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1][:200]}
    row: Row = json.loads(done.stdout.strip().splitlines()[-1])
    return row


def line(name: str, row: Row, others: bool) -> str:
    if "why" in row:
        return f"| {name} | {row['why']} |" + " |" * (7 + 2 * others)
    mine, eagers = row["step off"]
    near = mine <= max(STEP_OFF, 2 * eagers) or math.isnan(eagers)
    off = "" if row["loss off"] <= LOSS_OFF and near else " DIFFERS"
    cells = [
        f"{row['weights'] / 1e6:.2f}",
        f"{row['loss off']:.0e}",
        f"{mine:.0e}, {eagers:.0e}{off}",
        f"{row['first']:.1f}",
    ]
    cells += [f"{row['ours']:.2f}", f"{row['eager']:.2f}", f"{row['ours'] / row['eager']:.2f}"]
    if others:
        cells += [f"{row['compile']:.2f}, {row['compile first']:.1f}", f"{row['ours'] / row['compile']:.2f}"]
    return f"| {name} | {' | '.join(cells)} |"


def mean(rows: list[Row], other: str) -> str:
    ratios = sorted(r["ours"] / r[other] for r in rows)
    middle = math.exp(statistics.fmean(map(math.log, ratios)))
    return f"{middle:.2f} of {other}'s time, the geometric mean of {len(ratios)}; {ratios[0]:.2f} to {ratios[-1]:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--compile", action="store_true", help="torch.compile as well")
    parser.add_argument("--out", type=pathlib.Path)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        one(args.one, args.compile)
        return
    from tests.zoo import ZOO

    given = " ".join([*args.names, *(["--compile"] if args.compile else [])])
    where = (
        f"{machine_name('cpu', torch.get_num_threads())}, torch {torch.__version__}, Python {sys.version.split()[0]}"
    )
    titles = [
        "network",
        "million weights",
        "loss off",
        "step off, eager's",
        "s to first step",
        "ms",
        "eager's",
        "ratio",
    ]
    titles += ["torch.compile's ms, s", "ratio"] if args.compile else []
    lines, rows = ["| " + " | ".join(titles) + " |", "|---" * len(titles) + "|"], []
    for name in args.names or ZOO:
        row = row_of(name, args.compile)
        rows += [row] if "why" not in row else []
        lines.append(line(name, row, args.compile))
        print(lines[-1], flush=True)
    head = [f"`python bench/zoo.py {given}`".replace(" `", "`") + f", {where}; float32.", ""]
    head += [f"Step time: {mean(rows, other)}." for other in ("eager", "compile") if rows and other in rows[0]]
    text = "\n".join([*head, "", *lines, ""])
    print("\n".join(head))
    if args.out:
        args.out.write_text(text)


if __name__ == "__main__":
    main()
