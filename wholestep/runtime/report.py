"""What `step.report()` gives: compile time by phase, program size by phase, step times, and who computes what."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field


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

    def __str__(self) -> str:
        lines = ["compile            seconds"]
        lines += [f"  {name:<16} {seconds:>7.2f}" for name, seconds in self.seconds.items()]
        lines.append(f"  {'in all':<16} {sum(self.seconds.values()):>7.2f}   ({self.compilations} compilation(s))")
        lines.append("program                ops")
        lines += [f"  {phase:<16} {count:>7}" for phase, count in self.ops.items() if count]
        lines.append(f"  {'in all':<16} {sum(self.ops.values()):>7}")
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
