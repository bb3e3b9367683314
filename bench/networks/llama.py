"""A Llama with 1.1B parameters, of transformers: RMSNorm, rotary positions, SwiGLU, fewer heads for keys and values."""

from __future__ import annotations

from typing import Any

import torch

from .attention import without_masks
from .network import Batch, Network, drawn, of, token_walk

#: rows, length, vocabulary, width, inner width, layers, heads, heads of keys and values
DIMENSIONS: dict[str, tuple[int, int, int, int, int, int, int, int]] = {
    "full": (4, 2048, 32000, 2048, 5632, 22, 32, 4),
    "few": (1, 512, 32000, 2048, 5632, 22, 32, 4),
    "cpu": (4, 128, 8000, 256, 704, 4, 8, 2),
    "small": (4, 24, 211, 64, 176, 2, 4, 2),
    "tiny": (2, 8, 37, 16, 24, 1, 2, 1),
}


def build(size: str = "full", device: str = "cpu") -> Network:
    from transformers import LlamaConfig, LlamaForCausalLM

    rows, length, vocabulary, width, inner, layers, heads, shared = of(DIMENSIONS, size)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=shared,
        max_position_embeddings=2048,
        attn_implementation=without_masks(),
        use_cache=False,
    )
    with drawn(device):
        model = LlamaForCausalLM(config).train()

    def make_batch(seed: int, device: str | torch.device) -> Batch:
        return (token_walk(rows, length, vocabulary, seed, device),)

    def loss_fn(model: Any, ids: torch.Tensor) -> torch.Tensor:
        return model(input_ids=ids, labels=ids).loss

    lr = 1e-4 if size in ("full", "few") else 2e-3
    return Network("llama", f"{rows}x{length} tokens", model, loss_fn, make_batch, lr, warmup=30)
