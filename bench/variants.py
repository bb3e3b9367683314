"""Other ways to run the same step against the plain one: results, time and memory, in turns.

GPT-2 at 8x1024, bf16, AdamW: updates beside backward (`side-updates`), values that wait in host memory (`offload`), and
the plain step once more: whether it repeats itself. With gradients clipped by their norm: updates in the next forward,
and beside it. By ATen's kernels alone, op by op: the reference executor, and a
step that computes again what it has no room to keep, against the plan. All start from the same weights and see the
same batches; losses and parameters must be those of the step they are compared with bit by bit. Libraries'
attention adds gradients up in no fixed order, so that a step may not repeat itself: then losses must be about as near
as those of the plain step once more. Else no time is counted. Every variant is compiled once before, so that all see
what was measured for any of them.
`python bench/variants.py [--networks gpt2 ...] [--out FILE.md]` on a GPU, in two minutes; with `--deterministic` by
kernels that add up in a fixed order alone, where bits must be the same. Without a GPU: `--dry` walks the same path on a
CPU at tiny sizes, where what needs a GPU is the first of its kind.
"""

from __future__ import annotations

import argparse
import collections
import copy
import gc
import os
import pathlib
import statistics
import sys
import time
from collections.abc import Iterable
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
#: where the plain step does not repeat itself: how many times as far from it another may be, and how far at most
NEAR, MOST = 4.0, 1e-4
PLAIN, AGAIN, ATEN, CLIPPED = "plain", "plain again", "ATen", "clipped"
#: a plan of the program's own ops by ATen's kernels: what its order and its addresses must not change
UNCHANGED: dict[str, Any] = {"providers": ["aten"], "unchanged": True}
EIGHT = "eight layers"
VARIANTS: dict[str, dict[str, Any]] = {
    PLAIN: {},
    AGAIN: {},
    "side-updates": {"force": ("side-updates *",)},
    "offload": {"force": ("offload *.mlp.act/forward/*",), "level": 4},
    CLIPPED: {"clip_norm": 1.0},
    f"{CLIPPED}, updates in the next forward": {"clip_norm": 1.0, "updates": "in_next_forward"},
    f"{CLIPPED}, updates beside the next forward": {"clip_norm": 1.0, "updates": "beside_next_forward"},
    ATEN: UNCHANGED,
    "ATen, by the reference executor": {"providers": ["aten"], "level": 0},
    "ATen, less memory": {**UNCHANGED, "memory_budget": 0.9},
}
#: those that make no difference without a GPU, or need one: there they are the first of their kind
CUDA_ONLY = {"side-updates": PLAIN, "offload": PLAIN, f"{CLIPPED}, updates beside the next forward": CLIPPED}


@dataclass
class Variant:
    """One way to run the step, with what it gave so far."""

    network: Network
    step: ws.TrainStep
    losses: list[float]
    #: all bytes that were taken at once for it, its parameters included; 0 where there is no GPU
    peak: int
    seconds: float


def compiled(name: str, size: str, device: str, options: dict[str, Any]) -> Variant:
    """A step from its first weights on, after the steps that are compared."""
    cuda = device == "cuda"
    gc.collect()
    if cuda:
        torch.cuda.synchronize()
    before = torch.cuda.memory_allocated() if cuda else 0
    start = time.perf_counter()
    network = build(name, size, device)
    optimizer, _ = network.optimizer(network.model)
    batch = network.make_batch(0, device)
    how = {"precision": "bf16", **options}
    if how.pop("unchanged", False):  # what is done to the program by itself is what is forbidden
        usual = how | {"memory_budget": None}
        how["forbid"] = ws.compile(network.model, network.loss_fn, optimizer, batch, **usual).recipe
    step = ws.compile(network.model, network.loss_fn, optimizer, batch, **how)
    seconds = time.perf_counter() - start
    if cuda:
        torch.cuda.reset_peak_memory_stats()  # (what compiling takes is given back)
    losses = [float(step(*network.make_batch(seed, device))) for seed in range(CHECKED)]
    step.flush()
    peak = torch.cuda.max_memory_allocated() - before if cuda else 0
    return Variant(network, step, losses, peak, seconds)


def repeats(variant: Variant, device: str) -> dict[str, Any]:
    """The same steps twice, from one checkpoint, by one compiled step: how far apart they are."""
    step, found = variant.step, []
    start = copy.deepcopy(step.state_dict())
    for _ in range(2):
        step.load_state_dict(start)
        losses = [float(step(*variant.network.make_batch(seed, device))) for seed in range(CHECKED)]
        step.flush()
        found.append((losses, [p.detach().clone() for p in variant.network.model.parameters()]))
    (one, here), (two, there) = found
    return apart(one, two, here, there)


def apart(one: list[float], two: list[float], here: Iterable[torch.Tensor], there: Iterable[torch.Tensor]) -> Any:
    """How far losses are from others, and how many parameters differ."""
    far = max(abs(a - b) / abs(a) for a, b in zip(one, two, strict=True))
    return {"far": far, "different": sum(not torch.equal(a, b) for a, b in zip(here, there, strict=True))}


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
    """What the plan says: launches on other streams, how many others each of them may run beside, what goes where."""
    planned, by = variant.step._compiled.planned, variant.step.report().execution["by"]
    if planned is None:
        return {"streams": {}, "beside": [], "arena": 0, "host": 0, "by": by}
    plan = planned.plan
    main = [not x.stream and x.provider not in ("host", "wait") for x in plan.launches]
    waits = [(x.waits[0], p) for p, x in enumerate(plan.launches) if x.provider == "wait"]
    return {
        "streams": collections.Counter(x.stream for x in plan.launches if x.stream),
        "beside": [sum(main[start:end]) for start, end in waits if plan.launches[start].stream == SIDE],
        "arena": plan.arena,
        "host": plan.bytes_in("pinned"),
        "by": by,
    }


