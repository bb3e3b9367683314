"""PyTorch's fused CUDA kernels as our ops call them: attention and optimizer updates, checked, then timed.

Each case is compared with float64 arithmetic and with what eager PyTorch gives, runs inside a CUDA graph, and must lie
in memory as the shape functions say. Run where there is a GPU: `python bench/attention_cuda.py [--out DIR]`; it takes
under a minute. CI has none; bench/results/ holds the record.
"""

from __future__ import annotations

import argparse
import json
import math
import pathlib
import platform
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from wholestep.dialects.step import StepBuilder, attention_cuda, step, tensor_type  # noqa: E402
from wholestep.dialects.step.attention import additive, cuda_kernel  # noqa: E402
from wholestep.dialects.step.fused_updates import FusedUpdate  # noqa: E402
from wholestep.ir.builtin import add_function, module  # noqa: E402
from wholestep.ir.core import Op  # noqa: E402
from wholestep.torch_private import FakeTensorMode  # noqa: E402

#: largest difference allowed, as a share of the largest value
TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 3e-3, torch.float32: 2e-4, torch.float64: 1e-9}
KERNELS = (attention_cuda.CUDNN, attention_cuda.FLASH, attention_cuda.EFFICIENT)
LOW, SINGLE = (torch.bfloat16, torch.float16), (torch.float32,)


@dataclass(frozen=True)
class Case:
    """Shapes of one attention: q is [B, H, L, D], k and v have `own` heads and `keys` rows, v the width `out`."""

    name: str
    batch: int = 2
    heads: int = 4
    length: int = 128
    width: int = 64
    keys: int = 0
    own: int = 0
    out: int = 0
    causal: bool = False
    #: "", "bool", "float" or "empty rows", with the mask's shape
    mask: str = ""
    mask_shape: tuple[int, ...] = ()
    layout: str = "BLHD"
    types: tuple[torch.dtype, ...] = (*LOW, *SINGLE)


CASES = [
    Case("causal", causal=True),
    Case("plain"),
    Case("rows of heads", causal=True, layout="BHLD"),
    Case("odd length", length=77, causal=True),
    Case("length 1", length=1, keys=1),
    Case("one key", length=5, keys=1),
    Case("one query", length=1, keys=33),
    Case("cross", length=33, keys=70),
    Case("cross, causal", length=33, keys=70, causal=True),
    Case("cross, causal, more queries", length=70, keys=33, causal=True),
    Case("width 37", width=37, causal=True),
    Case("width 80", width=80, causal=True),
    Case("width 128", width=128, causal=True),
    Case("width 200", width=200, causal=True),
    Case("width 256", width=256),
    Case("width 320", width=320),
    Case("other width of v", out=32),
    Case("other odd width of v", out=33),
    Case("grouped heads", heads=8, own=2, causal=True),
    Case("grouped heads, mask", heads=8, own=2, mask="bool", mask_shape=(2, 1, 1, 128)),
    Case("padding mask", mask="bool", mask_shape=(2, 1, 1, 128)),
    Case("padding mask, odd", length=77, mask="bool", mask_shape=(2, 1, 1, 77)),
    Case("full mask", length=77, mask="bool", mask_shape=(2, 1, 77, 77)),
    Case("float mask", length=77, mask="float", mask_shape=(2, 4, 77, 77)),
    Case("float mask for all", mask="float", mask_shape=(128, 128)),
    Case("mask per row", mask="float", mask_shape=(1, 4, 128, 1)),
    Case("empty rows", length=77, mask="empty rows", mask_shape=(2, 1, 77, 77)),
    Case("many windows", batch=1000, heads=3, length=49, width=32),
    Case("f64", types=(torch.float64,)),
]


