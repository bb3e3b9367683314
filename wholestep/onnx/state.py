"""Which initializers of a graph are parameters, buffers or plain constants, and what they are called in the module.

- A *buffer* is a running statistic: an initializer that a BatchNormalization takes as mean or variance.
- A *parameter* is a floating-point initializer of more than one number that a node takes as data. It trains.
- Everything else is a *constant* of the graph: whole numbers, single numbers, and what operators take as settings.

`trainable=` overrides which parameters train. One that it selects is a parameter even if it is a single number; those
that it does not select are parameters with requires_grad=False.
"""

from __future__ import annotations

import fnmatch
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from .dtypes import TRAINABLE
from .errors import OnnxError, OnnxLimitError
from .files import Model, plain_domain

#: inputs by which an operator is told what to do; never trained
SETTINGS = {
    ("Resize", 1), ("Resize", 2), ("Upsample", 1), ("OneHot", 1), ("OneHot", 2), ("Clip", 1), ("Clip", 2),
    ("Dropout", 1), ("Pad", 2), ("QuantizeLinear", 1), ("QuantizeLinear", 2), ("DequantizeLinear", 1),
    ("DequantizeLinear", 2), ("ConstantOfShape", 0), ("Tile", 1), ("Range", 0), ("Range", 1), ("Range", 2),
}  # fmt: skip
STATISTICS = {("BatchNormalization", 3), ("BatchNormalization", 4)}

Trainable = None | Callable[[str], bool] | Iterable[str]


@dataclass(frozen=True, slots=True)
class State:
    """What an initializer is in the module: `kind` is "parameter" or "buffer", `path` its dotted name there."""

    kind: str
    path: str
    trains: bool


def find_state(model: Model, trainable: Trainable) -> dict[str, State]:
    """The initializers that are state of the module; the others are constants."""
    chosen = selection(trainable, list(model.initializers))
    uses = find_uses(model)
    kinds: dict[str, tuple[str, bool]] = {}
    for name, tensor in model.initializers.items():
        if model.kinds[name] not in TRAINABLE:
            if chosen is not None and name in chosen and trainable is not None and not callable(trainable):
                raise OnnxError(f"initializer {name} is selected by trainable=, but is not floating-point")
            continue
        taken = set(uses.get(name, ()))
        if taken and taken <= STATISTICS:
            kinds[name] = ("buffer", False)
        elif taken - SETTINGS - STATISTICS and tensor.numel() > 1:
            kinds[name] = ("parameter", chosen is None or name in chosen)
        elif chosen is not None and name in chosen and not callable(trainable):
            kinds[name] = ("parameter", True)
    warn_of_merged(model, uses, [name for name, (_, trains) in kinds.items() if trains])
    paths = attribute_paths(list(kinds))
    return {name: State(kind, paths[name], trains) for name, (kind, trains) in kinds.items()}


def warn_of_merged(model: Model, uses: Uses, names: list[str]) -> None:
    """Says which parameters were probably several: exporters keep one of many equal tensors, such as zero biases."""
    shared = []
    for name in names:
        tensor = model.initializers[name]
        if name in uses and uses[name].total() > 1 and bool((tensor == tensor.reshape(-1)[0]).all()):
            shared.append(name)
    if shared:
        warnings.warn(
            f"{some(shared)}: one number everywhere, and taken by several nodes each. The exporter has probably merged "
            "tensors that were equal; here they train as one. To train them apart, export after a training step or "
            "without that optimisation",
            stacklevel=4,
        )


def selection(trainable: Trainable, names: list[str]) -> set[str] | None:
    """The names that `trainable=` selects; None where the rule decides."""
    if trainable is None:
        return None
    if callable(trainable):
        return {name for name in names if trainable(name)}
    patterns = [trainable] if isinstance(trainable, str) else list(trainable)
    chosen: set[str] = set()
    for pattern in patterns:
        found = fnmatch.filter(names, pattern)
        if not found:
            raise OnnxError(f"trainable= names {pattern!r}, but no initializer is called so; there are {some(names)}")
        chosen.update(found)
    return chosen


def some(names: Sequence[str]) -> str:
    """A few names, for a message."""
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


Uses = dict[str, Counter[tuple[str, int]]]


def find_uses(model: Model) -> Uses:
    """For each name: how often which operators take it, and as which input. Identity nodes hand it on."""
    of_functions: dict[tuple[str, str, str], Uses] = {}

    def walk(nodes: Any, names: dict[str, str], uses: Uses) -> None:
        for node in nodes:
            domain = plain_domain(node.domain)
            if node.op_type == "Identity" and not domain and len(node.input) == 1 and len(node.output) == 1:
                names[node.output[0]] = names.get(node.input[0], node.input[0])
                continue
            key = (domain, node.op_type, node.overload)
            function = model.functions.get(key)
            if function is not None:
                if key not in of_functions:  # each is looked at once; one that calls itself sees nothing
                    of_functions[key] = {}
                    inner: Uses = {}
                    walk(function.node, {}, inner)
                    of_functions[key] = inner
                for formal, name in zip(function.input, node.input, strict=False):
                    uses.setdefault(names.get(name, name), Counter()).update(of_functions[key].get(formal, ()))
                continue
            for index, name in enumerate(node.input):
                uses.setdefault(names.get(name, name), Counter())[node.op_type, index] += 1
            for attribute in node.attribute:
                for graph in (attribute.g, *attribute.graphs):
                    walk(graph.node, dict(names), uses)

    found: Uses = {}
    try:
        walk(model.proto.graph.node, {}, found)
    except RecursionError:
        raise OnnxLimitError("the graph is nested too deeply") from None
    return found


def attribute_paths(names: list[str]) -> dict[str, str]:
    """A dotted name in the module for each initializer, readable and unlike all others.

    Names of exported torch modules stay as they are (`encoder.layer.0.weight`); other characters become underscores.
    """
    paths: dict[str, str] = {}
    taken: set[str] = set()
    inner: set[str] = set()
    for name in names:
        parts = [re.sub(r"\W", "_", part) for part in re.split(r"[./]|::", name) if part]
        path = ".".join(parts) or "unnamed"
        if parts and (parts[0] in RESERVED or hasattr_module(parts[0])):
            path = f"graph.{path}"
        new, number = path, 1
        while clash(new, taken, inner):
            number += 1
            new = f"{path.replace('.', '_')}_{number}"
        taken.add(new)
        pieces = new.split(".")
        inner.update(".".join(pieces[:i]) for i in range(1, len(pieces)))
        paths[name] = new
    return paths


def clash(path: str, taken: set[str], inner: set[str]) -> bool:
    """Whether a name is used already, as a tensor or as a module, or passes through a tensor."""
    pieces = path.split(".")
    return path in taken or path in inner or any(".".join(pieces[:i]) in taken for i in range(1, len(pieces)))


#: attributes that the module itself has
RESERVED = ("state", "graph")


def hasattr_module(name: str) -> bool:
    """Whether every torch module has an attribute of this name."""
    from torch import nn

    return hasattr(nn.Module, name) or name in ("training", "_parameters", "_buffers", "_modules")
