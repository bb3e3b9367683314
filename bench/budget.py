"""Time against memory: memory_budget beside activation checkpointing and torch.compile's own memory budget.

Run where there is a GPU: `python bench/budget.py --device cuda [--out DIR]` (GPT-2 8x1024 and ResNet-50 @ 256 in bf16);
without arguments tiny models on the CPU. Every system has a process of its own: torch.compile would use a program again
that it has compiled for another budget. They get ready at once and are measured in turns, one at a time.
bench/results/budget.md holds the record.
"""

from __future__ import annotations

import argparse
import copy
import json
import pathlib
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
import torch._functorch.config as functorch_config  # where torch.compile's memory budget is set
from torch import nn
from torch.utils.checkpoint import checkpoint

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import wholestep as ws  # noqa: E402
from bench.turns import Contender, own_command, race, serve  # noqa: E402
from wholestep.machine.describe import describe, usable_cores  # noqa: E402

Step = Callable[[], torch.Tensor]
#: shares of our peak without a budget
BUDGETS = (1.0, 0.85, 0.7, 0.55)
#: torch's own setting: 1 keeps what its partitioner likes, 0 keeps the inputs alone
TORCH_BUDGETS = (1.0, 0.6, 0.3, 0.1)
WARM_UP, TURNS, STEPS = 3, 3, 5
#: budgets whose peaks differ by less than this share were not different budgets
SAME_PEAK = 0.01
COLOURS = {"wholestep": "#1b66c9", "checkpoint": "#d95f02", "torch.compile": "#2a9d4a", "eager": "#999999"}


class Network:
    """A model with its batch, and the parts that checkpointing runs again."""

    def __init__(self, name: str, device: str, small: bool):
        from transformers import GPT2Config, GPT2LMHeadModel, ResNetConfig, ResNetForImageClassification

        self.name, self.device = name, device
        torch.manual_seed(0)
        if name == "gpt2":
            rows, length = (4, 64) if small else (8, 1024)
            sizes: dict[str, Any] = {"n_layer": 4, "n_head": 2, "n_embd": 64, "n_positions": 64, "vocab_size": 211}
            sizes = sizes | {"bos_token_id": 0, "eos_token_id": 0} if small else {}
            config = GPT2Config(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False, **sizes)
            self.model: nn.Module = GPT2LMHeadModel(config)
            ids = torch.randint(0, config.vocab_size, (rows, length), device=device)
            self.batch = {"input_ids": ids, "labels": ids.clone()}
            self.what = f"GPT-2, {rows}x{length} tokens, AdamW"
        else:
            rows, pixels = (8, 48) if small else (256, 224)
            sizes = {"embedding_size": 8, "hidden_sizes": [16, 32], "depths": [3, 3]} if small else {}
            config = ResNetConfig(num_labels=10 if small else 1000, **sizes)
            self.model = ResNetForImageClassification(config)
            labels = torch.randint(0, config.num_labels, (rows,), device=device)
            self.batch = {"pixel_values": torch.randn(rows, 3, pixels, pixels, device=device), "labels": labels}
            self.what = f"ResNet-50, {rows} images of {pixels}x{pixels}, SGD with momentum"
        self.what += " (tiny)" if small else ""
        self.model = self.model.to(device).train()

    def blocks(self, model: Any) -> list[nn.Module]:
        """What checkpointing runs again one by one: the transformer's blocks, the residual layers."""
        if self.name == "gpt2":
            return list(model.transformer.h)
        return [layer for stage in model.resnet.encoder.stages for layer in stage.layers]

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        if self.name == "gpt2":
            return torch.optim.AdamW(model.parameters(), lr=1e-4)
        return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def with_checkpoints(blocks: list[nn.Module]) -> None:
    """Each block keeps its inputs alone and runs again in backward."""
    for block in blocks:
        plain = block.forward

        def again(*given: Any, plain: Any = plain, **named: Any) -> Any:
            return checkpoint(plain, *given, use_reentrant=False, **named)

        block.forward = again  # type: ignore[method-assign]


def torch_step(
    network: Network, forward: Callable[[nn.Module], Any] = lambda model: model, parts: bool = False
) -> Step:
    """A plain PyTorch step in bf16 autocast, on a copy of the model."""
    model = copy.deepcopy(network.model)
    if parts:
        with_checkpoints(network.blocks(model))
    optimizer, run = network.optimizer(model), forward(model)

    def step() -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(network.device, torch.bfloat16):
            loss: torch.Tensor = run(**network.batch).loss
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def wholestep_step(network: Network, budget: float, notes: dict[str, Any]) -> Step:
    """Our step in bf16, on a copy of the model."""
    model = copy.deepcopy(network.model)
    given = None if budget == 1.0 else budget
    step = ws.compile(model, None, network.optimizer(model), network.batch, precision="bf16", memory_budget=given)
    notes["planned_peak"] = step.plan().peak
    notes["recomputed"] = len(step.recipe)
    return lambda: step(**network.batch)


