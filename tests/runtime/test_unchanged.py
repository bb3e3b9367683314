"""What a snapshot notices between two steps, and what it does not mistake for a change."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from wholestep.runtime.unchanged import Snapshot
from wholestep.training.optimizers import plan_optimizer


class Parts:
    """A model that has trained one eager step, and its snapshot."""

    def __init__(self, lr: float | torch.Tensor = 0.1) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=lr)
        self.model(torch.randn(3, 4)).sum().backward()
        self.optimizer.step()
        plan = plan_optimizer(self.optimizer, dict(self.model.named_parameters()))
        self.snapshot = Snapshot([self.model], self.optimizer, plan, ["lr"])
        self.state = self.optimizer.state[self.model[0].weight]


def replace(table: dict, key: str) -> None:
    """An equal tensor, but another one."""
    old = table[key]
    table[key] = nn.Parameter(old.detach().clone()) if isinstance(old, nn.Parameter) else old.clone()


def assign(tensor: torch.Tensor, data: torch.Tensor) -> None:
    tensor.data = data


CHANGES = {
    "mode": lambda p: p.model[1].eval(),
    "frozen": lambda p: p.model[0].requires_grad_(False),
    "parameter": lambda p: replace(p.model[0]._parameters, "weight"),
    "buffer of one element": lambda p: replace(p.model[1]._buffers, "num_batches_tracked"),
    "parameter removed": lambda p: p.model[0]._parameters.__setitem__("bias", None),
    "new in an empty table": lambda p: p.model[0].register_buffer("more", torch.zeros(1)),
    "child": lambda p: p.model._modules.__setitem__("2", nn.Linear(4, 1)),
    "moved": lambda p: assign(p.model[0].weight, p.model[0].weight.data.clone()),
    "laid otherwise": lambda p: assign(p.model[0].weight, p.model[0].weight.data.t()),
    "state moved": lambda p: assign(p.state["exp_avg"], p.state["exp_avg"].clone()),
    "state laid otherwise": lambda p: assign(p.state["exp_avg"], p.state["exp_avg"].data.t()),
    "counter replaced": lambda p: replace(p.state, "step"),
    "state replaced": lambda p: p.optimizer.load_state_dict(copy.deepcopy(p.optimizer.state_dict())),
    "state gone": lambda p: p.optimizer.state.clear(),
    "group grows": lambda p: p.optimizer.param_groups[0]["params"].append(nn.Parameter(torch.ones(2))),
    "parameter swapped": lambda p: p.optimizer.param_groups[0]["params"].reverse(),
    "option": lambda p: p.optimizer.param_groups[0].__setitem__("amsgrad", True),
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_change_is_noticed(what):
    parts = Parts()
    assert parts.snapshot.holds() and parts.snapshot.same_groups
    CHANGES[what](parts)
    assert not parts.snapshot.holds()


def test_values_and_learning_rates_may_change():
    parts = Parts()
    with torch.no_grad():
        parts.model[0].weight.mul_(2)
        parts.state["step"].add_(1)
    assert parts.snapshot.holds() and parts.snapshot.same_groups
    parts.optimizer.param_groups[0]["lr"] = 0.05
    assert parts.snapshot.holds() and not parts.snapshot.same_groups
    assert parts.snapshot.holds() and not parts.snapshot.same_groups  # nobody has read it yet
    parts.snapshot.keep_groups()
    assert parts.snapshot.holds() and parts.snapshot.same_groups
    parts.optimizer.param_groups[0]["amsgrad"] = True
    assert not parts.snapshot.holds()


def test_a_hyper_parameter_that_can_change_inside_is_read_every_time():
    parts = Parts(torch.tensor(0.1))
    parts.optimizer.param_groups[0]["lr"].fill_(0.2)
    assert parts.snapshot.holds() and not parts.snapshot.same_groups
