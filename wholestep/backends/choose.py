"""Who runs each region: every way that providers offer is built, compared with ATen's result, timed, and the best kept.

A way that is wrong, crashes or cannot be built is excluded with its reason and never stops a compile. What was measured
is kept in the store (`store.py`), so that a region is timed once per machine.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..ir.core import Value
from .providers import Launcher, Offer, Provider, Region, neutral_inputs, op_by_op
from .store import Choice, Store, Timed, fingerprint

#: a generated way must be this much better than ATen's to be taken: launches that are views or in place cost ATen less
#: inside a plan than alone
MARGIN = 1.0
#: seconds that timing one way may take
PATIENCE = {"cpu": 0.04, "cuda": 0.01}


@dataclass(slots=True)
class Chosen:
    """What runs a region: a provider's way of doing it. `run` is None for ATen, whose ops go back into the plan."""

    provider: str
    offer: str
    run: Launcher | None
    scratch: tuple = ()
    seconds: float = float("nan")
    aten: float = float("nan")
    excluded: list[Timed] = field(default_factory=list)


@dataclass(slots=True)
class Choices:
    """Decides about regions, and remembers."""

    device: torch.device
    providers: list[Provider]
    store: Store | None = None
    measure: bool = True
    #: whether products are tried as one kernel with their neighbours, which takes long to build
    products: bool = False
    progress: Callable[[str, int, int], None] | None = None
    known: dict[str, Chosen] = field(default_factory=dict)
    #: reasons why providers do not run regions, by provider
    refusals: dict[str, dict[str, int]] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=lambda: {"generate": 0.0, "build": 0.0, "measure": 0.0})

    def takes(self, op: object) -> bool:
        return any(p.takes(op) for p in self.providers)  # type: ignore[arg-type]

    def decide(self, regions: Iterable[Region]) -> None:
        """Chooses for regions that nothing is known of yet."""
        clock, start = time.perf_counter, time.perf_counter()
        wanted = {r.key: r for r in regions if r.key not in self.known}
        offers = {key: self.offers(region) for key, region in wanted.items()}
        kept = {key: choice for key in wanted if (choice := self.kept(key, offers[key])) is not None}
        self.seconds["generate"] += clock() - start
        start = clock()
        # what was chosen before is all that has to be built; of the others everything
        asked = {key: [kept[key]] if key in kept else found for key, found in offers.items()}
        built = self.build([pair for found in asked.values() for pair in found])
        lost = [key for key, (_, offer) in kept.items() if not callable(built.get(offer.key))]
        for key in lost:  # the winner of before can no longer be built
            del kept[key]
            asked[key] = offers[key]
        built |= self.build([pair for key in lost for pair in offers[key]])
        self.seconds["build"] += clock() - start
        start = clock()
        for number, (key, region) in enumerate(wanted.items()):
            self.known[key] = self.choose(region, asked[key], built, key in kept)
            if key in kept and self.store is not None and (old := self.store.get(self.store_key(key))) is not None:
                self.known[key].seconds = old.seconds
                aten = [t.seconds for t in old.candidates if t.name == "aten:aten" and not t.why]
                self.known[key].aten = aten[0] if aten else math.nan
            if self.progress is not None:
                self.progress("choosing kernels", number + 1, len(wanted))
        self.seconds["measure"] += clock() - start

    def times(self, regions: Sequence[Region]) -> list[float]:
        """Measured seconds of regions, each by the best of the providers."""
        self.decide(regions)
        found = []
        for region in regions:
            chosen = self.known[region.key]
            if math.isnan(chosen.seconds):
                inputs, run = neutral_inputs(region, False), op_by_op(region)
                with torch.no_grad():
                    chosen.seconds = self.time(lambda run=run, inputs=inputs: run(*inputs))  # type: ignore[misc]
            found.append(chosen.seconds)
        return found

    def offers(self, region: Region) -> list[tuple[Provider, Offer]]:
        found: list[tuple[Provider, Offer]] = []
        for provider in self.providers:
            try:
                why = provider.claims(region)
                if why:
                    self.refuse(provider.name, why)
                    continue
                found += [(provider, offer) for offer in provider.offers(region)]
            except Exception as error:  # one provider's failure is no reason to stop
                self.refuse(provider.name, f"it failed: {first_line(error)}")
        return found

    def refuse(self, provider: str, why: str) -> None:
        reasons = self.refusals.setdefault(provider, {})
        reasons[why] = reasons.get(why, 0) + 1

    def kept(self, key: str, offers: Sequence[tuple[Provider, Offer]]) -> tuple[Provider, Offer] | None:
        """The winner of an earlier measurement, where it is among today's competitors."""
        if self.store is None or not offers:
            return None
        choice = self.store.get(self.store_key(key))
        if choice is None:
            return None
        return next(((p, o) for p, o in offers if f"{p.name}:{o.name}" == choice.winner), None)

    def store_key(self, region: str) -> str:
        return f"{region} {'+'.join(p.name for p in self.providers)}"

    def build(self, pairs: Sequence[tuple[Provider, Offer]]) -> dict[str, Launcher | Exception]:
        by_provider: dict[str, dict[str, Offer]] = {}
        for provider, offer in pairs:
            by_provider.setdefault(provider.name, {})[offer.key] = offer
        built: dict[str, Launcher | Exception] = {}
        for provider in self.providers:
            offers = list(by_provider.get(provider.name, {}).values())
            if not offers:
                continue
            report = None
            if self.progress is not None:
                say, name = self.progress, provider.name

                def report(done: int, total: int, say=say, name=name) -> None:  # type: ignore[no-untyped-def]
                    say(f"building {name} kernels", done, total)

            try:
                built.update(provider.build(offers, report))
            except Exception as error:
                built.update({o.key: error for o in offers})
        return built

    # ---- one region --------------------------------------------------------------------------------------------------

    def choose(
        self,
        region: Region,
        offers: Sequence[tuple[Provider, Offer]],
        built: dict[str, Launcher | Exception],
        settled: bool,
    ) -> Chosen:
        usable: list[tuple[Provider, Offer, Launcher]] = []
        timed: list[Timed] = []
        for provider, offer in offers:
            made = built.get(offer.key, RuntimeError("it was not built"))
            if isinstance(made, Exception):
                timed.append(Timed(f"{provider.name}:{offer.name}", 0.0, f"not built: {first_line(made)}"))
            else:
                usable.append((provider, offer, made))
        own = [u for u in usable if u[0].name != "aten"]
        if settled or not self.measure:
            picked = (usable if settled else own or usable)[:1]
            return self.chosen(picked[0], timed) if picked else Chosen("aten", "aten", None, excluded=timed)
        if not own:
            return Chosen("aten", "aten", None, excluded=timed)
        if looks_up_what_it_computes(region):
            timed.append(Timed("all", 0.0, "not timed: it looks up by numbers that it computes"))
            return Chosen("aten", "aten", None, excluded=timed)
        try:
            return self.fastest(region, usable, timed)
        except torch.OutOfMemoryError:
            timed.append(Timed("all", 0.0, "not timed: out of memory"))
            return Chosen("aten", "aten", None, excluded=timed)

    def chosen(self, picked: tuple[Provider, Offer, Launcher], excluded: list[Timed]) -> Chosen:
        provider, offer, run = picked
        dissolves = provider.name == "aten"
        return Chosen(provider.name, offer.name, None if dissolves else run, offer.scratch, excluded=excluded)

    @torch.no_grad()
    def fastest(self, region: Region, usable: list[tuple[Provider, Offer, Launcher]], timed: list[Timed]) -> Chosen:
        reference = op_by_op(region)
        inputs = neutral_inputs(region, False)
        try:
            wanted = reference(*inputs)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # what was made up for operands does not suit the ops
            timed.append(Timed("all", 0.0, f"not timed: {first_line(error)}"))
            return Chosen("aten", "aten", None, excluded=timed)
        if any(bool(t.isnan().any()) for t in wanted if t.is_floating_point()):
            inputs = neutral_inputs(region, True)
            wanted = reference(*inputs)
        best: tuple[float, tuple[Provider, Offer, Launcher]] | None = None
        aten = float("nan")
        for provider, offer, run in usable:
            name = f"{provider.name}:{offer.name}"
            outputs = [spoilt(empty(s, self.device), w) for s, w in zip(region.results, wanted, strict=True)]
            scratch = [empty(s, self.device) for s in offer.scratch]
            tensors = (*inputs, *outputs, *scratch)
            try:
                run(*tensors)
                self.wait()
                why = difference(outputs, wanted, rounds(region))
                seconds = 0.0 if why else self.time(lambda: run(*tensors))  # noqa: B023
            except Exception as error:
                why, seconds = f"it crashed: {first_line(error)}", 0.0
            timed.append(Timed(name, seconds, why))
            if why:
                continue
            if provider.name == "aten":
                aten = seconds = seconds * MARGIN
            if best is None or seconds < best[0]:
                best = (seconds, (provider, offer, run))
        if best is None:
            return Chosen("aten", "aten", None, excluded=timed)
        found = self.chosen(best[1], [t for t in timed if t.why])
        found.seconds, found.aten = best[0], aten
        if self.store is not None:
            self.store.put(self.store_key(region.key), Choice(f"{found.provider}:{found.offer}", best[0], timed))
        return found

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def time(self, call: Callable[[], object]) -> float:
        """Seconds of one call: the least of several, on a GPU as part of a graph so that launching costs nothing."""
        return on_gpu(call, self.device) if self.device.type == "cuda" else on_cpu(call)


