"""Who runs what share of a step: launches, bytes and time by provider and by kernel family, and what was excluded.

Bytes are the ledger's. A launch whose way was timed when it was chosen counts with that time; the others with what the
machine's limits allow for them, where the machine is described. The report says how many are which.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from ..backends.choose import Choices
from ..backends.kernels import KERNEL
from ..cost import Movement
from ..cost import ledger as costs
from ..cost.counting import COPY
from ..cost.movement import seconds_text
from ..dialects.step.control import root_of
from ..dialects.step.fused import Fused
from ..ir.attributes import Symbol
from ..ir.builtin import lookup
from ..ir.core import Op
from ..plan.plan import Launch
from ..plan.planner import Planned
from ..transforms.attention_sides import ATTENTION

#: ops around which a region is a contraction
CONTRACTIONS = frozenset(f"step.{n}" for n in ("contract", "conv", "conv_input_grad", "conv_weight_grad"))
#: providers that generate nothing
LIBRARIES = frozenset(("aten", "cublas", "cudnn"))
#: launches that run nothing on the device
NOTHING = ("host", "wait")
SHOWN = 3


@dataclass(slots=True)
class Share:
    """What one provider, or one family, runs. modelled: of launches that were not timed; None without a price."""

    launches: int = 0
    bytes: int = 0
    timed: int = 0
    measured: float = 0.0
    modelled: float | None = 0.0
    distinct: set[int] = field(default_factory=set)

    def add(self, kernel: costs.Kernel, measured: float, modelled: float | None, built: int | None) -> None:
        self.launches += kernel.launches
        self.bytes += kernel.bytes
        if not math.isnan(measured):
            self.timed += kernel.launches
            self.measured += measured * kernel.times
        else:
            self.modelled = None if self.modelled is None or modelled is None else self.modelled + modelled
        if built is not None:
            self.distinct.add(built)

    @property
    def seconds(self) -> float | None:
        return None if self.modelled is None else self.measured + self.modelled

    def to_dict(self) -> dict[str, Any]:
        return {
            "launches": self.launches,
            "bytes": self.bytes,
            "timed": self.timed,
            "measured seconds": self.measured,
            "modelled seconds": self.modelled,
            "distinct": len(self.distinct),
        }


@dataclass(slots=True)
class Excluded:
    """A way to run a region that was not built, crashed, or gave another result than ATen."""

    way: str
    why: str


@dataclass(slots=True)
class KernelsReport:
    """The table "kernels" of `step.report()`."""

    providers: dict[str, Share]
    families: dict[str, Share]
    excluded: list[Excluded] = field(default_factory=list)
    #: how often each provider does not run a region at all, by its reason
    declined: dict[str, dict[str, int]] = field(default_factory=dict)
    #: whether somebody beside ATen may run regions
    competed: bool = True

    @property
    def distinct(self) -> int:
        """Generated kernels; those of equal layers are one."""
        return len(set().union(*(s.distinct for s in self.providers.values())))

    def lines(self) -> list[str]:
        if not self.competed:
            return ["kernels: ATen runs every op; see providers= and level="]
        launches = sum(s.launches for s in self.providers.values())
        timed = sum(s.timed for s in self.providers.values())
        lines = ["kernels               count  distinct      bytes  share   time"]
        for title, shares in (("", self.providers), ("by family", self.families)):
            lines += [title] if title and shares else []
            lines += [self.line(name, share, shares.values()) for name, share in shares.items()]
        measured = sum(s.measured for s in self.providers.values())
        line = f"  time: {timed} of {launches} kernels were timed alone when they were chosen"
        line += f", {seconds_text(measured)}" if timed else ""
        if any(s.seconds is None for s in self.providers.values()):
            lines.append(
                f"{line}; shares are of these alone: this machine is not described (`wholestep doctor --calibrate`)"
            )
        else:
            lines.append(f"{line}; the others count what the machine's limits allow (modelled)")
        if self.excluded:
            lines.append(f"  {len(self.excluded)} ways to run a region were excluded:")
            lines += [f"    {e.way}: {e.why}" for e in self.excluded[:SHOWN]]
        for provider, reasons in self.declined.items():
            most = sorted(reasons.items(), key=lambda item: -item[1])
            shown = "; ".join(f"{why} ({n})" for why, n in most[:SHOWN])
            lines.append(f"  {provider} does not run {sum(reasons.values())} regions: {shown}")
        return lines

    def line(self, name: str, share: Share, among: Iterable[Share]) -> str:
        whole, time = totals(among)
        own = share.measured if share.seconds is None else share.seconds
        distinct = str(len(share.distinct)) if share.distinct else "-"
        seconds = f"{own / time:.1%}" if time else "-"
        size = f"{share.bytes / 1e6:.2f} MB"
        return (
            f"  {name:<16} {share.launches:>8} {distinct:>9} {size:>10} {share.bytes / (whole or 1):>6.1%} {seconds:>6}"
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as JSON has them."""
        return {
            "providers": {name: share.to_dict() for name, share in self.providers.items()},
            "families": {name: share.to_dict() for name, share in self.families.items()},
            "distinct": self.distinct,
            "excluded": [asdict(e) for e in self.excluded],
            "declined": {name: dict(reasons) for name, reasons in self.declined.items()},
        }


