"""Tracing one parameter's update out of an optimizer's own `step`.

The real `step` runs on a shadow of the optimizer: fake tensors, traced numbers, the parameter between two bystanders of
its kind. Branches on tensor data are run both ways and joined by a select. The result is a small template program.
"""

from __future__ import annotations

import copy
import linecache
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from ..dialects.step import StepBuilder, tensor_type
from ..errors import OptimizerError, WholestepError
from ..ir.core import Block, Value
from ..ir.types import F64, TensorType
from ..torch_private import trace_with_fake_tensors
from .optimizer_plan import step_function
from .traced_import import OptimizerImporter
from .traced_numbers import (
    INSIDE,
    Expression,
    Refusal,
    Session,
    TracedNumber,
    depends_on_data,
    expression_of,
)
from .update_template import Trace, meeting_line, tidy

MOST_PATHS = 16
NUMBER = TensorType((), F64)


@dataclass(frozen=True)
class Layout:
    """What a traced update is specialised to: the parameter's kind, and what state and settings look like."""

    parameter: tuple[Any, ...]  # shape, stride, dtype, device
    state: tuple[tuple[str, Any], ...]  # key -> ("tensor", ...), ("number",) or ("constant", value)
    group: tuple[tuple[str, Any], ...]
    attributes: tuple[tuple[str, Any], ...]


def tensor_kind(tensor: torch.Tensor) -> tuple[Any, ...]:
    return (tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, tensor.device)


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_constant(value: Any) -> bool:
    return value is None or isinstance(value, bool | str | torch.dtype | torch.device)


def describe(value: Any) -> Any:
    """The kind of a setting or state entry, as far as a trace depends on it; None for what is left alone."""
    if isinstance(value, torch.Tensor):
        return ("tensor", *tensor_kind(value))
    if is_number(value):
        return ("number",)
    if is_constant(value):
        return ("constant", value)
    if isinstance(value, list | tuple):
        if all(is_number(v) or is_constant(v) for v in value):
            return (type(value).__name__, *(describe(v) for v in value))
        return ("constant", repr(value))
    return None


class StateDict(dict):
    """A parameter's state on the shadow: notes what is created and makes its numbers traceable."""

    def __init__(self, session: Session, role: str):
        super().__init__()
        self.session, self.role = session, role
        self.created: dict[str, Any] = {}

    def __setitem__(self, key: str, value: Any) -> None:
        if key not in self and key not in self.created:
            if isinstance(value, torch.Tensor):
                self.created[key] = value.detach().clone(memory_format=torch.preserve_format)
            elif is_number(value):
                start = value.value if isinstance(value, TracedNumber) else value
                self.created[key] = expression_of(value)
                value = self.session.leaf(("state", key) if self.role == "target" else (self.role, key), start)
            else:
                self.created[key] = value
        super().__setitem__(key, value)

    def setdefault(self, key: str, default: Any = None) -> Any:
        if key not in self:
            self[key] = default
        return self[key]

    def update(self, *args: Any, **kwargs: Any) -> None:
        for key, value in dict(*args, **kwargs).items():
            self[key] = value

    def fill(self, key: str, value: Any) -> None:
        """Sets what was there before the step."""
        super().__setitem__(key, value)


class StateMap(dict):
    """`optimizer.state` on the shadow."""

    def __init__(self, make: Callable[[Any], StateDict]):
        super().__init__()
        self.make = make

    def __missing__(self, parameter: Any) -> StateDict:
        entry = self.make(parameter)
        super().__setitem__(parameter, entry)
        return entry

    def __setitem__(self, parameter: Any, value: Any) -> None:
        entry = self[parameter]
        for key, v in dict(value).items():
            entry[key] = v


class Groups(list):
    """`param_groups` on the shadow, which holds one group: asking for one by its number would give the wrong one."""

    def __init__(self, group: dict[str, Any], several: bool):
        super().__init__([group])
        self.several = several

    def __getitem__(self, index: Any) -> Any:
        if self.several:
            raise Refusal("step() takes a param group by its number, so the update of one group depends on another")
        return super().__getitem__(index)


