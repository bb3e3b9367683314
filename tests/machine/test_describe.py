"""The machine record: honest about what is there, calm about what is not."""

from __future__ import annotations

import sys

import torch

import wholestep.machine.describe as describe_module
from wholestep.machine.describe import describe, package_version, tool_version


def test_this_machine():
    machine = describe()
    assert machine.torch == torch.__version__ and machine.torch_problem is None
    assert machine.cores >= 1 and machine.cpu
    assert machine.memory_bytes is None or machine.memory_bytes > 2**28
    assert len(machine.cuda) == (torch.cuda.device_count() if torch.cuda.is_available() else 0)
    assert set(machine.compilers) == set(describe_module.COMPILERS)


def test_a_tool_that_is_absent_or_fails_has_no_version():
    assert tool_version(["wholestep-no-such-tool", "--version"]) is None
    assert tool_version([sys.executable, "-c", "raise SystemExit(3)"]) is None


def test_the_wanted_line_of_a_tool_is_found():
    assert tool_version([sys.executable, "-c", "print('banner'); print('version 7')"], wanted="version") == "version 7"
    assert tool_version([sys.executable, "-c", "print(' first ')"]) == "first"


def test_packages_are_looked_up_without_importing():
    assert package_version("wholestep_no_such_package") is None
    assert package_version("pytest") is not None


def test_absent_torch_is_a_finding(monkeypatch):
    find_spec = describe_module.util.find_spec
    monkeypatch.setattr(describe_module.util, "find_spec", lambda name: None if name == "torch" else find_spec(name))
    machine = describe()
    assert machine.torch is None and machine.torch_problem == "torch is not installed" and machine.cuda == ()
