"""The cheapest choice that fits, with a proof: the integer program solved by HiGHS, which comes with SciPy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import util

import numpy

from .choice import Choice, Segments, measure
from .program import Program, program_of
from .silence import without_highs_lines

#: what the least memory is counted in, so that its variable stays small
LARGE = 1 << 20
#: seconds after which the best choice so far is taken; its distance from the bound is reported
TIME_LIMIT = 10.0


@dataclass(slots=True)
class Solved:
    """A choice and the least cost that any choice of this program can have, in seconds."""

    choice: Choice
    bound: float


def is_installed() -> bool:
    """Whether SciPy is there."""
    return util.find_spec("scipy") is not None


class Exact:
    """Solves for one graph at any limit."""

    name = "exact (HiGHS)"

    def __init__(self, segments: Segments):
        self.segments, self.program = segments, program_of(segments)
        self.known: dict[int | None, tuple[Sequence[float], float] | None] = {}  # by limit: a search comes back to some

    def solution(self, limit: int | None) -> tuple[Sequence[float], float] | None:
        """What `solve` finds, once per limit."""
        if limit not in self.known:
            self.known[limit] = solve(self.program, limit)
        return self.known[limit]

    def cheapest(self, limit: int) -> Solved | None:
        """The cheapest choice that holds no more than `limit` bytes; None where there is none."""
        found = self.solution(limit)
        if found is None:
            return None
        values, bound = found
        return Solved(measure(self.segments, self.program.nodes_again(self.segments, values)), bound)

    def leanest(self) -> Solved:
        """The cheapest choice among those that hold the fewest bytes."""
        found = self.solution(None)
        assert found is not None  # without a limit, running nothing again is a choice
        values, _ = found
        least = max((sum(c * round(values[v]) for v, c in terms) + b for terms, b in self.program.memory), default=0)
        solved = self.cheapest(int(least))
        assert solved is not None  # `values` is one
        return solved


def solve(program: Program, limit: int | None) -> tuple[Sequence[float], float] | None:
    """Values of the variables and a bound on the cost; without a limit the least memory is looked for."""
    from scipy.optimize import Bounds, LinearConstraint, milp  # type: ignore[import-untyped,import-not-found,unused-ignore]
    from scipy.sparse import csr_array  # type: ignore[import-untyped,import-not-found,unused-ignore]

    count = len(program.cost)
    if not count:
        return ([], 0.0) if limit is None or all(held <= limit for _, held in program.memory) else None
    lowest = limit is None
    unit = math.gcd(*[int(c) for terms, _ in program.memory for _, c in terms]) or 1  # whole numbers leave no rounding
    entries: list[tuple[int, int, float]] = []
    limits: list[float] = []
    for terms, at_most in program.rows:
        entries += [(len(limits), variable, c) for variable, c in terms]
        limits.append(at_most)
    for terms, held in program.memory:
        entries += [(len(limits), variable, c / unit) for variable, c in terms]
        if lowest:
            entries.append((len(limits), count, -float(LARGE)))
        limits.append(-held / unit if limit is None else (limit - held) // unit)
    rows, columns, values = zip(*entries, strict=True)
    width = count + lowest
    matrix = csr_array((values, (rows, columns)), shape=(len(limits), width))
    scale = max(program.cost) or 1.0
    cost = numpy.zeros(width)
    cost[:count] = 0.0 if lowest else numpy.asarray(program.cost) / scale
    cost[count:] = 1.0
    with without_highs_lines():
        result = milp(
            cost,
            constraints=LinearConstraint(matrix, -numpy.inf, limits),
            integrality=numpy.array([1] * count + [0] * lowest),
            bounds=Bounds(0, numpy.array([*map(float, program.upper), *[numpy.inf] * lowest])),
            options={"time_limit": TIME_LIMIT, "mip_rel_gap": 1e-6},
        )
    if result.x is None:
        return None
    return [float(round(x)) for x in result.x[:count]], float(result.mip_dual_bound) * scale
