"""Text: tensors of strings, which are always known while a graph is imported.

No step op holds a string. Inputs of text are bound by value, as constants are, so whatever is computed from text alone
is computed at import, by numpy; numbers that come of it are constants of the program.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from onnx import TensorProto

from .errors import OnnxError, OnnxFileError

#: what one string takes beside its characters, about
STRING_BYTES = 64


@dataclass(frozen=True, slots=True, eq=False)
class Text:
    """A tensor of strings of the graph: a numpy array of dtype object that holds `str`."""

    array: np.ndarray

    @property
    def type(self) -> int:
        return TensorProto.STRING

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    def __repr__(self) -> str:
        return f"<STRING {list(self.shape)} constant>"


def array_of(strings: Any, shape: tuple[int, ...] | list[int]) -> np.ndarray:
    """Strings one after the other as an array of this shape."""
    listed = list(strings)
    array = np.empty(len(listed), dtype=object)
    array[:] = listed
    return array.reshape(shape)


def text_input(x: Any, name: str) -> np.ndarray:
    """An input of the call that the graph declares as text: a numpy array of str, a str, or nested lists of them."""
    advice = "must be a numpy array of str (or a list of str)"
    if not isinstance(x, np.ndarray | np.generic | str | list | tuple):
        raise OnnxError(f"input {name} holds text: it {advice}, not {type(x).__name__}")
    try:
        array = np.array(x, dtype=object)
    except ValueError as error:  # parts of different sizes
        raise OnnxError(f"input {name} holds text: it {advice}; {error}") from None
    wrong = next((part for part in array.reshape(-1) if not isinstance(part, str)), None)
    if wrong is not None:
        raise OnnxError(f"input {name} holds text: it {advice} of one size; it has a {type(wrong).__name__}")
    return array_of((str(part) for part in array.reshape(-1)), array.shape)


def text_bytes(array: np.ndarray) -> int:
    """The memory that an array of text takes, about."""
    return sum(STRING_BYTES + 4 * len(part) for part in array.reshape(-1))


def read_text(proto: Any) -> np.ndarray:
    """A tensor of strings of the file."""
    name = proto.name or "an unnamed tensor"
    shape = [int(d) for d in proto.dims]
    if any(d < 0 for d in shape) or math.prod(shape) != len(proto.string_data):
        raise OnnxFileError(
            f"tensor {name}: text of shape {shape}, but the file holds {len(proto.string_data)} strings; it is damaged "
            "or was cut off"
        )
    try:
        return array_of((part.decode("utf-8") for part in proto.string_data), shape)
    except ValueError as error:  # bytes that are no text, or a shape that numpy does not know
        raise OnnxFileError(f"tensor {name} cannot be read: {error}") from None
