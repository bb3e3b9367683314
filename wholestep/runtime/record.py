"""What tables, lists and tensors were, and whether they still are: asked on every step, so it is one call of C++.

The call walks everything and compares it, word by word, with what it wrote down before. It needs no header: Python and
torch tell where their functions are. Where there is no compiler, Python walks: the same answers, at more host time.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import torch

from ..backends.cpp.compiler import Compiler, build_all, digest, working_compiler
from ..errors import InputError
from ..torch_private import place_of_tensor, tensor_functions, version_of

#: Without `words` it counts them. With `keep` it writes them down. Else 1 where each is the one written down. Members
#: come before their number, so that a table that has grown differs before the end of the words. Where a tensor lies is
#: read from its memory where that is known to be the same; torch's functions are asked first whether it can be read.
WALK = """
struct Walk {
  int (*next)(void*, long*, void**, void**);
  long (*length)(void*);
  void* (*item)(void*, long);
  int (*address)(void*, void**);
  int (*dimensions)(void*, i64*);
  int (*strides)(void*, i64**);
  i64 (*version)(const void*);
  bool (*trains)(const void*);
  long inside, tag, keep, count, tagged, tables, lists, placed, laid, trained, counted;
  long storage, data, form, lines;
  char** tags;
  void **table, **list;
  char **place, **lie, **train, **number;
  i64* words;
  char** line;
};

struct Pen {
  i64* words;
  bool keep;
  long limit, count;
  // Whether a word is the one written down.
  bool note(i64 word) {
    long at = count++;
    if (!words) return true;
    if (at >= limit) return false;
    if (keep) words[at] = word;
    return words[at] == word;
  }
  bool note(void* pointer) { return note((i64)pointer); }
};

// Strides of a form: dimensions, sizes and strides of up to five, offset. Those of more dimensions lie elsewhere.
static const long INSIDE = 5;

// Writes down where the next walk will read: there are many tensors, and each lies in several places. What only a
// function of torch reads (whether it trains, how often it was written) is taken to lie where it has been for years.
static void write_lines(Walk& w) {
  long count = 0;
  for (long i = 0; i < w.tagged; ++i) w.line[count++] = w.tags[i] + w.tag;
  char** groups[] = {w.place, w.lie, w.train, w.number};
  long sizes[] = {w.placed, w.laid, w.trained, w.counted};
  const long last[] = {0, 0, 8, 24};
  for (long g = 0; w.form && g < 4; ++g)
    for (long i = 0; i < sizes[g]; ++i) {
      char* handle = groups[g][i] + w.inside;
      char* tensor = *(char**)handle;
      char* other = *(char**)(tensor + w.storage + last[g]);
      w.line[count++] = handle;
      w.line[count++] = tensor + w.storage;
      w.line[count++] = g < 2 ? tensor + w.form + (1 + 2 * INSIDE) * sizeof(i64) : tensor;
      w.line[count++] = g < 2 ? other + w.data : other;
    }
  w.lines = count;
}

static bool note_place(const Walk& w, Pen& pen, char* handle, bool direct) {
  void* address;
  if (!direct || !w.form) return !w.address(handle, &address) && pen.note(address);
  char* tensor = *(char**)handle;
  char* storage = *(char**)(tensor + w.storage);
  i64* form = (i64*)(tensor + w.form);
  return storage && pen.note(tensor) && pen.note(*(void**)(storage + w.data)) && pen.note(form[1 + 2 * INSIDE]);
}

static bool note_strides(const Walk& w, Pen& pen, char* handle, bool direct) {
  i64* form = direct && w.form ? (i64*)(*(char**)handle + w.form) : 0;
  i64 dimensions, *strides;
  if (form && *form <= INSIDE) dimensions = *form, strides = form + 1 + INSIDE;
  else if (w.dimensions(handle, &dimensions) || w.strides(handle, &strides)) return false;
  if (!pen.note(dimensions)) return false;
  for (i64 d = 0; d < dimensions; ++d)
    if (!pen.note(strides[d])) return false;
  return true;
}

static bool walk(const Walk& w, Pen& pen, bool direct = true) {
  for (long i = 0; i < w.tagged; ++i)
    if (!pen.note(*(i64*)(w.tags[i] + w.tag))) return false;
  for (long i = 0; i < w.tables; ++i) {
    long at = 0, members = 0;
    void *key, *value;
    for (; w.next(w.table[i], &at, &key, &value); ++members)
      if (!pen.note(key) || !pen.note(value)) return false;
    if (!pen.note((i64)members)) return false;
  }
  for (long i = 0; i < w.lists; ++i) {
    long members = w.length(w.list[i]);
    if (!pen.note((i64)members)) return false;
    for (long j = 0; j < members; ++j)
      if (!pen.note(w.item(w.list[i], j))) return false;
  }
  for (long i = 0; i < w.placed; ++i)
    if (!note_place(w, pen, w.place[i] + w.inside, direct)) return false;
  for (long i = 0; i < w.laid; ++i)
    if (!note_place(w, pen, w.lie[i] + w.inside, direct) || !note_strides(w, pen, w.lie[i] + w.inside, direct))
      return false;
  for (long i = 0; i < w.trained; ++i)
    if (!pen.note((i64)w.trains(*(void**)(w.train[i] + w.inside)))) return false;
  for (long i = 0; i < w.counted; ++i)
    if (!pen.note(w.version(w.number[i] + w.inside))) return false;
  return true;
}

