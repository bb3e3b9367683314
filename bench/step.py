"""Training steps against eager PyTorch and torch.compile: time, host time and peak memory.

Run where there is a GPU: `python bench/step.py [--only gpt2:8x1024] [--out DIR]`; `--small` is a dry run on the CPU.
Each system has a process of its own; those of a workload get ready at once and are measured in turns, one at a time.
What was measured before stays in the record (bench/results/step.json) until it is measured again.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import pathlib
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench.turns import Contender, describe, own_command, race, serve  # noqa: E402

SYSTEMS = ("eager", "compile", "reduce-overhead", "wholestep-aten", "wholestep")
WORKLOADS = ("gpt2:8x1024", "gpt2:1x1024", "bert:16x512", "resnet:256")
SMALL = ("gpt2:2x16", "bert:2x16", "resnet:2")
#: workloads whose systems fit into the memory of a GPU together
WAVES = (("gpt2:8x1024", "gpt2:1x1024"), ("bert:16x512",), ("resnet:256",))
#: relative difference of the loss after three steps in bf16 that counts as agreement
TOLERANCE = 0.02

Batch = dict[str, torch.Tensor]
Step = Callable[[], torch.Tensor]
Found = dict[str, Any]


# ---- workloads -------------------------------------------------------------------------------------------------------


@dataclass
class Workload:
    """A model in train mode on its device, and one batch."""

    name: str
    model: nn.Module
    batch: Batch
    adam: bool
    what: str

    def optimizer(self, model: nn.Module, **options: Any) -> torch.optim.Optimizer:
        if self.adam:
            return torch.optim.AdamW(model.parameters(), lr=1e-4, **options)
        return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, **options)


def workload(name: str, device: str, small: bool = False, channels_last: bool = False) -> Workload:
    """For example gpt2:8x1024, bert:16x512 or resnet:256. Weights and data are random, the same every time."""
    import transformers as t

    kind, _, size = name.partition(":")
    rows, length = (int(n) for n in (*size.split("x"), "0")[:2])
    torch.manual_seed(0)
    if kind == "gpt2":
        sizes = {"n_layer": 2, "n_head": 2, "n_embd": 32, "n_positions": 32, "vocab_size": 101} if small else {}
        config = t.GPT2Config(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, attn_implementation="sdpa", **sizes)
        model, vocabulary, what = t.GPT2LMHeadModel(config), config.vocab_size, f"GPT-2, {rows}x{length} tokens, AdamW"
    elif kind == "bert":
        large = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
        tiny = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
        sizes = tiny | {"vocab_size": 101} if small else large
        config = t.BertConfig(
            hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, attn_implementation="sdpa", **sizes
        )
        model, vocabulary = t.BertForMaskedLM(config), config.vocab_size
        what = f"BERT-large, {rows}x{length} tokens, AdamW"
    elif kind == "resnet":
        sizes = {"embedding_size": 8, "hidden_sizes": [16, 16], "depths": [1, 1]} if small else {}
        config = t.ResNetConfig(num_labels=5 if small else 1000, **sizes)
        model = t.ResNetForImageClassification(config)
        what = f"ResNet-50, {rows} images{', channels last' if channels_last else ''}, SGD with momentum"
    else:
        raise SystemExit(f"unknown workload {name!r}: gpt2:8x1024, bert:16x512 and resnet:256 are examples")
    model = model.to(device).train()
    if kind == "resnet":
        pixels = 32 if small else 224
        batch = {
            "pixel_values": torch.randn(rows, 3, pixels, pixels, device=device),
            "labels": torch.randint(0, config.num_labels, (rows,), device=device),
        }
        if channels_last:
            model = model.to(memory_format=torch.channels_last)
            batch["pixel_values"] = batch["pixel_values"].to(memory_format=torch.channels_last)
    else:
        ids = torch.randint(0, vocabulary, (rows, length), device=device)
        batch = {"input_ids": ids, "labels": ids.clone()}
    return Workload(name, model, batch, kind != "resnet", what + (" (tiny)" if small else ""))


# ---- systems ---------------------------------------------------------------------------------------------------------


@dataclass
class Made:
    """A system ready to take steps, and what is to be said of it."""

    step: Step
    notes: dict[str, Any]
    ours: Any = None


def make(system: str, given: Workload, device: str, compile_optimizer: bool = True) -> Made:
    """A training step on a copy of the model. The first call of the step may still compile."""
    start = time.perf_counter()
    model = copy.deepcopy(given.model)
    if system.startswith("wholestep"):
        import wholestep as ws

        who = {"providers": ["aten"]} if system == "wholestep-aten" else {}
        optimizer = given.optimizer(model)
        step = ws.compile(model, lambda m, **b: m(**b).loss, optimizer, given.batch, precision="bf16", **who)
        notes: dict[str, Any] = {"optimizer": "in the step", "compile_seconds": time.perf_counter() - start}
        return Made(lambda: step(**given.batch), notes, step)
    autocast = lambda: torch.autocast(device, torch.bfloat16)  # noqa: E731
    if system == "eager":
        optimizer = given.optimizer(model, fused=True)

        def eager() -> torch.Tensor:
            optimizer.zero_grad(set_to_none=True)
            with autocast():
                loss = model(**given.batch).loss
            loss.backward()
            optimizer.step()
            return loss.detach()

        return Made(eager, {"optimizer": "fused"})
    mode = None if system == "compile" else system
    forward = torch.compile(model, mode=mode)
    fused = not compile_optimizer
    on_device = {"capturable": True} if given.adam and device == "cuda" else {}  # step counters on the device
    optimizer = given.optimizer(model, **({"fused": True} if fused else on_device))
    update = optimizer.step if fused else torch.compile(optimizer.step)
    notes = {"optimizer": "fused" if fused else "torch.compile of step (foreach)", "mode": mode or "default"}

    def compiled() -> torch.Tensor:
        nonlocal optimizer, update, fused
        optimizer.zero_grad(set_to_none=True)
        torch.compiler.cudagraph_mark_step_begin()
        with autocast():
            loss = forward(**given.batch).loss
        loss.backward()
        try:
            update()
        except Exception as error:  # recorded: the baseline then uses torch's fused kernels
            if fused:
                raise
            notes["optimizer"] = f"fused; torch.compile of its step failed: {describe(error)}"
            optimizer, fused = given.optimizer(model, fused=True), True
            update = optimizer.step
            update()
        return loss.detach().clone()

    return Made(compiled, notes)


# ---- measuring -------------------------------------------------------------------------------------------------------


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def seconds_of(step: Step, steps: int, device: str) -> float:
    """Seconds per step of several in a row, by the device's clock where it has one."""
    wait(device)
    if device == "cuda":
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        for _ in range(steps):
            step()
        last.record()
        last.synchronize()
        return first.elapsed_time(last) / 1e3 / steps
    start = time.perf_counter()
    for _ in range(steps):
        step()
    return (time.perf_counter() - start) / steps


