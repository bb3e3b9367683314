"""The loop dialect: how one kernel walks its data. Code generators read it; `transforms/loops.py` writes it."""

from __future__ import annotations

from .ops import (
    FUNCTIONS,
    REDUCTIONS,
    ROUNDED,
    Apply,
    Constant,
    Index,
    Load,
    Random,
    Reduce,
    Space,
    Store,
    compute_type,
    loop,
)
from .schedule import NoSchedule, Schedule, inputs_of, outputs_of, schedule, space_of, varying

__all__ = [
    "FUNCTIONS",
    "REDUCTIONS",
    "ROUNDED",
    "Apply",
    "Constant",
    "Index",
    "Load",
    "NoSchedule",
    "Random",
    "Reduce",
    "Schedule",
    "Space",
    "Store",
    "compute_type",
    "inputs_of",
    "loop",
    "outputs_of",
    "schedule",
    "space_of",
    "varying",
]
