"""A step's data movement as one HTML file that needs nothing beside it: charts as inline SVG, tables, a little script.

Whatever comes from the user (layer names, file names) is escaped where it is written and never reaches the script.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape

from .ledger import CAUSES, Kernel, Ledger
from .movement import (
    Movement,
    flops_text,
    heaviest_edges,
    memory_curve,
    mover_place,
    roofline_lines,
    seconds_text,
    size_text,
    top_movers,
)

WIDTH, HEIGHT = 960, 220
MOST_POINTS = 900
MOST_BARS = 1500
PHASE_COLOURS = {
    "forward": "#4c78a8", "loss": "#72b7b2", "backward": "#f58518", "clip": "#b279a2", "update": "#54a24b",
    "other": "#9d9d9d",
}  # fmt: skip
READ, WRITTEN = "#4c78a8", "#f58518"

STYLE = """
body{font:14px/1.45 system-ui,sans-serif;max-width:1000px;margin:2em auto;padding:0 1em;color:#222;background:#fff}
h1{font-size:1.5em}h2{font-size:1.1em;margin:2em 0 .4em;border-bottom:1px solid #ddd}
table{border-collapse:collapse;width:100%}th,td{padding:.15em .6em;text-align:left;border-bottom:1px solid #eee}
th{cursor:pointer;user-select:none}td.n,th.n{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}
td{overflow-wrap:anywhere}svg{width:100%;height:auto;display:block}svg text{font:11px system-ui,sans-serif;fill:#444}
.score{font-size:2em}.note{color:#666}pre{background:#f6f6f6;padding:1em;overflow:auto}
.key span{display:inline-block;margin-right:1.2em}.key i{display:inline-block;width:.8em;height:.8em;margin-right:.4em}
#tip{position:fixed;display:none;background:#222;color:#fff;padding:.2em .5em;border-radius:3px;font-size:12px}
#tip{pointer-events:none;max-width:40em}
"""

SCRIPT = """
const tip=document.getElementById('tip');
document.addEventListener('mousemove',e=>{const t=e.target.closest('[data-tip]');
 if(!t){tip.style.display='none';return}
 tip.textContent=t.dataset.tip;tip.style.display='block';
 tip.style.left=Math.min(e.clientX+12,innerWidth-tip.offsetWidth-8)+'px';tip.style.top=(e.clientY+14)+'px'});
document.querySelectorAll('th').forEach(th=>th.addEventListener('click',()=>{
 const table=th.closest('table'),i=[...th.parentNode.children].indexOf(th),up=th.dataset.up!=='1';
 th.dataset.up=up?'1':'0';
 const value=r=>{const c=r.children[i];return c.dataset.v===undefined?c.textContent:+c.dataset.v};
 const rows=[...table.tBodies[0].rows].sort((a,b)=>{const x=value(a),y=value(b);return (x<y?-1:x>y?1:0)*(up?1:-1)});
 table.tBodies[0].append(...rows)}));
"""

Cell = str | tuple[float, str]


def page(
    movement: Movement,
    title: str,
    measured: float | None = None,
    text: str = "",
    done: Sequence[tuple[str, int, str]] = (),
    budget: str = "",
) -> str:
    """The whole file. `measured` is the median time of a step, `text` the report as a table, `done` what was done
    to the program (what, how often, where), `budget` what became of a memory budget."""
    ledger = movement.ledger
    total = max(ledger.total, 1)
    parts = [
        f"<h1>What a training step of {escape(title)} moves</h1>",
        headline(movement, measured),
        "<h2>Bytes by cause</h2>",
        key({"read": READ, "written": WRITTEN}),
        cause_chart(ledger),
        table(
            ("cause", "what it is", "read", "written", "share"),
            [
                (cause, CAUSES[cause], number(read), number(written), share(read + written, total))
                for cause, (read, written) in ledger.by_cause().items()
            ],
        ),
        "<h2>Memory in use over the step</h2>",
        memory_chart(ledger),
        "<h2>Timeline</h2>",
        timeline_note(movement),
        key({phase: PHASE_COLOURS[phase] for phase in ledger.by_phase()}),
        timeline_chart(movement),
        "<h2>Heaviest edges</h2>",
        '<p class="note">What travels from the kernel that makes a tensor to one that reads it.</p>',
        edges_table(ledger),
        "<h2>Heaviest kernels</h2>",
        movers_table(ledger),
        "<h2>Bytes by phase</h2>",
        groups_table("phase", ledger.by_phase(), total),
        "<h2>Bytes by layer group</h2>",
        groups_table("layers", ledger.by_layer_group(), total),
        "<h2>Bytes by kernel</h2>",
        groups_table("kernel", ledger.by_kernel(), total),
        "<h2>Transformations</h2>",
        done_table(done),
    ]
    if budget:
        parts.append(f"<h2>Memory budget</h2><pre>{escape(budget)}</pre>")
    if text:
        parts.append(f"<h2>Report</h2><pre>{escape(text)}</pre>")
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f"<title>Wholestep: {escape(title)}</title><style>{STYLE}</style></head>\n<body>"
        + "\n".join(parts)
        + f'<div id="tip"></div><script>{SCRIPT}</script></body></html>\n'
    )


def headline(movement: Movement, measured: float | None) -> str:
    ledger = movement.ledger
    score = f"{movement.ratio:.2f}" if movement.bound.total else "none"
    lines = [
        f'<p><span class="score">{score}</span> = moved / bound: {size_text(ledger.total)} moved per step, '
        f"{size_text(movement.bound.total)} if all but its heavy ops and its state were free.</p>",
        f"<p>{ledger.launches} kernels, {flops_text(ledger.flops)}.</p>",
    ]
    if movement.cached is not None:
        lines.append(f"<p>{escape(movement.cache_line())}</p>")
    if movement.note:
        lines.append(f"<p>{escape(movement.note)}</p>")
    if movement.roofline is not None:
        lines += [f"<p>{escape(line)}</p>" for line in roofline_lines(movement.roofline, measured)]
    elif measured is not None:
        lines.append(f"<p>Measured: {seconds_text(measured)} per step.</p>")
    return "".join(lines)


def key(colours: Mapping[str, str]) -> str:
    shown = "".join(f'<span><i style="background:{c}"></i>{escape(name)}</span>' for name, c in colours.items())
    return f'<p class="key">{shown}</p>'


def table(columns: Sequence[str], rows: Iterable[Sequence[Cell]]) -> str:
    """A table; a cell that is a (number, text) pair is flush right and sorts by its number."""
    listed = [list(row) for row in rows]
    first: Sequence[Cell] = listed[0] if listed else ("",) * len(columns)
    head = "".join(
        f"<th{' class=n' if isinstance(cell, tuple) else ''}>{escape(name)}</th>"
        for name, cell in zip(columns, first, strict=True)
    )
    body = "".join("<tr>" + "".join(map(cell_html, row)) + "</tr>" for row in listed)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def cell_html(cell: Cell) -> str:
    if isinstance(cell, tuple):
        return f'<td class="n" data-v="{cell[0]:g}">{escape(cell[1])}</td>'
    return f"<td>{escape(cell)}</td>"


def number(size: int) -> Cell:
    return float(size), size_text(size)


def share(size: int, total: int) -> Cell:
    return size / total, f"{size / total:.1%}"


def groups_table(name: str, groups: Mapping[str, tuple[int, int]], total: int) -> str:
    rows = [(group, number(r), number(w), share(r + w, total)) for group, (r, w) in groups.items()]
    return table((name, "read", "written", "share"), rows)


def movers_table(ledger: Ledger) -> str:
    rows = [
        (row["kernel"], mover_place(row), number(row["bytes"]), (float(row["calls"]), str(row["calls"])))
        for row in top_movers(ledger, 25)
    ]
    return table(("kernel", "where", "bytes", "calls"), rows)


def done_table(done: Sequence[tuple[str, int, str]]) -> str:
    rows = [(name, (float(count), str(count)), where) for name, count, where in done]
    return table(("transformation", "times", "where"), rows) if rows else "<p>none</p>"


def edges_table(ledger: Ledger) -> str:
    rows = [
        (
            edge["from"] + (f" ({edge['from_layer']})" if edge["from_layer"] else ""),
            edge["to"] + (f" ({edge['to_layer']})" if edge["to_layer"] else ""),
            edge["type"],
            edge["cause"],
            number(edge["bytes"]),
            f"{edge['file']}:{edge['line']}" if edge["file"] else "",
        )
        for edge in heaviest_edges(ledger, 20)
    ]
    return table(("from", "to", "tensor", "cause", "bytes read", "source of the reader"), rows)


def svg(height: int, content: str, label: str) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(label)}">{content}</svg>'


def cause_chart(ledger: Ledger) -> str:
    """One bar per cause: read and written."""
    causes = ledger.by_cause()
    largest = max((sum(pair) for pair in causes.values()), default=0) or 1
    parts, row = [], 24
    for index, (cause, (read, written)) in enumerate(causes.items()):
        y, scale = index * row + 4, (WIDTH - 260) / largest
        parts.append(f'<text x="140" y="{y + 12}" text-anchor="end">{escape(cause)}</text>')
        at = 150.0
        for what, size, colour in (("read", read, READ), ("written", written, WRITTEN)):
            tip = escape(f"{cause}: {size_text(size)} {what}")
            parts.append(
                f'<rect x="{at:.1f}" y="{y}" width="{size * scale:.1f}" height="16" fill="{colour}" data-tip="{tip}"/>'
            )
            at += size * scale
        parts.append(f'<text x="{at + 6:.1f}" y="{y + 12}">{size_text(read + written)}</text>')
    return svg(len(causes) * row + 8, "".join(parts), "bytes by cause")


def memory_chart(ledger: Ledger) -> str:
    """Bytes in use while each kernel runs; what was there before the step is the floor."""
    curve = memory_curve(ledger)
    if not curve:
        return "<p>no kernel</p>"
    peak, floor = max(curve), ledger.lasting
    points = [max(curve[a:b]) for a, b in buckets(len(curve), MOST_POINTS)]
    top, bottom, left = 16, HEIGHT - 24, 70
    width = WIDTH - left - 10

    def height(size: int) -> float:
        return bottom - size / peak * (bottom - top) if peak else bottom

    step = width / len(points)
    path = f"M{left} {bottom}" + "".join(
        f"L{left + i * step:.1f} {height(p):.1f}L{left + (i + 1) * step:.1f} {height(p):.1f}"
        for i, p in enumerate(points)
    )
    at = curve.index(peak)
    kernel = ledger.kernels[at]
    tip = escape(f"{size_text(peak)} in use, in {kernel.phase} {kernel.name} {kernel.loc}")
    x = left + at / len(curve) * width
    content = (
        f'<path d="{path}L{left + width} {bottom}Z" fill="#c6dbef" stroke="#4c78a8"/>'
        f'<rect x="{left}" y="{height(floor):.1f}" width="{width}" height="{bottom - height(floor):.1f}" '
        f'fill="#9ecae1" data-tip="{escape(size_text(floor))}: parameters, state, batch, fixed tensors"/>'
        f'<circle cx="{x:.1f}" cy="{height(peak):.1f}" r="4" fill="#e45756" data-tip="{tip}"/>'
        f'<text x="{left - 6}" y="{top + 4}" text-anchor="end">{size_text(peak)}</text>'
        f'<text x="{left - 6}" y="{height(floor) + 4:.1f}" text-anchor="end">{size_text(floor)}</text>'
        f'<text x="{left}" y="{HEIGHT - 6}">first kernel</text>'
        f'<text x="{WIDTH - 10}" y="{HEIGHT - 6}" text-anchor="end">last of {len(curve)}</text>'
    )
    return svg(HEIGHT, content, "memory in use over the step") + f'<p class="note">Most: {tip}.</p>'


def timeline_note(movement: Movement) -> str:
    if movement.roofline is None:
        return (
            '<p class="note">Each kernel as wide as the bytes it moves; no description of the machine gives times.</p>'
        )
    return f'<p class="note">Each kernel as wide as its time at the limits of {escape(movement.roofline.machine)}.</p>'


def timeline_chart(movement: Movement) -> str:
    """Kernels in order, each as wide as its time, coloured by phase; neighbours too thin to see are drawn as one."""
    kernels = movement.ledger.kernels
    widths = list(movement.roofline.kernels) if movement.roofline else [float(k.bytes) for k in kernels]
    whole = sum(widths)
    if not whole:
        return "<p>nothing takes time</p>"
    parts: list[str] = []
    at = start = 0.0
    group: list[int] = []
    for index, (kernel, width) in enumerate(zip(kernels, widths, strict=True)):
        if group and (kernel.phase != kernels[group[0]].phase or at - start >= whole / MOST_BARS):
            parts.append(bar(kernels, widths, group, start / whole, at / whole, movement.roofline is not None))
            group, start = [], at
        group.append(index)
        at += width
    parts.append(bar(kernels, widths, group, start / whole, at / whole, movement.roofline is not None))
    return svg(64, "".join(parts), "timeline of the step")


def bar(
    kernels: Sequence[Kernel], widths: Sequence[float], group: Sequence[int], start: float, end: float, timed: bool
) -> str:
    longest = kernels[max(group, key=lambda index: widths[index])]
    size = sum(widths[index] for index in group)
    more = f" and {len(group) - 1} more" if len(group) > 1 else ""
    what = seconds_text(size) if timed else size_text(size)
    tip = escape(f"{longest.phase} {longest.name} {longest.loc}{more}: {what}")
    colour = PHASE_COLOURS.get(longest.phase, PHASE_COLOURS["other"])
    return (
        f'<rect x="{start * WIDTH:.2f}" y="4" width="{max((end - start) * WIDTH, 0.05):.2f}" height="56" '
        f'fill="{colour}" data-tip="{tip}"/>'
    )


def buckets(length: int, most: int) -> list[tuple[int, int]]:
    """`length` things in at most `most` ranges of about the same size."""
    count = min(length, most)
    return [(i * length // count, (i + 1) * length // count) for i in range(count)]
