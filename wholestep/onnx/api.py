"""`from_onnx` and `to_onnx`: a module from an ONNX file, and its trained weights back into the file's own graph."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import onnx
import torch
from onnx import checker

from .errors import OnnxError
from .files import read
from .module import OnnxModule
from .specialise import Graph
from .state import Trainable, find_state
from .tensors import take_in, tensors_of, write_tensor
from .walk import Limits

#: more bytes of weights than this go to a file beside the model: protobuf ends at 2 GB
MAX_INLINE = (1 << 31) - (1 << 24)


def from_onnx(
    source: Any,
    *,
    trainable: Trainable = None,
    outputs: Sequence[str] | None = None,
    mode: str = "module",
    frozen_inputs: bool = False,
    folder: str | os.PathLike[str] | None = None,
    limits: Limits | None = None,
) -> OnnxModule:
    """An ONNX model as a torch module: a path, bytes or a ModelProto.

    trainable: which initializers train. None is the rule in state.py; else patterns of names (`["head.*"]`) or a
        function of the name.
    outputs: the outputs wanted, in this order; all of them where None. A graph with its loss inside: `["loss"]`.
    mode: "module" lets `train()` and `eval()` decide about BatchNormalization and Dropout, "as written" the nodes.
    frozen_inputs: an input whose value decides about shapes is taken as a constant, and the graph imported anew for
        each value it has.
    folder: where external data lies, for a model that is not read from a path.
    limits: how much a graph may ask for while it is imported.
    """
    if mode not in ("module", "as written"):
        raise OnnxError(f"mode is 'module' or 'as written', not {mode!r}")
    model = read(source, folder)
    state = find_state(model, trainable)
    graph = Graph(model, state, outputs, mode == "as written", frozen_inputs, limits or Limits())
    return OnnxModule(graph)


def to_onnx(step_or_model: Any, path: str | os.PathLike[str]) -> None:
    """Writes a model that came from `from_onnx`, with the weights it has now, as an ONNX file.

    The graph is the original one; parameters and running statistics are replaced. Tensors of files beyond 2 GB go to an
    external data file beside it. The file is checked by onnx.checker before anything takes its name.
    """
    model = step_or_model if isinstance(step_or_model, torch.nn.Module) else getattr(step_or_model, "model", None)
    if not isinstance(model, OnnxModule):
        raise OnnxError(
            "to_onnx writes models that came from from_onnx (or a step compiled from one)\n"
            "Try: torch.onnx.export for a torch module"
        )
    proto = onnx.ModelProto()
    proto.CopyFrom(model._graph.model.proto)
    now = model.initializers()
    for tensor in proto.graph.initializer:
        if tensor.name in now:
            write_tensor(tensor, now[tensor.name])
    for tensor in tensors_of(proto):  # constants of external files, in nodes and subgraphs too
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            take_in(tensor, model._graph.model.folder)
    target = Path(path)
    if not target.parent.is_dir():
        raise OnnxError(f"{target} cannot be written: there is no folder {target.parent}")
    large = sum(len(t.raw_data) for t in proto.graph.initializer) > MAX_INLINE
    unfinished = target.with_name(target.name + ".unfinished")
    data = target.name + ".data"
    if large and target.with_name(data).exists():
        raise OnnxError(f"the weights would go to {data}, which is there already\nTry: another name")
    try:
        onnx.save_model(proto, str(unfinished), save_as_external_data=large, location=data)
        checker.check_model(str(unfinished))
        os.replace(unfinished, target)
    except checker.ValidationError as error:
        raise OnnxError(f"{target} was not written: onnx.checker does not take the graph: {error}") from error
    finally:
        unfinished.unlink(missing_ok=True)