def operands(case: Case, dtype: torch.dtype) -> tuple[list[torch.Tensor], torch.Tensor | None, torch.Tensor]:
    """q, k and v, a mask, and a gradient of the result."""
    g = torch.Generator(device="cuda").manual_seed(0)

    def draw(heads: int, length: int, width: int) -> torch.Tensor:
        if case.layout == "BHLD":
            return torch.randn(case.batch, heads, length, width, device="cuda", generator=g).to(dtype)
        x = torch.randn(case.batch, length, heads, width, device="cuda", generator=g).to(dtype)
        return x.transpose(1, 2)

    keys, own, out = case.keys or case.length, case.own or case.heads, case.out or case.width
    q, k, v = draw(case.heads, case.length, case.width), draw(own, keys, case.width), draw(own, keys, out)
    mask = None
    if case.mask == "float":
        mask = torch.randn(case.mask_shape, device="cuda", generator=g).to(dtype)
    elif case.mask:
        mask = torch.rand(case.mask_shape, device="cuda", generator=g) > 0.3
        mask[..., 0] = True
        if case.mask == "empty rows":
            mask[..., 3, :] = False
    return [q, k, v], mask, draw(case.heads, case.length, out)


def ops_of(case: Case, tensors: list[torch.Tensor], mask: torch.Tensor | None, scale: float) -> tuple[Op, Op]:
    given = [*tensors, *([] if mask is None else [mask])]
    block = add_function(module(), "main", [tensor_type(t) for t in given]).regions[0].block
    b, arguments = StepBuilder(block), list(block.arguments)
    options = {"causal": case.causal, "scale": scale, "enable_gqa": bool(case.own)}
    rest = arguments[3:] or [None]
    forward = step.ops["attention"].build(b, *arguments[:3], *rest, **options)
    out, lse = forward.results
    backward = step.ops["attention_grad"].build(b, out, *arguments[:3], out, lse, *rest, **options)
    step.ops["reshape"].build(b, lse, shape=(math.prod(lse.type.shape),))  # so that somebody reads it
    return forward, backward


def truth(
    tensors: list[torch.Tensor], mask: torch.Tensor | None, dout: torch.Tensor, causal: bool, scale: float
) -> list[torch.Tensor]:
    """Result, log-sum-exp and gradients in float64; rows that see nothing give zeros and no gradient."""
    q, k, v = (t.detach().double().requires_grad_() for t in tensors)
    group = q.shape[1] // k.shape[1]
    wide_k, wide_v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = q @ wide_k.mT * scale
    if mask is not None:
        scores = scores + additive(mask, torch.float64)
    if causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device="cuda").tril()
        scores = scores.masked_fill(~seen, -math.inf)
    empty = (scores == -math.inf).all(-1, keepdim=True)
    scores = scores.masked_fill(empty, 0.0)
    lse = torch.logsumexp(scores, -1).masked_fill(empty.squeeze(-1), 0.0)
    out = torch.softmax(scores, -1).masked_fill(empty, 0.0) @ wide_v
    return [out.detach(), lse.detach(), *torch.autograd.grad(out, (q, k, v), dout.double())]


