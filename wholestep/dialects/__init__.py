"""The dialects of a program, each an altitude: step says what is computed, loop how one kernel walks its data, move
which bytes travel."""

from __future__ import annotations

from ..ir.builtin import builtin, func
from ..ir.dialect import Context, Dialect
from . import loop, move, step


def all_dialects() -> list[Dialect]:
    """Every dialect Wholestep ships."""
    return [builtin, func, step.step, loop.loop, move.move]


def context(allow_unregistered: bool = False) -> Context:
    """A parsing context that knows every dialect."""
    return Context(all_dialects(), allow_unregistered)
