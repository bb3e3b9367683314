"""The entry point: commands, exit codes, and errors of ours as one clean message."""

from __future__ import annotations

import subprocess
import sys

import pytest

from wholestep.cli import doctor, main
from wholestep.errors import InputError


def test_without_a_command_help_is_printed(capsys):
    assert main.main([]) == 2
    text = capsys.readouterr().out
    assert all(command in text for command in main.COMMANDS)


@pytest.mark.parametrize("command", list(main.COMMANDS))
def test_every_command_has_help(command, capsys):
    with pytest.raises(SystemExit) as stop:
        main.main([command, "--help"])
    assert stop.value.code == 0
    assert "--traceback" in capsys.readouterr().out


def test_an_unknown_command_is_refused(capsys):
    with pytest.raises(SystemExit) as stop:
        main.main(["dance"])
    assert stop.value.code == 2 and "dance" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["cache", "softmax"], "--show"),
        (["explain", "train.py", "--epochs", "3"], "go after a --"),
        (["--strange"], "COMMAND"),
    ],
)
def test_arguments_that_a_command_does_not_know_show_how_to_use_it(arguments, said, capsys):
    with pytest.raises(SystemExit) as stop:
        main.main(arguments)
    err = capsys.readouterr().err
    assert stop.value.code == 2 and arguments[-1] in err and said in err


def _failing(error):
    def run(_args):
        raise error

    return run


def test_our_errors_are_one_message_on_stderr(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "run", _failing(InputError("layer 3: too wide; make it narrower")))
    assert main.main(["doctor"]) == 1
    printed = capsys.readouterr()
    assert printed.err == "layer 3: too wide; make it narrower\n" and printed.out == ""


def test_traceback_on_request(monkeypatch):
    monkeypatch.setattr(doctor, "run", _failing(InputError("x")))
    with pytest.raises(InputError):
        main.main(["doctor", "--traceback"])


def test_an_error_that_is_not_ours_is_not_hidden(monkeypatch):
    monkeypatch.setattr(doctor, "run", _failing(ZeroDivisionError("a bug")))
    with pytest.raises(ZeroDivisionError):
        main.main(["doctor"])


def test_interrupt(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "run", _failing(KeyboardInterrupt()))
    assert main.main(["doctor"]) == 130
    assert capsys.readouterr().err == "stopped\n"


def test_docs_outside_a_checkout(tmp_path, capsys):
    assert main.main(["docs", "--root", str(tmp_path)]) == 1
    assert "not a checkout" in capsys.readouterr().err


def test_as_a_module_with_a_reader_that_leaves():
    """`wholestep ... | head`: the reader closes the pipe before anything is written; no traceback follows."""
    code = (
        "import sys; from wholestep.cli import doctor, main\n"
        "doctor.run = lambda args: [print('x' * 1000) for _ in range(100_000)] and 0\n"
        "sys.exit(main.main(['doctor']))"
    )
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert child.stdout is not None and child.stderr is not None
    child.stdout.close()
    errors = child.stderr.read()
    child.stderr.close()
    assert child.wait(timeout=60) == 141 and errors == b""


def test_python_dash_m():
    done = subprocess.run(
        [sys.executable, "-m", "wholestep", "--version"], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0 and done.stdout.startswith("wholestep ")
