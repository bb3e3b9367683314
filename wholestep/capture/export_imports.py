"""What torch.export imports on its first call, without a library that it only names: networkx, 300 modules.

Torch's partitioners, which an export does not use, import it for the sake of annotations. Whoever calls it later gets
the library itself.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import ModuleType
from typing import Any

from ..torch_private import EXPORT


class Later(ModuleType):
    """Stands for a module that others import: its names mean nothing until that is over, and then are the module's."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Any if sys.modules.get(self.__name__) is self else getattr(importlib.import_module(self.__name__), name)


@contextmanager
def put_off(name: str) -> Iterator[None]:
    """Modules that are imported meanwhile and import this one get it when they use it."""
    found = None if name in sys.modules else importlib.util.find_spec(name)
    if found is None:
        yield
        return
    later = sys.modules[name] = Later(name)
    later.__spec__ = found  # torch asks where it lies
    try:
        yield
    finally:
        if sys.modules.get(name) is later:
            del sys.modules[name]


def import_export() -> None:
    """Does what the first export would do. A torch that has it elsewhere imports as it likes."""
    with put_off("networkx"), suppress(ModuleNotFoundError):
        importlib.import_module(EXPORT)
