"""A kernel of the loop dialect run point by point in torch, in float64: what generated code is tested against."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...ir.core import Op, Value
from ..step.base import torch_dtype
from ..step.bits import packed, unpacked
from ..step.philox import digits, draw
from .ops import Apply, Constant, Index, Load, Random, Reduce, Space, Store
from .schedule import space_of

_REDUCE: dict[str, Any] = {
    "sum": lambda x, d: x.sum(d),
    "max": lambda x, d: x.amax(d),
    "min": lambda x, d: x.amin(d),
    "or": lambda x, d: x.any(d),
    "and": lambda x, d: x.all(d),
}
_FUNCTIONS: dict[str, Any] = {
    "rem": torch.remainder,
    "fmod": torch.fmod,
    "floor_div": lambda x, y: torch.div(x, y, rounding_mode="floor"),
    "trunc_div": lambda x, y: torch.div(x, y, rounding_mode="trunc"),
    "bit_and": torch.bitwise_and,
    "bit_or": torch.bitwise_or,
    "bit_xor": torch.bitwise_xor,
    "bit_not": torch.bitwise_not,
    "select": torch.where,
    "cast": lambda x: x,
    "rounded": lambda x: x,
}


def run(function: Op, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> None:
    """Computes every number at every point at once, as tensors over the whole space; floats are float64."""
    sizes = space_of(function)
    rank = len(sizes)
    block = function.regions[0].block
    tensors: dict[Value, torch.Tensor] = dict(zip(block.arguments, [*inputs, *outputs], strict=True))
    numbers: dict[Value, torch.Tensor] = {}
    points = [
        torch.arange(n).reshape([-1 if i == d else 1 for i in range(rank)]).expand(sizes) for d, n in enumerate(sizes)
    ]

    def places(op: Op, tensor: torch.Tensor, indices: Sequence[Value]) -> list[torch.Tensor]:
        found = []
        for row in op.attributes["map"]:
            at = torch.full(sizes, row[-1])
            for d, c in enumerate(row[:-1]):
                at = at + c * points[d] if c else at
            found.append(at)
        for dim, value in zip(op.attributes["dynamic"], indices, strict=True):
            found[dim] = found[dim] + numbers[value]
        return found

    for op in block:
        kind = op.definition
        if kind is Index:
            value = points[op.attributes["dim"]]
        elif kind is Constant:
            dtype = wide(torch_dtype(op.attributes["dtype"]))
            value = torch.full(sizes, op.attributes["value"], dtype=dtype)
        elif kind is Load:
            tensor = tensors[op.operands[0]]
            if op.attributes.get("bits") is not None:
                tensor = unpacked(tensor, op.attributes["bits"])
            at = places(op, tensor, op.operands[1:])
            inside = torch.ones(sizes, dtype=torch.bool)
            for i, n in zip(at, tensor.shape, strict=True):
                inside = inside & (i >= 0) & (i < n)
            if not op.attributes["guarded"]:
                assert bool(inside.all()), f"{op} leaves its tensor"
            at = [i.clamp(0, n - 1) for i, n in zip(at, tensor.shape, strict=True)]
            value = tensor[tuple(at)] if at else tensor.expand(sizes)
            shown = op.attributes.get("checked") and value.dtype.is_floating_point
            outside = torch.full((), float("nan") if shown else 0, dtype=value.dtype)
            value = torch.where(inside, value, outside).to(wide(value.dtype))
        elif kind is Random:
            seed, counter, micro_batch = (int(numbers[v].flatten()[0]) for v in op.operands[:3])
            element = numbers[op.operands[3]].flatten()
            dtype = next(
                t for t in (torch.float32, torch.float16, torch.bfloat16) if digits(t) == op.attributes["digits"]
            )
            key, count = (seed, counter, micro_batch), int(element.max()) + 1
            drawn = draw("uniform", (count,), dtype, key, int(numbers[op.operands[4]].flatten()[0]))
            value = drawn.double()[element].reshape(sizes)
        elif kind is Apply:
            name, args = op.attributes["fn"], [numbers[v] for v in op.operands]
            value = (_FUNCTIONS.get(name) or getattr(torch, name))(*args)
            dtype = torch_dtype(op.attributes["dtype"])
            if name == "rounded" or (name == "cast" and not dtype.is_floating_point):
                value = value.to(dtype)
            value = value.to(wide(dtype))
        elif kind is Reduce:
            dims = op.attributes["dims"]
            x = numbers[op.operands[0]]
            if op.attributes["kind"] == "prod":
                value = x.movedim(dims, tuple(range(-len(dims), 0))).flatten(-len(dims)).prod(-1) if dims else x
            else:
                value = _REDUCE[op.attributes["kind"]](x, dims) if dims else x
            for d in sorted(dims):
                value = value.unsqueeze(d)
            value = value.expand(sizes)
        elif kind is Store:
            tensor = tensors[op.operands[1]]
            stored = numbers[op.operands[0]].to(tensor.dtype)
            at = places(op, tensor, op.operands[2:])
            if op.attributes.get("bits") is not None:
                dim = op.attributes["bits"]
                bits = unpacked(tensor, dim)
                bits[tuple(at)] = stored.bool()
                tensor.copy_(packed(bits, dim))
            elif at:
                tensor[tuple(at)] = stored
            else:
                tensor.copy_(stored.flatten()[0])
            continue
        else:
            assert kind is Space or kind.terminator
            continue
        numbers[op.results[0]] = value.expand(sizes)


def wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype.is_floating_point else dtype
