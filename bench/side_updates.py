"""Updates beside backward (`side-updates`) against the same step without them: time and memory, in turns.

GPT-2 at 8x1024 and BERT-large with 8 layers at 16x512, bf16, AdamW. Both steps start from the same weights and see the
same batches; losses and parameters must be equal bit by bit, or no time is counted. `python bench/side_updates.py
[--networks gpt2 ...] [--out FILE.json]` on a GPU, in about a minute. Without one: `--dry` walks the same path on a CPU
at tiny sizes, where both are the step without them.
"""

from __future__ import annotations

import argparse
import gc
import json
import pathlib
import statistics
import sys
import time
from dataclasses import dataclass
from typing import Any

import torch

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import wholestep as ws  # noqa: E402
from bench.networks import Network, build  # noqa: E402
from bench.networks.bert_large import DIMENSIONS  # noqa: E402
from wholestep.plan.side import SIDE  # noqa: E402

#: steps that are compared, rounds of timing, steps of one variant in a round
CHECKED, ROUNDS, STEPS = 8, 9, 10
EIGHT = "eight layers"
VARIANTS = {"plain": (), "side-updates": ("side-updates *",)}


@dataclass
class Variant:
    """One way to run the step, with what it gave so far."""

    network: Network
    step: ws.TrainStep
    losses: list[float]
    #: all bytes that were taken at once for it, its parameters included; 0 where there is no GPU
    peak: int
    seconds: float


def compiled(name: str, size: str, device: str, force: tuple[str, ...]) -> Variant:
    """A step from its first weights on, after the steps that are compared."""
    cuda = device == "cuda"
    gc.collect()
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() if cuda else 0
    start = time.perf_counter()
    network = build(name, size, device)
    optimizer, _ = network.optimizer(network.model)
    batch = network.make_batch(0, device)
    step = ws.compile(network.model, network.loss_fn, optimizer, batch, precision="bf16", force=force if cuda else ())
    seconds = time.perf_counter() - start
    losses = [float(step(*network.make_batch(seed, device))) for seed in range(CHECKED)]
    peak = torch.cuda.max_memory_allocated() - before if cuda else 0
    return Variant(network, step, losses, peak, seconds)


def milliseconds(variant: Variant, batch: Any, cuda: bool) -> float:
    """Of one step, as the mean of some in a row."""
    if not cuda:
        start = time.perf_counter()
        for _ in range(STEPS):
            variant.step(*batch)
        return (time.perf_counter() - start) * 1e3 / STEPS
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    first.record()
    for _ in range(STEPS):
        variant.step(*batch)
    last.record()
    torch.cuda.synchronize()
    return first.elapsed_time(last) / STEPS


def plan_of(variant: Variant) -> dict[str, Any]:
    """What the plan says: launches on the side stream, and how many others each of them may run beside."""
    plan = variant.step._compiled.planned.plan
    main = [not x.stream and x.provider not in ("host", "wait") for x in plan.launches]
    waits = [(x.waits[0], p) for p, x in enumerate(plan.launches) if x.provider == "wait"]
    return {
        "launches": sum(main) + sum(x.stream == SIDE for x in plan.launches),
        "beside": [sum(main[start:end]) for start, end in waits if plan.launches[start].stream == SIDE],
        "arena": plan.arena,
        "by": variant.step.report().execution["by"],
    }


def race(name: str, size: str, device: str) -> dict[str, Any]:
    """Both variants of one network; without times where they do not agree."""
    found = {label: compiled(name, size, device, force) for label, force in VARIANTS.items()}
    plain, side = found.values()
    pairs = zip(plain.network.model.parameters(), side.network.model.parameters(), strict=True)
    different = sum(not torch.equal(a, b) for a, b in pairs)
    record: dict[str, Any] = {"network": name, "items": plain.network.items, "different_parameters": different}
    record["equal"] = plain.losses == side.losses and not different
    times: dict[str, list[float]] = {label: [] for label in found}
    batch = plain.network.make_batch(CHECKED, device)
    for _ in range(ROUNDS if record["equal"] else 0):
        for label, variant in found.items():
            times[label].append(milliseconds(variant, batch, device == "cuda"))
    for label, variant in found.items():
        record[label] = {
            "ms": statistics.median(times[label]) if times[label] else None,
            "all_ms": times[label],
            "peak": variant.peak,
            "losses": variant.losses,
            "compile_seconds": variant.seconds,
            **plan_of(variant),
        }
    return record


def line(record: dict[str, Any], label: str) -> str:
    found = record[label]
    ms = "not counted" if found["ms"] is None else f"{found['ms']:9.3f} ms"
    beside = found["beside"]
    hidden = f"{len(beside)} launches beside {sum(beside) / len(beside):.0f} others each" if beside else "one stream"
    sizes = f"{found['peak'] / 1e9:6.2f} GB, arena {found['arena'] / 1e9:6.2f} GB"
    return f"  {label:13} {ms}  {sizes}  {hidden}; {found['by']}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="+", default=["gpt2", "bert_large"], choices=["gpt2", "bert_large"])
    parser.add_argument("--out", type=pathlib.Path)
    parser.add_argument("--dry", action="store_true", help="on a CPU, at tiny sizes")
    options = parser.parse_args()
    DIMENSIONS[EIGHT] = (*DIMENSIONS["full"][:4], 8, DIMENSIONS["full"][5])
    records = []
    for name in options.networks:
        size = "tiny" if options.dry else EIGHT if name == "bert_large" else "full"
        record = race(name, size, "cpu" if options.dry else "cuda")
        records.append(record)
        same = "losses and parameters equal" if record["equal"] else "NOT EQUAL"
        print(f"{name} {size}, {record['items']}: {same} after {CHECKED} steps")
        print("\n".join(line(record, label) for label in VARIANTS), flush=True)
        gc.collect()
        if not options.dry:
            torch.cuda.empty_cache()
    if options.out is not None:
        device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
        about = {"device": device, "torch": torch.__version__, "rounds": ROUNDS, "steps": STEPS}
        options.out.write_text(json.dumps({**about, "records": records}, indent=1) + "\n", encoding="utf-8")
    if not all(record["equal"] for record in records):
        sys.exit("the steps do not agree")


if __name__ == "__main__":
    main()
