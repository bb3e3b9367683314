"""Whether two trainings are the same: their losses, smoothed, as far apart as rounding alone carries them.

Rounding carries a long training anywhere in the end, so every step has a limit of its own: the first ones are strict.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

#: relative distance of smoothed losses that always counts as agreement, by precision
FLOORS = {"bf16": 0.01, "fp32": 1e-4}
#: how many times as far as eager training is from itself, rounded otherwise, a contender may be from it
TIMES = 2.0
#: and how many times as early: a step's limit is what rounding has done by this many times as many steps
SOONER = 2
#: a limit above this says little
TELLING = 0.1
#: and above this nothing: rounding decides where training goes, and losses need only be finite
CHAOS = 0.5


@dataclass(frozen=True, slots=True)
class Nearest:
    """The step (1 is the first) at which two curves are nearest to being too far apart, or are so most of all."""

    distance: float
    allowed: float
    step: int


def smooth(losses: Sequence[float], width: int = 5) -> list[float]:
    """Means over this many steps up to each."""
    return [statistics.fmean(losses[max(0, i - width + 1) : i + 1]) for i in range(len(losses))]


def apart(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """The largest relative distance of two curves."""
    return max(relative(ours, theirs))


def relative(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """Relative distances of two curves, step by step; infinite from 0 to anything else."""
    pairs = list(zip(ours, theirs, strict=True))
    return [0.0 if a == b else abs(a - b) / abs(b) if b else math.inf for a, b in pairs]


def distances(losses: Sequence[float], reference: Sequence[float]) -> list[float]:
    """Relative distances of two smoothed curves; infinite where one is not finite or not as long."""
    if len(losses) != len(reference) or not all(map(math.isfinite, [*losses, *reference])):
        return [math.inf] * len(reference)
    return relative(smooth(losses), smooth(reference))


def distance(losses: Sequence[float], reference: Sequence[float]) -> float:
    """The largest of `distances`."""
    return max(distances(losses, reference))


def limits(precision: str, reference: Sequence[float], rounded: Mapping[str, Sequence[float]]) -> list[float]:
    """How far a contender may be from eager training, step by step; never less than before.

    `rounded`: curves of eager training rounded otherwise.
    """
    known = [distances(curve, reference) for curve in rounded.values()]
    found = []
    for step in range(1, len(reference) + 1):
        seen = [each for curve in known for each in curve[: SOONER * step] if math.isfinite(each)]
        found.append(max([FLOORS[precision], *(TIMES * each for each in seen)]))
    return found


def nearest(losses: Sequence[float], reference: Sequence[float], allowed: Sequence[float]) -> Nearest:
    """Where two curves are furthest apart for what is allowed there, among the steps of which that says anything."""
    steps = zip(distances(losses, reference), allowed, range(1, len(reference) + 1), strict=True)
    found = [Nearest(*each) for each in steps]
    judged = [each for each in found if each.allowed <= CHAOS] or found
    return max(judged, key=lambda each: each.distance / each.allowed)
