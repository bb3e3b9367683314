"""One region that something is chosen for (`choose.py`): what is offered, what was tried, and what ways are alike."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher

from ..ir.core import Op
from ..transforms.attention_sides import ATTENTION
from ..transforms.regions import form_of
from .compare import first_line
from .providers import Generator, Launcher, Offer, Provider, Region
from .store import Choice, Timed

Pair = tuple[Provider, Offer]
Built = dict[str, Launcher | Exception]
Way = tuple[Provider, Offer, Launcher]
#: bytes beside its tensors that any way may take
SOME_BYTES = 1024
#: how the reason begins why a way was not tried
NOT_BUILT = "not built: "


class TimeIsUp(Exception):
    """A way was not built: its provider builds slowly, and had its time."""


@dataclass(slots=True, eq=False)
class Contest:
    """A region that something is to be chosen for: what is offered, what was tried, and the best so far."""

    region: Region
    offers: list[Pair]
    #: the result of an earlier measurement, whose winner is then the only offer
    kept: Choice | None
    #: what is to be tried now
    tried: list[Pair] = field(default_factory=list)
    #: ATen, where nobody else could be built so far
    waiting: list[Pair] = field(default_factory=list)
    timed: list[Timed] = field(default_factory=list)
    #: its seconds, whose it is and what runs it; None for ATen (`take`)
    best: tuple[float, Pair, Launcher | None] | None = None
    aten: float = math.nan
    #: why providers take no part
    refused: dict[str, str] = field(default_factory=dict)
    #: seconds of the best of what was tried first
    guessed: float = math.inf
    #: whether all that is worth it was tried
    whole: bool = False

    def estimate(self) -> float:
        """Seconds by which regions are compared: those of first guesses, so that trying more of one changes nothing
        for the others when the same program is compiled again. NaN where nothing ran."""
        return math.nan if self.best is None else self.guessed

    def best_names(self, count: int) -> list[str]:
        """The names of the quickest ways, ATen's apart."""
        ran = sorted((t for t in self.timed if not t.why and t.name != "aten:aten"), key=lambda t: t.seconds)
        return [t.name for t in ran[:count]]

    def first(self, measured: bool, bandwidth: float = math.inf) -> list[Pair]:
        """The winner of before, else the best guess of every provider, or all it has; where nothing is measured, one
        guess: of the provider that expects to be quickest."""
        if self.kept is not None:
            return self.offers
        guesses: dict[str, Pair] = {}
        quick = [pair for pair in self.offers if not pair[0].slow]
        for pair in quick if any(pair[0].name != "aten" for pair in quick) else self.offers:
            guesses.setdefault(name_of(pair) if pair[0].at_once(self.region) else pair[0].name, pair)
        own = [pair for name, pair in guesses.items() if name != "aten"]
        if measured or not own:
            return list(guesses.values())
        return [min(own, key=lambda pair: pair[0].estimate(self.region, bandwidth))]

    def written(self, pairs: Iterable[Pair]) -> list[Pair]:
        """Those of some ways that can be written, and are so from now on; why another cannot be is noted."""
        found = []
        for pair in pairs:
            try:
                _ = pair[1].key
                found.append(pair)
            except Exception as error:  # the others may do
                self.timed.append(Timed(name_of(pair), 0.0, f"{NOT_BUILT}{first_line(error)}"))
        return found

    @property
    def left(self) -> list[Pair]:
        """What was not tried yet."""
        known = {t.name for t in self.timed} | set(map(name_of, self.waiting))
        return [pair for pair in self.offers if name_of(pair) not in known]

    def is_likely(self, pair: Pair) -> bool:
        """Whether a way may be the best, by what its provider says. For a product alone libraries have many ways, and
        of kernels that are generated from loops the best guess is enough."""
        provider, offer = pair
        libraries = is_product(self.region) and any("step.contract" in p.alone for p, _ in self.offers)
        return offer.likely and not (libraries and isinstance(provider, Generator))

    @property
    def fails(self) -> bool:
        """Whether nothing that was tried could be taken instead of ATen."""
        return self.best is None or (self.kept is None and self.best[1][0].name == "aten" and all(
            t.why for t in self.timed if t.name != "aten:aten"
        ))  # fmt: skip

    def take(self, seconds: float, way: Way) -> None:
        """Makes a way the best. What runs ATen's is not kept: its ops go back into the plan, and constants that it
        holds may be as large as results."""
        provider, offer, run = way
        self.best = seconds, (provider, offer), None if provider.name == "aten" else run

    def pass_over(self, provider: str) -> None:
        """Leaves a provider out: its first call takes long, and what runs already is near the speed of memory."""
        self.offers = [pair for pair in self.offers if pair[0].name != provider]
        self.refused[provider] = "its first call takes long, and another runs near the speed of memory"

    def give_up(self, why: str) -> None:
        """Leaves the region to ATen."""
        self.timed.append(Timed("all", 0.0, f"not timed: {why}"))
        self.offers, self.best = [], None


def build_for(
    patience: float, provider: Provider, offers: Sequence[Offer], report: Callable[[int, int], None] | None
) -> Built:
    """What a provider builds of offers in so many seconds; no offer waits for one behind it."""
    built, start = Built(), time.perf_counter()
    for done, offer in enumerate(offers, 1):
        if time.perf_counter() - start < patience:
            built.update(provider.build([offer]))
        else:
            built[offer.key] = TimeIsUp(f'it builds slowly, and the {patience:g} s for that were up: tune="max" waits')
        if report is not None:
            report(done, len(offers))
    return built


def is_lean(offer: Offer, region: Region) -> bool:
    """Whether a way takes little memory beside the tensors of its region."""
    return sum(spec.bytes for spec in offer.scratch) <= max(SOME_BYTES, region.bytes // 8)


def name_of(pair: Pair) -> str:
    provider, offer = pair
    return f"{provider.name}:{offer.name}"


def alike(contests: Iterable[Contest]) -> list[list[Contest]]:
    """Regions that differ in sizes alone, in the order that they come in."""
    found: dict[tuple[object, ...], list[Contest]] = {}
    for contest in contests:
        region = contest.region
        laid = tuple([tuple(sorted(range(len(s.shape)), key=lambda d, s=s: -s.strides[d])) for s in region.specs])  # type: ignore[misc]
        apart = contest if region.parts else None  # (a batch is like no other)
        found.setdefault((form_of(region.ops)[0], laid, apart), []).append(contest)
    return list(found.values())


def most_like(names: Sequence[str], pairs: Sequence[Pair]) -> list[Pair]:
    """For each of some names the way that is called most alike: where sizes differ, numbers in names may."""
    found: dict[str, Pair] = {}
    for name in names:
        own = SequenceMatcher(None, b=words(name))
        ratios = []
        for pair in pairs:
            own.set_seq1(words(name_of(pair)))
            ratios.append(own.ratio())
        if ratios:
            best = pairs[ratios.index(max(ratios))]
            found[name_of(best)] = best
    return list(found.values())


def words(name: str) -> list[str]:
    return re.findall(r"\d+|[^\d\s]+", name)


def is_product(region: Region) -> bool:
    """Whether a region is a product and nothing else: a library writes its result in place, without a copy."""
    work = work_of(region)
    return len(work) == 1 and work[0].name == "step.contract"


def is_around_attention(region: Region) -> bool:
    """Whether a region is an attention and something else."""
    work = work_of(region)
    return len(work) > 1 and any(op.name in ATTENTION for op in work)


def work_of(region: Region) -> list[Op]:
    """The ops of a region that compute something."""
    return [op for op in region.ops if op.operands and not getattr(op.definition, "views", False)]
