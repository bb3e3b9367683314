"""Training in mixed precision beside torch.autocast: loss curves, casts, synchronisation, loss scaling, random numbers.

Run where there is a GPU: `python bench/training.py [--out DIR]`; `--small --device cpu` is a dry run. CI has no GPU;
bench/results/training.md holds the record.
"""

from __future__ import annotations

import argparse
import copy
import json
import pathlib
import platform
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import wholestep as ws  # noqa: E402
from wholestep.dialects.step import philox  # noqa: E402

#: runtime calls that make the host wait for the device
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy")


class Network:
    """A model, its batches, its optimizer and clipping."""

    def __init__(self, name: str, small: bool, device: str):
        from transformers import GPT2Config, GPT2LMHeadModel, ResNetConfig, ResNetForImageClassification

        self.name, self.device = name, device
        self.clip: float | None = None
        torch.manual_seed(0)
        if name == "gpt2":
            self.rows, self.length, self.vocabulary = (2, 32, 101) if small else (8, 1024, 50257)
            sizes = {"n_layer": 2, "n_head": 2, "n_embd": 32, "n_positions": 32, "vocab_size": 101} if small else {}
            self.model: nn.Module = GPT2LMHeadModel(
                GPT2Config(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **sizes)
            )
            self.clip, self.items = 1.0, f"{self.rows}x{self.length} tokens"
        else:
            self.rows, self.pixels, self.classes = (4, 32, 5) if small else (256, 224, 1000)
            sizes = {"embedding_size": 8, "hidden_sizes": [16, 16], "depths": [1, 1]} if small else {}
            self.model = ResNetForImageClassification(ResNetConfig(num_labels=self.classes, **sizes))
            self.items = f"{self.rows} images of {self.pixels}x{self.pixels}"
        self.model = self.model.to(device).train()

    def optimizer(self, model: nn.Module) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
        """The optimizer and its schedule: 30 steps of warm-up, without which runs diverge from their own repetition."""
        optimizer: torch.optim.Optimizer
        if self.name == "gpt2":
            optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
        else:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.005, momentum=0.9)
        return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 30))

    def batch(self, number: int) -> dict[str, torch.Tensor]:
        """Something that can be learned: a walk over 512 tokens; noisy classes that colour images."""
        draw = torch.Generator(self.device).manual_seed(number)
        if self.name == "gpt2":
            start = torch.randint(0, 512, (self.rows, 1), generator=draw, device=self.device)
            jump = torch.randint(1, 8, (self.rows, self.length), generator=draw, device=self.device)
            ids = (start + jump.cumsum(1)) % 512 * 97 % self.vocabulary
            return {"input_ids": ids, "labels": ids}
        labels = torch.randint(0, min(10, self.classes), (self.rows,), generator=draw, device=self.device)
        noise = torch.rand(self.rows, generator=draw, device=self.device) < 0.4  # so that the loss stays away from 0
        shape = (self.rows, 3, self.pixels, self.pixels)
        images = torch.randn(shape, generator=draw, device=self.device)
        colour = torch.stack([torch.sin(labels * (i + 1.0)) for i in range(3)], 1)
        other = torch.randint(0, min(10, self.classes), (self.rows,), generator=draw, device=self.device)
        return {"pixel_values": images + colour[:, :, None, None], "labels": torch.where(noise, other, labels)}


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def train(network: Network, steps: int, run: Callable[[dict[str, torch.Tensor]], torch.Tensor]) -> dict[str, Any]:
    """Losses of a run, its median step time and its peak memory."""
    losses, seconds = [], []
    if network.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    for number in range(steps):
        batch = network.batch(number)
        wait(network.device)
        start = time.perf_counter()
        losses.append(run(batch).detach().float().clone())
        wait(network.device)
        seconds.append(time.perf_counter() - start)
    peak = torch.cuda.max_memory_allocated() if network.device == "cuda" else 0
    found = [float(loss) for loss in losses]
    return {"losses": found, "ms": statistics.median(seconds[2:] or seconds) * 1e3, "peak_gb": peak / 1e9}


def eager(network: Network, dtype: torch.dtype | None, scaler: torch.amp.GradScaler | None = None) -> Any:
    """A plain PyTorch training step on a copy of the model."""
    model = copy.deepcopy(network.model)
    optimizer, schedule = network.optimizer(model)

    def run(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        optimizer.zero_grad()
        with torch.autocast(network.device, dtype or torch.bfloat16, enabled=dtype is not None):
            loss = model(**batch).loss
        (loss if scaler is None else scaler.scale(loss)).backward()
        if scaler is not None:
            scaler.unscale_(optimizer)
        if network.clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), network.clip)
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        schedule.step()
        return loss

    return run


