"""A library that PyTorch has loaded already, called by its C interface."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

import torch


class CLibrary:
    """Functions whose names begin with a prefix and that give 0 where all went well.

    explain: what a status means.
    """

    def __init__(
        self, prefix: str, file: str, explain: Callable[[ctypes.CDLL, int], str] = lambda _, status: str(status)
    ):
        self.prefix, self.file, self.explain = prefix, file, explain
        self._handles: dict[int, ctypes.c_void_p] = {}

    @functools.cached_property
    def loaded(self) -> ctypes.CDLL | None:
        """None where this PyTorch works without it."""
        if torch.version.cuda is None:
            return None
        try:
            found = ctypes.CDLL(self.file)
        except OSError:
            return None
        getattr(found, f"{self.prefix}GetVersion").restype = ctypes.c_size_t
        return found

    def version(self) -> str:
        return "" if self.loaded is None else str(getattr(self.loaded, f"{self.prefix}GetVersion")())

    def call(self, name: str, *arguments: object) -> None:
        found = self.loaded
        assert found is not None
        status = getattr(found, name)(*arguments)
        if status:
            raise RuntimeError(f"{name} says {self.explain(found, status)}")

    def handle(self, device: int) -> ctypes.c_void_p:
        """One per device; it lives as long as the process."""
        if device not in self._handles:
            made = ctypes.c_void_p()
            with torch.cuda.device(device):
                self.call(f"{self.prefix}Create", ctypes.byref(made))
            self._handles[device] = made
        return self._handles[device]
