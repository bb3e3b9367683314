"""Predicted DRAM bytes per launch against the hardware's counters, as `ncu` reads them.

Run where there is a GPU and ncu: `python bench/counters.py`; `--selftest` says whether counters work, `--dry` only
predicts (CPU). A first process compiles a step, so that kernels are built and chosen (ncu makes timing slow, and may
crash it); one under ncu finds them in the cache and runs the step launch by launch, each in an NVTX range
`ws:<number>`; here its kernels are joined with the plan. bench/results/counters.md holds the record.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import pathlib
import platform
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import torch

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from wholestep.bench.workload import Batch, build, cases  # noqa: E402
from wholestep.cost.cache import through_cache, without_cache  # noqa: E402
from wholestep.machine.description import find_description  # noqa: E402

WORKLOADS = ("gpt2@full", "bert_large@full", "resnet50@full")
SMALL = ("gpt2@tiny", "bert_large@tiny", "resnet50@tiny")
READ, WRITTEN, TIME = "dram__bytes_read.sum", "dram__bytes_write.sum", "gpu__time_duration.sum"
UNITS = {"byte": 1, "Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9, "ns": 1, "us": 1e3, "ms": 1e6, "s": 1e9}
UNITS |= {"nsecond": 1, "usecond": 1e3, "msecond": 1e6, "second": 1e9}
RANGE = re.compile(r"\bws:(\d+)\b")
#: shares of the device's L2 that the model is tried with
SHARES = (0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 1.0)
#: launches that move less, predicted and measured, have no error of their own; they count in the totals
SMALLEST = 1 << 20
#: sizes of the cache probe, as shares of the device's L2
PROBES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.2, 1.5, 2.0)
#: bytes that the one kernel of the self-test reads and writes: so many that what the cache holds hardly counts
SELFTEST = 1 << 30


# ---- under ncu -------------------------------------------------------------------------------------------------------


def compiled_step(name: str, device: str) -> tuple[Any, Batch]:
    """A network of `bench/networks`, compiled in bf16, and a batch."""
    import wholestep as ws

    given = build(cases([name], "full")[0], device)
    batch = given.batch(0, device)
    return ws.compile(given.model, given.loss_fn, given.optimizer[0], batch, precision="bf16"), batch


def predictions(planned: Any, cache_bytes: int, effective: int) -> dict[str, Any]:
    """Bytes of every launch: as the plan lists them, with the passes that kernels make, and through the cache."""
    start = time.perf_counter()
    models = {
        "plan": without_cache(planned, {}),
        "passes": without_cache(planned),
        "cache": through_cache(planned, effective),
    }
    seconds = time.perf_counter() - start
    sweep = {str(share): through_cache(planned, int(share * cache_bytes)) for share in SHARES}
    return {
        "cache_bytes": cache_bytes,
        "effective": effective,
        "seconds": seconds,
        "launches": [
            {"name": launch.name, "phase": launch.phase, "layer": launch.layer, "provider": launch.provider}
            for launch in planned.plan.launches
        ],
        "models": {name: list(zip(t.read, t.written, strict=True)) for name, t in models.items()},
        "sweep": {share: list(zip(t.read, t.written, strict=True)) for share, t in sweep.items()},
        "left": models["cache"].left,
    }


def cache_of(options: argparse.Namespace) -> tuple[int, int]:
    """Bytes of L2 as the device tells, and as many as the model counts on."""
    if options.dry or not torch.cuda.is_available():
        described = find_description("NVIDIA H200")
        told = described.cache_bytes if described is not None and described.cache_bytes else 50_000_000
    else:
        described = find_description(torch.cuda.get_device_name())
        told = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
    effective = described.effective_cache if described is not None and described.effective_cache else told
    return told, options.cache_bytes or effective


def child(options: argparse.Namespace) -> None:
    """The process under ncu. Profiling ends at the time limit even if the step does not."""
    folder = pathlib.Path(options.folder)
    if options.child == "selftest":
        x = torch.ones(SELFTEST // 4, device="cuda")
        return profiled([lambda: x.mul_(2.0)], options.stop_at)
    if options.child == "cache":
        return probe_cache(options, folder)
    step, batch = compiled_step(options.child, "cuda")
    print(f"compiled after {time.time() - options.started:.0f} s", flush=True)
    if options.ahead:
        return None
    (folder / "predicted.json").write_text(json.dumps(predictions(step._compiled.static.planned, *cache_of(options))))
    # without a CUDA graph, every launch of `step.plan()` in an NVTX range ws:<its number>
    for _ in range(2):
        step.annotated(*batch)  # what a first run sets up is not the step's
    torch.cuda.synchronize()
    print(f"ran after {time.time() - options.started:.0f} s", flush=True)
    with Profiling(options.stop_at) as profiling:
        step.annotated(*batch)
        torch.cuda.synchronize()
    (folder / "done.json").write_text(json.dumps({"stopped_early": profiling.stopped_early}))
    return None


class Profiling:
    """Between cudaProfilerStart and Stop; a timer stops at a time of day."""

    def __init__(self, stop_at: float):
        self.timer = threading.Timer(max(stop_at - time.time(), 1.0), self.stop_early)
        self.stopped_early = False

    def stop_early(self) -> None:
        self.stopped_early = True
        torch.cuda.profiler.stop()

    def __enter__(self) -> Profiling:
        self.timer.daemon = True
        self.timer.start()
        torch.cuda.profiler.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.timer.cancel()
        if not self.stopped_early:
            torch.cuda.profiler.stop()


def profiled(runs: Iterable[Any], stop_at: float) -> None:
    for run in (runs := list(runs)):
        run()
    torch.cuda.synchronize()
    with Profiling(stop_at):
        for number, run in enumerate(runs):
            torch.cuda.nvtx.range_push(f"ws:{number}")
            run()
            torch.cuda.nvtx.range_pop()
        torch.cuda.synchronize()


def probe_cache(options: argparse.Namespace, folder: pathlib.Path) -> None:
    """What is still in L2: buffers of many sizes read twice, or written and then read. The cache is emptied between."""
    told, _ = cache_of(options)
    other = torch.ones(8 * told // 4, device="cuda")
    runs: list[Any] = []
    sizes = [int(part * told) // 4096 * 4096 for part in PROBES]
    for size in sizes:
        x = torch.ones(size // 4, device="cuda")
        empty = lambda: other.sum()  # noqa: E731
        read = lambda x=x: x.sum()  # noqa: E731
        write = lambda x=x: x.fill_(1.0)  # noqa: E731
        runs += [empty, read, read, empty, write, read]  # the third and the sixth are of interest
    (folder / "predicted.json").write_text(json.dumps({"sizes": sizes, "cache_bytes": told}))
    profiled(runs, options.stop_at)


# ---- beside ncu ------------------------------------------------------------------------------------------------------


@dataclass
class Kernel:
    """One kernel as ncu saw it; launch is -1 outside all ranges."""

    launch: int
    name: str
    read: float
    written: float
    ns: float


def parse(text: str) -> list[Kernel]:
    """The kernels of ncu's raw page in CSV: a header, a row of units, a row per kernel."""
    lines = text.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"') and "Kernel Name" in line), None)
    if start is None:
        raise ValueError(f"no table in what ncu printed: {text.strip()[-300:]!r}")
    rows = list(csv.reader(lines[start:]))
    header = rows[0]
    columns = {name: header.index(name) for name in (READ, WRITTEN, TIME, "Kernel Name")}
    units = dict.fromkeys(columns, 1.0)
    found = []
    for row in rows[1:]:
        if len(row) != len(header):
            continue  # a line of ncu's own
        if not row[0].strip():
            units = {name: UNITS.get(row[at].strip(), 1.0) for name, at in columns.items()}
            continue
        ranges = [number for cell in row for number in RANGE.findall(cell)]
        read, written, ns = (amount(row[columns[name]], units[name]) for name in (READ, WRITTEN, TIME))
        found.append(Kernel(int(ranges[-1]) if ranges else -1, row[columns["Kernel Name"]], read, written, ns))
    return found


