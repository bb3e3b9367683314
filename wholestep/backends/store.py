"""What was measured on this machine, kept: which provider won a region, and the objects compiled for it.

`Store` is one SQLite file, a row per machine and region; `Objects` is a folder of files that carry their own checksum.
Neither stops a compile: what is damaged or locked counts as absent, what cannot be written is kept for this process,
and one warning per process says so. Every operation opens the database anew, so nothing is shared with threads or
forked processes.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import math
import os
import re
import shutil
import sqlite3
import tempfile
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any, TypeVar

import torch

from ..errors import InputError
from ..machine.cpu import cpu_field
from ..machine.describe import package_version, tool_version

#: of the table below; a file of another schema is put aside
SCHEMA = 1
DATABASE = "timings.sqlite"
LOCK = "timings.lock"
OBJECTS = "objects"
ROWS = 50_000
BYTES = 2_000_000_000
#: seconds that a compile waits for another process
PATIENCE = 5.0
PATIENCE_FOR_BUILDS = 120.0
#: what a user can do about a folder that takes nothing
MAKE_ROOM = "Try: set WHOLESTEP_CACHE to a folder that can be written, or make room with `wholestep cache --clear`"
#: what a disk says that takes nothing
NO_ROOM = tuple(os.strerror(number) for number in (errno.ENOSPC, errno.EDQUOT, errno.EROFS))

T = TypeVar("T")

TABLE = """
CREATE TABLE choices (
    id TEXT PRIMARY KEY,    -- hash of machine and key
    machine TEXT NOT NULL,  -- the fingerprint: device and versions
    key TEXT NOT NULL,      -- the region
    choice TEXT NOT NULL,   -- JSON
    used INTEGER NOT NULL   -- a counter: the least was used longest ago
)
"""
NEXT_USED = "(SELECT coalesce(max(used), 0) + 1 FROM choices)"


@dataclass(frozen=True)
class Timed:
    """A candidate: its time, or why it was excluded ("wrong", "crashed: ...")."""

    name: str
    seconds: float = math.inf
    why: str = ""


@dataclass(frozen=True)
class Choice:
    """Who won a region, how long it takes, and everybody who took part."""

    winner: str
    seconds: float
    candidates: list[Timed] = field(default_factory=list)
    #: seconds of the best of the first guesses: by these it is told which regions are worth trying in every way
    guessed: float = math.inf
    #: whether every way was tried, and not the best guesses alone
    whole: bool = False
    #: what the code of each competitor was, and why some did not take part
    versions: dict[str, str] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    #: the region in words, for people (`about.py`); "" in rows of before there were any
    about: str = ""

    @property
    def aten(self) -> float:
        """Seconds that ATen took; NaN where it was not timed."""
        return next((t.seconds for t in self.candidates if t.name == "aten:aten" and not t.why), math.nan)


@dataclass(frozen=True)
class Row:
    """A choice as it is listed."""

    machine: str
    key: str
    choice: Choice

    @property
    def texts(self) -> list[str]:
        """All that it can be found by."""
        choice = self.choice
        return [choice.about, choice.winner, *(c.name for c in choice.candidates), self.key, self.machine]


class Warner:
    """Warns once about each topic."""

    def __init__(self) -> None:
        self._said: set[str] = set()

    def __call__(self, topic: str, text: str) -> None:
        if topic not in self._said:
            self._said.add(topic)
            warnings.warn(text, stacklevel=3)


@cache
def warner_of(folder: Path | None) -> Warner:
    """One for all who use a folder: a compile opens it many times."""
    return Warner()


def say_unwritable(folder: Path, why: str) -> None:
    alone = "what is measured and compiled now is kept for this process alone"
    warner_of(folder)("unwritable", f"{folder} cannot be written ({why}): {alone}. {MAKE_ROOM}")


def lack_of_room(words: str) -> str:
    """What a compiler says of a disk that takes nothing; "" where it says something else."""
    return next((found for found in NO_ROOM if found in words), "")


def say_not_built(folder: Path | None, why: str) -> None:
    """The same warning, where compilers could not write: there, or to other folders of theirs."""
    where = "the cache folder" if folder is None else folder
    others = f"{where}, TRITON_CACHE_DIR or the folder for temporary files takes nothing"
    warner_of(folder)("unwritable", f"kernels were not built ({why}), and slower ones run: {others}. {MAKE_ROOM}")


class Unavailable(InputError):
    """The database is locked by another process, or cannot be read or written."""


class Unwritable(Unavailable):
    """The folder takes nothing: the disk is full, or it may only be read."""

    def __init__(self, folder: Path, why: str):
        super().__init__(f"{folder} cannot be written ({why}). {MAKE_ROOM}")
        self.folder, self.why = folder, why


class OtherSchema(Exception):
    """The file was written by another version of Wholestep, or by something else."""


def cache_folder(environment: Mapping[str, str] = os.environ) -> Path:
    """$WHOLESTEP_CACHE, else $XDG_CACHE_HOME/wholestep, else ~/.cache/wholestep."""
    try:
        if own := environment.get("WHOLESTEP_CACHE"):
            return Path(own).expanduser().absolute()
        shared = Path(environment.get("XDG_CACHE_HOME", ""))
        if shared.is_absolute():  # a relative one is to be ignored, says its specification
            return shared / "wholestep"
        return Path("~/.cache/wholestep").expanduser()
    except RuntimeError as error:  # this user has no home
        raise InputError(f"there is no cache folder ({error}). Try: set WHOLESTEP_CACHE to one") from None


def why_unwritable(folder: Path) -> str:
    """Makes the folder, for its owner alone, where it is not there. "" if it can be written, else why not."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return ""
    except OSError as error:
        return error.strerror or str(error)


