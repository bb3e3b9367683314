"""Tensors of an ONNX file as torch tensors, and back.

What a file claims is checked before memory is taken: the number of bytes that type and shape ask for must be there, in
the file or in an external data file, which must lie in the model's own folder.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from onnx import TensorProto, numpy_helper

from .dtypes import CARRIED, NATIVE, type_name
from .errors import OnnxFileError, OnnxUnsupportedError

#: bits of one element as files hold it
_BITS: dict[int, int] = {
    TensorProto.FLOAT: 32, TensorProto.DOUBLE: 64, TensorProto.FLOAT16: 16, TensorProto.BFLOAT16: 16,
    TensorProto.INT8: 8, TensorProto.INT16: 16, TensorProto.INT32: 32, TensorProto.INT64: 64,
    TensorProto.UINT8: 8, TensorProto.UINT16: 16, TensorProto.UINT32: 32, TensorProto.UINT64: 64,
    TensorProto.BOOL: 8, TensorProto.COMPLEX64: 64, TensorProto.COMPLEX128: 128,
    TensorProto.FLOAT8E4M3FN: 8, TensorProto.FLOAT8E4M3FNUZ: 8, TensorProto.FLOAT8E5M2: 8,
    TensorProto.FLOAT8E5M2FNUZ: 8, TensorProto.FLOAT8E8M0: 8, TensorProto.FLOAT4E2M1: 4,
    TensorProto.FLOAT6E2M3: 8, TensorProto.FLOAT6E3M2: 8,
    TensorProto.INT4: 4, TensorProto.UINT4: 4, TensorProto.INT2: 2, TensorProto.UINT2: 2,
}  # fmt: skip
#: the field that holds a type's numbers where they are not raw bytes
_FIELDS: dict[int, str] = {
    TensorProto.FLOAT: "float_data", TensorProto.COMPLEX64: "float_data",
    TensorProto.DOUBLE: "double_data", TensorProto.COMPLEX128: "double_data",
    TensorProto.INT64: "int64_data", TensorProto.UINT32: "uint64_data", TensorProto.UINT64: "uint64_data",
}  # fmt: skip


def read_tensor(proto: Any, folder: Path | None) -> torch.Tensor:
    """A tensor of the file, in the torch type that holds it. `folder` is where external data may lie."""
    name = proto.name or "an unnamed tensor"
    kind = proto.data_type
    expected = bytes_of(proto)
    if proto.HasField("segment"):
        raise OnnxUnsupportedError(f"tensor {name} is stored in segments, which is not supported")
    shape = [int(d) for d in proto.dims]
    if any(d < 0 for d in shape):
        raise OnnxFileError(f"tensor {name} has the shape {shape}, with a negative dimension")
    count = math.prod(shape)
    if proto.data_location == TensorProto.EXTERNAL:
        return decode(external_bytes(proto, folder, expected), kind, shape)
    field = _FIELDS.get(kind, "int32_data")
    if proto.HasField("raw_data"):
        there = len(proto.raw_data)
        if there != expected:
            raise OnnxFileError(
                f"tensor {name}: {type_name(kind)} of shape {shape} takes {expected} bytes, but the file holds "
                f"{there}; it is damaged or was cut off"
            )
        return decode(proto.raw_data, kind, shape)
    held, numbers = len(getattr(proto, field)), count
    if kind in (TensorProto.COMPLEX64, TensorProto.COMPLEX128):
        numbers = 2 * count
    elif _BITS[kind] < 8:
        numbers = expected
    if held != numbers:
        raise OnnxFileError(
            f"tensor {name}: {type_name(kind)} of shape {shape} has {numbers} numbers, but the file holds {held} in "
            f"{field}; it is damaged or was cut off"
        )
    try:
        return as_torch(numpy_helper.to_array(proto), kind)
    except (ValueError, TypeError, OverflowError) as error:
        raise OnnxFileError(f"tensor {name} cannot be read: {error}") from error


def decode(data: bytes, kind: int, shape: list[int]) -> torch.Tensor:
    """Raw little-endian bytes as a tensor."""
    if _BITS[kind] < 8 or kind not in NATIVE:
        proto = TensorProto(dims=shape, data_type=kind, raw_data=data)
        return as_torch(numpy_helper.to_array(proto), kind)
    if kind == TensorProto.BOOL:
        return torch.from_numpy(np.frombuffer(data, np.uint8) != 0).reshape(shape)
    dtype = NATIVE[kind]
    if not data:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(data), dtype=dtype).reshape(shape)


def as_torch(array: np.ndarray, kind: int) -> torch.Tensor:
    """A numpy array of an ONNX type in the torch type that holds it."""
    if kind in CARRIED:
        target = np.float32 if CARRIED[kind] is torch.float32 else np.int8 if CARRIED[kind] is torch.int8 else np.uint8
        return torch.from_numpy(array.astype(target))
    if kind == TensorProto.BFLOAT16:
        return torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(np.array(array, copy=True, order="C"))


def tensors_of(message: Any) -> Iterator[Any]:
    """Every tensor of a message: initializers, attributes, those of subgraphs and functions."""
    if isinstance(message, TensorProto):
        yield message
        return
    for declared, value in message.ListFields():
        if declared.type == declared.TYPE_MESSAGE:
            for inner in [value] if hasattr(value, "ListFields") else value:
                yield from tensors_of(inner)


def take_in(proto: Any, folder: Path | None) -> None:
    """Puts the bytes of a tensor that lies in a file of its own into the tensor."""
    data = external_bytes(proto, folder, bytes_of(proto))
    proto.ClearField("external_data")
    proto.ClearField("data_location")
    proto.raw_data = data


def bytes_of(proto: Any) -> int:
    """The bytes that a tensor of this type and shape takes."""
    if proto.data_type not in _BITS:
        raise OnnxUnsupportedError(
            f"tensor {proto.name or 'without a name'}: {type_name(proto.data_type)} tensors are not supported"
        )
    return (math.prod(proto.dims) * _BITS[proto.data_type] + 7) // 8


def external_bytes(proto: Any, folder: Path | None, expected: int) -> bytes:
    """The bytes of a tensor that lies in a file of its own; only files inside the model's folder are opened."""
    name = proto.name or "an unnamed tensor"
    if folder is None:
        raise OnnxFileError(
            f"tensor {name} lies in an external data file, and a model in memory has no folder to look in\n"
            "Try: give from_onnx the path of the model, or folder="
        )
    entries = {e.key: e.value for e in proto.external_data}
    location = entries.get("location", "")
    path = inside(folder, location, name)
    try:
        offset, length = int(entries.get("offset") or 0), int(entries.get("length") or expected)
    except ValueError:
        raise OnnxFileError(f"tensor {name}: offset or length of its external data is not a number") from None
    if not path.is_file():
        raise OnnxFileError(
            f"tensor {name}: its external data file {location} is not there\n"
            "Try: copy it into the folder of the model, beside the .onnx file"
        )
    size = path.stat().st_size
    if length != expected or offset < 0 or offset + length > size:
        raise OnnxFileError(
            f"tensor {name} takes {expected} bytes; {location} has {size}, of which it asks for {length} at {offset}; "
            "the file is damaged or was cut off"
        )
    with open(path, "rb") as file:
        file.seek(offset)
        data = file.read(length)
    if len(data) != length:
        raise OnnxFileError(f"tensor {name}: {location} ended early")
    return data


