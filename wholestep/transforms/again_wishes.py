"""What a user asks of `compute_again`: lines of a recipe, what must be done and what must not.

A line is "compute_again <producer> into <consumer> + <consumer>", with an op of each kernel that computes the value.
Patterns of `force` and `forbid` may name the producer alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..ir.core import Value
from .opportunity import fits, meant
from .regions import base

if TYPE_CHECKING:
    from .fuse import Fuser, Group

NAME = "compute_again"
INTO = " into "


@dataclass(frozen=True, slots=True)
class AgainWishes:
    """Those lines and patterns that are about computing again."""

    recipe: tuple[str, ...] = ()
    force: tuple[str, ...] = ()
    forbid: tuple[str, ...] = ()

    @classmethod
    def among(cls, recipe: Iterable[str], force: Iterable[str], forbid: Iterable[str]) -> AgainWishes:
        lines, forced = (tuple(k for k in keys if k.partition(" ")[0] == NAME) for keys in (recipe, force))
        return cls(lines, forced, tuple(k for k in forbid if meant(k) in (None, [NAME])))


def site(fuser: Fuser, value: Value, readers: Sequence[Group]) -> str:
    """What a value and the kernels that compute it are called: by ops of the program, which copies are not."""
    assert value.op is not None
    first = []
    for group in readers:
        named = [op for op in group.members if op in fuser.names]
        first.append(next((op for op in named if any(base(v) is value for v in op.operands)), named[0]))
    return fuser.names[value.op] + INTO + " + ".join(fuser.names[op] for op in first)


def is_unwanted(fuser: Fuser, site: str) -> bool:
    """Whether a line is forbidden."""
    found = [p for p in fuser.again.forbid if is_meant(site, p)]
    fuser.fusion.forbidden.update(found)
    return bool(found)


def is_meant(site: str, pattern: str) -> bool:
    """Whether a pattern names a line, its producer, or whatever is computed again."""
    keys = (NAME, f"{NAME} {site}", f"{NAME} {site.partition(INTO)[0]}")
    return any(fits(key, pattern) for key in keys)
