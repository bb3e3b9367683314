"""Fifty steps of eight networks, compiled beside eager autocast: losses, time, memory, compile time, who runs what.

Run where there is a GPU: `python bench/fifty.py [--networks gpt2,vit] [--inductor]`; `--device cpu --size small` is a
dry run. Each network has a process of its own with a time limit, and what was found is written down after each, beside
what earlier runs on the same machine found. bench/results/fifty.md holds the record.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import pathlib
import platform
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench.networks import NAMES, SIZES, Network, build  # noqa: E402
from bench.networks.curves import Trainer, apart, compiled, eager, smooth  # noqa: E402
from bench.step import describe, number, seconds_of, wait  # noqa: E402

#: smoothed losses agree where they are this close, or this many times as far as autocast is from its own repetition or
#: from float32
TOLERANCE, TIMES = 0.01, 2.0
#: steps that are timed in a row, once losses are known
TIMED = 20


# ---- one network, in a process of its own ----------------------------------------------------------------------------


def train(network: Network, trainer: Trainer, steps: int, device: str) -> dict[str, Any]:
    """Losses of the first steps; the time of warm ones by the device's clock; memory after the first step."""
    losses, start = [], time.perf_counter()
    for seed in range(steps):
        losses.append(trainer.step(network.make_batch(seed, device)).float().clone())
        if seed == 0:
            wait(device)
            first = time.perf_counter() - start
            if device == "cuda":
                torch.cuda.reset_peak_memory_stats()
    found: dict[str, Any] = {"losses": [float(loss) for loss in losses], "first_step_seconds": first}
    batch = network.make_batch(steps, device)
    found["ms"] = seconds_of(lambda: trainer.step(batch), TIMED, device) * 1e3
    if device == "cuda":
        found["peak_gb"] = torch.cuda.max_memory_allocated() / 1e9
        found["kernels"] = device_kernels(lambda: trainer.step(batch))
    return found


def device_kernels(step: Callable[[], Any], steps: int = 2) -> dict[str, Any]:
    """What the device ran per step, by the profiler: kernels, copies and fills, and where most time went."""
    step()
    torch.cuda.synchronize()
    kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=kinds) as profile:
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
    calls: dict[str, list[float]] = {}
    for event in profile.events():
        if event.device_type == torch.autograd.DeviceType.CUDA and not event.name.startswith(
            ("ProfilerStep", "wholestep.")
        ):
            calls.setdefault(event.name, []).append(event.time_range.elapsed_us())
    others = [n for n in calls if n.startswith(("Memcpy", "Memset"))]
    by_time = sorted(calls.items(), key=lambda item: -sum(item[1]))
    return {
        "count": sum(len(c) for n, c in calls.items() if n not in others) / steps,
        "copies and fills": sum(len(calls[n]) for n in others) / steps,
        "us": sum(sum(c) for c in calls.values()) / steps,
        "most": [{"name": n[:120], "calls": len(c) / steps, "us": sum(c) / steps} for n, c in by_time[:15]],
    }


def measure(options: argparse.Namespace, keep: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """All about one network. `keep` writes down what is known so far: the time limit may come at any moment."""
    device = options.device
    network = build(options.child, options.size, device)
    begin = {name: value.detach().cpu().clone() for name, value in network.model.state_dict().items()}
    found: dict[str, Any] = {
        "items": network.items,
        "parameters": sum(p.numel() for p in network.model.parameters()),
        "steps": options.steps,
    }
    held = found["held_gb"] = {}  # what is allocated before each training begins: the same, if nothing is left over

    def run(name: str, make: Callable[[], Trainer]) -> Trainer | None:
        """One training from the same weights. What goes wrong is recorded and does not stop the others."""
        network.model.load_state_dict(begin)
        network.model.zero_grad(set_to_none=True)
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()
            held[name] = torch.cuda.memory_allocated() / 1e9
        clock = time.perf_counter()
        trainer = None
        try:
            trainer = make()
            made = time.perf_counter() - clock
            found[name] = train(network, trainer, options.steps, device) | {"compile_seconds": made}
        except Exception as error:
            traceback.print_exc()
            found[name] = {"error": describe(error)}
        print(
            f"  {name}: {time.perf_counter() - clock:.1f} s",
            {k: v for k, v in found[name].items() if k in ("ms", "error")},
            flush=True,
        )
        keep(found)
        return trainer

    low = torch.bfloat16
    run("eager", lambda: eager(network, network.model, low))
    providers = options.providers.split(",")
    trainer = run(
        "wholestep",
        lambda: compiled(network, network.model, precision="bf16", providers=providers, tune=not options.no_tune),
    )
    if trainer is not None:
        found["wholestep"] |= step_facts(trainer.whole)
        keep(found)
    del trainer
    run("again", lambda: eager(network, network.model, low))
    if options.fp32:
        run("fp32", lambda: eager(network, network.model))
    if options.inductor:
        run("inductor", lambda: eager(network, network.model, low, torch.compile(network.loss_fn, dynamic=False)))
    return found


def step_facts(step: Any) -> dict[str, Any]:
    """Compile time by phase, launches and bytes by provider and family, and the plan's memory: `step.report()`."""
    try:
        report = json.loads(step.report(format="json"))
    except Exception as error:  # the curves are known by now, and stay
        traceback.print_exc()
        return {"report error": describe(error)}
    names = ("seconds", "ops", "bytes", "kernels", "execution", "opaque", "traced", "casts")
    moved = {k: report["movement"][k] for k in ("moved", "bound", "moved / bound")}
    return {"report": {k: report.get(k) for k in names} | moved}


# ---- the processes ---------------------------------------------------------------------------------------------------


def run_child(name: str, options: argparse.Namespace, folder: pathlib.Path) -> dict[str, Any]:
    """One network in a process of its own, which is ended when it is over its time."""
    result, log = folder / f"{name}.json", folder / f"{name}.log"
    command = [sys.executable, __file__, "--child", name, "--result", str(result)]
    for option in ("device", "size", "steps", "providers"):
        command += [f"--{option}", str(getattr(options, option))]
    command += [f"--{flag.replace('_', '-')}" for flag in ("no_tune", "fp32", "inductor") if getattr(options, flag)]
    environ = dict(os.environ) | {"PYTHONUNBUFFERED": "1"}
    if options.cold:
        environ["WHOLESTEP_CACHE"] = str(folder / f"cache-{name}")
    with log.open("w") as out:
        child = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=environ, start_new_session=True)
        try:
            child.wait(options.limit)
            why = f"exit code {child.returncode}" if child.returncode else ""
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
            why = f"over its limit of {options.limit:.0f} s"
    found = json.loads(result.read_text()) if result.exists() else {}
    if why:
        lines = log.read_text().strip().splitlines() or [""]
        found["error"] = f"{why}: {lines[-1][:300]}"
    print(log.read_text()[-1500:], flush=True)
    return found


