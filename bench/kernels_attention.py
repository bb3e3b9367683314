"""Attention with its surroundings in one kernel, against the best library's with generated kernels for the rest.

Rotary positions, norms and gates around the attentions of a Llama, a ViT and a GPT-2, forward and backward, and the
gradients of ViT's with nothing around them. Every way
is compared with float64 before it is timed, on the first sequence of a batch; times are medians of CUDA graphs on
rotating tensors, in turns. `python bench/kernels_attention.py --out FILE.md` on a GPU takes less than a minute of it.
Without one: `--compile` compiles everything for sm_90 and says what it needs; `TRITON_INTERPRET=1 ... --dry` walks the
same path at tiny sizes.
"""

from __future__ import annotations

import argparse
import pathlib
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench.kernel_clock import as_graph, in_turns, publish  # noqa: E402
from bench.kernels_gemm import compile_table, figure  # noqa: E402
from wholestep.backends.generated import region_of  # noqa: E402
from wholestep.backends.kernels import Spec  # noqa: E402
from wholestep.backends.providers import Cudnn, Region, op_by_op  # noqa: E402
from wholestep.backends.trial import empty  # noqa: E402
from wholestep.backends.triton import attention, generate  # noqa: E402
from wholestep.dialects.step import StepBuilder, tensor_type  # noqa: E402
from wholestep.dialects.step.attention import kernels_for  # noqa: E402
from wholestep.ir.builtin import add_function, finish_function, module  # noqa: E402
from wholestep.ir.core import Op, Value  # noqa: E402
from wholestep.ir.types import F64, TensorType  # noqa: E402
from wholestep.transforms.around import pieces_around  # noqa: E402
from wholestep.transforms.attention_sides import ATTENTION  # noqa: E402
from wholestep.transforms.loops import lowered  # noqa: E402
from wholestep.transforms.regions import body_of  # noqa: E402

#: calls in a CUDA graph, sets of tensors they rotate through, rounds of timing
CALLS, SETS, ROUNDS = 6, 2, 7
#: share of the largest value by which results may differ: bf16, and numbers per row
TOLERANCE = 2e-2
#: ways to run one kernel that are timed
WAYS = 5

Call = Callable[..., Any]
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Case:
    """An attention and what stands around it: positions, norms of queries and keys, a gate behind it."""

    network: str
    batch: int
    heads: int
    shared: int
    length: int
    width: int
    causal: bool
    around: str
    backward: bool = False

    @property
    def name(self) -> str:
        shape = f"{self.batch}x{self.length}, {self.heads}/{self.shared} heads of {self.width}"
        return f"{self.network}, {self.around}, {shape}{', gradients' if self.backward else ''}"

    @property
    def options(self) -> dict[str, Any]:
        return {"scale": self.width**-0.5, "causal": self.causal, "enable_gqa": self.heads != self.shared}

    @property
    def flops(self) -> float:
        pairs = self.batch * self.heads * self.length**2 * (0.5 if self.causal else 1)
        return 2 * pairs * self.width * (5 if self.backward else 2)


def all_cases(dry: bool) -> list[Case]:
    cases = [
        Case("Llama", 4, 32, 4, 2048, 64, True, "positions"),
        Case("GPT-2", 8, 12, 12, 1024, 64, True, "gate"),
        Case("ViT", 128, 12, 12, 197, 64, False, "norms"),
    ]
    cases += [replace(case, backward=True) for case in cases[:2]]
    cases.append(Case("ViT", 128, 12, 12, 197, 64, False, "nothing", True))
    if not dry:
        return cases
    tiny = [replace(case, batch=2, heads=2, shared=2, length=19, width=16) for case in cases]
    return [replace(case, shared=1) if case.network == "Llama" else case for case in tiny]


# ---- what is computed ------------------------------------------------------------------------------------------------


def turned(b: Any, x: Value, cos: Value, sin: Value, back: bool = False) -> Value:
    """Rotary positions, in f32; back: their gradient."""
    wide, last = b.cast_to(x, cos.type.element), x.type.rank - 1
    half = x.type.shape[last] // 2

    def swapped(x: Value) -> Value:
        one, other = (b.slice(x, dim=last, start=i * half, end=(i + 1) * half, stride=1) for i in (0, 1))
        return b.concat([other, b.neg(one)] if back else [b.neg(other), one], dim=last)

    beside = swapped(b.mul(wide, sin)) if back else b.mul(swapped(wide), sin)
    return b.cast_to(b.add(b.mul(wide, cos), beside), x.type.element)


def normed(b: Any, x: Value, weight: Value) -> Value:
    wide = b.cast_to(x, weight.type.element)
    size = b.rsqrt(b.add(b.mean(b.mul(wide, wide), dims=(3,), keepdim=True), 1e-6))
    return b.cast_to(b.mul(b.mul(wide, size), weight), x.type.element)


