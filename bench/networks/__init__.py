"""The networks that compiled training is compared with eager on, each in a file of its own: `build(name, size)`."""

from __future__ import annotations

import importlib

from .network import SIZES, Batch, Network

NAMES = ("gpt2", "bert_large", "llama", "vit", "resnet50", "efficientnet_b0", "wavenet", "dlrm")


def build(name: str, size: str = "full", device: str = "cpu") -> Network:
    """One network with the weights it starts from, the same every time."""
    if name not in NAMES:
        raise ValueError(f"there is no network {name!r}: {', '.join(NAMES)}")
    return importlib.import_module(f"{__name__}.{name}").build(size, device)


__all__ = ["NAMES", "SIZES", "Batch", "Network", "build"]
