"""One door for every transformation: `find` lists opportunities, `apply` takes one, a policy picks, a recipe remembers.

An opportunity names its transformation, its site, the change it predicts and, where it cannot be applied, why not. The
automatic pipeline, user code and saved recipes all go through `transform`.
"""

from __future__ import annotations

import difflib
import fnmatch
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar

import torch

from ..errors import InputError, WholestepError
from ..ir.builtin import functions
from ..ir.core import Op


@dataclass(frozen=True, slots=True)
class Change:
    """What applying an opportunity is predicted to change per step; negative is less."""

    bytes: int = 0  # read and written by all ops
    saved: int = 0  # held from forward to backward
    flops: int = 0
    #: at the limits of a described machine (`runtime/predicted.py`), unless a transformation says it; None without one
    seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Opportunity:
    """One thing that could be done at one site, or that cannot, and why not."""

    transformation: str
    site: str
    change: Change = Change()
    why_not: str = ""

    @classmethod
    def of(cls, transformation: str, site: str, what: Change | str) -> Opportunity:
        """By the change that it brings, or by the reason why it cannot be applied."""
        return cls(transformation, site, why_not=what) if isinstance(what, str) else cls(transformation, site, what)

    @property
    def key(self) -> str:
        """What a recipe, `force` and `forbid` call it."""
        return f"{self.transformation} {self.site}"

    def __str__(self) -> str:
        if self.why_not:
            return f"{self.key}: not possible: {self.why_not}"
        c = self.change
        time = "" if c.seconds is None else f", time {c.seconds * 1e6:+,.1f} us"
        return f"{self.key}: bytes {c.bytes:+,}, saved {c.saved:+,}, flops {c.flops:+,}{time}"


#: an op where something could be done, with what that would change, or with why it cannot be done
Place = tuple[Op, Change | str]


class Transformation(ABC):
    """A kind of change to a program. Levels: 1 one op, 2 neighbours, 3 the whole step, 4 devices."""

    name: ClassVar[str]
    level: ClassVar[int]
    #: False where results may differ beyond the order of summation: never picked by itself
    keeps_numerics: ClassVar[bool] = True
    #: True where it runs the op of its site once more: a plan then knows what that moves
    runs_again: ClassVar[bool] = False
    #: True where what it saves goes to the host and comes back, over the link between them
    over_link: ClassVar[bool] = False

    def find(self, module: Op) -> list[Opportunity]:
        """Every place where it could be applied, and those near misses a user may ask about."""
        found = [place for function in functions(module) for place in self.places(function)]
        names = site_names(module) if found else {}
        return [Opportunity.of(self.name, names[op], what) for op, what in found]

    def places(self, function: Op) -> Iterable[Place]:
        """The same for one function: what `find` goes by, where a transformation does not write that itself."""
        raise NotImplementedError(f"{type(self).__name__} has neither `find` nor `places`")

    def why_not_on(self, op: Op, device: torch.device) -> str:
        """Why a device has no use for it at an op where it is possible; empty if it has."""
        return ""

    @abstractmethod
    def apply(self, op: Op) -> None:
        """Changes the program at the op that `site_of` names."""


Policy = Callable[[Sequence[Opportunity]], Opportunity | None]
_TRANSFORMATIONS: dict[str, Transformation] = {}
_POLICIES: dict[str, Policy] = {}


def register_transformation(cls: type[Transformation]) -> type[Transformation]:
    """Class decorator: makes a transformation known, from our files or from a user's."""
    if " " in cls.name:
        raise ValueError(f"{cls.name!r} is no name for a transformation: it must be one word")
    _TRANSFORMATIONS[cls.name] = cls()
    return cls


def register_policy(policy: Policy) -> Policy:
    """Decorator: makes a policy known by the name of its function, for `ws.compile(..., policy="its_name")`."""
    _POLICIES[policy.__name__] = policy  # type: ignore[attr-defined]
    return policy


def policy_named(name: str) -> Policy:
    """A registered policy; InputError where there is none of that name."""
    if name not in _POLICIES:
        known = ", ".join(sorted(_POLICIES))
        raise InputError(
            f"there is no policy {name!r}; known: {known}; wholestep.transforms.opportunity.register_policy makes one "
            f"known{near(name, _POLICIES)}"
        )
    return _POLICIES[name]


def transformations() -> dict[str, Transformation]:
    """Every known transformation by name."""
    return dict(sorted(_TRANSFORMATIONS.items()))


def forget_transformation(name: str) -> None:
    """Takes a registered transformation out again."""
    _TRANSFORMATIONS.pop(name, None)


