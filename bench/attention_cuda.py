"""PyTorch's fused CUDA kernels as our ops call them: attention and optimizer updates, checked, then timed.

Each case is compared with float64 arithmetic and with what eager PyTorch gives, runs inside a CUDA graph, and must lie
in memory as the shape functions say. A CUDA error spoils its process, so the work is done by child processes: one that
dies is followed by another, after the part that killed it. Run where there is a GPU: `python bench/attention_cuda.py
[--out DIR]`; it ends within 90 seconds. CI has none; bench/results/ holds the record.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import pathlib
import platform
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
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
#: seconds for everything, and for one part of the work before its process is ended
LIMIT, PATIENCE = 85.0, 30.0
#: processes that check at a time; times are taken by one alone
WORKERS = 4
#: how a child ends whose GPU context no longer works
SPOILED = 3


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
    #: "", "bool", "float", "float, heads innermost" or "empty rows", with the mask's shape
    mask: str = ""
    mask_shape: tuple[int, ...] = ()
    #: "BLHD", "BHLD" or "packed": parts of one tensor [B, L, 3 * H * D]
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
    Case("packed projection", causal=True, layout="packed"),
    Case("packed projection, width 36", width=36, layout="packed"),
    Case("packed projection, width 37", width=37, layout="packed"),
    Case("position bias", length=49, mask="float, heads innermost", mask_shape=(1, 4, 49, 49)),
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
    if case.layout == "packed":
        projection = torch.cat([t.transpose(1, 2).flatten(2) for t in (q, k, v)], -1)
        parts = projection.split(case.heads * case.width, -1)
        q, k, v = (t.unflatten(-1, (case.heads, case.width)).transpose(1, 2) for t in parts)
    mask = None
    if case.mask.startswith("float"):
        mask = torch.randn(case.mask_shape, device="cuda", generator=g).to(dtype)
        if case.mask == "float, heads innermost":
            mask = mask.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)
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


def difference(mine: torch.Tensor, true: torch.Tensor) -> float:
    """The largest difference as a share of the largest value (of 0.05 where all are less); NaN counts as infinite."""
    if mine.shape != true.shape:
        raise AssertionError(f"{tuple(mine.shape)} instead of {tuple(true.shape)}")
    worst = float((mine.double() - true).abs().max() / true.abs().max().clamp_min(0.05))
    return math.inf if math.isnan(worst) else worst


def both(
    kernel: str, case: Case, forward: Op, backward: Op, scale: float, at: Callable[[str], None]
) -> Callable[..., list[torch.Tensor]]:
    """Result, log-sum-exp and gradients by a kernel, or as the ops themselves choose; `at` hears where it is."""

    def run(tensors: list[torch.Tensor], mask: torch.Tensor | None, dout: torch.Tensor) -> list[torch.Tensor]:
        at("forward")
        if kernel == "chosen":
            rest = [] if mask is None else [mask]
            out, lse = forward.definition.evaluate(forward)(*tensors, *rest)  # type: ignore[attr-defined]
            at("backward")
            run_backward = backward.definition.evaluate(backward)  # type: ignore[attr-defined]
            return [out, lse, *run_backward(dout, *tensors, out, lse, *rest)]
        bias = additive(mask, dout.dtype)
        out, lse = attention_cuda.forward(kernel, *tensors, bias, case.causal, scale)
        at("backward")
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


def check_case(job: Job, at: Callable[[str], None]) -> dict[str, Any]:
    """One kernel on one case; {} where the chosen kernel is that one, and has been checked as such."""
    case, dtype, kernel = job.case, job.dtype, job.kernel
    tensors, mask, dout = operands(case, dtype)
    scale = 1 / math.sqrt(case.width)
    true = truth(tensors, mask, dout, case.causal, scale)
    if kernel == "eager":
        at("forward and backward")
        theirs = eager(tensors, mask, dout, case.causal, scale)
        return {"eager": max(difference(m, t) for m, t in zip(theirs, [true[0], *true[2:]], strict=True))}
    forward, backward = ops_of(case, tensors, mask, scale)
    chosen = cuda_kernel(forward, tensors[0].device)
    if kernel == chosen:
        return {}
    row: dict[str, Any] = {"kernel": chosen or "formula"} if kernel == "chosen" else {}
    run = both(kernel, case, forward, backward, scale, at)
    with torch.no_grad():
        mine = run(tensors, mask, dout)
    at("comparison")
    names = ("out", "lse", "dq", "dk", "dv")
    row |= {n: difference(m, t) for n, m, t in zip(names, mine, true, strict=True)}
    row["agrees"] = all(row[n] <= TOLERANCE[dtype] for n in names if n != "lse") and row["lse"] <= 1e-3
    at("layouts")
    row["layout"] = layouts(kernel, case, forward, backward, scale, tensors, mask, dout, mine)
    quiet = both(kernel, case, forward, backward, scale, lambda stage: None)
    at("capture")
    graph, again = in_graph(lambda: quiet(tensors, mask, dout))
    at("replay")
    graph.replay()
    torch.cuda.synchronize()
    row["graph"] = max(difference(a, m.double()) for a, m in zip(again, mine, strict=True))
    row["agrees"] &= row["graph"] <= TOLERANCE[dtype]
    row["agrees"] &= kernel != "chosen" or row["layout"] == "as said"
    return row


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
        said = both(kernel, case, forward, backward, scale, lambda stage: None)(
            given, fake_mask, fakes.from_tensor(dout)
        )

    def moves(t: torch.Tensor) -> list[int]:
        return [s for s, n in zip(t.stride(), t.shape, strict=True) if n > 1]

    wrong = [
        f"{name}: {list(m.stride())}, said {list(s.stride())}"
        for name, m, s in zip(("out", "lse", "dq", "dk", "dv"), mine, said, strict=True)
        if moves(m) != moves(s)
    ]
    return "; ".join(wrong) or "as said"


# ---- optimizer updates -----------------------------------------------------------------------------------------------


ADAM: list[dict[str, Any]] = [{}, {"amsgrad": True}, {"maximize": True}]
OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], list[dict[str, Any]]]] = {
    "fused_adamw": (torch.optim.AdamW, ADAM),
    "fused_adam": (torch.optim.Adam, ADAM),
    "fused_sgd": (torch.optim.SGD, [{}, {"nesterov": True}, {"maximize": True}]),
}


def check_update(job: Job, at: Callable[[str], None]) -> dict[str, Any]:
    """One update by the fused op against torch.optim with fused=True, eagerly and inside a CUDA graph."""
    name, dtype, options, kind = job.name, job.dtype, job.options, OPTIMIZERS[job.name][0]
    row: dict[str, Any] = {}
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
    at("update")
    mine = run(*operands)
    at("torch.optim")
    other.step()
    row["parameter"] = difference(mine[0], leaf.detach().double())
    row["gradient_kept"] = bool(torch.equal(gradient, leaf.grad))
    at("graph")
    graph, again = in_graph(lambda: list(run(*operands)))
    graph.replay()
    row["graph"] = max(difference(a, m.double()) for a, m in zip(again, mine, strict=True))
    lr.fill_(0.0)  # the graph reads the rate anew: without one the parameter stays, but for the f32 rounding
    graph.replay()
    row["rate_is_read"] = difference(again[0], parameter.double())
    row["agrees"] = row["parameter"] <= TOLERANCE[dtype] * 0.05 and row["graph"] == 0.0 and row["gradient_kept"]
    row["agrees"] &= row["rate_is_read"] == 0.0
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


def time_case(job: Job, at: Callable[[str], None]) -> dict[str, Any]:
    case, dtype, kernel = job.case, job.dtype, job.kernel
    tensors, mask, dout = operands(case, dtype)
    scale = 1 / math.sqrt(case.width)
    if kernel == "eager SDPA":
        at("forward and backward")
        return {"chosen": False, "both_ms": milliseconds(lambda: eager(tensors, mask, dout, case.causal, scale))}
    forward, _ = ops_of(case, tensors, mask, scale)
    bias = additive(mask, dtype)

    def ahead() -> tuple[torch.Tensor, torch.Tensor]:
        return attention_cuda.forward(kernel, *tensors, bias, case.causal, scale)

    def back() -> tuple[torch.Tensor, ...]:
        return attention_cuda.backward(kernel, dout, *tensors, out, lse, bias, case.causal, scale)

    row: dict[str, Any] = {"chosen": kernel == cuda_kernel(forward, tensors[0].device)}
    at("forward")
    out, lse = ahead()
    row["forward_ms"] = milliseconds(ahead)
    at("backward")
    row["backward_ms"] = milliseconds(back)
    at("graph")
    graph, _ = in_graph(lambda: [*ahead(), *back()])
    row["graph_ms"] = milliseconds(graph.replay)
    return row


TIMED = {
    "GPT-2 8x12x1024x64 causal": Case("", batch=8, heads=12, length=1024, causal=True),
    "GPT-2 1x12x1024x64 causal": Case("", batch=1, heads=12, length=1024, causal=True),
    "BERT-large 16x16x512x64": Case("", batch=16, heads=16, length=512),
    "BERT-large, padding mask": Case("", 16, 16, 512, mask="bool", mask_shape=(16, 1, 1, 512)),
}


# ---- parts of the work, each of which may kill its process -----------------------------------------------------------


@dataclass(frozen=True)
class Job:
    """One part: "check" a kernel on a case, compare with "eager", "update", or "time" a kernel on a case."""

    kind: str
    name: str
    dtype: torch.dtype
    kernel: str = ""
    case: Case = Case("")
    options: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        options = [f"{k}={v}" for k, v in self.options.items()]
        return ", ".join([self.kind, self.name, str(self.dtype)[6:], *filter(None, [self.kernel]), *options])


def jobs() -> list[Job]:
    """All parts, in the same order in every process."""
    cases = [(c, d) for c in CASES for d in c.types]
    shapes = [(n, c, d) for n, c in TIMED.items() for d in (torch.bfloat16, torch.float32)]
    return [
        *(Job("check", c.name, d, "chosen", c) for c, d in cases),
        *(Job("check", c.name, d, k, c) for c, d in cases for k in KERNELS if fits(k, c, d)),
        *(
            Job("update", name, dtype, options=options)
            for dtype in (*SINGLE, *LOW)
            for name, (_, choices) in OPTIMIZERS.items()
            for options in choices
        ),
        *(Job("time", n, d, k, c) for n, c, d in shapes for k in KERNELS if fits(k, c, d)),
        *(Job("time", n, d, "eager SDPA", c) for n, c, d in shapes),
        *(Job("eager", c.name, d, "eager", c) for c, d in cases),
    ]


WORK = {"check": check_case, "eager": check_case, "update": check_update, "time": time_case}


def one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"


def child(numbers: list[int], log: pathlib.Path) -> int:
    """Does these jobs in order; every stage and every result is a line of the log, before anything else happens."""
    torch.backends.cuda.matmul.allow_tf32 = False
    every = jobs()
    with log.open("a") as file:
        for number in numbers:
            reached = ""

            def at(stage: str, number: int = number) -> None:
                nonlocal reached
                reached = stage
                print(json.dumps({"job": number, "stage": stage}), file=file, flush=True)

            print(f"[{os.getpid()}] {every[number]}", flush=True)
            at("operands")
            try:
                row = WORK[every[number].kind](every[number], at)
            except Exception as error:
                print(f"[{os.getpid()}] {every[number]}: failed at {reached}\n{traceback.format_exc()}", flush=True)
                row = {"agrees": False, "stage": reached, "error": one_line(error)}
            spoiled = ""
            try:
                torch.cuda.synchronize()
            except Exception as error:
                spoiled = one_line(error)
                row = {"stage": reached, "error": spoiled} | row | {"agrees": False, "spoiled": True}
            print(json.dumps({"job": number, "row": row}), file=file, flush=True)
            if spoiled:
                return SPOILED
    return 0


def command(numbers: list[int], log: pathlib.Path) -> list[str]:
    listed = ",".join(map(str, numbers))
    return [sys.executable, str(pathlib.Path(__file__).resolve()), "--jobs", listed, "--log", str(log)]


def watch(numbers: list[int], log: pathlib.Path, blocking: bool, deadline: float) -> str:
    """Runs a child until it ends, stands still or the time is up; says how it ended."""
    # where launches wait for their kernels an error is raised by the call that caused it
    settings = {"CUDA_LAUNCH_BLOCKING": "1"} if blocking else {}
    process = subprocess.Popen(command(numbers, log), env=settings | os.environ)
    size, since = 0, time.monotonic()
    while process.poll() is None:
        time.sleep(0.05)
        now = time.monotonic()
        if log.stat().st_size != size:
            size, since = log.stat().st_size, now
        if now > deadline or now - since > PATIENCE:
            process.kill()
            process.wait()
            return "out of time" if now > deadline else f"no progress for {PATIENCE:.0f} s"
    return f"its process ended with status {process.returncode}"


def do(numbers: list[int], blocking: bool, deadline: float) -> dict[int, dict[str, Any]]:
    """The rows of these jobs, by as many children as it takes."""
    rows: dict[int, dict[str, Any]] = {}
    left = numbers
    while left and time.monotonic() < deadline:
        with tempfile.TemporaryDirectory() as folder:
            log = pathlib.Path(folder) / "log"
            log.touch()
            ended = watch(left, log, blocking, deadline)
            lines = [json.loads(line) for line in log.read_text().splitlines(keepends=True) if line.endswith("\n")]
        rows |= {line["job"]: line["row"] for line in lines if "row" in line}
        if not lines:  # no part was begun: another child would do no better
            rows |= {n: {"agrees": False, "error": f"nothing was begun: {ended}"} for n in left}
        elif "stage" in lines[-1]:
            last = lines[-1]
            rows[last["job"]] = {"agrees": False, "stage": last["stage"], "error": ended, "spoiled": True}
        left = [n for n in left if n not in rows]
    return rows | {n: {"agrees": False, "error": "not run: out of time"} for n in left}


def do_all(every: list[Job], limit: float) -> list[dict[str, Any]]:
    """A row per job: our kernels first, then times with the GPU to themselves, then eager PyTorch."""
    deadline = time.monotonic() + limit
    rows: dict[int, dict[str, Any]] = {}
    for kinds, workers in ((("check", "update"), WORKERS), (("time",), 1), (("eager",), WORKERS)):
        numbers = [n for n, job in enumerate(every) if job.kind in kinds]
        parts = [numbers[i::workers] for i in range(workers)]
        with ThreadPoolExecutor(workers) as pool:
            for part in pool.map(do, parts, [kinds != ("time",)] * workers, [deadline] * workers):
                rows |= part
    return [rows[n] for n in range(len(every))]


def collect(every: list[Job], rows: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Rows by section; what eager PyTorch gave goes to the row of the chosen kernel."""
    record: dict[str, list[dict[str, Any]]] = {"attention": [], "updates": [], "times": [], "failed": []}
    theirs = {(j.name, j.dtype): row for j, row in zip(every, rows, strict=True) if j.kind == "eager"}
    for job, row in zip(every, rows, strict=True):
        dtype = str(job.dtype)[6:]
        if "error" in row or row.get("agrees") is False:
            record["failed"].append({"job": str(job), "counts": ours(job)} | row)
        if job.kind == "check" and row:
            row = {"case": job.name, "dtype": dtype, "kernel": job.kernel, "chosen": job.kernel == "chosen"} | row
            other = theirs[job.name, job.dtype] if row["chosen"] else {}
            row |= {"eager": other["eager"]} if "eager" in other else {}
            row |= {"eager_error": other["error"]} if "error" in other else {}
            record["attention"].append(row)
        elif job.kind == "update":
            record["updates"].append({"update": job.name, "dtype": dtype, "options": job.options} | row)
        elif job.kind == "time":
            record["times"].append({"shape": job.name, "dtype": dtype, "kernel": job.kernel, "chosen": False} | row)
    record["attention"].sort(key=lambda r: [c.name for c in CASES].index(r["case"]))
    record["times"].sort(key=lambda r: (list(TIMED).index(r["shape"]), r["dtype"]))
    return record


