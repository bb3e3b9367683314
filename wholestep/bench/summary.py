"""Ratios of ours to the contenders, their geometric means, and the bars they must hold: all from the results' JSON.

The bars are data of whoever sets them (`BARS` of the networks' module): this file knows no network. A ratio is ours /
theirs, of contenders whose losses agree; one below 1 is better.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..errors import InputError
from .agreement import TELLING
from .contenders import EAGER, MODES, OURS, RIVALS, rank
from .results import Entry, median, raced

BEGIN, END = "<!-- wholestep bench: begin -->", "<!-- wholestep bench: end -->"
BEST = "best"
#: share by which the measured peak differs from the planned one
UNPLANNED = "peak off plan"
#: how much longer our latest step may take than one beside rivals before it is said: machines of a kind differ by less
SLOWER = 1.03


@dataclass(frozen=True, slots=True)
class Bar:
    """What must hold: a figure's ratio to a contender (or to the best of all) over some cases.

    `over`: "mean" (geometric) or "worst". A bar that compares with nobody (moved / bound, host time) has `against` "".
    """

    what: str
    device: str
    figure: str
    cases: tuple[tuple[str, str], ...]
    over: str
    against: str
    most: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """A bar and what was measured. `known` counts the cases of it that have a ratio; `mixed` those of two runs.

    `beside`: cases whose compile time is compared with one that others made longer.
    """

    bar: Bar
    value: float | None
    known: int
    mixed: int
    beside: int
    worst: str

    @property
    def marks(self) -> str:
        """What the notes below a table are about."""
        return ("*" if self.mixed else "") + ("^" if self.beside else "")

    @property
    def verdict(self) -> str:
        if self.value is None:
            return "not measured"
        if self.known < len(self.bar.cases):
            missing = f"{self.known} of {len(self.bar.cases)} measured"
            return f"no ({missing})" if self.bar.over == "worst" and self.value > self.bar.most else missing
        return "yes" if self.value <= self.bar.most else "no"


class Table:
    """The entries of one machine, by case and contender."""

    def __init__(self, entries: Sequence[Entry]):
        self.rows: dict[tuple[str, str], dict[str, Entry]] = {}
        for entry in entries:
            self.rows.setdefault((entry["network"], entry["size"]), {})[entry["contender"]] = entry

    def figure(self, case: tuple[str, str], contender: str, figure: str) -> float | None:
        """A contender's figure, where its losses agree."""
        entry = self.rows.get(case, {}).get(contender)
        return None if entry is None or entry["status"] != "agrees" else median(entry.get(figure))

    def ours_beside(self, case: tuple[str, str], contender: str, figure: str) -> float | None:
        """Our figure of the run in which a contender was measured; the latest one where that is not known. None: ours
        fails or disagrees by now, whatever it was before."""
        latest = self.figure(case, OURS, figure)
        kept = self.rows[case][contender].get("ours", {}).get(figure)
        return latest if latest is None or kept is None else kept

    def ratios(self, case: tuple[str, str], figure: str) -> dict[str, float]:
        """Ours / theirs, of every contender that has one. Eager compiles nothing, so its compile time is none."""
        found = {}
        for name in self.rows.get(case, {}):
            theirs = self.figure(case, name, figure)
            ours = self.ours_beside(case, name, figure)
            if name != OURS and theirs is not None and ours is not None and not compiles_nothing(name, figure):
                found[name] = ours / theirs
        return found

    def ratio(self, case: tuple[str, str], against: str, figure: str) -> tuple[float, str] | None:
        """Ours / theirs and who they are; None where one of them is not known.

        The best is the one that ours is the least ahead of, and is not known before a compiler has taken part.
        """
        found = self.ratios(case, figure)
        if against == BEST:
            rivals = [name for name in RIVALS if name in found] if set(MODES) & set(self.rows.get(case, {})) else []
            against = max(rivals, key=lambda name: found[name], default="")
        return (found[against], against) if against in found else None

    def one_run(self, case: tuple[str, str], contender: str) -> bool:
        """Whether a contender's ratio is one of a single run."""
        row = self.rows[case]
        return "ours" in row[contender] or raced(row[OURS], row[contender])

    def own(self, case: tuple[str, str], figure: str) -> float | None:
        """A figure of ours that compares with nobody: of its facts, or how far its peak is from the planned one."""
        entry = self.rows.get(case, {}).get(OURS)
        if entry is None or entry["status"] != "agrees":
            return None
        if figure == UNPLANNED:
            planned, peak = entry.get("facts", {}).get("planned_peak"), entry.get("allocated_bytes")
            beside = entry.get("batch_bytes", 0)  # the benchmark's own batches are no part of a plan
            return None if not planned or peak is None else abs((peak - beside) / planned - 1)
        return entry.get("facts", {}).get(figure, entry.get(figure))

    def outcome(self, bar: Bar) -> Outcome:
        values: dict[tuple[str, str], float] = {}
        mixed = beside = 0
        for case in bar.cases:
            if not bar.against:
                if (own := self.own(case, bar.figure)) is not None:
                    values[case] = own
            elif (found := self.ratio(case, bar.against, bar.figure)) is not None:
                values[case] = found[0]
                mixed += not self.one_run(case, found[1])
                beside += bar.figure == "compile_seconds" and not self.rows[case][found[1]].get("alone", True)
        if not values:
            return Outcome(bar, None, 0, 0, 0, "")
        worst = max(values, key=lambda case: values[case])
        value = geometric_mean(list(values.values())) if bar.over == "mean" else values[worst]
        words = f"{case_name(worst)} {values[worst]:.{digits(bar)}f}"
        return Outcome(bar, value, len(values), mixed, beside, words)


