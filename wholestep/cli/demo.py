"""`wholestep demo`: trains a small GPT twice from the same weights on the same batches, eagerly and compiled.

It prints both losses side by side, the program's size by phase, and where the time went. Every number is measured here.
"""

from __future__ import annotations

import argparse
import copy
import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from wholestep.cli.console import Console
from wholestep.cli.tiny_gpt import Shape, TinyGPT, batches, loss_fn, standard_library_text
from wholestep.errors import InputError

LEARNING_RATE = 1e-3
CLIP_NORM = 1.0
# Rounding in another order grows as training goes on; beyond this the two runs are not the same training any more.
TOLERANCE = 1e-2
_CLOSING_SECONDS = 1.0  # kept for what is printed at the end


@dataclass
class Run:
    """One training run: a loss and a wall time per step."""

    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    @property
    def step_seconds(self) -> float:
        """Median, without the first steps, which still warm caches up."""
        return median(self.seconds[3:] or self.seconds)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=_positive_int, help="train exactly so many steps (default: what fits the time)")
    parser.add_argument("--seconds", type=_positive, default=60.0, help="time for everything (default: 60)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights and batches (default: 0)")
    parser.add_argument("--program", metavar="FILE", help="write the program's text there")
    parser.add_argument("--text", metavar="FILE", help="train on this file instead of the standard library's sources")


def run(args: argparse.Namespace, shape: Shape | None = None) -> int:
    import wholestep as ws

    began = time.perf_counter()
    console, shape = Console(), shape or Shape()
    text = _text(args.text, console)
    torch.manual_seed(args.seed)
    eager_model = TinyGPT(shape)
    model = copy.deepcopy(eager_model)
    count = sum(parameter.numel() for parameter in model.parameters())
    console.line(
        f"model: a GPT of {count:,} parameters, {shape.layers} layers, width {shape.width}; "
        f"batches of {shape.batch} x {shape.context} bytes; AdamW, gradients clipped to norm {CLIP_NORM:g}"
    )

    console.line("compiling the whole training step ...")
    example = next(batches(text, shape, args.seed))
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    compile_began = time.perf_counter()
    step = ws.compile(model, loss_fn, optimizer, example, clip_norm=CLIP_NORM)
    compile_seconds = time.perf_counter() - compile_began
    if args.program:
        _write(args.program, str(step.program()))

    left = args.seconds - _CLOSING_SECONDS - (time.perf_counter() - began)
    budget = math.inf if args.steps else max(left, 2.0) / 2
    eager = train(console, "eager", eager_step(eager_model), batches(text, shape, args.seed), args.steps, budget)
    steps = len(eager.losses)
    compiled = train(console, "compiled", step, batches(text, shape, args.seed), steps, math.inf)

    difference = show_losses(console, eager, compiled)
    show_program(console, step.report(), compile_seconds)
    show_times(console, eager, compiled, shape)
    show_next(console, args.program)
    console.line(f"\n{steps} steps each way, {time.perf_counter() - began:.0f} s in all")
    if not difference <= TOLERANCE:
        console.line(f"WARNING: the losses differ by more than {TOLERANCE:g}; this is a bug of ours, please report it")
        return 1
    return 0


