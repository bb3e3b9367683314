"""Whether anything a compiled step hangs on has changed since it was bound: a few passes over flat lists.

Looks at identities, lengths and addresses alone, at the speed of C loops. Where it says no, the slow and exact check
decides.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain, repeat
from operator import attrgetter, getitem, is_
from typing import Any

import torch
from torch import nn

from ..training.optimizer_plan import OptimizerPlan

FROZEN = attrgetter("requires_grad")


class Snapshot:
    """Modules, parameters, buffers and optimizer state as they were."""

    def __init__(self, roots: Iterable[nn.Module], optimizer: torch.optim.Optimizer, plan: OptimizerPlan):
        modules = list(dict.fromkeys(m for root in roots for m in root.modules()))
        self.optimizer, self.plan = optimizer, plan
        self.attributes = [m.__dict__ for m in modules]
        self.training = [m.training for m in modules]
        #: where modules keep children, parameters and buffers, how many, and which
        self.tables: list[dict[str, Any]] = [
            t
            for m in modules
            for t in (m._modules, m._parameters, m._buffers)  # type: ignore[misc]
        ]
        self.lengths = list(map(len, self.tables))
        self.places = [table for table in self.tables for _ in table]
        self.keys = [key for table in self.tables for key in table]
        self.members = list(map(getitem, self.places, self.keys))
        self.tensors = [t for t in self.members if isinstance(t, torch.Tensor)]
        self.flags = list(map(FROZEN, self.tensors))
        self.addresses = list(map(torch.Tensor.data_ptr, self.tensors))
        self.groups = [g["params"] for g in optimizer.param_groups]
        self.grouped = list(chain.from_iterable(self.groups))
        self.states = list(optimizer.state.values())
        self.state_lengths = list(map(len, self.states))
        self.held = list(chain.from_iterable(map(dict.values, self.states)))
        self.settings = plan.settings()
        self.row_by_row = list(map(torch.Tensor.is_contiguous, self.tensors))
        self.held_tensors = [t for t in self.held if isinstance(t, torch.Tensor)]
        self.held_addresses = list(map(torch.Tensor.data_ptr, self.held_tensors))
        self.held_row_by_row = list(map(torch.Tensor.is_contiguous, self.held_tensors))

    def holds(self) -> bool:
        """Whether all is as it was."""
        groups = [g["params"] for g in self.optimizer.param_groups]
        states = self.optimizer.state.values()
        return (
            list(map(len, self.tables)) == self.lengths
            and all(map(is_, map(dict.get, self.places, self.keys), self.members))
            and list(map(getitem, self.attributes, repeat("training"))) == self.training
            and list(map(torch.Tensor.data_ptr, self.tensors)) == self.addresses
            and list(map(FROZEN, self.tensors)) == self.flags
            and same(chain.from_iterable(groups), self.grouped, sum(map(len, groups)))
            and len(states) == len(self.states)
            and all(map(is_, states, self.states))
            and list(map(len, self.states)) == self.state_lengths
            and all(map(is_, chain.from_iterable(map(dict.values, self.states)), self.held))
            and list(map(torch.Tensor.is_contiguous, self.tensors)) == self.row_by_row
            and list(map(torch.Tensor.data_ptr, self.held_tensors)) == self.held_addresses
            and list(map(torch.Tensor.is_contiguous, self.held_tensors)) == self.held_row_by_row
            and self.settings is not None
            and self.plan.settings() == self.settings
        )


def same(found: Iterable[Any], known: list[Any], count: int) -> bool:
    """Whether `count` objects are the known ones."""
    return count == len(known) and all(map(is_, found, known))
