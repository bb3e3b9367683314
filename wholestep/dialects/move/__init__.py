"""The move dialect: which bytes travel, when and where, in three phases that `verify_plan` proves right."""

from __future__ import annotations

from .actions import Action, Collective, Copy, Launch, Recv, Results, Send, Wait
from .base import (
    ALLOC_LIFETIMES,
    ARENA,
    BUFFER,
    EXTERNAL_LIFETIMES,
    SPACES,
    TOKEN,
    extent,
    move,
    space,
    strides_of,
    type_of,
)
from .buffers import Alloc, Arena, External, Reuse, View
from .verify import PHASES, verify_plan

__all__ = [
    "ALLOC_LIFETIMES",
    "ARENA",
    "BUFFER",
    "EXTERNAL_LIFETIMES",
    "PHASES",
    "SPACES",
    "TOKEN",
    "Action",
    "Alloc",
    "Arena",
    "Collective",
    "Copy",
    "External",
    "Launch",
    "Recv",
    "Results",
    "Reuse",
    "Send",
    "View",
    "Wait",
    "extent",
    "move",
    "space",
    "strides_of",
    "type_of",
    "verify_plan",
]