def usable_folder(folder: Path | None = None) -> Path | None:
    """The cache folder, or another, where it can be written; None, with a warning, where it cannot."""
    try:
        found = cache_folder() if folder is None else folder
    except InputError as error:
        warner_of(None)("absent", f"what is measured and compiled now is kept for this process alone: {error}")
        return None
    if why := why_unwritable(found):
        say_unwritable(found, why)
        return None
    return found


def why_unsafe(folder: Path) -> str:
    """Why native code from this folder must not be loaded; "" if it may."""
    status = folder.stat()
    if status.st_uid != os.geteuid():
        return f"{folder} belongs to another user"
    if status.st_mode & 0o022:
        return f"{folder} can be written by other users (try: chmod go-w {folder})"
    return ""


def fingerprint(device: torch.device) -> str:
    """The device, and the versions of all that makes its kernels: times and choices hold for these alone."""
    if device.type == "cuda":
        seen = torch.cuda.get_device_properties(device)
        parts = [seen.name, f"capability {seen.major}.{seen.minor}", f"{seen.multi_processor_count} SMs"]
        parts += [f"cudnn {torch.backends.cudnn.version()}", f"triton {package_version('triton') or 'absent'}"]
    elif device.type == "cpu":
        parts = [cpu_field("model name") or "CPU", f"{torch.get_num_threads()} threads"]
        named = os.environ.get("CXX")  # (as `cpp/compiler.py` finds one)
        compilers = (tool_version([tool, "--version"]) for tool in ([named] if named else ["g++", "clang++"]))
        parts += [torch.backends.cpu.get_cpu_capability(), next(filter(None, compilers), "no compiler")]
    else:
        parts = [device.type]
    return ", ".join([*parts, f"torch {torch.__version__}"])


def digest(*parts: str | bytes) -> str:
    """The name of an object: a hash of everything it is made from."""
    made = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        made.update(len(data).to_bytes(8, "little"))  # so that ("ab", "c") is not ("a", "bc")
        made.update(data)
    return made.hexdigest()