def record_of(options: argparse.Namespace) -> dict[str, Any]:
    """An empty record, or the one of an earlier run on the same machine."""
    import transformers

    record: dict[str, Any] = {
        "machine": torch.cuda.get_device_name() if options.device == "cuda" else platform.processor() or "CPU",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "size": options.size,
        "networks": {},
    }
    file = options.out / "fifty.json"
    if file.exists():
        before = json.loads(file.read_text())
        if all(before[key] == record[key] for key in record if key != "networks"):
            record["networks"] = before["networks"]
    return record


def save(options: argparse.Namespace, record: dict[str, Any]) -> None:
    options.out.mkdir(parents=True, exist_ok=True)
    ordered = {name: record["networks"][name] for name in NAMES if name in record["networks"]}
    record = record | {"networks": ordered}
    (options.out / "fifty.json").write_text(json.dumps(record, indent=1) + "\n")
    (options.out / "fifty.md").write_text(page(record))


# ---- the page --------------------------------------------------------------------------------------------------------


def distance(found: dict[str, Any], one: str, other: str = "eager") -> float | None:
    """The largest relative distance of two smoothed curves; None where one is absent."""
    curves = [found.get(name, {}).get("losses") for name in (one, other)]
    return None if None in curves else apart(smooth(curves[0]), smooth(curves[1]))


def verdict(found: dict[str, Any]) -> str:
    ours, rounding = distance(found, "wholestep"), max(distance(found, k) or 0.0 for k in ("again", "fp32"))
    if ours is None:
        return "not known"
    return "agrees" if ours <= max(TOLERANCE, TIMES * rounding) else "DISAGREES"


def percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.3%}"


