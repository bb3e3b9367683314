"""Convolutions with what follows them in one kernel (`backends/wgmma`), against cuDNN and kernels for the rest.

The 3x3 convolutions of ResNet-50 at 256 images, channels-last in bf16: forward with the statistics of BatchNorm, input
gradients (convolutions with the kernel turned round, as a step has them) with ReLU's mask, its result once more and the
sums of BatchNorm's gradient; those of stride 2, of Wide ResNet-50-2 at 128 images too, by the kernel as it is, with
mask and sums. Every kernel is compared with PyTorch in f32, small ones of odd sizes in f64, and says how far it is off;
what is wrong or fails is named and not timed. Times are medians of CUDA graphs of six calls on rotating tensors, in
turns. `python bench/kernels_convolution.py --out FILE.md` on a Hopper GPU, within a minute. Without one
`--compile` says what kernels need (by nvcc), and `--dry` walks the same path with PyTorch's ops. `--only dx/2` takes
the input gradients of stride 2 alone.
"""

from __future__ import annotations

import argparse
import faulthandler
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench.kernel_clock import as_graph, in_turns, publish  # noqa: E402
from wholestep.backends.cudnn.convolution import channels_last  # noqa: E402
from wholestep.backends.kernels import Spec  # noqa: E402
from wholestep.backends.providers import Provider, Region, copying, op_by_op, providers_for  # noqa: E402
from wholestep.backends.wgmma import ways as wgmma  # noqa: E402
from wholestep.dialects.step import StepBuilder  # noqa: E402
from wholestep.dialects.step.base import ir_dtype  # noqa: E402
from wholestep.dialects.strides import row_major  # noqa: E402
from wholestep.ir.builtin import add_function, finish_function, module  # noqa: E402
from wholestep.ir.core import Value  # noqa: E402
from wholestep.ir.types import F32, TensorType  # noqa: E402
from wholestep.transforms.loops import lowered  # noqa: E402

BF16, FLOAT = torch.bfloat16, torch.float32
CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
#: calls in a CUDA graph, sets of tensors they rotate through, rounds of timing; seconds after which nothing is timed
CALLS, SETS, ROUNDS, LIMIT = 6, 3, 9, 50.0
#: seconds after which it is over, whatever it waits for
HANGS = 150.0
#: share of the largest value by which results may differ; ways of a provider that are tried
TOLERANCE, TRIED = 1e-2, 3
#: what BatchNorm adds to a variance
EPSILON = 1e-5

Launcher = Callable[..., Any]


