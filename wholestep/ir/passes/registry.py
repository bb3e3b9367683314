"""The registry of passes and the pipeline that runs them: `cse,dce{option=1}`.

A pass is `def f(module, *, option=default)`: the default gives the option's type, the docstring is what `--list` shows.
"""

from __future__ import annotations

import difflib
import inspect
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ...errors import IRError
from ..collector import collector_paused
from ..core import Op

Pass = Callable[..., None]
_PASSES: dict[str, Pass] = {}
_STAGE = re.compile(r"\s*([A-Za-z_][\w\-]*)\s*(?:\{([^{}]*)\})?\s*(,|\Z)")


@dataclass(frozen=True, slots=True)
class PassRun:
    """What one run of a pass cost and did."""

    name: str
    seconds: float
    ops_before: int
    ops_after: int


def register_pass(name: str) -> Callable[[Pass], Pass]:
    """Decorator: makes a function runnable as a pass under this name."""

    def register(function: Pass) -> Pass:
        if name in _PASSES and _PASSES[name] is not function:
            raise ValueError(f"a pass named {name!r} is registered already")
        if not re.fullmatch(r"[A-Za-z_][\w\-]*", name):
            raise ValueError(f"{name!r} is not a name a pipeline can spell: letters, digits, '-' and '_'")
        _PASSES[name] = function
        return function

    return register


def available() -> dict[str, str]:
    """Every registered pass with its documentation."""
    return {name: inspect.getdoc(function) or "" for name, function in sorted(_PASSES.items())}


def run_pipeline(module: Op, pipeline: str) -> list[PassRun]:
    """Runs passes on a module in place, in the order the text names them; checks the text before the first one runs."""
    stages = parse_pipeline(pipeline)
    runs = []
    count = _count(module)
    for name, options in stages:
        start = time.perf_counter()
        with collector_paused():
            _PASSES[name](module, **options)
        seconds = time.perf_counter() - start
        before, count = count, _count(module)
        runs.append(PassRun(name, seconds, before, count))
    return runs


def parse_pipeline(pipeline: str) -> list[tuple[str, dict[str, Any]]]:
    """The passes a text names, each with its options as Python values."""
    stages: list[tuple[str, dict[str, Any]]] = []
    position = 0
    while pipeline.strip() and position <= len(pipeline):
        found = _STAGE.match(pipeline, position)
        if found is None:
            raise IRError(
                f"cannot read the pipeline {pipeline!r} at {pipeline[position:]!r}; "
                "expected a form such as cse,dce{option=1}"
            )
        name, options, comma = found.groups()
        if name not in _PASSES:
            near = difflib.get_close_matches(name, _PASSES, 1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise IRError(f"there is no pass {name!r}; {hint}known passes: {', '.join(sorted(_PASSES))}")
        stages.append((name, _options(name, options or "")))
        if not comma:
            break
        position = found.end()
    return stages


def _options(name: str, text: str) -> dict[str, Any]:
    known = dict(list(inspect.signature(_PASSES[name]).parameters.items())[1:])
    values: dict[str, Any] = {}
    for item in re.split(r"[\s,]+", text.strip()) if text.strip() else ():
        key, equals, value = item.partition("=")
        key = key.replace("-", "_")
        if key not in known:
            listed = ", ".join(known) or "none"
            raise IRError(f"the pass {name!r} has no option {key!r}; its options: {listed}")
        if not equals:
            value = "true"
        values[key] = _convert(name, key, value, known[key].default)
    for key, parameter in known.items():
        if parameter.default is inspect.Parameter.empty and key not in values:
            raise IRError(f"the pass {name!r} needs its option {key!r}: {name}{{{key}=...}}")
    return values


def _convert(name: str, key: str, value: str, default: Any) -> Any:
    try:
        if isinstance(default, bool):
            return {"true": True, "1": True, "false": False, "0": False}[value]
        if isinstance(default, int | float):
            return type(default)(value)
    except (KeyError, ValueError):
        kind = type(default).__name__
        raise IRError(f"option {key!r} of the pass {name!r} is a {kind}, and {value!r} is none") from None
    return value


def _count(module: Op) -> int:
    return sum(1 for _ in module.walk()) - 1