def totals(shares: Iterable[Share]) -> tuple[int, float]:
    """Bytes, and seconds: of all, or of what was timed where that is all that is known."""
    listed = list(shares)
    seconds = [s.seconds for s in listed if s.seconds is not None]
    return sum(s.bytes for s in listed), sum(seconds if len(seconds) == len(listed) else [s.measured for s in listed])


def kernels_report(movement: Movement, choices: Choices | None) -> KernelsReport:
    """Who runs the launches of a step."""
    times, excluded = measured_times(choices)
    providers: dict[str, Share] = {}
    families: dict[str, Share] = {}
    prices = None if movement.roofline is None else movement.roofline.kernels
    ops = {id(p): list(p.function.regions[0].block) for p in (movement.planned, *movement.planned.bodies)}
    for number, (kernel, planned, position) in enumerate(launched(movement)):
        launch = None if position < 0 else planned.plan.launches[position]
        op = None if launch is None or launch.op < 0 else ops[id(planned)][launch.op]
        made = None if position < 0 else planned.kernels[position]
        built = id(made.steps[0].call) if made is not None and made.steps and made.steps[0].kind == KERNEL else None
        provider = launch.provider if launch else "aten"
        for shares, name in ((providers, provider), (families, family_of(planned, op, provider))):
            share = shares.setdefault(name, Share())
            share.add(kernel, times.get(built, math.nan), None if prices is None else prices[number], built)
    by_bytes = lambda item: -item[1].bytes  # noqa: E731
    return KernelsReport(
        dict(sorted(providers.items(), key=by_bytes)),
        dict(sorted(families.items(), key=by_bytes)),
        excluded,
        {} if choices is None else {name: dict(reasons) for name, reasons in choices.refusals.items()},
        choices is not None,
    )


def launched(movement: Movement) -> list[tuple[costs.Kernel, Planned, int]]:
    """Every kernel of the ledger with the plan it is a launch of and its place there; -1 for what gathers the results
    of micro-batches."""
    planned = movement.planned
    found: list[tuple[costs.Kernel, Planned, int]] = []
    inner: dict[int, int] = {}  # launch of micro-batches -> how far its body has been gone through
    for kernel in movement.ledger.kernels:
        outer = planned.plan.launches[kernel.launch]
        if outer.body < 0:
            found.append((kernel, planned, kernel.launch))
            continue
        body = planned.bodies[outer.body]
        position = next_like(kernel, body.plan.launches, inner.get(kernel.launch, 0))
        if position >= 0:
            inner[kernel.launch] = position + 1
        found.append((kernel, body, position))
    return found


def next_like(kernel: costs.Kernel, launches: Sequence[Launch], start: int) -> int:
    """The next launch that a kernel of the ledger can be: they are in the same order, but some move nothing."""
    for position in range(start, len(launches)):
        launch = launches[position]
        name = COPY if launch.provider == "copy" else launch.name.removeprefix("step.")
        if launch.provider not in NOTHING and (name, launch.phase or "other") == (kernel.name, kernel.phase):
            return position
    return -1


def family_of(planned: Planned, op: Op | None, provider: str) -> str:
    """The kind of kernel: by the way its loops walk for what is generated, else a library's."""
    if op is not None and op.name in CONTRACTIONS and provider not in LIBRARIES:
        return "contraction"
    if op is None or op.definition is not Fused or planned.fusion is None:
        return "library"
    bodies = planned.fusion.bodies
    name = op.callee.name
    while name not in bodies:  # a batch: its parts are alike
        name = next(iter(lookup(root_of(planned.function), Symbol(name)).regions[0].block)).callee.name
    body = bodies[name]
    if body.function is not None and any(o.name in CONTRACTIONS for o in body.function.regions[0].block):
        return "contraction"
    if body.function is not None and any(o.name in ATTENTION for o in body.function.regions[0].block):
        return "attention"
    if body.schedule is None:
        return "library"
    return "rows" if body.schedule.along else "sums" if body.schedule.across else "pointwise"


def measured_times(choices: Choices | None) -> tuple[dict[int | None, float], list[Excluded]]:
    """Seconds of what was timed, now or earlier, by the identity of what runs it; and what was excluded."""
    times: dict[int | None, float] = {}
    excluded: dict[tuple[str, str], Excluded] = {}
    for key, chosen in ({} if choices is None else choices.known).items():
        candidates, seconds = list(chosen.excluded), chosen.seconds
        if math.isnan(seconds) and choices is not None and choices.store is not None:
            kept = choices.store.get(choices.store_key(key))
            if kept is not None and kept.winner == f"{chosen.provider}:{chosen.offer}":
                seconds, candidates = kept.seconds, [*candidates, *(c for c in kept.candidates if c.why)]
        if chosen.run is not None and not math.isnan(seconds):
            times[id(chosen.run)] = seconds
        excluded |= {(key, c.name): Excluded(c.name, c.why) for c in candidates}
    return times, list(excluded.values())
