"""What planning costs and what it brings: time against size, and peak memory against program order and lower bound.

Both kinds of plan are made: state that changes only when nothing else is left to do (CPU), and updates as early as they
can be (CUDA). Each is the first plan of a process of its own, as a user's is; the networks are then planned once more.
Run: `python bench/plan.py [--out DIR]`; `--small` is a dry run. bench/results/plan.md holds the record.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import pathlib
import platform
import sys
import time
from collections.abc import Callable
from functools import partial
from multiprocessing import get_context
from typing import Any

import torch
from torch import nn

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from wholestep.api import PIPELINE, host_numbers  # noqa: E402
from wholestep.backends import kernels  # noqa: E402
from wholestep.capture.capture import capture  # noqa: E402
from wholestep.dialects.move.verify import verify_plan  # noqa: E402
from wholestep.dialects.step import StepBuilder  # noqa: E402
from wholestep.ir.builtin import add_function, finish_function, module  # noqa: E402
from wholestep.ir.core import Op  # noqa: E402
from wholestep.ir.passes import run_pipeline  # noqa: E402
from wholestep.ir.types import F32, TensorType  # noqa: E402
from wholestep.machine.describe import describe, package_version, usable_cores  # noqa: E402
from wholestep.options import Options  # noqa: E402
from wholestep.plan import Plan, plan_function, plan_to_module  # noqa: E402
from wholestep.training.autodiff import gradients  # noqa: E402
from wholestep.training.build import build_step  # noqa: E402
from wholestep.training.optimizers import plan_optimizer  # noqa: E402
from wholestep.training.traced_vjp import VjpCache  # noqa: E402


def text_batch(length: int = 128) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, 1000, (1, length))
    return {"input_ids": ids, "labels": ids}


def image_batch(rows: int, pixels: int) -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.randn(rows, 3, pixels, pixels), "labels": torch.randint(0, 10, (rows,))}


def gpt2(small: bool, layers: int = 12, width: int = 768) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_layer": 2, "n_embd": 48, "vocab_size": 1009} if small else {"n_layer": layers, "n_embd": width}
    return GPT2LMHeadModel(GPT2Config(**sizes)), text_batch()


def bert_large(small: bool) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    from transformers import BertConfig, BertForMaskedLM

    sizes: dict[str, Any] = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16}
    sizes["intermediate_size"] = 4096
    if small:
        sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    return BertForMaskedLM(BertConfig(**sizes)), text_batch()


def resnet50(small: bool) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    from transformers import ResNetConfig, ResNetForImageClassification

    sizes: dict[str, Any] = {"embedding_size": 8, "hidden_sizes": [16, 16], "depths": [1, 1]} if small else {}
    return ResNetForImageClassification(ResNetConfig(num_labels=10, **sizes)), image_batch(4, 32 if small else 128)


def efficientnet(small: bool) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    from transformers import EfficientNetConfig, EfficientNetForImageClassification

    sizes: dict[str, Any] = {"width_coefficient": 1.0, "depth_coefficient": 1.0, "hidden_dim": 1280}
    if small:
        sizes |= {"width_coefficient": 0.25, "depth_coefficient": 0.25, "hidden_dim": 320}
    model = EfficientNetForImageClassification(EfficientNetConfig(num_labels=10, **sizes))
    return model, image_batch(4, 32 if small else 128)


def vit(small: bool) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    from transformers import ViTConfig, ViTForImageClassification

    sizes: dict[str, Any] = {"image_size": 96, "hidden_size": 384, "num_attention_heads": 6, "intermediate_size": 1536}
    if small:
        sizes |= {"hidden_size": 48, "num_hidden_layers": 2, "intermediate_size": 96}
    return ViTForImageClassification(ViTConfig(num_labels=10, **sizes)), image_batch(4, 96)


def t5(small: bool) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    from transformers import T5Config, T5ForConditionalGeneration

    sizes: dict[str, Any] = {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2} if small else {}
    return T5ForConditionalGeneration(T5Config(decoder_start_token_id=0, **sizes)), text_batch()


#: name -> network, options, what the table calls it
NETWORKS: dict[str, tuple[Any, dict[str, Any], str]] = {
    "gpt2": (gpt2, {}, "GPT-2 124M, 1x128, AdamW"),
    "gpt2-bf16": (gpt2, {"precision": "bf16", "clip_norm": 1.0}, "GPT-2 124M, 1x128, AdamW, bf16, clipped"),
    "bert-large": (bert_large, {}, "BERT-large, 1x128, AdamW"),
    "resnet50": (resnet50, {}, "ResNet-50, 4 images of 128x128, AdamW"),
    "efficientnet": (efficientnet, {}, "EfficientNet-B0, 4 images of 128x128, AdamW"),
    "vit": (vit, {}, "ViT-S/16, 4 images of 96x96, AdamW"),
    "t5": (t5, {}, "T5-small, 1x128, AdamW"),
}


def program_of(model: nn.Module, batch: dict[str, torch.Tensor], **options: Any) -> tuple[Op, list[int]]:
    """The whole step of a network, and the arguments that are numbers on the host."""
    optimizer = torch.optim.AdamW(model.train().parameters())
    captured = capture(model, None, batch)
    program = build_step(captured, plan_optimizer(optimizer, captured.parameters, None), Options(**options))
    run_pipeline(program.module, PIPELINE)
    return program.function, host_numbers(program, optimizer)


def recurrent(steps: int, width: int = 32, rows: int = 8) -> Op:
    """A gated recurrent network unrolled over time, with its gradients and a plain update: about 62 ops per step."""
    function = add_function(
        module(),
        "step",
        [TensorType((steps, rows, width), F32)]
        + [TensorType((width, width), F32)] * 6
        + [TensorType((width,), F32)] * 3,
    )
    b = StepBuilder(function.regions[0].block, phase="forward")
    xs, *weights = function.regions[0].block.arguments
    h = b.full(0.0, (rows, width), F32)
    for i in range(steps):
        x = b.reshape(b.slice(xs, dim=0, start=i, end=i + 1), shape=(rows, width))
        gates = []
        for k in range(3):
            seen = b.mul(gates[1], h) if k == 2 else h
            mine = b.contract(x, weights[2 * k], spec="ab,bc->ac")
            total = b.add(b.add(mine, b.contract(seen, weights[2 * k + 1], spec="ab,bc->ac")), weights[6 + k])
            gates.append(b.tanh(total) if k == 2 else b.sigmoid(total))
        h = b.add(b.mul(gates[0], h), b.mul(b.sub(1.0, gates[0]), gates[2]))
    loss = b.mean(b.mul(h, h), dims=(0, 1))
    b.phase = "backward"
    grads = gradients(b, loss, weights, VjpCache(torch.device("cpu")), None)
    b.phase = "update"
    new = [b.sub(w, b.mul(g, 0.1)) for w, g in zip(weights, grads, strict=True)]
    words = [{"step.kind": "parameter", "step.donates": i + 1} for i in range(len(weights))]
    kinds = [{"step.kind": "batch"}] + [{"step.kind": "parameter"}] * len(weights)
    return finish_function(function, [loss, *new], kinds, [{"step.kind": "loss"}, *words])


#: the two kinds of plan: what `whole_updates` is, and what the tables call it
KINDS = {"whole": (True, "state last (CPU)"), "early": (False, "updates early (CUDA)")}


def measure(function: Op, numbers: list[int], again: bool = True) -> dict[str, Any]:
    """Seconds to plan for the first time, and once more, and what came out, for both kinds of plan."""
    found: dict[str, Any] = {}
    for kind, (whole, _) in KINDS.items():
        ops, found[kind] = apart(partial(measure_kind, function, numbers, whole, again))
        found["ops"] = ops
    return found | {"tracing_seconds": apart(partial(tracing_seconds, function, numbers))}


def measure_kind(function: Op, numbers: list[int], whole: bool, again: bool) -> tuple[int, dict[str, Any]]:
    """The number of ops, and the figures of one kind of plan. What is planned again finds kernels that are traced."""
    gc.collect()
    start = time.perf_counter()
    plan, expanded = plan_function(function, "cpu", numbers, whole_updates=whole)
    seconds = {"seconds": time.perf_counter() - start}
    text = plan_to_module(plan)
    start = time.perf_counter()
    verify_plan(text)
    seconds["verify_seconds"] = time.perf_counter() - start
    ops, row = len(expanded.regions[0].block), figures(plan)
    if again:
        del plan, expanded, text
        gc.collect()
        start = time.perf_counter()
        plan_function(function, "cpu", numbers, whole_updates=whole)
        seconds["again_seconds"] = time.perf_counter() - start
    return ops, seconds | row


def apart(run: Callable[[], Any]) -> Any:
    """What a function gives in a process of its own: a copy of this one, in which nothing is ever planned."""
    receiver, sender = get_context("fork").Pipe(duplex=False)
    process = get_context("fork").Process(target=lambda: sender.send(run()))
    process.start()
    sender.close()
    try:
        return receiver.recv()
    except EOFError:
        raise RuntimeError("a process that planned has ended without a result; it says why above") from None
    finally:
        process.join()


def tracing_seconds(function: Op, numbers: list[int]) -> float:
    """Seconds of a first planning run that go into tracing kernels."""
    spent, plain = 0.0, kernels.trace

    def timed(*args: Any) -> Any:
        nonlocal spent
        start = time.perf_counter()
        try:
            return plain(*args)
        finally:
            spent += time.perf_counter() - start

    kernels.trace = timed
    try:
        plan_function(function, "cpu", numbers)
    finally:
        kernels.trace = plain
    return spent


def figures(plan: Plan) -> dict[str, Any]:
    shares = [b.share for b in plan.buffers]
    return {
        "launches": len(plan.launches),
        "arena": plan.arena,
        "lower_bound": plan.lower_bound,
        "program_order_bound": plan.program_order_bound,
        "order": plan.order,
        "placer": plan.placer,
        "views": shares.count("view"),
        "in_place": shares.count("in_place"),
        "donated": shares.count("donated"),
        "state_bytes": plan.bytes_in("external"),
        "constant_bytes": plan.bytes_in("constant"),
    }


def report(record: dict[str, Any]) -> str:
    """The record as a page."""
    mega = 1 / 2**20
    lines = [
        "# Planning: what it costs and what it brings",
        "",
        f"{record['machine']}; torch {record['torch']}, omnimalloc {record['omnimalloc']}, Python {record['python']}. "
        f"Written by `python bench/plan.py`; load of the machine when it began: {record['load']:.2f}"
        + (", so others were at work on it." if record["load"] > 0.5 else "."),
        "",
        "Plans are made for a CPU in both kinds: *state last*, as a CPU runs them (nothing of the model changes before "
        "everything else is done), and *updates early*, as CUDA runs them. Arena: all memory of the step beside its "
        "arguments. *Program order* is the least arena that the program's own order needs, in-place writes and "
        "donation included; *bound* the least that the chosen order needs; *gap* how far the placement is from that. "
        "Seconds are those of the first plan of a process, which has captured a network before (that imports a lot), "
        "and include expanding the optimizer's updates and tracing every kernel; *tracing* is the second of these "
        "alone; *again* is the same program planned once more in that process, where much is known already; *verify* "
        "is `verify_plan` on the plan in the move dialect. After the order's name stand its largest templates: 12 x "
        "59 are 59 launches that come twelve times, one after the other, in the same order on memory of the same "
        "sizes.",
        "",
        "| network | plan | ops | launches | seconds | tracing | again | verify | arena MiB | gap |"
        " program order MiB | saved by order | order |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---|",
    ]
    for name, found in record["networks"].items():
        for kind, (_, title) in KINDS.items():
            row = found[kind]
            gap, saved = row["arena"] / row["lower_bound"] - 1, 1 - row["lower_bound"] / row["program_order_bound"]
            lines.append(
                f"| {NETWORKS[name][2]} | {title} | {found['ops']} | {row['launches']} | {row['seconds']:.2f} | "
                f"{found['tracing_seconds']:.2f} | {row['again_seconds']:.2f} | {row['verify_seconds']:.2f} | "
                f"{row['arena'] * mega:.1f} | {gap:.2%} | {row['program_order_bound'] * mega:.1f} | {saved:.1%} | "
                f"{row['order']} |"
            )
    lines += ["", "## Growth", "", "![planning time against number of ops](plan.svg)"]
    for key, title in SERIES.items():
        lines += ["", f"### {title}", "", "| | plan | ops | launches | seconds | microseconds per op | verify | gap |"]
        lines.append("|---|---|---:|---:|---:|---:|---:|---:|")
        for name, found in record[key].items():
            for kind, (_, what) in KINDS.items():
                row = found[kind]
                lines.append(
                    f"| {name} | {what} | {found['ops']} | {row['launches']} | {row['seconds']:.2f} | "
                    f"{1e6 * row['seconds'] / found['ops']:.0f} | {row['verify_seconds']:.2f} | "
                    f"{row['arena'] / row['lower_bound'] - 1:.2%} |"
                )
    return "\n".join(lines) + "\n"


SERIES = {"gpt2_layers": "GPT-2 by layers (width 192)", "recurrent": "An unrolled recurrent network"}


def plot(record: dict[str, Any]) -> str:
    """Seconds to plan against ops, one line per network and kind of plan, as SVG."""
    width, height, left, right, top, bottom = 720, 360, 56, 230, 36, 44
    lines = [
        (
            f"{SERIES[key].removesuffix(' (width 192)')}: {title}",
            [(f["ops"], f[kind]["seconds"]) for f in found.values()],
        )
        for key, found in ((k, record[k]) for k in SERIES)
        for kind, (_, title) in KINDS.items()
    ]
    most = max(ops for _, points in lines for ops, _ in points)
    longest = max(seconds for _, points in lines for _, seconds in points)

    def at(ops: float, seconds: float) -> tuple[float, float]:
        inner = height - top - bottom
        return left + ops / most * (width - left - right), height - bottom - seconds / longest * inner

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        'font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="{left}" y="20" font-size="14">seconds to plan, by number of ops</text>',
    ]
    for i in range(5):
        x, y = at(most * i / 4, longest * i / 4)
        parts.append(f'<line x1="{left}" x2="{width - right}" y1="{y:.0f}" y2="{y:.0f}" stroke="#dddddd"/>')
        parts.append(f'<text x="{left - 6}" y="{y + 4:.0f}" text-anchor="end">{longest * i / 4:.1f}</text>')
        parts.append(f'<text x="{x:.0f}" y="{height - 22}" text-anchor="middle">{most * i / 4:,.0f}</text>')
    for i, (name, points) in enumerate(lines):
        colour = ("#1f6feb", "#79b0ff", "#d1242f", "#f29a9f")[i]
        drawn = " ".join("{:.1f},{:.1f}".format(*at(*p)) for p in points)
        parts.append(f'<polyline points="{drawn}" fill="none" stroke="{colour}" stroke-width="2"/>')
        for x, y in (at(*p) for p in points):
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>')
        for line, word in enumerate(name.split(": ")):
            parts.append(
                f'<text x="{width - right + 12}" y="{top + 16 + 40 * i + 15 * line}" fill="{colour}">{word}</text>'
            )
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "bench" / "results")
    parser.add_argument("--small", action="store_true", help="tiny sizes: a dry run")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    here = describe()
    record: dict[str, Any] = {
        "machine": f"{here.cpu}, {usable_cores()} cores",
        "load": os.getloadavg()[0],
        "torch": torch.__version__,
        "python": platform.python_version(),
        "omnimalloc": package_version("omnimalloc") or "not installed",
        "networks": {},
        "gpt2_layers": {},
        "recurrent": {},
    }
    for name, (make, given, _) in NETWORKS.items():
        record["networks"][name] = measure(*program_of(*make(options.small), **given))
        print(name, json.dumps(record["networks"][name]), flush=True)
    for layers in (2, 4) if options.small else (2, 4, 8, 16, 32, 48):
        found = measure(*program_of(*gpt2(False, layers, 48 if options.small else 192)), again=False)
        record["gpt2_layers"][f"{layers} layers"] = found
        print(layers, *(f"{found[k]['seconds']:.2f}" for k in KINDS), flush=True)
    for steps in (4, 16) if options.small else (16, 64, 160, 320, 640, 1290):
        found = measure(recurrent(steps), [], again=False)
        record["recurrent"][f"{steps} steps"] = found
        print(steps, *(f"{found[k]['seconds']:.2f}" for k in KINDS), flush=True)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "plan.json").write_text(json.dumps(record, indent=1) + "\n")
    (options.out / "plan.md").write_text(report(record))
    (options.out / "plan.svg").write_text(plot(record))


if __name__ == "__main__":
    main()
