"""What a memory budget did to a step, in figures and in a few lines of text."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BudgetReport:
    """Bytes are of the whole step as planned: the arena, parameters, optimizer state, constants, the batch."""

    budget: int
    peak_before: int
    peak_after: int
    #: of `peak_after`: what is there for the whole step
    state: int
    #: the described machine that ops are priced on
    machine: str
    #: ops that run again, and the bytes of forward that are not kept because of it
    recomputed: int = 0
    recomputed_bytes: int = 0
    #: predicted seconds per step for running them again
    extra_seconds: float = 0.0
    solver: str = ""
    #: no choice that holds as little costs less than this, by the same prediction
    bound_seconds: float = 0.0
    #: what the greedy choice costs for as little memory; None where it does not get there
    greedy_seconds: float | None = None
    #: stretches of layers that repeat: (layer of the first op, how many instances, in how many something runs again)
    templates: tuple[tuple[str, int, int], ...] = ()
    #: how often the step was planned to find out
    plans: int = 1
    #: values that wait in host memory, their bytes, and predicted seconds per step: of all copies over the link (None
    #: where nobody measured it), and of the step without them
    offloaded: int = 0
    offloaded_bytes: int = 0
    link_seconds: float | None = 0.0
    step_seconds: float = 0.0
    #: losses that are taken in chunks of tokens: (linear layer, how many chunks), the bytes of logits that are not held
    #: because of it, and predicted seconds per step
    chunked: tuple[tuple[str, int], ...] = ()
    chunked_bytes: int = 0
    chunked_seconds: float = 0.0
    #: whether kernels that take much memory beside their tensors had to be left out
    lean: bool = False

    @property
    def gap(self) -> float:
        """How much more the choice costs than the bound, as a share; 0 where it is proved to be the cheapest."""
        return self.extra_seconds / self.bound_seconds - 1 if self.bound_seconds > 0 else 0.0

    @property
    def link_hidden(self) -> bool:
        """Whether all copies to and from the host together take no longer than the step without them."""
        return self.link_seconds is not None and self.link_seconds <= self.step_seconds

    def __str__(self) -> str:
        first = f"memory budget {size_text(self.budget)}: peak {size_text(self.peak_after)}"
        if not self.recomputed and not self.offloaded and not self.chunked and not self.lean:
            return f"{first}; it fits without running anything again"
        lines = [f"{first} instead of {size_text(self.peak_before)} ({size_text(self.state)} of it state)"]
        if self.lean:
            lines.append("kernels that take much memory beside their tensors are left out")
        for layer, count in self.chunked:
            lines.append(f"{layer or 'the last linear layer'} and its loss take their tokens in {count} chunks")
        if self.chunked:
            lines.append(
                f"{size_text(self.chunked_bytes)} of logits are not held because of it; predicted cost "
                f"{time_text(self.chunked_seconds)} per step on {self.machine}; sums over tokens are rounded otherwise"
            )
        if self.offloaded:
            lines.append(
                f"{self.offloaded} ops' values, {size_text(self.offloaded_bytes)}, wait in host memory; {self.link}"
            )
        return "\n".join(lines + (self.again if self.recomputed else []))

    @property
    def link(self) -> str:
        """What the copies over the link cost."""
        if self.link_seconds is None:
            return f"the link of {self.machine} is not measured (wholestep doctor --calibrate)"
        copies, step = time_text(self.link_seconds), time_text(self.step_seconds)
        if self.link_hidden:
            return f"the copies take {copies}, hidden behind the {step} predicted for the step"
        return f"the copies take {copies}, more than the {step} predicted for the step: the link sets its pace"

    @property
    def again(self) -> list[str]:
        """What runs again, and how it was chosen."""
        lines = [
            f"{self.recomputed} ops run again in backward, {size_text(self.recomputed_bytes)} are not kept; "
            f"predicted cost {time_text(self.extra_seconds)} per step on {self.machine}",
        ]
        greedy = "does not fit" if self.greedy_seconds is None else f"would cost {time_text(self.greedy_seconds)}"
        if self.solver == "greedy":
            lines.append("chosen greedily, nothing proved: SciPy is not installed (pip install 'wholestep[budget]')")
        else:
            proof = "proved cheapest" if self.gap < 1e-4 else f"within {self.gap:.2%} of the cheapest"
            lines.append(f"chosen by {self.solver}, {proof} for its memory model; the greedy choice {greedy}")
        for layer, count, touched in self.templates:
            lines.append(f"{touched} of {count} repeated layers from {layer or 'the first op'} on run something again")
        return lines


def size_text(size: int) -> str:
    """Bytes as people write them, in powers of ten."""
    value = float(size)
    for unit in ("B", "kB", "MB"):
        if value < 1000:
            return f"{value:.4g} {unit}"
        value /= 1000
    return f"{value:.4g} GB"


def time_text(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} us"
