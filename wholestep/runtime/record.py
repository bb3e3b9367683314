"""What tables, lists and tensors were, and whether they still are: asked on every step, so it is one call of C++.

The call compares everything with what it wrote down before. After a long step none of it is in the caches any more, so
what is written down lies side by side, knows where it must look, and is looked at in the order of memory. It needs no
header: Python and torch tell where their functions are. Where there is no compiler, Python looks: the same answers, at
more host time.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple, Protocol

import torch

from ..backends.cpp.compiler import Compiler, build_all, digest, working_compiler
from ..errors import InputError
from ..torch_private import place_of_tensor, tensor_functions, version_of
from .places import Places, changes, place_of_tag, places_in_tensors
from .record_source import SOURCE, WATCH


class Record(Protocol):
    """Something that was written down."""

    def same(self) -> bool:
        """Whether all is as it was written down, for sure."""

    def keep(self) -> None:
        """Writes down how it is now."""


def pointers(names: str) -> tuple[tuple[str, Any], ...]:
    return tuple((name, ctypes.c_void_p) for name in names.split())


def longs(names: str) -> tuple[tuple[str, Any], ...]:
    return tuple((name, ctypes.c_long) for name in names.split())


class Walk(ctypes.Structure):
    """The argument of the call: functions, how many of what, and where they are."""

    _fields_ = (
        *pointers("next length item address dimensions strides version trains"),
        *longs("inside tag keep count tagged tables lists placed laid trained counted"),
        *longs("storage data form meta flag counter version_in_counter"),
        *pointers("tags table list place lie train number words"),
        *pointers("seen forms known counts far asked"),
        *longs("form_count known_count far_count asked_count"),
        *pointers("told"),
        *longs("heard"),
    )


@dataclass(frozen=True)
class Subjects:
    """What a record is of: members of tables and lists, by identity, and some properties of tensors."""

    #: tables of which only Python's own count of changes is looked at, where it keeps one
    tagged: Sequence[dict[Any, Any]] = ()
    #: whether those are many and hardly ever change: then Python is to tell, where it can, and none need be looked at
    quiet: bool = False
    tables: Sequence[dict[Any, Any]] = ()
    lists: Sequence[list[Any]] = ()
    #: tensors whose address counts, or address and strides, or whether they train, or how often they were written
    placed: Sequence[torch.Tensor] = ()
    laid: Sequence[torch.Tensor] = ()
    trained: Sequence[torch.Tensor] = ()
    counted: Sequence[torch.Tensor] = ()

    def groups(self) -> list[tuple[Any, ...]]:
        of = (self.tagged, self.tables, self.lists, self.placed, self.laid, self.trained, self.counted)
        return list(map(tuple, of))

    def members(self) -> list[Any]:
        """The members now. Who holds them knows that an address stays the object's it was."""
        return [*map(dict, self.tables), *map(list, self.lists)]


class NativeRecord:
    """A record that C++ walks."""

    def __init__(self, walker: Walker, of: Subjects) -> None:
        self._call, self._of = walker.call, of
        groups = self._groups = of.groups()  # held, so that none of them goes while its address is kept
        self._arrays = [(ctypes.c_void_p * len(group))(*map(id, group)) for group in groups]
        told = walker.watch.told if of.quiet and walker.watch is not None else None
        if of.quiet and walker.watch is not None:
            walker.watch.over(of.tagged)
        placed, laid, trained, counted = map(len, groups[3:])
        words = (6 * (placed + laid), 6 * (laid + 1), 3 * trained, 4 * counted, laid, trained)
        self._written = [(ctypes.c_int64 * count)() for count in words]
        where = [ctypes.addressof(array) for array in self._arrays], [ctypes.addressof(a) for a in self._written]
        known = (*walker.functions, walker.inside, walker.tag, 0, 0, *map(len, groups), *walker.places)
        self._walk = Walk(*known, *where[0], None, *where[1], 0, 0, 0, 0, told, 0)
        #: where C++ finds it, for as long as this is held
        self.at, self._words = ctypes.addressof(self._walk), (ctypes.c_int64 * 0)()
        #: whether all of it can be read: else it is never the same
        self.readable = False
        self.keep()

    def keep(self) -> None:
        walk = self._walk
        self._members = self._of.members()
        walk.words = None
        readable = self._call(self.at) != 0 and (walk.tag > 0 or not walk.tagged)
        if walk.count not in (-1, len(self._words)):
            self._words = (ctypes.c_int64 * walk.count)()
        walk.words, walk.keep = ctypes.addressof(self._words), 1
        self.readable = readable and self._call(self.at) != 0
        walk.keep = 0

    def same(self) -> bool:
        return self.readable and self._call(self.at) != 0


