"""200 steps of mixed-precision training beside `torch.autocast`: a GPT, a BERT and a ResNet, same start, same batches.

Curves are compared after smoothing. On a CPU autocast's lists are shorter than on a GPU (powers, softmax and norms stay
low there), so ours keeps more digits in places and the curves agree to the rounding of the low type, not to the bit.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import wholestep as ws

transformers = pytest.importorskip("transformers")

STEPS, WINDOW = 200, 20
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@pytest.fixture(autouse=True)
def quiet() -> Any:
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


def gpt() -> tuple[nn.Module, Callable[..., torch.Tensor], Callable[[torch.Generator], tuple[torch.Tensor, ...]]]:
    config = transformers.GPT2Config(
        vocab_size=48, n_positions=16, n_embd=32, n_layer=1, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
    )
    model = transformers.GPT2LMHeadModel(config)

    def batch(generator: torch.Generator) -> tuple[torch.Tensor, ...]:
        start = torch.randint(0, 48, (8, 1), generator=generator)
        return ((start + torch.arange(12) * torch.randint(1, 4, (8, 1), generator=generator)) % 48,)

    return model, lambda m, x: m(x, labels=x).loss, batch


def bert() -> tuple[nn.Module, Callable[..., torch.Tensor], Callable[[torch.Generator], tuple[torch.Tensor, ...]]]:
    config = transformers.BertConfig(
        vocab_size=16,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=16,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    model = transformers.BertForMaskedLM(config)

    def batch(generator: torch.Generator) -> tuple[torch.Tensor, ...]:
        labels = torch.randint(1, 16, (8, 1), generator=generator).expand(8, 12)
        hidden = torch.rand(8, 12, generator=generator) < 0.3
        return labels.masked_fill(hidden, 0), labels.masked_fill(~hidden, -100)

    return model, lambda m, x, y: m(input_ids=x, labels=y).loss, batch


def batches(make: Callable[[torch.Generator], tuple[torch.Tensor, ...]]) -> list[tuple[torch.Tensor, ...]]:
    generator = torch.Generator().manual_seed(1)
    return [make(generator) for _ in range(STEPS)]


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=2e-3)


def compiled_curve(model: nn.Module, loss: Any, data: list[Any], precision: Any) -> torch.Tensor:
    step = ws.compile(model, loss, optimizer_of(model), data[0], precision=precision)
    return torch.stack([step(*batch).detach() for batch in data])


def autocast_curve(model: nn.Module, loss: Any, data: list[Any], precision: str) -> torch.Tensor:
    optimizer = optimizer_of(model)
    scaler = torch.amp.GradScaler("cpu", enabled=precision == "fp16")
    curve = []
    for batch in data:
        with torch.autocast("cpu", DTYPES[precision]):
            value = loss(model, *batch)
        optimizer.zero_grad()
        scaler.scale(value).backward()
        scaler.step(optimizer)
        scaler.update()
        curve.append(value.detach().float())
    return torch.stack(curve)


def smooth(curve: torch.Tensor) -> torch.Tensor:
    return curve.unfold(0, WINDOW, WINDOW // 2).mean(-1)


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    """The largest relative difference of the smoothed losses."""
    return float(((smooth(one) - smooth(other)).abs() / smooth(other).abs()).max())


@pytest.mark.parametrize(("make", "precision"), [(bert, "bf16"), (gpt, "fp16")])
def test_losses_track_autocast(make: Callable[[], Any], precision: str) -> None:
    torch.manual_seed(0)
    model, loss, batch = make()
    model.train()
    data = batches(batch)
    ours = compiled_curve(copy.deepcopy(model), loss, data, precision)
    theirs = autocast_curve(copy.deepcopy(model), loss, data, precision)
    assert ours.dtype is torch.float32 and ours.isfinite().all()
    assert smooth(ours)[-1] < 0.8 * smooth(ours)[0], "nothing was learned, so nothing was compared"
    assert abs(float(ours[0] - theirs[0])) < 2e-3 * float(theirs[0])
    assert distance(ours, theirs) < 0.01
    # the run is a low-precision one: it is not what float32 gives
    exact = compiled_curve(copy.deepcopy(model), loss, data[:10], "fp32")
    assert not torch.equal(ours[:10], exact)


def test_a_wrong_rule_would_be_seen() -> None:
    """The same measure with the loss computed in bf16, which autocast never does, is beyond the tolerance."""
    torch.manual_seed(0)
    model, loss, batch = gpt()
    model.train()
    data = batches(batch)[:60]
    right = compiled_curve(copy.deepcopy(model), loss, data, "bf16")
    wrong = compiled_curve(copy.deepcopy(model), loss, data, {"cross_entropy": "bf16", "default": "bf16"})
    theirs = autocast_curve(copy.deepcopy(model), loss, data, "bf16")
    assert float((right - theirs).abs().max()) * 3 < float((wrong - theirs).abs().max())
