"""Every documentation page that is executed tells the truth, and the runner notices one that does not."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.pages import MARKER, executed_pages, main, problems, same_line, same_output

PAGES = executed_pages()


@pytest.mark.parametrize("page", PAGES, ids=[p.stem for p in PAGES])
def test_page(page: Path):
    wrong = problems(page)
    assert not wrong, "\n\n".join(wrong)


def test_there_are_pages():
    assert "trainers" in [p.stem for p in PAGES]


def write(folder: Path, *blocks: str) -> Path:
    page = folder / "page.md"
    page.write_text(f"# Page\n\n{MARKER}\n\n" + "\n\nWords.\n\n".join(blocks) + "\n")
    return page


def python(code: str, output: str | None = None) -> str:
    return f"```python\n{code}\n```" + (f"\n\n```text\n{output}\n```" if output is not None else "")


def test_a_true_page(tmp_path):
    page = write(
        tmp_path,
        python("x = 2"),
        python("import torch\nprint('x is', x, torch.get_num_threads())", "x is 2 1"),
        python("print('one\\ntwo\\nthree')", "one\n..."),
        "```sh\nnot run\n```",
    )
    assert problems(page) == [] and executed_pages(tmp_path) == [page]


def test_a_page_without_the_marker_does_not_count(tmp_path):
    page = write(tmp_path, python("print(1)", "2"))
    page.write_text(page.read_text().replace(MARKER, ""))
    assert executed_pages(tmp_path) == []


@pytest.mark.parametrize(
    ("blocks", "message"),
    [
        ([python("print('loss', 1.5)", "loss 1.6")], "page.md:5: the page and the output differ"),
        ([python("print('a')", "b")], "-b\n+a"),
        ([python("print('a')\nprint('b')", "a")], "+b"),
        ([python("x = 1", "a")], "-a"),
        ([python("print('a')")], "no text block follows this block, which prints\na"),
        ([python("print('a')") + "\n\nWords.\n\n```text\na\n```"], "no text block follows"),
        ([python("print('a')", "a"), python("x = 1\n1 / 0")], "page.md:15: this block failed"),
        ([python("x = 1\n1 / 0")], 'page.md", line 7'),
        (["Only words."], "has no python block"),
    ],
)
def test_an_untrue_page_fails(tmp_path, blocks, message):
    wrong = problems(write(tmp_path, *blocks))
    assert len(wrong) == 1 and message in wrong[0], wrong


def test_numbers_have_a_tolerance_and_words_have_none():
    assert same_line("loss 1.500 after 20 steps", "loss 1.501 after 20 steps")
    assert same_line("0.0001", "0.0004") and same_line("1.5e-07 x", "0.0 x")
    assert not same_line("loss 1.5", "loss 1.6") and not same_line("fp32", "fp16")
    assert not same_line("loss 1.5", "cost 1.5") and not same_line("1 2", "1") and not same_line("2 steps", "3 steps")
    assert not same_line("nan", "1.0")


def test_three_dots_stand_for_any_lines():
    assert same_output("a\n...\nd\n", "a\nb\nc\nd\n") and same_output("...\nd", "d") and same_output("a\n...", "a")
    assert not same_output("a\n...\nd\n", "a\nb\n") and not same_output("...\na", "b")
    assert same_output("count    9.99", "count   10.00")  # the padding follows the number


def test_write_puts_the_real_output_in(tmp_path, capsys):
    page = write(
        tmp_path,
        python("print(1 + 1)"),
        python("print('new')", "old"),
        python("print('a\\nb')", "a\n..."),
        python("x = 3", "stale"),
    )
    assert main([str(page)]) == 1
    assert main(["--write", str(page)]) == 0
    text = page.read_text()
    assert python("print(1 + 1)", "2") in text and python("print('new')", "new") in text
    assert python("print('a\\nb')", "a\n...") in text and "stale" not in text and "old" not in text
    assert "as it says" in capsys.readouterr().out


def test_a_block_that_is_never_closed(tmp_path):
    with pytest.raises(ValueError, match="never closed"):
        problems(write(tmp_path, "```python\nx = 1"))
