"""A bound plan as one CUDA graph: the first step runs launch by launch, the second is captured, all later are replayed.

A launch that cannot be captured is named in one warning, and the steps go on launch by launch. Numbers of the host that
kernels take as they are (betas, decay) are part of the graph: where one changes, the graph is captured again. Launches
on streams beside that of the kernels are branches of the graph; kernels of the main stream go first.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

import torch

from ..torch_private import clear_cublas_workspaces
from .bound import BoundPlan
from .graph_nodes import without_memsets
from .library_memory import handed_out

#: after this many captures numbers that never stay are no reason to capture once more
MOST_CAPTURES = 8


class Graphed:
    """Runs a bound plan on a GPU."""

    def __init__(self, bound: BoundPlan):
        self.bound = bound
        self.graph: torch.cuda.CUDAGraph | None = None
        taken = sorted(bound.taken)
        stands_for = bound.numbers.stands_for
        #: the numbers that are part of the graph: all of them, and those that stand for all while all counters agree
        self.held_once = sorted({stands_for.get(i, i) for i in taken})
        self.every, self.once = picker(taken), picker(self.held_once)
        self.all_alike = picker([stands_for.get(i, i) for i in taken])
        self.kept: Any = None
        self.kept_once: Any = None
        self.warm = False
        self.captures = 0
        #: whether a replay takes numbers from torch's generator of random numbers, which then moves on
        self.draws = False
        #: why the steps run launch by launch; "" while they do not
        self.refused = ""

    def replay(self, alike: bool = False) -> bool:
        """Replays the graph where it stands for this step: there is one, with the numbers that calls take as they are.

        alike: each number stands only where it was computed.
        """
        if self.graph is None:
            return False
        values = self.bound.values
        if (self.once(values) != self.kept_once) if alike else (self.every(values) != self.kept):
            return False
        self.graph.replay()
        return True

    def run(self) -> None:
        """A step with all its numbers in place: replayed, or launch by launch, or captured and then replayed."""
        if self.replay():
            return
        if self.refused or not self.warm:
            self.run_launches()
            return
        self.capture()
        if self.graph is not None:
            before = drawn(self.bound.arena.device)
            self.graph.replay()
            self.draws = drawn(self.bound.arena.device) != before
        else:
            self.bound.run()

    def run_launches(self) -> None:
        """Launch by launch; the first time also makes what libraries make on first use."""
        if self.warm:
            self.bound.run()
            return
        device, launches, bodies = self.bound.device, self.bound.plan.launches, self.bound.plan.bodies
        allocated, before, at = self.bound.allocated, (0, 0), -1

        def enter(name: str) -> None:
            nonlocal before, at
            at = int(name.removeprefix("ws:"))
            before = handed_out(device)

        def leave() -> None:
            after = handed_out(device)
            launch = launches[at] if at >= 0 else None
            body = bodies[launch.body].made if launch is not None and launch.body >= 0 else 0
            allocated.note(launch, after[0] - before[0], after[1] - before[1], body)

        self.bound.run_in_ranges(enter, leave)
        self.warm = True

    def capture(self) -> None:
        self.graph = None
        if self.captures >= MOST_CAPTURES:
            self.refuse("the optimizer's settings (betas, decay) change too often to be part of a graph")
            return
        self.captures += 1
        bound, at = self.bound, -1
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        # a branch fills what the kernels leave idle: nodes keep the priority of the stream they are captured on
        first = {"stream": torch.cuda.Stream(bound.device, priority=-1)} if bound.beside else {}
        torch.cuda.synchronize(bound.device)
        clear_cublas_workspaces()  # those of the first step; the graph's own lie in its memory
        try:
            with torch.cuda.graph(graph, capture_error_mode="thread_local", **first), torch.no_grad():
                # a graph gives back nothing while it is captured: one block that all its launches take from in turn
                torch.empty(max(bound.plan.made, bound.allocated.bytes), dtype=torch.uint8, device=bound.arena.device)
                for at, (call, args, kwargs) in enumerate(bound.calls):  # noqa: B007 - the handler names the launch
                    call(*args, **kwargs)
        except Exception as error:
            launch = bound.sites[max(at, 0)][0]
            where = f"{launch.name} of layer {launch.layer or '(none)'}"
            self.refuse(f"{where} cannot be part of a CUDA graph: {str(error).splitlines()[0]}")
            torch.cuda.synchronize(bound.device)
            return
        finally:
            clear_cublas_workspaces()  # for the graph alone: its memory stays with it
        try:
            without_memsets(graph, bound.device)
            graph.instantiate()
        except RuntimeError as error:
            self.refuse(f"its CUDA graph cannot be made ready: {str(error).splitlines()[0]}")
            return
        self.graph, self.kept = graph, self.every(bound.values)
        agree = self.kept == self.all_alike(bound.values)
        self.kept_once = self.once(bound.values) if agree else None

    def refuse(self, why: str) -> None:
        self.refused = why
        warnings.warn(f"the step runs launch by launch, which costs host time: {why}", stacklevel=2)


def drawn(device: torch.device) -> list[int]:
    """How far torch's generator of random numbers for a GPU has come; nothing where it has none."""
    index = device.index or 0
    return [g.get_offset() for g in torch.cuda.default_generators[index : index + 1]]


def picker(places: Sequence[int]) -> Callable[[list[Any]], Any]:
    """What takes the values at some places out of a list, as fast as Python can."""
    return itemgetter(*places) if places else lambda values: ()
