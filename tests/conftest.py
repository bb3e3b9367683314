"""What every test shares: one torch thread per worker, few garbage collections, a loud word where a judge is absent."""

from __future__ import annotations

import gc
import os
import shutil
import sys
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:  # tests import their helpers as tests.<room>.<module>, however pytest was started
    sys.path.insert(0, str(ROOT))

MLIR_OPT = shutil.which("mlir-opt-22")
NO_MLIR_OPT = "mlir-opt-22 is not on the PATH (Debian package mlir-22-tools): stock MLIR did NOT judge our golden files"


def pytest_configure(config: pytest.Config) -> None:
    gc.disable()  # what is imported and collected stays: walking over it finds nothing
    os.environ.setdefault("WHOLESTEP_PROVIDERS", "aten")  # tests of generated kernels ask for them
    if "WHOLESTEP_CACHE" not in os.environ:  # what users have measured stays out of it, and workers share one
        os.environ["WHOLESTEP_CACHE"] = tempfile.mkdtemp(prefix="wholestep-tests-")
    if "PYTEST_XDIST_WORKER" in os.environ:
        import torch

        torch.set_num_threads(1)


def pytest_collection_finish(session: pytest.Session) -> None:
    gc.collect()
    gc.freeze()
    gc.set_threshold(5_000, 10, 10)  # a compile makes a million objects; Python's 700 would be a tenth of every test
    gc.enable()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if MLIR_OPT is None:
        terminalreporter.section("WARNING: a judge is absent", sep="!", red=True, bold=True)
        terminalreporter.line(NO_MLIR_OPT)


@pytest.fixture(scope="session")
def mlir_opt() -> str:
    """The path of mlir-opt 22; a test that asks for it is skipped where it is absent."""
    if MLIR_OPT is None:
        pytest.skip(NO_MLIR_OPT)
    return MLIR_OPT
