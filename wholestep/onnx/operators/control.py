"""Control flow that is decided at import: branches with a known condition, loops with a known number of rounds."""

from __future__ import annotations

from typing import Any

import onnx
import torch

from ..context import Context, Item, Tensor
from ..dtypes import dtype_of
from ..errors import OnnxLimitError
from . import operator


@operator("If", folds=False)
def branch(c: Context, condition: Tensor):
    taken = c.attribute("then_branch") if bool(c.number(condition, "condition")) else c.attribute("else_branch")
    return c.subgraph(taken, [])


@operator("Loop", folds=False)
def loop(c: Context, trips: Tensor | None, condition: Tensor | None, *carried: Item):
    body = c.attribute("body")
    count = None if trips is None else int(c.number(trips, "number of rounds"))
    going = condition is None or bool(c.number(condition, "condition"))
    if count is not None and count > c.walk.limits.rounds and going:
        raise too_many(c, count)
    state = list(carried)
    stacked = scan_outputs(c, body, 1 + len(state))
    round_ = 0
    while going and (count is None or round_ < count):
        if round_ >= c.walk.limits.rounds:
            raise too_many(c, None)
        number, go_on = c.constant(torch.tensor(round_)), c.constant(torch.tensor(True))
        keep_going, *rest = c.subgraph(body, [number, go_on, *state])
        if condition is not None:  # without one the body's own is not looked at
            if not isinstance(keep_going, Tensor):
                raise c.wrong("the condition that its body gives is no tensor")
            going = bool(c.number(keep_going, "condition"))
        state, new = rest[: len(state)], rest[len(state) :]
        for part, item in zip(stacked, new, strict=True):
            part.append(item)
        round_ += 1
    return [*state, *(stack(c, part, 0, body.output[1 + len(state) + i]) for i, part in enumerate(stacked))]


@operator("Scan", since=9, folds=False)
def scan(c: Context, *inputs: Item):
    body, count = c.attribute("body"), c.attribute("num_scan_inputs")
    if not 1 <= count <= len(inputs):
        raise c.wrong(f"it has {len(inputs)} inputs, of which {count} are to be scanned")
    state, scanned = list(inputs[: len(inputs) - count]), list(inputs[len(inputs) - count :])
    outputs = len(body.output) - len(state)
    return run_scan(
        c, body, state, scanned,
        c.attribute("scan_input_axes") or [0] * count, c.attribute("scan_input_directions") or [0] * count,
        c.attribute("scan_output_axes") or [0] * outputs, c.attribute("scan_output_directions") or [0] * outputs,
    )  # fmt: skip


@operator("Scan", until=8, folds=False)
def scan_in_batches(c: Context, lengths: Tensor | None, *inputs: Item):
    """The first form of Scan: a batch dimension in front of everything, and one sequence axis."""
    body, count = c.attribute("body"), c.attribute("num_scan_inputs")
    if lengths is not None:
        raise c.unsupported("sequences of different lengths are not supported", "pad them, or use Scan of opset 9")
    if not 1 <= count <= len(inputs) or not all(isinstance(x, Tensor) and x.rank for x in inputs):
        raise c.wrong(f"it has {len(inputs)} inputs, of which {count} are to be scanned")
    batch = inputs[0].shape[0]  # type: ignore[union-attr]
    if batch > c.walk.limits.rounds:
        raise too_many(c, batch)
    first = len(inputs) - count
    outputs = len(body.output) - first
    directions = c.attribute("directions") or [0] * count
    parts: list[list[Any]] = []
    for i in range(batch):
        own: list[Item] = [pick(c, x, 0, i) for x in inputs]  # type: ignore[arg-type]
        parts.append(run_scan(c, body, own[:first], own[first:], [0] * count, directions, [0] * outputs, [0] * outputs))
    return [stack(c, list(column), 0, None) for column in zip(*parts, strict=True)]


