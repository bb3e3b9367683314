"""What the JAX twins share: tensors of PyTorch as arrays, by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import jax.numpy as jnp
import torch

Tree = dict[str, Any]
#: loss(parameters, state, *batch) -> the loss and the new state
Loss = Callable[..., tuple[Any, Tree]]


def of_torch(named: Iterable[tuple[str, torch.Tensor]]) -> Tree:
    """Copies, kernels of convolutions with their channels last, as XLA likes them."""
    found: Tree = {}
    for name, tensor in named:
        value = tensor.detach().cpu()
        found[name] = jnp.array((value.permute(2, 3, 1, 0) if value.dim() == 4 else value).contiguous().numpy())
    return found
