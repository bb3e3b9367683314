"""Documentation pages that are programs: runs their python blocks and compares what they print with what the page says.

A page of docs/ with the line `<!-- executed by the tests -->` counts. Its python blocks run in order in one
process with one thread that has done nothing but import; a text block right after one is its output.
`python -m tests.docs.pages --write PAGE` fills those in.
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
import re
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests import warm

ROOT = Path(__file__).resolve().parents[2]
MARKER = "<!-- executed by the tests -->"
SECONDS_PER_PAGE = 120
NUMBER = re.compile(r"[-+]?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?")
RELATIVE, ABSOLUTE = 1e-2, 1e-3

#: runs in the page's process: blocks come in by stdin, what each printed goes out to a file as it ends
DRIVER = """
import contextlib, io, json, sys
page, blocks, out = json.load(sys.stdin)
namespace = {"__name__": "__main__"}
printed = []
for line, code in blocks:
    stream = io.StringIO()
    with contextlib.redirect_stdout(stream):
        exec(compile("\\n" * line + code, page, "exec"), namespace)
    printed.append(stream.getvalue())
    with open(out, "w") as file:
        json.dump(printed, file)
"""


@dataclass(frozen=True)
class Block:
    """A fenced block: lines[start] is its opening fence, lines[end] its closing one."""

    language: str
    start: int
    end: int
    text: str


@dataclass(frozen=True)
class Example:
    """A python block and the text block after it, if there is one."""

    code: Block
    output: Block | None


def executed_pages(folder: Path = ROOT / "docs") -> list[Path]:
    """The pages that say that they are executed."""
    return sorted(p for p in folder.glob("*.md") if MARKER in p.read_text().splitlines())


def fenced_blocks(lines: Sequence[str]) -> list[Block]:
    blocks, opened = [], None
    for index, line in enumerate(lines):
        if not line.startswith("```"):
            continue
        if opened is None:
            opened = index
        elif line.strip() == "```":
            text = "".join(f"{inner}\n" for inner in lines[opened + 1 : index])
            blocks.append(Block(lines[opened][3:].strip(), opened, index, text))
            opened = None
    if opened is not None:
        raise ValueError(f"line {opened + 1}: the block that opens here is never closed")
    return blocks


def examples(lines: Sequence[str]) -> list[Example]:
    """The python blocks of a page, each with its output."""
    blocks = fenced_blocks(lines)
    found = []
    for block, after in zip(blocks, [*blocks[1:], None], strict=False):
        if block.language != "python":
            continue
        follows = (
            after is not None
            and after.language == "text"
            and not any(line.strip() for line in lines[block.end + 1 : after.start])
        )
        found.append(Example(block, after if follows else None))
    return found


def run_blocks(page: Path, found: Sequence[Example]) -> tuple[list[str], str]:
    """What each python block printed, up to the first that failed, and the error's text ('' where none failed)."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "printed.json"
        work = Path(folder) / "work"
        work.mkdir()
        blocks = [(e.code.start + 1, e.code.text) for e in found]
        given = json.dumps([str(page), blocks, str(out)])
        result = warm.run(["-c", DRIVER], os.environ, work, given, SECONDS_PER_PAGE)
        printed = json.loads(out.read_text()) if out.exists() else []
    return printed, result.stderr if result.returncode else ""


def problems(page: Path) -> list[str]:
    """What is wrong with a page: a block that fails, output that is missing or different. Empty for a good page."""
    found = examples(page.read_text().splitlines())
    if not found:
        return [f"{page.name}: has no python block"]
    printed, error = run_blocks(page, found)
    wrong = []
    for example, actual in zip(found, printed, strict=False):
        where = f"{page.name}:{example.code.start + 1}"
        if example.output is None:
            if actual.strip():
                wrong.append(f"{where}: no text block follows this block, which prints\n{actual}")
        elif not same_output(example.output.text, actual):
            wrong.append(f"{where}: the page and the output differ\n{difference(example.output.text, actual)}")
    if error:
        wrong.append(f"{page.name}:{found[len(printed)].code.start + 1}: this block failed\n{error}")
    return wrong


def same_output(expected: str, actual: str) -> bool:
    """Whether lines agree; a line `...` stands for any lines, also none."""
    return _same_lines([_plain(x) for x in expected.splitlines()], [_plain(x) for x in actual.splitlines()])


def _same_lines(expected: list[str], actual: list[str]) -> bool:
    while expected and actual and expected[0] != "...":
        if not same_line(expected[0], actual[0]):
            return False
        expected, actual = expected[1:], actual[1:]
    if expected and expected[0] == "...":
        return any(_same_lines(expected[1:], actual[skipped:]) for skipped in range(len(actual) + 1))
    return not expected and not actual


def same_line(expected: str, actual: str) -> bool:
    """The same words, and numbers within the tolerance."""
    if NUMBER.split(expected) != NUMBER.split(actual):
        return False
    pairs = zip(NUMBER.findall(expected), NUMBER.findall(actual), strict=True)
    return all(abs(float(e) - float(a)) <= max(ABSOLUTE, RELATIVE * abs(float(e))) for e, a in pairs)


def _plain(line: str) -> str:
    """A line without the padding that a number's width may change."""
    return " ".join(line.split())


def difference(expected: str, actual: str) -> str:
    lines = difflib.unified_diff(expected.splitlines(), actual.splitlines(), "the page", "the output", lineterm="")
    return "\n".join(lines)


def rewritten(page: Path) -> str:
    """The page with real outputs: a text block that is true stays, another is replaced, a missing one is added."""
    lines = page.read_text().splitlines()
    found = examples(lines)
    printed, error = run_blocks(page, found)
    if error:
        raise SystemExit(f"{page.name}:{found[len(printed)].code.start + 1}: this block failed\n{error}")
    for example, actual in reversed(list(zip(found, printed, strict=True))):
        block, output = example.output, actual.rstrip("\n").splitlines()
        if block is not None and same_output(block.text, actual):
            continue
        fenced = ["```text", *output, "```"] if actual.strip() else []
        if block is not None:
            lines[block.start : block.end + 1] = fenced
        elif fenced:
            lines[example.code.end + 1 : example.code.end + 1] = ["", *fenced]
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.docs.pages", description="run the examples of docs/*.md")
    parser.add_argument("pages", nargs="*", type=Path, help="pages to run (default: all that are executed)")
    parser.add_argument("--write", action="store_true", help="put the real outputs into the pages")
    given = parser.parse_args(arguments)
    failed = False
    for page in [p.resolve() for p in given.pages] or executed_pages():
        if given.write:
            page.write_text(rewritten(page))
        wrong = problems(page)
        failed |= bool(wrong)
        print("\n\n".join(wrong) if wrong else f"{page.name}: as it says")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
