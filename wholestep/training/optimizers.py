"""Reads the user's `torch.optim` object: which update each parameter gets, from which state and hyper-parameters.

Classes of `torch.optim` map to the ops of `dialects/step/optimizers.py`; any other `step` is traced.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch

from ..capture.slots import Slot
from ..dialects.step import StepBuilder, step, tensor_type
from ..errors import OptimizerError
from ..ir.attributes import freeze
from ..ir.core import Value
from ..ir.types import F64, TensorType
from .optimizer_families import Family, Hyper, families
from .optimizer_plan import OptimizerPlan, refuse_unsupported, step_function, without_wrappers

NUMBER = TensorType((), F64)


def plan_optimizer(
    optimizer: torch.optim.Optimizer,
    parameters: dict[str, torch.nn.Parameter],
    previous: OptimizerPlan | None = None,
) -> OptimizerPlan:
    """The plan of the optimizer's update; OptimizerError where it cannot be part of a program.

    `previous` is an earlier plan of this optimizer: what was traced for it is not traced again.
    """
    refuse_unsupported(optimizer, parameters)
    family = family_of(optimizer)
    if family is not None:
        return FamilyPlan(optimizer, parameters, family)
    from .traced_optimizer import TracedPlan

    return TracedPlan(optimizer, parameters, previous)


def family_of(optimizer: torch.optim.Optimizer) -> Family | None:
    """The family whose `step` this optimizer runs; None for a class that brings its own."""
    for cls, family in families().items():
        if isinstance(optimizer, cls):
            own_step = step_function(type(optimizer)) is not step_function(cls)
            own_state = group_function(type(optimizer)) is not group_function(cls)
            return None if own_step or own_state else family
    return None


def group_function(cls: type[torch.optim.Optimizer]) -> Any:
    """What makes the state of a class's parameters."""
    return without_wrappers(cls._init_group)  # type: ignore[attr-defined]