def eager(
    tensors: list[torch.Tensor], mask: torch.Tensor | None, dout: torch.Tensor, causal: bool, scale: float
) -> list[torch.Tensor]:
    leaves = [t.detach().requires_grad_() for t in tensors]
    gqa = leaves[0].shape[1] != leaves[1].shape[1]
    out = F.scaled_dot_product_attention(*leaves, mask, is_causal=causal, scale=scale, enable_gqa=gqa)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def eager_difference(
    tensors: list[torch.Tensor],
    mask: torch.Tensor | None,
    dout: torch.Tensor,
    causal: bool,
    scale: float,
    true: list[torch.Tensor],
) -> dict[str, Any]:
    try:
        theirs = eager(tensors, mask, dout, causal, scale)
        return {"eager": max(difference(m, t) for m, t in zip(theirs, [true[0], *true[2:]], strict=True))}
    except Exception as error:
        return {"eager_error": f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"}


def difference(mine: torch.Tensor, true: torch.Tensor) -> float:
    """The largest difference as a share of the largest value (of 0.05 where all are less); NaN counts as infinite."""
    if mine.shape != true.shape:
        raise AssertionError(f"{tuple(mine.shape)} instead of {tuple(true.shape)}")
    worst = float((mine.double() - true).abs().max() / true.abs().max().clamp_min(0.05))
    return math.inf if math.isnan(worst) else worst


def both(kernel: str, case: Case, forward: Op, backward: Op, scale: float) -> Callable[..., list[torch.Tensor]]:
    """Result, log-sum-exp and gradients by a kernel, or as the ops themselves choose."""

    def run(tensors: list[torch.Tensor], mask: torch.Tensor | None, dout: torch.Tensor) -> list[torch.Tensor]:
        if kernel == "chosen":
            rest = [] if mask is None else [mask]
            out, lse = forward.definition.evaluate(forward)(*tensors, *rest)  # type: ignore[attr-defined]
            run_backward = backward.definition.evaluate(backward)  # type: ignore[attr-defined]
            return [out, lse, *run_backward(dout, *tensors, out, lse, *rest)]
        bias = additive(mask, dout.dtype)
        out, lse = attention_cuda.forward(kernel, *tensors, bias, case.causal, scale)
        return [out, lse, *attention_cuda.backward(kernel, dout, *tensors, out, lse, bias, case.causal, scale)]

    return run


def in_graph(run: Callable[[], list[torch.Tensor]]) -> tuple[torch.cuda.CUDAGraph, list[torch.Tensor]]:
    """The call captured in a CUDA graph, after it has run twice on a side stream."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side), torch.no_grad():
        run()
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), torch.no_grad():
        results = run()
    return graph, results


def fits(kernel: str, case: Case, dtype: torch.dtype) -> bool:
    """Whether a kernel may be tried at all where it is not the chosen one."""
    if kernel == "chosen":
        return True
    if kernel == attention_cuda.EFFICIENT:
        return dtype is not torch.float64
    special = case.mask or case.out not in (0, case.width) or (case.causal and case.keys not in (0, case.length))
    return dtype in LOW and not special and case.width <= 256


def check_case(case: Case, dtype: torch.dtype) -> list[dict[str, Any]]:
    tensors, mask, dout = operands(case, dtype)
    scale = 1 / math.sqrt(case.width)
    true = truth(tensors, mask, dout, case.causal, scale)
    forward, backward = ops_of(case, tensors, mask, scale)
    chosen = cuda_kernel(forward, tensors[0].device)
    rows = []
    for kernel in ("chosen", *(k for k in KERNELS if k != chosen)):
        if not fits(kernel, case, dtype):
            continue
        row: dict[str, Any] = {"case": case.name, "dtype": str(dtype)[6:], "kernel": chosen or "formula"}
        row |= {"chosen": True} if kernel == "chosen" else {"kernel": kernel, "chosen": False}
        try:
            run = both(kernel, case, forward, backward, scale)
            with torch.no_grad():
                mine = run(tensors, mask, dout)
            names = ("out", "lse", "dq", "dk", "dv")
            row |= {n: difference(m, t) for n, m, t in zip(names, mine, true, strict=True)}
            row["agrees"] = all(row[n] <= TOLERANCE[dtype] for n in names if n != "lse") and row["lse"] <= 1e-3
            if row["chosen"]:
                row |= eager_difference(tensors, mask, dout, case.causal, scale, true)
            row["layout"] = layouts(kernel, case, forward, backward, scale, tensors, mask, dout, mine)
            graph, again = in_graph(lambda run=run: run(tensors, mask, dout))  # type: ignore[misc]
            graph.replay()
            torch.cuda.synchronize()
            row["graph"] = max(difference(a, m.double()) for a, m in zip(again, mine, strict=True))
            row["agrees"] &= row["graph"] <= TOLERANCE[dtype]
            row["agrees"] &= not row["chosen"] or row["layout"] == "as said"
        except Exception as error:
            row |= {"agrees": False, "error": f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"}
            if row["chosen"]:
                traceback.print_exc()
        rows.append(row)
    return rows


def layouts(
    kernel: str,
    case: Case,
    forward: Op,
    backward: Op,
    scale: float,
    tensors: list[torch.Tensor],
    mask: torch.Tensor | None,
    dout: torch.Tensor,
    mine: list[torch.Tensor],
) -> str:
    """Whether results lie in memory as torch's shape functions say."""
    with FakeTensorMode() as fakes, torch.no_grad():
        given = [fakes.from_tensor(t) for t in tensors]
        fake_mask = None if mask is None else fakes.from_tensor(mask)
        said = both(kernel, case, forward, backward, scale)(given, fake_mask, fakes.from_tensor(dout))

    def moves(t: torch.Tensor) -> list[int]:
        return [s for s, n in zip(t.stride(), t.shape, strict=True) if n > 1]

    wrong = [
        f"{name}: {list(m.stride())}, said {list(s.stride())}"
        for name, m, s in zip(("out", "lse", "dq", "dk", "dv"), mine, said, strict=True)
        if moves(m) != moves(s)
    ]
    return "; ".join(wrong) or "as said"


# ---- optimizer updates -----------------------------------------------------------------------------------------------


def check_update(kind: type[torch.optim.Optimizer], dtype: torch.dtype, **options: Any) -> dict[str, Any]:
    """One update by the fused op against torch.optim with fused=True, eagerly and inside a CUDA graph."""
    name = f"fused_{kind.__name__.lower()}"
    row: dict[str, Any] = {"update": name, "dtype": str(dtype)[6:], "options": options}
    try:
        g = torch.Generator(device="cuda").manual_seed(1)
        draws = [torch.randn(300, 70, device="cuda", generator=g) for _ in range(5)]
        parameter, gradient, average = (t.to(dtype) for t in draws[:3])
        square, top = (t.abs().to(dtype) for t in draws[3:])
        lr = torch.tensor(0.01, device="cuda")
        numbers = {"beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.1, "momentum": 0.9, "dampening": 0.0}
        given: dict[str, Any] = {"parameter": parameter, "gradient": gradient, "lr": lr, **numbers}
        leaf = torch.nn.Parameter(parameter.clone())
        leaf.grad = gradient.clone()
        if name == "fused_sgd":
            given["momentum_buffer"] = average
            other = kind([leaf], lr=0.01, momentum=0.9, weight_decay=0.1, fused=True, **options)  # type: ignore[call-arg]
            other.state[leaf] = {"momentum_buffer": average.clone()}
        else:
            given |= {"exp_avg": average, "exp_avg_sq": square, "new_step": torch.tensor(4.0, device="cuda")}
            other = kind([leaf], lr=0.01, betas=(0.9, 0.99), weight_decay=0.1, fused=True, **options)  # type: ignore[call-arg]
            state = {"step": torch.tensor(3.0, device="cuda"), "exp_avg": average.clone(), "exp_avg_sq": square.clone()}
            if options.get("amsgrad"):
                given["max_exp_avg_sq"] = top
                state["max_exp_avg_sq"] = top.clone()
            other.state[leaf] = state
        run, operands = update_call(name, given, options)
        mine = run(*operands)
        other.step()
        row["parameter"] = difference(mine[0], leaf.detach().double())
        row["gradient_kept"] = bool(torch.equal(gradient, leaf.grad))
        graph, again = in_graph(lambda: list(run(*operands)))
        graph.replay()
        row["graph"] = max(difference(a, m.double()) for a, m in zip(again, mine, strict=True))
        lr.fill_(0.0)  # the graph reads the rate anew: without one the parameter stays, but for the f32 rounding
        graph.replay()
        row["rate_is_read"] = difference(again[0], parameter.double())
        row["agrees"] = row["parameter"] <= TOLERANCE[dtype] * 0.05 and row["graph"] == 0.0 and row["gradient_kept"]
        row["agrees"] &= row["rate_is_read"] == 0.0
    except Exception as error:
        traceback.print_exc()
        row |= {"agrees": False, "error": f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"}
    return row


def update_call(name: str, given: dict[str, Any], options: dict[str, Any]) -> tuple[Callable[..., Any], list[Any]]:
    """The call of a fused op and its operands: tensors on the device, and Python floats where it wants those."""
    definition = step.ops[name]
    assert issubclass(definition, FusedUpdate)
    fields = [f.name for f in definition.operand_fields]
    present = {n: given[n] for n in fields if n in given}
    types = [tensor_type(v if isinstance(v, torch.Tensor) else torch.tensor(v).double()) for v in present.values()]
    block = add_function(module(), "main", types).regions[0].block
    values = dict(zip(present, block.arguments, strict=True))
    attributes = {k: v for k, v in options.items() if k in ("nesterov", "maximize")}
    op = definition.build(StepBuilder(block), *(values.get(n) for n in fields), **attributes)
    return definition.evaluate(op), list(present.values())  # type: ignore[attr-defined]


# ---- time ------------------------------------------------------------------------------------------------------------


def milliseconds(run: Callable[[], Any], repeats: int = 20) -> float:
    """The median time of a call on the GPU."""
    for _ in range(3):
        run()
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def time_case(name: str, case: Case, dtype: torch.dtype) -> list[dict[str, Any]]:
    tensors, mask, dout = operands(case, dtype)
    scale = 1 / math.sqrt(case.width)
    forward, _ = ops_of(case, tensors, mask, scale)
    chosen = cuda_kernel(forward, tensors[0].device)
    bias = additive(mask, dtype)
    rows = []
    for kernel in (*KERNELS, "eager SDPA"):
        row: dict[str, Any] = {"shape": name, "dtype": str(dtype)[6:], "kernel": kernel, "chosen": kernel == chosen}
        try:
            if kernel == "eager SDPA":
                row["both_ms"] = milliseconds(lambda: eager(tensors, mask, dout, case.causal, scale))
            elif fits(kernel, case, dtype):

                def ahead(kernel: str = kernel) -> tuple[torch.Tensor, torch.Tensor]:
                    return attention_cuda.forward(kernel, *tensors, bias, case.causal, scale)

                out, lse = ahead()

                def back(kernel: str = kernel, out: Any = out, lse: Any = lse) -> Any:
                    return attention_cuda.backward(kernel, dout, *tensors, out, lse, bias, case.causal, scale)

                graph, _ = in_graph(lambda ahead=ahead, back=back: [*ahead(), *back()])  # type: ignore[misc]
                row |= {"forward_ms": milliseconds(ahead), "backward_ms": milliseconds(back)}
                row["graph_ms"] = milliseconds(graph.replay)
            else:
                continue
        except Exception as error:
            row["error"] = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
        rows.append(row)
    return rows


TIMED = {
    "GPT-2 8x12x1024x64 causal": Case("", batch=8, heads=12, length=1024, causal=True),
    "GPT-2 1x12x1024x64 causal": Case("", batch=1, heads=12, length=1024, causal=True),
    "BERT-large 16x16x512x64": Case("", batch=16, heads=16, length=512),
    "BERT-large, padding mask": Case("", 16, 16, 512, mask="bool", mask_shape=(16, 1, 1, 512)),
}


def markdown(record: dict[str, Any]) -> str:
    def number(value: Any, form: str = ".1e") -> str:
        return "" if value is None else format(value, form)

    lines = [
        "# Fused CUDA kernels as our ops call them",
        "",
        f"`{record['command']}` on {record['gpu']}, torch {record['torch']}, cuDNN {record['cudnn']}, "
        f"{record['seconds']:.0f} s. Differences are from float64, as a share of the largest value; `eager` is that of "
        "PyTorch's own attention, `graph` that of a CUDA graph from the call outside it.",
        "",
        f"Attention: {sum(r['agrees'] for r in record['attention'] if r['chosen'])} of "
        f"{sum(r['chosen'] for r in record['attention'])} chosen paths agree; "
        f"{sum(r['agrees'] for r in record['attention'] if not r['chosen'])} of "
        f"{sum(not r['chosen'] for r in record['attention'])} paths that were not chosen.",
        "",
        "| case | dtype | kernel | out | lse | dq | dk | dv | eager | graph | layout | |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for r in record["attention"]:
        cells = [number(r.get(k)) for k in ("out", "lse", "dq", "dk", "dv", "eager", "graph")]
        verdict = "agrees" if r["agrees"] else r.get("error", "differs")
        kernel = f"**{r['kernel']}**" if r["chosen"] else r["kernel"]
        lines.append(
            f"| {r['case']} | {r['dtype']} | {kernel} | {' | '.join(cells)} | {r.get('layout', '')} | {verdict} |"
        )
    lines += ["", "Updates, against torch.optim with fused=True:", ""]
    lines += ["| update | dtype | options | parameter | graph | |", "|---|---|---|---|---|---|"]
    for r in record["updates"]:
        options = ", ".join(f"{k}={v}" for k, v in r["options"].items())
        verdict = "agrees" if r["agrees"] else r.get("error", "differs")
        cells = [number(r.get(k)) for k in ("parameter", "graph")]
        lines.append(f"| {r['update']} | {r['dtype']} | {options} | {' | '.join(cells)} | {verdict} |")
    lines += ["", "Milliseconds, median; `both in a graph` is forward and backward in one CUDA graph:", ""]
    lines += [
        "| shape | dtype | kernel | forward | backward | both in a graph | both |",
        "|---|---|---|---|---|---|---|",
    ]
    for r in record["times"]:
        cells = [number(r.get(k), ".3f") for k in ("forward_ms", "backward_ms", "graph_ms", "both_ms")]
        kernel = f"**{r['kernel']}**" if r["chosen"] else r["kernel"]
        lines.append(f"| {r['shape']} | {r['dtype']} | {kernel} | {' | '.join(cells)} | {r.get('error', '')}")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "bench" / "results")
    out = parser.parse_args().out
    if not torch.cuda.is_available():
        print("this needs a CUDA GPU, and torch finds none here")
        return 2
    torch.backends.cuda.matmul.allow_tf32 = False
    start = time.perf_counter()
    attention = [row for case in CASES for dtype in case.types for row in check_case(case, dtype)]
    adam = [dict(), dict(amsgrad=True), dict(maximize=True)]
    updates = [
        check_update(kind, dtype, **options)
        for dtype in (torch.float32, torch.bfloat16, torch.float16)
        for kind, choices in (
            (torch.optim.AdamW, adam),
            (torch.optim.Adam, adam),
            (torch.optim.SGD, [dict(), dict(nesterov=True), dict(maximize=True)]),
        )
        for options in choices
    ]
    times = []
    for name, case in TIMED.items():
        for dtype in (torch.bfloat16, torch.float32):
            times += time_case(name, case, dtype)
    record = {
        "command": "python bench/attention_cuda.py",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "gpu": torch.cuda.get_device_name(),
        "cudnn": torch.backends.cudnn.version(),
        "seconds": time.perf_counter() - start,
        "attention": attention,
        "updates": updates,
        "times": times,
    }
    out.mkdir(parents=True, exist_ok=True)
    (out / "attention_cuda.json").write_text(json.dumps(record, indent=1) + "\n")
    text = markdown(record)
    (out / "attention_cuda.md").write_text(text)
    print(text)
    return 0 if all(r["agrees"] for r in attention if r["chosen"]) and all(r["agrees"] for r in updates) else 1


if __name__ == "__main__":
    sys.exit(main())
