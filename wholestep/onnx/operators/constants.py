"""Tensors out of nothing."""

from __future__ import annotations

import numpy as np
import torch
from onnx import TensorProto

from ...dialects.step import ir_dtype
from ..context import Context, Tensor
from ..dtypes import element_of
from ..text import array_of
from . import operator


@operator("Constant")
def constant(c: Context):
    given = [name for name in c.attributes if c.attributes[name] is not None]
    if len(given) != 1:
        raise c.wrong("it must have exactly one attribute, its value")
    (kind,) = given
    value = c.attributes[kind]
    if kind == "value":
        proto = next(a.t for a in c.walk.own_attributes(c.node).values() if a.name == "value")
        return c.text(value) if isinstance(value, np.ndarray) else c.constant(value, proto.data_type)
    if kind in ("value_string", "value_strings"):
        return c.text(array_of([value] if kind == "value_string" else value, [] if kind == "value_string" else [-1]))
    types = {"value_int": torch.int64, "value_ints": torch.int64, "value_float": torch.float32}
    types["value_floats"] = torch.float32
    if kind not in types:
        raise c.unsupported(f"a constant given as {kind} is not supported", "store it as a dense tensor of numbers")
    return c.constant(torch.tensor(value, dtype=types[kind]))


@operator("ConstantOfShape")
def constant_of_shape(c: Context, shape: Tensor):
    wanted = c.ints(shape, "shape")
    if any(d < 0 for d in wanted):
        raise c.wrong(f"{wanted} is not a shape")
    value = c.attribute("value")
    if value is None:
        return c.b.full(0.0, wanted, ir_dtype(torch.float32))
    if isinstance(value, np.ndarray):
        raise c.unsupported("text is not supported here", "store it as an initializer")
    if value.numel() != 1:
        raise c.wrong("its value must be a single number")
    kind = next(a.t.data_type for a in c.walk.own_attributes(c.node).values() if a.name == "value")
    element = element_of(kind)
    assert element is not None
    if element.kind == "complex" or kind == TensorProto.UINT64:
        raise c.unsupported("constants of this type are not supported", "store the tensor as an initializer")
    return c.tensor(c.b.full(value.item(), wanted, element), kind)
