"""Contenders on one case: each in a process that stays alive, all taking turns, losses compared before any time counts.

A process has caches of its own in a temporary folder, so that what it compiles is compiled cold (ours with a budget
uses those of ours without one). Only one works at a time. With `together`, processes that do not time kernels compile
at once, which is noted; they are never timed at once.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import select
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from . import agreement
from .contenders import EAGER, OURS, is_ours, measures, rank, split
from .workload import NETWORKS, Case

#: what a process runs: the time that importing Wholestep takes after torch counts as a part of its compile time
START = (
    "import sys, time; sys.path.insert(0, sys.argv.pop(1)); import torch; start = time.perf_counter(); "
    "from wholestep.bench import worker; worker.main(time.perf_counter() - start)"
)
CACHES = {
    "WHOLESTEP_CACHE": "wholestep",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TRITON_CACHE_DIR": "triton",
    "CUDA_CACHE_PATH": "cuda",
}
#: seconds that a process gets to end by itself
FAREWELL = 5.0


@dataclass(frozen=True)
class Settings:
    """How a race is run."""

    device: str
    precision: str
    steps: int = 10
    rounds: int = 7
    block_seconds: float = 0.4
    limit: float = 300.0
    together: bool = False
    profile: bool = False
    threads: int = 0
    networks: str = NETWORKS
    bind: dict[str, int] = field(default_factory=dict)


class Failed(Exception):
    """A contender did not do what it was told."""

    def __init__(self, why: str, out_of_memory: bool = False):
        super().__init__(why)
        self.out_of_memory = out_of_memory


class Runner:
    """A contender's process, seen from the parent."""

    def __init__(
        self,
        case: Case,
        contender: str,
        settings: Settings,
        folder: Path,
        deadline: float,
        caches: Path | None = None,
    ):
        self.contender, self.deadline = contender, deadline
        self.left = settings.limit  # seconds that it may still work
        self.limit = settings.limit
        place = folder / f"{contender.replace(':', '-')}-{secrets.token_hex(4)}"
        place.mkdir(parents=True)
        self.log, self.caches = place / "log", caches or place
        environ = dict(os.environ) | {name: str(self.caches / cache) for name, cache in CACHES.items()}
        environ |= {"PYTHONUNBUFFERED": "1", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        if settings.profile:  # kernels that PyTorch generates for a CPU name themselves, which costs a little
            environ["TORCHINDUCTOR_CPP_ENABLE_KERNEL_PROFILE"] = "1"
        root = str(Path(__file__).resolve().parents[2])
        reading, writing = os.pipe()
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", START, root, str(writing)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environ,
                pass_fds=(writing,),
                start_new_session=True,
            )
        os.close(writing)
        self.answers, self.rest = reading, b""
        who = {"contender": contender, "case": (case.network, case.size), "bind": settings.bind}
        how = {name: getattr(settings, name) for name in ("precision", "device", "threads", "networks")}
        try:
            self.tell("begin", **who, **how)  # it answers when it has imported what it needs
        except BaseException:
            self.end(at_once=True)
            raise

    def tell(self, do: str, **more: Any) -> None:
        """Gives an order. What it answers is for `hear`."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write((json.dumps({"do": do} | more) + "\n").encode())
            self.process.stdin.flush()
        except BrokenPipeError:
            raise Failed(f"its process has ended: {self.last_words()}") from None

    def hear(self) -> dict[str, Any]:
        """The answer to the last order; Failed where it is an error, or takes longer than is left."""
        start = time.monotonic()
        while b"\n" not in self.rest:
            spent = time.monotonic() - start
            own, all_left = self.left - spent, self.deadline - time.monotonic()
            if min(own, all_left) <= 0:
                why = f"over its limit of {self.limit:.0f} s" if own <= all_left else "no time was left for all"
                raise Failed(why)
            if not select.select([self.answers], [], [], min(own, all_left, 1.0))[0]:
                continue
            read = os.read(self.answers, 1 << 20)
            if not read:
                self.process.wait()
                raise Failed(f"its process ended with code {self.process.returncode}: {self.last_words()}")
            self.rest += read
        self.left -= time.monotonic() - start
        line, _, self.rest = self.rest.partition(b"\n")
        answer = json.loads(line)
        if "error" in answer:
            raise Failed(answer["error"], answer.get("out_of_memory", False))
        return answer

    def ask(self, do: str, **more: Any) -> dict[str, Any]:
        self.tell(do, **more)
        return self.hear()

    def last_words(self) -> str:
        lines = [line for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        return lines[-1].strip()[:300] if lines else "it said nothing"

    def end(self, at_once: bool = False) -> None:
        """Ends the process and whatever it has started."""
        if not at_once:
            with suppress(Failed, subprocess.TimeoutExpired):
                self.tell("end")
                self.process.wait(FAREWELL)
        with suppress(ProcessLookupError):  # it and its children are gone
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):  # the last order was never read
            self.process.stdin.close()
        os.close(self.answers)


Entry = dict[str, Any]


@dataclass
class Reference:
    """Eager training's losses, and how far rounding alone carries them."""

    losses: list[float]
    tolerance: float


