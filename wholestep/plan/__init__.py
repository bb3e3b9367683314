"""The static plan of a step: which launch runs when, where each tensor lies, what is written over what.

`plan_function` goes from a program to a `Plan`: flat data without code, which prints, diffs, saves and loads.
"""

from __future__ import annotations

from .plan import Buffer, Launch, Plan, Returned
from .planner import plan_function
from .text import describe_changes, load, module_to_plan, plan_to_module, save

__all__ = [
    "Buffer",
    "Launch",
    "Plan",
    "Returned",
    "describe_changes",
    "load",
    "module_to_plan",
    "plan_function",
    "plan_to_module",
    "save",
]
