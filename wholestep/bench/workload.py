"""What is trained in a benchmark: a network of the checkout, of a module the user names, or of an ONNX file."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from ..errors import InputError

Batch = tuple[torch.Tensor, ...]
#: where networks come from by default: beside the package in a checkout, not part of an installation
NETWORKS = "bench.networks"


@dataclass(frozen=True, slots=True)
class Case:
    """A network at a size, as a command line names it: `resnet50@few`. An ONNX file has no size."""

    network: str
    size: str = ""

    def __str__(self) -> str:
        return f"{self.network}@{self.size}" if self.size else self.network

    @property
    def is_onnx(self) -> bool:
        return self.network.endswith(".onnx")


@dataclass
class Workload:
    """A model in train mode with its loss and batches. `images`: it is laid out channels last."""

    items: str
    model: nn.Module
    loss_fn: Callable[..., torch.Tensor]
    make_batch: Callable[[int, str], Batch]
    lr: float
    warmup: int
    images: bool
    #: the module it came from
    source: str

    def batch(self, seed: int, device: str) -> Batch:
        made = self.make_batch(seed, device)
        if not self.images:
            return made
        return tuple(t.contiguous(memory_format=torch.channels_last) if t.dim() == 4 else t for t in made)

    @cached_property
    def optimizer(self) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
        """AdamW by PyTorch's fused kernels, and a learning rate that grows for some steps."""
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=self.lr, fused=True)
        return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / self.warmup))


def networks(module: str = NETWORKS) -> ModuleType:
    """The module that builds networks by name."""
    root = Path(__file__).resolve().parents[2]
    for place in (str(root), str(Path.cwd())):
        if place not in sys.path:
            sys.path.append(place)
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not (module == error.name or module.startswith(f"{error.name}.")):
            raise
        if module != NETWORKS:
            raise InputError(f"--networks names the module {module}, which cannot be imported from here") from error
        raise InputError(
            "the networks of the benchmark are part of a checkout of Wholestep, in bench/networks; run it there, give "
            "an ONNX file, or name a module of yours with --networks (it has a function build(name, size, device))"
        ) from error


def cases(names: Sequence[str], size: str, module: str = NETWORKS) -> list[Case]:
    """The cases a command line asks for. Without names: all networks that the module lists."""
    found: list[Case] = []
    if not names:
        listed = networks(module)
        known = getattr(listed, "TWELVE", ()) or getattr(listed, "NAMES", ())
        return [Case(name, each) for each in size.split(",") for name in known]
    for text in names:
        if text.endswith(".onnx"):
            if not Path(text).is_file():
                raise InputError(f"{text} is not there: give an ONNX file, or a network such as resnet50@few")
            found.append(Case(text))
            continue
        name, _, own = text.partition("@")
        found += [Case(name, each) for each in (own or size).split(",")]
    for case in found:
        check(case, module)
    return found


def check(case: Case, module: str) -> None:
    """Says what is wrong with a name or a size before anything is begun, where the networks' module has a `check`."""
    known = None if case.is_onnx else getattr(networks(module), "check", None)
    if known is not None:
        try:
            known(case.network, case.size)
        except ValueError as error:
            raise InputError(f"{case} cannot be built: {error}") from error


def build(
    case: Case, device: str, module: str = NETWORKS, bind: dict[str, int] | None = None, ours: bool = True
) -> Workload:
    """The workload of a case, with the weights it starts from: the same every time.

    An ONNX file is a module of ours; for others (not `ours`) it is one that makes the same calls of torch one by one.
    """
    if case.is_onnx:
        return of_onnx(case, device, bind or {}, ours)
    listed = networks(module)
    try:
        network: Any = listed.build(case.network, case.size, device)
    except ValueError as error:
        raise InputError(f"{case} cannot be built: {error}") from error
    except ModuleNotFoundError as error:
        raise InputError(f"{case} needs the package {error.name}, which is not installed") from error
    images = getattr(network, "images", False)
    model = network.model.to(memory_format=torch.channels_last) if images else network.model
    return Workload(
        network.items, model, network.loss_fn, network.make_batch, network.lr, network.warmup, images, source_of(model)
    )


def source_of(model: nn.Module) -> str:
    """The package whose class a model is, and its version if it has one."""
    name = type(model).__module__.partition(".")[0]
    version = getattr(sys.modules.get(name), "__version__", None)
    return f"{name} {version}" if version else type(model).__module__


def of_onnx(case: Case, device: str, bind: dict[str, int], ours: bool) -> Workload:
    """A model of an ONNX file, trained on one batch."""
    if importlib.util.find_spec("onnx") is None:
        raise InputError(f"{case.network} is an ONNX file, and those need the `onnx` package: wholestep[onnx]")
    from ..onnx import example
    from ..onnx.replay import Replay

    model, loss_fn, batch = example(case.network, bind)
    model = model.to(device).train()
    if not any(p.requires_grad for p in model.parameters()):
        raise InputError(f"{case.network} has no parameters to train: see docs/onnx.md for what counts as one")
    moved = tuple(t.to(device) for t in batch)
    network = model if ours else Replay(model, moved)
    items = "batch of " + ", ".join("x".join(map(str, t.shape)) or "1" for t in moved)
    source = "ONNX; for PyTorch its operators as torch calls, one by one"
    return Workload(items, network, loss_fn, lambda seed, device: moved, 1e-3, 10, False, source)
