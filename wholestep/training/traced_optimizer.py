"""The plan of an optimizer that brings its own `step`: traced once per kind of parameter, then instantiated.

State that the first step creates is found by tracing twice: from no state, and from the state so created. Where both
compute the same, one program serves every step; where they differ, the first step has a program of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ..capture.slots import Slot
from ..dialects.step import StepBuilder
from ..errors import OptimizerError
from ..ir.core import Value
from ..ir.types import TensorType
from .optimizer_plan import OptimizerPlan
from .optimizer_trace import Layout, Path, Shadow, describe, is_constant, is_number, numbers_in, refuse, tensor_kind
from .traced_numbers import evaluate
from .update_template import Trace, instantiate, reachable, same_results, used_arguments

MOST_VARIANTS = 16
#: attributes of every optimizer, none of them a setting of the algorithm
NOT_SETTINGS = {"state", "param_groups", "defaults", "step"}


@dataclass
class Variant:
    """A trace that serves some parameters, and the first step's trace where that creates the state it needs."""

    trace: Trace
    first: Trace | None = None

    @property
    def initial(self) -> dict[str, Any]:
        """State as the first step creates it, by key."""
        return (self.first or self.trace).created


class TracedPlan(OptimizerPlan):
    """The plan of a third-party optimizer."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        parameters: dict[str, torch.nn.Parameter],
        previous: OptimizerPlan | None = None,
    ):
        super().__init__(optimizer, parameters)
        self._members = self.membership()
        self._variants: dict[Layout, list[Variant]] = {}
        self._independent: set[Hashable] = set()
        self._chosen: dict[str, Variant] = {}
        #: how many times `step` was traced for this plan
        self.traces = 0
        if isinstance(previous, TracedPlan) and previous.optimizer is optimizer:
            self._variants, self._independent = previous._variants, previous._independent
        for fqn in self.places:
            self.variant(fqn)

    # ---- which trace -----------------------------------------------------------------------------------------------

    def structure(self) -> Hashable:
        members = self.membership()
        name = type(self.optimizer).__qualname__
        if members != self._members:
            return (name, members)
        settings: dict[int, Any] = {}
        self._chosen = {fqn: self.variant(fqn, settings) for fqn in self.places}
        return (name, members, repr(self.optimizer.defaults), tuple(v.trace.digest for v in self._chosen.values()))

    def layout(self, fqn: str, settings: dict[int, Any] | None = None) -> Layout:
        """What the trace of this parameter depends on, as the optimizer stands now.

        `settings` remembers the part that is common to a group, while many parameters are asked for.
        """
        place = self.place(fqn)
        common = None if settings is None else settings.get(place.group)
        if common is None:
            common = self._settings(fqn)
            if settings is not None:
                settings[place.group] = common
        entries = self.state(fqn)
        state = tuple((key, describe(value)) for key, value in entries.items())
        for key, value in entries.items():
            if not (isinstance(value, torch.Tensor) or is_number(value) or is_constant(value)):
                raise OptimizerError(
                    f"{self._name} keeps {key!r} of the parameter {fqn} as {type(value).__name__}; a program keeps "
                    "tensors and numbers, each under a key of its own"
                )
        return Layout(tensor_kind(place.parameter), state, *common)

    def _settings(self, fqn: str) -> tuple[Any, Any]:
        """What the group and the optimizer's own attributes look like."""
        group = {k: v for k, v in self.group(fqn).items() if k not in ("params", "param_names")}
        attributes = {k: v for k, v in vars(self.optimizer).items() if k not in NOT_SETTINGS and is_setting(v)}
        return (
            tuple((k, describe(group[k])) for k in sorted(group)),
            tuple((k, describe(v) if is_number(v) else ("constant", repr(v))) for k, v in attributes.items()),
        )

    def variant(self, fqn: str, settings: dict[int, Any] | None = None) -> Variant:
        """The trace that fits this parameter now; traces where none does."""
        layout = self.layout(fqn, settings)
        known = self._variants.setdefault(layout, [])
        for variant in known:
            leaf = self._leaf(fqn, variant)
            if variant.trace.holds(leaf) and (variant.first is None or variant.first.holds(leaf)):
                return variant
        if len(known) >= MOST_VARIANTS:
            lines = [line for variant in known for line in variant.trace.guards.values() if line]
            place = f" ({lines[-1][0]}:{lines[-1][1]})" if lines else ""
            raise OptimizerError(
                f"{self._name}.step() branches on a number that keeps changing{place}: it was traced {MOST_VARIANTS} "
                "times. Compute both sides and choose with torch.where, or train eagerly"
            )
        variant = self._trace(fqn, layout)
        known.append(variant)
        return variant

    def _trace(self, fqn: str, layout: Layout) -> Variant:
        group, state = self.group(fqn), self.state(fqn)
        try:
            first = self._run(group, layout, numbers_in(layout, group, self.optimizer, state))
            if not first.created:
                return Variant(first)
            steady = self._run_steady(fqn, group, layout, first)
            if steady is not None:
                return Variant(steady, first)
            return Variant(first)
        except OptimizerError:
            raise
        except Exception as error:
            raise refuse(self.optimizer, error) from error

    def _run(self, group: dict[str, Any], layout: Layout, numbers: dict[Any, Any]) -> Trace:
        self.traces += 1
        # whether parameters have a part in each other's updates is a matter of the code, not of sizes
        code_path = (len(layout.parameter[0]), layout.group)
        trace = Shadow(self.optimizer, group, layout, numbers).trace(code_path not in self._independent)
        self._independent.add(code_path)
        return trace

    def _run_steady(self, fqn: str, group: dict[str, Any], layout: Layout, first: Trace) -> Trace | None:
        """The trace of a later step, if the first step computes the same from the state it creates."""
        initial = [v for v in first.created.values() if isinstance(v, Value)]
        if any(name == ("target", "gradient") for name in used_arguments(first, initial)):
            return None
        if any(op.name == "step.select" for op in reachable(initial)):
            return None
        numbers = numbers_in(layout, group, self.optimizer, self.state(fqn))
        added = []
        for key, value in first.created.items():
            if isinstance(value, Value):
                added.append((key, ("tensor", *first.kinds[key])))
            elif value[0] == "number":
                numbers["state", key] = evaluate(value[1], self._leaf(fqn, Variant(first)))
                added.append((key, ("number",)))
            else:
                added.append((key, value))
        later = Layout(layout.parameter, (*layout.state, *added), layout.group, layout.attributes)
        steady = self._run(group, later, numbers)
        if steady.created or not same_results(first, steady):
            return None
        self._variants.setdefault(later, []).append(Variant(steady))
        return steady

    @property
    def _name(self) -> str:
        return type(self.optimizer).__name__

    # ---- the update ------------------------------------------------------------------------------------------------

    def slots(self, fqn: str) -> list[Slot]:
        return list(self._inputs(fqn, self.variant(fqn).trace).values())

    def _inputs(self, fqn: str, trace: Trace) -> dict[Any, Slot]:
        """Slots by argument name of the template, state first. State that is written has a slot even if never read."""
        state, rest = {}, {}
        for name in trace.used:
            if name in (("target", "parameter"), ("target", "gradient")):
                continue
            type = trace.arguments[name].type
            if name[0] in ("target", "state"):
                state[name] = self._state_slot(fqn, name[1], type)
            elif name[0] == "attribute":
                rest[name] = Slot("hyper", f"optimizer.{name[1]}", name, type)
            else:
                group = self.place(fqn).group
                text = ".".join(map(str, name[1:]))
                rest[name] = Slot("hyper", f"group{group}.{text}", ("group", group, *name[1:]), type)
        for key, value in trace.states.items():
            state.setdefault(("target", key), self._state_slot(fqn, key, value.type))
        return {**state, **rest}

    def _state_slot(self, fqn: str, key: str, type: TensorType) -> Slot:
        return Slot("optimizer_state", f"{fqn}.{key}", ("state", fqn, key), type)

    def emit(
        self, b: StepBuilder, fqn: str, parameter: Value, gradient: Value, inputs: list[Value]
    ) -> tuple[Value, list[tuple[Slot, Value]]]:
        trace = self.variant(fqn).trace
        gradient = b.cast_to(gradient, parameter.type.element)
        values: dict[Any, Value] = dict(zip(self._inputs(fqn, trace), inputs, strict=True))
        values = {name: value for name, value in values.items() if name in trace.arguments}
        values |= {("target", "parameter"): parameter, ("target", "gradient"): gradient}
        mapping = instantiate(b, trace, values)
        changes = []
        for key, value in trace.states.items():
            if value is not trace.arguments.get(("target", key)):
                changes.append((self._state_slot(fqn, key, value.type), mapping[value]))
        return mapping[trace.parameter], changes

    # ---- values ----------------------------------------------------------------------------------------------------

    def _leaf(self, fqn: str, variant: Variant, optimizer: torch.optim.Optimizer | None = None) -> Callable[[Any], Any]:
        """The present value of a number of this parameter's update."""
        owner = optimizer or self.optimizer
        state, group = self.state(fqn, owner), owner.param_groups[self.place(fqn).group]

        def leaf(name: Any) -> Any:
            kind, key, *inner = name
            if kind == "attribute":
                return getattr(owner, key)
            if kind == "state":
                value = state.get(key)
                return evaluate(variant.initial[key][1], leaf) if value is None else value
            value = group[key]
            for i in inner:
                value = value[i]
            return value

        return leaf

    def initialise(self, fqn: str) -> dict[str, Any]:
        variant, state = self._chosen.get(fqn) or self.variant(fqn), self.state(fqn)
        made: dict[str, Any] = {}
        leaf = self._leaf(fqn, variant)
        tensors: dict[str, torch.Tensor] | None = None
        for key, value in variant.initial.items():
            if key in state:
                continue
            if not isinstance(value, Value):
                made[key] = evaluate(value[1], leaf) if value[0] == "number" else value[1]
                continue
            shape, stride, dtype, device = (variant.first or variant.trace).kinds[key]
            made[key] = torch.empty_strided(shape, stride, dtype=dtype, device=device)
            if variant.first is None:
                made[key].zero_()  # only a place: the first step's program gives the value
                continue
            if tensors is None:
                tensors = self._created(fqn, variant.first, leaf)
            made[key].copy_(tensors[key])
        return made

    def _created(self, fqn: str, first: Trace, leaf: Callable[[Any], Any]) -> dict[str, torch.Tensor]:
        """State as the first step creates it, from running the trace on copies."""
        path = first.paths[0]
        parameter = self.place(fqn).parameter.detach()
        inputs = []
        shadow = Shadow(self.optimizer, self.group(fqn), self.layout(fqn), {})
        for name, (shape, _, dtype, device) in shadow.inputs():
            if name == ("target", "parameter"):
                inputs.append(parameter.clone())
            elif name[0] == "group":
                inputs.append(self.group(fqn)[name[1]].clone())
            elif name[0] == "target" and name[1] != "gradient":
                inputs.append(self.state(fqn)[name[1]].clone())
            else:
                inputs.append(torch.zeros((), dtype=dtype, device=device).expand(shape).clone())
        with torch.no_grad():
            outputs = Replay(path, leaf).run(*inputs)
        return {key: outputs[spec[1]] for key, spec in path.created.items() if spec[0] == "output"}

    def read(self, slot: Slot, optimizer: torch.optim.Optimizer | None = None) -> Any:
        owner = optimizer or self.optimizer
        kind, *where = slot.source
        if kind == "attribute":
            return getattr(owner, where[0])
        if kind == "group":
            value = owner.param_groups[where[0]]
            for key in where[1:]:
                value = value[key]
            return value
        fqn, key = where
        value = self.state(fqn, owner).get(key)
        return self.initialise(fqn)[key] if value is None else value

    def host_state(self, fqn: str) -> list[str]:
        variant = self._chosen.get(fqn) or self.variant(fqn)
        counted = [".".join(map(str, name[1:])) for name in variant.trace.host]
        started = [key for key, value in variant.initial.items() if isinstance(value, Value) and variant.first is None]
        state = {**{k: v for k, v in variant.initial.items() if not isinstance(v, Value)}, **self.state(fqn)}
        read = [s.source[2] for s in self.slots(fqn) if s.kind == "optimizer_state"]
        numbers = [key for key in read if key in state and not isinstance(state[key], torch.Tensor)]
        return [*counted, *started, *numbers]

    def finish(self, parameters: Iterable[str] | None = None) -> None:
        writes: list[Callable[[], None]] = []
        done: set[Any] = set()
        for fqn in self.places if parameters is None else parameters:
            place = self.place(fqn)
            variant = self._chosen.get(fqn) or self.variant(fqn)
            leaf = self._leaf(fqn, variant)
            for name, expression in variant.trace.host.items():
                target = (fqn, name) if name[0] == "state" else (place.group if name[0] == "group" else None, name)
                if target in done:
                    continue
                done.add(target)
                writes.append(self._write(fqn, name, evaluate(expression, leaf)))
        for write in writes:
            write()

    def _write(self, fqn: str, name: Any, value: Any) -> Callable[[], None]:
        kind, key, *inner = name

        def write() -> None:
            if kind == "attribute":
                setattr(self.optimizer, key, value)
            elif kind == "state":
                self.optimizer.state[self.place(fqn).parameter][key] = value
            elif not inner:
                self.group(fqn)[key] = value
            else:
                old = self.group(fqn)[key]
                new = list(old)
                new[inner[0]] = value
                self.group(fqn)[key] = type(old)(new)

        return write


class Replay(fx.Interpreter):
    """Runs a trace on real tensors, numbers at their present value."""

    def __init__(self, path: Path, leaf: Callable[[Any], Any]):
        super().__init__(path.graph)
        self.session, self.leaf = path.session, leaf
        self.items = path.outputs[path.items :]

    def fetch_args_kwargs_from_env(self, node: fx.Node) -> Any:
        return fx.node.map_aggregate(super().fetch_args_kwargs_from_env(node), self._number)

    def _number(self, value: Any) -> Any:
        if not is_number(value):
            return value
        expression = self.session.find(value)
        if expression is None:
            return value
        return evaluate(expression, self.leaf, lambda i: self.env[self.items[i]].item())


def is_setting(value: Any) -> bool:
    """Whether an attribute of the optimizer may steer its step: numbers and plain constants, alone or in a sequence."""
    if isinstance(value, list | tuple):
        return all(is_setting(v) for v in value)
    return is_number(value) or is_constant(value)
