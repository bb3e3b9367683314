"""Element types: ONNX's, torch's and the step dialect's.

Types that torch cannot compute with are *carried* by a wider one that holds each of their values exactly: int4 by int8,
the floats of 8 bits and less by float32. A tensor of the graph remembers the ONNX type it stands for.
"""

from __future__ import annotations

import torch
from onnx import TensorProto

from ..dialects.step import ir_dtype
from ..ir.types import ScalarType

#: ONNX element types that torch computes with, by the number that ONNX gives them
NATIVE: dict[int, torch.dtype] = {
    TensorProto.FLOAT: torch.float32,
    TensorProto.DOUBLE: torch.float64,
    TensorProto.FLOAT16: torch.float16,
    TensorProto.BFLOAT16: torch.bfloat16,
    TensorProto.INT8: torch.int8,
    TensorProto.INT16: torch.int16,
    TensorProto.INT32: torch.int32,
    TensorProto.INT64: torch.int64,
    TensorProto.UINT8: torch.uint8,
    TensorProto.UINT16: torch.uint16,
    TensorProto.UINT32: torch.uint32,
    TensorProto.UINT64: torch.uint64,
    TensorProto.BOOL: torch.bool,
    TensorProto.COMPLEX64: torch.complex64,
    TensorProto.COMPLEX128: torch.complex128,
}

#: ONNX element types that a wider torch type stands for
CARRIED: dict[int, torch.dtype] = {
    TensorProto.FLOAT8E4M3FN: torch.float32,
    TensorProto.FLOAT8E4M3FNUZ: torch.float32,
    TensorProto.FLOAT8E5M2: torch.float32,
    TensorProto.FLOAT8E5M2FNUZ: torch.float32,
    TensorProto.FLOAT8E8M0: torch.float32,
    TensorProto.FLOAT4E2M1: torch.float32,
    TensorProto.FLOAT6E2M3: torch.float32,
    TensorProto.FLOAT6E3M2: torch.float32,
    TensorProto.INT4: torch.int8,
    TensorProto.UINT4: torch.uint8,
    TensorProto.INT2: torch.int8,
    TensorProto.UINT2: torch.uint8,
}

#: torch's own types for carried ones, which a model takes as inputs and gives as outputs
TORCH_OWN: dict[int, torch.dtype] = {
    TensorProto.FLOAT8E4M3FN: torch.float8_e4m3fn,
    TensorProto.FLOAT8E4M3FNUZ: torch.float8_e4m3fnuz,
    TensorProto.FLOAT8E5M2: torch.float8_e5m2,
    TensorProto.FLOAT8E5M2FNUZ: torch.float8_e5m2fnuz,
    TensorProto.FLOAT8E8M0: torch.float8_e8m0fnu,
}

#: floating-point types in which a parameter can be trained
TRAINABLE = (TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.FLOAT16, TensorProto.BFLOAT16)

_NAMES: dict[int, str] = {value: name for name, value in TensorProto.DataType.items()}
_BY_DTYPE = {dtype: number for number, dtype in NATIVE.items()}


def type_name(number: int) -> str:
    """The name of an ONNX element type: `FLOAT`, `INT64`."""
    return _NAMES.get(number, f"unknown type {number}")


def dtype_of(number: int) -> torch.dtype | None:
    """The torch type in which tensors of an ONNX type are held; None for strings and unknown types."""
    return NATIVE.get(number) or CARRIED.get(number)


def element_of(number: int) -> ScalarType | None:
    """The element type of the step dialect in which an ONNX type is held; None for strings and unknown types."""
    dtype = dtype_of(number)
    return None if dtype is None else ir_dtype(dtype)


def onnx_type(dtype: torch.dtype) -> int:
    """The ONNX type of a torch type that is computed with."""
    try:
        return _BY_DTYPE[dtype]
    except KeyError:
        raise TypeError(f"{dtype} is not a type that is computed with here") from None


def schema_type(number: int) -> str:
    """A tensor of this type as operator schemas write it: `tensor(float)`."""
    return f"tensor({type_name(number).lower()})"