def compiled(
    network: Network, **options: Any
) -> tuple[ws.TrainStep, Callable[[dict[str, torch.Tensor]], torch.Tensor]]:
    """Our step on a copy of the model, alone and with its schedule."""
    model = copy.deepcopy(network.model)
    optimizer, schedule = network.optimizer(model)
    step = ws.compile(model, None, optimizer, network.batch(0), clip_norm=network.clip, **options)

    def run(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        loss = step(**batch)
        schedule.step()
        return loss

    return step, run


def smooth(losses: list[float], width: int = 10) -> list[float]:
    return [statistics.fmean(losses[max(0, i - width + 1) : i + 1]) for i in range(len(losses))]


def apart(first: list[float], second: list[float]) -> float:
    """The largest relative distance of two smoothed curves."""
    return max(abs(a - b) / abs(b) for a, b in zip(smooth(first), smooth(second), strict=True))


def host_waits(step: ws.TrainStep, network: Network, steps: int = 5) -> dict[str, Any]:
    """Steps under torch's own sync detector, then under the profiler: every call in which the host waits."""
    if network.device != "cuda":
        return {}
    batches = [network.batch(n) for n in range(steps)]
    wait("cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        for batch in batches:
            step(**batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    wait("cuda")
    kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=kinds) as profile:
        for batch in batches:
            step(**batch)
        marker = len(batches)
    found: dict[str, int] = {}
    inside = 0
    host = torch.autograd.DeviceType.CPU
    ranges = [e for e in profile.events() if e.name == "wholestep.step" and e.device_type == host]
    spans = [(e.time_range.start, e.time_range.end) for e in ranges]
    for event in profile.events():
        if event.name in WAITS or "DtoH" in event.name:
            when = event.time_range.start
            if any(a <= when <= b for a, b in spans) or "DtoH" in event.name:
                name = f"{event.name} in {innermost(profile.events(), event)}"
                found[name] = found.get(name, 0) + 1
        inside += event.name == "cudaLaunchKernel"
    return {"steps": marker, "waits": found, "launches per step": inside / marker, "sync_debug_mode": "no complaint"}


def innermost(events: Any, event: Any) -> str:
    """The shortest call on the host that was under way when an event began."""
    when, host = event.time_range.start, torch.autograd.DeviceType.CPU
    around = [
        e for e in events if e is not event and e.device_type == host and e.time_range.start <= when < e.time_range.end
    ]
    return min(around, key=lambda e: e.time_range.elapsed_us()).name if around else "nothing"


def curves(network: Network, steps: int) -> dict[str, Any]:
    """The same training four times: autocast in bf16, ours in bf16; autocast again and float32 for a sense of scale."""
    dtype = torch.bfloat16
    theirs = train(network, steps, eager(network, dtype))
    step, run = compiled(network, precision="bf16")
    ours = train(network, steps, run)
    report = step.report()
    waits = host_waits(step, network)
    again = train(network, steps, eager(network, dtype))
    plain = train(network, steps, eager(network, None))
    return {
        "items": network.items,
        "steps": steps,
        "autocast": theirs,
        "wholestep": ours,
        "float32": plain,
        "apart": apart(ours["losses"], theirs["losses"]),
        "autocast again apart": apart(again["losses"], theirs["losses"]),
        "float32 apart": apart(plain["losses"], theirs["losses"]),
        "waits": waits,
        "casts": vars_of(report.casts),
        "autocast casts": vars_of(report.autocast),
        "report": str(report),
    }


def vars_of(found: Any) -> Any:
    names = ("executed", "absorbed", "count")
    return {n: getattr(found, n) for n in names} if hasattr(found, "executed") else str(found)


def loss_scaling(network: Network, steps: int) -> dict[str, Any]:
    """fp16 with dynamic loss scaling beside torch.amp.GradScaler, from a scale that is too large at first."""
    settings = {"init_scale": 2.0**24, "growth_interval": 10}
    scaler = torch.amp.GradScaler(network.device, **settings)
    scales: dict[str, list[float]] = {"autocast": [], "wholestep": []}
    reference = eager(network, torch.float16, scaler)

    def theirs(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        loss = reference(batch)
        scales["autocast"].append(scaler.get_scale())
        return loss

    first = train(network, steps, theirs)
    step, run = compiled(network, precision="fp16", loss_scale=settings)

    def ours(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        loss = run(batch)
        scales["wholestep"].append(step.state_dict()["scaler"]["scale"])
        return loss

    second = train(network, steps, ours)
    waits = host_waits(step, network)
    return {
        "apart": apart(second["losses"], first["losses"]),
        "scales": scales,
        "skipped": step.report().skipped,
        "waits": waits,
    }


def random_numbers(device: str) -> dict[str, Any]:
    """The generator gives the same bits on every device, and Triton's Philox the same again."""
    found: dict[str, Any] = {}
    key, stream, size = (0x123456789ABCDEF, 7, 3), 5, 1 << 20
    drawn = {d: philox.draw("uniform", (size,), torch.float32, key, stream, d).cpu() for d in {"cpu": 0, device: 0}}
    found[f"uniform numbers on cpu and {device} are equal"] = torch.equal(drawn["cpu"], drawn[device])
    if device == "cuda":
        found["Triton's Philox gives the same words"] = triton_agrees(key, stream, drawn["cpu"])
    for name, run in (
        ("ours", lambda n: philox.draw("uniform", (n,), torch.float32, key, stream, device)),
        ("torch.rand", lambda n: torch.rand(n, device=device)),
    ):
        count, seconds = 1 << 24, []
        for _ in range(5):
            wait(device)
            start = time.perf_counter()
            run(count)
            wait(device)
            seconds.append(time.perf_counter() - start)
        found[f"ns per number, {name}"] = round(statistics.median(seconds) / count * 1e9, 4)
    return found


def triton_agrees(key: tuple[int, int, int], stream: int, expected: torch.Tensor) -> bool:
    """Whether Triton's own generator gives the same uniform numbers for this key and stream."""
    import triton
    import triton.language as tl

    @triton.jit
    def kernel(out, seed, stream, step, micro, BLOCK: tl.constexpr):
        block = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        zero = block * 0
        a, b, c, d = tl.philox(
            seed,
            block.to(tl.uint32),
            (zero + stream).to(tl.uint32),
            (zero + step).to(tl.uint32),
            (zero + micro).to(tl.uint32),
        )
        tl.store(out + 4 * block, a.to(tl.int32, bitcast=True))
        tl.store(out + 4 * block + 1, b.to(tl.int32, bitcast=True))
        tl.store(out + 4 * block + 2, c.to(tl.int32, bitcast=True))
        tl.store(out + 4 * block + 3, d.to(tl.int32, bitcast=True))

    words = torch.empty(expected.numel(), dtype=torch.int32, device="cuda")
    kernel[(expected.numel() // 4096,)](words, key[0], stream, key[1], key[2], BLOCK=1024)
    uniform = ((words.cpu().to(torch.int64) & 0xFFFFFFFF) >> 8).to(torch.float32) * 2.0**-24
    return torch.equal(uniform, expected)


def plot(title: str, lines: dict[str, list[float]]) -> str:
    """Loss curves as one SVG."""
    width, height, left, top = 720, 400, 60, 40
    low, high = min(map(min, lines.values())), max(map(max, lines.values()))
    steps = max(map(len, lines.values()))
    colours = {"torch.autocast bf16": "#d95f02", "wholestep bf16": "#1b66c9", "eager float32": "#999999"}

    def place(i: int, value: float) -> str:
        x = left + (width - left - 20) * i / max(steps - 1, 1)
        y = top + (height - top - 40) * (1 - (value - low) / max(high - low, 1e-9))
        return f"{x:.1f},{y:.1f}"

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        'font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/><text x="{left}" y="22" font-size="15">{title}</text>',
    ]
    for i in range(5):
        value = low + (high - low) * i / 4
        y = float(place(0, value).split(",")[1])
        parts.append(f'<line x1="{left}" x2="{width - 20}" y1="{y}" y2="{y}" stroke="#eee"/>')
        parts.append(f'<text x="8" y="{y + 4}">{value:.3g}</text>')
    for i in range(0, steps, max(1, steps // 5)):
        x = float(place(i, low).split(",")[0])
        parts.append(f'<text x="{x}" y="{height - 18}">{i}</text>')
    for number, (name, values) in enumerate(lines.items()):
        points = " ".join(place(i, v) for i, v in enumerate(values))
        dash = ' stroke-dasharray="6 4"' if name.startswith("wholestep") else ""
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colours[name]}" stroke-width="1.6"{dash}/>')
        y = top + 14 + 18 * number
        parts.append(
            f'<line x1="{width - 210}" x2="{width - 180}" y1="{y - 4}" y2="{y - 4}" stroke="{colours[name]}"{dash}/>'
        )
        parts.append(f'<text x="{width - 172}" y="{y}">{name}</text>')
    return "\n".join([*parts, "</svg>", ""])


def page(found: dict[str, Any]) -> str:
    lines = [
        "# Mixed precision beside torch.autocast",
        "",
        f"`{found['command']}` on {found['machine']}, torch {found['torch']}, Python {found['python']}.",
        "Same start, same batches, dropout off, reference execution through ATen. Curves are smoothed over 10 steps; "
        "the distance is the largest relative one.",
        "",
        "| network | batch | steps | first loss | last loss ours / autocast / float32 | distance to autocast |"
        " of autocast run again | of float32 |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, c in found["curves"].items():
        last = " / ".join(f"{smooth(c[k]['losses'])[-1]:.4f}" for k in ("wholestep", "autocast", "float32"))
        lines.append(
            f"| {name} | {c['items']} | {c['steps']} | {c['autocast']['losses'][0]:.3f} | {last} | {c['apart']:.2%} | "
            f"{c['autocast again apart']:.2%} | {c['float32 apart']:.2%} |"
        )
    lines += [
        "",
        "| network | cast bytes per step ours | absorbed | autocast's | ms per step ours / autocast | peak GB |",
    ]
    lines += ["|---|---|---|---|---|---|"]
    for name, c in found["curves"].items():
        mine, other = c["casts"], c["autocast casts"]
        theirs = f"{other['executed'] / 1e6:.1f} MB in {other['count']}" if isinstance(other, dict) else other
        lines.append(
            f"| {name} | {mine['executed'] / 1e6:.1f} MB in {mine['count']} | {mine['absorbed'] / 1e6:.1f} MB | "
            f"{theirs} | {c['wholestep']['ms']:.1f} / {c['autocast']['ms']:.1f} | "
            f"{c['wholestep']['peak_gb']:.1f} / {c['autocast']['peak_gb']:.1f} |"
        )
    lines += ["", "## Does a step wait for the device?", ""]
    for name, c in found["curves"].items():
        lines.append(f"- {name} bf16: {c['waits'] or 'not measured: no GPU'}")
    for name, c in found["scaling"].items():
        lines.append(f"- {name} fp16: {c['waits'] or 'not measured: no GPU'}")
    lines += [
        "",
        "`waits` counts calls of the CUDA runtime inside a step in which the host waits, under the profiler;",
        '`torch.cuda.set_sync_debug_mode("error")` did not complain either. A call "in nothing"',
        "lies outside every call of the host: the profiler's own wait at its end. The copy to pinned memory is the",
        "loss scale, read once it has arrived.",
        "",
        "## Loss scaling in fp16",
        "",
    ]
    for name, c in found["scaling"].items():
        same = c["scales"]["autocast"] == c["scales"]["wholestep"]
        lines.append(
            f"- {name}: loss {c['apart']:.2%} from autocast with GradScaler; {c['skipped']} updates skipped; the scale "
            f"went from {c['scales']['wholestep'][0]:g} to {c['scales']['wholestep'][-1]:g}, "
            + ("step by step as GradScaler's" if same else f"GradScaler's to {c['scales']['autocast'][-1]:g}")
        )
    lines += ["", "## Random numbers", ""]
    lines += [f"- {k}: {v}" for k, v in found["random"].items()]
    lines += [""] + [f"![{name}](training_{name}.svg)" for name in found["curves"]]
    for name, c in found["curves"].items():
        lines += ["", f"## `step.report()` of {name}", "", "```", c["report"], "```"]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--networks", nargs="*", default=["gpt2", "resnet50"])
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "bench" / "results")
    options = parser.parse_args()
    name = torch.cuda.get_device_name() if options.device == "cuda" else platform.processor() or "CPU"
    found: dict[str, Any] = {
        "command": "python bench/training.py" + (" --small" if options.small else ""),
        "machine": name,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "random": random_numbers(options.device),
        "curves": {},
        "scaling": {},
    }
    options.out.mkdir(parents=True, exist_ok=True)
    record = options.out / "training.json"
    if record.exists():  # networks that are not asked for keep what was measured before on this machine
        before = json.loads(record.read_text())
        if all(before[k] == found[k] for k in ("command", "machine", "torch", "python")):
            for part in ("curves", "scaling"):
                found[part] = {k: v for k, v in before[part].items() if k not in options.networks}
    for network_name in options.networks:
        network = Network(network_name, options.small, options.device)
        result = found["curves"][network_name] = curves(network, options.steps)
        print(network_name, f"{result['apart']:.3%} from autocast", result["waits"], flush=True)
        lines = {
            "eager float32": smooth(result["float32"]["losses"]),
            "torch.autocast bf16": smooth(result["autocast"]["losses"]),
            "wholestep bf16": smooth(result["wholestep"]["losses"]),
        }
        (options.out / f"training_{network_name}.svg").write_text(plot(f"{network_name}, {network.items}", lines))
        scaling = found["scaling"][network_name] = loss_scaling(network, min(options.steps, 40))
        print(network_name, f"fp16 {scaling['apart']:.3%} from GradScaler", scaling["waits"], flush=True)
        record.write_text(json.dumps(found, indent=1))
        (options.out / "training.md").write_text(page(found))
        del network
        if options.device == "cuda":
            torch.cuda.empty_cache()
    print((options.out / "training.md").read_text())


if __name__ == "__main__":
    main()
