"""Seconds from model to program on GPT-2 124M and BERT-large, as `step.report()` prints them, against their bars.

`python bench/compile.py [--torch]`: --torch also times torch's own tracing of forward and backward, for scale.
Writes bench/results/compile.{json,md}; exits 1 when a bar is missed.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import platform
import sys
import time

import torch

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import wholestep as ws  # noqa: E402
from wholestep.machine.describe import describe  # noqa: E402

BARS = {"GPT-2 124M": (5.0, 2.0), "BERT-large": (8.0, 3.0)}


def gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)
    return GPT2LMHeadModel(config).train(), torch.randint(0, config.vocab_size, (1, 128))


def bert_large():
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096,
        hidden_dropout_prob=0, attention_probs_dropout_prob=0,
    )  # fmt: skip
    return BertForMaskedLM(config).train(), torch.randint(0, config.vocab_size, (1, 128))


def torch_trace(model, ids) -> float:
    """Seconds that make_fx takes for forward and backward on fake tensors."""
    from torch.fx.experimental.proxy_tensor import make_fx

    names = [n for n, _ in model.named_parameters()]

    def step(parameters, ids):
        swapped = dict(zip(names, parameters, strict=True))
        loss = torch.func.functional_call(model, swapped, (), {"input_ids": ids, "labels": ids}).loss
        return torch.autograd.grad(loss, parameters, allow_unused=True)

    start = time.perf_counter()
    make_fx(step, tracing_mode="fake", _allow_non_fake_inputs=True)(list(model.parameters()), ids)
    return time.perf_counter() - start


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--torch", action="store_true", help="also time torch's own tracing")
    options = parser.parse_args()
    rows, missed = [], False
    for name, make in (("GPT-2 124M", gpt2), ("BERT-large", bert_large)):
        torch.manual_seed(0)
        model, ids = make()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        step = ws.compile(model, None, optimizer, {"input_ids": ids, "labels": ids}, clip_norm=1.0)
        report = step.report()
        bars = BARS[name]
        row = {
            "network": name,
            "seconds": report.seconds,
            "ops": report.ops,
            "bars": {"capture": bars[0], "autodiff + update": bars[1]},
        }
        if options.torch:
            row["torch make_fx forward+backward"] = torch_trace(model, ids)
        missed |= report.seconds["capture"] > bars[0] or report.seconds["autodiff + update"] > bars[1]
        rows.append(row)
        print(f"{name}\n{report}\n", flush=True)
    machine = describe()
    record = {
        "command": "python bench/compile.py" + (" --torch" if options.torch else ""),
        "machine": f"{machine.cpu}, {machine.cores} cores",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "rows": rows,
    }
    out = ROOT / "bench" / "results"
    (out / "compile.json").write_text(json.dumps(record, indent=1) + "\n")
    lines = [
        "# Seconds from model to program",
        "",
        f"`{record['command']}` on {record['machine']}, torch {record['torch']}, Python {record['python']}.",
        "AdamW, clip_norm=1.0, batch 1x128 (shapes do not matter to compile time).",
        "",
        "| network | capture (bar) | autodiff + update (bar) | verify | build | ops | make_fx of forward+backward |",
        "|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        s, b = r["seconds"], r["bars"]
        trace = r.get("torch make_fx forward+backward")
        lines.append(
            f"| {r['network']} | {s['capture']:.2f} (≤ {b['capture']:g}) | {s['autodiff + update']:.2f} "
            f"(≤ {b['autodiff + update']:g}) | {s['verify']:.2f} | {s['build']:.2f} | {sum(r['ops'].values())} | "
            f"{'not measured' if trace is None else f'{trace:.1f}'} |"
        )
    (out / "compile.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines[-2:]))
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
