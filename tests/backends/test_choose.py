"""Choosing who runs a region: what is wrong is excluded with its reason, what is slower loses, what was timed is kept.

Providers here are made of ATen's own kernels with something done to them.
"""

from __future__ import annotations

import errno
import os
import sqlite3
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import wholestep as ws
from tests import warm
from tests.dialects.loop.provider import LoopReference, registered
from tests.runtime.runs import adamw, data, fresh
from wholestep.backends import choose, providers
from wholestep.backends.choose import Choices
from wholestep.backends.generated import region_of
from wholestep.backends.kernels import Spec
from wholestep.backends.providers import (
    Aten,
    Cpp,
    Launcher,
    Offer,
    Progress,
    Provider,
    Region,
    Triton,
    copying,
    op_by_op,
)
from wholestep.backends.store import DATABASE, Choice, Store
from wholestep.dialects.step import StepBuilder, tensor_type
from wholestep.dialects.strides import row_major
from wholestep.errors import WholestepError
from wholestep.ir import add_function, finish_function, module
from wholestep.plan import planner
from wholestep.transforms.loops import lowered

CPU = torch.device("cpu")


def region(rows: int = 8, build: Any = None, dtype: torch.dtype = torch.float32) -> Region:
    x = torch.zeros(rows, 4, dtype=dtype)
    function = add_function(module(), "region", [tensor_type(x), tensor_type(x)])
    b = StepBuilder(function.regions[0].block)
    made = (build or (lambda b, x, y: b.mul(b.tanh(x), y)))(b, *function.regions[0].block.arguments)
    finish_function(function, made if isinstance(made, list) else [made])
    spec = Spec((rows, 4), row_major((rows, 4)), dtype)
    return region_of(function, lowered(function), [spec, spec], CPU)


class Aped(Provider):
    """ATen's result, and then whatever a subclass does to it."""

    name = "aped"
    devices = ("cpu",)
    built: int = 0

    def claims(self, region: Region) -> str:
        return ""

    def offers(self, region: Region) -> list[Offer]:
        return [Offer("one", f"{self.name} {region.key}", made=region)]

    def build(self, offers: Sequence[Offer], report: Progress | None = None) -> dict[str, Launcher | Exception]:
        type(self).built += len(offers)
        return {o.key: self.launcher(o.made) for o in offers}

    def launcher(self, region: Region) -> Launcher | Exception:
        true, count = copying(op_by_op(region), len(region.operands)), len(region.operands)

        def run(*tensors: torch.Tensor) -> None:
            true(*tensors[: count + len(region.results)])
            self.spoil(tensors[count : count + len(region.results)])

        return run

    def spoil(self, results: Sequence[torch.Tensor]) -> None:
        return


def spoiling(what: Callable[[Sequence[torch.Tensor]], object]) -> type[Aped]:
    class Spoiling(Aped):
        def spoil(self, results: Sequence[torch.Tensor]) -> None:
            what(results)

    return Spoiling


def raising(error: BaseException) -> Callable[..., Any]:
    def run(*args: Any, **named: Any) -> Any:
        raise error

    return run


def one_off(results: Sequence[torch.Tensor]) -> None:
    results[0].view(-1)[3] += 0.5


def nothing_written(region: Region) -> Launcher:
    return lambda *tensors: None


def spends_an_operand(self: Aped, region: Region) -> Launcher:
    true = copying(op_by_op(region), len(region.operands))

    def run(*tensors: torch.Tensor) -> None:
        true(*tensors)
        tensors[0].view(-1)[5] = 9.0

    return run


def right_once(self: Aped, region: Region) -> Launcher:
    true, calls = copying(op_by_op(region), len(region.operands)), list[int]()

    def run(*tensors: torch.Tensor) -> None:
        true(*tensors)
        calls.append(1)
        tensors[-1].add_(float(len(calls) > 1))

    return run