class Store:
    """Measured choices of one machine, given by its fingerprint. `objects` is the folder of what was compiled."""

    def __init__(
        self,
        machine: str,
        folder: Path | None = None,
        *,
        limit: int = ROWS,
        object_bytes: int = BYTES,
        patience: float = PATIENCE,
    ):
        self.machine, self.limit, self.patience = machine, limit, patience
        self.folder = usable_folder(folder)  # None where everything is kept in memory
        self._unwritten: dict[str, Choice] = {}  # what the file could not take
        self._stuck = False  # the last operation waited in vain: the next one does not wait
        self._say = warner_of(self.folder)
        self.objects = Objects(self.folder, limit=object_bytes)

    def get(self, key: str) -> Choice | None:
        """What was chosen for this region on this machine, or None."""
        if self.folder is None or key in self._unwritten:
            return self._unwritten.get(key)
        try:
            found = self._run(lambda database: self._select(database, key))
        except Unavailable as error:
            self._complain(error, "regions are timed again")
            return None
        if found is None:
            return None
        choice, stale = found
        if stale:
            with suppress(Unavailable):  # others are writing: only the order of removal will be less good
                self._run(lambda database: self._touch(database, key), patience=0)
        return choice

    def put(self, key: str, choice: Choice) -> None:
        """Keeps a choice in place of an older one, and lets the least recently used go beyond `limit` rows."""
        text = to_json(choice)
        if self.folder is None:
            self._unwritten[key] = choice
            return
        try:
            self._run(lambda database: self._insert(database, key, text))
            self._unwritten.pop(key, None)
        except Unavailable as error:
            self._unwritten[key] = choice
            self._complain(error, "what is measured now is kept for this process alone")

    def _complain(self, error: Unavailable, then: str) -> None:
        if isinstance(error, Unwritable):
            say_unwritable(error.folder, error.why)
        else:
            self._say("unavailable", f"{error}; {then}")

    def is_empty(self) -> bool:
        """Whether nothing is known of this machine; False where that cannot be told."""
        if self.folder is None:
            return not self._unwritten
        query = "SELECT 1 FROM choices WHERE machine = ? LIMIT 1"
        try:
            return self._run(lambda database: database.execute(query, (self.machine,)).fetchone() is None)
        except Unavailable:
            return False

    def rows(self) -> list[Row]:
        """Every choice of every machine, the last used first; raises Unavailable where it cannot be read."""

        def select(database: sqlite3.Connection) -> list[Row]:
            found = []
            for machine, key, text in database.execute("SELECT machine, key, choice FROM choices ORDER BY used DESC"):
                try:
                    found.append(Row(machine.decode(), key.decode(), from_json(text)))
                except (ValueError, AttributeError):
                    continue  # counts as absent; `get` deletes it
            return found

        return self._run(select) if self.folder is not None and (self.folder / DATABASE).exists() else []

    def clear(self) -> int:
        """Removes every row, and files that were put aside. The number of rows; Unavailable where it is locked."""
        if self.folder is None:
            return 0
        path, count = self.folder / DATABASE, 0

        def delete(database: sqlite3.Connection) -> None:
            nonlocal count
            count = int(database.execute("SELECT count(*) FROM choices").fetchone()[0])
            with database:
                database.execute("BEGIN IMMEDIATE")
                count = database.execute("DELETE FROM choices").rowcount
            database.execute("VACUUM")

        try:
            if path.exists():
                try:
                    self._run(delete)
                except Unwritable:  # deleting rows takes room, of which a full disk has none: the file goes as a whole
                    with self._locked(fcntl.LOCK_EX, self.patience):
                        for name in ("-journal", "-wal", "-shm", ""):
                            Path(f"{path}{name}").unlink(missing_ok=True)
            for aside in self.folder.glob(f"{DATABASE}.aside-*"):
                aside.unlink(missing_ok=True)
        except OSError as error:
            raise Unwritable(self.folder, error.strerror or str(error)) from None
        return count

    # ---- statements --------------------------------------------------------------------------------------------------

    def _select(self, database: sqlite3.Connection, key: str) -> tuple[Choice, bool] | None:
        """A row's choice, and whether its place in the order of use is out of date. A bad row is deleted."""
        row = row_id(self.machine, key)
        statement = "SELECT machine, key, choice, used, (SELECT max(used) FROM choices) FROM choices WHERE id = ?"
        for machine, region, text, used, newest in database.execute(statement, (row,)).fetchall():
            try:
                if (machine, region) != (self.machine.encode(), key.encode()):
                    raise ValueError("it is of another region or machine")
                # a row among the last used is in no danger, so reading it again and again writes nothing
                return from_json(text), used + self.limit // 10 < newest
            except (ValueError, TypeError) as error:
                self._say("row", f"{self.folder}: a damaged choice was removed ({error}); its region is timed again")
                with database:
                    database.execute("BEGIN IMMEDIATE")
                    database.execute("DELETE FROM choices WHERE id = ?", (row,))
        return None

    def _touch(self, database: sqlite3.Connection, key: str) -> None:
        with database:
            database.execute("BEGIN IMMEDIATE")
            database.execute(f"UPDATE choices SET used = {NEXT_USED} WHERE id = ?", (row_id(self.machine, key),))

    def _insert(self, database: sqlite3.Connection, key: str, text: str) -> None:
        with database:
            database.execute("BEGIN IMMEDIATE")
            database.execute(
                f"INSERT OR REPLACE INTO choices VALUES (?, ?, ?, ?, {NEXT_USED})",
                (row_id(self.machine, key), self.machine, key, text),
            )
            beyond = database.execute("SELECT count(*) FROM choices").fetchone()[0] - self.limit
            if beyond > 0:
                oldest = "SELECT id FROM choices ORDER BY used LIMIT ?"
                database.execute(f"DELETE FROM choices WHERE id IN ({oldest})", (beyond,))

    # ---- the file ----------------------------------------------------------------------------------------------------

    def _run(self, operation: Callable[[sqlite3.Connection], T], patience: float | None = None) -> T:
        """Runs an operation on the database. Once one has waited in vain, the next do not wait until one succeeds."""
        try:
            result = self._attempt(operation, 0.0 if self._stuck else self.patience if patience is None else patience)
        except Unavailable:
            self._stuck = self._stuck or patience is None
            raise
        self._stuck = False
        return result

    def _attempt(self, operation: Callable[[sqlite3.Connection], T], wait: float) -> T:
        """Runs an operation on the database, which is made where it is absent and made anew where it is no good."""
        assert self.folder is not None
        path = self.folder / DATABASE
        for last in (False, False, True):
            inode = inode_of(path)
            try:
                self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                with self._locked(fcntl.LOCK_SH, wait), closing(connect(path, wait)) as database:
                    prepare(database)
                    return operation(database)
            except OtherSchema as error:
                kind, problem = "schema", str(error)
            except sqlite3.DatabaseError as error:
                code = getattr(error, "sqlite_errorcode", 0) & 0xFF
                if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
                    raise Unavailable(f"{path} is locked by another process (waited {wait:g} s)") from None
                # SQLITE_ERROR: a table or column is not there. On a fresh file that is a mistake of ours, and raised.
                if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR) and not last:
                    kind, problem = "damaged", str(error)
                elif code != sqlite3.SQLITE_ERROR and isinstance(error, sqlite3.OperationalError):
                    raise Unwritable(self.folder, str(error)) from None
                else:
                    raise
            except OSError as error:
                raise Unwritable(self.folder, error.strerror or str(error)) from None
            self._put_aside(path, inode, kind, problem, wait)
        raise Unavailable(f"{path} is replaced again and again by another version of Wholestep")

    def _put_aside(self, path: Path, inode: int | None, kind: str, problem: str, wait: float) -> None:
        """Renames a file that is no good, once if several processes want to. Its journals go first: they must never
        be applied to the file that comes after it."""
        aside = f"{path}.aside-{kind}"
        with self._locked(fcntl.LOCK_EX, wait):
            if inode is None or inode != inode_of(path):
                return
            try:
                for journal in ("-journal", "-wal", "-shm"):
                    if os.path.exists(f"{path}{journal}"):
                        os.replace(f"{path}{journal}", f"{aside}{journal}")
                os.replace(path, aside)
            except OSError as error:
                raise Unavailable(f"{path} is no good ({problem}) and cannot be renamed: {error}") from None
        self._say("aside", f"{path} cannot be used ({problem}): it is now {Path(aside).name}, and a new one is begun")

    @contextmanager
    def _locked(self, how: int, patience: float) -> Iterator[None]:
        """Shared by all who have the database open, had alone by one who puts it aside: SQLite finds journals by name,
        and whoever still had the old file open would take the new file's journal for its own."""
        assert self.folder is not None
        with locked(self.folder / LOCK, patience, how) as mine:
            if not mine:
                why = f"is held by another process (waited {patience:g} s), or its file system has no locks"
                raise Unavailable(f"{self.folder / LOCK} {why}")
            yield