@dataclass(frozen=True)
class Case:
    """One convolution of square images. gradient: of its input, by the turned kernel where it visits every pixel;
    small: compared in f64 alone."""

    images: int
    channels: int
    pixels: int
    filters: int
    stride: int = 1
    taps: int = 3
    dilation: int = 1
    gradient: bool = False
    small: bool = False

    @property
    def name(self) -> str:
        kind = "dx of " if self.gradient else ""
        size = f"{self.taps}x{self.taps}{f'/{self.stride}' if self.stride > 1 else ''}"
        apart = f", dilated by {self.dilation}" if self.dilation > 1 else ""
        return f"{kind}{size} {self.channels} -> {self.filters} at {self.images}x{self.pixels}x{self.pixels}{apart}"

    @property
    def strided(self) -> bool:
        """Whether it is an input gradient by the kernel as it is."""
        return self.gradient and self.stride > 1

    @property
    def padding(self) -> int:
        return self.dilation * (self.taps // 2)

    @property
    def out(self) -> int:
        if self.strided:
            return self.pixels * self.stride
        return (self.pixels + 2 * self.padding - self.dilation * (self.taps - 1) - 1) // self.stride + 1

    @property
    def window(self) -> dict[str, tuple[int, int]]:
        pairs = {"stride": self.stride, "padding": self.padding, "dilation": self.dilation}
        return {name: (n, n) for name, n in pairs.items()}

    @property
    def flops(self) -> int:
        windows = self.images * (self.pixels if self.strided else self.out) ** 2
        return 2 * windows * self.filters * self.channels * self.taps**2

    @property
    def inputs(self) -> dict[str, Spec]:
        """What the whole reads: x (or a gradient), the kernel, and what is needed beside it."""
        n, c, f, p, out = self.images, self.channels, self.filters, self.pixels, self.out
        kernel = (c, f) if self.strided else (f, c)
        found = {"x": image(n, c, p, p), "w": image(*kernel, self.taps, self.taps)}
        if self.gradient:  # a product's result, its rows as they lie
            found["pre"] = Spec((n, out, out, f), row_major((n, out, out, f)), BF16)
            found |= {name: Spec((f,), (1,), FLOAT) for name in ("mean", "rstd", "scale", "shift")}
        return found


def image(*shape: int) -> Spec:
    return Spec(shape, channels_last(shape), BF16)


def statistics(b: Any, y: Value, v: dict[str, Value]) -> list[Value]:
    """BatchNorm's of a forward convolution."""
    wide = b.cast(y, dtype=F32)
    mean = b.mean(wide, dims=(0, 2, 3))
    spread = b.sub(b.mean(b.mul(wide, wide), dims=(0, 2, 3)), b.mul(mean, mean))
    return [mean, b.rsqrt(b.add(b.maximum(spread, 0.0), EPSILON))]


def sums(b: Any, y: Value, v: dict[str, Value]) -> list[Value]:
    """ReLU's result and the sums of BatchNorm's gradient, behind an input gradient."""
    along = {n: b.reshape(v[n], shape=(1, v[n].type.shape[0], 1, 1)) for n in ("mean", "rstd", "scale", "shift")}
    pre = b.cast(b.transpose(v["pre"], order=(0, 3, 1, 2)), dtype=F32)
    normal = b.mul(b.sub(pre, along["mean"]), along["rstd"])
    act = b.relu(b.add(b.mul(normal, along["scale"]), along["shift"]))
    kept = b.select(b.le(act, 0.0), 0.0, b.cast(y, dtype=F32))
    added = [b.sum(t, dims=(0, 2, 3)) for t in (kept, b.mul(kept, normal))]
    return [b.cast(act, dtype=ir_dtype(BF16)), *added]


def sums_alone(b: Any, y: Value, v: dict[str, Value]) -> list[Value]:
    return sums(b, y, v)[1:]


def region(inputs: dict[str, Spec], build: Callable[[Any, dict[str, Value]], list[Value]], loops: bool) -> Region:
    types = [TensorType(s.shape, ir_dtype(s.dtype)) for s in inputs.values()]
    function = add_function(module(), "region", types)
    block = function.regions[0].block
    made = build(StepBuilder(block), dict(zip(inputs, block.arguments, strict=True)))
    finish_function(function, made)
    dtype = {"bf16": BF16, "f32": FLOAT}
    results = [(v.type.shape, dtype[v.type.element.text]) for v in made]
    laid = tuple(Spec(s, channels_last(s) if len(s) == 4 else row_major(s), d) for s, d in results)
    return Region(function, lowered(function) if loops else None, tuple(inputs.values()), laid, DEVICE)


@dataclass
class Job:
    """A case as regions: all of it, the convolution, and what follows; how each can be run, by name."""

    case: Case
    whole: Region = field(init=False)
    alone: Region = field(init=False)
    rest: Region = field(init=False)
    #: of an input gradient: the op that it is, of the kernel as it was
    back: Region | None = None

    def __post_init__(self) -> None:
        case, after = self.case, statistics
        if case.gradient:
            after = sums_alone if case.strided else sums
        shape = (case.images, case.filters, case.out, case.out)

        def alone(b: Any, v: dict[str, Value]) -> list[Value]:
            if case.strided:
                return [b.conv_input_grad(v["x"], v["w"], input_shape=shape, **case.window)]
            return [b.conv(v["x"], v["w"], **case.window)]

        def all_of(b: Any, v: dict[str, Value]) -> list[Value]:
            (y,) = alone(b, v)
            return [y, *after(b, y, v)]

        both = {name: case.inputs[name] for name in ("x", "w")}
        beside = {name: spec for name, spec in case.inputs.items() if name not in both}
        made = {"y": image(*shape), **beside}
        self.whole = region(case.inputs, all_of, False)
        self.alone = region(both, alone, False)
        self.rest = region(made, lambda b, v: after(b, v["y"], v), True)
        if case.gradient and not case.strided:
            turned = {"x": both["x"], "w": image(case.channels, case.filters, case.taps, case.taps)}
            like = {"input_shape": shape, **case.window}
            self.back = region(turned, lambda b, v: [b.conv_input_grad(v["x"], v["w"], **like)], False)


def jobs(dry: bool) -> list[Job]:
    few = [
        Case(3, 64, 13, 64, small=True),
        Case(3, 72, 17, 136, 2, small=True),
        Case(2, 64, 15, 72, 1, 5, 2, small=True),
    ]
    few += [Case(5, 40, 9, 64, gradient=True, small=True), Case(3, 64, 16, 136, gradient=True, small=True)]
    few += [Case(3, 64, p, f, 2, gradient=True, small=True) for p, f in ((8, 136), (5, 64))]
    sizes = ((64, 56), (128, 28), (256, 14), (512, 7))
    full = [Case(256, c, p, c, gradient=g) for g in (False, True) for c, p in sizes]
    full += [Case(256, c, p, c, 2) for c, p in ((128, 56), (256, 28), (512, 14))]
    full += [Case(256, c, p, c, 2, gradient=True) for c, p in ((128, 28), (256, 14), (512, 7))]
    full += [Case(128, c, p, c, 2, gradient=True) for c, p in ((256, 28), (512, 14), (1024, 7))]
    tiny = [Case(2, 64, 8, 64, s, gradient=g) for s, g in ((1, False), (1, True), (2, True))]
    return [Job(case) for case in ([*few, *tiny] if dry else [*few, *full])]


# ---- tensors and what is right ---------------------------------------------------------------------------------------


def empty(spec: Spec) -> torch.Tensor:
    made = torch.empty_strided(spec.shape, spec.strides, dtype=spec.dtype, device=DEVICE)
    return spoilt(made)


def spoilt(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.fill_(float("nan") if tensor.dtype.is_floating_point else 0)


def drawn(case: Case, seed: int) -> dict[str, torch.Tensor]:
    g = torch.Generator(device=DEVICE).manual_seed(seed)
    made = {name: empty(spec).normal_(generator=g) for name, spec in case.inputs.items()}
    made["w"] *= (case.channels * case.taps**2) ** -0.5
    if case.gradient:
        made["rstd"].abs_().add_(0.5)
    return made


def wanted(case: Case, v: dict[str, torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
    """The results by PyTorch in a wider type."""
    w = {name: t.to(dtype) for name, t in v.items()}
    if case.strided:
        y = torch.nn.functional.conv_transpose2d(w["x"], w["w"], None, case.stride, case.padding, case.stride - 1)
    else:  # ("ieee": `main`)
        y = torch.nn.functional.conv2d(w["x"], w["w"], None, case.stride, case.padding, case.dilation)
    dims = (0, 2, 3)
    if not case.gradient:
        return [y, y.mean(dims), (y.var(dims, correction=0) + EPSILON).rsqrt()]
    along = {name: w[name].view(1, -1, 1, 1) for name in ("mean", "rstd", "scale", "shift")}
    normal = (w["pre"].permute(0, 3, 1, 2) - along["mean"]) * along["rstd"]
    act = (normal * along["scale"] + along["shift"]).relu()
    kept = torch.where(act > 0, y, 0.0)
    return [y, *([] if case.strided else [act]), kept.sum(dims), (kept * normal).sum(dims)]


def off(found: Sequence[torch.Tensor], right: Sequence[torch.Tensor]) -> float:
    """The largest difference of any result as a share of its largest value; infinite where one is no number."""
    apart = []
    for x, y in zip(found, right, strict=True):
        error = ((x.to(y.dtype) - y).abs().max() / y.abs().max()).item()
        apart.append(error if error == error else float("inf"))
    return max(apart)


# ---- ways ------------------------------------------------------------------------------------------------------------


def by_name(name: str) -> Provider:
    return next(p for p in providers_for(torch.device("cuda"), ["aten", "triton"]) if p.name == name)


Way = tuple[Launcher | Exception, tuple[Spec, ...]]


class Refused(RuntimeError):
    """A provider beside ours does not claim a region; the message says why."""


def ways_of(regions: Sequence[Region], provider: str, most: int) -> list[dict[str, Way]]:
    """Per region what a provider offers, built all at once; a refusal is one that cannot be built."""
    if not CUDA:
        return [{"PyTorch's ops": (copying(op_by_op(r), len(r.operands)), ())} for r in regions]
    own, found, offers = by_name(provider), [], []
    for each in regions:
        try:  # (what wgmma does not claim for being small is compared all the same)
            why = "" if provider == "wgmma" else own.claims(each)
            named = {} if why else {o.name: o for o in own.offers(each)[:most]}
        except Exception as error:
            why, named = str(error), {}
        offers += list(named.values())
        found.append((why, named))
    built = own.build(offers)
    kind = RuntimeError if provider == "wgmma" else Refused
    refused: list[dict[str, Way]] = [{provider: (kind(why), ())} if why else {} for why, _ in found]
    return [
        {f"{provider} {name}": (built[o.key], o.scratch) for name, o in named.items()} or none
        for (_, named), none in zip(found, refused, strict=True)
    ]


@dataclass
class Bench:
    """What is found out, line by line."""

    started: float = field(default_factory=time.perf_counter)
    lines: list[str] = field(default_factory=list)
    failed: int = 0

    def say(self, text: str) -> None:
        self.lines.append(text)
        print(text, flush=True)

    def verdict(self, what: str, error: float | Exception) -> bool:
        good = not isinstance(error, Exception) and error <= TOLERANCE
        told = str(error).strip().splitlines()[:1] if isinstance(error, Exception) else [f"off by {error:.1e}"]
        refused = isinstance(error, Refused)
        self.failed += not good and not refused
        self.say(f"- {'ok' if good else 'refused' if refused else 'FAILED'}: {what}: {' '.join(told) or repr(error)}")
        return good

    def right(
        self, what: str, ways: dict[str, Way], inputs: Sequence[torch.Tensor], each: Region, right: list[torch.Tensor]
    ) -> dict[str, Way]:
        """The ways that give what they should, twice in the same memory."""
        good = {}
        for name, (run, scratch) in ways.items():
            try:
                if isinstance(run, Exception):
                    raise run
                made, space = [empty(s) for s in each.results], [empty(s) for s in scratch]
                errors = []
                for _ in range(2):
                    for tensor in (*made, *space):
                        spoilt(tensor)
                    run(*inputs, *made, *space)
                    errors.append(off(made, right))
                if self.verdict(f"{what}, {name}", max(errors)):
                    good[name] = (run, scratch)
            except Exception as error:
                self.verdict(f"{what}, {name}", error)
        return good

    def calls(
        self, way: Way, each: Region, sets: Sequence[Sequence[torch.Tensor]], given: Sequence[Any] | None = None
    ) -> list[Callable[[], Any]]:
        """One call per set of tensors. given: results that are there, and are not made here."""
        run, scratch = way
        assert not isinstance(run, Exception)
        found = []
        for number, inputs in enumerate(sets):
            made = [empty(s) for s in each.results] if given is None else given[number]
            tensors = [*inputs, *made, *(empty(s) for s in scratch)]
            found.append(lambda tensors=tensors: run(*tensors))
        return found

    def measure(self, job: Job, ours: dict[str, Way], single: dict[str, Way], rest: dict[str, Way]) -> dict[str, Any]:
        """A case: everything compared, then what is right timed."""
        case = job.case
        self.say(f"\n{case.name}")
        sets = [drawn(case, seed) for seed in range(1 if case.small or not CUDA else SETS)]
        right = wanted(case, sets[0], torch.float64 if case.small else FLOAT)
        both = [[v["x"], v["w"]] for v in sets]
        everything = [list(v.values()) for v in sets]
        ours = self.right("with what follows", ours, everything[0], job.whole, right)
        single = self.right("alone", single, both[0], job.alone, right[:1])
        if case.small:
            return {"case": case.name, "small": True}
        theirs = self.right("alone", self.libraries(job), both[0], job.alone, right[:1])
        made = [empty(job.alone.results[0]) for _ in sets]
        for to in made:
            to.copy_(right[0])
        beside = [[to, *list(v.values())[2:]] for to, v in zip(made, sets, strict=True)]
        rest = self.right("what follows", rest, beside[0], job.rest, right[1:])
        del right
        found: dict[str, Any] = {"case": case.name, "flops": case.flops}
        if time.perf_counter() - self.started > LIMIT:
            return found
        graphs = {("cudnn", n): self.calls(w, job.alone, both, [[t] for t in made]) for n, w in theirs.items()}
        graphs |= {("alone", n): self.calls(w, job.alone, both) for n, w in single.items()}
        graphs |= {("with", n): self.calls(w, job.whole, everything) for n, w in ours.items()}
        graphs |= {("rest", n): self.calls(w, job.rest, beside) for n, w in rest.items()}
        best = self.best(in_turns({k: as_graph(c, CALLS) for k, c in graphs.items()}, 3, flush=False))
        last = {key: graphs[key] for key in best.values()}
        if "cudnn" in best and "rest" in best:
            pairs = zip(graphs[best["cudnn"]], graphs[best["rest"]], strict=True)
            last["apart", ""] = [lambda one=one, two=two: (one(), two()) for one, two in pairs]
        times = in_turns({k: as_graph(c, CALLS) for k, c in last.items()}, ROUNDS, flush=False)
        found |= {kind: us / CALLS for (kind, _), us in times.items()}
        return found | {f"{kind} by": name for kind, (_, name) in best.items()}

    def best(self, times: dict[tuple[str, str], float]) -> dict[str, tuple[str, str]]:
        """The fastest of each kind."""
        kinds = dict.fromkeys(kind for kind, _ in times)
        return {kind: min((k for k in times if k[0] == kind), key=times.__getitem__) for kind in kinds}

    def libraries(self, job: Job) -> dict[str, Way]:
        """cuDNN by PyTorch's call and by its engines; of an input gradient by those for gradients as well."""
        (aten,), (found,) = (ways_of([job.alone], name, 6) for name in ("aten", "cudnn"))
        if job.back is not None:
            (back,) = ways_of([job.back], "cudnn", 6)
            found |= {f"{name}, backward": (turned_back(run), scratch) for name, (run, scratch) in back.items()}
        return aten | found


def turned_back(run: Launcher | Exception) -> Launcher | Exception:
    """What takes a kernel, as what is given it turned round; it is turned in the first call."""
    if isinstance(run, Exception):
        return run
    kernels: dict[int, torch.Tensor] = {}

    def call(x: torch.Tensor, w: torch.Tensor, *rest: torch.Tensor) -> None:
        if w.data_ptr() not in kernels:
            kernels[w.data_ptr()] = w.transpose(0, 1).flip(2, 3).contiguous(memory_format=torch.channels_last)
        run(x, kernels[w.data_ptr()], *rest)

    return call


def table(found: Sequence[dict[str, Any]]) -> str:
    titles = (
        "case",
        "cuDNN alone",
        "ours alone",
        "TFLOP/s",
        "the rest",
        "cuDNN and the rest",
        "ours with it",
        "gain",
        "by",
    )
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for f in found:
        if f.get("small"):
            continue
        speed = f"{f['flops'] / f['alone'] / 1e6:.0f}" if "alone" in f else "-"
        gain = f"{f['apart'] / f['with']:.2f}" if "apart" in f and "with" in f else "-"
        times = {k: f"{f[k]:.1f}" if k in f else "-" for k in ("cudnn", "alone", "rest", "apart", "with")}
        cells = [f["case"], times["cudnn"], times["alone"], speed, times["rest"], times["apart"], times["with"], gain]
        lines.append(f"| {' | '.join([*cells, str(f.get('with by', f.get('error', '-')))])} |")
    return "\n".join(lines)


def needs(every: Sequence[Job]) -> list[str]:
    """What nvcc says of the kernels."""
    lines = ["| case | stages | registers | spilled bytes |", "|---|---|---|---|"]
    for job in every:
        for each in (job.alone, job.whole):
            way = wgmma.ways(each)[0]
            with tempfile.TemporaryDirectory() as folder:
                pathlib.Path(folder, "product.cu").write_text(way.source)
                options = ["-gencode=arch=compute_90a,code=sm_90a", "-cubin", "-Xptxas", "-v", "-o", "made.cubin"]
                done = subprocess.run(["nvcc", *options, "product.cu"], cwd=folder, capture_output=True, text=True)
            said = done.stderr.partition("entry function 'product'")[2]
            registers, spills = re.search(r"Used (\d+) reg", said), re.search(r"(\d+) bytes spill stores", said)
            cells = [m.group(1) if m else "does not compile" for m in (registers, spills)]
            name = f"{job.case.name}{', with what follows' if each is job.whole else ''}"
            lines.append(f"| {name} | {way.name} | {' | '.join(cells)} |")
    return lines


def answers() -> bool:
    """Whether the device still does: after an illegal access no call of this process succeeds."""
    try:
        if CUDA:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
    except RuntimeError:
        return False
    return True


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, help="write the record here, and all figures beside it as .json")
    parser.add_argument("--compile", action="store_true", help="only compile, by nvcc; needs no GPU")
    parser.add_argument(
        "--dry", action="store_true", help="small sizes alone, in seconds; without a GPU by PyTorch's ops"
    )
    parser.add_argument("--only", choices=("all", "dx/2"), default="all", help="the input gradients of stride 2 alone")
    options = parser.parse_args(arguments)
    every = [job for job in jobs(options.dry) if options.only == "all" or job.case.strided]
    if options.compile:
        if shutil.which("nvcc") is None:
            sys.exit("nvcc is not installed")
        publish("\n".join(needs(every)), [], options.out)
        return 0
    if CUDA and (why := wgmma.why_absent()):
        sys.exit(why)
    if CUDA:
        faulthandler.dump_traceback_later(HANGS, exit=True)  # a kernel that waits for ever
        torch.backends.cudnn.benchmark = True
        torch.backends.cudnn.conv.fp32_precision = "ieee"  # type: ignore[attr-defined]
    bench = Bench()
    ours = ways_of([job.whole for job in every], "wgmma", TRIED)
    single = ways_of([job.alone for job in every], "wgmma", TRIED)
    timed = iter(ways_of([job.rest for job in every if not job.case.small], "triton", TRIED))
    rest = [{} if job.case.small else next(timed) for job in every]
    compiled = time.perf_counter() - bench.started
    figures: list[dict[str, Any]] = []
    for job, *ways in zip(every, ours, single, rest, strict=True):
        try:
            figures.append(bench.measure(job, *ways))
        except Exception as error:
            bench.verdict(job.case.name, error)
            figures.append({"case": job.case.name, "error": repr(error)})
        if not answers():
            bench.say("\nthe GPU does not answer any more: what is left was not tried")
            break
    where = f"{torch.cuda.get_device_name()}, torch {torch.__version__}" if CUDA else "no GPU: PyTorch's ops"
    text = (
        f"# Convolutions with what follows them in one kernel\n\n`python bench/kernels_convolution.py --only "
        f"{options.only}`: {where}, bf16, channels-last; microseconds per call, medians of {ROUNDS} CUDA graphs of "
        f"{CALLS} calls on {SETS} sets of "
        f"tensors. Compiled in {compiled:.0f} s, everything {time.perf_counter() - bench.started:.0f} s. "
        f"{bench.failed} comparisons failed.\n\n{table(figures)}\n\nWhat was compared, and the largest "
        "difference as a share of the largest value:\n" + "\n".join(bench.lines)
    )
    publish(text, figures, options.out)
    return 1 if bench.failed else 0


if __name__ == "__main__":
    sys.exit(main())