def host_seconds(step: Step, device: str) -> float:
    """Seconds until the call of one step returns, with nothing in the device's queue."""
    wait(device)
    start = time.perf_counter()
    step()
    spent = time.perf_counter() - start
    wait(device)
    return spent


def queued_seconds(step: Step, steps: int, device: str) -> float:
    """Seconds per call of several steps that are called without waiting for them."""
    wait(device)
    start = time.perf_counter()
    for _ in range(steps):
        step()
    spent = (time.perf_counter() - start) / steps
    wait(device)
    return spent


def prepare(given: Workload, system: str, device: str, compile_optimizer: bool = True) -> tuple[Found, Step]:
    """A system with its first three steps behind it, and what they showed: losses, and the peak of three more."""
    start = time.perf_counter()
    ready = make(system, given, device, compile_optimizer)
    given.model.to("meta")  # the system has its own copy
    gc.collect()
    losses = [float(ready.step()) for _ in range(3)]
    wait(device)
    found: Found = {"losses": losses, "first_steps_seconds": time.perf_counter() - start}
    if device == "cuda":
        found["allocated_from_start"] = torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()
    for _ in range(3):
        ready.step()
    wait(device)
    if device == "cuda":
        found["allocated"] = torch.cuda.max_memory_allocated()
        found["reserved"] = torch.cuda.max_memory_reserved()
    if ready.ours is not None:
        plan = ready.ours.plan()
        found |= {"planned": plan.peak, "arena": plan.arena, "launches": len(plan.launches)}
    return found | ready.notes, ready.step


def measure(step: Step, device: str) -> Found:
    """One turn: step time, host time with an empty queue, host time per call of several in a row."""
    step()
    return {
        "ms": [seconds_of(step, 5, device) * 1e3 for _ in range(2)],
        "host_us": [host_seconds(step, device) * 1e6 for _ in range(5)],
        "queued_us": queued_seconds(step, 10, device) * 1e6,
    }


