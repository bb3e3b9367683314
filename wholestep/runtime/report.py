"""What `step.report()` gives: compile time and size, what was done to the program, bytes moved and their bound,
precision, state, step times."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import torch

from ..backends.attentions import Decision, report_lines
from ..budget import BudgetReport
from ..cost import Movement, layer_group, movement_of
from ..cost.html import page
from ..cost.movement import roofline_lines, size_text
from ..dialects.step import torch_dtype
from ..errors import InputError
from ..ir.builtin import functions
from ..ir.core import Op
from ..machine.cpu import cpu_field
from ..machine.description import Description, find_description
from ..plan.planner import planned_function
from ..training.build import sizes
from ..transforms.opportunity import by_transformation, sites_text
from .batches import first_micro_batch
from .cast_bytes import CastBytes, autocast_casts, program_casts
from .kernels_report import KernelsReport, kernels_report


@dataclass(slots=True)
class Report:
    """Figures of one compiled step; `str()` is a table."""

    seconds: dict[str, float]
    ops: dict[str, int]
    parameters: int
    untouched: list[str]
    opaque: dict[str, int]
    traced: dict[str, int]
    compilations: int
    step_seconds: list[float] = field(repr=False)
    optimizer: str = ""
    title: str = ""
    verified: bool | None = None
    #: batch shapes that are compiled now, the most recently used last, and how many were dropped for lack of room
    variants: list[list[list[int]]] = field(default_factory=list)
    dropped: int = 0
    #: what became of padding: empty where batches come in one length
    padding: str = ""
    #: flops of matrix products and convolutions by layer group and element type
    precision: dict[str, dict[str, int]] = field(default_factory=dict)
    casts: CastBytes | None = None
    autocast: CastBytes | str | None = None
    #: bytes of each kind of state
    state: dict[str, int] = field(default_factory=dict)
    #: bytes read and written per step by cause, layer and phase, their bound, and time at the machine's limits
    movement: Movement | None = field(default=None, repr=False)
    skipped: int | None = None
    loss_scale: float | None = None
    #: the transformations that were applied, as `step.recipe` has them, and what was done for a memory budget
    recipe: list[str] = field(default_factory=list, repr=False)
    budget: BudgetReport | None = None
    #: when updates are done, and whether one is waiting
    updates: str = "in_step"
    waiting: bool = False
    #: how the step runs, and the memory its plan gives it
    execution: dict[str, Any] = field(default_factory=dict)
    #: who runs what share of launches, bytes and time
    kernels: KernelsReport | None = None
    #: which kernel runs each attention, and why
    attention: list[Decision] = field(default_factory=list)
    #: how images were laid out, by what that was decided, and what could not be timed for it
    layouts: list[str] = field(default_factory=list)

    @property
    def bytes(self) -> int:
        """Bytes read and written per step: the ledger's total."""
        return 0 if self.movement is None else self.movement.ledger.total

    @property
    def median_seconds(self) -> float | None:
        """The median time of a step; the first counts only where it is the only one."""
        rest = self.step_seconds[1:] or self.step_seconds
        return statistics.median(rest) if rest else None

    def __str__(self) -> str:
        lines = ["compile            seconds"]
        lines += [f"  {name:<17} {seconds:>7.2f}" for name, seconds in self.seconds.items()]
        lines.append(f"  {'in all':<17} {sum(self.seconds.values()):>7.2f}   ({self.compilations} compilation(s))")
        if len(self.variants) > 1 or self.dropped:
            shown = "; ".join(" ".join("x".join(map(str, s)) or "scalar" for s in v) for v in self.variants)
            lines.append(f"  {len(self.variants)} batch shapes are compiled: {shown} ({self.dropped} dropped)")
        if self.padding:
            lines.append(f"  {self.padding}")
        lines.append("program                ops")
        lines += [f"  {phase:<16} {count:>7}" for phase, count in self.ops.items() if count]
        lines.append(f"  {'in all':<16} {sum(self.ops.values()):>7}")
        lines.append(f"{self.optimizer} updates {self.parameters} parameters in the program{self._updates_text()}")
        if self.untouched:
            shown = ", ".join(self.untouched[:5]) + (", ..." if len(self.untouched) > 5 else "")
            lines.append(f"no gradient reaches {len(self.untouched)} parameters, which stay as they are: {shown}")
        for title, table in (
            ("operators without an op of ours, run by ATen", self.opaque),
            ("gradients traced from PyTorch's autograd", self.traced),
        ):
            if table:
                lines.append(f"{title}: " + ", ".join(f"{name} x{n}" for name, n in sorted(table.items())))
        lines += recipe_lines(self.recipe)
        lines += [] if self.budget is None else str(self.budget).replace("\n", "\n  ").splitlines()
        lines += self._state_lines()
        lines += self._execution_lines()
        lines += [] if self.kernels is None else self.kernels.lines()
        lines += report_lines(self.attention)
        lines += ["layouts", *(f"  {line}" for line in self.layouts)] if self.layouts else []
        lines += self._precision_lines()
        if self.verified:
            lines.append("the first step was run in eager PyTorch too and agreed")
        if self.movement is not None:
            lines += self.movement.lines()
        median = self.median_seconds
        if self.movement is not None and self.movement.roofline is not None:
            lines += roofline_lines(self.movement.roofline, median)
        if median is not None:
            lines.append(
                f"{len(self.step_seconds)} steps, median {median * 1e3:.1f} ms "
                f"(first {self.step_seconds[0] * 1e3:.1f} ms)"
            )
        else:
            lines.append("no step has run yet")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as JSON has them."""
        found = {f.name: plain(getattr(self, f.name)) for f in fields(self) if f.name != "movement"}
        found["bytes"], found["median_seconds"] = self.bytes, self.median_seconds
        found["transformations"] = {
            name: {"count": len(where), "sites": where[:3]} for name, where in by_transformation(self.recipe).items()
        }
        return found | {"movement": None if self.movement is None else self.movement.to_dict()}

    def rendered(self, format: str) -> str:
        """The report as "text", "json" or "html": one file that needs nothing beside it."""
        if format == "text":
            return str(self)
        if format == "json":
            return json.dumps(self.to_dict(), indent=1) + "\n"
        if format == "html" and self.movement is not None:
            return page(
                self.movement, self.title, self.median_seconds, str(self), done_rows(self.recipe), self._budget_text()
            )
        raise InputError(f'a report is "text", "json" or "html", not {format!r}')

    def _budget_text(self) -> str:
        return "" if self.budget is None else str(self.budget)

    def _updates_text(self) -> str:
        """When updates are done, where that is not in their own step."""
        if self.updates == "in_step":
            return ""
        return f", {self.updates.replace('_', ' the ', 1).replace('_', ' ')}" + ("; one waits for it" * self.waiting)

    def _state_lines(self) -> list[str]:
        lines = ["state                 size"]
        lines += [f"  {name:<23} {size_text(size):>9}" for name, size in self.state.items() if size]
        if self.skipped is not None:
            scale = "" if self.loss_scale is None else f"; the loss scale is {self.loss_scale:g}"
            lines.append(f"{self.skipped} updates were skipped for gradients that are not finite{scale}")
        return lines

    def _execution_lines(self) -> list[str]:
        """How the step runs and in how much memory."""
        found = self.execution
        lines = [f"execution: {found['by']}"]
        if found["why"]:
            lines.append(f"  {found['why']}")
        if "arena" not in found:
            return lines
        lines.append(
            f"  {self._launches_text()}; order: {found['order']}; peak {size_text(found['peak'])}: arena "
            f"{size_text(found['arena'])} ({found['gap']:.2%} above the least, {found['placer']}), arguments and "
            f"constants {size_text(found['lasting'])}, kernels {size_text(found['made'])}"
            + (f", handed out beyond that {size_text(found['beyond'])}" if found["beyond"] else "")
        )
        if found["allocating"]:
            shown = ", ".join(f"{name} x{n}" for name, n in found["allocating"].items())
            lines.append(f"  launches whose kernels allocate their results and are copied: {shown}")
        if found["untraced"]:
            lines.append(f"  ops that run as a whole, for they could not be traced: {', '.join(found['untraced'])}")
        if found["taken"]:
            more = ", ".join(f"{name} {size_text(size)}" for name, size in found["unplanned"].items())
            lines.append(
                f"  kernels took {size_text(found['taken'])} beside the plan's memory in the first step"
                + (f"; more than planned: {more}" if more else "")
            )
        return lines

    def _launches_text(self) -> str:
        """The launches of the plan: those that run kernels, and numbers that the host computes before them."""
        launches, host, waits = (self.execution[name] for name in ("launches", "host_numbers", "waits"))
        kernels = 0 if self.movement is None else self.movement.ledger.launches
        ran = launches - host - waits
        parts = [f"{kernels} kernels" if ran == kernels else f"{ran} that run {kernels} kernels"]
        parts += [f"{n} {what}" for n, what in ((host, "numbers of the host"), (waits, "waits for copies")) if n]
        return f"{launches} launches: {' and '.join(parts)}"

    def _precision_lines(self) -> list[str]:
        """Which layers compute in which precision, and what casts cost."""
        kinds = sorted({k for group in self.precision.values() for k in group})
        if kinds in ([], ["f32"]):
            return []
        width = max(24, *(len(name) for name in self.precision))
        lines = [f"{'flops of products in':<{width + 2}} " + " ".join(f"{k:>6}" for k in kinds)]
        for name, group in self.precision.items():
            whole = sum(group.values()) or 1
            lines.append(f"  {name:<{width}} " + " ".join(f"{group.get(k, 0) / whole:>6.0%}" for k in kinds))
        if self.casts is not None:
            lines.append(
                f"casts: {self.casts.count} moving {size_text(self.casts.executed)} per step, "
                f"{size_text(self.casts.absorbed)} more are absorbed by the kernels beside them"
            )
        if isinstance(self.autocast, CastBytes):
            lines.append(f"torch.autocast: {self.autocast.count} moving {size_text(self.autocast.executed)} per step")
        elif self.autocast:
            lines.append(f"torch.autocast: not counted: {self.autocast}")
        return lines


def done_rows(recipe: Sequence[str]) -> list[tuple[str, int, str]]:
    """What was done to a program, how often, and at which sites first."""
    return [(name, len(where), sites_text(where, 8)) for name, where in by_transformation(recipe).items()]


def recipe_lines(recipe: Sequence[str]) -> list[str]:
    """What was done to the program: each transformation, how often, and where first."""
    if not recipe:
        return ["transformations: none"]
    lines = ["transformations      times  where"]
    for name, where in by_transformation(recipe).items():
        lines.append(f"  {name:<18} {len(where):>5}  {sites_text(where)}")
    return lines


def plain(value: Any) -> Any:
    """A field of the report as JSON has it."""
    if isinstance(value, KernelsReport):
        return value.to_dict()
    if isinstance(value, list) and value and isinstance(value[0], Decision):
        return [asdict(decision) for decision in value]
    return asdict(value) if isinstance(value, CastBytes | BudgetReport) else value


def report_of(step: Any, eager: bool = True) -> Report:
    """The report of a `TrainStep` on the program it used last.

    eager: also what eager training would cast. It runs with fake tensors for that, op by op: up to a minute.
    """
    compiled = step._compiled
    program = compiled.program
    low = program.policy.low
    own = step._own.tensors
    scale, skipped = own.get(("scaler", "scale")), own.get(("scaler", "skipped"))
    movement = movement_of_step(step)
    return Report(
        seconds=dict(compiled.seconds),
        ops=sizes(program.module),
        parameters=len(program.updated),
        untouched=list(program.untouched),
        opaque=dict(program.captured.opaque),
        traced=dict(program.vjps.traced),
        compilations=step.compilations,
        step_seconds=list(step._durations),
        optimizer=type(step.optimizer).__name__,
        verified=step.verified,
        variants=[[list(s.type.shape) for s in c.batch_slots] for c in step._variants.values()],
        dropped=step.dropped,
        padding=step._padding.description() if step._padding is not None else "",
        precision=precision_by_group(program.module),
        casts=program_casts(compiled.executable) if low is not None else None,
        autocast=autocast_of(step, low) if eager and low is not None else None,
        state=state_sizes(step),
        movement=movement,
        kernels=kernels_report(movement, step.choices if compiled.static is not None else None),
        attention=list(compiled.attentions),
        layouts=layout_lines(compiled),
        title=type(step.model).__name__,
        recipe=step.recipe,
        budget=step.budget,
        updates=step.options.updates,
        waiting=step._waiting is not None,
        execution=execution_of(compiled),
        skipped=None if skipped is None else int(skipped),
        loss_scale=None if scale is None else float(scale),
    )


def layout_lines(compiled: Any) -> list[str]:
    """What was decided about layouts, function by function, and what could not be timed, by its reason."""
    lines = [str(verdict) for verdict in compiled.layouts.verdicts.values()]
    reasons: dict[str, list[str]] = {}
    for what, why in compiled.untimed.items() if lines else ():
        reasons.setdefault(why, []).append(what)
    more = {why: f" and {len(what) - 1} others" if len(what) > 1 else "" for why, what in reasons.items()}
    return lines + [f"not timed, and modelled: {what[0]}{more[why]}: {why}" for why, what in reasons.items()]


def execution_of(compiled: Any) -> dict[str, Any]:
    """How a compiled program runs: from its plan, as a CUDA graph or launch by launch, or by the reference executor."""
    static = compiled.static
    if static is None:
        return {"by": "the reference executor, which allocates as it goes", "why": compiled.unplanned}
    plan, graph = static.plan, static.graph
    by = "from the plan, launch by launch"
    if graph is not None and not graph.refused:
        by = "from the plan, as one CUDA graph" + ("" if graph.graph is not None else " from the second step on")
    allocating: dict[str, int] = {}
    for each in (plan, *plan.bodies):
        for launch in each.launches:
            if launch.makes:
                allocating[launch.name] = allocating.get(launch.name, 0) + 1
    return {
        "by": by,
        "why": (graph.refused if graph is not None else "") or slow_host(compiled),
        "launches": len(plan.launches),
        "host_numbers": sum(launch.provider == "host" for launch in plan.launches),
        "waits": sum(launch.provider == "wait" for launch in plan.launches),
        "order": plan.order,
        "placer": plan.placer,
        "arena": plan.arena,
        "lower_bound": plan.lower_bound,
        "gap": plan.gap,
        "lasting": plan.bytes_in("external") + plan.bytes_in("constant"),
        "made": plan.made,
        "beyond": plan.handed_beyond,
        "peak": plan.peak,
        "allocating": dict(sorted(allocating.items())),
        "untraced": list(plan.assumed),
        "taken": static.allocated.bytes,
        "unplanned": dict(sorted(static.allocated.unplanned.items())),
    }


def slow_host(compiled: Any) -> str:
    """Why a step that runs as a graph takes more host time than it could; "" where it does not."""
    why = compiled.long_way[1]
    return f"no step is done again by one call, which costs host time: {why}" if why else ""


def autocast_of(step: Any, low: Any) -> CastBytes | str:
    """The bytes that casts would move in eager training of the same batch under torch.autocast, per micro-batch."""
    count = step.options.accumulate
    part = first_micro_batch(step.example_batch, count)
    found = autocast_casts(step.model, step.loss_fn, part, torch_dtype(low))
    return found if isinstance(found, str) else CastBytes().plus(found, times=count)


def precision_by_group(module: Op) -> dict[str, dict[str, int]]:
    """Flops of low-precision candidates (matrix products, convolutions, attention) by layer group and element type."""
    found: dict[str, dict[str, int]] = {}
    loops = [
        op for function in functions(module) for op in function.regions[0].block if op.name == "step.micro_batches"
    ]
    times = {op.callee.name: op.count for op in loops}
    for function in functions(module):
        runs = times.get(function.attributes["sym_name"], 1)
        for op in function.regions[0].block:
            if getattr(op.definition, "precision", "") != "low" or not op.operands:
                continue
            group = found.setdefault(layer_group(op.loc.layer), {})
            element = op.operands[0].type.element.text
            group[element] = group.get(element, 0) + runs * op.definition.flops(op)  # type: ignore[attr-defined]
    return dict(sorted(found.items()))


def movement_of_step(step: Any) -> Movement:
    """What one step of the program used last moves, priced on the machine it runs on if that is described."""
    compiled = step._compiled
    machine = machine_of(compiled.device)
    if compiled.static is not None:
        return movement_of(compiled.static.planned, machine)
    planned = planned_function(compiled.program.function, compiled.device, compiled.numbers)
    return movement_of(planned, machine, "the bytes are those of the plan, though the reference executor runs the step")


def machine_of(device: torch.device) -> Description | None:
    """The description of a device; None where there is none."""
    if device.type == "cuda":
        return find_description(torch.cuda.get_device_name(device))
    return find_description(cpu_field("model name"), torch.get_num_threads())


def state_sizes(step: Any) -> dict[str, int]:
    """Bytes of each kind of state that lasts from step to step."""
    parameters = step._parameters()
    buffers = {id(b): b for _, b in step.model.named_buffers()}
    states = [v for p in parameters.values() for v in step.optimizer.state.get(p, {}).values()]
    own = step._own.tensors
    return {
        "parameters": size_of(parameters.values()),
        "buffers": size_of(buffers.values()),
        "optimizer state": size_of(v for v in states if isinstance(v, torch.Tensor)),
        "low-precision copies": size_of(t for source, t in own.items() if source[0] == "copy"),
        "averages": size_of(t for source, t in own.items() if source[0] == "ema"),
        "gradients between steps": size_of(step._compiled.kept.values()),
    }


def size_of(tensors: Any) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)
