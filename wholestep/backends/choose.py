"""Who runs each region: ways that providers offer are built, compared with ATen's ops, timed, and the best kept.

Of each provider the best guess is tried first, and its other ways only for the regions where most can be gained: those
that take long, and longer than memory lets them; regions that are only compared, to see what should be one kernel, by
best guesses alone. While one region is measured, kernels of others are compiled. A way that is wrong, crashes or cannot
be built is excluded with its reason and never stops a compile, unless it ends the process or breaks its device: the
next process does without it (`crashes.py`). What was measured is kept (`store.py`), once per machine and version of the
providers' code; where only guesses were tried, a program in which the region weighs more tries the rest.
"""

from __future__ import annotations

import itertools
import math
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

import torch

from ..errors import WholestepError
from ..machine.describe import memory_bytes
from ..machine.description import find_description
from .about import about
from .compare import first_line
from .contest import (
    NOT_BUILT,
    Built,
    Contest,
    Pair,
    TimeIsUp,
    Way,
    alike,
    build_for,
    is_around_attention,
    is_lean,
    is_product,
    most_like,
    name_of,
)
from .convolutions import starts_slowly
from .crashes import BROKEN, collect, note_name, watched
from .made_up import looks_up_what_it_computes, neutral_inputs
from .providers import (
    Generator,
    Launcher,
    Offer,
    Provider,
    Region,
    op_by_op,
    version_of,
)
from .store import Choice, Objects, Store, Timed, fingerprint, lack_of_room, say_not_built
from .timing import make_room, on_cpu, on_gpu
from .trial import Trial, empty

#: a generated way must be this much better than ATen's to be taken: launches that are views or in place cost ATen less
#: inside a plan than alone
MARGIN = 1.0
#: so is another algorithm for a product: what was drawn is the least of many times, and ATen's bits are eager's
MARGIN_OF_PRODUCTS = 0.98
#: sets of tensors that products are timed on beside the first, and other regions that move from so many bytes up to so
#: many: less takes no time, more is in no cache
SPARES, FROM, UP_TO = 2, 1 << 24, 1 << 27
#: on a CPU regions from so many bytes on, on as many sets as come to this much in all
FROM_ON_CPU, ROUND = 1 << 23, 1 << 27
#: regions that make up this share of what can be gained are tried in other ways than the best guess, so many of them
HEAVY, MORE = 0.7, 3
#: and on a GPU, whose kernels compile while others are timed, so many of the heaviest in any case: a step of equal
#: layers has few regions, each of which runs often
HEAVIEST = 12
#: a region whose best guess takes at most so many times as long as its bytes do has nothing to gain
NEAR = 1.2
#: of regions that differ in sizes alone only the heaviest is, the others are tried in what is most like its best ways
ALIKE = 2
#: who takes long to start is not timed where what runs already takes fewer times as long as its bytes do
LITTLE = 8.0

#: so many contests are kept of regions that may be asked for, the latest ones
FORESEEN = 256

#: seconds for which a provider that builds slowly builds ways beside those of others, the heaviest regions first
PATIENCE = 60.0

#: so many of a provider's ways that are not built tell that it cannot build at all
MANY = 3


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
    #: seconds of the quickest way that is not ATen's; infinite where there is none
    own: float = math.inf
    #: seconds of the best of what was tried first
    guessed: float = float("nan")


