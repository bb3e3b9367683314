"""What running from a plan costs on a CPU: overhead per launch of the flat loop, and whole steps beside eager PyTorch.

Run on a quiet machine: `python bench/execution.py [--out DIR]`; `--small` is a dry run. bench/results/execution.md
holds the record. Everything that is compared is run in turns, and medians are kept.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import os
import pathlib
import platform
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import wholestep as ws  # noqa: E402
from wholestep.dialects.step import StepBuilder  # noqa: E402
from wholestep.ir.builtin import add_function, finish_function, module  # noqa: E402
from wholestep.ir.types import F32, TensorType  # noqa: E402
from wholestep.machine.describe import describe, usable_cores  # noqa: E402
from wholestep.plan.planner import planned_function  # noqa: E402
from wholestep.runtime.bound import BoundPlan  # noqa: E402

CPU = torch.device("cpu")
#: microseconds per launch that the flat loop may add to the kernels
BAR = 5.0


def in_turns(runs: dict[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each run, one after the other, round by round; the first round is not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    gc.collect()
    gc.disable()
    try:
        for number in range(rounds + 1):
            for name, run in runs.items():
                start = time.perf_counter()
                run()
                if number:
                    seconds[name].append(time.perf_counter() - start)
    finally:
        gc.enable()
    return seconds


# ---- overhead per launch ---------------------------------------------------------------------------------------------


def tiny_launches(count: int) -> BoundPlan:
    """A plan of this many launches, each a kernel on 8 elements."""
    function = add_function(module(), "tiny", [TensorType((8,), F32)])
    (x,) = function.regions[0].block.arguments
    b = StepBuilder(function.regions[0].block, phase="forward")
    y = x
    for number in range(count):
        y = b.tanh(y) if number % 2 else b.add(y, x) if number % 4 else b.mul(y, x)
    finish_function(function, [y])
    bound = BoundPlan(planned_function(function, CPU), CPU, [torch.randn(8)])
    assert len(bound.plan.launches) == len(bound.calls) == count
    return bound


def by_bindings(bound: BoundPlan) -> list[Callable[[], Any]]:
    """The same kernels on the same memory through `torch.add(..., out=)`: the shortest way to them from Python."""
    calls = []
    for (_, args, kwargs), (launch, _) in zip(bound.calls, bound.sites, strict=True):
        calls.append(partial(getattr(torch, launch.name.removeprefix("step.")), *args, **kwargs))
    return calls


def plain_loop(calls: list[Callable[[], Any]]) -> None:
    with torch.no_grad():
        for call in calls:
            call()


def nothing(*args: Any, **kwargs: Any) -> None:
    pass


def launches(count: int, rounds: int) -> dict[str, Any]:
    """Microseconds per launch of the flat loop and of the same kernels in a plain loop."""
    bound = tiny_launches(count)
    same = [partial(call, *args, **kwargs) for call, args, kwargs in bound.calls]
    direct = by_bindings(bound)
    bound.run()
    want = bound.results()[0].clone()
    bound.results()[0].zero_()
    plain_loop(direct)
    assert torch.equal(bound.results()[0], want), "the plain loop must do the same work"
    empty = copy.copy(bound)
    empty.calls = [(nothing, args, kwargs) for _, args, kwargs in bound.calls]
    runs = {
        "loop": bound.run,
        "same": partial(plain_loop, same),
        "direct": partial(plain_loop, direct),
        "empty": empty.run,
    }
    seconds = in_turns(runs, rounds)
    micro = {name: 1e6 * statistics.median(found) / count for name, found in seconds.items()}
    pairs = zip(seconds["loop"], seconds["direct"], strict=True)
    over = sorted(1e6 * (loop - direct) / count for loop, direct in pairs)
    return {
        "launches": count,
        "rounds": rounds,
        "microseconds": micro,
        "overhead": statistics.median(over),
        "overhead_90": over[int(0.9 * len(over))],
        "bar": BAR,
    }


# ---- whole steps -----------------------------------------------------------------------------------------------------


def tiny_layers(small: bool) -> tuple[nn.Module, dict[str, Any]]:
    """Many launches with next to no work: what a step costs beside its kernels."""
    layers = [layer for _ in range(2 if small else 16) for layer in (nn.Linear(8, 8), nn.Tanh())]
    return WithLoss(nn.Sequential(*layers)), {"x": torch.randn(4, 8)}


class WithLoss(nn.Module):
    """A model that returns its loss."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x).pow(2).mean()


