"""What the demo trains: a small GPT over bytes, on text that every machine has: the Python standard library's sources.

Plain PyTorch; nothing in it is written for Wholestep.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from wholestep.errors import InputError

TEXT_LIMIT = 2_000_000  # bytes


@dataclass(frozen=True, slots=True)
class Shape:
    layers: int = 4
    width: int = 128
    heads: int = 4
    context: int = 128
    batch: int = 16
    vocabulary: int = 256


class Block(nn.Module):
    """Pre-norm attention and feed-forward."""

    def __init__(self, shape: Shape):
        super().__init__()
        self.heads = shape.heads
        self.norm_attention = nn.LayerNorm(shape.width)
        self.qkv = nn.Linear(shape.width, 3 * shape.width)
        self.out = nn.Linear(shape.width, shape.width)
        self.norm_feed = nn.LayerNorm(shape.width)
        self.feed = nn.Sequential(
            nn.Linear(shape.width, 4 * shape.width), nn.GELU(), nn.Linear(4 * shape.width, shape.width)
        )

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        split = self.qkv(self.norm_attention(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.feed(self.norm_feed(x))


class TinyGPT(nn.Module):
    """A decoder over bytes whose output layer shares the token embedding's weights."""

    def __init__(self, shape: Shape):
        super().__init__()
        self.token = nn.Embedding(shape.vocabulary, shape.width)
        self.position = nn.Embedding(shape.context, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        self.head.weight = self.token.weight
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def loss_fn(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy of the next byte."""
    return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


def standard_library_text(folder: Path | None = None) -> tuple[bytes, int]:
    """The library's top-level sources in name order, cut at the limit, and how many files they came from."""
    folder = folder or Path(os.__file__).parent
    text, files = bytearray(), 0
    for path in sorted(folder.glob("*.py")):
        if len(text) >= TEXT_LIMIT:
            break
        text += path.read_bytes()
        files += 1
    if len(text) < 10_000:
        raise InputError(f"{folder} holds no Python sources to train on; name any text file with --text FILE")
    return bytes(text[:TEXT_LIMIT]), files


def batches(text: bytes, shape: Shape, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Random windows of the text and the same windows one byte later, for ever; one seed, one sequence."""
    if len(text) <= shape.context + 1:
        raise InputError(f"the training text has {len(text)} bytes; at least {shape.context + 2} are needed")
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    windows = data.unfold(0, shape.context + 1, 1)
    generator = torch.Generator().manual_seed(seed)
    while True:
        rows = windows[torch.randint(len(windows), (shape.batch,), generator=generator)].long()
        yield rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