def on_cpu(call: Callable[[], object]) -> float:
    call()
    best, end = float("inf"), time.perf_counter() + PATIENCE["cpu"]
    while True:
        start = time.perf_counter()
        call()
        now = time.perf_counter()
        best = min(best, now - start)
        if now >= end:
            return best


def on_gpu(call: Callable[[], object], device: torch.device) -> float:
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        first, then = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record(stream)
        call()
        then.record(stream)
        then.synchronize()
        count = min(10, max(1, int(1.0 / max(first.elapsed_time(then), 1e-3))))  # a slow one shows in fewer calls
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(count):
                call()
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(4)]
        for mark in marks:
            graph.replay()
            mark.record(stream)
    stream.synchronize()
    best = min(a.elapsed_time(b) for a, b in itertools.pairwise(marks)) / count / 1e3
    graph.reset()
    return best


def empty(spec: object, device: torch.device) -> torch.Tensor:
    return torch.empty_strided(spec.shape, spec.strides, dtype=spec.dtype, device=device)  # type: ignore[attr-defined]


def spoilt(tensor: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Memory for a result, with something in it that is wrong everywhere."""
    if tensor.is_floating_point():
        return tensor.fill_(float("nan"))
    return tensor.copy_(wanted == 0)


#: ops that hand on the integers they are given
HAND_ON = ("step.cast", "step.select", "step.concat", "step.pad", "step.slice_grad")


def looks_up_what_it_computes(region: Region) -> bool:
    """Whether a region looks something up by numbers that it makes out of operands: made-up operands could then lead
    outside of the table, which on a GPU ends the process."""

    def known(value: Value, constant: bool = False) -> bool:
        op = value.op
        if op is None:
            return not constant
        if op.definition.views or op.name in HAND_ON:  # type: ignore[attr-defined]
            return all(known(v, constant) for v in op.operands if v.type.element.kind == "int")
        return all(known(v, True) for v in op.operands)  # computed from constants alone

    for op in region.ops:
        for name in ("indices", "index", "target"):
            named = any(f.name == name for f in op.definition.operand_fields)
            if named and not all(map(known, listed(getattr(op, name)))):
                return True
    return False


def listed(value: Any) -> list[Value]:
    return list(value) if isinstance(value, list | tuple) else [value]


def rounds(region: Region) -> bool:
    """Whether ATen rounds something to 16 bits on the way."""
    values = [v for op in region.ops for v in (*op.operands, *op.results)]
    return any(v.type.element.kind == "float" and v.type.element.bits < 32 for v in values)


def difference(found: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor], low: bool) -> str:
    """Empty where results agree as far as rounding lets them (`low`: to 16 bits), else what is wrong."""
    for number, (x, y) in enumerate(zip(found, wanted, strict=True)):
        if x.shape != y.shape:
            return f"result {number} has another shape"
        if not x.is_floating_point():
            wrong = int((x != y).sum())
            if wrong > x.numel() // 1000:  # a comparison may fall otherwise where rounding decides
                return f"wrong: {wrong:,} elements of result {number} differ"
            continue
        a, b = x.float(), y.float()
        if not torch.equal(a.isfinite(), b.isfinite()):
            return f"wrong: result {number} is finite at other places"
        good = b.isfinite()
        if not torch.equal(a[~good].nan_to_num(0.0), b[~good].nan_to_num(0.0)):
            return f"wrong: result {number} has other infinities"
        a, b = a[good], b[good]
        if not a.numel():
            continue
        scale = float(b.abs().max()) + 1e-12
        typical = float(b.abs().mean()) + 1e-12
        apart = (a - b).abs()
        # rounding may turn a comparison, and what hangs on it, around: at few places
        off = int((apart > (0.1 if low else 2e-3) * scale).sum())
        if off > (2e-3 if low else 1e-4) * a.numel() or float(apart.mean()) > (0.02 if low else 1e-3) * typical:
            return f"wrong: result {number} is off by up to {float(apart.max()):.3g}, and the largest is {scale:.3g}"
    return ""


def first_line(error: BaseException) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0][:160]}" if text else type(error).__name__


def choices_for(
    device: torch.device, providers: list[Provider], measure: bool | str = True, store: Store | None = None
) -> Choices:
    """A chooser for one device with the store of this machine."""
    return Choices(device, providers, store or Store(fingerprint(device)), bool(measure), measure == "max")
