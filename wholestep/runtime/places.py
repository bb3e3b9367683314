"""Where Python and torch keep what in memory: found by looking at objects of which all is known.

Nothing is taken for granted: where the memory of an object does not tell, nobody reads it.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ..torch_private import version_of


class Places(NamedTuple):
    """Bytes to the storage of a tensor, to the memory of a storage, and to dimensions, sizes, strides and offset of a
    tensor; to what autograd knows of a tensor, and in that to whether it trains; to the counter of a tensor's writes,
    and in that to their number. Zeros where that is not known.
    """

    storage: int = 0
    data: int = 0
    form: int = 0
    meta: int = 0
    flag: int = 0
    counter: int = 0
    version: int = 0


def changes(table: dict[str, int]) -> list[Callable[[], Any]]:
    """Of every kind, for a table that has an `a`, but not with the value 2."""
    return [lambda: table.update(a=2), lambda: table.update(b=1), lambda: table.pop("b"), table.clear]


def place_of_tag() -> int:
    """Bytes from the start of a dict to the number that Python changes with every change of it (PEP 509); 0: none."""
    table: dict[str, int] = {"a": 1}
    word = (ctypes.c_int64 * 4).from_address(id(table))
    seen = [word[3]]
    for change in changes(table):
        change()
        seen.append(word[3])
    return 24 if sys.version_info < (3, 13) and len(set(seen)) == len(seen) else 0


def places_in_tensors(inside: int) -> Places:
    """Found by looking at tensors of which all that is known; zeros where they do not tell."""

    def words(address: int, count: int) -> list[int]:
        return list((ctypes.c_int64 * count).from_address(address))

    def look(tensor: torch.Tensor) -> list[int]:
        return words(words(id(tensor) + inside, 1)[0], 20)

    base, other = torch.zeros(64), torch.zeros(64)
    apart, strided = base.data, base.as_strided((2, 3, 4), (17, 5, 1), 7).data
    one, two, three, shared = look(apart), look(strided), look(other.data), look(apart.detach())
    # what tensors of one storage share, and another does not; what a tensor shares with one that is detached alone
    storages = [i for i in range(20) if one[i] == two[i] != three[i] and is_pointer(one[i])]
    counters = [i for i in range(20) if one[i] == shared[i] != two[i] and is_pointer(one[i])]
    forms = [i for i in range(9) if two[i : i + 4] == [3, 2, 3, 4] and two[i + 6 : i + 9] == [17, 5, 1]]
    if len(storages) != 1 or len(forms) != 1 or two[forms[0] + 11] != 7 or one[forms[0] + 11] != 0:
        return Places()
    memory = [words(row[storages[0]], 8) for row in (one, three)]
    data = [i for i in range(8) if (memory[0][i], memory[1][i]) == (base.data_ptr(), other.data_ptr())]
    if len(counters) != 1 or not data:
        return Places()
    versions = [list((ctypes.c_int32 * 6).from_address(one[counters[0]]))]
    for times in (1, 2):
        apart.add_(1)
        versions.append(list((ctypes.c_int32 * 6).from_address(one[counters[0]])))
        assert version_of(apart) == times
    version = [i for i in range(6) if [row[i] for row in versions] == [0, 1, 2]]
    # what only a tensor that autograd knows has; of that, what is one while it trains
    trains = torch.zeros(64, requires_grad=True)
    metas = [i for i in range(7) if one[i] == three[i] == 0 and is_pointer(look(trains)[i])]
    if len(version) != 1 or len(metas) != 1:
        return Places()
    flags = []
    for wanted in (True, False, True):
        trains.requires_grad_(wanted)
        flags.append(bytes((ctypes.c_char * 176).from_address(look(trains)[metas[0]])))
    flag = [i for i in range(176) if [row[i] for row in flags] == [1, 0, 1]]
    if len(flag) != 1:
        return Places()
    form = 8 * storages[0], 8 * data[0], 8 * forms[0]
    return Places(*form, 8 * metas[0], flag[0], 8 * counters[0], 4 * version[0])


def is_pointer(word: int) -> bool:
    """Whether a word may be the address of something that was allocated."""
    return word % 8 == 0 and 1 << 16 < word < 1 << 47


def place_of_holders() -> int | None:
    """Bytes from the start of a lock of Python to how often it is held; None where it does not show."""
    lock, seen = threading.RLock(), []
    for change in (int, lock.acquire, lock.acquire, lock.release, lock.release):
        change()
        seen.append(list((ctypes.c_int64 * (type(lock).__basicsize__ // 8)).from_address(id(lock))))
    found = [i for i, words in enumerate(zip(*seen, strict=True)) if words == (0, 1, 2, 1, 0)]
    return found[0] * 8 if len(found) == 1 else None
