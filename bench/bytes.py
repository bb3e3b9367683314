"""Where the bytes of a step go that the fused bound does without: networks planned as for an H200, without one.

`python bench/bytes.py resnet50 gpt2@few ...` plans networks of bench/networks in bf16 and prints what moves, by family
(norms, pointwise, pooling, ...) and by kernel, the heaviest beyond the bound first. Nothing is built or timed: every
region that Triton or wgmma claims is taken to win by its first guess, cuDNN takes the attention and convolutions that
it can, and pieces around products are chosen by their bytes and products at the speeds below. `--layer PATTERN` lists
the kernels of some layers in the order in which they run, each with all that it reads and writes; `--rows N` says how
many groups are shown, `--json FILE` keeps the figures. Kernels of a real step are chosen by the clock: `--compiled`
is that step, compiled on the GPU of this machine.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import pathlib
import re
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import wholestep as ws  # noqa: E402
from wholestep.api import (  # noqa: E402
    DEFAULTS,
    FIRST,
    PIPELINE,
    argument_strides,
    host_numbers,
)
from wholestep.backends.attentions import choose_attentions  # noqa: E402
from wholestep.backends.choose import Choices, Chosen  # noqa: E402
from wholestep.backends.contest import is_product  # noqa: E402
from wholestep.backends.cudnn import ways as cudnn_ways  # noqa: E402
from wholestep.backends.providers import Region, providers_for  # noqa: E402
from wholestep.backends.wgmma import ways as wgmma_ways  # noqa: E402
from wholestep.bench.workload import Case, Workload, build  # noqa: E402
from wholestep.capture.capture import capture  # noqa: E402
from wholestep.cost.bound import HEAVY, least_bytes, note_bound  # noqa: E402
from wholestep.cost.ledger import Kernel, Ledger, group_of  # noqa: E402
from wholestep.cost.movement import Movement, movement_of  # noqa: E402
from wholestep.dialects.step.base import StepOp  # noqa: E402
from wholestep.dialects.step.control import root_of  # noqa: E402
from wholestep.dialects.step.fused import Fused  # noqa: E402
from wholestep.ir.builtin import lookup  # noqa: E402
from wholestep.ir.core import Op  # noqa: E402
from wholestep.ir.passes import run_pipeline  # noqa: E402
from wholestep.machine.description import load_description  # noqa: E402
from wholestep.options import Options  # noqa: E402
from wholestep.plan.planner import Planned, planned_function  # noqa: E402
from wholestep.runtime.compiled import laid_by_step  # noqa: E402
from wholestep.training.build import build_step  # noqa: E402
from wholestep.training.optimizers import plan_optimizer  # noqa: E402
from wholestep.transforms import kept  # noqa: E402
from wholestep.transforms.attention_sides import ATTENTION  # noqa: E402
from wholestep.transforms.layout_prices import Timing, timed_by  # noqa: E402
from wholestep.transforms.opportunity import take, transform, whatever  # noqa: E402
from wholestep.transforms.recognise import recognise  # noqa: E402

GPU = torch.device("cuda")
#: bytes and multiplications per second at which pieces around tall products are compared
SPEED, PRODUCTS = 3.5e12, 5e14
#: what a kernel is called by: the first of these that it has an op of
FAMILIES = {
    "attention": ("attention",),
    "convolutions": ("conv",),
    "products": ("contract",),
    "embeddings": ("embedding",),
    "pooling": ("max_pool", "avg_pool", "adaptive", "pool"),
    "loss": ("cross_entropy", "log_softmax", "nll"),
    "norms": ("batch_norm", "layer_norm", "rms_norm", "group_norm"),
    "sums": ("sum", "mean", "var"),
    "layout copies": ("layout", "copy"),
}
MEGA = 1e-6


class Guessed(Choices):
    """Chooses without a GPU: whoever generates kernels for a region has won it, at the speeds above."""

    def decide(self, regions: Iterable[Region], later: Sequence[Region] = (), aten: bool = True) -> None:
        for region in regions:
            if region.key not in self.known:
                self.known[region.key] = self.guess(region)

    def guess(self, region: Region) -> Chosen:
        for provider in sorted(self.providers, key=lambda p: p.name != "wgmma"):
            if provider.name not in ("triton", "cudnn", "wgmma"):
                continue
            if provider.name == "wgmma" and (is_product(region) or not cudnn_ways.why_unsuited(region)):
                continue  # alone they are the libraries'
            if provider.name == "cudnn":
                if not cudnn_ways.why_unsuited(region):
                    return Chosen("cudnn", "a guess", idle, (), seconds_of(region))
                continue
            if provider.name == "triton" and any(op.name in ATTENTION for op in region.ops):
                continue  # (libraries' attentions with kernels beside them are taken to be faster)
            why = provider.claims(region)
            offers = [] if why else provider.offers(region)
            if offers:
                more = sum(2 * s.bytes for s in offers[0].scratch)
                return Chosen(provider.name, offers[0].name, idle, offers[0].scratch, seconds_of(region, more))
            self.refuse(provider.name, why or "it has no way")
        return Chosen("aten", "aten", None, seconds=seconds_of(region, apart=True))

    def times(self, regions: Sequence[Region]) -> list[float]:
        self.decide(regions)
        return [self.known[region.key].seconds for region in regions]


def idle(*tensors: torch.Tensor) -> None:
    """Stands for a kernel that is never run."""


def seconds_of(region: Region, more: int = 0, apart: bool = False) -> float:
    """How long a region takes, with so many bytes of scratch. apart: by its ops, each a kernel of its own."""
    ops = [op for op in region.ops if issubclass(op.definition, StepOp)]
    heavy = sum(op.definition.flops(op) for op in ops if op.definition.precision == "low")
    moved = region.bytes + more
    if apart and len(ops) > 1:
        moved = sum(v.type.bytes for op in ops for v in (*op.operands, *op.results))
    return max(moved / SPEED, heavy / 2 / PRODUCTS)


def planned(workload: Workload) -> Planned:
    """The step of a network as `ws.compile` makes it in bf16 on a GPU, planned with kernels that are guessed."""
    batch, (optimizer, _) = workload.batch(0, "cpu"), workload.optimizer
    options = Options(precision="bf16")
    step: Any = SimpleNamespace(model=workload.model, loss_fn=workload.loss_fn, optimizer=optimizer)
    captured = capture(workload.model, workload.loss_fn, batch)
    recognise(captured.function)
    program = build_step(captured, plan_optimizer(optimizer, captured.parameters, None), options)
    run_pipeline(program.module, PIPELINE)
    note_bound(program.function)
    with timed_by(Timing(why_modelled="nothing is timed")):
        transform(program.module, whatever(FIRST), levels=range(1, options.level + 1))
    take(program.module, [d.name for d in DEFAULTS if d.suits(options.level, "cuda", True, True)], (), GPU)
    run_pipeline(program.module, "cse")
    kept.cut(program.module, limits=kept.WITHOUT_BUDGET)
    run_pipeline(program.module, "cse,dce")
    choose_attentions(program.module, GPU, tune=False)
    choices = Guessed(GPU, providers_for(GPU, ("aten", "triton")))
    strides = argument_strides(program, step, batch, laid_by_step(program))
    with patch.object(wgmma_ways, "why_absent", return_value=""):  # as if the GPU were here
        return planned_function(program.function, GPU, host_numbers(program, optimizer), strides, choices=choices)


def compiled(workload: Workload) -> Movement:
    """The step of a network as it runs on the GPU of this machine."""
    step = ws.compile(
        workload.model, workload.loss_fn, workload.optimizer[0], workload.batch(0, "cuda"), precision="bf16"
    )
    movement = step.report().movement
    assert movement is not None
    return movement


# ---- what is beyond the bound ----------------------------------------------------------------------------------------


@dataclass
class Group:
    """Kernels that do the same for layers that differ in numbers alone."""

    kernel: str
    phase: str
    layer: str
    family: str
    ops: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    count: int = 0
    bytes: int = 0
    least: int = 0
    layers: list[str] = field(default_factory=list)

    @property
    def beyond(self) -> int:
        return self.bytes - self.least


def groups_of(movement: Movement) -> list[Group]:
    """All kernels of a step in groups, the heaviest beyond the bound first."""
    found: dict[tuple[Any, ...], Group] = {}
    for kernel in movement.ledger.kernels:
        ops = ops_of(kernel, movement.planned)
        reads, writes = (tuple(moves_of(kernel, movement.ledger, written)) for written in (False, True))
        family = family_of(kernel, ops)
        counted = Counter(op.name.removeprefix("step.") for op in ops)
        names = ", ".join(f"{n} x{c}" if c > 1 else n for n, c in counted.items())
        key = (group_of(kernel), kernel.phase, kernel.name, names, reads, writes)
        group = found.setdefault(key, Group(kernel.name, kernel.phase, key[0], family, names, reads, writes))
        group.count += kernel.times
        group.bytes += kernel.bytes
        group.least += kernel.times * least_of(ops)
        group.layers.append(kernel.loc.layer)
    return sorted(found.values(), key=lambda g: -g.beyond)


def least_of(ops: Sequence[Op]) -> int:
    """What the bound counts for the heavy ops of a kernel, as the program has them now."""
    return sum(sum(least_bytes(op)) for op in ops if issubclass(op.definition, HEAVY))


def ops_of(kernel: Kernel, planned: Planned) -> list[Op]:
    """The ops of a kernel; of a region those inside."""
    launch = planned.plan.launches[kernel.launch]
    if launch.op < 0:
        return []
    op = list(planned.function.regions[0].block)[launch.op]
    root = root_of(planned.function)

    def inside(op: Op) -> list[Op]:
        if op.definition is not Fused:
            return [] if op.definition.terminator else [op]
        return [each for part in lookup(root, op.callee).regions[0].block for each in inside(part)]

    return inside(op)


def family_of(kernel: Kernel, ops: Sequence[Op]) -> str:
    names = [op.name.removeprefix("step.") for op in ops] or [kernel.name]
    if kernel.phase in ("update", "clip"):
        return "updates"
    for family, words in FAMILIES.items():
        if any(name.startswith(words) for name in names):
            return family
    if all(name in ("cast", "reshape", "transpose") for name in names):
        return "casts" if "cast" in names else "layout copies"
    return "pointwise"


def moves_of(kernel: Kernel, ledger: Ledger, written: bool) -> list[str]:
    """What a kernel reads or writes: types with megabytes, the largest first; what is small is one word."""
    moved = sorted((m for m in kernel.moves if m.written == written), key=lambda m: -m.bytes)
    shown = [f"{type_of(ledger, m.buffer)} {m.bytes * MEGA:.1f}" for m in moved if m.bytes >= 1 / MEGA / 2]
    small = sum(m.bytes for m in moved if m.bytes < 1 / MEGA / 2)
    return [*shown, f"small {small * MEGA:.1f}"] if small * MEGA >= 0.05 else shown


def type_of(ledger: Ledger, buffer: int) -> str:
    if buffer < 0:
        return "scratch"
    return re.sub(r"tensor<(.*)>", r"\1", ledger.buffers[buffer].type)


def families(movement: Movement, groups: Sequence[Group]) -> dict[str, int]:
    """Bytes beyond the bound by family, the most first. The update must read and write its state. What heavy ops read
    and write more or less than they did when the step was captured is a family too."""
    found: Counter[str] = Counter()
    for group in groups:
        found[group.family] += group.beyond
    found["updates"] -= movement.bound.state_read + movement.bound.state_written
    found["other heavy ops"] += sum(group.least for group in groups) - movement.bound.heavy
    return dict(found.most_common())


# ---- text ------------------------------------------------------------------------------------------------------------


def page(name: str, movement: Movement, groups: Sequence[Group], rows: int) -> list[str]:
    moved, bound, plan = movement.ledger.total, movement.bound.total, movement.planned.plan
    lines = [
        f"{name}: moved {moved * 1e-9:.2f} GB, bound {bound * 1e-9:.2f}, ratio {moved / bound:.3f}, "
        f"peak {plan.peak * 1e-9:.2f} GB, {movement.ledger.launches} kernels"
    ]
    lines.append("beyond the bound by family, GB:")
    lines += [f"  {family:<16} {size * 1e-9:7.2f}" for family, size in families(movement, groups).items()]
    lines.append("by kernel, MB (one launch: what it reads -> what it writes):")
    for group in groups[:rows]:
        lines.append(
            f"  {group.beyond * MEGA:8.0f} of {group.bytes * MEGA:8.0f}  {group.count:>3} x {group.phase} "
            f"{group.family} {group.layer}: {text_of(group)}"
        )
    return lines


def text_of(group: Group) -> str:
    return f"{' + '.join(group.reads) or '-'} -> {' + '.join(group.writes) or '-'} [{group.ops}]"


def in_order(movement: Movement, pattern: str) -> list[str]:
    """The kernels of some layers, as they run, with what the bound counts for each."""
    lines, total, least = [], 0, 0
    for kernel in movement.ledger.kernels:
        if not fnmatch.fnmatchcase(kernel.loc.layer, pattern):
            continue
        ops = ops_of(kernel, movement.planned)
        reads, writes = (moves_of(kernel, movement.ledger, written) for written in (False, True))
        bound = kernel.times * least_of(ops)
        names = ", ".join(op.name.removeprefix("step.") for op in ops if not getattr(op.definition, "views", False))
        provider = movement.planned.plan.launches[kernel.launch].provider
        lines.append(
            f"  {kernel.bytes * MEGA:8.1f} (bound {bound * MEGA:7.1f}) {kernel.phase:<8} {provider:<6} "
            f"{kernel.loc.layer}: {' + '.join(reads)} -> {' + '.join(writes)} [{names}]"
        )
        total, least = total + kernel.bytes, least + bound
    return [*lines, f"  {total * MEGA:8.1f} (bound {least * MEGA:7.1f}) in all"]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("networks", nargs="+", metavar="NETWORK", help="a name of bench/networks, with @SIZE or not")
    parser.add_argument("--rows", type=int, default=25, help="groups of kernels that are shown")
    parser.add_argument("--layer", default="", help="kernels of layers of this pattern, in order")
    parser.add_argument("--json", type=pathlib.Path, help="where figures are kept")
    parser.add_argument("--compiled", action="store_true", help="compile it on the GPU here, instead of guessing")
    args = parser.parse_args(arguments)
    kept_figures: dict[str, Any] = {}
    for text in args.networks:
        name, _, size = text.partition("@")
        start = time.perf_counter()
        workload = build(Case(name, size or "full"), "cuda" if args.compiled else "cpu")
        if args.compiled:
            movement = compiled(workload)
        else:
            movement = movement_of(planned(workload), load_description("h200"))
        groups = groups_of(movement)
        print("\n".join(page(text, movement, groups, args.rows)))
        if args.layer:
            print("\n".join(in_order(movement, args.layer)))
        print(f"planned in {time.perf_counter() - start:.0f} s\n", flush=True)
        kept_figures[text] = {
            "moved": movement.ledger.total,
            "bound": movement.bound.total,
            "peak": movement.planned.plan.peak,
            "beyond": families(movement, groups),
        }
    if args.json:
        args.json.write_text(json.dumps(kept_figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
