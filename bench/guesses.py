"""How good are first guesses? What was timed on a machine, generated way by generated way, from its cache.

`python bench/guesses.py [FOLDER ...] [--worst N] [--out FILE.md]`: folders with a `timings.sqlite` (default: the cache
of this machine). Of each region that two or more ways of a generator of kernels were timed for: how many times as long
the one that was tried first takes as the best of them (bench/tiles.py times all tiles of a product). The record is
bench/results/guesses.md, the test tests/bench/test_guesses.py.
"""

from __future__ import annotations

import argparse
import math
import pathlib
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from wholestep.backends.store import Choice, Store, cache_folder  # noqa: E402

#: those who generate kernels, and of many configurations try some
GENERATORS = ("triton", "cpp", "wgmma")
MICRO = 1e-6


@dataclass(frozen=True)
class Guess:
    """The ways of one generator that were timed for a region, as they were tried, with their seconds."""

    family: str
    ways: tuple[tuple[str, float], ...]
    about: str

    @property
    def best(self) -> float:
        return min(seconds for _, seconds in self.ways)

    @property
    def ratio(self) -> float:
        """How many times as long the first takes as the best."""
        return self.ways[0][1] / self.best


def guesses_of(choice: Choice) -> list[Guess]:
    """What one choice says; nothing of generators of which fewer than two ways ran."""
    found = []
    for generator in GENERATORS:
        own = f"{generator}:"
        ran = [(t.name.partition(":")[2], t.seconds) for t in choice.candidates if t.name.startswith(own) and not t.why]
        if len(ran) > 1:
            family = f"{generator} {ran[0][0].split()[0]}"
            found.append(Guess(family, tuple(ran), choice.about))
    return found


def mean_ratio(guesses: Sequence[Guess]) -> float:
    """The geometric mean."""
    return math.exp(sum(math.log(g.ratio) for g in guesses) / len(guesses))


def table(guesses: Sequence[Guess]) -> list[str]:
    """By family: regions, in how many the first is the best (within 2 %), the mean, what better ones would save."""
    families = defaultdict[str, list[Guess]](list)
    for guess in guesses:
        families[guess.family].append(guess)
        families["all"].append(guess)
    lines = ["| family | regions | first is best | first / best | worst | us beyond the best, of |"]
    lines.append("|---|---|---|---|---|---|")
    for family, own in sorted(families.items(), key=lambda pair: (pair[0] == "all", -len(pair[1]))):
        beyond, whole = sum(g.ways[0][1] - g.best for g in own) / MICRO, sum(g.best for g in own) / MICRO
        right = sum(g.ratio <= 1.02 for g in own)
        worst = max(g.ratio for g in own)
        lines.append(
            f"| {family} | {len(own)} | {right} | {mean_ratio(own):.3f} | {worst:.2f} | {beyond:,.0f} of {whole:,.0f} |"
        )
    return lines


def line_of(guess: Guess) -> str:
    ways = ", ".join(f"{name} {seconds / MICRO:.1f}" for name, seconds in guess.ways)
    return f"- {guess.ratio:.2f}: {ways} us ({guess.about})"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="*", type=pathlib.Path, default=[cache_folder()], metavar="FOLDER")
    parser.add_argument("--worst", type=int, default=10, help="so many regions are shown whose first guess is worst")
    parser.add_argument("--out", type=pathlib.Path, help="write it there as well")
    args = parser.parse_args(arguments)
    rows = [row for folder in args.folders for row in Store("", folder).rows()]
    guesses = [guess for row in rows for guess in guesses_of(row.choice)]
    if not guesses:
        raise SystemExit("no region there was timed in two ways of one generator")
    machines = sorted({row.machine for row in rows})
    lines = [*machines, "", *table(guesses), ""]
    lines += [line_of(g) for g in sorted(guesses, key=lambda g: -g.ratio)[: args.worst]]
    print("\n".join(lines))
    if args.out is not None:
        args.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