def summary(found: Found, eager: Found) -> Found:
    """The row of a system: medians over its turns, and its loss beside eager's."""
    turns = found.pop("turns", [])
    row = dict(found)
    if turns:
        times = sorted(t for turn in turns for t in turn["ms"])
        row |= {
            "ms": statistics.median(times),
            "ms_quartiles": [times[len(times) // 4], times[len(times) * 3 // 4]],
            "host_us": statistics.median(t for turn in turns for t in turn["host_us"]),
            "queued_us": statistics.median(turn["queued_us"] for turn in turns),
            "turns": len(turns),
        }
    if row.get("losses") and eager.get("losses"):
        wanted = eager["losses"][-1]
        row["loss_difference"] = abs(row["losses"][-1] - wanted) / abs(wanted)
        row["agrees"] = row["loss_difference"] <= TOLERANCE
    return row


# ---- processes -------------------------------------------------------------------------------------------------------


def run_contender(options: argparse.Namespace) -> None:
    """The body of a contender: one system of one workload."""
    name, system = options.contender
    compile_optimizer = not options.fused_optimizer

    def ready() -> tuple[Found, Callable[[], Found]]:
        torch.manual_seed(0)
        given = workload(name, options.device, options.small, channels_last=not options.rows_last)
        found, step = prepare(given, system, options.device, compile_optimizer)
        return found | {"what": given.what}, lambda: measure(step, options.device)

    serve(options.folder, ready, sys.stdin)


def run_wave(names: list[str], options: argparse.Namespace, folder: pathlib.Path, deadline: float) -> dict[str, Found]:
    """All systems of some workloads: by workload, a row per system."""
    flags = [f"--{f.replace('_', '-')}" for f in ("small", "rows_last", "fused_optimizer") if getattr(options, f)]
    environ = {"TORCHINDUCTOR_COMPILE_THREADS": str(options.threads)}
    makers: dict[str, Callable[[], Contender]] = {}
    for name in names:
        for system in options.systems:
            command = own_command(__file__, "--contender", name, system, "--device", options.device, *flags)
            place = folder / f"{name.replace(':', '-')}-{system}"
            cache = {"TORCHINDUCTOR_CACHE_DIR": str(place / "inductor")}
            full = f"{name} {system}"
            makers[full] = lambda full=full, command=command, place=place, cache=cache: Contender(  # type: ignore[misc]
                full, command, place, environ | cache
            )
    ready_by = min(deadline, time.time() + options.ready)
    # our kernels are chosen by their measured times: nobody else may use the GPU meanwhile
    found = race(makers, options.turns, ready_by, deadline, quiet=lambda full: full.endswith(" wholestep"))
    rows: dict[str, Found] = {}
    for name in names:
        eager = dict(found.get(f"{name} eager", {}))
        systems = {system: summary(found[f"{name} {system}"], eager) for system in options.systems}
        whats = [row.pop("what") for row in systems.values() if "what" in row]
        rows[name] = {"what": whats[0] if whats else name, "systems": systems}
    return rows


# ---- the record ------------------------------------------------------------------------------------------------------

SAME = ("machine", "torch", "transformers", "python")


def merged(record: Found, file: pathlib.Path) -> Found:
    """The record with what an earlier run on this machine has measured."""
    before = json.loads(file.read_text()) if file.exists() else {}
    if "workloads" not in before or any(before.get(key) != record[key] for key in SAME):
        return record
    workloads: Found = copy.deepcopy(before["workloads"])
    for name, found in record["workloads"].items():
        kept = workloads.setdefault(name, {"systems": {}})
        kept["what"] = found["what"]
        kept["systems"] |= found["systems"]
    return record | {"workloads": workloads}


def save(options: argparse.Namespace, record: Found) -> Found:
    options.out.mkdir(parents=True, exist_ok=True)
    whole = merged(record, options.out / "step.json")
    (options.out / "step.json").write_text(json.dumps(whole, indent=1) + "\n")
    (options.out / "step.md").write_text(page(whole))
    return whole


# ---- the page --------------------------------------------------------------------------------------------------------


def page(record: Found) -> str:
    lines = [
        "# Training steps against eager PyTorch and torch.compile",
        "",
        f"`python bench/step.py` on {record['machine']}, torch {record['torch']}, transformers "
        f"{record['transformers']}, Python {record['python']}.",
        "",
        'bf16: autocast for eager and torch.compile, `precision="bf16"` for Wholestep; *wholestep-aten* has '
        '`providers=["aten"]`, *wholestep* what it takes by itself. Each system has a process of its own; they are '
        "measured in turns, one at a time. Step time: CUDA events over 5 steps in a row, median. Host time: from the "
        "call of a step to its return with an empty queue (*alone*), and per call of 10 in a row (*in a row*, where a "
        "full queue makes the host wait). Memory: `max_memory_allocated` (and reserved) over warm steps. Loss: "
        "relative difference from eager after three steps from the same start. Ready: seconds until the third step was "
        "over, with cold caches and the other systems of the workload getting ready at the same time (*wholestep* "
        "alone).",
    ]
    for found in record["workloads"].values():
        lines += [
            "",
            f"## {found['what']}",
            "",
            "| system | ms per step | quartiles | host us alone | in a row | peak GB | reserved GB | loss | ready s | "
            "optimizer |",
            "|---|---|---|---|---|---|---|---|---|---|",
        ]
        for system in [s for s in SYSTEMS if s in found["systems"]]:
            row = found["systems"][system]
            low, high = row.get("ms_quartiles", (None, None))
            lines.append(
                f"| {system} | {number(row.get('ms'), 2)} | {number(low, 2)} to {number(high, 2)} | "
                f"{number(row.get('host_us'), 0)} | {number(row.get('queued_us'), 0)} | "
                f"{number(row.get('allocated'), 2, 1e9)} | {number(row.get('reserved'), 2, 1e9)} | {loss_text(row)} | "
                f"{number(row.get('first_steps_seconds'), 1)} | "
                f"{'; '.join(str(row[k]) for k in ('error', 'optimizer') if k in row)} |"
            )
        for system, row in found["systems"].items():
            if "planned" in row:
                measured = row.get("allocated")
                beside = (
                    ""
                    if measured is None
                    else f", measured {measured / 1e9:.3f} GB ({measured / row['planned'] - 1:+.2%})"
                )
                lines += [
                    "",
                    f"{system}: planned peak {row['planned'] / 1e9:.3f} GB{beside}, arena {row['arena'] / 1e9:.3f} GB, "
                    f"{row['launches']} launches; compiled in {number(row.get('compile_seconds'), 1)} s.",
                ]
    return "\n".join(lines) + "\n"


def number(value: float | None, digits: int, unit: float = 1.0) -> str:
    return "-" if value is None else f"{value / unit:.{digits}f}"


def loss_text(row: dict[str, Any]) -> str:
    if "loss_difference" not in row:
        return "-"
    return f"{row['loss_difference']:.1e}" + ("" if row["agrees"] else " (disagrees)")


def main(arguments: list[str] | None = None) -> int:
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "bench" / "results")
    parser.add_argument("--only", nargs="+", help=f"workloads, like {' '.join(WORKLOADS)}")
    parser.add_argument("--systems", nargs="+", default=list(SYSTEMS), help=", ".join(SYSTEMS))
    parser.add_argument("--small", action="store_true", help="tiny networks: a dry run")
    parser.add_argument("--rows-last", action="store_true", help="images and kernels as torch lays them out by itself")
    parser.add_argument("--device", default="cuda" if cuda else "cpu", choices=("cpu", "cuda"))
    parser.add_argument("--seconds", type=float, default=400, help="limit for everything")
    parser.add_argument("--ready", type=float, default=120, help="seconds in which a system must get ready")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--threads", type=int, default=4, help="compiling threads of each torch.compile")
    parser.add_argument("--fused-optimizer", action="store_true", help="torch.compile without its optimizer: fused")
    parser.add_argument("--contender", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=pathlib.Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.contender:
        run_contender(options)
        return 0
    names = options.only or list(SMALL if options.small else WORKLOADS)
    strange = [s for s in options.systems if s not in SYSTEMS]
    if strange:
        parser.error(f"unknown system {strange[0]!r}: {', '.join(SYSTEMS)}")
    import transformers

    start = time.time()
    record: Found = {
        "machine": torch.cuda.get_device_name() if options.device == "cuda" else platform.processor() or "CPU",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "workloads": {},
    }
    waves = [[name for name in wave if name in names] for wave in WAVES]
    waves += [[name] for name in names if all(name not in wave for wave in WAVES)]
    with tempfile.TemporaryDirectory() as folder:
        for wave in filter(None, waves):
            if time.time() > start + options.seconds - 15:
                print(f"not run, no time left: {' '.join(wave)}")
                continue
            print(f"[{time.time() - start:.0f} s] {' '.join(wave)}", flush=True)
            record["workloads"] |= run_wave(wave, options, pathlib.Path(folder), start + options.seconds)
            whole = save(options, record)
    if record["workloads"]:
        print(page(whole))
    print(f"{time.time() - start:.0f} s")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
