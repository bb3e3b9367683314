"""Batches as a step takes them: their form, shapes and micro-batches, and what to say where one does not fit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..capture.structure import differences, flatten, unflatten
from ..errors import InputError

Signature = tuple[tuple[Any, ...], ...]


def as_compiled(example: Any, batch: tuple[Any, ...], named: dict[str, Any]) -> Any:
    """A batch in the form of the example: keyword batches may come as one mapping or as keywords."""
    if isinstance(example, Mapping):
        if len(batch) == 1 and not named and isinstance(batch[0], Mapping):
            named = dict(batch[0])
        elif batch:
            raise InputError(f"the step was compiled for a keyword batch {list(example)}: call step(**batch)")
        missing = [k for k in example if k not in named]
        extra = [k for k in named if k not in example]
        if missing or extra:
            raise InputError(
                f"the batch differs from the one the step was compiled for: missing {missing}, unexpected {extra}"
            )
        return {k: named[k] for k in example}
    if named:
        raise InputError(f"the step was compiled for {len(example)} positional tensors, not keywords {list(named)}")
    parts = len(example)
    if len(batch) == 1 != parts and isinstance(batch[0], list | tuple) and len(batch[0]) == parts:
        raise InputError(f"the step takes the {parts} parts of a batch one by one: call step(*batch)")
    return tuple(batch)


def flattened(batch: Any) -> tuple[list[torch.Tensor], list[str], Any]:
    """The tensors of a batch, their names, and the structure that is left."""
    tensors: list[torch.Tensor] = []
    names: list[str] = []
    structure = flatten(batch, tensors, names, "batch")
    return tensors, names, structure


def form_of(batch: Any) -> Any:
    """A batch of the same nesting, shapes and types, with zeros that take no memory: the user's own may go."""
    tensors, _, structure = flattened(batch)
    return unflatten(structure, [torch.zeros((), dtype=t.dtype, device=t.device).expand(t.shape) for t in tensors])


def signature(tensors: list[torch.Tensor]) -> Signature:
    """What tells one compiled shape from another."""
    return tuple([tuple(t.shape) for t in tensors])


def check_structure(expected: Any, structure: Any) -> None:
    """Refuses a batch whose nesting or constants differ from the compiled ones."""
    found = list(differences(expected, structure))
    if found:
        more = f" (and {len(found) - 3} more)" if len(found) > 3 else ""
        raise InputError(
            f"the batch differs from the one the step was compiled for: {'; '.join(found[:3])}{more}.\n"
            "Try: pass batches of one structure, or compile another step for this one; leave out what is no tensor and "
            "not needed in the step (names), and make tensors of numbers that change: torch.tensor(0.5)"
        )


def check_tensor(name: str, tensor: torch.Tensor, dtype: torch.dtype, device: torch.device) -> None:
    """Refuses a tensor of another type or on another device."""
    if tensor.dtype != dtype:
        raise InputError(
            f"{name} is {tensor.dtype} but the step was compiled for {dtype}; convert it with .to({dtype}), or compile "
            "another step where the model was converted"
        )
    if tensor.device != device:
        raise InputError(f"{name} is on {tensor.device} but the model is on {device}; move it with .to({device})")


def shape_message(name: str, want: tuple[int, ...], have: tuple[int, ...]) -> str:
    """Which dimension changed and what to do."""
    if len(want) != len(have):
        return f"{name} has {len(have)} dimensions {list(have)} but the step was compiled for {len(want)}: {list(want)}"
    where = ", ".join(
        f"dimension {i} is {h} instead of {w}" for i, (w, h) in enumerate(zip(want, have, strict=True)) if w != h
    )
    return (
        f"{name} has shape {list(have)} but the step was compiled for {list(want)}: {where}.\n"
        'Try: shapes="bucket" (compiles this shape too), or drop or pad the smaller batch (DataLoader(drop_last=True))'
    )


def micro_batches(batch: Any, count: int) -> list[Any]:
    """A batch cut into micro-batches along the first dimension of its tensors."""
    if count == 1:
        return [batch]
    tensors, names, structure = flattened(batch)
    rows = None
    for name, tensor in zip(names, tensors, strict=True):
        if not tensor.dim():
            raise InputError(f"{name} is a single number, which cannot be split into {count} micro-batches")
        rows = tensor.shape[0] if rows is None else rows
        if tensor.shape[0] != rows:
            raise InputError(
                f"accumulate={count} splits the batch along its first dimension, which is {tensor.shape[0]} for {name} "
                f"and {rows} for {names[0]}; make them equal, or make what is not of the batch a buffer of the model"
            )
        if not rows or rows % count:
            raise InputError(
                f"accumulate={count} does not divide the batch: {name} has {rows} rows; "
                f"use a batch size that is a multiple of {count}"
            )
    parts = [t.chunk(count) for t in tensors]
    return [unflatten(structure, [p[i] for p in parts]) for i in range(count)]


def first_micro_batch(batch: Any, count: int) -> Any:
    """The first of a batch's micro-batches, which stands for all of them."""
    return micro_batches(batch, count)[0]
