"""Our gradient of an embedding against ATen's, on tables of language models and of recommendation: checked, then timed.

Every configuration is compared with sums in float64 before it is timed, and must give the same bits twice; times are
medians of CUDA graph replays, in turns, with the L2 cache flushed. ATen's time includes the copy to where the result
belongs, as in a plan. `python bench/kernels_embedding.py --out FILE.md` on a GPU. Without one: `--compile` compiles
everything for sm_90 and counts registers and spills; `TRITON_INTERPRET=1 ... --dry` walks the same path at tiny sizes.
"""

from __future__ import annotations

import argparse
import pathlib
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench.kernel_clock import as_graph, in_turns, publish  # noqa: E402
from wholestep.backends import embedding  # noqa: E402
from wholestep.backends.embedding import CONFIGS, Config, Places, Problem  # noqa: E402
from wholestep.backends.providers import Offer  # noqa: E402
from wholestep.backends.triton.compiling import digest  # noqa: E402
from wholestep.backends.triton.compiling import run as compile_jobs  # noqa: E402

ROUNDS = 15
#: what rounding may change, as a share of the value and of the sum of absolute values
TOLERANCE = {torch.float32: (2**-23, 1e-6), torch.bfloat16: (2**-8, 1e-6)}
#: beside those that the provider offers
MORE = (replace(CONFIGS[0], own=32), replace(CONFIGS[0], few=16, windows=2), replace(CONFIGS[0], tile=1024))


@dataclass(frozen=True)
class Table:
    """A table, and how many tokens name rows of it; `apart`: how many times its size a token is from the next."""

    name: str
    tokens: int
    rows: int
    columns: int
    dtype: torch.dtype = torch.float32
    apart: int = 1

    @property
    def problem(self) -> Problem:
        t, step = self.tokens, self.columns * self.apart
        walks = (t, t * step, step), 1, (t, t * self.apart, self.apart)
        return Problem(t, self.rows, self.columns, -1, *walks, self.dtype, torch.int64)

    @property
    def bytes(self) -> int:
        """What must move: dy and the indices are read, the table is written."""
        return (self.tokens + self.rows) * self.columns * self.dtype.itemsize + 8 * self.tokens


TABLES = (
    Table("GPT-2, words", 8192, 50304, 768),
    Table("GPT-2, words, bf16", 8192, 50304, 768, torch.bfloat16),
    Table("GPT-2, positions", 1024, 1024, 768),
    Table("BERT, words", 8192, 30522, 1024),
    Table("BERT, kinds of words", 8192, 2, 1024),
    Table("DLRM, one table", 8192, 100_000, 64, apart=26),
    Table("a long batch", 32768, 32000, 2048, torch.bfloat16),
)
#: which rows tokens name: any alike, as words of a language (the r-th row as often as 1 / r), one of two, each once
DRAWS = ("evenly", "zipf", "two rows", "in turn")


def draws_of(table: Table) -> tuple[str, ...]:
    if table.rows == 2:
        return ("evenly",)
    return ("in turn",) if table.rows == table.tokens else DRAWS[:3]


def drawn(how: str, table: Table, device: str) -> torch.Tensor:
    g = torch.Generator(device=device).manual_seed(0)
    if how == "in turn":
        return torch.arange(table.tokens, device=device)
    if how == "zipf":
        weights = 1 / torch.arange(1, table.rows + 1, dtype=torch.float64, device=device)
        return torch.multinomial(weights, table.tokens, replacement=True, generator=g)
    return torch.randint(0, 2 if how == "two rows" else table.rows, (table.tokens,), generator=g, device=device)


def label(config: Config) -> str:
    return f"{config.tile} by {config.columns}, few {config.few}, own {config.own}"


def offers_of(table: Table) -> dict[str, Offer]:
    widest = embedding.power_of_two(table.columns)
    configs = dict.fromkeys(replace(c, columns=min(c.columns, widest)) for c in (*CONFIGS, *MORE))
    return {label(c): embedding.offer(table.problem, Places((0,), (1,), (2,)), c) for c in configs}


def compile_all(capability: int) -> list[dict[str, Any]]:
    """Compiles every kernel once, in parallel processes; what each needs."""
    kernels = {}
    for table in TABLES:
        for offer in offers_of(table).values():
            for function in offer.made.functions:
                job = function.job(capability)
                kernels.setdefault(digest(job), (table.name, function.kernel, job))
    answers = compile_jobs({key: job for key, (_, _, job) in kernels.items()}, None, 0)
    return [{"table": t, "kernel": k, **answers[key]} for key, (t, k, _) in kernels.items()]


def compile_table(found: list[dict[str, Any]]) -> str:
    lines = ["| kernel | variants | registers | spilled bytes | errors |", "|---|---|---|---|---|"]
    for name in dict.fromkeys(row["kernel"] for row in found):
        own = [row for row in found if row["kernel"] == name]
        good = [row for row in own if "error" not in row]
        registers = [row["registers"] for row in good] or [0]
        spilled = max((row["spills"] for row in good), default=0)
        errors = len(own) - len(good)
        lines.append(f"| {name} | {len(own)} | {min(registers)} to {max(registers)} | {spilled} | {errors} |")
    return "\n".join(lines)


# ------------------------------------------------------------------------------------------------------------- timing


