"""One compiled program on the user's own tensors: bound once, then every step replays the same calls in place.

Parameters and optimizer state are updated where they live; a batch is copied to fixed buffers. On a GPU the calls
become one CUDA graph. It is bound again when a tensor has moved, and planned again when one lies otherwise in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..backends.aten import device_random
from ..capture.slots import Slot
from ..dialects.step import torch_dtype
from ..dialects.strides import same_places
from ..errors import MemoryBudgetError
from ..ir.collector import collector_paused
from ..machine.describe import memory_bytes
from ..plan import Plan
from ..plan.plan import Launch
from ..plan.planner import Planned
from ..torch_private import foreach_copy
from ..transforms.late_updates import AHEAD, KEPT
from .allocated import Allocated
from .bound import BoundPlan
from .cells import Cells
from .cuda_graph import Graphed
from .library_memory import handed_beyond, measure


class Unfit(Exception):
    """The tensors of a step cannot be bound: some share memory, or are not what the step would update."""


class Arena:
    """Memory that the programs of one step share: they run one after the other and keep nothing in it between steps."""

    def __init__(self) -> None:
        self.memory: torch.Tensor | None = None

    def take(self, size: int, device: torch.device) -> torch.Tensor:
        """The first bytes of it; a program that needs more gets a larger one, which is the one from then on."""
        if self.memory is None or self.memory.numel() < size or self.memory.device != device:
            self.memory = torch.empty(size, dtype=torch.uint8, device=device)
        return self.memory[:size]


class StaticStep:
    """Runs a planned program. `plan_for` plans it for arguments with these strides."""

    def __init__(
        self,
        slots: Sequence[Slot],
        numbers: Sequence[int],
        device: torch.device,
        strides: list[Any],
        plan_for: Callable[[list[Any]], Planned],
        arena: Arena,
    ):
        self.slots, self.numbers, self.device, self.plan_for = slots, frozenset(numbers), device, plan_for
        self.arena, self.on_host = arena, device.type == "cpu"
        self.planned = self.planned_for(strides)
        self.batch = [(i, s.source[1]) for i, s in enumerate(slots) if s.kind == "batch"]
        self.bound: BoundPlan | None = None
        self.graph: Graphed | None = None
        self.bindings = 0
        self.fixed: list[torch.Tensor] = []
        #: of the last step: whether it was a replayed graph; whether its numbers stand only where they were computed
        self.replayed = self.alike = False
        #: where every launch is to be announced to a profiler: what begins a range, what ends it
        self.ranges: tuple[Callable[[str], Any], Callable[[], Any]] | None = None

    @property
    def plan(self) -> Plan:
        return self.planned.plan

    @property
    def allocated(self) -> Allocated:
        """What launches took beside the plan's memory in the first step; nothing before it."""
        return Allocated() if self.bound is None else self.bound.allocated

    def planned_for(self, strides: list[Any]) -> Planned:
        """The plan, with what libraries take beside it."""
        planned = self.plan_for(strides)
        if self.device.type == "cuda":
            measure(planned, self.device)
        return planned

    # ---- binding -----------------------------------------------------------------------------------------------------

    @collector_paused()  # what is bound is large and stays
    def bind(self, inputs: Sequence[torch.Tensor]) -> None:
        """Fixes the memory of every argument: the given tensors', or buffers of our own for the batch."""
        strides = [self.strides_of(i, t) for i, t in enumerate(inputs)]
        buffers = self.plan.buffers
        for i, (have, tensor) in enumerate(zip(strides, inputs, strict=True)):
            if i not in self.numbers and not same_places(tuple(tensor.shape), have, buffers[i].strides):
                self.planned = self.planned_for(strides)
                break
        self.refuse_shared(inputs)
        self.bound = self.graph = None  # the memory of the old binding goes first
        key = self.device if self.device.type == "cpu" or device_random() else torch.device("cpu")
        counters = [i for i in sorted(self.numbers) if self.slots[i].kind == "optimizer_state"]
        cells = Cells(self.planned, self.device, key, 8 * len(counters))
        arguments: list[torch.Tensor | None] = []
        for i, (slot, tensor) in enumerate(zip(self.slots, inputs, strict=True)):
            if i in self.numbers:
                arguments.append(None)
            elif slot.kind == "random_key":
                arguments.append(cells.key)
            elif slot.kind == "batch":
                laid, dtype = self.plan.buffers[i].strides, torch_dtype(slot.type.element)
                arguments.append(torch.empty_strided(slot.type.shape, laid, dtype=dtype, device=self.device))
            else:
                arguments.append(tensor.detach())
        arena = self.arena.take(self.plan.arena, self.device)
        self.bound = BoundPlan(self.planned, self.device, arguments, arena, cells, counters)
        self.fixed = [t for i, _ in self.batch if (t := arguments[i]) is not None]
        self.bindings += 1
        if self.device.type == "cuda":
            self.plan.handed_beyond = handed_beyond([t for t in (*arguments, self.arena.memory) if t is not None])
            self.graph = Graphed(self.bound)
            drawn = [p for p in self.plan.launches if p.name == "step.random"]
            if drawn and key.type == "cpu":
                self.graph.refuse(f"{drawn[0].name} of layer {drawn[0].layer} asks the host for its key (no Triton)")

    def strides_of(self, index: int, tensor: torch.Tensor) -> tuple[int, ...]:
        """How an argument lies in memory; a batch is copied to where it was planned."""
        planned = index in self.numbers or self.slots[index].kind in ("batch", "random_key")
        return self.plan.buffers[index].strides if planned else tuple(tensor.stride())

    def refuse_shared(self, inputs: Sequence[torch.Tensor]) -> None:
        """Raises where an argument that the step changes lies in the memory of another one."""
        changed = {r.argument for r in self.plan.results if r.argument >= 0}
        spans: list[tuple[int, int, int]] = []
        for i, tensor in enumerate(inputs):
            if i in self.numbers or self.slots[i].kind in ("batch", "random_key") or not tensor.numel():
                continue
            last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
            start = tensor.data_ptr()
            spans.append((start, start + (last + 1) * tensor.element_size(), i))
        spans.sort()
        reach, holder = -1, -1
        for start, end, i in spans:
            if start < reach and (i in changed or holder in changed):
                raise Unfit(f"{self.slots[i].name} and {self.slots[holder].name} share memory")
            if end > reach:
                reach, holder = end, i

    # ---- one step ----------------------------------------------------------------------------------------------------

    def __call__(
        self, batch: Sequence[torch.Tensor], put: Callable[[list[Any]], bool], key: Sequence[int]
    ) -> BoundPlan:
        """One step on the batch's tensors with this random key. Its results lie in the bound plan until the next step.

        put: puts the numbers of the host into the values of the plan; true where all counters are one number, which it
        has put into the place of the first alone.
        """
        bound = self.bound
        assert bound is not None
        if self.on_host:
            for fixed, (_, source) in zip(self.fixed, self.batch, strict=True):
                fixed.copy_(batch[source])
        elif self.fixed:
            foreach_copy(self.fixed, [batch[source] for _, source in self.batch])
        self.alike = bound.fill_in(key, put(bound.values))
        self.replayed = self.ranges is None and self.graph is not None and self.graph.replay(self.alike)
        if self.replayed:
            return bound
        if self.alike:
            bound.spread_numbers()
            self.alike = False
        if self.ranges is not None:
            bound.run_in_ranges(*self.ranges)
        elif self.graph is not None:
            self.graph.run()
        else:
            bound.run()
        return bound

    def written_before(self, error: BaseException) -> str:
        """The first argument that the failed step had changed already; "" where it found everything as it was.

        What is kept for an update does not count: a step that fails makes none.
        """
        bound = self.bound
        position = getattr(error, "launch_position", None)
        if bound is None or position is None:
            return ""
        for launch in self.plan.launches[:position]:
            for number in launch.writes:
                if number >= 0 and self.plan.buffers[number].space == "external":
                    slot = self.slots[self.plan.owner(number)]
                    if slot.kind != KEPT:
                        return slot.name
        return ""

    def completed(self, error: BaseException) -> bool:
        """After a step failed that does the update of the step before: does what is left of that update.

        False where the step had not begun, where the update itself failed, or where more has changed than that.
        """
        position = getattr(error, "launch_position", None)
        if self.bound is None or position is None:
            return False
        ahead = set(self.planned.function.attributes.get(AHEAD, ()))
        launches, owner = self.plan.launches, self.plan.owner

        def updates(launch: Launch) -> bool:
            return launch.phase == "update" and (launch.op >= 0 or owner(launch.writes[0]) in ahead)

        changed = [n for x in launches[:position] for n in x.writes if n >= 0]
        others = [n for n in changed if self.plan.buffers[n].space == "external" and owner(n) not in ahead]
        if updates(launches[position]) or others:
            return False
        self.bound.run_after(position, updates)
        return True


def check_fits(plan: Plan, device: torch.device, total: int | None = None) -> None:
    """Raises where a plan needs more memory than the device has: now, not when a step runs out of it."""
    if total is None:
        cuda = device.type == "cuda"
        total = torch.cuda.get_device_properties(device).total_memory if cuda else memory_bytes()
    if total is None or plan.peak <= total:
        return
    lasting = plan.bytes_in("external") + plan.bytes_in("constant")
    raise MemoryBudgetError(
        f"the step needs {plan.peak / 1e9:.2f} GB and {device} has {total / 1e9:.2f} GB: {plan.arena / 1e9:.2f} GB for "
        f"what it computes, {lasting / 1e9:.2f} GB for parameters, optimizer state and the batch.\n"
        f'Try: memory_budget="{int(total / 1e6 * 0.95)}MB" (computes values again instead of keeping them), '
        'accumulate=2 or more, a smaller batch, or precision="bf16"'
    )