@dataclass
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
    #: bytes per second of the device's memory, where they are known
    bandwidth: float = math.inf
    #: so many regions are tried in other ways however little they weigh
    heaviest: int = 0
    #: providers that were said to build nothing
    silent: set[str] = field(default_factory=set)
    #: regions that may be asked for after the next ones
    expected: list[Region] = field(default_factory=list)
    #: contests of such regions, which nothing was tried in yet
    foreseen: dict[str, Contest] = field(default_factory=dict)
    #: contests of regions that were compared by best guesses alone, and what won
    compared: dict[str, tuple[Contest, Chosen]] = field(default_factory=dict)
    #: for a budget of memory: whether ways that take much memory beside their tensors are left out
    lean: bool = False
    #: the providers that take part now
    contenders: list[Provider] = field(init=False)

    def __post_init__(self) -> None:
        self.contenders = self.providers

    def leaner(self) -> Choices:
        """The same, without ways that take much memory beside their tensors."""
        return replace(self, lean=True, known={}, foreseen={}, compared={})

    @property
    def objects(self) -> Objects | None:
        """Where what was worked out is kept for the next compile."""
        return None if self.store is None else self.store.objects

    def takes(self, op: object) -> bool:
        return any(self.taken_by(provider, op) for provider in self.providers)

    def taken_by(self, provider: Provider, op: object) -> bool:
        """Whether a provider wants an op for itself; one that fails to say so does not."""
        try:
            return provider.takes(op)  # type: ignore[arg-type]
        except Exception as error:  # one provider's failure is no reason to stop
            self.refuse(provider.name, f"it failed: {first_line(error)}")
            return False

    def followers(self, region: Region | None = None) -> list[Provider]:
        """Those who run wide products with what follows them inside: any, or this one."""
        return [p for p in self.providers if p.follows(region)]

    def decide(
        self, regions: Iterable[Region], later: Sequence[Region] = (), aten: bool = True, whole: bool = True
    ) -> None:
        """Chooses for regions that nothing is known of yet. later: regions like which some will be asked for next.

        aten: whether ATen takes part. Where it wins its ops lie as they like, and what reads them is another region.
        whole: whether more than best guesses is tried where it is worth it; else regions are compared, no more.
        """
        self.contenders = [p for p in self.providers if aten or p.name != "aten"]
        try:
            contests = self.hold(regions, later, whole)
        finally:
            if self.ahead is not None:
                self.ahead[1].drop()
        for key, contest in contests.items():
            chosen = self.settle(contest)
            if whole:
                self.known[key] = chosen
            else:
                self.compared[self.store_key(key)] = contest, chosen
        self.say_who_builds_nothing(contests.values())
        if self.device.type == "cuda" and any(c.timed for c in contests.values()):
            torch.cuda.empty_cache()  # what operands took is the step's again

    def say_who_builds_nothing(self, contests: Iterable[Contest]) -> None:
        """One warning for a provider that can build nothing: its compiler is there and does not work."""
        tried = [t for contest in contests for t in contest.timed]
        for name in {t.name.partition(":")[0] for t in tried} - self.silent:
            own = [t.why for t in tried if t.name.startswith(f"{name}:")]
            if len(own) >= MANY and all(why.startswith(NOT_BUILT) for why in own) and not any(map(lack_of_room, own)):
                self.silent.add(name)
                warnings.warn(
                    f"none of {len(own)} kernels by {name} could be built, so others run in their place "
                    f"({own[0].removeprefix(NOT_BUILT)}). Try: `wholestep doctor`, or providers=[...] without {name}",
                    stacklevel=2,
                )

    def hold(self, regions: Iterable[Region], later: Sequence[Region] = (), whole: bool = True) -> dict[str, Contest]:
        """Contests for regions that nothing is known of: first of best guesses, then of all where it is worth it."""
        launches, contests = Counter[str](), dict[str, Contest]()
        start = time.perf_counter()
        for region in regions:
            if region.key in self.known or (not whole and self.store_key(region.key) in self.compared):
                continue
            launches[region.key] += 1
            if region.key in contests:
                continue
            contest, _ = self.compared.pop(self.store_key(region.key), (None, None))
            if contest is None:
                contest = self.contest(region)
                contest.tried = contest.written(contest.first(self.measure, self.bandwidth))
                self.begin(contest.tried)
            else:
                contest.tried = []
            contests[region.key] = contest
        if whole and self.measure and self.ahead is not None:  # a guess at what is heavy, compiled meanwhile
            for group in alike(self.heavy(contests.values(), launches, lambda c: float(c.region.bytes))):
                self.begin(self.more(group[0]) if group[0].kept is None else (), perhaps=True)
        self.expect([region for region in (*later, *self.expected) if region.key not in contests])
        self.expected = []
        self.seconds["generate"] += time.perf_counter() - start
        self.round([c for c in contests.values() if c.tried])
        lost = [c for c in contests.values() if c.fails and self.reopen(c)]
        for contest in lost:  # the winner of before, or a guess, is no use
            contest.tried = contest.written(contest.left)
        self.round(lost)
        if self.measure and whole:
            for contest in contests.values():
                contest.whole = contest.whole or self.gain(contest) == 0
            self.try_more(self.heavy(contests.values(), launches, self.gain))
        return contests

    def contest(self, region: Region) -> Contest:
        """What is known and offered for a region: where a winner is known, nobody but its provider is asked."""
        foreseen = self.foreseen.pop(self.store_key(region.key), None)
        if foreseen is not None:
            return foreseen
        choice = self.store.get(self.store_key(region.key)) if self.store is not None else None
        if choice is not None and choice.versions == self.versions:
            winner = self.winner(region, choice)
            if winner is not None:
                for name, why in choice.refused.items():
                    self.refuse(name, why)
                guessed = choice.seconds if math.isinf(choice.guessed) else choice.guessed
                return Contest(region, [winner], choice, refused=choice.refused, guessed=guessed)
        offers, refused = self.offers(region)
        return Contest(region, offers, None, refused=refused)

    def winner(self, region: Region, choice: Choice) -> Pair | None:
        """The way that won before, where its provider still has it."""
        name, _, way = choice.winner.partition(":")
        for provider in self.contenders:
            if provider.name == name:
                try:
                    offer = provider.offer(region, way)
                except Exception:  # it is asked again with the others, and then its reason is noted
                    return None
                return None if offer is None else (provider, offer)
        return None

    def reopen(self, contest: Contest) -> bool:
        """Lets the others take part in what was decided before. Whether there are ways that were not tried yet."""
        kept, contest.kept = contest.kept, None
        if kept is not None:
            start = time.perf_counter()
            contest.offers, contest.refused = self.offers(contest.region)
            self.seconds["generate"] += time.perf_counter() - start
            if contest.best is not None:  # what was measured before still counts
                contest.best = (kept.seconds, *contest.best[1:])
                contest.aten, contest.timed = kept.aten, kept.candidates[:]
        return bool(contest.left)

    def gain(self, contest: Contest) -> float:
        """Seconds that better ways might save: by which the first guess is slower than memory; NaN where none ran."""
        seconds = contest.estimate()
        at_best = 0.0 if self.products else contest.region.bytes / self.bandwidth
        return 0.0 if seconds <= NEAR * at_best else seconds - at_best

    def heavy(
        self, contests: Iterable[Contest], launches: Mapping[str, int], weight: Callable[[Contest], float]
    ) -> list[Contest]:
        """Those that make up most of a weight and may have ways left to try, the heaviest first."""
        taken = {c: launches[c.region.key] * w for c in contests if not math.isnan(w := weight(c))}
        share = math.inf if self.products else HEAVY * sum(taken.values())
        found, so_far = [], 0.0
        for place, contest in enumerate(sorted(taken, key=lambda c: -taken[c])):
            if so_far >= share and (place >= self.heaviest or not taken[contest]):
                break
            so_far += taken[contest]
            if contest.left if contest.kept is None else not contest.kept.whole:
                found.append(contest)
        return found

    def more(self, contest: Contest) -> list[Pair]:
        """What is tried next, where it is worth it."""
        begun = set(map(name_of, contest.tried))
        left = [pair for pair in contest.left if name_of(pair) not in begun]
        quick = [name_of(pair) for pair in left if not pair[0].slow and contest.is_likely(pair)][:MORE]
        return contest.written(p for p in left if self.products or p[0].slow or name_of(p) in quick)

    def try_more(self, heavy: Sequence[Contest]) -> None:
        """Tries other ways for what is heavy; what differs from a heavier one in sizes alone only the best of those."""
        left = [c for c in heavy if self.reopen(c)]
        groups = [[c] for c in left] if self.products else alike(left)
        for first, *_ in groups:
            first.tried, first.whole = self.more(first), True
        patience = math.inf if self.products else PATIENCE
        self.round([group[0] for group in groups if group[0].tried], patience)
        others = [(group[0].best_names(ALIKE), c) for group in groups for c in group[1:]]
        for names, contest in others:
            known = {t.name for t in contest.timed}
            contest.tried = contest.written(most_like([n for n in names if n not in known], contest.left))
            contest.whole = True
        self.round([c for _, c in others if c.tried], patience)

    def round(self, contests: Iterable[Contest], patience: float = math.inf) -> None:
        """Builds and measures what is to be tried now. Who compiles ahead is built region by region, as they are
        compiled, and so is ATen, which holds what it takes for constants; others at once, the slow ones for so many
        seconds."""
        clock, left = time.perf_counter, list(contests)
        count, (names, compiling) = len(left), self.ahead or (frozenset(), None)
        one_by_one = {"aten", *names}
        start = clock()
        begun = [self.begin(contest.tried) for contest in left]
        built = self.build([pair for c in left for pair in c.tried if pair[0].name not in one_by_one], True, patience)
        self.seconds["build"] += clock() - start
        while left:
            start = clock()
            number = 0 if compiling is None else compiling.first_done(begun)
            contest, _ = left.pop(number), begun.pop(number)
            own = self.build([pair for pair in (*contest.tried, *contest.waiting) if pair[0].name in one_by_one])
            self.seconds["build"] += clock() - start
            start = clock()
            self.attempt(contest, built | own)
            self.seconds["measure"] += clock() - start
            if self.progress is not None:
                self.progress("choosing kernels", count - len(left), count)

    # ---- compiling ahead ---------------------------------------------------------------------------------------------

    @cached_property
    def ahead(self) -> tuple[frozenset[str], Any] | None:
        """The providers whose kernels are compiled while others are measured, and what compiles them."""
        for provider in self.providers:
            try:
                make = getattr(provider.code, "ahead", None) if isinstance(provider, Generator) else None
                compiling = None if make is None else make()
            except (ImportError, OSError):  # whatever is in the way is said when kernels are built
                continue
            if compiling is not None:
                return frozenset(p.name for p in self.providers if provider.name in (p.name, p.compiled_by)), compiling
        return None

    def begin(self, pairs: Sequence[Pair], perhaps: bool = False) -> frozenset[str]:
        """Has kernels compiled that are built later, or that may be."""
        if self.ahead is None:
            return frozenset()
        names, compiling = self.ahead
        return compiling.add([offer.made for provider, offer in pairs if provider.name in names], perhaps)

    def expect(self, regions: Iterable[Region]) -> None:
        """Has kernels compiled, if there is time, for regions that may be asked for next."""
        unknown = {region.key: region for region in regions if region.key not in self.known}
        for region in unknown.values() if self.ahead is not None else ():
            contest = self.foreseen[self.store_key(region.key)] = self.contest(region)
            self.begin(contest.written(contest.first(self.measure, self.bandwidth)), perhaps=True)
        while len(self.foreseen) > FORESEEN:
            del self.foreseen[next(iter(self.foreseen))]

    def runs_alone(self, name: str) -> bool:
        """Whether somebody may run an op of that name in ATen's place, by the clock."""
        return any(name in p.alone for p in self.providers)

    def of_one_op(self, region: Region) -> Chosen | None:
        """Who runs an op that stands alone; None where that is yet to be decided. ATen where the clock never said
        otherwise and nothing is timed now."""
        if self.measure or region.key in self.known:
            return self.known.get(region.key)
        kept = None if self.store is None else self.store.get(self.store_key(region.key))
        if kept is None or kept.versions != self.versions:
            return Chosen("aten", "aten", None)
        self.decide([region])
        return self.known[region.key]

    def times(self, regions: Sequence[Region]) -> list[float]:
        """Measured seconds of regions, each by the best guess of the best of the providers, or with `products` by its
        best way; of a product alone, by the libraries; of an attention and what stands around it, by those who run it
        as one kernel: infinite where nobody does."""
        asked = [r for r in regions if not is_product(r) or self.runs_alone("step.contract")]
        self.decide(asked, whole=self.products)
        found = []
        for region in regions:
            chosen = self.known.get(region.key)
            if chosen is None:
                _, chosen = self.compared.get(self.store_key(region.key), (None, None))
            seconds = math.nan if chosen is None else chosen.seconds if self.products else chosen.guessed
            if chosen is not None and is_around_attention(region):
                found.append(chosen.own)
            else:
                found.append(seconds if math.isfinite(seconds) else self.op_by_op(region))
        return found

    def op_by_op(self, region: Region) -> float:
        """Measured seconds of a region by ATen's ops. They are kept as well: what is joined by the clock would differ
        from compile to compile."""
        key = f"op by op {region.key}"
        kept = None if self.store is None else self.store.get(key)
        if kept is not None:
            return kept.seconds
        inputs, run = neutral_inputs(region, False), op_by_op(region)
        with torch.no_grad():
            seconds = self.time(lambda: run(*inputs))
        if self.store is not None:
            self.store.put(key, Choice("aten:aten", seconds, [Timed("aten:aten", seconds)], about=about(region)))
        return seconds

    def offers(self, region: Region) -> tuple[list[Pair], dict[str, str]]:
        """All ways to run a region, and why some providers have none."""
        found: list[Pair] = []
        refused: dict[str, str] = {}
        left = self.left_to_others(region)
        for provider in self.contenders:
            try:
                why = provider.claims(region) or left.get(provider.name, "")
                made = [] if why else provider.offers(region)
                found += [(provider, offer) for offer in made if not self.lean or is_lean(offer, region)]
                why = why or ("" if any(p is provider for p, _ in found) else "it takes too much memory by the way")
            except Exception as error:  # one provider's failure is no reason to stop
                why = f"it failed: {first_line(error)}"
            if why:
                refused[provider.name] = why
                self.refuse(provider.name, why)
        return found, refused

    def left_to_others(self, region: Region) -> dict[str, str]:
        """Providers that do not compete for a wide product which another one runs: their kernels take long to compile,
        and were slower wherever that was measured."""
        why = 'kernels of another kind were faster wherever that was measured; tune="max" tries these too'
        return {} if self.products else {p.below: why for p in self.followers(region)}

    def refuse(self, provider: str, why: str) -> None:
        reasons = self.refusals.setdefault(provider, {})
        reasons[why] = reasons.get(why, 0) + 1

    @property
    def versions(self) -> dict[str, str]:
        """What the code of each provider is now, and that of what decides who is right."""
        return {p.name: p.version for p in self.providers} | {"(compare)": self.comparison}

    @cached_property
    def comparison(self) -> str:
        return version_of([Path(__file__).with_name(f"{name}.py") for name in ("compare", "made_up", "trial")])

    def store_key(self, region: str) -> str:
        return f"{region} {'+'.join(p.name for p in self.contenders)}" + (" lean" if self.lean else "")

    def build(self, pairs: Sequence[Pair], tell: bool = False, patience: float = math.inf) -> Built:
        """What runs offers, by their keys, or why nothing does. tell: reports progress. patience: seconds of a slow
        provider."""
        by_provider: dict[str, dict[str, Offer]] = {}
        for provider, offer in pairs:
            by_provider.setdefault(provider.name, {})[offer.key] = offer
        built: Built = {}
        for provider in self.providers:
            offers = list(by_provider.get(provider.name, {}).values())
            if not offers:
                continue
            report = None
            if self.progress is not None and tell:
                say, name = self.progress, provider.name

                def report(done: int, total: int, say=say, name=name) -> None:  # type: ignore[no-untyped-def]
                    say(f"building {name} kernels", done, total)

            try:
                if provider.slow and patience < math.inf:
                    built.update(build_for(patience, provider, offers, report))
                else:
                    built.update(provider.build(offers, report))
            except Exception as error:
                built.update({o.key: error for o in offers})
        return built

    # ---- one region --------------------------------------------------------------------------------------------------

    def attempt(self, contest: Contest, built: Built) -> None:
        """Tries what was built, and notes the best."""
        usable: list[Way] = []
        for provider, offer in (*contest.tried, *contest.waiting):
            made = built.get(offer.key, RuntimeError("it was not built"))
            if self.has_broken(provider, offer):
                made = RuntimeError("it has broken a process before")
            if isinstance(made, TimeIsUp):
                contest.refused[provider.name] = str(made)
                self.refuse(provider.name, str(made))
            elif isinstance(made, Exception):
                contest.timed.append(Timed(f"{provider.name}:{offer.name}", 0.0, f"{NOT_BUILT}{first_line(made)}"))
            else:
                usable.append((provider, offer, made))
        own = [u for u in usable if u[0].name != "aten"]
        if contest.kept is not None or not self.measure:
            contest.best = None
            for way in (usable if contest.kept is not None else own or usable)[:1]:
                contest.take(math.nan, way)
        elif not own:  # ATen alone is no contest: it is timed once there is somebody to compare with
            contest.waiting = [(provider, offer) for provider, offer, _ in usable]
        elif looks_up_what_it_computes(contest.region):
            contest.give_up("it looks up by numbers that it computes")
        elif self.device.type == "cpu" and contest.region.bytes > (memory_bytes() or math.inf):
            contest.give_up("out of memory")  # which a CPU does not tell in time
        else:
            ways = [*own, *(u for u in usable if u[0].name == "aten")]
            if self.device.type == "cuda":
                make_room(self.device)
            try:
                with watched(self.trials) as trying:
                    self.compare(contest, ways, trying)
            except torch.OutOfMemoryError:
                contest.give_up("out of memory")

    @torch.no_grad()
    def compare(self, contest: Contest, usable: Sequence[Way], trying: Callable[[str], None]) -> None:
        """Times every way whose result is right; ATen itself last, so that it is not timed long where it is slow.

        It has run before, for the wanted results: the call that is compared may be enough. The best is compared once
        more after all: a way may be right only the first time.
        """
        region, timed = contest.region, contest.timed
        contest.waiting = []
        try:
            trial = Trial(region, self.wait)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # what was made up for operands does not suit the ops
            contest.give_up(first_line(error))
            return
        spares, ran = self.spares(region, trial.inputs), list[tuple[float, Way]]()
        best = math.inf if contest.best is None else contest.best[0]
        for provider, offer, run in usable:
            scratch = [empty(s, self.device) for s in offer.scratch]
            turns = itertools.cycle([trial.tensors(scratch), *((*spare, *scratch) for spare in spares)])
            if provider.name == "aten" and self.is_not_waited_for(region, best):
                contest.pass_over(provider.name)
                self.refuse(provider.name, contest.refused[provider.name])
                continue
            trying(note_name(provider, offer))
            try:
                why, before = trial.judge(run, scratch)
                before = before if provider.name == "aten" else 0.0
                seconds = 0.0 if why else self.time(lambda: run(*next(turns)), best, before)  # noqa: B023
            except Exception as error:
                why, seconds = f"it crashed: {first_line(error)}", 0.0
                if not self.answers():
                    self.break_off(provider, offer, region, error)
            timed.append(Timed(f"{provider.name}:{offer.name}", seconds, why))
            if why:
                continue
            if provider.name == "aten":
                contest.aten = seconds = seconds * (MARGIN_OF_PRODUCTS if is_product(region) else MARGIN)
            best = min(best, seconds)
            ran.append((seconds, (provider, offer, run)))
        self.take_best(contest, ran, trial)
        if contest.best is not None and contest.guessed == math.inf:
            contest.guessed = contest.best[0]

    def take_best(self, contest: Contest, ran: list[tuple[float, Way]], trial: Trial) -> None:
        """The quickest whose results are still right after all the calls that were timed."""
        for seconds, way in sorted(ran, key=lambda pair: pair[0]):
            if contest.best is not None and contest.best[0] <= seconds:
                return
            provider, offer, run = way
            why = ""
            if provider.name != "aten":
                try:
                    why, _ = trial.judge(run, [empty(s, self.device) for s in offer.scratch])
                except Exception as error:
                    why = f"it crashed: {first_line(error)}"
                    if not self.answers():
                        self.break_off(provider, offer, contest.region, error)
            if not why:
                contest.take(seconds, way)
                return
            name = name_of((provider, offer))
            found = Timed(name, 0.0, f"right at first, but not after it was timed: {why}")
            contest.timed[:] = [found if t.name == name else t for t in contest.timed]

    def is_not_waited_for(self, region: Region, best: float) -> bool:
        """Whether ATen is not timed: its first call takes as long as all the others, and little could be won."""
        return starts_slowly(region) and not self.products and best < LITTLE * region.bytes / self.bandwidth

    def spares(self, region: Region, inputs: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
        """Other operands and results, which a kernel is timed on in turns: one that finds its tensors in a cache tells
        little of one that does not, as most do in a step."""
        if region.parts:  # (a batch has a table of where its tensors are, which a graph keeps)
            return []
        if self.device.type == "cpu":
            count = ROUND // region.bytes if region.bytes >= FROM_ON_CPU else 0
        elif is_product(region) or FROM <= region.bytes < UP_TO:
            count = SPARES if torch.cuda.mem_get_info(self.device)[0] > 8 * region.bytes else 0
        else:
            count = 0
        sets = [[empty(s, self.device) for s in region.specs] for _ in range(count)]
        for tensors in sets:
            for spare, own in zip(tensors, inputs, strict=False):
                spare.copy_(own)
        return sets

    def settle(self, contest: Contest) -> Chosen:
        """What was chosen in the end; a result of measuring is kept, unless a full disk had a say in it."""
        key, excluded = self.store_key(contest.region.key), [t for t in contest.timed if t.why]
        tried = contest.timed if contest.kept is None else contest.kept.candidates
        own = min((t.seconds for t in tried if not t.why and t.name != "aten:aten"), default=math.inf)
        full = next(filter(None, (lack_of_room(t.why) for t in excluded)), "")
        if full:
            say_not_built(None if self.store is None else self.store.folder, full)
        if contest.best is None:
            return Chosen("aten", "aten", None, excluded=excluded, own=own)
        seconds, (provider, offer), run = contest.best
        guessed = contest.estimate()
        found = Chosen(provider.name, offer.name, run, offer.scratch, seconds, contest.aten, excluded, own, guessed)
        if contest.kept is not None:
            found.seconds, found.aten = contest.kept.seconds, contest.kept.aten
            found.excluded += [t for t in contest.kept.candidates if t.why]
        elif self.store is not None and not math.isnan(seconds) and not full:
            whole = contest.whole or not contest.left
            kept = (contest.timed, contest.guessed, whole, self.versions, contest.refused)
            told = about(contest.region)
            self.store.put(key, Choice(f"{provider.name}:{offer.name}", seconds, *kept, about=told))
        return found

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def answers(self) -> bool:
        """Whether the device still does: after an illegal access no call of this process succeeds."""
        try:
            self.wait()
        except RuntimeError:
            return False
        return True

    @property
    def trials(self) -> Path | None:
        """Where a process that tries ways on a CPU leaves word for the next; None where that would not find it."""
        if self.device.type != "cpu" or self.store is None:
            return None
        root = self.store.objects.root
        return root if root.parent == self.store.folder else None

    @cached_property
    def notes(self) -> Objects | None:
        """Where ways that have ended a process are noted, with what processes before this one have left."""
        if self.trials is not None and self.objects is not None:
            collect(self.trials, self.objects)
        return self.objects

    def has_broken(self, provider: Provider, offer: Offer) -> bool:
        """Whether this way has ended a process."""
        return self.notes is not None and self.notes.read(BROKEN, note_name(provider, offer)) is not None

    def break_off(self, provider: Provider, offer: Offer, region: Region, error: Exception) -> NoReturn:
        """Notes a way after which the device answers nothing, so that the next process does without it."""
        way, what = f"{provider.name}:{offer.name}", ", ".join(dict.fromkeys(op.name for op in region.ops))
        then = 'Try: providers=["aten"]'
        if self.objects is not None:
            self.objects.write(BROKEN, note_name(provider, offer), way.encode())
            then = "It is noted and not tried again on this machine: start the program once more"
        told = f"a kernel that was tried for {what} ({way}) broke the device for this process: {first_line(error)}"
        raise WholestepError(f"{told}.\n{then}") from error

    def time(self, call: Callable[[], object], to_beat: float = math.inf, before: float = 0.0) -> float:
        """Seconds of one call. before: those that it took on a CPU when it was called last."""
        if self.stream is None:
            return on_cpu(call, to_beat, before)
        return on_gpu(call, self.device, to_beat, self.stream)

    @cached_property
    def stream(self) -> torch.cuda.Stream | None:
        """Where a GPU is timed: one for all, since memory that ops take is kept per stream."""
        return torch.cuda.Stream(self.device) if self.device.type == "cuda" else None


def choices_for(
    device: torch.device, providers: list[Provider], measure: bool | str = True, store: Store | None = None
) -> Choices:
    """A chooser for one device with the store of this machine. Where that is empty, compilers are started now."""
    kept = store or Store(fingerprint(device))
    choices = Choices(device, providers, kept, bool(measure), measure == "max")
    if device.type == "cuda":
        known = find_description(torch.cuda.get_device_name(device))
        choices.heaviest = HEAVIEST
        choices.bandwidth = known.bandwidth if known is not None and known.kind == "cuda" else math.inf
    if measure and choices.ahead is not None and kept.is_empty():
        choices.ahead[1].start()
    return choices