def sites(module: Op) -> dict[str, Op]:
    """Every op by its site: function, layer, op and its number among the same there. Other sites keep their names."""
    found: dict[str, Op] = {}
    counts: dict[str, int] = {}
    for function in functions(module):
        for op in function.regions[0].block:
            if op.definition.terminator:
                continue
            name = op.name.partition(".")[2]
            stem = f"{function.attributes['sym_name']}/{op.loc.layer or '-'}/{op.phase}/{name}"
            number = counts[stem] = counts.get(stem, -1) + 1
            found[f"{stem}#{number}"] = op
    return found


def site_names(module: Op) -> dict[Op, str]:
    """The site of every op."""
    return {op: site for site, op in sites(module).items()}


def opportunities(
    module: Op,
    levels: Iterable[int] = (1, 2, 3, 4),
    names: Sequence[str] | None = None,
    device: torch.device | None = None,
) -> list[Opportunity]:
    """What every transformation of these levels, and of these names, finds, impossible ones included.

    With a device also what that one has no use for is impossible.
    """
    wanted, known = set(levels), transformations()
    asked = [known[n] for n in (known if names is None else names) if n in known]
    found = [o for t in asked if t.level in wanted for o in found_by(t, module)]
    if device is None:
        return found
    at = sites(module)
    reasons = ["" if o.why_not else known[o.transformation].why_not_on(at[o.site], device) for o in found]
    return [Opportunity(o.transformation, o.site, why_not=r) if r else o for o, r in zip(found, reasons, strict=True)]


def found_by(how: Transformation, module: Op) -> list[Opportunity]:
    """What one transformation finds."""
    with named(how, "looked for opportunities", "find" if type(how).find is not Transformation.find else "places"):
        return how.find(module)


def applied(how: Transformation, op: Op, site: str) -> None:
    """Applies a transformation at an op."""
    with named(how, f"was applied at {site}", "apply"):
        how.apply(op)


@contextmanager
def named(how: Transformation, when: str, method: str) -> Iterator[None]:
    """Whatever goes wrong in a transformation is an error that says in which: it may be one that nobody asked for."""
    try:
        yield
    except WholestepError:
        raise
    except Exception as error:
        raise WholestepError(
            f"the transformation {how.name!r} failed while it {when}: {type(error).__name__}: {error}.\n"
            f"Try: correct {type(how).__name__}.{method}, or do without it: "
            f"wholestep.transforms.opportunity.forget_transformation({how.name!r})"
        ) from error


def do_nothing(found: Sequence[Opportunity]) -> Opportunity | None:
    """The policy that leaves the program as it is."""
    return None


@register_policy
def fewest_bytes(found: Sequence[Opportunity]) -> Opportunity | None:
    """The policy that takes whatever moves fewer bytes, the largest gain first."""
    best = min(found, key=lambda o: (o.change.bytes, o.key), default=None)
    return best if best is not None and best.change.bytes < 0 else None


@dataclass(frozen=True, slots=True)
class Whatever:
    """The policy that takes every opportunity of some transformations: the others need not be asked."""

    names: tuple[str, ...]

    def __call__(self, found: Sequence[Opportunity]) -> Opportunity | None:
        return next((o for o in found if o.transformation in self.names), None)


def whatever(*names: str) -> Whatever:
    """The policy that takes every opportunity of these transformations."""
    return Whatever(tuple(sorted(names)))


def transform(
    module: Op,
    policy: Policy = do_nothing,
    recipe: Sequence[str] = (),
    force: Sequence[str] = (),
    forbid: Sequence[str] = (),
    limit: int = 10_000,
    levels: Iterable[int] = (1, 2, 3, 4),
    device: torch.device | None = None,
) -> list[str]:
    """Applies a recipe, then what is forced, then what the policy picks until it picks nothing; gives the recipe of it.

    The policy sees what transformations of these levels find, and with a device only what that one has a use for.
    `force` and `forbid` are keys or patterns such as "recompute */gelu#*"; one that fits nothing is an error.
    """
    done = [apply_key(module, key) for key in recipe]
    for pattern in force:
        done += apply_pattern(module, pattern)
    check_patterns(module, forbid)
    levels = tuple(levels)
    while len(done) < limit and policy is not do_nothing:
        asked = policy.names if isinstance(policy, Whatever) else None
        possible = [o for o in opportunities(module, levels, asked, device) if not o.why_not and not matches(o, forbid)]
        safe = [o for o in possible if _TRANSFORMATIONS[o.transformation].keeps_numerics]
        picked = policy(safe)
        if picked is None:
            break
        if picked not in safe:
            raise InputError(f"a policy picks one of the opportunities that it is given, or None; this one: {picked!r}")
        done.append(apply_key(module, picked.key))
    return done