@dataclass
class Path:
    """One run of `step`."""

    graph: fx.GraphModule
    session: Session
    states: dict[str, Any]  # final state: tensors by their place among the outputs, numbers as expressions
    created: dict[str, Any]  # state as created: likewise
    group: dict[Any, Expression]  # numbers of the group (and attributes) that changed
    items: int  # where the item snapshots start among the outputs
    kinds: dict[str, tuple[Any, ...]] = field(default_factory=dict)

    @property
    def outputs(self) -> list[fx.Node]:
        """The nodes of the graph's outputs."""
        (node,) = self.graph.graph.find_nodes(op="output")
        return list(node.args[0])


class Shadow:
    """Runs the optimizer's `step` for one parameter."""

    def __init__(self, optimizer: Any, group: dict[str, Any], layout: Layout, numbers: dict[Any, Any]):
        self.optimizer, self.group, self.layout, self.numbers = optimizer, group, layout, numbers

    def inputs(self) -> list[tuple[Any, tuple[Any, ...]]]:
        """Names and kinds of the tensors a run takes."""
        out: list[tuple[Any, tuple[Any, ...]]] = []
        for role in ("before", "target", "after"):
            out += [((role, "parameter"), self.layout.parameter), ((role, "gradient"), self.layout.parameter)]
            out += [((role, key), kind[1:]) for key, kind in self.layout.state if kind[0] == "tensor"]
        out += [(("group", key), kind[1:]) for key, kind in self.layout.group if kind and kind[0] == "tensor"]
        return out

    def run(self, decisions: tuple[bool, ...], alone: bool = False) -> Path:
        """One run; the branches on tensor data go as `decisions` say, beyond them the true way."""
        session = Session(decisions)
        names = [name for name, _ in self.inputs()]
        found: dict[str, Any] = {}
        step = step_function(type(self.optimizer))

        def run_step(*tensors: torch.Tensor) -> list[torch.Tensor]:
            given = dict(zip(names, tensors, strict=True))
            shadow = object.__new__(type(self.optimizer))
            for name, value in vars(self.optimizer).items():  # containers are copied: step() may write to them
                vars(shadow)[name] = copy.copy(value) if isinstance(value, list | dict | set) else value
            vars(shadow).pop("step", None)
            for name, kind in self.layout.attributes:
                if kind == ("number",):
                    setattr(shadow, name, session.leaf(("attribute", name), self.numbers["attribute", name]))
            roles: dict[int, str] = {}
            state = StateMap(lambda p: StateDict(session, roles.get(id(p), "other")))
            members = []
            for role in ("before", "target", "after"):
                parameter = given[role, "parameter"].requires_grad_()
                parameter.grad = given[role, "gradient"]
                roles[id(parameter)] = role
                members.append(parameter)
                if self.layout.state:
                    entry = state[parameter]
                    for key, kind in self.layout.state:
                        entry.fill(key, self._entry(session, given, role, key, kind))
            group = self._group(session, given)
            before = {k: v for k, v in group.items() if k != "params"}
            group["params"] = members[1:2] if alone else members
            shadow.param_groups = Groups(group, len(self.optimizer.param_groups) > 1)
            shadow.state, shadow.defaults = state, dict(self.optimizer.defaults)
            with torch.no_grad(), session.active(step.__globals__):
                step(shadow)
            return self._outputs(found, session, members[1], state, before, group, shadow)

        graph = trace_with_fake_tensors(run_step, [kind for _, kind in self.inputs()])
        return Path(graph, session, **found)

    def _entry(self, session: Session, given: Any, role: str, key: str, kind: Any) -> Any:
        if kind[0] == "tensor":
            return given[role, key]
        if kind[0] == "number":
            name = ("state", key) if role == "target" else (role, key)
            return session.leaf(name, self.numbers["state", key])
        return kind[1]

    def _group(self, session: Session, given: Any) -> dict[str, Any]:
        """The param group with its numbers traced."""

        def traced(value: Any, *where: Any) -> Any:
            if is_number(value):
                return session.leaf(("group", *where), value)
            if type(value) in (list, tuple) and value and all(is_number(v) or is_constant(v) for v in value):
                return type(value)(traced(v, *where, i) for i, v in enumerate(value))
            return given["group", where[0]] if isinstance(value, torch.Tensor) else value

        return {k: traced(v, k) for k, v in self.group.items() if k != "params"}

    def _outputs(self, found, session, parameter, state, before, group, shadow) -> list[torch.Tensor]:
        """Notes what the run left behind; the tensors among it are the graph's outputs."""
        outputs = [parameter]
        entry = state.get(parameter) or StateDict(session, "target")

        def place(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                outputs.append(value)
                return ("output", len(outputs) - 1)
            if isinstance(value, TracedNumber) or is_number(value):
                return ("number", expression_of(value))
            if value is None or isinstance(value, bool | str):
                return ("constant", value)
            raise Refusal(
                f"state holds a {type(value).__name__}; a program keeps tensors and numbers as entries of their own"
            )

        found["kinds"] = {k: tensor_kind(v) for k, v in entry.items() if isinstance(v, torch.Tensor)}
        found["states"] = {key: place(value) for key, value in entry.items()}
        found["created"] = {
            key: ("number", value) if isinstance(value, tuple) else place(value) for key, value in entry.created.items()
        }
        gone = [key for key, _ in self.layout.state if key not in entry]
        if gone:
            raise Refusal(f"step() removes {gone[0]!r} from the state")
        changed: dict[Any, Expression] = {}

        def compare(name: tuple[Any, ...], old: Any, new: Any) -> None:
            if old is new:
                return
            if type(old) in (list, tuple) and type(new) is type(old) and len(old) == len(new):
                for i, (a, b) in enumerate(zip(old, new, strict=True)):
                    compare((*name, i), a, b)
            elif is_number(old) and is_number(new):
                changed[name] = expression_of(new)
            else:
                raise Refusal(f"step() replaces {name[1]!r} of the {name[0]}, which is not a number")

        for key, value in group.items():
            if key == "params":
                continue
            if isinstance(value, torch.Tensor):
                outputs.append(value)
                found["states"][f"group {key}"] = ("group", key, len(outputs) - 1)
            elif key not in before:
                raise Refusal(f"step() adds {key!r} to the param group; put it into the defaults")
            else:
                compare(("group", key), before[key], value)
        for name in [n for n, k in self.layout.attributes if k == ("number",)]:
            value = getattr(shadow, name)
            if expression_of(value) != ("leaf", ("attribute", name)):
                changed["attribute", name] = expression_of(value)
        found["group"], found["items"] = changed, len(outputs)
        outputs.extend(session.items)
        return outputs

    # ---- all paths, joined -----------------------------------------------------------------------------------------

    def trace(self, check_alone: bool = True) -> Trace:
        """Every path of `step`, as one template; `check_alone` makes sure that no other parameter has a part in it."""
        paths: list[Path] = []
        pending: list[tuple[bool, ...]] = [()]
        while pending:
            decisions = pending.pop()
            path = self.run(decisions, alone=True)
            paths.append(path)
            taken = tuple(outcome for _, outcome, _ in path.session.conditions)
            pending += [(*taken[:i], False) for i in range(len(decisions), len(taken))]
            if len(paths) + len(pending) > MOST_PATHS:
                line = path.session.conditions[-1][2]
                raise Refusal("step() branches on tensor data too often; choose with torch.where instead", line)
        if check_alone:
            self._check_alone(paths[0])
        return self._join(paths)

    def _check_alone(self, path: Path) -> None:
        """Refuses an update that other parameters have a part in: among bystanders the trace must be the same."""
        crowd = self.run(())
        if crowd.group != path.group:
            raise Refusal("step() changes a number of the group or of the optimizer once per parameter")
        together, alone = self._join([crowd]), self._join([path])
        strangers = [n for n in together.used if isinstance(n, tuple) and n[0] in ("before", "after", "other")]
        if strangers or together.digest != alone.digest:
            raise Refusal(
                "the update of one parameter depends on other parameters (a norm over all of them, a sum that runs "
                "through the loop, or their number); do that outside step(), for instance by clipping",
                meeting_line(together, [together.arguments[n] for n in strangers]),
            )

    def _join(self, paths: list[Path]) -> Trace:
        first = paths[0]
        for other in paths[1:]:
            same = set(other.states) == set(first.states) and set(other.created) == set(first.created)
            if not same or host_numbers(other) != host_numbers(first):
                line = first.session.conditions[0][2]
                raise Refusal("a branch on tensor data changes which state there is, or a number kept in Python", line)
        block = Block()
        arguments: dict[Any, Value] = {}
        for name, kind in self.inputs():
            shape, _, dtype, _ = kind
            arguments[name] = block.add_argument(tensor_type(torch.empty(shape, dtype=dtype, device="meta")))

        def leaf(name: Any) -> Value:
            if name not in arguments:
                arguments[name] = block.add_argument(NUMBER)
            return arguments[name]

        imported = [import_path(block, path, [arguments[n] for n, _ in self.inputs()], leaf) for path in paths]
        parameter, states, created = join(StepBuilder(block), imported)
        guards = {key: line for path in paths for key, line in path.session.guards.items()}
        for key, expression in host_numbers(first).items():
            if depends_on_data(expression):
                raise Refusal(f"the number {key[1]!r} is kept in Python but depends on tensor data; keep it a tensor")
        trace = Trace(block, arguments, parameter, states, created, first.kinds, host_numbers(first), guards, paths)
        for key in [k for k in trace.states if k.startswith("group ")]:
            name = key.removeprefix("group ")
            if trace.states.pop(key) is not arguments["group", name]:
                raise Refusal(f"step() changes the tensor {name!r} of the param group; keep it in the state")
        tidy(trace)
        return trace


def host_numbers(path: Path) -> dict[Any, Expression]:
    """What the host writes after the step: numbers and constants of the state that change, and of the group."""
    out = dict(path.group)
    for key, (kind, value, *_) in path.states.items():
        if kind == "number" and value != ("leaf", ("state", key)):
            out["state", key] = value
        elif kind == "constant":
            out["state", key] = ("const", value)
    return out


@dataclass
class Imported:
    """The values of one path."""

    outputs: list[Value]
    conditions: list[tuple[Value, bool]]
    path: Path


def import_path(block: Block, path: Path, inputs: list[Value], leaf: Callable[[Any], Value]) -> Imported:
    """Builds the ops of one path at the end of the block."""
    b = StepBuilder(block)
    importer = OptimizerImporter(b, path.session, leaf, path.outputs[path.items :])
    outputs = importer.outputs(path.graph, inputs, path.items)
    return Imported(outputs, [(importer.number(e), outcome) for e, outcome, _ in path.session.conditions], path)


def join(b: StepBuilder, paths: list[Imported]) -> tuple[Value, dict[str, Value], dict[str, Any]]:
    """The results over all paths: selects along the tree of their conditions."""

    def merge(members: list[Imported], depth: int, at: int) -> Value:
        if len(members) == 1:
            return members[0].outputs[at]
        yes = [p for p in members if p.conditions[depth][1]]
        no = [p for p in members if not p.conditions[depth][1]]
        x, y = merge(yes, depth + 1, at), merge(no, depth + 1, at)
        return b.select(yes[0].conditions[depth][0], x, y)

    path = paths[0].path
    places = {key: spec[-1] for key, spec in path.states.items() if spec[0] in ("output", "group")}
    states = {key: merge(paths, 0, at) for key, at in places.items()}
    created = {k: merge(paths, 0, spec[1]) if spec[0] == "output" else spec for k, spec in path.created.items()}
    return merge(paths, 0, 0), states, created


def refuse(optimizer: torch.optim.Optimizer, error: BaseException) -> OptimizerError:
    """One error that names the optimizer's class and the line that cannot be traced."""
    name = type(optimizer).__name__
    line = error.line if isinstance(error, Refusal) else None
    if line is None:
        frames = [f for f in traceback.extract_tb(error.__traceback__) if not any(p in f.filename for p in INSIDE)]
        line = (frames[-1].filename, frames[-1].lineno or 0) if frames else None
    place = ""
    if line is not None:
        code = linecache.getline(*line).strip()
        place = f" ({line[0]}:{line[1]}{': ' + code if code else ''})"
    text = str(error) if isinstance(error, Refusal | WholestepError) else f"{type(error).__name__}: {error}"
    return OptimizerError(
        f"{name}.step() cannot become part of a program{place}: {text}. "
        "Use a torch.optim optimizer, or rewrite that line; training eagerly always works"
    )


def numbers_in(layout: Layout, group: dict[str, Any], optimizer: Any, state: dict[str, Any]) -> dict[Any, Any]:
    """The present value of each number a run starts from."""
    out: dict[Any, Any] = {("attribute", n): getattr(optimizer, n) for n, k in layout.attributes if k == ("number",)}
    out |= {("state", key): value for key, value in state.items() if is_number(value)}
    return out
