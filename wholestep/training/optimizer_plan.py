"""What the step builder and the runtime ask of an optimizer, whatever kind it is; and which optimizers are refused."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from ..capture.slots import Slot
from ..dialects.step import StepBuilder
from ..errors import OptimizerError
from ..ir.core import Value
from ..torch_private import optimizer_step_hooks


@dataclass(frozen=True)
class Place:
    """A parameter the optimizer updates: its name in the model and where it stands in `param_groups`."""

    fqn: str
    group: int
    position: int
    parameter: torch.nn.Parameter


class OptimizerPlan(ABC):
    """How one optimizer's update becomes part of the program.

    Everything is read from the optimizer when it is asked for, so that schedulers, loaded checkpoints and added groups
    are seen; `structure` tells whether the program built from this plan still fits.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, parameters: dict[str, torch.nn.Parameter]):
        self.optimizer = optimizer
        self.names = {id(p): fqn for fqn, p in parameters.items()}
        self.places: dict[str, Place] = {}
        #: how many of the optimizer's parameters are not the model's
        self.foreign = 0
        for g, group in enumerate(optimizer.param_groups):
            for i, parameter in enumerate(group["params"]):
                fqn = self.names.get(id(parameter))
                if fqn is None:
                    self.foreign += 1
                    continue
                self.places[fqn] = Place(fqn, g, i, parameter)

    @property
    def parameters(self) -> tuple[str, ...]:
        """The model's parameters that this optimizer updates, in the optimizer's order."""
        return tuple(self.places)

    def place(self, fqn: str) -> Place:
        try:
            return self.places[fqn]
        except KeyError:
            name = type(self.optimizer).__name__
            raise OptimizerError(f"{name} does not update the parameter {fqn}: it is in none of its groups") from None

    def group(self, fqn: str) -> dict[str, Any]:
        return self.optimizer.param_groups[self.place(fqn).group]

    def membership(self) -> Hashable:
        """Which parameters are in which group; one not of the model counts as None."""
        names = self.names
        return tuple(tuple([names.get(id(p)) for p in group["params"]]) for group in self.optimizer.param_groups)

    def state(self, fqn: str, optimizer: torch.optim.Optimizer | None = None) -> dict[str, Any]:
        """The parameter's state in this optimizer or in a copy of it; never creates an entry."""
        place, owner = self.place(fqn), optimizer or self.optimizer
        return owner.state.get(owner.param_groups[place.group]["params"][place.position], {})

    @abstractmethod
    def structure(self) -> Hashable:
        """Everything that the program depends on beyond the values of its inputs, as the optimizer stands now."""

    def settings(self) -> Hashable:
        """The part of `structure` that is neither a tensor nor an input; None where all of it must be asked."""
        return None

    @abstractmethod
    def slots(self, fqn: str) -> list[Slot]:
        """The inputs of this parameter's update, in the order `emit` wants their values."""

    @abstractmethod
    def emit(
        self, b: StepBuilder, fqn: str, parameter: Value, gradient: Value, inputs: list[Value]
    ) -> tuple[Value, list[tuple[Slot, Value]]]:
        """Builds the update: the new parameter, and the new value of each state slot that changes."""

    @abstractmethod
    def initialise(self, fqn: str) -> dict[str, Any]:
        """The state the first step would create for this parameter and that is not there yet; installs nothing."""

    @abstractmethod
    def read(self, slot: Slot, optimizer: torch.optim.Optimizer | None = None) -> Any:
        """The current value of a slot: a number or a tensor. Read `fresh` before installing what `initialise` gave."""

    def host_state(self, fqn: str) -> list[str]:
        """What a step changes for this parameter that no result of the program can hold back."""
        return []

    def finish(self, parameters: Iterable[str] | None = None) -> None:  # noqa: B027 - most optimizers have nothing to do
        """After a step that ran to its end: advances what the optimizer keeps as Python numbers, for the parameters
        that were updated (all where not told). `structure` was called before that step."""


def step_function(cls: type[torch.optim.Optimizer]) -> Any:
    """The class's own `step`, without the wrappers torch puts around it (hooks, no_grad)."""
    return without_wrappers(cls.step)


def without_wrappers(function: Any) -> Any:
    """A function without what torch wraps around it; torch.compile's first call wraps parts of all optimizers."""
    while hasattr(function, "__wrapped__") and "/torch/" in function.__code__.co_filename:
        function = function.__wrapped__
    return function


def refuse_unsupported(optimizer: Any, parameters: dict[str, torch.nn.Parameter]) -> None:
    """Raises OptimizerError for what no program can do, whichever way the optimizer would be read."""
    name = type(optimizer).__name__
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise OptimizerError(f"{name} is not a torch.optim.Optimizer; pass the optimizer itself, not a wrapper of it")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise OptimizerError(
            "LBFGS evaluates the loss several times per step through a closure, so its step is not one program; "
            "use a first-order optimizer, or train eagerly"
        )
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise OptimizerError("SparseAdam wants sparse gradients, and a program's are dense; use torch.optim.Adam")
    own = vars(optimizer).get("step")
    if own is not None and not hasattr(own, "_wrapped_by_lr_sched"):
        raise OptimizerError(
            f"{name}.step was replaced on the object (by a wrapper or a patch), so what it does is not known; "
            "pass the optimizer before it is wrapped"
        )
    hooks = optimizer_step_hooks(optimizer)
    if hooks:
        raise OptimizerError(
            f"{name} has step hooks ({', '.join(hooks)}), which a compiled step would not call; "
            "remove them, and do their work before or after the step"
        )
    required = [
        p.name
        for p in list(inspect.signature(step_function(type(optimizer))).parameters.values())[1:]
        if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    ]
    if required:
        raise OptimizerError(
            f"{name}.step needs {', '.join(required)}: a step that re-evaluates the model through a closure is not one "
            "program; use an optimizer whose step() takes no argument, or train eagerly"
        )
    names = {id(p): fqn for fqn, p in parameters.items()}
    for index, group in enumerate(optimizer.param_groups):
        if group.get("differentiable"):
            raise OptimizerError(
                f"{name} has differentiable=True in group {index}: gradients through the update are not part of a "
                "training step; set it to False"
            )
        for parameter in group["params"]:
            if parameter.is_complex():
                fqn = names.get(id(parameter), "of the optimizer")
                raise OptimizerError(
                    f"the parameter {fqn} is complex ({parameter.dtype}), which {name} cannot update in a program; "
                    "keep real and imaginary part as two real parameters"
                )
