"""A batch and a loss made up from what a graph says of its inputs and outputs: for `explain` and `bench` of a file."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from .api import from_onnx
from .dtypes import dtype_of, type_name
from .errors import OnnxError, OnnxLimitError
from .module import OnnxModule

#: the size of a symbolic dimension that is not bound: batches are small, everything else a short sequence
BATCH, OTHER = 2, 16
#: elements of one input that is made up
MAX_ELEMENTS = 1 << 30


def example(
    source: Any, bind: Mapping[str, int] | None = None, **options: Any
) -> tuple[OnnxModule, Callable[..., torch.Tensor], tuple[torch.Tensor, ...]]:
    """A model, a loss and a batch for an ONNX file: `ws.compile(model, loss_fn, optimizer, batch)` takes them.

    Symbolic dimensions have the size that `bind` gives them by name; else the first dimension of an input is 2 and any
    other 16. Floats are normal numbers, whole numbers 0 or 1 (they index something), by a fixed seed. The loss is the
    graph's output called `loss`, or its first one if that is a single number, else the mean square of all floating
    outputs.
    """
    model = from_onnx(source, **options)
    generator = torch.Generator().manual_seed(0)
    bind = dict(bind or {})
    unused = set(bind)
    batch = []
    for declared in model._graph.model.inputs:
        if declared.type.WhichOneof("value") != "tensor_type":
            raise OnnxError(f"input {declared.name} is not a tensor; write a script that makes the batch")
        tensor = declared.type.tensor_type
        if not tensor.HasField("shape"):
            raise OnnxError(f"input {declared.name} has no declared shape; write a script that makes the batch")
        shape = []
        for index, dim in enumerate(tensor.shape.dim):
            unused.discard(dim.dim_param)
            default = BATCH if index == 0 else OTHER
            shape.append(dim.dim_value if dim.WhichOneof("value") == "dim_value" else bind.get(dim.dim_param, default))
        batch.append(made_up(shape, tensor.elem_type, declared.name, generator))
    if unused:
        named = sorted(
            {d.dim_param for i in model._graph.model.inputs for d in i.type.tensor_type.shape.dim if d.dim_param}
        )
        raise OnnxError(
            f"no dimension is called {', '.join(sorted(unused))}; the graph has {', '.join(named) or 'none'}"
        )
    return model, loss_of(model.output_names), tuple(batch)


def made_up(shape: list[int], kind: int, name: str, generator: torch.Generator) -> torch.Tensor:
    """A tensor for an input."""
    dtype = dtype_of(kind)
    if dtype is None:
        raise OnnxError(f"input {name} holds {type_name(kind)}; write a script that makes the batch")
    if min(shape, default=0) < 0 or math.prod(shape) > MAX_ELEMENTS:
        raise OnnxLimitError(f"input {name} has the shape {shape}, which is not made up here; bind smaller dimensions")
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator).to(dtype)
    if name.endswith("mask"):
        return torch.ones(shape, dtype=dtype)
    return torch.randint(0, 2, shape, generator=generator).to(dtype)


def loss_of(names: list[str]) -> Callable[..., torch.Tensor]:
    """A loss over a model's outputs."""

    def loss_fn(model: Any, *batch: torch.Tensor) -> torch.Tensor:
        out = model(*batch)
        outputs = list(out) if isinstance(out, tuple) else [out]
        if "loss" in names:
            return outputs[names.index("loss")]
        if isinstance(outputs[0], torch.Tensor) and outputs[0].numel() == 1 and outputs[0].is_floating_point():
            return outputs[0].reshape(())
        squares = [o.float().square().mean() for o in outputs if isinstance(o, torch.Tensor) and o.is_floating_point()]
        if not squares:
            raise OnnxError("the graph has no floating-point output to make a loss of")
        return torch.stack(squares).sum()

    return loss_fn
