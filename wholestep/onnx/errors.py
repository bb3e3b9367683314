"""What can be wrong with an ONNX file, each with a class of its own; every message names the node and what to try."""

from __future__ import annotations

from ..errors import InputError


class OnnxError(InputError):
    """An ONNX model that cannot be used."""


class OnnxFileError(OnnxError):
    """The file is damaged, incomplete, of another format, or reaches outside of its folder."""


class OnnxGraphError(OnnxError):
    """The graph breaks the rules of ONNX: a cycle, a wrong type or shape, an attribute that is not there."""


class OnnxUnsupportedError(OnnxError):
    """The graph is right, but holds an operator, or a use of one, that is not supported."""


class OnnxLimitError(OnnxError):
    """The graph asks for more than is reasonable while it is read: a huge tensor, a loop of a billion rounds."""


class DataDependentError(OnnxUnsupportedError):
    """A shape, an axis or another setting hangs on the data; `inputs` are the graph's inputs it is computed from."""

    def __init__(self, message: str, inputs: frozenset[str] = frozenset()):
        super().__init__(message)
        self.inputs = inputs
