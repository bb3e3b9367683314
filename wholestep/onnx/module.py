"""An ONNX graph as a torch module: its initializers are parameters and buffers, its call is one operator.

Eager calls run by the reference executor, with gradients by our own autodiff. While a model is captured the call is one
node, `wholestep::onnx_call`, which the importer replaces by the step ops of the imported graph.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from onnx import TensorProto
from torch import nn

from ..capture.importer import Importer, aten
from ..dialects.step import torch_dtype
from ..ir.core import Location, Value
from .errors import OnnxError
from .specialise import Graph, Specialised, carried_input, own_output
from .text import Text, text_input

#: the functions of live modules, by the number that is part of the operator's call
_LIVE: weakref.WeakValueDictionary[str, Specialised] = weakref.WeakValueDictionary()
_NUMBERS = itertools.count()


class OnnxModule(nn.Module):
    """A model that came as an ONNX file. Call it with the graph's inputs, by position or by name.

    It gives the graph's output, or a tuple of them. `train()` and `eval()` decide about BatchNormalization and Dropout:
    while training, batch statistics are used (and running ones updated) and elements are dropped, whatever mode the
    file was exported for; in eval mode neither is done. Text is numpy arrays of str, in and out.
    """

    def __init__(self, graph: Graph):
        super().__init__()
        self._graph = graph
        for name, found in graph.state.items():
            owner: nn.Module = self
            *modules, last = found.path.split(".")
            for part in modules:
                if part not in owner._modules:
                    owner.add_module(part, Scope())
                owner = owner._modules[part]  # type: ignore[assignment]
            tensor = graph.model.initializers.pop(name)
            if found.kind == "parameter":
                owner.register_parameter(last, nn.Parameter(tensor, requires_grad=found.trains))
            else:
                owner.register_buffer(last, tensor)

    @property
    def input_names(self) -> list[str]:
        return [i.name for i in self._graph.model.inputs]

    @property
    def output_names(self) -> list[str]:
        return list(self._graph.outputs)

    def initializers(self) -> dict[str, torch.Tensor]:
        """The parameters and buffers by the names that the ONNX file gives them."""
        return {name: self._tensor(found.path) for name, found in self._graph.state.items()}

    def _tensor(self, path: str) -> torch.Tensor:
        owner: Any = self
        for part in path.split("."):
            owner = getattr(owner, part)
        return owner

    def forward(self, *inputs: Any, **named: Any) -> Any:
        items = [
            carried(x, i.type, i.name)
            for i, x in zip(self._graph.model.inputs, self._bound(inputs, named), strict=True)
        ]
        flat: list[torch.Tensor] = []
        flatten(items, flat)
        state = {name: self._tensor(found.path) for name, found in self._graph.state.items()}
        device = one_device([*flat, *state.values()])
        found = outside_traces(self._graph.specialise, items, self.training)
        constants = outside_traces(found.constants, device)
        tracing = torch.compiler.is_compiling()
        tensors = []
        for index, source in enumerate(found.sources):
            if source.kind == "input":
                tensors.append(flat[int(source.name)])
            elif source.kind == "state":
                tensor = state[source.name]
                # backward sees the statistics as they were
                tensors.append(tensor.clone() if source.name in found.updated and not tracing else tensor)
            elif source.kind == "constant":
                tensors.append(constants[index])
        key = draw_key() if found.random and not tracing else torch.zeros(3, dtype=torch.int64)
        results = onnx_call(tensors, key, number_of(found), str(device))
        with torch.no_grad():
            for name, new in zip(found.updated, results[found.outputs :], strict=True):
                state[name].copy_(new)
        outputs = [own_output(r, kind) for r, kind in zip(results, found.types, strict=False)]
        arranged = [arrange(part, outputs) for part in found.structure]
        return arranged[0] if len(arranged) == 1 else tuple(arranged)

    def _bound(self, inputs: Sequence[Any], named: dict[str, Any]) -> list[Any]:
        """The inputs in the order of the graph."""
        names = self.input_names
        if len(inputs) > len(names):
            raise OnnxError(f"the model takes {len(names)} inputs ({', '.join(names)}), not {len(inputs)}")
        given = dict(zip(names, inputs, strict=False))
        for name, x in named.items():
            if name not in names or name in given:
                raise OnnxError(f"the model has no input {name!r}, or got it twice; its inputs are {', '.join(names)}")
            given[name] = x
        absent = [
            i.name for i in self._graph.model.inputs
            if i.name not in given and i.type.WhichOneof("value") != "optional_type"
        ]  # fmt: skip
        if absent:
            raise OnnxError(f"the model was called without {', '.join(absent)}; its inputs are {', '.join(names)}")
        return [given.get(name) for name in names]

    def extra_repr(self) -> str:
        return f"{', '.join(self.input_names)} -> {', '.join(self.output_names)}"


class Scope(nn.Module):
    """Holds the parameters whose names begin alike."""


def carried(x: Any, declared: Any, name: str) -> Any:
    """An input as the graph computes with it: tensors (of arrays and numbers, too), text, lists of them or None."""
    if x is None:
        return None
    if declared.WhichOneof("value") == "optional_type":
        declared = declared.optional_type.elem_type
    if declared.WhichOneof("value") == "tensor_type" and declared.tensor_type.elem_type == TensorProto.STRING:
        return text_input(x, name)
    if isinstance(x, list | tuple):
        return [carried(part, declared.sequence_type.elem_type, name) for part in x]
    if isinstance(x, np.ndarray | np.generic | bool | int | float):
        try:
            x = torch.as_tensor(x)
        except (TypeError, ValueError) as error:  # text, objects, unusual strides
            raise OnnxError(f"input {name} is no array that torch can hold: {error}") from None
    if not isinstance(x, torch.Tensor):
        raise OnnxError(f"input {name} must be a tensor, not {type(x).__name__}")
    return carried_input(x, declared.tensor_type.elem_type)


def flatten(items: Any, flat: list[torch.Tensor]) -> None:
    for item in items:
        if isinstance(item, list | tuple):
            flatten(item, flat)
        elif isinstance(item, torch.Tensor):
            flat.append(item)


def arrange(structure: Any, results: list[torch.Tensor]) -> Any:
    if structure is None:
        return None
    if isinstance(structure, Text):
        return structure.array.copy()  # the caller may write into it
    return [arrange(part, results) for part in structure] if isinstance(structure, list) else results[structure]


def one_device(tensors: Sequence[torch.Tensor]) -> torch.device:
    devices = list(dict.fromkeys(t.device for t in tensors))
    if len(devices) > 1:
        raise OnnxError(f"inputs and parameters lie on {' and '.join(map(str, devices))}; move all to one device")
    return devices[0] if devices else torch.device("cpu")


def outside_traces(function: Callable[..., Any], *args: Any) -> Any:
    """Runs a function where no trace of torch is active: those belong to a thread, so in another one while tracing.

    The import of a graph computes constants, which must have values even while the model is captured.
    """
    if not torch.compiler.is_compiling():
        return function(*args)
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(function, *args).result()


def draw_key() -> torch.Tensor:
    """A key for random ops, from torch's own generator: torch.manual_seed makes calls repeatable."""
    return torch.cat([torch.randint(0, 1 << 62, (1,)), torch.zeros(2, dtype=torch.int64)])


