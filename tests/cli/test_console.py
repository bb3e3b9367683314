"""Tables and bars, with rich and without it."""

from __future__ import annotations

import io

import pytest

from wholestep.cli.console import WITHOUT_RICH, Console, plain_table


def test_plain_table_aligns_text_left_and_numbers_right():
    assert plain_table(("phase", "ops"), [("forward", "7"), ("loss", "1,200")]).splitlines() == [
        "phase      ops",
        "-------  -----",
        "forward      7",
        "loss     1,200",
    ]


def test_a_ragged_row_is_an_error():
    with pytest.raises(ValueError):
        plain_table(("a", "b"), [("only one",)])


def test_absent_rich_is_said_once_and_everything_still_prints():
    stream = io.StringIO()
    console = Console(stream, use_rich=False)
    console.heading("Loss")
    console.table(("step", "loss"), [("1", "5.5")])
    console.table(("step", "loss"), [("2", "4.5")])
    text = stream.getvalue()
    assert text.count(WITHOUT_RICH) == 1
    assert "Loss\n" in text and "5.5" in text and "4.5" in text


def test_plain_progress_prints_each_quarter_once():
    stream = io.StringIO()
    console = Console(stream, use_rich=False)
    with console.progress("eager", total=8) as bar:
        for step in range(1, 9):
            bar.update(step, f"step {step}")
    lines = stream.getvalue().splitlines()[1:]
    assert lines == [f"eager: {25 * quarter} %  step {2 * quarter}" for quarter in (1, 2, 3, 4)]


@pytest.mark.parametrize("use_rich", [True, False])
def test_brackets_are_text_and_not_markup(use_rich):
    if use_rich:
        pytest.importorskip("rich")
    stream = io.StringIO()
    console = Console(stream, use_rich=use_rich)
    console.line("[bold]cse{limit=1}[/bold] :smile:")
    console.table(("a", "b"), [("[red]", "1")])
    assert "[bold]cse{limit=1}[/bold] :smile:" in stream.getvalue() and "[red]" in stream.getvalue()


def test_rich_progress_ends_with_the_last_note():
    pytest.importorskip("rich")
    stream = io.StringIO()
    with Console(stream, use_rich=True).progress("compiled", total=2) as bar:
        bar.update(2, "step 2  loss 1.0")
    assert "compiled" in stream.getvalue() and "loss 1.0" in stream.getvalue()
