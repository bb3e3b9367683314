"""Nested batches and outputs: flattened to tensors and constants, rebuilt later, compared leaf by leaf.

Tuples, lists, dicts, named tuples, dataclasses and mappings such as the outputs of `transformers` are understood.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from ..errors import InputError


@dataclasses.dataclass(frozen=True, slots=True)
class Leaf:
    """A place where a tensor goes."""

    index: int


@dataclasses.dataclass(frozen=True, slots=True)
class Structure:
    """A nesting with its tensors taken out: what kind of container, its keys, its parts."""

    kind: Any  # the class of the container
    keys: tuple[Any, ...]
    parts: tuple[Any, ...]


def flatten(value: Any, tensors: list[torch.Tensor], names: list[str], path: str = "") -> Any:
    """Takes the tensors out of a nesting into `tensors` (with their paths in `names`); gives the structure left."""
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        names.append(path or "value")
        return Leaf(len(tensors) - 1)
    if value is None or isinstance(value, bool | int | float | complex | str | bytes | torch.dtype | torch.device):
        return value
    keys, parts = _children(value, path)
    return Structure(
        type(value), keys, tuple(flatten(v, tensors, names, _join(path, k)) for k, v in zip(keys, parts, strict=True))
    )


def _join(path: str, key: Any) -> str:
    return f"{path}[{key}]" if isinstance(key, int) else f"{path}.{key}" if path else str(key)


def _children(value: Any, path: str) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    if isinstance(value, Mapping):
        return tuple(value.keys()), tuple(value.values())
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return tuple(value._fields), tuple(value)
    if isinstance(value, list | tuple):
        return tuple(range(len(value))), tuple(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = tuple(f.name for f in dataclasses.fields(value))
        return fields, tuple(getattr(value, f) for f in fields)
    raise InputError(
        f"{path or 'value'} is a {type(value).__name__}; only tensors, numbers, strings, None and nestings of tuples, "
        "lists, dicts and dataclasses can go through a compiled step"
    )


def unflatten(structure: Any, tensors: list[Any] | tuple[Any, ...]) -> Any:
    """Puts tensors back into a structure."""
    if isinstance(structure, Leaf):
        return tensors[structure.index]
    if not isinstance(structure, Structure):
        return structure
    parts = [unflatten(p, tensors) for p in structure.parts]
    kind = structure.kind
    if issubclass(kind, tuple) and hasattr(kind, "_fields"):
        return kind(*parts)
    if issubclass(kind, list | tuple):
        return kind(parts)
    if issubclass(kind, defaultdict):
        return kind(None, zip(structure.keys, parts, strict=True))
    if dataclasses.is_dataclass(kind):
        sparse = issubclass(kind, Mapping)  # type: ignore[arg-type]  # outputs of transformers leave out what is None
        pairs = zip(structure.keys, parts, strict=True)
        return kind(**{k: v for k, v in pairs if v is not None or not sparse})  # type: ignore[operator]
    return kind(dict(zip(structure.keys, parts, strict=True)))


def differences(expected: Any, given: Any, path: str = "batch") -> Iterator[str]:
    """What differs between two structures, in words."""
    if isinstance(expected, Leaf) or isinstance(given, Leaf):
        if type(expected) is not type(given):
            yield f"{path} was {_describe(expected)} when compiled and is {_describe(given)} now"
    elif isinstance(expected, Structure) and isinstance(given, Structure):
        if expected.keys != given.keys or expected.kind is not given.kind:
            yield f"{path} was {_describe(expected)} when compiled and is {_describe(given)} now"
            return
        for key, a, b in zip(expected.keys, expected.parts, given.parts, strict=True):
            yield from differences(a, b, _join(path, key))
    elif type(expected) is not type(given) or expected != given:
        yield f"{path} was {_describe(expected)} when compiled and is {_describe(given)} now"


def _describe(structure: Any) -> str:
    if isinstance(structure, Leaf):
        return "a tensor"
    if isinstance(structure, Structure):
        return f"{structure.kind.__name__} with {list(structure.keys)}"
    return repr(structure)


def find_loss(value: Any) -> tuple[torch.Tensor, Callable[[Any], Any]]:
    """The loss within what a loss function or model returned, by the rule: itself, `.loss`, `["loss"]`, the first."""
    if isinstance(value, torch.Tensor):
        return value, lambda v: v
    if isinstance(value, Mapping) and "loss" in value:
        return value["loss"], lambda v: v["loss"]
    if getattr(value, "loss", None) is not None:
        return value.loss, lambda v: v.loss
    if isinstance(value, list | tuple) and value and isinstance(value[0], torch.Tensor):
        return value[0], lambda v: v[0]
    raise InputError(
        f"no loss found in the {type(value).__name__} that was returned; return a scalar tensor, a tuple that starts "
        "with it, or an object with .loss (for transformers models: pass labels in the batch)"
    )
