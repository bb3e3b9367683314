"""A kernel that ends the process while it is tried: the next does without it, and one that was killed blames nobody."""

from __future__ import annotations

import errno
import faulthandler
import fcntl
import json
import os
import resource
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import wholestep as ws
from tests import warm
from tests.dialects.loop.provider import registered
from tests.runtime.runs import adamw, data, fresh, squares
from wholestep.backends import crashes
from wholestep.backends.crashes import BROKEN, FIRST_LINE_LENGTH, TRYING, blamed, collect, watched
from wholestep.backends.providers import Launcher, Offer, Progress, Provider, Region
from wholestep.backends.store import Objects, acquire, digest
from wholestep.ir.core import Op

NAME = digest("a way")
HEAD = f"{NAME} 0x{7:016x}\n"
DIED = "Fatal Python error: Segmentation fault\n\n"


def deadly(by: signal.Signals) -> type[Provider]:
    """A provider of LayerNorm whose kernel sends its process a signal."""

    class Deadly(Provider):
        name = "deadly"
        devices = ("cpu",)

        def takes(self, op: Op) -> bool:
            return op.name == "step.layer_norm"

        def claims(self, region: Region) -> str:
            return "" if [op.name for op in region.ops] == ["step.layer_norm"] else "it is no LayerNorm"

        def offers(self, region: Region) -> list[Offer]:
            return [Offer("one", f"deadly {region.key}")]

        def build(self, offers: Sequence[Offer], report: Progress | None = None) -> dict[str, Launcher | Exception]:
            return {o.key: lambda *tensors: os.kill(os.getpid(), by) for o in offers}

    return Deadly


def train(by: int) -> None:
    """Trains beside eager PyTorch and prints what was excluded; runs in a process of its own."""
    faulthandler.disable()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    x, model, eager = data(6, 4), fresh(network), fresh(network)
    with registered(deadly(signal.Signals(by))):
        step = ws.compile(model, squares, adamw(model), (x,), providers=["aten", "deadly"])
        optimizer = adamw(eager)
        for _ in range(3):
            loss = squares(eager, x)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            torch.testing.assert_close(step(x), loss.detach())
        assert not faulthandler.is_enabled()
        print(json.dumps(json.loads(step.report(format="json"))["kernels"]["excluded"]))


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 2))


def test_a_kernel_that_ends_the_process_is_left_out_the_next_time(tmp_path: Path) -> None:
    def run(by: signal.Signals) -> tuple[int, str]:
        code = f"from tests.backends.test_crashes import train; train({int(by)})"
        done = warm.run(["-c", code], os.environ | {"WHOLESTEP_CACHE": str(tmp_path)})
        return done.returncode, done.stdout or done.stderr

    for by in (signal.SIGKILL, signal.SIGSEGV):  # the second finds what the first has left, and tries the way again
        assert run(by) == (-by, "")
        assert len(list(tmp_path.glob(f"objects/{TRYING}*"))) == 1
        assert not list(tmp_path.glob(f"objects/{BROKEN}/*/*"))
    status, said = run(signal.SIGSEGV)
    assert status == 0, said
    (excluded,) = json.loads(said)
    assert excluded["way"] == "deadly:one" and "it has broken a process before" in excluded["why"]
    assert not list(tmp_path.glob(f"objects/{TRYING}*"))


@pytest.mark.parametrize(
    ("text", "guilty"),
    [
        (f"{HEAD}{DIED}Current thread 0x{7:016x} (most recent call first):", True),
        (f"{HEAD}{DIED}Thread 0x{7:016x} (most recent call first):", True),  # a thread that shares the kernel's work
        (f"{HEAD}{DIED}Current thread 0x{8:016x} (most recent call first):", False),  # another thread of the user's
        (HEAD, False),
        (HEAD.replace(NAME, "../" + NAME[3:]) + DIED, False),
        ("\0" * FIRST_LINE_LENGTH + DIED, False),  # before the first way
        ("", False),
    ],
    ids=["its thread", "a worker", "another thread", "killed", "no digest", "no way yet", "empty"],
)
def test_who_is_to_blame(tmp_path: Path, text: str, guilty: bool) -> None:
    path, objects = tmp_path / f"{TRYING}{0:032}", Objects(tmp_path)
    path.write_text(text)
    assert (blamed(path) is not None) == guilty
    running = acquire(path, 0.0, fcntl.LOCK_EX)
    assert running is not None
    collect(tmp_path, objects)
    assert path.exists() and objects.read(BROKEN, NAME) is None
    os.close(running)
    collect(tmp_path, objects)
    assert not path.exists() and objects.read(BROKEN, NAME) == (DIED.strip().encode() if guilty else None)


def test_what_stands_in_the_way_of_notes_stops_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    objects = tmp_path / "objects"
    objects.mkdir()
    monkeypatch.setattr(crashes.faulthandler, "enable", lambda file: calls.append("enable"))
    monkeypatch.setattr(crashes.faulthandler, "disable", lambda: calls.append("disable"))
    monkeypatch.setattr(crashes.faulthandler, "is_enabled", lambda: True)
    for folder in (None, objects):  # no cache, and somebody else's faulthandler
        with watched(folder) as trying:
            trying(NAME)
            assert not list(objects.iterdir())
    assert not calls

    monkeypatch.setattr(crashes.faulthandler, "is_enabled", lambda: False)
    with watched(objects) as trying:
        trying(NAME)
        (file,) = objects.iterdir()
        assert file.read_text().startswith(f"{NAME} 0x")

        def full(*args: Any) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(os, "pwrite", full)
        with pytest.warns(UserWarning, match="No space left on device.*this process alone"):
            trying(digest("another way"))
        assert calls == ["enable", "disable"]  # or the first way were blamed for what the second does
    assert not list(objects.iterdir())
    with pytest.warns(UserWarning, match="this process alone"), watched(objects / "absent") as trying:
        trying(NAME)
