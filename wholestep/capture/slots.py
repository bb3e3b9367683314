"""A slot names one input of the training step: what it is, where the runtime finds it, and its type."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..ir.types import TensorType


@dataclass(frozen=True)
class Slot:
    """One input of the step; slots with the same source are one input.

    `kind` is parameter, buffer, constant, batch or random_key; or, for the optimizer: `optimizer_state` with source
    ("state", parameter, key), `hyper` with source ("group", index, key, ...) or ("attribute", name, ...), and `fresh`
    with source ("fresh", parameter), which is 1.0 on a parameter's first update and 0.0 after it.
    """

    kind: str
    name: str
    source: tuple[Any, ...]
    type: TensorType
