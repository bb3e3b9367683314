"""What `step.report()` gives: compile time and size by phase, precision by layer group, casts, state, step times."""

from __future__ import annotations

import re
import statistics
from dataclasses import dataclass, field
from typing import Any

import torch

from ..dialects.step import StepOp
from ..ir.builtin import functions
from ..ir.core import Op
from ..training.build import sizes
from .cast_bytes import CastBytes, autocast_casts, program_casts


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
    #: bytes read and written per step if each op reads its operands and writes its results once
    bytes: int = 0
    skipped: int | None = None
    loss_scale: float | None = None

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
        lines.append(f"  {'in all':<16} {sum(self.ops.values()):>7}   ({size_text(self.bytes)} through its ops)")
        lines.append(f"{self.optimizer} updates {self.parameters} parameters in the program")
        if self.untouched:
            shown = ", ".join(self.untouched[:5]) + (", ..." if len(self.untouched) > 5 else "")
            lines.append(f"no gradient reaches {len(self.untouched)} parameters, which stay as they are: {shown}")
        for title, table in (
            ("operators without an op of ours, run by ATen", self.opaque),
            ("gradients traced from PyTorch's autograd", self.traced),
        ):
            if table:
                lines.append(f"{title}: " + ", ".join(f"{name} x{n}" for name, n in sorted(table.items())))
        lines += self._state_lines()
        lines += self._precision_lines()
        if self.verified:
            lines.append("the first step was run in eager PyTorch too and agreed")
        if self.step_seconds:
            rest = self.step_seconds[1:] or self.step_seconds
            lines.append(
                f"{len(self.step_seconds)} steps, median {statistics.median(rest) * 1e3:.1f} ms "
                f"(first {self.step_seconds[0] * 1e3:.1f} ms)"
            )
        else:
            lines.append("no step has run yet")
        return "\n".join(lines)

    def _state_lines(self) -> list[str]:
        lines = ["state                 size"]
        lines += [f"  {name:<22} {size_text(size):>9}" for name, size in self.state.items() if size]
        if self.skipped is not None:
            scale = "" if self.loss_scale is None else f"; the loss scale is {self.loss_scale:g}"
            lines.append(f"{self.skipped} updates were skipped for gradients that are not finite{scale}")
        return lines

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


def size_text(count: int) -> str:
    """Bytes in words."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} B"


def report_of(step: Any) -> Report:
    """The report of a `TrainStep` on the program it used last."""
    compiled = step._compiled
    program = compiled.program
    low = program.policy.low
    own = step._own.tensors
    scale, skipped = own.get(("scaler", "scale")), own.get(("scaler", "skipped"))
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
        autocast=autocast_of(step, low) if low is not None else None,
        state=state_sizes(step),
        bytes=program_bytes(program.module),
        skipped=None if skipped is None else int(skipped),
        loss_scale=None if scale is None else float(scale),
    )


def autocast_of(step: Any, low: Any) -> CastBytes | str:
    """The bytes that casts would move in eager training of the same batch under torch.autocast."""
    from ..dialects.step import torch_dtype

    return autocast_casts(step.model, step.loss_fn, step.example_batch, torch_dtype(low))


def layer_group(layer: str) -> str:
    """A layer with the numbers of repeated blocks left out: `h.3.attn` and `h.7.attn` are one group."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.|$)", "*", layer) or "(the model itself)"


def precision_by_group(module: Op) -> dict[str, dict[str, int]]:
    """Flops of low-precision candidates (matrix products, convolutions, attention) by layer group and element type."""
    found: dict[str, dict[str, int]] = {}
    for function in functions(module):
        for op in function.regions[0].block:
            if getattr(op.definition, "precision", "") != "low" or not op.operands:
                continue
            group = found.setdefault(layer_group(op.loc.layer), {})
            element = op.operands[0].type.element.text
            group[element] = group.get(element, 0) + op.definition.flops(op)  # type: ignore[attr-defined]
    return dict(sorted(found.items()))


def program_bytes(module: Op) -> int:
    """Bytes read and written per step if each op reads its operands once and writes its results once."""
    counts = {f.attributes["sym_name"]: 0 for f in functions(module)}
    loops: dict[str, int] = {}
    for function in functions(module):
        for op in function.regions[0].block:
            if op.name == "step.micro_batches":
                loops[op.callee.name] = op.count
            elif issubclass(op.definition, StepOp):
                counts[function.attributes["sym_name"]] += sum(op.definition.bytes(op))
    return sum(count * loops.get(name, 1) for name, count in counts.items())


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
    }


def size_of(tensors: Any) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)
