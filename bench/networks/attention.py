"""Attention of transformers' models without mask tensors: causal by a flag, or of all tokens with all.

Its own "sdpa" leaves masks that hide nothing else out of eager training, but while torch.compile traces (before torch
2.14) it makes them as tensors, and PyTorch has no flash attention with a mask. All contenders are to have the same.
"""

from __future__ import annotations

from typing import Any

NAME = "sdpa_without_masks"


def without_masks() -> str:
    """The `attn_implementation` for a model's configuration."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    AttentionInterface.register(NAME, sdpa_attention_forward)
    AttentionMaskInterface.register(NAME, no_mask)
    return NAME


def no_mask(*given: Any, **named: Any) -> None:
    """The mask of a model that is given none."""