class PlainRecord:
    """The same without C++."""

    def __init__(self, of: Subjects) -> None:
        self._of = of
        self.keep()

    def _look(self) -> list[list[Any]]:
        of = self._of
        return [
            [list(map(id, part)) for table in of.tables for part in (table, table.values())],
            [list(map(id, each)) for each in of.lists],
            [t.data_ptr() for t in of.placed],
            [(t.data_ptr(), t.stride()) for t in of.laid],
            [t.requires_grad for t in of.trained],
            list(map(version_of, of.counted)),
        ]

    def keep(self) -> None:
        self._members = self._of.members()
        self._kept = self._look()

    def same(self) -> bool:
        return not self._of.tagged and self._look() == self._kept


class Watch:
    """Python tells of every change of tables that are watched: `told` is where it is counted how often it did."""

    def __init__(self, number: int, told: int) -> None:
        self._number, self.told = number, told

    def over(self, tables: Sequence[dict[Any, Any]]) -> None:
        """Those are watched from now on."""
        watch = ctypes.pythonapi["PyDict_Watch"]
        for table in tables:
            watch(self._number, ctypes.py_object(table))


class Walker(NamedTuple):
    """The compiled call, the functions it is given, where in a Python tensor that of C++ is, and in a dict its tag."""

    call: Callable[[int], int]
    functions: list[int]
    inside: int
    tag: int
    places: Places
    watch: Watch | None


def record(of: Subjects) -> Record:
    """Writes down how its subjects are now."""
    walker = native()
    built_in = all(isinstance(t, dict) for t in (*of.tagged, *of.tables)) and all(isinstance(x, list) for x in of.lists)
    return NativeRecord(walker, of) if built_in and not isinstance(walker, str) else PlainRecord(of)


def native() -> Walker | str:
    """What walks in C++, or why nothing does."""
    try:
        compiler = working_compiler()
        return compiler if isinstance(compiler, str) else _native(compiler)
    except InputError as error:  # there is no folder to keep anything in
        return str(error)


@cache
def _native(compiler: Compiler) -> Walker | str:
    try:
        functions, inside = functions_of_python() + tensor_functions(), place_of_tensor()
    except (OSError, AttributeError, ValueError) as error:
        return f"this torch does not say how its tensors are read: {error}"
    name = f"wholestep_walk_{digest(SOURCE)[:16]}"
    built = build_all([(name, SOURCE.replace("NAME", name))], compiler)[name]
    if isinstance(built, Exception):
        return str(built)
    # a type that keeps Python's lock: nobody changes what is walked over
    call = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(address_of(built))
    tag = place_of_tag()
    return Walker(call, functions, inside, tag, places_in_tensors(inside), watch_of_python(compiler) if tag else None)


def watch_of_python(compiler: Compiler) -> Watch | None:
    """What Python tells of changes by; None before 3.12, and where all its watches are taken."""
    if not hasattr(ctypes.pythonapi, "PyDict_AddWatcher"):
        return None
    name = f"wholestep_watch_{digest(WATCH)[:16]}"
    built = build_all([(name, WATCH.replace("NAME", name))], compiler)[name]
    if isinstance(built, Exception):
        return None
    found = (ctypes.c_void_p * 2)()
    ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(address_of(built))(ctypes.addressof(found))
    try:
        number = ctypes.pythonapi["PyDict_AddWatcher"](ctypes.c_void_p(found[0]))
    except RuntimeError:
        return None
    watch, table = Watch(number, found[1] or 0), {"a": 1}
    told = ctypes.c_int64.from_address(watch.told)
    watch.over([table])
    seen = [told.value]
    for change in changes(table):
        change()
        seen.append(told.value)
    return watch if len(set(seen)) == len(seen) else None


def functions_of_python() -> list[int]:
    """Of Python's stable interface."""
    return [address_of(getattr(ctypes.pythonapi, name)) for name in ("PyDict_Next", "PyList_Size", "PyList_GetItem")]


def address_of(function: Any) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0
