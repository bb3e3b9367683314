"""Nested batches and outputs: flattened to tensors and constants, rebuilt later, compared leaf by leaf.

Tuples, lists, dicts, named tuples, dataclasses and mappings such as the outputs of `transformers` are understood.
"""

from __future__ import annotations

import dataclasses
import math
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from ..errors import InputError

#: containers that text may name; every other class is handed over by the user, never looked up by its name
PLAIN_CONTAINERS = (tuple, list, dict, OrderedDict)
MAX_DEPTH = 50


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
        "lists, dicts and dataclasses can go through a compiled step (arrays: torch.as_tensor)"
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


# ---- structures as text --------------------------------------------------------------------------------------------


def class_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def containers_of(structure: Any) -> list[type]:
    """The classes of the containers in a structure."""
    if not isinstance(structure, Structure):
        return []
    return [structure.kind, *(c for part in structure.parts for c in containers_of(part))]


def to_plain(structure: Any) -> Any:
    """A structure (or a number, a string, ...) in values that JSON knows."""
    if isinstance(structure, Leaf):
        return {"tensor": structure.index}
    if isinstance(structure, Structure):
        entries = [[to_plain(k), to_plain(p)] for k, p in zip(structure.keys, structure.parts, strict=True)]
        return {"container": class_name(structure.kind), "entries": entries}
    if structure is None or type(structure) in (bool, int, str):
        return structure
    if type(structure) is float:
        return structure if math.isfinite(structure) else {"float": repr(structure)}
    if type(structure) is complex:
        return {"complex": [to_plain(structure.real), to_plain(structure.imag)]}
    if type(structure) is bytes:
        return {"bytes": structure.hex()}
    if isinstance(structure, torch.dtype | torch.device):
        return {type(structure).__name__: str(structure)}
    raise InputError(f"a batch or output with a {type(structure).__name__} in it cannot be written as text")


def from_plain(plain: Any, containers: Mapping[str, type], depth: int = 0) -> Any:
    """The inverse of `to_plain`; InputError for anything that it does not write. No class is looked up by name."""
    if depth > MAX_DEPTH:
        raise InputError(f"it is nested more than {MAX_DEPTH} deep")
    if plain is None or isinstance(plain, bool | int | float | str):
        return plain
    if not isinstance(plain, dict):
        raise InputError(f"{short(plain)} is no part of a structure")
    if set(plain) == {"container", "entries"}:
        return _container(plain, containers, depth)
    if len(plain) != 1:
        raise InputError(f"{short(plain)} is no part of a structure")
    ((kind, value),) = plain.items()
    if kind == "tensor" and type(value) is int and value >= 0:
        return Leaf(value)
    if kind == "float" and value in ("inf", "-inf", "nan"):
        return float(value)
    if kind == "complex" and isinstance(value, list) and len(value) == 2:
        real, imaginary = (from_plain(v, containers, depth + 1) for v in value)
        if isinstance(real, int | float) and isinstance(imaginary, int | float):
            return complex(real, imaginary)
    if kind == "bytes" and isinstance(value, str):
        try:
            return bytes.fromhex(value)
        except ValueError:
            raise InputError(f"{short(value)} is no text of bytes") from None
    if kind == "dtype" and value in (names := {str(d): d for d in vars(torch).values() if isinstance(d, torch.dtype)}):
        return names[value]
    if kind == "device" and isinstance(value, str):
        try:
            return torch.device(value)
        except RuntimeError as error:
            raise InputError(f"{short(value)} is no device") from error
    raise InputError(f"{short(plain)} is no part of a structure")


def _container(plain: dict[str, Any], containers: Mapping[str, type], depth: int) -> Structure:
    name, entries = plain["container"], plain["entries"]
    known = {class_name(c): c for c in PLAIN_CONTAINERS}
    kind = known.get(name) or containers.get(name) if isinstance(name, str) else None
    if kind is None:
        raise InputError(
            f"it has a container {short(name)}, whose class is not known here; pass it: containers=(TheClass,)"
        )
    if not isinstance(entries, list) or not all(isinstance(e, list) and len(e) == 2 for e in entries):
        raise InputError(f"the entries of a {name} are not pairs of a key and a value")
    keys = tuple(from_plain(k, containers, depth + 1) for k, _ in entries)
    if any(isinstance(k, Leaf | Structure) for k in keys):
        raise InputError(f"a key of a {name} is no constant")
    if not _fits(kind, keys):
        raise InputError(f"the keys {short(keys)} are not those of a {name}")
    return Structure(kind, keys, tuple(from_plain(v, containers, depth + 1) for _, v in entries))


def _fits(kind: type, keys: tuple[Any, ...]) -> bool:
    """Whether `unflatten` can make such a container with these keys."""
    if issubclass(kind, tuple) and hasattr(kind, "_fields"):
        return keys == tuple(kind._fields)
    if issubclass(kind, list | tuple):
        return keys == tuple(range(len(keys))) and not any(isinstance(k, bool) for k in keys)
    if dataclasses.is_dataclass(kind):
        return len(set(keys)) == len(keys) and {f.name for f in dataclasses.fields(kind)} >= set(keys)
    return issubclass(kind, Mapping) and len(set(keys)) == len(keys)


def short(value: Any, limit: int = 80) -> str:
    """A value for a message, cut where it is long."""
    text = repr(value)
    return text if len(text) <= limit else text[:limit] + "..."