def connect(path: Path, patience: float) -> sqlite3.Connection:
    return sqlite3.connect(path, timeout=patience, isolation_level=None)


def prepare(database: sqlite3.Connection) -> None:
    """Checks the schema and makes the table in a new file. Raises OtherSchema.

    The journal is SQLite's default one, which is safe on home folders mounted over a network, where a write-ahead log
    is not. Nothing waits for the disk: a killed process loses nothing; what a power cut damages is noticed and redone.
    """
    database.text_factory = bytes  # damaged text must fail where it is understood, not where it is fetched
    database.execute("PRAGMA synchronous = OFF")
    if database.execute("PRAGMA user_version").fetchone()[0] == SCHEMA:
        return
    with database:
        database.execute("BEGIN IMMEDIATE")
        version = database.execute("PRAGMA user_version").fetchone()[0]
        if version == SCHEMA:  # another process was quicker
            return
        if version or database.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
            raise OtherSchema(f"its schema is {version}, this version of Wholestep has {SCHEMA}")
        database.execute(TABLE)
        database.execute("CREATE INDEX by_use ON choices (used)")
        database.execute(f"PRAGMA user_version = {SCHEMA}")


def row_id(machine: str, key: str) -> str:
    return digest(machine, key)


def inode_of(path: Path) -> int | None:
    try:
        return path.stat().st_ino
    except OSError:
        return None


