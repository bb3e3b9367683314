"""Convolutions by cuDNN that write where they are told, by each of its engines, against PyTorch's as a plan runs them.

The shapes are those of ResNet-50 that are no matrix products, and dilated ones of FCN; sums are of what a plan of
ResNet-50 has. Each result is compared with PyTorch's and with float32: launched, inside a CUDA graph and on another
stream, with nothing allocated and nothing written beside results and workspace. Run where there is a GPU:
`python bench/convolution_direct.py [--out FILE]`; it ends within 60 seconds. CI has none.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.attention_direct import BESIDE, DEVICE, SETS, TOLERANCE, Report, checked, race
from wholestep.backends.choose import Choices
from wholestep.backends.cudnn import library, ways
from wholestep.backends.cudnn.convolution import channels_last
from wholestep.backends.kernels import Spec
from wholestep.backends.providers import Aten, Region, op_by_op, providers_for
from wholestep.dialects.step import StepBuilder, tensor_type
from wholestep.ir import add_function, finish_function, module

#: seconds after which no case is begun, and after which nobody chooses
LIMIT, CHOOSING = 40.0, 45.0
#: elements before and behind a result that nobody may write to
AROUND = 1024
NAMES = ("conv", "conv_input_grad", "conv_weight_grad")
ATEN = "PyTorch"


@dataclass(frozen=True)
class Case:
    """One convolution of square images, and how often ResNet-50 has it. A plan computes input gradients of those that
    visit every pixel as convolutions, and of one tap as products (`transforms/backward_forms.py`)."""

    name: str
    count: int
    images: int
    channels: int
    pixels: int
    filters: int
    taps: int
    stride: int = 1
    dilation: int = 1
    first: bool = False  # nobody asks for the gradient of its images
    dtype: torch.dtype = torch.bfloat16

    @property
    def padding(self) -> int:
        return self.dilation * (self.taps // 2)

    def times(self, name: str) -> int:
        """How often the plan of ResNet-50 has an op."""
        if name == "conv":
            return self.count * (2 if self.stride == 1 else 1)
        return self.count if name == "conv_weight_grad" or (self.stride > 1 and self.taps > 1) else 0

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        reach = self.dilation * (self.taps - 1)
        out = (self.pixels + 2 * self.padding - reach - 1) // self.stride + 1
        return {
            "x": (self.images, self.channels, self.pixels, self.pixels),
            "w": (self.filters, self.channels, self.taps, self.taps),
            "y": (self.images, self.filters, out, out),
        }

    @property
    def window(self) -> tuple[list[int], list[int], list[int], bool, list[int], int]:
        """The arguments of ATen's convolution."""
        return [self.stride] * 2, [self.padding] * 2, [self.dilation] * 2, False, [0, 0], 1


CASES = (
    Case("7x7/2 3 -> 64 at 224", 1, 256, 3, 224, 64, 7, 2, first=True),
    *(
        Case(f"3x3 {c} at {n}", k, 256, c, n, c, 3)
        for c, n, k in ((64, 56, 3), (128, 28, 3), (256, 14, 5), (512, 7, 2))
    ),
    *(Case(f"3x3/2 {c} at {n}", 1, 256, c, n, c, 3, 2) for c, n in ((128, 56), (256, 28), (512, 14))),
    *(Case(f"1x1/2 {c} -> {2 * c} at {n}", 1, 256, c, n, 2 * c, 1, 2) for c, n in ((256, 56), (512, 28), (1024, 14))),
    Case("FCN 3x3 256 at 60, dilated by 2", 0, 16, 256, 60, 256, 3, 1, 2),
    Case("FCN 3x3 512 at 60, dilated by 4", 0, 16, 512, 60, 512, 3, 1, 4),
    Case("f16 3x3/2 72 -> 40 at 31", 0, 9, 72, 31, 40, 3, 2, dtype=torch.float16),
)


@dataclass
class Total:
    """Microseconds of a network, by op: PyTorch's, those of the first engine and of the best."""

    aten: dict[str, float] = field(default_factory=dict)
    first: dict[str, float] = field(default_factory=dict)
    best: dict[str, float] = field(default_factory=dict)
    regions: list[tuple[Region, int]] = field(default_factory=list)

    def add(self, name: str, count: int, times: dict[str, float]) -> None:
        ours = [t for n, t in times.items() if n != ATEN]
        for side, seconds in ((self.aten, times[ATEN]), (self.first, ours[0]), (self.best, min(ours))):
            side[name] = side.get(name, 0.0) + count * seconds


