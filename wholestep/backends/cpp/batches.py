"""Several kernels as one function in C++ that runs them one after the other, each by all threads."""

from __future__ import annotations

from collections.abc import Sequence

from ...ir.core import Op
from ..kernels import Spec
from . import NAME, Candidate, candidates
from .compiler import digest, header


def key(function: Op, specs: Sequence[Spec]) -> str:
    """Kernels with the same key are one launch: all are."""
    return "kernels"


def ways(
    kernels: dict[str, tuple[Op, Sequence[Spec]]], order: Sequence[str]
) -> tuple[list[Candidate], list[tuple[Spec, ...]]]:
    """What runs kernels, given by name and in which order, and the scratch memory of each of them."""
    best = {name: candidates(*kernel)[0] for name, kernel in kernels.items()}
    functions = {name: f"{NAME}_{number}" for number, name in enumerate(best)}
    text = [c.source.replace(NAME, functions[name]).replace('extern "C"', "static") for name, c in best.items()]
    text += [f'extern "C" int {NAME}(void** tensors) {{', "  int outside = 0;"]
    at = 0
    for name in order:
        text.append(f"  outside |= {functions[name]}(tensors + {at});")
        at += len(kernels[name][1]) + len(best[name].scratch)
    text += ["  return outside;", "}", ""]
    source = "\n".join(text)
    made = Candidate(f"batch of {len(order)}", (), digest(source, header()), source)
    return [made], [best[name].scratch for name in order]
