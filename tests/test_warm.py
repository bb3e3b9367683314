"""Programs that are forks of a warm process behave as programs that were started."""

from __future__ import annotations

import os

import pytest

from tests import warm


def test_arguments_streams_and_status(tmp_path):
    code = "import os, sys; print(sys.argv, os.getcwd(), os.environ['MINE']); sys.exit(sys.stdin.read())"
    done = warm.run(["-c", code, "x"], os.environ | {"MINE": "7"}, tmp_path, "some words")
    assert (done.returncode, done.stdout, done.stderr) == (1, f"['-c', 'x'] {tmp_path} 7\n", "some words\n")
    script = tmp_path / "script.py"
    script.write_text("import sys, torch\nprint(__name__, sys.argv[1:], torch.get_num_threads())\n1 / 0\n")
    done = warm.run([str(script), "y"], os.environ)
    assert (done.returncode, done.stdout) == (1, "__main__ ['y'] 1\n")
    assert f'"{script}", line 3' in done.stderr and done.stderr.endswith("ZeroDivisionError: division by zero\n")


def test_one_knows_nothing_of_another():
    leave = "import torch; torch.manual_seed(4); torch.left = 1"
    assert warm.run(["-c", leave], os.environ).returncode == 0
    done = warm.run(["-c", "import torch; print(hasattr(torch, 'left'), torch.initial_seed() == 4)"], os.environ)
    assert done.stdout == "False False\n"


def test_several_run_at_once(tmp_path):
    meet = "import os, time\nopen(str(os.getpid()), 'w')\nwhile len(os.listdir()) < 2: time.sleep(0.01)"
    assert [d.returncode for d in warm.run_at_once(2, ["-c", meet], os.environ, tmp_path, timeout=60)] == [0, 0]


def test_a_signal_is_told_and_what_takes_too_long_is_ended(tmp_path):
    assert warm.run(["-c", "import os; os.kill(os.getpid(), 15)"], os.environ).returncode == -15
    code = f"import time; open({str(tmp_path / 'begun')!r}, 'w'); time.sleep(600)"
    with pytest.raises(TimeoutError, match="did not end"):
        warm.run(["-c", code], os.environ, timeout=0.5)
