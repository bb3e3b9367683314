"""Matrix products with their surroundings in one kernel, against cuBLAS with generated kernels for the rest.

The layers of GPT-2 at 8192 tokens and the 1x1 convolutions of ResNet-50 and EfficientNet-B0 with their gradients. Every
configuration is compared with PyTorch before it is timed; times are medians of CUDA graphs of ten calls on rotating
tensors, in turns. `python bench/kernels_gemm.py [--tokens | --images] --out FILE.md` on a GPU. Without one: `--compile`
compiles everything for sm_90 and says what it needs; `TRITON_INTERPRET=1 ... --dry` walks the same path at tiny sizes.
"""

from __future__ import annotations

import argparse
import math
import pathlib
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench.kernel_clock import as_graph, in_turns, publish  # noqa: E402
from wholestep.backends.kernels import Spec  # noqa: E402
from wholestep.backends.triton import contraction, generate  # noqa: E402
from wholestep.dialects.step import StepBuilder  # noqa: E402
from wholestep.dialects.step.base import ir_dtype, torch_dtype  # noqa: E402
from wholestep.ir.builtin import add_function, finish_function, module  # noqa: E402
from wholestep.ir.core import Op, Value  # noqa: E402
from wholestep.ir.types import F32, TensorType  # noqa: E402
from wholestep.transforms.loops import lowered  # noqa: E402

BF16, FLOAT = torch.bfloat16, torch.float32
#: calls in a CUDA graph, sets of tensors they rotate through, rounds of timing
CALLS, SETS, ROUNDS = 10, 4, 9
#: share of the largest value by which bf16 results may differ, and sums
TOLERANCE = {BF16: 2e-2, FLOAT: 2e-2}


@dataclass(frozen=True)
class Case:
    """A product and its surroundings: `before` gives the factors and `after` the results, from a builder and inputs."""

    name: str
    #: shape and type by name
    inputs: dict[str, tuple[tuple[int, ...], torch.dtype]]
    spec: str
    before: Callable[[Any, dict[str, Value]], tuple[Value, Value]]
    after: Callable[[Any, Value, dict[str, Value]], list[Value]]
    #: a bias that cuBLAS adds by itself
    bias: str = ""
    flops: int = field(default=0)
    #: the factors as PyTorch computes them, and the results from the product; where these are more than a plain product
    factors: Callable[[dict[str, torch.Tensor]], tuple[torch.Tensor, torch.Tensor]] | None = None
    results: Callable[[torch.Tensor, dict[str, torch.Tensor]], list[torch.Tensor]] | None = None


def plain(x: str, w: str) -> Callable[[Any, dict[str, Value]], tuple[Value, Value]]:
    return lambda b, v: (v[x], v[w])


def gpt2(tokens: int, width: int) -> list[Case]:
    four, three = 4 * width, 3 * width

    def half(*shape: int) -> tuple[tuple[int, ...], torch.dtype]:
        return shape, BF16

    def forward(name: str, k: int, n: int, after: Any, **more: Any) -> Case:
        inputs = {"x": half(tokens, k), "w": half(n, k), "bias": half(n), **more}
        return Case(name, inputs, "mk,nk->mn", plain("x", "w"), after, "bias", 2 * tokens * k * n)

    def input_grad(name: str, k: int, n: int, after: Any, **more: Any) -> Case:
        inputs = {"dy": half(tokens, k), "w": half(k, n), **more}
        return Case(name, inputs, "mk,kn->mn", plain("dy", "w"), after, "", 2 * tokens * k * n)

    def weight_grad(name: str, m: int, n: int) -> Case:
        after = lambda b, y, v: [b.cast(y, dtype=F32)]  # noqa: E731
        inputs = {"dy": half(tokens, m), "x": half(tokens, n)}
        return Case(name, inputs, "km,kn->mn", plain("dy", "x"), after, "", 2 * tokens * m * n)

    def slope(b: Any, y: Value, v: dict[str, Value]) -> list[Value]:
        d = b.gelu_grad(y, v["pre"], approximate="tanh")
        return [d, b.sum(b.cast(d, dtype=F32), dims=(0,))]

    residual = lambda b, y, v: [b.add(y, v["r"])]  # noqa: E731
    return [
        forward(f"{width} to {three}, bias", width, three, lambda b, y, v: [y]),
        forward(f"{width} to {width}, bias, residual", width, width, residual, r=half(tokens, width)),
        forward(f"{width} to {four}, bias, gelu, both kept", width, four,
                lambda b, y, v: [y, b.gelu(y, approximate="tanh")]),
        forward(f"{four} to {width}, bias, residual", four, width, residual, r=half(tokens, width)),
        input_grad(f"dx {width} to {four}, gelu', column sums", width, four, slope, pre=half(tokens, four)),
        input_grad(f"dx {four} to {width}", four, width, lambda b, y, v: [y]),
        input_grad(f"dx {three} to {width}, added to a gradient", three, width, residual, r=half(tokens, width)),
        weight_grad(f"dw {four} x {width}, f32", four, width),
        weight_grad(f"dw {three} x {width}, f32", three, width),
        weight_grad(f"dw {width} x {width}, f32", width, width),
    ]  # fmt: skip