BAD: dict[str, tuple[Any, str]] = {
    "one element": (spoiling(one_off), "wrong: result 0"),
    "all elements a little": (spoiling(lambda r: r[0].mul_(1.01)), "wrong: result 0"),
    "nan": (spoiling(lambda r: r[0].view(-1)[0].fill_(float("nan"))), "finite at other places"),
    "crash": (spoiling(raising(RuntimeError("illegal address\nand more"))), "crashed: RuntimeError: illegal address"),
    "out of memory": (spoiling(raising(torch.OutOfMemoryError("no 3 GiB"))), "it crashed: OutOfMemoryError: no 3 GiB"),
    "says nothing": (spoiling(raising(KeyError())), "it crashed: KeyError"),
    "not written": (type("Lazy", (Aped,), {"launcher": lambda self, r: nothing_written(r)}), "finite at other places"),
    "writes an operand": (type("Spends", (Aped,), {"launcher": spends_an_operand}), "it writes over its operands"),
    "build raises": (type("NoBuild", (Aped,), {"build": raising(ValueError("no compiler"))}), "not built: ValueError"),
    "build fails": (type("Failed", (Aped,), {"launcher": lambda self, r: ValueError("ptxas")}), "ValueError: ptxas"),
    "build forgets": (type("Forgets", (Aped,), {"build": lambda self, o, report=None: {}}), "it was not built"),
}  # fmt: skip


@pytest.mark.parametrize("how", BAD)
def test_a_bad_way_is_excluded_with_its_reason(how: str) -> None:
    cls, why = BAD[how]
    choices = Choices(CPU, [Aten(), cls()])
    wanted = region()
    choices.decide([wanted])
    chosen = choices.known[wanted.key]
    assert (chosen.provider, chosen.run) == ("aten", None)
    assert [(t.name, why in t.why) for t in chosen.excluded] == [("aped:one", True)], chosen.excluded


def test_who_spends_operands_spoils_no_other_trial() -> None:
    """A slower way that is right is tried after it, and taken for lack of ATen's."""
    bad = type("Spends", (Aped,), {"launcher": spends_an_operand, "name": "bad"})
    choices, wanted = Choices(CPU, [bad(), Aped()]), region()
    choices.decide([wanted])
    assert choices.known[wanted.key].provider == "aped"


def test_a_way_that_is_right_only_the_first_time_is_not_taken() -> None:
    once = type("Once", (Aped,), {"launcher": right_once, "name": "once"})
    choices, wanted = Choices(CPU, [once(), spoiling(lambda results: time.sleep(0.001))()]), region()
    choices.decide([wanted])
    chosen = choices.known[wanted.key]
    assert chosen.provider == "aped" and [t.name for t in chosen.excluded] == ["once:one"]
    assert chosen.excluded[0].why.startswith("right at first, but not after it was timed: wrong: result 0")


def test_without_measuring_the_one_who_expects_to_be_quickest_is_taken() -> None:
    quick = type("Quick", (Aped,), {"name": "quick", "estimate": lambda self, region, bandwidth: 1e-9})
    for given in ([Aped(), quick()], [quick(), Aped()]):
        choices, wanted = Choices(CPU, [Aten(), *given], measure=False, bandwidth=1e9), region()
        choices.decide([wanted])
        assert choices.known[wanted.key].provider == "quick"


def test_a_compiler_that_builds_nothing_is_one_warning() -> None:
    failed = type("Failed", (Aped,), {"launcher": lambda self, r: ValueError("ld: not found")})
    choices = Choices(CPU, [Aten(), failed()])
    with pytest.warns(
        UserWarning, match=r"none of 3 kernels by aped could be built.*\(ValueError: ld: not found\)"
    ) as said:
        choices.decide([region(n) for n in (8, 16, 24)])
        choices.decide([region(n) for n in (32, 40, 48)])
    assert len(said) == 1