// Whether all is as it was written down. After a long step little of it is still in the caches: all is asked for first.
static bool unchanged(const Walk* w) {
  for (long i = 0; i < w->lines; ++i) __builtin_prefetch(w->line[i]);
  Pen pen = {w->words, false, w->count, 0};
  return walk(*w, pen);
}

// As many words as before; false where there are more now.
static bool write_down(Walk* w) {
  Pen pen = {w->words, true, w->count, 0};
  w->lines = 0;
  if (!walk(*w, pen)) return false;
  write_lines(*w);
  return true;
}
"""
SOURCE = (
    WALK
    + """
extern "C" int NAME(Walk* w) {
  if (w->words) return w->keep ? write_down(w) : unchanged(w);
  Pen ask = {0, false, 0, 0}, pen = {0, false, 0, 0};
  bool readable = walk(*w, ask, false) && walk(*w, pen);
  w->count = pen.count;
  return readable;
}
"""
)


class Record(Protocol):
    """Something that was written down."""

    def same(self) -> bool:
        """Whether all is as it was written down, for sure."""

    def keep(self) -> None:
        """Writes down how it is now."""


class Walk(ctypes.Structure):
    """The argument of the call: functions, how many of what, and where they are."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("next", "length", "item")),
        *((name, ctypes.c_void_p) for name in ("address", "dimensions", "strides", "version", "trains")),
        *((name, ctypes.c_long) for name in ("inside", "tag", "keep", "count")),
        *((name, ctypes.c_long) for name in ("tagged", "tables", "lists", "placed", "laid", "trained", "counted")),
        *((name, ctypes.c_long) for name in ("storage", "data", "form", "lines")),
        *((name, ctypes.c_void_p) for name in ("tags", "table", "list", "place", "lie", "train", "number")),
        *((name, ctypes.c_void_p) for name in ("words", "line")),
    )


@dataclass(frozen=True)
class Subjects:
    """What a record is of: members of tables and lists, by identity, and some properties of tensors."""

    #: tables of which only Python's own count of changes is looked at, where it keeps one
    tagged: Sequence[dict[Any, Any]] = ()
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
        places = map(ctypes.addressof, self._arrays)
        where = (*walker.functions, walker.inside, walker.tag, 0, 0, *map(len, groups), *walker.form, 0, *places)
        self._lines = (ctypes.c_void_p * (len(of.tagged) + 4 * sum(map(len, groups[3:]))))()
        self._walk = Walk(*where, None, ctypes.addressof(self._lines))
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
        if walk.count != len(self._words):
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


class Walker:
    """The compiled call, the functions it is given, where in a Python tensor that of C++ is, and in a dict its tag.

    form: where in a tensor its storage is, in a storage its memory, and in a tensor its sizes and strides; or zeros.
    """

    def __init__(
        self, call: Callable[[int], int], functions: list[int], inside: int, tag: int, form: tuple[int, int, int]
    ) -> None:
        self.call, self.functions, self.inside, self.tag, self.form = call, functions, inside, tag, form


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
    return Walker(call, functions, inside, place_of_tag(), places_in_tensors(inside))


def functions_of_python() -> list[int]:
    """Of Python's stable interface."""
    return [address_of(getattr(ctypes.pythonapi, name)) for name in ("PyDict_Next", "PyList_Size", "PyList_GetItem")]


def place_of_tag() -> int:
    """Bytes from the start of a dict to the number that Python changes with every change of it (PEP 509); 0: none."""
    table: dict[str, int] = {"a": 1}
    word = (ctypes.c_int64 * 4).from_address(id(table))
    seen = [word[3]]
    for change in (lambda: table.update(a=2), lambda: table.update(b=1), lambda: table.pop("b"), table.clear):
        change()
        seen.append(word[3])
    return 24 if sys.version_info < (3, 13) and len(set(seen)) == len(seen) else 0


def places_in_tensors(inside: int) -> tuple[int, int, int]:
    """Bytes to the storage of a tensor, to the memory of a storage, and to dimensions, sizes, strides and offset of a
    tensor. Found by looking at tensors of which all that is known; zeros where they do not tell.
    """

    def words(address: int, count: int) -> list[int]:
        return list((ctypes.c_int64 * count).from_address(address))

    def tensor_of_c(tensor: torch.Tensor) -> int:
        return words(id(tensor) + inside, 1)[0]

    base, other = torch.zeros(64), torch.zeros(64)
    seen = [base.data, base.as_strided((2, 3, 4), (17, 5, 1), 7).data, other.data]
    one, two, three = (words(tensor_of_c(t), 20) for t in seen)
    # what two tensors of one storage share, and a third does not
    storages = [i for i in range(20) if one[i] == two[i] != three[i] and one[i] % 8 == 0 and one[i] > 1 << 16]
    forms = [i for i in range(9) if two[i : i + 4] == [3, 2, 3, 4] and two[i + 6 : i + 9] == [17, 5, 1]]
    if len(storages) != 1 or len(forms) != 1 or two[forms[0] + 11] != 7 or one[forms[0] + 11] != 0:
        return 0, 0, 0
    memory = [words(row[storages[0]], 8) for row in (one, three)]
    places = [i for i in range(8) if (memory[0][i], memory[1][i]) == (base.data_ptr(), other.data_ptr())]
    return (storages[0] * 8, places[0] * 8, forms[0] * 8) if places else (0, 0, 0)


def address_of(function: Any) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0
