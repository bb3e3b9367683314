"""A library that notes what it is told, in cuDNN's place."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from wholestep.backends.cudnn import library


class Recorded:
    """Proposes engines, each with its bytes and its notes. Descriptors are numbers."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, engines: Sequence[tuple[int, Sequence[int]]]) -> None:
        self.engines = engines
        #: of each descriptor what was set, and of each kind its descriptors
        self.told: dict[int, dict[int, list[Any]]] = {}
        self.kinds: dict[int, list[int]] = {}
        #: the engine that a descriptor is of
        self.number: dict[int, int] = {}
        monkeypatch.setattr(library, "call", self.call)
        monkeypatch.setattr(library, "handle", lambda device: ctypes.c_void_p(77))
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=5))

    def of(self, kind: int) -> list[dict[int, list[Any]]]:
        """What descriptors of a kind were told."""
        return [self.told[made] for made in self.kinds[kind]]

    def call(self, name: str, *given: Any) -> None:
        if name == "cudnnBackendCreateDescriptor":
            kind, made = given
            made._obj.value = len(self.told) + 1
            self.told[made._obj.value] = {}
            self.kinds.setdefault(kind, []).append(made._obj.value)
        elif name == "cudnnBackendSetAttribute":
            pointer, attribute, _, count, array = given
            assert count.value == len(array)
            self.told[pointer.value][attribute] = list(array)
        elif name == "cudnnBackendGetAttribute":
            pointer, attribute, _, _, count, array = given
            count._obj.value = self.answer(pointer.value, attribute, array)

    def answer(self, pointer: int, attribute: int, array: Any) -> int:
        if attribute == library.HEURISTICS_RESULTS:
            if array is not None:
                self.number |= {config: number for number, config in enumerate(array)}
            return len(self.engines)
        if attribute == library.CONFIG_ENGINE:
            self.number[array[0]] = self.number[pointer]
            return 1
        space, notes = self.engines[self.number[pointer]]
        values = {library.CONFIG_WORKSPACE: [space], library.ENGINE_NOTES: list(notes)}[attribute]
        array[: len(values)] = values
        return len(values)