def test_a_full_disk_of_a_compiler_is_one_warning_and_what_it_chose_is_not_kept(tmp_path: Path) -> None:
    """Triton writes to a folder of its own, in other processes, and its kernels are then "not built"."""
    error, slow = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), type("Slow", (Aped,), {"name": "slow"})
    full = type("Full", (Aped,), {"launcher": lambda self, r: error})
    store, wanted = Store("a machine", tmp_path), [region(), region(16)]
    with pytest.warns(UserWarning) as said:
        Choices(CPU, [Aten(), full(), slow()], store).decide(wanted)
    (text,) = [str(w.message) for w in said]
    assert "not built (No space left on device)" in text and str(tmp_path) in text and "TRITON_CACHE_DIR" in text
    assert not store.rows()
    Choices(CPU, [Aten(), Aped(), slow()], store).decide(wanted)
    assert len(store.rows()) == len(wanted)


def test_a_way_that_breaks_the_device_ends_one_process_and_no_other(tmp_path: Path) -> None:
    store, wanted = Store("a machine", tmp_path), region()
    broken = type("Broken", (Choices,), {"answers": lambda self: False})
    with pytest.raises(
        WholestepError, match=r"step\.mul.*\(aped:one\) broke the device.*illegal address\.\nIt is noted"
    ):
        broken(CPU, [Aten(), BAD["crash"][0]()], store).decide([wanted])
    choices = Choices(CPU, [Aten(), Aped()], Store("a machine", tmp_path))  # what it would do by now does not matter
    choices.decide([wanted])
    assert choices.known[wanted.key].provider == "aten"
    assert [t.why for t in choices.known[wanted.key].excluded] == [
        "not built: RuntimeError: it has broken a process before"
    ]


@pytest.mark.parametrize("where", ["claims", "offers"])
def test_a_provider_that_fails_before_it_builds(where: str) -> None:
    cls = type("Fails", (Aped,), {where: raising(TypeError("unknown op"))})
    choices = Choices(CPU, [cls(), Aten()])
    wanted = region()
    choices.decide([wanted])
    assert choices.known[wanted.key].provider == "aten"
    assert choices.refusals == {"aped": {"it failed: TypeError: unknown op": 1}}


def test_a_provider_that_fails_to_say_what_it_takes_takes_nothing() -> None:
    choices = Choices(CPU, [type("Fails", (Aped,), {"takes": raising(TypeError("unknown op"))})(), Aten()])
    assert not choices.takes(region().ops[0])
    assert choices.refusals == {"aped": {"it failed: TypeError: unknown op": 1}}


def test_an_integer_or_boolean_result_that_is_not_written_is_noticed() -> None:
    """Memory is not filled with what the result happens to be."""
    cls = type("Lazy", (Aped,), {"launcher": lambda self, r: nothing_written(r)})
    for build in (
        lambda b, x, y: b.ge(b.abs(x), 0.0),
        lambda b, x, y: b.isnan(x),
        lambda b, x, y: b.all_finite([x, y]),
    ):
        wanted = region(build=build)
        choices = Choices(CPU, [Aten(), cls()])
        choices.decide([wanted])
        assert "elements of result 0 differ" in choices.known[wanted.key].excluded[0].why


def test_a_right_way_that_is_slower_loses() -> None:
    slow = spoiling(lambda r: time.sleep(0.1))
    quick = type("Quick", (Aped,), {"name": "quick", "launcher": quick_tanh})
    wanted = region(rows=4096)
    choices = Choices(CPU, [Aten(), slow(), quick()])
    choices.decide([wanted])
    chosen = choices.known[wanted.key]
    assert chosen.provider != "aped" and not chosen.excluded
    assert chosen.seconds < 0.1
    alone = Choices(CPU, [slow(), quick()])
    alone.decide([wanted])
    assert alone.known[wanted.key].provider == "quick"


def quick_tanh(self: Aped, region: Region) -> Launcher:
    def run(x: torch.Tensor, y: torch.Tensor, out: torch.Tensor) -> None:
        torch.mul(torch.tanh(x), y, out=out)

    return run


class Sole(Aped):
    """The only provider beside ATen, and quicker than it: ATen is made slow in the tests below."""

    name = "sole"


