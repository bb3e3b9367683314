"""Small ONNX models from text, and the judge: onnxruntime where it is installed, else onnx's own evaluator."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import numpy as np
import onnx
import onnx.parser
import torch
from onnx import numpy_helper
from onnx.reference import ReferenceEvaluator


def model(body: str, opset: int = 18, **tensors: Any) -> Any:
    """A model from its graph's text; keywords become initializers. Two underscores in a name stand for a dot."""
    text = f'<ir_version: 8, opset_import: ["" : {opset}, "local" : 1]>\n{body}'
    proto = onnx.parser.parse_model(text)
    for node in proto.graph.node:
        node.input[:] = [name.replace("__", ".") for name in node.input]
    for name, value in tensors.items():
        array = value.numpy() if isinstance(value, torch.Tensor) else np.asarray(value)
        proto.graph.initializer.append(numpy_helper.from_array(array, name.replace("__", ".")))
    return proto


def expected(proto: Any, *inputs: torch.Tensor) -> list[torch.Tensor]:
    """What somebody else's runtime gives for these inputs."""
    data = proto.SerializeToString() if isinstance(proto, onnx.ModelProto) else proto
    if find_spec("onnxruntime") is not None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        options.log_severity_level = 4
        session = onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])
        arrays = [x.detach().numpy() for x in inputs]
        out = session.run(None, dict(zip([i.name for i in session.get_inputs()], arrays, strict=True)))
        return [torch.as_tensor(np.asarray(x)) for x in out]
    return evaluated(onnx.load_model_from_string(data), *inputs)


def evaluated(proto: Any, *inputs: torch.Tensor) -> list[torch.Tensor]:
    """What the evaluator of the `onnx` package gives."""
    evaluator = ReferenceEvaluator(proto)
    out = evaluator.run(None, dict(zip(evaluator.input_names, (x.detach().numpy() for x in inputs), strict=True)))
    return [torch.as_tensor(np.asarray(x)) for x in out]
