"""Host memory as the third choice under a budget: which values of forward wait there, and whether that costs time.

The largest values go first, of equal ones those made first: their copies have longest to travel. As few go as let the
plan fit. While all copies together take no longer than the step itself they are counted as hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..ir.core import Op
from ..machine.description import Description
from ..plan import Plan
from ..transforms.offload import Offload
from ..transforms.opportunity import matches, sites

FROM, TO = "device_to_host", "host_to_device"


@dataclass(frozen=True, slots=True)
class Away:
    """Values that wait in host memory: the recipe, their bytes, and predicted seconds for copies and for the step."""

    recipe: tuple[str, ...] = ()
    bytes: int = 0
    link_seconds: float | None = 0.0  # None where nobody measured the link
    step_seconds: float = 0.0

    @property
    def extra_seconds(self) -> float:
        """What is not hidden behind the step's own work; endless where the link is unknown."""
        return float("inf") if self.link_seconds is None else max(0.0, self.link_seconds - self.step_seconds)


def send_away(module: Op, recipe: Sequence[str]) -> None:
    """Applies `offload` at the sites of a recipe."""
    found, transformation = sites(module), Offload()
    for key in recipe:
        transformation.apply(found[key.partition(" ")[2]])


def fewest_away(
    module: Op,
    plan_with: Callable[[tuple[str, ...]], Plan],
    budget: int,
    forbidden: Sequence[str],
    machine: Description,
    step_seconds: float,
) -> Away | None:
    """The fewest values to send away so that the plan fits; None where even all of them are too few.

    plan_with: the plan of the step with these values sent away.
    """
    possible = [o for o in Offload().find(module) if not o.why_not]
    possible = [o for o in possible if not matches(o, forbidden)]
    possible.sort(key=lambda o: o.change.saved)
    keys = tuple(o.key for o in possible)
    if not keys or plan_with(keys).peak > budget:
        return None
    low, high = 0, len(keys)  # too few, enough
    while high - low > 1:
        middle = (low + high) // 2
        if plan_with(keys[:middle]).peak > budget:
            low = middle
        else:
            high = middle
    size = -sum(o.change.saved for o in possible[:high])
    links = machine.links
    known = FROM in links and TO in links
    return Away(keys[:high], size, size / links[FROM] + size / links[TO] if known else None, step_seconds)