def differently_chosen(plain: ws.TrainStep, other: ws.TrainStep) -> int:
    """Regions of both steps that run in different ways."""
    one, two = ({} if s.choices is None else s.choices.known for s in (plain, other))
    return sum((one[k].provider, one[k].offer) != (two[k].provider, two[k].offer) for k in one.keys() & two.keys())


def race(name: str, size: str, device: str) -> dict[str, Any]:
    """All variants of one network; without times where they do not agree with the first."""
    variants = {k: VARIANTS[CUDA_ONLY.get(k, k) if device == "cpu" else k] for k in VARIANTS}
    for options in variants.values():
        compiled(name, size, device, options)
    found: dict[str, Variant] = {}
    record: dict[str, Any] = {"network": name, "variants": {}}
    for label, options in variants.items():
        variant = found[label] = compiled(name, size, device, options)
        base = found[next((kind for kind in (ATEN, CLIPPED) if label.startswith(kind)), PLAIN)]
        models = (v.network.model.parameters() for v in (base, variant))
        found_apart = apart(base.losses, variant.losses, *models)
        record["variants"][label] = found_apart | {"chosen": differently_chosen(base.step, variant.step)}
    noise = record["variants"][AGAIN]
    for each in record["variants"].values():
        each["equal"] = not each["far"] and not each["different"]
        near = each["far"] <= min(NEAR * noise["far"], MOST)
        repeats_itself = torch.are_deterministic_algorithms_enabled() or not noise["different"]
        each["counts"] = each["equal"] or (near and not repeats_itself)
    plain = found[PLAIN]
    record["itself"] = repeats(plain, device)
    record["items"] = plain.network.items
    times: dict[str, list[float]] = {label: [] for label in found}
    batch = plain.network.make_batch(CHECKED, device)
    for _ in range(ROUNDS):
        for label, variant in found.items():
            if record["variants"][label]["counts"]:
                times[label].append(milliseconds(variant, batch, device == "cuda"))
    for label, variant in found.items():
        ms = statistics.median(times[label]) if times[label] else None
        record["variants"][label] |= {"ms": ms, "peak": variant.peak, "seconds": variant.seconds, **plan_of(variant)}
    return record


def row(label: str, found: dict[str, Any]) -> str:
    agree = "bit for bit"
    if not found["equal"]:
        how = "as near as it is to itself" if found["counts"] else "NOT"
        agree = f"{how}: losses {found['far']:.1e}, {found['different']} parameters"
    if found["chosen"]:
        agree += f"; {found['chosen']} kernels differ"
    ms = "not counted" if found["ms"] is None else f"{found['ms']:.3f}"
    beside = found["beside"]
    hidden = f"{len(beside)} launches beside {sum(beside) / len(beside):.0f} others each" if beside else ""
    streams = ", ".join(
        [f"{count} on {stream}" for stream, count in found["streams"].items()] + [hidden] * bool(hidden)
    )
    sizes = f"{found['peak'] / 1e9:.3f} | {found['arena'] / 1e9:.3f} | {found['host'] / 1e9:.3f}"
    return f"| {label} | {agree} | {ms} | {sizes} | {streams or 'one stream'}; {found['by']} | {found['seconds']:.1f} |"


def page(records: list[dict[str, Any]]) -> str:
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    lines = [
        "# Other ways to run the same step",
        "",
        f"`python {' '.join(['bench/variants.py', *sys.argv[1:]])}` on {device}, torch {torch.__version__}, bf16.",
        f"{CHECKED} steps are compared; ms is the median of {ROUNDS} rounds of {STEPS} steps, in turns.",
    ]
    for record in records:
        lines += ["", f"## {record['network']}, {record['items']}", ""]
        lines += [
            "| | as the one it is compared with | ms | peak GB | arena GB | host GB | streams | compile s |",
            "|" + "---|" * 8,
        ]
        lines += [row(label, found) for label, found in record["variants"].items()]
        far, different = record["itself"]["far"], record["itself"]["different"]
        words = f"losses {far:.1e} apart, {different} parameters differ" if far or different else "bit for bit the same"
        lines += ["", f"The plain step itself, {CHECKED} steps twice from one checkpoint: {words}."]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="+", default=["gpt2"], choices=["gpt2", "bert_large"])
    parser.add_argument("--out", type=pathlib.Path)
    parser.add_argument("--dry", action="store_true", help="on a CPU, at tiny sizes")
    parser.add_argument("--deterministic", action="store_true", help="by kernels that add up in a fixed order alone")
    options = parser.parse_args()
    if options.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what cuBLAS asks for then
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # it would take time, and graphs would hold it
    DIMENSIONS[EIGHT] = (*DIMENSIONS["full"][:4], 8, DIMENSIONS["full"][5])
    records = []
    for name in options.networks:
        size = "tiny" if options.dry else EIGHT if name == "bert_large" else "full"
        records.append(race(name, size, "cpu" if options.dry else "cuda"))
        gc.collect()
    text = page(records)
    print(text)
    if options.out is not None:
        options.out.write_text(text, encoding="utf-8")
    if not all(found["counts"] for record in records for found in record["variants"].values()):
        sys.exit("the steps do not agree")


if __name__ == "__main__":
    main()
