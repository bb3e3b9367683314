"""Reading an ONNX model: the file, its version, and its tensors. Nothing of it is run and no code is loaded."""

from __future__ import annotations

import os
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from onnx import TensorProto, defs

from .errors import OnnxFileError, OnnxGraphError, OnnxUnsupportedError
from .tensors import read_tensor
from .text import read_text

OLDEST_OPSET = 1
#: the largest file: protobuf, and so ONNX, has no larger ones
MAX_FILE = (1 << 31) - 1


@dataclass
class Model:
    """A model as it was read: the message, its initializers as tensors, its opsets."""

    proto: Any
    folder: Path | None
    opsets: dict[str, int]
    initializers: dict[str, torch.Tensor]
    #: the ONNX type of each initializer
    kinds: dict[str, int]
    functions: dict[tuple[str, str, str], Any] = field(default_factory=dict)
    #: initializers that are text
    texts: dict[str, np.ndarray] = field(default_factory=dict)

    @property
    def inputs(self) -> list[Any]:
        """The inputs of the graph that are no initializers (old files list those among the inputs)."""
        return [i for i in self.proto.graph.input if i.name not in self.kinds]


def read(source: Any, folder: str | os.PathLike[str] | None = None) -> Model:
    """Reads a model from a path, bytes or a ModelProto."""
    base = Path(folder) if folder is not None else None
    if isinstance(source, onnx.ModelProto):
        proto = onnx.ModelProto()
        proto.CopyFrom(source)
    elif isinstance(source, bytes | bytearray | memoryview):
        proto = parse(bytes(source), "these bytes")
    elif isinstance(source, str | os.PathLike):
        path = Path(source)
        if not path.is_file():
            raise OnnxFileError(f"{path} is not a file")
        if path.stat().st_size > MAX_FILE:
            raise OnnxFileError(f"{path} is larger than 2 GiB, which no ONNX file is (large tensors go to other files)")
        proto = parse(path.read_bytes(), str(path))
        base = base or path.parent
    else:
        raise OnnxFileError(f"from_onnx takes a path, bytes or a ModelProto, not a {type(source).__name__}")
    return checked(proto, base)


def parse(data: bytes, what: str) -> Any:
    proto = onnx.ModelProto()
    try:
        proto.ParseFromString(data)
    except (DecodeError, ValueError, RecursionError) as error:
        raise OnnxFileError(f"{what}: not an ONNX model, or one that is damaged or cut off ({error})") from None
    if not proto.HasField("graph"):
        raise OnnxFileError(f"{what}: there is no graph in it; it is not an ONNX model, or it is damaged or cut off")
    return proto


def check_text(message: Any) -> None:
    """Every name in a message is text: protobuf hands on bytes that are none as they are."""
    for declared, value in message.ListFields():
        if declared.type == declared.TYPE_STRING:
            for text in [value] if isinstance(value, str | bytes) else value:
                if not isinstance(text, str):
                    raise OnnxFileError(f"{declared.full_name} holds bytes that are no text; the file is damaged")
        elif declared.type == declared.TYPE_MESSAGE:
            for inner in [value] if hasattr(value, "ListFields") else value:
                check_text(inner)


def checked(proto: Any, folder: Path | None) -> Model:
    """Checks versions and reads the initializers."""
    check_text(proto)
    if not 3 <= proto.ir_version <= onnx.IR_VERSION:
        raise OnnxFileError(
            f"the model has version {proto.ir_version} of the ONNX format; versions 3 to {onnx.IR_VERSION} can be "
            "read\nTry: a newer `onnx` package, or export the model again"
        )
    opsets = opset_versions(proto.opset_import)
    newest = defs.onnx_opset_version()
    version = opsets.get("")
    if version is not None and not OLDEST_OPSET <= version <= newest:
        raise OnnxUnsupportedError(
            f"the model uses opset {version}; opsets {OLDEST_OPSET} to {newest} can be read\n"
            "Try: onnx.version_converter.convert_version, or export the model again with opset_version="
        )
    if version is None and not opsets:
        raise OnnxFileError("the model names no opset (opset_import is empty)")
    if proto.training_info:
        warnings.warn("the model's own training algorithm (training_info) is not used", stacklevel=4)
    if not proto.graph.output:
        raise OnnxGraphError("the graph has no outputs")
    functions = {}
    for function in proto.functions:
        key = (plain_domain(function.domain), function.name, function.overload)
        if key in functions:
            raise OnnxGraphError(f"two functions are called {function.domain}.{function.name}")
        functions[key] = function
    initializers, kinds, texts = {}, {}, {}
    for tensor in proto.graph.initializer:
        if not tensor.name or tensor.name in kinds:
            raise OnnxGraphError(f"an initializer has no name, or two have the name {tensor.name!r}")
        if tensor.data_type == TensorProto.STRING:
            texts[tensor.name] = read_text(tensor)
        else:
            initializers[tensor.name] = read_tensor(tensor, folder)
        kinds[tensor.name] = tensor.data_type
    if proto.graph.sparse_initializer:
        name = proto.graph.sparse_initializer[0].values.name
        raise OnnxUnsupportedError(f"initializer {name} is sparse, which is not supported\nTry: store it densely")
    return Model(proto, folder, opsets, initializers, kinds, functions, texts)


def opset_versions(imports: Any) -> dict[str, int]:
    """Versions of operator sets by domain; the default domain is the empty string."""
    versions: dict[str, int] = {}
    for entry in imports:
        domain = plain_domain(entry.domain)
        if domain in versions:
            raise OnnxGraphError(f"the operator set {domain or 'ai.onnx'} is imported twice")
        if not 1 <= entry.version < 1 << 31:
            raise OnnxGraphError(f"the operator set {domain or 'ai.onnx'} has no version {entry.version}")
        versions[domain] = entry.version
    return versions


def plain_domain(domain: str) -> str:
    """A domain with the default one written as the empty string."""
    return "" if domain == "ai.onnx" else domain
