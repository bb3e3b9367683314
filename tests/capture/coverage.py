"""docs/coverage.md: what PyTorch's op samples and the zoo's networks come to, generated, never written by hand.

`python -m tests.capture.coverage --write` examines every op and writes the page; without `--write` it prints verdicts
of the ops that a pattern names. `--networks` renews only the networks' section, from tests/zoo/results.json.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import pathlib
import re
import sys

import torch

from .opinfo import LIMITS, RULE, TRACED, UNDEFINED, WRONG, Verdict, database, examine, title

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "coverage.md"
RESULTS = ROOT / "tests" / "zoo" / "results.json"
NETWORKS = "## Networks"
KINDS = {
    RULE: "by rule",
    TRACED: "by traced fallback",
    "partly": "partly refused",
    "refused": "refused",
    "not applicable": "not applicable",
    WRONG: "WRONG",
}
MEANING = {
    RULE: "only curated ops of the step dialect and their own derivative rules are used",
    TRACED: "an operator runs as `step.opaque`, or a derivative is traced from PyTorch's autograd; as right",
    "partly": "some samples are right, some are refused with a clear error: the note says why",
    "refused": "every sample is refused with a clear error: the note says why",
    "not applicable": "no sample with real, dense tensors runs in eager PyTorch on this machine",
}
HOW = f"""# Coverage

What capture, differentiation and execution make of operators and networks that we did not write. This page is generated
(`make coverage-docs`); a test examines each operator again and compares it with its row here.

## Operators

Every entry of PyTorch's own test database (`torch.testing._internal.common_methods_invocations.op_db`) goes through the
real importer, our autodiff and the reference executor: up to {LIMITS[0]} samples per op that rules cover and
{LIMITS[1]} per other op, spread over those that PyTorch has (`WHOLESTEP_ALL_SAMPLES=1` takes them all), and
non-contiguous, in-place, float32, integer and boolean ones besides. Values must equal eager PyTorch's and float64
gradients those of `torch.autograd`, to 1e-9 relative. Where an op draws random numbers its gradient must be the slope
of our own program under the same random key. There is no row for a wrong answer: one would fail the test.
"""


def row(verdict: Verdict) -> str:
    """One op's line of the table."""
    right = verdict.count(RULE) + verdict.count(TRACED)
    samples = f"{right}" if right == len(verdict.outcomes) else f"{right} of {len(verdict.outcomes)}"
    gradient = "yes" if any(o.differentiated for o in verdict.outcomes) else ""
    notes = [shorten(reason) for reason in verdict.reasons]
    if verdict.status == TRACED:
        notes = [f"`{name}`" for name in dict.fromkeys(n for reason in notes for n in reason.split(", "))]
        some = f"in {verdict.count(TRACED)} of {len(verdict.outcomes)} samples " if verdict.count(RULE) else ""
        notes = [some + ", ".join(notes[:4] + (["..."] if len(notes) > 4 else []))]
    if any(o.random for o in verdict.outcomes):
        notes.append("draws random numbers: their values are not compared")
    if verdict.name.partition(".")[0] in UNDEFINED:
        notes.append("memory as it was found: values are not compared")
    note = "; ".join(dict.fromkeys(notes)).replace("|", "\\|")
    cells = (f"`{verdict.name}`", KINDS[verdict.status], gradient, "" if verdict.not_applicable else samples, note)
    return "| " + " | ".join(cells) + " |"


def shorten(reason: str) -> str:
    """A reason without what every one of its kind says."""
    reason = reason.replace("which a static program cannot have; use a mask (torch.where) or a fixed size instead", "")
    reason = re.sub(r"cannot be captured: |; try: .*", "", reason)
    return reason.strip(" ,.;")


def summary(statuses: list[str]) -> list[str]:
    """The counts, as a table. Statuses are as in the ops' rows."""
    lines = ["| | ops | |", "|---|---:|---|"]
    for kind, meaning in MEANING.items():
        lines.append(f"| {KINDS[kind]} | {statuses.count(KINDS[kind])} | {meaning} |")
    return [*lines, f"| all | {len(statuses)} | |"]


def handlers_section(reached: set[str]) -> list[str]:
    from wholestep.capture.importer import HANDLERS

    missed = sorted(set(HANDLERS) - reached)
    return [
        f"Capture maps {len(HANDLERS)} ATen overloads to curated ops; the samples reach "
        f"{len(HANDLERS) - len(missed)} of them. "
        "Not reached, mostly because only backward passes and decompositions call them:",
        "",
        ", ".join(f"`{name}`" for name in missed) + ".",
    ]