def by_heads(b: Any, x: Value) -> Value:
    return b.transpose(x, order=(0, 2, 1, 3))


def build(case: Case, b: Any, v: dict[str, Value]) -> list[Value]:
    """The results of a case, from a builder and inputs by name."""
    q, k, value = (by_heads(b, v[name]) for name in "qkv")
    if case.around == "positions":
        q, k = (turned(b, x, v["cos"], v["sin"]) for x in (q, k))
    elif case.around == "norms":
        q, k = normed(b, q, v["scale"]), normed(b, k, v["scale"])
    if not case.backward:
        out, lse = b.attention(q, k, value, **case.options)
        out = by_heads(b, out)
        if case.around == "gate":
            out = b.mul(out, b.sigmoid(v["gate"]))
        return [out, lse]
    dout = b.mul(v["dout"], b.sigmoid(v["gate"])) if case.around == "gate" else v["dout"]
    given = by_heads(b, dout), q, k, value, by_heads(b, v["out"]), v["lse"]
    dq, dk, dv = b.attention_grad(*given, **case.options)
    if case.around == "positions":
        dq, dk = (turned(b, x, v["cos"], v["sin"], back=True) for x in (dq, dk))
    return [by_heads(b, x) for x in (dq, dk, dv)]


def body(case: Case, types: dict[str, TensorType]) -> Op:
    function = add_function(module(), "region", list(types.values()))
    block = function.regions[0].block
    finish_function(function, build(case, StepBuilder(block), dict(zip(types, block.arguments, strict=True))))
    return function


