"""One compiled program of a step: what it was compiled for, where its numbers and results are, and what runs it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from ..backends.attentions import Decision
from ..budget import BudgetReport
from ..capture.reads import Reads
from ..dialects.step import torch_dtype
from ..plan.planner import Planned
from ..training.build import Program
from ..training.optimizer_plan import OptimizerPlan
from ..transforms.fuse import Fusion
from ..transforms.layout import own_strides
from ..transforms.layout_prices import Timing
from .counters import Counters
from .executor import Executable
from .fusions import parts_of
from .static import StaticStep
from .unchanged import Snapshot

if TYPE_CHECKING:
    from .late import Late
    from .replay import Replay


def laid_by_step(program: Program) -> dict[tuple[Any, ...], tuple[int, ...]]:
    """Strides of what a step lays out itself, by the source of its slot."""
    return {program.slots[i].source: s for i, s in own_strides(program.function).items()}


class Compiled:
    """One compiled program with what it was compiled for, and what runs it."""

    def __init__(
        self,
        program: Program,
        plan: OptimizerPlan,
        device: torch.device,
        numbers: Sequence[int],
        key: Any,
        seconds: dict[str, float],
        recipe: Sequence[str] = (),
        static: StaticStep | None = None,
        laid: Mapping[tuple[Any, ...], tuple[int, ...]] | None = None,
    ):
        self.program, self.plan, self.device, self.key, self.seconds = program, plan, device, key, seconds
        #: arguments that are single numbers on the host
        self.numbers = list(numbers)
        #: runs the program from its plan; None where it runs through the reference executor
        self.static = static
        #: why the reference executor runs it though there was a plan
        self.unplanned = ""
        #: the transformations that were applied, by their keys
        self.recipe = list(recipe)
        self.batch_slots = [s for s in program.slots if s.kind == "batch"]
        #: strides of what the step lays out itself, by the source of its slot
        self.laid = laid_by_step(program) if laid is None else dict(laid)
        #: numbers of the results that are not new state, what they are, and which of them are the user's
        self.returned = [i for i, r in enumerate(program.results) if r.slot is None]
        self.kinds = [program.results[i].kind for i in self.returned]
        self.users = [i for i, kind in enumerate(self.kinds) if kind in ("loss", "output")]
        self.norm, self.finite = (self.kinds.index(k) if k in self.kinds else None for k in ("grad_norm", "finite"))
        #: whether the program may hold an update back, so that counters live on its device
        self.skips = any(s.kind == "scaler" for s in program.slots)
        self.batch_types = {s.source[1]: s for s in self.batch_slots}
        #: shape and type of each tensor of a batch that has nothing else in it; None where it has
        self.flat_batch: list[tuple[Any, torch.dtype]] | None = None
        if sorted(self.batch_types) == list(range(len(self.batch_types))):
            slots = [self.batch_types[i] for i in range(len(self.batch_types))]
            self.flat_batch = [(s.type.shape, torch_dtype(s.type.element)) for s in slots]
        #: where each buffer lives: eager code may put another tensor there (`self.buffer = self.buffer + 1`)
        self.buffers: dict[str, tuple[dict[str, Any], str]] = {}
        #: Python values that the program was made from
        self.reads = program.captured.reads or Reads()
        #: what the bound tensors were; None where they must be looked up and bound again
        self.snapshot: Snapshot | None = None
        #: what was computed again to fit a memory budget
        self.budget: BudgetReport | None = None
        #: which kernel runs each attention, and why
        self.attentions: list[Decision] = []
        #: how images were laid out and by what, and what could not be timed for that, with the reason
        self.layouts = Timing()
        self.untimed: dict[str, str] = {}
        #: hyper-parameters that the optimizer's groups hold
        self.hypers = {s.source[2] for s in program.slots if s.kind == "hyper" and s.source[0] == "group"}
        #: where updates wait for the next forward: the other programs, and what all of them keep between steps
        self.late: Late | None = None
        self.kept: dict[tuple[Any, ...], torch.Tensor] = {}
        self.counters: Counters | None = None
        #: what does a step again by one call, once it has run as a graph; else the graph that it cannot do, and why not
        self.again: Replay | None = None
        self.long_way: tuple[Any, str] = (None, "")

    @property
    def planned(self) -> Planned | None:
        """The plan with what was fused for it; None where the reference executor runs the program."""
        return None if self.static is None else self.static.planned

    @property
    def waits(self) -> bool:
        """Whether updates wait for the next forward."""
        return bool(self.kept)

    def programs(self) -> Iterator[Compiled]:
        """This program and those that take turns with it."""
        yield self
        if self.late is not None:
            yield from (self.late.first, self.late.update, self.late.whole)

    @property
    def fusions(self) -> list[Fusion]:
        """What was fused in each function of the program."""
        return [] if self.static is None else [fusion for _, fusion in parts_of(self.static.planned)]

    def put_numbers(self, values: list[Any]) -> bool:
        """Puts the numbers of a step that is not the first into the values of its plan: see `Counters.put`."""
        assert self.counters is not None and self.snapshot is not None
        agree = self.counters.put(values, self.snapshot.same_groups and not self.waits)
        if not self.snapshot.same_groups:
            self.snapshot.keep_groups()
        return agree

    def tensors_of(self, example: Any, batch: tuple[Any, ...], named: dict[str, Any]) -> list[torch.Tensor] | None:
        """The tensors of a flat batch of exactly these shapes and types; None where it asks for a closer look."""
        if self.flat_batch is None:
            return None
        if len(batch) == 1 and not named and type(batch[0]) is dict:
            return self.tensors_of(example, (), batch[0])
        if named:
            if batch or type(example) is not dict or named.keys() != example.keys():
                return None
            tensors = [named[k] for k in example]
        else:
            tensors = list(batch)
            if type(example) is not tuple or len(tensors) != len(example):
                return None
        if len(tensors) != len(self.flat_batch):
            return None
        for tensor, (shape, dtype) in zip(tensors, self.flat_batch, strict=True):
            if not (
                isinstance(tensor, torch.Tensor)
                and tensor.shape == shape
                and tensor.dtype is dtype
                and tensor.device == self.device
            ):
                return None
        return tensors

    @cached_property
    def executable(self) -> Executable:
        """The reference executor of the program: it allocates as it goes and changes nothing."""
        return Executable(self.program.function, self.device, self.numbers)