class SlowAten(Aten):
    def build(self, offers: Sequence[Offer], report: Progress | None = None) -> dict[str, Launcher | Exception]:
        found = super().build(offers, report)

        def slow(run: Any) -> Launcher:
            return lambda *tensors: (time.sleep(2e-3), run(*tensors))[0]

        return {key: slow(run) for key, run in found.items()}


@pytest.fixture
def timings(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Counts what is timed."""
    seen: list[int] = []
    real = Choices.time

    def counted(self: Choices, call: Any, *to_beat: float) -> float:
        seen.append(1)
        return real(self, call, *to_beat)

    monkeypatch.setattr(Choices, "time", counted)
    return seen


def test_a_choice_is_kept_and_used_without_timing(tmp_path: Path, timings: list[int]) -> None:
    wanted, store = region(), Store("machine", tmp_path)
    first = Choices(CPU, [SlowAten(), Sole()], store)
    first.decide([wanted])
    assert first.known[wanted.key].provider == "sole" and len(timings) == 2
    assert store.rows()[0].choice.about.startswith("step.")  # `wholestep cache --show` finds it by its ops
    again = Choices(CPU, [SlowAten(), Sole()], Store("machine", tmp_path))
    again.decide([region()])
    assert again.known[wanted.key].provider == "sole" and again.known[wanted.key].run is not None
    assert len(timings) == 2
    others = Choices(CPU, [SlowAten(), Sole(), Aped()], Store("machine", tmp_path))  # other competitors: anew
    others.decide([region()])
    assert len(timings) == 5
    elsewhere = Choices(CPU, [SlowAten(), Sole()], Store("another machine", tmp_path))
    elsewhere.decide([region()])
    assert len(timings) == 7
    larger = region(rows=9)
    again.decide([larger])
    assert len(timings) == 9 and larger.key != wanted.key


def test_the_time_of_a_product_is_kept(tmp_path: Path, timings: list[int]) -> None:
    """What is joined by the clock is the same in the next compile."""
    product = region(build=lambda b, x, y: b.contract(x, y, spec="ik,jk->ij"))
    seconds = Choices(CPU, [SlowAten(), Sole()], Store("machine", tmp_path)).times([product, region()])
    assert len(timings) == 3
    assert Choices(CPU, [SlowAten(), Sole()], Store("machine", tmp_path)).times([product, region()]) == seconds
    assert len(timings) == 3


def test_a_winner_that_is_gone_is_measured_again(tmp_path: Path, timings: list[int]) -> None:
    wanted, store = region(), Store("machine", tmp_path)
    choices = Choices(CPU, [SlowAten(), Sole()], store)
    store.put(choices.store_key(wanted.key), Choice("sole:some older way", 1e-6, [], versions=choices.versions))
    choices.decide([wanted])
    assert len(timings) == 2 and choices.known[wanted.key].offer == "one"
    assert store.get(choices.store_key(wanted.key)).winner == "sole:one"


def test_a_winner_that_cannot_be_built_any_more_is_replaced(tmp_path: Path, timings: list[int]) -> None:
    wanted, store = region(), Store("machine", tmp_path)
    broken = type("Broken", (Sole,), {"launcher": lambda self, r: ValueError("the compiler is gone")})
    other = type("Other", (Aped,), {"name": "other"})
    choices = Choices(CPU, [SlowAten(), broken(), other()], store)
    store.put(choices.store_key(wanted.key), Choice("sole:one", 1e-6, [], versions=choices.versions))
    choices.decide([wanted])
    chosen = choices.known[wanted.key]
    assert chosen.provider == "other" and "compiler is gone" in chosen.excluded[0].why


def test_a_damaged_row_is_measured_again(tmp_path: Path, timings: list[int]) -> None:
    wanted, store = region(), Store("machine", tmp_path)
    Choices(CPU, [SlowAten(), Sole()], store).decide([wanted])
    with closing(sqlite3.connect(tmp_path / DATABASE)) as database, database:
        columns = [c[1] for c in database.execute("PRAGMA table_info(choices)")]
        text = next(c for c in columns if c in ("choice", "value", "data", "json"))
        assert database.execute(f"UPDATE choices SET {text} = 'not json'").rowcount == 1
    again = Choices(CPU, [SlowAten(), Sole()], Store("machine", tmp_path))
    again.decide([wanted])
    assert len(timings) == 4 and again.known[wanted.key].provider == "sole"


def test_without_measuring_the_first_generated_way_is_taken(timings: list[int]) -> None:
    wanted = region()
    choices = Choices(CPU, [Aten(), Sole()], measure=False)
    choices.decide([wanted])
    assert choices.known[wanted.key].provider == "sole" and not timings


def test_what_other_code_was_measured_with_is_measured_again(tmp_path: Path, timings: list[int]) -> None:
    wanted = region()
    for version, count in (("old", 2), ("old", 2), ("new", 4), ("new", 4)):
        provider = type("Versioned", (Sole,), {"version": version})
        choices = Choices(CPU, [SlowAten(), provider()], Store("machine", tmp_path))
        choices.decide([wanted])
        assert len(timings) == count and choices.known[wanted.key].provider == "sole"


def test_what_was_compared_in_another_way_is_measured_again(tmp_path: Path, timings: list[int]) -> None:
    for how, count in (("old", 2), ("old", 2), ("new", 4)):
        choices = Choices(CPU, [SlowAten(), Sole()], Store("machine", tmp_path))
        choices.comparison = how  # type: ignore[misc]
        choices.decide([region()])
        assert len(timings) == count


def test_the_version_of_a_provider_is_its_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert Aten().version == "" and Triton().version != Cpp().version
    assert Cpp().version == Cpp().version != ""
    for folder in ("backends/triton", "backends/cpp", "dialects/loop", "transforms"):
        (tmp_path / folder).mkdir(parents=True)
    written_by = [f"transforms/{name}" for name in Triton.written_by]
    for file in ("backends/providers", *written_by, *(f"backends/{name}" for name in Triton.templates)):
        (tmp_path / f"{file}.py").write_text("pass")
    monkeypatch.setattr(providers, "__file__", str(tmp_path / "backends/providers.py"))
    found = [Triton().version]
    for file in ("backends/triton/text", "backends/depthwise", "dialects/loop/ops", *written_by):
        (tmp_path / f"{file}.py").write_text("changed")
        found.append(Triton().version)
    (tmp_path / "backends/cpp/text.py").write_text("changed")
    assert len(set(found)) == 6 and Triton().version == found[-1]
    assert Aped().version == Sole().version != ""


def test_refusals_are_known_when_nobody_is_asked(tmp_path: Path) -> None:
    proud = type("Proud", (Aped,), {"name": "proud", "claims": lambda self, r: "too plain"})
    for _ in range(2):
        choices = Choices(CPU, [SlowAten(), Sole(), proud()], Store("machine", tmp_path))
        choices.decide([region()])
        assert choices.refusals == {"proud": {"too plain": 1}}
        proud.claims = raising(AssertionError("nobody was to ask"))


def test_equal_regions_are_decided_once() -> None:
    Sole.built = 0
    choices = Choices(CPU, [SlowAten(), Sole()])
    choices.decide([region(), region()])
    choices.decide([region()])
    assert Sole.built == 1


# ---- whole steps -----------------------------------------------------------------------------------------------------


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 3))


def losses(**options: Any) -> tuple[list[float], dict[str, torch.Tensor], ws.TrainStep]:
    model = fresh(net)
    batch = (data(6, 4), torch.tensor([0, 1, 2, 0, 1, 2]))
    step = ws.compile(model, nn.functional.cross_entropy, adamw(model), batch, **options)
    return [float(step(*batch)) for _ in range(3)], dict(model.state_dict()), step


@pytest.mark.parametrize("how", ["one element", "crash", "out of memory", "build raises", "not written"])
def test_a_step_with_a_bad_provider_is_right(how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WHOLESTEP_CACHE", str(tmp_path))
    true, state, _ = losses(providers=["aten"])
    with registered(BAD[how][0]):
        found, own, step = losses(providers=["aten", "aped"])
    assert {launch.provider for launch in step.plan().launches} <= {"aten", "choose", "copy", "host", "view", ""}
    torch.testing.assert_close(found, true, rtol=1e-5, atol=1e-6)
    for name, tensor in state.items():
        torch.testing.assert_close(own[name], tensor, rtol=1e-4, atol=1e-6)


def test_a_second_compile_gives_the_program_of_the_first(
    tmp_path: Path, timings: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same kernels in the same order at the same addresses, and nothing is timed."""
    monkeypatch.setenv("WHOLESTEP_CACHE", str(tmp_path))
    with registered(LoopReference):
        true, _, first = losses(providers=["aten", "loops"])
        timed = len(timings)
        found, _, again = losses(providers=["aten", "loops"])
    assert len(timings) == timed > 0
    assert found == true and again.plan() == first.plan() and again.recipe == first.recipe
    one, other = ({k: (c.provider, c.offer) for k, c in s.choices.known.items()} for s in (first, again))  # type: ignore[union-attr]
    assert one == other


def test_what_is_larger_than_the_memory_of_a_cpu_is_not_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def compare(*given: object) -> None:
        raise AssertionError("a region was tried")

    monkeypatch.setenv("WHOLESTEP_CACHE", str(tmp_path))
    monkeypatch.setattr(Choices, "compare", compare)
    with registered(LoopReference):
        with pytest.raises(AssertionError, match="tried"):
            losses(providers=["aten", "loops"])
        monkeypatch.setattr(choose, "memory_bytes", lambda: 1)
        _, _, step = losses(providers=["aten", "loops"])
    assert "loops" not in {launch.provider for launch in step.plan().launches}


class SlowLoops(LoopReference):
    """Loses to ATen, also where a machine is so busy that ATen's threads wait for each other."""

    def launcher(self, region: Region) -> Launcher:
        run = super().launcher(region)

        def slow(*tensors: torch.Tensor) -> None:
            run(*tensors)
            time.sleep(0.05)

        return slow


def test_where_layouts_keep_changing_regions_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ATen, which would win, takes no part any more; what was found without it is not taken for a choice against it."""
    monkeypatch.setenv("WHOLESTEP_CACHE", str(tmp_path))
    with registered(SlowLoops):
        monkeypatch.setattr(planner, "ATTEMPTS", 0)
        found, _, step = losses(providers=["aten", "loops"])
        assert "loops" in {launch.provider for launch in step.plan().launches}
        monkeypatch.undo()
        monkeypatch.setenv("WHOLESTEP_CACHE", str(tmp_path))
        true, _, usual = losses(providers=["aten", "loops"])
    assert "loops" not in {launch.provider for launch in usual.plan().launches}
    torch.testing.assert_close(found, true, rtol=1e-5, atol=1e-6)


TUNE = """
from tests.backends.test_choose import losses
from tests.dialects.loop.provider import LoopReference, registered
with registered(LoopReference):
    found, _, step = losses(providers=["aten", "loops"])
print([round(x, 4) for x in found])
"""


def test_two_processes_tune_the_same_model_at_once(tmp_path: Path) -> None:
    done = warm.run_at_once(2, ["-c", TUNE], {**os.environ, "WHOLESTEP_CACHE": str(tmp_path)})
    assert [d.returncode for d in done] == [0, 0], done
    true = [round(x, 4) for x in losses(providers=["aten"])[0]]
    assert [d.stdout.strip() for d in done] == [str(true)] * 2
    assert all("Traceback" not in d.stderr for d in done)
    with closing(sqlite3.connect(tmp_path / DATABASE)) as database:
        assert database.execute("SELECT count(*) FROM choices").fetchone()[0] > 0