def wrong(found: torch.Tensor, wanted: torch.Tensor, spread: torch.Tensor) -> str:
    """How a result differs from the sums in float64; "" if only by rounding."""
    share, of_all = TOLERANCE[found.dtype]
    excess = float(((found.double() - wanted).abs() - share * wanted.abs() - of_all * spread).max())
    return "" if excess <= 0 else f"differs by {excess:.3g} more than rounding may"


def measure(table: Table, how: str, built: dict[str, Any], device: str) -> dict[str, Any]:
    """Every configuration: checked, then timed beside ATen."""
    g = torch.Generator(device=device).manual_seed(1)
    whole = torch.randn(table.tokens, table.apart, table.columns, generator=g, device=device).to(table.dtype)
    dy = whole[:, 0]
    indices = torch.zeros(table.tokens, table.apart, dtype=torch.int64, device=device)[:, 0]
    indices.copy_(drawn(how, table, device))
    zeros = torch.zeros(table.rows, table.columns, dtype=torch.float64, device=device)
    wanted, spread = (zeros.index_add(0, indices, x) for x in (dy.double(), dy.double().abs()))
    out = torch.empty(table.rows, table.columns, dtype=table.dtype, device=device)
    calls: dict[str, Callable[[], Any]] = {}
    faults: dict[str, str] = {}

    def ours(run: Any, scratch: list[torch.Tensor]) -> Callable[[], None]:
        return lambda: run(dy, indices, out, *scratch)

    for name, offer in offers_of(table).items():
        run = built[offer.key]
        if isinstance(run, Exception):
            faults[name] = f"not built: {run}"
            continue
        scratch = [torch.empty(s.shape, dtype=s.dtype, device=device) for s in offer.scratch]
        call = ours(run, scratch)
        results = []
        for _ in range(2):
            out.fill_(float("nan"))
            for memory in scratch:
                memory.fill_(-1)
            call()
            results.append(out.clone())
        fault = wrong(results[0], wanted, spread)
        if not fault and not torch.equal(*results):
            fault = "gives other bits the second time"
        if fault:
            faults[name] = fault
        else:
            calls[name] = as_graph([call])
    del wanted, spread, zeros
    aten = torch.ops.aten.embedding_dense_backward.default
    graph = True

    def atens() -> None:
        out.copy_(aten(dy, indices, table.rows, -1, False))

    try:
        calls["aten"] = as_graph([atens])
    except RuntimeError:  # it waits for the host in the middle: timed as it is launched
        graph = False
        torch.cuda.synchronize()
        calls["aten"] = atens
    times = in_turns(calls, ROUNDS if device == "cuda" else 1)
    return {"table": table.name, "rows": how, "aten": times.pop("aten"), "aten in a graph": graph, "ours": times,
            "faults": faults, "bytes": table.bytes}  # fmt: skip


def text_of(measured: list[dict[str, Any]]) -> str:
    lines = [
        "| table | rows named | bytes at 4.8 TB/s | ATen and copy | ours | first guess | best configuration |",
        "|---|---|---|---|---|---|---|",
    ]
    for found in measured:
        ours = found["ours"]
        best = min(ours, key=lambda name: ours[name]) if ours else "none"
        first = next(iter(ours.values()), float("nan"))
        aten = f"{found['aten']:.1f}" + ("" if found["aten in a graph"] else " (not in a graph)")
        lines.append(
            f"| {found['table']} | {found['rows']} | {found['bytes'] / 4.8e6:.1f} | {aten} | "
            f"{ours.get(best, float('nan')):.1f} | {first:.1f} | {best} |"
        )
    faults = [f"- {f['table']}, {f['rows']}: {key}: {why}" for f in measured for key, why in f["faults"].items()]
    return "\n".join([*lines, "", f"Configurations that are wrong or not built (not timed): {len(faults)}", *faults])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=pathlib.Path, help="write the table here, and all figures beside it as .json")
    parser.add_argument("--compile", action="store_true", help="only compile, for sm_90; needs no GPU")
    parser.add_argument("--dry", action="store_true", help="tiny sizes; with TRITON_INTERPRET=1 on any machine")
    options = parser.parse_args()
    begin = time.perf_counter()
    figures: list[dict[str, Any]]
    if options.compile:
        figures = compile_all(90)
        text = f"{compile_table(figures)}\n\n{time.perf_counter() - begin:.0f} s"
        failed = any("error" in row for row in figures)
    else:
        cuda = torch.cuda.is_available()
        tables = (Table("tiny", 40, 30, 24), Table("tiny, apart", 40, 30, 24, apart=2)) if options.dry else TABLES
        built = embedding.build([offer for table in tables for offer in offers_of(table).values()])
        compiled = time.perf_counter() - begin
        figures = [measure(t, how, built, "cuda" if cuda else "cpu") for t in tables for how in draws_of(t)]
        failed = any(found["faults"] for found in figures)
        where = torch.cuda.get_device_name() if cuda else "A dry run on a CPU: the times mean nothing"
        text = (
            f"{where}; torch {torch.__version__}, Triton {triton.__version__}; microseconds, median of "
            f"{ROUNDS if cuda else 1}, L2 flushed. Compiling took {compiled:.0f} s, everything "
            f"{time.perf_counter() - begin:.0f} s.\n\n{text_of(figures)}"
        )
    publish(text, figures, options.out)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
