"""Reference execution on a GPU and on this torch: networks of the zoo train like eager PyTorch, then GPT-2 is timed.

Run where there is a GPU: `python bench/cuda_reference.py [--out DIR]`. CI has none; bench/results/ holds the record.
`--rounding NETWORK` trains eagerly alone, anywhere: how far ten steps get from those of weights that are one rounding
away.
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
import traceback

import torch

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import wholestep as ws  # noqa: E402
from tests.zoo import ZOO  # noqa: E402
from tests.zoo.compare import KINDS, STEPS, compare, far_buffers, optimizer_for  # noqa: E402

NETWORKS = [
    "gpt2",
    "llama",
    "gemma2",
    "opt",
    "bert",
    "deberta-v2",
    "albert",
    "t5",
    "bart",
    "resnet",
    "efficientnet",
    "convnext",
    "vit",
    "swin",
    "whisper",
    "wav2vec2-classifier",
    "mixtral",
    "mamba",
    "lstm",
    "dlrm",
    "wavenet",
    "mlp-mixer",
    "unet",
    "convnet",
    "graph-index-add",
    "graph-attention",
    "tied-gpt",
    "checkpointed-gpt",
    "in-place",
    "frozen-backbone",
]


def check(device: str) -> list[dict]:
    rows = []
    for name in NETWORKS:
        entry = ZOO[name]
        for index, kind in enumerate(KINDS):
            row = {"network": name, "optimizer": kind, "device": device}
            try:
                found = compare(entry, kind, device)
                row |= {"loss": found.loss, "parameters": found.parameters, "agrees": found.agrees(entry.lr[index])}
            except Exception as error:
                row |= {"agrees": False, "error": f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"}
                traceback.print_exc()
            rows.append(row)
            print(row, flush=True)
    return rows


def eagerly(name: str, kind: str, nudge: int | None = None) -> torch.nn.Module:
    """A network after ten eager steps; nudge: of weights that are at most one rounding away, by this seed."""
    entry = ZOO[name]
    model, batch = entry.build()
    if nudge is not None:
        numbers = torch.Generator().manual_seed(nudge)
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(1 + (torch.rand(p.shape, generator=numbers) - 0.5) * torch.finfo(p.dtype).eps)
    optimizer = optimizer_for(kind, entry, model)
    for _ in range(STEPS):
        optimizer.zero_grad()
        entry.loss(model, batch).backward()
        optimizer.step()
    return model


def rounding(name: str, seeds: int = 6) -> list[str]:
    """A row for each seed: what one rounding of the weights makes of eager training."""
    lines = ["| optimizer | seed | parameters apart | buffers beyond the limit |", "|---|---|---|---|"]
    for kind in KINDS:
        wanted = eagerly(name, kind)
        for seed in range(seeds):
            found = eagerly(name, kind, seed)
            pairs = zip(found.parameters(), wanted.parameters(), strict=True)
            apart = max(float((a - b).detach().abs().max()) for a, b in pairs)
            far = far_buffers(found, wanted, 1e-5)
            told = f"{', '.join(far[:2])}{', ...' if len(far) > 2 else ''} ({len(far)})" if far else "none"
            lines.append(f"| {kind} | {seed} | {apart:.1e} | {told} |")
    return lines


def time_gpt2(device: str) -> dict:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)
    model = GPT2LMHeadModel(config).train().to(device)
    twin = copy.deepcopy(model)
    ids = torch.randint(0, config.vocab_size, (4, 512), device=device)
    batch = {"input_ids": ids, "labels": ids}
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    eager_optimizer = torch.optim.AdamW(twin.parameters(), lr=3e-4)
    step = ws.compile(model, None, optimizer, batch, clip_norm=1.0)

    def eager() -> torch.Tensor:
        eager_optimizer.zero_grad()
        loss = twin(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(twin.parameters(), 1.0)
        eager_optimizer.step()
        return loss.detach()

    def timed(run) -> tuple[float, float]:
        torch.cuda.synchronize()
        start = time.perf_counter()
        loss = float(run())
        torch.cuda.synchronize()
        return time.perf_counter() - start, loss

    ours, theirs, worst = [], [], 0.0
    for _ in range(12):
        mine, loss = timed(lambda: step(**batch))
        other, wanted = timed(eager)
        ours.append(mine)
        theirs.append(other)
        worst = max(worst, abs(loss - wanted) / wanted)
    return {
        "what": "GPT-2 124M, fp32, batch 4x512, AdamW, clip 1.0; reference execution through ATen, not tuned",
        "tokens_per_step": 4 * 512,
        "compiled_ms": statistics.median(ours[2:]) * 1e3,
        "eager_ms": statistics.median(theirs[2:]) * 1e3,
        "largest_loss_difference": worst,
        "compile_seconds": step.report().seconds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "bench" / "results")
    parser.add_argument("--rounding", metavar="NETWORK")
    options = parser.parse_args()
    if options.rounding:
        print("\n".join(rounding(options.rounding)))
        return
    out = options.out
    devices = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])
    torch.set_num_threads(4)
    torch.backends.cudnn.allow_tf32 = False  # both sides in full float32, and by kernels that repeat themselves
    torch.backends.cudnn.deterministic = True
    record = {
        "command": "python bench/cuda_reference.py",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "gpu": torch.cuda.get_device_name() if "cuda" in devices else None,
        "networks": [row for device in devices for row in check(device)],
    }
    if "cuda" in devices:
        record["gpt2"] = time_gpt2("cuda")
    out.mkdir(parents=True, exist_ok=True)
    (out / "cuda_reference.json").write_text(json.dumps(record, indent=1) + "\n")
    good = sum(bool(r["agrees"]) for r in record["networks"])
    lines = [
        "# Reference execution against eager PyTorch",
        "",
        f"`{record['command']}` on {record['gpu'] or 'CPU alone'}, torch {record['torch']}, Python {record['python']}.",
        "Ten steps in float32 from the same start; largest relative difference of the loss, largest of a parameter.",
        f"{good} of {len(record['networks'])} agree (loss 1e-5 relative, parameters 1e-4).",
        "",
        "| network | optimizer | device | loss | parameters | agrees |",
        "|---|---|---|---|---|---|",
    ]
    for r in record["networks"]:
        figures = f"{r['loss']:.1e} | {r['parameters']:.1e}" if "loss" in r else f"{r['error']} | "
        lines.append(
            f"| {r['network']} | {r['optimizer']} | {r['device']} | {figures} | {'yes' if r['agrees'] else 'no'} |"
        )
    if "gpt2" in record:
        g = record["gpt2"]
        lines += [
            "",
            f"{g['what']}: compiled {g['compiled_ms']:.1f} ms, eager {g['eager_ms']:.1f} ms per step (medians of 10, "
            f"interleaved); losses agree to {g['largest_loss_difference']:.1e} relative.",
        ]
    (out / "cuda_reference.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines[-8:]))


if __name__ == "__main__":
    main()
