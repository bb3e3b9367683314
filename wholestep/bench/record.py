"""The record of a benchmark: a Markdown page with all that was measured, case by case, made from the results' JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .contenders import OURS, rank
from .page import by_case
from .profile import table_of
from .results import Entry
from .summary import Table, about, case_name, compile_text, machines, markdown_table, reason

HEAD = (
    "# Training steps side by side",
    "",
    "Made by `wholestep bench --summary bench/results/bench.json` with `--record bench/results/bench.md --plots "
    "bench/results`.",
    "",
    "- *ms*: median and quartiles of blocks of steps, all contenders in turn, each in a process of its own.",
    "- *host us*: from the call of a step to its return: alone, with an empty queue, after others have had the "
    "processor's caches; and in a row, the median call of rows of 8 (~: by an older measure, the mean of 8 to 20 in "
    "a row, where a full queue makes the host wait).",
    "- *peak GB*: the allocator's peak (*allocated GB*), or what CUDA graphs keep reserved if that is more; *asked for "
    "GB*: the same without what the allocator hands out beyond that; *planned GB*: what our plan said before it ran. "
    "Of jax: the most since its process began, what it tries while it compiles included.",
    "- *kernels*: what the profiler saw the device run in a step.",
    "- *compile s*: to the end of the first step with empty caches; *warm*: with ours' caches. *beside n* (or *not "
    "alone*): up to n others compiled at the same time, which takes longer; to wait for them counts for nobody. Who "
    "times a kernel has the GPU to itself, if that comes within a tenth of a second (*without* of a row's *clock*: how "
    "often it did not; in runs until 2026-11-18 06:40 torch.compile's modes timed theirs beside others). Ours compiles "
    "alone, and so do jax and, since 2026-11-18 12:00, torch.compile as it is: against older rows our compile time is "
    "flattered. Since then the optimizer is there before: to make the first one imports Dynamo, which was 3.5 to 5.5 s "
    "of everybody's compile time of networks that are not of transformers.",
    "- *loss apart*: relative distance of smoothed losses from eager's, of what is allowed, at the step where that is "
    "nearest. Allowed by a step is twice what rounding does to eager training by twice as many steps, at least 1 % in "
    "bf16 and 0.01 % in fp32; where that is more than half, losses need only be finite. Where no step is named: the "
    "largest distance, and one limit for all steps, at least 1 % in bf16 and 0.1 % in fp32.",
    "- *wholestep:x* and *compile:x* have a budget of memory: a share of our own peak, torch's "
    "`activation_memory_budget`. *checkpoint*: `torch.utils.checkpoint` on every block. *aten*: ours with "
    '`providers=["aten"]`; *inductor*: with PyTorch\'s compiler among the providers; *max*: with `tune="max"`; '
    "*offload:x*: with a budget at `level=4`, where values may wait in host memory.",
)
CONTENDER_COLUMNS = (
    "contender",
    "ms",
    "quartiles",
    "host us alone",
    "in a row",
    "peak GB",
    "allocated GB",
    "asked for GB",
    "planned GB",
    "kernels",
    "copies, fills",
    "moved / bound",
    "compile s",
    "loss apart",
)


def record(entries: Sequence[Entry], plots: Sequence[str] = (), listed: Sequence[Entry] = ()) -> str:
    """All that was measured, case by case: everybody's figures, and of ours who runs what.

    `plots`: names of plots that lie beside the page. `listed`: profiles.
    """
    lines = [*HEAD, *([""] if plots else []), *(f"![{plot_text(name)}]({name})" for name in plots)]
    for found in machines(entries).values():
        table = Table(found)
        lines += ["", f"## {about(found)}"]
        for case, row in table.rows.items():
            items = next((entry["items"] for entry in row.values() if entry.get("items")), "")
            lines += ["", f"### {case_name(case)}: {items}", ""]
            lines += markdown_table(CONTENDER_COLUMNS, [record_row(row[name], name) for name in sorted(row, key=rank)])
            lines += waiting_lines(row)
            if OURS in row and row[OURS].get("facts", {}).get("providers"):
                lines += ["", *share_lines(row[OURS]["facts"])]
            commands = dict.fromkeys(entry["command"] for entry in row.values())
            lines += ["", *(f"`{command}`" for command in commands)]
    for name, group in by_case(listed).items():
        lines += ["", f"## Time and bytes by kernel family: {name}", "", *markdown_table(*table_of(group))]
    profiled = dict.fromkeys(entry["command"] for entry in listed)
    lines += ["", *(f"`{command}`" for command in profiled)] if profiled else []
    return "\n".join(lines) + "\n"


def waiting_lines(row: Mapping[str, Entry]) -> list[str]:
    """Who of ours keeps values in host memory, and how many bytes."""
    waiting = {name: row[name].get("facts", {}).get("host_bytes", 0) for name in sorted(row, key=rank)}
    told = [f"{name} {size / 1e9:.2f} GB" for name, size in waiting.items() if size]
    return ["", f"Waiting in host memory: {', '.join(told)}."] if told else []


def plot_text(name: str) -> str:
    return name.removeprefix("bench_").removesuffix(".svg").replace("_", " ")


def record_row(entry: Entry, name: str) -> list[str]:
    """A contender's figures; "-" where one is not known."""
    if entry["status"] != "agrees" or "ms" not in entry:
        return [name, reason(entry), *["-"] * (len(CONTENDER_COLUMNS) - 2)]
    facts, ms, older = entry.get("facts", {}), entry["ms"], entry.get("host_us_queued")

    def number(value: float | None, decimals: int = 0, unit: float = 1.0) -> str:
        return "-" if value is None else f"{value / unit:.{decimals}f}"

    return [
        name,
        f"{ms['median']:.2f}",
        f"{ms['low']:.2f} .. {ms['high']:.2f}",
        number(entry.get("host_us")),
        f"~{number(older)}" if older is not None else number(entry.get("host_us_row")),
        number(entry.get("peak_bytes"), 3, 1e9),
        number(entry.get("allocated_bytes"), 3, 1e9),
        number(entry.get("requested_bytes"), 3, 1e9),
        number(facts.get("planned_peak"), 3, 1e9),
        number(entry.get("kernels")),
        number(entry.get("copies_and_fills")),
        number(facts.get("moved / bound"), 2),
        compile_text(entry),
        f"{entry['distance']:.2%} of {entry['tolerance']:.2%}, {steps_text(entry)}",
    ]


