"""Why a budget cannot be met: the least that can, what that is made of, and what to try next."""

from __future__ import annotations

from collections.abc import Iterator

from ..plan import Buffer, Launch, Plan
from .report import size_text


def impossible(plan: Plan, budget: int, again: int, forbidden: bool, micro_batches: int = 1) -> str:
    """The text of the error. plan: that of the leanest step. again: how many ops run again in it.

    forbidden: whether a user keeps ops from running again that otherwise might.
    """
    held = list(held_at_peak(plan))
    parts = {"memory that kernels take by themselves": plan.made}
    for _, buffer in held:
        word = WORDS.get(buffer.lifetime, "activations")
        parts[word] = parts.get(word, 0) + buffer.bytes
    own = [(b.bytes, launches[b.first]) for launches, b in held if b.space == "arena" and b.first >= 0]
    largest, launch = max(own, key=lambda o: o[0], default=(0, None))
    made_by = "" if launch is None else f"{launch.name.removeprefix('step.')} in {launch.layer or launch.phase}"
    shown = ", ".join(f"{name} {size_text(b)}" for name, b in sorted(parts.items(), key=lambda p: -p[1]) if b)
    needed = plan.peak
    grows = sum(parts.get(word, 0) for word in ("activations", "temporaries", "the batch"))  # with the batch
    accumulate = f", or accumulate={2 * micro_batches}" if grows > parts.get("parameters", 0) else ""
    return (
        f"memory_budget is {size_text(budget)} ({budget:,} bytes), and the least found to do for this step is "
        f"{size_text(needed)} ({needed:,} bytes), {with_what(again, forbidden)}. At its peak there "
        f"are {shown}; the largest tensor of the step's own is {size_text(largest)}, made by {made_by}. "
        f"Give memory_budget={needed} or more, or {'forbid less, or ' if forbidden else ''}a smaller batch{accumulate}"
    )


def with_what(again: int, forbidden: bool) -> str:
    """What is done for the least."""
    if again:
        return f"with all that helps{' and is not forbidden' if forbidden else ''} computed again in backward"
    if forbidden:
        return "with nothing computed again in backward, since what could be is forbidden or does not help"
    return "with nothing computed again in backward, since that would not help"


def held_at_peak(plan: Plan) -> Iterator[tuple[list[Launch], Buffer]]:
    """What owns memory when most of the arena is in use, with the launches it counts by; that of micro-batches too."""
    curve = plan.live_bytes()
    at = max(range(len(curve)), key=curve.__getitem__, default=0)
    inside = plan.launches[at] if plan.launches and plan.launches[at].body >= 0 else None
    for number, buffer in enumerate(plan.buffers):
        if buffer.base >= 0 or buffer.space == "host" or (inside is not None and number == inside.workspace):
            continue
        if buffer.space != "arena" or buffer.first <= at <= buffer.last:
            yield plan.launches, buffer
    if inside is not None:
        yield from (held for held in held_at_peak(plan.bodies[inside.body]) if held[1].space == "arena")


#: what the memory of a plan is called in an error
WORDS = {
    "param": "parameters",
    "opt_state": "optimizer state",
    "state": "buffers and other state",
    "batch": "the batch",
    "constant": "constants",
    "grad": "gradients",
    "activation": "activations",
    "transient": "temporaries",
    "output": "outputs",
    "workspace": "temporaries",
}