def compiled_step(network: Network, budget: float) -> Step:
    """torch.compile of the model with torch's own memory budget, which is read while it compiles."""
    torch._dynamo.reset()
    functorch_config.activation_memory_budget = budget
    return torch_step(network, lambda model: torch.compile(model, dynamic=False))


def systems() -> list[str]:
    """The name of every configuration."""
    budgets = [f"wholestep {share:g}" for share in BUDGETS] + [f"torch.compile {share:g}" for share in TORCH_BUDGETS]
    return ["eager", "checkpoint every block", *budgets]


def make(name: str, network: Network, notes: dict[str, Any]) -> Step:
    """A step of a configuration, ready for its first call."""
    kind, _, budget = name.partition(" ")
    if kind == "wholestep":
        return wholestep_step(network, float(budget), notes)
    if kind == "torch.compile":
        return compiled_step(network, float(budget))
    return torch_step(network, parts=kind == "checkpoint")


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def timed(step: Step, device: str) -> float:
    wait(device)
    start = time.perf_counter()
    step()
    wait(device)
    return time.perf_counter() - start


def prepare(name: str, network: Network) -> tuple[dict[str, Any], Step]:
    """A step made and warmed up; its peak over two steps, less what was there before the system was made."""
    cuda = network.device == "cuda"
    before = torch.cuda.memory_allocated() if cuda else 0
    row: dict[str, Any] = {}
    start = time.perf_counter()
    step = make(name, network, row)
    losses = [float(step()) for _ in range(WARM_UP)]
    wait(network.device)
    row |= {"make_seconds": time.perf_counter() - start, "loss": losses[-1], "what": network.what}
    if cuda:
        torch.cuda.reset_peak_memory_stats()
        step()
        step()
        wait(network.device)
        row["peak_bytes"] = torch.cuda.max_memory_allocated() - before
    return row, step


def run_contender(options: argparse.Namespace) -> None:
    """The body of a contender: one configuration of one network."""
    if options.device == "cpu":
        torch.set_num_threads(1)

    def ready() -> tuple[dict[str, Any], Callable[[], dict[str, Any]]]:
        network = Network(options.network[0], options.device, small=options.device == "cpu")
        row, step = prepare(options.contender, network)
        return row, lambda: {"ms": [timed(step, options.device) * 1e3 for _ in range(STEPS)]}

    serve(options.folder, ready, sys.stdin)


def measure(network: str, names: list[str], options: argparse.Namespace) -> dict[str, Any]:
    """All configurations of one network."""
    deadline = time.time() + options.seconds
    rows: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        makers: dict[str, Callable[[], Contender]] = {}
        for number, name in enumerate(names):
            command = own_command(__file__, "--device", options.device, "--network", network, "--contender", name)
            place = pathlib.Path(folder) / str(number)
            environ = {"TORCHINDUCTOR_CACHE_DIR": str(place / "inductor"), "TORCHINDUCTOR_COMPILE_THREADS": "4"}
            makers[name] = lambda name=name, command=command, place=place, environ=environ: Contender(  # type: ignore[misc]
                name, command, place, environ
            )
        ready_by = time.time() + 0.6 * options.seconds
        # our kernels are chosen by their measured times: nobody else may use the GPU meanwhile
        found = race(makers, TURNS, ready_by, deadline, quiet=lambda name: name.startswith("wholestep"))
    what = network
    for name, row in found.items():
        times = [t for turn in row.pop("turns") for t in turn["ms"]]
        what = row.pop("what", what)
        if "error" in row:
            row["failed"] = row.pop("error")
        elif times:
            row |= {"ms": statistics.median(times), "ms_all": times}
        rows[name] = row
    return {"what": what, "rows": rows, "varies": varies(rows)}


def varies(rows: dict[str, Any]) -> bool | None:
    """Whether torch.compile's peaks differ with its budget; None where they were not measured."""
    peaks = [r["peak_bytes"] for name, r in rows.items() if name.startswith("torch.compile") and "peak_bytes" in r]
    return None if len(peaks) < 2 else max(peaks) > (1 + SAME_PEAK) * min(peaks)


def memory_of(row: dict[str, Any]) -> int | None:
    """Measured bytes; on a CPU, where nothing measures them, what our plan says."""
    return row.get("peak_bytes", row.get("planned_peak"))


