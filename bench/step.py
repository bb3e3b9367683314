"""Training steps against eager PyTorch and torch.compile: time, host time and peak memory, in one run.

Run where there is a GPU: `python bench/step.py [--out DIR]`; `--small` is a dry run on the CPU. Time and host time: one
process per workload in which all systems take turns. Memory: a process of its own per workload and system. The memory
processes run first, a few at once, and fill the caches of torch.compile. bench/results/step.md holds the record.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import os
import pathlib
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

SYSTEMS = ("eager", "compile", "reduce-overhead", "wholestep")
WORKLOADS = ("gpt2:8x1024", "gpt2:1x1024", "bert:16x512", "resnet:256")
SMALL = ("gpt2:2x16", "bert:2x16", "resnet:2")
#: GB that a memory process of a full-size workload may need: how many run at once
GIGABYTES = {"gpt2:8x1024": 30, "gpt2:1x1024": 8, "bert:16x512": 30, "resnet:256": 35}
ROOM = 120
#: relative difference of the loss after three steps in bf16 that counts as agreement
TOLERANCE = 0.02

Batch = dict[str, torch.Tensor]
Step = Callable[[], torch.Tensor]


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
    if system == "wholestep":
        import wholestep as ws

        step = ws.compile(model, lambda m, **b: m(**b).loss, given.optimizer(model), given.batch, precision="bf16")
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


def describe(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:300]}"


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


class Rounds:
    """Systems that take turns; keeps what was found of each, ready to be written down at any time."""

    def __init__(self, given: Workload, device: str, deadline: float, keep: Callable[[dict[str, Any]], None]):
        self.given, self.device, self.deadline, self.keep = given, device, deadline, keep
        self.made: dict[str, Made] = {}
        self.found: dict[str, Any] = {}

    def prepare(self, system: str, compile_optimizer: bool) -> None:
        """Compiles a system and takes its first three steps."""
        start = time.perf_counter()
        if time.time() > self.deadline:
            self.found[system] = {"error": "not run: no time left"}
            return
        try:
            ready = make(system, self.given, self.device, compile_optimizer)
            losses = [float(ready.step()) for _ in range(3)]
            wait(self.device)
        except Exception as error:
            traceback.print_exc()
            self.found[system] = {"error": describe(error)}
            return
        seconds = time.perf_counter() - start
        self.found[system] = found = ready.notes | {"losses": losses, "first_steps_seconds": seconds}
        self.made[system] = ready
        if "losses" in self.found.get("eager", {}):
            wanted = self.found["eager"]["losses"][-1]
            found["loss_difference"] = abs(losses[-1] - wanted) / abs(wanted)
            found["agrees"] = found["loss_difference"] <= TOLERANCE
        print(f"  {system}: losses {losses}, ready after {seconds:.1f} s", flush=True)

    def measure(self, rounds: int) -> None:
        times: dict[str, list[float]] = {system: [] for system in self.made}
        host: dict[str, list[float]] = {system: [] for system in self.made}
        for ready in self.made.values():  # warm: clocks, autotuning, CUDA graphs
            seconds_of(ready.step, 5, self.device)
        for number in range(rounds):
            if number >= 3 and time.time() > self.deadline:
                break
            for system, ready in self.made.items():
                times[system].append(seconds_of(ready.step, 5, self.device))
                host[system] += [host_seconds(ready.step, self.device) for _ in range(3)]
        for system in self.made:
            ordered = sorted(times[system])
            self.found[system] |= {
                "ms": statistics.median(ordered) * 1e3,
                "ms_quartiles": [ordered[len(ordered) // 4] * 1e3, ordered[len(ordered) * 3 // 4] * 1e3],
                "host_us": statistics.median(host[system]) * 1e6,
                "rounds": len(ordered),
                "in_turns_with": [other for other in self.made if other != system],
            }
            print(
                f"  {system}: {self.found[system]['ms']:.3f} ms, host {self.found[system]['host_us']:.0f} us",
                flush=True,
            )
        self.keep(self.result())

    def result(self) -> dict[str, Any]:
        return {"what": self.given.what, "systems": self.found}


def measure_time(
    given: Workload,
    systems: list[str],
    device: str,
    deadline: float,
    rounds: int,
    compile_optimizer: bool = True,
    keep: Callable[[dict[str, Any]], None] = lambda found: None,
) -> dict[str, Any]:
    """All systems in turns. A few rounds without torch.compile come first, in case its compilation takes too long."""
    turns = Rounds(given, device, deadline, keep)
    slow = [system for system in systems if system in ("compile", "reduce-overhead")]
    for system in [s for s in systems if s not in slow]:
        turns.prepare(system, compile_optimizer)
    if slow and turns.made:
        turns.measure(3)
    for system in slow:
        turns.prepare(system, compile_optimizer)
    turns.measure(rounds)
    return turns.result()


def measure_memory(given: Workload, system: str, device: str, compile_optimizer: bool = True) -> dict[str, Any]:
    """Peak memory of one system, alone in its process: of warm steps, and of everything up to then."""
    found: dict[str, Any] = {}
    cuda = device == "cuda"
    ready = make(system, given, device, compile_optimizer)
    given.model.to("meta")  # the system has its own copy
    gc.collect()
    found |= ready.notes
    for _ in range(3):
        ready.step()
    wait(device)
    if cuda:
        found["allocated_from_start"] = torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()
    for _ in range(3):
        ready.step()
    wait(device)
    if cuda:
        found["allocated"] = torch.cuda.max_memory_allocated()
        found["reserved"] = torch.cuda.max_memory_reserved()
        free, total = torch.cuda.mem_get_info()
        found["device_in_use_by_all"] = total - free
    if ready.ours is not None:
        plan = ready.ours.plan()
        found |= {"planned": plan.peak, "arena": plan.arena, "launches": len(plan.launches)}
    return found


# ---- processes -------------------------------------------------------------------------------------------------------


class Child:
    """One measurement in a process of its own, with a time limit. What it found is in a file."""

    def __init__(self, job: str, name: str, system: str, options: argparse.Namespace, folder: str, limit: float):
        self.job, self.name, self.system = job, name, system
        self.result = pathlib.Path(folder) / f"{job}-{name.replace(':', '-')}-{system}.json"
        self.log = self.result.with_suffix(".log")
        self.deadline = time.time() + limit
        command = [sys.executable, __file__, "--job", job, "--workloads", name, "--systems", system]
        command += ["--result", str(self.result), "--seconds", str(limit), "--rounds", str(options.rounds)]
        flags = ("small", "channels_last", "fused_optimizer")
        command += [f"--{flag.replace('_', '-')}" for flag in flags if getattr(options, flag)]
        command += ["--device", options.device]
        environ = os.environ | {"TORCHINDUCTOR_CACHE_DIR": options.cache, "PYTHONUNBUFFERED": "1"}
        environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "4")
        self.process = subprocess.Popen(
            command, stdout=self.log.open("w"), stderr=subprocess.STDOUT, env=environ, start_new_session=True
        )

    def done(self) -> bool:
        """Whether it has ended; one that is over its time is ended."""
        if self.process.poll() is None and time.time() > self.deadline:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        return self.process.poll() is not None

    def found(self) -> dict[str, Any]:
        if self.result.exists():
            return json.loads(self.result.read_text())
        tail = self.log.read_text()[-1500:]
        print(tail, flush=True)
        why = "over its time limit" if time.time() > self.deadline else f"exit code {self.process.returncode}"
        return {"error": f"{why}: {(tail.strip().splitlines() or [''])[-1][:300]}"}


def run_child(options: argparse.Namespace) -> None:
    """The body of a child: one job, its result as JSON."""
    deadline = time.time() + 0.8 * options.seconds
    torch.manual_seed(0)
    try:
        given = workload(options.workloads[0], options.device, options.small, options.channels_last)
        if options.job == "memory":
            found = measure_memory(given, options.systems[0], options.device, not options.fused_optimizer)
        else:
            found = measure_time(
                given,
                options.systems,
                options.device,
                deadline,
                options.rounds,
                not options.fused_optimizer,
                lambda so_far: options.result.write_text(json.dumps(so_far)),
            )
    except Exception as error:
        traceback.print_exc()
        found = {"error": describe(error)}
    options.result.write_text(json.dumps(found))


def memory_children(options: argparse.Namespace, folder: str, record: dict[str, Any], deadline: float) -> None:
    """Peak memory of every system, a few processes at once."""
    waiting = [(name, system) for name in options.workloads for system in options.systems]
    running: list[Child] = []
    while waiting or running:
        for child in [c for c in running if c.done()]:
            running.remove(child)
            found = record["memory"].setdefault(child.name, {})[child.system] = child.found()
            gone = f"{time.time() - record['started']:.0f} s"
            shown = found.get("error") or f"{found.get('allocated', 0) / 1e9:.2f} GB"
            print(f"[{gone}] memory {child.name} {child.system}: {shown}", flush=True)
            save(options, record)
        if waiting:
            name, system = waiting[0]
            needed = GIGABYTES.get(name, 1)
            taken = sum(GIGABYTES.get(c.name, 1) for c in running)
            left = deadline - time.time()
            if left < 10:
                for name, system in waiting:
                    record["memory"].setdefault(name, {})[system] = {"error": "not run: no time left"}
                waiting.clear()
            elif not running or (len(running) < options.parallel and taken + needed <= ROOM):
                waiting.pop(0)
                running.append(Child("memory", name, system, options, folder, left))
                continue
        time.sleep(0.2)


def keep_others(options: argparse.Namespace, record: dict[str, Any]) -> None:
    """Workloads that are not asked for keep what was measured before on this machine."""
    file = options.out / "step.json"
    if not file.exists():
        return
    before = json.loads(file.read_text())
    if any(before[key] != record[key] for key in ("machine", "torch", "transformers", "python")):
        return
    for part in ("time", "memory"):
        again = options.workloads if part == "time" or not options.skip_memory else []
        record[part] = {name: found for name, found in before[part].items() if name not in again}


def save(options: argparse.Namespace, record: dict[str, Any]) -> None:
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "step.json").write_text(json.dumps(record, indent=1) + "\n")
    (options.out / "step.md").write_text(page(record))


# ---- the page --------------------------------------------------------------------------------------------------------


def page(record: dict[str, Any]) -> str:
    lines = [
        "# Training steps against eager PyTorch and torch.compile",
        "",
        f"`{record['command']}` on {record['machine']}, torch {record['torch']}, transformers "
        f"{record['transformers']}, Python {record['python']}.",
        "",
        'bf16: autocast for eager and torch.compile, `precision="bf16"` for Wholestep. Step time: CUDA events over 5 '
        "steps, median over rounds in which all systems take turns in one process. Host time: from the call of a step "
        "to its return, with an empty queue. Memory: `max_memory_allocated` (and reserved) over warm steps, each "
        "system alone in its process. Loss: relative difference from eager after three steps from the same start. "
        "torch.compile starts from its warm caches here, Wholestep has none.",
    ]
    for name in dict.fromkeys([*record["time"], *record["memory"]]):
        timed, memory = record["time"].get(name, {}), record["memory"].get(name, {})
        lines += ["", f"## {timed.get('what') or name}", ""]
        if timed.get("command", record["command"]) != record["command"]:
            lines += [f"Measured before, by `{timed['command']}`.", ""]
        if "error" in timed:
            lines += [f"Timing failed: {timed['error']}", ""]
        lines += [
            "| system | ms per step | quartiles | host us | peak GB | reserved GB | loss | optimizer |",
            "|---|---|---|---|---|---|---|---|",
        ]
        for system in SYSTEMS:
            row, used = timed.get("systems", {}).get(system), memory.get(system, {})
            if row is None and not used:
                continue
            row = row or {}
            errors = [e for e in (row.get("error"), used.get("error")) if e]
            low, high = row.get("ms_quartiles", (None, None))
            lines.append(
                f"| {system} | {number(row.get('ms'), 2)} | {number(low, 2)} to {number(high, 2)} | "
                f"{number(row.get('host_us'), 0)} | {number(used.get('allocated'), 2, 1e9)} | "
                f"{number(used.get('reserved'), 2, 1e9)} | {loss_text(row)} | "
                f"{'; '.join(errors) or row.get('optimizer') or used.get('optimizer', '')} |"
            )
        ours, timed_ours = memory.get("wholestep", {}), timed.get("systems", {}).get("wholestep", {})
        if ours.get("planned") and ours.get("allocated"):
            lines += [
                "",
                f"Wholestep: planned peak {ours['planned'] / 1e9:.3f} GB, measured {ours['allocated'] / 1e9:.3f} GB "
                f"({ours['allocated'] / ours['planned'] - 1:+.2%}), arena {ours['arena'] / 1e9:.3f} GB, "
                f"{ours['launches']} launches; compiled in {number(timed_ours.get('compile_seconds'), 1)} s.",
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
    parser.add_argument("--workloads", nargs="+", help=f"like {' '.join(WORKLOADS)}")
    parser.add_argument("--systems", nargs="+", default=list(SYSTEMS), help=", ".join(SYSTEMS))
    parser.add_argument("--small", action="store_true", help="tiny networks: a dry run")
    parser.add_argument("--channels-last", action="store_true", help="convolution networks and images channels last")
    parser.add_argument("--device", default="cuda" if cuda else "cpu", choices=("cpu", "cuda"))
    parser.add_argument("--seconds", type=float, default=400, help="limit for everything")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--parallel", type=int, default=6, help="memory processes at once")
    parser.add_argument("--cache", default=os.path.join(tempfile.gettempdir(), "wholestep-bench-inductor"))
    parser.add_argument("--fused-optimizer", action="store_true", help="torch.compile without its optimizer: fused")
    parser.add_argument("--skip-memory", action="store_true")
    parser.add_argument("--job", choices=("time", "memory"), help=argparse.SUPPRESS)
    parser.add_argument("--result", type=pathlib.Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    options.workloads = options.workloads or list(SMALL if options.small else WORKLOADS)
    options.systems = [part for given in options.systems for part in given.split(",")]
    strange = [s for s in options.systems if s not in SYSTEMS]
    if strange:
        parser.error(f"unknown system {strange[0]!r}: {', '.join(SYSTEMS)}")
    if options.job:
        run_child(options)
        return 0
    import transformers

    record: dict[str, Any] = {
        "command": " ".join(["python bench/step.py", *(sys.argv[1:] if arguments is None else arguments)]),
        "machine": torch.cuda.get_device_name() if options.device == "cuda" else platform.processor() or "CPU",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "started": time.time(),
        "time": {},
        "memory": {},
    }
    keep_others(options, record)
    deadline = record["started"] + options.seconds
    with tempfile.TemporaryDirectory() as folder:
        if not options.skip_memory:
            memory_children(options, folder, record, record["started"] + 0.5 * options.seconds)
        for position, name in enumerate(options.workloads):
            left = deadline - time.time()
            if left < 15:
                record["time"][name] = {"error": "not run: no time left"}
                continue
            later = len(options.workloads) - position - 1
            limit = max(left / (later + 1), left - 45 * later)
            child = Child("time", name, ",".join(options.systems), options, folder, limit)
            while not child.done():
                time.sleep(0.2)
            record["time"][name] = child.found() | {"command": record["command"]}
            print(f"[{time.time() - record['started']:.0f} s] time {name}", flush=True)
            print(child.log.read_text()[-1200:], flush=True)
            save(options, record)
    record["seconds"] = time.time() - record["started"]
    save(options, record)
    print((options.out / "step.md").read_text())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
