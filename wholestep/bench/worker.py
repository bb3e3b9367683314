"""What runs in a contender's process: it builds, compiles, trains and times when the parent says so.

Orders come as lines of JSON on stdin, answers go as lines of JSON to a pipe of their own: whatever libraries print is
not mistaken for one. The process works only between an order and its answer.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import math
import os
import re
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, TextIO

import torch

from ..torch_private import hold_while_timing
from . import profile as profiles
from .clock import Clock
from .contenders import JAX, MODES, Trainer, is_ours, make, split, torch_step
from .memory import Peak, release, size_of
from .runner import ASKED
from .workload import Batch, Case, Workload, build

if TYPE_CHECKING:
    from ..transforms.opportunity import Opportunity

#: kinds of kernels that are told of which were slower as one
REFUSED = 12
#: steps that are taken before a block is timed: others have used the caches meanwhile
WARM = 2
LEAST, MOST = 3, 200
PROFILED = 3
#: calls whose host time is taken: as many as fit these seconds
HOST_SECONDS, HOST_LEAST, HOST_MOST = 0.3, 8, 20
#: calls in a row: so few that none waits for the device
HOST_ROW = 8


class Worker:
    """One contender on one case."""

    def __init__(self, order: dict[str, Any], import_seconds: float):
        self.contender, self.precision, self.device = order["contender"], order["precision"], order["device"]
        self.case, self.module, self.bind = Case(*order["case"]), order["networks"], order["bind"]
        self.clock = Clock(order.get("clock"))
        self.import_seconds = import_seconds
        self.trainer: Trainer | None = None
        self.batch: Batch = ()
        self.peak: Peak | None = None
        self.steps = 0
        if self.device == "cpu" and order["threads"]:
            torch.set_num_threads(order["threads"])
        self.workload = self.build()  # before anything counts, and with `together` beside the others

    def wait(self) -> None:
        """Until all that was begun is done."""
        if self.trainer is not None and self.trainer.jax is not None:
            self.trainer.jax.wait()
        wait(self.device)

    def build(self) -> Workload:
        """The model and, where PyTorch trains it, its optimizer: a user has both before anything is compiled."""
        workload = build(self.case, self.device, self.module, self.bind, is_ours(self.contender))
        if self.contender != JAX:
            _ = workload.optimizer  # the first one of a process imports PyTorch's compiler, which takes seconds
        return workload

    # ---- orders ------------------------------------------------------------------------------------------------------

    def prepare(self, order: dict[str, Any]) -> dict[str, Any]:
        """Builds, compiles and trains for some steps: seconds to the end of the first, and all losses.

        Beside others it trains while it has the clock, and times kernels if it has its turn soon.
        """
        workload = self.workload
        self.batch = workload.batch(0, self.device)
        release(self.device)
        wait(self.device)
        start = self.clock.now()
        if self.clock.file is not None and split(self.contender)[0] in MODES:
            hold_while_timing(self.clock.turn)
        trainer = self.trainer = make(
            self.contender, workload, self.precision, self.batch, self.case.network, self.module
        )
        made = self.clock.now() - start
        losses = [float(trainer(self.batch))]
        self.wait()
        first = self.clock.now() - start
        # importing ours happened before; what PyTorch imports of its compiler beside Dynamo, inside the first call
        imported = self.import_seconds if is_ours(self.contender) else 0.0
        self.peak = Peak(workload, trainer, self.batch, self.device)
        clock = self.clock.facts()
        with self.clock.held():
            more, seconds = self.train(trainer, self.peak, order["steps"])
        losses += more
        return {
            "clock": clock,
            "items": workload.items,
            "source": workload.source,
            "parameters": sum(p.numel() for p in workload.model.parameters()),
            "channels_last": workload.images,
            "losses": losses,
            "compile_seconds": imported + first,
            "import_seconds": imported,
            "made_seconds": made,
            "next_steps_seconds": seconds[:4],
        }

    def train(self, trainer: Trainer, peak: Peak, steps: int) -> tuple[list[float], list[float]]:
        """All steps but the first: their losses and their seconds."""
        losses, seconds = [], []
        peak.start()
        for seed in range(1, steps):
            batch = self.workload.batch(seed, self.device)
            wait(self.device)
            peak.begin()
            begin = time.perf_counter()
            losses.append(float(trainer(batch)))
            self.wait()
            seconds.append(time.perf_counter() - begin)
            peak.end()
            del batch
        peak.stop()
        return losses, seconds

    def facts(self, order: dict[str, Any]) -> dict[str, Any]:
        """What our step says of itself."""
        whole = self.trainer.whole if self.trainer is not None else None
        if whole is None:
            return {}
        from ..runtime.fusions import refused  # only ours pays for importing it
        from ..runtime.report import report_of

        report = json.loads(report_of(whole, eager=False).rendered("json"))
        movement, kernels = report["movement"], report.get("kernels") or {}
        return {
            "moved": movement["moved"]["total"],
            "bound": movement["bound"]["total"],
            "moved / bound": movement["moved / bound"],
            "planned_peak": report["execution"].get("peak"),
            "host_bytes": whole.plan().bytes_in("pinned"),
            "seconds": report["seconds"],
            "execution": report["execution"]["by"],
            "why": report["execution"].get("why", ""),
            "launches": len(whole.plan().launches),
            "providers": kernels.get("providers", {}),
            "families": kernels.get("families", {}),
            "excluded": [f"{each['way']}: {each['why']}" for each in kernels.get("excluded", [])],
            "refused": refused_by_the_clock(refused(whole._compiled.planned)),
        }

    def rounded(self, order: dict[str, Any]) -> dict[str, Any]:
        """Losses of eager training rounded otherwise: what rounding alone may do to a curve.

        bf16: training once more (a GPU does not add up in a fixed order), and in float32. fp32: from weights that are
        moved in their last bit, and on a CPU by one thread, which adds up in another order at every step.
        """
        curves: dict[str, list[float]] = {}
        threads = torch.get_num_threads()
        names = ["again", "fp32"] if self.precision == "bf16" else ["nudged"]
        if self.precision == "fp32" and self.device == "cpu" and threads > 1:
            names.append("one thread")
        for name in names:
            workload = self.build()
            if name == "nudged":
                nudge(workload.model)
            trainer = torch_step(workload, workload.loss_fn, "bf16" if name == "again" else "fp32")
            torch.set_num_threads(1 if name == "one thread" else threads)
            with self.clock.held():
                curves[name] = [float(trainer(workload.batch(i, self.device))) for i in range(order["steps"])]
            torch.set_num_threads(threads)
            del workload, trainer
            release(self.device)
        return {"rounded": curves}

    def time(self, order: dict[str, Any]) -> dict[str, Any]:
        """Seconds per step over one block. The first time, finds how many steps a block of the wanted length has."""
        trainer = self.trainer
        assert trainer is not None
        if self.steps == 0:
            once = self.block(trainer, 1)
            self.steps = min(max(LEAST, math.ceil(order["seconds"] / once)), MOST)
        seconds = self.block(trainer, self.steps)
        return {"seconds": seconds, "steps": self.steps}

    def block(self, trainer: Trainer, steps: int) -> float:
        for _ in range(WARM):
            trainer(self.batch)
        self.wait()
        start = time.perf_counter()
        for _ in range(steps):
            trainer(self.batch)
        self.wait()
        return (time.perf_counter() - start) / steps

    def device_load(self, order: dict[str, Any]) -> dict[str, Any]:
        """On a GPU: how long the host is busy with a step, and what the device runs in one.

        Host time is from the call of a step to its return, without the learning rate's schedule: with nothing in the
        device's queue, where whatever ran meanwhile has taken the processor's caches, and in a row.
        """
        assert self.trainer is not None
        if self.device != "cuda" or self.trainer.jax is not None:
            return {}
        step = self.trainer.step
        alone: list[float] = []
        row: list[float] = []

        def timed(into: list[float]) -> None:
            start = time.perf_counter()
            step(self.batch)
            into.append(time.perf_counter() - start)

        times = min(max(HOST_LEAST, math.ceil(HOST_SECONDS / self.block(self.trainer, 1))), HOST_MOST)
        for _ in range(times):
            self.wait()
            timed(alone)
        for _ in range(times // HOST_ROW):
            self.wait()
            for _ in range(HOST_ROW):
                timed(row)
        self.wait()
        ran, _ = profiles.traced(lambda: step(self.batch), self.device, 1, listing=False)
        others = [each for each in ran if each.name.startswith(("Memcpy", "Memset"))]
        return {
            "host_us": statistics.median(alone) * 1e6,
            "host_us_row": statistics.median(row) * 1e6,
            "host_calls": times,
            "kernels": len(ran) - len(others),
            "copies_and_fills": len(others),
        }

    def memory(self, order: dict[str, Any]) -> dict[str, Any]:
        """The most memory that steps after the first took, and the tensors that last from step to step."""
        assert self.trainer is not None and self.peak is not None
        model = self.workload.model
        tensors = [*model.parameters(), *model.buffers(), *self.trainer.states()]
        jax = self.trainer.jax
        return {
            "peak_bytes": (self.peak.bytes if jax is None else jax.peak_bytes()) or None,
            "allocated_bytes": (self.peak.allocated if jax is None else 0) or None,
            "requested_bytes": (self.peak.requested if jax is None else 0) or None,
            "batch_bytes": 2 * size_of(list(self.batch)),  # the one of a step, and the one that is timed later
            "state_bytes": size_of(tensors) if jax is None else jax.state_bytes(),
        }

    def profile(self, order: dict[str, Any]) -> dict[str, Any]:
        """Time and bytes by kernel family."""
        assert self.trainer is not None
        step, batch = self.trainer, self.batch
        if self.trainer.whole is not None:
            return profiles.of_ours(self.trainer.whole, lambda: step(batch), self.device, PROFILED)
        return profiles.of_torch(lambda: step(batch), self.device, PROFILED)


def refused_by_the_clock(found: Iterable[Opportunity]) -> list[dict[str, Any]]:
    """Kernels that were slower as one: what would have been saved, layers that differ in numbers alone together, the
    most bytes first."""
    groups: dict[str, dict[str, Any]] = {}
    for each in found:
        if each.why_not.startswith("measured:"):
            group = groups.setdefault(re.sub(r"\d+", "*", each.site), {"count": 0, "bytes": 0, "why": each.why_not})
            group["count"] += 1
            group["bytes"] -= each.change.bytes
    heaviest = sorted(groups.items(), key=lambda item: -item[1]["bytes"])
    return [{"site": site, **group} for site, group in heaviest[:REFUSED]]


def nudge(model: torch.nn.Module) -> None:
    """Moves every weight up or down by about its last bit."""
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            way = torch.randint(0, 2, parameter.shape, generator=draw) * 2 - 1
            parameter.mul_((1 + way * 2.0**-23).to(parameter.device))


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def describe(error: BaseException) -> dict[str, Any]:
    """An answer that says what went wrong."""
    text = " ".join(str(error).split())
    full = isinstance(error, torch.cuda.OutOfMemoryError) or "out of memory" in text.lower()
    return {"error": f"{type(error).__name__}: {text[:400]}", "out_of_memory": full}


def serve(orders: TextIO, answer: Callable[[dict[str, Any]], None], import_seconds: float = 0.0) -> None:
    """Takes orders until they end. The first one says who this is."""
    worker: Worker | None = None
    for line in orders:
        order = json.loads(line)
        if order["do"] == "end":
            return
        try:
            if order["do"] == "begin":
                worker = Worker(order, import_seconds)
                answer({"ready": True})
            else:
                answer(getattr(worker, order["do"])(order))
        except Exception as error:  # the answer carries it, the parent decides
            traceback.print_exc()
            answer(describe(error))


@contextlib.contextmanager
def answers(number: int) -> Iterator[Callable[[dict[str, Any]], None]]:
    with os.fdopen(number, "w") as pipe:

        def answer(found: dict[str, Any]) -> None:
            pipe.write(json.dumps(found) + "\n")
            pipe.flush()

        yield answer


def tell_when_asked() -> None:
    """Has the process write to its log what it is doing, when the parent asks (`runner.where`), wherever its errors go
    by then: its first thread, the one that a signal to a process goes to. Of many threads it would come last, behind
    the hundredth, where the list ends."""
    faulthandler.register(ASKED, file=os.dup(2), all_threads=False)


def main(import_seconds: float) -> None:
    tell_when_asked()
    with answers(int(sys.argv[1])) as answer:
        serve(sys.stdin, answer, import_seconds)
