"""A library that others only name is imported when somebody uses it, and by everybody else as ever."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path

import pytest

from wholestep.capture.export_imports import put_off

USER = """
import heavy_library as heavy

def graph() -> heavy.Graph:
    return heavy.Graph()
"""


def test_a_library_that_is_only_named_waits_until_it_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "heavy_library.py").write_text("class Graph: ...\n")
    (tmp_path / "user_of_heavy.py").write_text(USER)
    monkeypatch.syspath_prepend(str(tmp_path))
    with put_off("heavy_library"):
        user = importlib.import_module("user_of_heavy")
        spec = importlib.util.find_spec("heavy_library")  # torch asks for the place of what is imported already
        assert spec is not None and spec.origin == str(tmp_path / "heavy_library.py")
    assert "heavy_library" not in sys.modules
    made = user.graph()
    assert type(made) is importlib.import_module("heavy_library").Graph
    with put_off("heavy_library"):  # it is there: nothing stands for it
        assert importlib.import_module("heavy_library").Graph is type(made)
    with put_off("no_such_library"), pytest.raises(ModuleNotFoundError):
        importlib.import_module("no_such_library")
    for name in ("heavy_library", "user_of_heavy"):
        del sys.modules[name]