class Guarded:
    """A tensor with memory around it that nobody may write to."""

    def __init__(self, spec: Spec) -> None:
        count = spec.bytes // spec.dtype.itemsize
        self.whole = torch.full((count + 2 * AROUND,), BESIDE, dtype=spec.dtype, device=DEVICE)
        self.tensor = self.whole.as_strided(spec.shape, spec.strides, AROUND)

    @property
    def intact(self) -> bool:
        return bool((self.whole[:AROUND] == BESIDE).all()) and bool((self.whole[-AROUND:] == BESIDE).all())


def spec_of(case: Case, role: str) -> Spec:
    shape = case.shapes[role]
    return Spec(shape, channels_last(shape), case.dtype)


def drawn(case: Case, role: str) -> torch.Tensor:
    spec = spec_of(case, role)
    made = torch.empty_strided(spec.shape, spec.strides, dtype=spec.dtype, device=DEVICE)
    fan = case.channels * case.taps**2 if role == "w" else 1
    return made.normal_(0, fan**-0.5)


def region_of(case: Case, name: str, operands: list[torch.Tensor], result: Spec) -> Region:
    function = add_function(module(), "convolution", [tensor_type(x) for x in operands])
    block = function.regions[0].block
    stride, padding, dilation, *_ = case.window
    shapes = {
        "conv_input_grad": {"input_shape": case.shapes["x"]},
        "conv_weight_grad": {"weight_shape": case.shapes["w"]},
    }
    build = getattr(StepBuilder(block), name)
    made = build(*block.arguments, stride=stride, padding=padding, dilation=dilation, **shapes.get(name, {}))
    finish_function(function, [made])
    lies = tuple([Spec(tuple(x.shape), tuple(x.stride()), x.dtype) for x in operands])
    return Region(function, None, lies, (result,), DEVICE)


