"""Which ways are tried for a region (`contest.py`, `choose.py`): the best guesses, then others where it is worth it."""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.backends.test_choose import CPU, Aped, SlowAten, nothing_written, region
from wholestep.backends import choose, contest, providers
from wholestep.backends.choose import Choices
from wholestep.backends.contest import Contest
from wholestep.backends.made_up import neutral_inputs
from wholestep.backends.providers import Aten, Launcher, Offer, Progress, Region, copying, op_by_op
from wholestep.backends.store import Store
from wholestep.backends.trial import empty


class Several(Aped):
    """Three ways to run a region, the best guess first; `tried` has those that were built, per number of rows."""

    name = "several"

    def __init__(self, first: Any = None):
        self.tried: dict[int, list[str]] = {}
        self.first_way = first
        self.waits = dict.fromkeys(("first", "second", "third"), 0.0)

    def offers(self, region: Region) -> list[Offer]:
        return [Offer(n, f"{self.name} {n} {region.key}", made=(n, region)) for n in self.waits]

    def build(self, offers: Sequence[Offer], report: Progress | None = None) -> dict[str, Launcher | Exception]:
        found: dict[str, Launcher | Exception] = {}
        for offer in offers:
            way, region = offer.made
            self.tried.setdefault(region.operands[0].shape[0], []).append(way)
            made = self.first_way if way == "first" and self.first_way else self.launcher(region)
            found[offer.key] = self.waiting(made, self.waits[way]) if self.waits[way] else made
        return found

    def waiting(self, made: Any, seconds: float) -> Launcher:
        return lambda *tensors: (time.sleep(seconds), made(*tensors))[1]


def test_other_ways_are_tried_for_what_takes_most_of_the_time() -> None:
    provider, waits = Several(), {8: 20e-3, 16: 0.0}

    def launcher(region: Region) -> Launcher:
        true = copying(op_by_op(region), 2)
        return lambda *tensors: (time.sleep(waits[tensors[0].shape[0]]), true(*tensors))[1]

    provider.launcher = launcher  # type: ignore[method-assign]
    Choices(CPU, [provider]).decide([region(8), region(16)])
    assert provider.tried == {8: ["first", "second", "third"], 16: ["first"]}
    both = Several()
    both.launcher = launcher  # type: ignore[method-assign]
    Choices(CPU, [both], heaviest=2).decide([region(8), region(16)])
    assert both.tried[8] == ["first", "second", "third"] and len(both.tried[16]) > 1
    everything = Several()
    Choices(CPU, [everything], products=True).decide([region(8), region(16)])
    assert everything.tried == {8: ["first", "second", "third"], 16: ["first", "second", "third"]}


def test_regions_are_compared_by_best_guesses_and_the_rest_is_tried_once_they_are_decided(tmp_path: Path) -> None:
    """Whether this is the first compile or the second, so that both join the same."""
    provider = Several()
    provider.waits |= {"first": 4e-3, "second": 1e-3, "third": 2e-3}
    choices = Choices(CPU, [provider], Store("machine", tmp_path))
    (guessed,) = choices.times([region(8)])
    assert provider.tried == {8: ["first"]} and guessed > 3.9e-3 and not choices.known
    assert choices.times([region(8)]) == [guessed] and provider.tried == {8: ["first"]}
    choices.decide([region(8)])
    assert provider.tried == {8: ["first", "second", "third"]} and not choices.compared
    chosen = choices.known[region(8).key]
    assert chosen.offer == "second" and chosen.seconds < chosen.guessed == guessed
    assert choices.times([region(8)]) == [guessed] == Choices(CPU, [provider], choices.store).times([region(8)])


def test_what_runs_aten_is_there_for_one_region_at_a_time_and_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """It holds constants, which may be as large as results."""
    real, alive, most = torch.full, weakref.WeakSet[torch.Tensor](), 0

    def full(*arguments: Any, **named: Any) -> torch.Tensor:
        nonlocal most
        alive.add(made := real(*arguments, **named))
        most = max(most, len(alive))
        return made

    monkeypatch.setattr(torch, "full", full)
    slow = Several(lambda *tensors: (time.sleep(4e-3), torch.mul(*tensors[:2], out=tensors[2]).add_(0.5))[1])
    choices = Choices(CPU, [Aten(), slow])
    regions = [
        region(rows, lambda b, x, y: b.add(b.constant(value=0.5, type=x.type), b.mul(x, y))) for rows in (8, 16, 24)
    ]
    choices.times(regions)
    assert [chosen.provider for _, chosen in choices.compared.values()] == ["aten"] * 3
    assert 0 < most <= 2 and not alive  # (ATen says what is right, and takes part)