class FamilyPlan(OptimizerPlan):
    """The plan of a `torch.optim` optimizer: one op per parameter."""

    def __init__(self, optimizer: torch.optim.Optimizer, parameters: dict[str, torch.nn.Parameter], family: Family):
        super().__init__(optimizer, parameters)
        self.family = family
        self.definition: Any = step.ops[family.op]
        self._members = self.membership()
        self._initial_types: dict[tuple[Any, ...], dict[str, TensorType]] = {}
        for fqn in self.places:
            self._layout(fqn)

    # ---- structure -------------------------------------------------------------------------------------------------

    def structure(self) -> Hashable:
        members = self.membership()
        if members != self._members:  # another program anyhow, and the places no longer hold
            return (type(self.optimizer).__qualname__, members)
        layouts = tuple(tuple(self._layout(fqn).items()) for fqn in self.places)
        return (type(self.optimizer).__qualname__, members, self.settings(), layouts)

    def settings(self) -> Hashable:
        return tuple(
            (tuple((k, freeze(v)) for k, v in self.family.options(group).items()), tuple(self.family.hypers(group)))
            for group in self.optimizer.param_groups
        )

    def _layout(self, fqn: str) -> dict[str, TensorType]:
        """Type of each state by operand name: of what is there, or of what the first step will create."""
        place = self.places[fqn]
        initial = self._initial(place.parameter, self.group(fqn))
        state = self.state(fqn)
        present = {key: value for key, value in state.items() if value is not None}
        if not present:
            return initial
        layout = {}
        for operand, type in initial.items():
            key = self._key(operand)
            value = present.get(key)
            if value is None:
                if key not in self.family.lazy:
                    raise OptimizerError(
                        f"{self._name} has state for the parameter {fqn} but no {key!r}, which its options ask for "
                        f"(it has {', '.join(map(repr, present))}); eager raises KeyError here too. Clear the state or "
                        "restore the options it was made with"
                    )
                layout[operand] = type
                continue
            if not isinstance(value, torch.Tensor):
                raise OptimizerError(
                    f"{self._name} keeps {key!r} of the parameter {fqn} as {value.__class__.__name__}, not as a "
                    "tensor; load it with optimizer.load_state_dict, which converts it"
                )
            if tuple(value.shape) != type.shape:
                raise OptimizerError(
                    f"{self._name}'s state {key!r} of the parameter {fqn} has shape {tuple(value.shape)}, "
                    f"expected {type.shape}: it belongs to another parameter or model"
                )
            layout[operand] = tensor_type(value)
        return layout

    def _initial(self, parameter: torch.Tensor, group: dict[str, Any]) -> dict[str, TensorType]:
        """Types of the state the first step creates, found on a tensor without memory."""
        group_options = tuple(k for k in ("momentum", "amsgrad", "centered") if group.get(k))
        key = (parameter.shape, parameter.dtype, group_options, torch.get_default_dtype())
        if key not in self._initial_types:
            meta = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
            made = self.family.initial(meta, group, self.optimizer)
            operands = {self._key(operand): operand for operand in self.definition.states}
            types = {operands[k]: tensor_type(v) for k, v in made.items()}
            self._initial_types[key] = {s: types[s] for s in self.definition.states if s in types}
        return self._initial_types[key]

    def _key(self, operand: str) -> str:
        return self.family.keys.get(operand, operand)

    @property
    def _name(self) -> str:
        return type(self.optimizer).__name__

    # ---- the update ------------------------------------------------------------------------------------------------

    def slots(self, fqn: str) -> list[Slot]:
        return list(self._inputs(fqn).values())

    def _inputs(self, fqn: str) -> dict[str, Slot]:
        """Slots by operand name, state first."""
        place, group = self.place(fqn), self.group(fqn)
        inputs = {}
        for operand, type in self._layout(fqn).items():
            key = self._key(operand)
            inputs[operand] = Slot("optimizer_state", f"{fqn}.{key}", ("state", fqn, key), type)
        for hyper in self.family.hypers(group):
            inputs[hyper.operand] = hyper_slot(place.group, hyper)
        if self.family.fresh(group):
            inputs["fresh"] = Slot("fresh", f"{fqn}.fresh", ("fresh", fqn), NUMBER)
        return inputs

    def emit(
        self, b: StepBuilder, fqn: str, parameter: Value, gradient: Value, inputs: list[Value]
    ) -> tuple[Value, list[tuple[Slot, Value]]]:
        slots = self._inputs(fqn)
        values = {"parameter": parameter, "gradient": gradient, **dict(zip(slots, inputs, strict=True))}
        operands = [values.get(f.name) for f in self.definition.operand_fields]
        op = self.definition.build(b, *operands, **self.family.options(self.group(fqn)))
        return op.results[0], [(slots[name], new) for name, _, new in self.definition.state_values(op)]

    # ---- values ----------------------------------------------------------------------------------------------------

    def initialise(self, fqn: str) -> dict[str, torch.Tensor]:
        state, place, group = self.state(fqn), self.place(fqn), self.group(fqn)
        missing = [key for key in map(self._key, self._initial(place.parameter, group)) if state.get(key) is None]
        if not missing:
            return {}
        made = self.family.initial(place.parameter.detach(), group, self.optimizer)
        return {key: value for key, value in made.items() if key in missing}

    def read(self, slot: Slot, optimizer: torch.optim.Optimizer | None = None) -> Any:
        owner = optimizer or self.optimizer
        what, *where = slot.source
        if what == "group":
            index, key, *inner = where
            value = owner.param_groups[index][key]
            return value[inner[0]] if inner else value
        fqn = where[0]
        state = self.state(fqn, owner)
        if what == "fresh":
            return 1.0 if state.get("momentum_buffer") is None else 0.0
        value = state.get(where[1])
        return self.initialise(fqn)[where[1]] if value is None else value


def hyper_slot(group: int, hyper: Hyper) -> Slot:
    """The slot of a hyper-parameter; equal for all parameters of the group."""
    where = (hyper.key,) if hyper.index is None else (hyper.key, hyper.index)
    return Slot("hyper", ".".join(("group" + str(group), *map(str, where))), ("group", group, *where), NUMBER)