class Race:
    """One case: prepares contenders, checks them, lets them take turns. `entries` says what was found of each."""

    def __init__(
        self,
        case: Case,
        settings: Settings,
        say: Callable[[str], None],
        deadline: float,
        known: Reference | None = None,
    ):
        self.case, self.settings, self.say, self.deadline = case, settings, say, deadline
        self.reference = known
        self.entries: dict[str, Entry] = {}
        self.runners: dict[str, Runner] = {}
        self.samples: dict[str, list[float]] = {}

    def run(self, contenders: Sequence[str], work: Callable[[Race], None]) -> dict[str, Entry]:
        """Prepares, then `work` with all that agree. Who found no memory beside the others has another try after them,
        with ours alone."""
        wanted = sorted(contenders, key=lambda name: (name != EAGER, rank(name)))  # the reference, ours, the others
        if EAGER not in wanted and self.reference is None:
            wanted.insert(0, EAGER)
        with tempfile.TemporaryDirectory(prefix="wholestep-bench-") as folder:
            try:
                self.prepare(wanted, Path(folder))
                if EAGER not in contenders:
                    self.leave(EAGER)
                work(self)
                late = [name for name, entry in self.entries.items() if entry.get("out_of_memory")]
                for name in late if len(wanted) > 2 else ():
                    self.say(f"{self.case} {name}: once more, with less memory taken by others")
                    for other in [other for other in self.runners if other != OURS]:
                        self.leave(other)
                    del self.entries[name]
                    self.prepare([name], Path(folder))
                    if name in self.runners:
                        work(self)
            finally:
                for name in list(self.runners):  # they have said all they know
                    self.leave(name, at_once=True)
        return {name: entry for name, entry in self.entries.items() if name in contenders}

    # ---- before anything is timed ------------------------------------------------------------------------------------

    def prepare(self, wanted: Sequence[str], folder: Path) -> None:
        """Builds, compiles and compares, group by group. With `together` all processes start and import at once."""
        groups = self.groups(wanted)
        if self.settings.together:
            self.begin(wanted, folder)
        for group in groups:
            alone = len(group) == 1
            if not self.settings.together:
                self.begin(group, folder)
            started = [name for name in group if name in self.runners]
            for name in started:
                self.order(name, "prepare", steps=self.settings.steps)
            for name in started:
                if name in self.runners:
                    self.check(name, alone)

    def groups(self, wanted: Sequence[str]) -> list[list[str]]:
        """Who compiles at once: nobody, or with `together` those that do not time kernels meanwhile."""
        if not self.settings.together:
            return [[name] for name in wanted]
        alone = [[name] for name in wanted if name == EAGER or measures(name)]
        return [*alone, *filter(None, [[name for name in wanted if name != EAGER and not measures(name)]])]

    def begin(self, names: Sequence[str], folder: Path) -> None:
        """Starts processes, and waits until they are ready."""
        for name in names:
            self.entries[name] = {"status": "failed"}
            caches = None
            if is_ours(name) and split(name)[1] is not None and OURS in self.runners:
                caches = self.runners[OURS].caches  # how long it compiles is no figure of a budget
                self.entries[name]["warm"] = True
            try:
                self.runners[name] = Runner(self.case, name, self.settings, folder, self.deadline, caches)
            except Failed as error:
                self.fail(name, error)
        for name in names:
            if name in self.runners:
                try:
                    self.runners[name].hear()
                except Failed as error:
                    self.fail(name, error)

    def order(self, name: str, do: str, **more: Any) -> None:
        try:
            self.runners[name].tell(do, **more)
        except Failed as error:
            self.fail(name, error)

    def check(self, name: str, alone: bool) -> None:
        """Takes what a contender has prepared, and compares its losses with eager's."""
        runner, entry = self.runners[name], self.entries[name]
        try:
            entry |= runner.hear() | {"alone": alone}
            if name == EAGER:
                self.take_reference(runner, entry)
        except Failed as error:
            self.fail(name, error)
            return
        if self.reference is None:
            entry["why"] = "eager did not train, and nothing else says what the losses should be"
            self.leave(name)
        else:
            entry |= verdict(entry["losses"], self.reference)
        what = f"{entry['compile_seconds']:.1f} s to the first step, losses {entry['losses'][0]:.5f} .. "
        what += f"{entry['losses'][-1]:.5f}"
        if entry["status"] == "disagrees":
            far = "not finite" if entry["distance"] is None else f"{entry['distance']:.2%} from eager's"
            what += f": DISAGREES, {far} ({entry['tolerance']:.2%} is allowed)"
            self.leave(name)
        self.say(f"{self.case} {name}: {what}")

    def take_reference(self, runner: Runner, entry: Entry) -> None:
        """Eager's losses are what others are compared with, and eager rounded otherwise says how closely."""
        rounded = runner.ask("rounded", steps=self.settings.steps)["rounded"]
        precision = self.settings.precision
        entry["rounding"] = {k: finite(agreement.distance(v, entry["losses"])) for k, v in rounded.items()}
        entry["tolerance"] = agreement.tolerance(precision, entry["losses"], rounded)
        self.reference = Reference(entry["losses"], entry["tolerance"])

    def fail(self, name: str, error: Failed) -> None:
        """Notes what went wrong with a contender; the others go on."""
        self.entries[name] |= {"status": "failed", "why": str(error), "out_of_memory": error.out_of_memory}
        self.entries[name].pop("ms", None)
        self.say(f"{self.case} {name}: FAILED, {error}")
        self.leave(name, at_once=True)

    def leave(self, name: str, at_once: bool = False) -> None:
        if name in self.runners:
            self.runners.pop(name).end(at_once)

    # ---- the work ----------------------------------------------------------------------------------------------------

    def timing(self) -> None:
        """Everybody alive times a block in turn, round after round; then memory."""
        samples: dict[str, list[float]] = {name: [] for name in self.runners}
        for number in range(self.settings.rounds):
            order = list(self.runners)
            for name in order if number % 2 == 0 else order[::-1]:
                try:
                    answer = self.runners[name].ask("time", seconds=self.settings.block_seconds)
                except Failed as error:
                    self.fail(name, error)
                    continue
                samples[name].append(answer["seconds"] * 1e3)
                self.entries[name]["steps_in_block"] = answer["steps"]
        for name in list(self.runners):
            try:
                self.entries[name] |= self.runners[name].ask("memory")
                self.entries[name] |= self.runners[name].ask("device_load")
            except Failed as error:
                self.fail(name, error)
                continue
            if is_ours(name):
                self.entries[name]["facts"] = self.facts_of(name)
            self.samples.setdefault(name, []).extend(samples[name])
            self.entries[name]["ms"] = spread(self.samples[name])
            ms, peak = self.entries[name]["ms"], self.entries[name].get("peak_bytes")
            memory = "" if peak is None else f", {peak / 1e9:.2f} GB"
            self.say(f"{self.case} {name}: {ms['median']:.3f} ms ({ms['low']:.3f} .. {ms['high']:.3f}){memory}")

    def facts_of(self, name: str) -> Entry:
        """What our step says of itself. Its times are known by now, and stay if it cannot."""
        try:
            return self.runners[name].ask("facts")
        except Failed as error:
            self.say(f"{self.case} {name}: its report FAILED, {error}")
            self.leave(name, at_once=True)
            return {"error": str(error)}

    def profiling(self) -> None:
        """Everybody alive times one block and is profiled."""
        for name in list(self.runners):
            try:
                timed = self.runners[name].ask("time", seconds=self.settings.block_seconds)
                found = self.runners[name].ask("profile")
            except Failed as error:
                self.fail(name, error)
                continue
            self.entries[name]["profile"] = found | {"step_us": timed["seconds"] * 1e6}
            self.say(f"{self.case} {name}: profiled")


def verdict(losses: Sequence[float], reference: Reference) -> Entry:
    """Whether a contender's times count."""
    found = agreement.distance(losses, reference.losses)
    agrees = found <= reference.tolerance
    return {
        "distance": finite(found),
        "tolerance": reference.tolerance,
        "status": "agrees" if agrees else "disagrees",
    }


def finite(value: float) -> float | None:
    """JSON has no infinity."""
    return value if math.isfinite(value) else None


def spread(samples: Sequence[float]) -> Mapping[str, Any]:
    """The median of blocks, and their quartiles."""
    quartiles = statistics.quantiles(samples, n=4, method="inclusive") if len(samples) > 1 else [samples[0]] * 3
    return {"median": quartiles[1], "low": quartiles[0], "high": quartiles[2], "blocks": list(samples)}
