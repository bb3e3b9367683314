"""The generated pages are current and deterministic."""

from __future__ import annotations

from pathlib import Path

import pytest

from wholestep.dialects import all_dialects, reference

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("path", sorted(reference.pages()))
def test_committed_pages_are_current(path: str) -> None:
    committed = ROOT / path
    assert committed.exists(), f"{path} is missing; run `wholestep docs`"
    assert committed.read_text(encoding="utf-8") == reference.pages()[path], f"{path} is behind; run `wholestep docs`"


def test_every_op_has_a_section_and_a_sentence() -> None:
    for dialect in all_dialects():
        page = reference.page(dialect)
        for definition in dialect.ops.values():
            assert f"## {definition.name}\n" in page
            assert definition.__doc__, f"{definition.name} has no doc"


def test_write_all(tmp_path: Path) -> None:
    written = reference.write_all(tmp_path)
    assert {str(path.relative_to(tmp_path)) for path in written} == set(reference.pages())
    assert reference.pages() == reference.pages()
