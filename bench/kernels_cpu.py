"""Our products, alone and per group, and attention on CPUs beside PyTorch's: checked by float64, then timed in turns.

Products: MKL is what `torch.mm` calls; oneDNN is what PyTorch's linear layers may call instead, which it does for 16
bits only (its time includes a result of its own). Products per group: PyTorch's is one by MKL for each. Attention:
PyTorch's fused kernel, forward and backward, without the copies that a plan would need. `python bench/kernels_cpu.py
--out FILE.md`.
"""

from __future__ import annotations

import argparse
import pathlib
import statistics
import sys
import time
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from wholestep.backends.cpp import attention, grouped, product  # noqa: E402
from wholestep.backends.kernels import Spec  # noqa: E402
from wholestep.backends.providers import Region, op_by_op  # noqa: E402
from wholestep.bench.results import machine_name  # noqa: E402
from wholestep.dialects.step import StepBuilder, tensor_type  # noqa: E402
from wholestep.dialects.step.grouped import ROWS, SUMS, TURNED  # noqa: E402
from wholestep.ir.builtin import add_function, finish_function, module  # noqa: E402

ROUNDS = 25
#: what a linear layer of 512 tokens does, forward and both gradients: rows, columns, terms, and how the factors lie
PRODUCTS = [
    (kind, m, n, k)
    for m, n, k in ((512, 768, 256), (512, 1024, 256), (512, 256, 1024), (512, 8000, 256), (2048, 1024, 1024))
    for kind, m, n, k in (("forward", m, n, k), ("input gradient", m, k, n), ("weight gradient", n, k, m))
]
#: batch, heads, heads of keys, rows and keys, columns, causal
ATTENTIONS = [
    (4, 4, 4, 128, 64, True),
    (4, 4, 4, 128, 64, False),
    (8, 3, 3, 64, 64, False),
    (4, 8, 2, 128, 32, True),
    (1, 12, 12, 512, 64, False),
    (1, 8, 8, 1024, 64, True),
]
#: experts, rows of each, and the widths of their matrices
GROUPS = [(8, 128, 1024, 256), (8, 128, 256, 1024), (64, 16, 512, 256), (16, 8, 1024, 1024)]
Ways = dict[str, Callable[[], object]]


