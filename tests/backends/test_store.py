"""The store of measured choices and compiled objects: kept, bounded, and never in the way when it is damaged or locked.

Processes here are forked: they share the imports and nothing else, since every operation opens the database anew.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import importlib.util
import json
import math
import os
import resource
import shutil
import signal
import sqlite3
import stat
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from wholestep.backends import store as store_module
from wholestep.backends.store import (
    DATABASE,
    LOCK,
    OBJECTS,
    SCHEMA,
    Choice,
    Objects,
    Store,
    Timed,
    Unavailable,
    cache_folder,
    digest,
    fingerprint,
    from_json,
    to_json,
    why_unwritable,
)
from wholestep.errors import InputError

CHOICE = Choice(
    "triton",
    2.5e-5,
    [Timed("triton", 2.5e-5), Timed("aten", 4e-5), Timed("cpp", why="wrong"), Timed("mine", why="crashed: signal 11")],
)


def forked(work: Callable[[], None]) -> int:
    """Runs `work` in a process of its own, where any warning is an error; returns its id at once."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 on threads: the child uses none of torch's
        child = os.fork()
    if child:
        return child
    code = 1
    try:
        warnings.simplefilter("error")
        work()
        code = 0
    except BaseException:
        import traceback

        traceback.print_exc(file=sys.__stderr__)
    finally:
        os._exit(code)


def ended(*children: int) -> list[int]:
    """Exit codes; the negative number of the signal for a process that was killed."""
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


def open_raw(folder: Path) -> closing[sqlite3.Connection]:
    return closing(sqlite3.connect(folder / DATABASE, isolation_level=None))


def intact(folder: Path) -> bool:
    with open_raw(folder) as database:
        return database.execute("PRAGMA integrity_check").fetchall() == [("ok",)]


