"""Results as plots and as one HTML file: ratios of every case against every contender, drawn by hand as SVG."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from ..cost.html import SCRIPT, STYLE
from . import profile as profiles
from .contenders import RIVALS, rank, split
from .results import FIGURES, Entry
from .summary import (
    BAR_COLUMNS,
    Bar,
    Table,
    about,
    bar_rows,
    case_name,
    case_rows,
    machines,
    notes,
    reason,
    remarks,
)

COLOURS = {
    "wholestep": "#d62728",
    "aten": "#e899a0",
    "inductor": "#7f3c8d",
    "max": "#ff9da6",
    "offload": "#17a2b8",
    "checkpoint": "#8c564b",
    "eager": "#9d9d9d",
    "compile": "#f58518",
    "compile-reduce-overhead": "#4c78a8",
    "compile-max-autotune": "#54a24b",
    "jax": "#b279a2",
}
WIDTH, LEFT, ROW, TOP = 760, 210, 24, 64
#: a ratio this high is drawn at the edge
MOST = 1.6


def plot(table: Table, figure: str, title: str) -> str:
    """Ours / theirs, a row per case and a dot per contender, with a line where they are equal. "" without a ratio."""
    rows: list[tuple[str, dict[str, float]]] = []
    for case in table.rows:
        found = {name: table.ratio(case, name, figure) for name in RIVALS}
        known = {name: ratio[0] for name, ratio in found.items() if ratio is not None}
        if known:
            rows.append((case_name(case), known))
    if not rows:
        return ""
    height = TOP + ROW * len(rows) + 40

    def across(ratio: float) -> float:
        return LEFT + (WIDTH - LEFT - 30) * min(ratio, MOST) / MOST

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" '
        'font-size="12">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        f'<text x="10" y="22" font-size="15">{escape(title)}</text>',
    ]
    for number, name in enumerate(name for name in COLOURS if any(name in known for _, known in rows)):
        x = 10 + 175 * number
        parts.append(f'<circle cx="{x + 5}" cy="40" r="4" fill="{COLOURS[name]}"/>')
        parts.append(f'<text x="{x + 14}" y="44">{name}</text>')
    for tick in range(0, 9):
        ratio, colour = tick * 0.2, "#444" if tick == 5 else "#e4e4e4"
        place = across(ratio)
        parts.append(f'<line x1="{place:.1f}" x2="{place:.1f}" y1="{TOP - 8}" y2="{height - 30}" stroke="{colour}"/>')
        parts.append(f'<text x="{place - 8:.1f}" y="{height - 12}">{ratio:.1f}</text>')
    for number, (name, known) in enumerate(rows):
        y = TOP + ROW * number + ROW / 2
        parts.append(f'<text x="10" y="{y + 4:.1f}">{escape(name)}</text>')
        for contender, ratio in known.items():
            parts.append(
                f'<circle cx="{across(ratio):.1f}" cy="{y:.1f}" r="4.5" fill="{COLOURS[contender]}" fill-opacity="0.8">'
                f"<title>{escape(name)} against {contender}: {ratio:.3f}</title></circle>"
            )
    return "\n".join([*parts, "</svg>", ""])


def memory_plot(table: Table, case: tuple[str, str], title: str) -> str:
    """Milliseconds against peak memory: a line per contender that was given budgets, a dot for each other one.

    "" where nobody had a budget.
    """
    row = table.rows[case]
    if not any(split(name)[1] is not None for name in row):
        return ""
    lines: dict[str, list[tuple[float, float]]] = {}
    for name in sorted(row, key=rank):
        ms, peak = table.figure(case, name, "ms"), table.figure(case, name, "peak_bytes")
        if ms is not None and peak is not None:
            lines.setdefault(split(name)[0], []).append((peak / 1e9, ms))
    points = [point for line in lines.values() for point in line]
    if not points:
        return ""
    right, top = (1.05 * max(p[i] for p in points) for i in (0, 1))
    bottom, height = 0.9 * min(p[1] for p in points), 420

    def place(x: float, y: float) -> tuple[float, float]:
        return 70 + (WIDTH - 90) * x / right, 40 + (height - 90) * (1 - (y - bottom) / (top - bottom))

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" '
        'font-size="12">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        f'<text x="70" y="22" font-size="15">{escape(title)}</text>',
        f'<text x="{WIDTH / 2}" y="{height - 10}">peak memory, GB</text><text x="8" y="34">ms per step</text>',
    ]
    for i in range(5):
        x, y = right * i / 4, bottom + (top - bottom) * i / 4
        across, down = place(x, y)
        parts.append(f'<line x1="70" x2="{WIDTH - 20}" y1="{down:.1f}" y2="{down:.1f}" stroke="#eee"/>')
        parts.append(f'<text x="8" y="{down + 4:.1f}">{y:.3g}</text>')
        parts.append(f'<text x="{across - 10:.1f}" y="{height - 32}">{x:.3g}</text>')
    for number, (name, found) in enumerate(lines.items()):
        places, colour = [place(*point) for point in found], COLOURS[name]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="1.6"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{colour}"/>' for x, y in places]
        parts.append(f'<circle cx="{WIDTH - 210}" cy="{50 + 18 * number}" r="4" fill="{colour}"/>')
        parts.append(f'<text x="{WIDTH - 200}" y="{54 + 18 * number}">{name}</text>')
    return "\n".join([*parts, "</svg>", ""])


def plots(entries: Sequence[Entry]) -> dict[str, str]:
    """All plots, by a name for their file: figure, device, precision, and which of several such machines."""
    found: dict[str, str] = {}
    seen: Counter[str] = Counter()
    for (device, machine, precision), listed in machines(entries).items():
        where = f"{device}_{precision}"
        seen[where] += 1
        where += f"_{seen[where]}" if seen[where] > 1 else ""
        for figure, words in FIGURES.items():
            drawn = plot(Table(listed), figure, f"{words}, ours / theirs ({machine}, {precision})")
            if drawn:
                found[f"bench_{words.replace(' ', '_')}_{where}.svg"] = drawn
        table = Table(listed)
        for case in table.rows:
            drawn = memory_plot(table, case, budget_title(case, machine, precision))
            if drawn:
                found[f"bench_memory_{case[0]}_{case[1]}_{where}.svg"] = drawn
    return found


def budget_title(case: tuple[str, str], machine: str, precision: str) -> str:
    return f"{case_name(case)}: time against memory ({machine}, {precision})"


def html_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in columns)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def page(entries: Sequence[Entry], listed: Sequence[Entry], bars: Sequence[Bar]) -> str:
    """One HTML file: bars, cases, plots, what failed and why, profiles."""
    parts = ["<h1>Wholestep beside PyTorch</h1>", '<p class="note">Ratios are ours / theirs: lower is better.</p>']
    for (device, machine, precision), found in machines(entries).items():
        table = Table(found)
        parts.append(f"<h2>{escape(about(found))}</h2>")
        own = [bar for bar in bars if bar.device == device]
        if own:
            rows = bar_rows(table, own)
            parts.append(html_table(BAR_COLUMNS, rows))
            parts += [f'<p class="note">{escape(note)}</p>' for note in notes(rows)]
        parts.append(html_table(*case_rows(table)))
        for figure, words in FIGURES.items():
            parts.append(plot(table, figure, f"{words}, ours / theirs ({machine}, {precision})"))
        parts += [memory_plot(table, case, budget_title(case, machine, precision)) for case in table.rows]
        parts += [f'<p class="note">{escape(remark)}</p>' for remark in remarks(table, own)]
        wrong = [entry for entry in found if entry["status"] != "agrees"]
        rows = [[case_name((e["network"], e["size"])), e["contender"], reason(e)] for e in wrong]
        if rows:
            parts += ["<h2>What did not count</h2>", html_table(("case", "contender", "why"), rows)]
    for case, group in by_case(listed).items():
        parts.append(f"<h2>Profile of {escape(case)}</h2>")
        parts.append(html_table(*profiles.table_of(group)))
        for name, one in group.items():
            parts += [f"<h3>{escape(name)}</h3>", html_table(profiles.TOP_COLUMNS, profiles.top_rows(one, 15))]
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>wholestep bench</title>'
        f"<style>{STYLE}</style></head>\n<body>"
        + "\n".join(parts)
        + f'<div id="tip"></div><script>{SCRIPT}</script></body></html>\n'
    )


def by_case(listed: Sequence[Entry]) -> dict[str, dict[str, Mapping[str, Any]]]:
    """Profiles by machine and case, then by contender."""
    found: dict[str, dict[str, Mapping[str, Any]]] = {}
    for entry in listed:
        case = f"{case_name((entry['network'], entry['size']))} on {entry['machine']}, {entry['precision']}"
        found.setdefault(case, {})[entry["contender"]] = entry["profile"]
    return found
