"""Whether anything a compiled step hangs on has changed since it was bound: records of it, compared on every step.

Looks at identities, addresses and strides alone. Where it says no, the slow and exact check decides.
"""

from __future__ import annotations

from collections.abc import Iterable
from operator import methodcaller
from typing import Any

import torch
from torch import nn

from ..capture.reads import Reads
from ..training.optimizer_plan import OptimizerPlan
from .record import Subjects, record

TRAINING = methodcaller("get", "training")  # those of TorchScript keep it elsewhere
PLAIN = frozenset({int, float, bool, str, type(None)})


class Snapshot:
    """Modules, parameters, buffers and optimizer state as they were.

    hypers: what of the optimizer's groups a step reads every time, so that it may change.
    reads: Python values that the program was made from.
    """

    def __init__(
        self,
        roots: Iterable[nn.Module],
        optimizer: torch.optim.Optimizer,
        plan: OptimizerPlan,
        hypers: Iterable[str],
        reads: Reads | None = None,
    ):
        self.reads = reads = reads or Reads()
        modules = list(dict.fromkeys([*(m for root in roots for m in root.modules()), *reads.modules.values()]))
        self.optimizer, self.plan = optimizer, plan
        self.state, self.param_groups = optimizer.state, optimizer.param_groups
        self.attributes = [m.__dict__ for m in modules]
        self.training = list(map(TRAINING, self.attributes))
        #: where modules keep children, parameters and buffers
        tables: list[dict[str, Any]] = [
            t
            for m in modules
            for t in (m._modules, m._parameters, m._buffers)  # type: ignore[misc]
        ]
        states: list[dict[Any, Any]] = [optimizer.state, *optimizer.state.values()]
        own, held = (
            [t for table in found for t in table.values() if isinstance(t, torch.Tensor)]
            for found in (tables, states[1:])
        )
        tensors = list({id(t): t for t in own + held + reads.tensors}.values())
        #: in one dimension or none a tensor can hardly lie otherwise at the same address
        laid, placed = [t for t in tensors if t.dim() > 1], [t for t in tensors if t.dim() < 2]
        lists = [self.param_groups, *(group["params"] for group in self.param_groups)]
        trained = list({id(t): t for t in own if isinstance(t, nn.Parameter)}.values())
        self.tensors = record(Subjects(lists=lists, placed=placed, laid=laid, trained=trained))
        self.tables = record(Subjects(tables=tables + states))
        #: tells quickly that no table has changed at all, which is not to say that what counts has
        self.untouched = record(Subjects(tagged=[*self.attributes, *tables, *states], quiet=True))
        self.settings, self.hypers = plan.settings(), frozenset(hypers)
        #: whether the optimizer's groups are, hyper-parameters included, what they were when they were last kept
        self.same_groups = False
        self.untouched_groups = record(Subjects(tagged=self.param_groups))
        self.keep_groups()

    def keep_groups(self) -> None:
        """The hyper-parameters have been read: until they change there is no need to read them again."""
        self.groups = [dict(group) for group in self.param_groups]
        self.untouched_groups.keep()
        #: whether comparing groups tells all: a tensor or a list among the hyper-parameters may change inside
        self.fixed = all(is_fixed(v) for group in self.groups for key, v in group.items() if key != "params")

    def changed_keys(self) -> set[str]:
        """The entries of the optimizer's groups that are others than those kept."""
        changed: set[str] = set()
        for now, before in zip(self.param_groups, self.groups, strict=True):
            keys = now.keys() if now.keys() == before.keys() else now.keys() | before.keys()
            changed |= {k for k in keys if now.get(k) is not before.get(k) and repr(now.get(k)) != repr(before.get(k))}
        return changed - {"params"}

    def holds(self) -> bool:
        """Whether all is as it was."""
        self.same_groups = False
        if (
            self.settings is None
            or self.optimizer.state is not self.state
            or self.optimizer.param_groups is not self.param_groups
            or not self.tensors.same()
            or not (self.untouched.same() or self.same_tables())
            or not self.reads.same_names()
        ):
            return False
        if self.fixed and self.untouched_groups.same():
            self.same_groups = True
            return True
        return self.holds_groups()

    def holds_groups(self) -> bool:
        """Whether of the optimizer's groups nothing but hyper-parameters has changed; `same_groups`: not even those."""
        self.same_groups = False
        if any(
            now["params"] is not before["params"] for now, before in zip(self.param_groups, self.groups, strict=True)
        ):
            return False
        changed = self.changed_keys()
        if self.fixed and not changed:
            self.same_groups = True
            return True
        return changed <= self.hypers and self.plan.settings() == self.settings

    def same_tables(self) -> bool:
        """Whether all tables have the members they had."""
        if not self.tables.same() or list(map(TRAINING, self.attributes)) != self.training:
            return False
        if not self.reads.same_settings():
            return False
        self.untouched.keep()
        return True


def is_fixed(value: Any) -> bool:
    """Whether a value that is still the same object, or equal to it, has not changed inside."""
    return type(value) in PLAIN or (isinstance(value, tuple) and all(map(is_fixed, value)))