def to_json(choice: Choice) -> str:
    """A choice as JSON; ValueError if it could not be read back."""
    candidates = [[c.name, None if c.seconds == math.inf else c.seconds, c.why] for c in choice.candidates]
    guessed = None if choice.guessed == math.inf else choice.guessed
    content = {"winner": choice.winner, "seconds": choice.seconds, "candidates": candidates, "guessed": guessed}
    content |= {"whole": choice.whole, "versions": choice.versions, "refused": choice.refused, "about": choice.about}
    text = json.dumps(content)
    from_json(text.encode())
    return text


def from_json(text: Any) -> Choice:
    """A choice from what a row holds; ValueError if it is not one, or names a winner that did not run."""
    try:
        given = json.loads(text)
        winner, seconds, candidates = given["winner"], given["seconds"], given["candidates"]
        if not isinstance(winner, str) or not winner or not isinstance(candidates, list):
            raise ValueError("no winner or no candidates")
        timed = [Timed(text_in(n), math.inf if s is None else number_in(s), text_in(w)) for n, s, w in candidates]
        if timed and not any(c.name == winner and not c.why for c in timed):
            raise ValueError(f"the winner {winner!r} is none of the candidates that ran")
        guessed, whole = given.get("guessed"), given.get("whole", False)
        if not isinstance(whole, bool):
            raise ValueError(f"{whole!r} is neither true nor false")
        texts = [{text_in(k): text_in(v) for k, v in given.get(n, {}).items()} for n in ("versions", "refused")]
        first = math.inf if guessed is None else number_in(guessed)
        about = text_in(given.get("about", ""))
        return Choice(winner, number_in(seconds), timed, first, whole, texts[0], texts[1], about)
    except (
        AttributeError,
        TypeError,
        KeyError,
        OverflowError,
        RecursionError,
    ) as error:  # a ValueError goes on as it is
        raise ValueError(f"not a choice: {type(error).__name__} {error}") from None


