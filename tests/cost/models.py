"""What the tests of the cost room share: small models, and the ledger of a compiled step."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import nn

import wholestep as ws
from wholestep.cost import Movement
from wholestep.runtime.report import movement_of_step


class Block(nn.Module):
    """Attention and a perceptron, as language models have them."""

    def __init__(self, width: int = 16, dropout: float = 0.0):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down, self.dropout = nn.Linear(width, 4 * width), nn.Linear(4 * width, width), nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        split = self.qkv(self.norm(x)).split(width, -1)
        q, k, v = (t.view(batch, length, 2, width // 2).transpose(1, 2) for t in split)
        seen = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.out(seen.transpose(1, 2).reshape(batch, length, width)))
        return x + self.down(nn.functional.gelu(self.up(x)))


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.second, self.head = nn.Conv2d(8, 8, 3, stride=2, padding=1), nn.Linear(8, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.norm(self.first(x)))
        return self.head(torch.relu(self.second(x)).mean((2, 3)))


TOKENS = torch.arange(4 * 9).reshape(4, 9) % 50


def language_model(dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(50, 16), Block(dropout=dropout), Block(dropout=dropout), nn.Linear(16, 50))


def next_token(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


@cache  # several tests look at the same step; none of them runs or changes it
def language_step(dropout: float = 0.0, **options: Any) -> ws.TrainStep:
    model = language_model(dropout)
    return ws.compile(model, next_token, torch.optim.AdamW(model.parameters()), (TOKENS,), **options)


@cache
def convolution_step(**options: Any) -> ws.TrainStep:
    torch.manual_seed(0)
    model = Convolutions()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    batch = (torch.randn(2, 3, 8, 8), torch.arange(2))
    return ws.compile(model, nn.CrossEntropyLoss(), optimizer, batch, **options)


def moved(step: ws.TrainStep) -> Movement:
    return movement_of_step(step)