def factors(kind: str, m: int, n: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    if kind == "forward":
        return torch.randn(m, k), torch.randn(n, k).t()
    return (torch.randn(m, k) if kind == "input gradient" else torch.randn(k, m).t()), torch.randn(k, n)


def region_of(
    kind: str, operands: Sequence[torch.Tensor], results: Sequence[torch.Tensor], **options: object
) -> Region:
    """One op as a region by itself."""
    function = add_function(module(), "one", [tensor_type(x) for x in operands])
    block = function.regions[0].block
    builder = StepBuilder(block)
    given = list(block.arguments)
    made = getattr(builder, kind)(*given, *([None] if kind.startswith("attention") else []), **options)
    finish_function(function, list(made) if kind.startswith("attention") else [made])
    specs = [Spec(tuple(x.shape), x.stride(), x.dtype) for x in (*operands, *results)]
    return Region(function, None, tuple(specs[: len(operands)]), tuple(specs[len(operands) :]), torch.device("cpu"))


def ours(family, region: Region, tensors: Sequence[torch.Tensor]) -> Callable[[], None]:  # type: ignore[no-untyped-def]
    assert family.runs(region) and not family.why_not(region), family.why_not(region)
    (offer,) = family.offers(region)
    run = family.build([offer])[offer.key]
    if isinstance(run, Exception):
        raise run
    scratch = [torch.empty(s.shape, dtype=s.dtype) for s in offer.scratch]
    return lambda: run(*tensors, *scratch)


def check(found: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    off = ((found.double() - expected).abs().max() / expected.abs().max()).item()
    assert off < 1e-5, f"{what} is off by {off:.1e} of the largest"


def in_turns(ways: Ways) -> dict[str, float]:
    """Median microseconds of each."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(ROUNDS):
        for name, run in ways.items():
            start = time.perf_counter()
            run()
            times[name].append((time.perf_counter() - start) * 1e6)
    return {name: statistics.median(each) for name, each in times.items()}


def products() -> list[str]:
    rows = ["| product | m, n, k | MKL | oneDNN | ours | GFLOP/s | MKL / ours |", "|---|---|---|---|---|---|---|"]
    for kind, m, n, k in PRODUCTS:
        left, right = factors(kind, m, n, k)
        theirs, made = torch.empty(m, n), torch.empty(m, n)
        run = ours(product, region_of("contract", [left, right], [made], spec="mk,kn->mn"), [left, right, made])
        run()
        check(made, left.double() @ right.double(), f"{kind} {m, n, k}")
        ways: Ways = {"MKL": lambda x=left, y=right, o=theirs: torch.mm(x, y, out=o), "ours": run}  # type: ignore[misc]
        if torch.backends.mkldnn.is_available():
            linear = torch.ops.mkldnn._linear_pointwise
            ways["oneDNN"] = lambda x=left, y=right, f=linear: f(x, y.t(), None, "none", [], "")  # type: ignore[misc]
        us = in_turns(ways)
        own, mkl = us["ours"], us["MKL"]
        speed = f"{2e-3 * m * n * k / own:.0f} | {mkl / own:.2f}"
        rows.append(
            f"| {kind} | {m}, {n}, {k} | {mkl:.0f} | {us.get('oneDNN', float('nan')):.0f} | {own:.0f} | {speed} |"
        )
    return rows


def groups() -> list[str]:
    rows = [
        "| product per group | groups, rows of each, n, k | PyTorch | ours | GFLOP/s | PyTorch / ours |",
        "|---|---|---|---|---|---|",
    ]
    for count, each, n, k in GROUPS:
        x, dy, w = torch.randn(count * each, k), torch.randn(count * each, n), torch.randn(count, n, k)
        ends = torch.arange(1, count + 1, dtype=torch.int32) * each
        a, b = x.double().view(count, each, k), dy.double().view(count, each, n)
        cases = [
            ("forward", TURNED, (x, w), (a @ w.double().mT).view(-1, n)),
            ("input gradient", ROWS, (dy, w), (b @ w.double()).view(-1, k)),
            ("weight gradient", SUMS, (dy, x), b.mT @ a),
        ]
        for kind, spec, (left, right), expected in cases:
            made = torch.empty(expected.shape)
            region = region_of("grouped_contract", [left, right, ends], [made], spec=spec)
            run = ours(grouped, region, [left, right, ends, made])
            run()
            check(made, expected, f"{kind} {count, each, n, k}")
            given = left.t() if spec == SUMS else left, right.mT if spec == TURNED else right
            us = in_turns({"PyTorch": lambda g=given, e=ends: F.grouped_mm(*g, offs=e), "ours": run})  # type: ignore[misc]
            theirs, own = us.values()
            speed = f"{2e-3 * count * each * n * k / own:.0f} | {theirs / own:.2f}"
            rows.append(f"| {kind} | {count}, {each}, {n}, {k} | {theirs:.0f} | {own:.0f} | {speed} |")
    return rows


def attentions() -> list[str]:
    rows = [
        "| batch, heads, of keys, rows, columns | | PyTorch | ours | ratio | gradients: PyTorch | ours | ratio |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for batch, heads, others, length, width, causal in ATTENTIONS:
        q, k, v = (torch.randn(batch, length, h, width).transpose(1, 2) for h in (heads, others, others))
        out, dout, sums = torch.empty_like(q), torch.randn_like(q), torch.empty(batch, heads, length)
        gradients = [torch.empty_like(x) for x in (q, k, v)]
        options = {"causal": causal, "scale": width**-0.5, "enable_gqa": heads != others}
        forward = region_of("attention", [q, k, v], [out, sums], **options)
        given = [dout, q, k, v, out, sums]
        backward = region_of("attention_grad", given, gradients, **options)
        runs = ours(attention, forward, [q, k, v, out, sums]), ours(attention, backward, [*given, *gradients])
        for run in runs:
            run()
        inputs = [x.double().requires_grad_() for x in (q, k, v)]
        whole = torch.nn.functional.scaled_dot_product_attention(*inputs, is_causal=causal, enable_gqa=heads != others)
        whole.backward(dout.double())
        name = f"{batch}, {heads}, {others}, {length}, {width}"
        check(out, whole.detach(), name)
        for made, x in zip(gradients, inputs, strict=True):
            assert x.grad is not None
            check(made, x.grad, f"a gradient of {name}")
        theirs = op_by_op(forward), op_by_op(backward)
        us = in_turns(
            {
                "PyTorch": lambda f=theirs[0], x=(q, k, v): f(*x),  # type: ignore[misc]
                "ours": runs[0],
                "gradients by PyTorch": lambda f=theirs[1], x=given: f(*x),  # type: ignore[misc]
                "our gradients": runs[1],
            }
        )
        a, b, c, d = us.values()
        kind = "causal" if causal else ""
        rows.append(f"| {name} | {kind} | {a:.0f} | {b:.0f} | {a / b:.2f} | {c:.0f} | {d:.0f} | {c / d:.2f} |")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=pathlib.Path, help="write the tables there as well")
    args = parser.parse_args()
    where = (
        f"{machine_name('cpu', torch.get_num_threads())}; torch {torch.__version__}, Python {sys.version.split()[0]}"
    )
    head = f"`python bench/kernels_cpu.py`, {where}; microseconds, medians of {ROUNDS}, in turns, float32."
    text = "\n".join([head, "", *products(), "", *groups(), "", *attentions(), ""])
    print(text)
    if args.out:
        args.out.write_text(text)


if __name__ == "__main__":
    main()