def eager_step(model: nn.Module) -> Callable[..., Tensor]:
    """The same step in plain PyTorch."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)

    def step(*batch: Tensor) -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss = loss_fn(model, *batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        optimizer.step()
        return loss.detach()

    return step


def train(console: Console, what: str, step: Callable[..., Tensor], data: Any, steps: int | None, budget: float) -> Run:
    """Run `steps` steps, or where that is None as many as `budget` seconds hold."""
    run, began = Run(), time.perf_counter()
    with console.progress(what, total=steps or budget) as bar:
        while len(run.losses) < steps if steps else not run.losses or time.perf_counter() - began < budget:
            batch = next(data)
            start = time.perf_counter()
            run.losses.append(float(step(*batch)))
            run.seconds.append(time.perf_counter() - start)
            done = len(run.losses) if steps else min(budget, time.perf_counter() - began)
            bar.update(done, f"step {len(run.losses)}  loss {run.losses[-1]:.4f}")
    return run


def show_losses(console: Console, eager: Run, compiled: Run) -> float:
    """Both losses at some steps; returns the largest relative difference over all of them."""
    differences = [relative_difference(a, b) for a, b in zip(eager.losses, compiled.losses, strict=True)]
    largest = max(differences, key=lambda value: math.inf if math.isnan(value) else value)
    console.heading("Loss (nats per byte)")
    rows = [
        (str(at + 1), f"{eager.losses[at]:.6f}", f"{compiled.losses[at]:.6f}", f"{differences[at]:.1e}")
        for at in milestones(len(differences))
    ]
    console.table(("step", "eager", "compiled", "relative difference"), rows, left=0)
    console.line(f"largest relative difference over all {len(differences)} steps: {largest:.1e}")
    return largest


def show_program(console: Console, report: Any, compile_seconds: float) -> None:
    console.heading("The program")
    total = sum(report.ops.values())
    rows = [(phase, f"{count:,}") for phase, count in report.ops.items()]
    console.table(("phase", "operations"), [*rows, ("whole step", f"{total:,}")])
    console.heading("Compile time")
    rows = [(phase, f"{seconds:.2f}") for phase, seconds in report.seconds.items()]
    console.table(("phase", "seconds"), [*rows, ("in all, on the clock", f"{compile_seconds:.2f}")])


def show_times(console: Console, eager: Run, compiled: Run, shape: Shape) -> None:
    console.heading("Step time (median)")
    rows = []
    for name, run in (("eager", eager), ("compiled", compiled)):
        rate = shape.batch * shape.context / run.step_seconds
        rows.append(
            (name, f"{1e3 * run.step_seconds:.1f}", f"{rate:,.0f}", f"{eager.step_seconds / run.step_seconds:.2f}")
        )
    console.table(("", "ms", "bytes of text per second", "speed against eager"), rows)


def show_next(console: Console, program: str | None) -> None:
    console.heading("Where to look next")
    command, file = this_command(), program or "step.mlir"
    rows = [] if program else [(f"{command} demo --steps 1 --program {file}", "write the program as MLIR text")]
    rows += [
        (f"{command} opt {file} --passes cse,dce", "run passes on that text"),
        (f"{command} opt --list", "the passes there are"),
        (f"{command} doctor", "what this machine can do"),
        ("README.md, docs/architecture.md", "your own model in a few lines; how Wholestep is built"),
    ]
    console.table(("where", "what"), rows, left=2)


def this_command() -> str:
    """How to call Wholestep again from here, the way it was called now."""
    if Path(sys.argv[0]).name == "wholestep":
        return "wholestep"
    python = Path(sys.executable)
    return f"{python.relative_to(Path.cwd()) if python.is_relative_to(Path.cwd()) else python} -m wholestep"


def milestones(count: int) -> list[int]:
    """Indices of the steps to show: 1, 2, 5, 10, 20, 50, ... and the last."""
    rounds = (mantissa * 10**power for power in range(len(str(count))) for mantissa in (1, 2, 5))
    return sorted({step - 1 for step in rounds if step <= count} | {count - 1})


def relative_difference(a: float, b: float) -> float:
    return 0.0 if a == b else abs(a - b) / max(abs(a), abs(b))


def _text(file: str | None, console: Console) -> bytes:
    if file is None:
        text, files = standard_library_text()
        console.line(f"text: {len(text):,} bytes from {files} source files of the Python standard library")
        return text
    try:
        text = Path(file).read_bytes()
    except OSError as error:
        raise InputError(f"cannot read {file}: {error.strerror}") from error
    console.line(f"text: {len(text):,} bytes from {file}")
    return text


def _write(file: str, text: str) -> None:
    try:
        Path(file).write_text(text if text.endswith("\n") else text + "\n", encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot write {file}: {error.strerror}") from error


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return value


def _positive_int(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive whole number")
    return value
