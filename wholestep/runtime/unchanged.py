"""Whether anything a compiled step hangs on has changed since it was bound: a few passes over flat lists.

Looks at identities and addresses alone, at the speed of C loops. Where it says no, the slow and exact check decides.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from operator import attrgetter, is_
from typing import Any

import torch
from torch import nn

from ..training.optimizer_plan import OptimizerPlan

TRAINING, FROZEN = attrgetter("training"), attrgetter("requires_grad")


class Snapshot:
    """Modules, parameters, buffers and optimizer state as they were."""

    def __init__(self, roots: Iterable[nn.Module], optimizer: torch.optim.Optimizer, plan: OptimizerPlan):
        self.modules = list(dict.fromkeys(m for root in roots for m in root.modules()))
        self.optimizer, self.plan = optimizer, plan
        self.tables = [m._modules for m in self.modules]
        self.tables += [m._parameters for m in self.modules]  # type: ignore[misc]
        self.tables += [m._buffers for m in self.modules]  # type: ignore[misc]
        self.members = self._members()
        self.tensors = [t for t in self.members if isinstance(t, torch.Tensor)]
        self.training = list(map(TRAINING, self.modules))
        self.flags = list(map(FROZEN, self.tensors))
        self.places = list(map(torch.Tensor.data_ptr, self.tensors))
        self.held = self._held()
        self.settings = plan.settings()

    def _members(self) -> list[Any]:
        return list(chain.from_iterable(map(dict.values, self.tables)))

    def _held(self) -> list[Any]:
        """The optimizer's parameters, and what it keeps for each."""
        state = list(self.optimizer.state.values())
        groups = [g["params"] for g in self.optimizer.param_groups]
        return [*chain.from_iterable(groups), *chain.from_iterable(map(dict.values, state))]

    def holds(self) -> bool:
        """Whether all is as it was."""
        return (
            same(self._members(), self.members)
            and list(map(TRAINING, self.modules)) == self.training
            and list(map(torch.Tensor.data_ptr, self.tensors)) == self.places
            and list(map(FROZEN, self.tensors)) == self.flags
            and same(self._held(), self.held)
            and self.settings is not None
            and self.plan.settings() == self.settings
        )


def same(one: list[Any], other: list[Any]) -> bool:
    """Whether two lists hold the same objects."""
    return len(one) == len(other) and all(map(is_, one, other))