def test_who_tries_everything_compares_by_the_best_way() -> None:
    provider = Several()
    provider.waits |= {"first": 4e-3, "second": 1e-3, "third": 2e-3}
    choices = Choices(CPU, [provider], products=True)
    (seconds,) = choices.times([region(8)])
    assert provider.tried == {8: ["first", "second", "third"]} and seconds < 2e-3
    assert choices.known[region(8).key].seconds == seconds and not choices.compared


def test_what_was_compared_with_aten_is_no_answer_without_it() -> None:
    provider = Several()
    choices = Choices(CPU, [SlowAten(), provider])
    choices.times([region(8)])
    choices.decide([region(8)], aten=False)
    assert provider.tried[8].count("first") == 2 and choices.known[region(8).key].provider == "several"


def test_who_is_slow_to_build_is_tried_only_there() -> None:
    quick, slow, waits = Several(), Several(), {8: 20e-3, 16: 0.0}
    slow.name, slow.slow = "late", True  # type: ignore[misc]

    def launcher(region: Region) -> Launcher:
        true = copying(op_by_op(region), 2)
        return lambda *tensors: (time.sleep(waits[tensors[0].shape[0]]), true(*tensors))[1]

    quick.launcher = launcher  # type: ignore[method-assign]
    chosen = Choices(CPU, [quick, slow])
    chosen.decide([region(8), region(16)])
    assert quick.tried[16] == ["first"] and list(slow.tried) == [8]
    assert chosen.known[region(8).key].provider == "late"
    alone = Several()
    alone.slow = True  # type: ignore[misc]
    Choices(CPU, [alone]).decide([region(16)])
    assert alone.tried[16][0] == "first"


@pytest.mark.parametrize("products", [False, True])
def test_who_is_slow_to_build_has_its_time(products: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose, "PATIENCE", 0.0)
    quick, slow = Several(), Several()
    slow.name, slow.slow = "late", True  # type: ignore[misc]
    quick.waits = dict.fromkeys(quick.waits, 5e-3)
    chosen = Choices(CPU, [quick, slow], products=products)
    chosen.decide([region(8)])
    assert bool(slow.tried) is products
    assert chosen.known[region(8).key].provider == ("late" if products else "several")
    assert not chosen.known[region(8).key].excluded
    assert any("tune=" in why for why in chosen.refusals.get("late", {})) is not products


def test_what_was_light_is_tried_in_every_way_where_it_is_heavy(tmp_path: Path) -> None:
    def decide(provider: Several, *rows: int) -> None:
        waits = {8: 20e-3, 16: 2e-3}

        def launcher(region: Region) -> Launcher:
            true = copying(op_by_op(region), 2)
            return lambda *tensors: (time.sleep(waits[tensors[0].shape[0]]), true(*tensors))[1]

        provider.launcher = launcher  # type: ignore[method-assign]
        choices = Choices(CPU, [provider], Store("machine", tmp_path))
        choices.decide([region(n) for n in rows])

    decide(first := Several(), 8, 16)
    assert first.tried == {8: ["first", "second", "third"], 16: ["first"]}
    decide(again := Several(), 8, 16)
    assert {rows: len(tried) for rows, tried in again.tried.items()} == {8: 1, 16: 1}  # only the winners
    decide(alone := Several(), 16)
    assert sorted(alone.tried[16]) == ["first", "second", "third"]
    decide(last := Several(), 16)
    assert len(last.tried[16]) == 1


def test_of_regions_that_differ_in_sizes_one_is_tried_in_every_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose, "HEAVY", 1.0)
    provider = Several()
    provider.waits = {"first": 30e-3, "second": 1e-3, "third": 10e-3, "fourth": 30e-3}
    Choices(CPU, [provider]).decide([region(16), region(16), region(8)])
    assert provider.tried[16] == [*provider.waits]
    assert provider.tried[8][:2] == ["first", "second"] and len(provider.tried[8]) == 3  # (with the best two)
    other = Several()
    other.waits = provider.waits
    Choices(CPU, [other]).decide([region(16), region(16), region(8, lambda b, x, y: b.add(x, y))])
    assert other.tried == {16: [*provider.waits], 8: [*provider.waits]}


class Written(Several):
    """Its ways are written when they are tried, which the second cannot be; `wrote` has the others, by their rows."""

    def __init__(self) -> None:
        super().__init__()
        self.wrote: dict[int, list[str]] = {}
        self.waits = dict.fromkeys(("first", "second", "third", "fourth", "fifth", "sixth"), 5e-3)

    def offers(self, region: Region) -> list[Offer]:
        return [providers.Unwritten(Draft(self, name, region)) for name in self.waits]


