"""Seconds from `ws.compile` to the end of the first step: with an empty cache, then in processes that find it full.

`python bench/warm_compile.py [gpt2@full ...] [--out FILE.md]`: on a GPU in bf16 at full size, else in fp32 at the size
for CPUs. Each line is a process of its own; a case's share one new cache folder. Exits 1 where a bar is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import platform
import subprocess
import sys
import tempfile
import time
from typing import Any

import torch

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench.networks import build  # noqa: E402
from bench.networks.curves import compiled  # noqa: E402
from wholestep.machine.describe import describe  # noqa: E402

#: seconds to the end of the first step, with a full cache
BARS = {"gpt2": 5.0}
KINDS = ("cold", "warm", "warm again")


def once(case: str, device: str) -> dict[str, Any]:
    """One process's answer: seconds in all, by phase, and of the first step."""
    name, _, size = case.partition("@")
    network = build(name, size, device)
    batch = network.make_batch(0, device)
    start = time.perf_counter()
    trainer = compiled(network, network.model, precision="bf16" if device == "cuda" else "fp32")
    ready = time.perf_counter()
    loss = float(trainer.step(batch))
    end = time.perf_counter()
    assert trainer.whole is not None
    found = {"phases": trainer.whole.report().seconds, "compile": ready - start, "first step": end - ready}
    return found | {"seconds": end - start, "loss": loss}


def apart(case: str, device: str, cache: str) -> dict[str, Any]:
    """`once` in a fresh process."""
    command = [sys.executable, __file__, case, "--once", device]
    done = subprocess.run(command, env=os.environ | {"WHOLESTEP_CACHE": cache}, stdout=subprocess.PIPE, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def missed(case: str, rows: dict[str, dict[str, Any]]) -> bool:
    bar = BARS.get(case.partition("@")[0], float("inf"))
    return any(row["seconds"] > bar for kind, row in rows.items() if kind != "cold")


def page(where: str, command: str, found: dict[str, dict[str, dict[str, Any]]]) -> str:
    lines = [
        "# Compiling the same step again",
        "",
        f"`{command}` on {where}, torch {torch.__version__}, Python {platform.python_version()}. Seconds from",
        "the call of `ws.compile` to the end of the first step; each line is a fresh process, those of a network share",
        "one cache folder.",
        "",
        "| network | cache | in all (bar) | compile | first step | phases |",
        "|---|---|---|---|---|---|",
    ]
    for case, rows in found.items():
        for kind, row in rows.items():
            bar = BARS.get(case.partition("@")[0])
            limit = f" (≤ {bar:g})" if bar is not None and kind != "cold" else ""
            phases = ", ".join(f"{phase} {seconds:.2f}" for phase, seconds in row["phases"].items())
            times = f"{row['seconds']:.2f}{limit} | {row['compile']:.2f} | {row['first step']:.2f}"
            lines.append(f"| {case} | {kind} | {times} | {phases} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", default=["gpt2@full" if device == "cuda" else "gpt2@cpu"])
    parser.add_argument("--out", type=pathlib.Path)
    parser.add_argument("--once", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.once:
        print(json.dumps(once(options.cases[0], options.once)))
        return 0
    found = {}
    for case in options.cases:
        with tempfile.TemporaryDirectory() as cache:
            found[case] = {kind: apart(case, device, cache) for kind in KINDS}
    machine = describe()
    where = torch.cuda.get_device_name() if device == "cuda" else f"{machine.cpu}, {machine.cores} cores"
    text = page(where, " ".join(["python", "bench/warm_compile.py", *sys.argv[1:]]), found)
    print(text)
    if options.out:
        options.out.write_text(text)
    return int(any(missed(case, rows) for case, rows in found.items()))


if __name__ == "__main__":
    sys.exit(main())