@pytest.fixture
def silent():
    """Nothing in the test may warn."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


# ---- where -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environment", "folder"),
    [
        ({"WHOLESTEP_CACHE": "/a", "XDG_CACHE_HOME": "/b"}, "/a"),
        ({"WHOLESTEP_CACHE": "~/a"}, "{home}/a"),
        ({"WHOLESTEP_CACHE": "", "XDG_CACHE_HOME": "/b"}, "/b/wholestep"),
        ({"XDG_CACHE_HOME": "relative"}, "{home}/.cache/wholestep"),
        ({"XDG_CACHE_HOME": ""}, "{home}/.cache/wholestep"),
        ({}, "{home}/.cache/wholestep"),
    ],
)
def test_location(environment, folder):
    assert cache_folder(environment) == Path(folder.format(home=Path.home()))


def test_a_relative_folder_is_made_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cache_folder({"WHOLESTEP_CACHE": "here"}) == tmp_path / "here"


def test_the_store_goes_where_the_variable_says(tmp_path, monkeypatch, silent):
    monkeypatch.setenv("WHOLESTEP_CACHE", str(tmp_path / "a" / "b"))
    store = Store("m")
    store.put("k", CHOICE)
    assert store.folder == tmp_path / "a" / "b" and (store.folder / DATABASE).is_file()
    assert stat.S_IMODE(store.folder.stat().st_mode) == 0o700


def test_a_user_without_a_home_gets_memory_and_a_warning(monkeypatch):
    def no_home(_path):
        raise RuntimeError("Could not determine home directory.")

    for name in ("WHOLESTEP_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "expanduser", no_home)
    with pytest.raises(InputError, match="set WHOLESTEP_CACHE"):
        cache_folder()
    store_module.warner_of.cache_clear()
    with pytest.warns(UserWarning, match="no cache folder.*Try: set WHOLESTEP_CACHE"):
        assert Store("m").folder is None


def test_a_folder_that_cannot_be_made_is_one_warning_and_memory(tmp_path):
    (tmp_path / "file").write_text("in the way")
    folder = tmp_path / "file" / "cache"
    with pytest.warns(UserWarning, match="kept for this process alone") as said:
        store = Store("m", folder)
        store.put("k", CHOICE)
        assert store.get("k") == CHOICE and store.get("other") is None
        name = digest("x")
        path = store.objects.write("so", name, b"code")
        assert store.objects.read("so", name) == b"code" and path.is_file()
        with store.objects.lock("so", name) as mine:
            assert mine
        Store("m", folder)  # a compile opens it several times
    assert len(said) == 1 and f"{folder} cannot be written" in str(said[0].message)
    assert "Try: set WHOLESTEP_CACHE" in str(said[0].message)
    assert store.rows() == [] and store.clear() == 0
    assert stat.S_IMODE(store.objects.root.stat().st_mode) == 0o700


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_permission(tmp_path):
    tmp_path.chmod(0o500)
    assert "denied" in why_unwritable(tmp_path / "cache")


# ---- keeping ---------------------------------------------------------------------------------------------------------


def test_a_choice_is_there_for_the_next_process(tmp_path, silent):
    assert ended(forked(lambda: Store("m", tmp_path).put("region", CHOICE))) == [0]
    store = Store("m", tmp_path)
    assert store.get("region") == CHOICE
    assert store.get("regio") is None
    assert Store("another machine", tmp_path).get("region") is None


def test_machine_and_key_are_told_apart(tmp_path, silent):
    store, other = Store("ab", tmp_path), Store("a", tmp_path)
    assert store.is_empty()
    store.put("c", CHOICE)
    assert other.get("bc") is None
    assert other.is_empty() and not store.is_empty()


def test_a_newer_choice_replaces_the_older(tmp_path, silent):
    store = Store("m", tmp_path)
    store.put("k", CHOICE)
    store.put("k", Choice("aten", 1.0))
    assert Store("m", tmp_path).get("k") == Choice("aten", 1.0, [])
    assert [(row.machine, row.key, row.choice.winner) for row in store.rows()] == [("m", "k", "aten")]


def test_columns_hold_json(tmp_path, silent):
    Store("m", tmp_path).put("k", CHOICE)
    with open_raw(tmp_path) as database:
        ((text,),) = database.execute("SELECT choice FROM choices")
    assert json.loads(text)["candidates"][3] == ["mine", None, "crashed: signal 11"]


@pytest.mark.parametrize(
    "choice",
    [
        Choice("a", math.nan),
        Choice("a", -1.0),
        Choice("a", math.inf),
        Choice("", 1.0),
        Choice("a", 1.0, [Timed("a", why="wrong"), Timed("b", 2.0)]),
        Choice("a", 1.0, [Timed("b", 2.0)]),
        Choice("a", 1.0, [Timed("a", math.nan)]),
    ],
)
def test_a_choice_that_makes_no_sense_is_refused(tmp_path, choice):
    with pytest.raises(ValueError):
        Store("m", tmp_path).put("k", choice)


def test_threads_share_a_store(tmp_path, silent):
    store = Store("m", tmp_path, patience=60)
    failures = []

    def work(name):
        try:
            for index in range(10):
                store.put(f"{name} {index}", CHOICE)
                assert store.get(f"{name} {index}") == CHOICE
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(name,)) for name in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == [] and len(store.rows()) == 30


def test_the_least_recently_used_rows_go_first(tmp_path, silent):
    store = Store("m", tmp_path, limit=5)
    for index in range(5):
        store.put(f"k{index}", CHOICE)
    assert store.get("k0") == CHOICE  # used again, so k1 is now the oldest
    store.put("k5", CHOICE)
    store.put("k6", CHOICE)
    assert {row.key for row in store.rows()} == {"k0", "k3", "k4", "k5", "k6"}


def test_a_smaller_limit_cuts_a_store_that_is_too_large(tmp_path, silent):
    for index in range(9):
        Store("m", tmp_path).put(f"k{index}", CHOICE)
    Store("m", tmp_path, limit=3).put("new", CHOICE)
    assert [row.key for row in Store("m", tmp_path).rows()] == ["new", "k8", "k7"]


def test_reading_what_was_lately_used_writes_nothing(tmp_path, silent):
    store = Store("m", tmp_path)
    store.put("k", CHOICE)
    store.put("k2", CHOICE)
    before = (tmp_path / DATABASE).read_bytes()
    assert store.get("k") == CHOICE
    assert (tmp_path / DATABASE).read_bytes() == before


def test_clear(tmp_path, silent):
    store = Store("m", tmp_path)
    for index in range(3):
        store.put(f"k{index}", CHOICE)
    (tmp_path / f"{DATABASE}.aside-damaged").write_text("old")
    (tmp_path / "notes.txt").write_text("the user's own")
    assert store.clear() == 3
    assert store.get("k0") is None and store.rows() == []
    assert sorted(p.name for p in tmp_path.iterdir()) == ["notes.txt", LOCK, DATABASE]


# ---- damage ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("content", [b"not a database at all" * 100, b"SQLite format 3\0" + b"\xff" * 5000])
def test_a_file_that_is_no_database_is_put_aside(tmp_path, content):
    (tmp_path / DATABASE).write_bytes(content)
    store = Store("m", tmp_path)
    with pytest.warns(UserWarning, match="aside-damaged") as said:
        assert store.get("k") is None
        store.put("k", CHOICE)
        assert store.get("k") == CHOICE
    assert len(said) == 1
    assert (tmp_path / f"{DATABASE}.aside-damaged").read_bytes() == content
    assert Store("m", tmp_path).get("k") == CHOICE and intact(tmp_path)


@pytest.mark.parametrize("damage", ["truncated", "overwritten"])
def test_a_damaged_database_is_rebuilt(tmp_path, damage):
    store = Store("m", tmp_path)
    for index in range(200):
        store.put(f"k{index}", CHOICE)
    path = tmp_path / DATABASE
    content = path.read_bytes()
    assert len(content) > 20_000
    path.write_bytes(content[:5000] if damage == "truncated" else content[:4096] + b"\xa5" * (len(content) - 4096))
    with pytest.warns(UserWarning, match="aside-damaged") as said:
        store.put("new", CHOICE)
        assert store.get("new") == CHOICE and store.get("k3") is None
    assert len(said) == 1 and intact(tmp_path)


def test_an_empty_file_is_a_new_store(tmp_path, silent):
    (tmp_path / DATABASE).touch()
    Store("m", tmp_path).put("k", CHOICE)
    assert Store("m", tmp_path).get("k") == CHOICE


@pytest.mark.parametrize("version", [SCHEMA - 1, SCHEMA + 1, 99])
def test_another_schema_is_put_aside_whole(tmp_path, version):
    with open_raw(tmp_path) as database:
        database.execute("CREATE TABLE choices (other TEXT)")
        database.execute("INSERT INTO choices VALUES ('precious')")
        database.execute(f"PRAGMA user_version = {version}")
    with pytest.warns(UserWarning, match=f"schema is {version}"):
        Store("m", tmp_path).put("k", CHOICE)
    assert Store("m", tmp_path).get("k") == CHOICE
    with closing(sqlite3.connect(tmp_path / f"{DATABASE}.aside-schema")) as database:
        assert database.execute("SELECT other FROM choices").fetchall() == [("precious",)]


def test_the_right_version_without_the_table_is_put_aside(tmp_path):
    with open_raw(tmp_path) as database:
        database.execute(f"PRAGMA user_version = {SCHEMA}")
        database.execute("CREATE TABLE something (x)")
    with pytest.warns(UserWarning, match="no such table"):
        assert Store("m", tmp_path).get("k") is None
    Store("m", tmp_path).put("k", CHOICE)
    assert Store("m", tmp_path).get("k") == CHOICE


def test_journals_go_aside_with_their_file(tmp_path):
    """Another version, with a write-ahead log, has the file open and its rows still in the log."""
    with open_raw(tmp_path) as database:
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("PRAGMA user_version = 99")
        database.execute("CREATE TABLE choices (other TEXT)")
        database.execute("INSERT INTO choices VALUES ('precious')")
        with pytest.warns(UserWarning, match="schema is 99"):
            Store("m", tmp_path).put("k", CHOICE)
        assert sorted(p.name for p in tmp_path.glob(f"{DATABASE}*")) == [
            DATABASE,
            *(f"{DATABASE}.aside-schema{ending}" for ending in ("", "-shm", "-wal")),
        ]
        with closing(sqlite3.connect(tmp_path / f"{DATABASE}.aside-schema")) as aside:
            assert aside.execute("SELECT other FROM choices").fetchall() == [("precious",)]
    assert Store("m", tmp_path).get("k") == CHOICE and intact(tmp_path)


BAD_ROWS = [
    "",
    "{",
    "null",
    "[]",
    "{}",
    '{"winner": "a", "seconds": 1.0}',
    '{"winner": 3, "seconds": 1.0, "candidates": []}',
    '{"winner": "a", "seconds": "1", "candidates": []}',
    '{"winner": "a", "seconds": true, "candidates": []}',
    '{"winner": "a", "seconds": NaN, "candidates": []}',
    '{"winner": "a", "seconds": 1' + "0" * 400 + ', "candidates": []}',
    '{"winner": "a", "seconds": 1.0, "candidates": {}}',
    '{"winner": "a", "seconds": 1.0, "candidates": [["a", 1.0]]}',
    '{"winner": "a", "seconds": 1.0, "candidates": ["abc"]}',
    '{"winner": "a", "seconds": 1.0, "candidates": [["a", 1.0, null]]}',
    '{"winner": "a", "seconds": 1.0, "candidates": [["a", 1.0, "wrong"]]}',
    "[" * 100_000,
    b'{"winner": "\xff", "seconds": 1.0, "candidates": []}',
    '{"winner": "a", "seconds": 1.0, "candidates": [], "versions": ["a"]}',
    '{"winner": "a", "seconds": 1.0, "candidates": [], "whole": 1}',
    5,
]


@pytest.mark.parametrize("bad", BAD_ROWS, ids=lambda bad: str(bad)[:60])
def test_a_bad_row_counts_as_absent_and_is_deleted(tmp_path, bad):
    store = Store("m", tmp_path)
    store.put("good", CHOICE)
    store.put("bad", CHOICE)
    with open_raw(tmp_path) as database:
        assert database.execute("UPDATE choices SET choice = ? WHERE key = 'bad'", (bad,)).rowcount == 1
    assert [row.key for row in store.rows()] == ["good"]
    with pytest.warns(UserWarning, match="damaged choice"):
        assert store.get("bad") is None
    with open_raw(tmp_path) as database:
        assert database.execute("SELECT key FROM choices").fetchall() == [("good",)]
    assert store.get("good") == CHOICE


@pytest.mark.parametrize(
    ("column", "value"), [("key", "other"), ("machine", "other"), ("machine", None), ("used", "x")]
)
def test_a_row_with_another_bad_column(tmp_path, column, value):
    store = Store("m", tmp_path)
    store.put("k", CHOICE)
    with open_raw(tmp_path) as database:
        if value is None:
            value = b"\xff"  # no text at all
        assert database.execute(f"UPDATE choices SET {column} = ?", (value,)).rowcount == 1
    with pytest.warns(UserWarning, match="damaged choice"):
        assert store.get("k") is None
    assert store.rows() == []


def test_json_round_trip():
    assert from_json(to_json(CHOICE).encode()) == CHOICE


def test_a_removed_folder_is_made_again(tmp_path, silent):
    folder = tmp_path / "cache"
    store = Store("m", folder)
    store.put("k", CHOICE)
    name = digest("x")
    store.objects.write("so", name, b"1")
    shutil.rmtree(folder)
    assert store.get("k") is None and store.objects.read("so", name) is None
    store.put("k", CHOICE)
    store.objects.write("so", name, b"2")
    assert store.get("k") == CHOICE and store.objects.read("so", name) == b"2"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_a_mistake_of_ours_in_a_statement_is_not_hidden(tmp_path):
    store = Store("m", tmp_path)
    with pytest.warns(UserWarning, match="aside"), pytest.raises(sqlite3.OperationalError, match="no such column"):
        store._run(lambda database: database.execute("SELECT nonsense FROM choices"))


# ---- several processes -----------------------------------------------------------------------------------------------


def test_several_processes_write_at_once(tmp_path, silent):
    def work(name):
        store = Store("m", tmp_path, patience=60)
        for index in range(25):
            store.put(f"{name} {index}", Choice(f"{name}", float(index)))
            store.put("shared", Choice(f"{name}", float(index)))
            assert store.get(f"{name} {index}") == Choice(f"{name}", float(index))
            assert store.get("shared") is not None

    assert ended(*[forked(lambda name=name: work(name)) for name in range(4)]) == [0] * 4
    store = Store("m", tmp_path)
    assert len(store.rows()) == 4 * 25 + 1 and intact(tmp_path)
    assert all(
        store.get(f"{name} {index}") == Choice(f"{name}", float(index)) for name in range(4) for index in (0, 24)
    )


def test_several_processes_find_the_same_damage(tmp_path):
    """The file is put aside once: nobody puts aside the new one that another has begun."""
    (tmp_path / DATABASE).write_bytes(b"rubbish" * 1000)
    gate, opened = os.pipe()

    def work(name):
        warnings.filterwarnings("ignore", message=".*aside-damaged")
        os.close(opened)
        os.read(gate, 1)  # all begin when the parent closes the pipe
        store = Store("m", tmp_path, patience=60)
        for index in range(5):
            store.put(f"{name} {index}", CHOICE)

    children = [forked(lambda name=name: work(name)) for name in range(4)]
    os.close(opened)
    os.close(gate)
    assert ended(*children) == [0] * 4
    assert len(Store("m", tmp_path).rows()) == 20 and intact(tmp_path)
    assert (tmp_path / f"{DATABASE}.aside-damaged").read_bytes() == b"rubbish" * 1000


def test_a_process_killed_between_writes_loses_nothing_it_had_put(tmp_path, silent):
    reader, writer = os.pipe()

    def work():
        store = Store("m", tmp_path)
        for index in range(100_000):
            store.put(f"k{index}", Choice("w", float(index)))
            os.write(writer, b"%d\n" % index)

    child = forked(work)
    os.close(writer)
    with open(reader, "rb") as reports:
        done = [int(reports.readline()) for _ in range(20)]
        os.kill(child, signal.SIGKILL)
        done += [int(line) for line in reports]
    assert ended(child) == [-signal.SIGKILL]
    store = Store("m", tmp_path)
    assert done == list(range(len(done))) and 20 <= len(done) < 100_000
    assert all(store.get(f"k{index}") == Choice("w", float(index)) for index in done)
    assert intact(tmp_path)


def test_a_process_killed_in_the_middle_of_a_write_leaves_the_old_rows(tmp_path, silent):
    """Its pages are already in the file, and the journal beside it says what was there before."""
    store = Store("m", tmp_path)
    for index in range(100):
        store.put(f"k{index}", CHOICE)
    before = (tmp_path / DATABASE).read_bytes()

    def work():
        database = sqlite3.connect(tmp_path / DATABASE, isolation_level=None)
        database.execute("PRAGMA cache_size = 1")  # pages go to the file before the end
        database.execute("BEGIN IMMEDIATE")
        database.execute("UPDATE choices SET choice = 'half written', used = used + 1000")
        os.kill(os.getpid(), signal.SIGKILL)

    assert ended(forked(work)) == [-signal.SIGKILL]
    assert (tmp_path / f"{DATABASE}-journal").stat().st_size > 0
    assert (tmp_path / DATABASE).read_bytes() != before
    assert all(store.get(f"k{index}") == CHOICE for index in range(100))
    assert intact(tmp_path)


def test_a_locked_store_is_a_miss_and_keeps_for_this_process(tmp_path):
    store = Store("m", tmp_path, patience=0.01)
    store.put("k", CHOICE)
    with open_raw(tmp_path) as database:
        database.execute("BEGIN EXCLUSIVE")
        with pytest.warns(UserWarning, match="locked by another process") as said:
            assert store.get("k") is None
            store.put("new", CHOICE)
            assert store.get("new") == CHOICE
        assert len(said) == 1
        with pytest.raises(Unavailable):
            store.rows()
        database.execute("COMMIT")
    assert store.get("k") == CHOICE  # free again
    assert [row.key for row in store.rows()] == ["k"]
    store.put("new", CHOICE)
    assert {row.key for row in store.rows()} == {"k", "new"}


def test_a_store_that_is_stuck_is_waited_for_once(tmp_path, monkeypatch):
    """A compile asks for hundreds of regions; it must not wait for each."""
    store = Store("m", tmp_path, patience=0.01)
    store.put("k", CHOICE)
    waits = []
    connect = store_module.connect
    monkeypatch.setattr(store_module, "connect", lambda path, wait: waits.append(wait) or connect(path, wait))
    with open_raw(tmp_path) as database:
        database.execute("BEGIN EXCLUSIVE")
        with pytest.warns(UserWarning, match="locked"):
            for _ in range(3):
                assert store.get("k") is None
    assert store.get("k") == CHOICE and store.get("k") == CHOICE
    assert waits == [0.01, 0, 0, 0, 0.01]


def test_nobody_puts_a_file_aside_that_others_have_open(tmp_path):
    store = Store("m", tmp_path, patience=0.01)
    (tmp_path / DATABASE).write_bytes(b"rubbish" * 1000)
    with (
        store_module.locked(tmp_path / LOCK, 0, fcntl.LOCK_SH) as mine,
        pytest.warns(UserWarning, match="held by another process"),
    ):
        assert mine and store.get("k") is None
        assert (tmp_path / DATABASE).read_bytes() == b"rubbish" * 1000
    with pytest.warns(UserWarning, match="aside-damaged"):
        assert store.get("k") is None


def test_a_full_disk_is_one_warning_and_no_error(tmp_path):
    """A limit on the size of files makes every write beyond it fail, as a full disk does."""

    def work():
        store = Store("m", tmp_path)
        store.put("first", CHOICE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (16_384, 16_384))
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            for index in range(20):
                store.put(f"k{index}", Choice("w" * 5000, 1.0))
                assert store.get(f"k{index}") == Choice("w" * 5000, 1.0)
            path = store.objects.write("so", digest("x"), b"small")
            assert path.is_relative_to(tmp_path)
        texts = [str(w.message) for w in said]
        assert len(texts) == 1 and f"{tmp_path} cannot be written" in texts[0] and "cache --clear" in texts[0], texts
        assert store.get("first") == CHOICE

    Store("m", tmp_path).put("before", CHOICE)
    assert ended(forked(work)) == [0]
    rows = {row.key for row in Store("m", tmp_path).rows()}
    assert {"first", "before"} <= rows and "k19" not in rows and intact(tmp_path)


# ---- the machine -----------------------------------------------------------------------------------------------------


def test_fingerprint_of_this_cpu(monkeypatch):
    threads = torch.get_num_threads()
    text = fingerprint(torch.device("cpu"))
    assert f"torch {torch.__version__}" in text and f"{threads} threads" in text
    assert fingerprint(torch.device("cpu")) == text
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads + 1)
    assert fingerprint(torch.device("cpu")) != text


def test_fingerprint_follows_the_compiler(monkeypatch):
    versions = {"g++": "g++ 12.2", "clang++": "clang 17", "icpx": "Intel 2025"}
    monkeypatch.setattr(store_module, "tool_version", lambda command: versions.get(command[0]))
    for name, said in (("icpx", "Intel 2025"), ("clang++", "clang 17"), ("absent", "no compiler")):
        monkeypatch.setenv("CXX", name)
        assert said in fingerprint(torch.device("cpu"))
    monkeypatch.delenv("CXX")
    assert "g++ 12.2" in fingerprint(torch.device("cpu"))
    del versions["g++"]
    assert "clang 17" in fingerprint(torch.device("cpu"))
    del versions["clang++"]
    assert "no compiler" in fingerprint(torch.device("cpu"))


def test_fingerprint_of_a_gpu(monkeypatch):
    seen = SimpleNamespace(name="A GPU", major=9, minor=0, multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: seen)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91002)
    monkeypatch.setattr(store_module, "package_version", lambda name: None)
    text = fingerprint(torch.device("cuda", 0))
    assert text.startswith("A GPU, capability 9.0, 132 SMs, cudnn 91002, triton absent, torch ")
    monkeypatch.setattr(store_module, "package_version", lambda name: "3.6.0")
    assert "triton 3.6.0" in fingerprint(torch.device("cuda", 0))


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_fingerprint_of_this_gpu():
    assert fingerprint(torch.device("cuda")).startswith(torch.cuda.get_device_name())


# ---- objects ---------------------------------------------------------------------------------------------------------

NAME = digest("source", "flags")


def test_digest_tells_parts_apart():
    assert digest("ab", "c") != digest("a", "bc") != digest("abc")
    assert digest("é") == digest("é".encode())


@pytest.mark.parametrize("data", [b"", b"x", os.urandom(100_000), b"\n#pragma sha256 " + b"0" * 64 + b"\n"])
def test_an_object_comes_back(tmp_path, silent, data):
    objects = Objects(tmp_path)
    assert objects.read("so", NAME) is None and objects.find("so", NAME) is None
    path = objects.write("so", NAME, data)
    assert Objects(tmp_path).read("so", NAME) == data
    assert objects.find("so", NAME) == path == objects.path("so", NAME)
    assert objects.read("cpp", NAME) is None
    assert [p for p in tmp_path.rglob("*") if p.is_file()] == [path]


def test_files_and_folders_are_for_their_owner_alone(tmp_path):
    tmp_path.chmod(0o755)
    old = os.umask(0)
    try:
        with Objects(tmp_path).lock("so", NAME):
            path = Objects(tmp_path).write("so", NAME, b"x")
    finally:
        os.umask(old)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    for folder in (path.parent, path.parent.parent, tmp_path / OBJECTS):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700


@pytest.mark.parametrize(
    ("kind", "name"),
    [("so", "../../etc"), ("../x", NAME), ("so", NAME.upper()), ("so", "ab"), ("", NAME), ("So", NAME)],
)
def test_names_cannot_leave_the_folder(tmp_path, kind, name):
    with pytest.raises(ValueError, match="digest"):
        Objects(tmp_path).path(kind, name)


@pytest.mark.parametrize("damage", ["empty", "truncated", "flipped", "longer", "another's"])
def test_a_damaged_object_counts_as_absent_and_is_removed(tmp_path, damage):
    objects = Objects(tmp_path)
    data = os.urandom(1000)
    path = objects.write("so", NAME, data)
    content = path.read_bytes()
    other = objects.write("so", digest("other"), b"other").read_bytes()
    flipped = content[:500] + bytes([content[500] ^ 1]) + content[501:]
    changed = {
        "empty": b"",
        "truncated": content[:700],
        "flipped": flipped,
        "longer": content + b"x",
        "another's": other,
    }
    path.write_bytes(changed[damage])
    with pytest.warns(UserWarning, match="damaged") as said:
        assert objects.find("so", NAME) is None
        assert not path.exists()
        path.write_bytes(changed[damage])
        assert objects.read("so", NAME) is None
    assert len(said) == 1
    objects.write("so", NAME, data)
    assert objects.read("so", NAME) == data


def test_an_object_that_others_can_write_is_not_used(tmp_path):
    objects = Objects(tmp_path)
    path = objects.write("so", NAME, b"x")
    path.chmod(0o666)
    with pytest.warns(UserWarning, match="other users"):
        assert objects.read("so", NAME) is None
    assert not path.exists()


def test_a_folder_that_others_can_write_is_not_used(tmp_path):
    planted = Objects(tmp_path).write("so", NAME, b"planted")
    tmp_path.chmod(0o777)
    objects = Objects(tmp_path)
    with pytest.warns(UserWarning, match="chmod go-w") as said:
        assert objects.read("so", NAME) is None
        path = objects.write("so", NAME, b"own")
        assert objects.read("so", NAME) == b"own"
    assert len(said) == 1
    assert not path.is_relative_to(tmp_path) and planted.exists()
    assert stat.S_IMODE(objects.root.stat().st_mode) == 0o700


@pytest.mark.parametrize("inner", [False, True])
def test_a_folder_of_another_user_is_not_used(tmp_path, monkeypatch, inner):
    Objects(tmp_path).write("so", NAME, b"planted")
    if inner:
        (tmp_path / OBJECTS).chmod(0o770)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: tmp_path.stat().st_uid + 1)
    with pytest.warns(UserWarning, match="can be written by other users" if inner else "belongs to another user"):
        assert Objects(tmp_path).read("so", NAME) is None


def test_the_temporary_folder_goes_with_its_owner():
    objects = Objects(None)
    root = objects.write("so", NAME, b"x").parents[2]
    assert root.is_dir()
    del objects
    assert not root.exists()


def test_a_folder_that_stops_taking_objects(tmp_path):
    objects = Objects(tmp_path)
    objects.write("so", NAME, b"x")
    shutil.rmtree(tmp_path / OBJECTS)
    (tmp_path / OBJECTS).write_text("in the way")
    with pytest.warns(UserWarning, match="this process alone"):
        path = objects.write("so", NAME, b"y")
    assert objects.read("so", NAME) == b"y" and not path.is_relative_to(tmp_path)


def test_a_disk_that_fills_up_is_one_warning_for_all_who_use_the_folder(tmp_path, monkeypatch):
    """The store, its objects and those that the compiler opens anew for every build."""
    store, others = Store("m", tmp_path), [Objects(tmp_path) for _ in range(2)]

    def full(*_arguments, **_named):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(store_module, "connect", full)
    write = Objects._write
    monkeypatch.setattr(
        Objects, "_write", lambda self, path, data: full() if path.is_relative_to(tmp_path) else write(self, path, data)
    )
    with pytest.warns(UserWarning) as said:
        store.put("k", CHOICE)
        assert store.get("other") is None and store.get("k") == CHOICE
        for objects in (store.objects, *others):
            assert objects.write("so", NAME, b"x").is_file() and objects.read("so", NAME) == b"x"
    (text,) = [str(w.message) for w in said]
    assert f"{tmp_path} cannot be written (No space left on device)" in text
    assert "WHOLESTEP_CACHE" in text and "`wholestep cache --clear`" in text


def test_a_full_disk_can_be_cleared(tmp_path, monkeypatch):
    """Deleting rows would take room."""
    store = Store("m", tmp_path)
    store.put("k", CHOICE)
    connect = store_module.connect

    def full(path, wait):
        database = connect(path, wait)
        database.execute("PRAGMA query_only = ON")
        return database

    monkeypatch.setattr(store_module, "connect", full)
    assert store.clear() == 1 and not (tmp_path / DATABASE).exists()


def test_the_least_recently_used_objects_go_first(tmp_path, silent):
    objects = Objects(tmp_path, limit=4000)
    names = [digest(str(index)) for index in range(6)]
    for index in range(3):
        os.utime(objects.write("so", names[index], b"x" * 1000), ns=(index, index))
    assert objects.read("so", names[0]) is not None  # used again, so 1 is now the oldest
    objects.write("so", names[3], b"x" * 1000)
    assert [objects.path("so", name).exists() for name in names[:4]] == [True, False, True, True]
    objects.write("so", names[4], b"x" * 10_000)  # larger than the limit: the one just written stays
    assert [objects.path("so", name).exists() for name in names] == [False] * 4 + [True, False]


def test_files_of_others_in_the_folder_stay(tmp_path, silent):
    objects = Objects(tmp_path, limit=100)
    (tmp_path / OBJECTS / "so" / "ab").mkdir(parents=True)
    (tmp_path / OBJECTS).chmod(0o700)
    own = [tmp_path / OBJECTS / "notes.txt", tmp_path / OBJECTS / "so" / "ab" / "thesis.tex"]
    for path in own:
        path.write_bytes(b"x" * 1000)
    for index in range(3):
        objects.write("so", digest(str(index)), b"x" * 200)
    assert objects.clear()[0] == 1 and objects.sizes() == {}
    assert all(path.exists() for path in own)


def test_sizes(tmp_path, silent):
    objects = Objects(tmp_path)
    assert objects.sizes() == {}
    objects.write("so", NAME, b"x" * 10)
    objects.write("cpp", NAME, b"x" * 20)
    objects.write("cpp", digest("other"), b"x" * 30)
    seal = store_module.SEAL_LENGTH
    assert objects.sizes() == {"cpp": (2, 50 + 2 * seal), "so": (1, 10 + seal)}


def test_a_process_killed_while_it_writes_leaves_no_object(tmp_path, silent):
    def work():
        replace = os.replace
        os.replace = lambda *names: os.kill(os.getpid(), signal.SIGKILL) or replace(*names)
        Objects(tmp_path).write("so", NAME, b"x" * 1000)

    assert ended(forked(work)) == [-signal.SIGKILL]
    objects = Objects(tmp_path)
    assert objects.read("so", NAME) is None
    assert objects.clear()[0] == 1  # what it left


def test_processes_write_and_read_one_object_at_once(tmp_path, silent):
    """Every reader sees a whole object, whoever wrote it; nobody removes what another has just written."""

    def work(name):
        objects = Objects(tmp_path)
        for _ in range(40):
            objects.write("so", NAME, bytes([name]) * (50_000 + name))
            data = objects.read("so", NAME)
            assert data is not None and data == bytes([data[0]]) * (50_000 + data[0])

    assert ended(*[forked(lambda name=name: work(name)) for name in range(4)]) == [0] * 4


def test_two_processes_build_an_object_once(tmp_path, silent):
    log = tmp_path / "log"
    gate, opened = os.pipe()

    def work():
        os.close(opened)
        os.read(gate, 1)
        objects = Objects(tmp_path)
        with objects.lock("so", NAME) as mine:
            assert mine
            if objects.find("so", NAME) is None:
                with open(log, "a") as file:
                    file.write("built\n")
                objects.write("so", NAME, b"x")
        assert objects.read("so", NAME) == b"x"

    children = [forked(work) for _ in range(6)]
    os.close(opened)
    os.close(gate)
    assert ended(*children) == [0] * 6
    assert log.read_text() == "built\n"
    assert not list(tmp_path.rglob("*.lock"))


def held_by(work_folder: Path) -> tuple[int, int]:
    """A process that holds the lock until it is killed: its id, and a pipe that it writes to once it has it."""
    reader, writer = os.pipe()

    def work():
        with Objects(work_folder).lock("so", NAME) as mine:
            assert mine
            os.write(writer, b"x")
            signal.pause()

    child = forked(work)
    os.close(writer)
    return child, reader


def test_the_lock_of_a_dead_process_holds_nothing_up(tmp_path, silent):
    child, reader = held_by(tmp_path)
    assert os.read(reader, 1) == b"x"
    os.close(reader)
    objects = Objects(tmp_path)
    with objects.lock("so", NAME, patience=0) as mine:
        assert not mine  # it lives
    os.kill(child, signal.SIGKILL)
    assert ended(child) == [-signal.SIGKILL]
    assert list(tmp_path.rglob("*.lock"))  # the file is still there, and means nothing
    with objects.lock("so", NAME, patience=0) as mine:
        assert mine
    assert not list(tmp_path.rglob("*.lock"))


def test_different_objects_do_not_wait_for_each_other(tmp_path, silent):
    objects = Objects(tmp_path)
    with objects.lock("so", NAME, patience=0) as one, objects.lock("so", digest("other"), patience=0) as other:
        assert one and other


def test_the_lock_is_freed_by_an_error(tmp_path, silent):
    objects = Objects(tmp_path)
    with pytest.raises(ZeroDivisionError), objects.lock("so", NAME):
        raise ZeroDivisionError
    with objects.lock("so", NAME, patience=0) as mine:
        assert mine


def test_objects_are_used_from_their_path(tmp_path, silent):
    """The seal is in nobody's way: a source compiles, a library loads, a module is imported."""
    objects = Objects(tmp_path)
    module = objects.write("py", NAME, b"answer = 42")
    spec = importlib.util.spec_from_file_location("generated", module)
    imported = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(imported)
    assert imported.answer == 42
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler: only the module was tried")
    source = objects.write("cpp", NAME, b'extern "C" int answer() { return 43; }')
    built = tmp_path / "built.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", built, source], check=True)
    objects.write("so", NAME, built.read_bytes())
    assert ctypes.CDLL(str(objects.find("so", NAME))).answer() == 43