class Draft:
    """What `Written` offers: a name, and a key that is there once it is written."""

    likely, scratch = True, ()

    def __init__(self, provider: Written, name: str, region: Region):
        self.provider, self.name, self.region = provider, name, region

    def __iter__(self) -> Any:
        return iter((self.name, self.region))

    @property
    def key(self) -> str:
        if self.name == "second":
            raise ValueError("it has no text")
        wrote = self.provider.wrote.setdefault(self.region.operands[0].shape[0], [])
        if self.name not in wrote:
            wrote.append(self.name)
        return f"{self.name} {self.region.key}"


def test_ways_are_written_when_they_are_tried() -> None:
    provider = Written()
    choices = Choices(CPU, [provider])
    choices.decide([region(16)])
    assert provider.wrote[16] == provider.tried[16] == ["first", "third", "fourth"]  # (three more, one of which failed)
    assert [(t.name, t.why) for t in choices.known[region(16).key].excluded] == [
        ("several:second", "not built: ValueError: it has no text")
    ]


class Doubtful(Several):
    """Its second way can hardly be the best."""

    def offers(self, region: Region) -> list[Offer]:
        return [replace(offer, likely=offer.name != "second") for offer in super().offers(region)]


def test_what_can_hardly_be_the_best_is_tried_where_nothing_else_works() -> None:
    def tried(provider: Several, **options: Any) -> list[str]:
        provider.waits = dict.fromkeys(provider.waits, 5e-3)
        Choices(CPU, [provider], **options).decide([region(8)])
        return provider.tried[8]

    assert tried(Doubtful()) == ["first", "third"]
    assert tried(Doubtful(), products=True) == ["first", "second", "third"]
    assert tried(Doubtful(nothing_written)) == ["first", "second", "third"]


def test_of_a_product_alone_what_is_generated_is_tried_once_beside_libraries() -> None:
    product = region(build=lambda b, x, y: b.contract(x, y, spec="ik,jk->ij"))
    triton, cublas = providers.Triton(), providers.Cublas()
    own, theirs = ((p, Offer(name, name)) for p, name in ((triton, "dot"), (cublas, "algorithm")))
    assert not Contest(product, [own, theirs], None).is_likely(own)
    assert Contest(product, [own, theirs], None).is_likely(theirs)
    assert Contest(product, [own], None).is_likely(own)
    assert Contest(region(), [own, theirs], None).is_likely(own)


def test_ways_are_alike_by_their_names() -> None:
    aten, names = Aten(), ["dot 64x64x64 s4 w4", "dot 64x128x256 by264 s2 w8", "dot 128x128x64 by132 s3 w4"]
    pairs = [(aten, Offer(name, name)) for name in names]
    found = contest.most_like(["aten:dot 64x128x128 by132 s2 w8", "aten:dot 64x32x64 s4 w4"], pairs)
    assert [offer.name for _, offer in found] == [names[1], names[0]]
    assert contest.most_like(["aten:dot"], []) == []


def test_what_runs_as_fast_as_memory_is_left_at_its_first_guess(tmp_path: Path) -> None:
    def decide(bandwidth: float) -> Several:
        provider = Several()
        store = Store(str(bandwidth), tmp_path)
        choices = Choices(CPU, [provider], store, bandwidth=bandwidth)
        choices.decide([wanted])
        kept = store.get(choices.store_key(wanted.key))
        assert kept is not None and kept.whole  # nothing else is worth trying, so the next compile does not either
        return provider

    wanted = region(8)
    assert decide(1.0).tried == {8: ["first"]}  # (in a second one byte moves)
    assert decide(1e30).tried == {8: ["first", "second", "third"]}


def test_who_takes_long_to_start_is_not_timed_where_little_could_be_won(monkeypatch: pytest.MonkeyPatch) -> None:
    def decide(bandwidth: float, products: bool = False) -> Choices:
        choices = Choices(CPU, [Aten(), Aped()], None, products=products, bandwidth=bandwidth)
        choices.decide([wanted])
        return choices

    wanted = region(8)
    monkeypatch.setattr(choose, "starts_slowly", lambda region: True)
    passed_over = decide(1.0)  # (in a second one byte moves: whatever runs is near that)
    assert passed_over.known[wanted.key].provider == "aped"
    assert "first call takes long" in " ".join(passed_over.refusals["aten"])
    assert math.isnan(passed_over.known[wanted.key].aten)
    for timed in (decide(1e30), decide(1.0, products=True)):
        assert "aten" not in timed.refusals and timed.known[wanted.key].aten > 0
    memory = wanted.bytes / 1e9
    assert [Choices(CPU, [], bandwidth=1e9).is_not_waited_for(wanted, n * memory) for n in (7, 9)] == [True, False]