def run_scan(
    c: Context,
    body: Any,
    state: list[Item],
    scanned: list[Item],
    axes: list[int],
    directions: list[int],
    out_axes: list[int],
    out_directions: list[int],
) -> list[Item]:
    tensors = [x for x in scanned if isinstance(x, Tensor)]
    if len(tensors) != len(scanned) or not len(axes) == len(directions) == len(scanned):
        raise c.wrong("what it scans must be tensors, with an axis and a direction each")
    axes = [c.axis(a, x.rank) for a, x in zip(axes, tensors, strict=True)]
    lengths = {x.shape[a] for x, a in zip(tensors, axes, strict=True)}
    if len(lengths) != 1:
        raise c.wrong(f"what it scans has different lengths: {sorted(lengths)}")
    (length,) = lengths
    if length > c.walk.limits.rounds:
        raise too_many(c, length)
    stacked = scan_outputs(c, body, len(state))
    if not len(out_axes) == len(out_directions) == len(stacked):
        raise c.wrong("its scan outputs need an axis and a direction each")
    for i in range(length):
        slices = [
            pick(c, x, a, length - 1 - i if backwards else i)
            for x, a, backwards in zip(tensors, axes, directions, strict=True)
        ]
        results = c.subgraph(body, [*state, *slices])
        state, new = results[: len(state)], results[len(state) :]
        for part, item in zip(stacked, new, strict=True):
            part.append(item)
    whole = []
    for i, (part, axis, backwards) in enumerate(zip(stacked, out_axes, out_directions, strict=True)):
        whole.append(stack(c, part[::-1] if backwards else part, axis, body.output[len(state) + i]))
    return [*state, *whole]


def scan_outputs(c: Context, body: Any, before: int) -> list[list[Item]]:
    """An empty list for each output of a body that is collected over the rounds."""
    if len(body.output) < before:
        raise c.wrong(f"its body has {len(body.output)} outputs, at least {before} are needed")
    return [[] for _ in range(len(body.output) - before)]


def pick(c: Context, x: Tensor, axis: int, index: int) -> Tensor:
    """One slice of a tensor, without its axis."""

    def rule(inner: Context, x: Tensor) -> Any:
        b = inner.b
        part = b.slice(x.value, dim=axis, start=index, end=index + 1)
        return b.reshape_to(part, x.shape[:axis] + x.shape[axis + 1 :])

    return c.apply(rule, x)


def stack(c: Context, parts: list[Item], axis: int, declared: Any) -> Item:
    """Tensors of one shape along a new axis; where there are none, the declared shape says which tensor is empty."""
    if not parts:
        return nothing(c, axis, declared)
    if not all(isinstance(p, Tensor) and p.shape == parts[0].shape for p in parts):  # type: ignore[union-attr]
        raise c.unsupported("what its body collects changes its shape from round to round", "pad it to one shape")

    def rule(inner: Context, *tensors: Tensor) -> Any:
        rank = tensors[0].rank + 1
        place = inner.axis(axis, rank)
        shape = (*tensors[0].shape[:place], 1, *tensors[0].shape[place:])
        lifted = [inner.b.reshape(t.value, shape=shape) for t in tensors]
        joined = inner.b.concat(lifted, dim=place) if len(lifted) > 1 else lifted[0]
        return inner.tensor(joined, tensors[0].type)

    return c.apply(rule, *parts)


def nothing(c: Context, axis: int, declared: Any) -> Item:
    """An empty tensor, of the shape that the body declares."""
    tensor = declared.type.tensor_type if declared is not None else onnx.TypeProto.Tensor()
    dtype, dims = dtype_of(tensor.elem_type), list(tensor.shape.dim)
    if (
        dtype is None
        or not tensor.HasField("shape")
        or any(d.WhichOneof("value") != "dim_value" or d.dim_value < 0 for d in dims)
    ):
        raise c.unsupported(
            "no round of it runs, and its body does not say which shape it would collect", "declare the shape"
        )
    shape = [d.dim_value for d in dims]
    shape.insert(c.axis(axis, len(shape) + 1), 0)
    return c.constant(torch.empty(shape, dtype=dtype), tensor.elem_type)


def too_many(c: Context, rounds: int | None) -> OnnxLimitError:
    limit = c.walk.limits.rounds
    asked = f"{rounds} rounds" if rounds is not None else f"more than {limit} rounds"
    return OnnxLimitError(
        f"{c.where}: it runs {asked}, and loops are unrolled: at most {limit} are\n"
        "Try: from_onnx(..., limits=Limits(rounds=...)), or write the loop with whole tensors"
    )