def in_float32(case: Case, name: str, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """The result, of the first image alone unless all are summed up."""
    if name == "conv_weight_grad":
        like = torch.zeros(case.shapes["w"], device=DEVICE)
        mask = [False, True, False]
        return torch.ops.aten.convolution_backward(right.float(), left.float(), like, None, *case.window, mask)[1]
    first, w = left[:1].float(), right.float()
    if name == "conv":
        return torch.ops.aten.convolution(first, w, None, *case.window)
    like = torch.zeros((1, *case.shapes["x"][1:]), device=DEVICE)
    return torch.ops.aten.convolution_backward(first, like, w, None, *case.window, [True, False, False])[0]


def run_op(case: Case, name: str, sets: list[dict[str, torch.Tensor]], report: Report, total: Total) -> None:
    roles = {"conv": "xwy", "conv_input_grad": "ywx", "conv_weight_grad": "xyw"}[name]
    limit, told = TOLERANCE[case.dtype], f"{case.name}, {name}"
    operands = [[tensors[r] for r in roles[:2]] for tensors in sets]
    results = [Guarded(spec_of(case, roles[2])) for _ in sets]
    region = region_of(case, name, operands[0], spec_of(case, roles[2]))
    why = ways.why_unsuited(region)
    report.check(why == "", f"{told} is refused: {why}")
    (wanted,) = op_by_op(region)(*operands[0])
    exact = in_float32(case, name, *operands[0])
    few = slice(None, exact.shape[0])
    theirs = report.near([wanted[few]], [exact], limit, f"{told}, PyTorch's, against f32")
    begun = time.perf_counter()
    found = ways.ways(region)
    asked = time.perf_counter() - begun
    aten = Aten().launcher(region)
    calls: dict[str, list[Callable[[], object]]] = {
        ATEN: [lambda o=o, r=r: aten(*o, r.tensor) for o, r in zip(operands, results, strict=True)]  # type: ignore[misc]
    }
    report.say(f"{told}: PyTorch's is off f32 by {theirs}; {asked:.3f} s to ask for {len(found)} engines")
    for way in found:
        label = f"engine {way.engine.number}"
        begun = time.perf_counter()
        try:
            run = way.build()
        except RuntimeError as error:
            report.check(False, f"{told}, {label} cannot be built: {error}")
            continue
        built = time.perf_counter() - begun
        scratch = [Guarded(s) for s in way.scratch]
        space = [s.tensor for s in scratch]
        own = results[0].tensor
        both = [*operands[0], own, *space]
        ours = checked(lambda: run(*both), [own], [wanted], limit, report, f"{told}, {label}")  # noqa: B023
        mine = report.near([own[few]], [exact], limit, f"{told}, {label}, against f32")
        once = own.clone()
        run(*both)
        same = torch.equal(once, own)
        report.check(results[0].intact and all(s.intact for s in scratch), f"{told}, {label}, writes beside")
        bits = " (the same bits)" if torch.equal(own, wanted) else ""
        report.say(
            f"  {label}: off PyTorch's by {ours}{bits}, off f32 by {mine}{'' if same else ', not twice the same'}; "
            f"{way.engine.workspace:,} bytes beside; notes {sorted(way.engine.notes)}; {built:.3f} s to build"
        )
        calls[label] = [
            lambda o=o, r=r, run=run, space=space: run(*o, r.tensor, *space)  # type: ignore[misc]
            for o, r in zip(operands, results, strict=True)
        ]
    times = race(calls)
    ours_best = min((t for n, t in times.items() if n != ATEN), default=float("nan"))
    gained = f"{100 * (1 - ours_best / times[ATEN]):.1f} % less"
    report.say(f"  {', '.join(f'{n} {t:.1f}' for n, t in times.items())} us: {gained}, {case.times(name)} times")
    if case.times(name):
        total.add(name, case.times(name), times)
        total.regions.append((region, case.times(name)))


def run_case(case: Case, report: Report, total: Total) -> None:
    torch.manual_seed(0)
    sets = [{role: drawn(case, role) for role in "xwy"} for _ in range(SETS)]
    for name in NAMES:
        if name != "conv_input_grad" or not case.first:
            run_op(case, name, sets, report, total)


def chosen(total: Total, report: Report) -> None:
    """What the clock chooses for the network, and how long that takes."""
    choices = Choices(DEVICE, providers_for(DEVICE, ["aten", "cudnn"]))
    begun = time.perf_counter()
    choices.decide([region for region, count in total.regions for _ in range(count)])
    took = time.perf_counter() - begun
    seconds = aten = 0.0
    for region, count in total.regions:
        found = choices.known[region.key]
        seconds, aten = seconds + count * found.seconds, aten + count * found.aten
        excluded = [f"{t.name} {t.why}" for t in found.excluded]
        report.check(not excluded, f"{region.ops[0].name} {region.operands[0].shape}: excluded {excluded}")
        names = f"{region.ops[0].name} {region.operands[0].shape} {region.operands[1].shape}"
        report.say(
            f"  {names}: {found.provider} {found.offer} {found.seconds * 1e6:.1f}, ATen {found.aten * 1e6:.1f} us"
        )
    report.say(
        f"chosen: {seconds * 1e3:.2f} ms, ATen {aten * 1e3:.2f} ms; {took:.1f} s for {len(total.regions)} regions"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="a file that what is printed is added to")
    args = parser.parse_args()
    report, total, begun = Report(args.out), Total(), time.perf_counter()
    torch.backends.cudnn.conv.fp32_precision = "ieee"  # type: ignore[attr-defined]
    report.say(f"{torch.cuda.get_device_name(DEVICE)}, torch {torch.__version__}, cuDNN {library.version()}")
    with torch.no_grad():
        for case in CASES:
            if time.perf_counter() - begun > LIMIT:
                report.check(False, f"{case.name}: there was no time left")
                continue
            try:
                run_case(case, report, total)
                torch.cuda.synchronize(DEVICE)
            except Exception:  # the next case may still tell something
                report.check(False, f"{case.name}: {traceback.format_exc()}")
            torch.cuda.empty_cache()
    words = "ResNet-50 {}: PyTorch {:.0f}, first engines {:.0f}, best engines {:.0f} us"
    for name in total.aten:
        report.say(words.format(name, total.aten[name], total.first[name], total.best[name]))
    report.say(words.format("in all", *[sum(side.values()) for side in (total.aten, total.first, total.best)]))
    if time.perf_counter() - begun < CHOOSING:
        chosen(total, report)
    seconds = time.perf_counter() - begun
    report.say(f"{report.passed} checks passed, {len(report.failed)} failed, {seconds:.0f} s")
    return 1 if report.failed else 0


if __name__ == "__main__":
    sys.exit(main())
