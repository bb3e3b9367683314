"""The networks that compiled training is compared with eager on, each in a file of its own: `build(name, size)`."""

from __future__ import annotations

import importlib
from typing import Any

from torch import nn

from .network import SIZES, Batch, Network, of

#: eight that are trained for fifty steps in the tests
NAMES = ("gpt2", "bert_large", "llama", "vit", "resnet50", "efficientnet_b0", "wavenet", "dlrm")
#: the twelve of `wholestep bench`
TWELVE = (*NAMES, "wide_resnet50_2", "mobilenet_v2", "mlp_mixer", "fcn_resnet50")
#: those that have a twin in plain JAX
IN_JAX = ("gpt2", "resnet50")


def check(name: str, size: str) -> None:
    """ValueError where there is no such network, or it has no such size."""
    if name not in TWELVE:
        raise ValueError(f"there is no network {name!r}: {', '.join(TWELVE)}")
    of(importlib.import_module(f"{__name__}.{name}").DIMENSIONS, size)


def build(name: str, size: str = "full", device: str = "cpu") -> Network:
    """One network with the weights it starts from, the same every time."""
    check(name, size)
    return importlib.import_module(f"{__name__}.{name}").build(size, device)


def jax_twin(name: str, model: nn.Module, precision: str) -> Any:
    """Parameters, state and loss function of a network in plain JAX; None where there is no such twin."""
    if name not in IN_JAX:
        return None
    return importlib.import_module(f"{__name__}.jax_{name}").build(model, precision)


__all__ = ["NAMES", "SIZES", "TWELVE", "Batch", "Network", "build", "check", "jax_twin"]
