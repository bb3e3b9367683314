"""Whether two trainings are the same: their losses, smoothed, as far apart as rounding alone carries them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

#: relative distance of smoothed losses that always counts as agreement, by precision
FLOORS = {"bf16": 0.01, "fp32": 1e-3}
#: how many times as far as eager training is from itself, rounded otherwise, a contender may be from it
TIMES = 2.0


def smooth(losses: Sequence[float], width: int = 5) -> list[float]:
    """Means over this many steps up to each."""
    return [statistics.fmean(losses[max(0, i - width + 1) : i + 1]) for i in range(len(losses))]


def apart(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """The largest relative distance of two curves."""
    return max(abs(a - b) / abs(b) for a, b in zip(ours, theirs, strict=True))


def distance(losses: Sequence[float], reference: Sequence[float]) -> float:
    """The largest relative distance of two smoothed curves; infinite where one is not finite or not as long."""
    if len(losses) != len(reference) or not all(map(math.isfinite, [*losses, *reference])):
        return math.inf
    return apart(smooth(losses), smooth(reference))


def tolerance(precision: str, reference: Sequence[float], rounded: Mapping[str, Sequence[float]]) -> float:
    """How far a contender may be from eager training. `rounded`: curves of eager training rounded otherwise."""
    known = [distance(curve, reference) for curve in rounded.values()]
    return max([FLOORS[precision], *(TIMES * found for found in known if math.isfinite(found))])