def compiles_nothing(contender: str, figure: str) -> bool:
    return contender == EAGER and figure == "compile_seconds"


def geometric_mean(values: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def machines(entries: Sequence[Entry]) -> dict[tuple[str, str, str], list[Entry]]:
    """Entries by device, machine and precision."""
    found: dict[tuple[str, str, str], list[Entry]] = {}
    for entry in entries:
        found.setdefault((entry["device"], entry["machine"], entry["precision"]), []).append(entry)
    return found


# ---- text ------------------------------------------------------------------------------------------------------------


def case_name(case: tuple[str, str]) -> str:
    """As a command line names it; an ONNX file has no size."""
    return "@".join(filter(None, case))


def reason(entry: Entry) -> str:
    """Why a contender's times do not count."""
    if entry["status"] == "disagrees":
        far = "not finite" if entry["distance"] is None else f"{entry['distance']:.2%} from eager's"
        at = f" at step {entry['at_step']}" if "at_step" in entry else ""
        return f"losses disagree: {far}{at}, {entry['tolerance']:.2%} is allowed"
    return entry.get("why", "failed")


def digits(bar: Bar) -> int:
    """Decimals that tell whether a bar of this height holds."""
    return 0 if bar.most >= 10 else 2 if bar.most >= 0.1 else 3


def bar_rows(table: Table, bars: Sequence[Bar]) -> list[list[str]]:
    """A row per bar: what, against whom, the bar, what was measured, whether it holds."""
    rows = []
    for bar in bars:
        found = table.outcome(bar)
        value = "-" if found.value is None else f"{found.value:.{digits(bar)}f}{found.marks}"
        against = {BEST: "the best of all", "": "-"}.get(bar.against, bar.against)
        rows.append([bar.what, against, f"≤ {bar.most:.{digits(bar)}f}", value, found.verdict, found.worst])
    return rows


BAR_COLUMNS = ("what", "against", "bar", "measured", "holds", "worst")


def notes(rows: Sequence[Sequence[str]]) -> list[str]:
    """What the marks in some rows of a table say."""
    said = {
        "*": "* ours and theirs are of different runs.",
        "^": "^ theirs compiled beside others, which takes longer; ours compiled alone.",
    }
    return [note for mark, note in said.items() if any(mark in cell for row in rows for cell in row)]


def remarks(table: Table, bars: Sequence[Bar]) -> list[str]:
    """Who the best of all was picked from, and where losses could be compared but loosely."""
    cases = list(dict.fromkeys(case for bar in bars if bar.against == BEST for case in bar.cases))
    took_part = [(name, sum(table.figure(case, name, "ms") is not None for case in cases)) for name in RIVALS]
    found = []
    if cases:
        counts = ", ".join(f"{name} {count}" for name, count in took_part)
        found.append(f"The best of all is the best of those that were measured, of {len(cases)} cases: {counts}.")
    slower = {case: slowed(table, case) for case in cases if slowed(table, case) > SLOWER}
    if slower:
        listed = ", ".join(f"{case_name(case)} {share:.2f}" for case, share in slower.items())
        found.append(f"Ours of a later run, without all of these rivals, took longer than beside them: {listed} times.")
    loose = {case: row[EAGER]["tolerance"] for case, row in table.rows.items() if EAGER in row and loosely(row[EAGER])}
    if loose:
        listed = ", ".join(f"{case_name(case)} {limit:.0%}" for case, limit in loose.items())
        found.append(
            f"Losses with a limit above {TELLING:.0%}, the same for all steps (twice what rounding does to eager "
            f"training by the last one): {listed}."
        )
    without = [case_name(case) for case, row in table.rows.items() if any(map(may_lack_bytecode, row.values()))]
    if without:
        listed = "all cases" if len(without) == len(table.rows) else ", ".join(without)
        found.append(
            "Compile times, ours and others', may have Python's compiling of modules in them, for which nobody waits "
            f"who installs packages with their bytecode: {listed}."
        )
    return found


def may_lack_bytecode(entry: Entry) -> bool:
    """Whether a compile time is of a run that did not see to it that packages had their bytecode (`rehearsal.py`)."""
    return "compile_seconds" in entry and entry["contender"] != EAGER and not entry.get("bytecode")


def slowed(table: Table, case: tuple[str, str]) -> float:
    """Our latest step time, of the shortest that was measured beside a rival whose ratio counts."""
    latest = table.figure(case, OURS, "ms")
    beside = [table.ours_beside(case, name, "ms") for name in table.ratios(case, "ms") if name in RIVALS]
    known = [each for each in beside if each is not None]
    return 0.0 if latest is None or not known else latest / min(known)


def loosely(eager: Entry) -> bool:
    """Whether losses were compared with eager's by one limit for all steps, and one that says little."""
    return eager["status"] == "agrees" and "limits" not in eager and eager["tolerance"] > TELLING


def case_rows(table: Table) -> tuple[list[str], list[list[str]]]:
    """A row per case: milliseconds and ratio, memory and compile seconds of every contender."""
    present = [n for n in (OURS, *RIVALS) if any(n in row for row in table.rows.values())]
    columns = ["network", "batch", *(f"{n}: ms, GB, compile s" for n in present), "ours / best", "moved / bound"]
    rows = []
    for case, row in table.rows.items():
        items = next((entry["items"] for entry in row.values() if entry.get("items")), case[1])
        best = table.ratio(case, BEST, "ms")
        moved = row.get(OURS, {}).get("facts", {}).get("moved / bound")
        ratio = "-" if best is None else f"{best[0]:.2f} ({best[1]}{'' if table.one_run(case, best[1]) else '*'})"
        cells = [entry_text(row.get(name)) for name in present]
        rows.append([case[0], items, *cells, ratio, "-" if moved is None else f"{moved:.2f}"])
    return columns, rows


def contender_rows(table: Table) -> tuple[list[str], list[list[str]]]:
    """A row per case and contender: what a terminal has room for."""
    columns = ["network", "contender", "ms", "quartiles", "GB", "compile s", "ours / theirs", "loss apart"]
    rows = []
    for case, row in table.rows.items():
        for name in sorted(row, key=rank):
            entry = row[name]
            cells = ["-"] * 6
            if entry["status"] == "agrees" and "ms" in entry:
                ms, peak = entry["ms"], entry.get("peak_bytes")
                ratio = table.ratio(case, name, "ms") if name != OURS else None
                cells[0], cells[1] = f"{ms['median']:.3f}", f"{ms['low']:.3f} .. {ms['high']:.3f}"
                cells[2] = "-" if peak is None else f"{peak / 1e9:.3f}"
                cells[3] = compile_text(entry)
                cells[4] = "" if ratio is None else f"{ratio[0]:.3f}{'' if table.one_run(case, name) else '*'}"
            if entry.get("distance") is not None:
                cells[5] = f"{entry['distance']:.1e}{' DISAGREES' if entry['status'] == 'disagrees' else ''}"
            rows.append([case_name(case), name, *cells])
    return columns, rows


def entry_text(entry: Entry | None) -> str:
    if entry is None:
        return "-"
    if entry["status"] != "agrees" or "ms" not in entry:
        return "losses disagree" if entry["status"] == "disagrees" else "failed"
    peak = entry.get("peak_bytes")
    memory = "-" if peak is None else f"{peak / 1e9:.2f}"
    return f"{entry['ms']['median']:.2f}, {memory}, {compile_text(entry)}"


def compile_text(entry: Entry) -> str:
    """Seconds to the first step, and how many others compiled meanwhile."""
    words = " (warm)" if entry.get("warm") else ""
    if not entry.get("alone", True):
        words += f" (beside {entry['beside']})" if "beside" in entry else " (not alone)"
    return f"{entry['compile_seconds']:.1f}{words}"


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    escaped = [[cell.replace("|", "/") for cell in row] for row in rows]
    return [f"| {' | '.join(row)} |" for row in [list(columns), ["---"] * len(columns), *escaped]]


def about(entries: Sequence[Entry]) -> str:
    """Machine, versions and dates of some entries, in one line."""
    first = entries[0]
    versions = sorted({f"{name} {v}" for entry in entries for name, v in entry["versions"].items() if v})
    dates = sorted({entry["date"][:10] for entry in entries})
    when = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    return f"{first['machine']}, {first['precision']}; {', '.join(versions)}; {when}"


def markdown(entries: Sequence[Entry], bars: Sequence[Bar]) -> str:
    """The whole summary: bars and cases of every machine."""
    if not entries:
        return "Nothing has been measured yet: `wholestep bench --json bench/results/bench.json`.\n"
    lines: list[str] = []
    shown: list[Sequence[str]] = []
    for (device, _, _), found in machines(entries).items():
        table = Table(found)
        lines += [f"**{about(found)}**", ""]
        own = [bar for bar in bars if bar.device == device]
        if own:
            rows = bar_rows(table, own)
            shown += rows
            lines += [*markdown_table(BAR_COLUMNS, rows), ""]
            lines += [part for remark in remarks(table, own) for part in (remark, "")]
        columns, cases = case_rows(table)
        shown += cases
        lines += [*markdown_table(columns, cases), ""]
    lines.append(
        "Ratios are ours / theirs: lower is better. Each contender has a process of its own, all take turns; medians "
        "of blocks of steps. Losses must agree before a time counts. Convolutional networks of images are laid out "
        "channels last for everybody; there is no dropout. For PyTorch bf16 is `torch.autocast`; torch.compile "
        "compiles forward and loss, and backward with them; AdamW is called as it is, with its fused kernels. All "
        "other settings are PyTorch's defaults. Compile time: from the call to the end of the first step, with empty "
        "caches, without waiting for others; (beside n): up to n others compiled meanwhile."
    )
    lines += [f"\\{note}" for note in notes(shown)]
    return "\n".join(lines) + "\n"


def between_markers(path: Path) -> tuple[str, str]:
    """What lies before and after the markers of a page."""
    try:
        page = path.read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}") from None
    before, found, rest = page.partition(BEGIN)
    _, closed, after = rest.partition(END)
    if not found or not closed:
        raise InputError(f"{path} has no place for the table; put these two lines there:\n{BEGIN}\n{END}")
    return before, after


def write_between_markers(path: Path, text: str) -> None:
    """Replaces what lies between the markers of a page."""
    before, after = between_markers(path)
    path.write_text(page_with(before, text, after), encoding="utf-8")


def page_with(before: str, text: str, after: str) -> str:
    return f"{before}{BEGIN}\n{text.rstrip()}\n{END}{after}"
