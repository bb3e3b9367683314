"""`bench/guesses.py`: what a cache says of first guesses."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.guesses import guesses_of, main, table
from wholestep.backends.store import Choice, Store, Timed


def choice(*seconds: float) -> Choice:
    ways = [Timed(f"triton:dot {n}", s) for n, s in enumerate(seconds)]
    return Choice(
        "triton:dot 0", min(seconds), [*ways, Timed("triton:dot wrong", 0.0, "wrong"), Timed("aten:aten", 1e-9)]
    )


def test_the_first_of_what_ran_is_compared_with_the_best_of_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = Store("a machine", tmp_path / "cache")
    store.put("right", choice(1e-6, 2e-6))
    store.put("wrong", choice(4e-6, 2e-6, 1e-6))
    store.put("one way", choice(1e-6))
    main([str(tmp_path / "cache"), "--worst", "1", "--out", str(tmp_path / "page.md")])
    page = capsys.readouterr().out
    assert "| triton dot | 2 | 1 | 2.000 | 4.00 | 3 of 2 |" in page.splitlines() and "a machine" in page
    assert page.count("\n- ") == 1 and "dot 0 4.0, dot 1 2.0, dot 2 1.0 us" in page
    assert (tmp_path / "page.md").read_text() == page


def test_generators_are_apart_and_who_has_nothing_says_so(tmp_path: Path) -> None:
    both = Choice("cpp:row", 1e-6, [Timed("cpp:row 1", 2e-6), Timed("triton:flat", 1e-6), Timed("cpp:row 2", 1e-6)])
    assert [(g.family, g.ratio) for g in guesses_of(both)] == [("cpp row", 2.0)]
    assert table(guesses_of(both))[-1].startswith("| all | 1 | 0 |")
    with pytest.raises(SystemExit, match="two ways"):
        main([str(tmp_path)])
