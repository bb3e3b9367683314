"""Wholestep compiles the whole training step (forward, loss, backward, clip, update) into one static program."""

from __future__ import annotations

from typing import Any

from . import machine
from .ir.collector import collector_paused

machine.protect()  # before torch's first matrix product: see machine/cpu.py

with collector_paused():  # it would go through all that torch has made, and find nothing
    from .api import compile, load
    from .errors import WholestepError
    from .integrations.fit import fit
    from .runtime.prefetch import prefetch
    from .runtime.train_step import TrainStep

__version__ = "0.1.0"
__all__ = [
    "TrainStep",
    "WholestepError",
    "__version__",
    "compile",
    "fit",
    "from_onnx",
    "load",
    "prefetch",
    "to_onnx",
]


def __getattr__(name: str) -> Any:
    if name in ("from_onnx", "to_onnx"):  # onnx is optional
        from . import onnx

        return getattr(onnx, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
