"""Attention by cuDNN that writes where it is told, against PyTorch's call of the same library and the copies after it.

Each case is compared with PyTorch's results and, in a corner, with the formula in float32: launched, inside a CUDA
graph and on another stream, with nothing allocated and nothing written beside the results. Run where there is a GPU:
`python bench/attention_direct.py [--out FILE]`; it ends within 60 seconds. CI has none.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from wholestep.backends.attentions import corner, formula
from wholestep.backends.choose import Choices
from wholestep.backends.cudnn import library, ways
from wholestep.backends.kernels import Spec
from wholestep.backends.providers import Region, copying, known_providers, op_by_op, providers_for
from wholestep.dialects.step import StepBuilder, tensor_type
from wholestep.ir import add_function, finish_function, module
from wholestep.ir.core import Op

DEVICE = torch.device("cuda")
#: largest difference allowed, as a share of the largest value
TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 4e-3}
#: seconds after which no case is begun
LIMIT = 45.0
#: sets of tensors that calls take in turns, so that none finds its own in the cache; calls in a graph; graphs timed
SETS, CALLS, REPLAYS = 3, 9, 7
#: what lies beside results
BESIDE = 7.0

Launcher = Callable[..., object]


@dataclass(frozen=True)
class Case:
    """Shapes of one attention; its q, k and v are parts of one tensor, and so are their gradients."""

    name: str
    batch: int
    length: int
    heads: int
    own: int
    width: int
    causal: bool
    dtype: torch.dtype = torch.bfloat16


CASES = (
    Case("GPT-2", 8, 1024, 12, 12, 64, True),
    Case("ViT", 128, 197, 12, 12, 64, False),
    Case("BERT-large", 16, 512, 16, 16, 64, False),
    Case("Llama", 4, 2048, 32, 4, 64, True),
    Case("width 128, f16", 4, 1024, 16, 16, 128, True, torch.float16),
    Case("odd", 3, 333, 8, 2, 72, True),
)


@dataclass
class Report:
    out: Path | None
    failed: list[str] = field(default_factory=list)
    passed: int = 0

    def say(self, text: str) -> None:
        print(text, flush=True)
        if self.out is not None:
            with self.out.open("a") as file:
                file.write(text + "\n")

    def check(self, good: bool, text: str) -> None:
        if good:
            self.passed += 1
        else:
            self.failed.append(text)
            self.say(f"  FAILED: {text}")

    def near(self, found: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor], limit: float, text: str) -> str:
        """Checks results; how far they are off, each as a share of the largest value."""
        apart = [off(x, y) for x, y in zip(found, wanted, strict=True)]
        self.check(all(a <= limit for a in apart), f"{text}: off by {apart}")
        return " ".join(f"{a:.1e}" for a in apart)


def off(x: torch.Tensor, y: torch.Tensor) -> float:
    """The largest difference as a share of the largest value; infinite where one is not a number."""
    apart = ((x.float() - y.float()).abs().max() / y.float().abs().max().clamp_min(1e-6)).item()
    return apart if apart == apart else float("inf")


# ---- tensors and regions ---------------------------------------------------------------------------------------------


def joined(case: Case) -> list[torch.Tensor]:
    """q, k, v as parts of one tensor that has one head more, which nobody may write to."""
    parts = [case.heads, case.own, case.own, 1]
    rows = torch.randn(case.batch, case.length, sum(parts), case.width, device=DEVICE).to(case.dtype)
    rows[:, :, -1] = BESIDE
    return [x.transpose(1, 2) for x in rows.split(parts, 2)]


@dataclass
class Set:
    """Tensors of one attention: operands and results of both directions."""

    operands: list[torch.Tensor]  # q, k, v
    dout: torch.Tensor
    out: torch.Tensor
    logsumexp: torch.Tensor
    gradients: list[torch.Tensor]  # dq, dk, dv
    beside: torch.Tensor

    @classmethod
    def of(cls, case: Case) -> Set:
        sizes = (case.batch, case.length, case.heads, case.width)
        dout, out = (torch.randn(sizes, device=DEVICE).to(case.dtype).transpose(1, 2) for _ in range(2))
        logsumexp = torch.zeros(case.batch, case.heads, case.length, device=DEVICE)
        q, k, v, _ = joined(case)
        *gradients, beside = joined(case)
        return cls([q, k, v], dout, out, logsumexp, gradients, beside)

    def tensors(self, backward: bool) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Operands and results."""
        if not backward:
            return self.operands, [self.out, self.logsumexp]
        return [self.dout, *self.operands, self.out, self.logsumexp], self.gradients

    def all(self, backward: bool) -> list[torch.Tensor]:
        operands, results = self.tensors(backward)
        return [*operands, *results]