def number_of(found: Specialised) -> str:
    if not found.number:
        found.number = f"onnx#{next(_NUMBERS)}"
        _LIVE[found.number] = found
    return found.number


# ---- the operator ----------------------------------------------------------------------------------------------------


def arguments_of(found: Specialised, tensors: Sequence[torch.Tensor], key: torch.Tensor) -> list[torch.Tensor]:
    rest = iter(tensors)
    return [key if s.kind == "key" else next(rest) for s in found.sources]


@torch.library.custom_op("wholestep::onnx_call", mutates_args=())
def onnx_call(tensors: list[torch.Tensor], key: torch.Tensor, number: str, device: str) -> list[torch.Tensor]:
    """The outputs of an imported graph, then new values of its buffers."""
    found = _LIVE[number]
    return found.run([t.detach() for t in arguments_of(found, tensors, key)], torch.device(device))


@onnx_call.register_fake
def _(tensors, key, number, device):
    found = _LIVE[number]
    where = torch.device(device)
    return [torch.empty(t.shape, dtype=torch_dtype(t.element), device=where) for t in found.result_types]


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    tensors, key, ctx.number, ctx.device = inputs
    ctx.found = _LIVE[ctx.number]  # alive as long as its gradient may be asked for
    ctx.needed = [t.requires_grad for t in tensors]
    ctx.save_for_backward(key, *tensors)


def _backward(ctx: Any, gradients: Any) -> Any:
    key, *tensors = ctx.saved_tensors
    found = ctx.found
    needed, flags = [], iter(ctx.needed)
    for source in found.sources:
        needed.append(source.kind != "key" and next(flags))
    whole = found.pull_back(arguments_of(found, tensors, key), list(gradients), needed, torch.device(ctx.device))
    grads = [g for g, s in zip(whole, found.sources, strict=True) if s.kind != "key"]
    return grads, None, None, None


onnx_call.register_autograd(_backward, setup_context=_setup)


@aten("wholestep.onnx_call.default", complex_too=True)
def _inline(imp: Importer, tensors: list[Value], key: Value, number: str, device: str) -> list[Value]:
    """The step ops of the graph in place of the call of it."""
    found = _LIVE[number]
    block = found.function.regions[0].block
    rest = iter(tensors)
    mapping: dict[Value, Value] = {}
    for argument, source in zip(block.arguments, found.sources, strict=True):
        if source.kind == "key":
            if imp.random_key is None:
                raise ValueError("random numbers cannot be drawn here")
            mapping[argument] = imp.random_key()
        else:
            mapping[argument] = next(rest)
    prefix = imp.b.loc.layer
    assert block.last is not None
    for op in block:
        if op is block.last:
            continue
        copy = op.clone(mapping)
        copy.loc = Location(f"{prefix}.{op.loc.layer}" if prefix else op.loc.layer)
        if copy.name == "step.random":
            imp.streams += 1
            copy.attributes["stream"] = imp.streams
        elif copy.name == "step.opaque":
            imp.opaque_targets[copy.target] = imp.opaque_targets.get(copy.target, 0) + 1
        if imp.b.phase:
            copy.attributes["phase"] = imp.b.phase
        imp.b.insert(copy)
    return [mapping[v] for v in block.last.operands]