def steps_text(entry: Entry) -> str:
    steps = f"{len(entry['losses'])} steps"
    return f"at {entry['at_step']} of {steps}" if "at_step" in entry else steps


def share_lines(facts: Mapping[str, Any]) -> list[str]:
    """Who runs ours, and which families of kernels it has."""
    rows = []
    for kind in ("providers", "families"):
        whole = sum(share["bytes"] for share in facts[kind].values()) or 1
        for name, share in facts[kind].items():
            clocked, modelled = (share[f"{how} seconds"] for how in ("measured", "modelled"))
            rows.append(
                [
                    f"{kind.removesuffix('s').replace('familie', 'family')} {name}",
                    str(share["launches"]),
                    str(share["distinct"]),
                    f"{share['bytes'] / 1e9:.2f}",
                    f"{share['bytes'] / whole:.1%}",
                    *("-" if seconds is None else f"{seconds * 1e3:.2f}" for seconds in (clocked, modelled)),
                ]
            )
    phases = ", ".join(f"{phase} {spent:.1f}" for phase, spent in facts["seconds"].items())
    lines = markdown_table(("of ours", "launches", "distinct", "GB", "share", "measured ms", "modelled ms"), rows)
    return [*lines, "", f"Compile seconds: {phases}. {facts['execution']}.", *refused_lines(facts.get("refused", ()))]


def refused_lines(refused: Sequence[Mapping[str, Any]]) -> list[str]:
    """What of ours could move fewer bytes and was slower so."""
    if not refused:
        return []
    rows = [[r["site"], str(r["count"]), f"{r['bytes'] / 1e9:.2f}", r["why"].partition(": ")[2]] for r in refused]
    return ["", *markdown_table(("slower as one kernel", "times", "GB", "the first of them"), rows)]