def amount(text: str, unit: float) -> float:
    try:
        return float(text.replace(",", "")) * unit
    except ValueError:
        return float("nan")


def compile_ahead(job: str, options: argparse.Namespace, folder: pathlib.Path, limit: float) -> str:
    """Compiles a step in a process of its own, without ncu, into the cache on disk; what it printed."""
    command = [*in_child(job, folder, time.time(), limit, options), "--ahead"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=limit, check=False)
    if done.returncode:
        raise RuntimeError(f"compiling failed (exit code {done.returncode}): {done.stderr.strip()[-1500:]}")
    return done.stdout.strip()


def in_child(job: str, folder: pathlib.Path, now: float, limit: float, options: argparse.Namespace) -> list[str]:
    """The command of a process for one job; a crash of it says where it was."""
    command = [sys.executable, "-X", "faulthandler", __file__, "--child", job, "--folder", str(folder)]
    command += ["--started", str(now), "--stop-at", str(now + 0.8 * limit)]
    command += ["--small"] if options.small else []
    return command + (["--cache-bytes", str(options.cache_bytes)] if options.cache_bytes else [])


def run_ncu(job: str, options: argparse.Namespace, folder: pathlib.Path, limit: float) -> tuple[list[Kernel], str]:
    """Starts a child under ncu and reads its kernels; also what ncu and the child printed."""
    now = time.time()
    report = folder / "report"
    command = ["ncu", "--nvtx", "--metrics", f"{READ},{WRITTEN},{TIME}", "--clock-control", "none"]
    command += ["--cache-control", "none", "--replay-mode", "kernel", "--profile-from-start", "off"]
    command += ["--launch-count", str(options.kernels), "-f", "-o", str(report)]
    command += in_child(job, folder, now, limit, options)
    log = folder / "log"
    environ = os.environ | {"PYTHONUNBUFFERED": "1"}
    with log.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, start_new_session=True, env=environ)
        try:
            process.wait(limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    said = log.read_text(errors="replace")
    files = sorted(folder.glob("report*.ncu-rep"))
    if not files:
        raise RuntimeError(f"ncu left no report (exit code {process.returncode}): {said.strip()[-1500:]}")
    try:
        return read_report(files[0], max(30.0, limit / 2)), said
    except Exception as error:
        raise RuntimeError(f"{error}; the process said: {said.strip()[-1500:]}") from error


def read_report(file: pathlib.Path, limit: float) -> list[Kernel]:
    """The report as CSV. Where the columns have no NVTX ranges, ncu is asked to put them into the names."""
    plain = ["ncu", "--import", str(file), "--page", "raw", "--csv"]
    problems, kernels = [], []
    for more in (["--print-units", "base"], ["--print-units", "base", "--print-nvtx-rename", "kernel"], []):
        done = subprocess.run([*plain, *more], capture_output=True, text=True, timeout=limit, check=False)
        try:
            kernels = parse(done.stdout)
        except (ValueError, IndexError) as error:
            problems.append(f"{' '.join(more)}: {error} {done.stderr.strip()[-300:]}")
            continue
        if any(k.launch >= 0 for k in kernels):
            return kernels
        problems.append(f"{' '.join(more)}: {len(kernels)} kernels, none in a range; {done.stdout[:1500]!r}")
    raise RuntimeError("no kernel could be joined with a launch: " + " | ".join(problems))


def passes_of(said: str) -> dict[str, int]:
    """How many passes ncu needed per kernel, and for how many kernels: more than one disturbs the cache."""
    found: dict[str, int] = {}
    for number in re.findall(r"- (\d+) pass(?:es)?\b", said):
        found[number] = found.get(number, 0) + 1
    return found


# ---- comparing -------------------------------------------------------------------------------------------------------


def compare(predicted: dict[str, Any], kernels: list[Kernel], stopped_early: bool) -> dict[str, Any]:
    """Predicted against measured, per launch that ncu saw whole."""
    kernels = [k for k in kernels if k.read == k.read and k.written == k.written]  # nan: not counted
    launches, models = predicted["launches"], predicted["models"]
    measured: dict[int, list[float]] = {}
    for kernel in kernels:
        sums = measured.setdefault(kernel.launch, [0.0, 0.0, 0.0, 0])
        sums[0] += kernel.read
        sums[1] += kernel.written
        sums[2] += kernel.ns
        sums[3] += 1
    outside = measured.pop(-1, [0.0, 0.0, 0.0, 0])
    beyond = [number for number in measured if number >= len(launches)]
    for number in beyond:
        measured.pop(number)
    last = max(measured, default=-1)
    covered = last if stopped_early else len(launches)  # the launch it stopped in may have more kernels
    seen = sorted(n for n in measured if n < covered)
    unseen = [n for n in range(covered) if n not in measured and sum(models["plan"][n]) > 0]
    rows = [
        launches[n]
        | {"launch": n, "measured": measured[n][:2], "ns": measured[n][2], "kernels": measured[n][3]}
        | {name: pairs[n] for name, pairs in models.items()}
        for n in seen
    ]
    return {
        "launches": len(launches),
        "covered": covered,
        "seen": len(seen),
        "kernels": len(kernels),
        "numbers_beyond_the_plan": len(beyond),
        "milliseconds": sum(r["ns"] for r in rows) / 1e6,
        "outside": {"kernels": outside[3], "read": outside[0], "written": outside[1]},
        "copies": sum(r["provider"] == "copy" for r in rows),
        "not_seen": {
            "launches": len(unseen),
            "bytes": sum(sum(models["plan"][n]) for n in unseen),
            "names": counts(launches[n]["name"] for n in unseen),
        },
        "measured": [sum(r["measured"][i] for r in rows) for i in (0, 1)],
        "models": {name: errors(rows, name) for name in models},
        "sweep": {
            share: [sum(pairs[n][i] for n in seen) for i in (0, 1)] for share, pairs in predicted["sweep"].items()
        },
        "kinds": by_kind(rows),
        "worst": worst(rows),
    }


def counts(names: Iterable[str]) -> dict[str, int]:
    found: dict[str, int] = {}
    for name in names:
        found[name] = found.get(name, 0) + 1
    return dict(sorted(found.items(), key=lambda item: -item[1])[:10])


def errors(rows: list[dict[str, Any]], model: str) -> dict[str, Any]:
    """Totals and the distribution of the error: median, 90th percentile, and weighted by measured bytes."""
    read, written = (sum(r[model][i] for r in rows) for i in (0, 1))
    each = [abs(sum(r[model]) - sum(r["measured"])) for r in rows]
    sizes = [sum(r["measured"]) for r in rows]
    relative = sorted(
        miss / max(size, SMALLEST)
        for r, miss, size in zip(rows, each, sizes, strict=True)
        if max(size, sum(r[model])) >= SMALLEST
    )
    total = sum(sizes)
    return {
        "read": read,
        "written": written,
        "ratio": (read + written) / total if total else None,
        "median": statistics.median(relative) if relative else None,
        "p90": relative[min(len(relative) - 1, int(0.9 * len(relative)))] if relative else None,
        "weighted": sum(each) / total if total else None,
        "launches": len(relative),
    }


def by_kind(rows: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault(row["name"], []).append(row)
    found = {
        name: {"launches": len(group), "kernels": sum(r["kernels"] for r in group)}
        | {"measured": [sum(r["measured"][i] for r in group) for i in (0, 1)]}
        | {"plan": [sum(r["plan"][i] for r in group) for i in (0, 1)]}
        | {"cache": errors(group, "cache"), "milliseconds": sum(r["ns"] for r in group) / 1e6}
        for name, group in groups.items()
    }
    return dict(sorted(found.items(), key=lambda item: -sum(item[1]["measured"])))


def worst(rows: list[dict[str, Any]], count: int = 15) -> list[dict[str, Any]]:
    """Where prediction and counter are furthest apart, in bytes; the same op of repeated layers is one line."""
    groups: dict[tuple[str, str, str], dict[str, Any]] = {}
    for row in rows:
        layer = re.sub(r"(?<=\.)\d+(?=\.|$)", "*", row["layer"])
        group = groups.setdefault(
            (row["name"], row["phase"], layer),
            {"calls": 0, "predicted": [0.0, 0.0], "measured": [0.0, 0.0], "apart": 0.0},
        )
        group["calls"] += 1
        group["apart"] += abs(sum(row["cache"]) - sum(row["measured"]))
        for i in (0, 1):
            group["predicted"][i] += row["cache"][i]
            group["measured"][i] += row["measured"][i]
    ordered = sorted(groups.items(), key=lambda item: -item[1]["apart"])[:count]
    return [{"name": name, "phase": phase, "layer": layer} | group for (name, phase, layer), group in ordered]


def held_in_cache(predicted: dict[str, Any], kernels: list[Kernel]) -> list[dict[str, float]]:
    """For each size of the probe: the share of a second read that came from DRAM, after a read and after a write."""
    read: dict[int, float] = {}
    for kernel in kernels:
        read[kernel.launch] = read.get(kernel.launch, 0.0) + kernel.read
    return [
        {
            "bytes": size,
            "share_of_l2": size / predicted["cache_bytes"],
            "missed_after_read": read.get(6 * i + 2, float("nan")) / size,
            "missed_after_write": read.get(6 * i + 5, float("nan")) / size,
        }
        for i, size in enumerate(predicted["sizes"])
    ]


# ---- the page --------------------------------------------------------------------------------------------------------


def page(record: dict[str, Any]) -> str:
    lines = [
        "# Predicted DRAM bytes against hardware counters",
        "",
        f"`{record['command']}` on {record['machine']}, torch {record['torch']}, Python {record['python']}.",
        "",
        f"One training step in bf16, launch by launch under ncu (`{READ}`, `{WRITTEN}`; caches and clocks left alone). "
        "*plan*: the bytes of the plan's buffers, all from and to DRAM. *passes*: the same with the second pass that "
        "normalisations make. *cache*: that through a cache of "
        f"{record.get('effective', 0) / 1e6:.0f} MB (`wholestep/cost/cache.py`). Error: per launch, the distance of "
        f"read plus written, over the measured bytes (at least {SMALLEST >> 20} MiB); weighted: all distances over all "
        "measured bytes. ncu sees kernels alone: copies and fills by the copy engine are listed as not seen.",
    ]
    if record.get("probe"):
        lines += [
            "",
            "## What L2 holds",
            "",
            "| buffer, MB | share of L2 | read from DRAM after a read | after a write |",
        ]
        lines += ["|---|---|---|---|"]
        lines += [
            f"| {row['bytes'] / 1e6:.1f} | {row['share_of_l2']:.2f} | {row['missed_after_read']:.0%} | "
            f"{row['missed_after_write']:.0%} |"
            for row in record["probe"]
        ]
    for name, found in record["workloads"].items():
        lines += ["", f"## {name}", ""]
        lines += [f"Failed: {found['error']}"] if "error" in found else workload_lines(found)
    return "\n".join(lines) + "\n"


def workload_lines(found: dict[str, Any]) -> list[str]:
    read, written = found["measured"]
    lines = [
        f"{found['seen']} launches with kernels among the first {found['covered']} of {found['launches']}; "
        f"{found['kernels']} kernels, {found['milliseconds']:.1f} ms in kernels; passes of ncu per kernel: "
        f"{found.get('ncu_passes') or 'not told'}.",
        f"Not seen: {found['not_seen']['launches']} launches, {gb(found['not_seen']['bytes'])} GB planned "
        f"({', '.join(f'{k} {v}' for k, v in found['not_seen']['names'].items()) or 'none'}). "
        f"Outside all launches: {found['outside']['kernels']} kernels, "
        f"{gb(found['outside']['read'] + found['outside']['written'])} GB. Copies of the plan: {found['copies']}.",
        "",
        "| | read GB | written GB | total / measured | median error | 90 % below | weighted |",
        "|---|---|---|---|---|---|---|",
        f"| measured | {gb(read)} | {gb(written)} | 1 | | | |",
    ]
    for name, e in found["models"].items():
        lines.append(
            f"| {name} | {gb(e['read'])} | {gb(e['written'])} | {plain(e['ratio'])} | {percent(e['median'])} | "
            f"{percent(e['p90'])} | {percent(e['weighted'])} |"
        )
    total = read + written
    tried = ", ".join(f"{share}: {sum(pair) / total:.3f}" for share, pair in found["sweep"].items()) if total else ""
    lines += ["", f"Total / measured by the share of L2 that is counted on: {tried}.", ""]
    lines += [
        "| op | launches | kernels | ms | measured read / written GB | predicted | plan | ratio | median | weighted |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, kind in list(found["kinds"].items())[:25]:
        e = kind["cache"]
        lines.append(
            f"| {name.removeprefix('step.')} | {kind['launches']} | {kind['kernels']} | {kind['milliseconds']:.2f} | "
            f"{gb(kind['measured'][0])} / {gb(kind['measured'][1])} | {gb(e['read'])} / {gb(e['written'])} | "
            f"{gb(kind['plan'][0])} / {gb(kind['plan'][1])} | {plain(e['ratio'])} | {percent(e['median'])} | "
            f"{percent(e['weighted'])} |"
        )
    lines += ["", "Furthest apart:", "", "| op | phase | layer | calls | predicted GB | measured GB |"]
    lines += ["|---|---|---|---|---|---|"]
    lines += [
        f"| {row['name'].removeprefix('step.')} | {row['phase']} | {row['layer']} | {row['calls']} | "
        f"{gb(row['predicted'][0])} / {gb(row['predicted'][1])} | {gb(row['measured'][0])} / {gb(row['measured'][1])} |"
        for row in found["worst"]
    ]
    return lines


def gb(size: float) -> str:
    return f"{size / 1e9:.3f}"


def plain(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def save(options: argparse.Namespace, record: dict[str, Any]) -> None:
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "counters.json").write_text(json.dumps(record, indent=1) + "\n")
    (options.out / "counters.md").write_text(page(record))


# ---- jobs ------------------------------------------------------------------------------------------------------------


def dry(options: argparse.Namespace) -> int:
    """Predicts alone."""
    for name in options.workloads:
        step, _ = compiled_step(name, "cpu")
        found = predictions(step._compiled.static.planned, *cache_of(options))
        for model, pairs in found["models"].items():
            read, written = (sum(pair[i] for pair in pairs) for i in (0, 1))
            print(f"{name} {model}: read {gb(read)} GB, written {gb(written)} GB, {len(pairs)} launches")
        print(f"{name}: {found['seconds']:.2f} s for three predictions; still in the cache {gb(found['left'])} GB")
    return 0


def selftest(options: argparse.Namespace) -> int:
    """One kernel that reads and writes a known number of bytes."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            kernels, said = run_ncu("selftest", options, pathlib.Path(folder), 120)
        except Exception as error:
            print(f"counters do not work here: {type(error).__name__}: {error}")
            return 1
    for kernel in kernels:
        print(asdict(kernel))
    print("passes of ncu per kernel:", passes_of(said))
    read = sum(k.read for k in kernels if k.launch == 0)
    good = 0.85 < read / SELFTEST < 1.1
    print("counters work" if good else f"the counter says {read:.0f} bytes read where {SELFTEST} were expected")
    return 0 if good else 1


def profile(options: argparse.Namespace, record: dict[str, Any], job: str, limit: float) -> None:
    """One child under ncu, compared with its predictions."""
    with tempfile.TemporaryDirectory() as name:
        folder, start = pathlib.Path(name), time.time()
        if job != "cache":
            print(f"  {compile_ahead(job, options, folder, 0.6 * limit)}", flush=True)
        kernels, said = run_ncu(job, options, folder, limit - (time.time() - start))
        predicted = json.loads((folder / "predicted.json").read_text())
        if job == "cache":
            record["probe"] = held_in_cache(predicted, kernels)
            return
        done = folder / "done.json"
        early = not done.exists() or json.loads(done.read_text())["stopped_early"] or len(kernels) >= options.kernels
        record["effective"] = predicted["effective"]
        found = compare(predicted, kernels, early)
        record["workloads"][job] = found | {"ncu_passes": passes_of(said), "stopped_early": early}
        models = {name: plain(e["ratio"]) for name, e in found["models"].items()}
        print(f"  {found['seen']} launches, {found['kernels']} kernels; total / measured: {models}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "bench" / "results")
    parser.add_argument("--workloads", nargs="+", help=f"like {' '.join(WORKLOADS)}")
    parser.add_argument("--small", action="store_true", help="tiny networks")
    parser.add_argument("--dry", action="store_true", help="predict on the CPU, measure nothing")
    parser.add_argument("--selftest", action="store_true", help="whether ncu reads counters here")
    parser.add_argument("--seconds", type=float, default=360, help="limit for everything")
    parser.add_argument("--kernels", type=int, default=9000, help="most kernels to measure per workload")
    parser.add_argument("--cache-bytes", type=int, help="cache the model counts on; else the machine's description")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--ahead", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    parser.add_argument("--started", type=float, default=0.0, help=argparse.SUPPRESS)
    parser.add_argument("--stop-at", type=float, default=0.0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.workloads = options.workloads or list(SMALL if options.small else WORKLOADS)
    if options.child:
        child(options)
        return 0
    if options.dry:
        return dry(options)
    if shutil.which("ncu") is None:
        print("ncu is not on the PATH: there are no counters to compare with; --dry predicts alone")
        return 1
    if options.selftest:
        return selftest(options)
    record: dict[str, Any] = {
        "command": " ".join(["python bench/counters.py", *sys.argv[1:]]),
        "machine": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "workloads": {},
    }
    start = time.time()
    jobs = ["cache", *options.workloads]
    for position, job in enumerate(jobs):
        left = options.seconds - (time.time() - start)
        if left < 20:
            record["workloads"][job] = {"error": "not run: no time left"}
            continue
        limit = min(left, 60.0) if job == "cache" else left * min(1.0, 1.3 / (len(jobs) - position))
        print(f"[{time.time() - start:.0f} s] {job}: at most {limit:.0f} s", flush=True)
        try:
            profile(options, record, job, limit)
        except Exception as error:
            traceback.print_exc()
            record["workloads"][job] = {"error": " ".join(f"{type(error).__name__}: {error}".split())}
        save(options, record)
    record["seconds"] = time.time() - start
    save(options, record)
    print((options.out / "counters.md").read_text())
    return 0 if all("error" not in found for found in record["workloads"].values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