def networks_section() -> list[str]:
    """The zoo's networks: how far ten compiled steps are from ten eager ones, or why there are none."""
    from tests.zoo import KNOWN_FAILURES, ZOO

    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    entries = {**ZOO, **KNOWN_FAILURES}
    lines = [
        NETWORKS,
        "",
        "Ten training steps in float32 on CPU, compiled and eager side by side (`python -m tests.zoo.compare`):",
        "largest relative difference of a loss and the largest difference of a parameter, with AdamW and with SGD.",
        "Parameters whose exact gradient is zero (a bias before BatchNorm, a key's bias before softmax) are not in the",
        "AdamW column: Adam divides rounding noise by its own size, so they drift in any two programs; they are held",
        "to Adam's own step (`null_gradients` in tests/zoo). The learning rates are those of the entries.",
        "",
        "| network | family | status | loss, AdamW | parameters, AdamW | loss, SGD | parameters, SGD | note |",
        "|---|---|---|---:|---:|---:|---:|---|",
    ]
    for name in sorted({*results, *entries}):
        result, entry = results.get(name, {}), entries.get(name)
        numbers = [
            f"{result[kind][what]:.1e}" if isinstance(result.get(kind), dict) and what in result[kind] else ""
            for kind in ("adamw", "sgd")
            for what in ("loss", "parameters")
        ]
        failure = entry.failure if entry is not None else ""
        note = result.get("reason") or failure or (entry.note if entry is not None else "")
        status = result.get("status") or ("not captured" if failure else "not run")
        family = result.get("family") or (entry.family if entry is not None else "")
        cells = (f"`{name}`", family, status, *numbers, " ".join(str(note).split()).replace("|", "\\|"))
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def page(verdicts: list[Verdict]) -> str:
    """The whole page."""
    rows = [row(v) for v in verdicts]
    version = torch.__version__.partition("+")[0]
    lines = [
        HOW,
        f"PyTorch {version}:",
        "",
        *summary([KINDS[v.status] for v in verdicts]),
        "",
        *handlers_section(set().union(*(v.handlers for v in verdicts))),
        "",
        "| op | covered | gradient | samples | note |",
        "|---|---|---|---:|---|",
        *rows,
        "",
        *networks_section(),
    ]
    return "\n".join(lines) + "\n"


def committed() -> tuple[str, dict[str, str], list[str]]:
    """The committed page: the torch it was made with, its rows by op, its table of counts."""
    text = PAGE.read_text() if PAGE.exists() else ""
    version = re.search(r"^PyTorch (\S+):$", text, re.MULTILINE)
    operators = text.partition(NETWORKS)[0]
    rows = {m.group(1): m.group(0) for m in re.finditer(r"^\| `([^`]+)` \|.*$", operators, re.MULTILINE)}
    counts = re.search(r"^\| \| ops \| \|\n(?:\|.*\n)+", operators, re.MULTILINE)
    return version.group(1) if version else "", rows, counts.group(0).splitlines() if counts else []


def _examine(name: str) -> Verdict:
    torch.set_num_threads(1)
    return examine(next(info for info in database() if title(info) == name))


def examine_all(pattern: str, processes: int) -> list[Verdict]:
    names = [title(info) for info in database() if re.search(pattern, title(info))]
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        found = []
        for i, verdict in enumerate(pool.imap(_examine, names, chunksize=4)):
            found.append(verdict)
            if sys.stderr.isatty():
                print(f"\r{i + 1} of {len(names)}", end="", file=sys.stderr)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pattern", nargs="?", default="", help="ops to examine, a regular expression")
    parser.add_argument("--write", action="store_true", help="examine all ops and write docs/coverage.md")
    parser.add_argument("--networks", action="store_true", help="write the networks' section alone")
    parser.add_argument("--processes", type=int, default=2)
    arguments = parser.parse_args()
    if arguments.networks:
        head = PAGE.read_text().partition(NETWORKS)[0]
        PAGE.write_text(head + "\n".join(networks_section()) + "\n")
        return 0
    verdicts = examine_all("" if arguments.write else arguments.pattern, arguments.processes)
    wrong = [v for v in verdicts if v.status == WRONG]
    for verdict in wrong if arguments.write else verdicts:
        print(row(verdict))
    if arguments.write and not wrong:
        PAGE.write_text(page(verdicts))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
