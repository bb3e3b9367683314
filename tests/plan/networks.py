"""Small training steps to plan: networks, optimizers, and inputs for every slot of their programs."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from wholestep.api import PIPELINE, host_numbers
from wholestep.capture.capture import capture
from wholestep.dialects.step import torch_dtype
from wholestep.ir.passes import run_pipeline
from wholestep.options import Options
from wholestep.runtime.batches import first_micro_batch
from wholestep.training.build import Program, build_step
from wholestep.training.optimizers import plan_optimizer


class Attention(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.qkv, self.out, self.heads = nn.Linear(width, 3 * width), nn.Linear(width, width), heads

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, n, w = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, self.heads, w // self.heads).permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(b, n, w))


class Layer(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.dropout(self.attention(self.norm1(x)))
        return x + self.dropout(self.mlp(self.norm2(x)))


class TinyGPT(nn.Module):
    """A GPT with tied embeddings."""

    def __init__(self, layers: int = 2, width: int = 16, heads: int = 2, dropout: float = 0.0, words: int = 31):
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(8, width)
        self.layers = nn.ModuleList(Layer(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.words(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        for layer in self.layers:
            x = layer(x)
        return self.norm(x) @ self.words.weight.T


def next_word(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def gpt(dropout: float = 0.0, layers: int = 2) -> tuple[nn.Module, Any, tuple[torch.Tensor, ...]]:
    ids = torch.randint(0, 31, (4, 8))
    return TinyGPT(layers, dropout=dropout), lambda model, ids: next_word(model(ids), ids), (ids,)


class Block(nn.Module):
    """Two convolutions with BatchNorm beside a shortcut, one of them on memory in channels-last order."""

    def __init__(self, width: int):
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.norm2 = nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.norm1(self.conv1(x)))
        return torch.relu(x + self.norm2(self.conv2(y.contiguous(memory_format=torch.channels_last))))


def convnet() -> tuple[nn.Module, Any, tuple[torch.Tensor, ...]]:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), Block(8), Block(8),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5),
    )  # fmt: skip
    return model, nn.functional.cross_entropy, (torch.randn(4, 3, 16, 16), torch.randint(0, 5, (4,)))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.out = nn.LSTMCell(6, 6), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = c = x.new_zeros(x.shape[0], 6)
        for t in range(x.shape[1]):
            h, c = self.cell(x[:, t], (h, c))
        return self.out(h)


def recurrent() -> tuple[nn.Module, Any, tuple[torch.Tensor, ...]]:
    return Recurrent(), nn.functional.cross_entropy, (torch.randn(4, 5, 6), torch.randint(0, 3, (4,)))


def optimizer_of(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    """An optimizer by a short name."""
    if kind == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    if kind == "amsgrad":
        return torch.optim.Adam(model.parameters(), lr=1e-3, amsgrad=True, weight_decay=0.01)
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


class Case:
    """A program, what the host keeps, and its inputs."""

    def __init__(self, network: Any, optimizer: str = "adamw", **options: Any):
        torch.manual_seed(0)
        model, loss_fn, batch = network
        self.optimizer = optimizer_of(optimizer, model)
        settings = Options(**options)
        captured = capture(model, loss_fn, first_micro_batch(batch, settings.accumulate))
        self.program: Program = build_step(
            captured, plan_optimizer(self.optimizer, captured.parameters, None), settings
        )
        run_pipeline(self.program.module, PIPELINE)
        self.numbers = host_numbers(self.program, self.optimizer)
        self.inputs = [self.input(slot, batch) for slot in self.program.slots]

    def input(self, slot: Any, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
        captured, dtype = self.program.captured, torch_dtype(slot.type.element)
        if slot.kind == "parameter":
            return captured.parameters[slot.source[1]].detach().clone()
        if slot.kind == "buffer":
            return captured.buffers[slot.source[1]].detach().clone()
        if slot.kind == "batch":
            found = next(t for t in batch if tuple(t.shape) == slot.type.shape and t.dtype == dtype)
            return found.clone()
        if slot.kind == "random_key":
            return torch.tensor([7, 3, 0])
        if slot.kind == "copy":
            return captured.parameters[slot.source[1]].detach().to(dtype)
        if slot.kind == "hyper" and slot.source[0] == "group":
            value = self.optimizer.param_groups[slot.source[1]][slot.source[2]]
            for index in slot.source[3:]:
                value = value[index]
            return torch.tensor(float(value), dtype=dtype)
        if not slot.type.shape:
            scale = slot.kind == "scaler" and "scale" in slot.name and dtype.is_floating_point
            return torch.tensor(1024.0 if scale else 0.5 if slot.kind == "hyper" else 1.0, dtype=dtype)
        count = math.prod(slot.type.shape)
        return (torch.arange(count) % 7 * 0.01).reshape(slot.type.shape).to(dtype)
