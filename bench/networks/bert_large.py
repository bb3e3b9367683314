"""BERT-large, of transformers: an encoder that fills in tokens that were hidden from it."""

from __future__ import annotations

from typing import Any

import torch

from .attention import without_masks
from .network import Batch, Network, drawn, of, token_walk

#: rows, length, vocabulary, width, layers, heads
DIMENSIONS: dict[str, tuple[int, int, int, int, int, int]] = {
    "full": (16, 512, 30522, 1024, 24, 16),
    "few": (1, 512, 30522, 1024, 24, 16),
    "cpu": (4, 128, 8000, 256, 4, 4),
    "small": (4, 24, 211, 64, 2, 4),
    "tiny": (2, 8, 37, 16, 1, 2),
}


def build(size: str = "full", device: str = "cpu") -> Network:
    from transformers import BertConfig, BertForMaskedLM

    rows, length, vocabulary, width, layers, heads = of(DIMENSIONS, size)
    config = BertConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=4 * width,
        max_position_embeddings=512,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        attn_implementation=without_masks(),
    )
    with drawn(device):
        model = BertForMaskedLM(config).train()

    def make_batch(seed: int, device: str | torch.device) -> Batch:
        ids = token_walk(rows, length, vocabulary - 1, seed, device)
        draw = torch.Generator(device).manual_seed(seed + 1_000_000)
        hidden = torch.rand(ids.shape, generator=draw, device=device) < 0.15
        return ids.masked_fill(hidden, vocabulary - 1), ids.masked_fill(~hidden, -100)

    def loss_fn(model: Any, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return model(input_ids=ids, labels=labels).loss

    lr = 1e-4 if size in ("full", "few") else 1e-3
    return Network("bert_large", f"{rows}x{length} tokens", model, loss_fn, make_batch, lr, warmup=30)
