"""Whether anything a compiled step hangs on has changed since it was bound: a few passes over flat lists.

Looks at identities and addresses alone, at the speed of C loops. Where it says no, the slow and exact check decides.
"""

from __future__ import annotations

from collections.abc import Iterable
from operator import attrgetter, itemgetter
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from ..torch_private import at_addresses
from ..training.optimizer_plan import OptimizerPlan

ADDRESS, ROW_BY_ROW = torch.Tensor.data_ptr, torch.Tensor.is_contiguous
TRAINS, TRAINING = attrgetter("requires_grad"), itemgetter("training")


class OtherTensorError(Exception):
    """Two tensors were compared that are not the same object."""


class ByIdentity(TorchFunctionMode):
    """While it is on, tensors are equal only where they are the same object.

    Containers compare their members by identity first. Those that are not identical are asked for equality, which
    raises here: two lists of tables are compared in one call, and no tensor's values are ever looked at.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise OtherTensorError


class Snapshot:
    """Modules, parameters, buffers and optimizer state as they were.

    hypers: what of the optimizer's groups a step reads every time, so that it may change.
    """

    def __init__(
        self,
        roots: Iterable[nn.Module],
        optimizer: torch.optim.Optimizer,
        plan: OptimizerPlan,
        hypers: Iterable[str],
    ):
        modules = list(dict.fromkeys(m for root in roots for m in root.modules()))
        self.optimizer, self.plan, self.by_identity = optimizer, plan, ByIdentity()
        self.attributes = [m.__dict__ for m in modules]
        self.training = list(map(TRAINING, self.attributes))
        #: where modules keep children, parameters and buffers, and what was there
        tables: list[dict[str, Any]] = [
            t
            for m in modules
            for t in (m._modules, m._parameters, m._buffers)  # type: ignore[misc]
        ]
        self.empty, self.tables = [t for t in tables if not t], [t for t in tables if t]
        self.members = [dict(t) for t in self.tables]
        self.states = [dict(state) for state in optimizer.state.values()]
        held = [t for state in self.states for t in state.values() if isinstance(t, torch.Tensor)]
        own = [t for table in self.members for t in table.values() if isinstance(t, torch.Tensor)]
        self.trainable = [t for t in own if isinstance(t, nn.Parameter)]
        self.flags = list(map(TRAINS, self.trainable))
        self.tensors = own + held
        self.addresses, self.numbers = list(map(ADDRESS, self.tensors)), list(range(len(self.tensors)))
        #: tensors that can lie otherwise at the same address: the others have one dimension or none
        self.laid = [t for t in self.tensors if t.dim() > 1]
        self.row_by_row = list(map(ROW_BY_ROW, self.laid))
        self.settings, self.hypers = plan.settings(), frozenset(hypers)
        #: whether the optimizer's groups are, hyper-parameters included, what they were when they were last kept
        self.same_groups = False
        self.keep_groups()

    def keep_groups(self) -> None:
        """The hyper-parameters have been read: until they change there is no need to read them again."""
        self.groups = [dict(group, params=list(group["params"])) for group in self.optimizer.param_groups]
        #: whether comparing groups tells all: a tensor or a list among the hyper-parameters may change inside
        self.fixed = all(is_fixed(v) for group in self.groups for key, v in group.items() if key != "params")

    def changed_keys(self) -> set[str]:
        """The entries of the optimizer's groups that are others than those kept."""
        changed: set[str] = set()
        for now, before in zip(self.optimizer.param_groups, self.groups, strict=True):
            keys = (now.keys() | before.keys()) - {"params"}
            changed |= {k for k in keys if now.get(k) is not before.get(k) and repr(now.get(k)) != repr(before.get(k))}
        return changed

    def holds(self) -> bool:
        """Whether all is as it was."""
        self.same_groups = False
        try:
            with self.by_identity:
                if (
                    any(self.empty)
                    or not self.tables == self.members  # noqa: SIM201 - `!=` of lists would compare dictionaries twice
                    or not list(self.optimizer.state.values()) == self.states  # noqa: SIM201
                ):
                    return False
                same = self.fixed and self.optimizer.param_groups == self.groups
                if not same and [g["params"] for g in self.optimizer.param_groups] != [
                    g["params"] for g in self.groups
                ]:
                    return False
        except OtherTensorError:
            return False
        if (
            not at_addresses(self.tensors, self.addresses, self.numbers)
            or list(map(TRAINING, self.attributes)) != self.training
            or list(map(TRAINS, self.trainable)) != self.flags
            or list(map(ROW_BY_ROW, self.laid)) != self.row_by_row
            or self.settings is None
        ):
            return False
        if not same and (self.plan.settings() != self.settings or not self.changed_keys() <= self.hypers):
            return False
        self.same_groups = same
        return True


def is_fixed(value: Any) -> bool:
    """Whether a value that is still the same object, or equal to it, has not changed inside."""
    return (
        value is None
        or isinstance(value, int | float | str)
        or (isinstance(value, tuple) and all(map(is_fixed, value)))
    )
