"""What the tests of capture and runtime share: small models, and a training run compared with eager PyTorch."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

import wholestep as ws


class Perceptron(nn.Module):
    """Two layers."""

    def __init__(self, inputs: int = 4, outputs: int = 3) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(inputs, 5), nn.Linear(5, outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x)))


class Body(nn.Module):
    """A linear layer whose forward is the function under test: `forward(module, *inputs)`."""

    def __init__(self, function: Callable[..., Any], **attributes: Any) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.function = function
        for name, value in attributes.items():
            if isinstance(value, torch.Tensor):
                self.register_buffer(name, value)
            else:
                setattr(self, name, value)

    def forward(self, *inputs: Any, **named: Any) -> Any:
        return self.function(self, *inputs, **named)


def squares(model: nn.Module, *batch: Any) -> torch.Tensor:
    """A loss for any model that returns one tensor."""
    return model(*batch).pow(2).mean()


def sgd(model: nn.Module, lr: float = 0.1) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)


def adamw(model: nn.Module, lr: float = 0.01) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=lr)


def data(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def fresh(make: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    """The model with the same weights every time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make().train()


def eager_step(loss: Callable[[nn.Module], torch.Tensor], model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    optimizer.zero_grad()
    value = loss(model)
    value.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(value.detach())


def compare(
    model: nn.Module,
    loss_fn: Any,
    batches: list[Any],
    eager: Callable[[nn.Module, Any], torch.Tensor],
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer] = sgd,
    **options: Any,
) -> ws.TrainStep:
    """Trains the model compiled and a copy eagerly on the same batches; both must end as one. Gives the step."""
    twin = copy.deepcopy(model)
    optimizer, twin_optimizer = make_optimizer(model), make_optimizer(twin)
    step = ws.compile(model, loss_fn, optimizer, batches[0], **options)
    for batch in batches:
        out = step(**batch) if isinstance(batch, Mapping) else step(*batch) if isinstance(batch, tuple) else step(batch)
        loss = loss_in(out)
        expected = eager_step(lambda m, batch=batch: eager(m, batch), twin, twin_optimizer)
        torch.testing.assert_close(float(loss), expected, rtol=1e-5, atol=1e-7)
    assert_same(model, twin)
    return step


def loss_in(out: Any) -> torch.Tensor:
    if isinstance(out, torch.Tensor):
        return out
    if isinstance(out, Mapping):
        return out["loss"]
    return out.loss if hasattr(out, "loss") else out[0]


def assert_same(one: nn.Module, other: nn.Module, rtol: float = 1e-5, atol: float = 1e-6) -> None:
    ours, theirs = one.state_dict(), other.state_dict()
    assert ours.keys() == theirs.keys()
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], rtol=rtol, atol=atol, msg=lambda m, n=name: f"{n}: {m}")
