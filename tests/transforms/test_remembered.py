"""What fusion joined is kept by program: the second time nothing is tried, and the same kernels come out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.plan.networks import Case, gpt
from tests.transforms.test_fuse import ops_of, root_of
from wholestep.backends.store import Objects
from wholestep.ir import verify
from wholestep.ir.core import Op
from wholestep.transforms import fuse as fusing
from wholestep.transforms import remembered
from wholestep.transforms.expand import expanded
from wholestep.transforms.fuse import Fuser, Fusion, fuse


@pytest.fixture(scope="module")
def step() -> Op:
    return Case(gpt(dropout=0.1, layers=1)).program.function


def fused(step: Op, kept: Any = None, **named: Any) -> tuple[list[Any], Fusion]:
    """The kernels as text and what was refused."""
    function = expanded(step)
    fusion = fuse(function, kept=kept, **named)
    verify(root_of(function))
    kernels = [names for _, names in fusion.kernels]
    return [kernels, [op.name for op in ops_of(function)], fusion.refusals, fusion.gains], fusion


def test_the_second_time_nothing_is_tried(step: Op, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fusing, "WINDOW", 200)  # (several parts)
    plain, _ = fused(step)
    kept = Objects(tmp_path)
    first, _ = fused(step, kept)
    parts = list(tmp_path.rglob(f"*.{remembered.KIND}"))
    assert len(parts) > 1 and first == plain and plain[2]
    found = json.loads(parts[0].read_bytes().partition(b"\n#pragma")[0])
    assert set(found) == {"joined", "refused"} and all(type(i) is int for group in found["joined"] for i in group)

    def never(*args: Any) -> None:
        raise AssertionError("it was tried again")

    monkeypatch.setattr(Fuser, "try_join", never)
    again, _ = fused(step, kept)
    assert again == plain
    with pytest.raises(AssertionError, match="tried again"):  # what may be joined is another thing here
        fused(step, kept, alone=lambda op: op.name == "step.layer_norm")
    with pytest.raises(AssertionError, match="tried again"):  # what a user asks for is looked at each time
        fused(step, kept, forbid=["fuse * <- *"])
    monkeypatch.setattr(remembered, "source_hash", lambda: "of other code")
    with pytest.raises(AssertionError, match="tried again"):
        fused(step, kept)


@pytest.mark.parametrize("damage", [
    b"", b"\xff", b"[]", b"{}", b'{"joined": 1, "refused": []}', b'{"joined": [[0, 999999]], "refused": []}',
    b'{"joined": [[1, 2], [2, 3]], "refused": []}', b'{"joined": [["a"]], "refused": []}',
    b'{"joined": [], "refused": [[1]]}',
])  # fmt: skip
def test_an_entry_that_is_none_is_made_again(step: Op, damage: bytes) -> None:
    """(A file that was damaged is not even given back: tests/backends/test_store.py.)"""

    class Broken:
        def __init__(self) -> None:
            self.written: list[bytes] = []

        def read(self, kind: str, digest: str) -> bytes:
            return damage

        def write(self, kind: str, digest: str, data: bytes) -> None:
            self.written.append(data)

    function, kept = expanded(step), Broken()
    fuser = Fuser(function, kept=kept)
    fuser.block, fuser.position, fuser.groups = function.regions[0].block, {}, {}
    fuser.nodes = ops_of(function)
    assert not remembered.recall(kept, "0" * 64, fuser)
    assert not fuser.groups and not kept.written
