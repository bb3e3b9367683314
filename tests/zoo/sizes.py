"""How large the networks of the zoo are: tiny in tests, of middle size by `WHOLESTEP_ZOO=middle` (`bench/zoo.py`)."""

from __future__ import annotations

import os
from typing import TypeVar

T = TypeVar("T")
VARIABLE, MIDDLE = "WHOLESTEP_ZOO", "middle"


def sized(tiny: T, middle: T) -> T:
    """What a size is now."""
    return middle if os.environ.get(VARIABLE) == MIDDLE else tiny