def page(record: dict[str, Any]) -> str:
    lines = [
        "# Eight networks beside eager PyTorch",
        "",
        f"`python bench/fifty.py` on {record['machine']}, torch {record['torch']}, transformers "
        f"{record['transformers']}, Python {record['python']}; size: {record['size']}.",
        "",
        'bf16: `torch.autocast` for eager and torch.compile, `precision="bf16"` for Wholestep; AdamW with warm-up, '
        "dropout off. Same weights to start from, same batches. Losses are smoothed over five steps; a distance is the "
        f"largest relative one. They agree within {TOLERANCE:.0%}, or {TIMES:.0f} times the distance of autocast from "
        "its own repetition or from float32: rounding alone carries curves that far apart.",
        "",
        "| network | batch | parameters | steps | first loss | last loss ours / eager | distance to eager |"
        " of eager run again | of float32 | |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    networks = record["networks"]
    for name, found in networks.items():
        ends = [found.get(k, {}).get("losses") for k in ("wholestep", "eager")]
        last = " / ".join("-" if c is None else f"{smooth(c)[-1]:.5f}" for c in ends)
        first = "-" if ends[1] is None else f"{ends[1][0]:.3f}"
        lines.append(
            f"| {name} | {found.get('items', '-')} | {number(found.get('parameters'), 1, 1e6)}M | "
            f"{found.get('steps', '-')} | {first} | {last} | {percent(distance(found, 'wholestep'))} | "
            f"{percent(distance(found, 'again'))} | {percent(distance(found, 'fp32'))} | {verdict(found)} |"
        )
    lines += [
        "",
        f"Time: {TIMED} warm steps in a row. Memory: `max_memory_allocated` after the first step. Kernels: what the "
        "profiler saw the device run in a step, without copies and fills. inductor: `torch.compile` of the loss, with "
        "PyTorch's fused AdamW.",
        "",
        "| network | ms ours / eager / inductor | peak GB ours / eager / inductor | kernels ours / eager / inductor |"
        " moved / bound | compile s |",
        "|---|---|---|---|---|---|",
    ]
    systems = ("wholestep", "eager", "inductor")
    for name, found in networks.items():
        rows = [found.get(system, {}) for system in systems]
        report = rows[0].get("report", {})
        lines.append(
            f"| {name} | {' / '.join(number(r.get('ms'), 2) for r in rows)} | "
            f"{' / '.join(number(r.get('peak_gb'), 2) for r in rows)} | "
            f"{' / '.join(number(r.get('kernels', {}).get('count'), 0) for r in rows)} | "
            f"{number(report.get('moved / bound'), 2)} | {number(rows[0].get('compile_seconds'), 1)} |"
        )
    for name, found in networks.items():
        lines += ["", f"## {name}", ""]
        lines += [f"- {what}: {text}" for what, text in errors_of(found)]
        report = found.get("wholestep", {}).get("report")
        if report is not None:
            lines += report_lines(report)
        if found.get("command"):
            lines.append(f"- `{found['command']}`")
    return "\n".join(lines) + "\n"


def errors_of(found: dict[str, Any]) -> list[tuple[str, str]]:
    errors = [("the process", found["error"])] if "error" in found else []
    for system, part in found.items():
        if isinstance(part, dict):
            errors += [(system, part[key]) for key in ("error", "report error") if key in part]
    return errors


def report_lines(report: dict[str, Any]) -> list[str]:
    seconds = ", ".join(f"{phase} {spent:.1f}" for phase, spent in report["seconds"].items())
    lines = [f"- compile seconds: {seconds}", f"- {report['execution']['by']}"]
    kernels = report.get("kernels")
    if not kernels:
        return lines
    lines += ["", "| who or what | launches | distinct | bytes | share of bytes | measured ms | modelled ms |"]
    lines += ["|---|---|---|---|---|---|---|"]
    for part in ("providers", "families"):
        whole = sum(share["bytes"] for share in kernels[part].values()) or 1
        kind = {"providers": "provider", "families": "family"}[part]
        for name, share in kernels[part].items():
            lines.append(
                f"| {kind} {name} | {share['launches']} | {share['distinct']} | {share['bytes'] / 1e9:.3f} GB | "
                f"{share['bytes'] / whole:.1%} | {number(share['measured seconds'], 3, 1e-3)} | "
                f"{number(share['modelled seconds'], 3, 1e-3)} |"
            )
    lines.append("")
    for each in kernels["excluded"][:10]:
        lines.append(f"- excluded: {each['way']}: {each['why']}")
    for provider, reasons in kernels["declined"].items():
        lines += [f"- {provider} declines {count} regions: {why}" for why, count in list(reasons.items())[:5]]
    return lines


def main(arguments: list[str] | None = None) -> int:
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--networks", default=",".join(NAMES), help=f"of {','.join(NAMES)}")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--size", default="full", choices=SIZES)
    parser.add_argument("--device", default="cuda" if cuda else "cpu", choices=("cpu", "cuda"))
    parser.add_argument("--providers", help="aten,triton on a GPU; aten,cpp on a CPU")
    parser.add_argument("--no-tune", action="store_true", help="takes the first kernel that providers offer")
    parser.add_argument("--cold", action="store_true", help="compiles without what was measured and built before")
    parser.add_argument("--fp32", action="store_true", help="trains in float32 too, for a sense of scale")
    parser.add_argument("--inductor", action="store_true", help="counts the kernels of torch.compile too")
    parser.add_argument("--limit", type=float, default=240, help="seconds that one network may take")
    parser.add_argument("--seconds", type=float, default=530, help="seconds for all; networks that do not fit are left")
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "bench" / "results")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--result", type=pathlib.Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    options.providers = options.providers or ("aten,triton" if options.device == "cuda" else "aten,cpp")
    if options.child:
        measure(options, lambda found: options.result.write_text(json.dumps(found)))
        return 0
    names = options.networks.split(",")
    if strange := [name for name in names if name not in NAMES]:
        parser.error(f"there is no network {strange[0]!r}: {', '.join(NAMES)}")
    record = record_of(options)
    command = " ".join(["python bench/fifty.py", *(sys.argv[1:] if arguments is None else arguments)])
    deadline = time.time() + options.seconds
    limit = options.limit
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            left = deadline - time.time()
            if left < 10:
                print(f"{name}: not run, no time left", flush=True)
                continue
            options.limit = min(limit, left)
            print(f"{name}:", flush=True)
            record["networks"][name] = run_child(name, options, pathlib.Path(folder)) | {"command": command}
            save(options, record)
    known = {name: verdict(found) for name, found in record["networks"].items()}
    print(json.dumps(known), flush=True)
    return 0 if all(known.get(name) == "agrees" for name in names) else 1


if __name__ == "__main__":
    raise SystemExit(main())