def inside(folder: Path, location: str, name: str) -> Path:
    """The file a location names, or an error where that is not a file inside the folder."""
    refused = (
        f"tensor {name}: its external data {location!r} leads outside of the model's folder, which is not allowed\n"
        "Try: copy the data file itself (no link) beside the .onnx file and save the model with a plain file name"
    )
    plain = location.replace("\\", "/")
    if not location or "\0" in location:
        raise OnnxFileError(f"tensor {name}: its external data has no file name")
    if os.path.isabs(location) or plain.startswith("/") or ".." in plain.split("/") or plain[1:2] == ":":
        raise OnnxFileError(refused)
    try:
        root = folder.resolve(strict=True)
        path = (root / location).resolve()
    except (OSError, RuntimeError) as error:
        raise OnnxFileError(f"tensor {name}: its external data {location!r} cannot be found: {error}") from None
    if not path.is_relative_to(root):
        raise OnnxFileError(refused)
    return path


def write_tensor(proto: Any, tensor: torch.Tensor) -> None:
    """Puts the values of a torch tensor of the same type and shape into a tensor of a file, as raw bytes."""
    name, kind, dims = proto.name, proto.data_type, list(proto.dims)
    plain = tensor.detach().cpu().contiguous()
    proto.Clear()
    proto.name, proto.data_type = name, kind
    proto.dims.extend(dims)
    proto.raw_data = plain.reshape(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b""