def draw(case: Case, device: str, seed: int) -> Tensors:
    """Inputs: queries, keys and values are parts of one tensor. What forward has made is computed in float64."""
    g = torch.Generator(device=device).manual_seed(seed)

    def numbers(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.randn(shape, device=device, generator=g).to(dtype)

    parts, rows = [case.heads, case.shared, case.shared], (case.batch, case.length, case.heads, case.width)
    made = dict(zip("qkv", numbers(*rows[:2], sum(parts), case.width).split(parts, 2), strict=True))
    if case.around == "positions":
        turns = torch.logspace(0, -4, case.width // 2, device=device).repeat(2)
        angle = torch.arange(case.length, device=device)[:, None] * turns
        made |= {"cos": angle.cos(), "sin": angle.sin()}
    elif case.around == "norms":
        made["scale"] = 1 + numbers(case.width, dtype=torch.float32) / 8
    if case.around == "gate":
        made["gate"] = numbers(*rows)
    if case.backward:
        forward = replace(case, backward=False, around="" if case.around == "gate" else case.around)
        pieces = [exact(forward, part) for part in one_by_one(made)]
        out, lse = (torch.cat(each) for each in zip(*pieces, strict=True))
        made |= {"dout": numbers(*rows), "out": out.to(torch.bfloat16), "lse": lse.float()}
    return made


def one_by_one(tensors: Tensors) -> list[Tensors]:
    """The sequences of a batch, each by itself."""
    batched = ("q", "k", "v", "gate", "dout", "out", "lse")
    count = tensors["q"].shape[0]
    return [{n: t[i : i + 1] if n in batched else t for n, t in tensors.items()} for i in range(count)]


def exact(case: Case, tensors: Tensors) -> list[torch.Tensor]:
    """The results of one sequence in float64."""
    function = body(replace(case, batch=1), {n: TensorType(tuple(t.shape), F64) for n, t in tensors.items()})
    for op in function.regions[0].block:
        if op.name in ATTENTION:
            op.attributes["kernel"] = "math"
    run = op_by_op(Region(function, None, (), (), next(iter(tensors.values())).device))
    return run(*(t.double() for t in tensors.values()))


def fault(found: Sequence[torch.Tensor], right: Sequence[torch.Tensor]) -> str:
    """What is wrong with the results of the first sequence; empty where nothing is."""
    for number, (a, b) in enumerate(zip(found, right, strict=True)):
        error = ((a[:1].double() - b).abs().max() / b.abs().max()).item()
        if not error <= TOLERANCE * (2 if generate.interpreting() else 1):  # (which cuts bf16 off)
            return f"result {number} differs by {error:.3g} of the largest value"
    return ""


# ---- ways to compute it ----------------------------------------------------------------------------------------------


def spec_of(x: torch.Tensor) -> Spec:
    return Spec(tuple(x.shape), tuple(x.stride()), x.dtype)


@dataclass
class Job:
    """A case as one region, and as the pieces that it is apart."""

    case: Case
    region: Region
    own: list[generate.Candidate]


def prepare(case: Case, device: str) -> Job:
    tensors = draw(replace(case, backward=False), device, 0)
    if case.backward:
        rows = (case.batch, case.length, case.heads, case.width)
        tensors |= {n: torch.empty(rows, dtype=torch.bfloat16, device=device) for n in ("dout", "out")}
        tensors["lse"] = torch.empty(case.batch, case.heads, case.length, device=device)
    function = body(case, {n: tensor_type(t) for n, t in tensors.items()})
    region = region_of(function, None, [spec_of(t) for t in tensors.values()], torch.device(device))
    if why := attention.why_not(function, region.specs):
        raise RuntimeError(f"{case.name}: {why}")
    return Job(case, region, attention.candidates(function, region.specs)[:WAYS])


def libraries(region: Region) -> dict[str, Call]:
    """The attention of a region by each library that runs it: they write their results where they like."""
    found: dict[str, Call] = {}
    (anchor,) = (op for op in region.ops if op.name in ATTENTION)
    for kernel in kernels_for(anchor, region.device):
        own = replace(region, body=region.body.clone())
        next(op for op in own.ops if op.name in ATTENTION).attributes["kernel"] = kernel
        run, count = op_by_op(own), len(own.operands)
        found[kernel] = lambda *tensors, run=run, count=count: run(*tensors[:count])
        if region.device.type == "cuda" and not Cudnn().claims(own):
            offers = Cudnn().offers(own)
            built = Cudnn().build(offers)
            for offer in offers:
                if not isinstance(run := built[offer.key], Exception):
                    found[f"{kernel}, in place, {offer.name}"] = with_scratch(offer, run, region.device)
    return found


def runs(name: str, run: Call, tensors: Sequence[torch.Tensor]) -> bool:
    """Whether a library's way does what it is asked; what it says where it does not."""
    try:
        run(*tensors)
    except RuntimeError as error:
        print(f"{name} is left out: {str(error).splitlines()[0]}", file=sys.stderr)
        return False
    return True


@dataclass
class Apart:
    """The pieces of a region on tensors of their own, in the order of the program: ways to run each of them."""

    pieces: list[tuple[str, dict[str, Call], list[torch.Tensor]]]
    results: list[torch.Tensor]


def apart(region: Region, operands: Sequence[torch.Tensor]) -> Apart:
    """What a region is where nobody runs it as one; all is computed once, so that every piece has its operands."""
    block = region.body.regions[0].block
    assert block.last is not None
    values: dict[Value, torch.Tensor] = dict(zip(block.arguments, operands, strict=True))
    found = []

    def seen(value: Value) -> torch.Tensor:
        if value not in values:
            assert value.op is not None
            function = add_function(module(), "view", [v.type for v in value.op.operands])
            inner = function.regions[0].block
            copy = value.op.clone(dict(zip(value.op.operands, inner.arguments, strict=True)))
            inner.append(copy)
            finish_function(function, copy.results)
            (values[value],) = op_by_op(Region(function, None, (), (), region.device))(*map(seen, value.op.operands))
        return values[value]

    for piece in pieces_around(region.body):
        function, given = body_of(piece), [seen(v) for v in piece.inputs]
        anchored = any(op.name in ATTENTION for op in piece.ops)
        kernel = None if anchored else lowered(function)
        own = region_of(function, kernel, [spec_of(t) for t in given], region.device)
        results = [empty(s, region.device) for s in own.results]
        for result, made in zip(results, op_by_op(own)(*given), strict=True):
            result.copy_(made)
        values.update(zip(piece.outputs, results, strict=True))
        if anchored:
            ways = {n: run for n, run in libraries(own).items() if runs(n, run, [*given, *results])}
        else:
            candidates = generate.candidates(kernel, own.specs)[:WAYS]
            built = generate.build(candidates)
            right = [(c, run) for c in candidates if not isinstance(run := built[c.key], Exception)]
            ways = {c.name: with_scratch(c, run, region.device) for c, run in right}
        found.append(("attention" if anchored else "loops", ways, [*given, *results]))
    return Apart(found, [seen(v) for v in block.last.operands])


def with_scratch(way: Any, run: Call, device: torch.device) -> Call:
    scratch = [empty(s, device) for s in way.scratch]
    return lambda *tensors: run(*tensors, *scratch)


def measure(job: Job, built: dict[str, Any], sets: int, rounds: int) -> dict[str, Any]:
    case, device = job.case, job.region.device
    drawn = [draw(case, device.type, seed) for seed in range(sets)]
    tensors = [list(each.values()) for each in drawn]
    right = exact(case, one_by_one(drawn[0])[0])
    faults: dict[str, str] = {}
    graphs: dict[str, Call] = {}
    outputs = [[empty(s, device) for s in job.region.results] for _ in range(sets)]
    for candidate in job.own:
        run = built[candidate.key]
        if isinstance(run, Exception):
            faults[candidate.name] = str(run).strip().splitlines()[-1]
            continue
        whole = with_scratch(candidate, run, device)
        for output in outputs[0]:
            output.fill_(float("nan"))
        whole(*tensors[0], *outputs[0])
        if wrong := fault(outputs[0], right):
            faults[candidate.name] = wrong
            continue
        calls = [lambda t=t, o=o, run=whole: run(*t, *o) for t, o in zip(tensors, outputs, strict=True)]
        graphs[candidate.name] = as_graph(calls, CALLS)
    divided = [apart(job.region, t) for t in tensors]
    best: list[str] = []
    for number, (_, ways, _) in enumerate(divided[0].pieces):  # each piece by its quickest way
        alone = {
            name: as_graph([lambda d=d, n=number, w=name: d.pieces[n][1][w](*d.pieces[n][2]) for d in divided], CALLS)
            for name in ways
        }
        times = in_turns(alone, min(rounds, 3), flush=False)
        best.append(min(times, key=times.__getitem__))
    if wrong := fault(divided[0].results, right):  # (by now generated kernels have written what is theirs)
        faults["libraries and kernels"] = wrong
    anchors = [n for n, (kind, _, _) in enumerate(divided[0].pieces) if kind == "attention"]

    def sequence(d: Apart, which: Sequence[int]) -> Call:
        calls = [(d.pieces[n][1][best[n]], d.pieces[n][2]) for n in which]
        return lambda: [run(*given) for run, given in calls]

    every = range(len(best))
    graphs["library alone"] = as_graph([sequence(d, anchors) for d in divided], CALLS)
    graphs["apart"] = as_graph([sequence(d, every) for d in divided], CALLS)
    times = {name: us / CALLS for name, us in in_turns(graphs, rounds, flush=False).items()}
    own = {c.name: times[c.name] for c in job.own if c.name in times}
    first = min(own, key=own.__getitem__) if own else ""
    return {
        "case": case.name,
        "library": best[anchors[0]],
        "alone": times["library alone"],
        "apart": times["apart"],
        "ours": own.get(first),
        "first": own.get(job.own[0].name),
        "best": first,
        "tflops": case.flops / own[first] / 1e6 if own else None,
        "configs": own,
        "faults": faults,
    }


def table(found: Sequence[dict[str, Any]]) -> str:
    times = ("library alone", "with kernels", "one kernel", "first guess")
    titles = ("case", "library", *times, "gain", "TFLOP/s", "configuration")
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for f in found:
        gain = None if f["ours"] is None else f["apart"] / f["ours"]
        figures = [figure(f[key]) for key in ("alone", "apart", "ours", "first")]
        cells = [f["case"], f["library"], *figures, figure(gain, 2), figure(f["tflops"], 0), f["best"]]
        lines.append(f"| {' | '.join(cells)} |")
    faults = [f"- {f['case']}: {name}: {why}" for f in found for name, why in f["faults"].items()]
    return "\n".join([*lines, "", f"Ways that are wrong or do not fit (not timed): {len(faults)}", *faults])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=pathlib.Path, help="write the table here, and all figures beside it as .json")
    parser.add_argument("--compile", action="store_true", help="only compile, for sm_90; needs no GPU")
    parser.add_argument("--dry", action="store_true", help="tiny sizes; with TRITON_INTERPRET=1 on any machine")
    options = parser.parse_args()
    begin, cuda = time.perf_counter(), torch.cuda.is_available()
    jobs = [prepare(case, "cuda" if cuda else "cpu") for case in all_cases(options.dry)]
    if options.compile:
        text, figures = compile_table(jobs)
    else:
        built = generate.build(list({c.key: c for job in jobs for c in job.own}.values()))
        compiled = time.perf_counter() - begin
        rounds = ROUNDS if cuda else 1
        figures = []
        for job in jobs:
            figures.append(measure(job, built, SETS if cuda else 1, rounds))
            if cuda:
                torch.cuda.empty_cache()
        where = torch.cuda.get_device_name() if cuda else "no GPU"
        text = (
            "# Attention and its neighbours as one kernel\n\n"
            f"`python bench/kernels_attention.py`: {where}, torch {torch.__version__}, bf16; "
            f"microseconds per call, median of {rounds} CUDA graphs of "
            f"{CALLS} calls. The attentions were compiled in {compiled:.0f} s, everything took "
            f"{time.perf_counter() - begin:.0f} s.\n\n{table(figures)}"
        )
    publish(text, figures, options.out)
    return 1 if any(f.get("faults") or f.get("error") for f in figures) else 0


if __name__ == "__main__":
    sys.exit(main())