def plot(title: str, rows: dict[str, Any]) -> str:
    """Milliseconds per step against peak memory, a line per system, as SVG."""
    points: dict[str, list[tuple[float, float]]] = {}
    for name, row in rows.items():
        size = memory_of(row)
        if size is not None and "ms" in row:
            points.setdefault(name.split(" ")[0], []).append((size / 1e9, row["ms"]))
    if not points:
        return ""
    width, height, left, top, bottom = 720, 420, 70, 40, 50
    xs = [x for found in points.values() for x, _ in found]
    ys = [y for found in points.values() for _, y in found]
    low_x, high_x, low_y, high_y = 0.0, max(xs) * 1.05, min(ys) * 0.9, max(ys) * 1.05

    def place(x: float, y: float) -> tuple[float, float]:
        across = left + (width - left - 20) * (x - low_x) / max(high_x - low_x, 1e-9)
        return across, top + (height - top - bottom) * (1 - (y - low_y) / max(high_y - low_y, 1e-9))

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        'font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/><text x="{left}" y="22" font-size="15">{title}</text>',
        f'<text x="{width / 2}" y="{height - 10}">peak memory, GB</text><text x="8" y="34">ms per step</text>',
    ]
    for i in range(5):
        x, y = low_x + (high_x - low_x) * i / 4, low_y + (high_y - low_y) * i / 4
        across, down = place(x, y)
        parts.append(f'<line x1="{left}" x2="{width - 20}" y1="{down:.1f}" y2="{down:.1f}" stroke="#eee"/>')
        parts.append(f'<text x="8" y="{down + 4:.1f}">{y:.3g}</text>')
        parts.append(f'<text x="{across - 10:.1f}" y="{height - bottom + 18}">{x:.3g}</text>')
    for number, (system, found) in enumerate(points.items()):
        colour = COLOURS[system]
        places = [place(x, y) for x, y in sorted(found)]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="1.6"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{colour}"/>' for x, y in places]
        parts.append(f'<circle cx="{width - 180}" cy="{top + 10 + 18 * number}" r="4" fill="{colour}"/>')
        parts.append(f'<text x="{width - 170}" y="{top + 14 + 18 * number}">{system}</text>')
    return "\n".join([*parts, "</svg>", ""])


def page(record: dict[str, Any]) -> str:
    """The record as a page."""
    lines = [
        "# Time against memory",
        "",
        f"`{record['command']}` on {record['machine']}, torch {record['torch']}, Python {record['python']}. bf16; "
        f"every system in a process of its own, median of {TURNS * STEPS} steps in {TURNS} turns. Memory: "
        "`torch.cuda.max_memory_allocated` less what was there before the system was made; the plan's own peak beside "
        "it.",
        "",
        "*wholestep* x: `memory_budget=x`, a share of its peak without one. *torch.compile* x: torch's "
        "`activation_memory_budget`. *checkpoint every block*: `torch.utils.checkpoint` on each transformer block or "
        "residual layer.",
    ]
    for name, network in record["networks"].items():
        lines += ["", f"## {network['what']}", "", "| system | ms per step | peak GB | planned GB | made in s |"]
        lines.append("|---|---:|---:|---:|---:|")
        for system, row in network["rows"].items():
            if "failed" in row:
                lines.append(f"| {system} | failed: {row['failed'].replace('|', '/')} | | | |")
                continue
            cells = [f"{row[k] / 1e9:.3f}" if k in row else "" for k in ("peak_bytes", "planned_peak")]
            lines.append(f"| {system} | {row['ms']:.2f} | {cells[0]} | {cells[1]} | {row['make_seconds']:.1f} |")
        if network.get("varies") is False:
            lines += ["", "torch.compile's peaks do not differ with its budget: these rows are no measurement of it."]
        lines += ["", f"![{name}](budget_{name}.svg)"]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "bench" / "results")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--network", action="append", choices=("gpt2", "resnet50"), help="one of them alone")
    parser.add_argument("--only", nargs="+", help=f"systems, of {', '.join(systems())}")
    parser.add_argument("--seconds", type=float, default=90.0, help="limit per network")
    parser.add_argument("--contender", choices=systems(), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=pathlib.Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.contender:
        run_contender(options)
        return
    here = describe()
    machine = here.cuda[0].name if options.device == "cuda" else f"{here.cpu}, {usable_cores()} cores"
    record: dict[str, Any] = {
        "command": "python bench/budget.py" + (" --device cuda" if options.device == "cuda" else ""),
        "machine": machine,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "networks": {},
    }
    options.out.mkdir(parents=True, exist_ok=True)
    file = options.out / "budget.json"
    before = json.loads(file.read_text()) if file.exists() else {}
    if all(before.get(key) == record[key] for key in ("machine", "torch", "python")):
        record["networks"] = before["networks"]  # what is not measured again stays
    for name in options.network or ("gpt2", "resnet50"):
        found = measure(name, options.only or systems(), options)
        if options.only and name in record["networks"]:
            rows = record["networks"][name]["rows"] | found["rows"]
            found = {"what": found["what"], "rows": rows, "varies": varies(rows)}
        record["networks"][name] = found
        (options.out / f"budget_{name}.svg").write_text(plot(found["what"], found["rows"]))
        file.write_text(json.dumps(record, indent=1) + "\n")
        (options.out / "budget.md").write_text(page(record))
        print(
            json.dumps({n: {k: v for k, v in r.items() if k != "ms_all"} for n, r in found["rows"].items()}, indent=1)
        )


if __name__ == "__main__":
    main()
