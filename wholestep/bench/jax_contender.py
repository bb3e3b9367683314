"""A plain JAX twin of a network: loss, gradients and AdamW under one `jax.jit` with donated state.

The networks' module gives the twin: `jax_twin(name, model, precision)` returns parameters, state and a loss function of
both. Only imported where JAX is installed and asked for.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from importlib import util
from typing import Any

import torch

from ..errors import InputError
from .workload import Batch, Workload, networks

BETAS, EPSILON, DECAY = (0.9, 0.999), 1e-8, 0.01  # of torch.optim.AdamW


def has_twin(network: str, module: str) -> bool:
    """Whether JAX is installed, and the networks' module lists (`IN_JAX`) a twin of a network."""
    return util.find_spec("jax") is not None and network in getattr(networks(module), "IN_JAX", ())


class JaxTraining:
    """The state of a training in JAX, and its compiled step."""

    def __init__(self, workload: Workload, network: str, module: str, precision: str):
        if util.find_spec("jax") is None:
            raise InputError("JAX is not installed here; leave jax out of --against")
        jax: Any = importlib.import_module("jax")
        twin = getattr(networks(module), "jax_twin", None)
        found = None if twin is None else twin(network, workload.model, precision)
        if found is None:
            raise InputError(f"{network} has no twin in JAX; leave jax out of --against")
        parameters, state, loss = found
        zeros = [jax.tree.map(lambda p: p * 0, parameters) for _ in range(2)]
        self.jax = jax
        carry = (parameters, *zeros, state, jax.numpy.zeros((), "int32"))
        # bound to a device as batches are, and so what a step returns: else the second step compiles once more
        self.carry = jax.device_put(carry, jax.devices()[0])
        self.step = jax.jit(whole_step(jax, loss, workload.lr, workload.warmup), donate_argnums=0)
        self.given: tuple[Batch, Any] = ((), ())

    def __call__(self, batch: Batch) -> Any:
        """One step; the loss, which may not be there yet."""
        if self.given[0] is not batch:
            self.given = (batch, tuple(self.array(tensor) for tensor in batch))
        loss, self.carry = self.step(self.carry, *self.given[1])
        return loss

    def array(self, tensor: torch.Tensor) -> Any:
        """A tensor as JAX sees it: images with their channels last, numbers of classes in 32 bits."""
        tensor = tensor.permute(0, 2, 3, 1) if tensor.dim() == 4 else tensor
        tensor = tensor.int() if tensor.dtype == torch.int64 else tensor
        return self.jax.dlpack.from_dlpack(tensor.contiguous())

    def wait(self) -> None:
        self.jax.block_until_ready(self.carry)

    def state_bytes(self) -> int:
        return sum(leaf.nbytes for leaf in self.jax.tree.leaves(self.carry))

    def peak_bytes(self) -> int | None:
        """The most memory of a GPU that was in use; of a CPU JAX does not say it."""
        stats = self.jax.devices()[0].memory_stats() or {}
        return stats.get("peak_bytes_in_use")


def whole_step(jax: Any, loss: Callable[..., Any], rate: float, warmup: int) -> Callable[..., Any]:
    """Forward, backward and AdamW as `torch.optim.AdamW` computes it, with the warm-up of the other contenders."""
    np = jax.numpy

    def step(carry: Any, *batch: Any) -> Any:
        parameters, first, second, state, count = carry
        (value, state), gradients = jax.value_and_grad(loss, has_aux=True)(parameters, state, *batch)
        count = count + 1
        lr = rate * np.minimum(1.0, count / warmup)
        first = jax.tree.map(lambda m, g: BETAS[0] * m + (1 - BETAS[0]) * g, first, gradients)
        second = jax.tree.map(lambda v, g: BETAS[1] * v + (1 - BETAS[1]) * g * g, second, gradients)
        grown = [1 - np.power(beta, count.astype("float32")) for beta in BETAS]

        def updated(p: Any, m: Any, v: Any) -> Any:
            return p * (1 - lr * DECAY) - lr * (m / grown[0]) / (np.sqrt(v / grown[1]) + EPSILON)

        return value, (jax.tree.map(updated, parameters, first, second), first, second, state, count)

    return step
