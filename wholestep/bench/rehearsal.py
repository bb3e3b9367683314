"""A rehearsal, where Python's bytecode is not installed: it is made once, by runs that nobody times.

Installers compile modules to bytecode; checkouts, and environments that were made without, have none, and whoever
imports a module then compiles it, in the middle of what is measured: importing PyTorch's compiler takes 2 s or 9.
Small steps of the same kinds of contenders leave the bytecode of all that they import in a folder of this run.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .contenders import DEFAULT, JAX, MODES, OURS, is_ours, split
from .runner import Failed, Runner, Settings
from .workload import Batch, Case

#: a module of each package that a contender compiles by; the package is taken to be like it
COMPILERS = {OURS: ("wholestep", "api.py"), DEFAULT: ("torch", "_inductor/compile_fx.py"), JAX: ("jax", "_src/api.py")}
#: seconds that a rehearsal may take
LIMIT = 180.0


@dataclass
class Small:
    """A network with an op of each kind that compilers have modules for."""

    model: nn.Module
    items: str = "4 images of 8x8"
    lr: float = 1e-3
    warmup: int = 1
    images: bool = True

    def loss_fn(self, model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(model(images), labels)

    def make_batch(self, seed: int, device: str) -> Batch:
        return torch.randn(4, 3, 8, 8, device=device), torch.arange(4, device=device)


class Mixed(nn.Module):
    """Convolution, normalisations, attention and products."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2))
        self.norm, self.mixed, self.head = nn.LayerNorm(16), nn.Linear(16, 48), nn.Linear(16, 8)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        rows = self.norm(self.seen(images).flatten(2).transpose(1, 2)).unsqueeze(1)
        q, k, v = self.mixed(rows).chunk(3, -1)
        attended = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.head(nn.functional.gelu(attended + rows).mean((1, 2)))


def build(name: str, size: str, device: str) -> Small:
    """As modules of networks do."""
    return Small(Mixed().to(device))


def jax_twin(name: str, model: nn.Module, precision: str) -> tuple[Any, Any, Callable[..., Any]]:
    """A network for JAX: parameters, state and loss."""
    numpy: Any = importlib.import_module("jax.numpy")

    def loss(parameters: Any, state: Any, images: Any, labels: Any) -> Any:
        return (images.mean((1, 2)) @ parameters * labels[:, None]).mean(), state

    return numpy.ones((3, 8)), numpy.zeros(()), loss


def kinds(contenders: Sequence[str]) -> list[str]:
    """One contender for each compiler that takes part."""
    names = [split(name)[0] for name in contenders]
    found = [OURS] if any(map(is_ours, names)) else []
    found += [DEFAULT] if any(name in MODES for name in names) else []
    return found + ([JAX] if JAX in names else [])


def has_bytecode(kind: str) -> bool:
    """Whether the package that a contender compiles by lies there with bytecode."""
    package, module = COMPILERS[kind]
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        return True  # it is not installed: nobody compiles it
    path = Path(spec.submodule_search_locations[0], module)
    return Path(importlib.util.cache_from_source(str(path))).exists()


@contextmanager
def bytecode(contenders: Sequence[str], settings: Settings, say: Callable[[str], None]) -> Iterator[bool]:
    """Processes that are started inside find the bytecode of contenders' packages; whether they do."""
    lacking = [kind for kind in kinds(contenders) if not has_bytecode(kind)]
    if not lacking:
        yield True
        return
    packages = ", ".join(COMPILERS[kind][0] for kind in lacking)
    say(f"{packages} lie here without bytecode: runs that are not timed make it once, for everybody")
    folder = tempfile.TemporaryDirectory(prefix="wholestep-bytecode-")
    with folder as name, environment(PYTHONPYCACHEPREFIX=name, PYTHONDONTWRITEBYTECODE=""):
        yield rehearse(kinds(contenders), settings, say)


def rehearse(names: Sequence[str], settings: Settings, say: Callable[[str], None]) -> bool:
    """A small step of each, beside each other; whether nobody failed."""
    began = time.monotonic()
    own = replace(settings, networks=__name__, limit=LIMIT, profile=False, bind={})
    with tempfile.TemporaryDirectory(prefix="wholestep-rehearsal-") as place:
        runners: dict[str, Runner] = {}

        def each(among: Sequence[str], do: Callable[[str], Any]) -> None:
            for name in among:
                try:
                    do(name)
                except Failed as error:
                    say(f"rehearsal of {name}: {error}")
                    if name in runners:
                        runners.pop(name).end()

        def start(name: str) -> None:
            runners[name] = Runner(Case("rehearsal", "tiny"), name, own, Path(place), began + LIMIT)

        try:
            each(names, start)
            each(list(runners), lambda name: runners[name].hear())
            each(list(runners), lambda name: runners[name].tell("prepare", steps=1))
            each(list(runners), lambda name: runners[name].hear())
        finally:
            for runner in runners.values():
                runner.end()
        say(f"rehearsed {', '.join(runners) or 'nobody'} in {time.monotonic() - began:.1f} s")
        return len(runners) == len(names)


@contextmanager
def environment(**values: str) -> Iterator[None]:
    """Sets variables of the environment, and puts back what was there."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
