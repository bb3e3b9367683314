"""Regions in words: ops, shapes and layers, each once, with an end."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from wholestep.backends.about import MOST, about
from wholestep.backends.kernels import Spec


def op(name: str, layer: str = "", operands: int = 1, views: bool = False) -> Any:
    definition, loc = SimpleNamespace(views=views), SimpleNamespace(layer=layer)
    return SimpleNamespace(name=name, operands=[None] * operands, definition=definition, loc=loc)


def spec(*shape: int, dtype: torch.dtype = torch.float32) -> Spec:
    return Spec(shape, torch.empty(shape).stride(), dtype)


def region(ops: list[Any], operands: list[Spec], results: list[Spec]) -> Any:
    return SimpleNamespace(ops=ops, operands=operands, results=results)


def test_ops_shapes_and_layers_are_named_once() -> None:
    ops = [op("step.constant", operands=0), op("step.reshape", "x", views=True), op("step.mul", "h.0.attn")]
    ops += [op("step.softmax", "h.0.attn"), op("step.mul")]
    text = about(region(ops, [spec(), spec(8, 128, dtype=torch.bfloat16)], [spec(8, 128), spec(8, 128)]))
    assert text == (
        "step.mul (x2), step.softmax: scalar f32, 8x128 bf16 -> 8x128 f32 (x2); first met in layer h.0.attn"
    )


def test_a_region_without_work_is_named_by_what_it_has() -> None:
    assert about(region([op("step.constant", operands=0)], [], [spec(2)])) == "step.constant: nothing -> 2 f32"


def test_the_words_have_an_end() -> None:
    text = about(region([op("step.add")], [spec(n + 1) for n in range(MOST + 3)], [spec(1)]))
    assert f"{MOST} f32 and 3 others -> 1 f32" in text