def ours(job: Job) -> bool:
    """Whether a failure is our op's: not eager PyTorch's, nor of a kernel tried on a case beside the chosen one."""
    return job.kind == "update" or job.kernel == "chosen" or (job.kind == "time" and job.kernel != "eager SDPA")


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
        verdict += f"; eager: {r['eager_error']}" if "eager_error" in r else ""
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
        "| shape | dtype | kernel | forward | backward | both in a graph | both | |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for r in record["times"]:
        cells = [number(r.get(k), ".3f") for k in ("forward_ms", "backward_ms", "graph_ms", "both_ms")]
        kernel = f"**{r['kernel']}**" if r["chosen"] else r["kernel"]
        lines.append(f"| {r['shape']} | {r['dtype']} | {kernel} | {' | '.join(cells)} | {r.get('error', '')} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "bench" / "results")
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds after which what is left is not run")
    parser.add_argument("--jobs", help="numbers of the jobs that this process does itself (used by the parent)")
    parser.add_argument("--log", type=pathlib.Path, help="where it writes what it does")
    given = parser.parse_args()
    if not torch.cuda.is_available():
        print("this needs a CUDA GPU, and torch finds none here")
        return 2
    if given.jobs:
        return child([int(n) for n in given.jobs.split(",")], given.log)
    start = time.perf_counter()
    every = jobs()
    record: dict[str, Any] = {
        "command": "python bench/attention_cuda.py",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "gpu": torch.cuda.get_device_name(),
        "cudnn": torch.backends.cudnn.version(),
    }
    record |= collect(every, do_all(every, given.limit))
    record["seconds"] = time.perf_counter() - start
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / "attention_cuda.json").write_text(json.dumps(record, indent=1) + "\n")
    text = markdown(record)
    (given.out / "attention_cuda.md").write_text(text)
    print(text)
    for failure in record["failed"]:
        reason = failure.get("error", "differs") + (f", at {failure['stage']}" if "stage" in failure else "")
        print(f"{'FAILED' if failure['counts'] else 'failed (not ours, or not chosen)'}: {failure['job']}: {reason}")
    return 1 if any(f["counts"] for f in record["failed"]) else 0


if __name__ == "__main__":
    sys.exit(main())