def text_in(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is not text")
    return value


def number_in(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise ValueError(f"{value!r} is not a time in seconds")
    return float(value)


# ---- objects ---------------------------------------------------------------------------------------------------------

#: the last line of every object. A comment in Python, ignored by C++ compilers, and out of the way in a shared library
SEAL = b"\n#pragma sha256 %s\n"
SEAL_LENGTH = len(SEAL % (b"0" * 64))
KIND = re.compile(r"[a-z][a-z0-9_]*")
DIGEST = re.compile(r"[0-9a-f]{16,128}")
OURS = re.compile(r"[0-9a-f]{16,128}\.[a-z][a-z0-9_]*|\.new-\w+")


class Objects:
    """Generated sources and compiled objects, by kind (how the file's name ends: "cpp", "so", "py") and digest.

    Without a folder, or in one that others could write to, they live in a temporary folder of this process.
    A path may vanish when another process makes room: whoever cannot open it builds again.
    """

    def __init__(self, folder: Path | None = None, *, limit: int = BYTES):
        self._folder, self.limit = folder, limit
        self._say = warner_of(folder)
        self._until_scan = 0  # bytes that may be written before sizes are looked at again

    @cached_property
    def root(self) -> Path:
        if self._folder is not None:
            root = self._folder / OBJECTS
            try:
                root.mkdir(mode=0o700, exist_ok=True)
                unsafe = why_unsafe(self._folder) or why_unsafe(root)
                if not unsafe:
                    return root
                self._say("unsafe", f"{unsafe}: compiled objects are not kept there, and each process builds its own")
            except OSError as error:
                say_unwritable(self._folder, error.strerror or str(error))
        return self._temporary

    @cached_property
    def _temporary(self) -> Path:
        """For its owner alone; goes with this object."""
        made = tempfile.mkdtemp(prefix="wholestep-")
        weakref.finalize(self, shutil.rmtree, made, ignore_errors=True)
        return Path(made)

    def path(self, kind: str, digest: str) -> Path:
        """Where the object is or would be."""
        if not KIND.fullmatch(kind) or not DIGEST.fullmatch(digest):
            raise ValueError(f"{kind!r}, {digest!r}: not a kind in small letters and a digest in hex")
        return self.root / kind / digest[:2] / f"{digest}.{kind}"

    def find(self, kind: str, digest: str) -> Path | None:
        """The path of an object that is whole, to be compiled, imported or loaded from there; None if there is none."""
        return None if self.read(kind, digest) is None else self.path(kind, digest)

    def read(self, kind: str, digest: str) -> bytes | None:
        """What was written; None if it is absent. A damaged object is removed and counts as absent."""
        path = self.path(kind, digest)
        try:
            with open(path, "rb") as file:
                status, content = os.fstat(file.fileno()), file.read()
                data = content[:-SEAL_LENGTH]
                sealed = content[len(data) :] == seal_of(kind, digest, data)
                own = status.st_uid == os.geteuid() and not status.st_mode & 0o022
                if sealed and own:
                    os.utime(file.fileno())
                    return data
        except FileNotFoundError:
            return None
        except OSError as error:
            self._say("unreadable", f"{path} cannot be read ({error.strerror or error}): it is built again")
            return None
        why = "other users could have written it" if sealed else "it is damaged"
        self._say(why, f"{path} is removed and built again: {why}")
        if inode_of(path) == status.st_ino:  # else another process has written it anew
            path.unlink(missing_ok=True)
        return None

    def write(self, kind: str, digest: str, data: bytes) -> Path:
        """Writes an object, whole or not at all. Where the folder cannot take it, it goes to a temporary one."""
        path = self.path(kind, digest)
        try:
            return self._write(path, data + seal_of(kind, digest, data))
        except OSError as error:
            if path.is_relative_to(self._temporary):
                raise
            say_unwritable(path.parents[3], error.strerror or str(error))
            self._folder = None
            self.__dict__.pop("root", None)  # (another thread may have been quicker)
            return self.write(kind, digest, data)

    @contextmanager
    def lock(self, kind: str, digest: str, patience: float = PATIENCE_FOR_BUILDS) -> Iterator[bool]:
        """Held while an object is built, so that others wait and then find it. Not to be taken twice by one thread.

        Gives False, and the caller builds for itself, where the lock could not be had. A dead process holds nothing.
        """
        path = self.path(kind, digest)
        with suppress(OSError):  # then there is no lock, and `write` will say why
            self._make_folders(path)
        with locked(path.with_name(f"{path.name}.lock"), patience, remove=True) as mine:
            yield mine

    def sizes(self) -> dict[str, tuple[int, int]]:
        """By kind: how many objects, and their bytes."""
        found: dict[str, tuple[int, int]] = {}
        for _, size, path in self._files():
            kind = path.parent.parent.name
            count, total = found.get(kind, (0, 0))
            found[kind] = count + 1, total + size
        return dict(sorted(found.items()))

    def clear(self) -> tuple[int, int]:
        """Removes every object: how many, and their bytes."""
        files = self._files()
        for _, _, path in files:
            path.unlink(missing_ok=True)
        return len(files), sum(size for _, size, _ in files)

    def _write(self, path: Path, content: bytes) -> Path:
        self._make_folders(path)
        handle, name = tempfile.mkstemp(prefix=".new-", dir=path.parent)
        try:
            with open(handle, "wb") as file:
                file.write(content)
            os.replace(name, path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
        self._until_scan -= len(content)
        if self._until_scan < 0:
            self._make_room(path)
        return path

    def _make_folders(self, path: Path) -> None:
        """The folders of an object, each for its owner alone."""
        for folder in reversed(path.parents[:4]):  # the cache's, the objects', the kind's and the digest's
            folder.mkdir(mode=0o700, exist_ok=True)

    def _make_room(self, keep: Path) -> None:
        """Removes the least recently used beyond `limit` bytes."""
        files = sorted(self._files())
        total = sum(size for _, size, _ in files)
        for _, size, path in files:
            if total <= self.limit:
                break
            if path != keep:
                path.unlink(missing_ok=True)
                total -= size
        self._until_scan = self.limit // 64

    def _files(self) -> list[tuple[int, int, Path]]:
        """(time of last use, bytes, path) of every file of ours, among them what a killed process left half written."""
        found = []
        for path in self.root.glob("*/??/*"):
            if OURS.fullmatch(path.name):
                try:
                    status = path.stat()
                except FileNotFoundError:
                    continue  # another process has removed it
                found.append((status.st_mtime_ns, status.st_size, path))
        return found


def seal_of(kind: str, name: str, data: bytes) -> bytes:
    """The checksum also covers the name: an object moved to another's place is no good there."""
    return SEAL % digest(kind, name, data).encode()


@contextmanager
def locked(path: Path, patience: float, how: int = fcntl.LOCK_EX, remove: bool = False) -> Iterator[bool]:
    """A lock among processes; False where it was not free within so many seconds. The kernel frees it at a death."""
    handle = acquire(path, patience, how)
    try:
        yield handle is not None
    finally:
        if handle is not None:
            try:
                if remove:  # while it is held: whoever waits sees that the file is gone, and opens anew
                    path.unlink(missing_ok=True)
            finally:
                os.close(handle)


def acquire(path: Path, patience: float, how: int) -> int | None:
    """An open file that holds the lock, or None."""
    end = time.monotonic() + patience
    while True:
        try:
            handle = os.open(path, os.O_CREAT | os.O_RDWR, 0o600)
        except OSError:
            return None  # a folder that cannot be written
        try:
            fcntl.flock(handle, how | fcntl.LOCK_NB)
            if os.fstat(handle).st_ino == inode_of(path):
                return handle
            os.close(handle)  # the one before us has removed it
        except BlockingIOError:
            os.close(handle)
            if time.monotonic() >= end:
                return None
            time.sleep(0.02)
        except OSError:
            os.close(handle)
            return None  # a file system without locks