def region_of(case: Case, tensors: Set, backward: bool) -> Region:
    operands, results = tensors.tensors(backward)
    function = add_function(module(), "attention", [tensor_type(x) for x in operands])
    block = function.regions[0].block
    options = {"causal": case.causal, "scale": case.width**-0.5, "enable_gqa": case.own != case.heads}
    build = StepBuilder(block)
    make = build.attention_grad if backward else build.attention
    finish_function(function, list(make(*block.arguments, None, kernel="cudnn", **options)))
    lies = [[Spec(tuple(x.shape), tuple(x.stride()), x.dtype) for x in side] for side in (operands, results)]
    return Region(function, None, tuple(lies[0]), tuple(lies[1]), DEVICE)


def empty(spec: Spec) -> torch.Tensor:
    return torch.empty_strided(spec.shape, spec.strides, dtype=spec.dtype, device=DEVICE)


def cornered(op: Op, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [corner(x, op) for x in tensors]


# ---- running ---------------------------------------------------------------------------------------------------------


def spoil(tensors: Sequence[torch.Tensor]) -> None:
    for x in tensors:
        x.fill_(float("nan"))


def captured(calls: Sequence[Callable[[], object]]) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph


def race(calls: dict[str, list[Callable[[], object]]]) -> dict[str, float]:
    """Microseconds of one call, all of them in turns: the median of graphs of several calls."""
    graphs = {name: captured([each[n % len(each)] for n in range(CALLS)]) for name, each in calls.items()}
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(REPLAYS):
        for name, graph in graphs.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            graph.replay()
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times[name].append(begin.elapsed_time(end) / CALLS * 1e3)
    return {name: statistics.median(found) for name, found in times.items()}


def checked(
    run: Callable[[], object],
    results: Sequence[torch.Tensor],
    wanted: Sequence[torch.Tensor],
    limit: float,
    report: Report,
    name: str,
) -> str:
    """Results of a call that is launched, replayed and launched on another stream; how far they are off."""
    spoil(results)
    run()
    told = report.near(results, wanted, limit, f"{name}, launched")
    before = torch.cuda.memory_stats(DEVICE).get("allocation.all.allocated", 0)
    run()
    after = torch.cuda.memory_stats(DEVICE).get("allocation.all.allocated", 0)
    report.check(before == after, f"{name} allocates")
    graph = captured([run])
    spoil(results)
    graph.replay()
    report.near(results, wanted, limit, f"{name}, in a graph")
    side = torch.cuda.Stream(DEVICE)
    spoil(results)
    side.wait_stream(torch.cuda.current_stream(DEVICE))
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream(DEVICE).wait_stream(side)
    report.near(results, wanted, limit, f"{name}, on another stream")
    return told


def direction(case: Case, sets: list[Set], backward: bool, exact: list[torch.Tensor], report: Report) -> None:
    name, limit = f"{case.name} {'backward' if backward else 'forward'}", TOLERANCE[case.dtype]
    region = region_of(case, sets[0], backward)
    op = region.ops[0]
    operands, results = sets[0].tensors(backward)
    why = ways.why_unsuited(region)
    report.check(why in ("", "it is too small to be worth measuring"), f"{name} is refused: {why}")
    aten = op_by_op(region)
    wanted = [x.clone() for x in aten(*operands)]
    theirs = report.near(cornered(op, wanted), exact, limit, f"{name}, PyTorch's, against the formula")
    report.say(f"{name}: PyTorch's is off the formula by {theirs}")
    begun = time.perf_counter()
    found = ways.ways(region)
    asked = time.perf_counter() - begun
    place = copying(aten, len(operands))
    calls: dict[str, list[Callable[[], object]]] = {
        "PyTorch and copies": [lambda t=t: place(*t.all(backward)) for t in sets],  # type: ignore[misc]
        "PyTorch alone": [lambda t=t: aten(*t.tensors(backward)[0]) for t in sets],  # type: ignore[misc]
    }
    for number, way in enumerate(found):
        begun = time.perf_counter()
        run = way.build()
        built = time.perf_counter() - begun
        scratch = [empty(s) for s in way.scratch]
        whole = [*operands, *results, *scratch]
        told = checked(lambda: run(*whole), results, wanted, limit, report, f"{name}, engine {number}")  # noqa: B023
        mine = report.near(cornered(op, results), exact, limit, f"{name}, engine {number}, against the formula")
        same = all(torch.equal(x, y) for x, y in zip(results, wanted, strict=True))
        report.check(bool((sets[0].beside == BESIDE).all()), f"{name}, engine {number}, writes beside its results")
        space = sum(s.bytes for s in way.scratch)
        report.say(
            f"  engine {number}: off PyTorch's by {told}{' (the same bits)' if same else ''}, off the formula by "
            f"{mine}; {space:,} bytes beside ({way.engine.workspace:,} of them cuDNN's); {built:.2f} s to build"
        )
        calls[f"engine {number}"] = [
            lambda t=t, run=run, scratch=scratch: run(*t.all(backward), *scratch)  # type: ignore[misc]
            for t in sets
        ]
    times = race(calls)
    report.say(f"  {', '.join(f'{n} {t:.1f}' for n, t in times.items())} us; {asked:.2f} s to ask for engines")
    place(*operands, *results)  # (what the other direction reads)


def handed_over(case: Case, tensors: Set, report: Report) -> None:
    """PyTorch's backward from our forward, whose log-sum-exp it must be able to read."""
    forward, backward = (region_of(case, tensors, b) for b in (False, True))
    wanted = [x.clone() for x in op_by_op(backward)(*tensors.tensors(True)[0])]
    operands, results = tensors.tensors(False)
    way = ways.ways(forward)[0]
    way.build()(*operands, *results, *map(empty, way.scratch))
    found = op_by_op(backward)(*tensors.tensors(True)[0])
    report.near(found, wanted, TOLERANCE[case.dtype], f"{case.name}, PyTorch's backward from our forward")
    moved = torch.empty(results[0].numel() + 1, dtype=case.dtype, device=DEVICE)
    moved = moved.as_strided(results[0].shape, results[0].stride(), 1)
    way.build()(*operands, moved, results[1], *map(empty, way.scratch))
    report.near([moved], [results[0]], TOLERANCE[case.dtype], f"{case.name}, a result that begins anywhere")


def chosen(case: Case, tensors: Set, report: Report) -> None:
    """Who is chosen by the clock, where the provider is registered."""
    if "cudnn" not in known_providers():
        report.say("  (no provider cudnn is registered: nobody chooses)")
        return
    regions = [region_of(case, tensors, b) for b in (False, True)]
    choices = Choices(DEVICE, providers_for(DEVICE, ["aten", "cudnn"]))
    choices.decide(regions)
    for region in regions:
        found = choices.known[region.key]
        excluded = [f"{t.name} {t.why}" for t in found.excluded]
        times = f"{found.seconds * 1e6:.1f} us, ATen {found.aten * 1e6:.1f} us"
        report.say(f"  chosen for {region.ops[0].name}: {found.provider} {found.offer}, {times} {excluded or ''}")
        report.check(not excluded, f"{case.name}: excluded {excluded}")


def run_case(case: Case, report: Report) -> None:
    torch.manual_seed(0)
    sets = [Set.of(case) for _ in range(SETS)]
    op = region_of(case, sets[0], False).ops[0]
    q, k, v, dout = cornered(op, [*sets[0].operands, sets[0].dout])
    exact = formula(op, q, k, v, dout, None, backward=True)
    with torch.no_grad():
        direction(case, sets, False, exact[:2], report)
        for tensors in sets[1:]:
            made = op_by_op(region_of(case, tensors, False))(*tensors.operands)
            tensors.out.copy_(made[0])
            tensors.logsumexp.copy_(made[1])
        direction(case, sets, True, exact[2:], report)
        handed_over(case, sets[0], report)
        chosen(case, sets[0], report)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="a file that what is printed is added to")
    args = parser.parse_args()
    report, begun = Report(args.out), time.perf_counter()
    report.say(f"{torch.cuda.get_device_name(DEVICE)}, torch {torch.__version__}, cuDNN {library.version()}")
    for case in CASES:
        if time.perf_counter() - begun > LIMIT:
            report.check(False, f"{case.name}: there was no time left")
            continue
        try:
            run_case(case, report)
            torch.cuda.synchronize(DEVICE)
        except Exception:  # the next case may still tell something
            report.check(False, f"{case.name}: {traceback.format_exc()}")
        torch.cuda.empty_cache()
    seconds = time.perf_counter() - begun
    report.say(f"{report.passed} checks passed, {len(report.failed)} failed, {seconds:.0f} s")
    return 1 if report.failed else 0


if __name__ == "__main__":
    sys.exit(main())
