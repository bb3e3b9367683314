"""ONNX models in: read from a file, imported straight to step ops, trained like any torch module, written back.

`from_onnx` reads (files.py, tensors.py), decides what trains (state.py) and gives a module (module.py). A call imports
the graph for the shapes at hand (specialise.py, walk.py) by the rules in `operators/`. The `onnx` package is optional.
"""

from __future__ import annotations

from importlib.util import find_spec

from ..errors import InputError

if find_spec("onnx") is None:
    raise InputError("ONNX models need the `onnx` package\nTry: pip install wholestep[onnx]")

from .api import from_onnx, to_onnx
from .errors import (
    DataDependentError,
    OnnxError,
    OnnxFileError,
    OnnxGraphError,
    OnnxLimitError,
    OnnxUnsupportedError,
)
from .module import OnnxModule
from .sample import example
from .walk import Limits

__all__ = [
    "DataDependentError",
    "Limits",
    "OnnxError",
    "OnnxFileError",
    "OnnxGraphError",
    "OnnxLimitError",
    "OnnxModule",
    "OnnxUnsupportedError",
    "example",
    "from_onnx",
    "to_onnx",
]