def gpt2(small: bool, wide: bool = False) -> tuple[nn.Module, dict[str, Any]]:
    from transformers import GPT2Config, GPT2LMHeadModel

    layers, width, rows, length = (2, 32, 2, 16) if small else (4, 256, 4, 128) if wide else (4, 64, 2, 32)
    config = GPT2Config(
        n_layer=layers,
        n_embd=width,
        n_head=4,
        n_positions=length,
        vocab_size=1024,
        bos_token_id=None,
        eos_token_id=None,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    ids = torch.randint(0, 1024, (rows, length))
    return GPT2LMHeadModel(config), {"input_ids": ids, "labels": ids}


def resnet(small: bool) -> tuple[nn.Module, dict[str, Any]]:
    from transformers import ResNetConfig, ResNetForImageClassification

    depths = [1, 1] if small else [2, 2, 2, 2]
    hidden = [16, 16] if small else [32, 64, 128, 256]
    config = ResNetConfig(num_labels=10, embedding_size=16, hidden_sizes=hidden, depths=depths, layer_type="basic")
    images = {"pixel_values": torch.randn(4, 3, 32 if small else 64, 32 if small else 64)}
    return ResNetForImageClassification(config), {**images, "labels": torch.randint(0, 10, (4,))}


#: name -> network, what the table calls it, rounds
STEPS: dict[str, tuple[Any, str, int]] = {
    "tiny": (tiny_layers, "16 linear layers of width 8, 4 rows", 200),
    "gpt2": (gpt2, "GPT-2, 4 layers of width 64, 2x32 tokens", 60),
    "gpt2-wide": (partial(gpt2, wide=True), "GPT-2, 4 layers of width 256, 4x128 tokens", 20),
    "resnet": (resnet, "ResNet-18 shape, widths 32 to 256, 4 images of 64x64", 20),
}


def eager(model: nn.Module, optimizer: torch.optim.Optimizer, batch: dict[str, Any]) -> float:
    optimizer.zero_grad()
    out = model(**batch)
    loss = out if isinstance(out, torch.Tensor) else out.loss
    loss.backward()
    optimizer.step()
    return float(loss.detach())


def whole_steps(name: str, small: bool) -> dict[str, Any]:
    """Milliseconds of a step from its plan, through the reference executor, and in eager PyTorch; AdamW, float32."""
    make, _, rounds = STEPS[name]
    torch.manual_seed(0)
    model, batch = make(small)
    model.train()
    models = {kind: copy.deepcopy(model) for kind in ("plan", "loop", "reference", "eager")}
    optimizers = {kind: torch.optim.AdamW(m.parameters(), lr=1e-3) for kind, m in models.items()}
    steps = {
        kind: ws.compile(models[kind], None, optimizers[kind], batch, level=level)
        for kind, level in (("plan", 3), ("loop", 3), ("reference", 0))
    }
    losses: dict[str, list[float]] = {kind: [] for kind in models}

    def compiled(kind: str) -> None:
        out = steps[kind](**batch)
        losses[kind].append(float(out if isinstance(out, torch.Tensor) else out.loss))

    runs: dict[str, Callable[[], Any]] = {
        "plan": partial(compiled, "plan"),
        "reference": partial(compiled, "reference"),
        "eager": lambda: losses["eager"].append(eager(models["eager"], optimizers["eager"], batch)),
    }
    for run in (*runs.values(), partial(compiled, "loop")):  # the first step binds and makes optimizer state
        run()
    static = steps["loop"]._compiled.static
    assert static is not None and static.bound is not None
    runs["loop"] = static.bound.run  # of a model of its own: it trains on, with the numbers of its first step
    seconds = in_turns(runs, 3 if small else rounds)
    assert losses["plan"] == losses["reference"], "the plan must give the reference executor's bits"
    apart = max(abs(a - b) / abs(b) for a, b in zip(losses["plan"], losses["eager"], strict=True))
    milli = {kind: 1e3 * statistics.median(found) for kind, found in seconds.items()}
    count = len(steps["plan"].plan().launches)
    return {
        "launches": count,
        "calls": len(static.bound.calls),
        "milliseconds": milli,
        "plan_against_eager": ratio(seconds["plan"], seconds["eager"]),
        "plan_against_reference": ratio(seconds["plan"], seconds["reference"]),
        "loss_apart_from_eager": apart,
    }


def ratio(one: list[float], other: list[float]) -> float:
    """The median of the ratios of neighbouring runs."""
    return statistics.median(a / b for a, b in zip(one, other, strict=True))


# ---- the record ------------------------------------------------------------------------------------------------------


def report(record: dict[str, Any]) -> str:
    """The record as a page."""
    tiny = record["launches"]
    micro = tiny["microseconds"]
    verdict = "holds" if tiny["overhead"] < BAR else "does NOT hold"
    lines = [
        "# Running from a plan on a CPU",
        "",
        f"{record['machine']}, 1 thread; torch {record['torch']}, Python {record['python']}. Written by "
        f"`{record['command']}`; load of the machine when it began: {record['load']:.2f}.",
        "",
        "## Overhead per launch",
        "",
        f"A plan of {tiny['launches']} launches on 8 elements each. *Flat loop* is what runs a step; *same calls* are "
        "its calls as `functools.partial` objects in a plain Python loop; *torch.add(..., out=)* are the same "
        "kernels on the same memory through torch's own bindings, the shortest way to them from Python; *empty* is the "
        f"flat loop with calls that do nothing. In turns, medians of {tiny['rounds']} rounds.",
        "",
        "| | microseconds per launch |",
        "|---|---:|",
        f"| flat loop | {micro['loop']:.2f} |",
        f"| same calls, plain loop | {micro['same']:.2f} |",
        f"| torch.add(..., out=), plain loop | {micro['direct']:.2f} |",
        f"| empty flat loop | {micro['empty']:.2f} |",
        f"| **overhead: flat loop over torch.add(..., out=)** | **{tiny['overhead']:.2f}** |",
        f"| the same, 90th percentile | {tiny['overhead_90']:.2f} |",
        "",
        f"The bar of {BAR:g} microseconds {verdict}.",
        "",
        "## Whole steps",
        "",
        "Float32, AdamW, one batch again and again. *Plan* is `level=3`, *reference* `level=0`; *loop* is the "
        "flat loop alone, and the rest of *plan* what a call does beside it: checks, the batch, counters, results. "
        "The loop trains a model of its own, so that a few percent between the two say nothing. "
        "Ratios are medians over neighbouring runs. Plan and reference gave the same losses to the last bit.",
        "",
        "| network | launches | plan ms | loop ms | reference ms | eager ms | plan / reference | plan / eager |"
        " losses apart from eager |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for name, row in record["steps"].items():
        milli = row["milliseconds"]
        lines.append(
            f"| {STEPS[name][1]} | {row['launches']} | {milli['plan']:.2f} | {milli['loop']:.2f} | "
            f"{milli['reference']:.2f} | {milli['eager']:.2f} | {row['plan_against_reference']:.2f} | "
            f"{row['plan_against_eager']:.2f} | {row['loss_apart_from_eager']:.1e} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "bench" / "results")
    parser.add_argument("--small", action="store_true", help="tiny sizes: a dry run")
    options = parser.parse_args()
    load = os.getloadavg()[0]
    torch.set_num_threads(1)
    torch.manual_seed(0)
    record: dict[str, Any] = {
        "command": "python bench/execution.py" + (" --small" if options.small else ""),
        "machine": f"{describe().cpu}, {usable_cores()} cores",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "load": load,
        "launches": launches(400, 20 if options.small else 300),
        "steps": {},
    }
    print(json.dumps(record["launches"]), flush=True)
    for name in STEPS:
        record["steps"][name] = whole_steps(name, options.small)
        print(name, json.dumps(record["steps"][name]), flush=True)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "execution.json").write_text(json.dumps(record, indent=1) + "\n")
    (options.out / "execution.md").write_text(report(record))


if __name__ == "__main__":
    main()
