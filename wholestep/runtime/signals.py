"""Signals that wait for the end of a step, so that Ctrl-C finds the model at a border between two steps."""

from __future__ import annotations

import importlib
import signal
from collections.abc import Callable
from threading import get_ident, main_thread
from typing import Any

SIGNALS = tuple(map(int, signal.valid_signals()))
#: `signal.getsignal` and `signal.signal` without their detour through enums
HANDLER: Callable[[int], Any] = importlib.import_module("_signal").getsignal
HANDLE: Callable[[int, Any], Any] = importlib.import_module("_signal").signal


class Uninterrupted:
    """Holds signals with Python handlers (Ctrl-C, alarms) back until the block is done; other threads get none.

    It may be entered again and again, and remembers which signals have handlers while those stay the same.
    """

    def __init__(self) -> None:
        self._seen: list[Any] = []
        self._handlers: dict[int, Any] = {}
        #: handlers that are replaced now, and the signals that came meanwhile
        self._replaced: dict[int, Any] = {}
        self._received: list[tuple[Callable[[int, Any], Any], int, Any]] = []

    def __enter__(self) -> None:
        if get_ident() != main_thread().ident:
            return
        try:
            found = list(map(HANDLER, SIGNALS))
            if found != self._seen:
                self._seen = found
                self._handlers = {n: handler for n, handler in zip(SIGNALS, found, strict=True) if callable(handler)}
            for number, handler in self._handlers.items():
                self._replaced[number] = handler
                HANDLE(number, self._hold)
        except BaseException:  # a signal that came before its handler was replaced
            self.__exit__()
            raise

    def __exit__(self, *_: Any) -> None:
        if get_ident() != main_thread().ident:
            return
        self._restore()
        if not self._received:
            return
        received, self._received = self._received, []
        for handler, number, frame in received:
            handler(number, frame)

    def _restore(self) -> None:
        """Puts all handlers back, even where one is called meanwhile and raises."""
        try:
            while self._replaced:
                number, handler = next(iter(self._replaced.items()))
                HANDLE(number, handler)
                del self._replaced[number]
        finally:
            if self._replaced:
                self._restore()

    def _hold(self, number: int, frame: Any) -> None:
        self._received.append((self._handlers[number], number, frame))
