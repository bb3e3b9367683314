"""Plans a step again and again while a budget is fitted: what does not change between trials is worked out once.

Calls that are alike are traced once, pieces of equal structure are lowered once. A plan that is asked for with `marked`
tells for every launch which ops of the program it runs: marks stand where ops have their layer, and whatever an op
becomes, expanded, copied or fused, keeps them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from ..backends.choose import Choices
from ..backends.kernels import Kernels
from ..dialects.step.control import root_of
from ..dialects.strides import Strides
from ..ir.builtin import functions, lookup
from ..ir.core import Location, Op
from ..plan.planner import Planned, planned_function
from ..transforms.fusion_wishes import Wishes
from ..transforms.regions import Bodies

MARK = re.compile(r"=(\d+)=")


@dataclass(slots=True)
class Trials:
    """Plans of one step. choices: who runs regions; None where ATen runs every op. wishes: what a user asks of fusion.

    note: writes down in a plan what is known only on the device: the memory that libraries take.
    """

    device: torch.device
    numbers: Sequence[int]
    strides: Sequence[Strides | None] | None
    choices: Choices | None = None
    wishes: Wishes | None = None
    note: Callable[[Planned], None] | None = None
    count: int = 0
    kernels: Kernels = field(init=False)
    pieces: Bodies = field(default_factory=Bodies)

    def __post_init__(self) -> None:
        self.kernels = Kernels(self.device)

    @property
    def fuses(self) -> bool:
        return self.choices is not None

    def planned(self, function: Op, marked: bool = False, fused: bool = True) -> Planned:
        """The plan of a step; marked: of a copy with marks, which no wish of a user's fits. fused: as it will run."""
        self.count += 1
        wishes = self.wishes or Wishes()
        if marked:
            function, wishes = lookup(with_marks(root_of(function)), function.attributes["sym_name"]), Wishes()
        planned = planned_function(
            function,
            self.device,
            self.numbers,
            self.strides,
            choices=self.choices if fused else None,
            wishes=wishes,
            kernels=self.kernels,
            pieces=self.pieces,
        )
        if self.note is not None:
            self.note(planned)
        return planned


def with_marks(module: Op) -> Op:
    """A copy of a program in which the layer of every op is the number of the op in its function."""
    copy = module.clone()
    for function in functions(copy):
        for number, op in enumerate(function.regions[0].block):
            op.loc = Location(f"={number}=")
    return copy


def origins(planned: Planned) -> list[list[int]]:
    """Of a marked plan: for every op of the planned function the numbers of the program's ops that it does."""
    inside: dict[Op, list[int]] = {}
    for op, names in planned.fusion.kernels if planned.fusion is not None else ():
        marks = [MARK.fullmatch(name.split("/")[1]) for name in names if "/" in name]
        inside.setdefault(op, []).extend(int(m[1]) for m in marks if m is not None)
    found = []
    for op in planned.function.regions[0].block:
        mark = MARK.fullmatch(op.loc.layer)
        found.append(sorted(set(inside[op])) if op in inside else [int(mark[1])] if mark is not None else [])
    return found