def images(batch: int, small: bool = False) -> list[Case]:
    """1x1 convolutions channels-last: products of pixels x channels, with the halves of BatchNorm on their sides."""

    def half(*shape: int) -> tuple[tuple[int, ...], torch.dtype]:
        return shape, BF16

    def rows(names: str, channels: int) -> dict[str, Any]:
        return {name: ((channels,), FLOAT) for name in names.split()}

    def normal(b: Any, x: Value, v: dict[str, Value]) -> Value:
        return b.add(b.mul(b.cast(x, dtype=F32), v["scale"]), v["shift"])

    def activated(act: str, gate: bool = False) -> tuple[Any, Any]:
        """scale, shift, activation and maybe a factor per image, on load."""

        def made(b: Any, v: dict[str, Value]) -> tuple[Value, Value]:
            x = getattr(b, act)(b.cast(normal(b, v["x"], v), dtype=ir_dtype(BF16)))
            return b.mul(x, v["gate"]) if gate else x, v["w"]

        def right(v: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
            x = getattr(torch.nn.functional, act)((v["x"] * v["scale"] + v["shift"]).to(BF16).float())
            return (x * v["gate"] if gate else x).to(BF16).float(), v["w"]

        return made, right

    def statistics(b: Any, y: Value, v: dict[str, Value]) -> list[Value]:
        wide, dims = b.cast(y, dtype=F32), tuple(range(y.type.rank - 1))
        return [y, b.sum(wide, dims=dims), b.sum(b.mul(wide, wide), dims=dims)]

    def sums(y: torch.Tensor, v: dict[str, torch.Tensor]) -> list[torch.Tensor]:
        dims = tuple(range(y.ndim - 1))
        return [y, y.sum(dims), y.square().sum(dims)]

    def forward(side: int, k: int, n: int, act: str, gate: bool = False) -> Case:
        shape = (batch, side * side) if gate else (batch * side * side,)
        inputs = {"x": half(*shape, k), "w": half(n, k)} | (rows("scale shift", k) if act else {})
        inputs |= {"gate": half(batch, 1, k)} if gate else {}
        name = (
            f"1x1 {k} to {n} @ {side}²{', BatchNorm + ' + act + ' on load' if act else ''}{', gate' * gate}, statistics"
        )
        before, right = activated(act, gate) if act else (plain("x", "w"), None)
        spec = "bmk,nk->bmn" if gate else "mk,nk->mn"
        return Case(name, inputs, spec, before, statistics, "", 2 * batch * side * side * k * n, right, sums)

    def gradient(b: Any, v: dict[str, Value]) -> Value:
        """BatchNorm's backward: a * dy + b * x + c."""
        dy, x = (b.cast(v[name], dtype=F32) for name in ("dy", "x"))
        return b.cast(b.add(b.add(b.mul(dy, v["p"]), b.mul(x, v["q"])), v["r"]), dtype=ir_dtype(BF16))

    def gradient_right(v: dict[str, torch.Tensor]) -> torch.Tensor:
        return (v["dy"] * v["p"] + v["x"] * v["q"] + v["r"]).to(BF16).float()

    def masked_sums(b: Any, y: Value, v: dict[str, Value]) -> list[Value]:
        """The sums of the next BatchNorm's backward, under the mask of its relu."""
        wide = b.cast(v["z"], dtype=F32)
        dy = b.select(b.gt(normal(b, v["z"], v), 0.0), b.cast(y, dtype=F32), 0.0)
        return [y, b.sum(dy, dims=(0,)), b.sum(b.mul(dy, wide), dims=(0,))]

    def masked_right(y: torch.Tensor, v: dict[str, torch.Tensor]) -> list[torch.Tensor]:
        dy = torch.where(v["z"] * v["scale"] + v["shift"] > 0, y, 0.0)
        return [y, dy.sum(0), (dy * v["z"]).sum(0)]

    def input_grad(side: int, k: int, n: int) -> Case:
        m = batch * side * side
        inputs = {"dy": half(m, k), "x": half(m, k), "w": half(k, n), "z": half(m, n)}
        inputs |= rows("p q r", k) | rows("scale shift", n)
        name = f"dx {k} to {n} @ {side}², BatchNorm' on load, sums of BatchNorm' with relu"
        return Case(name, inputs, "mk,kn->mn", lambda b, v: (gradient(b, v), v["w"]), masked_sums, "", 2 * m * k * n,
                    lambda v: (gradient_right(v), v["w"]), masked_right)  # fmt: skip

    def residual(side: int, k: int, n: int) -> Case:
        """The gradient of a residual sum: added, masked and summed up where it is made."""
        m = batch * side * side

        def after(b: Any, y: Value, v: dict[str, Value]) -> list[Value]:
            d = b.select(b.gt(v["s"], 0.0), b.add(y, v["d"]), 0.0)
            wide = b.cast(d, dtype=F32)
            return [d, b.sum(wide, dims=(0,)), b.sum(b.mul(wide, b.cast(v["z"], dtype=F32)), dims=(0,))]

        def right(y: torch.Tensor, v: dict[str, torch.Tensor]) -> list[torch.Tensor]:
            d = torch.where(v["s"] > 0, y + v["d"], 0.0)
            return [d, d.sum(0), (d * v["z"]).sum(0)]

        inputs = {"dy": half(m, k), "w": half(k, n), "d": half(m, n), "s": half(m, n), "z": half(m, n)}
        name = f"dx {k} to {n} @ {side}², residual, relu' and sums of BatchNorm'"
        return Case(name, inputs, "mk,kn->mn", plain("dy", "w"), after, "", 2 * m * k * n, None, right)

    def weight_grad(side: int, k: int, n: int) -> Case:
        m = batch * side * side

        def before(b: Any, v: dict[str, Value]) -> tuple[Value, Value]:
            y = b.cast(normal(b, v["z"], v), dtype=ir_dtype(BF16))
            return gradient(b, v), b.relu(y)

        def right(v: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
            return gradient_right(v), torch.relu((v["z"] * v["scale"] + v["shift"]).to(BF16).float())

        inputs = {"dy": half(m, k), "x": half(m, k), "z": half(m, n), **rows("p q r", k), **rows("scale shift", n)}
        name = f"dw {k} x {n} @ {side}², both computed on load"
        return Case(name, inputs, "km,kn->mn", before, lambda b, y, v: [y], "", 2 * m * k * n, right)

    if small:
        return [
            forward(6, 32, 48, "relu"),
            forward(6, 40, 24, "silu", True),
            input_grad(6, 48, 32),
            residual(6, 32, 48),
            weight_grad(6, 48, 32),
        ]
    return [
        forward(56, 256, 64, ""),
        forward(56, 64, 256, "relu"),
        forward(28, 128, 512, "relu"),
        forward(14, 256, 1024, "relu"),
        forward(56, 24, 144, ""),
        forward(56, 144, 24, "silu", True),
        input_grad(56, 256, 64),
        residual(56, 64, 256),
        residual(28, 128, 512),
        weight_grad(56, 256, 64),
    ]


def all_cases(dry: bool, only: str = "") -> list[Case]:
    tokens = [] if only == "images" else gpt2(80, 32) if dry else gpt2(8192, 768)
    return [*tokens, *([] if only == "tokens" else images(2 if dry else 256, dry))]


# ---- kernels ---------------------------------------------------------------------------------------------------------


@dataclass
class Kernel:
    """A generated kernel: its loops, the names of its inputs, what it writes and which of the results that is."""

    loops: Op
    inputs: list[str]
    outputs: list[TensorType]
    which: list[int]

    def candidates(self, family: Any) -> list[generate.Candidate]:
        arguments = self.loops.regions[0].block.arguments
        return family.candidates(self.loops, [spec_of(a.type) for a in arguments])


def spec_of(type: TensorType) -> Spec:
    strides, at = [], 1
    for n in reversed(type.shape):
        strides.append(at)
        at *= n
    return Spec(type.shape, tuple(reversed(strides)), torch_dtype(type.element))


def kernel(inputs: dict[str, TensorType], build: Callable[[Any, dict[str, Value]], list[Value]]) -> Kernel | None:
    """The loops of some step ops; None where they do nothing. A result that is an input is nobody's work."""
    function = add_function(module(), "k", list(inputs.values()))
    block = function.regions[0].block
    made = build(StepBuilder(block), dict(zip(inputs, block.arguments, strict=True)))
    which = [i for i, r in enumerate(made) if r.op is not None]
    if not which:
        return None
    results = [made[i] for i in which]
    finish_function(function, results)
    return Kernel(lowered(function), list(inputs), [r.type for r in results], which)


def types_of(case: Case) -> dict[str, TensorType]:
    return {n: TensorType(shape, ir_dtype(dtype)) for n, (shape, dtype) in case.inputs.items()}


def whole(case: Case) -> Kernel:
    """Everything as one kernel."""

    def build(b: Any, v: dict[str, Value]) -> list[Value]:
        bias = [v[case.bias]] if case.bias else []
        return case.after(b, b.contract(*case.before(b, v), *bias, spec=case.spec), v)

    made = kernel(types_of(case), build)
    assert made is not None
    return made


def parts(case: Case) -> tuple[list[Kernel | None], Kernel | None, TensorType]:
    """What cuBLAS leaves to others: the two factors, and everything after its result, whose type is the third."""
    types = types_of(case)
    function = add_function(module(), "k", list(types.values()))
    block = function.regions[0].block
    b = StepBuilder(block)
    y = b.contract(*case.before(b, dict(zip(types, block.arguments, strict=True))), spec=case.spec).type
    before = [kernel(types, lambda b, v, i=i: [case.before(b, v)[i]]) for i in (0, 1)]
    return before, kernel({**types, "y": y}, lambda b, v: case.after(b, v["y"], v)), y


# ---- running ---------------------------------------------------------------------------------------------------------


def draw(case: Case, device: str, seed: int) -> dict[str, torch.Tensor]:
    g = torch.Generator(device=device).manual_seed(seed)
    made = {}
    for name, (shape, dtype) in case.inputs.items():
        made[name] = torch.randn(shape, device=device, generator=g).to(dtype)
    w = "w" if "w" in made else "x"
    made[w] = made[w] / math.sqrt(case.inputs[w][0][-1])
    return made


def blank(types: Sequence[TensorType | Spec], device: str) -> list[torch.Tensor]:
    dtypes = [t.dtype if isinstance(t, Spec) else torch_dtype(t.element) for t in types]
    return [torch.full(t.shape, float("nan"), dtype=d, device=device) for t, d in zip(types, dtypes, strict=True)]


def library(
    case: Case, v: dict[str, torch.Tensor], x: torch.Tensor, c: torch.Tensor, out: torch.Tensor
) -> Callable[[], Any]:
    """The product alone by cuBLAS."""
    left, right = case.spec.split("->")[0].split(",")
    a = x.T if left == "km" else x.flatten(0, -2)
    c = c.T if right == "nk" else c
    flat = out.flatten(0, -2)
    if case.bias:
        return lambda: torch.addmm(v[case.bias], a, c, out=flat)
    return lambda: torch.mm(a, c, out=flat)


def plain_factors(case: Case, v: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    first, second = list(v.values())[:2]
    return first, v.get("w", second)


def wanted(case: Case, v: dict[str, torch.Tensor], after: Any, y_type: TensorType) -> list[torch.Tensor]:
    """The results by PyTorch in f32."""
    wide = {n: t.float() for n, t in v.items()}
    factors = plain_factors(case, wide) if case.factors is None else case.factors(wide)
    y = torch.empty(y_type.shape, device=factors[0].device)
    library(case, wide, *factors, y)()
    if case.results is not None:
        return case.results(y.to(BF16).float(), wide)
    if after is None:
        return [y]
    if "pre" in v:
        d = torch.ops.aten.gelu_backward(y, wide["pre"], approximate="tanh")
        return [d, d.sum(0)]
    if "r" in v:
        return [y + wide["r"]]
    if after.which == [1]:
        return [y, torch.nn.functional.gelu(y, approximate="tanh")]
    return [y]


def fault(found: Sequence[torch.Tensor], right: Sequence[torch.Tensor]) -> str:
    for i, (a, b) in enumerate(zip(found, right, strict=True)):
        error = ((a.float() - b).abs().max() / b.abs().max()).item()
        if not error <= TOLERANCE[a.dtype]:
            return f"result {i} differs by {error:.3g} of the largest value"
    return ""


@dataclass
class Job:
    """A case with its generated kernels and their candidates."""

    case: Case
    whole: Kernel
    own: list[generate.Candidate]
    before: list[Kernel | None]
    after: Kernel | None
    rest: list[list[generate.Candidate]]
    y: TensorType

    @property
    def around(self) -> list[Kernel | None]:
        return [*self.before, self.after]


def prepare(case: Case) -> Job:
    fused = whole(case)
    before, after, y = parts(case)
    rest = [k.candidates(generate)[:2] if k is not None else [] for k in (*before, after)]
    return Job(case, fused, fused.candidates(contraction), before, after, rest, y)


@dataclass
class Bench:
    """Built kernels on a device."""

    built: dict[str, Any]
    device: str
    sets: int
    rounds: int

    def call(
        self,
        kernel: Kernel,
        candidate: generate.Candidate,
        values: dict[str, torch.Tensor],
        outputs: list[torch.Tensor],
    ) -> Callable[[], None]:
        run = self.built[candidate.key]
        if isinstance(run, Exception):
            raise run
        tensors = [*(values[n] for n in kernel.inputs), *outputs, *blank(candidate.scratch, self.device)]
        return lambda: run(*tensors)

    def measure(self, job: Job) -> dict[str, Any]:
        case = job.case
        tensors = [draw(case, self.device, seed) for seed in range(self.sets)]
        right = wanted(case, tensors[0], job.after, job.y)
        graphs: dict[str, Callable[[], Any]] = {}
        faults: dict[str, str] = {}
        outputs = [blank(job.whole.outputs, self.device) for _ in range(self.sets)]
        for candidate in job.own:
            run = self.built[candidate.key]
            if isinstance(run, Exception):
                faults[candidate.name] = str(run).strip().splitlines()[-1]
                continue
            calls = [self.call(job.whole, candidate, v, o) for v, o in zip(tensors, outputs, strict=True)]
            for o in outputs[0]:
                o.fill_(float("nan"))
            calls[0]()
            wrong = fault(outputs[0], right)
            if wrong:
                faults[candidate.name] = wrong
            else:
                graphs[candidate.name] = as_graph(calls, CALLS)
        graphs["cuBLAS alone"], graphs["apart"] = self.apart(job, tensors, right, faults)
        times = {name: us / CALLS for name, us in in_turns(graphs, self.rounds, flush=False).items()}
        own = {c.name: times[c.name] for c in job.own if c.name in times}
        best = min(own, key=lambda n: own[n]) if own else ""
        return {
            "case": case.name,
            "cublas": times["cuBLAS alone"],
            "apart": times["apart"],
            "ours": own.get(best),
            "best": best,
            "first": own.get(job.own[0].name),
            "tflops": case.flops / own[best] / 1e6 if own else None,
            "configs": own,
            "faults": faults,
        }

    def apart(
        self, job: Job, tensors: list[dict[str, torch.Tensor]], right: list[torch.Tensor], faults: dict[str, str]
    ) -> tuple[Callable[[], Any], Callable[[], Any]]:
        """cuBLAS alone, and with the kernels for the rest, each in the faster of its first two configurations."""
        products, sequences, outputs = [], [], []
        chosen = [self.quicker(k, r, job, tensors[0]) if k else None for k, r in zip(job.around, job.rest, strict=True)]
        for v in tensors:
            calls: list[Callable[[], Any]] = []
            factors, y = list(plain_factors(job.case, v)), blank([job.y], self.device)[0]
            for i, own in enumerate(job.before):
                if own is not None and (config := chosen[i]) is not None:
                    (factors[i],) = made = blank(own.outputs, self.device)
                    calls.append(self.call(own, config, v, made))
            products.append(library(job.case, v, *factors, y))
            calls.append(products[-1])
            results = [y] * len(right)
            if job.after is not None and chosen[2] is not None:
                made = blank(job.after.outputs, self.device)
                for i, tensor in zip(job.after.which, made, strict=True):
                    results[i] = tensor
                calls.append(self.call(job.after, chosen[2], {**v, "y": y}, made))
            sequences.append(lambda calls=calls: [call() for call in calls])
            outputs.append(results)
        sequences[0]()
        wrong = fault(outputs[0], right)
        if wrong:
            faults["cuBLAS and kernels"] = wrong
        return as_graph(products, CALLS), as_graph(sequences, CALLS)

    def quicker(
        self, kernel: Kernel, options: Sequence[generate.Candidate], job: Job, v: dict[str, torch.Tensor]
    ) -> generate.Candidate:
        values = {**v, "y": torch.zeros(job.y.shape, dtype=torch_dtype(job.y.element), device=self.device)}
        calls = {o.name: self.call(kernel, o, values, blank(kernel.outputs, self.device)) for o in options}
        graphs = {name: as_graph([call], CALLS) for name, call in calls.items()}
        times = in_turns(graphs, min(self.rounds, 3), flush=False)
        return min(options, key=lambda o: times[o.name])


def figure(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def table(found: Sequence[dict[str, Any]]) -> str:
    titles = (
        "case",
        "cuBLAS alone",
        "cuBLAS and kernels",
        "one kernel",
        "first guess",
        "gain",
        "TFLOP/s",
        "configuration",
    )
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for f in found:
        gain = None if f["ours"] is None else f["apart"] / f["ours"]
        times = [figure(f[key]) for key in ("cublas", "apart", "ours", "first")]
        lines.append(f"| {' | '.join([f['case'], *times, figure(gain, 2), figure(f['tflops'], 0), f['best']])} |")
    faults = [f"- {f['case']}: {name}: {why}" for f in found for name, why in f["faults"].items()]
    return "\n".join([*lines, "", f"Configurations that are wrong or do not fit (not timed): {len(faults)}", *faults])


def compile_table(jobs: Sequence[Job]) -> tuple[str, list[dict[str, Any]]]:
    every = [c for job in jobs for c in job.own]
    infos = generate.compile_for(list({c.key: c for c in every}.values()), 90)
    lines = [
        "| case | configuration | registers | spilled bytes | shared bytes | seconds |",
        "|---|---|---|---|---|---|",
    ]
    figures = []
    for job in jobs:
        for c in job.own:
            info = infos[c.key]
            if isinstance(info, Exception):
                lines.append(f"| {job.case.name} | {c.name} | {str(info).splitlines()[0]} | | | |")
                figures.append({"case": job.case.name, "configuration": c.name, "error": str(info)})
                continue
            needs = {"registers": info.registers, "spills": info.spills, "shared": info.shared}
            cells = [job.case.name, c.name, *map(str, needs.values()), f"{info.seconds:.1f}"]
            lines.append(f"| {' | '.join(cells)} |")
            figures.append({"case": job.case.name, "configuration": c.name, **needs})
    return "\n".join(lines), figures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=pathlib.Path, help="write the table here, and all figures beside it as .json")
    parser.add_argument("--compile", action="store_true", help="only compile, for sm_90; needs no GPU")
    parser.add_argument("--dry", action="store_true", help="tiny sizes; with TRITON_INTERPRET=1 on any machine")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--images", dest="only", action="store_const", const="images", help="only the convolutions")
    which.add_argument("--tokens", dest="only", action="store_const", const="tokens", help="only the layers of GPT-2")
    options = parser.parse_args()
    begin = time.perf_counter()
    cuda = torch.cuda.is_available()
    jobs = [prepare(case) for case in all_cases(options.dry, options.only or "")]
    if options.compile:
        text, figures = compile_table(jobs)
    else:
        every = {c.key: c for job in jobs for c in (*job.own, *(c for r in job.rest for c in r))}
        built = generate.build(list(every.values()))
        compiled = time.perf_counter() - begin
        bench = Bench(built, "cuda" if cuda else "cpu", SETS if cuda else 1, ROUNDS if cuda else 1)
        figures = []
        for job in jobs:
            figures.append(bench.measure(job))
            if cuda:
                torch.cuda.empty_cache()
        where = torch.cuda.get_device_name() if cuda else "no GPU"
        text = (
            f"{where}, torch {torch.__version__}, bf16; microseconds per call, median of {bench.rounds} CUDA graphs of "
            f"{CALLS} calls on {bench.sets} sets of tensors. {len(every)} kernels compiled in {compiled:.0f} s, "
            f"everything {time.perf_counter() - begin:.0f} s.\n\n{table(figures)}"
        )
    publish(text, figures, options.out)
    return 1 if any(f.get("faults") or f.get("error") for f in figures) else 0


if __name__ == "__main__":
    sys.exit(main())
