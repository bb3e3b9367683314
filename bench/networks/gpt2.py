"""GPT-2 with 124M parameters, of transformers: a decoder with learned positions, LayerNorm and tanh-GELU."""

from __future__ import annotations

from typing import Any

import torch

from .attention import without_masks
from .network import Batch, Network, drawn, of, token_walk

#: rows, length, what differs from GPT-2
DIMENSIONS: dict[str, tuple[int, int, dict[str, int]]] = {
    "full": (8, 1024, {}),
    "few": (1, 1024, {}),
    "cpu": (4, 128, {"n_layer": 4, "n_head": 4, "n_embd": 256, "n_positions": 128, "vocab_size": 8000}),
    "small": (4, 24, {"n_layer": 2, "n_head": 4, "n_embd": 64, "n_positions": 32, "vocab_size": 211}),
    "tiny": (2, 8, {"n_layer": 1, "n_head": 2, "n_embd": 16, "n_positions": 8, "vocab_size": 37}),
}


def build(size: str = "full", device: str = "cpu") -> Network:
    from transformers import GPT2Config, GPT2LMHeadModel

    rows, length, changes = of(DIMENSIONS, size)
    config = GPT2Config(
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, attn_implementation=without_masks(), use_cache=False, **changes
    )
    with drawn(device):
        model = GPT2LMHeadModel(config).train()
    model.loss_type = "ForCausalLM"  # which it has anyway, with a warning that torch.compile splits its graph for

    def make_batch(seed: int, device: str | torch.device) -> Batch:
        return (token_walk(rows, length, config.vocab_size, seed, device),)

    def loss_fn(model: Any, ids: torch.Tensor) -> torch.Tensor:
        return model(input_ids=ids, labels=ids).loss

    lr = 3e-4 if size in ("full", "few") else 2e-3
    return Network("gpt2", f"{rows}x{length} tokens", model, loss_fn, make_batch, lr, warmup=30)
