"""What the files beside this one build: a network with its loss, its batches and its optimizer, ready to be trained."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

Batch = tuple[torch.Tensor, ...]

#: "full" is the network that its name stands for, at a large batch, and "few" the same at a small one; "cpu" is what
#: two cores train at some steps per second; "small" has the same parts and trains in seconds on one core; "tiny" is for
#: kernels that are interpreted
SIZES = ("full", "few", "cpu", "small", "tiny")


#: of transformers' models of images: else their first step writes it down, and torch.compile compiles twice
SINGLE_LABEL = {"problem_type": "single_label_classification"}


@dataclass
class Network:
    """A model in train mode, its loss, batches that can be learned, and how it is trained.

    Dropout is off: random streams of two systems differ, and their losses are to be compared.
    """

    name: str
    #: the batch in words
    items: str
    model: nn.Module
    #: loss_fn(model, *batch)
    loss_fn: Callable[..., torch.Tensor]
    #: make_batch(seed, device)
    make_batch: Callable[[int, str | torch.device], Batch]
    lr: float
    #: steps over which the learning rate grows: without them large networks leave their own repetition
    warmup: int = 10
    #: a convolutional network of images: who wants speed of PyTorch lays it out channels last
    images: bool = False

    def optimizer(self, model: nn.Module) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
        """AdamW, by its fused kernels on a GPU, and its warm-up."""
        fused = next(model.parameters()).device.type == "cuda"
        optimizer = torch.optim.AdamW(model.parameters(), lr=self.lr, fused=fused)
        return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / self.warmup))


@contextmanager
def drawn(device: str | torch.device, seed: int = 0) -> Iterator[None]:
    """Weights that are made inside are made on this device, the same every time; the caller's random state stays."""
    cuda = torch.device(device).type == "cuda"
    with torch.random.fork_rng([torch.cuda.current_device()] if cuda else []), torch.device(device):
        torch.manual_seed(seed)
        yield


def of(sizes: dict[str, Any], size: str) -> Any:
    """The entry of a size."""
    if size not in sizes:
        raise ValueError(f"there is no size {size!r}: {', '.join(sizes)}")
    return sizes[size]


def token_walk(rows: int, length: int, vocabulary: int, seed: int, device: str | torch.device) -> torch.Tensor:
    """Sentences that can be learned: from token to token by small jumps, over an eighth of the tokens, at most 512."""
    draw = torch.Generator(device).manual_seed(seed)
    known = min(512, vocabulary // 8)
    start = torch.randint(0, known, (rows, 1), generator=draw, device=device)
    jump = torch.randint(1, 4, (rows, length), generator=draw, device=device)
    return (start + jump.cumsum(1)) % known


def coloured_images(rows: int, pixels: int, classes: int, seed: int, device: str | torch.device) -> Batch:
    """Images whose colour tells their class, and labels of which some are wrong: the loss stays away from 0."""
    draw = torch.Generator(device).manual_seed(seed)
    known = min(10, classes)
    labels, other = (torch.randint(0, known, (rows,), generator=draw, device=device) for _ in range(2))
    wrong = torch.rand(rows, generator=draw, device=device) < 0.2
    images = torch.randn((rows, 3, pixels, pixels), generator=draw, device=device)
    colour = torch.stack([torch.sin(labels * (i + 1.0)) for i in range(3)], 1)
    return images + colour[:, :, None, None], torch.where(wrong, other, labels)
