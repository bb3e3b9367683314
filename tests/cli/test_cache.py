"""`wholestep cache`: the summary, the list of choices, clearing, and what it says when something is wrong."""

from __future__ import annotations

import os
import re
import sqlite3
from contextlib import closing
from dataclasses import replace

import pytest

from tests import warm
from wholestep.backends.store import DATABASE, LOCK, Choice, Store, Timed, digest
from wholestep.cli import cache, main

CHOICE = Choice("triton", 2.5e-5, [Timed("aten", 4e-5), Timed("cpp", why="wrong"), Timed("triton", 2.5e-5)])


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("WHOLESTEP_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def filled(folder):
    Store("machine A", folder).put("softmax 8x128", CHOICE)
    Store("machine A", folder).put("linear 64x64", Choice("aten", 1e-3))
    store = Store("machine B", folder)
    store.put("softmax 8x128", Choice("aten", 5e-5))
    store.objects.write("cpp", digest("1"), b"x" * 100)
    store.objects.write("so", digest("1"), b"x" * 5000)
    return folder


def printed(capsys, *arguments: str) -> str:
    assert main.main(["cache", *arguments]) == 0
    return re.sub(r"[ ]+", " ", capsys.readouterr().out)


def test_path_makes_nothing(folder, capsys):
    assert printed(capsys, "--path") == f"{folder}\n"
    assert not folder.exists()


@pytest.mark.parametrize("arguments", [(), ("--show", "x"), ("--clear",)])
def test_nothing_is_kept_yet(folder, capsys, arguments):
    assert printed(capsys, *arguments).startswith(f"{folder}: nothing is kept yet; the first ws.compile")
    assert not folder.exists()


def test_summary(filled, capsys):
    text = printed(capsys)
    assert text.startswith(f"{filled}\n") and "3 measured choices, " in text and "2 objects, 5.3 kB" in text
    for row in ("machine A 2", "machine B 1", "cpp 1 181 B", "so 1 5.1 kB"):
        assert row in text


@pytest.mark.parametrize(
    ("pattern", "keys", "count"),
    [
        ("softmax", {"softmax 8x128"}, 2),
        ("soft*128", {"softmax 8x128"}, 2),
        ("machine A", {"softmax 8x128", "linear 64x64"}, 2),
        ("*", {"softmax 8x128", "linear 64x64"}, 3),
    ],
)
def test_show(filled, capsys, pattern, keys, count):
    text = printed(capsys, "--show", pattern)
    assert {key for key in ("softmax 8x128", "linear 64x64") if key in text} == keys
    assert text.endswith(f"{count} of 3 measured choices\n")


ABOUT = "step.softmax, step.mul (x2): 8x128 bf16 -> 8x128 bf16; first met in layer h.0.attn"


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        (["softmax"], 1),
        (["step.mul"], 1),
        (["8x128"], 1),
        (["H.0.Attn"], 1),
        (["softmax", "bf16", "triton"], 1),
        (["softmax", "conv"], 0),
        (["aten"], 2),  # it took part in both
        (["--winner", "aten"], 1),
        (["softmax", "--winner", "aten"], 0),
        ([], 2),
    ],
)
def test_choices_are_found_by_what_they_are_about(folder, capsys, arguments, found):
    store = Store("m", folder)
    store.put("3d62bc aten+triton", replace(CHOICE, about=ABOUT))
    store.put("18070a aten+triton", Choice("aten", 1e-3))  # of before there were words
    text = printed(capsys, "--show", *arguments)
    assert f"{found} of 2 measured choices" in text and ("Try: " in text) == (found == 0)
    assert (ABOUT in text) == ("3d62bc" in text)


def test_winner_alone_says_what_it_belongs_to(folder, capsys):
    assert main.main(["cache", "--winner", "cpp"]) == 1
    assert "Try: wholestep cache --show --winner cpp" in capsys.readouterr().err


def test_show_lists_candidates_the_fastest_first_and_the_excluded_last(filled, capsys):
    rows = cache.candidate_rows(CHOICE)
    assert rows == [("triton", "chosen", "25.0 us"), ("aten", "", "40.0 us"), ("cpp", "wrong", "")]
    assert cache.candidate_rows(Choice("aten", 1e-3)) == [("aten", "chosen", "1,000.0 us")]
    text = printed(capsys, "--show", "softmax")
    assert "triton chosen 25.0 us" in text and "cpp wrong" in text


def test_text_with_brackets_is_found_as_it_is(folder, capsys):
    Store("m", folder).put("tensor [0] -> [red]x[/red]", Choice("aten", 1.0))
    assert "tensor [0] -> [red]x[/red]" in printed(capsys, "--show", "[0]")


def test_clear_says_what_it_removed(filled, capsys):
    (filled / "notes.txt").write_text("the user's own")
    text = printed(capsys, "--clear")
    assert re.search(r"removed 3 measured choices and 2 objects, \d+\.\d kB\n$", text)
    assert [p.name for p in filled.rglob("*") if p.is_file() and p.name not in (DATABASE, LOCK)] == ["notes.txt"]
    assert "0 measured choices" in printed(capsys) and Store("machine A", filled).get("linear 64x64") is None
    assert "removed 0 measured choices and 0 objects" in printed(capsys, "--clear")


def test_only_one_thing_at_a_time(folder):
    with pytest.raises(SystemExit) as stop:
        main.main(["cache", "--clear", "--path"])
    assert stop.value.code == 2


def test_a_damaged_database_is_said_on_stderr(filled, capsys):
    (filled / DATABASE).write_bytes(b"rubbish" * 1000)
    assert main.main(["cache"]) == 0
    shown = capsys.readouterr()
    assert "0 measured choices" in shown.out and "2 objects" in shown.out
    assert "aside-damaged" in shown.err and "UserWarning" not in shown.err


def test_a_locked_database_is_an_error(filled, capsys, monkeypatch):
    monkeypatch.setattr(cache, "Store", lambda machine, folder: Store(machine, folder, patience=0.01))
    with closing(sqlite3.connect(filled / DATABASE, isolation_level=None)) as database:
        database.execute("BEGIN EXCLUSIVE")
        for arguments in ((), ("--clear",), ("--show", "x")):
            assert main.main(["cache", *arguments]) == 1
            err = capsys.readouterr().err
            assert "locked by another process" in err and "Try: again" in err
    assert len(Store("m", filled).rows()) == 3


def test_a_folder_that_cannot_be_used_is_an_error(filled, capsys, monkeypatch):
    monkeypatch.setattr(cache, "why_unwritable", lambda folder: "Read-only file system")
    assert main.main(["cache"]) == 1
    err = capsys.readouterr().err
    assert "Read-only file system" in err and "Try: set WHOLESTEP_CACHE" in err


def test_a_file_in_place_of_the_folder_is_an_error(folder, capsys):
    folder.write_text("in the way")
    assert main.main(["cache"]) == 1
    assert "is a file" in capsys.readouterr().err


def test_objects_that_others_could_have_written_are_not_counted(filled, capsys):
    filled.chmod(0o777)
    assert main.main(["cache"]) == 0
    shown = capsys.readouterr()
    assert "3 measured choices" in shown.out and "0 objects" in shown.out and "chmod go-w" in shown.err


def test_as_a_program(filled):
    done = warm.run(["-m", "wholestep", "cache", "--show", "linear"], os.environ)
    assert done.returncode == 0, done.stderr
    assert "linear 64x64" in done.stdout and done.stderr == ""
