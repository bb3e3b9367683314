"""A small Llama whose products turn queries and keys themselves, in Triton's interpreter, beside eager PyTorch.

Run by `test_interpreted.py` in a process of its own: Triton reads TRITON_INTERPRET when it is imported.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import wholestep as ws
from wholestep.backends.providers import Triton, forget_provider, register_provider
from wholestep.backends.triton import contraction

transformers = pytest.importorskip("transformers")

#: relative distance of losses; the interpreter cuts bf16 off instead of rounding it to nearest
LOSSES = {"fp32": 1e-5, "bf16": 1e-2}
LAYER, STEPS = "step/model.layers.0.self_attn", 2


class Interpreted(Triton):
    """The Triton provider where there is no GPU."""

    name, devices = "interpreted", ("cpu",)


@pytest.fixture(autouse=True)
def interpreted() -> Iterator[None]:
    logging.disable(logging.WARNING)
    register_provider(Interpreted)
    yield
    forget_provider(Interpreted.name)
    logging.disable(logging.NOTSET)


def loss_of(model: Any, ids: torch.Tensor) -> torch.Tensor:
    return model(input_ids=ids, labels=ids, use_cache=False).loss


def compiled(model: Any, ids: torch.Tensor, **options: Any) -> tuple[ws.TrainStep, list[float]]:
    model = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = ws.compile(model, loss_of, optimizer, (ids,), providers=["aten", Interpreted.name], tune=False, **options)
    return step, [float(step(ids)) for _ in range(STEPS)]


def eager(model: Any, ids: torch.Tensor, low: bool) -> list[float]:
    model, losses = copy.deepcopy(model), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(STEPS):
        with torch.autocast("cpu", torch.bfloat16, enabled=low):
            loss = loss_of(model, ids)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def with_products(recipe: list[str]) -> list[str]:
    """A recipe whose kernels of rotary positions have the products before them."""
    found = []
    for line in recipe:
        for number, name in enumerate(("q_proj", "k_proj")):
            if line.startswith("fuse ") and f"{LAYER}/forward/add#{number}" in line.split(" "):
                line = f"fuse {LAYER}.{name}/forward/contract#0 + {line.removeprefix('fuse ')}"
        found.append(line)
    return found


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_queries_and_keys_are_turned_by_their_products(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = transformers.LlamaConfig(
        vocab_size=53,
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=3,
        num_key_value_heads=3,
        attn_implementation="sdpa",
    )
    torch.manual_seed(0)
    model, ids = transformers.LlamaForCausalLM(config), torch.randint(0, 53, (2, 19))
    plain, apart = compiled(model, ids, precision=precision)
    places: list[int] = []
    written = contraction.candidates

    def noted(function: Any, specs: Any) -> Any:
        places.append(contraction.Contraction(function, specs).parts)
        return written(function, specs)

    monkeypatch.setattr(contraction, "candidates", noted)
    step, together = compiled(model, ids, precision=precision, recipe=with_products(plain.recipe))
    assert 2 in places, "the tile has both halves of heads"
    for number, name in enumerate(("q_proj", "k_proj")):
        turned, product = f"{LAYER}/forward/add#{number}", f"{LAYER}.{name}/forward/contract#0"
        said = step.why_not(turned, product)
        assert "are one kernel" in said and said.endswith(f"run by {Interpreted.name}")
        assert "are one kernel" not in plain.why_not(turned, product)
    assert len(step.plan().launches) == len(plain.plan().launches) - 2
    wanted = eager(model, ids, precision == "bf16")
    for losses in (apart, together):
        torch.testing.assert_close(losses, wanted, rtol=LOSSES[precision], atol=0)