class Compiling:
    """Compiles what was added last first, and notes what it is told."""

    def __init__(self) -> None:
        self.log: list[Any] = []

    def start(self) -> None:
        self.log.append("start")

    def add(self, offered: Sequence[Any], perhaps: bool = False) -> frozenset[str]:
        self.log.append((tuple(f"{name} {region.operands[0].shape[0]}" for name, region in offered), perhaps))
        return frozenset()

    def first_done(self, begun: Sequence[frozenset[str]]) -> int:
        return len(begun) - 1

    def drop(self) -> None:
        self.log.append("drop")


def test_regions_are_measured_as_they_are_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Generating(Several, providers.Generator):
        name = "several"
        package, version = "none", ""
        code = type("Code", (), {})()  # type: ignore[assignment]
        offers, build = Several.offers, Several.build

    compiling, order = Compiling(), []
    Generating.code.ahead = lambda: compiling
    true = Choices.attempt
    monkeypatch.setattr(
        Choices, "attempt", lambda self, c, b: order.append(c.region.operands[0].shape[0]) or true(self, c, b)
    )
    choices = choose.choices_for(CPU, [Generating()], True, Store("machine", tmp_path))
    choices.expected = [region(32), region(8)]
    choices.decide([region(8), region(16)])
    assert order[:2] == [16, 8]  # what is compiled first
    assert compiling.log[:3] == ["start", (("first 8",), False), (("first 16",), False)]
    assert (("second 16", "third 16"), True) in compiling.log  # what may be tried later, behind what is waited for
    assert compiling.log.index((("first 32",), True)) > compiling.log.index((("second 16", "third 16"), True))
    assert compiling.log[-1] == "drop" and not choices.expected
    choices.expect([region(8), region(64)])  # of what is known nothing is compiled
    assert compiling.log[-1] == (("first 64",), True) and compiling.log[-2] == "drop"
    assert len(choices.foreseen) == 2
    monkeypatch.setattr(Generating, "offers", lambda self, region: [])  # they were offered already
    choices.decide([region(64)])
    assert choices.known[region(64).key].provider == "several" and len(choices.foreseen) == 1
    monkeypatch.setattr(choose, "FORESEEN", 0)
    choices.expect([region(128)])
    assert not choices.foreseen
    choose.choices_for(CPU, [Generating()], True, Store("machine", tmp_path))
    assert compiling.log.count("start") == 1  # what was measured before needs no compiler


@pytest.mark.parametrize("bad", [ValueError("no registers"), nothing_written(None)])  # type: ignore[arg-type]
def test_where_the_best_guess_is_no_use_the_others_are_tried(bad: Any) -> None:
    provider = Several(bad)
    choices = Choices(CPU, [SlowAten(), provider])
    small, large = region(8), region(16)
    choices.decide([small, large, large])
    assert provider.tried[8] == provider.tried[16] == ["first", "second", "third"]
    for wanted in (small, large):
        chosen = choices.known[wanted.key]
        assert (chosen.provider, chosen.offer in ("second", "third")) == ("several", True)
        assert [t.name for t in chosen.excluded] == ["several:first"]


def test_without_measuring_one_way_is_built() -> None:
    provider = Several()
    Choices(CPU, [Aten(), provider], measure=False).decide([region(8)])
    assert provider.tried == {8: ["first"]}


def test_a_way_that_is_clearly_slower_is_called_twice() -> None:
    calls: list[int] = []

    def slow() -> None:
        calls.append(1)
        time.sleep(3e-3)

    assert Choices(CPU, []).time(slow, 1e-4) > 3e-3 and len(calls) == 2
    calls.clear()
    assert Choices(CPU, []).time(slow) > 3e-3 and len(calls) > 3


def test_tensors_of_some_size_are_timed_in_turns_but_not_those_of_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch keeps a table of where its tensors are: others would be new to it while a graph is captured."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 50, 1 << 50))
    monkeypatch.setattr(choose, "empty", lambda spec, device: empty(spec, CPU))
    wanted = region(64)
    monkeypatch.setattr(choose, "FROM", wanted.bytes)
    choices, inputs = Choices(torch.device("cuda"), []), neutral_inputs(wanted, False)
    sets = choices.spares(wanted, inputs)
    assert len(sets) == choose.SPARES and all(torch.equal(s[0], inputs[0]) for s in sets)
    assert sets[0][0].data_ptr() != inputs[0].data_ptr()
    assert choices.spares(replace(wanted, parts=(wanted, wanted)), inputs) == []
    assert choices.spares(region(32), inputs) == [] == Choices(CPU, []).spares(wanted, inputs)
    monkeypatch.setattr(choose, "FROM_ON_CPU", wanted.bytes)  # there as many as come to so much
    monkeypatch.setattr(choose, "ROUND", 5 * wanted.bytes)
    assert len(Choices(CPU, []).spares(wanted, inputs)) == 5 and Choices(CPU, []).spares(region(32), inputs) == []