def matches(opportunity: Opportunity, patterns: Sequence[str]) -> bool:
    """Whether a pattern names the opportunity: its key, or its transformation alone."""
    return is_named(opportunity.key, patterns)


def is_named(key: str, patterns: Sequence[str]) -> bool:
    """The same by its key."""
    return any(p == key.partition(" ")[0] or fits(key, p) for p in patterns)


def fits(key: str, pattern: str) -> bool:
    return key == pattern or fnmatch.fnmatchcase(key, pattern)


def take(module: Op, names: Sequence[str], forbid: Sequence[str] = (), device: torch.device | None = None) -> list[str]:
    """Applies what is possible and not forbidden of some transformations, one after the other; gives the keys.

    For those that leave every other site as it was: each looks at the program once, not once per opportunity. The last
    comes first: what an op is called does not change with what comes after it.
    """
    done: list[str] = []
    for name in names:
        how, places = transformations()[name], sites(module)
        for opportunity in possible(module, name, forbid, device):
            applied(how, places[opportunity.site], opportunity.site)
            done.append(opportunity.key)
    return done


def possible(
    module: Op, name: str, forbid: Sequence[str] = (), device: torch.device | None = None
) -> list[Opportunity]:
    """What is possible, on this device if one is given, and not forbidden of a transformation, the last first."""
    found = opportunities(module, names=[name], device=device)
    return [o for o in reversed(found) if not o.why_not and not matches(o, forbid)]


def apply_key(module: Op, key: str) -> str:
    """Applies one opportunity by its key; InputError where there is none, or where it is not possible."""
    name, _, site = key.partition(" ")
    known = transformations()
    if name not in known:
        raise InputError(f"there is no transformation {name!r}; known: {', '.join(known)}{near(name, known)}")
    found = {o.key: o for o in found_by(known[name], module)}
    if key not in found:
        raise InputError(f"the program has no opportunity {key!r}{near(key, found)}")
    if found[key].why_not:
        raise InputError(f"{key!r} is not possible: {found[key].why_not}")
    applied(known[name], sites(module)[site], site)
    return key


def apply_pattern(module: Op, pattern: str) -> list[str]:
    """Applies every possible opportunity that fits a key or pattern, each as it stands when its turn comes."""
    fitting = [o for o in opportunities(module, names=meant(pattern)) if matches(o, [pattern])]
    if not fitting:
        raise InputError(f"force names {pattern!r}, which {fits_nothing(pattern)}")
    possible = [o for o in fitting if not o.why_not]
    if not possible:
        raise InputError(f"{fitting[0].key!r} is not possible: {fitting[0].why_not}")
    done = []
    for wanted in possible:
        still = {o.key for o in found_by(_TRANSFORMATIONS[wanted.transformation], module) if not o.why_not}
        if wanted.key in still:
            done.append(apply_key(module, wanted.key))
    return done


def check_patterns(module: Op, patterns: Sequence[str]) -> None:
    """Refuses patterns that fit nothing: a misspelt `forbid` must not pass unseen. The name of a transformation is
    none: what it applies to may be there only after others."""
    for pattern in patterns:
        name, _, site = pattern.partition(" ")
        if name in _TRANSFORMATIONS and site in ("", "*"):
            continue
        if not any(matches(o, [pattern]) for o in opportunities(module, names=meant(pattern))):
            raise InputError(f"forbid names {pattern!r}, which {fits_nothing(pattern)}")


def meant(pattern: str) -> list[str] | None:
    """The transformation that a key or pattern names, so that no other need be asked; None where it may be any."""
    name = pattern.partition(" ")[0]
    return None if any(c in name for c in "*?[") else [name]


def fits_nothing(pattern: str) -> str:
    """What to do about a pattern that fits no opportunity."""
    name = pattern.partition(" ")[0]
    hint = "" if name in _TRANSFORMATIONS else near(name, _TRANSFORMATIONS)
    return f"fits no opportunity; step.opportunities() lists them{hint}"


def near(given: str, choices: Iterable[str]) -> str:
    found = difflib.get_close_matches(given, list(choices), 1)
    return f"; did you mean {found[0]!r}?" if found else ""


def by_transformation(recipe: Iterable[str]) -> dict[str, list[str]]:
    """The sites of a recipe by what was done there, in the order in which each was done first."""
    found: dict[str, list[str]] = {}
    for key in recipe:
        name, _, site = key.partition(" ")
        found.setdefault(name, []).append(site)
    return found


def sites_text(where: Sequence[str], most: int = 3) -> str:
    """The first of some sites; of a kernel, which is several, the first of those."""
    shown = []
    for site in where[:most]:
        first, *others = site.split(" + ")
        shown.append(f"{first} + {len(others)} more" if others else first)
    return ", ".join(shown) + (", ..." if len(where) > most else "")
